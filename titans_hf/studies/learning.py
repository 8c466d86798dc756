"""Who learns faster from text, and what is the memory worth? Models of equal size, tokens and tuning effort.

    python scripts/train/small_text.py --data DATA --out runs/small
    python scripts/studies/learning.py --text runs/small --models lmm,gdn,llama --out runs/learning

Every model is trained with every learning rate and every start of the grid on the first seed, on `--grid-tokens`. The
setting with the lowest loss on the novels kept to choose by is trained on `--tokens`, with all seeds. What is reported
is the loss on other novels: at the later places of texts as long as a row of training, and by place in longer texts;
for Titans the same with the memory never written. Baselines get the quiet start of Titans' mixers as well. Each run is
a JSON file in `--out`, and a run that has its file is not done again; `--jobs` runs go on side by side, with one thread
each, the first seed of all models first.
"""

import argparse
import json
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, get_wsd_schedule

from ..configuration_titans import VARIANTS, TitansConfig
from ..records.files import plots, write_record, write_text
from .families import ABOUT, FAMILIES, build
from .places import places, token_losses
from .settings import numbers, read_fields, show

SIZES = {"vocab_size": 4096, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "window": 128}
PARAMETERS = 3_400_000
ROW = 1024
EVALUATED = 16  # rows' length of a text that is read to its end
TEXTS = {"choose": 24, "report": 32, "far": 2}  # as long as a row; those of "far" are read to their end
FROM = 512  # places from here on are what runs are compared by, up to the length of a row


@dataclass(frozen=True)
class Run:
    """One training: what is trained, and how."""

    model: str
    tokens: int
    lr: float
    start: float  # of the embeddings, in units of 1 / sqrt(width)
    seed: int
    fields: str = "{}"  # of the model's configuration, as JSON

    @property
    def name(self) -> str:
        own = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.fields.replace('"', "").strip("{}"))
        parts = (self.model, own, f"{self.tokens}", f"lr{self.lr:g}", f"start{self.start:g}", f"seed{self.seed}")
        return "-".join(part for part in parts if part)

    @property
    def embedding_range(self) -> float:
        return self.start * SIZES["hidden_size"] ** -0.5

    def build(self) -> PreTrainedModel:
        if self.model in VARIANTS:
            fields = {"embedding_initializer_range": self.embedding_range}
        else:
            fields = {"embedding_range": self.embedding_range, "mixer_scale": TitansConfig.mixer_initializer_scale}
        return build(self.model, SIZES, PARAMETERS, self.seed, **fields, **json.loads(self.fields))


def training_tokens(folder: Path, tokens: int) -> Tensor:
    """The first tokens of the training documents in a row, kept in a file beside them for the next run."""
    kept = folder / "tokens.pt"
    if not kept.exists():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        lines = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        ids = (tokenizer(text, verbose=False).input_ids + [tokenizer.eos_token_id] for text in texts)
        torch.save(torch.tensor([token for text in ids for token in text], dtype=torch.int32), kept)
    found = torch.load(kept)
    if len(found) < tokens:
        raise ValueError(f"{folder} has {len(found):,} tokens to train on: lower --tokens")
    return found[:tokens].long()


