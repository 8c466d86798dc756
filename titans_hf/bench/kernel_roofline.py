"""What the kernels compute and move, from their own constants, and the best time for it on an A100 and an H100.

Arithmetic, not measurement: nothing here was timed on a GPU. Writes the section into kernels/README.md.

    python scripts/bench/kernel_roofline.py [--check]
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from titans_kernels.served import GROUP, PIECE, Shape

from .. import TitansConfig
from ..train.gpus import GPU, GPUS

README = Path(__file__).parents[2] / "kernels" / "README.md"
BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"
PRESET, TOKENS, BATCH = "titans-mag-340m", 4096, 8
FLOAT = 4  # bytes
A100, H100 = GPUS["a100"], GPUS["h100"]


@dataclass
class Work:
    """The work of a kernel for one chunk of one head: multiply-adds, numbers moved from memory and from the caches."""

    kernel: str
    sequential: bool
    macs: int = 0
    memory: int = 0
    cached: int = 0

    def product(self, rows: int, columns: int, inner: int, block: int, in_registers: bool = False) -> None:
        """A tiled matrix product: the left operand, if not in registers, is read once per block of columns."""
        self.macs += rows * columns * inner
        self.cached += inner * columns + (0 if in_registers else rows * inner * math.ceil(columns / block))

    def update(self, wide: int, high: int, C: int, block: int) -> None:
        """Two products `x^T error` that share their tiles."""
        self.macs += 2 * C * wide * high
        self.cached += C * high + C * wide * math.ceil(high / block)

    def weight_gradient(self, wide: int, high: int, C: int, block: int) -> None:
        """A product `x^T d`, tile by tile."""
        self.macs += C * wide * high
        self.cached += C * high * math.ceil(wide / block) + C * wide * math.ceil(high / block)


def forward_work(shape: Shape, to_start: bool) -> list[Work]:
    """Where forgetting leads `to_start`, that is read once for all chunks of a row: from the caches."""
    C, D, F = shape.chunk, shape.width, shape.hidden
    state = 4 * D * F  # weights and momentum of both layers
    entry = Work("q, k, v made contiguous", False, memory=6 * C * D)
    coefficients = Work("coefficients_kernel", False, 2 * C * C, C * C + 7 * C)
    states = Work("states_kernel", True, memory=2 * C * D + state + 3 * C * F + C * D + 4 * C, cached=2 * state)
    block = shape.constants("states_kernel")["BF"]
    for columns, inner in ((F, D), (D, F), (F, D)):
        states.product(C, columns, inner, block)
    for wide, high in ((F, D), (D, F)):
        states.update(wide, high, C, block)
    states.cached += to_start * state // 2
    outputs = Work("outputs_kernel", False, memory=4 * C * D + C * C + state + 3 * C * F + 4 * C)
    block = shape.constants("outputs_kernel")["BF"]
    programs, Q = C // shape.queries, shape.queries
    for _ in range(programs):
        own = ((F, D), (D, F)) * to_start
        for columns, inner in ((C, D), (F, D), (F, D), (C, F), (D, F), (D, F), *own):
            outputs.product(Q, columns, inner, block)
        for columns in (F, D):
            outputs.product(Q, columns, C, block, in_registers=True)
    return [entry, coefficients, states, outputs]


def backward_work(shape: Shape, to_start: bool) -> list[Work]:
    C, D, F = shape.chunk, shape.width, shape.hidden
    state = 4 * D * F
    entry, coefficients, states, _ = forward_work(shape, to_start)
    coefficients.memory += C * C  # all rows of the momentum's coefficients
    states = Work(states.kernel, False, states.macs, states.memory + C * F, states.cached)  # all groups at once
    read = Work("read_backward_kernel", False, memory=2 * state + 7 * C * (D + F) + 4 * C * C + 6 * C)
    block = shape.constants("read_backward_kernel")["BF"]
    for columns, inner in ((C, D), (F, D), (F, D), (F, C), (C, F), (C, D), *(((F, D),) * to_start)):
        read.product(C, columns, inner, block)
    for wide, high in ((D, F), (F, D)):  # each layer's output and input width
        own = ((high, wide),) * to_start
        for columns, inner in ((C, wide), (high, wide), (high, wide), (high, C), (high, C), (wide, C), *own):
            read.product(C, columns, inner, block)
        read.update(wide, high, C, block)
    write = Work("write_backward_kernel", True, memory=2 * state + 6 * C * (D + F) + 10 * C, cached=2 * state)
    block = shape.constants("write_backward_kernel")["BF"]
    for wide, high in ((F, D), (D, F)):
        for columns, inner in ((wide, high), (wide, high), (high, wide), (high, wide)):
            write.product(C, columns, inner, block)
    for columns, inner in ((D, F), (F, D), (D, F)):
        write.product(C, columns, inner, block)
    for wide, high, products in ((D, F, 2), (F, D, 1)):
        for _ in range(products):
            write.weight_gradient(wide, high, C, block)
    gates = Work("gates_backward_kernel", False, 2 * C * C, 3 * C * C + 12 * C)
    start = [start_work(shape, [(D, F), (F, D)])] if to_start else []
    return [entry, coefficients, states, read, write, *start, gates]


def start_work(shape: Shape, factors: list[tuple[int, int]]) -> Work:
    """The start's gradient: products `x^T d` of these widths, and the gradient of the weights after the chunk."""
    C, D, F = shape.chunk, shape.width, shape.hidden
    start = Work("start_backward_kernel", False, memory=4 * D * F + C, cached=2 * D * F)
    block = shape.constants(start.kernel)["BF"]
    for wide, high in factors:
        start.memory += C * (wide + high)
        start.weight_gradient(wide, high, C, block)
    return start


