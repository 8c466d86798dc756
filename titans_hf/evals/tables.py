"""The paper's tables with the rows of our records beneath, as Markdown and as CSV. `table_plots` draws them."""

from dataclasses import dataclass, field

from ..records.files import csv_text
from .chance import CHANCE, level
from .paper_tables import Column, Row, Table, paper_table
from .records import stderr_of_mean

OURS = "titans-hf"
HYBRIDS = ("mac", "mag", "mal")  # attention and memory


@dataclass(frozen=True)
class OurRow(Row):
    """A row of our own: the variant of the model, its standard errors, and how it was measured."""

    variant: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def our_rows(records: list[dict], table: Table) -> list[OurRow]:
    """One row per model, from its records of all suites; the last record of a column counts."""
    by_model: dict[tuple, list[dict]] = {}
    for record in records:
        by_model.setdefault(tuple(record["model"].values()), []).append(record)
    rows = [our_row(own, table) for own in by_model.values()]
    return [row for row in rows if row.values]


def our_row(records: list[dict], table: Table) -> OurRow:
    model = records[0]["model"]
    found = {key: metric for record in records for key, metric in record["metrics"].items()}
    values = {key: metric["value"] for key, metric in found.items() if metric["value"] is not None}
    errors = {key: metric["stderr"] for key, metric in found.items()}
    for means in (paper_table(1), table):  # Table 5 has a mean of Table 1's mean
        errors |= {column.key: stderr_of_mean([errors[key] for key in column.mean]) for column in means.means(values)}
        values = means.with_means(values)
    keys = [column.key for column in table.columns if column.key in values]
    return OurRow(
        f"{model['name']} ({', '.join(describe(model))})",
        "hybrid" if model["variant"] in HYBRIDS else "simple",
        {key: values[key] for key in keys},
        variant_name(model),
        {key: errors[key] for key in keys if errors[key] is not None},
        tuple(measured(record) for record in records),
    )


def describe(model: dict) -> list[str]:
    """What a row says about a record's model after its name."""
    control = {"off": ["memory off"], "reset": ["memory reset"]}.get(model["memory"], [])
    return [variant_name(model), count(model["parameters"]), *control]


def variant_name(model: dict) -> str:
    """A variant as the paper writes it; a baseline's model type is left as it is."""
    return model["variant"].upper() if model["variant"] in ("lmm", *HYBRIDS) else model["variant"]


def count(parameters: int) -> str:
    """A number of parameters as the paper writes it."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)


def measured(record: dict) -> str:
    """How a record was measured, in one line."""
    source = " and ".join(sorted({held["source"] for held in record["data"].values()}))
    version, commit = record["versions"]["lm_eval"], record["commit"] or "unknown"
    how = f"{record['model']['dtype']}, lm-eval {version}, commit {commit}, {record['date']}"
    read = f"{which_documents(record)}, from {source}{cut_inputs(record['settings'])}"
    return f"{record['suite']}: {read}; {how}: `{record['command']}`"


def which_documents(record: dict) -> str:
    limit = record["settings"]["limit"]
    if all(held["documents"] == held["total"] for held in record["data"].values()):
        return "all documents"
    if limit is None:
        return "all documents of files that do not hold the whole benchmark"
    each = "each task and length" if "lengths" in record["settings"] else "each task"
    return f"the first {limit} documents of {each}"


def cut_inputs(settings: dict) -> str:
    """How many inputs were cut for a baseline, if any."""
    cut = settings.get("inputs_cut")
    return f", {cut:,} inputs cut to {settings['max_length']:,} tokens" if cut else ""


def groups_with(table: Table, records: list[dict]) -> dict[str, list[Row]]:
    """The paper's groups, and ours if there are rows in it."""
    ours = our_rows(records, table)
    return {**table.groups, **({OURS: list(ours)} if ours else {})}