def held_out_texts(folder: Path, part: str, length: int, texts: int) -> list[Tensor]:
    """Texts of that many tokens, taken evenly from the novels that are kept to choose by or to report."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "tokenizer"), []
    lines = [json.loads(line) for line in (folder / "novels.jsonl").read_text(encoding="utf-8").splitlines()]
    novels = [line["text"] for line in lines if line["part"] == part]
    for novel in novels:
        ids = torch.tensor(tokenizer(novel, verbose=False).input_ids)
        found += ids[: len(ids) // length * length].view(-1, length)[
            :: max(1, len(ids) // length * len(novels) // texts)
        ]
    if not found:
        raise ValueError(f"{folder / 'novels.jsonl'} holds no text of {length:,} tokens to {part}")
    return found[:texts]


def train(run: Run, ids: Tensor, progress: Path) -> tuple[PreTrainedModel, dict]:
    """The trained model, and its largest gradient norm and time."""
    model = run.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps, started, norms, curve = len(ids) // ROW, time.time(), [], []
    warmup = max(1, round(0.05 * steps))
    schedule = get_wsd_schedule(optimizer, warmup, steps - warmup, num_stable_steps=0, min_lr_ratio=0.1)
    for step, row in enumerate(ids[: steps * ROW].view(steps, 1, ROW), 1):
        loss = model(row, labels=row).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append(loss.item())
        if step % 10 == 0:
            progress.write_text(f"{step}/{steps}")
    seconds = time.time() - started
    last = curve[-max(1, steps // 20) :]
    measured = {
        "parameters": model.num_parameters(),
        "seconds": round(seconds, 1),
        "tokens_per_second": len(ids) / seconds,
    }
    return model.eval(), measured | {"largest_gradient": max(norms), "training_loss": mean(last)}


def losses_by_place(model: PreTrainedModel, texts: list[Tensor], **options) -> list[float]:
    """Mean nats per token in each stretch of the texts, which have equal lengths."""
    found = torch.stack([token_losses(model, ids, **options) for ids in texts]).mean(0)
    return [round(found[start:end].mean().item(), 4) for start, end in places(len(found) + 1)]


def perform(run: Run, folder: Path, out: Path, evaluated: int, parts: Iterable[str]) -> None:
    """Train a run, measure these parts of `TEXTS`, and write its file; a process of its own calls this."""
    torch.set_num_threads(1)
    progress = out / f"{run.name}.progress"
    model, measured = train(run, training_tokens(folder, run.tokens), progress)
    results = {"places": places(ROW), "far_places": places(evaluated)}
    for part in parts:
        novels, length = ("report", evaluated) if part == "far" else (part, ROW)
        found = held_out_texts(folder, novels, length, TEXTS[part])
        results[part] = losses_by_place(model, found)
        if run.model in VARIANTS and part != "choose":
            results[f"{part}_off"] = losses_by_place(model, found, memory_read_only=True)
    model.save_pretrained(out / f"{run.name}.model")
    write_text(out / f"{run.name}.json", json.dumps({**asdict(run), **measured, **results}, indent=1) + "\n")
    progress.unlink(missing_ok=True)


def perform_all(runs: list[Run], args: argparse.Namespace, parts: Iterable[str] = tuple(TEXTS)) -> list[dict]:
    """All runs, those that have no file in `--jobs` processes; their records in the order of `runs`."""
    left = [run for run in runs if not (args.out / f"{run.name}.json").exists()]
    if left:
        args.out.mkdir(parents=True, exist_ok=True)
        training_tokens(args.text, 1)  # tokenised once, before there are several processes
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(perform, run, args.text, args.out, args.evaluated, parts) for run in left]
            for run, done in zip(tqdm(left, desc="runs"), waiting, strict=True):
                tqdm.write(run.name)
                done.result()
    return [json.loads((args.out / f"{run.name}.json").read_text()) for run in runs]


def compared_by(record: dict, part: str) -> float:
    """The mean loss at the places from `FROM` to the end of a training row."""
    chosen = [loss for (start, end), loss in zip(record["places"], record[part]) if start >= FROM and end <= ROW]
    return mean(chosen or record[part])


def study(args: argparse.Namespace) -> list[dict]:
    """Per model the records of its best setting, all seeds, and of the grid it was chosen from."""
    grids = {model: tuned(model, args) for model in args.models} if len(args.lr) * len(args.start) > 1 else {}
    kept = tuple(TEXTS) if args.grid_tokens == args.tokens else ("choose",)  # else the best is trained again
    perform_all([run for grid in grids.values() for run in grid], args, kept)
    best, tried = {}, {}
    for model in args.models:
        records = perform_all(grids.get(model, []), args)
        tried[model] = [
            {"lr": record["lr"], "start": record["start"], "choose": compared_by(record, "choose")}
            for record in records
        ]
        best[model] = min(tried[model], key=lambda point: point["choose"], default={})
    runs = {
        (model, seed): Run(
            model,
            args.tokens,
            best[model].get("lr", args.lr[0]),
            best[model].get("start", args.start[0]),
            seed,
            args.fields.get(model, "{}"),
        )
        for seed in args.seeds
        for model in args.models
    }
    records = dict(zip(runs, perform_all(list(runs.values()), args), strict=True))
    return [
        {"model": model, "grid": tried[model], "runs": [records[model, seed] for seed in args.seeds]}
        for model in args.models
    ]


def tuned(model: str, args: argparse.Namespace) -> list[Run]:
    """The runs that a model's setting is chosen from."""
    return [
        Run(model, args.grid_tokens, lr, start, args.seeds[0], args.fields.get(model, "{}"))
        for lr in args.lr
        for start in args.start
    ]


