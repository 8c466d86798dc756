"""The chunk form computes what the token loop defines: outputs, states, every gradient, from anywhere to anywhere."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TOLERANCE, assert_close, memory_inputs

from titans_hf import MemoryState, neural_memory
from titans_hf.memory_closed_form import gradient_factors
from titans_hf.memory_rule import Rule


def run(tokens, state, pieces, mask=None, **options):
    """Read the tokens in pieces of the given sizes; returns the outputs and the final weights and momentum."""
    outputs, start = [], 0
    for size in pieces:
        part = slice(start, start + size)
        y, state = neural_memory(
            *(x[:, part] for x in tokens), state, mask=None if mask is None else mask[:, part], **options
        )
        outputs.append(y)
        start += size
    weights, momentum = state.current()
    return [torch.cat(outputs, dim=1), *weights, *momentum]


def gradients(results, leaves, seed=5):
    """Gradients of a random linear functional of all results."""
    g = torch.Generator().manual_seed(seed)
    total = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in results)
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def compare(seed, depth, chunk, pieces, mask, cap, closed_gates, dtype, towards_start):
    tokens, state = memory_inputs(B=2, T=sum(pieces), depth=depth, seed=seed, closed_gates=closed_gates, dtype=dtype)
    if towards_start:
        state = replace(state, start=tuple(torch.roll(W, 1, dims=2) for W in state.weights))
    leaves = [*tokens, *state.weights, *state.momentum, *(state.start or ())]
    for leaf in leaves:
        leaf.requires_grad_()
    options = {"chunk_size": chunk, "max_surprise": cap, "mask": mask}
    expected = run(tokens, state, [sum(pieces)], backend="recurrent", **options)
    actual = run(tokens, state, pieces, backend="torch", **options)
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y, TOLERANCE[dtype])
    for x, y in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):  # zero: no chunk was filled
        assert_close(x, y, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 3, 16])
@settings(max_examples=6)
@given(data=st.data())
def test_chunk_form_equals_token_loop(depth, chunk, dtype, data):
    """Any length, any split (so any state in the middle of a chunk), any mask, with and without the cap."""
    pieces = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    mask = None
    if data.draw(st.booleans()):
        rows = [data.draw(st.lists(st.booleans(), min_size=sum(pieces), max_size=sum(pieces))) for _ in range(2)]
        mask = torch.tensor(rows)
    cap = data.draw(st.sampled_from([None, 0.7, 10.0]))
    closed_gates, towards_start = data.draw(st.booleans()), data.draw(st.booleans())
    compare(data.draw(st.integers(0, 999)), depth, chunk, pieces, mask, cap, closed_gates, dtype, towards_start)


def test_towards_its_start_a_memory_forgets_what_it_has_learned_since():
    """`M = start + L` where `L_t = (1 - alpha_t) L_(t-1) + S_t`, at any token; by a loop that knows no other form."""
    tokens, state = memory_inputs(T=14, depth=2)
    state = replace(state, start=tuple(torch.roll(W, 1, dims=2) for W in state.weights))
    k, v, theta, eta, alpha = (x.transpose(1, 2) for x in tokens[1:])
    learned = [W - own for W, own in zip(state.weights, state.start, strict=True)]
    momentum = list(state.momentum)
    for t in range(14):
        if t % 4 == 0:
            boundary = tuple(own + L for own, L in zip(state.start, learned, strict=True))
        inputs, errors = gradient_factors(Rule(), boundary, k[:, :, t, None], v[:, :, t, None])
        step, keep_S, keep_L = (gate[:, :, t, None, None] for gate in (theta, eta, 1 - alpha))
        for i, (a, g) in enumerate(zip(inputs, errors, strict=True)):
            momentum[i] = keep_S * momentum[i] - step * (a.mT @ g)
            learned[i] = keep_L * learned[i] + momentum[i]
    _, end = neural_memory(*tokens, state, chunk_size=4)
    for W, own, L in zip(end.current()[0], state.start, learned, strict=True):
        assert_close(W, own + L, 1e-12)


def test_a_start_unlike_the_weights_is_refused_by_name():
    tokens, state = memory_inputs(T=3)
    with pytest.raises(ValueError, match="`state.start` must be like `state.weights`"):
        neural_memory(*tokens, replace(state, start=state.weights[:1]), chunk_size=4)


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_gates_at_the_ends_of_their_range_give_finite_outputs_and_gradients(gate):
    tokens, state = memory_inputs(T=40)
    tokens[4], tokens[5] = torch.full_like(tokens[4], gate), torch.full_like(tokens[5], gate)
    for leaf in tokens:
        leaf.requires_grad_()
    results = run(tokens, state, [40], chunk_size=16, max_surprise=10.0)
    assert all(x.isfinite().all() for x in (*results, *gradients(results, tokens)))


def test_padding_reads_as_zero_and_its_content_never_matters():
    tokens, state = memory_inputs(T=23)
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.6
    clean = run(tokens, state, [23], mask=mask, chunk_size=4)
    poisoned = [torch.where(mask.view(2, 23, *[1] * (x.dim() - 2)), x, float("nan")) for x in tokens]
    for x, y in zip(run(poisoned, state, [23], mask=mask, chunk_size=4), clean, strict=True):
        assert_close(x, y, 0.0)
    assert (clean[0][~mask] == 0).all()


def test_a_state_of_one_backend_goes_on_in_the_other():
    tokens, state = memory_inputs(T=21)
    expected = run(tokens, state, [21], chunk_size=8, backend="recurrent")[0]
    for first, second in (("recurrent", "torch"), ("torch", "recurrent")):
        head, middle = neural_memory(*(x[:, :13] for x in tokens), state, chunk_size=8, backend=first)
        tail, _ = neural_memory(*(x[:, 13:] for x in tokens), middle, chunk_size=8, backend=second)
        assert_close(torch.cat((head, tail), dim=1), expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_keep_a_float32_state(dtype):
    tokens, state = memory_inputs(dtype=dtype)
    y, state = neural_memory(*tokens, state, chunk_size=4)
    assert y.dtype == dtype
    assert {x.dtype for x in state.tensors() if x.is_floating_point()} == {torch.float32}


def test_what_is_kept_for_the_backward_pass_grows_with_chunks_not_with_copies_of_the_weights():
    """Bytes saved by autograd for T tokens stay far below one copy of the weights per token."""
    T, chunk, H, D = 256, 32, 2, 16
    tokens, state = memory_inputs(B=1, T=T, H=H, D=D, depth=2, expansion=4, dtype=torch.float32)
    for x in tokens:
        x.requires_grad_()
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = neural_memory(*tokens, state, chunk_size=chunk)  # noqa: F841  (alive, so that no storage is used twice)
    memory_bytes = sum(W.nbytes for W in state.weights)
    input_bytes = sum(x.nbytes for x in tokens)
    states = 2 * memory_bytes * T / chunk
    assert states / 2 < sum(saved.values()) <= states + 4 * input_bytes < 0.2 * memory_bytes * T


@torch.no_grad()
def test_autocast_does_not_change_a_number():
    tokens, state = memory_inputs(dtype=torch.float32)
    plain = run(tokens, state, [11, 8], chunk_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(tokens, state, [11, 8], chunk_size=4)
    for x, y in zip(mixed, plain, strict=True):
        assert_close(x, y, 0.0)


def test_the_token_loop_says_that_it_cannot_run_in_inference_mode():
    tokens, state = memory_inputs(T=3)
    with torch.inference_mode(), pytest.raises(ValueError, match="no_grad"):
        neural_memory(*tokens, state, chunk_size=4, backend="recurrent")


BAD_INPUTS = {
    "backend": (dict(backend="cuda"), "backend"),
    "chunk of zero": (dict(chunk_size=0), "chunk_size"),
    "cap of zero": (dict(max_surprise=0.0), "max_surprise"),
    "mask of floats": (dict(mask=torch.ones(2, 7)), "mask"),
    "mask of the wrong shape": (dict(mask=torch.ones(2, 8, dtype=torch.bool)), "mask"),
}


@pytest.mark.parametrize("options, field", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_options_are_refused_by_name(options, field):
    tokens, state = memory_inputs(T=7)
    with pytest.raises(ValueError, match=f"`{field}`"):
        neural_memory(*tokens, state, **{"chunk_size": 4, **options})


def test_bad_tensors_are_refused_by_name():
    tokens, state = memory_inputs(T=7)
    for index, name in enumerate(("q", "k", "v", "theta", "eta", "alpha")):
        broken = list(tokens)
        broken[index] = broken[index][..., 0]
        with pytest.raises(ValueError, match="`q`" if index == 0 else f"`{name}`"):
            neural_memory(*broken, state, chunk_size=4)
    with pytest.raises(ValueError, match="tokens >= 1"):
        neural_memory(*(x[:, :0] for x in tokens), state, chunk_size=4)
    with pytest.raises(ValueError, match=r"state.weights\[0\]"):
        neural_memory(
            *tokens,
            MemoryState(*(tuple(x[:1] for x in part) for part in (state.weights, state.momentum))),
            chunk_size=4,
        )
    _, middle = neural_memory(*tokens, state, chunk_size=4)
    with pytest.raises(ValueError, match="`chunk_size` is 5"):
        neural_memory(*tokens, middle, chunk_size=5)
