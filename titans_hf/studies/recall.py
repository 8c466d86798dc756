"""Key-value recall far beyond the attention window: does the memory hold what attention cannot reach?

Each sequence shows `--pairs` random (key, value) pairs, then a gap of filler, then asks for every key again in another
order; the loss is on the values of the second part. With two layers and a window of 16, attention reaches back 30
tokens, less than the gap. The control is the same model, whose memory is read but never written
(`memory_read_only=True`).

    python scripts/studies/recall.py --variant mag --record model_cards/records/recall-mag
"""

import argparse
import time
from pathlib import Path

import torch
from tqdm import trange

from .. import TitansForCausalLM
from ..configuration_titans import VARIANTS
from ..records.files import plots, write_record
from ..train.small_titans import small_titans

FILLER = 16
TOKENS_AT_A_TIME = 2**16  # of a test: fewer rows at longer gaps


def sample_batch(
    args: argparse.Namespace, batch: int, gap: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [batch, 4 * pairs + gap]; labels are -100 except on the values that are asked for."""
    pairs, symbols = args.pairs, args.symbols
    keys = torch.rand(batch, symbols, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(symbols, 2 * symbols, (batch, pairs), generator=generator)
    filler = torch.randint(2 * symbols, 2 * symbols + FILLER, (batch, gap), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    shown = torch.stack((keys, values), dim=2).flatten(1)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), dim=2).flatten(1)
    ids = torch.cat((shown, filler, asked), dim=1)
    labels = torch.full_like(ids, -100)
    labels[:, 2 * pairs + gap + 1 :: 2] = asked[:, 1::2]
    return ids, labels


def build_model(args: argparse.Namespace) -> TitansForCausalLM:
    return small_titans(
        args.variant,
        2 * args.symbols + FILLER,
        args.hidden_size,
        args.seed,
        num_hidden_layers=args.layers,
        segment_size=args.window,
        sliding_window=args.window,
        memory_chunk_size=args.chunk,
        use_cache=False,
    )


@torch.no_grad()
def accuracy(model: TitansForCausalLM, args: argparse.Namespace, read_only: bool, gap: int, batches: int = 4) -> float:
    """Share of asked values whose argmax is right, on fresh sequences."""
    generator = torch.Generator().manual_seed(10_000 + gap)
    hits = asked = 0
    model.eval()
    rows = max(2, min(64, TOKENS_AT_A_TIME // gap))
    for _ in range(batches):
        ids, labels = sample_batch(args, rows, gap, generator)
        guesses = model(ids, memory_read_only=read_only).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:]
        hits += (guesses == wanted).sum().item()
        asked += (wanted >= 0).sum().item()
    model.train()
    return hits / asked


def train(args: argparse.Namespace, read_only: bool) -> dict:
    """Train one model; returns its loss curve, its accuracies at growing gaps, and the time."""
    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    curve, started = [], time.time()
    label = "memory never written" if read_only else "memory"
    for step in (bar := trange(args.steps, desc=f"{args.variant}, {label}", disable=args.quiet)):
        ids, labels = sample_batch(args, args.batch, args.gap, generator)
        loss = model(ids, labels=labels, memory_read_only=read_only).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 19 or step == args.steps - 1:
            curve.append({"step": step + 1, "loss": loss.item()})
            bar.set_postfix(loss=f"{loss.item():.3f}")
    gaps = [args.gap * factor for factor in args.factors]
    return {
        "memory": "read only" if read_only else "written",
        "parameters": model.num_parameters(),
        "seconds": round(time.time() - started, 1),
        "accuracy_by_gap": {str(gap): accuracy(model, args, read_only, gap) for gap in gaps},
        "curve": curve,
    }


def draw(record: dict, path: Path) -> None:
    """Loss curves, and accuracy against the gap, with and without writing."""
    plt = plots()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for run, colour in zip(record["runs"], ("tab:blue", "tab:gray"), strict=False):
        label = f"memory {run['memory']}"
        left.plot([p["step"] for p in run["curve"]], [p["loss"] for p in run["curve"]], color=colour, label=label)
        gaps, hits = zip(*((int(gap), 100 * hit) for gap, hit in run["accuracy_by_gap"].items()), strict=True)
        right.plot(gaps, hits, "o-", color=colour, label=label)
    left.set(
        xlabel="training step", ylabel="loss on asked values (nats)", title=f"{record['args']['variant']}: training"
    )
    right.axhline(100 / record["args"]["symbols"], color="black", linewidth=0.8, linestyle=":", label="chance")
    right.axvline(record["args"]["window"], color="tab:red", linewidth=0.8, linestyle="--", label="attention window")
    right.set(xlabel="tokens between showing and asking", ylabel="recall (%)", xscale="log", ylim=(0, 102))
    right.set_title("recall on fresh sequences")
    ticks = [record["args"]["window"], *gaps]
    right.set_xticks(ticks, map(str, ticks))
    right.set_xticks([], minor=True)
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="mag")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--symbols", type=int, default=32, help="different keys, and different values")
    parser.add_argument("--gap", type=int, default=32)
    parser.add_argument(
        "--factors", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="gaps to test at, in units of --gap"
    )
    parser.add_argument("--window", type=int, default=16, help="attention window, and segment of mac")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-control", action="store_true", help="skip the run whose memory is never written")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)

    runs = [train(args, read_only=False)]
    if not args.no_control:
        runs.append(train(args, read_only=True))
    settings = {name: value for name, value in vars(args).items() if name != "record"}
    record = {"args": settings, "runs": runs}
    for run in runs:
        shares = ", ".join(f"{100 * hit:.1f} % at gap {gap}" for gap, hit in run["accuracy_by_gap"].items())
        print(f"{args.variant}, memory {run['memory']}: {shares} ({run['seconds']} s)")
    if args.record:
        write_record(args.record, **record)
        draw(record, args.record.with_suffix(".png"))
    return record
