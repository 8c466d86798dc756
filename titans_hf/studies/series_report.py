"""What the forecasters reached, as a table and as a picture of forecasts beside what was observed."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from ..records.files import plots

MEASURES = ("mse", "mae")
HORIZONS = (96, 192, 336, 720)
# Means over these horizons at a look-back of 96, from Table 3 of arXiv 2501.00663, which has DLinear's and PatchTST's
# from arXiv 2310.06625 (iTransformer, Table 10).
PUBLISHED = {
    "titans": {"ETTh1": (0.420, 0.421), "ETTh2": (0.336, 0.382), "ETTm1": (0.358, 0.387), "ETTm2": (0.261, 0.309)},
    "dlinear": {"ETTh1": (0.456, 0.452), "ETTh2": (0.559, 0.515), "ETTm1": (0.403, 0.407), "ETTm2": (0.350, 0.401)},
    "patchtst": {"ETTh1": (0.469, 0.454), "ETTh2": (0.387, 0.407), "ETTm1": (0.387, 0.400), "ETTm2": (0.281, 0.326)},
}


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
    """MSE and MAE of every model by dataset and horizon, `-` where there is no run; and the means over horizons.

    Below the means of the ETT files stand the published ones, where horizons and look-back are the same.
    """
    lines = summary(records)
    models = list(dict.fromkeys(line["model"] for line in lines))
    horizons = sorted({line["horizon"] for line in lines})
    cells = {(line["data"], line["horizon"], line["model"]): line for line in lines}
    text = ["| data | horizon | " + " | ".join(f"{model} MSE | MAE" for model in models) + " |"]
    text.append("|---|---:|" + "---:|---:|" * len(models))
    for data in dict.fromkeys(line["data"] for line in lines):
        rows = [[cells.get((data, horizon, model)) for model in models] for horizon in horizons]
        text += [_row(data, str(horizon), row) for horizon, row in zip(horizons, rows)]
        text.append(_row(data, "mean", [_mean(column) for column in zip(*rows)]))
        if tuple(horizons) == HORIZONS and {record["look_back"] for record in records} == {96}:
            published = [PUBLISHED[model].get(data) for model in models]
            if any(published):
                text.append(_row(data, "published", [pair and dict(zip(MEASURES, pair)) for pair in published]))
    return "\n".join(text) + "\n"


def _mean(lines: Sequence[dict | None]) -> dict | None:
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
    figure.savefig(path, dpi=85)
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
