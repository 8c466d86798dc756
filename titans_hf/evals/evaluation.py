"""A model on the paper's benchmarks: lm-eval runs them, and a record holds the results.

record = evaluate(model, tokenizer, data_dir="data/lm_eval")
record["metrics"]["average"]["value"]
"""

import math
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ..records.provenance import provenance
from .files import COUNTS, check_files, data_folder, digests, given_folder
from .paper_tables import Column, paper_table
from .records import FORMAT, VERSION, stderr_of_mean
from .suites import TASKS as LONG_TASKS
from .suites import check_texts, columns, length_name, read_lengths

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TASK_FOLDER = Path(__file__).parent / "lm_eval_tasks"  # what lm-eval calls an include_path
SUITES = {"table1": 1, "table2": 2, "babilong": None}  # and the tables of the paper that they fill
SHOTS = {"table1": 0, "table2": 0, "babilong": 2}  # examples before a question; BABILong brings its own
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # lm-eval's own
BOOTSTRAPS = 1000  # for the standard error of LAMBADA's perplexity; lm-eval's 100,000 take minutes
HOMES = {  # where lm-eval keeps tasks whose folders have other names
    "lambada_openai": "lambada",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "social_iqa": "siqa",
    "boolq": "super_glue/boolq",
    **dict.fromkeys(LONG_TASKS["table2"], "ruler"),
    **dict.fromkeys(LONG_TASKS["babilong"], "babilong"),
}


def suite_tasks(suite: str) -> tuple[str, ...]:
    return tuple(LONG_TASKS[suite]) if suite in LONG_TASKS else paper_table(SUITES[suite]).tasks


def choose_tasks(suite: str, asked: Sequence[str] | None = None) -> list[str]:
    """The tasks of a suite, or those of them that are asked for, in the suite's order."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}: it is one of {', '.join(SUITES)}")
    known = suite_tasks(suite)
    unknown = [task for task in asked or () if task not in known]
    if unknown:
        raise ValueError(f"{suite} has no task {unknown[0]!r}: choose from {', '.join(known)}")
    return [task for task in known if not asked or task in asked]


def check_data(suite: str, tasks: Sequence[str], data_dir: str | os.PathLike | None = None) -> Path | None:
    """The folder of a suite's documents, if it holds those of the tasks; None is the Hub."""
    folder = given_folder(data_dir) if suite in LONG_TASKS else data_folder(data_dir)
    if folder is not None:
        (check_texts if suite in LONG_TASKS else check_files)(tasks, folder)
    return folder


def task_manager(data_dir: str | os.PathLike | None = None, **metadata) -> "TaskManager":
    """lm-eval's manager, with our groups and their tasks; its thousands of other tasks are not indexed.

    The long-context tasks need the model's `tokenizer`: its folder, or the object.
    """
    from lm_eval import tasks as of_lm_eval

    own = Path(of_lm_eval.__file__).parent
    homes = [own / HOMES.get(task, task) for suite in SUITES for task in suite_tasks(suite)]
    moved = not all(home.is_dir() for home in homes)  # another lm-eval may keep them elsewhere
    paths = [] if moved else list(dict.fromkeys(homes))
    metadata = {**metadata, **({"data_dir": os.fspath(data_dir)} if data_dir else {})}
    return of_lm_eval.TaskManager(include_path=[*paths, TASK_FOLDER], include_defaults=moved, metadata=metadata)


def task_class(suite: str) -> type:
    if suite == "table2":
        from .needles import NeedleTask as found
    elif suite == "babilong":
        from .babilong import BabilongTask as found
    else:
        from .tasks import Table1Task as found
    return found


