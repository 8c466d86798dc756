"""A graft is taught by its source: what is trained, what stays, what counts, and that a run may be interrupted."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("peft", reason="peft is not installed (pip install titans-hf[train])")

from titans_hf.bench import graft as speed  # noqa: E402
from titans_hf.hub.graft import graft_config, graft_model, save  # noqa: E402
from titans_hf.studies import graft as study  # noqa: E402
from titans_hf.train import distil, pretrain  # noqa: E402
from titans_hf.train.corpus import read_documents, train_tokenizer  # noqa: E402

RECIPES = Path(__file__).parent.parent / "scripts" / "recipes"
WINDOW, LENGTH = 16, 48


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source") / "source"
    tokenizer = train_tokenizer(read_documents()[:20], 400)
    sizes = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, eos_token_id=0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save(graft_model(model, graft_config(model.config, window=WINDOW)), tokenizer, folder.parent / "graft")
    return folder


def tune(source: Path, out: Path, *settings: str, recipe: str = "graft-memory.yaml") -> None:
    graft = source.parent / "graft"
    small = ["data.source=python", "data.path=null", f"data.sequence_length={LENGTH}", "held_out.rows=2"]
    small += ["held_out.one_in=10", f"training.tokens={4 * 2 * LENGTH}", f"training.batch_tokens={2 * LENGTH}"]
    small += ["training.log_every=1", "training.save_every=2", "training.learning_rate=1e-2", f"out={out}"]
    small += [f"model.checkpoint={graft}", f"tokenizer.name={graft}", f"distil.teacher={source}"]
    pretrain.main([str(RECIPES / recipe), *small, *settings])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(source: Path, out: Path) -> set[str]:
    before, after = weights(source.parent / "graft"), weights(out / "model")
    assert before.keys() == after.keys(), "an ordinary Titans checkpoint again"
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "memory"
    tune(source, out)
    return out


def test_the_first_stage_changes_the_memories_alone(source, tuned):
    names = changed(source, tuned)
    assert names
    assert all(".mixer.memory." in name for name in names)
    assert AutoModelForCausalLM.from_pretrained(tuned / "model").config.use_cache


def test_the_second_stage_changes_attention_too_and_merges_it(source, tuned, tmp_path):
    tune(source, tmp_path / "lora", "distil.lora_rank=2", recipe="graft-lora.yaml")
    names = changed(source, tmp_path / "lora")
    attention = {name.split(".")[-2] for name in names if ".mixer.attention." in name}
    assert attention == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(".mixer." in name for name in names), "feed-forward, norms and embeddings stay"


@pytest.mark.parametrize("recipe", ["graft-memory.yaml", "graft-lora.yaml"])
def test_an_interrupted_run_goes_on_to_the_same_weights(source, tmp_path, monkeypatch, recipe):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    tune(source, straight, recipe=recipe)
    clip = pretrain.StreamTrainer._clip_grad_norm

    def interrupted(self, model):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGINT)
        return clip(self, model)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.StreamTrainer, "_clip_grad_norm", interrupted)
        with pytest.raises(SystemExit):
            tune(source, stopped, recipe=recipe)
    tune(source, stopped, "--resume", recipe=recipe)
    one, two = weights(straight / "model"), weights(stopped / "model")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_is_the_divergence_beyond_the_window_and_the_memory_learns_from_it(source):
    teacher, student = (AutoModelForCausalLM.from_pretrained(x) for x in (source, source.parent / "graft"))
    ids = torch.randint(0, 400, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    found, wanted = (model(ids, use_cache=False).logits for model in (student, teacher))
    assert distil.divergence(found[:, :WINDOW], wanted[:, :WINDOW]) < 1e-9, "inside the window both see the same"
    beyond = distil.divergence(found[:, WINDOW:], wanted[:, WINDOW:])
    p, q = wanted[:, WINDOW:].double().softmax(-1), found[:, WINDOW:].double().softmax(-1)
    assert beyond.item() == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert beyond > 1e-3
    beyond.backward()
    assert student.model.layers[-1].memory.out_proj.weight.grad.abs().max() > 0


def test_pieces_do_not_change_the_divergence(monkeypatch):
    found, wanted = torch.randn(2, 2, 11, 7, generator=torch.Generator().manual_seed(0))
    whole = distil.divergence(found, wanted)
    monkeypatch.setattr(distil, "PIECE", 3)
    assert distil.divergence(found, wanted).item() == pytest.approx(whole.item(), rel=1e-6)


def test_drawn_places_lie_beyond_the_window_and_follow_from_the_row():
    ids = torch.randint(0, 400, (2, 31), generator=torch.Generator().manual_seed(0))
    assert distil.chosen_places(ids, 7, None).tolist() == distil.chosen_places(ids, 7, 50).tolist() == [*range(7, 31)]
    drawn = distil.chosen_places(ids, 7, 5).tolist()
    assert drawn == sorted(set(drawn))
    assert (len(drawn), min(drawn) >= 7) == (5, True)
    assert drawn == distil.chosen_places(ids, 7, 5).tolist() != distil.chosen_places(ids + 1, 7, 5).tolist()


def test_a_row_learns_from_some_of_its_places(source, tmp_path):
    tune(source, tmp_path / "some", "distil.places=5", "training.save_every=100")
    assert changed(source, tmp_path / "some")


def test_what_is_evaluated_lies_beyond_the_window():
    (row,) = distil.overflowed([{"input_ids": torch.arange(6), "labels": torch.arange(6)}], start=3)
    assert row["labels"].tolist() == [-100, -100, -100, -100, 4, 5], "the prediction at place 3 is of token 4"


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.sequence_length=16", "training.batch_tokens=32"], "must be more than 16, the first place"),
        (["data.sequence_length=96", "training.batch_tokens=192"], "is more than the 64 positions"),
        (["data.reset_at_documents=true"], "`distil` needs `data.reset_at_documents: false`"),
        (["distil.teacher=nowhere"], "`distil.teacher`: cannot load 'nowhere'"),
        (["model.checkpoint=nowhere"], "`model.checkpoint`: cannot load 'nowhere'"),
        (["model.checkpoint=null"], "`distil` needs `model.checkpoint`"),
        (["model.preset=titans-mag-170m"], "leave out `model.preset` and `model.config`"),
        (["distil.lora=3"], "there is no field `distil.lora`; the nearest is `distil.lora_rank`"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(source, tmp_path, settings, message):
    with pytest.raises(SystemExit) as ended:
        tune(source, tmp_path / "out", *settings)
    assert message in str(ended.value.code)
    assert not (tmp_path / "out" / "model").exists()


def test_the_study_compares_with_full_attention_and_the_window(source, tmp_path, capsys):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(read_documents()[number][:4000], encoding="utf-8")
    record = tmp_path / "graft"
    graft = str(source.parent / "graft")
    command = [str(source), graft, graft, "--texts", str(tmp_path / "*.txt"), "--tokens", "300"]
    found = study.main([*command, "--count", "2", "--record", str(record)])
    nats = found["nats"]
    for name in (study.ALONE, *study.CONTROLS):
        assert nats[study.TUNED] == pytest.approx(nats[name], abs=2e-4), "an untuned memory says nothing"
    assert nats[study.WITHOUT_SINKS][1:] != nats[study.ALONE][1:] != nats[study.FULL][1:]
    assert found["closed"] == dict.fromkeys((study.TUNED, *study.CONTROLS), pytest.approx(0, abs=0.01))
    assert " %  graft, memory of another text" in capsys.readouterr().out
    assert json.loads(record.with_suffix(".json").read_text())["window"] == WINDOW
    assert record.with_suffix(".png").stat().st_size > 10_000
    halfway = {**nats, "graft": [(x + y) / 2 for x, y in zip(nats[study.ALONE], nats[study.FULL])]}
    assert study.closed(halfway, 300, WINDOW, study.TUNED) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="do not reach far enough"):
        study.closed(nats, 100, WINDOW, study.TUNED)


def test_the_benchmark_shows_a_cache_that_does_not_grow(source, tmp_path):
    sizes = ["--contexts", "80", "200", "--steps", "2", "--repeats", "1", "--threads", "1"]
    rows = speed.main([str(source), str(source.parent / "graft"), *sizes, "--record", str(tmp_path / "speed")])
    assert [(row["model"], row["context"]) for row in rows] == [
        ("source", 80),
        ("source", 200),
        ("graft", 80),
        ("graft", 200),
    ]
    bytes_of_token = 2 * 4 * 8 * 2  # keys and values, in float32, of one head of 8, in two layers
    assert [row["cache_bytes"] for row in rows[:2]] == [80 * bytes_of_token, 200 * bytes_of_token]
    assert rows[2]["cache_bytes"] == rows[3]["cache_bytes"]
    assert json.loads((tmp_path / "speed.json").read_text())["runs"] == rows
    assert (tmp_path / "speed.png").stat().st_size > 10_000
