"""Every way of generating equals reading the whole text again for every token."""

from threading import Thread

import pytest
import torch
import transformers
from packaging.version import Version
from support import (
    assert_close,
    chat_tokenizer,
    every_variant,
    hang_on_memory,
    random_ids,
    take_flash_attention,
    tiny_model,
)
from transformers import (
    CompileConfig,
    DynamicCache,
    StaticCache,
    TextIteratorStreamer,
)

from titans_hf import TitansCache
from titans_hf.cache_titans import TitansCacheLayer

GREEDY = dict(do_sample=False, eos_token_id=None)
drafts_are_tracked = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"),
    reason="transformers 5.15.1 lets a draft's cache run ahead of the text when tokens are rejected, Llama's too",
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def left_padded():
    """Three prompts of 6, 10 and 3 tokens, padded on the left, and their mask."""
    ids = random_ids(3, 10)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :7] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask


@every_variant
def test_greedy_generation_with_and_without_cache_and_padding_agree(variant):
    model, (ids, mask) = tiny_model(variant), left_padded()
    options = dict(max_new_tokens=12, **GREEDY)
    together = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(together, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    for row, real, found in zip(ids, mask.bool(), together, strict=True):
        assert torch.equal(model.generate(row[real][None], **options)[0, real.sum() :], found[10:])


@every_variant
def test_generation_goes_on_from_a_right_padded_prompt(variant):
    """A row's first new token follows its last real one, wherever its padding stands."""
    model, (ids, mask) = tiny_model(variant), left_padded()
    options = dict(max_new_tokens=8, **GREEDY)
    expected = model.generate(ids, attention_mask=mask, **options)[:, 10:]
    rows = [torch.cat((row[real], row[~real])) for row, real in zip(ids, mask.bool(), strict=True)]
    prompt = dict(input_ids=torch.stack(rows), attention_mask=mask.flip(1))
    for how in ({}, dict(use_cache=False), dict(prefill_chunk_size=3), dict(cache_implementation="static")):
        found = model.generate(**prompt, **how, disable_compile=True, **options)[:, 10:]
        assert torch.equal(found, expected), how


@every_variant
@pytest.mark.parametrize("sampled", [False, True])
def test_sampling_and_its_returned_sequences_do_not_depend_on_the_cache(variant, sampled):
    """Sampling, beam search and beam sampling, several sequences per prompt, with and without a cache."""
    model, (ids, mask) = tiny_model(variant), left_padded()
    found = {}
    for beams in (1, 4):
        if beams == 1 and not sampled:
            continue
        for use_cache in (True, False):
            torch.manual_seed(3)
            found[use_cache] = model.generate(
                ids,
                attention_mask=mask,
                num_beams=beams,
                num_return_sequences=2,
                do_sample=sampled,
                top_k=0 if sampled else None,
                max_new_tokens=9,
                eos_token_id=None,
                use_cache=use_cache,
            )
        assert found[True].shape == (6, 19)
        assert torch.equal(found[True], found[False])


@every_variant
def test_beam_search_takes_each_beam_with_its_memory(variant, monkeypatch):
    """And this prompt tells: with memories that stay behind, the beams have other scores."""
    model, ids = hang_on_memory(tiny_model(variant)), random_ids(2, 10)
    options = dict(max_new_tokens=12, num_beams=4, return_dict_in_generate=True, output_scores=True, **GREEDY)
    expected = model.generate(ids, use_cache=False, **options)
    for how in ({}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(ids, **how, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(found.sequences_scores, expected.sequences_scores, 1e-5)
    monkeypatch.setattr(TitansCacheLayer, "reorder_cache", lambda self, beam_idx: None)
    left_behind = model.generate(ids, **options)
    assert not torch.allclose(left_behind.sequences_scores, expected.sequences_scores, atol=1e-3)


@every_variant
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_prompt_read_in_chunks_is_the_same_prompt(variant, chunk):
    model, (ids, mask) = tiny_model(variant), left_padded()
    options = dict(attention_mask=mask, max_new_tokens=7, **GREEDY)
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=chunk, **options), expected)


def assistant_of(variant: str):
    """A model that writes some of the tokens that `tiny_model(variant)` writes."""
    assistant = tiny_model(variant)
    for parameter in assistant.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return assistant


@every_variant
def test_assisted_decoding_and_prompt_lookup_equal_greedy(variant):
    """Far beyond what the cache's log holds, with an assistant that is right only some of the time."""
    model, assistant, ids = tiny_model(variant), assistant_of(variant), random_ids(1, 40)
    options = dict(max_new_tokens=120, **GREEDY)
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), greedy)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), greedy)


