"""DNA: letters in and out, rows that are checked, models of equal size that learn a motif, and a study that resumes."""

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

pytest.importorskip("tqdm", reason="tqdm is not installed (pip install titans-hf[dev])")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install titans-hf[viz])")

from titans_hf.dna import dna_tokenizer  # noqa: E402
from titans_hf.dna.data import read_examples, read_task, stratified  # noqa: E402
from titans_hf.dna.scores import accuracy, mcc  # noqa: E402
from titans_hf.studies import dna, dna_models, dna_training  # noqa: E402
from titans_hf.studies.dna_models import MODELS, build, parameters  # noqa: E402

REAL = Path(__file__).parent.parent.parent / "shared" / "data" / "dna"
MOTIF = "GGCGCC"


@pytest.fixture
def small(monkeypatch):
    """Models of a size that trains in a second."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "window": 16}
    monkeypatch.setattr(dna_models, "SIZES", sizes)
    monkeypatch.setattr(dna_models, "PARAMETERS", 20_000)


def motif_rows(rows: int, seed: int) -> list[tuple[str, int]]:
    """Rows of A and T, 17 to 21 letters; those of class 1 hold the motif somewhere."""
    generator, found = torch.Generator().manual_seed(seed), []
    for label in (torch.rand(rows, generator=generator) < 0.5).int().tolist():
        length = int(torch.randint(17, 22, (1,), generator=generator))
        letters = ["AT"[i] for i in torch.randint(2, (length,), generator=generator)]
        if label:
            start = int(torch.randint(length - len(MOTIF), (1,), generator=generator))
            letters[start : start + len(MOTIF)] = MOTIF
        found.append(("".join(letters), label))
    return found


def write_csv(path: Path, rows: list[tuple[str, object]], text: str = "sequence") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([(text, "label"), *rows])


@pytest.fixture
def motifs(tmp_path) -> Path:
    """A folder with the task `motif` in GUE's format."""
    for split, rows in (("train", 192), ("dev", 40), ("test", 80)):
        write_csv(tmp_path / "motif" / f"{split}.csv", motif_rows(rows, len(split) + rows))
    return tmp_path


# The tokenizer


def test_letters_become_hyena_dna_s_numbers_and_letters_again():
    tokenizer = dna_tokenizer()
    ids = tokenizer("ACGTN").input_ids
    assert ids == [7, 8, 9, 10, 11]
    assert tokenizer.decode(ids) == "ACGTN"
    assert tokenizer("acgtn").input_ids == ids
    assert tokenizer("AXC -\nG").input_ids == [7, 6, 8, 6, 6, 6, 9]
    assert len(tokenizer) == 12
    assert tokenizer("ACGTNACG", truncation=True, max_length=3).input_ids == [7, 8, 9]
    assert dna_tokenizer(max_length=5).model_max_length == 5


def test_rows_are_padded_on_the_left():
    rows = dna_tokenizer()(["ACG", "T", "GGNNA"], padding=True)
    assert rows.input_ids == [[4, 4, 7, 8, 9], [4, 4, 4, 4, 10], [9, 9, 11, 11, 7]]
    assert rows.attention_mask == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1] * 5]


def test_a_saved_classifier_and_its_tokenizer_load_by_the_auto_classes(tmp_path, small):
    tokenizer, model = dna_tokenizer(), build("mag", classes=3, seed=0).eval()
    rows = ["acgtnn", "ACG"]
    before = model(**tokenizer(rows, padding=True, return_tensors="pt")).logits
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert loaded(rows).input_ids == tokenizer(rows).input_ids
    assert loaded.decode(loaded("aCGt").input_ids) == "ACGT"
    inputs = loaded(rows, padding=True, return_tensors="pt")
    assert inputs.attention_mask.tolist() == [[1] * 6, [0, 0, 0, 1, 1, 1]]
    assert again.config.classifier_pooling == "mean"
    assert torch.equal(again(**inputs).logits, before)


# The models


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_left_padding_gives_the_logits_of_no_padding(name, small):
    model = build(name, classes=3, seed=0).double().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    ids = torch.randint(7, 12, (2, 19), generator=torch.Generator().manual_seed(2))
    padded = torch.cat((torch.full((2, 5), dna_tokenizer().pad_token_id), ids), dim=1)
    logits = model(ids).logits
    assert (model(padded, attention_mask=(padded != 4).long()).logits - logits).abs().max() < 1e-6
    assert (model(ids[:, 1:]).logits - logits).abs().min() > 1e-6, "every letter counts"


