"""The cache: constant in size, independent in each row, exact after a crop; what it cannot do is an error."""

import copy

import pytest
import torch
from support import assert_close, every_variant, random_ids, tiny_config, tiny_model
from transformers import DynamicCache, StaticCache

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def read(model, ids, cache, **kwargs):
    return model(ids, past_key_values=cache, **kwargs).logits


@every_variant
def test_forward_and_generate_create_and_return_a_titans_cache(variant):
    model, ids = tiny_model(variant), random_ids(2, 7)
    assert isinstance(model(ids, use_cache=True).past_key_values, TitansCache)
    assert model(ids, use_cache=False).past_key_values is None
    output = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, do_sample=False, eos_token_id=None)
    assert isinstance(output.past_key_values, TitansCache)
    assert output.past_key_values.get_seq_length() == 9


@every_variant
def test_bytes_do_not_grow_with_the_length_read(variant):
    model = tiny_model(variant, torch.float32)
    cache, sizes = TitansCache(model.config), set()
    for piece in (1, 1, 5, 200, 1, 64, 130, 7, 1000):
        read(model, random_ids(2, piece), cache)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1


@every_variant
def test_rows_can_be_reordered_repeated_and_selected(variant):
    """What follows depends on each row's own memory alone, so picking rows of the cache picks rows of the future."""
    model, ids, more = tiny_model(variant), random_ids(3, 17), random_ids(6, 9, seed=2)
    order = torch.tensor([2, 0, 0, 1, 2, 2])
    expected = model(torch.cat((ids[order], more), dim=1), use_cache=False).logits[:, 17:]

    reordered = model(ids, use_cache=True).past_key_values
    reordered.reorder_cache(order)
    assert_close(read(model, more, reordered), expected, 1e-9)

    repeated = model(ids, use_cache=True).past_key_values
    repeated.batch_repeat_interleave(2)
    repeated.batch_select_indices(torch.tensor([4, 0, 1, 2, 5, 4]))
    assert_close(read(model, more, repeated), expected, 1e-9)
    repeated.crop(-9)
    assert_close(read(model, more, repeated), expected, 1e-9)


