"""Backward kernels of the chunked update: the hand-written backward of `titans_hf/memory_chunks.py` in three kernels.

`read_backward_kernel` computes the gradients that come from the outputs, all chunks in parallel.
`write_backward_kernel` adds those that come from the state at a chunk's end, and so runs from the last chunk to the
first. `gates_backward_kernel` turns gradients of coefficients into gradients of gates, all chunks in parallel.

Axis letters and layouts as in `forward.py`. `d_W`, `d_S` [B, H, P + 1, in, out] are the gradients of the state at every
chunk boundary; gradients of a layer's inputs and errors are [B, H, P, C, width].
"""

import triton
import triton.language as tl

from .forward import chunks_here, end_of_chunk
from .tiles import (
    kernel,
    load_tile,
    product,
    rolled,
    silu,
    silu_curve,
    silu_slope,
    squared_norms,
    step_share,
    store_tile,
)


@triton.jit
def _layer_read_backward(
    xb, x, error, scale, overlap, W, S, own, dz, step, d_step, work, d_xb, d_x, d_error, d_W, d_S, M_of_M, M_of_S, t,
    FIRST: tl.constexpr, TO_START: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of `z = decay (xb W) + drift (xb S) - (overlap * step * scale) error`, with `overlap = xb x^T`.

    With TO_START z has `(1 - decay) (xb own)` besides. Returns the gradients of decay and drift. Stores d_xb, d_x
    [C, IN], d_error [C, OUT] (of the capped error), d_W and d_S [IN, OUT]; adds to d_step [C, C], or sets it if FIRST.
    `work` [C, C] is workspace for the gradient of the overlap.
    """
    weight = load_tile(step, t, t, C, 1)
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        d_product = -product(dz, OUT, 1, error, 1, OUT, t, i, OUT, BO, PRECISION) * tl.load(scale + i)[None, :]
        found = d_product * load_tile(overlap, t, i, C, 1)
        if not FIRST:
            found += load_tile(d_step, t, i, C, 1)
        store_tile(d_step, t, i, C, found)
        store_tile(work, t, i, C, d_product * load_tile(step, t, i, C, 1))
    tl.debug_barrier()  # other threads read the gradient of the overlap
    d_decay, d_drift = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for start in range(0, rolled(IN), BI):
        i = start + tl.arange(0, BI)
        xb_tile = load_tile(xb, t, i, IN, 1)
        through = product(dz, OUT, 1, W, 1, OUT, t, i, OUT, BO, PRECISION)
        d_decay += tl.sum(xb_tile * through, axis=1)
        d_tile = M_of_M[:, None] * through
        through = product(dz, OUT, 1, S, 1, OUT, t, i, OUT, BO, PRECISION)
        d_drift += tl.sum(xb_tile * through, axis=1)
        d_tile += M_of_S[:, None] * through
        if TO_START:
            through = product(dz, OUT, 1, own, 1, OUT, t, i, OUT, BO, PRECISION)
            d_decay -= tl.sum(xb_tile * through, axis=1)
            d_tile += (1.0 - M_of_M)[:, None] * through
        d_tile += product(work, C, 1, x, IN, 1, t, i, C, BC, PRECISION)
        store_tile(d_xb, t, i, IN, d_tile)
        store_tile(d_x, t, i, IN, product(work, 1, C, xb, IN, 1, t, i, C, BC, PRECISION))
    for o_start in range(0, rolled(OUT), BO):
        o = o_start + tl.arange(0, BO)
        dz_tile = load_tile(dz, t, o, OUT, 1)
        P = tl.trans(load_tile(overlap, t, t, C, 1) * weight)
        store_tile(d_error, t, o, OUT, -tl.dot(P, dz_tile, input_precision=PRECISION))
        for i_start in range(0, rolled(IN), BI):
            i = i_start + tl.arange(0, BI)
            xb_tile = load_tile(xb, i, t, 1, IN)
            store_tile(d_W, i, o, OUT, tl.dot(xb_tile, M_of_M[:, None] * dz_tile, input_precision=PRECISION))
            store_tile(d_S, i, o, OUT, tl.dot(xb_tile, M_of_S[:, None] * dz_tile, input_precision=PRECISION))
    return d_decay, d_drift


@kernel
def read_backward_kernel(
    q, k, dy, step, decay, drift, W1, S1, own1, W2, S2, own2, hidden, error1, error2, scale1, scale2,
    read, d_read, overlap, work, dq, d_k, d_hidden, d_error1, d_error2, d_W1, d_S1, d_W2, d_S2, d_step, d_decay,
    d_drift, chunks, first, N, P,
    H, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through the outputs, from dy. Grid (P, B H).

    Workspace: read [2, C, F], the hidden layer of the queries before and after the non-linearity; d_read [C, F], its
    gradient; overlap and work [C, C]. For the results see `_layer_read_backward`.
    """
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if n >= chunks_here(chunks, row, first, P, H):
        return
    here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
    slot = (row * (P + 1) + n) * D * F
    own1, own2 = own1 + row * D * F, own2 + row * D * F
    t = tl.arange(0, C)
    M_of_M, M_of_S = tl.load(decay + here + t), tl.load(drift + here + t)
    overlap, work, step, d_step = overlap + here * C, work + here * C, step + here * C, d_step + here * C
    zb, xb, d_read = read + 2 * here * F, read + (2 * here + C) * F, d_read + here * F
    found_decay, found_drift = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    if DEPTH == 2:
        for start in range(0, rolled(C), BC):
            i = start + tl.arange(0, BC)
            P1 = product(q + tokens, D, 1, k + tokens, 1, D, t, i, D, BD, PRECISION)
            P1 *= load_tile(step, t, i, C, 1) * tl.load(scale1 + here + i)[None, :]
            store_tile(work, t, i, C, P1)
        tl.debug_barrier()  # each barrier here: the next step reads what other threads stored
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            Z = M_of_M[:, None] * product(q + tokens, D, 1, W1 + slot, F, 1, t, f, D, BD, PRECISION)
            Z += M_of_S[:, None] * product(q + tokens, D, 1, S1 + slot, F, 1, t, f, D, BD, PRECISION)
            if TO_START:
                Z += (1.0 - M_of_M)[:, None] * product(q + tokens, D, 1, own1, F, 1, t, f, D, BD, PRECISION)
            Z -= product(work, C, 1, error1 + here * F, F, 1, t, f, C, BC, PRECISION)
            store_tile(zb, t, f, F, Z)
            store_tile(xb, t, f, F, silu(Z))
        tl.debug_barrier()
        for start in range(0, rolled(C), BC):
            i = start + tl.arange(0, BC)
            store_tile(overlap, t, i, C, product(xb, F, 1, hidden + here * F, 1, F, t, i, F, BF, PRECISION))
        tl.debug_barrier()
        found_decay, found_drift = _layer_read_backward(
            xb, hidden + here * F, error2 + here * D, scale2 + here, overlap, W2 + slot, S2 + slot, own2,
            dy + tokens, step, d_step, work, d_read, d_hidden + here * F, d_error2 + here * D, d_W2 + slot, d_S2 + slot,
            M_of_M, M_of_S, t, True, TO_START, C, F, D, BF, BD, BC, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            dz = load_tile(d_read, t, f, F, 1) * silu_slope(load_tile(zb, t, f, F, 1))
            store_tile(d_read, t, f, F, dz)
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        store_tile(overlap, t, i, C, product(q + tokens, D, 1, k + tokens, 1, D, t, i, D, BD, PRECISION))
    tl.debug_barrier()
    if DEPTH == 2:
        upstream = d_read
    else:
        upstream = dy + tokens
    more_decay, more_drift = _layer_read_backward(
        q + tokens, k + tokens, error1 + here * F, scale1 + here, overlap, W1 + slot, S1 + slot, own1, upstream,
        step, d_step, work, dq + tokens, d_k + here * D, d_error1 + here * F, d_W1 + slot, d_S1 + slot,
        M_of_M, M_of_S, t, DEPTH == 1, TO_START, C, D, F, BD, BF, BC, PRECISION,
    )  # fmt: skip
    tl.store(d_decay + here + t, found_decay + more_decay)
    tl.store(d_drift + here + t, found_drift + more_drift)


@triton.jit
def scale_slopes(x_squared, error_squared, share, normalised, max_surprise):
    """Minus the derivative of the scale's logarithm by the input, over the input; the same for the error.

    Where the cap acts the scale is `max_surprise / (|x| |error|)`, elsewhere in proportion to `1 / |x|^2` or constant.
    """
    step = step_share(x_squared, share, normalised)
    capped = x_squared * error_squared * step * step > max_surprise * max_surprise
    of_x = tl.where(normalised, tl.where(x_squared > 1.0, 2.0 / tl.maximum(x_squared, 1.0), 0.0), 0.0)
    of_x = tl.where(capped, 1.0 / tl.where(capped, x_squared, 1.0), of_x)
    return of_x, tl.where(capped, 1.0 / tl.where(capped, error_squared, 1.0), 0.0)


@triton.jit
def _layer_write_backward(
    x, error, scale, d_W, d_S, d_x, d_error, to_M, to_S, share, normalised, max_surprise, t,
    IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of a layer's update, `M = ... - x^T (to_M scale error)` and `S = ... - x^T (to_S scale error)`.

    Returns the gradients of to_M and to_S, and `taken` [C]: the gradient of the error before the scale is
    `scale d_error - taken error`. d_W, d_S: gradients of the state after the chunk. Completes in place d_error (of the
    scaled error) and d_x, including the part of d_x that comes from the scale.
    """
    s = tl.load(scale + t)
    from_M, from_S = tl.zeros(t.shape, tl.float32), tl.zeros(t.shape, tl.float32)
    along, error_squared = tl.zeros(t.shape, tl.float32), tl.zeros(t.shape, tl.float32)
    for start in range(0, rolled(OUT), BO):
        o = start + tl.arange(0, BO)
        error_tile, d_tile = load_tile(error, t, o, OUT, 1), load_tile(d_error, t, o, OUT, 1)
        moved = product(x, IN, 1, d_W, OUT, 1, t, o, IN, BI, PRECISION)
        from_M -= s * tl.sum(error_tile * moved, axis=1)
        d_tile -= to_M[:, None] * moved
        moved = product(x, IN, 1, d_S, OUT, 1, t, o, IN, BI, PRECISION)
        from_S -= s * tl.sum(error_tile * moved, axis=1)
        d_tile -= to_S[:, None] * moved
        along += tl.sum(error_tile * d_tile, axis=1)
        error_squared += tl.sum(error_tile * error_tile, axis=1)
        store_tile(d_error, t, o, OUT, d_tile)
    x_squared = squared_norms(x, t, IN, BI)
    of_x, of_error = scale_slopes(x_squared, error_squared, share, normalised, max_surprise)
    from_x, taken = of_x * s * along, of_error * s * along
    for start in range(0, rolled(IN), BI):
        i = start + tl.arange(0, BI)
        d_tile = load_tile(d_x, t, i, IN, 1) - from_x[:, None] * load_tile(x, t, i, IN, 1)
        d_tile -= (to_M * s)[:, None] * product(error, OUT, 1, d_W, 1, OUT, t, i, OUT, BO, PRECISION)
        d_tile -= (to_S * s)[:, None] * product(error, OUT, 1, d_S, 1, OUT, t, i, OUT, BO, PRECISION)
        store_tile(d_x, t, i, IN, d_tile)
    return from_M, from_S, taken


@triton.jit
def _state_backward(
    W, S, d_W, d_S, x, dz, more, error, M_of_M, M_of_S, S_of_S, t,
    TWO: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Complete the gradient of the state before a chunk; return the gradients of the old state's three coefficients.

    d_W, d_S hold the part that comes from the outputs, and in the next slot the gradient of the state after the chunk.
    Adds `x^T dz`, and `more^T error` if TWO.
    """
    from_decay, from_drift, from_momentum = 0.0, 0.0, 0.0
    for i_start in range(0, rolled(IN), BI):
        i = i_start + tl.arange(0, BI)
        for o_start in range(0, rolled(OUT), BO):
            o = o_start + tl.arange(0, BO)
            end_W, end_S = load_tile(d_W + IN * OUT, i, o, OUT, 1), load_tile(d_S + IN * OUT, i, o, OUT, 1)
            old_S = load_tile(S, i, o, OUT, 1)
            from_decay += tl.sum(end_W * load_tile(W, i, o, OUT, 1))
            from_drift += tl.sum(end_W * old_S)
            from_momentum += tl.sum(end_S * old_S)
            found = load_tile(d_S, i, o, OUT, 1) + M_of_S * end_W + S_of_S * end_S
            store_tile(d_S, i, o, OUT, found)
            found = load_tile(d_W, i, o, OUT, 1) + M_of_M * end_W
            x_tile, dz_tile = load_tile(x, i, t, 1, IN), load_tile(dz, t, o, OUT, 1)
            found = tl.dot(x_tile, dz_tile, found, input_precision=PRECISION)
            if TWO:
                x_tile, dz_tile = load_tile(more, i, t, 1, IN), load_tile(error, t, o, OUT, 1)
                found = tl.dot(x_tile, dz_tile, found, input_precision=PRECISION)
            store_tile(d_W, i, o, OUT, found)
    return from_decay, from_drift, from_momentum


@kernel
def write_backward_kernel(
    k, step, in_S, decay, drift, momentum, W1, S1, W2, S2, pre, hidden, through, error1, error2, scale1, scale2,
    d_k, d_hidden, d_error1, d_error2, d_W1, d_S1, d_W2, d_S2, dk, dv, d_to_M, d_to_S, d_end, chunks, max_surprise,
    hidden_step, normalised, first, N, P,
    H, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through the state updates, from a row's last chunk to its first. Grid (B H).

    d_k, d_hidden, d_error1, d_error2 hold the gradients through the outputs, and are overwritten. d_W and d_S hold the
    gradient of the end state in the slot after the last chunk, and are completed down to slot 0. Stores dk and dv;
    d_to_M and d_to_S [C], the gradients of the last rows of `step` and `in_S`; d_end [3], those of the last decay,
    drift and momentum.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, C)
    share = 1.0  # of the step that the first layer takes
    if DEPTH == 2:
        share = hidden_step
    count = chunks_here(chunks, row, first, P, H)
    for done in range(count):
        n = count - 1 - done
        here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
        slot, wide, narrow = (row * (P + 1) + n) * D * F, here * F, here * D
        M_of_M, M_of_S, S_of_S, to_M, to_S = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
        after = slot + D * F
        from_M, from_S, taken1 = _layer_write_backward(
            k + tokens, error1 + wide, scale1 + here, d_W1 + after, d_S1 + after, d_k + narrow, d_error1 + wide, to_M,
            to_S, share, False, max_surprise, t, D, F, BD, BF, PRECISION,
        )  # fmt: skip
        s1 = tl.load(scale1 + here + t)[:, None]
        if DEPTH == 1:
            tl.debug_barrier()  # each barrier here: the next step reads what other threads stored
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                d_tile = s1 * load_tile(d_error1 + wide, t, f, F, 1)
                d_tile = 2.0 * (d_tile - taken1[:, None] * load_tile(error1 + wide, t, f, F, 1))
                store_tile(d_error1 + wide, t, f, F, d_tile)
                store_tile(dv + tokens, t, f, D, -d_tile)
            dz1 = d_error1 + wide
            from_decay, from_drift, from_momentum = 0.0, 0.0, 0.0
        else:
            more_M, more_S, taken2 = _layer_write_backward(
                hidden + wide, error2 + narrow, scale2 + here, d_W2 + after, d_S2 + after, d_hidden + wide,
                d_error2 + narrow, to_M, to_S, 1.0, normalised != 0, max_surprise, t, F, D, BF, BD, PRECISION,
            )  # fmt: skip
            from_M += more_M
            from_S += more_S
            s2 = tl.load(scale2 + here + t)[:, None]
            tl.debug_barrier()
            for start in range(0, rolled(F), BF):  # error1 = (error2 W2^T) slope
                f = start + tl.arange(0, BF)
                Z = load_tile(pre + wide, t, f, F, 1)
                d_tile = s1 * load_tile(d_error1 + wide, t, f, F, 1)
                d_tile -= taken1[:, None] * load_tile(error1 + wide, t, f, F, 1)
                store_tile(d_error1 + wide, t, f, F, d_tile * silu_slope(Z))
                d_hidden_tile = load_tile(d_hidden + wide, t, f, F, 1) * silu_slope(Z)
                d_hidden_tile += d_tile * load_tile(through + wide, t, f, F, 1) * silu_curve(Z)
                store_tile(d_hidden + wide, t, f, F, d_hidden_tile)
            tl.debug_barrier()
            for start in range(0, rolled(D), BD):  # error2 = 2 (out - v)
                d = start + tl.arange(0, BD)
                d_tile = s2 * load_tile(d_error2 + narrow, t, d, D, 1)
                d_tile -= taken2[:, None] * load_tile(error2 + narrow, t, d, D, 1)
                d_tile += product(d_error1 + wide, F, 1, W2 + slot, D, 1, t, d, F, BF, PRECISION)
                store_tile(d_error2 + narrow, t, d, D, 2.0 * d_tile)
                store_tile(dv + tokens, t, d, D, -2.0 * d_tile)
            tl.debug_barrier()
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                d_tile = product(d_error2 + narrow, D, 1, W2 + slot, 1, D, t, f, D, BD, PRECISION)
                d_tile *= silu_slope(load_tile(pre + wide, t, f, F, 1))
                store_tile(d_hidden + wide, t, f, F, load_tile(d_hidden + wide, t, f, F, 1) + d_tile)
            from_decay, from_drift, from_momentum = _state_backward(
                W2 + slot, S2 + slot, d_W2 + slot, d_S2 + slot, hidden + wide, d_error2 + narrow, d_error1 + wide,
                error2 + narrow, M_of_M, M_of_S, S_of_S, t, True, F, D, BF, BD, PRECISION,
            )  # fmt: skip
            dz1 = d_hidden + wide
        tl.debug_barrier()
        for start in range(0, rolled(D), BD):
            d = start + tl.arange(0, BD)
            d_tile = product(dz1, F, 1, W1 + slot, 1, F, t, d, F, BF, PRECISION)
            store_tile(dk + tokens, t, d, D, load_tile(d_k + narrow, t, d, D, 1) + d_tile)
        more_decay, more_drift, more_momentum = _state_backward(
            W1 + slot, S1 + slot, d_W1 + slot, d_S1 + slot, k + tokens, dz1, dz1, dz1, M_of_M, M_of_S, S_of_S, t,
            False, D, F, BD, BF, PRECISION,
        )  # fmt: skip
        tl.store(d_to_M + here + t, from_M)
        tl.store(d_to_S + here + t, from_S)
        ends = d_end + (row * P + n) * 3
        tl.store(ends, from_decay + more_decay)
        tl.store(ends + 1, from_drift + more_drift)
        tl.store(ends + 2, from_momentum + more_momentum)
        tl.debug_barrier()


@kernel
def gates_backward_kernel(
    eta, alpha, step, in_S, decay, drift, momentum, d_step, d_decay, d_drift, d_to_M, d_to_S, d_end,
    d_theta, d_eta, d_alpha, chunks, first, N, P, H, C: tl.constexpr,
):  # fmt: skip
    """Gradients of theta, eta and alpha: the recurrence of `coefficients_kernel` in reverse. Grid (P, B H)."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if n >= chunks_here(chunks, row, first, P, H):
        return
    tokens, here = (row * N + first + n) * C, (row * P + n) * C
    i = tl.arange(0, C)
    d_M, d_S = tl.load(d_to_M + here + i), tl.load(d_to_S + here + i)  # gradients of row t of step and in_S
    ends = d_end + (row * P + n) * 3
    d_M_of_M, d_M_of_S, d_S_of_S = tl.load(ends), tl.load(ends + 1), tl.load(ends + 2)
    for done in range(C):
        t = C - 1 - done
        keep = tl.load(eta + tokens + t)
        stay = 1.0 - tl.load(alpha + tokens + t)
        before = here + t - 1
        M_row = tl.load(step + before * C + i, mask=(i < t), other=0.0)
        S_row = tl.load(in_S + before * C + i, mask=(i < t), other=0.0)
        later = t > 0
        M_of_M = tl.load(decay + before, mask=later, other=1.0)
        M_of_S = tl.load(drift + before, mask=later, other=0.0)
        S_of_S = tl.load(momentum + before, mask=later, other=1.0)
        d_M += tl.load(d_step + (here + t) * C + i, mask=(i <= t), other=0.0)
        d_M_of_M += tl.load(d_decay + here + t)
        d_M_of_S += tl.load(d_drift + here + t)
        d_stay = tl.sum(d_M * M_row) + d_M_of_M * M_of_M + d_M_of_S * M_of_S
        d_S += d_M
        d_S_of_S += d_M_of_S
        d_keep = tl.sum(d_S * S_row) + d_S_of_S * S_of_S
        tl.store(d_theta + tokens + t, tl.sum(tl.where(i == t, d_S, 0.0)))
        tl.store(d_eta + tokens + t, d_keep)
        tl.store(d_alpha + tokens + t, -d_stay)
        d_M, d_S = stay * d_M, keep * d_S
        d_M_of_M, d_M_of_S, d_S_of_S = stay * d_M_of_M, stay * d_M_of_S, keep * d_S_of_S
