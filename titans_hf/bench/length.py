"""Cost per token and cache size against the length read: neither grows.

Each variant reads up to `--tokens` tokens through its cache. At growing lengths the script keeps a clone, measures its
size, and times `--steps` decode steps from it, interleaved over repeats. For comparison, the KV cache of
a full-attention model of the same width and depth.

    python scripts/bench/length.py --tokens 200000 --record model_cards/records/length
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from .. import TitansCache, TitansForCausalLM
from ..configuration_titans import VARIANTS
from ..records.files import plots, write_csv, write_record
from ..train.small_titans import small_titans

VOCABULARY = 256
MARKS = (1_000, 4_000, 16_000, 64_000, 200_000)


@torch.no_grad()
def decode_milliseconds(model: TitansForCausalLM, cache: TitansCache, steps: int) -> float:
    """Median time of one decode step from the given cache, which is left as it was."""
    cache, times = cache.clone(), []
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(steps):
        started = time.perf_counter()
        model(token, past_key_values=cache)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


@torch.no_grad()
def read(
    variant: str, marks: list[int], piece: int
) -> tuple[TitansForCausalLM, dict[int, TitansCache], dict[int, float]]:
    """Read up to the last mark; returns clones of the cache at the marks and the reading rate since the mark before."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "segment_size": 128, "sliding_window": 128}
    model, generator = small_titans(variant, **sizes).eval(), torch.Generator().manual_seed(0)
    cache, kept, rates, place = TitansCache(model.config, rewind=False), {}, {}, 0
    bar = tqdm(total=marks[-1], desc=f"{variant}: reading", unit="token")
    for mark in marks:
        began, started = place, time.perf_counter()
        while place < mark:
            size = min(piece, mark - place)
            model(torch.randint(0, VOCABULARY, (1, size), generator=generator), past_key_values=cache)
            place += size
            bar.update(size)
        rates[mark] = (place - began) / (time.perf_counter() - started)
        kept[mark] = cache.clone()
    bar.close()
    return model, kept, rates


def measure(variant: str, marks: list[int], piece: int, steps: int, repeats: int) -> list[dict]:
    model, kept, rates = read(variant, marks, piece)
    times: dict[int, list[float]] = {mark: [] for mark in marks}
    for _ in tqdm(range(repeats), desc=f"{variant}: decoding"):  # interleaved, so that noise hits every length alike
        for mark in marks:
            times[mark].append(decode_milliseconds(model, kept[mark], steps))
    config = model.config
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return [
        {
            "variant": variant,
            "tokens_read": mark,
            "decode_ms_per_token": round(statistics.median(times[mark]), 3),
            "read_tokens_per_second": round(rates[mark]),
            "cache_bytes": kept[mark].nbytes,
            "full_attention_kv_bytes": token_bytes * mark,
        }
        for mark in marks
    ]


def draw(rows: list[dict], path: Path) -> None:
    plt = plots()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        lengths = [row["tokens_read"] for row in mine]
        left.plot(lengths, [row["decode_ms_per_token"] for row in mine], "o-", label=variant)
        right.plot(lengths, [row["cache_bytes"] / 2**20 for row in mine], "o-", label=variant)
    right.plot(lengths, [row["full_attention_kv_bytes"] / 2**20 for row in mine], "k:", label="full-attention KV cache")
    left.set(xscale="log", xlabel="tokens read before", ylabel="ms per decoded token", title="decode step")
    left.set_ylim(bottom=0)
    right.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="MiB per sequence", title="cache")
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--piece", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--record", type=Path, help="write <record>.json, .csv and .png")
    args = parser.parse_args()

    marks = [mark for mark in MARKS if mark < args.tokens] + [args.tokens]
    rows = [row for variant in args.variants for row in measure(variant, marks, args.piece, args.steps, args.repeats)]
    print(f"{'variant':8}{'tokens':>9}{'ms/token':>10}{'read tok/s':>12}{'cache KiB':>11}{'KV KiB':>9}")
    for row in rows:
        print(
            f"{row['variant']:8}{row['tokens_read']:>9}{row['decode_ms_per_token']:>10.2f}"
            f"{row['read_tokens_per_second']:>12}{row['cache_bytes'] // 1024:>11}"
            f"{row['full_attention_kv_bytes'] // 1024:>9}"
        )
    if args.record:
        write_record(args.record, rows=rows)
        write_csv(args.record, rows)
        draw(rows, args.record.with_suffix(".png"))