def delta_states_work(shape: Shape, to_start: bool) -> Work:
    C, D, F = shape.chunk, shape.width, shape.hidden
    plain = next(work for work in forward_work(shape, to_start) if work.kernel == "states_kernel")
    states = Work("delta_states_kernel", True, memory=plain.memory + 3 * C * C, cached=2 * 4 * D * F)
    block = shape.constants(states.kernel)["BF"]
    own = ((D, F), (F, D)) * to_start
    for columns, inner in ((F, D), (C, F), (D, F), (D, F), (C, D), (F, D), (F, D), (F, C), *own):
        states.product(C, columns, inner, block)
    for wide, high in ((F, D), (D, F)):
        states.update(wide, high, C, block)
    states.cached += to_start * 2 * D * F
    return in_turn(states, C, D)


def delta_write_backward_work(shape: Shape, to_start: bool) -> Work:
    C, D, F = shape.chunk, shape.width, shape.hidden
    plain = next(work for work in backward_work(shape, to_start) if work.kernel == "write_backward_kernel")
    write = Work("delta_write_backward_kernel", True, memory=plain.memory + 7 * C * C + 2 * C * D, cached=2 * 4 * D * F)
    block = shape.constants(write.kernel)["BF"]
    for wide, high in ((F, D), (D, F)):
        for columns, inner in ((wide, high), (wide, high), (high, wide), (high, wide)):
            write.product(C, columns, inner, block)
    hidden_errors = ((C, F), (C, D), (D, F), (D, F), (D, C), (D, C))
    answers = ((C, D), (F, D), (F, D), (F, C), (F, C), (F, C), (D, F))
    own = ((D, F), (F, D)) * to_start
    for columns, inner in hidden_errors + answers + own:
        write.product(C, columns, inner, block)
    for wide, high, products in ((D, F, 1), (F, D, 4)):
        for _ in range(products):
            write.weight_gradient(wide, high, C, block)
    return in_turn(write, C, D)


def in_turn(work: Work, C: int, D: int) -> Work:
    """With a substitution, which reads the rows before each row."""
    work.macs += C * C * D // 2
    work.cached += C * C * D // 2
    return work


def by_delta(works: list[Work], *others: Work) -> list[Work]:
    """The kernels of a pass, some of them replaced by those that errors in turn need."""
    replaced = {work.kernel.removeprefix("delta_"): work for work in others}
    return [replaced.get(work.kernel, work) for work in works]


def seconds(work: Work, gpu: GPU, rows: int, chunks: int, rate: float) -> tuple[float, str]:
    """The shortest time for all rows and chunks, and what limits it."""
    busy = min(rows, gpu.processors) if work.sequential else gpu.processors
    total = rows * chunks
    bounds = {
        "arithmetic": 2 * work.macs * total / (rate * busy / gpu.processors),
        "memory": FLOAT * work.memory * total / gpu.bandwidth,
        "L2": FLOAT * work.cached * total / (gpu.l2 * busy / gpu.processors),
    }
    limit = max(bounds, key=bounds.get)
    return bounds[limit], limit


def kernel_table(works: list[Work], C: int) -> str:
    lines = [
        "| kernel | kFLOP | bytes, memory | bytes, L2 | FLOP/byte, memory | FLOP/byte, L2 |",
        "|---|---|---|---|---|---|",
    ]
    for work in works:
        flop, memory, cached = 2 * work.macs / C, FLOAT * work.memory / C, FLOAT * work.cached / C
        by_l2 = f"{flop / cached:.1f}" if cached else ""
        name = f"`{work.kernel}`" if work.macs else work.kernel
        lines.append(f"| {name} | {flop / 1e3:.1f} | {memory:,.0f} | {cached:,.0f} | {flop / memory:.0f} | {by_l2} |")
    return "\n".join(lines)


