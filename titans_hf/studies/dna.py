"""DNA classification (the paper's Table 4): Titans, a CNN and a Transformer of equal size, trained from scratch.

    python scripts/studies/dna.py --data DATA/dna --tasks GUE/prom/prom_core_tata GUE/mouse/2 --seeds 0,1
    python scripts/studies/dna.py --data DATA/dna --tasks human_nontata_promoters.test.csv --rows 2000
    python scripts/studies/dna.py --data genomic_benchmarks --tasks table4 --epochs 100 --batch 128 --lr 6e-4

A task is a folder of `--data` with the splits train, dev and test (GUE's CSV files, or GenomicBenchmarks' folders of
classes), or one CSV file, which is cut into `--folds`: `titans_hf/dna/data.py` has the formats. Width, depth, weight
decay, clipping, cosine schedule and left padding are HyenaDNA's, and so is `--lr 6e-4`; without its pre-training.

Every model is trained with every learning rate of `--lr` on the first seed (and fold), and with the one that is best on
dev on the others. The epoch is chosen on dev, too, by MCC. The test split is read once, with these weights; for Titans
once more with the memory never written. Each run is a JSON file in `--out`, and is not done again.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from ..dna.data import LONGEST
from ..records.files import plots, write_record
from .dna_models import MODELS, PARAMETERS, SIZES
from .dna_training import Run, perform, read_run
from .runner import perform_all
from .settings import numbers, show

TABLE4 = (
    "human_enhancers_cohn",
    "human_enhancers_ensembl",
    "human_ensembl_regulatory",
    "human_nontata_promoters",
    "human_ocr_ensembl",
)
Found = dict[tuple[str, str], list[dict]]  # records by task and model
QUICK = {"epochs": 1, "rows": 128, "evaluated": 128, "folds": 2}


def run_of(args: argparse.Namespace, task: str, model: str, place: tuple[int | None, int], lr: float) -> Run:
    """The run of a model on a task at that place, a fold and a seed."""
    shared = {name: getattr(args, name) for name in ("epochs", "batch", "weight_decay", "rows", "evaluated", "folds")}
    return Run(task=task, model=model, lr=lr, fold=place[0], seed=place[1], **shared)


def places(args: argparse.Namespace, task: str) -> list[tuple[int | None, int]]:
    """Folds and seeds to train with."""
    folds = range(args.folds) if task.endswith(".csv") else [None]
    return [(fold, seed) for seed in args.seeds for fold in folds]


def study(args: argparse.Namespace) -> tuple[Found, list[dict]]:
    """By task and model the records of all seeds and folds with the learning rate that is best on dev; and the rates
    tried on the first."""
    do = partial(perform_all, out=args.out, jobs=args.jobs)
    do = partial(do, perform=partial(perform, data=args.data, longest=args.longest, quiet=args.jobs > 0))
    pairs = [(task, model) for task in args.tasks for model in args.models]
    grid = [run_of(args, *pair, places(args, pair[0])[0], lr) for pair in pairs for lr in args.lr]
    tried = do(grid)
    best = {}
    for pair in pairs:
        own = [record for record in tried if (record["task"], record["model"]) == pair]
        best[pair] = max(own, key=lambda record: record["dev_mcc"])["lr"]
    runs = [run_of(args, *pair, place, best[pair]) for pair in pairs for place in places(args, pair[0])]
    found: Found = {pair: [] for pair in pairs}
    for record in do(runs):
        found[record["task"], record["model"]].append(record)
    return found, [{name: record[name] for name in ("task", "model", "lr", "dev_mcc")} for record in tried]


def row(records: list[dict]) -> dict:
    """One line of the table: scores in %, with the spread over seeds and folds if there are several."""
    first = records[0]
    rows = f"{first['train_rows']}/{first['dev_rows']}/{first['test_rows']}"
    return {
        "task": first["task"],
        "model": first["model"],
        "parameters": first["parameters"],
        "lr": first["lr"],
        "runs": len(records),
        "train/dev/test": rows,
        "epoch": round(mean(one["chosen_epoch"] for one in records), 1),
        "MCC": in_percent([one["mcc"] for one in records]),
        "accuracy": in_percent([one["accuracy"] for one in records]),
        "commonest": in_percent([mean(one["commonest"] for one in records)]),
        "memory off": in_percent([one["mcc_off"] for one in records]) if "mcc_off" in first else None,
        "tokens per processor second": round(mean(one["tokens_per_processor_second"] for one in records)),
    }


def in_percent(shares: list[float]) -> str:
    spread = f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.1f}{spread}"


def draw(found: Found, path: Path) -> None:
    """MCC on the test split as bars, by task and model, with the spread over seeds and folds."""
    plt = plots()
    tasks, models = (list(dict.fromkeys(pair[i] for pair in found)) for i in (0, 1))
    figure, axes = plt.subplots(figsize=(max(4.8, 1.8 + 1.5 * len(tasks)), 3.6))
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        scores = [[100 * one["mcc"] for one in found[task, model]] for task in tasks]
        spread = [stdev(own) if len(own) > 1 else 0.0 for own in scores]
        at = [i + (number - (len(models) - 1) / 2) * width for i in range(len(tasks))]
        bars = axes.bar(at, list(map(mean, scores)), width, label=model, yerr=spread if any(spread) else None)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(tasks)), [shown(task) for task in tasks], fontsize=8)
    axes.set(ylabel="MCC on the test split (%)", title="DNA, trained from scratch")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def shown(task: str) -> str:
    """A task's name below its bars."""
    name = task.removeprefix("GUE/").removesuffix(".csv").removesuffix(".test")
    return name.replace("prom/", "").replace("human_", "human\n")


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks")
    parser.add_argument(
        "--tasks", nargs="+", required=True, help="folders and CSV files in it; table4: the paper's five"
    )
    parser.add_argument("--models", default="lmm,mag,llama,cnn", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lr", type=numbers, default=[6e-4, 2e-3], metavar="A,B", help="learning rates")
    parser.add_argument("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0], metavar="A,B")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--rows", type=int, help="rows to train on, chosen at random; by default all")
    parser.add_argument("--evaluated", type=int, help="rows of dev and of test; by default all")
    parser.add_argument("--folds", type=int, default=5, help="of a CSV file that is one split alone")
    parser.add_argument("--longest", type=int, default=LONGEST, help="letters of the longest sequence accepted")
    parser.add_argument("--quick", action="store_true", help="one epoch of few rows and one rate, to see that it runs")
    parser.add_argument("--jobs", type=int, default=0, help="runs side by side; 0 in this process")
    parser.add_argument("--out", type=Path, default=Path("runs/dna"))
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    args.models = list(dict.fromkeys(args.models.split(",")))
    args.tasks = [task for given in dict.fromkeys(args.tasks) for task in (TABLE4 if given == "table4" else [given])]
    if args.quick:
        vars(args).update(QUICK, lr=args.lr[:1], seeds=args.seeds[:1])
    check(parser, args)

    found, grid = study(args)
    rows = [row(records) for records in found.values()]
    print(show(rows))
    if args.record:
        runs = [record for records in found.values() for record in records]
        about = {"sizes": SIZES, "parameters": PARAMETERS, "seeds": args.seeds, "grid": grid}
        write_record(args.record, **about, table=rows, runs=runs)
        draw(found, args.record.with_suffix(".png"))
    return rows


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what cannot run before anything is trained: every task is read once."""
    unknown = [model for model in args.models if model not in MODELS]
    if unknown:
        parser.error(f"--models: there is no {unknown[0]!r}; choose from {', '.join(MODELS)}")
    for option, least in (("epochs", 1), ("batch", 1), ("folds", 2)):
        if getattr(args, option) < least:
            parser.error(f"--{option} must be at least {least}, got {getattr(args, option)}")
    for task in args.tasks:
        if not (args.data / task).exists():
            parser.error(f"--tasks: {args.data / task} is not there")
        read_run(run_of(args, task, args.models[0], places(args, task)[0], args.lr[0]), args.data, args.longest)
