"""The neural long-term memory as a function of tensors (Section 3 of the paper): `neural_memory`.

Every token is written into a small MLP by one step of gradient descent with momentum and forgetting (Eqs. 12-14), then
the MLP is asked for the token's query (Eq. 15). Gradients are taken at the last chunk boundary (Eq. 16). `memory_rule`
defines a step. The same numbers come from several forms, which `choose_form` picks from:

* the token loop (`memory_rule.token_loop`): the definition;
* the closed form of a chunk under autograd (`memory_closed_form`), for `torch.compile`, `torch.func` and new rules;
* the same with a hand-written backward (`memory_chunks`), and one token at a time (`memory_step`), in eager mode;
* the same as Triton kernels (`titans_kernels`), on GPUs;
* one token at a time in C++ (`titans_cpu`), on CPUs.

Axis letters: B batch, T tokens, H heads, D head width, C chunk length, N chunks, n tokens of one chunk. Weights are
stored so that `M(x) = x W`, i.e. [B, H, in, out].
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .fast_paths import (
    inside_functorch,
    operators,
    operators_package,
    state_dtype,
    takes,
    without_autocast,
    without_values,
)
from .memory_chunks import scan as scan_by_hand
from .memory_chunks import serves
from .memory_closed_form import chunk_coefficients, read_chunk, read_tokens
from .memory_rule import DeltaRule, Rule, answers, token_loop
from .memory_state import MemoryState, where_all
from .memory_step import native_step, step
from .rows import GridCut, PackedRows

BACKENDS = ("auto", "torch", "triton", "cpu", "recurrent")
NATIVE = ("auto", "cpu")  # those that take the C++ operators


# The closed form under autograd, and the choice of a faster one


def scan(rule: Rule, weights, momentum, start, tokens, chunks: Tensor | None = None):
    """Read whole chunks from a boundary, one after the other.

    Args:
        weights, momentum: tuples over the memory's depth of [B, H, in, out].
        start: where forgetting leads, like the weights; None is zero.
        tokens: q, k, v [B, H, N, C, D], N chunks of C tokens, and theta, eta, alpha [B, H, N, C].
        chunks: [B] how many of the chunks each row has; None means all. Outputs after a row's last are unspecified.

    Returns:
        The outputs [B, H, N, C, D], and weights and momentum after each row's last chunk.
    """
    tokens = [x.to(weights[0].dtype) for x in tokens]
    if takes("chunks") and serves(rule):
        return scan_by_hand(rule, weights, momentum, start, tokens, chunks)
    read = partial(read_chunk, rule)
    if torch.is_grad_enabled() and not inside_functorch():  # torch.func has no saved-tensor hooks to checkpoint with
        read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    for n in range(tokens[0].shape[2]):
        y, *after = read(weights, momentum, start, *(x[:, :, n] for x in tokens))
        outputs.append(y)
        if chunks is not None:
            after = [where_all(n < chunks, *pair) for pair in zip(after, (weights, momentum), strict=True)]
        weights, momentum = after
    return torch.stack(outputs, dim=2), weights, momentum


def extend(rule: Rule, state: MemoryState, tokens, counts: Tensor | None = None) -> tuple[Tensor, MemoryState]:
    """Read tokens into each row's open chunk; rows whose chunk fills up step over the boundary.

    Args:
        state: with its open-chunk fields.
        tokens: q, k, v [B, H, n, D] and theta, eta, alpha [B, H, n]; no more than any row's chunk has room for.
        counts: [B] how many of the tokens each row has; None means all. Outputs after a row's last are unspecified.

    Returns:
        The outputs [B, H, n, D] and the state after each row's last token.
    """
    q, k, v, *gates = (x.to(state.weights[0].dtype) for x in tokens)
    n, C = q.shape[2], state.gates[0].shape[-1]
    if counts is None and takes("step", n) and serves(rule):
        found = step(rule, state, q, k, v, gates)
        if found is not None:
            return found
    factors = rule.factors(state.weights, state.momentum, state.start, state.open_chunk(), gates, k, v)
    slots = state.length[:, None] + torch.arange(n, device=q.device)
    state = state.with_tokens(*factors, gates, n if counts is None else counts)
    coefficients = chunk_coefficients(*state.gates, rows=slots.clamp(max=C - 1))
    y = read_tokens(state.weights, state.momentum, state.start, state.inputs, state.errors, coefficients, q)
    if without_values(state.length) or bool((state.length == C).any()):
        state = state.close(*state.current())
    return y, state


def scan_chunks(
    weights,
    momentum,
    q,
    k,
    v,
    theta,
    eta,
    alpha,
    chunks: Tensor | None,
    max_surprise: float | None,
    normalised: bool = False,
    hidden_step: float = 1.0,
    delta: bool = False,
    start=None,
):
    """`scan` as the Triton kernels compute it: a rule given by its fields."""
    rule = (DeltaRule if delta else Rule)(max_surprise, normalised, hidden_step)
    return scan(rule, weights, momentum, start, (q, k, v, theta, eta, alpha), chunks)


def extend_chunk(
    state,
    q,
    k,
    v,
    theta,
    eta,
    alpha,
    counts: Tensor | None,
    max_surprise: float | None,
    normalised: bool = False,
    hidden_step: float = 1.0,
    delta: bool = False,
):
    """`extend` as the Triton kernels compute it: a rule given by its fields."""
    rule = (DeltaRule if delta else Rule)(max_surprise, normalised, hidden_step)
    return extend(rule, state, (q, k, v, theta, eta, alpha), counts)


def _fields(rule: Rule) -> tuple:
    """A rule's fields and which of the two it is, in the order of the arguments of `scan_chunks` and `extend_chunk`."""
    return rule.max_surprise, rule.normalised, rule.hidden_step, type(rule) is DeltaRule