def time_table(passes: dict[str, list[Work]], rows: int, chunks: int) -> str:
    lines = ["| pass | GPU | best time | tokens/s of one layer | share of the TF32 peak | longest kernel, its limit |"]
    lines.append("|---|---|---|---|---|---|")
    for name, works in passes.items():
        for gpu in (A100, H100):
            times = {work.kernel: seconds(work, gpu, rows, chunks, gpu.tf32) for work in works}
            total = sum(time for time, _ in times.values())
            longest = max(times, key=lambda kernel: times[kernel][0])
            share = sum(2 * work.macs for work in works) * rows * chunks / total / gpu.tf32
            rate = BATCH * TOKENS / total
            lines.append(
                f"| {name} | {gpu.name} | {total * 1e3:.2f} ms | {rate / 1e6:.1f} M | {share:.0%} | "
                f"`{longest}` {times[longest][0] / total:.0%}, {times[longest][1]} |"
            )
    return "\n".join(lines)


def section() -> str:
    config = TitansConfig.preset(PRESET)
    shape = Shape(2, config.memory_chunk_size, config.head_dim, config.head_dim * config.memory_expansion)
    C, D, F = shape.chunk, shape.width, shape.hidden
    heads, chunks, state = config.memory_num_heads, TOKENS // C, 4 * D * F * FLOAT
    to_start = config.memory_forget_to == "start"
    forward, backward = forward_work(shape, to_start), backward_work(shape, to_start)
    states, write = delta_states_work(shape, to_start), delta_write_backward_work(shape, to_start)
    states_again = Work(states.kernel, False, states.macs, states.memory + C * F, states.cached)
    start = [start_work(shape, [(D, F), (F, D), (F, D), (F, D)])] * to_start
    delta_forward, delta_backward = by_delta(forward, states), by_delta(backward, states_again, write, *start)
    passes = {"forward": forward, "forward, by delta": delta_forward}
    passes |= {"backward": backward, "backward, by delta": delta_backward}
    moved = sum(work.memory for work in forward) * FLOAT / C
    token_scan, materialised = 2 * state, 6 * (state // 2)
    factors = C * (2 * D + 2 * F + 3) * FLOAT
    own = to_start * state // 2
    step = 2 * (state + factors) + own
    block = shape.constants("states_kernel")["BF"]
    tiles = FLOAT * (2 * C * block + block * block)
    on_a100, on_h100 = (step * heads / gpu.bandwidth * 1e6 for gpu in (A100, H100))
    return f"""
Written by `python scripts/bench/kernel_roofline.py`: computed from the kernels' constants; nothing was timed.
`{PRESET}` has {heads} heads of width {D}, a hidden width of {F}, chunks of {C}, and a memory that forgets towards its
start. Per token and head, forward:

{kernel_table(forward, C)}

and backward:

{kernel_table(backward, C)}

By delta these differ:

{kernel_table([states, write, *start], C)}

"Memory" counts every tensor once for each kernel that uses it; "L2" counts the repeated reads of the products' tiles.

On-chip memory: a step of a product in `states_kernel` holds {tiles:,} bytes of tiles (left {C} x {block}, right
{block} x {block}, result {C} x {block}); the table above has its registers and shared memory, with one program per
processor. The state of one head takes {state:,} bytes, half of a processor's register file of 262,144 bytes, and the
products would not fit beside it. So the state stays in L2, whose bandwidth limits the sequential kernels.

The best possible time of one layer, batch {BATCH}, {TOKENS:,} tokens ({BATCH * heads} programs per sequential kernel):

{time_table(passes, BATCH * heads, chunks)}

By delta these bounds leave out that the substitutions are serial: C steps with two barriers for each chunk and pass.

The same forward computed in other ways, in bytes of memory traffic per token and head:

| method | bytes |
|---|---|
| these kernels | {moved:,.0f} |
| a scan over tokens that reads and writes the state at each | {token_scan:,} ({token_scan / moved:.0f}x) |
| every token's gradient, momentum and weights, each written and read | {materialised:,} ({materialised / moved:.0f}x) |

For the backward the forward saves {state // (GROUP * C):,} bytes of checkpoints per token and head (one state in
{GROUP} chunks; all of them would take {state // C:,}). The backward recomputes the others in pieces of {PIECE} chunks.

A decoding step reads the state ({state:,} bytes per head) and the open chunk's factors ({factors:,}), and writes both.
It reads the start, too ({own:,}). Together {step:,} bytes, which for {heads} heads take {on_a100:.1f} us on an A100 and
{on_h100:.1f} us on an H100. Updating in place would save the writes; new tensors keep the old state valid and need no
synchronisation with the host.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the README is out of date")
    arguments = parser.parse_args()
    text = README.read_text()
    before, rest = text.split(BEGIN)
    updated = before + BEGIN + section() + END + rest.split(END)[1]
    if arguments.check:
        sys.exit(updated != text)
    README.write_text(updated)
    print(section())
