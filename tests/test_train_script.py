"""Training by a recipe: a run may be killed at any time and still ends in the same weights."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

datasets = pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")

from titans_hf.train import pretrain as train  # noqa: E402
from titans_hf.train import recipe as recipes  # noqa: E402
from titans_hf.train import stream_trainer, token_stream  # noqa: E402

ROOT = Path(__file__).parent.parent

DEBUG = ROOT / "scripts/recipes/debug-cpu.yaml"
TINY = [
    "model.config.hidden_size=16",
    "model.config.intermediate_size=24",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.vocab_size=400",
    "tokenizer.train.vocab_size=400",
    "data.sequence_length=64",
    "data.shuffle_seed=1",
    "held_out.rows=3",
    "training.rows_per_device=2",
    "training.batch_tokens=256",
    "training.tokens=2048",
    "training.log_every=1",
    "training.save_every=2",
    "training.keep_checkpoints=2",
    "training.eval_every=4",
]
STEPS = 8


def run(out: Path, *arguments: str) -> None:
    train.main([str(DEBUG), *TINY, f"out={out}", *arguments])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model/model.safetensors")


def assert_identical(out: Path, other: Path) -> None:
    one, two = weights(out), weights(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("run") / "straight"
    run(out)
    return out


def history(out: Path, step: int = STEPS) -> list[dict]:
    return json.loads((out / f"checkpoints/checkpoint-{step}/trainer_state.json").read_text())["log_history"]


def test_a_run_leaves_a_model_its_tokenizer_a_picture_and_the_recipe(finished):
    model, tokenizer = (auto.from_pretrained(finished / "model") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.use_cache
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=3).shape[0] == 1
    assert (finished / "loss.png").stat().st_size > 10_000
    assert recipes.load_recipe(finished / "recipe.yaml") == recipes.load_recipe(DEBUG, [*TINY, f"out={finished}"])
    assert not [*finished.rglob("*.unfinished"), *(finished / "model").glob("*.bin")]
    steps = {train.step_of(folder) for folder in stream_trainer.complete_checkpoints(finished / "checkpoints")}
    assert steps == {STEPS - 2, STEPS}


def test_a_run_leaves_a_record_of_itself(finished):
    record = json.loads((finished / "training.json").read_text())
    assert record["steps"] == STEPS
    assert record["tokens"] == 2048
    assert record["parameters"] == AutoModelForCausalLM.from_pretrained(finished / "model").num_parameters()
    assert record["recipe"]["seed"] == 0
    assert record["recipe"]["model"]["config"]["hidden_size"] == 16
    assert record["held_out_perplexity"] == history(finished)[-1]["eval_perplexity"]
    assert record["seconds"] > 0
    logged = [entry for entry in history(finished) if "loss" in entry]
    assert record["log"]["step"] == [entry["step"] for entry in logged]
    assert record["log"]["grad_norm"] == [pytest.approx(entry["grad_norm"], abs=1e-4) for entry in logged]
    assert len(logged) > 1
    assert train.training_log([{"step": 3, "loss": 2.0}]) == {"step": [3], "loss": [2.0], "grad_norm": [None]}
    assert {"command", "commit", "date", "torch", "transformers", "machine"} <= record.keys()


def test_the_perplexity_is_that_of_the_held_out_rows(finished):
    recipe = recipes.load_recipe(finished / "recipe.yaml")
    model = AutoModelForCausalLM.from_pretrained(finished / "model").eval()
    tokenizer = token_stream.load_tokenizer(finished / "tokenizer", 400)
    documents = token_stream.open_documents(recipe.data)
    rows = token_stream.held_out_rows(documents, tokenizer, recipe.data, recipe.held_out.one_in, 3)
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        expected = math.exp(model(input_ids=ids, labels=ids).loss)
    found = [entry["eval_perplexity"] for entry in history(finished) if "eval_perplexity" in entry]
    assert len(found) == 2  # after steps 4 and 8
    assert found[-1] == pytest.approx(expected, rel=1e-4)


def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_identical_weights(finished, tmp_path):
    out = tmp_path / "killed"
    code = """
import os, signal, sys
from titans_hf.train import pretrain as train
save = train.StreamTrainer._save_rng_state
def killed(self, folder):
    if self.state.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, folder)
