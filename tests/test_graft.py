"""A grafted model is the model it was copied from: up to its window, and beyond it under a window's mask."""

import pytest
import torch
from support import assert_close
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.hub.graft import default_memory_layers, graft_config, graft_model

VOCAB, WINDOW, LAYERS = 31, 11, 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 34,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-3,
}
HEAD = {"head_dim": 14}


def scaled(rope_type: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5e3, "factor": 3.0, **parameters}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 23}
SOURCES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, hidden_act="gelu"),
    "llama, biases and head size": lambda: LlamaConfig(**SIZES, **HEAD, attention_bias=True, mlp_bias=True),
    "llama, linear": lambda: LlamaConfig(**SIZES, **scaled("linear")),
    "llama, llama3": lambda: LlamaConfig(**SIZES, **scaled("llama3", **LLAMA3)),
    "llama, yarn": lambda: LlamaConfig(**SIZES, **scaled("yarn", original_max_position_embeddings=23)),
    "mistral": lambda: MistralConfig(**SIZES, **HEAD, sliding_window=None),
    "mistral, own window": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, own windows": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW + 2, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEAD),
    "qwen3, biases, tied": lambda: Qwen3Config(**SIZES, **HEAD, attention_bias=True, tie_word_embeddings=True),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 1, 0], attention_bias=True),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
every_source = pytest.mark.parametrize("name", SOURCES)
every_family = pytest.mark.parametrize("name", FAMILIES)
both = pytest.mark.parametrize("variant", ["mag", "mal"])


def source_of(name: str, seed: int = 0) -> PreTrainedModel:
    """A small model of the family in which every parameter matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(SOURCES[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def graft_of(source: PreTrainedModel, variant: str = "mag", **options) -> TitansForCausalLM:
    options = {"window": WINDOW, "memory_chunk_size": 4, **options}
    return graft_model(source, graft_config(source.config, variant, **options))


def ids_of(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def windowed(source: PreTrainedModel, ids: Tensor, window: int = WINDOW, full: tuple[int, ...] = ()) -> Tensor:
    """The source's logits where all layers but the full ones see a window, by a mask put into every attention."""
    place = torch.arange(ids.shape[1])
    distance = place[:, None] - place
    masks = [(distance >= 0) & (distance < (ids.shape[1] if i in full else window)) for i in range(LAYERS)]
    hooks = []
    for layer, visible in zip(source.model.layers, masks, strict=True):
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]

        def put(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    try:
        return source(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Equal relative to the largest logit, which is at least 1 in these models."""
    assert expected.abs().max() > 1
    assert_close(found, expected, tolerance)


@torch.no_grad()
def read(model: TitansForCausalLM, ids: Tensor, pieces: list[int], rewind: bool = True) -> tuple[Tensor, TitansCache]:
    cache = TitansCache(model.config, rewind)
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(pieces, dim=1)], dim=1), cache


@every_source
@both
def test_up_to_the_window_a_graft_is_its_source(name, variant):
    source = source_of(name)
    student = graft_of(source, variant)
    for tokens in (1, 7, WINDOW):
        ids = ids_of(2, tokens)
        with torch.no_grad():
            assert_same(student(ids).logits, source(ids).logits)


@every_source
@both
def test_beyond_the_window_a_graft_is_its_source_under_a_mask(name, variant):
    """At once, where attention goes in blocks, in pieces, and token by token."""
    source, ids = source_of(name), ids_of(2, 3 * WINDOW + 4)
    student, expected = graft_of(source, variant), windowed(source, ids)
    with torch.no_grad():
        assert_same(student(ids, use_cache=False).logits, expected)
        for pieces in ([5, 19, 1, 12], [1] * 37):
            assert_same(read(student, ids, pieces)[0], expected)


@pytest.mark.parametrize("name", ["mistral, own window"])
@both
def test_a_source_with_a_window_of_its_own_is_followed_to_any_length(name, variant):
    source, ids = source_of(name), ids_of(2, 3 * WINDOW + 4)
    student = graft_of(source, variant, window=None)
    assert student.config.sliding_window == WINDOW
    with torch.no_grad():
        assert_same(student(ids).logits, source(ids).logits)


@every_family
@both
@pytest.mark.parametrize("full", [(0, 3), (4,)])
def test_layers_that_keep_full_attention_see_everything(name, variant, full):
    source, ids = source_of(name), ids_of(2, 3 * WINDOW + 4)
    student = graft_of(source, variant, full_attention_layers=full, memory_layers="all")
    expected = windowed(source, ids, full=full)
    with torch.no_grad():
        assert_same(student(ids, use_cache=False).logits, expected)
    for pieces in ([5, 19, 1, 12], [1] * 37):
        assert_same(read(student, ids, pieces)[0], expected)


@every_family
@both
@pytest.mark.parametrize("full", [(), (1, 4)], ids=["windows", "some full"])
def test_padding_on_either_side_changes_nothing(name, variant, full):
    source, lengths = source_of(name), (17, 5, 1, 26)
    student = graft_of(source, variant, full_attention_layers=full)
    rows = [ids_of(1, length, seed=length) for length in lengths]
    expected = [windowed(source, row, full=full)[0] for row in rows]
    for left in (True, False):
        ids, mask = torch.zeros(4, 26, dtype=torch.long), torch.zeros(4, 26, dtype=torch.long)
        places = [slice(26 - n, 26) if left else slice(0, n) for n in lengths]
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            ids[i, place], mask[i, place] = row[0], 1
        cache = TitansCache(student.config)
        with torch.no_grad():
            parts = [(ids[:, :9], mask[:, :9]), (ids[:, 9:], mask)]
            found = [student(x, attention_mask=m, past_key_values=cache).logits for x, m in parts]
        for i, place in enumerate(places):
            assert_same(torch.cat(found, dim=1)[i, place], expected[i])


@every_family
@both
def test_it_generates_the_source_token_for_token(name, variant):
    """Two rows, one of them padded; within the window, and beyond it where all layers keep full attention."""
    source = source_of(name)
    ids, mask = ids_of(2, 7), torch.ones(2, 7, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    for new, options in ((4, {}), (30, {"full_attention_layers": range(LAYERS)})):
        student = graft_of(source, variant, **options)
        settings = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        assert torch.equal(student.generate(ids, **settings), source.generate(ids, **settings))


@both
def test_what_is_new_is_silent_and_can_learn(variant):
    """The projection behind each memory has a gradient at once, everything before it after one step."""
    source, ids = source_of("llama"), ids_of(2, 23)
    student = graft_of(source, variant, memory_layers=[1, 4])
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        student(ids, labels=ids).loss.backward()
        for layer in (1, 4):
            memory = student.model.layers[layer].memory
            assert memory.out_proj.weight.grad.abs().max() > 0
            others = [x.grad for name, x in memory.named_parameters() if name != "out_proj.weight"]
            moved = [bool(grad.abs().max() > 0) for grad in others if grad is not None]
            assert all(moved) if step else not any(moved)
        optimizer.step()
    assert [layer.memory is not None for layer in student.model.layers] == [False, True, False, False, True]


def test_by_default_every_fourth_layer_and_the_last_get_a_memory():
    assert default_memory_layers(9) == [3, 7, 8]
    assert default_memory_layers(8) == [3, 7]
    assert default_memory_layers(1) == [0]
    config = graft_config(source_of("llama").config)
    assert (config.variant, config.memory_layers, config.full_attention_layers) == ("mag", [3, 4], None)
    assert graft_config(source_of("llama").config, memory_layers="all").memory_layers is None
