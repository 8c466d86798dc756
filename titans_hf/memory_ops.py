"""The neural long-term memory as a function of tensors (Section 3 of the paper), in plain torch.

`neural_memory` reads a sequence: every token is written into a small MLP by one step of gradient descent with momentum
and forgetting (Eqs. 12-14), then the MLP is asked for the token's query (Eq. 15). Gradients are taken at the weights of
the last chunk boundary (Eq. 16). Two forms compute the same numbers:

* `recurrent`: a loop over tokens whose gradients come from autograd on the memory's own loss. Slow, obviously right.
* `torch`: the chunk form. Inside a chunk every gradient is an outer product `u_i = a_i g_i^T` of factors taken at the
  chunk-start weights, so all tokens of the chunk are read by matrix products and no per-token weight is ever formed.
  `triton` is the same in kernels (`titans_kernels`).

Axis letters: B batch, T tokens, H heads, D head width, C chunk length, Q queries of one call, n tokens of one chunk.
Weights are stored so that `M(x) = x W`, i.e. [B, H, in, out]. Paper letters: alpha forgets, eta decays the momentum,
theta is the step, S the momentum, u the gradient ("momentary surprise").
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .memory_chunks import scan as written_out_scan
from .memory_chunks import without_autocast, without_dust
from .memory_step import Pen
from .rows import PackedRows, RowCut, compact, on_host, where_rows, without_values

BACKENDS = ("auto", "torch", "triton", "recurrent")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of memory state and gate products: float32 under half precision, never less than the model's."""
    return torch.promote_types(dtype, torch.float32)


