"""The shapes that have kernels, and the sizes these are launched with, for dispatch, launches and resource table."""

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNKS, WIDTHS, EXPANSIONS, MAX_DEPTH = (16, 32, 64), (16, 32, 64, 128), (1, 2, 4), 2
MAX_ROWS = 65_535  # a CUDA grid's second dimension
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

PIECE = 64  # most chunks whose states are in memory at a time
BUFFERS = 2**30  # most bytes for the states of a piece
GROUP = 8  # chunks between two checkpoints that the forward saves for the backward
ON_CHIP_WIDTH = {"tf32": 64, "ieee": 16}  # one layer up to this width stays in registers between chunks

BLOCK = 32  # columns of a tile, and of the inner dimension in one step of a product
SMALL = ("write_backward_kernel", "delta_states_kernel", "delta_write_backward_kernel", "token_kernel")
BLOCKS = dict.fromkeys(SMALL, 16)  # larger tiles would spill
QUERIES = 32  # tokens of a chunk that one program of the outputs kernel reads
STAGES = 1  # no pipelining of loads: the loops have one to four steps
WARPS = {"coefficients_kernel": 1, "gates_backward_kernel": 1, "outputs_kernel": 4}
THREADS = 256  # of the other kernels: 8 warps on NVIDIA, 4 on AMD


class Rule(NamedTuple):
    """What the kernels know of a write: the fields of `titans_hf.memory_rule.Rule`, and whether it is `DeltaRule`."""

    max_surprise: float | None
    normalised: bool
    hidden_step: float
    delta: bool


@dataclass(frozen=True)
class Shape:
    """The sizes that a kernel is compiled for."""

    depth: int
    chunk: int
    width: int
    hidden: int

    def on_chip(self, precision: str) -> bool:
        return self.depth == 1 and self.width <= ON_CHIP_WIDTH[precision]

    @property
    def queries(self) -> int:
        return min(QUERIES, self.chunk)

    def constants(self, kernel: str) -> dict[str, int]:
        """The sizes under the names of the kernels' arguments; a kernel uses those it has."""
        block = min(BLOCKS.get(kernel, BLOCK), self.width)
        blocks = dict(BD=block, BF=block, BC=min(block, self.chunk))
        return dict(DEPTH=self.depth, C=self.chunk, D=self.width, F=self.hidden, BQ=self.queries, **blocks)


def options(kernel: str, amd: bool) -> dict[str, int]:
    """Triton's options for a kernel."""
    chosen = dict(num_warps=WARPS.get(kernel, THREADS // (64 if amd else 32)), num_stages=STAGES)
    if not amd:
        chosen["maxnreg"] = 255  # by default ptxas spills a few bytes to fit two programs on a processor
    return chosen


def every_shape() -> list[Shape]:
    """Every shape that has kernels: `refusal` is None for these."""
    linear = [Shape(1, C, D, D) for C in CHUNKS for D in WIDTHS]
    return linear + [Shape(2, C, D, D * times) for C in CHUNKS for D in WIDTHS for times in EXPANSIONS]


def shape_of(weights, chunk_size: int) -> Shape:
    return Shape(len(weights), chunk_size, *weights[0].shape[-2:])


def piece_of(rows: int, shape: Shape) -> int:
    """The number of chunks in a piece: whole groups, as many as `BUFFERS` allows."""
    state = 2 * shape.depth * shape.width * shape.hidden * 4 * rows
    return max(GROUP, min(PIECE, BUFFERS // state // GROUP * GROUP))


def refusal(weights, q: Tensor, chunk_size: int) -> str | None:
    """Why the kernels cannot run for this memory and these tokens; None if they can."""
    first, device = weights[0], q.device.type
    (width, hidden), rows = first.shape[-2:], first.shape[0] * first.shape[1]
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    for served, what in (
        (device in ("cuda", "meta") or interpreted, f"{device.upper()} tensors, only those of GPUs"),
        (first.dtype == torch.float32, f"a state in {first.dtype}, only in float32"),
        (q.dtype in DTYPES, f"tokens in {q.dtype}, only in {DTYPES}"),
        (len(weights) <= MAX_DEPTH, f"a memory of {len(weights)} layers, only of 1 or {MAX_DEPTH}"),
        (chunk_size in CHUNKS, f"a chunk of {chunk_size} tokens, only of {CHUNKS}"),
        (rows <= MAX_ROWS, f"a batch times heads of {rows}, only to {MAX_ROWS}"),
        (width in WIDTHS, f"a head width of {width}, only of {WIDTHS}"),
        (hidden in [width * times for times in EXPANSIONS], f"a hidden width of {hidden}, only {EXPANSIONS} x {width}"),
    ):
        if not served:
            return what
    return None


def refuse(weights, q: Tensor, chunk_size: int) -> None:
    """Raise a ValueError with the reason of `refusal`, if there is one."""
    what = refusal(weights, q, chunk_size)
    if what is not None:
        raise ValueError(f"`backend='triton'` does not serve {what}. Use 'torch'")


def precision_of(q: Tensor) -> str:
    """The `input_precision` of products, "tf32" or "ieee"; they accumulate in float32 in both cases.

    Half-precision tokens, and float32 tokens under `torch.set_float32_matmul_precision("high")`, use TF32 where the
    GPU has it. All others use float32.
    """
    if q.device.type != "cuda":
        return "ieee"
    rounded = q.dtype != torch.float32 or _tf32_is_allowed()
    properties = torch.cuda.get_device_properties(q.device)
    has_tf32 = properties.gcnArchName.startswith("gfx942") if torch.version.hip else properties.major >= 8
    return "tf32" if rounded and has_tf32 else "ieee"


def _tf32_is_allowed() -> bool:
    """Whether torch allows TF32 products. Reading the old switch raises once the new one was set."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return torch.get_float32_matmul_precision() != "highest"
