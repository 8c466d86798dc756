"""The decoding step in one kernel: writes one token into the open chunk and reads the memory after it (Eqs. 12-16).

The kernel stores the next state in new tensors. It never changes a state in place, needs no synchronisation with the
host to know whether a chunk is full, and is the same launch at every step, which a CUDA graph can capture.

Axis letters as in `forward.py`; slots are the C tokens of the open chunk. All tensors are contiguous.
"""

import triton
import triton.language as tl

from .tiles import kernel, load_tile, rolled, scale_of, silu, silu_slope, store_tile


@triton.jit
def _after(before, size, keep, stay, i, slot):
    """The coefficients after the token in `slot` from those before it, by the recurrence of `coefficients_kernel`."""
    M_of_M, M_of_S, S_of_S, to_M, to_S = before
    to_S = keep * to_S + tl.where(i == slot, size, 0.0)
    S_of_S = keep * S_of_S
    return stay * M_of_M, stay * M_of_S + S_of_S, S_of_S, stay * to_M + to_S, to_S


@triton.jit
def _coefficients_before(theta, eta, alpha, here, slot, i, C: tl.constexpr):
    """The coefficients before the token in `slot`."""
    size = tl.load(theta + here + i)
    to_S, to_M = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    S_of_S, M_of_S, M_of_M = 1.0, 0.0, 1.0
    for s in range(slot):
        keep, stay = tl.load(eta + here + s), 1.0 - tl.load(alpha + here + s)
        M_of_M, M_of_S, S_of_S, to_M, to_S = _after((M_of_M, M_of_S, S_of_S, to_M, to_S), size, keep, stay, i, s)
    return M_of_M, M_of_S, S_of_S, to_M, to_S


@triton.jit
def _next_gate(gate, next_gate, new, here, i, written):
    """Store the slots of a gate with the new token's value in its slot."""
    tl.store(next_gate + here + i, tl.where(i == written, new, tl.load(gate + here + i)))


@triton.jit
def _next_factors(old, after, fresh, i, columns, written, WIDTH):
    """Some columns of a layer's factors [C, WIDTH] with the new token's in its slot; stores them as well."""
    tile = tl.where((i == written)[:, None], fresh[None, :], load_tile(old, i, columns, WIDTH, 1))
    store_tile(after, i, columns, WIDTH, tile)
    return tile


