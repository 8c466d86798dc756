"""Kernels of chunks written by delta (`DeltaRule`): forward and backward of `titans_hf/memory_delta.py`.

The last layer's error of a token is taken after the writes of the tokens before it in the chunk, so errors follow one
another, row by row. A token finds `found_M M_0 + found_S S_0 - sum_i step[t - 1, i] x_i e_i^T`, and with TO_START
`(1 - found_M) own` besides. The kernels of `forward.py` and `backward.py` for coefficients, outputs and gates serve
this rule unchanged.

Axis letters and layouts as in `forward.py`; IN and OUT are the last layer's widths.
"""

import triton
import triton.language as tl

from .backward import _layer_write_backward, _state_backward, scale_slopes
from .forward import _update, chunks_here, end_of_chunk
from .tiles import (
    kernel,
    load_tile,
    product,
    rolled,
    scale_of,
    silu,
    silu_curve,
    silu_slope,
    squared_norms,
    store_tile,
)

UNCAPPED = tl.constexpr(float("inf"))


@triton.jit
def _tokens(chunks, C: tl.constexpr):
    """The tokens 0 to C - 1, as values unknown to the compiler, which would otherwise keep what it computes from them
    in registers for a whole chunk, and run out of them."""
    return tl.arange(0, C) + tl.minimum(tl.load(chunks), 0)  # 0, because no row has a negative number of chunks


@triton.jit
def found_of_state(decay, drift, here, t):
    """The coefficients [C] of `M_0` and `S_0` in the weights that each token finds."""
    before = here + t - 1
    return tl.load(decay + before, mask=t > 0, other=1.0), tl.load(drift + before, mask=t > 0, other=0.0)


@triton.jit
def _found_steps(step, t, i, C: tl.constexpr):
    """The coefficients of the gradients i in them."""
    return tl.load(step + (t - 1)[:, None] * C + i[None, :], mask=(t > 0)[:, None], other=0.0)


@triton.jit
def _add(target, t, found, mask=True):
    """Add to a vector in memory."""
    tl.store(target + t, tl.load(target + t, mask=mask, other=0.0) + found, mask=mask)


@triton.jit
def _add_before(target, t, i, C: tl.constexpr, tile):
    """Add the gradient of `_found_steps` to that of `step`."""
    places, later = target + (t - 1)[:, None] * C + i[None, :], (t > 0)[:, None]
    tl.store(places, tl.load(places, mask=later, other=0.0) + tile, mask=later)


@triton.jit
def _rows(matrix, i, o, OUT: tl.constexpr, present):
    """Rows of a matrix [C, OUT], 0 where not present."""
    return tl.load(matrix + i[:, None] * OUT + o[None, :], mask=present[:, None], other=0.0)


@triton.jit
def _errors_in_turn(
    overlap, step, error, scale, normalised, max_surprise, C: tl.constexpr, OUT: tl.constexpr, BC: tl.constexpr
):
    """Errors and their scales, token after token; `error` [C, OUT] holds what they are without the chunk's writes."""
    o = tl.arange(0, OUT)
    for now in range(0, rolled(C)):
        E = tl.load(error + now * OUT + o)
        for start in range(0, now, BC):
            i = start + tl.arange(0, BC)
            weight = 2.0 * tl.load(step + (now - 1) * C + i, mask=i < now, other=0.0)
            weight *= tl.load(overlap + now * C + i, mask=i < now, other=0.0)
            weight *= tl.load(scale + i, mask=i < now, other=0.0)
            E -= tl.sum(weight[:, None] * _rows(error, i, o, OUT, i < now), axis=0)
        s = scale_of(tl.load(overlap + now * C + now), tl.sum(E * E), 1.0, normalised, max_surprise)
        tl.debug_barrier()  # several threads read the row
        tl.store(error + now * OUT + o, E)
        tl.store(scale + now, s)
        tl.debug_barrier()  # and read it for the next tokens


