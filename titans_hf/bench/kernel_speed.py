"""Time the memory's implementations side by side: torch, Triton, and peers where they are installed.

Ours are compared before they are timed: outputs and gradients must agree, or nothing is reported. The runs are
interleaved and the median is taken. The time of titans-pytorch's NeuralMemory includes its projections, and its maths
differ (updates at each chunk, as here); flash-linear-attention's gated delta rule is a linear memory without momentum:
a yardstick for speed only.

    python scripts/bench/kernel_speed.py --record runs/kernels           # on a GPU
    python scripts/bench/kernel_speed.py --device cpu --record runs/cpu  # tiny, in Triton's interpreter
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from ..configuration_titans import MEMORY_FORGET_TO
from ..memory_ops import MemoryState, neural_memory
from ..memory_rule import RULES
from ..records.files import plots, write_csv, write_record

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"highest": 1e-4, "high": 1e-2, "medium": 1e-2}  # relative, by torch's float32 matmul precision


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    width: int
    expansion: int
    depth: int
    chunk: int
    write: str = "chunk"  # the rule, as in `memory_write`
    forget_to: str = "start"  # as in `memory_forget_to`

    def inputs(self, tokens: int, device: str):
        """Leaves that require gradients: tokens and gates, start weights."""
        g = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=g).to(device)  # noqa: E731
        shape = (self.batch, tokens, self.heads)
        q, k, v = (torch.nn.functional.normalize(normal(*shape, self.width), dim=-1) for _ in range(3))
        theta, eta, alpha = (scale * normal(*shape).sigmoid() for scale in (0.1, 0.9, 0.02))
        widths = [self.width, *[self.width * self.expansion] * (self.depth - 1), self.width]
        layers = list(zip(widths, widths[1:], strict=False))
        weights = [normal(self.batch, self.heads, *layer) / layer[0] ** 0.5 for layer in layers]
        return [x.requires_grad_() for x in (q, k, v, theta, eta, alpha, *weights)]

    def state(self, weights) -> MemoryState:
        """The memory before the first token."""
        weights = tuple(weights)
        momentum = tuple(torch.zeros_like(W) for W in weights)
        return MemoryState(weights, momentum, start=weights if self.forget_to == "start" else None)


def ours(sizes: Sizes, backend: str) -> Callable:
    def read(q, k, v, theta, eta, alpha, *weights):
        state = sizes.state(weights)
        rule = RULES[sizes.write](10.0)
        y, _ = neural_memory(q, k, v, theta, eta, alpha, state, chunk_size=sizes.chunk, rule=rule, backend=backend)
        return y

    return read


def titans_pytorch(sizes: Sizes, device: str) -> Callable:
    from titans_pytorch import MemoryMLP, NeuralMemory

    model = MemoryMLP(sizes.width, depth=sizes.depth, expansion_factor=sizes.expansion)
    dim = sizes.heads * sizes.width
    memory = NeuralMemory(
        dim, chunk_size=sizes.chunk, batch_size=sizes.chunk, heads=sizes.heads, dim_head=sizes.width, model=model
    ).to(device)
    return lambda q, *_: memory(q.flatten(2))[0]


def gated_delta_rule(sizes: Sizes, device: str) -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if device == "cpu":
        raise ImportError("its kernels need a GPU")
    half = torch.bfloat16
    return lambda q, k, v, theta, eta, alpha, *_: chunk_gated_delta_rule(
        q.to(half), k.to(half), v.to(half), g=torch.log1p(-alpha), beta=theta.to(half)
    )[0]


def contenders(sizes: Sizes, device: str) -> dict[str, Callable]:
    found = {"torch": ours(sizes, "torch"), "triton": ours(sizes, "triton")}
    for name, make in (("titans-pytorch", titans_pytorch), ("fla gated delta rule", gated_delta_rule)):
        try:
            found[name] = make(sizes, device)
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return found


def distance(mine: list, theirs: list) -> float:
    """The largest difference, relative to the size of what is compared; NaN if there is one anywhere."""
    pairs = zip(mine, theirs, strict=True)
    return torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=1e-6) for a, b in pairs]).max().item()


def disagreement(first: Callable, second: Callable, inputs: list) -> float:
    """The largest difference of outputs and of all gradients."""
    found = []
    for read in (first, second):
        y = read(*inputs)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    return distance(*found)


def ragged_disagreement(sizes: Sizes, device: str) -> float:
    """Rows of different lengths: outputs, final states, and the gradients of all of them."""
    inputs, found = sizes.inputs(5 * sizes.chunk, device), []
    lengths = torch.tensor([5 * sizes.chunk - 3, *[2 * sizes.chunk] * (sizes.batch - 1)], device=device)
    mask = torch.arange(5 * sizes.chunk, device=device) < lengths[:, None]
    for backend in ("triton", "torch"):
        state = sizes.state(inputs[6:])
        rule = RULES[sizes.write](1.0)
        y, after = neural_memory(*inputs[:6], state, chunk_size=sizes.chunk, rule=rule, mask=mask, backend=backend)
        outputs = [y, *after.current()[0], *after.current()[1]]
        found.append([*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs)])
    return distance(*found)


@torch.no_grad()
def decoding_disagreement(sizes: Sizes, device: str) -> float:
    """Decoding token by token, past the end of a chunk."""
    inputs, found = sizes.inputs(sizes.chunk + 5, device), []
    tokens, weights = inputs[:6], inputs[6:]
    for backend in ("triton", "torch"):
        state, outputs = sizes.state(weights), []
        for t in range(sizes.chunk + 5):
            y, state = neural_memory(
                *(x[:, t : t + 1] for x in tokens),
                state,
                chunk_size=sizes.chunk,
                rule=RULES[sizes.write](1.0),
                backend=backend,
            )
            outputs.append(y)
        found.append([torch.cat(outputs, 1), *state.current()[0], *state.current()[1]])
    return distance(*found)


def verify(sizes: Sizes, device: str, tolerance: float) -> None:
    """Every kernel against the torch form, for both depths and rules and wherever forgetting leads.

    On a GPU several times: a race does not show each time.
    """
    for depth, write, forget_to in tqdm([*product((1, 2), RULES, MEMORY_FORGET_TO)], desc="comparing"):
        for repeat in range(3 if device == "cuda" else 1):
            for check in (ragged_disagreement, decoding_disagreement):
                off = check(replace(sizes, depth=depth, write=write, forget_to=forget_to), device)
                if not off <= tolerance:
                    what = f"{check.__name__.split('_')[0]}, depth {depth}, by {write}, to {forget_to}, run {repeat}"
                    sys.exit(
                        f"triton and torch disagree by {off:.1e} ({what}; allowed {tolerance:.0e}): nothing is timed"
                    )


def timed(read: Callable, inputs: list, backward: bool) -> float:
    synchronise = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    synchronise()
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        y = read(*inputs)
    if backward:
        y.float().square().sum().backward()
        for x in inputs:
            x.grad = None
    synchronise()
    return time.perf_counter() - started


def measure(sizes: Sizes, lengths: list[int], repeats: int, device: str, tolerance: float) -> list[dict]:
    rows, readers = [], contenders(sizes, device)
    verify(sizes, device, tolerance)
    bar = tqdm(total=len(lengths) * 2 * (repeats + 1), desc="timing")
    for tokens in lengths:
        inputs = sizes.inputs(tokens, device)
        off = disagreement(readers["triton"], readers["torch"], inputs)
        if not off <= tolerance:
            sys.exit(f"triton and torch disagree by {off:.1e} at {tokens} tokens (allowed {tolerance:.0e}): not timed")
        for backward in (False, True):
            times = {name: [] for name in readers}
            for repeat in range(repeats + 1):
                for name, read in readers.items():
                    seconds = timed(read, inputs, backward)
                    if repeat:  # the first run compiles and warms up
                        times[name].append(seconds)
                bar.update()
            for name, found in times.items():
                median = statistics.median(found)
                rows.append(
                    dict(
                        implementation=name,
                        tokens=tokens,
                        backward=backward,
                        milliseconds=round(1e3 * median, 3),
                        tokens_per_second=round(sizes.batch * tokens / median),
                        times_torch=round(statistics.median(times["torch"]) / median, 3),
                        disagreement=f"{off:.1e}",
                    )
                )
    return rows


def draw(rows: list[dict], path: Path, title: str) -> None:
    plt = plots()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, backward in zip(axes, (False, True), strict=True):
        for name in dict.fromkeys(row["implementation"] for row in rows):
            mine = [row for row in rows if row["implementation"] == name and row["backward"] == backward]
            axis.plot([x["tokens"] for x in mine], [x["tokens_per_second"] for x in mine], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title="forward and backward" if backward else "forward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens per second")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=DEVICE, choices=("cuda", "cpu"))
    parser.add_argument("--tokens", nargs="+", type=int, help="sequence lengths")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--expansion", type=int, default=2)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--write", default="chunk", choices=RULES, help="the rule, as in memory_write")
    parser.add_argument("--forget-to", default="start", choices=MEMORY_FORGET_TO, help="as in memory_forget_to")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--precision", default="high", choices=TOLERANCE, help="torch.set_float32_matmul_precision")
    parser.add_argument("--record", type=Path, default=Path("runs/bench_kernels"))
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision(arguments.precision)
    names = ("batch", "heads", "width", "expansion", "depth", "chunk", "write", "forget_to")
    sizes, lengths = Sizes(**{name: getattr(arguments, name) for name in names}), arguments.tokens
    if arguments.device == "cpu":  # the interpreter is a thousand times slower: the script runs, its times mean nothing
        sizes, lengths, arguments.repeats = replace(sizes, batch=1, heads=2, width=16, chunk=16), [24, 48], 1
    tolerance = TOLERANCE[arguments.precision]
    rows = measure(sizes, lengths or [1024, 4096, 16384], arguments.repeats, arguments.device, tolerance)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU, Triton interpreted"
    record = write_record(arguments.record, device=where, precision=arguments.precision, sizes=vars(sizes), runs=rows)
    write_csv(record, rows)
    draw(rows, record.with_suffix(".png"), f"Neural memory on {where}")
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