@triton.jit
def _next_state(
    W, S, own, next_W, next_S, x, error, M_of_M, M_of_S, S_of_S, to_M, to_S, i, closes,
    TO_START: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store weights and momentum at the next boundary if the token completes the chunk, else copies of the old ones."""
    for a_start in range(0, rolled(IN), BI):
        a = a_start + tl.arange(0, BI)
        for b_start in range(0, rolled(OUT), BO):
            b = b_start + tl.arange(0, BO)
            new_W, new_S = load_tile(W, a, b, OUT, 1), load_tile(S, a, b, OUT, 1)
            if closes:
                x_tile, error_tile = load_tile(x, a, i, 1, IN), load_tile(error, i, b, OUT, 1)
                new_W = M_of_M * new_W + M_of_S * new_S
                if TO_START:
                    new_W += (1.0 - M_of_M) * load_tile(own, a, b, OUT, 1)
                new_W -= tl.dot(x_tile, to_M[:, None] * error_tile, input_precision=PRECISION)
                new_S = S_of_S * new_S - tl.dot(x_tile, to_S[:, None] * error_tile, input_precision=PRECISION)
            store_tile(next_W, a, b, OUT, new_W)
            store_tile(next_S, a, b, OUT, new_S)


@kernel
def token_kernel(
    q, k, v, new_theta, new_eta, new_alpha, counts, length, theta, eta, alpha, W1, S1, own1, W2, S2, own2, x1, x2,
    error1, error2, y, next_length, next_theta, next_eta, next_alpha, next_W1, next_S1, next_W2, next_S2,
    next_x1, next_x2, next_error1, next_error2, fresh, max_surprise, hidden_step, normalised,
    H, DELTA: tl.constexpr, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and next state of one token in every row that has one (`counts` [B] is 1, else 0). Grid (B H).

    q, k, v, y [D]; new gates: one number; theta, eta, alpha [C]; W, S, own [in, out]; x1 [C, D], x2 [C, F], error1
    [C, F], error2 [C, D]; length [B]. Names with `next_` are the state after the token. fresh [2, F]: workspace for the
    token's factors. With DELTA the last layer's error is that of its present weights, and goes back through these.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, here, state = row // H, row * C, row * D * F
    i, d = tl.arange(0, C), tl.arange(0, D)
    slot, real = tl.load(length + batch), tl.load(counts + batch) > 0
    written = tl.where(real, slot, C)  # C is no slot: a row without a token fills none
    closes = written == C - 1
    if row % H == 0:
        tl.store(next_length + batch, tl.where(closes, 0, slot + tl.where(real, 1, 0)))

    size, keep, forget = (tl.load(new_theta + row), tl.load(new_eta + row), tl.load(new_alpha + row))
    before = _coefficients_before(theta, eta, alpha, here, slot, i, C)
    found_M, found_S, _, found, _ = before  # coefficients of what the token finds
    _next_gate(theta, next_theta, size, here, i, written)
    _next_gate(eta, next_eta, keep, here, i, written)
    _next_gate(alpha, next_alpha, forget, here, i, written)

    Q, K = tl.load(q + row * D + d), tl.load(k + row * D + d)
    V, k_squared = tl.load(v + row * D + d), tl.sum(K * K)
    keys = _next_factors(x1 + here * D, next_x1 + here * D, K, i, d, written, D)
    asked = tl.sum(keys * Q[None, :], axis=1)
    fresh_x, fresh_error = fresh + row * 2 * F, fresh + row * 2 * F + F
    error_squared = 0.0
    if DEPTH == 1:
        known = found * tl.sum(keys * K[None, :], axis=1)  # [C] weight of each gradient in the key's answer
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            E = tl.sum(K[:, None] * load_tile(W1 + state, d, f, F, 1), axis=0)
            if DELTA:
                E = found_M * E + found_S * tl.sum(K[:, None] * load_tile(S1 + state, d, f, F, 1), axis=0)
                if TO_START:
                    E += (1.0 - found_M) * tl.sum(K[:, None] * load_tile(own1 + state, d, f, F, 1), axis=0)
                E -= tl.sum(known[:, None] * load_tile(error1 + here * F, i, f, F, 1), axis=0)
            E = 2.0 * (E - tl.load(v + row * D + f))
            error_squared += tl.sum(E * E)
            tl.store(fresh_error + f, E)
        tl.debug_barrier()  # each barrier here: the next step reads what other threads stored
        scale = scale_of(k_squared, error_squared, 1.0, False, max_surprise)
        M_of_M, M_of_S, S_of_S, to_M, to_S = _after(before, size, keep, 1.0 - forget, i, slot)
        weight = to_M * asked  # [C] weight of each gradient in the output
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            E = _next_factors(
                error1 + here * F, next_error1 + here * F, scale * tl.load(fresh_error + f), i, f, written, F
            )
            Z = M_of_M * tl.sum(Q[:, None] * load_tile(W1 + state, d, f, F, 1), axis=0)
            Z += M_of_S * tl.sum(Q[:, None] * load_tile(S1 + state, d, f, F, 1), axis=0)
            if TO_START:
                Z += (1.0 - M_of_M) * tl.sum(Q[:, None] * load_tile(own1 + state, d, f, F, 1), axis=0)
            Z -= tl.sum(weight[:, None] * E, axis=0)
            tl.store(y + row * D + f, tl.where(real, Z, 0.0))
    else:
        out, hidden_squared = tl.zeros((D,), tl.float32), 0.0
        out_S, out_own, known = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32), tl.zeros((C,), tl.float32)
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            Z = tl.sum(K[:, None] * load_tile(W1 + state, d, f, F, 1), axis=0)
            A = silu(Z)
            hidden_squared += tl.sum(A * A)
            out += tl.sum(A[:, None] * load_tile(W2 + state, f, d, D, 1), axis=0)
            if DELTA:
                out_S += tl.sum(A[:, None] * load_tile(S2 + state, f, d, D, 1), axis=0)
                if TO_START:
                    out_own += tl.sum(A[:, None] * load_tile(own2 + state, f, d, D, 1), axis=0)
                known += tl.sum(A[None, :] * load_tile(x2 + here * F, i, f, F, 1), axis=1)
            tl.store(fresh_x + f, A)
            tl.store(fresh_error + f, silu_slope(Z))
        if DELTA:
            errors = load_tile(error2 + here * D, i, d, D, 1)
            out = found_M * out + found_S * out_S - tl.sum((found * known)[:, None] * errors, axis=0)
            if TO_START:
                out += (1.0 - found_M) * out_own
        E2 = 2.0 * (out - V)
        tl.debug_barrier()
        if DELTA:  # loaded again: held in registers until here, the errors would spill
            known = found * tl.sum(load_tile(error2 + here * D, i, d, D, 1) * E2[None, :], axis=1)
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            E = tl.sum(load_tile(W2 + state, f, d, D, 1) * E2[None, :], axis=1)
            if DELTA:
                E = found_M * E + found_S * tl.sum(load_tile(S2 + state, f, d, D, 1) * E2[None, :], axis=1)
                if TO_START:
                    E += (1.0 - found_M) * tl.sum(load_tile(own2 + state, f, d, D, 1) * E2[None, :], axis=1)
                E -= tl.sum(known[:, None] * load_tile(x2 + here * F, i, f, F, 1), axis=0)
            E *= tl.load(fresh_error + f)
            error_squared += tl.sum(E * E)
            tl.debug_barrier()
            tl.store(fresh_error + f, E)
        tl.debug_barrier()
        scale = scale_of(k_squared, error_squared, hidden_step, False, max_surprise)
        M_of_M, M_of_S, S_of_S, to_M, to_S = _after(before, size, keep, 1.0 - forget, i, slot)
        weight = to_M * asked
        Y, overlap = tl.zeros((D,), tl.float32), tl.zeros((C,), tl.float32)
        for start in range(0, rolled(F), BF):
            f = start + tl.arange(0, BF)
            E = _next_factors(
                error1 + here * F, next_error1 + here * F, scale * tl.load(fresh_error + f), i, f, written, F
            )
            Z = M_of_M * tl.sum(Q[:, None] * load_tile(W1 + state, d, f, F, 1), axis=0)
            Z += M_of_S * tl.sum(Q[:, None] * load_tile(S1 + state, d, f, F, 1), axis=0)
            if TO_START:
                Z += (1.0 - M_of_M) * tl.sum(Q[:, None] * load_tile(own1 + state, d, f, F, 1), axis=0)
            X = silu(Z - tl.sum(weight[:, None] * E, axis=0))
            A = _next_factors(x2 + here * F, next_x2 + here * F, tl.load(fresh_x + f), i, f, written, F)
            overlap += tl.sum(A * X[None, :], axis=1)
            Y += M_of_M * tl.sum(X[:, None] * load_tile(W2 + state, f, d, D, 1), axis=0)
            Y += M_of_S * tl.sum(X[:, None] * load_tile(S2 + state, f, d, D, 1), axis=0)
            if TO_START:
                Y += (1.0 - M_of_M) * tl.sum(X[:, None] * load_tile(own2 + state, f, d, D, 1), axis=0)
        E2 *= scale_of(hidden_squared, tl.sum(E2 * E2), 1.0, normalised != 0, max_surprise)
        errors = _next_factors(error2 + here * D, next_error2 + here * D, E2, i, d, written, D)
        Y -= tl.sum((to_M * overlap)[:, None] * errors, axis=0)
        tl.store(y + row * D + d, tl.where(real, Y, 0.0))
        tl.debug_barrier()
        _next_state(
            W2 + state, S2 + state, own2 + state, next_W2 + state, next_S2 + state, next_x2 + here * F,
            next_error2 + here * D, M_of_M, M_of_S, S_of_S, to_M, to_S, i, closes, TO_START, F, D, BF, BD, PRECISION,
        )  # fmt: skip
    tl.debug_barrier()
    _next_state(
        W1 + state, S1 + state, own1 + state, next_W1 + state, next_S1 + state, next_x1 + here * D,
        next_error1 + here * F, M_of_M, M_of_S, S_of_S, to_M, to_S, i, closes, TO_START, D, F, BD, BF, PRECISION,
    )  # fmt: skip
