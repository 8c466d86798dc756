"""The hand-written backward of whole chunks is the derivative, exactly."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, memory_inputs
from torch.autograd import gradcheck

from titans_hf import memory_chunks
from titans_hf.memory_closed_form import read_chunk
from titans_hf.memory_rule import DeltaRule, Rule
from titans_hf.memory_state import where_all


def chunked(B=2, N=3, C=5, closed_gates=False, depth=2, expansion=2, seed=0):
    """Tokens [B, H, N, C, ...] and a start state, in float64; all of them ask for gradients."""
    tokens, state = memory_inputs(B=B, T=N * C, depth=depth, expansion=expansion, seed=seed, closed_gates=closed_gates)
    tokens = [x.transpose(1, 2).unflatten(2, (N, C)) for x in tokens]
    return [x.requires_grad_() for x in tokens], [x.requires_grad_() for x in (*state.weights, *state.momentum)]


def by_autograd(rule, weights, momentum, start, tokens, chunks):
    """Chunk after chunk by the closed form; rows stop after their last chunk."""
    outputs = []
    for n in range(tokens[0].shape[2]):
        y, *after = read_chunk(rule, weights, momentum, start, *(x[:, :, n] for x in tokens))
        outputs.append(y)
        if chunks is not None:
            after = [where_all(n < chunks, *pair) for pair in zip(after, (weights, momentum), strict=True)]
        weights, momentum = after
    return torch.stack(outputs, dim=2), weights, momentum


@given(
    depth=st.integers(1, 3),
    expansion=st.integers(1, 3),
    N=st.integers(1, 4),
    C=st.integers(1, 9),
    cap=st.sampled_from([None, 0.7, 10.0]),
    closed_gates=st.booleans(),
    last=st.none() | st.integers(0, 4),
    towards_start=st.booleans(),
    kind=st.sampled_from([Rule, DeltaRule]),
    normalised=st.booleans(),
    hidden_step=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_outputs_states_and_gradients_equal_autograds(
    depth, expansion, N, C, cap, closed_gates, last, towards_start, kind, normalised, hidden_step, seed
):
    """Gates of exactly 0 and 1, tokens below and above the cap, rows of different lengths, chunks of any size."""
    tokens, starts = chunked(2, N, C, closed_gates, depth, expansion, seed)
    chunks = None if last is None else torch.tensor([N, min(last, N)])
    real = torch.arange(N) < (torch.full((2,), N) if chunks is None else chunks)[:, None]
    start = [torch.roll(W.detach(), 1, dims=2).requires_grad_() for W in starts[:depth]] if towards_start else None
    starts, found = [*starts, *(start or ())], []
    for scan in (memory_chunks.scan, by_autograd):
        y, W, S = scan(
            kind(cap, normalised, hidden_step),
            tuple(starts[:depth]),
            tuple(starts[depth : 2 * depth]),
            start,
            tokens,
            chunks,
        )
        outputs = [torch.where(real[:, None, :, None, None], y, 0.0), *W, *S]
        g = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, (*starts, *tokens), upstream, materialize_grads=True)])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, 1e-12)


@pytest.mark.parametrize("rule", [Rule(1.0), DeltaRule(10.0, True), DeltaRule(0.5)])
def test_pieces_join_without_a_seam(rule, monkeypatch):
    tokens, starts = chunked(B=1, N=5, C=3)
    found = []
    for at_a_time in (1, 6, 99):
        monkeypatch.setattr(memory_chunks, "SEQUENCES_AT_A_TIME", at_a_time)
        y, W, S = memory_chunks.scan(rule, tuple(starts[:2]), tuple(starts[2:]), None, tokens, None)
        found.append([y, *W, *S, *torch.autograd.grad(y.square().sum() + W[0].sum(), (*starts, *tokens))])
    for first, *others in zip(*found, strict=True):
        for other in others:
            assert_close(first, other, 1e-13)


@pytest.mark.parametrize("rule", [Rule(), Rule(0.9, True, 0.3), DeltaRule(), DeltaRule(0.9, True, 0.3)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("towards_start", [False, True])
def test_the_derivative_passes_gradcheck(depth, rule, towards_start):
    """Finite differences in float64."""
    tokens, state = memory_inputs(B=1, T=6, H=1, D=3, depth=depth)
    tokens = [x.transpose(1, 2).unflatten(2, (2, 3)).contiguous() for x in tokens]
    start = [torch.roll(W, 1, dims=2) for W in state.weights] if towards_start else []
    inputs = [x.requires_grad_() for x in (*tokens, *state.weights, *state.momentum, *start)]

    def read(*inputs):
        tokens, weights, momentum = inputs[:6], inputs[6 : 6 + depth], inputs[6 + depth : 6 + 2 * depth]
        y, W, S = memory_chunks.scan(rule, weights, momentum, inputs[6 + 2 * depth :], tokens, None)
        return y, *W, *S

    assert gradcheck(read, inputs)


def test_a_second_derivative_is_refused_rather_than_wrong():
    tokens, starts = chunked(B=1, N=1, C=2)
    y, *_ = memory_chunks.scan(Rule(None), tuple(starts[:2]), tuple(starts[2:]), None, tokens, None)
    (first,) = torch.autograd.grad(y.square().sum(), starts[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_reading_without_gradients_keeps_no_states(monkeypatch):
    """The states of all chunks would grow with the text: at most the last few are alive."""
    tokens, starts = chunked(B=1, N=12, C=2)
    born, most_alive = [], []

    class Watched(memory_chunks.Write):
        def __init__(self, rule, weights, *rest):
            born.append(weakref.ref(weights[0]))
            most_alive.append(sum(x() is not None for x in born))
            super().__init__(rule, weights, *rest)

    monkeypatch.setattr(memory_chunks, "Write", Watched)
    monkeypatch.setattr(memory_chunks, "SEQUENCES_AT_A_TIME", 1)
    for gradients in (False, True):
        born.clear(), most_alive.clear()
        with torch.set_grad_enabled(gradients):
            memory_chunks.scan(Rule(None), tuple(starts[:2]), tuple(starts[2:]), None, tokens, None)
        assert max(most_alive) == 12 if gradients else max(most_alive) <= 3


def test_a_backward_under_autocast_keeps_its_precision():
    tokens, state = memory_inputs(B=1, T=6, D=8, dtype=torch.float32)
    tokens = [x.transpose(1, 2).unflatten(2, (2, 3)).requires_grad_() for x in tokens]
    found = []
    for enabled in (False, True):
        y, *_ = memory_chunks.scan(Rule(1.0), state.weights, state.momentum, None, tokens, None)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(y.square().sum(), tokens))
    assert all(map(torch.equal, *found))
