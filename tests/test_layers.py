"""Layers may differ: with and without a memory, with a window or full attention. All promises hold for them, too."""

import pytest
import torch
from support import TOLERANCE, VOCAB, assert_close, random_ids, take_flash_attention, tiny_config, tiny_model
from transformers import DynamicCache, StaticCache

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM
from titans_hf.cache_titans import REWIND
from titans_hf.evals.model import put_back
from titans_hf.hub.describe import describe, only_layers
from titans_hf.train.plan import attention_flops, memory_flops

EXACT = TOLERANCE[torch.float64]
MIXED = {
    "memory in the last": dict(memory_layers=[2]),
    "full attention first": dict(full_attention_layers=[0]),
    "all kinds": dict(memory_layers=[1, 3], full_attention_layers=[0, 1], rotary_layers=[0, 3]),
    "no memory": dict(memory_layers=[]),
    "sinks": dict(attention_sinks=3, memory_layers=[1]),
    "as in a graft": dict(
        memory_layers=[1],
        full_attention_layers=[2],
        num_persistent_tokens=0,
        memory_combine="add",
        memory_layer_norm=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        attention_qk_norm=True,
    ),
}
mixed = pytest.mark.parametrize("kinds", MIXED)
both = pytest.mark.parametrize("variant", ["mag", "mal"])


def model_of(variant: str, kinds: str, **overrides) -> TitansForCausalLM:
    return tiny_model(variant, num_hidden_layers=4, **{**MIXED[kinds], **overrides})


@torch.no_grad()
def read(model, cache, ids, *, mask=None):
    return model(ids, attention_mask=mask, past_key_values=cache).logits


@torch.no_grad()
def read_whole(model, ids):
    return model(ids, use_cache=False).logits


@mixed
@both
def test_any_split_gives_the_same_logits(variant, kinds):
    model, ids = model_of(variant, kinds), random_ids(2, 31)
    whole = read_whole(model, ids)
    for pieces in ([31], [4, 1, 17, 9], [1] * 31):
        cache = TitansCache(model.config)
        assert_close(torch.cat([read(model, cache, x) for x in ids.split(pieces, dim=1)], dim=1), whole, EXACT)


@mixed
@both
def test_a_later_token_changes_nothing_before_it(variant, kinds):
    model, ids = model_of(variant, kinds), random_ids(1, 23)
    changed = ids.clone()
    changed[0, 13] = ids[0, 13] % (VOCAB - 1) + 1
    before, after = read_whole(model, ids), read_whole(model, changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.allclose(before[:, 13:], after[:, 13:])


@mixed
@both
def test_padding_in_any_place_is_as_if_it_were_not_there(variant, kinds):
    """Three calls with different numbers of tokens in each row: one has none in the first, one none in the second."""
    model, cache = model_of(variant, kinds), None
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 27, generator=g) < torch.tensor([[0.9], [0.5], [0.3]])).long()
    mask[2, 9:20], mask[1, :9], mask[:, 0] = 0, 0, torch.tensor([1, 0, 1])
    ids, cache = random_ids(3, 27), TitansCache(model.config)
    found = [read(model, cache, ids[:, a:b], mask=mask[:, :b]) for a, b in ((0, 9), (9, 20), (20, 27))]
    for row, logits in enumerate(torch.cat(found, dim=1)):
        real = mask[row].bool()
        assert_close(logits[real], read_whole(model, ids[row : row + 1, real])[0], EXACT)


@mixed
@both
@pytest.mark.parametrize("removed", [1, 7, REWIND])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been_read(variant, kinds, removed):
    model, ids, more = model_of(variant, kinds), random_ids(2, 90), random_ids(2, 8, seed=1)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, [3, 50, 85]] = 0
    cache, expected = TitansCache(model.config), TitansCache(model.config)
    for start in range(0, 90, 30):
        read(model, cache, ids[:, start : start + 30], mask=mask[:, : start + 30])
    read(model, expected, ids[:, :-removed], mask=mask[:, :-removed])
    cache.crop(-removed)
    assert_close(read(model, cache, more), read(model, expected, more), EXACT)


def test_cropping_gives_back_what_full_attention_kept():
    model, cache = model_of("mag", "full attention first"), TitansCache(tiny_config("mag"))
    cache = TitansCache(model.config)
    read(model, cache, random_ids(2, 40))
    for _ in range(30):  # drafts of which all but one are refused
        read(model, cache, random_ids(2, 6))
        cache.crop(-5)
    assert cache.layers[0].carry.tails["keys"].size == 70


