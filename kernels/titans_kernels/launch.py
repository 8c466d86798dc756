"""Allocates buffers and launches the kernels in order. Imported only where Triton runs.

A scan runs in pieces of a limited number of chunks (`served.piece_of`), so buffers between kernels do not grow with the
sequence. Kernels receive their arguments by name, from `Piece.bound`.
"""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from . import served
from .backward import gates_backward_kernel, read_backward_kernel, write_backward_kernel
from .decode import token_kernel
from .delta import delta_states_kernel, delta_write_backward_kernel
from .forward import coefficients_kernel, linear_states_kernel, outputs_kernel, states_kernel
from .served import Rule, Shape, options, piece_of, precision_of, shape_of
from .start import start_backward_kernel

TOKENS = ("q", "k", "v", "theta", "eta", "alpha")


def names_of(kinds: Iterable[str], depth: int) -> list[str]:
    """Names of all layers' tensors of the first kind (weights W, momentum S, the start `own`), then of the others."""
    return [f"{kind}{layer}" for kind in kinds for layer in range(1, depth + 1)]


def _numbers(rule: Rule) -> dict[str, float | int]:
    """A rule's fields as the kernels take them."""
    cap = math.inf if rule.max_surprise is None else rule.max_surprise
    return dict(max_surprise=cap, hidden_step=rule.hidden_step, normalised=int(rule.normalised), DELTA=rule.delta)


def run(kernel, grid: tuple[int, ...], shape: Shape, bound: dict) -> None:
    """Launch a kernel with the arguments that it names, from `bound` and the shape."""
    bound = bound | shape.constants(kernel.__name__)
    kernel[grid](
        **{name: bound[name] for name in kernel.arg_names}, **options(kernel.__name__, amd=bool(torch.version.hip))
    )


