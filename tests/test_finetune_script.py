"""scripts/train/finetune.py: chats, prompts and texts train a model or an adapter; bad input ends in one line."""

import json
import signal
from pathlib import Path

import pytest
import torch
from support import assert_close, save_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("trl", reason="trl is not installed (pip install titans-hf[train])")
pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")
peft = pytest.importorskip("peft", reason="peft is not installed (pip install titans-hf[train])")


from titans_hf.train import finetune  # noqa: E402

ROWS = {
    "messages": lambda i: {
        "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i + 1)}]
    },
    "completion": lambda i: {"prompt": f"{i}+1=", "completion": str(i + 1), "source": "a field that does not matter"},
    "text": lambda i: {"text": f"{i} comes before {i + 1}."},
}
QUICK = ["--steps", "6", "--batch", "4", "--log-every", "1", "--learning-rate", "1e-2"]
IDS = torch.arange(5, 22)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder, "mag")
    return folder


def write(path: Path, *rows) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def tune(model: Path, tmp_path: Path, kind: str, name: str, *options: str) -> Path:
    data = write(tmp_path / f"{kind}.jsonl", *(ROWS[kind](i) for i in range(12)))
    finetune.main([str(model), "--data", str(data), "--out", str(tmp_path / name), *QUICK, *options])
    return tmp_path / name


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind, options", [("messages", []), ("completion", []), ("text", ["--packing"])])
def test_every_kind_of_data_trains_a_model(kind, options, model, tmp_path, capsys):
    out = tune(model, tmp_path, kind, "tuned", *options)
    last = capsys.readouterr().out.splitlines()[-1]
    first, final = (float(x.strip(";")) for x in last.split("loss ")[1].split()[0:3:2])
    assert final < first - 0.3
    tuned = AutoModelForCausalLM.from_pretrained(out)
    assert tuned.config.use_cache
    assert (logits(tuned) - logits(AutoModelForCausalLM.from_pretrained(model))).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(out).chat_template is not None
    assert not (out / "training_args.bin").exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tuned"]


def test_an_adapter_is_saved_alone_or_merged(model, tmp_path):
    """Both are the same model, and the adapter is small."""
    adapter = tune(model, tmp_path, "messages", "adapter", "--lora", "--rank", "2")
    merged = tune(model, tmp_path, "messages", "merged", "--lora", "--rank", "2", "--merge")
    base = AutoModelForCausalLM.from_pretrained(model)
    before = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, adapter))
    assert (adapted - before).abs().max() > 0.01
    assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), adapted, 1e-4)
    assert not (adapter / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(adapter).chat_template is not None


def test_ctrl_c_saves_the_model_so_far(model, tmp_path, monkeypatch, capsys):
    on_step_end = finetune.StopOnSignal.on_step_end

    def interrupted(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return on_step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(finetune.StopOnSignal, "on_step_end", interrupted)
    with pytest.raises(SystemExit) as ended:
        tune(model, tmp_path, "text", "stopped")
    assert ended.value.code == 130
    assert f"stopped at step 2 of 6; the model so far is in {tmp_path / 'stopped'}" in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(tmp_path / "stopped")


def test_a_run_that_fails_leaves_no_folder(model, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(finetune, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        tune(model, tmp_path, "text", "failed")
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


@pytest.mark.parametrize(
    "rows, message",
    [
        (None, "there is no file"),
        ([""], "is empty"),
        ([{"text": "a"}, '{"text": '], "line 2 of"),
        ([{"txt": "a"}], 'line 1 of {} has neither "messages" nor "prompt" and "completion" nor "text"'),
        (["3"], "has neither"),
        ([{"text": "a"}, {"prompt": "a", "completion": "b"}], "of different kinds"),
        ([{"text": 3}], "text must be text"),
        ([{"messages": [{"role": "user"}]}], '"messages" must be a list of'),
    ],
)
def test_bad_data_ends_in_one_line(rows, message, model, tmp_path):
    path = tmp_path / "data.jsonl"
    if rows is not None:
        write(path, *rows)
    with pytest.raises(SystemExit, match="^error: ") as ended:
        finetune.main([str(model), "--data", str(path), "--out", str(tmp_path / "out")])
    assert message.format(path) in str(ended.value)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "out").exists()


def test_bad_places_end_in_one_line(model, tmp_path):
    data = write(tmp_path / "data.jsonl", ROWS["messages"](1))
    other, bare = tmp_path / "other", tmp_path / "bare"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())

    def refusal(folder: Path, *options: str, out: str = "out") -> str:
        with pytest.raises(SystemExit, match="^error: ") as ended:
            finetune.main([str(folder), "--data", str(data), "--out", str(tmp_path / out), *options])
        assert "\n" not in str(ended.value)
        return str(ended.value)

    assert "is not a Titans checkpoint: it has no config.json" in refusal(tmp_path)
    assert "is not a Titans checkpoint, but 'llama'" in refusal(other)
    assert "has no tokenizer" in refusal(bare)
    assert "exists: choose another place" in refusal(model, out="other")
    assert "--merge goes with --lora" in refusal(model, "--merge")