# State
@dataclass(frozen=True)
class MemoryState:
    """The memory of a batch, at any token.

    `weights` and `momentum` are those of the last chunk boundary, tuples over the memory's depth of [B, H, in, out].
    The other fields describe the chunk that is open since then; their default means "at a chunk boundary".

    Attributes:
        inputs: per layer [B, H, C, in], the activations `a` of the open chunk's keys.
        errors: per layer [B, H, C, out], the back-propagated errors `g` (after the surprise cap).
        gates: `(theta, eta, alpha)` of the open chunk, each [B, H, C].
        length: [B] tokens in each row's open chunk; slots from there on are unused.
        start: per layer [B, H, in, out], what forgetting goes towards: at the end of each chunk the weights get back
            what it has forgotten of them (`given_back`). None, the paper's letter, is towards zero.
        pen: what decoding goes on with; it serves the one state that it was last moved to. Any state may be without.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...] | None = None
    errors: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, Tensor, Tensor] | None = None
    length: Tensor | None = None
    start: tuple[Tensor, ...] | None = None
    pen: Pen | None = None

    def __reduce__(self):
        """Copies and pickles own their bytes, and have no pen."""
        state = self.map(compact)
        return MemoryState, tuple(getattr(state, name) for name in self.__dataclass_fields__ if name != "pen")

    def current(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights and momentum after the last token read (Eqs. 13 and 14)."""
        if self.length is None:
            return self.weights, self.momentum
        last = (self.length - 1).clamp(min=0)[:, None]
        with without_autocast(self.length):
            end = chunk_coefficients(*self.gates, rows=last)
            weights, momentum = advance(self.weights, self.momentum, self.inputs, self.errors, end)
        read = self.length > 0
        return (
            tuple(where_rows(read, now, start) for now, start in zip(weights, self.weights, strict=True)),
            tuple(where_rows(read, now, start) for now, start in zip(momentum, self.momentum, strict=True)),
        )

    def kept(self) -> Tensor:
        """[B, H, 1, 1] what forgetting leaves of the chunk's start, in rows whose chunk is full."""
        return (1 - self.gates[2]).prod(-1)[..., None, None]

    def held(self) -> "MemoryState":
        """The same state, which is not written on later if autograd may keep some of it."""
        if self.pen is None or not torch.is_grad_enabled():
            return self
        self.pen.retire()
        return replace(self, pen=None)

    def opened(self, chunk_size: int) -> "MemoryState":
        """The same state with every open-chunk field present, so that its structure and size never change."""
        if self.length is not None:
            return self
        first = self.weights[0]
        B, H = first.shape[:2]
        slots = (B, H, chunk_size)
        return replace(
            self,
            inputs=tuple(first.new_zeros(*slots, W.shape[2]) for W in self.weights),
            errors=tuple(first.new_zeros(*slots, W.shape[3]) for W in self.weights),
            gates=tuple(first.new_zeros(slots) for _ in range(3)),
            length=torch.zeros(B, dtype=torch.long, device=first.device),
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> "MemoryState":
        """Apply `fn` to every tensor."""

        def each(field):
            return tuple(map(fn, field)) if isinstance(field, tuple) else field if field is None else fn(field)

        return MemoryState(*(each(getattr(self, name)) for name in self.__dataclass_fields__ if name != "pen"))

    def select(self, rows: Tensor, other: "MemoryState") -> "MemoryState":
        """Rows of this state where `rows` [B] is True, rows of `other` elsewhere (both in the same form)."""
        others = iter(other.tensors())
        return self.map(lambda x: where_rows(rows, x, next(others)))

    def settled(self) -> "MemoryState":
        """The same state in tensors that hold nothing else."""
        return self if self.pen is not None and self.pen.serves(self) else self.map(compact)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, in the order `map` visits them."""
        found: list[Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)
        return found


# The chunk form


class Coefficients(NamedTuple):
    """What a token's memory is made of: `M_t = A M_0 + B S_0 - sum C_i u_i`, `S_t = m S_0 - sum N_i u_i`."""

    A: Tensor  # [B, H, Q, 1]
    B: Tensor  # [B, H, Q, 1]
    C: Tensor  # [B, H, Q, n]
    m: Tensor  # [B, H, Q, 1]
    N: Tensor  # [B, H, Q, n]

    def last(self) -> "Coefficients":
        return Coefficients(*(field[..., -1:, :] for field in self))


def _segment_products(gate: Tensor) -> Tensor:
    """Products of a gate over every segment that ends at a token.

    Returns [B, H, n, 1 + n]: column 0 holds the product over tokens 0..t, column 1 + i over tokens i+1..t (1 for i = t,
    0 for i > t). A running product, never a difference of logarithms: gates of exactly 0 and 1 are ordinary values.
    """
    n = gate.shape[-1]
    token = torch.arange(n, device=gate.device)[:, None]
    column = torch.arange(n + 1, device=gate.device)
    factors = torch.where(token >= column, gate[..., None], gate.new_ones(()))
    return without_dust(factors.cumprod(-2).masked_fill(column > token + 1, 0.0))


def chunk_coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Coefficients:
    """Coefficients of the tokens of one chunk, from its gates [B, H, n]; `rows` [B, Q] picks tokens, None means all."""
    decay, momentum = _segment_products(1 - alpha), _segment_products(eta)
    end = momentum
    if rows is not None:
        index = rows[:, None, :, None].expand(-1, decay.shape[1], -1, decay.shape[-1])
        decay, end = decay.gather(2, index), momentum.gather(2, index)
    mixed = decay[..., 1:] @ momentum  # [B, H, Q, 1 + n]
    step = theta[..., None, :]
    return Coefficients(decay[..., :1], mixed[..., :1], mixed[..., 1:] * step, end[..., :1], end[..., 1:] * step)


def gradient_factors(
    weights: tuple[Tensor, ...], k: Tensor, v: Tensor, max_surprise: float | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Factors `a`, `g` of the gradients `u = a g^T` of `|M(k) - v|^2` at the given weights (Eq. 12), token by token."""
    inputs, slopes, x = [], [], k
    for depth, W in enumerate(weights, 1):
        inputs.append(x)
        z = x @ W  # [B, H, n, out]
        if depth < len(weights):
            sigmoid = torch.sigmoid(z)
            x = z * sigmoid
            slopes.append(sigmoid * (1 + z * (1 - sigmoid)))
    errors = [2 * (z - v)]
    for W, slope in zip(reversed(weights[1:]), reversed(slopes), strict=True):
        errors.insert(0, (errors[0] @ W.mT) * slope)
    if max_surprise is not None:
        errors = [g * _cap(a, g, max_surprise) for a, g in zip(inputs, errors, strict=True)]
    return tuple(inputs), tuple(errors)


def _cap(a: Tensor, g: Tensor, max_surprise: float) -> Tensor:
    """Scale that brings the gradient `a g^T` of each token to a norm of at most `max_surprise`."""
    squared_norm = a.square().sum(-1, keepdim=True) * g.square().sum(-1, keepdim=True)
    return max_surprise * squared_norm.clamp(min=max_surprise**2).rsqrt()


def read_tokens(weights, momentum, inputs, errors, coefficients: Coefficients, q: Tensor) -> Tensor:
    """Each query through its own token's memory (Eq. 15), without forming that memory."""
    A, B, C = coefficients[:3]
    x = q
    for depth, (W, S, a, g) in enumerate(zip(weights, momentum, inputs, errors, strict=True), 1):
        x = A * (x @ W) + B * (x @ S) - (C * (x @ a.mT)) @ g
        if depth < len(weights):
            x = F.silu(x)
    return x


def advance(weights, momentum, inputs, errors, end: Coefficients) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and momentum after the one token whose coefficients are given."""
    new_weights, new_momentum = [], []
    for W, S, a, g in zip(weights, momentum, inputs, errors, strict=True):
        written = a.mT @ torch.cat((end.C.mT * g, end.N.mT * g), dim=-1)  # [B, H, in, 2 out]
        write_M, write_S = written.chunk(2, dim=-1)
        new_weights.append(end.A * W + end.B * S - write_M)
        new_momentum.append(end.m * S - write_S)
    return tuple(new_weights), tuple(new_momentum)


def given_back(weights: tuple[Tensor, ...], start: tuple[Tensor, ...] | None, keep: Tensor) -> tuple[Tensor, ...]:
    """The weights at a chunk's end, with what the chunk has forgotten of `start`, if there is one.

    `keep` [B, H, 1, 1] is the product of `1 - alpha` over the chunk. So on the grid `M - start` is what is forgotten:
    `M_end - start = keep (M - start) + ...`, where the letter has `M_end = keep M + ...`.
    """
    if start is None:
        return weights
    return tuple(W + (1 - keep) * own for W, own in zip(weights, start, strict=True))


def _chunk(weights, momentum, start, q, k, v, theta, eta, alpha, max_surprise):
    """One chunk from its boundary: outputs, and weights and momentum after its last token."""
    inputs, errors = gradient_factors(weights, k, v, max_surprise)
    coefficients = chunk_coefficients(theta, eta, alpha)
    y = read_tokens(weights, momentum, inputs, errors, coefficients, q)
    end = coefficients.last()
    weights, momentum = advance(weights, momentum, inputs, errors, end)
    return y, given_back(weights, start, end.A), momentum


def _fill_slots(buffer: Tensor, new: Tensor, length: Tensor) -> Tensor:
    """Put `new` [B, H, n, ...] behind the first `length` [B] slots of `buffer` [B, H, C, ...]."""
    slot = torch.arange(buffer.shape[2], device=buffer.device) - length[:, None]  # [B, C]
    shape = (slot.shape[0], 1, slot.shape[1], *[1] * (buffer.dim() - 3))
    index = slot.clamp(0, new.shape[2] - 1).view(shape)
    filled = new.gather(2, index.expand(*buffer.shape))
    return torch.where((slot < 0).view(shape), buffer, filled)


def extend_chunk(state, q, k, v, theta, eta, alpha, counts: Tensor | None, max_surprise: float | None):
    """Read tokens that fall into each row's open chunk; rows whose chunk fills up step over the boundary.

    Args:
        state: with its open-chunk fields.
        q, k, v: [B, H, n, D], no more than the open chunk of any row has room for.
        theta, eta, alpha: [B, H, n].
        counts: [B] how many of the tokens each row has; None means all. Outputs behind a row's last are unspecified.

    Returns:
        The outputs [B, H, n, D] and the state after each row's last token.
    """
    n, C = q.shape[2], state.gates[0].shape[-1]
    q, k, v = (x.to(state.weights[0].dtype) for x in (q, k, v))
    if n == 1 and counts is None and not torch.is_grad_enabled() and not seen_through():
        opened = _with_pen(state)
        if opened is not None:
            return _step(opened, q, k, v, (theta, eta, alpha), max_surprise)
    new_inputs, new_errors = gradient_factors(state.weights, k, v, max_surprise)
    inputs = tuple(_fill_slots(*pair, state.length) for pair in zip(state.inputs, new_inputs, strict=True))
    errors = tuple(_fill_slots(*pair, state.length) for pair in zip(state.errors, new_errors, strict=True))
    gates = tuple(_fill_slots(*pair, state.length) for pair in zip(state.gates, (theta, eta, alpha), strict=True))

    slots = state.length[:, None] + torch.arange(n, device=q.device)
    coefficients = chunk_coefficients(*gates, rows=slots.clamp(max=C - 1))
    y = read_tokens(state.weights, state.momentum, inputs, errors, coefficients, q)

    length = state.length + (n if counts is None else counts)
    state = replace(state, inputs=inputs, errors=errors, gates=gates, length=length, pen=None)
    full = length == C
    if without_values(full) or bool(full.any()):
        weights, momentum = state.current()
        weights = given_back(weights, state.start, state.kept())
        state = replace(
            state,
            weights=tuple(where_rows(full, *pair) for pair in zip(weights, state.weights, strict=True)),
            momentum=tuple(where_rows(full, *pair) for pair in zip(momentum, state.momentum, strict=True)),
            length=length.masked_fill(full, 0),
        )
    return y, state


def _with_pen(state: MemoryState) -> MemoryState | None:
    """The state with a pen of its own to go on with; None if its rows stand at different places, or on meta tensors."""
    if state.pen is not None and state.pen.serves(state):
        return state
    places = on_host(state.length)
    if places is None or len(set(places)) > 1:
        return None
    if places[0]:
        end = chunk_coefficients(*state.gates, rows=(state.length - 1)[:, None])
        of_M, of_S = (end.A, end.B, -end.C), (torch.zeros_like(end.A), end.m, -end.N)
        of_M, of_S = (torch.cat(parts, dim=-1).flatten(0, 2) for parts in (of_M, of_S))
    else:
        B, H, C = state.gates[0].shape
        of_M, of_S = state.gates[0].new_zeros(2, B * H, 2 + C)
        of_M[:, 0] = of_S[:, 1] = 1
    pen = Pen(state.weights, state.momentum, state.inputs, state.errors, state.gates, of_M, of_S, places[0])
    return pen.moved_to(MemoryState(**pen.fields(), length=state.length, start=state.start, pen=pen))


def _step(state: MemoryState, q, k, v, gates, max_surprise: float | None):
    """`extend_chunk` by one token in every row, for a state with a pen: the slots are filled in place."""
    pen, (B, H) = state.pen, q.shape[:2]
    q, k, v, *gates = (x.flatten(0, 1) for x in (q, k, v, *gates))
    pen.write(k, v, gates, max_surprise)
    y = pen.read(q).unflatten(0, (B, H))
    if pen.filled < pen.slots.shape[1]:
        return y, pen.moved_to(replace(state, length=state.length + 1))
    weights, momentum = pen.state()
    weights = given_back(weights, state.start, pen.of_M[:, 0].view(B, H, 1, 1))
    pen.retire()
    return y, replace(state, weights=weights, momentum=momentum, length=torch.zeros_like(state.length), pen=None)


def scan_chunks(weights, momentum, q, k, v, theta, eta, alpha, chunks: Tensor | None, max_surprise: float | None):
    """Read whole chunks from a chunk boundary, one after the other.

    Args:
        weights, momentum: tuples over the memory's depth of [B, H, in, out].
        q, k, v: [B, H, N, C, D], N chunks of C tokens.
        theta, eta, alpha: [B, H, N, C].
        chunks: [B] how many of the chunks each row has; None means all. Outputs behind a row's last are unspecified.

    Returns:
        The outputs [B, H, N, C, D], and weights and momentum after each row's last chunk.
    """
    return scan_towards(None, weights, momentum, q, k, v, theta, eta, alpha, chunks, max_surprise)


def scan_towards(start, weights, momentum, q, k, v, theta, eta, alpha, chunks: Tensor | None, max_surprise):
    """`scan_chunks` that forgets towards `start`, which is like the weights; None is zero."""
    q, k, v = (x.to(weights[0].dtype) for x in (q, k, v))
    if not seen_through():
        return written_out_scan(max_surprise, chunks, weights, momentum, start, q, k, v, theta, eta, alpha)
    step = _chunk
    # checkpoints rest on saved-tensor hooks, which torch.func's transforms do not have
    if torch.is_grad_enabled() and not _inside_functorch():

        def step(*args):
            return checkpoint(_chunk, *args, use_reentrant=False, preserve_rng_state=False)

    outputs = []
    for n in range(q.shape[2]):
        y, *after = step(weights, momentum, start, *(x[:, :, n] for x in (q, k, v, theta, eta, alpha)), max_surprise)
        outputs.append(y)
        if chunks is not None:
            more = n < chunks
            after = [
                tuple(where_rows(more, *pair) for pair in zip(new, old, strict=True))
                for new, old in zip(after, (weights, momentum), strict=True)
            ]
        weights, momentum = after
    return torch.stack(outputs, dim=2), weights, momentum


def seen_through() -> bool:
    """Whether torch.compile or torch.func is at work: derivatives that are written out would be in their way."""
    return torch.compiler.is_compiling() or _inside_functorch()


def _inside_functorch() -> bool:
    """Whether a transform of torch.func is at work: it sees through torch's own functions only."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Forms(NamedTuple):
    """What reads whole chunks, and what reads tokens into an open one."""

    scan_chunks: Callable = scan_chunks
    extend_chunk: Callable = extend_chunk


def _forms(backend: str, state: MemoryState, q: Tensor, chunk_size: int) -> _Forms:
    """The implementation that a backend stands for. What it cannot serve is refused here, before a token is read."""
    if state.start is not None and backend == "triton":
        raise ValueError("`backend='triton'` forgets towards zero: take 'auto' where `state.start` is given")
    if state.start is not None:
        return _Forms(partial(scan_towards, state.start))
    if backend != "triton" and (backend != "auto" or not q.is_cuda or _inside_functorch()):
        return _Forms()
    try:
        import titans_kernels as kernels
    except ImportError as error:
        if backend == "auto":
            return _Forms()
        raise ValueError("`backend='triton'` needs the kernels: pip install 'titans-hf[kernels]'") from error
    if backend == "triton":
        kernels.refuse(state.weights, q, chunk_size)
    elif kernels.refusal(state.weights, q, chunk_size) is not None:
        return _Forms()
    if backend == "auto" and not kernels.passes(state.weights, q, chunk_size, scan_chunks, extend_chunk, MemoryState):
        return _Forms()

    def extend(state: MemoryState, q: Tensor, *rest):
        state = replace(state, pen=None)
        tensors = (x for x in (*state.tensors(), q, *rest) if isinstance(x, Tensor))
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        one_token = q.shape[2] == 1 and not trained  # the kernel of a decoding step
        return (kernels.extend_chunk if one_token else extend_chunk)(state, q, *rest)

    return _Forms(kernels.scan_chunks, extend)


def _read_from_line(state: MemoryState, tokens, counts: Tensor | None, chunk_size: int, max_surprise, forms: _Forms):
    """Read tokens [B, T, H, ...] that start on a chunk boundary in every row (of those with any)."""
    cut = RowCut.at_last_line(counts, tokens[0].shape[1], chunk_size)
    y_whole = y_rest = None
    if cut.head_width:
        whole = [cut.head(x).transpose(1, 2).unflatten(2, (-1, chunk_size)) for x in tokens]
        chunks = None if cut.head_counts is None else cut.head_counts // chunk_size
        y_whole, weights, momentum = forms.scan_chunks(state.weights, state.momentum, *whole, chunks, max_surprise)
        y_whole = y_whole.flatten(2, 3).transpose(1, 2)
        on_line = cut.head_counts is None  # then nothing of an open chunk is left
        state = (
            MemoryState(weights, momentum, start=state.start)
            if on_line
            else replace(state, weights=weights, momentum=momentum)
        )
    if cut.body_width:
        rest = [cut.body(x).transpose(1, 2) for x in tokens]
        y_rest, state = forms.extend_chunk(state.opened(chunk_size), *rest, cut.body_counts, max_surprise)
        y_rest = y_rest.transpose(1, 2)
    return cut.join(y_whole, y_rest), state


def _chunkwise(q, k, v, theta, eta, alpha, state: MemoryState, lengths: Tensor | None, chunk_size, max_surprise, forms):
    """The chunk form over rows whose real tokens stand at the front: close the open chunk, then go on from its line."""
    tokens = (q, k, v, theta, eta, alpha)
    if state.length is not None and q.shape[1] == 1:  # a decoding step: into the open chunk, wherever the row stands
        y, state = forms.extend_chunk(state, *(x.transpose(1, 2) for x in tokens), lengths, max_surprise)
        return y.transpose(1, 2), state
    cut = RowCut.at_next_line(state.length, lengths, q.shape[1], chunk_size)
    y_head = y_body = None
    if cut.head_width:
        head = [cut.head(x).transpose(1, 2) for x in tokens]
        y_head, state = forms.extend_chunk(state, *head, cut.head_counts, max_surprise)
        y_head = y_head.transpose(1, 2)
    if cut.body_width:
        body = [cut.body(x) for x in tokens]
        y_body, state = _read_from_line(state, body, cut.body_counts, chunk_size, max_surprise, forms)
    return cut.join(y_head, y_body), state


# The oracle


def _memory_loss(weights: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`|M(k) - v|^2` summed over batch and heads (Eq. 12), with each layer's input and pre-activation."""
    inputs, pre_activations, x = [], [], k[..., None, :]
    for W in weights:
        x = F.silu(x) if inputs else x
        inputs.append(x)
        x = x @ W  # [B, H, 1, out]
        pre_activations.append(x)
    return (x - v[..., None, :]).square().sum(), inputs, pre_activations


def _surprise(weights: tuple[Tensor, ...], k: Tensor, v: Tensor, max_surprise: float | None):
    """The gradient of the memory's own loss by autograd (Eq. 12), capped; and its factors for the open chunk."""
    outer_grad = torch.is_grad_enabled()
    with torch.enable_grad():
        # New tensors, so that only the loss's own use of the weights counts: in MAC the keys depend on them as well.
        weights = tuple(W.clone() if outer_grad and W.requires_grad else W.detach().requires_grad_() for W in weights)
        loss, inputs, pre_activations = _memory_loss(weights, k, v)
        found = torch.autograd.grad(loss, [*weights, *pre_activations], create_graph=outer_grad)
        u, errors = list(found[: len(weights)]), list(found[len(weights) :])
    if max_surprise is not None:
        norms = [g.square().sum((-2, -1), keepdim=True).clamp(min=max_surprise**2).sqrt() for g in u]
        u = [g * (max_surprise / norm) for g, norm in zip(u, norms, strict=True)]
        errors = [g * (max_surprise / norm) for g, norm in zip(errors, norms, strict=True)]
    if not outer_grad:
        inputs = [a.detach() for a in inputs]
    return u, inputs, errors


def _recurrent(q, k, v, theta, eta, alpha, state: MemoryState, mask: Tensor | None, chunk_size, max_surprise):
    """Eqs. 12-15 token by token: the definition that every other form is tested against."""
    state = state.opened(chunk_size)
    q, k, v = (x.to(state.weights[0].dtype) for x in (q, k, v))
    M, S = state.current()
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(state.length, dtype=torch.bool) if mask is None else mask[:, t]
        u, inputs, errors = _surprise(state.weights, k[:, t], v[:, t], max_surprise)
        step, keep_S, keep_M = (gate[:, t, :, None, None] for gate in (theta, eta, 1 - alpha))
        S_new = [keep_S * s - step * g for s, g in zip(S, u, strict=True)]
        M_new = [keep_M * w + s for w, s in zip(M, S_new, strict=True)]
        S = tuple(where_rows(real, *pair) for pair in zip(S_new, S, strict=True))
        M = tuple(where_rows(real, *pair) for pair in zip(M_new, M, strict=True))
        y = _memory_loss(M, q[:, t], torch.zeros_like(v[:, t]))[2][-1].squeeze(-2)  # M_t(q_t)
        outputs.append(where_rows(real, y, torch.zeros_like(y)))

        gates = [gate[:, t, :, None] for gate in (theta, eta, alpha)]
        noted = MemoryState(
            state.weights,
            state.momentum,
            tuple(_fill_slots(*pair, state.length) for pair in zip(state.inputs, inputs, strict=True)),
            tuple(_fill_slots(*pair, state.length) for pair in zip(state.errors, errors, strict=True)),
            tuple(_fill_slots(*pair, state.length) for pair in zip(state.gates, gates, strict=True)),
            state.length + 1,
            state.start,
        )
        state = noted.select(real, state)
        full = state.length == chunk_size
        restored = given_back(M, state.start, state.kept())
        M = tuple(where_rows(full, *pair) for pair in zip(restored, M, strict=True))
        boundary = replace(state, weights=M, momentum=S, length=torch.zeros_like(state.length))
        state = boundary.select(full, state)
    if not any(on_host(state.length)):
        state = MemoryState(state.weights, state.momentum, start=state.start)
    return torch.stack(outputs, dim=1), state


# The public functions


def recall(weights: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """Ask a memory that is not being written, `M(q)`: every query [B, T, H, D] meets the same weights."""
    x = q.transpose(1, 2).to(weights[0].dtype)
    with without_autocast(q):
        for depth, W in enumerate(weights, 1):
            x = x @ W
            if depth < len(weights):
                x = F.silu(x)
    return x.transpose(1, 2).to(q.dtype)


def neural_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    state: MemoryState,
    *,
    chunk_size: int,
    max_surprise: float | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
    lengths: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:
    """Write a sequence into the memory and read it after each token's own write (Eqs. 12-16).

    Training, prefill and decoding are this one function: any number of tokens, from any state, to any state. Splitting
    a sequence anywhere and carrying the state gives the numbers of the whole.

    For the backward pass the chunk form keeps its inputs and one copy of weights and momentum per chunk, and recomputes
    the rest chunk by chunk: `O(T H D + (T / C) H |M|)` numbers for `|M|` weights per head, where a per-token scan would
    keep `O(T H |M|)`.

    Args:
        q, k, v: queries, keys and values, [B, T, H, D].
        theta, eta, alpha: step size, momentum decay and forget gate, [B, T, H]; eta and alpha may be exactly 0 or 1.
        state: where to go on from; `MemoryState(weights, momentum)` starts at a chunk boundary.
        chunk_size: C, the spacing of the grid on which gradients are taken, counted from each row's own first token.
        max_surprise: cap on the norm of each token's gradient, per memory layer. None is the paper's letter, and
            diverges on repetitive input.
        mask: [B, T] bool, True at real tokens, in any pattern. Padding changes nothing and reads as zero.
        backend: "recurrent" (the oracle), "torch" (the chunk form), "triton" (its kernels, on GPUs, for the shapes they
            serve), or "auto": "triton" where it is installed and serves the tensors, "torch" elsewhere.
        lengths: [B] real tokens of each row, for rows that already hold them at the front: a cheaper `mask`. Outputs
            behind a row's last token are then unspecified.

    Returns:
        The outputs [B, T, H, D] in the dtype of `q`, and the state after the last token.
    """
    _check(q, k, v, theta, eta, alpha, state, chunk_size, max_surprise, mask, lengths, backend)
    dtype, state = state_dtype(q.dtype), state.held()
    tokens = [q, k, v, *(gate.to(dtype) for gate in (theta, eta, alpha))]
    if state.weights[0].dtype != dtype:
        state = state.map(lambda x: x.to(dtype) if x.is_floating_point() else x)
    forms = _forms(backend, state, q, chunk_size)
    with without_autocast(q):
        if backend == "recurrent":
            if lengths is not None:
                mask = torch.arange(q.shape[1], device=q.device) < lengths[:, None]
            y, state = _recurrent(*tokens, state, mask, chunk_size, max_surprise)
        elif mask is None:
            y, state = _chunkwise(*tokens, state, lengths, chunk_size, max_surprise, forms)
        else:
            rows = PackedRows(mask)
            y, state = _chunkwise(*map(rows.pack, tokens), state, rows.lengths, chunk_size, max_surprise, forms)
            y = rows.unpack(y)
    return y.to(q.dtype), state


def _check(q, k, v, theta, eta, alpha, state, chunk_size, max_surprise, mask, lengths, backend) -> None:
    """Refuse what cannot be computed, naming the argument and the fix."""
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {BACKENDS}, got {backend!r}")
    if backend == "recurrent" and torch.is_inference_mode_enabled():
        raise ValueError("`backend='recurrent'` differentiates: use torch.no_grad() in place of torch.inference_mode()")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"`chunk_size` must be a positive integer, got {chunk_size!r}")
    if max_surprise is not None and not max_surprise > 0:
        raise ValueError(f"`max_surprise` must be positive, or None for no cap; got {max_surprise!r}")
    if q.dim() != 4 or q.shape[1] == 0:
        raise ValueError(f"`q` must be [batch, tokens >= 1, heads, width], got shape {tuple(q.shape)}")
    for name, x, shape in (
        ("k", k, q.shape),
        ("v", v, q.shape),
        ("theta", theta, q.shape[:3]),
        ("eta", eta, q.shape[:3]),
        ("alpha", alpha, q.shape[:3]),
    ):
        if x.shape != shape:
            raise ValueError(f"`{name}` must have shape {tuple(shape)} to fit `q`, got {tuple(x.shape)}")
    if mask is not None and (mask.shape != q.shape[:2] or mask.dtype != torch.bool):
        raise ValueError(
            f"`mask` must be a bool tensor of shape {tuple(q.shape[:2])}, got {mask.dtype} {tuple(mask.shape)}"
        )
    if lengths is not None and (mask is not None or lengths.shape != q.shape[:1]):
        raise ValueError(f"`lengths` must be [{q.shape[0]}] and stand in place of `mask`, not beside it")
    _check_state(state, q, chunk_size)


def _check_state(state: MemoryState, q: Tensor, chunk_size: int) -> None:
    B, _, H, D = q.shape
    if not state.weights or len(state.weights) != len(state.momentum):
        raise ValueError("`state.weights` and `state.momentum` must be tuples of the same length, one entry per layer")
    width = D
    if state.start is not None and [W.shape for W in state.start] != [W.shape for W in state.weights]:
        raise ValueError("`state.start` must be like `state.weights`, or None to forget towards zero")
    for depth, (W, S) in enumerate(zip(state.weights, state.momentum, strict=True)):
        if W.dim() != 4 or W.shape[:3] != (B, H, width) or S.shape != W.shape:
            raise ValueError(
                f"`state.weights[{depth}]` and its momentum must be [{B}, {H}, {width}, out], got {tuple(W.shape)} and "
                f"{tuple(S.shape)}; a state belongs to the batch size and head count it was made with"
            )
        width = W.shape[3]
    if width != D:
        raise ValueError(f"the last of `state.weights` must map to the head width {D}, got {width}")
    if state.length is not None and state.gates[0].shape[-1] != chunk_size:
        raise ValueError(
            f"`chunk_size` is {chunk_size}, but `state` stands inside a chunk of {state.gates[0].shape[-1]}: "
            "keep the grid it was made on"
        )
