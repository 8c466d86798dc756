"""The kernels compile for GPUs that need not be present, and what the scripts recorded is up to date."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install titans-hf[kernels])")

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})


def test_the_presets_kernels_compile_without_spills_as_the_list_says():
    """For every target, in a process without the interpreter; every variant is in the list, and none spills."""
    done = run("bench/kernel_resources.py", "--defaults", "--check", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_list_is_checked_against_the_sources(tmp_path):
    """With another digest the check fails."""
    code = "from titans_hf.bench import kernel_resources as r; r.digest = lambda: 'other'; print(r.differences([]))"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "was made from other sources" in done.stdout, done.stderr


CODE_OF = """
from titans_hf.bench.kernel_resources import code_of
source = "'First.'\\nx = 1  # why\\n\\ndef f():\\n    'F.'\\n    return '# not a comment'\\n"
print(code_of(source))
"""


def test_words_do_not_count_as_sources_and_code_does():
    """So that a docstring can be improved without compiling everything again."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", CODE_OF], capture_output=True, text=True, env=environment)
    assert done.stdout == "x = 1\ndef f():\n    return '# not a comment'\n", done.stderr


def test_the_roofline_in_the_readme_is_the_scripts():
    assert run("bench/kernel_roofline.py", "--check").returncode == 0


def test_the_kernel_benchmark_times_nothing_that_is_not_equal():
    """A NaN in one gradient is enough."""
    code = (
        "import torch; from titans_hf.bench import kernel_speed as b;"
        "x = torch.ones(2); n = torch.tensor([1.0, float('nan')]);"
        "print(b.distance([x, x], [x, n]) <= 1e9); b.ragged_disagreement = lambda *_: float('nan');"
        "b.verify(b.Sizes(1, 1, 16, 1, 1, 16), 'cpu', 1.0)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "False"
    assert done.returncode == 1
    assert "nothing is timed" in done.stderr


def test_the_kernel_benchmark_compares_before_it_times(tmp_path):
    done = run("bench/kernel_speed.py", "--device", "cpu", "--record", tmp_path / "kernels", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} >= {"torch", "triton"}
    assert all(float(row["disagreement"]) < 1e-4 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert json.loads((tmp_path / "kernels.json").read_text())["runs"]
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