@every_variant
@pytest.mark.parametrize("prompt_length", [11, 150])
def test_attention_maps_with_a_draft_are_those_of_each_token_alone(variant, prompt_length):
    """A prompt of 150 tokens is one that a cache reads in two passes, unless maps are wanted."""
    model, ids = tiny_model(variant, attn_implementation="eager"), random_ids(1, prompt_length)
    asked = dict(max_new_tokens=9, return_dict_in_generate=True, output_attentions=True, **GREEDY)
    drafts = (dict(assistant_model=tiny_model(variant)), dict(prompt_lookup_num_tokens=3), dict(assistant_early_exit=1))
    for how in drafts:
        found = model.generate(ids, output_hidden_states=True, **how, **asked)
        assert torch.equal(found.sequences, model.generate(ids, max_new_tokens=9, **GREEDY))
        assert len(found.attentions) == len(found.hidden_states) == 9
        cache = TitansCache(model.config)
        parts = found.sequences[:, :-1].split([prompt_length, *[1] * 8], dim=1)
        for part, maps, states in zip(parts, found.attentions, found.hidden_states, strict=True):
            alone = model(part, past_key_values=cache, output_attentions=True, output_hidden_states=True)
            assert_close(states[-1], alone.hidden_states[-1], 1e-9)
            assert (maps is None) == (alone.attentions is None) == (variant == "lmm")
            for one, other in zip(maps or (), alone.attentions or (), strict=True):
                assert_close(one, other, 1e-9)
                assert_close(one.sum(-1), torch.ones_like(one[..., 0]), 1e-9)


def test_attention_maps_are_refused_where_the_tokens_depend_on_the_assistant():
    model, ids = tiny_model("mag", attn_implementation="eager"), random_ids(1, 11)
    options = dict(max_new_tokens=9, assistant_model=model, assistant_ensemble_weight=0.5, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="`output_attentions` leaves out the assistant"):
        model.generate(ids, output_attentions=True, **options, **GREEDY)
    assert len(model.generate(ids, **options, **GREEDY).sequences[0]) == 20


@drafts_are_tracked
def test_drafts_are_no_longer_than_the_cache_can_take_back():
    model, assistant, ids = tiny_model("lmm"), assistant_of("lmm"), random_ids(1, 150)
    options = dict(max_new_tokens=100, **GREEDY)
    greedy = model.generate(ids, **options)
    assistant.generation_config.update(
        num_assistant_tokens=100, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), greedy)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=100, **options), greedy)


@drafts_are_tracked
@every_variant
def test_early_exit_equals_greedy(variant):
    model, ids = tiny_model(variant), random_ids(1, 40)
    options = dict(max_new_tokens=100, **GREEDY)
    assert torch.equal(model.generate(ids, assistant_early_exit=1, **options), model.generate(ids, **options))


@every_variant
def test_generation_goes_on_from_a_cache_of_tokens_it_is_not_given(variant):
    """With a mask over everything read, the question alone suffices: the book is in the memory."""
    model, book, question = tiny_model(variant), random_ids(1, 40), random_ids(1, 5, seed=1)
    options = dict(max_new_tokens=6, **GREEDY)
    expected = model.generate(torch.cat((book, question), dim=1), **options)[:, 40:]
    cache = model(book, use_cache=True).past_key_values
    mask = torch.ones(1, cache.get_seq_length() + question.shape[1])
    assert torch.equal(model.generate(question, attention_mask=mask, past_key_values=cache, **options), expected)


