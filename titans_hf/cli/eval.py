"""`titans eval` measures a model on the paper's benchmarks; `titans table` puts the records beside the paper's rows."""

import logging
import shlex
import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..evals.files import VARIABLE
from ..hub.loading import CommandError, Dtype, folder_name, load_to_measure, say
from .support import DeviceOption, DtypeOption, check_output


class Suite(str, Enum):
    table1, table2, babilong = "table1", "table2", "babilong"


class Memory(str, Enum):
    on, off, reset = "on", "off", "reset"


class Format(str, Enum):
    markdown, csv, png = "markdown", "csv", "png"


SUFFIXES = {".md": Format.markdown, ".csv": Format.csv, ".png": Format.png}


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="Folder of the model, or the Hub name of a downloaded one.")
    ],
    suite: Annotated[
        Suite, typer.Option("--suite", help="What to measure: the paper's Table 1 or 2, or BABILong.")
    ] = Suite.table1,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="PATH",
            envvar=VARIABLE,
            help="Read the documents from files: a folder with lm_eval/ (Table 1), text/books/ (Table 2, BABILong) and "
            "babi/en-10k/ (BABILong). Left out, from the Hub.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Score the first N documents of each task, at each length.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="2k,4k", help="In tokens, for Table 2 and BABILong; left out, up to 16k."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Inputs side by side; results differ by rounding.")
    ] = 8,
    memory: Annotated[
        Memory,
        typer.Option(
            "--memory",
            help="Controls: off never writes into it, reset restores its start at each segment of the model.",
        ),
    ] = Memory.on,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B", help="Some of the suite's tasks, by lm-eval's names.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What the record calls the model; left out, DIR.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The record; left out, MODEL-SUITE.json or -off.json, here."),
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Measure a model on the paper's benchmarks, with lm-eval's tasks and metrics.

    Table 1 is WikiText-2, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC, Social IQa and BoolQ, zero-shot, and the mean of
    the eight accuracies. Table 2 is RULER's needles in a haystack (S-NIAH), BABILong is questions about facts that are
    scattered over books; their samples are as long as --lengths says, in the model's tokens. No input is cut, and long
    ones are read in bounded memory. Writes a record: what was found, on what data, by which versions. DIR may also hold
    another causal model of transformers, as a baseline, whose record counts the inputs that had to be cut for it.

    \b
    titans eval runs/demo --limit 100
    titans eval runs/demo --data-dir data --tasks wikitext,piqa --out demo.json
    titans eval runs/demo --suite table2 --data-dir data --lengths 2k,4k --limit 20
    """
    for package in ("lm_eval", "datasets", *(("nltk", "wonderwords") if suite is Suite.table2 else ())):
        if find_spec(package) is None:
            raise CommandError(f"titans eval needs {package}: pip install 'titans-hf[eval]'")
    from ..evals.evaluation import check_data, choose_tasks
    from ..evals.suites import length_name, read_lengths

    chosen = choose_tasks(suite.value, split_names(tasks))
    folder = check_data(suite.value, chosen, data_dir)
    read = [length_name(length) for length in read_lengths(suite.value, lengths)]
    asked = None if out else {"name": name or model, "tasks": chosen, "limit": limit, "lengths": read}
    out = out or default_output(model, suite, memory)
    check_record_output(out, asked)
    loaded = load_to_measure(model, dtype, device)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from ..evals.evaluation import evaluate as run
    from ..evals.records import write_record
    from ..evals.tables import cut_inputs

    record = run(
        loaded.model,
        loaded.tokenizer,
        suite=suite.value,
        tasks=chosen,
        data_dir=folder,
        lengths=lengths,
        limit=limit,
        batch_size=batch_size,
        memory=memory.value,
        name=name or model,
        command=shlex.join(["titans", *sys.argv[1:]]),
    )
    write_record(out, record)
    show(record)
    if cut_inputs(record["settings"]):
        say(f"did not fit{cut_inputs(record['settings'])}")
    say(f"record: {out}")


def split_names(text: str | None) -> list[str] | None:
    return None if text is None else [name for name in text.replace(",", " ").split() if name]


def default_output(model: str, suite: Suite, memory: Memory) -> Path:
    control = "" if memory is Memory.on else f"-{memory.value}"
    return Path(f"{folder_name(Path(model))}-{suite.value}{control}.json")


def check_record_output(out: Path, asked: dict | None) -> None:
    """Refuse to overwrite a file that is not a record, or without --out the record of another measurement."""
    from ..evals.records import read_record

    check_output(out, memory=False)
    if not out.exists():
        return
    try:
        found = read_record(out)
    except ValueError as error:
        raise CommandError(f"{out} exists and is not a record: choose another name with --out") from error
    settings = found["settings"]
    known = {"name": found["model"]["name"], "tasks": list(found["data"]), "limit": settings["limit"]}
    known["lengths"] = settings.get("lengths", [])
    other = [name for name, value in known.items() if asked and asked[name] != value]
    if other:
        raise CommandError(f"{out} is the record of another {other[0]}: name this one with --out")


def show(record: dict) -> None:
    """The figures of a record, one per line; with several lengths, one task per line."""
    if "lengths" in record["settings"]:
        return show_lengths(record)
    from ..evals.evaluation import SUITES
    from ..evals.paper_tables import paper_table
    from ..evals.tables import figure, unit

    table = paper_table(SUITES[record["suite"]])
    typer.echo(f"{'':<42}{'stderr':>10}  documents")
    for column in table.columns:
        if column.key not in record["metrics"]:
            continue
        found, data = record["metrics"][column.key], record["data"].get(column.task)
        value, error = (
            "-" if found[name] is None else figure(found[name], table.decimals) for name in ("value", "stderr")
        )
        documents = f"{data['documents']:,} of {data['total']:,}" if data else ""
        name = f"{column.name} {unit(column)}"
        typer.echo(f"{name:<14}{column.task or '':<16}{value:>12}{error:>10}  {documents}".rstrip())


def show_lengths(record: dict) -> None:
    """Accuracies in percent and their standard errors, the tasks by the lengths."""
    lengths = record["settings"]["lengths"]
    typer.echo(f"{'accuracy, %':<16}" + "".join(f"{length:>14}" for length in lengths) + "  documents")
    for task, data in record["data"].items():
        own = [found for found in record["metrics"].values() if found["task"] == task]
        cells = (f"{found['value']:.1f}" + _plus_minus(found["stderr"]) for found in own)
        documents = f"{data['documents']:,} of {data['total']:,}, {data['source']}"
        typer.echo(f"{task:<16}" + "".join(f"{cell:>14}" for cell in cells) + f"  {documents}")


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.1f}"


def table(
    records: Annotated[
        list[Path] | None, typer.Argument(metavar="[RECORD]...", help="Records of `titans eval`.")
    ] = None,
    number: Annotated[int, typer.Option("--table", help="The paper's table: 1, 2 or 5.")] = 1,
    kind: Annotated[
        Format | None, typer.Option("--format", help="Left out, what --out ends in says it; else markdown.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Left out, it is printed (not a picture).")
    ] = None,
) -> None:
    """Put our records beside the paper's rows.

    Table 1: language modelling and common-sense reasoning. Table 2: needles in a haystack. Table 5: ablations, whose
    columns are means of the other two. Without a record, the paper's rows alone.

    \b
    titans table demo-table1.json --out table1.md
    titans table *.json --table 1 --format png --out table1.png
    """
    from ..evals.paper_tables import paper_table
    from ..evals.records import read_record
    from ..evals.tables import markdown, our_rows, to_csv
    from ..records.files import write_text

    if kind is None and out is not None and out.suffix.lower() not in SUFFIXES:
        raise typer.BadParameter(f"{out} ends in none of {', '.join(SUFFIXES)}: say --format", param_hint="--out")
    kind = kind or (SUFFIXES[out.suffix.lower()] if out else Format.markdown)
    if out is None and kind is Format.png:
        raise typer.BadParameter("a picture needs a file: pass --out FILE.png", param_hint="--out")
    if out is not None:
        check_output(out, memory=False)
    wanted, found = paper_table(number), [read_record(path) for path in records or []]
    for path, record in zip(records or [], found):
        if not our_rows([record], wanted):
            say(f"{path} has nothing for Table {number}: it is of the suite {record['suite']}")
    if kind is Format.png:
        from ..evals.table_plots import save_png

        save_png(out, wanted, found)
    else:
        text = markdown(wanted, found) if kind is Format.markdown else to_csv(wanted, found)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_text(out, text)
    if out is not None:
        say(f"saved: {out}")
