"""Every script runs, in a reduced form, and leaves the record it promises."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from titans_hf.bench.stream import problems

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script as the main program of this process, which spares it the imports, and returns what it printed."""
    monkeypatch.setenv("COLUMNS", "400")  # no row of a table is wrapped
    threads = torch.get_num_threads()

    def run(script: str, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def test_the_tour_takes_every_step_and_tells_how_to_repeat_it(run, tmp_path):
    out = tmp_path / "demo"
    printed = run("demo.py", "--steps", 6, "--out", out)
    made = ("model.safetensors", "loss.png", "facts.txt", "facts.safetensors", "surprise.png", "surprise.html")
    assert all((out / name).stat().st_size for name in made)
    for figure in ("perplexity", "AutoModelForCausalLM", "% of 8 facts", "nothing known", "bits per byte"):
        assert figure in printed
    for step in ("train", "load", "generate", "remember", "surprise"):
        assert f"--only {step}" in printed
    assert "lm_eval --model hf" in printed
    assert len(json.loads((out / "tour.json").read_text())["steps"]) == 6


def test_recall_writes_its_curve_and_accuracies(run, tmp_path):
    run("studies/recall.py", "--steps", 2, "--batch", 2, "--quiet", "--record", tmp_path / "recall")
    record = json.loads((tmp_path / "recall.json").read_text())
    assert [run["memory"] for run in record["runs"]] == ["written", "read only"]
    assert (tmp_path / "recall.png").stat().st_size > 10_000


def test_dna_tells_the_models_scores_on_splits_and_on_folds(run, tmp_path):
    rows = "".join(f"{'ACGT'[i % 4] * 9}{'TTG' if i % 2 else 'CCA'},{i % 2}\n" for i in range(24))
    (tmp_path / "gue").mkdir()
    for name in ("gue/train", "gue/test", "folds"):
        (tmp_path / f"{name}.csv").write_text("sequence,label\n" + rows)
    tasks = ["--data", tmp_path, "--tasks", "gue", "folds.csv", "--models", "lmm,cnn", "--quick"]
    printed = run("studies/dna.py", *tasks, "--out", tmp_path / "runs", "--record", tmp_path / "dna")
    record = json.loads((tmp_path / "dna.json").read_text())
    assert [(line["task"], line["model"], line["runs"]) for line in record["table"]] == [
        ("gue", "lmm", 1),
        ("gue", "cnn", 1),
        ("folds.csv", "lmm", 2),
        ("folds.csv", "cnn", 2),
    ]
    assert len(record["runs"]) == 6
    assert [point["model"] for point in record["grid"]] == ["lmm", "cnn"] * 2
    assert str(record["table"][0]["MCC"]) in printed
    assert (tmp_path / "dna.png").stat().st_size > 10_000


def test_stability_reports_every_case(run, tmp_path):
    run("studies/stability.py", "--tokens", 500, "--variants", "mac", "lmm", "--record", tmp_path / "stability")
    record = json.loads((tmp_path / "stability.json").read_text())
    assert len(record["runs"]) == 6
    assert all(run["finite"] for run in record["runs"])


def test_series_compares_forecasters_of_a_file(run, tmp_path):
    lines = [f"2016-07-{day:02} {hour:02}:00:00,{hour + day / 9}" for day in range(1, 21) for hour in range(24)]
    (tmp_path / "hours.csv").write_text("\n".join(["date,load", *lines]) + "\n")
    sizes = ["--look-back", 24, "--horizons", 3, "--epochs", 1, "--lr", 1e-3, "--out", tmp_path / "runs"]
    printed = run(
        "studies/series.py", tmp_path / "hours.csv", "--models", "titans", "dlinear", *sizes, "--record", tmp_path / "s"
    )
    assert "| hours | 3 |" in printed
    table = json.loads((tmp_path / "s.json").read_text())["table"]
    assert [line["model"] for line in table] == ["titans", "dlinear"]
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_length_benchmark_shows_a_constant_cache(run, tmp_path):
    arguments = ["--tokens", 1500, "--steps", 2, "--repeats", 1, "--variants", "mal", "--record", tmp_path / "length"]
    run("bench/length.py", *arguments)
    rows = json.loads((tmp_path / "length.json").read_text())["rows"]
    assert [row["tokens_read"] for row in rows] == [1000, 1500]
    assert len({row["cache_bytes"] for row in rows}) == 1
    assert (tmp_path / "length.csv").read_text().count("\n") == 3


PROGRAMS = sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.py"))


@pytest.mark.parametrize("script", PROGRAMS)
def test_every_script_explains_itself(run, script, capsys):
    with pytest.raises(SystemExit) as ended:
        run(script, "--help")
    assert not ended.value.code
    assert "usage" in capsys.readouterr().out


def test_the_speed_benchmark_times_the_layer_and_its_bound(run, tmp_path):
    sizes = ["--tokens", 128, "--expansions", 1, "--heads", 2, "--repeats", 1, "--threads", 1]
    printed = run("bench/speed.py", "--sections", "layer", *sizes, "--record", tmp_path / "speed")
    runs = json.loads((tmp_path / "speed.json").read_text())["runs"]
    measured = {(run["measured"], run["implementation"]) for run in runs}
    assert measured >= {("forward", "titans-hf"), ("forward", "large products"), ("peak memory", "titans-hf")}
    assert all(run.get("milliseconds", run.get("mebibytes")) > 0 for run in runs)
    assert "times as long as large products" in printed
    assert (tmp_path / "speed.csv").exists()
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_the_speed_benchmark_times_models_of_equal_parameters_and_of_equal_width(run, tmp_path):
    sections = ["--sections", "training", "prefill", "decode", "--repeats", 1, "--threads", 1]
    sizes = ["--width", 64, "--vocabulary", 128, "--model-tokens", 100]
    decoding = ["--contexts", 64, 128, 200, "--batches", 1, 2, "--steps", 2]
    run("bench/speed.py", *sections, *sizes, *decoding, "--record", tmp_path / "speed")
    record = json.loads((tmp_path / "speed.json").read_text())
    runs = record["runs"]
    ours = {f"titans-hf {variant}" for variant in ("mac", "mag", "mal", "lmm")}
    for section in ("training", "prefill"):
        models = {run["implementation"]: run["parameters"] for run in runs if run["section"] == section}
        assert set(models) >= ours | {"Mamba2", "Qwen3-Next", "Llama"}
        assert max(models.values()) < 1.1 * min(models.values())
    decoded = [run for run in runs if run["section"] == "decode"]
    places = {(run["implementation"], run["batch"], run["context"]) for run in decoded}
    assert places >= {(name, batch, context) for name in ours for batch in (1, 2) for context in (64, 128, 200)}
    assert ("Mamba2", 2, 200) in places  # its state stands for any context
    assert all(run["tokens_per_second"] > 0 for run in runs)
    targets = {line["target"]: line for line in record["targets"]}
    assert targets["decode: largest cache over the smallest"]["reached"]
    assert (tmp_path / "speed-models.png").stat().st_size > 10_000
    assert (tmp_path / "speed-decode.png").stat().st_size > 10_000


def test_a_long_stream_stays_finite_and_flat(run, tmp_path):
    sizes = ["--variants", "mac", "--tokens", 4500, "--mark", 1000, "--piece", 300]
    run("bench/stream.py", *sizes, "--record", tmp_path / "stream")
    record = json.loads((tmp_path / "stream.json").read_text())
    assert record["problems"] == []
    assert [row["tokens_read"] for row in record["rows"]] == [1000, 2000, 3000, 4000, 4500]
    assert all(row["finite"] and row["tokens_per_second"] > 0 for row in record["rows"])
    assert len({row["cache_bytes"] for row in record["rows"]}) == 1
    assert (tmp_path / "stream.csv").read_text().count("\n") == 6
    assert (tmp_path / "stream.png").stat().st_size > 10_000


def test_a_stream_that_grows_or_breaks_is_noticed():
    """A check that could not fail would be none."""
    good = dict(variant="mac", tokens_read=100, resident_mebibytes=500.0, cache_bytes=7, finite=True)
    changes = ({}, dict(resident_mebibytes=511.0), dict(cache_bytes=8), dict(finite=False))
    assert [len(problems([good, {**good, **change}], 0.02)) for change in changes] == [0, 1, 1, 1]
