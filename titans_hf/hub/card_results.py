"""What records of `titans eval` say in a model card: tables with standard errors, chance, and the Hub's metadata.

The Hub has two forms of results. `model-index`, in the card's metadata, takes any dataset. Files in `.eval_results/`
are the newer form, shown for datasets that are registered there as benchmarks.
"""

import re
from typing import TYPE_CHECKING

from ..evals.chance import CHANCE, SAME_ANSWER, level
from ..evals.paper_tables import NUMBERS, Column, paper_table
from ..evals.tables import figure, markdown_row, measured, unit

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

AS_TRAINED = ("on", "none")  # "none" is a baseline's, which has no memory
SETTINGS = (*AS_TRAINED, "reset", "off")  # the last two are controls
CONTROLS = {
    "reset": "Memory reset: a control that puts the memory back to its start at each segment, while attention goes on.",
    "off": "Memory off: a control that never writes into the memory.",
}
HUB_NAMES = {"acc": "accuracy", "word_perplexity": "perplexity"}  # of lm-eval's metrics
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HEADINGS = {
    "table1": "Table 1 of the paper: language modelling and common-sense reasoning",
    "table2": "Table 2 of the paper: needles in a haystack (S-NIAH)",
    "babilong": "BABILong: facts scattered over books",
}


def setting(record: dict) -> str:
    """The setting of the memory in a record."""
    return record["model"]["memory"]


def by_suite(records: list[dict]) -> dict[str, dict[str, dict]]:
    """Records by suite, and by setting of the memory within it."""
    found: dict[str, dict[str, dict]] = {}
    for record in sorted(records, key=lambda each: (each["suite"], _rank(setting(each)))):
        own = found.setdefault(record["suite"], {})
        if setting(record) in own:
            raise ValueError(
                f"two records are of {record['suite']} with the memory {setting(record)}: give one of them"
            )
        own[setting(record)] = record
    return found


def _rank(name: str) -> tuple[int, str]:
    return (SETTINGS.index(name) if name in SETTINGS else len(SETTINGS), name)


def result_tables(records: list[dict]) -> list[dict]:
    """One table per suite, one column per setting of the memory: heading, Markdown, and how it was measured."""
    tables = []
    for suite, own in by_suite(records).items():
        several = len(own) > 1
        columns = [f"memory {name}" if several else "result" for name in own]
        lines = [markdown_row(["", *columns, "chance"]), markdown_row(["---", *["---:"] * len(columns), "---:"])]
        metrics = list(dict.fromkeys(key for record in own.values() for key in record["metrics"]))
        lines += [
            markdown_row([_title(key, own), *(_cell(record, key) for record in own.values()), _chance(key, own)])
            for key in metrics
        ]
        labels = [f"Memory {name}: " if several else "" for name in own]
        notes = [label + note for label, note in zip(labels, map(chance_note, own.values())) if note]
        how = [label + measured(record) for label, record in zip(labels, own.values())]
        text = {"heading": HEADINGS.get(suite, suite), "table": "\n".join(lines)}
        tables.append(
            {**text, "controls": [CONTROLS[name] for name in own if name in CONTROLS], "notes": notes, "how": how}
        )
    return tables


def _column(key: str) -> Column | None:
    columns = (column for number in NUMBERS for column in paper_table(number).columns)
    return next((column for column in columns if column.key == key), None)


def _title(key: str, own: dict[str, dict]) -> str:
    """The task and the metric of a figure, as lm-eval calls them, or what the paper writes over its column."""
    metric = next(record["metrics"][key] for record in own.values() if key in record["metrics"])
    if metric["task"]:
        arrow = "↓" if metric["unit"] == "ppl" else "↑"
        return f"{metric['task']}, {_metric_name(metric)} {arrow}"
    column = _column(key)
    return f"{column.name} {unit(column)}".strip() if column else key


def _metric_name(metric: dict) -> str:
    """lm-eval's name; the figures of long context are accuracies, which it names by their length."""
    return f"acc at {_length(metric)} tokens" if _length(metric) else metric["metric"] or metric["unit"]


