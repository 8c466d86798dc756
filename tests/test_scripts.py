"""Every script runs, in a reduced form, and leaves the record it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(script: str, *arguments) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo_trains_saves_loads_and_generates(tmp_path):
    printed = run("demo.py", "--variant", "mag", "--steps", 3, "--out", tmp_path / "demo")
    assert (tmp_path / "demo" / "model.safetensors").exists()
    assert "perplexity" in printed


def test_recall_writes_its_curve_and_accuracies(tmp_path):
    run("recall.py", "--steps", 2, "--batch", 2, "--quiet", "--record", tmp_path / "recall")
    record = json.loads((tmp_path / "recall.json").read_text())
    assert [run["memory"] for run in record["runs"]] == ["written", "read only"]
    assert (tmp_path / "recall.png").stat().st_size > 10_000


def test_stability_reports_every_case(tmp_path):
    run("stability.py", "--tokens", 500, "--variants", "mac", "lmm", "--record", tmp_path / "stability")
    record = json.loads((tmp_path / "stability.json").read_text())
    assert len(record["runs"]) == 6
    assert all(run["finite"] for run in record["runs"])


def test_length_benchmark_shows_a_constant_cache(tmp_path):
    arguments = ["--tokens", 1500, "--steps", 2, "--repeats", 1, "--variants", "mal", "--record", tmp_path / "length"]
    run("bench_length.py", *arguments)
    rows = json.loads((tmp_path / "length.json").read_text())["rows"]
    assert [row["tokens_read"] for row in rows] == [1000, 1500]
    assert len({row["cache_bytes"] for row in rows}) == 1
    assert (tmp_path / "length.csv").read_text().count("\n") == 3


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "records.py"))
def test_every_script_explains_itself(script):
    assert "usage" in run(script, "--help")


def test_the_speed_benchmark_times_the_layer_and_its_bound(tmp_path):
    run("bench_speed.py", "--tokens", 128, "--heads", 2, "--repeats", 1, "--threads", 1, "--record", tmp_path / "speed")
    runs = json.loads((tmp_path / "speed.json").read_text())["runs"]
    measured = {(run["measured"], run["implementation"]) for run in runs}
    assert measured >= {("forward", "titans-hf"), ("forward", "large products"), ("peak memory", "titans-hf")}
    assert all(run.get("milliseconds", run.get("mebibytes")) > 0 for run in runs)
    assert (tmp_path / "speed.csv").exists()
    assert (tmp_path / "speed.png").stat().st_size > 10_000
