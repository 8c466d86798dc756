"""The C++ operators of a decoding step compute what torch does, and give way where they cannot serve."""

from dataclasses import replace

import pytest
import titans_cpu
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, every_variant, memory_inputs, random_ids, tiny_model

from titans_hf import TitansCache, neural_memory
from titans_hf.fast_paths import forced
from titans_hf.memory_rule import DeltaRule, Rule

BUILT = pytest.mark.skipif(titans_cpu.problem() is not None, reason=f"no C++ operators: {titans_cpu.problem()}")


def steps(tokens, state, **options):
    """Outputs and last state of the tokens, one at a time."""
    outputs, state = [], state.opened(options["chunk_size"])
    for t in range(tokens[0].shape[1]):
        y, state = neural_memory(*(x[:, t : t + 1] for x in tokens), state.opened(options["chunk_size"]), **options)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@BUILT
@given(
    depth=st.integers(1, 3),
    width=st.sampled_from([5, 16, 67]),
    expansion=st.integers(1, 3),
    chunk=st.integers(1, 9),
    cap=st.sampled_from([None, 0.7, 10.0]),
    closed_gates=st.booleans(),
    towards_start=st.booleans(),
    kind=st.sampled_from([Rule, DeltaRule]),
    normalised=st.booleans(),
    hidden_step=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_steps_equal_those_in_torch(
    depth, width, expansion, chunk, cap, closed_gates, towards_start, kind, normalised, hidden_step, seed
):
    """Outputs and states, over chunk ends, with gates of exactly 0 and 1."""
    sizes = dict(T=2 * chunk + 1, D=width, depth=depth, expansion=expansion, seed=seed)
    tokens, state = memory_inputs(closed_gates=closed_gates, dtype=torch.float32, **sizes)
    if towards_start:
        state = replace(state, start=tuple(torch.roll(W, 1, dims=2) for W in state.weights))
    options = {"chunk_size": chunk, "rule": kind(cap, normalised, hidden_step)}
    y, end = steps(tokens, state, backend="cpu", **options)
    with forced(operators=False):
        expected, expected_end = steps(tokens, state, backend="torch", **options)
    assert_close(y, expected, 1e-5)
    for mine, theirs in zip(end.current(), expected_end.current(), strict=True):
        for x, other in zip(mine, theirs, strict=True):
            assert_close(x, other, 1e-5)


@torch.no_grad()
def decode(model, ids, cache=None):
    """Logits of a prompt of 14 tokens, then token by token over chunk and segment ends."""
    cache = TitansCache(model.config) if cache is None else cache
    pieces = ids.split([14, *[1] * (ids.shape[1] - 14)], dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


SWITCHES = [
    {},
    dict(memory_write="chunk", memory_forget_to="zero"),
    dict(memory_conv=False, memory_shared_keys=False),
    dict(memory_momentum=False, memory_forget=False),
    dict(memory_gates="chunk", memory_depth=3),
    dict(memory_value_limit=False, num_persistent_tokens=0, memory_depth=1),
    dict(memory_combine="gate_attention", attention_qk_norm=True),
]


@BUILT
@every_variant
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda fields: "-".join(fields) or "defaults")
def test_a_model_decodes_as_with_torch(variant, switches):
    model, ids = tiny_model(variant, torch.float32, memory_implementation="cpu", **switches), random_ids(2, 27)
    found = decode(model, ids)
    with forced(operators=False):
        expected = decode(model, ids)
    assert_close(found, expected, 1e-5)
    assert not torch.equal(found, expected), "the operators were not used"