def _length(metric: dict) -> str | None:
    """The length that a long-context figure is named by."""
    name = metric["metric"] or ""
    return name if name[:1].isdigit() else None


def _cell(record: dict, key: str) -> str:
    metric = record["metrics"].get(key)
    if metric is None or metric["value"] is None:
        return "–"
    text = figure(metric["value"], 2)
    return text if metric["stderr"] is None else f"{text} ± {figure(metric['stderr'], 2)}"


def _chance(key: str, own: dict[str, dict]) -> str:
    metric = next(record["metrics"][key] for record in own.values() if key in record["metrics"])
    task = metric["task"]
    if metric["unit"] != "%" or task not in CHANCE:
        return "–"
    same = f" (one answer to all: {SAME_ANSWER[task]:.1f})" if task in SAME_ANSWER else ""
    return f"{CHANCE[task]:.1f}{same}"


def chance_note(record: dict) -> str:
    """A sentence on which multiple-choice figures are at chance; empty without such figures."""
    judged = {
        metric["task"]: metric["value"] > level(metric["task"]) + 2 * metric["stderr"]
        for metric in record["metrics"].values()
        if metric["task"] in CHANCE and metric["unit"] == "%" and None not in (metric["value"], metric["stderr"])
    }
    if not judged:
        return ""
    above, rest = ([task for task, is_above in judged.items() if is_above is wanted] for wanted in (True, False))
    parts = [f"within two standard errors of chance, or below it: {', '.join(rest)}"] if rest else []
    parts += [f"above chance by more than that: {', '.join(above) or 'none'}"]
    return "; ".join(parts) + "."


def _whole_metrics(records: list[dict]) -> list[tuple[dict, dict, dict]]:
    """Record, metric and data of every figure of the model as trained, over all documents of a dataset of the Hub."""
    found = []
    for record in records:
        for metric in record["metrics"].values() if setting(record) in AS_TRAINED else ():
            data = record["data"].get(metric["task"] or "")
            known = data is not None and HUB_ID.fullmatch(dataset_id(data)) and data["documents"] == data["total"]
            if known and metric["value"] is not None:
                found.append((record, metric, data))
    return found


def eval_results(records: list[dict]) -> list["EvalResult"]:
    """The figures on datasets of the Hub, for the card's `model-index`."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset_id(data),
            dataset_name=metric["task"],
            dataset_config=data["dataset"].partition(", ")[2] or _length(metric),
            dataset_split=metric["task"].rpartition("_")[2] if _length(metric) else None,  # BABILong's qa1 to qa5
            metric_type=HUB_NAMES.get(metric["metric"] or "", "accuracy" if metric["unit"] == "%" else "perplexity"),
            metric_name=f"{_metric_name(metric)}, {record['settings']['num_fewshot']}-shot",
            metric_value=round(metric["value"], 2),
        )
        for record, metric, data in _whole_metrics(records)
    ]


def dataset_id(data: dict) -> str:
    """The Hub's id, which a record has before the name of the configuration."""
    return data["dataset"].partition(", ")[0]


def eval_files(records: list[dict]) -> dict[str, str]:
    """The accuracies as the Hub's `.eval_results/*.yaml`, by path in the repository; tasks have lm-eval's names.

    Long-context figures are left out: the format has no field for a length.
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries: dict[str, list] = {}
    for record, metric, data in _whole_metrics(records):
        if metric["unit"] == "%" and not _length(metric):
            how = f"{_metric_name(metric)}, {record['settings']['num_fewshot']}-shot, stderr {metric['stderr']}"
            notes = f"lm-eval {record['versions']['lm_eval']}, {metric['task']}, {how}"
            value = round(metric["value"], 2)
            entry = EvalResultEntry(dataset_id(data), metric["task"], value, date=record["date"], notes=notes)
            entries.setdefault(f".eval_results/titans-{record['suite']}.yaml", []).append(entry)
    return {path: yaml.safe_dump(eval_result_entries_to_yaml(own), sort_keys=False) for path, own in entries.items()}
