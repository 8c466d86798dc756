"""A model on the paper's benchmarks: lm-eval runs them, and a record keeps what it found.

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

from .eval_files import data_folder, digests
from .eval_records import FORMAT, VERSION, provenance, stderr_of_mean
from .paper_tables import Column, Table, paper_table

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

    from .modeling_titans import TitansForCausalLM

TASK_FOLDER = Path(__file__).parent / "lm_eval_tasks"  # what lm-eval calls an include_path
SUITES = {"table1": 1}  # and the tables of the paper that they fill
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # lm-eval's own
BOOTSTRAPS = 1000  # for the standard error of LAMBADA's perplexity; lm-eval's 100,000 take minutes
HOMES = {  # where lm-eval keeps tasks whose folders have other names
    "lambada_openai": "lambada",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "social_iqa": "siqa",
    "boolq": "super_glue/boolq",
}


def choose_tasks(suite: str, asked: Sequence[str] | None = None) -> list[str]:
    """The tasks of a suite, or those of them that are asked for, in the suite's order."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}: it is one of {', '.join(SUITES)}")
    known = paper_table(SUITES[suite]).tasks
    unknown = [task for task in asked or () if task not in known]
    if unknown:
        raise ValueError(f"{suite} has no task {unknown[0]!r}: choose from {', '.join(known)}")
    return [task for task in known if not asked or task in asked]


def task_manager(data_dir: str | os.PathLike | None = None) -> "TaskManager":
    """lm-eval's manager, with `titans_table1` and the tasks in it, and without a look at its thousands of others."""
    from lm_eval import tasks as of_lm_eval

    own = Path(of_lm_eval.__file__).parent
    homes = [own / HOMES.get(task, task) for task in paper_table(1).tasks]
    moved = not all(home.is_dir() for home in homes)  # another lm-eval may keep them elsewhere
    paths = [] if moved else list(dict.fromkeys(homes))
    metadata = {"data_dir": os.fspath(data_dir)} if data_dir else {}
    return of_lm_eval.TaskManager(include_path=[*paths, TASK_FOLDER], include_defaults=moved, metadata=metadata)


def load_tasks(tasks: Sequence[str], folder: Path | None) -> dict:
    """The tasks with their documents, ready for `lm_eval.evaluate`, zero-shot."""
    from .eval_tasks import Table1Task

    some = {"group": "some_of_titans_table1", "task": [{"task": task, "class": Table1Task} for task in tasks]}
    try:
        loaded = task_manager(folder).load([some])
    except OSError as error:
        if folder is not None:
            raise
        raise OSError(f"{error} (no way to the Hub? --data-dir reads the documents from files)") from error
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(SEEDS["fewshot"])
    return loaded


def evaluate(
    model: "TitansForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    suite: str = "table1",
    tasks: Sequence[str] | None = None,
    data_dir: str | os.PathLike | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    name: str | None = None,
    command: str | None = None,
) -> dict:
    """Run a suite, and return its record (see `eval_records`).

    Args:
        tasks: some of the suite's; all of them if left out.
        data_dir: folder of the documents (see `eval_files`); left out, TITANS_EVAL_DATA in the environment, or the Hub.
        limit: score the first documents of each task only.
        name, command: what the record says of the model and of the run.
    """
    from lm_eval.evaluator import evaluate as run

    from .eval_model import TitansLM

    chosen, folder = choose_tasks(suite, tasks), data_folder(data_dir)
    sow()
    loaded = load_tasks(chosen, folder)
    lm = TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    started = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints a little here and there
            results = run(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False)
    except OverflowError as error:
        raise ValueError(
            "a perplexity is larger than any float: the model has diverged, or has not been trained"
        ) from error
    seconds = time.perf_counter() - started
    return {
        "format": FORMAT,
        "version": VERSION,
        "suite": suite,
        **provenance(model.device, command),
        "seeds": SEEDS,
        "seconds": round(seconds, 1),
        "model": describe(model, name),
        "settings": {
            "limit": limit,
            "batch_size": batch_size,
            "max_length": lm.max_length,
            "num_fewshot": 0,
            "bootstrap_iters": BOOTSTRAPS,
        },
        "data": {task: describe_data(task, loaded["tasks"][task], results, folder) for task in chosen},
        "metrics": read_metrics(results["results"], paper_table(SUITES[suite])),
    }


def sow() -> None:
    """Seed every generator. None is used zero-shot; the record says what they were."""
    import numpy
    import torch

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork this process, model and threads and all
    random.seed(SEEDS["python"])
    numpy.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def describe(model: "TitansForCausalLM", name: str | None) -> dict:
    return {
        "name": name or model.config.name_or_path or "unnamed",
        "variant": model.config.variant,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def describe_data(name: str, task, results: dict, folder: Path | None) -> dict:
    counts = results["n-samples"][name]
    return {
        "source": "files" if folder else "hub",
        "dataset": ", ".join(filter(None, (task.DATASET_PATH, task.DATASET_NAME))),
        "task_version": task.VERSION,
        "documents": counts["effective"],
        "total": counts["original"],
        "files": digests(name, folder) if folder else {},
    }


def read_metrics(results: dict, table: Table) -> dict[str, dict]:
    """lm-eval's figures by column of the paper, in its units, and the columns that are means of them."""
    found: dict[str, dict] = {}
    for column in table.columns:
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
