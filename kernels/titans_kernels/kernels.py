"""The forward of the chunked update as Triton kernels: coefficients, states, outputs.

One chunk after another, the states kernel writes the chunk into the memory; every chunk's start stays in global
memory, where the outputs kernel finds it and reads all chunks at once. Matrices are too large for registers: the hidden
width is walked in blocks of BF columns, and the states live in L2.

Axis letters: B batch, H heads, N chunks, C tokens of a chunk, D head width, F width of a layer's output. Tensors are
contiguous: tokens [B, H, N, C, ...], states [B, H, N + 1, in, out].
"""

import triton
import triton.language as tl


@triton.jit
def coefficients_kernel(theta, eta, alpha, step, write_S, decay, drift, momentum, C: tl.constexpr):
    """What the state after each token of a chunk is made of (Eqs. 13 and 14). One program per chunk.

    step [C, C]: the weight of gradient i in `M_t`; write_S [C]: of gradient i in `S` after the last token; decay, drift
    [C]: of `M_0` and `S_0` in `M_t`; momentum [C]: of `S_0` in `S_t`. Row t follows from row t - 1 by the recurrence
    itself: no products are divided, and gates of exactly 0 and 1 are ordinary values.
    """
    chunk = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, C)
    size = tl.load(theta + chunk * C + i).to(tl.float32)
    in_S, in_M = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    S_of_S, M_of_S, M_of_M = 1.0, 0.0, 1.0
    for t in range(C):
        keep = tl.load(eta + chunk * C + t).to(tl.float32)
        stay = 1.0 - tl.load(alpha + chunk * C + t).to(tl.float32)
        in_S = keep * in_S + tl.where(i == t, size, 0.0)
        in_M = stay * in_M + in_S
        S_of_S = keep * S_of_S
        M_of_S = stay * M_of_S + S_of_S
        M_of_M = stay * M_of_M
        tl.store(step + (chunk * C + t) * C + i, in_M)
        tl.store(decay + chunk * C + t, M_of_M)
        tl.store(drift + chunk * C + t, M_of_S)
        tl.store(momentum + chunk * C + t, S_of_S)
    tl.store(write_S + chunk * C + i, in_S)


@triton.jit
def _cap(x_squared, error_squared, max_surprise, CAPPED: tl.constexpr):
    """[C] scale that brings the norm of each token's gradient to `max_surprise` at most."""
    if CAPPED:
        return max_surprise * tl.rsqrt(tl.maximum(x_squared * error_squared, max_surprise * max_surprise))
    else:
        return tl.full(x_squared.shape, 1.0, tl.float32)


@triton.jit
def _end_of_chunk(step, write_S, decay, drift, momentum, chunk, C: tl.constexpr):
    """The coefficients after a chunk: of `M_0` and `S_0` in `M`, of `S_0` in `S`, and of the gradients in each."""
    last, t = chunk * C + C - 1, tl.arange(0, C)
    in_M, in_S = tl.load(step + last * C + t), tl.load(write_S + chunk * C + t)
    return tl.load(decay + last), tl.load(drift + last), tl.load(momentum + last), in_M, in_S


@triton.jit
def _update(W, S, block, size, x, error, end, PRECISION: tl.constexpr):
    """A block of weights and momentum, `size` numbers on, after a chunk of gradients `x_i error_i^T`."""
    M_of_M, M_of_S, S_of_S, in_M, in_S = end
    old_W, old_S, x = tl.load(W + block), tl.load(S + block), tl.trans(x)
    new_W = M_of_M * old_W + M_of_S * old_S - tl.dot(x, in_M[:, None] * error, input_precision=PRECISION)
    new_S = S_of_S * old_S - tl.dot(x, in_S[:, None] * error, input_precision=PRECISION)
    tl.store(W + block + size, new_W)
    tl.store(S + block + size, new_S)