train.StreamTrainer._save_rng_state = killed
train.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, str(DEBUG), *TINY, f"out={out}", "training.data_workers=1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {folder.name: (folder / train.COMPLETE).exists() for folder in (out / "checkpoints").glob("checkpoint-*")}
    assert left == {"checkpoint-2": True, "checkpoint-4": True, "checkpoint-6": False}
    assert not (out / "model").exists()
    run(out, "--resume")
    assert_identical(out, finished)
    losses = [[(e["step"], e["loss"]) for e in history(folder) if "loss" in e] for folder in (out, finished)]
    assert losses[0] == losses[1]


def test_a_run_stopped_by_ctrl_c_leaves_a_checkpoint_and_resumes(finished, tmp_path, monkeypatch, capsys):
    out, clip = tmp_path / "stopped", train.StreamTrainer._clip_grad_norm
    before = signal.getsignal(signal.SIGINT)

    def interrupted(self, model):
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return clip(self, model)

    monkeypatch.setattr(train.StreamTrainer, "_clip_grad_norm", interrupted)
    with pytest.raises(SystemExit) as ended:
        run(out)
    assert ended.value.code == 130
    assert "stopped at step 3 of 8; go on with --resume" in capsys.readouterr().err
    assert [path.name for path in stream_trainer.complete_checkpoints(out / "checkpoints")][-1] == "checkpoint-3"
    assert signal.getsignal(signal.SIGINT) is before
    run(out, "--resume")
    assert_identical(out, finished)