@mixed
@both
def test_rows_can_be_reordered_repeated_and_chosen(variant, kinds):
    model, ids, more = model_of(variant, kinds), random_ids(3, 19), random_ids(3, 5, seed=1)
    mask = torch.ones(3, 19, dtype=torch.long)
    mask[1, :6] = 0
    mask[2, 11:] = 0
    for act, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = TitansCache(model.config)
        read(model, cache, ids, mask=mask)
        act(cache)
        expected = TitansCache(model.config)
        read(model, expected, ids[rows], mask=mask[rows])
        new = more[: len(rows)] if len(rows) <= 3 else more.repeat(2, 1)
        assert_close(read(model, cache, new), read(model, expected, new), EXACT)


@mixed
@both
def test_a_clone_and_a_reset_cache_are_apart_from_what_is_read_on(variant, kinds):
    model, ids, more = model_of(variant, kinds), random_ids(2, 13), random_ids(2, 4, seed=1)
    cache = TitansCache(model.config, rewind=False)
    for token in ids.split(1, dim=1):
        read(model, cache, token)
    twin = cache.clone()
    first = read(model, cache, more[:, :1]), read(model, cache, more[:, 1:])
    assert_close(read(model, twin, more), torch.cat(first, dim=1), EXACT)
    cache.reset()
    assert_close(read(model, cache, ids), read_whole(model, ids), EXACT)


@mixed
@both
@pytest.mark.parametrize("rewind", [True, False])
def test_a_snapshot_goes_on_where_it_was_saved(variant, kinds, rewind, tmp_path):
    model, ids, more = model_of(variant, kinds), random_ids(2, 33), random_ids(2, 5, seed=1)
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[0, :8] = 0
    cache = TitansCache(model.config, rewind)
    read(model, cache, ids, mask=mask)
    cache.save(tmp_path / "x.safetensors", model)
    loaded = TitansCache.load(tmp_path / "x.safetensors", model)
    if rewind:
        for each in (cache, loaded):
            each.crop(-3)
    assert torch.equal(read(model, loaded, more), read(model, cache, more))


def test_a_snapshot_with_fewer_keys_than_tokens_is_refused(tmp_path):
    model, path = model_of("mag", "full attention first"), tmp_path / "x.safetensors"
    cache = TitansCache(model.config)
    read(model, cache, random_ids(1, 33))
    for name in ("keys", "values"):
        tail = cache.layers[0].carry.tails[name]
        cache.layers[0].carry.tails[name] = tail.without_last(torch.tensor([2]))
    cache.save(path, model)
    with pytest.raises(ValueError, match="damaged: 'layers.0.tails.keys'"):
        TitansCache.load(path, model)
    other = model_of("mag", "full attention first", full_attention_layers=[1])
    with pytest.raises(ValueError, match="full_attention_layers="):
        TitansCache.load(path, other)


@mixed
@both
def test_greedy_with_drafts_and_beams_equal_those_without_a_cache(variant, kinds):
    model, ids = model_of(variant, kinds, eos_token_id=None), random_ids(1, 9)
    settings = {"max_new_tokens": 14, "do_sample": False}
    greedy = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), greedy)
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **settings), greedy)
    assert torch.equal(model.generate(ids, use_cache=False, **settings), greedy)
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*beams)


@mixed
@both
def test_packed_documents_are_read_apart(variant, kinds):
    model, parts = model_of(variant, kinds), [random_ids(1, n, seed=n) for n in (9, 2, 14)]
    places = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        packed = model(torch.cat(parts, dim=1), position_ids=places, use_cache=False).logits
    assert_close(packed, torch.cat([read_whole(model, part) for part in parts], dim=1), EXACT)


@both
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_attention_implementations_agree(variant, implementation):
    model, ids = model_of(variant, "all kinds"), random_ids(2, 16)
    expected = read_whole(model, ids)
    model.set_attn_implementation(implementation)
    found = read_whole(model.float() if implementation == "flex_attention" else model, ids)
    assert_close(found.double(), expected, 1e-5 if implementation == "flex_attention" else EXACT)