@triton.jit
def linear_states_kernel(
    k, v, step, write_S, decay, drift, momentum, W, S, error, chunks, max_surprise,
    H: tl.constexpr, N, CAPPED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """Write a row's chunks into a linear memory, one after the other. One program per (batch, head).

    W, S [N + 1, D, D]: slot 0 holds the start, slot n + 1 the state after chunk n. error [N, C, D]: capped errors.
    """
    row = tl.program_id(0).to(tl.int64)
    t, d = tl.arange(0, C), tl.arange(0, D)
    for n in range(tl.load(chunks + row // H)):
        chunk, slot = row * N + n, (row * (N + 1) + n) * D * D
        tokens = chunk * C * D + t[:, None] * D
        K = tl.load(k + tokens + d[None, :]).to(tl.float32)
        error_squared = tl.zeros((C,), tl.float32)
        for start in range(0, D, BF):
            f = start + tl.arange(0, BF)
            Z = tl.dot(K, tl.load(W + slot + d[:, None] * D + f[None, :]), input_precision=PRECISION)
            E = 2.0 * (Z - tl.load(v + tokens + f[None, :]).to(tl.float32))
            error_squared += tl.sum(E * E, axis=1)
            tl.store(error + tokens + f[None, :], E)
        scale = _cap(tl.sum(K * K, axis=1), error_squared, max_surprise, CAPPED)
        tl.debug_barrier()  # the errors were written by other threads
        end = _end_of_chunk(step, write_S, decay, drift, momentum, chunk, C)
        for start in range(0, D, BF):
            f = start + tl.arange(0, BF)
            E = tl.load(error + tokens + f[None, :]) * scale[:, None]
            _update(W, S, slot + d[:, None] * D + f[None, :], D * D, K, E, end, PRECISION)
            tl.store(error + tokens + f[None, :], E)
        tl.debug_barrier()  # the next chunk starts from what all threads have written


@triton.jit
def linear_outputs_kernel(
    q, k, step, decay, drift, W, S, error, y, chunks,
    H: tl.constexpr, N, PRECISION: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Ask a linear memory for BQ tokens of a chunk, each with the weights after it (Eq. 15). Grid (N C / BQ, B H)."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) // (C // BQ)
    chunk, slot = row * N + n, (row * (N + 1) + n) * D * D
    t, d = tl.arange(0, C), tl.arange(0, D)
    asked = tl.program_id(0) % (C // BQ) * BQ + tl.arange(0, BQ)
    tokens, queries = chunk * C * D + t[:, None] * D, chunk * C * D + asked[:, None] * D
    if n >= tl.load(chunks + row // H):
        tl.store(y + queries + d[None, :], tl.zeros((BQ, D), tl.float32))
        return
    Q = tl.load(q + queries + d[None, :]).to(tl.float32)
    K = tl.load(k + tokens + d[None, :]).to(tl.float32)
    P = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    P *= tl.load(step + (chunk * C + asked[:, None]) * C + t[None, :])
    M_decay, M_drift = tl.load(decay + chunk * C + asked)[:, None], tl.load(drift + chunk * C + asked)[:, None]
    for start in range(0, D, BF):
        f = start + tl.arange(0, BF)
        block = slot + d[:, None] * D + f[None, :]
        Y = M_decay * tl.dot(Q, tl.load(W + block), input_precision=PRECISION)
        Y += M_drift * tl.dot(Q, tl.load(S + block), input_precision=PRECISION)
        Y -= tl.dot(P, tl.load(error + tokens + f[None, :]), input_precision=PRECISION)
        tl.store(y + queries + f[None, :], Y)


@triton.jit
def _hidden(K, W1, block, PRECISION: tl.constexpr):
    """A block of the hidden layer for the keys: its activations and the slope of its non-linearity."""
    Z = tl.dot(K, tl.load(W1 + block), input_precision=PRECISION)
    s = tl.sigmoid(Z)
    return Z * s, s * (1.0 + Z * (1.0 - s))


@triton.jit
def mlp_states_kernel(
    k, v, step, write_S, decay, drift, momentum, W1, S1, W2, S2, hidden, error1, error2, chunks, max_surprise,
    H: tl.constexpr, N, CAPPED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Write a row's chunks into a memory of two layers, one after the other. One program per (batch, head).

    W1, S1 [N + 1, D, F] and W2, S2 [N + 1, F, D] as in the linear kernel. hidden [N, C, F]: activations of the keys;
    error1 [N, C, F], error2 [N, C, D]: capped errors.
    """
    row = tl.program_id(0).to(tl.int64)
    t, d = tl.arange(0, C), tl.arange(0, D)
    for n in range(tl.load(chunks + row // H)):
        chunk, slot = row * N + n, (row * (N + 1) + n) * D * F
        tokens, wide = chunk * C * D + t[:, None] * D, chunk * C * F + t[:, None] * F
        K = tl.load(k + tokens + d[None, :]).to(tl.float32)
        out, hidden_squared = tl.zeros((C, D), tl.float32), tl.zeros((C,), tl.float32)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            A, _ = _hidden(K, W1, slot + d[:, None] * F + f[None, :], PRECISION)
            out += tl.dot(A, tl.load(W2 + slot + f[:, None] * D + d[None, :]), input_precision=PRECISION)
            hidden_squared += tl.sum(A * A, axis=1)
            tl.store(hidden + wide + f[None, :], A)
        E2 = 2.0 * (out - tl.load(v + tokens + d[None, :]).to(tl.float32))
        error1_squared = tl.zeros((C,), tl.float32)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            _, slope = _hidden(K, W1, slot + d[:, None] * F + f[None, :], PRECISION)
            W2_block = tl.load(W2 + slot + f[:, None] * D + d[None, :])
            E1 = tl.dot(E2, tl.trans(W2_block), input_precision=PRECISION) * slope
            error1_squared += tl.sum(E1 * E1, axis=1)
            tl.store(error1 + wide + f[None, :], E1)
        scale1 = _cap(tl.sum(K * K, axis=1), error1_squared, max_surprise, CAPPED)
        E2 *= _cap(hidden_squared, tl.sum(E2 * E2, axis=1), max_surprise, CAPPED)[:, None]
        tl.store(error2 + tokens + d[None, :], E2)
        tl.debug_barrier()  # activations and errors were written by other threads
        end = _end_of_chunk(step, write_S, decay, drift, momentum, chunk, C)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            E1 = tl.load(error1 + wide + f[None, :]) * scale1[:, None]
            _update(W1, S1, slot + d[:, None] * F + f[None, :], D * F, K, E1, end, PRECISION)
            tl.store(error1 + wide + f[None, :], E1)
            A = tl.load(hidden + wide + f[None, :])
            _update(W2, S2, slot + f[:, None] * D + d[None, :], D * F, A, E2, end, PRECISION)
        tl.debug_barrier()  # the next chunk starts from what all threads have written


@triton.jit
def mlp_outputs_kernel(
    q, k, step, decay, drift, W1, S1, W2, S2, hidden, error1, error2, y, chunks,
    H: tl.constexpr, N, PRECISION: tl.constexpr, C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """Ask a memory of two layers for BQ tokens of a chunk, each with the weights after it. Grid (N C / BQ, B H)."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) // (C // BQ)
    chunk, slot = row * N + n, (row * (N + 1) + n) * D * F
    t, d = tl.arange(0, C), tl.arange(0, D)
    asked = tl.program_id(0) % (C // BQ) * BQ + tl.arange(0, BQ)
    tokens, queries = chunk * C * D + t[:, None] * D, chunk * C * D + asked[:, None] * D
    wide = chunk * C * F + t[:, None] * F
    if n >= tl.load(chunks + row // H):
        tl.store(y + queries + d[None, :], tl.zeros((BQ, D), tl.float32))
        return
    Q = tl.load(q + queries + d[None, :]).to(tl.float32)
    K = tl.load(k + tokens + d[None, :]).to(tl.float32)
    weight = step + (chunk * C + asked[:, None]) * C + t[None, :]
    P = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * tl.load(weight)
    M_decay, M_drift = tl.load(decay + chunk * C + asked)[:, None], tl.load(drift + chunk * C + asked)[:, None]
    Y, overlap = tl.zeros((BQ, D), tl.float32), tl.zeros((BQ, C), tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        block = slot + d[:, None] * F + f[None, :]
        Z = M_decay * tl.dot(Q, tl.load(W1 + block), input_precision=PRECISION)
        Z += M_drift * tl.dot(Q, tl.load(S1 + block), input_precision=PRECISION)
        Z -= tl.dot(P, tl.load(error1 + wide + f[None, :]), input_precision=PRECISION)
        X = Z * tl.sigmoid(Z)
        block = slot + f[:, None] * D + d[None, :]
        Y = tl.dot(M_decay * X, tl.load(W2 + block), Y, input_precision=PRECISION)
        Y = tl.dot(M_drift * X, tl.load(S2 + block), Y, input_precision=PRECISION)
        overlap = tl.dot(X, tl.trans(tl.load(hidden + wide + f[None, :])), overlap, input_precision=PRECISION)
    overlap *= tl.load(weight)
    Y -= tl.dot(overlap, tl.load(error2 + tokens + d[None, :]), input_precision=PRECISION)
    tl.store(y + queries + d[None, :], Y)
