"""The memory contains its relatives: with special gates it is each of them, to 1e-12 in float64 (Appendix C).

Every relative is written here from its own definition, for one head of one row: queries, keys and values [T, D], and a
state `M` with `y = q M` (row vectors).
"""

import pytest
import torch
from support import assert_close, memory_inputs

from titans_hf import MemoryState, neural_memory

T, D = 37, 5


@pytest.fixture
def problem():
    (q, k, v, *_), state = memory_inputs(B=1, T=T, H=1, D=D, depth=1)
    beta = torch.rand(T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    alpha = 0.5 * torch.rand(T, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return q, k, v, beta, alpha, state.weights[0]


def titans(q, k, v, theta, alpha, M, chunk_size):
    """Our memory without momentum."""
    theta, alpha = (torch.as_tensor(x, dtype=torch.float64).expand(T)[None, :, None] for x in (theta, alpha))
    state = MemoryState((M,), (torch.zeros_like(M),))
    y, _ = neural_memory(q, k, v, theta, torch.zeros_like(theta), alpha, state, chunk_size=chunk_size)
    return y[0, :, 0]


def test_deltanet(problem):
    q, k, v, beta, _, start = problem
    M, outputs = start[0, 0], []
    for t in range(T):
        key, value = k[0, t, 0], v[0, t, 0]
        M = M + beta[t] * torch.outer(key, value - key @ M)
        outputs.append(q[0, t, 0] @ M)
    assert_close(titans(q, k, v, beta / 2, 0.0, start, 1), torch.stack(outputs), 1e-12)


def test_gated_deltanet(problem):
    """It decays before it takes the error: theta = (1 - alpha) beta / 2, and values divided by 1 - alpha."""
    q, k, v, beta, alpha, start = problem
    M, outputs = start[0, 0], []
    for t in range(T):
        key, value = k[0, t, 0], v[0, t, 0]
        decayed = (1 - alpha[t]) * M
        M = decayed + beta[t] * torch.outer(key, value - key @ decayed)
        outputs.append(q[0, t, 0] @ M)
    scaled = v / (1 - alpha)[None, :, None, None]
    actual = titans(q, k, scaled, (1 - alpha) * beta / 2, alpha, start, 1)
    assert_close(actual, torch.stack(outputs), 1e-12)


def test_longhorn(problem):
    """The implicit online-regression step: M_t minimises |M - M_{t-1}|^2 + theta' |k M - v|^2, solved exactly."""
    q, k, v, rate, _, start = problem
    k = 1.7 * k  # the step depends on the key's norm
    M, outputs = start[0, 0], []
    for t in range(T):
        key, value = k[0, t, 0], v[0, t, 0]
        normal = torch.eye(D, dtype=torch.float64) + rate[t] * torch.outer(key, key)
        M = torch.linalg.solve(normal, M + rate[t] * torch.outer(key, value))
        outputs.append(q[0, t, 0] @ M)
    theta = 0.5 * rate / (1 + rate * k[0, :, 0].square().sum(-1))
    assert_close(titans(q, k, v, theta, 0.0, start, 1), torch.stack(outputs), 1e-12)


def test_linear_attention(problem):
    """One chunk as long as the sequence, from zero: the gradient at zero is -2 k v, so theta = 1/2 adds up k v."""
    q, k, v, _, _, start = problem
    scores = (q[0, :, 0] @ k[0, :, 0].T).tril()
    assert_close(titans(q, k, v, 0.5, 0.0, torch.zeros_like(start), T), scores @ v[0, :, 0], 1e-12)


def test_mamba2_form(problem):
    """The same with forgetting: scores decayed by the product of the gates between key and query."""
    q, k, v, _, alpha, start = problem
    logs = (1 - alpha).log().cumsum(0)
    decay = (logs[:, None] - logs[None, :]).exp()
    scores = ((q[0, :, 0] @ k[0, :, 0].T) * decay).tril()
    assert_close(titans(q, k, v, 0.5, alpha, torch.zeros_like(start), T), scores @ v[0, :, 0], 1e-12)


@pytest.mark.parametrize("chunk", [1, 4, T])
def test_ttt(problem, chunk):
    """Mini-batch gradient descent on |k M - v|^2 with the mini-batch's first weights, no momentum, no decay."""
    q, k, v, rate, _, start = problem
    M, outputs = start[0, 0], []
    for t in range(T):
        if t % chunk == 0:
            anchor = M
        key, value = k[0, t, 0], v[0, t, 0]
        M = M - rate[t] * 2 * torch.outer(key, key @ anchor - value)
        outputs.append(q[0, t, 0] @ M)
    assert_close(titans(q, k, v, rate, 0.0, start, chunk), torch.stack(outputs), 1e-12)
