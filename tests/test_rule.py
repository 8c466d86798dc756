"""A new rule is one subclass: the token loop and the closed form compute it, and no fast form is used for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, every_variant, memory_inputs, random_ids, tiny_config, tiny_model

from titans_hf import TitansCache, carry_titans, memory_layer, memory_ops, neural_memory
from titans_hf.memory_rule import DeltaRule, Rule, rule_of, surprise, write


class RobustRule(Rule):
    """A smooth absolute loss, `sum sqrt(1 + d^2) - 1`: no fast form knows it."""

    def loss(self, answer, v):
        return ((1 + (answer - v).square()).sqrt() - 1).sum(-1)

    def error(self, answer, v):
        return (answer - v) * (1 + (answer - v).square()).rsqrt()


def read(tokens, state, pieces, **options):
    outputs, start = [], 0
    for size in pieces:
        y, state = neural_memory(*(x[:, start : start + size] for x in tokens), state, chunk_size=4, **options)
        outputs.append(y)
        start += size
    return [torch.cat(outputs, dim=1), *(x for part in state.current() for x in part)]


@pytest.mark.parametrize("kind", [RobustRule, DeltaRule, Rule])
@given(
    depth=st.integers(1, 3),
    normalised=st.booleans(),
    hidden_step=st.sampled_from([1.0, 0.3]),
    pieces=st.lists(st.integers(1, 11), min_size=1, max_size=5),
    cap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 99),
)
def test_any_rule_is_computed_as_the_token_loop_defines_it(kind, depth, normalised, hidden_step, pieces, cap, seed):
    """Outputs, states and gradients, from any place of a chunk; single steps without gradients as well."""
    tokens, state = memory_inputs(T=sum(pieces), depth=depth, seed=seed)
    leaves = [x.requires_grad_() for x in (*tokens, *state.weights, *state.momentum)]
    rule = kind(cap, normalised, hidden_step)
    expected = read(tokens, state, [sum(pieces)], rule=rule, backend="recurrent")
    actual = read(tokens, state, pieces, rule=rule)
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in expected]
    found = [torch.autograd.grad(xs, leaves, upstream, materialize_grads=True) for xs in (actual, expected)]
    with torch.no_grad():
        steps = read(tokens, state, [1] * sum(pieces), rule=rule)
    for mine, theirs in (*zip(actual, expected), *zip(steps, expected), *zip(*found)):
        assert_close(mine, theirs, 1e-9)


def test_the_rule_matters():
    tokens, state = memory_inputs()
    plain, robust = (read(tokens, state, [19], rule=rule)[0] for rule in (Rule(), RobustRule()))
    assert (plain - robust).abs().max() > 0.01


def test_fast_forms_pass_over_a_rule_they_do_not_name():
    tokens, state = memory_inputs()
    assert not memory_ops.serves(RobustRule())
    with pytest.raises(ValueError, match="'triton'. does not serve RobustRule"):
        neural_memory(*tokens, state, chunk_size=4, rule=RobustRule(), backend="triton")


def test_the_cap_is_given_once():
    tokens, state = memory_inputs()
    with pytest.raises(ValueError, match="`max_surprise` is a field of `rule`"):
        neural_memory(*tokens, state, chunk_size=4, rule=Rule(3.0), max_surprise=3.0)


@every_variant
def test_a_model_with_another_rule_reads_in_pieces_and_is_cropped_like_any_other(variant, monkeypatch):
    for module in (memory_layer, carry_titans):
        monkeypatch.setattr(module, "rule_of", lambda config: RobustRule(config.memory_max_surprise))
    model, ids = tiny_model(variant), random_ids(2, 31)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = TitansCache(model.config)
        model(ids[:, :14], past_key_values=cache)
        for token in random_ids(2, 7, seed=3).split(1, dim=1):
            model(token, past_key_values=cache)
        cache.crop(-7)
        rest = model(ids[:, 14:], past_key_values=cache).logits
    assert_close(rest, whole[:, 14:], 1e-9)


def test_a_step_is_eqs_13_and_14_and_the_gradient_is_that_of_a_linear_memory():
    """Depth 1: `u = 2 k^T (k W - v)`; then `S = eta S - theta u` and `M = (1 - alpha) M + S`, in plain numbers."""
    (_, k, v, theta, eta, alpha), state = memory_inputs(T=1, depth=1)
    k, v, theta, eta, alpha = (x[:, 0] for x in (k, v, theta, eta, alpha))
    u, (a,), (g,) = surprise(rule_of(tiny_config("lmm", memory_max_surprise=None)), state.weights, k, v)
    expected = 2 * k[..., None] * (k[..., None, :] @ state.weights[0] - v[..., None, :])
    assert_close(u[0], expected, 1e-12)
    assert_close(a.mT @ g, expected, 1e-12)
    (M,), (S,) = write(state.weights, state.momentum, u, theta, eta, alpha)
    past = eta[..., None, None] * state.momentum[0] - theta[..., None, None] * expected
    assert_close(S, past, 1e-12)
    assert_close(M, (1 - alpha[..., None, None]) * state.weights[0] + past, 1e-12)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_linear_memory_written_by_delta_does_not_depend_on_the_chunk_size(cap):
    """Momentum and forgetting included: it is the plain recurrence of chunks of one token."""
    tokens, state = memory_inputs(T=23, depth=1)
    expected, end = neural_memory(*tokens, state, chunk_size=1, max_surprise=cap)
    for chunk_size in (3, 8, 64):
        y, after = neural_memory(*tokens, state, chunk_size=chunk_size, rule=DeltaRule(cap))
        assert_close(y, expected, 1e-12)
        for mine, theirs in zip(after.current()[0], end.current()[0], strict=True):
            assert_close(mine, theirs, 1e-12)


def test_delta_refuses_a_loss_that_its_closed_form_does_not_solve():
    class RobustDelta(DeltaRule):
        error = RobustRule.error

    tokens, state = memory_inputs()
    with pytest.raises(ValueError, match="squared loss: give RobustDelta its own"):
        neural_memory(*tokens, state, chunk_size=4, rule=RobustDelta())


def test_large_steps_overshoot_equal_keys_unless_they_are_written_by_delta():
    """A chunk of 16 equal keys, theta 1/2: by delta the first write is exact and the others change nothing."""
    (q, k, v, theta, eta, alpha), state = memory_inputs(T=16, depth=1)
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    theta, eta, alpha = torch.full_like(theta, 0.5), torch.zeros_like(eta), torch.zeros_like(alpha)
    for rule, off in ((Rule(), 10.0), (DeltaRule(), 1e-9)):
        y, _ = neural_memory(k, k, v, theta, eta, alpha, state, chunk_size=16, rule=rule)
        assert ((y - v)[:, -1].abs().max() <= off) == (rule != Rule())


@every_variant
def test_a_model_written_by_delta_reads_in_pieces_with_padding_and_is_cropped_like_any_other(variant):
    model, ids = tiny_model(variant, memory_write="delta", memory_theta_max=0.5), random_ids(2, 31)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        alone = model(ids[:1, 5:], use_cache=False).logits
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        cache = TitansCache(model.config)
        model(ids[:, :14], attention_mask=mask[:, :14], past_key_values=cache)
        for token in random_ids(2, 7, seed=3).split(1, dim=1):
            model(token, past_key_values=cache)
        cache.crop(-7)
        rest = model(ids[:, 14:], past_key_values=cache).logits
        plain = tiny_model(variant, memory_write="chunk", memory_theta_max=0.5)(ids[:1, 5:], use_cache=False).logits
    assert_close(whole[:1, 5:], alone, 1e-9)
    assert_close(rest, whole[:, 14:], 1e-9)
    assert (plain - alone).abs().max() > 1e-3
