"""Forward kernels of the chunked update: coefficients, states, outputs (Eqs. 12-16).

The states kernel is sequential over chunks and stores the state at the start of each. The outputs kernel then reads
all chunks in parallel.

Axis letters: B batch, H heads, N chunks of a row, P chunks of the current piece (which starts at chunk `first`), C
tokens of a chunk, D head width, F width of the first layer's output (the hidden width; D in a memory of one layer).
Tokens and gates are [B, H, N, C, ...]; intermediate results are [B, H, P, ...]; states are [B, H, P + 1, in, out]. All
tensors are contiguous. Errors are stored before the rule scales them (share of the step, surprise cap); the factor
`scale` [C] multiplies the coefficients instead, which saves a scaled copy.

With TO_START forgetting leads to own1 and own2 [B, H, in, out], the memory's own start, and `M_t` has `1 - decay_t` of
it. Without, it leads to zero, and they are not read.
"""

import triton
import triton.language as tl

from .tiles import cap, kernel, load_tile, product, rolled, scale_of, silu, silu_slope, squared_norms, store_tile


@triton.jit
def chunks_here(chunks, row, first, P, H):
    """The number of chunks that the row has in this piece."""
    return tl.minimum(tl.maximum(tl.load(chunks + row // H) - first, 0), P)


@kernel
def coefficients_kernel(
    theta, eta, alpha, step, in_S, decay, drift, momentum, first, N, P, KEEP: tl.constexpr, C: tl.constexpr
):
    """Coefficients of the state after each token of a chunk (Eqs. 13 and 14). Grid (P, B H).

    step [C, C] is the weight of gradient i in `M_t`, in_S [C, C] its weight in `S_t` (only the last row unless KEEP).
    decay and drift [C] are the weights of `M_0` and `S_0` in `M_t`, momentum [C] that of `S_0` in `S_t`. Row t follows
    from row t - 1 by the recurrence, without a division: gates may be exactly 0 or 1.
    """
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    tokens, here = (row * N + first + n) * C, (row * P + n) * C
    i = tl.arange(0, C)
    size = tl.load(theta + tokens + i)
    S_row, M_row = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    S_of_S, M_of_S, M_of_M = 1.0, 0.0, 1.0
    for t in range(C):
        keep = tl.load(eta + tokens + t)
        stay = 1.0 - tl.load(alpha + tokens + t)
        S_row = keep * S_row + tl.where(i == t, size, 0.0)
        M_row = stay * M_row + S_row
        S_of_S = keep * S_of_S
        M_of_S = stay * M_of_S + S_of_S
        M_of_M = stay * M_of_M
        tl.store(step + (here + t) * C + i, M_row)
        if KEEP:
            tl.store(in_S + (here + t) * C + i, S_row)
        tl.store(decay + here + t, M_of_M)
        tl.store(drift + here + t, M_of_S)
        tl.store(momentum + here + t, S_of_S)
    tl.store(in_S + (here + C - 1) * C + i, S_row)


@triton.jit
def end_of_chunk(step, in_S, decay, drift, momentum, here, t, C: tl.constexpr):
    """Coefficients at the last token: of `M_0` and `S_0` in `M`, of `S_0` in `S`, of the gradients in `M` and `S`."""
    last = here + C - 1
    to_M, to_S = tl.load(step + last * C + t), tl.load(in_S + last * C + t)
    return tl.load(decay + last), tl.load(drift + last), tl.load(momentum + last), to_M, to_S


@triton.jit
def _update(
    W, S, own, x, error, scale, end, t, TO_START: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store weights and momentum after a chunk of gradients `x_i error_i^T` in the next slot."""
    M_of_M, M_of_S, S_of_S, to_M, to_S = end
    to_M, to_S = (to_M * scale)[:, None], (to_S * scale)[:, None]
    for i_start in range(0, rolled(IN), BI):
        i = i_start + tl.arange(0, BI)
        x_tile = load_tile(x, i, t, 1, IN)
        for o_start in range(0, rolled(OUT), BO):
            o = o_start + tl.arange(0, BO)
            error_tile = load_tile(error, t, o, OUT, 1)
            old_W, old_S = load_tile(W, i, o, OUT, 1), load_tile(S, i, o, OUT, 1)
            new_W = M_of_M * old_W + M_of_S * old_S
            if TO_START:
                new_W += (1.0 - M_of_M) * load_tile(own, i, o, OUT, 1)
            new_W -= tl.dot(x_tile, to_M * error_tile, input_precision=PRECISION)
            store_tile(W + IN * OUT, i, o, OUT, new_W)
            new_S = S_of_S * old_S - tl.dot(x_tile, to_S * error_tile, input_precision=PRECISION)
            store_tile(S + IN * OUT, i, o, OUT, new_S)


@kernel
def linear_states_kernel(
    k, v, step, in_S, decay, drift, momentum, W1, S1, own1, error1, scale1, chunks, max_surprise, first, N, P,
    H, GROUP, KEEP: tl.constexpr, TO_START: tl.constexpr, C: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States of a memory of one layer, with weights and momentum in registers. Grid (groups, B H).

    W1, S1 [P + 1, D, D]: each group of GROUP chunks reads its start from its first slot and fills the slots after it.
    The backward sets KEEP and starts every group from a checkpoint; a group then does not store its end, which is the
    checkpoint of the next group. Also stores error1 [P, C, D] and scale1 [P, C] for the outputs kernel.
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    t, d = tl.arange(0, C), tl.arange(0, D)
    begin = group * GROUP
    stop = tl.minimum(begin + GROUP, chunks_here(chunks, row, first, P, H))
    slot = (row * (P + 1) + begin) * D * D
    M, momentum_now = load_tile(W1 + slot, d, d, D, 1), load_tile(S1 + slot, d, d, D, 1)
    for n in range(begin, stop):
        here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
        K = load_tile(k + tokens, t, d, D, 1)
        E = 2.0 * (tl.dot(K, M, input_precision=PRECISION) - load_tile(v + tokens, t, d, D, 1))
        capped = cap(tl.sum(K * K, axis=1), tl.sum(E * E, axis=1), max_surprise)
        store_tile(error1 + here * D, t, d, D, E)
        tl.store(scale1 + here + t, capped)
        M_of_M, M_of_S, S_of_S, to_M, to_S = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
        K = tl.trans(K)
        M = M_of_M * M + M_of_S * momentum_now
        if TO_START:
            M += (1.0 - M_of_M) * load_tile(own1 + row * D * D, d, d, D, 1)
        M -= tl.dot(K, (to_M * capped)[:, None] * E, input_precision=PRECISION)
        momentum_now = S_of_S * momentum_now - tl.dot(K, (to_S * capped)[:, None] * E, input_precision=PRECISION)
        slot = (row * (P + 1) + n + 1) * D * D
        if not KEEP or n + 1 < stop:
            store_tile(W1 + slot, d, d, D, M)
            store_tile(S1 + slot, d, d, D, momentum_now)


@kernel
def states_kernel(
    k, v, step, in_S, decay, drift, momentum, W1, S1, own1, W2, S2, own2, pre, hidden, through, error1, error2, scale1,
    scale2, chunks, max_surprise, hidden_step, normalised, first, N, P,
    H, GROUP, KEEP: tl.constexpr, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States of a memory of one or two layers, in global memory (L2). Grid (groups, B H).

    W1, S1 [P + 1, D, F] and W2, S2 [P + 1, F, D] as in the linear kernel. For each chunk it also stores pre [C, F] and
    hidden [C, F], the keys' hidden layer before and after the non-linearity; error1 [C, F] and error2 [C, D]; their
    factors; and, if KEEP, through [C, F], the first layer's error before the slope of the non-linearity.
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own1, own2 = own1 + row * D * F, own2 + row * D * F
    t = tl.arange(0, C)
    begin = group * GROUP
    stop = tl.minimum(begin + GROUP, chunks_here(chunks, row, first, P, H))
    for n in range(begin, stop):
        here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
        slot = (row * (P + 1) + n) * D * F
        end = end_of_chunk(step, in_S, decay, drift, momentum, here, t, C)
        share = 1.0  # of the step that the first layer takes
        k_squared, error1_squared = squared_norms(k + tokens, t, D, BD), tl.zeros((C,), tl.float32)
        if DEPTH == 1:
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                out = product(k + tokens, D, 1, W1 + slot, F, 1, t, f, D, BD, PRECISION)
                E = 2.0 * (out - load_tile(v + tokens, t, f, D, 1))
                error1_squared += tl.sum(E * E, axis=1)
                store_tile(error1 + here * F, t, f, F, E)
            tl.debug_barrier()  # other threads read these errors
        else:
            hidden_squared, error2_squared = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                Z = product(k + tokens, D, 1, W1 + slot, F, 1, t, f, D, BD, PRECISION)
                A = silu(Z)
                hidden_squared += tl.sum(A * A, axis=1)
                store_tile(pre + here * F, t, f, F, Z)
                store_tile(hidden + here * F, t, f, F, A)
            tl.debug_barrier()  # other threads read these activations
            for start in range(0, rolled(D), BD):
                d = start + tl.arange(0, BD)
                out = product(hidden + here * F, F, 1, W2 + slot, D, 1, t, d, F, BF, PRECISION)
                E = 2.0 * (out - load_tile(v + tokens, t, d, D, 1))
                error2_squared += tl.sum(E * E, axis=1)
                store_tile(error2 + here * D, t, d, D, E)
            tl.debug_barrier()  # other threads read these errors
            for start in range(0, rolled(F), BF):
                f = start + tl.arange(0, BF)
                U = product(error2 + here * D, D, 1, W2 + slot, 1, D, t, f, D, BD, PRECISION)
                E = U * silu_slope(load_tile(pre + here * F, t, f, F, 1))
                error1_squared += tl.sum(E * E, axis=1)
                store_tile(error1 + here * F, t, f, F, E)
                if KEEP:
                    store_tile(through + here * F, t, f, F, U)
            share = hidden_step
            scale = scale_of(hidden_squared, error2_squared, 1.0, normalised != 0, max_surprise)
            tl.store(scale2 + here + t, scale)
            tl.debug_barrier()  # other threads read the first layer's errors
            if not KEEP or n + 1 < stop:
                _update(
                    W2 + slot, S2 + slot, own2, hidden + here * F, error2 + here * D, scale, end, t, TO_START, F,
                    D, BF, BD, PRECISION,
                )  # fmt: skip
        scale = scale_of(k_squared, error1_squared, share, False, max_surprise)
        tl.store(scale1 + here + t, scale)
        if not KEEP or n + 1 < stop:
            _update(
                W1 + slot, S1 + slot, own1, k + tokens, error1 + here * F, scale, end, t, TO_START, D, F, BD, BF,
                PRECISION,
            )  # fmt: skip
        tl.debug_barrier()  # the next chunk reads the states that all threads wrote


@kernel
def outputs_kernel(
    q, k, step, decay, drift, W1, S1, own1, W2, S2, own2, hidden, error1, error2, scale1, scale2, asking, y, chunks,
    first, N, P,
    H, TO_START: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, BQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of BQ tokens of a chunk, each read from the memory after its own write (Eq. 15). Grid (P C / BQ, B H).

    asking [P, C, F]: workspace for the hidden layer of the queries.
    """
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) // (C // BQ)
    here, tokens = (row * P + n) * C, (row * N + first + n) * C * D
    slot = (row * (P + 1) + n) * D * F
    own1, own2 = own1 + row * D * F, own2 + row * D * F
    t, asked = tl.arange(0, C), tl.program_id(0) % (C // BQ) * BQ + tl.arange(0, BQ)
    if n >= chunks_here(chunks, row, first, P, H):
        for start in range(0, rolled(D), BD):
            store_tile(y + tokens, asked, start + tl.arange(0, BD), D, tl.zeros((BQ, BD), tl.float32))
        return
    weight = load_tile(step + here * C, asked, t, C, 1)
    M_of_M, M_of_S = tl.load(decay + here + asked)[:, None], tl.load(drift + here + asked)[:, None]
    P1 = product(q + tokens, D, 1, k + tokens, 1, D, asked, t, D, BD, PRECISION) * weight
    P1 *= tl.load(scale1 + here + t)[None, :]
    for start in range(0, rolled(F), BF):
        f = start + tl.arange(0, BF)
        Z = M_of_M * product(q + tokens, D, 1, W1 + slot, F, 1, asked, f, D, BD, PRECISION)
        Z += M_of_S * product(q + tokens, D, 1, S1 + slot, F, 1, asked, f, D, BD, PRECISION)
        if TO_START:
            Z += (1.0 - M_of_M) * product(q + tokens, D, 1, own1, F, 1, asked, f, D, BD, PRECISION)
        Z -= tl.dot(P1, load_tile(error1 + here * F, t, f, F, 1), input_precision=PRECISION)
        if DEPTH == 1:
            store_tile(y + tokens, asked, f, D, Z)
        else:
            store_tile(asking + here * F, asked, f, F, silu(Z))
    if DEPTH == 2:
        tl.debug_barrier()  # other threads read the queries' hidden layer
        P2 = product(asking + here * F, F, 1, hidden + here * F, 1, F, asked, t, F, BF, PRECISION) * weight
        P2 *= tl.load(scale2 + here + t)[None, :]
        for start in range(0, rolled(D), BD):
            d = start + tl.arange(0, BD)
            Y = M_of_M * product(asking + here * F, F, 1, W2 + slot, D, 1, asked, d, F, BF, PRECISION)
            Y += M_of_S * product(asking + here * F, F, 1, S2 + slot, D, 1, asked, d, F, BF, PRECISION)
            if TO_START:
                Y += (1.0 - M_of_M) * product(asking + here * F, F, 1, own2, D, 1, asked, d, F, BF, PRECISION)
            Y -= tl.dot(P2, load_tile(error2 + here * D, t, d, D, 1), input_precision=PRECISION)
            store_tile(y + tokens, asked, d, D, Y)
