"""Time the memory layer and whole models beside their peers (`peers.py`): interleaved, median of repeats, ratios.

Sections:
    layer     the memory layer forward, and forward and backward, beside titans-pytorch's and large matrix products with
              as many FLOPs, the bound of what torch can do; peak memory is the rise of the resident set over one
              forward and backward, each in a process of its own (Linux)
    training  tokens per second of loss and gradients, at equal width, depth and parameters
    prefill   tokens per second of reading a prompt into a cache, of the same models
    decode    single-token steps after short and long contexts, at equal width and depth; our models read every token
              of their context, and 256 steps are timed together, so that occasional work is in the mean

    pip install titans-pytorch==0.5.5
    python scripts/bench/speed.py --record model_cards/records/speed
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ..records.files import write_csv, write_record
from .peers import (
    CHUNK,
    HEAD,
    LAYERS,
    Case,
    Peer,
    Shape,
    large_products,
    of_equal_parameters,
    of_equal_width,
)
from .resident import resident, restart_peak
from .speed_plots import draw
from .speed_targets import print_targets, targets


def interleaved(timers: dict[Hashable, Callable[[], float]], repeats: int, label: str) -> dict[Hashable, float]:
    """Median of what each timer returns. They take turns, so that noise affects all alike; the first round warms up."""
    times = {key: [] for key in timers}
    with tqdm(total=(repeats + 1) * len(timers), desc=label) as bar:
        for repeat in range(repeats + 1):
            for key, timer in timers.items():
                seconds = timer()
                if repeat:
                    times[key].append(seconds)
                bar.update()
    return {key: statistics.median(found) for key, found in times.items()}


def seconds_of(run: Callable, *inputs) -> float:
    started = time.perf_counter()
    run(*inputs)
    return time.perf_counter() - started


# The memory layer


def pass_through(read: Callable, x: torch.Tensor, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        y = read(x)
    if backward and y is not None:
        y.square().mean().backward()
        x.grad = None


def layer_times(case: Case, backward: bool, repeats: int) -> list[dict]:
    torch.manual_seed(0)
    readers = {name: make(case) for name, make in LAYERS.items()}
    readers["large products"] = large_products(case, backward)
    x = torch.randn(1, case.tokens, case.heads * HEAD, requires_grad=True)
    timers = {name: partial(seconds_of, pass_through, read, x, backward) for name, read in readers.items()}
    measured = "forward and backward" if backward else "forward"
    times = interleaved(timers, repeats, f"{case}, {measured}")
    return layer_rows(case, measured, times, lambda seconds: {"milliseconds": round(1e3 * seconds, 1)})


def layer_rows(case: Case, measured: str, found: dict[str, float], figure: Callable[[float], dict]) -> list[dict]:
    return [
        dict(
            section="layer",
            implementation=name,
            tokens=case.tokens,
            expansion=case.expansion,
            measured=measured,
            **figure(value),
            times_ours=round(value / found["titans-hf"], 2),
        )
        for name, value in found.items()
    ]


def layer_memory(case: Case) -> list[dict]:
    found = {
        name: max(0.1, peak_memory(case, name)) for name in LAYERS
    }  # a small case may fit into memory that was already resident
    return layer_rows(case, "peak memory", found, lambda mebibytes: {"mebibytes": round(mebibytes, 1)})


def peak_memory(case: Case, name: str) -> float:
    """MiB that one forward and backward adds to a process."""
    code = (
        f"from titans_hf.bench import speed as b; "
        f"print(b.rise({name!r}, b.Case({case.tokens}, {case.expansion}, {case.heads}), {torch.get_num_threads()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def rise(name: str, case: Case, threads: int) -> float:
    torch.set_num_threads(threads)
    make = LAYERS[name]
    small = Case(2 * CHUNK, case.expansion, case.heads)
    pass_through(make(small), torch.randn(1, small.tokens, small.heads * HEAD, requires_grad=True), True)  # libraries
    before = resident()
    restart_peak()
    pass_through(make(case), torch.randn(1, case.tokens, case.heads * HEAD, requires_grad=True), True)
    return resident("VmHWM") - before


def measure_layer(arguments: argparse.Namespace) -> list[dict]:
    rows = []
    for expansion in arguments.expansions:
        for tokens in arguments.tokens:
            case = Case(tokens, expansion, arguments.heads)
            for backward in (False, True):
                rows += layer_times(case, backward, arguments.repeats)
        rows += layer_memory(Case(max(arguments.tokens), expansion, arguments.heads))
    return rows


# Whole models


def train_seconds(model: Peer, ids: torch.Tensor) -> float:
    seconds = seconds_of(lambda: model.loss(ids).backward())
    model.network.zero_grad()
    return seconds


def measure_training(arguments: argparse.Namespace) -> list[dict]:
    return measure_reading("training", train_seconds, arguments)


def measure_prefill(arguments: argparse.Namespace) -> list[dict]:
    return measure_reading("prefill", lambda model, ids: seconds_of(model.prefill, ids), arguments)


def measure_reading(section: str, timer: Callable, arguments: argparse.Namespace) -> list[dict]:
    torch.manual_seed(0)
    shape, tokens = shape_of(arguments), arguments.model_tokens
    models, ids = of_equal_parameters(shape), shape.draw(1, tokens)
    timers = {name: partial(timer, model, ids) for name, model in models.items()}
    times = interleaved(timers, arguments.repeats, f"{section}, {tokens:,} tokens")
    rows = [
        dict(
            section=section,
            implementation=name,
            tokens=tokens,
            batch=1,
            parameters=models[name].parameters,
            milliseconds=round(1e3 * seconds, 1),
            tokens_per_second=round(tokens / seconds, 1),
        )
        for name, seconds in times.items()
    ]
    return with_ratios(rows)


def measure_decode(arguments: argparse.Namespace) -> list[dict]:
    torch.manual_seed(0)
    models = of_equal_width(shape_of(arguments))
    rows = [row for batch in arguments.batches for row in decode_times(models, batch, arguments)]
    return with_ratios(rows)


def decode_times(models: dict[str, Peer], batch: int, arguments: argparse.Namespace) -> list[dict]:
    """Every model after every context, interleaved: contexts are compared as well as models."""
    states = {
        (name, context): model.begin(context, batch)
        for name, model in models.items()
        for context in model.contexts(sorted(arguments.contexts))
    }

    def step_seconds(name: str, context: int) -> float:
        model = models[name]
        steps = min(model.period, arguments.steps or model.period)
        ids, state = model.shape.draw(batch, steps), model.fork(states[name, context])
        return seconds_of(model.decode, state, ids) / steps

    timers = {place: partial(step_seconds, *place) for place in states}
    times = interleaved(timers, arguments.repeats, f"decode, batch of {batch}")
    return [
        dict(
            section="decode",
            implementation=name,
            batch=batch,
            context=context,
            context_was=models[name].filled,
            parameters=models[name].parameters,
            milliseconds=round(1e3 * seconds, 3),
            tokens_per_second=round(batch / seconds, 1),
            **cache_size(states[name, context], models[name].shape.kv_bytes(batch * context)),
        )
        for (name, context), seconds in times.items()
    ]


def cache_size(state, full_attention: int) -> dict:
    """Bytes of a Titans cache, and what part of a full-attention model's keys and values they are."""
    size = getattr(state, "nbytes", None)
    return {} if size is None else dict(cache_bytes=size, part_of_kv_cache=round(size / full_attention, 5))


