"""What a study found, as a table and as a plot."""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from ..records.files import plots

Place = tuple[str, str]  # setting, model


def by_place(records: list[dict]) -> dict[Place, list[dict]]:
    """The records of all seeds, by setting and model."""
    found: dict[Place, list[dict]] = defaultdict(list)
    for record in records:
        found[record["setting"], record["model"]].append(record)
    return dict(found)


def table(records: list[dict]) -> list[dict]:
    """A line per setting and model: right answers in % at every tested point, with the spread over seeds if any."""
    return [
        {
            **({"setting": setting} if setting else {}),
            "model": model,
            "parameters": runs[0]["parameters"],
            "state bytes": runs[0]["state_bytes"],
            "lr": runs[0]["lr"],
            "seeds": len(runs),
            "learned after": _steps(runs),
            **{point: _share([run["accuracy"][point] for run in runs]) for point in runs[0]["accuracy"]},
            "memory off": _share([max(run["memory_off"].values()) for run in runs])
            if "memory_off" in runs[0]
            else None,
            "largest gradient": round(max(run["largest_gradient"] for run in runs), 2),
        }
        for (setting, model), runs in by_place(records).items()
    ]


def _share(hits: list[float]) -> str | None:
    if not hits:
        return None
    spread = f" ± {100 * stdev(hits):.1f}" if len(hits) > 1 else ""
    return f"{100 * mean(hits):.1f}{spread}"


def _steps(runs: list[dict]) -> str:
    """The steps after which most seeds had learned; else how many had."""
    learned = [run["steps_to_learn"] for run in runs if run["steps_to_learn"] is not None]
    return str(round(mean(learned))) if len(learned) == len(runs) else f"{len(learned)} of {len(runs)} did"


def draw(records: list[dict], path: Path) -> None:
    """Per setting the answers of training over its steps, and of the tests; dashed with the memory never written."""
    plt = plots()
    places = by_place(records)
    settings = list(dict.fromkeys(setting for setting, _ in places))
    figure, axes = plt.subplots(len(settings), 2, figsize=(11, 3.4 * len(settings)), squeeze=False)
    for (left, right), setting in zip(axes, settings):
        for runs in (runs for (own, _), runs in places.items() if own == setting):
            curves = [run["curve"] for run in runs]
            curve = [100 * mean(values) for values in zip(*curves)]
            steps = [i * runs[0]["steps"] / max(1, len(curve)) for i in range(len(curve))]
            (line,) = left.plot(steps, curve, linewidth=1, label=runs[0]["model"])
            for name, style in (("accuracy", "o-"), ("memory_off", "--")):
                if name in runs[0]:
                    hits = [100 * mean(run[name][point] for run in runs) for point in runs[0][name]]
                    label = _label(runs[0]) if name == "accuracy" else None
                    right.plot(list(runs[0][name]), hits, style, color=line.get_color(), label=label)
        right.axhline(100 * runs[0]["chance"], color="black", linewidth=0.8, linestyle=":")
        left.set(xlabel="training step", ylabel="right answers (%)", ylim=(0, 102))
        left.set_title(f"{setting} while training".strip())
        right.set(title=f"{setting} on fresh sequences".strip(), ylim=(0, 102))
        right.tick_params(axis="x", rotation=45)
        right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(run: dict) -> str:
    return f"{run['model']}, {run['state_bytes'] / 1024:.0f} KiB" if run["state_bytes"] else run["model"]
