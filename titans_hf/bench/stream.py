"""Let a tiny MAC and a tiny LMM read two million tokens through the cache: all finite, memory and speed flat.

The text follows Zipf's law, repeats some passages, and is made while it is read. Each variant runs in a process of
its own. At every mark the script notes tokens per second since the mark before, resident memory (Linux; its peak, and
what remains after freed memory is returned), the cache's bytes, and whether logits and cache were finite. It fails if
something was not, if the cache changed its size, or if what remains varied by more than `--tolerance` after the
first mark.

    python scripts/bench/stream.py --record model_cards/records/stream
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from .. import TitansCache, TitansForCausalLM
from ..records.files import plots, write_csv, write_record
from ..train.small_titans import small_titans
from .resident import hand_back, resident, restart_peak

VOCABULARY = 256
PASSAGE = 128  # tokens
RETURNING = 32  # passages that are read again and again


def build_model(variant: str, width: int, layers: int) -> TitansForCausalLM:
    heads = {"num_hidden_layers": layers, "num_attention_heads": width // 32}
    return small_titans(variant, VOCABULARY, width, segment_size=128, **heads).eval()


def passages(seed: int = 0) -> Iterator[torch.Tensor]:
    """Endless text: one passage in four, at random, is one of the returning ones, the others are new."""
    generator = torch.Generator().manual_seed(seed)
    zipf = 1 / torch.arange(1.0, VOCABULARY + 1)

    def new(count: int) -> torch.Tensor:
        tokens = torch.multinomial(zipf, count * PASSAGE, replacement=True, generator=generator)
        return tokens.view(count, PASSAGE)

    returning = new(RETURNING)
    while True:
        which = int(torch.randint(0, 4 * RETURNING, (), generator=generator))
        yield returning[which] if which < RETURNING else new(1)[0]


def pieces(sizes: list[int]) -> Iterator[torch.Tensor]:
    """The text cut into pieces [1, size] of the given sizes."""
    text, held = passages(), torch.empty(0, dtype=torch.long)
    for size in sizes:
        while len(held) < size:
            held = torch.cat((held, next(text)))
        yield held[None, :size]
        held = held[size:]


def cut(tokens: int, piece: int) -> list[int]:
    """Sizes of pieces that add up to `tokens`; the last one may be shorter."""
    return [min(piece, tokens - start) for start in range(0, tokens, piece)]


@torch.no_grad()
def stream(variant: str, arguments: argparse.Namespace) -> list[dict]:
    """Read from mark to mark; returns a row for each."""
    torch.set_num_threads(arguments.threads)
    model = build_model(variant, arguments.width, arguments.layers)
    cache, rows = TitansCache(model.config, rewind=False), []
    stretches = [cut(stretch, arguments.piece) for stretch in cut(arguments.tokens, arguments.mark)]
    text = pieces([size for stretch in stretches for size in stretch])
    with tqdm(total=arguments.tokens, desc=variant, unit=" tokens", unit_scale=True) as bar:
        for stretch in stretches:
            restart_peak()
            started, finite = time.perf_counter(), True
            for size in stretch:
                output = model(next(text), past_key_values=cache, use_cache=True, logits_to_keep=1)
                finite &= bool(output.logits.isfinite().all())
                bar.update(size)
            seconds = time.perf_counter() - started
            peak = resident("VmHWM")
            hand_back()
            finite &= all(bool(x.isfinite().all()) for layer in cache.layers for x in layer.tensors())
            rows.append(
                dict(
                    variant=variant,
                    tokens_read=cache.get_seq_length(),
                    tokens_per_second=round(sum(stretch) / seconds),
                    resident_mebibytes=round(resident(), 1),
                    peak_mebibytes=round(peak, 1),
                    cache_bytes=cache.nbytes,
                    finite=finite,
                )
            )
    return rows


def in_own_process(variant: str, arguments: argparse.Namespace) -> list[dict]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(stream, variant, arguments).result()


def problems(rows: list[dict], tolerance: float) -> list[str]:
    """The problems of a variant's rows, as messages."""
    found = []
    variant, memory = rows[0]["variant"], [row["resident_mebibytes"] for row in rows]
    broken = [row["tokens_read"] for row in rows if not row["finite"]]
    if broken:
        found.append(f"{variant}: logits or cache were not finite within {broken[0]:,} tokens")
    if max(memory) > (1 + tolerance) * min(memory):
        found.append(f"{variant}: resident memory went from {min(memory)} to {max(memory)} MiB after the first mark")
    if len({row["cache_bytes"] for row in rows}) > 1:
        found.append(f"{variant}: the cache did not keep its size")
    return found


def draw(rows: list[dict], path: Path) -> None:
    plt = plots()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        read = [row["tokens_read"] / 1e6 for row in mine]
        left.plot(read, [row["tokens_per_second"] for row in mine], "o-", label=variant, markersize=4)
        (line,) = right.plot(read, [row["resident_mebibytes"] for row in mine], "o-", label=variant, markersize=4)
        peaks = [row["peak_mebibytes"] for row in mine]
        right.plot(read, peaks, ":", color=line.get_color(), label=f"{variant}, peak since the mark before")
    left.set(xlabel="million tokens read", ylabel="tokens per second", title="speed since the mark before")
    left.yaxis.set_major_formatter("{x:,.0f}")
    right.set(xlabel="million tokens read", ylabel="MiB", title="resident memory of the process")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--mark", type=int, default=100_000, help="tokens from mark to mark")
    parser.add_argument("--piece", type=int, default=4_096, help="tokens per forward")
    parser.add_argument("--variants", nargs="+", default=["mac", "lmm"])
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32, the width of a head")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.02, help="by which resident memory may vary")
    parser.add_argument("--record", type=Path, default=Path("runs/stream"), help="write <record>.json, .csv and .png")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)  # as in the processes that read: the record names it
    runs = [in_own_process(variant, arguments) for variant in arguments.variants]
    rows = [row for run in runs for row in run]
    found = [problem for run in runs for problem in problems(run, arguments.tolerance)]
    record = write_record(arguments.record, rows=rows, problems=found)
    write_csv(record, rows)
    draw(rows, record.with_suffix(".png"))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if found:
        raise SystemExit("\n".join(found))
