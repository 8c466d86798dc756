"""Finite for every input: repeated, alternating and random tokens through the cache; and what happens uncapped."""

import pydoc_data.topics

import pytest
import torch
from support import VARIANTS, every_variant, memory_inputs, slow_but, tiny_model

from titans_hf import MemoryState, TitansCache, TitansConfig, memory_chunks, neural_memory
from titans_hf.memory_layer import WriteGates
from titans_hf.memory_rule import rule_of
from titans_hf.studies.stability import build_model, hard_rows

slow = pytest.mark.slow
ORDINARY_PRECISION = {"mac": torch.float32, "mag": torch.bfloat16, "mal": torch.float32, "lmm": torch.bfloat16}
every_variant_in_both_precisions = pytest.mark.parametrize(
    "variant, dtype",
    [
        pytest.param(variant, dtype, marks=() if dtype == ORDINARY_PRECISION[variant] else slow)
        for variant in VARIANTS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)


def memory_of(cache):
    return [x for layer in cache.layers for part in layer.carry.memory.current() for x in part]


@every_variant_in_both_precisions
@torch.no_grad()
def test_sixteen_thousand_tokens_stay_finite(variant, dtype):
    model = build_model(variant).to(dtype)
    cache = TitansCache(model.config)
    for piece in hard_rows(0, 16_000).split(1999, dim=1):
        assert model(piece, past_key_values=cache).logits.isfinite().all()
    assert all(x.isfinite().all() for x in memory_of(cache))


@slow_but("mac", "lmm")
@torch.no_grad()
def test_saturated_gates_stay_finite(variant):
    """Large steps, the longest momentum and no forgetting at all: growth is polynomial, not exponential."""
    model = build_model(variant, worst_gates=True)
    theta, eta, alpha = model.model.layers[0].mixer.memory.write_gates(torch.zeros(1, 1, 16))[0, 0]
    assert (theta > 0.09).all()
    assert (eta > 0.998).all()
    assert (alpha < 1e-9).all()
    cache = TitansCache(model.config)
    for piece in hard_rows(0, 6_000).split(1999, dim=1):
        assert model(piece, past_key_values=cache).logits.isfinite().all()
    assert all(x.isfinite().all() for x in memory_of(cache))


@pytest.mark.parametrize("variant", ["lmm", *(pytest.param(variant, marks=slow) for variant in ("mag", "mal"))])
@torch.no_grad()
def test_a_start_that_is_given_back_does_not_fade(variant):
    """With the rule as printed it does, on unrelated tokens: what the memory has learned in training is lost."""
    left = {}
    for forget_to in ("zero", "start"):
        model = build_model(variant, memory_forget_to=forget_to, memory_alpha_start=[0.05, 0.0005])
        cache = TitansCache(model.config)
        for piece in hard_rows(0, 8_000)[2:].split(1999, dim=1):
            model(piece, past_key_values=cache)
        memory = cache.layers[0].carry.memory
        start = model.model.layers[0].mixer.memory.start.weights[0]
        left[forget_to] = (memory.current()[0][0].norm() / start.norm()).item()
    assert left["zero"] < 0.2
    assert left["start"] > 0.8


@every_variant_in_both_precisions
@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_gradients_stay_finite_on_such_input(variant, dtype, forget_to):
    model, ids = build_model(variant, memory_forget_to=forget_to).to(dtype).train(), hard_rows(0, 700)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_variant
@torch.no_grad()
def test_float16_inference_is_finite(variant):
    model, ids = build_model(variant).half(), hard_rows(0, 600)
    logits = model(ids).logits
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()
    random = ids[2:, :200]  # on repeated tokens the rule itself amplifies any rounding
    expected = build_model(variant).half().float()(random).logits  # the same weights, rounded alike
    assert (model(random).logits.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("max_surprise, finite", [(None, False), (10.0, True)])
@torch.no_grad()
def test_the_rule_as_printed_diverges_on_a_repeated_token_and_the_cap_prevents_it(max_surprise, finite):
    tokens, state = memory_inputs(B=1, T=1, H=2, D=16, depth=2, dtype=torch.float32)
    q, k, v = (x.expand(-1, 4096, -1, -1) for x in tokens[:3])
    theta, eta, alpha = (torch.full((1, 4096, 2), gate) for gate in (0.02, 0.9, 0.0))
    state = MemoryState(state.weights, tuple(torch.zeros_like(S) for S in state.momentum))
    y, state = neural_memory(q, k, v, theta, eta, alpha, state, chunk_size=64, max_surprise=max_surprise)
    assert bool(y.isfinite().all()) is finite
    assert all(bool(x.isfinite().all()) is finite for x in state.current()[0])


def surprise_at_one_token(eta: float, theta_max: float, write: str = "chunk") -> torch.Tensor:
    """By token, of a linear memory that forgets nothing and takes the largest steps, without the cap."""
    linear = {"memory_depth": 1, "memory_forget": False, "memory_max_surprise": None, "memory_theta_max": theta_max}
    model = tiny_model(
        "lmm", memory_chunk_size=16, memory_eta_max=0.999, num_hidden_layers=1, memory_write=write, **linear
    )
    gates = model.model.layers[0].mixer.memory.write_gates
    with torch.no_grad():
        gates.proj.weight.zero_()
        share = torch.tensor([1 - 1e-12, eta / gates.eta_max, 0.5], dtype=torch.float64)
        gates.proj.bias.copy_(share.logit().repeat_interleave(model.config.memory_num_heads))
    return model.trace_surprise(torch.full((1600,), 7)).surprise.amax((0, 1))


@pytest.mark.parametrize("eta", [1e-9, 0.3, 0.8, 0.99, 0.9989])
def test_steps_of_one_over_the_chunk_do_not_overshoot_equal_keys(eta):
    surprise = surprise_at_one_token(eta, 1 / 16)
    assert surprise[16:].max() < 1.01 * surprise[:16].max()


def test_larger_steps_do():
    surprise = surprise_at_one_token(1e-9, 1.1 / 16)
    assert surprise[-1] > 1e6 * surprise[:16].max()


def gradient_under_wild_gates(**fields) -> float:
    """The largest number in the gradient of the keys, where keys are alike and gates jump from token to token."""
    config = TitansConfig(hidden_size=64, num_attention_heads=1, **fields)
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    k, v = (normal(1, 1024, 1, 64) + 1.5 * normal(1, 1, 1, 64), normal(1, 1024, 1, 64))
    k, v = (torch.nn.functional.normalize(x, dim=-1) for x in (k, v))
    k.requires_grad_()
    gates = WriteGates(config)
    with torch.no_grad():
        gates.proj.weight.copy_(4 * torch.eye(3, 64))
        gates.proj.bias.copy_(torch.tensor([2.0, 4.0, -12.0]))  # theta, eta, alpha
    weights = (0.5 * normal(1, 1, 64, 128), torch.zeros(1, 1, 128, 64))
    state = MemoryState(weights, tuple(map(torch.zeros_like, weights)), start=weights)
    theta_eta_alpha = gates(normal(1, 1024, 64)).unbind(2)
    y, _ = neural_memory(k, k, v, *theta_eta_alpha, state, chunk_size=32, rule=rule_of(config))
    (y * normal(*y.shape)).sum().backward()
    return k.grad.abs().max().item() / y.numel() ** 0.5


def test_a_short_momentum_bounds_the_gradients_of_training():
    assert gradient_under_wild_gates() < 100
    assert gradient_under_wild_gates(memory_eta_max=0.999, memory_hidden_step=0.1) > 1e3, "or the test cannot fail"


def test_by_delta_the_largest_steps_do_not_and_leave_nothing_to_learn():
    surprise = surprise_at_one_token(1e-9, 1 / 2, "delta")
    assert surprise.max() < 1.01 * surprise[:16].max()
    assert surprise[-1] < 1e-9


@slow_but("mac", "lmm")
def test_ordinary_text_does_not_touch_the_cap(variant, monkeypatch):
    """After a short training run on English, fewer than 1 % of the tokens have a gradient scaled anywhere."""
    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()[:60_000]))
    model = build_model(variant, hidden_size=32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(40):
        starts = torch.randint(0, len(text) - 256, (4,), generator=generator)
        ids = torch.stack([text[start : start + 256] for start in starts])
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1.0, "the run must have learned something"

    capped = []

    class Counting(memory_chunks.DeltaWrite):
        def after(self, *state_and_gates):
            if self.scale[0].shape[1] == model.config.memory_chunk_size:  # not the prologue
                sizes = zip(self.norms, self.step_scale, strict=True)
                capped.extend((x * d * step > self.rule.max_surprise).flatten() for (x, d), step in sizes)
            return super().after(*state_and_gates)

    monkeypatch.setattr(memory_chunks, "DeltaWrite", Counting)
    with torch.no_grad():
        model.eval()(text[None, :4096], use_cache=False)
    assert torch.cat(capped).numel() == 4096 * 2 * 2 * 2, "tokens, heads, memory layers, blocks"
    by_token = torch.stack(capped).view(2, 64, 2, 2, 64)  # block, chunk, memory layer, head, token
    assert by_token.any(3).any(2).any(0).float().mean() < 0.01
