"""Decoding, token by token and in place, gives the numbers of the token loop, and leaves every earlier state alone."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import TOLERANCE, assert_close, every_variant, memory_inputs, random_ids, tiny_model

from titans_hf import TitansCache, neural_memory
from titans_hf.memory_rule import DeltaRule, Rule


def piece(tokens, start, stop):
    return [x[:, start:stop] for x in tokens]


def snapshot(state):
    return [x.clone() for part in state.current() for x in part]


@given(
    depth=st.integers(1, 3),
    expansion=st.integers(1, 3),
    chunk=st.integers(1, 9),
    prompt=st.integers(0, 11),
    cap=st.sampled_from([None, 0.7, 10.0]),
    closed_gates=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    towards_start=st.booleans(),
    kind=st.sampled_from([Rule, DeltaRule]),
    normalised=st.booleans(),
    hidden_step=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_steps_equal_the_token_loop(
    depth, expansion, chunk, prompt, cap, closed_gates, dtype, towards_start, kind, normalised, hidden_step, seed
):
    """From any place of a chunk, over chunk ends, gates of exactly 0 and 1."""
    T = prompt + 2 * chunk + 3
    tokens, start = memory_inputs(
        T=T, depth=depth, expansion=expansion, closed_gates=closed_gates, dtype=dtype, seed=seed
    )
    if towards_start:
        start = replace(start, start=tuple(torch.roll(W, 1, dims=2) for W in start.weights))
    options = {"chunk_size": chunk, "rule": kind(cap, normalised, hidden_step)}
    expected, end = neural_memory(*tokens, start, backend="recurrent", **options)
    outputs, state = [], start.opened(chunk)
    with torch.no_grad():
        if prompt:
            y, state = neural_memory(*piece(tokens, 0, prompt), state, **options)
            outputs.append(y)
        for t in range(prompt, T):
            y, state = neural_memory(*piece(tokens, t, t + 1), state.opened(chunk), **options)
            outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), expected, TOLERANCE[dtype])
    for mine, theirs in zip(snapshot(state), snapshot(end), strict=True):
        assert_close(mine, theirs, TOLERANCE[dtype])


@torch.no_grad()
def test_states_on_the_way_keep_their_numbers_and_can_be_gone_on_from_again():
    tokens, start = memory_inputs(T=40)
    states, noted = [start.opened(8)], []
    for t in range(20):
        states.append(neural_memory(*piece(tokens, t, t + 1), states[-1], chunk_size=8)[1])
        noted.append(snapshot(states[-1]))
    for state, numbers in zip(states[1:], noted, strict=True):
        assert all(map(torch.equal, snapshot(state), numbers))
        expected, _ = neural_memory(*piece(tokens, 20, 23), state, chunk_size=8)
        again, on = [], state
        for other in range(20, 23):
            y, on = neural_memory(*piece(tokens, other, other + 1), on, chunk_size=8)
            again.append(y)
        assert_close(torch.cat(again, dim=1), expected, 1e-12)
    assert all(map(torch.equal, snapshot(states[-1]), noted[-1]))


def test_a_loss_from_before_the_steps_can_still_be_differentiated():
    tokens, state = memory_inputs(T=30)
    tokens[0].requires_grad_()
    with torch.no_grad():
        _, state = neural_memory(*piece(tokens, 0, 3), state, chunk_size=16)
        _, state = neural_memory(*piece(tokens, 3, 4), state, chunk_size=16)
    y, state = neural_memory(*piece(tokens, 4, 5), state, chunk_size=16)
    with torch.no_grad():
        for t in range(5, 9):
            _, state = neural_memory(*piece(tokens, t, t + 1), state, chunk_size=16)
    (gradient,) = torch.autograd.grad(y.sum(), tokens[0])
    assert gradient[:, 4].abs().sum() > 0


def test_a_loss_of_a_read_only_pass_can_be_differentiated_after_further_steps():
    model, ids = tiny_model("mag"), random_ids(1, 12)
    with torch.no_grad():
        cache = model(ids[:, :6]).past_key_values
        model(ids[:, 6:7], past_key_values=cache)
    loss = model(ids[:, 7:8], past_key_values=cache, memory_read_only=True).logits.square().sum()
    with torch.no_grad():
        for t in range(8, 12):
            model(ids[:, t : t + 1], past_key_values=cache)
    loss.backward()
    assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.parametrize("first, second", [("inference_mode", "no_grad"), ("no_grad", "inference_mode")])
def test_steps_may_change_between_inference_mode_and_no_grad(first, second):
    tokens, state = memory_inputs(T=12)
    expected, _ = neural_memory(*tokens, state, chunk_size=16)
    outputs, state = [], state.opened(16)
    for t in range(12):
        with getattr(torch, first if t % 3 else second)():
            y, state = neural_memory(*piece(tokens, t, t + 1), state, chunk_size=16)
        outputs.append(y.clone())
    assert_close(torch.cat(outputs, dim=1), expected, 1e-12)


def logits(model, ids, cache):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def decoded(model, ids):
    """A cache in the middle of decoding."""
    cache = TitansCache(model.config)
    for part in ids.split([ids.shape[1] - 4, 1, 1, 1, 1], dim=1):
        logits(model, part, cache)
    return cache


@every_variant
@pytest.mark.parametrize("tokens", [9, 20, 75])
@pytest.mark.parametrize("removed", [1, 3, 4])
def test_steps_after_a_crop_go_on_from_what_is_left(variant, tokens, removed):
    model, ids = tiny_model(variant), random_ids(2, tokens + 3)
    expected = logits(model, ids, TitansCache(model.config))
    cache = decoded(model, ids[:, :tokens])
    cache.crop(-removed)
    for t in range(tokens - removed, tokens + 3):
        assert_close(logits(model, ids[:, t : t + 1], cache)[:, 0], expected[:, t], 1e-10)


@every_variant
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), TitansCache.clone])
def test_copies_in_the_middle_of_decoding_are_whole_and_apart(variant, twin):
    model, ids, other = tiny_model(variant), random_ids(2, 20), random_ids(2, 4, seed=7)
    cache = decoded(model, ids)
    copied = twin(cache)
    expected = logits(model, torch.cat((ids, other), dim=1), TitansCache(model.config))[:, 20:]
    for t in range(4):
        logits(model, ids[:, t : t + 1], cache)  # the original goes another way
        assert_close(logits(model, other[:, t : t + 1], copied)[:, 0], expected[:, t], 1e-10)


def test_a_changed_state_is_read_as_it_was_changed():
    tokens, state = memory_inputs(T=12)
    with torch.no_grad():
        for t in range(6):
            _, state = neural_memory(*piece(tokens, t, t + 1), state.opened(16), chunk_size=16)
        changed = replace(state, weights=tuple(2 * W for W in state.weights))
        expected, _ = neural_memory(*piece(tokens, 6, 9), changed, chunk_size=16)
        outputs = []
        for t in range(6, 9):
            y, changed = neural_memory(*piece(tokens, t, t + 1), changed, chunk_size=16)
            outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), expected, 1e-12)


@pytest.mark.parametrize("width", [1, 12])
def test_a_layer_read_with_gradients_then_without_from_one_carry(width):
    memory = tiny_model("lmm").model.layers[0].mixer.memory
    x = torch.randn(1, 40, memory.q_proj.in_features, dtype=torch.float64)
    with torch.no_grad():
        _, carry, _ = memory(x[:, :5], memory.begin(1, spare=64))
        carry.tail, carry.state = carry.tail.compact(), carry.state.opened(memory.chunk_size)
        _, carry, _ = memory(x[:, 5:6], carry)
    y, _, _ = memory(x[:, 6 : 6 + width], carry)
    with torch.no_grad():
        memory(x[:, 20:21], carry)
    y.sum().backward()
    assert memory.q_proj.weight.grad.isfinite().all()
