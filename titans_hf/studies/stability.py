"""Stream hard input through every variant's cache and check that logits and memory stay finite.

Rows of the batch: one repeated token, two alternating tokens, random tokens. Each variant runs with the default memory
settings at a tiny width, in float32 and bfloat16; and in float32 with gates worse than the defaults allow: steps of
0.1, the longest momentum, which adds each up a thousand times, and no forgetting. Then only the cap on surprise bounds
the memory.

    python scripts/studies/stability.py --tokens 200000 --record model_cards/records/stability
"""

import argparse
import time
from pathlib import Path

import torch
from tqdm import tqdm

from .. import TitansCache, TitansConfig, TitansForCausalLM
from ..configuration_titans import VARIANTS
from ..records.files import write_record
from ..train.small_titans import small_titans

VOCAB = 256
ROWS = ("repeated", "alternating", "random")
LONGEST_ETA = 0.999  # that `TitansConfig` admits


def build_model(variant: str, worst_gates: bool = False, hidden_size: int = 16, **fields) -> TitansForCausalLM:
    """Tiny width, default memory settings; with the worst gates, theta is 0.1, eta 0.999 and alpha 0 at every token."""
    model = small_titans(
        variant,
        VOCAB,
        hidden_size,
        intermediate_size=24,
        segment_size=128,
        sliding_window=64,
        memory_theta_max=0.1 / (1 - LONGEST_ETA) if worst_gates else None,
        memory_eta_max=LONGEST_ETA if worst_gates else TitansConfig.memory_eta_max,
        initializer_range=0.25,
        **fields,
    ).eval()
    if worst_gates:
        with torch.no_grad():
            for layer in model.model.layers:
                bias = torch.tensor([50.0, 50.0, -50.0]).repeat_interleave(model.config.memory_num_heads)
                layer.mixer.memory.write_gates.proj.bias.copy_(bias)
    return model


def hard_rows(start: int, stop: int) -> torch.Tensor:
    """Tokens [3, stop - start] of the three endless rows."""
    place = torch.arange(start, stop)
    random = torch.randint(0, VOCAB, (stop - start,), generator=torch.Generator().manual_seed(start))
    return torch.stack((torch.full_like(place, 7), 11 + place % 2, random))


@torch.no_grad()
def stream(variant: str, dtype: torch.dtype, worst_gates: bool, tokens: int, piece: int) -> dict:
    """Read the rows in pieces; returns whether all values were finite and how large the memory grew."""
    model = build_model(variant, worst_gates).to(dtype)
    cache, finite, started = TitansCache(model.config, rewind=False), True, time.time()
    name = f"{variant} {str(dtype)[6:]}{' worst gates' if worst_gates else ''}"
    norms = {}
    for start in tqdm(range(0, tokens, piece), desc=name):
        stop = min(start + piece, tokens)
        finite &= bool(model(hard_rows(start, stop), past_key_values=cache).logits.isfinite().all())
        weights = [W for layer in cache.layers for W in layer.carry.memory.current()[0]]
        finite &= all(bool(W.isfinite().all()) for W in weights)
        norms[str(stop)] = [round(max(W[row].norm().item() for W in weights), 3) for row in range(len(ROWS))]
    return {
        "variant": variant,
        "dtype": str(dtype)[6:],
        "gates": "worst" if worst_gates else "as started",
        "finite": finite,
        "largest_weight_norm_by_row": norms[str(tokens)],
        "seconds": round(time.time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--piece", type=int, default=4_000)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--record", type=Path, help="write <record>.json")
    args = parser.parse_args()

    cases = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
    runs = [stream(variant, *case, args.tokens, args.piece) for variant in args.variants for case in cases]
    for run in runs:
        verdict = "finite" if run["finite"] else "NOT FINITE"
        norms = run["largest_weight_norm_by_row"]
        print(f"{run['variant']:4} {run['dtype']:9} gates {run['gates']:11} {verdict}, largest weight norms {norms}")
    if args.record:
        write_record(args.record, tokens=args.tokens, rows=ROWS, runs=runs)
    if not all(run["finite"] for run in runs):
        raise SystemExit("some state or logits were not finite")