class Form(NamedTuple):
    """What reads whole chunks (`scan`), and what reads tokens into an open one (`extend`)."""

    scan: Callable
    extend: Callable


TORCH = Form(scan, extend)


def choose_form(backend: str, rule: Rule, state: MemoryState, q: Tensor, chunk_size: int) -> Form:
    """The form for a backend. What it cannot compute is refused here, before a token is read."""
    if backend == "cpu":
        refusal = operator_refusal(rule, state, q)
        if refusal is not None:
            raise ValueError(f"`backend='cpu'` {refusal}")
    if backend != "triton" and (backend != "auto" or not q.is_cuda or inside_functorch()):
        return Form(scan, _native_extend) if backend in NATIVE and not q.is_cuda else TORCH
    refusal = kernel_refusal(rule, state, q, chunk_size)
    if refusal is not None and backend == "triton":
        raise ValueError(f"`backend='triton'` {refusal}")
    if refusal is not None or (backend == "auto" and not _kernels_pass(rule, state, q, chunk_size)):
        return TORCH
    return Form(_kernel_scan, _kernel_extend)


def kernel_refusal(rule: Rule, state: MemoryState, q: Tensor, chunk_size: int) -> str | None:
    """Why the Triton kernels cannot serve a memory, and the fix; None if they can."""
    if type(rule) not in (Rule, DeltaRule):
        return f"does not serve {rule}: use 'auto' or 'torch'"
    kernels = _kernels()
    if kernels is None:
        return "needs the kernels: pip install 'titans-hf[kernels]'"
    what = kernels.refusal(state.weights, q, chunk_size)
    return None if what is None else f"does not serve {what}. Use 'torch'"


def operator_refusal(rule: Rule, state: MemoryState, q: Tensor) -> str | None:
    """Why the C++ operators cannot serve a memory on a CPU, and the fix; None if they can."""
    if not serves(rule):
        return f"does not serve {rule}: use 'auto' or 'torch'"
    if q.device.type != "cpu" or state.weights[0].dtype is not torch.float32:
        return f"serves states in float32 on a CPU, not {state.weights[0].dtype} on {q.device}: use 'auto' or 'torch'"
    package = operators_package()
    if package is None:
        return "needs the package titans_cpu, which comes with titans-hf: use 'auto' or 'torch'"
    problem = package.problem()
    return None if problem is None else f"has no operators: {problem}. Use 'auto' or 'torch'"


def _kernels():
    """The package of Triton kernels, if it is installed."""
    try:
        import titans_kernels
    except ImportError:
        return None
    return titans_kernels


def _kernels_pass(rule: Rule, state: MemoryState, q: Tensor, chunk_size: int) -> bool:
    """Whether the kernels agree with torch on this device; checked at their first use (`titans_kernels.self_check`)."""
    kind = dict(delta=type(rule) is DeltaRule, to_start=state.start is not None)
    return _kernels().passes(state.weights, q, chunk_size, scan_chunks, extend_chunk, MemoryState, **kind)


def _kernel_scan(rule: Rule, weights, momentum, start, tokens, chunks: Tensor | None):
    return _kernels().scan_chunks(weights, momentum, *tokens, chunks, *_fields(rule), start)


def _kernel_extend(rule: Rule, state: MemoryState, tokens, counts: Tensor | None):
    """The kernel of a decoding step for one token without gradients, the torch form for more."""
    state = replace(state, writer=None)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (*state.tensors(), *tokens))
    if tokens[0].shape[2] > 1 or trained:
        return extend(rule, state, tokens, counts)
    return _kernels().extend_chunk(state, *tokens, counts, *_fields(rule))


def _native_extend(rule: Rule, state: MemoryState, tokens, counts: Tensor | None):
    """The C++ operator for one token without gradients, the torch form for more."""
    q, k, v, *gates = (x.to(state.weights[0].dtype) for x in tokens)
    native = operators(q, q.shape[2]) if counts is None and serves(rule) else None
    found = None if native is None else native_step(native, rule, state, q, k, v, gates)
    return extend(rule, state, tokens, counts) if found is None else found


