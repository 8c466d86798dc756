"""Text in the room of studies: what is read, what is never trained on, and what is read or trained otherwise later."""

import json
from dataclasses import asdict

import pytest
import torch
from support import random_ids, small_text, tiny_model

pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")
pytest.importorskip("tqdm", reason="tqdm is not installed (pip install titans-hf[dev])")

from titans_hf.studies import report, runner  # noqa: E402
from titans_hf.studies.study import Paper, Study, models_of, read_study, runs_of  # noqa: E402
from titans_hf.studies.tasks.task import NATS, RIGHT, UNLABELLED, plainly, without_writing  # noqa: E402
from titans_hf.studies.tasks.text import held_out_texts, labelled, text, tokenizer_of  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("home") / "text")


def study_of(folder, **changes) -> Study:
    settings = {"folder": str(folder), "row": 40, "choose": 2, "report": 3, "far": 1, "far_rows": 5}
    values = {
        "about": "a test",
        "task": "text",
        "settings": {"": settings},
        "models": {"lmm": {}},
        "sizes": {"hidden_size": 16, "num_hidden_layers": 1, "window": 8, "parameters": 12000},
        "training": {"steps": 3, "batch_tokens": 80, "lr": [1e-3]},
    }
    return Study.model_validate({**values, **changes})


def test_training_reads_the_documents_in_their_order_for_every_seed(folder):
    task = text(str(folder), row=50)
    parts = [task.training_batch(step, 150, torch.Generator().manual_seed(step)) for step in range(2)]
    assert all(ids.shape == (3, 50) for ids, _ in parts)
    first = json.loads((folder / "text.jsonl").read_text().splitlines()[0])["text"]
    wanted = tokenizer_of(folder)(first).input_ids[:300]
    assert torch.cat([ids.flatten() for ids, _ in parts]).tolist() == wanted
    for ids, labels in parts:
        assert torch.equal(labels[:, :-1], ids[:, 1:])
        assert (labels[:, -1] == UNLABELLED).all()


def test_no_text_of_a_test_is_trained_on_or_chosen_by(folder):
    tokenizer = tokenizer_of(folder)
    read = {part: tokenizer.decode(torch.cat(held_out_texts(folder, part, 90, 7))) for part in ("choose", "report")}
    assert "Snow" in read["choose"]
    assert "Snow" not in read["report"]
    assert "bird" in read["report"]
    assert "bird" not in read["choose"]
    assert "night" not in read["choose"] + read["report"], "a word of all documents"
    task = text(str(folder), row=90)
    assert {point["part"] for point in task.chosen_by} == {"choose"}
    assert {point["part"] for point in task.tested.values()} == {"report"}


def test_losses_are_the_model_s_own_with_its_memory_on_and_off(folder):
    model, task = tiny_model("lmm", torch.float32), text(str(folder), row=41)
    ids, labels = labelled(random_ids(1, 41))
    for reading, options in ((plainly, {}), (without_writing, {"memory_read_only": True})):
        found = runner.scores(model, task, ids, labels, reading)
        assert found.shape == (1, 41)
        assert found.isnan().tolist() == [[False] * 40 + [True]]
        with torch.no_grad():
            expected = model(ids, labels=ids, **options).loss.item()
        assert found.nanmean().item() == pytest.approx(expected, abs=1e-5)


def test_values_are_means_by_place(folder):
    task = text(str(folder), row=300, far=2, far_rows=3)
    nats = torch.arange(300.0).repeat(2, 1) + torch.tensor([[0.0], [2.0]])
    assert task.values("far", list(nats.split(1))) == {
        "far 0-128": 63.5 + 1,
        "far 128-256": 191.5 + 1,
        "far 256-300": 277.0 + 1,
    }
    assert task.compared_by == "256-300"
    assert task.shown == ("256-300", "far 256-512", "far 512-900")
    assert task.overall({"0-128": 7.0, "256-300": 3.0}) == 3.0


def test_the_rate_with_the_lowest_loss_is_taken_and_of_right_answers_the_highest(folder, tmp_path, monkeypatch):
    study = study_of(folder, training={"steps": 3, "batch_tokens": 80, "lr": [1e-3, 2e-3, 4e-3]})
    found = {1e-3: 0.5, 2e-3: 0.3, 4e-3: 0.9}
    for metric, best in ((NATS, 2e-3), (RIGHT, 4e-3)):

        def perform_all(runs, out, jobs, metric=metric):
            return [{**asdict(run), "metric": metric.name, "validation": found[run.lr]} for run in runs]

        monkeypatch.setattr(runner, "perform_all", perform_all)
        assert [record["lr"] for record in runner.measure(study, tmp_path, 0)] == [best]


