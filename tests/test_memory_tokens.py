"""The hand-written forward and backward of single tokens equal torch's own functions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close

from titans_hf import memory_tokens


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def compare(hand_written, composed, inputs):
    found = []
    for form in (hand_written, composed):
        y = form(*inputs)
        found.append([y, *torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, 1e-12)


@given(
    B=st.integers(1, 3),
    T=st.integers(1, 50),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    reach=st.integers(0, 4),
    least=st.sampled_from([None, memory_tokens.SMALLEST, memory_tokens.LONGEST]),
    block=st.sampled_from([1, 400, 2**18]),
)
def test_convolution(B, T, heads, width, reach, least, block):
    """Blocks of any size join without a seam, also where the convolution reaches back before the first token."""
    channels = heads * width
    inputs = draw(B, T, channels, seed=0), draw(B, reach, channels, seed=1), draw(reach + 1, channels, seed=2)

    def composed(x, before, taps):
        extended = torch.cat((before, x), dim=1).transpose(1, 2)
        mixed = F.conv1d(extended, taps.T[:, None], groups=channels).transpose(1, 2)
        y = F.silu(mixed).unflatten(-1, (heads, width))
        return y if least is None else F.normalize(y, dim=-1, eps=least)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_tokens, "BLOCK", block)
        compare(lambda *xs: memory_tokens.conv_silu(*xs, heads, least), composed, inputs)


@given(
    B=st.integers(1, 3),
    T=st.integers(1, 50),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    block=st.sampled_from([1, 400, 2**18]),
)
def test_gated_norm(B, T, heads, width, block):
    inputs = draw(B, T, heads, width, seed=0), draw(B, T, heads * width, seed=1), draw(width, seed=2)

    def composed(y, gate, weight):
        return F.rms_norm(y, (width,), weight, 1e-6).flatten(2) * F.silu(gate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_tokens, "BLOCK", block)
        compare(lambda *xs: memory_tokens.gated_norm(*xs, 1e-6), composed, inputs)


def test_a_zero_vector_stays_zero_and_has_a_finite_gradient():
    x = torch.zeros(1, 20, 4, requires_grad=True)
    y = memory_tokens.conv_silu(x, torch.zeros(1, 2, 4), torch.ones(3, 4), heads=2, least=memory_tokens.SMALLEST)
    assert torch.equal(y, torch.zeros_like(y))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()


def test_nothing_but_the_inputs_is_kept_for_the_backward():
    x, before, taps = draw(2, 300, 8, seed=0), draw(2, 3, 8, seed=1), draw(4, 8, seed=2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = memory_tokens.conv_silu(x, before, taps, heads=2, least=memory_tokens.SMALLEST)
        memory_tokens.gated_norm(y, x, draw(4, seed=3), 1e-6)
    assert len(kept) == 6
    assert {x.data_ptr(), before.data_ptr(), taps.data_ptr(), y.data_ptr()} <= set(kept)
