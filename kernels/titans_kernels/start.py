"""The gradient of the start that forgetting leads to, `1 - decay` of which is in the memory after each token.

`start_backward_kernel` runs after those of `backward.py` and `delta.py`, all chunks in parallel: what it needs is still
in their buffers.

Axis letters and layouts as in `forward.py` and `backward.py`.
"""

import triton
import triton.language as tl

from .delta import found_of_state
from .forward import chunks_here
from .tiles import kernel, load_tile, rolled, store_tile


@triton.jit
def _add_faded(
    total, x, d, decay, i, o, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of `total + x^T ((1 - decay) d)`, for outputs."""
    for start in range(0, rolled(C), BC):
        t = start + tl.arange(0, BC)
        d_tile = (1.0 - tl.load(decay + t))[:, None] * load_tile(d, t, o, OUT, 1)
        total = tl.dot(load_tile(x, i, t, 1, IN), d_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def _add_found_faded(
    total, x, d, decay, drift, here, i, o, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same one token earlier, for what each token finds."""
    for start in range(0, rolled(C), BC):
        t = start + tl.arange(0, BC)
        found_M, _ = found_of_state(decay, drift, here, t)
        d_tile = (1.0 - found_M)[:, None] * load_tile(d, t, o, OUT, 1)
        total = tl.dot(load_tile(x, i, t, 1, IN), d_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def _layer_start_backward(
    xb, dz, own, d_W, d_own, x, d_error, dU, error, decay, drift, here,
    FOUND: tl.constexpr, TWO: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store d_own [IN, OUT] of one chunk: through its outputs, its end, and, if FOUND, what its tokens find.

    d_W: the gradient of the weights after the chunk. Returns what the start takes from the gradient of the last decay.
    """
    left, taken = 1.0 - tl.load(decay + here + C - 1), 0.0
    for i_start in range(0, rolled(IN), BI):
        i = i_start + tl.arange(0, BI)
        for o_start in range(0, rolled(OUT), BO):
            o = o_start + tl.arange(0, BO)
            end_W = load_tile(d_W, i, o, OUT, 1)
            taken += tl.sum(end_W * load_tile(own, i, o, OUT, 1))
            found = _add_faded(left * end_W, xb, dz, decay + here, i, o, C, IN, OUT, BC, PRECISION)
            if FOUND:
                found = _add_found_faded(found, x, d_error, decay, drift, here, i, o, C, IN, OUT, BC, PRECISION)
                if TWO:
                    found = _add_found_faded(found, dU, error, decay, drift, here, i, o, C, IN, OUT, BC, PRECISION)
            store_tile(d_own, i, o, OUT, found)
    return taken


@triton.jit
def _no_gradient(d_own, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr):
    for i_start in range(0, rolled(IN), BI):
        for o_start in range(0, rolled(OUT), BO):
            i, o = i_start + tl.arange(0, BI), o_start + tl.arange(0, BO)
            store_tile(d_own, i, o, OUT, tl.zeros((BI, BO), tl.float32))


@kernel
def start_backward_kernel(
    q, k, dy, decay, drift, own1, own2, read, d_read, hidden, error2, d_error1, d_error2, d_W1, d_W2, d_own1, d_own2,
    d_end, chunks, first, N, P,
    H, DELTA: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the start through each chunk, d_own1 and d_own2 [P, in, out], 0 for chunks that a row lacks.

    Completes the gradient of the last decay in d_end. Grid (P, B H).
    """
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
    wide, narrow, after, matrix = here * F, here * D, (row * (P + 1) + n + 1) * D * F, (row * P + n) * D * F
    if n >= chunks_here(chunks, row, first, P, H):
        _no_gradient(d_own1 + matrix, D, F, BD, BF)
        if DEPTH == 2:
            _no_gradient(d_own2 + matrix, F, D, BF, BD)
        return
    state = row * D * F
    if DEPTH == 1:
        taken = _layer_start_backward(
            q + tokens, dy + tokens, own1 + state, d_W1 + after, d_own1 + matrix, k + tokens, d_error1 + wide,
            d_error1, error2, decay, drift, here, DELTA, False, C, D, F, BD, BF, BC, PRECISION,
        )  # fmt: skip
    else:
        taken = _layer_start_backward(
            q + tokens, d_read + wide, own1 + state, d_W1 + after, d_own1 + matrix, k, d_error1, d_error1, error2,
            decay, drift, here, False, False, C, D, F, BD, BF, BC, PRECISION,
        )  # fmt: skip
        taken += _layer_start_backward(
            read + 2 * wide + C * F, dy + tokens, own2 + state, d_W2 + after, d_own2 + matrix, hidden + wide,
            d_error2 + narrow, d_error1 + wide, error2 + narrow, decay, drift, here, DELTA, True, C, F, D, BF, BD, BC,
            PRECISION,
        )  # fmt: skip
    ends = d_end + (row * P + n) * 3
    tl.store(ends, tl.load(ends) - taken)