def with_ratios(rows: list[dict]) -> list[dict]:
    """Adds to each row its rate over titans-pytorch's and over Mamba2's of the same batch and context."""
    for column, peer in (("times_titans_pytorch", "titans-pytorch mac"), ("times_mamba2", "Mamba2")):
        rates = {
            (row["batch"], row.get("context")): row["tokens_per_second"]
            for row in rows
            if row["implementation"] == peer
        }
        for row in rows:
            rate = rates.get((row["batch"], row.get("context")))
            if rate:
                row[column] = round(row["tokens_per_second"] / rate, 3)
    return rows


def shape_of(arguments: argparse.Namespace) -> Shape:
    return Shape(arguments.width, arguments.layers, arguments.vocabulary)


SECTIONS = {
    "layer": measure_layer,
    "training": measure_training,
    "prefill": measure_prefill,
    "decode": measure_decode,
}


def write(rows: list[dict], path: Path) -> None:
    record = write_record(path, runs=rows, targets=targets(rows))
    write_csv(record, rows)
    draw(rows, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=Path("runs/speed"), help="write <record>.json, .csv and plots")
    layer = parser.add_argument_group("layer")
    layer.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    layer.add_argument("--expansions", nargs="+", type=int, default=[1, 4])
    layer.add_argument("--heads", type=int, default=8)
    models = parser.add_argument_group("training, prefill and decode")
    models.add_argument("--width", type=int, default=256, help="a multiple of 64")
    models.add_argument("--layers", type=int, default=4, help="at least 4: Qwen3-Next's fourth is its first attention")
    models.add_argument("--vocabulary", type=int, default=1024)
    models.add_argument("--model-tokens", type=int, default=2048, help="tokens of training and prefill")
    contexts = [2**10, 2**12, 2**14, 2**17, 2**20]
    models.add_argument("--contexts", nargs="+", type=int, default=contexts, help="tokens before decode, at least 64")
    models.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="batch sizes of decode")
    models.add_argument(
        "--steps", type=int, help="decode at most this many tokens per measurement: quick, but not fair"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    rows = []
    for section in arguments.sections:
        rows += SECTIONS[section](arguments)
        write(rows, arguments.record)  # after each: a long run may be stopped
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print_targets(targets(rows))
