"""The C++ operators of a decoding step compute what torch does, and give way where they cannot serve."""

import copy
import logging
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VARIANTS, assert_close, every_variant, memory_inputs, random_ids, tiny_model

import titans_cpu
from titans_cpu.self_check import difference
from titans_hf import TitansCache, fast_paths, neural_memory
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
@settings(max_examples=25)
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
def decode(model, ids, cache=None, prompt=14):
    """Logits of a prompt, then token by token over chunk and segment ends."""
    cache = TitansCache(model.config) if cache is None else cache
    pieces = ids.split([prompt, *[1] * (ids.shape[1] - prompt)], dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


CASES = [
    *((variant, {}) for variant in VARIANTS),
    ("mac", dict(memory_write="chunk", memory_forget_to="zero")),
    ("mag", dict(memory_write="chunk", memory_forget_to="zero")),
    ("mac", dict(memory_conv=False, memory_shared_keys=False)),
    ("mal", dict(memory_shared_keys=False, attention_bias=True, mlp_bias=True)),
    ("lmm", dict(memory_momentum=False, memory_forget=False)),
    ("mac", dict(memory_gates="chunk", memory_depth=3)),
    ("mag", dict(memory_value_limit=False, num_persistent_tokens=0, memory_depth=1)),
    ("mac", dict(num_persistent_tokens=0, memory_combine="gate_attention")),
    ("mac", dict(attention_qk_norm=True)),
    ("mag", dict(attention_qk_norm=True, memory_layers=[1], full_attention_layers=[0], rotary_layers=[1])),
    ("mal", dict(full_attention_layers=[1], hidden_act="gelu")),
    ("mag", dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0})),
    ("mag", dict(attention_sinks=2)),
    ("mal", dict(attention_sinks=3, attention_qk_norm=True, num_persistent_tokens=0)),
    ("mag", dict(attention_sinks=1, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0})),
]


@BUILT
@pytest.mark.parametrize("variant, switches", CASES, ids=str)
def test_a_model_decodes_as_with_torch(variant, switches):
    model, ids = tiny_model(variant, torch.float32, **switches), random_ids(2, 27)
    found = decode(model, ids)
    with forced(operators=False):
        expected = decode(model, ids)
    assert_close(found, expected, 1e-5)
    assert not torch.equal(found, expected), "the operators were not used"


@BUILT
@pytest.mark.parametrize("prompt", [1, 2, 4])
def test_sinks_are_seen_as_with_torch_from_the_first_token_on(prompt):
    """While they are read, inside the window, while it leaves them one by one, and beyond."""
    model, ids = tiny_model("mag", torch.float32, attention_sinks=3), random_ids(2, 13)
    found = decode(model, ids, prompt=prompt)
    with forced(operators=False):
        assert_close(found, decode(model, ids, prompt=prompt), 1e-5)
        assert_close(found, model(ids).logits, 1e-5)


@BUILT
@every_variant
@torch.no_grad()
def test_caches_on_the_way_are_cropped_copied_reordered_and_saved_as_with_torch(variant, tmp_path):
    model, ids, more = tiny_model(variant, torch.float32), random_ids(3, 22), random_ids(3, 7, seed=1)
    cache = TitansCache(model.config)
    decode(model, ids, cache)
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    cache.save(tmp_path / "cache.safetensors", model)
    twins = [cache, cache.clone(), copy.deepcopy(cache), TitansCache.load(tmp_path / "cache.safetensors", model)]
    decode(model, more[:, :3], twins[0], prompt=1)  # the others must not notice
    rest = ids[[2, 0, 2]][:, :17]
    with forced(operators=False):
        expected = model(torch.cat((rest, more), dim=1)).logits[:, 17:]
    for twin in twins[1:]:
        found = [model(token, past_key_values=twin).logits for token in more.split(1, dim=1)]
        assert_close(torch.cat(found, dim=1), expected, 1e-5)


@BUILT
@pytest.mark.parametrize("options", [dict(), dict(num_beams=3)], ids=["greedy", "beams"])
def test_padded_rows_generate_what_they_do_with_torch(options):
    """Rows at different places of their chunks and segments, a case in which the memory's step is torch's."""
    model, ids = tiny_model("mac", torch.float32), random_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    written = dict(attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0, **options)
    with forced(operators=False):
        expected = model.generate(ids, **written)
    assert torch.equal(model.generate(ids, **written), expected)


@BUILT
@torch.no_grad()
def test_a_state_of_before_is_gone_on_from_as_it_was():
    tokens, state = memory_inputs(T=13, dtype=torch.float32)
    options = dict(chunk_size=8, backend="cpu")
    _, early = steps([x[:, :4] for x in tokens], state, **options)
    numbers = [x.clone() for part in early.current() for x in part]
    later, _ = steps([x[:, 4:] for x in tokens], early, **options)
    assert all(map(torch.equal, (x for part in early.current() for x in part), numbers))
    again, _ = steps([x[:, 4:] for x in tokens], early, **options)
    assert torch.equal(later, again)


