"""Long-term forecasting (Table 3): Titans beside DLinear and PatchTST, on any CSV file with a `date` column.

Splits are of 12, 4 and 4 months for the ETT files and 7/1/2 for others; values are scaled by the training rows, errors
are of scaled values, and every test window counts. Each model's learning rate is the best by validation at a file's
first horizon, and its weights are those of its best epoch. A run that is done is kept in --out, and found again.

    python scripts/studies/series.py DATA/timeseries/ett/ETTh1.csv DATA/timeseries/ett/ETTh2.csv --record series
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from ..records.files import write_record, write_text
from .runner import perform_all
from .series_data import SPLITS
from .series_models import DEFAULTS, MODELS
from .series_report import HORIZONS, draw, markdown, summary
from .series_runs import Run, perform, read_once


def plan(args: argparse.Namespace, csv: Path, model: str) -> list[Run]:
    """A run for every learning rate, at the first horizon and with the first seed."""
    windows = len(read_once(csv, args.irregular).windows("train", args.look_back, args.horizons[0]))
    own = dict(DEFAULTS[model])
    for setting in args.set:
        place, _, value = setting.partition("=")
        of, _, field = place.partition(".")
        if of not in MODELS or not field or not value:
            raise ValueError(f"--set: {setting!r} is not MODEL.FIELD=VALUE of {', '.join(MODELS)}")
        if of == model:
            try:
                own[field] = json.loads(value)
            except json.JSONDecodeError:
                own[field] = value
    return [
        Run(
            data=csv.stem,
            horizon=args.horizons[0],
            model=model,
            fields=json.dumps(own, sort_keys=True),
            look_back=args.look_back,
            epochs=args.epochs,
            patience=args.patience,
            batch=args.batch,
            stride=-(-windows // args.windows),
            lr=lr,
            weight_decay=args.weight_decay,
            seed=args.seeds[0],
            csv=str(csv),
            irregular=args.irregular,
        )
        for lr in args.lr
    ]


def check(args: argparse.Namespace) -> None:
    """Refuse, before anything is trained, files and horizons that do not fit."""
    for csv in args.csv:
        for horizon in args.horizons:
            for split in SPLITS:
                read_once(csv, args.irregular).windows(split, args.look_back, horizon)


def measure(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """The records of all files, models, horizons and seeds; and those of the learning rates tried."""
    found, tried = [], []
    for csv in args.csv:
        best = []
        for model in args.models:
            runs = {run.lr: run for run in plan(args, csv, model)}
            rates = done(list(runs.values()), args)
            tried += rates
            if rates:
                best.append(runs[min(rates, key=lambda record: record["validation"])["lr"]])
        chosen = [
            replace(run, horizon=horizon, seed=seed) for horizon in args.horizons for run in best for seed in args.seeds
        ]
        found += done(chosen, args)
    return found, tried


def done(runs: list[Run], args: argparse.Namespace) -> list[dict]:
    """The records of runs. Those that have no file are trained, or with `--no-training` left out."""
    if args.no_training:
        runs = [run for run in runs if (args.out / f"{run.name}.json").exists()]
    return perform_all(runs, args.out, args.jobs, perform)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--horizons", type=int, nargs="+", default=list(HORIZONS))
    parser.add_argument("--look-back", type=int, default=96)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--epochs", type=int, default=3, help="at most")
    parser.add_argument("--patience", type=int, default=2, help="epochs without a better validation error")
    parser.add_argument("--batch", type=int, default=32, help="windows, of all channels")
    parser.add_argument("--windows", type=int, default=9000, help="train on every n-th window, so many at most")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="+", default=[], help="titans.variant=mac: a field of a model's configuration")
    parser.add_argument("--irregular", action="store_true", help="take rows as they come, whatever their dates")
    parser.add_argument("--no-training", action="store_true", help="report the runs that are there")
    parser.add_argument("--jobs", type=int, default=0, help="runs side by side; 0 in this process")
    parser.add_argument("--out", type=Path, default=Path("runs/series"))
    parser.add_argument("--record", type=Path, help="write <record>.json, .md and .png")
    args = parser.parse_args()

    torch.set_num_threads(1)
    check(args)
    records, tried = measure(args)
    if not records:
        parser.error(f"--no-training: there is no run of these in {args.out}")
    print(markdown(records))
    if args.record:
        runs = [{name: value for name, value in run.items() if name != "example"} for run in records]  # is in the plot
        rates = [
            {name: run[name] for name in ("data", "model", "horizon", "lr", "seed", "validation")} for run in tried
        ]
        write_record(args.record, table=summary(records), runs=runs, learning_rates=rates)
        write_text(args.record.with_suffix(".md"), markdown(records))
        draw(records, args.record.with_suffix(".png"))
