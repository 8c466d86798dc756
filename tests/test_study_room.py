"""The room of studies: what its tasks ask, what it refuses, and that a run is done once."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from support import small_text
from typer.testing import CliRunner

pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install titans-hf[viz])")

from titans_hf.cli.app import app  # noqa: E402
from titans_hf.configuration_titans import VARIANTS  # noqa: E402
from titans_hf.studies import report, runner  # noqa: E402
from titans_hf.studies.families import build, state_bytes  # noqa: E402
from titans_hf.studies.study import known, models_of, read_study, runs_of  # noqa: E402
from titans_hf.studies.tasks import TASKS, groups, mqar  # noqa: E402
from titans_hf.studies.tasks.groups import table_of  # noqa: E402
from titans_hf.studies.tasks.task import UNLABELLED  # noqa: E402

OF_NEEDLES = ("needles", "passkeys", "ablations-needles")  # test_study_needles.py runs these
OF_TEXT = ("ablations-text", "chunk-mismatch", "depth", "depth-grid", "learning")
STUDY = {
    "about": "a test",
    "task": "groups",
    "settings": {"parity": {"group": "parity", "trained": [3, 8], "tested": [8, 12]}},
    "models": {"lmm": {}, "linear": {"family": "lmm", "memory_depth": 1}, "llama": {}},
    "sizes": {"hidden_size": 16, "num_hidden_layers": 1, "window": 8, "parameters": 12000},
    "training": {"steps": 2, "batch_tokens": 32, "lr": [1e-3, 3e-3]},
    "seeds": [0, 1],
    "quick": {"models": {"linear": None}, "training": {"steps": 1}},
}


def written(tmp_path, **changes) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return str(path)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Where studies of text find it."""
    folder = tmp_path_factory.mktemp("home")
    small_text(folder / "runs" / "small")
    return folder


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("path", [path for path in known() if path.stem not in OF_NEEDLES], ids=lambda path: path.stem)
def test_every_study_is_readable_and_its_batches_are_what_its_task_says(path, quick, home, monkeypatch):
    monkeypatch.chdir(home)
    study = read_study(path.stem, quick)
    for settings in study.settings.values():
        task = TASKS[study.task](**settings)
        batches = [task.training_batch(step, 64, generator()) for step in range(len(task.trained))]
        batches += [next(task.test_batches(point, 64, 0)) for point in task.tested.values()]
        for ids, labels in batches:
            assert ids.shape == labels.shape
            assert 0 <= ids.min() <= ids.max() < task.vocabulary
            asked = labels[labels != UNLABELLED]
            assert len(asked) > 0
            assert 0 <= asked.min() <= asked.max() < task.vocabulary


@pytest.mark.parametrize("name", OF_TEXT)
def test_the_reduced_form_of_a_study_of_text_runs_to_its_table_and_plot(name, home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    command = ["study", name, "--quick", "--out", str(tmp_path), "--record", str(tmp_path / "record")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    study, record = read_study(name, quick=True), json.loads((tmp_path / "record.json").read_text())
    assert {row["model"] for row in record["table"]} == set(models_of(study))
    compared = record["runs"][0]["compared_by"]
    assert all(float(row[compared]) > 0 for row in record["table"]), "nats"
    plain = [row for row in record["table"] if row.get("read with", "as trained") == "as trained"]
    ours = {row["model"]: row["worth"] is not None for row in plain}
    assert ours == {run["model"]: run["family"] in VARIANTS for run in record["runs"]}
    if study.paper is not None:
        assert sorted(row["paper's rank"] for row in plain) == list(range(1, 1 + len(plain)))
        assert {row["rank"] for row in plain} <= set(range(1, 1 + len(plain)))
    assert (tmp_path / "record.png").stat().st_size > 10_000


def test_mqar_asks_every_pair_once_and_the_answer_follows_no_key():
    """The wanted value stands only beside its key at the front: the place that is asked does not show it."""
    task = mqar(trained=[[64, 7]])
    ids, labels = task.sample(5, generator(), **task.trained[0])
    asked = labels != UNLABELLED
    assert (asked.sum(1) == 7).all()
    for row in range(5):
        pairs = dict(ids[row, :14].view(7, 2).tolist())
        assert len(pairs) == 7
        assert {key.item(): value.item() for key, value in zip(ids[row][asked[row]], labels[row][asked[row]])} == pairs
    assert not asked[:, :14].any()
    with pytest.raises(ValueError, match="no room for 20 pairs"):
        task.sample(1, generator(), tokens=64, pairs=20)


@pytest.mark.parametrize(
    "group, order, commutes", [("parity", 2, True), ("Z7", 7, True), ("S3", 6, False), ("A4", 12, False)]
)
def test_groups_are_groups(group, order, commutes):
    table = table_of(group)
    assert table.shape == (order, order)
    assert torch.equal(table[0], torch.arange(order)), "element 0 changes nothing"
    assert all(torch.equal(line.sort()[0], torch.arange(order)) for line in (*table, *table.T)), (
        "and all has an inverse"
    )
    a, b, c = torch.randint(0, order, (3, 200), generator=generator())
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])
    assert torch.equal(table, table.T) is commutes


