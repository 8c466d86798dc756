"""What the forecasters reached, as a table and as a picture of forecasts beside what was observed."""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from ..records.files import plots

MEASURES = ("mse", "mae")


def summary(records: list[dict]) -> list[dict]:
    """A line per dataset, horizon and model: mean over seeds of MSE and MAE, with and without the last batch."""
    groups = defaultdict(list)
    for record in records:
        groups[record["data"], record["horizon"], record["model"]].append(record)
    lines = []
    for (data, horizon, model), runs in groups.items():
        line = {"data": data, "horizon": horizon, "model": model, "seeds": len(runs)}
        for name in MEASURES:
            values = [run[name] for run in runs]
            line |= {name: mean(values), f"{name} dropping": mean(run["dropping"][name] for run in runs)}
            line |= {f"{name} spread": stdev(values)} if len(values) > 1 else {}
        lines.append(line)
    return lines


def markdown(records: list[dict]) -> str:
    """MSE and MAE of every model by dataset and horizon, and their means over the horizons of a dataset."""
    lines = summary(records)
    models = list(dict.fromkeys(line["model"] for line in lines))
    horizons = list(dict.fromkeys(line["horizon"] for line in lines))
    cells = {(line["data"], line["horizon"], line["model"]): line for line in lines}
    text = ["| | | " + " | ".join(f"{model} MSE | MAE" for model in models) + " |"]
    text.append("|---|---:|" + "---:|---:|" * len(models))
    for data in dict.fromkeys(line["data"] for line in lines):
        own = [horizon for horizon in horizons if any((data, horizon, model) in cells for model in models)]
        for horizon in own:
            found = [cells.get((data, horizon, model)) for model in models]
            text.append(_row(data, str(horizon), found))
        means = [_mean([cells.get((data, horizon, model)) for horizon in own]) for model in models]
        text.append(_row(data, "mean", means))
    return "\n".join(text) + "\n"


def _mean(lines: list[dict | None]) -> dict | None:
    if None in lines:
        return None
    return {name: mean(line[name] for line in lines) for name in MEASURES}


def _row(data: str, horizon: str, found: list[dict | None]) -> str:
    figures = ["-" if line is None else f"{line[name]:.3f}" for line in found for name in MEASURES]
    return " | ".join([f"| {data}", horizon, *figures]) + " |"


def draw(records: list[dict], path: Path) -> None:
    """The last channel in the middle of the test rows: what was observed, and what every model forecast."""
    plt = plots()
    datasets = list(dict.fromkeys(record["data"] for record in records))
    horizons = sorted({record["horizon"] for record in records})
    shown = [horizons[0], horizons[-1]] if len(horizons) > 1 else horizons
    size = (6.2 * len(shown), 2.5 * len(datasets) + 0.4)
    figure, axes = plt.subplots(len(datasets), len(shown), figsize=size, squeeze=False, layout="constrained")
    for row, data in enumerate(datasets):
        for axis, horizon in zip(axes[row], shown):
            runs = {r["model"]: r for r in reversed(records) if (r["data"], r["horizon"]) == (data, horizon)}
            _draw_one(axis, runs, f"{data}, {horizon} steps ahead")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_one(axis, runs: dict[str, dict], title: str) -> None:
    if not runs:
        axis.set_axis_off()
        return
    first = next(iter(runs.values()))["example"]
    past, future = first["past"], first["future"]
    axis.plot(range(-len(past), len(future)), [*past, *future], color="black", linewidth=1.0, label="observed")
    for model, color in (("dlinear", "tab:orange"), ("patchtst", "tab:blue"), ("titans", "tab:red")):
        if model in runs:
            axis.plot(range(len(future)), runs[model]["example"]["forecast"], color=color, linewidth=1.2, label=model)
    axis.axvline(-0.5, color="grey", linewidth=0.6, linestyle=":")
    axis.set_title(f"{title}: {next(iter(runs.values()))['channels'][-1]}", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