@both
def test_flash_attention_agrees(variant, monkeypatch):
    model, ids = model_of(variant, "as in a graft"), random_ids(2, 16)
    expected = read_whole(model, ids)
    take_flash_attention(model, monkeypatch)
    cache = TitansCache(model.config)
    found = [read(model, cache, part) for part in ids.split([3, 9, 4], dim=1)]
    assert_close(torch.cat(found, dim=1), expected, EXACT)


@both
def test_full_attention_takes_long_inputs_piece_by_piece(variant, monkeypatch):
    """The same as at once, with a past, padding and persistent tokens."""
    model, ids, mask = model_of(variant, "all kinds"), random_ids(2, 41), torch.ones(2, 41, dtype=torch.long)
    mask[0, :5], mask[1, 30:33] = 0, 0
    found = []
    for size in (1024, 4):
        monkeypatch.setattr("titans_hf.attention_titans.PIECE", size)
        cache = TitansCache(model.config)
        parts = [read(model, cache, ids[:, a:b], mask=mask[:, :b]) for a, b in ((0, 18), (18, 41))]
        found.append(torch.cat(parts, dim=1))
    assert_close(found[1], found[0], EXACT)


@both
def test_generating_with_a_static_cache_is_generating_without(variant):
    model, ids = model_of(variant, "memory in the last"), random_ids(2, 9)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), model.generate(ids, **settings))


@mixed
def test_gradients_reach_every_parameter_that_is_used(kinds):
    model, ids = model_of("mag", kinds).train(), random_ids(2, 17)
    model(ids, labels=ids).loss.backward()
    unused = {name for name, x in model.named_parameters() if x.grad is None or not x.grad.any()}
    assert not {name for name in unused if "memory.start" not in name and "k_proj.bias" not in name}


def test_only_full_attention_grows_and_only_for_its_layers():
    model = model_of("mag", "all kinds")
    sizes = []
    for tokens in (100, 300):
        cache = TitansCache(model.config)
        for part in random_ids(1, tokens).split(50, dim=1):
            read(model, cache, part)
        sizes.append([sum(x.nbytes for x in layer.tensors()) for layer in cache.layers])
    assert [after > before for before, after in zip(*sizes)] == [True, True, False, False]


@pytest.mark.parametrize("rewind", [True, False])
def test_info_tells_what_grows_apart_from_what_does_not(rewind):
    model = model_of("mag", "all kinds")
    facts, cache = describe(model.config, torch.float64), TitansCache(model.config, rewind)
    read(model, cache, random_ids(1, 100))
    growing = [layer.carry.parts()["full attention"] for layer in cache.layers]
    constant = cache.nbytes - sum(growing)
    assert facts["cache_bytes_with_rewind" if rewind else "cache_bytes"] == constant
    kept = sum(x.values.nbytes for layer in cache.layers[:2] for x in layer.carry.tails.values())
    assert facts["cache_bytes_per_token"] == kept // 100
    assert (facts["memory_layers"], facts["full_attention_layers"]) == ([1, 3], [0, 1])
    memory = sum(x.nbytes for i in (1, 3) for x in (*model_state(cache, i).weights, *model_state(cache, i).momentum))
    assert facts["memory_state_bytes"] == {"per_layer": memory // 2, "all": memory}


def model_state(cache: TitansCache, layer: int):
    return cache.layers[layer].carry.memory


def test_a_model_without_memories_can_be_described_but_not_traced():
    model = model_of("mag", "no memory")
    facts = describe(model.config, torch.float32)
    assert facts["memory_state_bytes"] == {"per_layer": 0, "all": 0}
    assert facts["kernels"] == {"here": "none", "why": "no layer has a memory"}
    with pytest.raises(ValueError, match="`memory_layers` is empty"):
        model.trace_surprise(random_ids(1, 5))


@pytest.mark.parametrize("rewind", [True, False])
def test_a_memory_is_put_back_where_there_is_one(rewind):
    """As evaluation does between segments: what the memories hold goes, what attention sees stays."""
    model, cache, start = model_of("mag", "all kinds"), None, None
    cache, start = TitansCache(model.config, rewind), TitansCache(model.config, rewind)
    for each, ids in ((cache, random_ids(1, 30)), (start, random_ids(1, 1))):
        read(model, each, ids)
    seen = [layer.carry.tails["keys"].values.clone() for layer in cache.layers]
    put_back(cache, start)
    for layer, kept, other in zip(cache.layers, seen, start.layers, strict=True):
        assert torch.equal(layer.carry.tails["keys"].values, kept)
        if layer.carry.own is not None:
            assert all(map(torch.equal, layer.carry.memory.weights, other.carry.memory.weights))
    with pytest.raises(ValueError, match="cropped" if not rewind else "go back 0"):
        cache.crop(-1)


def test_a_trace_has_the_layers_with_a_memory():
    assert model_of("mag", "all kinds").trace_surprise(random_ids(1, 12)).surprise.shape == (2, 3, 12)


def test_some_layers_make_a_configuration_of_their_own():
    config = tiny_config("mag", num_hidden_layers=5, memory_layers=[1, 4], full_attention_layers=[3])
    small = only_layers(config, [3, 4])
    assert (small.num_hidden_layers, small.memory_layers, small.full_attention_layers) == (2, [1], [0])
    assert config.memory_layers == [1, 4]


def test_a_plan_counts_layer_by_layer():
    config = tiny_config("mag", sliding_window=64)
    wide, full = (attention_flops(x, 64, half=True) for x in (config, only_full(tiny_config("mag", sliding_window=8))))
    assert wide == full > attention_flops(tiny_config("mag", sliding_window=8), 64, half=True)
    assert 2 * memory_flops(tiny_config("mag", memory_layers=[1])) == memory_flops(config)


def only_full(config: TitansConfig) -> TitansConfig:
    return TitansConfig.from_dict({**config.to_dict(), "full_attention_layers": [0, 1]})


@pytest.mark.parametrize("field", ["memory_layers", "full_attention_layers", "rotary_layers"])
@pytest.mark.parametrize("layers", [[2], [-1], [1, 0], [0, 0]])
def test_layer_numbers_that_cannot_be_are_refused_by_name(field, layers):
    with pytest.raises(ValueError, match=f"`{field}` must be rising layer numbers from 0 to 1"):
        tiny_config("mag", **{field: layers})


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_full_attention_has_no_rotation_that_is_scaled_for_a_window(rope_type):
    scaled = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=f"`full_attention_layers` cannot have rotary positions of type '{rope_type}'"):
        tiny_config("mag", full_attention_layers=[0], rope_parameters=scaled)