@BUILT
@torch.no_grad()
def test_half_precision_models_take_the_memorys_step():
    model, ids = tiny_model("mag", torch.bfloat16), random_ids(2, 20)
    with forced(operators=False):
        expected = decode(model, ids)
    assert_close(decode(model, ids), expected, 0.05)


@BUILT
@torch.no_grad()
def test_layers_that_are_more_than_linear_keep_what_they_add():
    """A hook, as an adapter or offloading brings it, and another module in a layer's place."""
    model, ids = tiny_model("mac", torch.float32), random_ids(2, 17)
    mixer = model.model.layers[0].mixer
    mixer.memory.v_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    mixer.attention.o_proj = torch.nn.Sequential(mixer.attention.o_proj, torch.nn.Tanh())
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    found = decode(model, ids)
    with forced(operators=False):
        assert_close(found, decode(model, ids), 1e-5)


@BUILT
@torch.no_grad()
def test_weights_that_change_in_place_or_are_replaced_are_read_anew():
    model, ids = tiny_model("mal", torch.float32), random_ids(2, 17)
    decode(model, ids)
    layer = model.model.layers[0]
    layer.mixer.memory.out_proj.weight.mul_(-2)
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.flip(0))
    found = decode(model, ids)
    with forced(operators=False):
        assert_close(found, decode(model, ids), 1e-5)


@BUILT
def test_gradients_are_torchs_and_the_operators_refuse_them():
    model, ids = tiny_model("lmm", torch.float32), random_ids(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :8]).past_key_values
        model(ids[:, 8:], past_key_values=cache)
    model(ids[:, :1], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].mixer.memory.q_proj.weight.grad.abs().sum() > 0
    x = torch.randn(2, 1, 7, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradients"):
        torch.ops.titans_cpu.gated_norm(x, torch.ones(7), 0.1)


@BUILT
@torch.no_grad()
def test_tensors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="`weight` must be contiguous float32"):
        torch.ops.titans_cpu.gated_norm(torch.randn(2, 1, 7), torch.ones(7).double(), 0.1)
    with pytest.raises(ValueError, match="must lead to 7"):
        torch.ops.titans_cpu.recall([torch.randn(2, 3, 7, 5)], torch.randn(2, 1, 3, 7))


@torch.no_grad()
@pytest.mark.parametrize("dtype, rule", [(torch.float64, Rule()), (torch.float32, type("Own", (Rule,), {})())])
def test_a_forced_backend_says_what_it_cannot_serve(dtype, rule):
    tokens, state = memory_inputs(T=2, dtype=dtype)
    with pytest.raises(ValueError, match="`backend='cpu'` (serves states in float32|does not serve)"):
        neural_memory(*tokens, state, chunk_size=4, rule=rule, backend="cpu")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The package as at its first use, with an empty folder for what it builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    caches = (titans_cpu.problem, titans_cpu.operators, fast_paths._operators)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


BROKEN = {
    "no compiler": {"CXX": "no-such-compiler"},
    "a compiler that fails": {"CXX": "false"},
    "switched off": {"TITANS_CPU_OPERATORS": "0"},
}


@pytest.mark.parametrize("environment", BROKEN.values(), ids=list(BROKEN))
def test_without_operators_torch_decodes_and_one_line_in_the_log_says_so(environment, fresh, caplog):
    for name, value in environment.items():
        fresh.setenv(name, value)
    model, ids = tiny_model("mag", torch.float32), random_ids(2, 16)
    with caplog.at_level(logging.INFO, logger="titans_cpu"):
        found = decode(model, ids)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert next(iter(environment.values())) in record.getMessage()
    with forced(operators=False):
        assert torch.equal(found, decode(model, ids))
    tokens, state = memory_inputs(T=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="`backend='cpu'` has no operators"):
        neural_memory(*tokens, state, chunk_size=4, backend="cpu")


def test_where_the_package_is_missing_torch_decodes(fresh):
    """As with a checkpoint's own code where titans-hf is not installed."""
    fresh.setitem(sys.modules, "titans_cpu", None)
    model, ids = tiny_model("mac", torch.float32), random_ids(2, 16)
    found = decode(model, ids)
    with forced(operators=False):
        assert torch.equal(found, decode(model, ids))
    tokens, state = memory_inputs(T=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="`backend='cpu'` needs the package titans_cpu"):
        neural_memory(*tokens, state, chunk_size=4, backend="cpu")


@BUILT
@pytest.mark.parametrize("wrong", ["step", "gated_norm", "heads", "attend"])
def test_operators_that_compute_something_else_fail_their_check(wrong):
    class Wrong:
        def __getattr__(self, name):
            operator = getattr(torch.ops.titans_cpu, name)
            return self.spoiled(operator) if name == wrong else operator

        @staticmethod
        def spoiled(operator):
            def run(*arguments):
                found = operator(*arguments)
                first = found[0] if isinstance(found, tuple) else found
                first.flatten()[-1].add_(0.01)
                return found

            return run

    assert difference(torch.ops.titans_cpu) is None
    assert f"the operator `{wrong}` is off" in difference(Wrong())