def highlighted(rows: list[Row], table: Table) -> set[tuple[int, str]]:
    """The best of the simple and of the hybrid models in each column, where they differ."""
    found = set()
    for column in table.columns if table.highlight else ():
        for kind in ("simple", "hybrid"):
            alike = [(i, row.values) for i, row in enumerate(rows) if row.kind == kind]
            values = {i: held[column.key] for i, held in alike if column.key in held}
            best = column.best(list(values.values())) if len(set(values.values())) > 1 else None
            found |= {(i, column.key) for i, value in values.items() if value == best}
    return found


def unit(column: Column) -> str:
    """What the paper writes under a column's name."""
    return "ppl" if column.unit == "ppl" else {"acc": "acc", "acc_norm": "acc_n"}.get(column.metric or "", "")


def heading(column: Column) -> str:
    return " ".join(filter(None, (column.name, unit(column), "↓" if column.better == "lower" else "↑")))


def figure(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.2e}"


def cell(row: Row, column: Column, decimals: int, bold: bool) -> str:
    if column.key not in row.values:
        return "–"
    text = figure(row.values[column.key], decimals)
    text = f"**{text}**" if bold else text
    error = row.errors.get(column.key) if isinstance(row, OurRow) else None
    return text if error is None else f"{text} ± {figure(error, decimals)}"


def markdown(table: Table, records: list[dict]) -> str:
    """The table, what the paper says of it, and how our rows were measured."""
    found = groups_with(table, records)
    header, rule = ["Model", *map(heading, table.columns)], ["---"] + ["---:"] * len(table.columns)
    lines = [f"### Table {table.number}: {table.title}", "", markdown_row(header), markdown_row(rule)]
    for name, rows in found.items():
        bold = highlighted(rows, table)
        if name:
            lines.append(markdown_row([f"**{name}**", *[""] * len(table.columns)]))
        for i, row in enumerate(rows):
            star = r"\*" if row.kind == "hybrid" and table.highlight else ""
            cells = [cell(row, column, table.decimals, (i, column.key) in bold) for column in table.columns]
            lines.append(markdown_row([_escape(row.model) + star, *cells]))
    if OURS in found and chance_levels(table):
        lines.append(chance_line(table))
    return "\n".join([*lines, "", *_footnotes(table, found.get(OURS, [])), ""])


def chance_levels(table: Table) -> dict[str, float]:
    """The chance level of each column that has one above 0, by key."""
    return {column.key: level(column.task) for column in table.columns if column.task in CHANCE}


def chance_line(table: Table) -> str:
    levels = chance_levels(table)
    cells = [figure(levels[column.key], table.decimals) if column.key in levels else "–" for column in table.columns]
    return markdown_row(["chance", *cells])


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


def _footnotes(table: Table, ours: list[OurRow]) -> list[str]:
    rule = "Hybrid models are marked with \\*; bold: the best of the simple and of the hybrid models of each group."
    notes = [f"The paper's rows: {table.source['paper']}.", *([rule] if table.highlight else [])]
    wrong = table.source["does_not_add_up"]
    if wrong:
        notes.append("Means that do not add up in the paper: " + "; ".join(wrong) + ".")
    if ours and chance_levels(table):
        notes.append("Chance is a guess among the answers; for BoolQ it is one answer to every question.")
    for row in ours:
        notes += [f"{_escape(row.model)}: {note}" for note in row.notes]
    return [f"- {note}" for note in notes]


def to_csv(table: Table, records: list[dict]) -> str:
    """One line for each row: where it is from, its figures, and their standard errors."""
    keys = [column.key for column in table.columns]
    columns = ["source", "group", "model", "kind", *keys, *(f"{key}_stderr" for key in keys)]
    rows = [
        {
            "source": OURS if isinstance(row, OurRow) else "paper",
            "group": group,
            "model": row.model,
            "kind": row.kind,
            **{key: row.values[key] for key in keys if key in row.values},
            **({f"{key}_stderr": error for key, error in row.errors.items()} if isinstance(row, OurRow) else {}),
        }
        for group, rows in groups_with(table, records).items()
        for row in rows
    ]
    return csv_text(rows, columns)