def test_a_preset_takes_layer_lists():
    config = TitansConfig.preset("titans-mag-170m", memory_layers=[3, 11], full_attention_layers=[0])
    facts, all_layers = describe(config, torch.float32), describe(TitansConfig.preset("titans-mag-170m"), torch.float32)
    assert facts["memory_state_bytes"]["all"] * 6 == all_layers["memory_state_bytes"]["all"]
    assert facts["parameters"]["all"] < all_layers["parameters"]["all"]


@pytest.mark.parametrize("variant", ["mac", "lmm"])
def test_layers_differ_in_mag_and_mal_only(variant):
    with pytest.raises(ValueError, match="`memory_layers` is for mag and mal, and `variant` is"):
        tiny_config(variant, memory_layers=[0])


def test_layer_lists_are_saved_and_older_files_have_none():
    config = tiny_config("mag", memory_layers=[1], full_attention_layers=[0])
    again = TitansConfig.from_dict(config.to_dict())
    assert (again.memory_layers, again.full_attention_layers) == ([1], [0])
    older = {name: x for name, x in config.to_dict().items() if name not in ("memory_layers", "full_attention_layers")}
    assert TitansConfig.from_dict(older).memory_layers is None


def test_a_static_cache_is_refused_where_the_cache_must_grow():
    model, ids = model_of("mag", "full attention first"), random_ids(1, 5)
    with pytest.raises(ValueError, match="full_attention_layers"):
        model.generate(ids, cache_implementation="static", max_new_tokens=3)
    with pytest.raises(ValueError, match="a static cache cannot grow"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))


@mixed
def test_a_dynamic_cache_of_the_configuration_holds_it_too(kinds):
    model, ids = model_of("mag", kinds), random_ids(2, 12)
    cache = DynamicCache(config=model.config)
    found = [read(model, cache, part) for part in ids.split(5, dim=1)]
    assert_close(torch.cat(found, dim=1), read_whole(model, ids), EXACT)


def test_a_static_cache_holds_layers_without_a_memory():
    model, ids = model_of("mag", "memory in the last"), random_ids(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = [read(model, cache, part) for part in ids.split(5, dim=1)]
    assert_close(torch.cat(found, dim=1), read_whole(model, ids), EXACT)
