"""Compares the kernels with the torch form on a small case, once per process for each device and shape.

`backend="auto"` calls `passes` before it uses the kernels on a GPU: hardware, driver and Triton may be ones on which
they never ran. The case covers forward, backward and the decoding step. Its data come from a fixed seed, and the
reference is the torch form in float64. `TITANS_KERNEL_CHECK=0` skips the check.

Axis letters: B batch, H heads, N chunks, C tokens of a chunk, D head width, F hidden width.
"""

import os
import subprocess
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import normalize
from triton.errors import TritonError

from . import extend, scan
from .served import CHUNKS, EXPANSIONS, WIDTHS, Shape, precision_of

B, H, N = 2, 3, 2
CAP = 4.5  # exceeded by a third to a half of the gradients; none is so close that rounding moves it across
FIELDS = dict(max_surprise=CAP, normalised=True, hidden_step=0.8)  # of the rule; plain numbers to the kernels
TOLERANCE = {
    "ieee": 1e-4,
    "tf32": 1e-2,
}  # largest difference in a tensor, relative to its largest entry

FAILURES = (
    TritonError,  # CompilationError, OutOfResources, PTXASError
    RuntimeError,  # compiler passes, the driver, launches; a missing C compiler; torch's own CUDA errors
    subprocess.CalledProcessError,  # the C compiler, which builds Triton's launcher
    OSError,  # a missing tool or shared library
    ImportError,  # a launcher that does not load
    KeyError,  # a compiler option that this version of Triton does not know
)


@dataclass(frozen=True)
class Form:
    """One implementation of the memory: two functions and the class of their state."""

    scan_chunks: Callable
    extend_chunk: Callable
    State: type


@dataclass(frozen=True)
class Case:
    """What a check is valid for: the kernels are compiled for each of these."""

    device: torch.device
    dtype: torch.dtype  # of the tokens
    precision: str
    shape: Shape
    delta: bool  # whether errors are taken in turn, by kernels of its own
    to_start: bool  # where forgetting leads, if not to zero

    @property
    def tolerance(self) -> float:
        rounding = 0.0 if self.dtype == torch.float32 else torch.finfo(self.dtype).eps
        return TOLERANCE[self.precision] + rounding

    def __str__(self) -> str:
        how = ("errors in turn, " if self.delta else "") + ("forgetting to the start, " if self.to_start else "")
        return f"{self.shape}, {how}tokens in {self.dtype}, {self.precision} products, on {self.device}"


_results: dict[Case, bool] = {}


def passes(
    weights, q: Tensor, chunk_size: int, scan_chunks, extend_chunk, State, delta: bool = False, to_start: bool = False
) -> bool:
    """Whether the kernels agree with the torch form for tensors like these; a failure warns once.

    Under `torch.compile` the check runs during tracing, on tensors of its own, and the graph contains its result as a
    constant. Where no kernel can run (fake tensors of an absent GPU, a CUDA graph under capture) an earlier result
    counts; without one the answer is False.

    Args:
        weights, q, chunk_size: memory and tokens, of which only device, dtype and sizes matter.
        scan_chunks, extend_chunk, State: the torch form (`titans_hf.memory_ops`). `State` takes the keywords weights,
            momentum, inputs, errors, gates, length and start.
        delta: whether the rule is `DeltaRule`. Its other fields do not matter: any are the same kernels.
        to_start: whether the memory forgets towards a start.
    """
    width, hidden = weights[0].shape[-2:]
    chunk, width = _constant(chunk_size, CHUNKS), _constant(width, WIDTHS)
    hidden = _constant(hidden, [width * times for times in EXPANSIONS])
    shape = (len(weights), chunk, width, hidden)
    return _passes(q.device, q.dtype, *shape, delta, to_start, scan_chunks, extend_chunk, State)


def _constant(size: int, served) -> int:
    """The size as a Python integer. Under dynamic shapes it is a symbol, which the comparison specialises."""
    for choice in served:
        if size == choice:
            return choice
    raise ValueError(f"the kernels do not serve the size {size}, only {served}: ask `refusal` first")


@torch.compiler.assume_constant_result
def _passes(
    device, dtype, depth: int, chunk: int, width: int, hidden: int, delta, to_start, scan_chunks, extend_chunk, State
) -> bool:
    if os.environ.get("TITANS_KERNEL_CHECK") == "0":
        return True
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        return False
    precision = precision_of(SimpleNamespace(device=device, dtype=dtype))
    case = Case(device, dtype, precision, Shape(depth, chunk, width, hidden), delta, to_start)
    if case not in _results:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _results[case] = _check(case, Form(scan_chunks, extend_chunk, State))
    return _results[case]


def _check(case: Case, torch_form: Form) -> bool:
    """Run the case in a thread of its own, and warn if the kernels fail.

    A new thread is in plain eager mode, whatever surrounds the caller: autocast, no_grad, the hooks of activation
    checkpointing, fake tensors.
    """
    with ThreadPoolExecutor(1) as pool:
        problem = pool.submit(_problem, case, torch_form).result()
    if problem is not None:
        warnings.warn(
            f"the Triton kernels failed their check, so the torch form is used. {problem} ({case}). To use the kernels "
            "anyway set `memory_implementation='triton'` (`backend='triton'`), or TITANS_KERNEL_CHECK=0",
            RuntimeWarning,
            stacklevel=2,
        )
    return problem is None