def row(found: dict) -> dict:
    """One line of the table: the loss on the novels to report, its spread over seeds, and what the memory is worth."""
    losses = [compared_by(record, "report") for record in found["runs"]]
    off = [compared_by(record, "report_off") for record in found["runs"] if "report_off" in record]
    return {
        "model": found["model"],
        "parameters": found["runs"][0]["parameters"],
        "lr": found["runs"][0]["lr"],
        "start": found["runs"][0]["start"],
        "seeds": len(losses),
        "nats": round(mean(losses), 4),
        "spread": round(stdev(losses), 4) if len(losses) > 1 else None,
        "memory off": round(mean(off), 4) if off else None,
        "worth": round(mean(off) - mean(losses), 4) if off else None,
        "largest gradient": round(max(record["largest_gradient"] for record in found["runs"]), 2),
        "tokens/s": round(mean(record["tokens_per_second"] for record in found["runs"])),
    }


def draw(study: list[dict], path: Path) -> None:
    """Loss by place, with the memory's off control as a dashed line."""
    plt = plots()
    figure, axes = plt.subplots(figsize=(7.5, 4))
    for found, colour in zip(study, plt.rcParams["axes.prop_cycle"].by_key()["color"]):
        runs = found["runs"]
        ends = [end for _, end in runs[0]["far_places"]]
        for part, style in (("far", "o-"), ("far_off", "--")):
            if part in runs[0]:
                by_place = [mean(run[part][i] for run in runs) for i in range(len(ends))]
                label = found["model"] if part == "far" else None
                axes.plot(ends, by_place, style, color=colour, markersize=3, label=label)
    axes.axvline(ROW, color="black", linestyle=":", linewidth=0.8, label="a row of training")
    axes.set(xscale="log", xlabel="place in the text (tokens)", ylabel="nats per token")
    axes.set_title("held-out novels; dashed: memory never written")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("runs/small"), help="what small_text.py has made")
    parser.add_argument("--models", default="lmm,gdn,llama", help=f"some of {', '.join(FAMILIES)}")
    parser.add_argument("--tokens", type=float, default=4e5, help="to train each on")
    parser.add_argument("--grid-tokens", type=float, help="to train each setting of the grid on; by default --tokens")
    parser.add_argument("--lr", type=numbers, default=[1e-3, 2e-3, 4e-3], metavar="A,B", help="learning rates")
    parser.add_argument("--start", type=numbers, default=[1.0], metavar="A,B", help="embeddings' start x sqrt(width)")
    parser.add_argument("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0], metavar="A,B")
    parser.add_argument("--set", action="append", default=[], metavar="MODEL.FIELD=VALUE", help="of a configuration")
    parser.add_argument("--evaluated", type=int, default=EVALUATED * ROW, help="tokens of a held-out text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    args.models, args.tokens = args.models.split(","), int(args.tokens)
    args.grid_tokens = int(args.grid_tokens or args.tokens)
    args.fields = read_fields(parser, args)
    if min(args.tokens, args.grid_tokens) < ROW:
        parser.error(f"--tokens and --grid-tokens must be {ROW} or more, a row of training")
    if not (args.text / "novels.jsonl").is_file():
        parser.error(f"--text: {args.text / 'novels.jsonl'} is not there; make it with scripts/train/small_text.py")

    found = study(args)
    rows = [row(one) for one in found]
    print(show(rows))
    if args.record:
        about = {model: ABOUT[model] for model in args.models if model in ABOUT}
        write_record(args.record, sizes=SIZES, row=ROW, about=about, table=rows, study=found)
        draw(found, args.record.with_suffix(".png"))
    return found