@every_variant
@pytest.mark.parametrize("make_cache", [TitansCache, lambda config: DynamicCache(config=config)])
def test_a_conversation_goes_on_with_the_cache_of_its_last_turn(variant, make_cache):
    """Each turn adds several tokens to the whole conversation's ids; the cache has read the rest but for one token."""
    model = tiny_model(variant)
    options = dict(max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
    conversation, cache = random_ids(2, 7), make_cache(model.config)
    for turn in range(3):
        expected = model.generate(conversation, use_cache=False, **options).sequences
        answer = model.generate(conversation, past_key_values=cache, **options)
        assert torch.equal(answer.sequences, expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
        conversation = torch.cat((expected, random_ids(2, 5, seed=turn)), dim=1)


@every_variant
def test_padding_behind_a_row_that_has_ended_leaves_its_memory(variant):
    """generate pads rows that end early, and reads the padding; the next turn's mask takes it back."""
    model, ids = tiny_model(variant), random_ids(3, 7)
    free = model.generate(ids, max_new_tokens=9, **GREEDY)[:, 7:]
    stop = int(free[0, 2])  # the first row ends at the latest after three tokens
    options = dict(max_new_tokens=9, do_sample=False, eos_token_id=stop, pad_token_id=0)
    cache = TitansCache(model.config)
    first = model.generate(ids, past_key_values=cache, **options)
    ended = (first[:, 7:] == stop).cumsum(1) - (first[:, 7:] == stop).long() > 0  # behind the row's end
    assert ended.any()
    assert not ended.all(1).any()
    conversation = torch.cat((first, random_ids(3, 4, seed=1)), dim=1)
    mask = torch.cat((torch.ones(3, 7), ~ended, torch.ones(3, 4)), dim=1).long()
    options = dict(attention_mask=mask, max_new_tokens=5, **GREEDY)
    expected = model.generate(conversation, use_cache=False, **options)
    assert torch.equal(model.generate(conversation, past_key_values=cache, **options), expected)


def test_a_mask_that_hides_other_tokens_of_the_past_is_refused():
    model, ids = tiny_model("mag"), random_ids(2, 12)
    for make_cache in (TitansCache, lambda config: StaticCache(config=config, max_cache_len=20)):
        cache = make_cache(model.config)
        model(ids[:, :9], past_key_values=cache)
        mask = torch.ones_like(ids)
        mask[0, 3] = 0
        with pytest.raises(ValueError, match="`attention_mask` hides tokens"):
            model(ids[:, 9:], attention_mask=mask, past_key_values=cache)
        assert int(cache.get_seq_length()) == 9


@every_variant
def test_generation_from_embeddings_equals_generation_from_ids(variant):
    model, (ids, mask) = tiny_model(variant), left_padded()
    options = dict(attention_mask=mask, max_new_tokens=8, **GREEDY)
    expected = model.generate(ids, **options)[:, 10:]
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected)
    assert torch.equal(model.generate(inputs_embeds=embeds, use_cache=False, **options), expected)


@every_variant
def test_logits_are_kept_for_the_positions_asked_for(variant):
    model, ids = tiny_model(variant), random_ids(2, 9)
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:], 1e-12)
    places = torch.tensor([1, 4, 8])
    assert_close(model(ids, logits_to_keep=places).logits, whole[:, places], 1e-12)
    scores = model.generate(ids, max_new_tokens=3, output_logits=True, return_dict_in_generate=True, **GREEDY).logits
    assert_close(scores[0], whole[:, -1].float(), 1e-5)


@every_variant
def test_a_streamer_and_a_stop_string_see_the_text_as_it_is_written(variant):
    tokenizer = chat_tokenizer()
    model = tiny_model(variant, torch.float32, vocab_size=len(tokenizer))
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz").input_ids
    inputs = tokenizer("What is written is ", return_tensors="pt")
    options = dict(max_new_tokens=16, prefix_allowed_tokens_fn=lambda row, ids: letters, **GREEDY)
    whole = tokenizer.decode(model.generate(**inputs, **options)[0])
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    writer = Thread(target=model.generate, kwargs=dict(**inputs, streamer=streamer, **options))
    writer.start()
    assert "".join(streamer) == whole
    writer.join()
    stop = whole[-10:-8]
    stopped = tokenizer.decode(model.generate(**inputs, stop_strings=[stop], tokenizer=tokenizer, **options)[0])
    assert stopped == whole[: whole.index(stop, len("What is written is ")) + 2]


@every_variant
def test_a_chat_template_feeds_generate(variant):
    tokenizer = chat_tokenizer()
    model = tiny_model(variant, torch.float32, vocab_size=len(tokenizer))
    chats = [[{"role": "user", "content": text}] for text in ("hello", "what is a memory?")]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    assert (inputs.attention_mask == 0).any()
    together = model.generate(**inputs, max_new_tokens=6, **GREEDY)
    for chat, found in zip(chats, together, strict=True):
        alone = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert torch.equal(model.generate(**alone, max_new_tokens=6, **GREEDY)[0, -6:], found[-6:])


