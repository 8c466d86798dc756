"""The configuration: presets of the right size, ablations as switches, and bad values refused by name."""

import pytest
import torch
from support import VARIANTS, random_ids, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM
from titans_hf.cache_titans import identity
from titans_hf.configuration_titans import BEFORE, MEMORY_COMBINES, NEITHER, READING, SHAPE


@pytest.mark.parametrize("size, millions", [("170m", 170), ("340m", 340), ("400m", 400), ("760m", 760)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_preset_has_the_parameters_of_its_name(variant, size, millions):
    config = TitansConfig.preset(f"titans-{variant}-{size}")
    assert config.vocab_size == 32_000
    assert config.variant == variant
    with torch.device("meta"):
        model = TitansForCausalLM(config)
    assert abs(model.num_parameters() / (millions * 1e6) - 1) < 0.03


def test_a_preset_takes_overrides_and_unknown_names_list_the_known():
    assert TitansConfig.preset("titans-mag-170m", sliding_window=64).sliding_window == 64
    with pytest.raises(ValueError, match="titans-mac-340m"):
        TitansConfig.preset("titans-mac-9b")


BAD_FIELDS = [
    ("rope_parameters", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    ("variant", dict(variant="mem")),
    ("memory_gates", dict(memory_gates="layer")),
    ("memory_implementation", dict(memory_implementation="cuda")),
    ("memory_chunk_size", dict(memory_chunk_size=4, segment_size=6)),
    ("memory_chunk_size", dict(memory_chunk_size=0)),
    ("memory_depth", dict(memory_depth=0)),
    ("num_key_value_heads", dict(num_key_value_heads=3)),
    ("head_dim", dict(head_dim=5)),
    ("num_persistent_tokens", dict(num_persistent_tokens=-1)),
    ("memory_max_surprise", dict(memory_max_surprise=0.0)),
    ("memory_theta_max", dict(memory_theta_max=0.0)),
    ("memory_forget_to", dict(memory_forget_to="end")),
    ("classifier_pooling", dict(classifier_pooling="first")),
    ("memory_write", dict(memory_write="late")),
    ("memory_step", dict(memory_step="long")),
    ("memory_hidden_step", dict(memory_hidden_step=0.0)),
    ("memory_combine", dict(memory_combine="product")),
    ("memory_alpha_start", dict(memory_alpha_start=[0.3])),
    ("memory_alpha_start", dict(memory_alpha_start=[0.3, 1.0])),
    ("memory_theta_start", dict(memory_theta_start=0.0)),
    ("memory_eta_start", dict(memory_eta_start=1.0)),
    ("mixer_initializer_scale", dict(mixer_initializer_scale=0.0)),
    ("embedding_initializer_range", dict(embedding_initializer_range=-0.1)),
    ("memory_eta_max", dict(memory_eta_max=1.0)),
    ("memory_theta_max", dict(memory_theta_max=float("nan"))),
    ("sliding_window", dict(sliding_window=0)),
    ("hidden_act", dict(hidden_act="nope")),
    ("rope_parameters", dict(rope_parameters={"rope_type": "nope", "rope_theta": 1e4})),
    ("num_attention_heads", dict(num_attention_heads=3, head_dim=None)),
]


@pytest.mark.parametrize("field, values", BAD_FIELDS, ids=[f"{field}-{i}" for i, (field, _) in enumerate(BAD_FIELDS)])
def test_a_bad_field_is_refused_by_name(field, values):
    with pytest.raises(ValueError, match=f"`{field}`"):
        tiny_config(**{"variant": "mac", **values})


def test_rope_theta_is_taken_as_in_other_models():
    assert tiny_config("mag", rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


def test_the_bound_on_theta_follows_the_chunk_unless_it_is_set():
    printed = TitansConfig(memory_chunk_size=16, memory_write="chunk")
    assert TitansConfig(memory_chunk_size=16).memory_theta_max == 0.5, "by delta, the whole value of a key"
    assert printed.memory_theta_max == 1 / 64
    assert TitansConfig(memory_chunk_size=16, memory_theta_max=0.2).memory_theta_max == 0.2
    assert TitansConfig.from_dict(printed.to_dict()).memory_theta_max == 1 / 64
    with pytest.raises(ValueError, match="`memory_theta_max` must be positive, got None: leave it out"):
        TitansForCausalLM(TitansConfig.from_dict(TitansConfig().to_dict(), memory_theta_max=None))


def test_only_mac_needs_its_chunks_to_divide_its_segments():
    for variant in ("mag", "mal", "lmm"):
        tiny_config(variant, memory_chunk_size=4, segment_size=6)


ABLATIONS = [
    dict(memory_momentum=False),
    dict(memory_forget=False),
    dict(memory_conv=False),
    dict(memory_depth=1),
    dict(num_persistent_tokens=0),
    dict(memory_gates="chunk"),
    dict(memory_forget_to="zero"),
    dict(memory_max_surprise=None),
    dict(memory_write="chunk", memory_theta_max=0.5),
    dict(memory_step="plain"),
    dict(memory_hidden_step=1.0),
    dict(memory_shared_keys=False),
    dict(memory_value_limit=False),
    dict(memory_norm_floor=0.0),
]


@pytest.mark.parametrize("switch", ABLATIONS, ids=lambda switch: next(iter(switch)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_ablation_is_a_switch_that_changes_the_model(variant, switch):
    """It runs, it saves its setting, and it is not the default model under another name."""
    ids = random_ids(2, 25)
    kwargs = dict(memory_max_surprise=0.05) if "memory_max_surprise" in switch else {}
    ablated, default = tiny_model(variant, **switch), tiny_model(variant, **kwargs)
    shared = {k: v for k, v in default.state_dict().items() if k in ablated.state_dict()}
    if "memory_depth" not in switch:
        ablated.load_state_dict(shared, strict=False)
    with torch.no_grad():
        assert not torch.allclose(ablated(ids).logits, default(ids).logits)
    name, value = next(iter(switch.items()))
    assert getattr(TitansConfig.from_dict(ablated.config.to_dict()), name) == value


@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_every_way_to_join_memory_and_attention_is_another_model_and_needs_both(variant):
    ids, found = random_ids(2, 25), {}
    for combine in MEMORY_COMBINES:
        model = tiny_model(variant, memory_combine=combine)
        with torch.no_grad():
            found[combine] = model(ids).logits
            for mixer in (layer.mixer for layer in model.model.layers):
                mixer.attention.o_proj.weight.zero_()
            assert not torch.allclose(model(ids).logits, found[combine])
    first, *others = found.values()
    assert not any(torch.allclose(first, other) for other in others)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_back_to_the_same_logits(variant, tied, tmp_path):
    model, ids = tiny_model(variant, torch.float32, tie_word_embeddings=tied), random_ids(2, 11)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is TitansForCausalLM
    assert (again.model.embed_tokens.weight is again.lm_head.weight) == tied
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_config_json_names_no_layer_type_that_other_tools_do_not_know(tmp_path):
    tiny_config("mac").save_pretrained(tmp_path)
    assert "layer_types" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path).layer_types == ["titans", "titans"]


def test_start_weights_stay_in_float32_when_a_model_is_loaded_in_half_precision(tmp_path):
    tiny_model("mag", torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    memory = model.model.layers[0].mixer.memory
    assert {W.dtype for W in memory.start.weights} == {torch.float32}
    assert memory.q_proj.weight.dtype == torch.bfloat16
    with torch.no_grad():
        output = model(random_ids(2, 9), use_cache=True)
    assert output.logits.dtype == torch.bfloat16
    state = output.past_key_values.layers[0].carry.memory
    assert {x.dtype for x in state.tensors() if x.is_floating_point()} == {torch.float32}


def test_a_fresh_model_starts_where_its_docstrings_say():
    model = TitansForCausalLM(tiny_config("mag"))
    memory = model.model.layers[0].mixer.memory
    assert (memory.write_gates.proj.weight == 0).all()
    theta, eta, alpha = memory.write_gates(torch.randn(1, 1, 14)).unbind(2)
    assert torch.allclose(eta, torch.tensor(0.09))
    assert torch.allclose(theta / (1 - eta), torch.tensor(0.25)), "half of what replaces a value"
    assert torch.allclose(alpha, torch.tensor([5e-2, 50**0.5 * 1e-4, 1e-5]), atol=1e-9), "in equal ratios"
    queries, keys, values = memory.conv.weight.chunk(3)
    first, last = memory.start.weights
    assert 0.4 < first.std() < 0.6
    assert (last == 0).all()


def test_a_single_head_starts_by_keeping_a_text():
    gates = TitansForCausalLM(tiny_config("mag", memory_num_heads=1)).model.layers[0].mixer.memory.write_gates
    assert torch.allclose(gates(torch.randn(1, 1, 14))[0, 0, 2], torch.tensor([1e-5]), atol=1e-9)


@pytest.mark.parametrize("width", [32, 96])
def test_a_fresh_model_of_any_width_says_little_and_starts_with_its_tokens(width):
    """Embeddings of length near 1 lead the residual stream; memory and attention enter it quietly."""
    model = TitansForCausalLM(tiny_config("mag", hidden_size=width, num_attention_heads=4, head_dim=8, vocab_size=500))
    embedding = model.model.embed_tokens.weight
    assert 0.9 < embedding.norm(dim=-1).square().mean() < 1.1
    mixer = model.model.layers[0].mixer
    for proj in (mixer.memory.out_proj, mixer.attention.o_proj):
        assert 0.0015 < proj.weight.std() < 0.0025


def test_without_a_convolution_keys_have_their_own_projection():
    """With one projection and no convolution a token would find itself and nothing else."""
    assert TitansForCausalLM(tiny_config("lmm")).model.layers[0].mixer.memory.k_proj is None
    assert not tiny_config("lmm", memory_conv=False).memory_shared_keys
    assert TitansForCausalLM(tiny_config("lmm", memory_conv=False)).model.layers[0].mixer.memory.k_proj is not None


def test_as_printed_is_one_argument_and_what_older_files_mean():
    printed = TitansConfig.preset("titans-mag-170m", as_printed=True)
    assert (printed.memory_write, printed.memory_step, printed.memory_max_surprise) == ("chunk", "plain", None)
    assert printed.memory_theta_max == 1 / 256
    assert TitansConfig.preset("titans-mag-170m", as_printed=True, memory_max_surprise=3.0).memory_max_surprise == 3.0
    saved = TitansConfig(memory_theta_max=0.01, memory_write="chunk", memory_step="plain").to_dict()
    for field in BEFORE:
        del saved[field]
    older = TitansConfig.from_dict(saved)
    assert {field: getattr(older, field) for field in BEFORE} == BEFORE


def test_a_fresh_mac_attends_to_itself_first():
    """Keys start as twice the queries of their group's first head; the memory's own keys, if any, as its queries."""
    mixer = TitansForCausalLM(tiny_config("mac", memory_shared_keys=False)).model.layers[1].mixer
    queries = mixer.attention.q_proj.weight.unflatten(0, (4, 6))
    assert torch.equal(mixer.attention.k_proj.weight.unflatten(0, (2, 6)), 2 * queries[[0, 2]])
    assert torch.equal(mixer.memory.k_proj.weight, mixer.memory.q_proj.weight)


def test_the_tokenizer_of_a_saved_folder_loads_without_the_package(tmp_path):
    """`AutoTokenizer` reads config.json with transformers' own classes alone."""
    import subprocess
    import sys

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tiny_model("mac", torch.float32).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    ).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("b").input_ids == [1]
    code = (
        "import sys; from transformers import AutoTokenizer as A; print(A.from_pretrained(sys.argv[1])('b').input_ids)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert found.stdout.strip().endswith("[1]"), found.stderr  # before it, transformers asks whether to trust the code


def test_every_field_says_what_a_cache_has_to_do_with_it():
    """A field of none of the three groups, or of two, could make a cache of another model compute silently wrong."""
    classified = [*SHAPE, *READING, *NEITHER]
    assert sorted(classified) == sorted(TitansConfig.__annotations__)


@pytest.mark.parametrize("field, value", [("memory_forget_to", "zero"), ("memory_gates", "chunk")])
def test_a_cache_of_another_rule_is_refused_before_it_is_read(field, value):
    first, second = tiny_model("mag"), tiny_model("mag", **{field: value})
    cache = TitansCache(first.config)
    with torch.no_grad():
        first(random_ids(1, 9), past_key_values=cache)
        before = [x.clone() for layer in cache.layers for x in layer.tensors()]
        with pytest.raises(ValueError, match=f"made for a model with `{field}="):
            second(random_ids(1, 2), past_key_values=cache)
    assert all(map(torch.equal, before, (x for layer in cache.layers for x in layer.tensors())))


@pytest.mark.parametrize("field", sorted({*SHAPE, *READING}))
def test_a_cache_is_bound_to_every_field_of_shape_and_reading(field):
    layer, mine = TitansCache(tiny_config("mag")).layers[0], identity(tiny_config("mag"))
    with pytest.raises(ValueError, match=f"`{field}="):
        layer.bind(tiny_config("mag"), {**mine, field: "something else"})
