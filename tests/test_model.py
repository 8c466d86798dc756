"""The model as users of transformers meet it: inputs, outputs, loss, attention implementations."""

import pytest
import torch
from support import VOCAB, assert_close, every_variant, random_ids, take_flash_attention, tiny_config, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from titans_hf import TitansCache, TitansForCausalLM, TitansForSequenceClassification, TitansModel

with_attention = pytest.mark.parametrize("variant", ["mac", "mag", "mal"])
ROPE_PARAMETERS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 3},
    "longrope": {
        "factor": 3.0,
        "original_max_position_embeddings": 3,
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [2.0, 3.1, 5.3],
    },
    "llama3": {"factor": 3.0, "original_max_position_embeddings": 3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.7},
}


def roped_model(variant: str, rope_type: str):
    """A model whose `max_position_embeddings` is smaller than its window and its segment."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE_PARAMETERS[rope_type]}
    return tiny_model(variant, rope_parameters=rope, max_position_embeddings=4, attn_implementation="eager")


@every_variant
def test_loss_ignores_minus_100_and_equals_cross_entropy(variant):
    model, ids = tiny_model(variant), random_ids(2, 15)
    labels = ids.clone()
    labels[0, :9] = -100
    output = model(ids, labels=labels)
    flat = output.logits[:, :-1].float().reshape(-1, VOCAB)
    expected = torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)
    assert_close(output.loss.detach().double(), expected.detach().double(), 1e-6)


@every_variant
@torch.no_grad()
def test_logits_to_keep_and_inputs_embeds(variant):
    model, ids = tiny_model(variant), random_ids(2, 15)
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], 0.0)
    assert_close(model(ids, logits_to_keep=torch.tensor([1, 7])).logits, whole[:, [1, 7]], 0.0)
    assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole, 0.0)


@every_variant
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_hidden_states_have_the_shape_and_place_of_the_tokens(variant, padded):
    model, ids = tiny_model(variant), random_ids(2, 150)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert all(states.shape == (2, 150, 14) for states in output.hidden_states)
    assert_close(model.lm_head(output.hidden_states[-1]), output.logits, 1e-12)
    embedded = model.get_input_embeddings()(ids) * mask[..., None]
    assert_close(output.hidden_states[0] * mask[..., None], embedded, 0.0)


@torch.no_grad()
def test_a_mal_without_its_attention_is_an_lmm():
    """The memory is a layer of its own: what it says reaches the stack beside attention, not through it alone."""
    mal, lmm, ids = tiny_model("mal"), tiny_model("lmm", seed=1), random_ids(2, 17)
    lmm.load_state_dict({name: x for name, x in mal.state_dict().items() if name in lmm.state_dict()})
    assert (mal(ids).logits - lmm(ids).logits).abs().max() > 1e-3
    for layer in mal.model.layers:
        layer.mixer.attention.o_proj.weight.zero_()
    assert_close(mal(ids).logits, lmm(ids).logits, 1e-12)


@torch.no_grad()
def test_the_attention_of_a_mal_sees_its_token_and_what_the_memory_says_of_it():
    mal, ids = tiny_model("mal", num_hidden_layers=1), random_ids(1, 17)
    mixer = mal.model.layers[0].mixer
    seen = []
    mixer.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mixer.memory.register_forward_hook(lambda module, args, found: seen.append((args[0], found[0])))
    mal(ids, use_cache=False)
    *_, (x, m), attended = seen
    assert_close(attended, mixer.norm(x + m), 1e-12)


@with_attention
@torch.no_grad()
def test_attention_maps_carry_the_persistent_and_retrieved_columns(variant):
    """Rows of each map sum to one over [persistent | past | tokens], or [persistent | retrieved | segment] in mac."""
    model = tiny_model(variant)
    model.set_attn_implementation("eager")
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = 0
    cache = TitansCache(model.config)
    past = 0
    for start, stop in ((0, 13), (13, 20)):
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, output_attentions=True)
        P, C, W = 2, model.config.segment_size, model.config.sliding_window
        columns = P + 2 * C if variant == "mac" else P + past + stop - start
        assert len(output.attentions) == 2
        for weights in output.attentions:
            assert weights.shape == (2, 4, stop - start, columns)
            real = mask[:, None, start:stop].expand(2, 4, -1).bool()
            assert torch.allclose(weights.sum(-1)[real], torch.ones((), dtype=torch.float64))
            assert (weights[~real] == 0).all()
        past = W - 1
    assert tiny_model("lmm")(ids, output_attentions=True).attentions is None


@torch.no_grad()
def test_mac_attention_is_causal_within_the_segment_by_slot():
    model = tiny_model("mac")
    model.set_attn_implementation("eager")
    weights = model(random_ids(1, 17), output_attentions=True).attentions[1][0, 0]
    slot = torch.arange(17) % 6
    hidden = torch.arange(6) > slot[:, None]  # [token, slot]
    for columns in (weights[:, 2:8], weights[:, 8:14]):
        assert (columns[hidden] == 0).all()
        assert (columns[~hidden] > 0).all()


@with_attention
@torch.no_grad()
def test_attention_implementations_agree(variant):
    """Also over several windows, where sdpa works in blocks and a request for the maps takes the dense form."""
    model, ids = tiny_model(variant), random_ids(2, 33)
    assert model.config._attn_implementation == "sdpa"
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    assert_close(model(ids).logits, expected, 1e-9)
    assert_close(model(ids, output_attentions=True).logits, expected, 1e-9)


@with_attention
@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
@torch.no_grad()
def test_rotary_scaling_depends_on_no_other_call_and_no_length(variant, rope_type, tmp_path):
    """With and without the maps, whole and in pieces, a short text after a long one, and loaded from disk."""
    model, ids = roped_model(variant, rope_type), random_ids(2, 41)
    short = model(ids[:, :3]).logits
    expected = model(ids).logits
    assert_close(expected[:, :3], short, 1e-9)
    assert_close(model(ids, output_attentions=True).logits, expected, 1e-9)
    cache = TitansCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([13, 1, 1, 7, 2, 17], dim=1)]
    assert_close(torch.cat(parts, dim=1), expected, 1e-9)
    assert_close(model(ids[:, :3]).logits, short, 0.0)
    model.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    assert_close(loaded(ids).logits, expected, 1e-9)


@with_attention
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_scaling_is_for_the_positions_that_attention_spans(variant, rope_type):
    """A window of 5, or a segment of 6 with the tokens retrieved for it and 2 persistent ones: 14."""
    rotary = roped_model(variant, rope_type).model.rotary_emb
    span = 14 if variant == "mac" else 5
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](rotary.config, seq_len=span)
    assert torch.equal(rotary.inv_freq, frequencies.to(rotary.inv_freq.dtype))
    assert rotary.attention_scaling == scaling
    unscaled, _ = ROPE_INIT_FUNCTIONS[rope_type](rotary.config, seq_len=3)
    assert not torch.allclose(frequencies, unscaled)


@pytest.mark.slow
@with_attention
@torch.no_grad()
def test_flex_attention_agrees(variant):
    """Compiled by inductor, so it needs a C++ compiler; on a CPU it serves inference only, at widths of 16 and more."""
    model, ids = tiny_model(variant, torch.float32, head_dim=16), random_ids(2, 18)
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    assert_close(model(ids).logits, expected, 1e-4)


def test_attention_implementations_that_cannot_express_the_mask_are_refused():
    model = tiny_model("mac")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="num_persistent_tokens=0"):
        model(random_ids(1, 5))


@pytest.mark.parametrize("variant", ["mag", "mal"])
@torch.no_grad()
def test_flash_attention_gets_a_window_and_a_left_padding_mask(variant, monkeypatch):
    model, ids = tiny_model(variant, num_persistent_tokens=0), random_ids(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    take_flash_attention(model, monkeypatch)
    assert_close(model(ids, attention_mask=mask, use_cache=False).logits, expected, 1e-9)
    cache, parts, start = TitansCache(model.config), [], 0
    for size in (11, 1, 1, 11):
        stop = start + size
        parts.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        start = stop
    assert_close(torch.cat(parts, dim=1), expected, 1e-9)


@every_variant
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_can_be_asked_for_at_the_returned_states_and_maps(variant, padded):
    model, ids = tiny_model(variant, attn_implementation="eager").train(), random_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, 7 if padded else 11 :] = 0
    outputs = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=variant in ("mag", "mal"))
    returned = [*outputs.hidden_states[:-1], *(outputs.attentions or ())]
    for x in returned:
        x.retain_grad()
    outputs.logits.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in returned)


@every_variant
def test_autocast_leaves_the_memory_in_its_own_precision(variant):
    model, ids = tiny_model(variant, torch.float32), random_ids(2, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, labels=ids, use_cache=True)
    output.loss.backward()
    states = [layer.carry.memory for layer in output.past_key_values.layers]
    assert {x.dtype for state in states for x in state.tensors() if x.is_floating_point()} == {torch.float32}
    assert all(W.dtype == torch.float32 for state in states for W in state.current()[0])
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_variant
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it(variant):
    model, ids = tiny_model(variant), random_ids(2, 30)
    with torch.inference_mode():
        cache = model(ids[:, :12], use_cache=True).past_key_values
        cache.crop(-2)
    with torch.no_grad():
        logits = model(ids[:, 10:], past_key_values=cache).logits
        assert_close(logits, model(ids, use_cache=False).logits[:, 10:], 1e-9)


@every_variant
def test_gradient_checkpointing_gives_the_same_gradients(variant):
    found = []
    for checkpointing in (False, True):
        model, ids = tiny_model(variant).train(), random_ids(2, 20)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert_close(checkpointed, plain, 1e-9)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, past_key_values=TitansCache(model.config))


@every_variant
@torch.no_grad()
def test_classification_reads_the_last_real_token(variant):
    torch.manual_seed(0)
    model = TitansForSequenceClassification(tiny_config(variant, num_labels=3)).double().eval()
    ids = random_ids(2, 12)
    padded = torch.cat((ids, torch.zeros(2, 5, dtype=torch.long)), dim=1)
    mask = (padded > 0).long()
    logits = model(ids).logits
    assert logits.shape == (2, 3)
    assert_close(model(padded, attention_mask=mask).logits, logits, 1e-9)


@every_variant
@torch.no_grad()
def test_classification_by_the_mean_counts_real_tokens_only(variant):
    torch.manual_seed(0)
    config = tiny_config(variant, num_labels=3, classifier_pooling="mean")
    model = TitansForSequenceClassification(config).double().eval()
    ids, labels = random_ids(2, 12), torch.tensor([2, 0])
    expected = model.model(ids).last_hidden_state.mean(1) @ model.score.weight.T
    found = model(ids, labels=labels)
    assert_close(found.logits, expected, 1e-9)
    assert_close(found.loss, torch.nn.functional.cross_entropy(expected, labels), 1e-9)
    left = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids), dim=1)
    for padded in (left, left.roll(-5, dims=1)):
        assert_close(model(padded, attention_mask=(padded > 0).long()).logits, expected, 1e-9)
    embeds = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embeds).logits, expected, 1e-9)


@torch.no_grad()
def test_classification_by_the_mean_counts_exactly_in_bfloat16():
    """A number of tokens above 256 is rounded in bfloat16: 263 would count as 264."""
    model = TitansForSequenceClassification(tiny_config("lmm", num_labels=3, classifier_pooling="mean")).bfloat16()
    states, ones = torch.ones(2, 263, 14, dtype=torch.bfloat16), torch.ones(2, 263)
    real = model._real_tokens(None, ones, states)
    assert ((states * real).sum(1) / real.sum(1) == 1).all()
    assert real.sum(1).unique().item() == 263
    assert model.eval()(random_ids(2, 7)).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_classification_by_the_mean_goes_on_from_a_cache():
    torch.manual_seed(0)
    model = TitansForSequenceClassification(tiny_config("mag", num_labels=3, classifier_pooling="mean")).double().eval()
    ids, cache = random_ids(2, 11), TitansCache(model.config)
    model(ids[:, :4], past_key_values=cache)
    later = model(ids[:, 4:], attention_mask=torch.ones(2, 11), past_key_values=cache)
    assert later.past_key_values is cache
    assert_close(later.logits, model.model(ids).last_hidden_state[:, 4:].mean(1) @ model.score.weight.T, 1e-9)


@every_variant
def test_bad_input_is_refused_by_name_before_anything_is_read(variant):
    model, ids = tiny_model(variant), random_ids(2, 7)
    cache = TitansCache(model.config)
    for kwargs, field in (
        (dict(), "input_ids"),
        (dict(input_ids=ids, inputs_embeds=torch.zeros(2, 7, 14)), "input_ids"),
        (dict(input_ids=ids[:, :0]), "input_ids"),
        (dict(input_ids=ids[0]), "input_ids"),
        (dict(inputs_embeds=torch.zeros(2, 7)), "inputs_embeds"),
        (dict(inputs_embeds=torch.zeros(2, 7, 15)), "inputs_embeds"),
        (dict(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 3, 7])), "cu_seq_lens_q"),
        (dict(input_ids=ids, attention_mask=torch.ones(2, 6)), "attention_mask"),
        (dict(input_ids=ids, attention_mask=torch.ones(3, 7)), "attention_mask"),
        (dict(input_ids=ids, attention_mask=torch.ones(2, 1, 7, 7)), "attention_mask"),
        (dict(input_ids=ids, position_ids=torch.arange(6)[None]), "position_ids"),
        (dict(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)), "past_key_values"),
        (dict(input_ids=ids, seq_idx=torch.zeros(3, 7)), "seq_idx"),
    ):
        with pytest.raises(ValueError, match=f"`{field}`"):
            model(past_key_values=cache, **kwargs)
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0


def test_a_row_of_nothing_but_padding_waits_for_its_first_token():
    """It has read nothing, and starts like a fresh row when its first token comes."""
    model, ids = tiny_model("mal"), random_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(ids[:1, 5:], use_cache=False).logits
        cache = TitansCache(model.config)
        model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        actual = model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert_close(actual[:1], expected, 1e-9)


def test_the_base_model_and_the_heads_share_their_stack():
    model = tiny_model("mac")
    assert isinstance(model.model, TitansModel)
    assert isinstance(model, TitansForCausalLM)
    ids = random_ids(1, 5)
    with torch.no_grad():
        assert_close(model.lm_head(model.model(ids).last_hidden_state), model(ids).logits, 0.0)