@triton.jit
def _last_errors(
    x, v, W, S, own, overlap, step, error, scale, decay, drift, here, normalised, max_surprise, t,
    TO_START: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the last layer's errors [C, OUT], their scales [C], and the overlap [C, C] of its inputs x."""
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        store_tile(overlap, t, i, C, product(x, IN, 1, x, 1, IN, t, i, IN, BI, PRECISION))
    found_M, found_S = found_of_state(decay, drift, here, t)
    for start in range(0, rolled(OUT), BO):
        o = start + tl.arange(0, BO)
        out = found_M[:, None] * product(x, IN, 1, W, OUT, 1, t, o, IN, BI, PRECISION)
        out += found_S[:, None] * product(x, IN, 1, S, OUT, 1, t, o, IN, BI, PRECISION)
        if TO_START:
            out += (1.0 - found_M)[:, None] * product(x, IN, 1, own, OUT, 1, t, o, IN, BI, PRECISION)
        store_tile(error, t, o, OUT, 2.0 * (out - load_tile(v, t, o, OUT, 1)))
    tl.debug_barrier()  # each barrier here: the next step reads what other threads stored
    _errors_in_turn(overlap, step, error, scale, normalised, max_surprise, C, OUT, BC)


@kernel
def delta_states_kernel(
    k, v, step, in_S, decay, drift, momentum, W1, S1, own1, W2, S2, own2, pre, hidden, through, error1, error2, scale1,
    scale2, key_overlap, work, chunks, max_surprise, hidden_step, normalised, first, N, P,
    H, GROUP, KEEP: tl.constexpr, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`states_kernel` by delta; also stores key_overlap [C, C], the inner products of the last layer's inputs.

    work [C, C] is workspace. Vectors are loaded where they are used: held for a whole chunk, they would spill.
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own1, own2 = own1 + row * D * F, own2 + row * D * F
    begin = group * GROUP
    stop = tl.minimum(begin + GROUP, chunks_here(chunks, row, first, P, H))
    for n in range(begin, stop):
        here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
        slot, wide, narrow, square = (row * (P + 1) + n) * D * F, here * F, here * D, here * C
        t = _tokens(chunks, C)
        if DEPTH == 1:
            _last_errors(
                k + tokens, v + tokens, W1 + slot, S1 + slot, own1, key_overlap + square, step + square,
                error1 + wide, scale1 + here, decay, drift, here, False, max_surprise, t, TO_START, C, D, F, BD, BF, BC,
                PRECISION,
            )  # fmt: skip
        else:
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                Z = product(k + tokens, D, 1, W1 + slot, F, 1, t, f, D, BD, PRECISION)
                store_tile(pre + wide, t, f, F, Z)
                store_tile(hidden + wide, t, f, F, silu(Z))
            tl.debug_barrier()  # other threads read these activations
            t = _tokens(chunks, C)
            _last_errors(
                hidden + wide, v + tokens, W2 + slot, S2 + slot, own2, key_overlap + square, step + square,
                error2 + narrow, scale2 + here, decay, drift, here, normalised != 0, max_surprise, t, TO_START, C, F, D,
                BF, BD, BC, PRECISION,
            )  # fmt: skip
            for start in range(0, rolled(C), BC):
                i = start + tl.arange(0, BC)
                shared = product(error2 + narrow, D, 1, error2 + narrow, 1, D, t, i, D, BD, PRECISION)
                shared *= _found_steps(step + square, t, i, C) * tl.load(scale2 + here + i)[None, :]
                store_tile(work + square, t, i, C, shared)
            tl.debug_barrier()  # other threads read this matrix
            t = _tokens(chunks, C)
            found_M, found_S = found_of_state(decay, drift, here, t)
            error1_squared = tl.zeros((C,), tl.float32)
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                U = found_M[:, None] * product(error2 + narrow, D, 1, W2 + slot, 1, D, t, f, D, BD, PRECISION)
                U += found_S[:, None] * product(error2 + narrow, D, 1, S2 + slot, 1, D, t, f, D, BD, PRECISION)
                if TO_START:
                    of_own = product(error2 + narrow, D, 1, own2, 1, D, t, f, D, BD, PRECISION)
                    U += (1.0 - found_M)[:, None] * of_own
                U -= product(work + square, C, 1, hidden + wide, F, 1, t, f, C, BC, PRECISION)
                E = U * silu_slope(load_tile(pre + wide, t, f, F, 1))
                error1_squared += tl.sum(E * E, axis=1)
                store_tile(error1 + wide, t, f, F, E)
                if KEEP:
                    store_tile(through + wide, t, f, F, U)
            k_squared = squared_norms(k + tokens, t, D, BD)
            tl.store(scale1 + here + t, scale_of(k_squared, error1_squared, hidden_step, False, max_surprise))
            tl.debug_barrier()  # other threads read the first layer's errors
            t = _tokens(chunks, C)
            if not KEEP or n + 1 < stop:
                scale, end = tl.load(scale2 + here + t), end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
                _update(
                    W2 + slot, S2 + slot, own2, hidden + wide, error2 + narrow, scale, end, t, TO_START, F, D, BF,
                    BD, PRECISION,
                )  # fmt: skip
        if not KEEP or n + 1 < stop:
            scale, end = tl.load(scale1 + here + t), end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
            _update(
                W1 + slot, S1 + slot, own1, k + tokens, error1 + wide, scale, end, t, TO_START, D, F, BD, BF,
                PRECISION,
            )  # fmt: skip
        tl.debug_barrier()  # the next chunk reads the states that all threads wrote


@triton.jit
def _errors_in_turn_backward(
    overlap, step, error, scale, d_error, d_direct, dv, from_x, normalised, max_surprise,
    TWO: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Backward of `_errors_in_turn`: the system transposed, from the last token to the first.

    d_error holds the gradient of the scaled errors and gets twice that of the errors. d_direct, if TWO: the part of the
    latter that comes from the hidden layer. Stores dv, and in from_x [C] what the inputs' gradient takes of each input.
    """
    o = tl.arange(0, OUT)
    for done in range(0, rolled(C)):
        now = C - 1 - done
        d_scaled = tl.load(d_error + now * OUT + o)
        for start in range(now // BC * BC, rolled(C), BC):
            t = start + tl.arange(0, BC)
            weight = tl.load(step + (t - 1) * C + now, mask=t > now, other=0.0)
            weight *= tl.load(overlap + t * C + now, mask=t > now, other=0.0)
            d_scaled -= tl.sum(weight[:, None] * _rows(d_error, t, o, OUT, t > now), axis=0)
        E, s = tl.load(error + now * OUT + o), tl.load(scale + now)
        x_squared = tl.load(overlap + now * C + now)
        of_x, of_error = scale_slopes(x_squared, tl.sum(E * E), 1.0, normalised, max_surprise)
        along = s * tl.sum(E * d_scaled)
        d = s * d_scaled - of_error * along * E
        if TWO:
            d += tl.load(d_direct + now * OUT + o)
        tl.debug_barrier()  # several threads read the row
        tl.store(d_error + now * OUT + o, 2.0 * d)
        tl.store(dv + now * OUT + o, -2.0 * d)
        tl.store(from_x + now, of_x * along)
        tl.debug_barrier()  # and read it for the tokens before


@triton.jit
def _scaled_product(
    a, b, scale, B_ROW: tl.constexpr, rows, columns, C: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr
):
    """The tile of `A (scale B)`, where A is [C, C] and `scale` scales the rows of B."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        right = tl.load(scale + i)[:, None] * load_tile(b, i, columns, B_ROW, 1)
        total = tl.dot(load_tile(a, rows, i, C, 1), right, total, input_precision=PRECISION)
    return total


@triton.jit
def _start_backward(
    d, own, x, target, decay, drift, here, chunks,
    ADD: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, OWN_ROW: tl.constexpr,
    OWN_COLUMN: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through `(1 - found_M) x own^T`, from d: store `(1 - found_M) d own` in target, or add it to what is there.

    Returns its part of the gradient of found_M. The strides may exchange `own` with its transpose. In the loops of the
    callers this would spill.
    """
    t = _tokens(chunks, C)
    found_M, _ = found_of_state(decay, drift, here, t)
    d_found_M = tl.zeros((C,), tl.float32)
    for start in range(0, rolled(WIDTH), BLOCK):
        i = start + tl.arange(0, BLOCK)
        of_own = product(d, INNER, 1, own, OWN_ROW, OWN_COLUMN, t, i, INNER, BLOCK_INNER, PRECISION)
        d_found_M -= tl.sum(load_tile(x, t, i, WIDTH, 1) * of_own, axis=1)
        of_own *= (1.0 - found_M)[:, None]
        if ADD:
            of_own += load_tile(target, t, i, WIDTH, 1)
        store_tile(target, t, i, WIDTH, of_own)
    return d_found_M


@triton.jit
def _present_backward(
    x, error, scale, dU, W, S, own, step, work, back, d_step, d_error, d_direct, decay, drift, here, chunks,
    TO_START: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of `U = found_M error W^T + found_S error S^T - (found_step * error (scale error)^T) x`, from dU.

    U has `(1 - found_M) error own^T` besides if TO_START. Returns the gradients of found_M and found_S. Adds to d_step
    and to d_error (of the scaled error); stores d_direct (of the error) and back [C, C], the factor in brackets. `work`
    [C, C] is workspace.
    """
    t = _tokens(chunks, C)
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        towards = product(dU, IN, 1, x, 1, IN, t, i, IN, BI, PRECISION)
        agreement = product(error, OUT, 1, error, 1, OUT, t, i, OUT, BO, PRECISION) * tl.load(scale + i)[None, :]
        found_step = _found_steps(step, t, i, C)
        store_tile(work, t, i, C, found_step * towards)
        store_tile(back, t, i, C, found_step * agreement)
        _add_before(d_step, t, i, C, -agreement * towards)
    d_found_M, d_found_S = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    if TO_START:
        d_found_M += _start_backward(
            dU, own, error, d_direct, decay, drift, here, chunks, False, C, IN, OUT, OUT, 1, BI, BO, PRECISION
        )  # fmt: skip
    tl.debug_barrier()  # other threads read these matrices
    t = _tokens(chunks, C)
    found_M, found_S = found_of_state(decay, drift, here, t)
    for start in range(0, rolled(OUT), BO):
        o = start + tl.arange(0, BO)
        E = load_tile(error, t, o, OUT, 1)
        of_W = product(dU, IN, 1, W, OUT, 1, t, o, IN, BI, PRECISION)
        of_S = product(dU, IN, 1, S, OUT, 1, t, o, IN, BI, PRECISION)
        d_found_M += tl.sum(E * of_W, axis=1)
        d_found_S += tl.sum(E * of_S, axis=1)
        direct = found_M[:, None] * of_W + found_S[:, None] * of_S
        if TO_START:
            direct += load_tile(d_direct, t, o, OUT, 1)
        direct -= _scaled_product(work, error, scale, OUT, t, o, C, BC, PRECISION)
        store_tile(d_direct, t, o, OUT, direct)
        d_tile = load_tile(d_error, t, o, OUT, 1)
        d_tile -= product(work, 1, C, error, OUT, 1, t, o, C, BC, PRECISION)
        store_tile(d_error, t, o, OUT, d_tile)
    return d_found_M, d_found_S


@triton.jit
def _answers_backward(
    x, error, scale, overlap, W, S, own, step, work, back, d_step, d_error, dU, d_x, from_x, decay, drift, here, chunks,
    TWO: tl.constexpr, TO_START: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the answers `found_M x W + found_S x S - (found_step * x x^T) (scale error)`, from d_error.

    If TO_START they have `(1 - found_M) x own` besides. Returns the gradients of found_M and found_S; adds to d_step;
    completes d_x, if TWO also by `back` and dU.
    """
    t = _tokens(chunks, C)
    for start in range(0, rolled(C), BC):
        i = start + tl.arange(0, BC)
        d_share = product(d_error, OUT, 1, error, 1, OUT, t, i, OUT, BO, PRECISION) * tl.load(scale + i)[None, :]
        store_tile(work, t, i, C, _found_steps(step, t, i, C) * d_share)
        _add_before(d_step, t, i, C, -d_share * load_tile(overlap, t, i, C, 1))
    d_found_M, d_found_S = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    if TO_START:
        d_found_M += _start_backward(
            d_error, own, x, d_x, decay, drift, here, chunks, True, C, OUT, IN, 1, OUT, BO, BI, PRECISION
        )  # fmt: skip
    tl.debug_barrier()  # other threads read the gradient of the overlap
    t = _tokens(chunks, C)
    found_M, found_S = found_of_state(decay, drift, here, t)
    for start in range(0, rolled(IN), BI):
        i = start + tl.arange(0, BI)
        x_tile = load_tile(x, t, i, IN, 1)
        of_W = product(d_error, OUT, 1, W, 1, OUT, t, i, OUT, BO, PRECISION)
        of_S = product(d_error, OUT, 1, S, 1, OUT, t, i, OUT, BO, PRECISION)
        d_found_M += tl.sum(x_tile * of_W, axis=1)
        d_found_S += tl.sum(x_tile * of_S, axis=1)
        d_tile = load_tile(d_x, t, i, IN, 1) + found_M[:, None] * of_W + found_S[:, None] * of_S
        d_tile -= tl.load(from_x + t)[:, None] * x_tile
        d_tile -= product(work, C, 1, x, IN, 1, t, i, C, BC, PRECISION)
        d_tile -= product(work, 1, C, x, IN, 1, t, i, C, BC, PRECISION)
        if TWO:
            d_tile -= product(back, 1, C, dU, IN, 1, t, i, C, BC, PRECISION)
        store_tile(d_x, t, i, IN, d_tile)
    return d_found_M, d_found_S


@triton.jit
def _add_found(
    to_W, to_S, x, d, decay, drift, here, i, o, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of `W + x^T (found_M d)` and `S + x^T (found_S d)`."""
    for start in range(0, rolled(C), BC):
        t = start + tl.arange(0, BC)
        found_M, found_S = found_of_state(decay, drift, here, t)
        x_tile, d_tile = load_tile(x, i, t, 1, IN), load_tile(d, t, o, OUT, 1)
        to_W = tl.dot(x_tile, found_M[:, None] * d_tile, to_W, input_precision=PRECISION)
        to_S = tl.dot(x_tile, found_S[:, None] * d_tile, to_S, input_precision=PRECISION)
    return to_W, to_S


@triton.jit
def _found_state_backward(
    W, S, d_W, d_S, x, d_error, dU, error, decay, drift, here, M_of_M, M_of_S, S_of_S,
    TWO: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_state_backward` of the last layer, whose answers and errors pass through the weights that each token finds.

    Adds `x^T (found d_error)`, and `(found dU)^T error` if TWO.
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
            to_W = load_tile(d_W, i, o, OUT, 1) + M_of_M * end_W
            to_S = load_tile(d_S, i, o, OUT, 1) + M_of_S * end_W + S_of_S * end_S
            to_W, to_S = _add_found(to_W, to_S, x, d_error, decay, drift, here, i, o, C, IN, OUT, BC, PRECISION)
            if TWO:
                to_W, to_S = _add_found(to_W, to_S, dU, error, decay, drift, here, i, o, C, IN, OUT, BC, PRECISION)
            store_tile(d_W, i, o, OUT, to_W)
            store_tile(d_S, i, o, OUT, to_S)
    return from_decay, from_drift, from_momentum


@kernel
def delta_write_backward_kernel(
    k, step, in_S, decay, drift, momentum, W1, S1, own1, W2, S2, own2, pre, hidden, through, error1, error2, scale1,
    scale2, key_overlap, overlap, work, d_k, d_hidden, d_error1, d_error2, d_direct, d_W1, d_S1, d_W2, d_S2, dk, dv,
    d_step, d_decay, d_drift, d_to_M, d_to_S, from_x, d_end, chunks, max_surprise, hidden_step, normalised, first, N, P,
    H, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`write_backward_kernel` by delta; adds to d_step, d_decay and d_drift the gradients of what tokens find.

    Workspace: overlap and work [C, C]; d_direct [C, D]; from_x [C]. `through` is overwritten. Grid (B H). Vectors are
    stored and loaded where they are used: held for a whole chunk, they would spill.
    """
    row = tl.program_id(0).to(tl.int64)
    own1, own2 = own1 + row * D * F, own2 + row * D * F
    count = chunks_here(chunks, row, first, P, H)
    for done in range(count):
        n = count - 1 - done
        here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
        slot, wide, narrow, square = (row * (P + 1) + n) * D * F, here * F, here * D, here * C
        t = _tokens(chunks, C)
        _, _, _, to_M, to_S = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
        after = slot + D * F
        if DEPTH == 1:
            x, error, scale, d_x, d_error = k + tokens, error1 + wide, scale1 + here, d_k + narrow, d_error1 + wide
            W, S, d_W, d_S, divides = W1 + slot, S1 + slot, d_W1 + slot, d_S1 + slot, False
            own = own1
        else:
            x, error, scale = hidden + wide, error2 + narrow, scale2 + here
            d_x, d_error = d_hidden + wide, d_error2 + narrow
            W, S, d_W, d_S, divides = W2 + slot, S2 + slot, d_W2 + slot, d_S2 + slot, normalised != 0
            own = own2
        dU = d_error1 + wide
        # no cap and no division here: the scale's part comes with the errors in turn
        from_M, from_S, _ = _layer_write_backward(
            x, error, scale, d_W + D * F, d_S + D * F, d_x, d_error, to_M, to_S, 1.0, False, UNCAPPED, t, F, D, BF, BD,
            PRECISION,
        )  # fmt: skip
        tl.store(d_to_M + here + t, from_M)
        tl.store(d_to_S + here + t, from_S)
        if DEPTH == 2:
            t = _tokens(chunks, C)
            _, _, _, to_M, to_S = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
            more_M, more_S, taken = _layer_write_backward(
                k + tokens, error1 + wide, scale1 + here, d_W1 + after, d_S1 + after, d_k + narrow, dU, to_M, to_S,
                hidden_step, False, max_surprise, t, D, F, BD, BF, PRECISION,
            )  # fmt: skip
            s1 = tl.load(scale1 + here + t)[:, None]
            tl.debug_barrier()  # each barrier here: the next step reads what other threads stored
            t = _tokens(chunks, C)
            _add(d_to_M + here, t, more_M)
            _add(d_to_S + here, t, more_S)
            for start in range(0, rolled(F), BF):  # error1 = U slope
                f = start + tl.arange(0, BF)
                Z = load_tile(pre + wide, t, f, F, 1)
                d_tile = s1 * load_tile(dU, t, f, F, 1) - taken[:, None] * load_tile(error1 + wide, t, f, F, 1)
                store_tile(dU, t, f, F, d_tile * silu_slope(Z))
                store_tile(through + wide, t, f, F, d_tile * load_tile(through + wide, t, f, F, 1) * silu_curve(Z))
            tl.debug_barrier()
            t = _tokens(chunks, C)
            d_found_M, d_found_S = _present_backward(
                x, error, scale, dU, W, S, own, step + square, work + square, overlap + square, d_step + square,
                d_error, d_direct + narrow, decay, drift, here, chunks, TO_START, C, F, D, BF, BD, BC, PRECISION,
            )  # fmt: skip
            _add(d_decay + here - 1, t, d_found_M, t > 0)
            _add(d_drift + here - 1, t, d_found_S, t > 0)
        tl.debug_barrier()
        t = _tokens(chunks, C)
        _errors_in_turn_backward(
            key_overlap + square, step + square, error, scale, d_error, d_direct + narrow, dv + tokens, from_x + here,
            divides, max_surprise, DEPTH == 2, C, D, BC,
        )  # fmt: skip
        t = _tokens(chunks, C)
        d_found_M, d_found_S = _answers_backward(
            x, error, scale, key_overlap + square, W, S, own, step + square, work + square, overlap + square,
            d_step + square, d_error, dU, d_x, from_x + here, decay, drift, here, chunks, DEPTH == 2, TO_START, C, F, D,
            BF, BD, BC, PRECISION,
        )  # fmt: skip
        _add(d_decay + here - 1, t, d_found_M, t > 0)
        _add(d_drift + here - 1, t, d_found_S, t > 0)
        M_of_M, M_of_S, S_of_S, _, _ = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
        from_decay, from_drift, from_momentum = _found_state_backward(
            W, S, d_W, d_S, x, d_error, dU, error, decay, drift, here, M_of_M, M_of_S, S_of_S, DEPTH == 2, C, F, D,
            BF, BD, BC, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        t = _tokens(chunks, C)
        if DEPTH == 1:
            for start in range(0, rolled(D), BD):
                d = start + tl.arange(0, BD)
                store_tile(dk + tokens, t, d, D, load_tile(d_x, t, d, D, 1))
        else:
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                dz = load_tile(d_x, t, f, F, 1) * silu_slope(load_tile(pre + wide, t, f, F, 1))
                store_tile(d_x, t, f, F, dz + load_tile(through + wide, t, f, F, 1))
            tl.debug_barrier()
            t = _tokens(chunks, C)
            for start in range(0, rolled(D), BD):
                d = start + tl.arange(0, BD)
                d_tile = product(d_x, F, 1, W1 + slot, 1, F, t, d, F, BF, PRECISION)
                store_tile(dk + tokens, t, d, D, load_tile(d_k + narrow, t, d, D, 1) + d_tile)
            more_decay, more_drift, more_momentum = _state_backward(
                W1 + slot, S1 + slot, d_W1 + slot, d_S1 + slot, k + tokens, d_x, d_x, d_x, M_of_M, M_of_S, S_of_S, t,
                False, D, F, BD, BF, PRECISION,
            )  # fmt: skip
            from_decay += more_decay
            from_drift += more_drift
            from_momentum += more_momentum
        ends = d_end + (row * P + n) * 3
        tl.store(ends, from_decay)
        tl.store(ends + 1, from_drift)
        tl.store(ends + 2, from_momentum)
        tl.debug_barrier()