def test_a_run_killed_behind_its_last_step_is_only_saved(finished, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(out / "model")
    monkeypatch.setattr(train.StreamTrainer, "training_step", None)  # would fail
    run(out, "--resume")
    assert_identical(out, finished)
    run(out, "--resume")
    assert "nothing is left to do" in capsys.readouterr().out


def test_what_cannot_be_resumed_is_refused(finished, tmp_path, monkeypatch):
    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(*arguments)
        return str(ended.value)

    assert "is not empty: go on with --resume" in refusal(finished)
    assert "there is no run to resume" in refusal(tmp_path / "nowhere", "--resume")
    assert "`training.learning_rate` is not what the run" in refusal(
        finished, "--resume", "training.learning_rate=1e-3"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "checkpoint-8 is of 1 processes, and these are 2" in refusal(finished, "--resume")


# Recipes


@pytest.mark.parametrize(
    "setting, message",
    [
        ("trainin.tokens=3", "no field `trainin`; the nearest is `training`"),
        ("training.learning_rat=3", "no field `training.learning_rat`; the nearest is `training.learning_rate`"),
        ("model.config.hiden_size=3", "the nearest is `model.config.hidden_size`"),
        ("tokenizer.train.vocab=3", "the nearest is `tokenizer.train.vocab_size`"),
        ("training.learning_rate=fast", "`training.learning_rate` must be a valid number"),
        ("training.tokens=many", "`training.tokens` must be a valid integer"),
        ("training.tokens=0", "`training.tokens` must be greater than or equal to 1; got 0"),
        ("training.keep_checkpoints=1", "`training.keep_checkpoints` must be greater than or equal to 2"),
        ("training.batch_tokens=1000", "`training.batch_tokens` (1,000) is not a multiple"),
        ("training.report_to=[everything]", "`training.report_to[0]` must be 'tensorboard' or 'trackio'"),
        ("training=3", "`training` must be a section"),
        ("model.preset=titans-mag-1b", "unknown preset"),
        ("model.config.memory_depth=0", "`memory_depth` must be at least 1"),
        ("data.source=s3", "`data.source` must be 'hub', 'jsonl', 'text' or 'python'; got 's3'"),
        ("data.source=text", "`data.path` must be given"),
        ("tokenizer.name=x", "exactly one of `tokenizer.name` and `tokenizer.train`"),
        ("tokenizer.train.vocab_size=4000", "`tokenizer.train.vocab_size` must be between 300"),
        ("hardware.gpu=h1000", "`hardware.gpu` must be one of"),
        ("held_out.one_in=100000", "`held_out.one_in`: one document in 100000 does not fill"),
        ("nonsense", "write section.field=value"),
    ],
)
def test_what_cannot_work_ends_in_one_line_and_leaves_nothing(setting, message, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "out", setting)
    assert str(ended.value).startswith("error: ")
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.source=jsonl", "data.path={}/*.json"], "no file matches"),
        (["data.source=jsonl", "data.path={}/*.jsonl", "data.column=body"], "it has text, source"),
        (["data.source=jsonl", "data.path={}/*.txt"], "`data.path`: a file cannot be read: JSON parse error"),
        (["data.source=hub", "data.path={}/nowhere"], "`data.path`: cannot open"),
        (["tokenizer.train=null", "tokenizer.name={}"], "`tokenizer.name`: cannot load"),
    ],
)
def test_data_that_cannot_be_read_ends_in_one_line(settings, message, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "no.txt").write_text("not JSON")
    (tmp_path / "part.jsonl").write_text('{"text": "a", "source": "b"}\n')
    with pytest.raises(SystemExit, match="^error: ") as ended:
        run(tmp_path / "out", *(setting.format(tmp_path) for setting in settings))
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


def test_a_recipe_starts_from_its_base_and_the_command_line_has_the_last_word(tmp_path):
    (tmp_path / "base.yaml").write_text(DEBUG.read_text())
    (tmp_path / "own.yaml").write_text("base: base.yaml\ntraining: {learning_rate: 1e-3, warmup: 0.2}\n")
    recipe = recipes.load_recipe(tmp_path / "own.yaml", ["training.warmup=0.3", "model.config.memory_depth=3"])
    base = recipes.load_recipe(DEBUG)
    assert (recipe.training.learning_rate, recipe.training.warmup) == (1e-3, 0.3)
    assert recipe.training.batch_tokens == base.training.batch_tokens
    assert recipe.configuration().memory_depth == 3
    assert recipe.configuration().hidden_size == base.configuration().hidden_size


def test_only_matrices_decay():
    model = tiny_model("mac")
    names = set(train.StreamTrainer.get_decay_parameter_names(None, model))
    parameters = dict(model.named_parameters())
    assert {parameters[name].dim() for name in names & set(parameters)} == {2}
    assert "model.embed_tokens.weight" in names
    left_out = [name for name in parameters if name not in names]
    assert all(part in " ".join(left_out) for part in ("norm", "bias", "persistent", "memory.start", "memory.conv"))
    assert not any("proj.weight" in name for name in left_out)


# Several processes


@pytest.mark.parametrize("name, processes", [("one-node", 8), ("several-nodes", 32)])
def test_accelerate_reads_its_configurations_and_finds_the_layer_to_wrap(name, processes, monkeypatch):
    """Through accelerate's own loader, launcher and plugin."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = ROOT / f"scripts/recipes/accelerate/{name}.yaml"
    assert load_config_from_file(str(path)).num_processes == processes
    place = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"] if name == "several-nodes" else []
    arguments = launch_command_parser().parse_args(["--config_file", str(path), *place, "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    with monkeypatch.context() as patch:
        for variable, value in prepare_multi_gpu_env(arguments).items():
            patch.setenv(variable, value)
        plugin = FullyShardedDataParallelPlugin()
        mixed = os.environ["ACCELERATE_MIXED_PRECISION"]
    assert (plugin.fsdp_version, plugin.reshard_after_forward, mixed) == (2, True, "bf16")
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    model = tiny_model("mag")
    plugin.set_auto_wrap_policy(model)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert wrapped == {type(model.model.layers[0])}


@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_both(tmp_path):
    """The loss of the first step is that of both processes' rows together; both places are saved."""
    out = tmp_path / "two"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    settings = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    script = [str(ROOT / "scripts/train/pretrain.py"), str(DEBUG), *TINY, f"out={out}", "training.batch_tokens=512"]
    done = subprocess.run(
        [*launcher, *settings, *script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 rows x 2 accumulated x 2 processes x 64 tokens = 512" in done.stdout
    recipe = recipes.load_recipe(out / "recipe.yaml")
    tokenizer = token_stream.load_tokenizer(out / "tokenizer", 400)
    rows = []
    for rank in range(2):
        documents = train.split_dataset_by_node(token_stream.open_documents(recipe.data), rank, 2)
        one = token_stream.TokenStream(documents, tokenizer, recipe.data, recipe.held_out.one_in)
        rows += [row["input_ids"] for row in islice(one, 4)]
    ids = torch.stack(rows)
    assert len({tuple(row.tolist()) for row in ids}) == 8
    train.set_seed(recipe.seed)
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    loss = train.TitansForCausalLM(recipe.configuration(**tokens))(input_ids=ids, labels=ids).loss.item()
    assert history(out, 4)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    places = [(out / f"checkpoints/checkpoint-4/place-{rank}.json").read_text() for rank in range(2)]
    assert places[0] != places[1]
