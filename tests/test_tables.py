"""The paper's tables are kept as they stand, our rows come beside them, and records say what they must."""

import copy
import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest
from typer.testing import CliRunner

from titans_hf.cli.app import app
from titans_hf.evals import records as eval_records
from titans_hf.evals.paper_tables import NUMBERS, paper_table
from titans_hf.evals.records import Record, Versions, check_record, read_record, write_record
from titans_hf.evals.tables import highlighted, markdown, our_rows, to_csv
from titans_hf.records import provenance as provenance_module
from titans_hf.records.provenance import PACKAGES, own_commit, provenance

TABLE = paper_table(1)
ROWS = [(group.split("M")[0], row) for group, rows in TABLE.groups.items() for row in rows]


def column(value: float | None, stderr: float | None = 0.5, unit: str = "%") -> dict:
    return {"value": value, "stderr": stderr, "unit": unit, "task": "piqa", "metric": "acc"}


def make_record(name: str = "runs/a", variant: str = "mac", suite: str = "table1", **metrics: dict) -> dict:
    """A record as `titans eval` writes it."""
    data = {"source": "files", "dataset": "baber/piqa", "task_version": 1.0, "documents": 7, "total": 1838}
    return {
        "format": "titans evaluation",
        "version": 1,
        "suite": suite,
        **provenance(command=f"titans eval {name}"),
        "seeds": {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234},
        "seconds": 3.5,
        "model": {"name": name, "variant": variant, "parameters": 340_123_456, "dtype": "bfloat16", "memory": "on"},
        "settings": {"limit": 7, "batch_size": 8, "max_length": 2**21, "num_fewshot": 0, "bootstrap_iters": 1000},
        "data": {"piqa": {**data, "files": {"piqa/valid.jsonl": "0" * 64}}},
        "metrics": metrics or {"piqa_acc": column(61.25)},
    }


def table1_metrics() -> dict:
    metrics = {held.key: column(30.0 + i) for i, held in enumerate(TABLE.columns) if held.task}
    return {**metrics, "wikitext_ppl": column(26.5, None, "ppl"), "lambada_ppl": column(29.5, 0.25, "ppl")}