def _read_chunkwise(rule: Rule, tokens, state: MemoryState, lengths: Tensor | None, chunk_size: int, form: Form):
    """Read rows whose real tokens are at the front: close the open chunk, read whole chunks, open the next."""
    cut = GridCut.of(state.length, lengths, tokens[0].shape[1], chunk_size)
    y_head = y_cells = y_rest = None
    if cut.head.width:
        head = [x.transpose(1, 2) for x in cut.head.of(tokens)]  # [B, H, n, ...]
        y_head, state = form.extend(rule, state, head, cut.head.counts)
    if cut.cells.width:
        whole = [x.transpose(1, 2).unflatten(2, (-1, chunk_size)) for x in cut.cells.of(tokens)]  # [B, H, N, C, ...]
        chunks = None if cut.cells.counts is None else cut.cells.counts // chunk_size
        y_cells, weights, momentum = form.scan(rule, state.weights, state.momentum, state.start, whole, chunks)
        y_cells = y_cells.flatten(2, 3)
        state = replace(state if chunks is not None else state.at_boundary(), weights=weights, momentum=momentum)
    if cut.rest.width:
        rest = [x.transpose(1, 2) for x in cut.rest.of(tokens)]
        y_rest, state = form.extend(rule, state.opened(chunk_size), rest, cut.rest.counts)
    return cut.join(*(None if y is None else y.transpose(1, 2) for y in (y_head, y_cells, y_rest))), state


# The public functions


def recall(weights: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """`M(q)` of a memory that is not being written: the same weights for every query [B, T, H, D].

    Under autograd, take the weights of `state.current()`, or of `state.without_writer()`: a decoding step that goes on
    from a state writes into its buffers.
    """
    precise = q.to(weights[0].dtype)
    native = operators(precise, q.shape[1])
    if native is not None:
        return native.recall(weights, precise).to(q.dtype)
    with without_autocast(q):
        y = answers(weights, precise.transpose(1, 2))[1][-1]
    return y.transpose(1, 2).to(q.dtype)


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
    rule: Rule | None = None,
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
        max_surprise: cap on the norm of each token's gradient, per memory layer. None is the paper as printed, and
            diverges on repetitive input.
        mask: [B, T] bool, True at real tokens, in any pattern. Padding changes nothing and reads as zero.
        backend: "recurrent" (the token loop), "torch" (the chunk form), "triton" (its kernels, on GPUs, for the shapes
            they serve), "cpu" (a decoding step in C++, else "torch"), or "auto": "triton" and "cpu" where they are
            installed, serve the tensors and have passed a check against torch at their first use
            (`TITANS_KERNEL_CHECK=0` skips that), "torch" elsewhere.
        lengths: [B] real tokens of each row, for rows that already hold them at the front: a cheaper `mask`. Outputs
            after a row's last token are then unspecified.
        rule: the update rule, in place of `max_surprise`; by default `Rule(max_surprise)`.

    Returns:
        The outputs [B, T, H, D] in the dtype of `q`, and the state after the last token.
    """
    _check(q, k, v, theta, eta, alpha, state, chunk_size, mask, lengths, backend)
    if rule is not None and max_surprise is not None:
        raise ValueError("`max_surprise` is a field of `rule`: pass one of them")
    rule = Rule(max_surprise) if rule is None else rule
    if torch.is_grad_enabled():
        state = state.without_writer()
    dtype = state_dtype(q.dtype)
    if state.weights[0].dtype != dtype:
        state = state.map(lambda x: x.to(dtype) if x.is_floating_point() else x)
    tokens = [q, k, v, *(gate.to(dtype) for gate in (theta, eta, alpha))]
    form = choose_form(backend, rule, state, q, chunk_size)
    with without_autocast(q):
        if backend == "recurrent":
            if lengths is not None:
                mask = torch.arange(q.shape[1], device=q.device) < lengths[:, None]
            y, state = token_loop(rule, *(x.to(dtype) for x in tokens), state, mask, chunk_size)
        elif mask is None:
            y, state = _read_chunkwise(rule, tokens, state, lengths, chunk_size, form)
        else:
            rows = PackedRows(mask)
            y, state = _read_chunkwise(rule, [*map(rows.pack, tokens)], state, rows.lengths, chunk_size, form)
            y = rows.unpack(y)
    return y.to(q.dtype), state


def _check(q, k, v, theta, eta, alpha, state, chunk_size, mask, lengths, backend) -> None:
    """Refuse what cannot be computed, naming the argument and the fix."""
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {BACKENDS}, got {backend!r}")
    if backend == "recurrent" and torch.is_inference_mode_enabled():
        raise ValueError("`backend='recurrent'` differentiates: use torch.no_grad() in place of torch.inference_mode()")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"`chunk_size` must be a positive integer, got {chunk_size!r}")
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
        raise ValueError(f"`lengths` must be [{q.shape[0]}] and replaces `mask`: pass one of them")
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
            f"`chunk_size` is {chunk_size}, but `state` is inside a chunk of {state.gates[0].shape[-1]}: "
            "keep the grid it was made on"
        )