def compiled(backend: str) -> CompileConfig:
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless told
    return config


def check_compiled_generation(variant: str, backend: str, padded: bool, **fields) -> None:
    """Equal to the default cache, in one graph that is compiled once, whatever the length of the prompt."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(variant, torch.float32, **{"num_hidden_layers": 1, **fields})
    options = dict(max_new_tokens=14, **GREEDY)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in (random_ids(2, 8), random_ids(2, 13, seed=1)):
            mask = torch.ones_like(ids)
            mask[0, : 3 if padded else 0] = 0
            prompt = dict(input_ids=ids, attention_mask=mask)
            static = model.generate(
                **prompt, cache_implementation="static", compile_config=compiled(backend), **options
            )
            assert torch.equal(static, model.generate(**prompt, **options))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


PADDED = {"mac": True, "mag": False, "mal": True, "lmm": False}  # the other half is slow


@pytest.mark.parametrize(
    "variant, padded",
    [
        pytest.param(variant, padded, marks=() if padded == ordinary else pytest.mark.slow)
        for variant, ordinary in PADDED.items()
        for padded in (False, True)
    ],
)
def test_generate_compiles_the_decode_step_once(variant, padded):
    check_compiled_generation(variant, "eager", padded)


@pytest.mark.parametrize("layers", [[], [1]], ids=["no memory", "memory in the last"])
def test_generate_compiles_the_decode_step_of_layers_that_differ_once(layers):
    check_compiled_generation("mag", "eager", padded=True, num_hidden_layers=2, memory_layers=layers)


@pytest.mark.slow
@every_variant
def test_generate_compiles_the_decode_step_once_with_inductor(variant):
    check_compiled_generation(variant, "inductor", padded=False)


@every_variant
def test_generation_with_a_static_cache_equals_the_default(variant):
    model, (ids, mask) = tiny_model(variant), left_padded()
    options = dict(attention_mask=mask, max_new_tokens=9, disable_compile=True, **GREEDY)
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, **options))


@pytest.mark.parametrize("use_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_model_takes_inputs_of_any_length(use_cache):
    model, ids = tiny_model("lmm", num_hidden_layers=1), random_ids(2, 12)
    torch._dynamo.reset()
    compiled_model = torch.compile(model, backend="eager")
    for length in (12, 7, 9):
        logits = compiled_model(ids[:, :length], use_cache=use_cache).logits
        assert_close(logits, model(ids[:, :length]).logits, 1e-9)
    torch._dynamo.reset()


def check_compiled_steps(model, expected_from) -> None:
    """Traced whole, with no Python number that depends on the data; equal to eager, over chunk and segment borders."""
    ids = random_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = expected_from(ids, attention_mask=mask, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for place in range(5, 16):
        logits = step(ids[:, place : place + 1], past_key_values=cache).logits
        assert_close(logits, expected[:, place : place + 1], 1e-9)


@every_variant
def test_a_compiled_decode_step_with_a_static_cache_is_one_graph(variant):
    model = tiny_model(variant, num_hidden_layers=1)
    check_compiled_steps(model, expected_from=model)


@pytest.mark.parametrize("variant", ["mag", "mal"])
def test_a_compiled_decode_step_takes_flash_attention(variant, monkeypatch):
    """From a prompt that is shorter than the window, so that slots are still empty, until all of them are filled."""
    model, plain = (
        tiny_model(variant, num_hidden_layers=1, num_persistent_tokens=0, sliding_window=7) for _ in range(2)
    )
    take_flash_attention(model, monkeypatch)
    check_compiled_steps(model, expected_from=plain)


@every_variant
def test_what_cannot_hold_a_memory_is_refused_at_once(variant):
    model, ids = tiny_model(variant, torch.float32), random_ids(2, 8)
    for refused, message in (
        (dict(cache_implementation="quantized"), "cache_implementation='quantized'"),
        (dict(cache_implementation="offloaded"), "cache_implementation='offloaded'"),
        (dict(past_key_values=DynamicCache()), "past_key_values"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=3, **refused)
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([[1, 2, 3], [4, 5]])
    with pytest.raises(ValueError, match="static Titans cache cannot be cropped|assisted"):
        model.generate(ids[:1], assistant_model=model, cache_implementation="static", max_new_tokens=3)
