"""Needles in the room of studies: rows that hide an answer beyond the window, and controls that know none."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from support import small_text, tiny_model
from typer.testing import CliRunner

for package, extra in {"lm_eval": "eval", "wonderwords": "eval", "yaml": "train", "matplotlib": "viz"}.items():
    pytest.importorskip(package, reason=f"{package} is not installed (pip install titans-hf[{extra}])")

from titans_hf.cli.app import app  # noqa: E402
from titans_hf.studies.study import read_study  # noqa: E402
from titans_hf.studies.tasks.task import UNLABELLED, plainly  # noqa: E402

of = importlib.import_module("titans_hf.studies.tasks.needles")  # the package's `needles` is the task itself
KINDS = list(of.KINDS)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small_text(folder / "runs" / "small")
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch):
    monkeypatch.chdir(home)


def haystack(kind: str, held_out: bool = False) -> of.Haystack:
    return of.Haystack([]) if kind == "passkey" else of.haystack_of(Path("runs/small"), held_out)


def place_of(words: list[str], answer: str) -> int:
    """Where an answer stands in a row, one character after the other; -1 if nowhere."""
    length = len(answer)
    return next((i for i in range(len(words)) if words[i : i + length] == [*answer]), -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_tokens_and_the_answer_stands_further_off_than_windows_reach(kind):
    places = set()
    for seed in range(25):
        words, answer = of.row(kind, haystack(kind), 223, 61, seed, absent=False)
        place = place_of(words, answer)
        asked = 223 - len(answer)
        assert len(words) == 223
        assert words[asked + 1 :] == [*answer][:-1], "read along, all but the last"
        assert words[asked - 1 : asked + 1] == ["text", "is"]
        assert 0 < place < asked - 61 - len(answer)
        assert words[asked + 1 - of.QUESTION] == "What"
        places.add(place)
    assert len(places) > (4 if kind == "passkey" else 10), "between sentences of noise, or of prose"


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_characters_that_chance_has_drawn(kind):
    task = of.needles(kinds=[kind], trained=[199], tested=[211], apart=30, words=97)
    ids, labels = task.training_batch(0, 3 * 199, torch.Generator().manual_seed(0))
    assert ids.shape == (3, 199)
    asked = (labels != UNLABELLED).sum(1).tolist()
    assert asked == [31 if kind == "uuid" else 7] * 3
    shown = ids[:, 1:][labels[:, :-1] != UNLABELLED]
    assert torch.equal(shown, labels[:, :-1][labels[:, :-1] != UNLABELLED]), "read along"
    assert labels.max() < 16
    assert ids.max() < 97 + len(of.CHARACTERS) == task.vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_its_needle_does_not_hold_the_answer(kind):
    for seed in range(5):
        words, answer = of.row(kind, haystack(kind), 223, 61, seed, absent=True)
        assert len(words) == 223
        assert place_of(words[: 223 - len(answer)], answer) == -1
        assert words.count("special") == 3, "the first line, the question and the beginning of the answer"


def test_the_place_of_a_needle_says_nothing_about_its_answer():
    """Of 500 numbers, no digit goes with the place: four standard errors of a correlation are 0.18."""
    rows = [of.row("passkey", haystack("passkey"), 300, 40, seed, absent=False) for seed in range(500)]
    places = torch.tensor([float(place_of(words, answer)) for words, answer in rows])
    digits = torch.tensor([[float(digit) for digit in answer] for _, answer in rows])
    assert torch.corrcoef(torch.stack((places, *digits.T)))[0, 1:].abs().max() < 0.18
    assert len({answer for _, answer in rows}) == 500
    halves = [digits[half].mean(0) for half in (places > places.median(), places <= places.median())]
    assert (halves[0] - halves[1]).abs().max() < 1.1, "four standard errors of a difference are 1.03"


def test_tests_hide_needles_in_prose_that_training_has_not_read():
    trained, tested = (set(haystack("number", held_out).words) for held_out in (False, True))
    assert "night" in trained - tested
    assert "bird" in tested - trained
    assert "hill" not in tested, "of the novels that are chosen by"
    task = of.needles(kinds=["number"])
    assert all(point["held_out"] for point in task.tested.values())
    assert not any("held_out" in point for point in task.trained)


def test_an_answer_counts_if_all_its_characters_are_right():
    task = of.needles(kinds=["passkey"], tested=[1024, 3000])
    scores = torch.full((3, 9), torch.nan)
    scores[:, 4:8] = torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
    found = task.values("passkey 1k", [scores[:2], scores[2:]])
    assert found == {"passkey 1k": pytest.approx(1 / 3), "passkey 1k characters": pytest.approx(7 / 12)}
    assert task.shown == ("passkey 1k", "passkey 3000")
    assert list(task.tested) == ["passkey 1k", "passkey 3000", "passkey absent"]
    assert task.overall({"passkey 1k": 0.5, "passkey 3000": 0.1, "passkey absent": 0.9}) == pytest.approx(0.3)


@pytest.mark.parametrize("variant", ["lmm", "mag"])
def test_a_memory_that_is_reset_at_the_question_forgets_what_was_read_before(variant):
    """Two texts that differ far before the question: with the reset, what is read from it on is the same."""
    model = tiny_model(variant, torch.float64, num_hidden_layers=1)
    ids = torch.randint(0, 29, (1, 90), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 10:20] = (other[:, 10:20] + 5) % 29
    labels = torch.full_like(ids, UNLABELLED)
    labels[:, 80:] = 1
    start = 48  # of the segment of 6 tokens that holds token 51, the question's first
    found = {}
    with torch.no_grad():
        for read in (plainly, of.forgetting):
            found[read] = [read(model, each, labels) for each in (ids, other)]
    assert torch.allclose(found[of.forgetting][0][:, :start], found[plainly][0][:, :start])
    assert torch.allclose(*(hidden[:, start:] for hidden in found[of.forgetting]), atol=1e-12)
    assert not torch.allclose(*(hidden[:, start:] for hidden in found[plainly]), atol=1e-6)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="`kinds` must be some of passkey, number, uuid; got"):
        of.needles(kinds=["word"])
    with pytest.raises(ValueError, match="60 tokens have no room for a needle 20 tokens from its answer"):
        of.row("passkey", haystack("passkey"), 60, 20, 0, absent=False)
    with pytest.raises(ValueError, match="is not there; make it with scripts/train/small_text.py"):
        of.needles("nowhere")
    assert of.needles("nowhere", kinds=["passkey"]).vocabulary == 2065, "noise needs no text"


@pytest.mark.parametrize("name", ["needles", "passkeys", "ablations-needles"])
def test_the_full_studies_keep_needles_beyond_what_attention_and_convolutions_reach(name):
    study = read_study(name)
    (settings,) = study.settings.values()
    task = of.needles(**settings)
    assert task.vocabulary == settings.get("words", 2048) + 17
    layers, window = study.sizes.num_hidden_layers, study.sizes.window
    assert window <= 128
    assert layers * (window - 1 + 2 * 3) < settings["apart"]
    assert max(settings["trained"]) == (256 if name == "passkeys" else 1024)


@pytest.mark.parametrize("name", ["needles", "passkeys", "ablations-needles"])
def test_the_reduced_form_runs_to_its_table_with_all_controls(name, tmp_path):
    command = ["study", name, "--quick", "--out", str(tmp_path), "--record", str(tmp_path / "record")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "record.json").read_text())
    lmm = next(run for run in record["runs"] if run["model"] == "lmm")
    assert list(lmm["tested"]) == ["as trained", "memory off", "memory reset"]
    assert {"passkey absent", "passkey absent characters"} <= set(lmm["tested"]["as trained"])
    assert lmm["about"]["chance of a character"] == {"passkey": pytest.approx(0.1016, abs=1e-4)}
    assert [row["read with"] for row in record["table"] if row["model"] == "lmm"] == ["as trained", "memory reset"]
    assert (tmp_path / "record.png").stat().st_size > 10_000