def test_even_permutations_are_half_of_all():
    assert len(table_of("A5")) == 60
    assert len(table_of("S5")) == 120


@pytest.mark.parametrize("group", ["S1", "S9", "D4", "Z", "5", ""])
def test_a_group_that_is_none_is_refused(group):
    with pytest.raises(ValueError, match="`group` must be 'parity'"):
        table_of(group)


def test_labels_of_a_group_are_the_products_so_far_and_tests_do_not_overlap():
    task, table = groups("S3", tested=[5, 9]), table_of("S3")
    assert task.tested == {"5": {"tokens": 5, "start": 0}, "9": {"tokens": 9, "start": 5}}
    ids, labels = task.sample(3, generator(), **task.tested["9"])
    assert (labels[:, :5] == UNLABELLED).all()
    for row, asked in zip(ids.tolist(), labels.tolist()):
        products = list(itertools.accumulate(row, lambda a, b: table[a, b].item()))
        assert asked[5:] == products[5:]
    lengths = {task.sample(1, generator(seed), tokens=(3, 6))[0].shape[1] for seed in range(40)}
    assert lengths == {3, 4, 5, 6}


@pytest.mark.parametrize("kind", ["recall", "fuzzy", "noisy"])
def test_mad_asks_for_the_value_of_a_key_that_was_there_before(kind):
    """Read back from the row alone: keys are below half of the vocabulary, values above, noise behind it."""
    task = TASKS["mad"](kind, tokens=64, vocabulary=12)
    ids, labels = task.sample(8, generator(), tokens=64)
    for row, asked in zip(ids.tolist(), labels.tolist()):
        known_values: dict[tuple, list] = {}
        runs = [(is_key, list(run)) for is_key, run in itertools.groupby(enumerate(row), lambda pair: pair[1] < 6)]
        runs = [run for run in runs if any(token < 12 for _, token in run[1])]
        for (_, key), (_, value) in zip(runs[::2], runs[1::2]):
            name, said = tuple(token for _, token in key), [token for _, token in value if token < 12]
            begin = key[-1][0]
            wanted = [label for label in asked[begin : begin + len(value)] if label != UNLABELLED]
            if value[-1][0] < len(row) - 1:  # whole
                assert wanted == (said if name in known_values else [])
                known_values[name] = said
    assert (ids >= 12).any() == (kind == "noisy")


def test_mad_copying_asks_for_all_tokens_in_order():
    ids, labels = TASKS["mad"]("copying", tokens=32, vocabulary=5, copied=7).sample(3, generator(), tokens=32)
    for row, asked in zip(ids, labels):
        assert torch.equal(row[row < 5], asked[asked != UNLABELLED])
        assert row[24] == 6
        assert (row[25:] == 5).all(), "nothing is shown again"
    with pytest.raises(ValueError, match="must be more than twice `copied`"):
        TASKS["mad"]("copying", tokens=32, copied=16).sample(1, generator(), tokens=32)


def test_mad_memorization_has_the_same_values_in_every_sequence():
    task = TASKS["mad"]("memorization", tokens=33, vocabulary=20)
    found = [task.sample(9, generator(seed), tokens=33) for seed in range(2)]
    pairs = {
        (i.item(), l.item()) for ids, labels in found for i, l in zip(ids[:, ::2].flatten(), labels[:, ::2].flatten())
    }
    assert len(pairs) == len(dict(pairs)) == 10
    assert not any((ids == label).any() for ids, labels in found for label in labels[labels >= 0]), (
        "shown in no sequence"
    )


def test_mad_compression_is_answered_from_the_last_token_alone():
    task = TASKS["mad"]("compression", tokens=9, vocabulary=5)
    decoder, hidden = task.decoder(16), torch.randn(2, 9, 16, generator=generator())
    before = decoder(hidden)
    assert before.shape == (2, 8, 5)
    hidden[:, :-1] = 0
    assert torch.equal(decoder(hidden), before)
    ids, labels = task.sample(2, generator(), tokens=9)
    assert torch.equal(ids[:, :-1], labels[:, :-1])


def test_an_unknown_mad_task_is_refused():
    with pytest.raises(ValueError, match="`kind` must be one of recall, fuzzy"):
        TASKS["mad"]("remember")