@pytest.mark.parametrize("name", MODELS)
def test_all_models_have_the_same_number_of_parameters(name):
    model = build(name, classes=2, seed=0)
    assert abs(parameters(model) / dna_models.PARAMETERS - 1) < 0.02
    again = build(name, classes=2, seed=0)
    assert all(map(torch.equal, model.parameters(), again.parameters())), "the seed decides the start"


@pytest.mark.parametrize("name", ["lmm", "mag", "llama", "cnn"])
def test_a_motif_is_learned(name, motifs, small, tmp_path):
    run = a_run(model=name, epochs=8, lr=1e-2)
    dna_training.perform(run, tmp_path / "out", motifs, longest=30, quiet=True)
    record = json.loads((tmp_path / "out" / f"{run.name}.json").read_text())
    assert record["mcc"] > 0.5
    assert record["accuracy"] > record["commonest"] + 0.2
    assert ("mcc_off" in record) == (name in ("lmm", "mag"))
    assert len(record["curve"]) == 8
    chosen = record["curve"][record["chosen_epoch"] - 1]
    assert chosen["mcc"] == record["dev_mcc"] == max(one["mcc"] for one in record["curve"])


def a_run(**changes) -> dna_training.Run:
    settings = dict(task="motif", model="cnn", lr=3e-3, seed=0, fold=None, folds=5, epochs=2, batch=16)
    settings |= dict(weight_decay=0.1, rows=None, evaluated=None)
    return dna_training.Run(**{**settings, **changes})


def test_the_test_split_is_read_and_decides_nothing(motifs, small, tmp_path):
    """With all its labels turned, the training is the same, and the score has the other sign."""
    out, run = tmp_path / "out", a_run(model="cnn", epochs=3)
    found = []
    for turned in (False, True):
        if turned:
            rows = [(sequence, 1 - label) for sequence, label in motif_rows(80, 4 + 80)]
            write_csv(motifs / "motif" / "test.csv", rows)
        dna_training.perform(run, out, motifs, longest=30, quiet=True)
        found.append(json.loads((out / f"{run.name}.json").read_text()))
    curves = [[(one["loss"], one["mcc"]) for one in record["curve"]] for record in found]
    assert curves[0] == curves[1]
    assert found[0]["mcc"] == pytest.approx(-found[1]["mcc"])
    assert found[0]["mcc"] != 0


def test_batches_hold_every_row_once_and_rows_of_equal_length_have_no_mask():
    examples = read_like(motif_rows(37, seed=3))
    data = dna_training.Encoded.of(examples)
    order = list(dna_training.batches(data, 5, torch.Generator().manual_seed(0)))
    assert sorted(i for rows in order for i in rows) == list(range(37))
    assert order != list(dna_training.batches(data, 5, torch.Generator().manual_seed(1)))
    ids, mask, labels = data.batch([0, 1, 2, 3])
    texts = [row.replace("[PAD]", "") for row in dna_tokenizer().batch_decode(ids)]
    assert texts == examples.sequences[:4]
    assert labels.tolist() == examples.labels[:4]
    assert mask.sum(1).tolist() == [len(text) for text in texts]
    alike = [i for i, text in enumerate(examples.sequences) if len(text) == 18]
    assert data.batch(alike)[1] is None


def read_like(rows):
    from titans_hf.dna.data import Examples

    return Examples([sequence for sequence, _ in rows], [label for _, label in rows])


# The data


