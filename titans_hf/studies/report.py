"""What a study found, as a table and as a plot."""

from collections import defaultdict
from pathlib import Path
from statistics import mean

from ..evals.paper_tables import paper_table
from ..records.files import plots
from .study import Paper
from .tasks import METRICS
from .tasks.task import AS_TRAINED, OFF, Metric

Place = tuple[str, str]  # setting, model


def by_place(records: list[dict]) -> dict[Place, list[dict]]:
    """The records of all seeds, by setting and model."""
    found: dict[Place, list[dict]] = defaultdict(list)
    for record in records:
        found[record["setting"], record["model"]].append(record)
    return dict(found)


def table(records: list[dict], paper: Paper | None = None) -> list[dict]:
    """A line per setting, model and way to read it, with the spread over seeds if there are several.

    Values are of every tested point that the task shows. "memory off" is the same without writing: the best of these
    values where the task asks, or the one that models are compared by; "worth" is what the memory takes from that one.
    """
    places = by_place(records)
    several = any(len(readings(runs[0])) > 1 for runs in places.values())
    found = orders(places, paper) if paper is not None else {}
    blank = dict.fromkeys(next(iter(found.values()), {}))
    return [
        {
            **({"setting": place[0]} if place[0] else {}),
            "model": place[1],
            **({"read with": reading} if several else {}),
            **summary(runs, reading),
            **(found.get(place, blank) if reading == AS_TRAINED else blank),
        }
        for place, runs in places.items()
        for reading in readings(runs[0])
    ]


def readings(run: dict) -> list[str]:
    """The ways in which a run was tested that have a line of their own."""
    return [name for name in run["tested"] if name != OFF]


def summary(runs: list[dict], reading: str) -> dict:
    """The columns of a line behind its names."""
    first, metric = runs[0], METRICS[runs[0]["metric"]]
    plain, rates = reading == AS_TRAINED, [run["tokens_per_second"] for run in runs]
    return {
        "parameters": first["parameters"],
        "state bytes": first["state_bytes"],
        "lr": first["lr"],
        "seeds": len(runs),
        **({"learned after": _steps(runs) if plain else None} if metric.learned is not None else {}),
        **{name: metric.write([run["tested"][reading][name] for run in runs]) for name in first["shown"]},
        **controls(runs if plain and OFF in first["tested"] else [], metric, first["compared_by"]),
        "largest gradient": round(max(run["largest_gradient"] for run in runs), 2),
        "tokens/s": round(mean(rates)),
    }


def controls(runs: list[dict], metric: Metric, compared_by: str | None) -> dict:
    """What is left with the memory never written; and what that costs, where models are compared by one value."""
    if compared_by is None:
        off = [metric.best([run["tested"][OFF][name] for name in run["shown"]]) for run in runs]
        return {"memory off": metric.write(off)}
    off = [run["overall"][OFF] for run in runs]
    worth = [(value - run["overall"][AS_TRAINED]) * (-1 if metric.higher else 1) for value, run in zip(off, runs)]
    return {"memory off": metric.write(off), "worth": metric.write(worth)}


def _steps(runs: list[dict]) -> str:
    """The steps after which most seeds had learned; else how many had."""
    learned = [run["steps_to_learn"] for run in runs if run["steps_to_learn"] is not None]
    return str(round(mean(learned))) if len(learned) == len(runs) else f"{len(learned)} of {len(runs)} did"


def orders(places: dict[Place, list[dict]], paper: Paper) -> dict[Place, dict]:
    """Each model's rank beside the paper's, among the models that have a row there; by setting and model."""
    table = paper_table(paper.table)
    column = table.column(paper.column)
    figures = {row.model: row.values[column.key] for group in table.groups.values() for row in group}
    theirs = {model: figures[row] for model, row in paper.rows.items()}
    found = {}
    for setting in dict.fromkeys(setting for setting, _ in places):
        runs = {model: places[setting, model] for model in theirs if (setting, model) in places}
        ours = {model: mean(run["overall"][AS_TRAINED] for run in runs[model]) for model in runs}
        higher = METRICS[next(iter(runs.values()))[0]["metric"]].higher if runs else True
        own, printed = ranks(ours, higher), ranks({m: theirs[m] for m in runs}, column.better == "higher")
        for model in runs:
            found[setting, model] = {"rank": own[model], "paper's": theirs[model], "paper's rank": printed[model]}
    return found


def ranks(values: dict[str, float], higher: bool) -> dict[str, int]:
    """1 for the best; equal values share a rank."""
    return {name: 1 + sum((x > y) if higher else (x < y) for x in values.values()) for name, y in values.items()}


def draw(records: list[dict], path: Path) -> None:
    """Per setting the answers of training over its steps, and of the tests.

    Dashed is the memory never written, dotted whatever else was changed at reading.
    """
    plt = plots()
    places = by_place(records)
    settings = list(dict.fromkeys(setting for setting, _ in places))
    figure, axes = plt.subplots(len(settings), 2, figsize=(11, 3.4 * len(settings)), squeeze=False)
    for (left, right), setting in zip(axes, settings):
        for runs in (runs for (own, _), runs in places.items() if own == setting):
            draw_runs(left, right, runs)
        finish(left, right, setting, runs[0])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_runs(left, right, runs: list[dict]) -> None:
    """A model's line on both sides."""
    first, scale = runs[0], METRICS[runs[0]["metric"]].scale
    curve = [scale * mean(values) for values in zip(*(run["curve"] for run in runs))]
    steps = [i * first["steps"] / max(1, len(curve)) for i in range(len(curve))]
    (line,) = left.plot(steps, curve, linewidth=1, label=first["model"])
    for name in first["tested"]:
        values = [scale * mean(run["tested"][name][point] for run in runs) for point in first["shown"]]
        if name == AS_TRAINED:
            right.plot(first["shown"], values, "o-", color=line.get_color(), markersize=3, label=_label(first))
        elif name == OFF:
            right.plot(first["shown"], values, "--", color=line.get_color())
        else:
            right.plot(first["shown"], values, "x:", markersize=3, linewidth=1, label=f"{first['model']}, {name}")


def finish(left, right, setting: str, run: dict) -> None:
    """Titles, axes and the line of chance."""
    metric = METRICS[run["metric"]]
    if run["chance"] is not None:
        right.axhline(metric.scale * run["chance"], color="black", linewidth=0.8, linestyle=":")
    left.set(xlabel="training step", ylabel=metric.name, title=f"{setting} while training".strip())
    right.set(title=f"{setting} in the tests; dashed: memory never written".strip())
    if metric.learned is not None:
        for axes in (left, right):
            axes.set_ylim(0, 1.02 * metric.scale)
    right.tick_params(axis="x", rotation=45)
    right.legend(fontsize=6)


def _label(run: dict) -> str:
    return f"{run['model']}, {run['state_bytes'] / 1024:.0f} KiB" if run["state_bytes"] else run["model"]