def run(*arguments, code: int = 0):
    done = CliRunner().invoke(app, ["table", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_the_average_is_that_of_the_eight_accuracies_but_where_the_source_note_says_otherwise():
    found = set()
    for size, row in ROWS:
        values = [row.values[key] for key in TABLE.column("average").mean]
        mean, printed = sum(values) / 8, row.values["average"]
        if abs(mean - printed) > 0.005 + 1e-9:
            found.add(f"{size}M, {row.model}: printed {printed:.2f}, the mean is {mean + 1e-9:.2f}")
    noted = {note.split(" (Table")[0] for note in TABLE.source["does_not_add_up"]}
    assert found == noted
    assert len(ROWS) - len(found) == 34


def test_table_5_follows_from_tables_1_and_2():
    """Its perplexity is a mean of two columns at 400M, its accuracy an average, its long context a mean of Table 2."""
    ablations = {row.model: row.values for row in paper_table(5).groups[""]}
    at_400m = {row.model: row.values for row in TABLE.groups["400M params / 15B tokens"]}
    needles = {row.model: row.values for row in paper_table(2).groups[""]}
    for short, name in (("LMM", "LMM"), ("+Attn (MAC)", "MAC"), ("+Attn (MAG)", "MAG"), ("+Attn (MAL)", "MAL")):
        both = {**at_400m[f"Titans ({name})"], **needles[f"Titans ({name})"]}
        follows = paper_table(5).with_means(both)
        for key, printed in ablations[short].items():
            assert follows[key] == pytest.approx(printed, abs=0.005 + 1e-9)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_table_names_its_source_and_its_rows_are_whole(number):
    table = paper_table(number)
    assert table.number == number
    assert f"arXiv 2501.00663v1, Table {number}" == table.source["paper"]
    assert {"read", "confirmed", "does_not_add_up", "notes"} < set(table.source)
    for rows in table.groups.values():
        for row in rows:
            assert list(row.values) == [held.key for held in table.columns]
            assert row.kind in ("simple", "hybrid")
            assert all(0 <= value <= 100 for value in row.values.values())


def test_the_tables_have_all_their_rows():
    assert [len(rows) for rows in TABLE.groups.values()] == [11, 15, 13]
    assert [len(paper_table(number).groups[""]) for number in (2, 5)] == [7, 9]
    assert len(paper_table(2).columns) == 12


def test_bold_is_the_best_of_the_simple_and_of_the_hybrid_models():
    rows = TABLE.groups["400M params / 15B tokens"]
    names = {(rows[i].model, key) for i, key in highlighted(rows, TABLE)}
    assert {model for model, key in names if key == "wikitext_ppl"} == {"Titans (LMM)", "Titans (MAG)"}
    assert {model for model, key in names if key == "boolq_acc"} == {"Transformer++", "Titans (MAC)"}
    assert {model for model, key in names if key == "piqa_acc"} == {"GLA", "Gated DeltaNet", "Titans (MAG)"}  # a tie
    assert not highlighted(paper_table(5).groups[""], paper_table(5))


def test_markdown_has_the_papers_rows_and_ours_beneath():
    text = markdown(TABLE, [make_record("runs/a|b", **table1_metrics())])
    assert text.startswith("### Table 1")
    body = [line for line in text.split("\n") if line.startswith("|")]
    assert len(body) == 2 + 3 + len(ROWS) + 2 + 1
    assert all(line.replace(r"\|", "").count("|") == len(TABLE.columns) + 2 for line in body)
    assert r"| Titans (MAG)\* | **18.61** | **19.86** | **40.98** |" in text
    assert "| Titans (LMM) | **20.04** |" in text
    ours = body[-2].split(" | ")
    assert ours[0] == r"| runs/a\|b (MAC, 340M)\*"
    assert ours[1:4] == ["26.50", "29.50 ± 0.25", "32.00 ± 0.50"]
    assert ours[-1] == f"{sum(range(32, 40)) / 8:.2f} ± {0.5 / math.sqrt(8):.2f} |"
    assert "the first 7 documents of each task, from files" in text
    assert "| runs/a (llama, 340M) |" in markdown(TABLE, [make_record(variant="llama", **table1_metrics())])
    assert "760M, TTT: printed 47.32, the mean is 49.37" in text
    assert body[-1] == "| chance | – | – | – | 50.00 | 25.00 | 50.00 | 25.00 | 25.00 | 33.33 | 62.20 | – |"
    assert "for BoolQ it is one answer to every question" in text
    assert "chance" not in markdown(TABLE, []).lower()  # the paper prints none
    assert "chance" not in markdown(paper_table(5), [make_record(average=column(40.0))]).lower()


def test_one_of_a_kind_is_not_called_the_best():
    lonely = our_rows([make_record(**table1_metrics())], TABLE)
    assert not highlighted(lonely, TABLE)
    better = {**table1_metrics(), "piqa_acc": column(99.0)}
    both = our_rows([make_record(**table1_metrics()), make_record("runs/b", **better)], TABLE)
    assert highlighted(both, TABLE) == {(1, "piqa_acc"), (1, "average")}  # where all are equal none is the best


def test_records_of_one_model_make_one_row():
    needles = {held.key: column(90.0) for held in paper_table(2).columns}
    records = [make_record(**table1_metrics(), average=column(35.5)), make_record(suite="table2", **needles)]
    (row,) = our_rows(records, paper_table(5))
    assert row.values == {"ppl": 28.0, "reasoning": 35.5, "long_context": pytest.approx(90.0)}
    assert set(row.errors) == {"reasoning", "long_context"}  # WikiText has no standard error, so the mean has none
    assert len(row.notes) == 2
    assert our_rows(records[:1], paper_table(2)) == []


@pytest.mark.parametrize(("number", "key"), [(1, "average"), (5, "reasoning")])
def test_a_task_that_was_measured_again_counts_in_the_average(number, key):
    whole = make_record(**table1_metrics(), average=column(35.5, 0.1))
    (row,) = our_rows([whole, make_record(piqa_acc=column(33.0 + 8.0, 1.5))], paper_table(number))
    assert row.values[key] == pytest.approx(35.5 + 8 / 8)
    assert row.errors[key] == pytest.approx(math.sqrt(7 * 0.5**2 + 1.5**2) / 8)


def test_a_part_of_a_suite_has_no_average_and_what_diverged_is_left_out():
    (row,) = our_rows([make_record(piqa_acc=column(61.25), boolq_acc=column(None))], TABLE)
    assert row.values == {"piqa_acc": 61.25}
    assert "61.25 ± 0.50 | – |" in markdown(TABLE, [make_record(piqa_acc=column(61.25))])


def test_csv_reads_back_as_it_was():
    rows = list(csv.DictReader(io.StringIO(to_csv(TABLE, [make_record(variant="lmm", **table1_metrics())]))))
    assert len(rows) == len(ROWS) + 1
    for read, (_, row) in zip(rows, ROWS):
        assert read["source"] == "paper"
        assert {key: float(read[key]) for key in row.values} == row.values
    assert (rows[-1]["source"], rows[-1]["kind"], rows[-1]["lambada_ppl_stderr"]) == ("titans-hf", "simple", "0.25")
    assert rows[-1]["wikitext_ppl_stderr"] == ""


def test_the_command_writes_each_form(tmp_path):
    write_record(tmp_path / "a.json", make_record(**table1_metrics()))
    run(tmp_path / "a.json", "--out", tmp_path / "t.md")
    assert (tmp_path / "t.md").read_text(encoding="utf-8") == run(tmp_path / "a.json").stdout
    run(tmp_path / "a.json", "--format", "csv", "--out", tmp_path / "t.txt")
    assert (tmp_path / "t.txt").read_text(encoding="utf-8").startswith("source,group,model")
    run(tmp_path / "a.json", "--table", 5, "--out", tmp_path / "t.PNG")
    (tmp_path / "t.PNG").rename(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_the_commands_errors_are_one_line(tmp_path):
    (tmp_path / "b.json").write_text('{"format": "other"}')
    cases = (
        (["--format", "png"], 2, "--out FILE.png"),
        (["--out", tmp_path / "table.svg"], 2, "ends in none of .md, .csv, .png: say --format"),
        (["--table", 3], 1, "one of 1, 2, 5"),
        ([tmp_path / "none.json"], 1, "No such file"),
        ([tmp_path / "b.json"], 1, "not the record of a `titans eval`"),
        (["--out", tmp_path / "no" / "t.md"], 1, "there is no folder"),
    )
    for arguments, code, message in cases:
        done = run(*arguments, code=code)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    write_record(tmp_path / "a.json", make_record())
    assert "has nothing for Table 2" in run(tmp_path / "a.json", "--table", 2).stderr


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = make_record()
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json") == record
    assert set(record) == set(Record.model_fields)
    assert set(record["versions"]) == {"titans_hf", *PACKAGES} == set(Versions.model_fields)
    assert all(name in eval_records.__doc__ for name in Record.model_fields)  # the schema is documented


def fields_of(schema, *path: str):
    """The path of every field that the schema names, `*` standing for any name."""
    if get_origin(schema) is dict:
        yield from fields_of(get_args(schema)[1], *path, "*")
    elif hasattr(schema, "model_fields"):
        for name, field in schema.model_fields.items():
            yield from fields_of(field.annotation, *path, name)
    else:
        yield path


@pytest.mark.parametrize("path", list(fields_of(Record)), ids=".".join)
def test_a_field_that_is_missing_or_wrong_is_named(path):
    record = make_record()
    check_record(record)
    inner = record
    names = []
    for name in path:
        names.append(next(iter(inner)) if name == "*" else name)
        inner, last = inner[names[-1]], inner
    last[names[-1]] = ["wrong"]
    where = "not the record|of version" if path[0] in ("format", "version") else ".".join(names).replace("/", ".")
    with pytest.raises(ValueError, match=where):
        check_record(record)
    del last[names[-1]]
    if path[-1] != "*":
        with pytest.raises(ValueError, match=where):
            check_record(record)


def test_figures_that_are_not_finite_become_null(tmp_path):
    write_record(tmp_path / "a.json", make_record(wikitext_ppl=column(math.inf, math.nan, "ppl")))
    assert "Infinity" not in (tmp_path / "a.json").read_text()
    assert read_record(tmp_path / "a.json")["metrics"]["wikitext_ppl"]["value"] is None


def test_a_write_that_fails_leaves_the_old_record(tmp_path, monkeypatch):
    write_record(tmp_path / "a.json", make_record())
    before = (tmp_path / "a.json").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_record(tmp_path / "a.json", make_record("runs/b"))
    broken = copy.deepcopy(make_record())
    del broken["seeds"]
    with pytest.raises(ValueError, match="`seeds` is missing"):
        write_record(tmp_path / "a.json", broken)
    assert (tmp_path / "a.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_commit_is_this_packages_or_none(tmp_path, monkeypatch):
    """A wheel inside a stranger's repository does not borrow its commit; files of ours that were changed are told."""

    def git(*arguments: str) -> str:
        told = ["-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(["git", *told], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(provenance_module, "__file__", str(tmp_path / "records" / "provenance.py"))
    assert own_commit() is None
    git("init")
    (tmp_path / "theirs.py").write_text("")
    git("add", ".")
    git("commit", "-m", "theirs")
    (tmp_path / "__init__.py").write_text("")
    assert own_commit() is None
    git("add", ".")
    git("commit", "-m", "ours")
    assert own_commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "__init__.py").write_text("changed")
    assert own_commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert own_commit() is None


def test_the_command_of_a_record_can_be_typed_again(monkeypatch):
    script = Path(__file__).parents[1] / "scripts" / "bench" / "speed.py"
    for argv, command in (
        ([str(script), "--record", "a b"], "python scripts/bench/speed.py --record 'a b'"),
        (["/somewhere/bin/titans", "eval", "runs/a"], "titans eval runs/a"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert provenance()["command"] == command
    assert provenance("cpu")["machine"] == provenance()["machine"] + ", cpu"


def test_a_record_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="a.json is not a record"):
        read_record(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({**make_record(), "version": 2}))
    with pytest.raises(ValueError, match="is of version 2; this titans-hf reads version 1"):
        read_record(tmp_path / "a.json")