def test_trained_weights_are_read_with_another_chunk_size_and_stay_the_same():
    model, ids = tiny_model("lmm", torch.float32, memory_write="chunk"), random_ids(2, 31)
    other = runner.with_fields(model, {"memory_chunk_size": 11})
    assert other.config.memory_chunk_size == 11
    assert model.config.memory_chunk_size == 3
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with torch.no_grad():
        logits = [each(ids, use_cache=False).logits for each in (model, other, runner.with_fields(model, {}))]
    assert not torch.allclose(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_second_stage_goes_on_from_the_trained_weights_with_the_text_that_follows(folder, tmp_path, monkeypatch):
    later = {"then": [{"fields": {"memory_chunk_size": 2}, "steps": 2}], "read_with": [{"memory_chunk_size": 2}]}
    plain, run = (runs_of(study_of(folder, **changes), 1e-3, 0)[0] for changes in ({}, later))
    assert plain.name != run.name
    read, own = [], runner.TASKS["text"](**json.loads(run.task_settings))
    batch = type(own).training_batch
    monkeypatch.setattr(
        type(own), "training_batch", lambda self, step, *args: (read.append(step), batch(self, step, *args))[1]
    )
    records = [record for one in (plain, run) for record in runner.perform_all([one], tmp_path, 0)]
    assert read == [0, 1, 2, 0, 1, 2, 3, 4]
    first, second = (record["tested"] for record in records)
    assert list(second) == ["as trained", "memory off", "memory_chunk_size=2", "memory_chunk_size=2, 2 steps more"]
    assert first["as trained"] == second["as trained"], "the second stage trains a copy"
    assert second["memory_chunk_size=2"] != second["memory_chunk_size=2, 2 steps more"]
    assert list(records[1]["stages"]) == ["memory_chunk_size=2, 2 steps more"]
    lines = report.table(records[1:])
    assert [line["read with"] for line in lines] == [name for name in second if name != "memory off"]
    assert [line["worth"] is None for line in lines] == [False, True, True]


def test_what_cannot_be_trained_or_read_is_refused_before_anything_is_trained(folder, tmp_path):
    long = {"steps": 10_000, "batch_tokens": 80, "lr": [1e-3]}
    with pytest.raises(ValueError, match="`training`: step 10,000 needs 800,000 tokens"):
        runner.expected_seconds(study_of(folder, training=long), tmp_path, 1)
    mac = study_of(folder, models={"mac": {}}, read_with=[{"memory_chunk_size": 3}])
    with pytest.raises(ValueError, match="must divide `segment_size`"):
        runner.expected_seconds(mac, tmp_path, 1)
    with pytest.raises(ValueError, match="is not there; make it with scripts/train/small_text.py"):
        text(str(tmp_path / "nowhere"))
    assert not list(tmp_path.iterdir())


def test_a_grid_is_every_model_with_every_combination(folder):
    grid = {"memory_depth": [1, 2], "memory_theta_max": [0.25, 0.5, 1.0]}
    study = study_of(folder, models={"lmm": {}, "own": {"family": "mag", "memory_conv": False}}, grid=grid)
    models = models_of(study)
    assert len(models) == 12
    assert models["own-depth=2-theta_max=0.25"] == {
        "family": "mag",
        "memory_conv": False,
        "memory_depth": 2,
        "memory_theta_max": 0.25,
    }
    assert len({run.name for run in runs_of(study, 1e-3, 0)}) == 12


def test_the_paper_s_order_stands_beside_ours():
    """Lower is better in both; of the paper's Table 5, 27.01 is better than 28.49, which is better than 28.98."""
    losses = {"lmm": 3.2, "linear": 3.1, "still": 3.3}
    runs = {("", model): [{"metric": NATS.name, "overall": {"as trained": nats}}] for model, nats in losses.items()}
    paper = Paper(table=5, column="ppl", rows={"lmm": "LMM", "linear": "Linear Memory", "still": "w/o Momentum"})
    found = report.orders(runs, paper)
    assert {model: (row["rank"], row["paper's rank"]) for (_, model), row in found.items()} == {
        "lmm": (2, 1),
        "linear": (1, 2),
        "still": (3, 3),
    }
    assert found["", "lmm"]["paper's"] == 27.01


@pytest.mark.parametrize("ablation", ["linear", "no-convolution", "no-momentum", "no-forgetting", "no-persistent"])
def test_every_ablation_changes_what_a_memory_alone_computes(ablation):
    """With LMM, too, persistent tokens count: its memory reads them before a text."""
    fields = dict(read_study("ablations-text").models[ablation])
    assert fields.pop("family") == "lmm"
    whole, less = tiny_model("lmm", memory_depth=2), tiny_model("lmm", **{"memory_depth": 2, **fields})
    own = less.state_dict()
    common = {name: x for name, x in whole.state_dict().items() if name in own and own[name].shape == x.shape}
    assert len(common) > len(own) / 2
    less.load_state_dict(common, strict=False)
    ids = random_ids(2, 29)
    with torch.no_grad():
        found = [model(ids, use_cache=False).logits for model in (whole, less)]
    assert not torch.allclose(*found, atol=1e-6)