class Piece:
    """The chunks of a scan from chunk `first` on, up to P of them, and the buffers that the kernels share.

    Args:
        starts: weights and momentum of each layer at the piece's start, [B, H, in, out].
        own: where forgetting leads, like the weights and contiguous; empty for zero.
        tokens: the whole scan's tokens and gates, by name, [B, H, N, C, ...], contiguous.
        chunks: [B] chunks of each row, int32.
    """

    def __init__(
        self, starts: list[Tensor], own, tokens: dict[str, Tensor], chunks, rule: Rule, first: int, precision: str
    ):
        q = tokens["q"]
        self.B, self.H, N, C, _ = q.shape
        self.depth, self.like, self.rule = len(starts) // 2, starts[0], rule
        self.shape = shape_of(starts[: self.depth], C)
        self.P = min(piece_of(self.B * self.H, self.shape), N - first)
        self.row = torch.arange(self.B, device=q.device)
        self.count = (chunks - first).clamp(0, self.P)  # [B] chunks of each row in this piece
        self.bound = dict(
            **tokens,
            chunks=chunks.contiguous(),
            first=first,
            N=N,
            P=self.P,
            H=self.H,
            PRECISION=precision,
            TO_START=bool(own),
            **_numbers(rule),
        )
        if own:
            self.bound |= zip(names_of(["own"], self.depth), own, strict=True)
        else:  # as below
            self.bound |= dict.fromkeys(("own1", "own2"), self.like)
        if self.depth == 1:  # never dereferenced, but the arguments need a pointer
            second = ["W2", "S2", "pre", "hidden", "through", "error2", "scale2", "asking", "read"]
            second += ["d_W2", "d_S2", "d_hidden", "d_error2", "d_read", "own2", "d_own2"]
            self.bound |= dict.fromkeys(second, self.like)

    def allocate(self, **shapes: tuple[int, ...]) -> None:
        """Allocate buffers [B, H, *shape] in float32."""
        self.bound |= {name: self.like.new_empty(self.B, self.H, *shape) for name, shape in shapes.items()}

    def allocate_layers(self, number: int, *kinds: str) -> list[Tensor]:
        """New buffers [B, H, number, in, out] of these kinds, for every layer."""
        D, F = self.shape.width, self.shape.hidden
        sizes = {1: (D, F), 2: (F, D)}
        names = names_of(kinds, self.depth)
        self.allocate(**{name: (number, *sizes[int(name[-1])]) for name in names})
        return [self.bound[name] for name in names]

    def run(self, kernel, *grid: int, **own) -> None:
        run(kernel, grid, self.shape, self.bound | own)

    def coefficients(self, keep: bool) -> None:
        P, C = self.P, self.shape.chunk
        self.allocate(step=(P, C, C), in_S=(P, C, C), decay=(P, C), drift=(P, C), momentum=(P, C))
        self.run(coefficients_kernel, P, self.B * self.H, KEEP=keep)

    def states(self, group: int, keep: bool) -> None:
        """Compute the states after the start of every group of chunks; `keep` stores what the backward needs."""
        P, C, D, F = self.P, self.shape.chunk, self.shape.width, self.shape.hidden
        self.allocate(error1=(P, C, F), scale1=(P, C))
        if self.depth == 2:
            self.allocate(pre=(P, C, F), hidden=(P, C, F), error2=(P, C, D), scale2=(P, C))
            self.allocate(through=(P, C, F) if keep else ())
        kernel = linear_states_kernel if self.shape.on_chip(self.bound["PRECISION"]) else states_kernel
        if self.rule.delta:
            self.allocate(key_overlap=(P, C, C), work=(P, C, C))
            kernel = delta_states_kernel
        self.run(kernel, math.ceil(P / group), self.B * self.H, GROUP=group, KEEP=keep)

    def outputs(self, y: Tensor) -> None:
        if self.depth == 2:
            self.allocate(asking=(self.P, self.shape.chunk, self.shape.hidden))
        blocks = self.P * self.shape.chunk // self.shape.queries
        self.run(outputs_kernel, blocks, self.B * self.H, y=y)

    def read_backward(self, dy: Tensor) -> None:
        P, C, D, F = self.P, self.shape.chunk, self.shape.width, self.shape.hidden
        self.allocate(overlap=(P, C, C), work=(P, C, C), d_step=(P, C, C), d_decay=(P, C), d_drift=(P, C))
        self.allocate(d_k=(P, C, D), d_error1=(P, C, F))
        if self.depth == 2:
            self.allocate(read=(P, 2, C, F), d_read=(P, C, F), d_hidden=(P, C, F), d_error2=(P, C, D))
        self.bound |= dict(dy=dy)
        self.run(read_backward_kernel, P, self.B * self.H)

    def write_backward(self) -> None:
        P, C = self.P, self.shape.chunk
        self.allocate(d_to_M=(P, C), d_to_S=(P, C), d_end=(P, 3))
        if self.rule.delta:
            self.allocate(d_direct=(P, C, self.shape.width), from_x=(P, C))
        self.run(delta_write_backward_kernel if self.rule.delta else write_backward_kernel, self.B * self.H)

    def start_backward(self) -> list[Tensor]:
        """The gradient of what forgetting leads to."""
        parts = self.allocate_layers(self.P, "d_own")
        self.run(start_backward_kernel, self.P, self.B * self.H)
        return [x.sum(2) for x in parts]

    def gates_backward(self) -> None:
        self.run(gates_backward_kernel, self.P, self.B * self.H)


