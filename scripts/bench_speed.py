"""Time the memory layer beside its peers on this machine: interleaved, median of repeats, ratios printed.

Peers: titans-pytorch's NeuralMemory with `batch_size == chunk_size`, which updates at each chunk as here, and large
matrix products with as many FLOPs, the bound of what torch can do. Both layers have their projections. Peak memory is
the rise of the resident set over one forward and backward, each in a process of its own (Linux).

    pip install titans-pytorch==0.5.5
    python scripts/bench_speed.py --record model_cards/records/speed
"""

import argparse
import csv
import importlib.util
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from records import plots, write_record
from tqdm import tqdm

from titans_hf import NeuralMemory, TitansConfig

CHUNK, WIDTH = 64, 64


@dataclass(frozen=True)
class Case:
    tokens: int
    expansion: int
    heads: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, expansion {self.expansion}"


def ours(case: Case) -> Callable:
    config = TitansConfig(
        hidden_size=case.heads * WIDTH,
        num_attention_heads=case.heads,
        memory_expansion=case.expansion,
        memory_chunk_size=CHUNK,
    )
    memory = NeuralMemory(config)
    for name, parameter in memory.named_parameters():  # the model's initialiser does this
        if name.startswith("conv") or "start" in name:
            torch.nn.init.normal_(parameter, std=0.3 if name.startswith("conv") else WIDTH**-0.5)
    return lambda x: memory(x, memory.begin(x.shape[0]))[0]


def titans_pytorch(case: Case) -> Callable:
    from titans_pytorch import MemoryMLP
    from titans_pytorch import NeuralMemory as Theirs

    model = MemoryMLP(WIDTH, depth=2, expansion_factor=case.expansion)
    sizes = dict(chunk_size=CHUNK, batch_size=CHUNK, heads=case.heads, dim_head=WIDTH)
    memory = Theirs(case.heads * WIDTH, **sizes, model=model)
    return lambda x: memory(x)[0]


LAYERS = {"titans-hf": ours}
if importlib.util.find_spec("titans_pytorch"):
    LAYERS["titans-pytorch"] = titans_pytorch
else:
    print("without titans-pytorch: it is not installed", file=sys.stderr)


def large_products(case: Case, backward: bool) -> Callable:
    """Products of 1,024 x 1,024 matrices with the FLOPs of our layer; a backward has twice those of the forward."""
    hidden, size = case.expansion * WIDTH, 1024
    memory = 11 * CHUNK * WIDTH * hidden + 2 * CHUNK**2 * (WIDTH + hidden)
    macs = case.tokens * (case.heads * memory / CHUNK + 5 * (case.heads * WIDTH) ** 2)
    count = max(1, round(macs * (3 if backward else 1) / size**3))
    a, b = torch.randn(size, size), torch.randn(size, size)

    def multiply(x):
        for _ in range(count):
            a @ b

    return multiply


def timed(read: Callable, x: torch.Tensor, backward: bool) -> float:
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        y = read(x)
    if backward and y is not None:
        y.square().mean().backward()
        x.grad = None
    return time.perf_counter() - started


def measure(case: Case, backward: bool, repeats: int) -> list[dict]:
    torch.manual_seed(0)
    readers = {name: make(case) for name, make in LAYERS.items()}
    readers["large products"] = large_products(case, backward)
    x = torch.randn(1, case.tokens, case.heads * WIDTH, requires_grad=True)
    times = {name: [] for name in readers}
    for repeat in tqdm(range(repeats + 1), desc=f"{case}, {'forward and backward' if backward else 'forward'}"):
        for name, read in readers.items():
            seconds = timed(read, x, backward)
            if repeat:  # the first warms up
                times[name].append(seconds)
    mine = statistics.median(times["titans-hf"])
    return [
        dict(
            implementation=name,
            tokens=case.tokens,
            expansion=case.expansion,
            measured="forward and backward" if backward else "forward",
            milliseconds=round(1e3 * statistics.median(found), 1),
            times_ours=round(statistics.median(found) / mine, 2),
        )
        for name, found in times.items()
    ]


def peak_memory(case: Case, name: str) -> float:
    """MiB that one forward and backward adds to a process."""
    code = (
        f"import bench_speed as b; print(b.rise({name!r}, b.Case({case.tokens}, {case.expansion}, {case.heads}), "
        f"{torch.get_num_threads()}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return float(done.stdout.split()[-1])


def rise(name: str, case: Case, threads: int) -> float:
    torch.set_num_threads(threads)
    make = LAYERS[name]
    small = Case(2 * CHUNK, case.expansion, case.heads)
    timed(make(small), torch.randn(1, small.tokens, small.heads * WIDTH, requires_grad=True), True)  # loads libraries
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    timed(make(case), torch.randn(1, case.tokens, case.heads * WIDTH, requires_grad=True), True)
    return resident("VmHWM") - before


def resident(which: str) -> float:
    """MiB of this process by Linux's count."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def measure_memory(case: Case) -> list[dict]:
    found = {name: max(0.1, peak_memory(case, name)) for name in LAYERS}  # a small case fits into what was there
    return [
        dict(
            implementation=name,
            tokens=case.tokens,
            expansion=case.expansion,
            measured="peak memory",
            mebibytes=round(mebibytes, 1),
            times_ours=round(mebibytes / found["titans-hf"], 2),
        )
        for name, mebibytes in found.items()
    ]


def draw(rows: list[dict], path: Path) -> None:
    plt = plots()
    names = ("titans-pytorch", "large products")
    groups = list(dict.fromkeys((row["measured"], row["tokens"], row["expansion"]) for row in rows))
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(groups) + 1.5), layout="constrained")
    for offset, name in zip((-0.2, 0.2), names, strict=True):
        for place, group in enumerate(groups):
            mine = [r for r in rows if (r["measured"], r["tokens"], r["expansion"]) == group]
            for row in (r for r in mine if r["implementation"] == name):
                colour = "tab:orange" if name == "titans-pytorch" else "tab:gray"
                axis.barh(place + offset, row["times_ours"], 0.36, color=colour, label=None if place else name)
                axis.text(row["times_ours"], place + offset, f" {row['times_ours']:.2f}", va="center", fontsize=8)
    axis.axvline(1, color="tab:blue", label="titans-hf = 1")
    labels = [f"{measured}, {tokens:,} tokens, expansion {expansion}" for measured, tokens, expansion in groups]
    axis.set_yticks(range(len(groups)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set(
        xlabel="time (or memory) as a multiple of titans-hf's", title="The memory layer, 8 heads of 64, chunks of 64"
    )
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--expansions", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=Path("runs/speed"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for expansion in arguments.expansions:
        for tokens in arguments.tokens:
            case = Case(tokens, expansion, arguments.heads)
            for backward in (False, True):
                rows += measure(case, backward, arguments.repeats)
        rows += measure_memory(Case(max(arguments.tokens), expansion, arguments.heads))
    record = write_record(arguments.record, runs=rows)
    with record.with_suffix(".csv").open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, record.with_suffix(".png"))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