@every_variant
def test_reset_goes_back_to_the_learned_start(variant):
    model, ids = tiny_model(variant), random_ids(2, 13)
    cache = TitansCache(model.config)
    first = read(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(read(model, ids, cache), first, 0.0)
    cache.crop(-13)
    assert_close(read(model, ids, cache), first, 0.0)


@every_variant
def test_a_clone_is_independent_and_a_cache_moves(variant):
    model, ids = tiny_model(variant), random_ids(2, 13)
    cache = model(ids, use_cache=True).past_key_values
    twin = copy.deepcopy(cache.clone().to("cpu"))
    expected = read(model, ids, cache)
    assert cache.get_seq_length() == 26
    assert twin.get_seq_length() == 13
    twin.crop(-2)
    assert_close(read(model, torch.cat((ids[:, -2:], ids), dim=1), twin)[:, 2:], expected, 1e-9)


@every_variant
def test_caches_that_transformers_builds_from_the_config_work(variant):
    model, ids = tiny_model(variant), random_ids(2, 20)
    whole = model(ids, use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        parts = [read(model, piece, cache) for piece in ids.split([7, 1, 1, 11], dim=1)]
        assert_close(torch.cat(parts, dim=1), whole, 1e-9)
        assert int(cache.get_seq_length()) == 20
        cache.reset()
        assert_close(read(model, ids, cache), whole, 1e-9)


@every_variant
def test_read_only_answers_without_writing(variant):
    """The memory (weights, momentum, open chunk) is what it was, and answers differ from those of a writing model."""
    model, book, question = tiny_model(variant), random_ids(2, 40), random_ids(2, 11, seed=3)
    cache = model(book, use_cache=True).past_key_values
    before = [x.clone() for layer in cache.layers for x in layer.carry.memory.tensors()]
    twin = cache.clone()
    answer = read(model, question, cache, memory_read_only=True)
    after = [x for layer in cache.layers for x in layer.carry.memory.tensors()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not torch.allclose(answer, read(model, question, twin))


@every_variant
def test_read_only_in_pieces_equals_read_only_at_once_and_can_be_cropped(variant):
    model, book, question = tiny_model(variant), random_ids(2, 40), random_ids(2, 23, seed=3)
    start = model(book, use_cache=True).past_key_values
    at_once = read(model, question, start.clone(), memory_read_only=True)
    pieces, parts = start.clone(), []
    for piece in question.split([1, 9, 2, 11], dim=1):
        parts.append(read(model, piece, pieces, memory_read_only=True))
    assert_close(torch.cat(parts, dim=1), at_once, 1e-9)
    pieces.crop(-13)
    assert_close(read(model, question[:, 10:], pieces, memory_read_only=True), at_once[:, 10:], 1e-9)
    pieces.crop(-23)
    assert_close(read(model, question, pieces), read(model, question, start), 1e-9)


@every_variant
def test_gradients_flow_through_a_carried_cache(variant):
    """Two forwards and one backward give the gradients of one forward over both parts."""
    ids, found = random_ids(2, 24), []
    with torch.enable_grad():
        for pieces in ([24], [15, 9]):
            model = tiny_model(variant)
            cache = TitansCache(model.config)
            logits = torch.cat([read(model, piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
            logits.square().mean().backward()
            found.append([p.grad for p in model.parameters()])
    for whole, parts in zip(*found, strict=True):
        assert_close(parts, whole, 1e-9)


def test_crop_further_back_than_the_cache_can_is_an_error_that_changes_nothing():
    model, ids = tiny_model("mag"), random_ids(1, 150)
    cache = model(ids, use_cache=True).past_key_values
    twin = cache.clone()
    with pytest.raises(ValueError, match="cannot crop 65 tokens"):
        cache.crop(-65)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    assert_close(read(model, ids, cache), read(model, ids, twin), 0.0)


def test_a_long_pass_that_returns_attention_maps_leaves_nothing_to_crop():
    model = tiny_model("mag")
    model.set_attn_implementation("eager")
    cache = model(random_ids(1, 150), use_cache=True, output_attentions=True).past_key_values
    with pytest.raises(ValueError, match="can go back 0 of its 150"):
        cache.crop(-1)
    read(model, random_ids(1, 3), cache)
    cache.crop(-3)


def test_caches_that_do_not_fit_are_refused_by_name():
    model, ids = tiny_model("mag"), random_ids(2, 7)
    with pytest.raises(ValueError, match="cannot hold a Titans memory"):
        model(ids, past_key_values=DynamicCache())
    cache = model(ids, use_cache=True).past_key_values
    untouched = cache.clone()
    with pytest.raises(ValueError, match="holds 2 rows, but the input has 3"):
        model(random_ids(3, 7), past_key_values=cache)
    with pytest.raises(ValueError, match="`memory_chunk_size=3`"):
        tiny_model("mag", memory_chunk_size=4)(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="`variant='mag'`"):
        tiny_model("mal")(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="holds torch.float64"):
        tiny_model("mag", torch.float32)(ids, past_key_values=cache)
    assert_close(read(model, ids, cache), read(model, ids, untouched), 0.0)
    with pytest.raises(ValueError, match="only a Titans model can fill it"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)


def test_a_cache_needs_a_titans_config():
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match="TitansConfig"):
        TitansCache(LlamaConfig(num_hidden_layers=1))
    assert len(TitansCache(tiny_config("mac")).layers) == 2


@every_variant
def test_a_long_rope_s_scaling_is_the_same_for_one_token_and_for_many(variant):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    model, ids = tiny_model(variant, rope_parameters=rope), random_ids(2, 24)
    cache = TitansCache(model.config)
    expected = read(model, ids, TitansCache(model.config))
    found = [read(model, part, cache) for part in ids.split([19, 1, 1, 1, 2], dim=1)]
    assert_close(torch.cat(found, dim=1), expected, 1e-10)


@every_variant
def test_a_cache_filled_under_autocast_is_read_on(variant):
    model, cache = tiny_model(variant, torch.float32), None
    for part in random_ids(1, 190).split([150, 1, 30, 9], dim=1):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    carry = cache.layers[0].carry
    assert {tail.values.dtype for tail in (carry.own.tail, *carry.tails.values())} == {torch.float32}
    assert read(model, random_ids(1, 3), cache).isfinite().all()


def test_a_cache_does_not_share_memory_with_the_model():
    model = tiny_model("mac", torch.float32)
    cache = TitansCache(model.config)
    read(model, random_ids(1, 3), cache)
    mine = {x.untyped_storage().data_ptr() for x in model.parameters()}
    assert not mine & {x.untyped_storage().data_ptr() for layer in cache.layers for x in layer.tensors()}


@every_variant
def test_a_cache_that_took_over_a_memory_cannot_be_cropped_to_before(variant):
    """A log of the memory it had before would bring that memory back."""
    model, ids = tiny_model(variant), random_ids(2, 40)
    cache, fresh = TitansCache(model.config), TitansCache(model.config)
    read(model, ids[:, :20], cache)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=fresh, memory_read_only=True)
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        layer.take_memory_of(other)
    with pytest.raises(ValueError, match="can go back 0 of its 20 tokens"):
        cache.crop(-1)
    expected = read(model, ids[:, 20:25], cache.clone())
    read(model, ids[:, 30:33], cache)
    cache.crop(-3)
    assert_close(read(model, ids[:, 20:25], cache), expected, 1e-9)


@every_variant
def test_without_rewinding_a_cache_computes_the_same_in_fewer_bytes(variant):
    model, ids = tiny_model(variant), random_ids(2, 150)
    caches = [TitansCache(model.config, rewind=rewind) for rewind in (True, False)]
    for piece in ids.split([140, 1, 1, 8], dim=1):
        first, second = (read(model, piece, cache) for cache in caches)
        assert_close(second, first, 1e-10)
    assert caches[1].nbytes < 0.6 * caches[0].nbytes
    with pytest.raises(ValueError, match="rewind=False"):
        caches[1].crop(-1)


@every_variant
def test_generate_keeps_a_log_only_where_something_may_be_cropped(variant, monkeypatch):
    model, ids, made = tiny_model(variant), random_ids(1, 9), []
    start = TitansCache.__init__
    monkeypatch.setattr(TitansCache, "__init__", lambda self, *args: made.append(self) or start(self, *args))
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    drafted = model.generate(ids, max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2)
    returned = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(plain, drafted)
    assert torch.equal(plain, returned.sequences)
    assert [cache.layers[0].spare > 0 for cache in made] == [False, True, True]
    assert made[0].layers[0].carry.log is None
    returned.past_key_values.crop(-2)


def test_the_cache_of_a_preset_stays_within_its_bytes():
    """titans-mac-340m, 16 layers. The keys and values of a segment and its retrieved tokens are the largest part.

    Of it, 16 MiB are the memory's start, which forgetting leads to.
    """
    expected = {torch.float32: (163, 310), torch.bfloat16: (126, 257)}
    for dtype, sizes in expected.items():
        config = TitansConfig.preset("titans-mac-340m", num_hidden_layers=2, memory_implementation="torch")
        with torch.device("meta"):
            model = TitansForCausalLM(config).to(dtype)
        for rewind, size in zip((False, True), sizes, strict=True):
            cache = TitansCache(config, rewind)
            read(model, torch.zeros(1, 1, dtype=torch.long, device="meta"), cache)
            assert 16 * sum(x.nbytes for x in cache.layers[0].tensors()) / 2**20 <= size
            dtypes = {
                tail.buffer.dtype for tail in (cache.layers[0].carry.own.tail, *cache.layers[0].carry.tails.values())
            }
            assert dtypes == {dtype}


def test_drafts_with_a_cache_that_cannot_be_cropped_are_refused_before_anything_is_read():
    model, ids = tiny_model("mag", torch.float32), random_ids(1, 9)
    cache = TitansCache(model.config, rewind=False)
    assert not cache.layers[0].is_croppable
    with pytest.raises(ValueError, match="rewind=False"):
        model.generate(ids, past_key_values=cache, max_new_tokens=5, prompt_lookup_num_tokens=2)
    assert cache.get_seq_length() == 0


def test_a_cache_asked_for_another_dtype_stays_on_its_device():
    config = tiny_config("mag")
    with torch.device("meta"):
        model = TitansForCausalLM(config)
    cache = TitansCache(config)
    read(model, torch.zeros(1, 3, dtype=torch.long, device="meta"), cache)
    assert {x.device.type for layer in cache.to(torch.float64).layers for x in layer.tensors()} == {"meta"}


def test_a_crop_inside_the_open_chunk_passes_no_gradients():
    """As one further back, whose memory is computed again."""
    model, ids = tiny_model("lmm", memory_chunk_size=16), random_ids(1, 12)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    cache.crop(-2)
    assert not any(x.requires_grad for x in cache.layers[0].carry.memory.tensors())


@every_variant
def test_a_loss_with_a_cache_can_be_differentiated_by_torch_func(variant):
    model, ids = tiny_model(variant), random_ids(1, 7)
    scale = torch.ones((), dtype=torch.float64)

    def loss(scale):
        return model(inputs_embeds=scale * model.get_input_embeddings()(ids), use_cache=True).logits.square().sum()

    assert torch.func.grad(loss)(scale).isfinite()
