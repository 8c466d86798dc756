"""Two processes train like one: DDP and FSDP2 on two CPU processes, started by `accelerate launch`."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from support import assert_close, every_variant, random_ids
from train_distributed import MODES, STEPS, train
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).parent / "train_distributed.py"
both_modes = pytest.mark.parametrize("mode", MODES)

# one worker of pytest-xdist runs them all: they share one launch
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """What two processes left behind, in a folder for each mode."""
    folder = tmp_path_factory.mktemp("launched")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    settings = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launcher, *settings, str(WORKER), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@cache
def one_process(variant: str):
    return train(variant)


@both_modes
@every_variant
def test_two_processes_see_the_losses_of_one(mode, variant, launched):
    report = json.loads((launched / mode / "report.json").read_text())
    assert report["processes"] == 2
    assert report[variant]["class"] == {"ddp": "DistributedDataParallel", "fsdp": "FSDPTitansForCausalLM"}[mode]
    expected, _ = one_process(variant)
    assert len(expected) == STEPS
    assert report[variant]["losses"] == pytest.approx(expected, abs=1e-5)


@both_modes
@every_variant
def test_their_checkpoint_loads_in_one_process(mode, variant, launched):
    loaded = AutoModelForCausalLM.from_pretrained(launched / mode / variant)
    _, model = one_process(variant)
    ids = random_ids(2, 13)
    with torch.no_grad():
        assert_close(loaded(ids).logits, model.eval()(ids).logits, 1e-8)
    auto_map = json.loads((launched / mode / variant / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "modeling_titans.TitansForCausalLM"
    assert (launched / mode / variant / "modeling_titans.py").exists()