def _by_name(tokens: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Tokens and gates by name, contiguous and in float32."""
    return {name: x.float().contiguous() for name, x in zip(TOKENS, tokens, strict=True)}


def on_their_device(fn):
    """Run `fn` with the device of its first tensor as the current one, to which Triton launches."""

    @functools.wraps(fn)
    def guarded(tensors, *rest):
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        with torch.cuda.device_of(first):
            return fn(tensors, *rest)

    return guarded


@on_their_device
def forward(starts: list[Tensor], own: list[Tensor], tokens, chunks: Tensor, rule: Rule, keep: bool) -> list[Tensor]:
    """Outputs, end states and, if `keep`, the states at the start of every `GROUP`-th chunk for the backward."""
    dtype, precision, tokens = tokens[0].dtype, precision_of(tokens[0]), _by_name(tokens)
    own = [x.contiguous() for x in own]
    N, y, kept, first = tokens["q"].shape[2], torch.empty_like(tokens["q"]), [], 0
    while first < N:
        piece = Piece(starts, own, tokens, chunks, rule, first, precision)
        states = piece.allocate_layers(piece.P + 1, "W", "S")
        for state, start in zip(states, starts, strict=True):
            state[:, :, 0] = start
        piece.coefficients(keep=False)
        piece.states(group=piece.P, keep=False)
        piece.outputs(y)
        starts = [state[piece.row, :, piece.count] for state in states]
        kept.append([x[:, :, : piece.P : served.GROUP].clone() if keep else x.new_empty(0) for x in states])
        first += piece.P
        del piece, states, state  # free the buffers before the next piece allocates its own
    checkpoints = [torch.cat(parts, dim=2 if keep else 0) for parts in zip(*kept, strict=True)]
    return [y.to(dtype), *starts, *checkpoints]


@on_their_device
def backward(
    dy: Tensor, d_ends: list[Tensor], checkpoints: list[Tensor], own: list[Tensor], tokens, chunks, rule: Rule
) -> list[Tensor]:
    """Gradients of weights, momentum and what forgetting leads to, then of tokens and gates."""
    dtypes, precision = [x.dtype for x in tokens], precision_of(tokens[0])
    own = [x.contiguous() for x in own]
    tokens, dy = _by_name(tokens), dy.float().contiguous()
    found = {name: torch.zeros_like(x) for name, x in tokens.items()}
    gradients = {f"d_{name}" if name in ("theta", "eta", "alpha") else f"d{name}": x for name, x in found.items()}
    size = piece_of(math.prod(d_ends[0].shape[:2]), shape_of(d_ends[: len(d_ends) // 2], dy.shape[-2]))
    d_own = [torch.zeros_like(x) for x in own]
    for first in reversed(range(0, dy.shape[2], size)):
        groups = slice(first // served.GROUP, (first + size) // served.GROUP)
        starts = [x[:, :, groups] for x in checkpoints]
        piece = Piece([x[:, :, 0] for x in starts], own, tokens, chunks, rule, first, precision)
        piece.bound |= gradients
        for state, start in zip(piece.allocate_layers(piece.P + 1, "W", "S"), starts, strict=True):
            state[:, :, : piece.P : served.GROUP] = start
        d_states = piece.allocate_layers(piece.P + 1, "d_W", "d_S")
        for d_state, d_end in zip(d_states, d_ends, strict=True):
            d_state[piece.row, :, piece.count] = d_end
        piece.coefficients(keep=True)
        piece.states(group=served.GROUP, keep=True)
        piece.read_backward(dy)
        piece.write_backward()
        if own:
            d_own = list(map(torch.add, d_own, piece.start_backward()))
        piece.gates_backward()
        d_ends = [x[:, :, 0].clone() for x in d_states]
        del piece, state, d_states, d_state  # free the buffers before the next piece allocates its own
    d_tokens = [x.to(dtype) for x, dtype in zip(found.values(), dtypes, strict=True)]
    return [*d_ends, *d_own, *d_tokens]


@on_their_device
def token(state, own, gates, length: Tensor, tokens, counts: Tensor, rule: Rule) -> list[Tensor]:
    """The output of one token of every row, then the next length, gates and state in the order of the arguments."""
    depth = len(state) // 4
    names = names_of(("W", "S", "x", "error"), depth)
    B, H, C = gates[0].shape
    shape = shape_of(state[:depth], C)
    old = dict(zip(("length", "theta", "eta", "alpha", *names), (length, *gates, *state), strict=True))
    old = {name: x.contiguous() for name, x in old.items()}
    new = {f"next_{name}": torch.empty_like(x) for name, x in old.items()}
    dtype, precision = tokens[0].dtype, precision_of(tokens[0])
    q, k, v, *new_gates = (x.float().contiguous() for x in tokens)
    y, like = torch.empty_like(q), old["W1"]
    unused = ("W2", "S2", "x2", "error2") if depth == 1 else ()
    bound = dict.fromkeys((*unused, *(f"next_{name}" for name in unused), "own1", "own2"), like) | old | new
    bound |= zip(names_of(["own"], depth), (x.contiguous() for x in own))
    bound |= dict(zip(("new_theta", "new_eta", "new_alpha"), new_gates, strict=True))
    bound |= dict(q=q, k=k, v=v, y=y, counts=counts.contiguous(), fresh=like.new_empty(B, H, 2, shape.hidden))
    bound |= dict(H=H, PRECISION=precision, TO_START=bool(own), **_numbers(rule))
    run(token_kernel, (B * H,), shape, bound)
    return [y.to(dtype), *new.values()]