def test_a_study_trains_every_rate_on_one_seed_and_the_best_on_the_others(tmp_path):
    study, out = read_study(written(tmp_path)), tmp_path / "runs"
    assert runner.expected_seconds(study, out, jobs=1) > 0
    records = runner.measure(study, out, jobs=0)
    assert [(r["model"], r["seed"]) for r in records if r["seed"] == 0 and r["model"] == "lmm"] == [("lmm", 0)]
    assert sorted((r["model"], r["seed"]) for r in records) == sorted(itertools.product(study.models, study.seeds))
    assert len(list(out.glob("*.json"))) == 3 * 3, "two rates of the first seed, one of the other"
    assert runner.expected_seconds(study, out, jobs=1) == 0
    lmm = next(r for r in records if r["model"] == "lmm")
    assert {name: list(values) for name, values in lmm["tested"].items()} == {
        "as trained": ["8", "12"],
        "memory off": ["8", "12"],
    }
    assert list(next(r for r in records if r["model"] == "llama")["tested"]) == ["as trained"]
    assert lmm["tokens_per_second"] > 0
    rows = report.table(records)
    assert [row["model"] for row in rows] == ["lmm", "linear", "llama"]
    assert all("±" in row["8"] for row in rows)
    report.draw(records, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000

    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert runner.measure(study, out, jobs=0) == records
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.json")} == kept, "nothing is trained twice"


def test_what_says_the_answers_in_place_of_the_head_is_trained_and_read_with_other_fields(tmp_path):
    settings = {"compression": {"kind": "compression", "tokens": 12, "vocabulary": 5}}
    changes = {"task": "mad", "settings": settings, "models": {"lmm": {}}, "read_with": [{"memory_chunk_size": 2}]}
    run = runs_of(read_study(written(tmp_path, **changes)), 1e-3, 0)[0]
    task = runner.task_of(run)
    model = runner.build_model(run, task)
    before = model.decoder.outer.weight.clone()
    runner.train(model, task, run, print, run.lr, 1)
    assert not torch.equal(model.decoder.outer.weight, before)
    (record,) = runner.perform_all([run], tmp_path, 0)
    assert list(record["tested"]) == ["as trained", "memory off", "memory_chunk_size=2"]
    assert all(list(values) == ["12"] for values in record["tested"].values())


def test_whatever_changes_a_result_changes_the_name_of_its_file(tmp_path):
    first = {run.name for run in runs_of(read_study(written(tmp_path)), 1e-3, 0)}
    for changes in (
        {"training": {**STUDY["training"], "steps": 3}},
        {"sizes": {**STUDY["sizes"], "window": 4}},
        {"settings": {"parity": {"group": "parity", "trained": [3, 9], "tested": [8, 12]}}},
    ):
        assert not first & {run.name for run in runs_of(read_study(written(tmp_path, **changes)), 1e-3, 0)}


def test_quick_changes_sections_and_takes_models_away(tmp_path):
    study = read_study(written(tmp_path), quick=True)
    assert list(study.models) == ["lmm", "llama"]
    assert (study.training.steps, study.training.batch_tokens) == (1, 32)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": "sudoku"}, "`task` must be one of mqar"),
        ({"models": {"gpt": {}}}, "`models.gpt` has no `family` of mac"),
        ({"sizes": {"hidden_size": 16}}, "`sizes.parameters` is missing"),
        ({"seed": [0]}, "there is no field `seed`; the nearest is `seeds`"),
        ({"training": {"steps": 2, "lr": []}}, "`training.lr`"),
    ],
)
def test_a_study_that_cannot_work_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        read_study(written(tmp_path, **changes))
    assert message in str(error.value)


def test_an_unknown_study_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="there is no study 'mqa'; those of this checkout are .*groups, learning, mad, mqar"
    ):
        read_study("mqa")


def test_state_bytes_are_those_of_the_cache():
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "window": 16}
    lmm, gdn, llama = (build(family, sizes, 150_000, 0) for family in ("lmm", "gdn", "llama"))
    weights = sum(W.numel() for W in lmm.model.layers[0].mixer.memory.start.weights)
    assert state_bytes(lmm) == 2 * 2 * weights * 4, "two layers, weights and momentum, four bytes"
    assert state_bytes(gdn) == 2 * 64 * 64 * 4
    assert state_bytes(llama) is None


def test_a_record_holds_what_was_run(tmp_path):
    study, out = read_study(written(tmp_path), quick=True), tmp_path / "runs"
    run = runs_of(study, 1e-3, 0)[0]
    runner.perform_all([run], out, jobs=0)
    record = json.loads((out / f"{run.name}.json").read_text())
    assert (record["model"], record["lr"], record["seed"], record["task"]) == ("lmm", 1e-3, 0, "groups")
    assert record["parameters"] == pytest.approx(12000, rel=0.1)


def test_the_command_lists_studies_and_runs_one(tmp_path):
    listed = CliRunner().invoke(app, ["study"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == [path.stem for path in known()]
    command = [
        "study",
        written(tmp_path),
        "--quick",
        "--out",
        str(tmp_path / "runs"),
        "--record",
        str(tmp_path / "own"),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "seconds of training" in done.output
    record = json.loads((tmp_path / "own.json").read_text())
    assert [row["model"] for row in record["table"]] == ["lmm", "llama"]
    assert record["families"] == {"llama": "Transformer with full attention (Llama)"}
    tried = [(run["lr"], run["model"]) for run in record["tried"]]
    assert tried == list(itertools.product([1e-3, 3e-3], ["lmm", "llama"]))
    assert (tmp_path / "own.png").stat().st_size > 10_000