def test_gue_genomic_benchmarks_and_csv_files_are_read_alike(tmp_path):
    splits = {"train": [("acgt", 0), ("CCN", 1), ("GG", 0)], "dev": [("AAT", 1)], "test": [("TTTT", 0), ("C", 1)]}
    for split, rows in splits.items():
        write_csv(tmp_path / "gue" / f"{split}.csv", rows)
        write_csv(tmp_path / "benchmark" / f"{split}.csv", rows, text="seq")
        for number, (sequence, label) in enumerate(rows):
            folder = tmp_path / "folders" / split / ("negative", "positive")[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(sequence + "\n")
    tasks = [read_task(tmp_path / name) for name in ("gue", "benchmark", "folders")]
    assert tasks[0] == tasks[1]
    assert tasks[0].train.sequences == ["ACGT", "CCN", "GG"]
    assert tasks[0].classes == 2
    for split, rows in splits.items():
        read = getattr(tasks[2], split)
        assert sorted(zip(read.sequences, read.labels)) == sorted((text.upper(), label) for text, label in rows)


def test_where_there_is_no_dev_a_tenth_of_train_is_kept(tmp_path):
    rows = motif_rows(60, seed=5)
    for split in ("train", "test"):
        write_csv(tmp_path / f"{split}.csv", [(f"{text}{'ACGT'[i % 4]}", y) for i, (text, y) in enumerate(rows)])
    task = read_task(tmp_path)
    assert (len(task.train), len(task.dev), len(task.test)) == (54, 6, 60)
    assert sorted(task.train.sequences + task.dev.sequences) == sorted(task.test.sequences)
    assert set(task.dev.labels) == {0, 1}


def test_folds_are_stratified_and_disjoint_and_cover_every_row(tmp_path):
    labels = [0] * 23 + [1] * 47 + [2] * 11
    parts = stratified(labels, 5, seed=0)
    assert sorted(i for part in parts for i in part) == list(range(81))
    for label, rows in ((0, 23), (1, 47), (2, 11)):
        assert {sum(labels[i] == label for i in part) for part in parts} <= {rows // 5, rows // 5 + 1}
    assert stratified(labels, 5, seed=1) != parts

    texts = ["".join("ACGT"[i // 4**k % 4] for k in range(4)) for i in range(81)]  # all different
    write_csv(tmp_path / "one.csv", list(zip(texts, labels)))
    tasks = [read_task(tmp_path / "one.csv", fold=fold, folds=3) for fold in range(3)]
    assert sorted(text for task in tasks for text in task.test.sequences) == sorted(texts)
    for task in tasks:
        every = task.train.sequences + task.dev.sequences + task.test.sequences
        assert sorted(every) == sorted(texts), "no row is in two splits"
        assert {*task.dev.labels} == {*task.test.labels} == {0, 1, 2}


GOOD = [("ACGT", 0), ("GGCC", 1)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train": [("ACGT", 0), ("ACXT", 1)]}, r"train.csv, row 2: 'X' is none of the letters A, C, G, T, N"),
        ({"dev": [("ACGT", 0), ("  ", 1)]}, r"dev.csv, row 2: the sequence is empty"),
        ({"train": [("ACGT", "0.5"), ("A", 1)]}, r"train.csv, row 1: `label` must be a whole number from 0, got '0.5'"),
        ({"test": [("ACGT", "")]}, r"test.csv, row 1: `label` must be a whole number"),
        (
            {"train": [("ACGT", 0), ("ACGTACGTA", 1)]},
            r"row 2: the sequence has 9 letters, more than 8: raise the limit",
        ),
        ({"train": [("ACGT", 0), ("A", 2)]}, r"no row of `train` has class 1"),
        ({"train": [("ACGT", 0), ("A", 0)]}, r"no row of `train` has class 1"),
        ({"test": [("ACGT", 0), ("A", 3)]}, r"`test` has class 3, which no row of `train` has"),
        ({"test": None}, r"has no split `test`: it needs test.csv, or test/ with a folder a class"),
        ({"train": None}, r"has no split `train`"),
        ({"train": []}, r"train.csv has no sequences"),
    ],
)
def test_bad_rows_and_splits_are_refused_by_name(changes, message, tmp_path):
    for split, rows in {"train": GOOD, "dev": GOOD, "test": GOOD, **changes}.items():
        if rows is not None:
            write_csv(tmp_path / f"{split}.csv", rows)
    with pytest.raises(ValueError, match=message):
        read_task(tmp_path, longest=8)


def test_files_that_are_no_task_are_refused_by_name(tmp_path):
    write_csv(tmp_path / "other.csv", GOOD, text="dna")
    with pytest.raises(ValueError, match="needs the columns `sequence`"):
        read_examples(tmp_path / "other.csv")
    write_csv(tmp_path / "one.csv", GOOD)
    for fold in (None, 5):
        with pytest.raises(ValueError, match="choose `fold` from 0 to 4"):
            read_task(tmp_path / "one.csv", fold=fold, folds=5)
    for split, names in (("train", "ab"), ("test", "ac")):
        for name in names:
            (tmp_path / "folders" / split / name).mkdir(parents=True)
            (tmp_path / "folders" / split / name / "0.txt").write_text("ACG")
    with pytest.raises(ValueError, match="has the class 'c', which the training split has not"):
        read_task(tmp_path / "folders")
    with pytest.raises(ValueError, match="folds are for one CSV file"):
        read_task(tmp_path / "folders", fold=1)


@pytest.mark.skipif(not REAL.is_dir(), reason="the tasks' own files are not in ../shared/data/dna")
def test_the_real_files_are_read_to_their_last_row():
    task = read_task(REAL / "GUE" / "mouse" / "3")
    assert (len(task.train), len(task.dev), len(task.test), task.classes) == (1904, 239, 239, 2)
    promoters = read_examples(REAL / "human_nontata_promoters.test.csv")
    assert len(promoters) == 9034
    assert {len(sequence) for sequence in promoters.sequences} == {251}


# The scores


def test_mcc_is_that_of_a_table_computed_by_hand():
    """4 true positives, 1 false positive, 2 false negatives, 3 true negatives: (4*3 - 1*2) / sqrt(5*6*4*5)."""
    predicted = [1] * 4 + [1] + [0] * 2 + [0] * 3
    wanted = [1] * 4 + [0] + [1] * 2 + [0] * 3
    assert mcc(predicted, wanted) == pytest.approx(10 / 600**0.5, abs=1e-12)
    assert accuracy(predicted, wanted) == 0.7
    assert mcc(wanted, wanted) == pytest.approx(1)
    assert mcc([1 - x for x in wanted], wanted) == pytest.approx(-1)
    assert mcc([1] * 10, wanted) == mcc(predicted, [0] * 10) == 0


def test_mcc_of_several_classes_is_the_correlation_of_their_indicators():
    generator = torch.Generator().manual_seed(0)
    predicted, wanted = (torch.randint(3, (31,), generator=generator) for _ in range(2))
    one_hot = [torch.nn.functional.one_hot(x, 3).double() for x in (predicted, wanted)]
    x, y = (hot - hot.mean(0) for hot in one_hot)
    expected = (x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt()
    assert mcc(predicted.tolist(), wanted.tolist()) == pytest.approx(expected.item(), abs=1e-12)


# The study


def arguments(motifs: Path, *more) -> list[str]:
    chosen = ["--models", "cnn,llama", "--lr", "1e-4,1e-2", "--seeds", "0,1", "--epochs", 2, "--batch", 16, *more]
    return [*map(str, ("--data", motifs, "--tasks", "motif", "--out", motifs / "out", *chosen))]


def test_each_model_is_tuned_on_the_first_seed_and_a_done_run_is_not_repeated(motifs, small, monkeypatch, capsys):
    rows = dna.main(arguments(motifs))
    assert [(line["model"], line["runs"]) for line in rows] == [("cnn", 2), ("llama", 2)]
    files = sorted((motifs / "out").glob("*.json"))
    assert len(files) == 6  # per model two rates on seed 0, and the better one on seed 1
    records = [json.loads(file.read_text()) for file in files]
    for line in rows:
        tried = [one for one in records if one["model"] == line["model"] and one["seed"] == 0]
        assert line["lr"] == max(tried, key=lambda one: one["dev_mcc"])["lr"]

    monkeypatch.setattr(dna, "perform", lambda *args, **options: pytest.fail("a run was repeated"))
    assert dna.main(arguments(motifs)) == rows
    printed = capsys.readouterr().out
    assert "MCC" in printed
    assert "±" in printed


def test_another_setting_is_another_run():
    names = {a_run(**change).name for change in ({}, {"epochs": 3}, {"rows": 7}, {"fold": 1}, {"seed": 1}, {"lr": 0.1})}
    assert len(names) == 6


def test_rows_that_leave_out_a_class_are_refused_before_anything_is_trained(motifs):
    with pytest.raises(ValueError, match="no row of `train` has class"):
        dna.main(arguments(motifs, "--rows", 1))
    assert not (motifs / "out").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--models", "gpt"], "--models: there is no 'gpt'"),
        (["--tasks", "elsewhere"], "elsewhere is not there"),
        (["--tasks", "table4"], "human_enhancers_cohn is not there"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--folds", "1"], "--folds must be at least 2"),
    ],
)
def test_the_command_line_refuses_what_cannot_run(more, message, motifs, capsys):
    with pytest.raises(SystemExit):
        dna.main(arguments(motifs, *more))
    assert message in capsys.readouterr().err
    assert not (motifs / "out").exists()