def _problem(case: Case, torch_form: Form) -> str | None:
    """How the kernels fail or differ; None if they do neither."""
    kernels = Form(scan.scan_chunks, extend.extend_chunk, torch_form.State)
    expected = _compute(torch_form, Data(case, exact=True))
    try:
        return _difference(_compute(kernels, Data(case, exact=False)), expected, case.tolerance)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except FAILURES as error:
        return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str | None:
    """The tensor that differs most, if by more than the tolerance; NaN always does."""
    gaps = [(found[name] - x).abs().max() / x.abs().max().clamp(min=1e-6) for name, x in expected.items()]
    worst, place = torch.stack(gaps).nan_to_num(nan=torch.inf).max(0)
    if worst <= tolerance:
        return None
    return f"{list(expected)[place]}: relative difference {worst:.1e}, allowed {tolerance:.1e}"


class Data:
    """Random inputs on the case's device, the same in each run; `exact` gives the same numbers in float64."""

    def __init__(self, case: Case, exact: bool):
        self.case, self.exact, self.generator = case, exact, torch.Generator().manual_seed(0)
        self.layers = [(case.shape.width, case.shape.hidden), (case.shape.hidden, case.shape.width)][: case.shape.depth]

    def place(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        x = x.to(self.case.device, dtype)
        return x.double() if self.exact else x

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(B, H, *shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def gates(self, *shape: int) -> list[Tensor]:
        """theta, eta, alpha [B, H, *shape]; at the first token of two heads eta and alpha are exactly 0 or 1."""
        theta, eta, alpha = (scale * self.normal(*shape).sigmoid() for scale in (0.01, 1.0, 0.01))
        eta[:, 0, ..., 0], eta[:, 1, ..., 0] = 0.0, 1.0
        alpha[:, 0, ..., 0], alpha[:, 1, ..., 0] = 1.0, 0.0
        return [self.place(x) for x in (theta, eta, alpha)]

    def tokens(self, *shape: int) -> list[Tensor]:
        """q, k, v [B, H, *shape, D] and the gates; every other value is so far off that the cap acts on its token."""
        q, k, v = (normalize(self.normal(*shape, self.case.shape.width), dim=-1) for _ in range(3))
        v[..., ::2, :] *= 16
        return [*(self.place(x, self.case.dtype) for x in (q, k, v)), *self.gates(*shape)]

    def matrices(self, scale: float) -> tuple[Tensor, ...]:
        """One [B, H, in, out] for each layer."""
        return tuple(self.place(self.normal(*layer) * scale / layer[0] ** 0.5) for layer in self.layers)

    def start(self) -> tuple[Tensor, ...] | None:
        """Where forgetting leads; of a size that keeps every token away from the cap."""
        return self.matrices(0.65) if self.case.to_start else None

    def rows(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, device=self.case.device)  # [B]


def _compute(form: Form, data: Data) -> dict[str, Tensor]:
    found = _scan(form, data) | _decode(form, data)
    return {name: x.double() for name, x in found.items()}


def _scan(form: Form, data: Data) -> dict[str, Tensor]:
    """Outputs and end state of N chunks, of which the second row has one fewer, and the gradients of all inputs."""
    weights, momentum, tokens = data.matrices(1.0), data.matrices(0.1), data.tokens(N, data.case.shape.chunk)
    start, chunks = data.start(), data.rows(N, N - 1)
    inputs = [x.requires_grad_() for x in (*weights, *momentum, *tokens, *(start or ()))]
    rule = dict(**FIELDS, delta=data.case.delta, start=start)
    y, weights, momentum = form.scan_chunks(weights, momentum, *tokens, chunks, **rule)
    absent = torch.arange(N, device=chunks.device) >= chunks[:, None]
    outputs = [y.masked_fill(absent[:, None, :, None, None], 0.0), *weights, *momentum]
    upstream = [data.place(data.normal(*x.shape[2:]), data.case.dtype).to(x.dtype) for x in outputs]
    gradients = torch.autograd.grad(outputs, inputs, upstream)
    layers = range(1, len(weights) + 1)
    state = [f"{name} {layer}" for name in ("weights", "momentum") for layer in layers]
    leaves = (*state, "q", "k", "v", "theta", "eta", "alpha", *(f"start {layer}" for layer in layers if start))
    names = ["outputs", *state, *(f"gradient of {name}" for name in leaves)]
    return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=True)}


@torch.no_grad()
def _decode(form: Form, data: Data) -> dict[str, Tensor]:
    """Outputs and state of two decoding steps; the first row ends a chunk, the second skips the second step."""
    C = data.case.shape.chunk
    state = form.State(
        weights=data.matrices(1.0),
        momentum=data.matrices(0.1),
        inputs=tuple(data.place(normalize(data.normal(C, wide), dim=-1)) for wide, _ in data.layers),
        errors=tuple(data.place(normalize(data.normal(C, high), dim=-1)) for _, high in data.layers),
        gates=tuple(data.gates(C)),
        length=data.rows(C - 1, C // 2),
        start=data.start(),
    )
    tokens, found = data.tokens(2), {}
    for step, counts in enumerate((data.rows(1, 1), data.rows(1, 0))):
        token = [x[:, :, step : step + 1] for x in tokens]
        y, state = form.extend_chunk(state, *token, counts, **FIELDS, delta=data.case.delta)
        found[f"decoded output {step + 1}"] = y.masked_fill((counts == 0)[:, None, None, None], 0.0)
    found["decoded length"] = state.length
    for name in ("weights", "momentum"):
        found |= {f"decoded {name} {layer}": x for layer, x in enumerate(getattr(state, name), 1)}
    unused = torch.arange(C, device=counts.device) >= state.length[:, None]  # [B, C]
    for name in ("inputs", "errors", "gates"):
        for layer, x in enumerate(getattr(state, name), 1):
            slots = unused.view(B, 1, C, *[1] * (x.dim() - 3))
            found[f"decoded {name} {layer}"] = x.masked_fill(slots, 0.0)
    return found