def load_tasks(tasks: Sequence[str], folder: Path | None, suite: str = "table1", **metadata) -> dict:
    """The tasks of a suite with their documents, ready for `lm_eval.evaluate`."""
    own = task_class(suite)
    some = {"group": f"some_of_titans_{suite}", "task": [{"task": task, "class": own} for task in tasks]}
    try:
        loaded = task_manager(folder, **metadata).load([some])
    except OSError as error:
        if folder is not None:
            raise
        raise OSError(f"{error} (no way to the Hub? --data-dir reads the documents from files)") from error
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", SHOTS[suite])
        task.set_fewshot_seed(SEEDS["fewshot"])
    return loaded


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    suite: str = "table1",
    tasks: Sequence[str] | None = None,
    data_dir: str | os.PathLike | None = None,
    lengths: str | Sequence[int] | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    memory: str = "on",
    name: str | None = None,
    command: str | None = None,
) -> dict:
    """Run a suite, and return its record (see `records`).

    Args:
        model: a Titans model, or another causal one as a baseline.
        tasks: some of the suite's; all of them if left out.
        data_dir: folder of the documents (see `files` and `texts`); left out, TITANS_EVAL_DATA in the
            environment, or the Hub.
        lengths: of the suites of long context, "2k,4k" or tokens; left out, 2k to 16k, and for babilong 0k to 16k.
        limit: score the first documents of each task only, at each length.
        memory: "on", or a control (see `model`): "off" or "reset". A baseline, which has none, takes "on".
        name, command: what the record says of the model and of the run.
    """
    from lm_eval.evaluator import evaluate as run

    chosen = choose_tasks(suite, tasks)
    folder, read = check_data(suite, chosen, data_dir), read_lengths(suite, lengths)
    sow()
    lm = open_lm(model, tokenizer, batch_size, memory)
    loaded = load_tasks(chosen, folder, suite, **({"tokenizer": tokenizer, "max_seq_lengths": read} if read else {}))
    first = limit * max(1, len(read)) if limit else None  # the lengths take turns
    origin, started = provenance(model.device, command), time.perf_counter()  # a long run may end on another commit
    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints to stdout in places
            results = run(lm, loaded, limit=first, bootstrap_iters=BOOTSTRAPS, log_samples=False)
    except OverflowError as error:
        raise ValueError(
            "a perplexity is larger than any float: the model has diverged, or has not been trained"
        ) from error
    seconds = time.perf_counter() - started
    return {
        "format": FORMAT,
        "version": VERSION,
        "suite": suite,
        **origin,
        "seeds": SEEDS,
        "seconds": round(seconds, 1),
        "model": describe(model, name, memory),
        "settings": {
            "limit": limit,
            "batch_size": batch_size,
            "max_length": lm.max_length,
            "num_fewshot": SHOTS[suite],
            "bootstrap_iters": BOOTSTRAPS,
            **({"lengths": [length_name(length) for length in read]} if read else {}),
            **({} if is_titans(model) else {"inputs_cut": lm.inputs_cut}),
        },
        "data": {task: describe_data(task, loaded["tasks"][task], results, folder) for task in chosen},
        "metrics": read_metrics(
            results["results"], columns(suite, chosen, read) if read else paper_table(SUITES[suite]).columns
        ),
    }


def open_lm(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int, memory: str = "on"
) -> "HFLM":
    """The model as an lm-eval model. A baseline reads up to its `max_position_embeddings`, as in lm-eval."""
    from .model import CheckedLM, TitansLM

    if is_titans(model):
        return TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, memory=memory)
    if memory != "on":
        raise ValueError(f"`memory` must be left out: {model.config.model_type!r} is a baseline without one")
    return CheckedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def is_titans(model: "PreTrainedModel") -> bool:
    return model.config.model_type == "titans"


def sow() -> None:
    """Seed every generator; zero-shot tasks use none, but the record lists the seeds."""
    import numpy
    import torch

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork this process with its model and threads
    random.seed(SEEDS["python"])
    numpy.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def describe(model: "PreTrainedModel", name: str | None, memory: str) -> dict:
    return {
        "name": name or model.config.name_or_path or "unnamed",
        "variant": model.config.variant if is_titans(model) else model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "memory": memory if is_titans(model) else "none",
    }


def describe_data(name: str, task, results: dict, folder: Path | None) -> dict:
    counts = results["n-samples"][name]
    if hasattr(task, "describe_source"):  # a long-context task, with one request per document
        counts = {**counts, "effective": len(task.instances)}
        return {**task.describe_source(), **_counted(task, counts)}
    if folder:
        counts = {**counts, "original": COUNTS[name]}
    return {
        "source": "files" if folder else "hub",
        "dataset": ", ".join(filter(None, (task.DATASET_PATH, task.DATASET_NAME))),
        **_counted(task, counts),
        "files": digests(name, folder) if folder else {},
    }


def _counted(task, counts: dict) -> dict:
    return {"task_version": task.VERSION, "documents": counts["effective"], "total": counts["original"]}


def read_metrics(results: dict, columns: Sequence[Column]) -> dict[str, dict]:
    """lm-eval's figures by column of the paper, in its units, and the columns that are means of them."""
    found: dict[str, dict] = {}
    for column in columns:
        if column.task in results:
            value = results[column.task][f"{column.metric},none"]
            error = results[column.task].get(f"{column.metric}_stderr,none")
            found[column.key] = metric(column, value, error if isinstance(error, float) else None)
        elif column.mean and all(key in found for key in column.mean):
            found[column.key] = mean_of(column, [found[key] for key in column.mean])
    return found


def metric(column: Column, value: float, error: float | None) -> dict:
    return {
        "value": column.scale * value if math.isfinite(value) else None,
        "stderr": None if error is None or not math.isfinite(error) else column.scale * error,
        "unit": column.unit,
        "task": column.task,
        "metric": column.metric,
    }


def mean_of(column: Column, parts: list[dict]) -> dict:
    values = [part["value"] for part in parts]
    known = all(value is not None for value in values)
    return {
        "value": sum(values) / len(values) if known else None,
        "stderr": stderr_of_mean([part["stderr"] for part in parts]),
        "unit": column.unit,
        "task": None,
        "metric": "mean",
    }
