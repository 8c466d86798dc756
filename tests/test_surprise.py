"""`trace_surprise` shows what the memory made of a text, as it was, without changing it."""

import io
import re

import pytest
import torch
from rich.console import Console
from support import VOCAB, chat_tokenizer, every_variant, tiny_model

from titans_hf import TitansCache
from titans_hf.memory_layer import NeuralMemory
from titans_hf.memory_ops import recall
from titans_hf.surprise import FIELDS, token_texts

T = 29


def some_tokens(length: int = T, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def token_by_token(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, the slow way: before each token ask the memory as it stands in the cache, after it measure its size."""
    cache, seen = TitansCache(model.config), []
    memories = [module for module in model.modules() if isinstance(module, NeuralMemory)]
    written = {}
    hooks = [m.register_forward_hook(lambda m, _, output: written.__setitem__(m, output[2])) for m in memories]
    before = [None] * len(memories)
    for token in ids:
        if cache.layers[0].carry is None:  # the first token finds the memory as the persistent tokens left it
            model(token.view(1, 1), past_key_values=(first := TitansCache(model.config)))
            before = [layer.carry.log.base.current()[0] for layer in first.layers]
        model(token.view(1, 1), past_key_values=cache)
        after = [layer.carry.memory.current()[0] for layer in cache.layers]
        for memory, old, new in zip(memories, before, after, strict=True):
            k, v, gates = (getattr(written[memory], name) for name in ("k", "v", "gates"))
            loss = (recall(old, k) - v).square().sum(-1)[0, 0]
            norm = torch.stack([W.square().sum((-2, -1)) for W in new]).sum(0).sqrt()[0]
            seen.append((loss, v.square().sum(-1)[0, 0], *gates[0, 0], norm))
        before = after
    for hook in hooks:
        hook.remove()
    stacked = (torch.stack(x).view(len(ids), len(memories), -1).permute(1, 2, 0) for x in zip(*seen))
    return dict(zip(FIELDS, stacked, strict=True))


@every_variant
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_every_number_is_that_of_a_memory_asked_token_by_token(variant, depth, forget_to):
    model = tiny_model(variant, memory_depth=depth, memory_forget_to=forget_to)
    trace, expected = model.trace_surprise(some_tokens()), token_by_token(model, some_tokens())
    for name in FIELDS:
        assert getattr(trace, name).shape == (2, 3, T)
        torch.testing.assert_close(getattr(trace, name), expected[name], rtol=1e-9, atol=1e-9)


@every_variant
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_pieces_of_any_length_and_a_cache_to_go_on_from_give_the_same(variant, piece):
    model, ids = tiny_model(variant), some_tokens()
    cache = TitansCache(model.config)
    parts = [model.trace_surprise(part, cache, piece=piece) for part in ids.split(11)]
    together, whole = parts[0] + parts[1] + parts[2], model.trace_surprise(ids)
    for name in FIELDS:
        torch.testing.assert_close(getattr(together, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(getattr(whole[11:22], name), getattr(parts[1], name), rtol=1e-9, atol=1e-9)


@every_variant
def test_looking_on_changes_nothing(variant):
    model, ids = tiny_model(variant).train(), some_tokens()
    watched, alone = TitansCache(model.config), TitansCache(model.config)
    model.trace_surprise(ids, watched)
    assert model.training
    model.eval()
    with torch.no_grad():
        model(ids[None], past_key_values=alone)
        again = [model(ids[None, :5], past_key_values=cache).logits for cache in (watched, alone)]
    torch.testing.assert_close(*again, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in model.modules())


@every_variant
def test_read_only_shows_the_surprise_at_a_memory_that_stays_as_it_is(variant):
    model, ids = tiny_model(variant), some_tokens()
    cache = TitansCache(model.config)
    model.trace_surprise(ids, cache)
    weights = [layer.carry.memory.current()[0] for layer in cache.layers]
    trace = model.trace_surprise(some_tokens(13, seed=4), cache, memory_read_only=True)
    for layer, old in zip(cache.layers, weights, strict=True):
        torch.testing.assert_close(layer.carry.memory.current()[0], old, rtol=0, atol=0)
    assert (trace.norm == trace.norm[..., :1]).all()
    assert not trace.theta.any()
    assert trace.surprise.isfinite().all()


def test_a_token_that_returns_is_no_surprise():
    """A linear memory that forgets nothing and writes in full: what was written is foreseen."""
    model = tiny_model("lmm", memory_depth=1, memory_forget=False, memory_momentum=False, memory_chunk_size=1)
    for layer in model.model.layers:
        gates = layer.mixer.memory.write_gates
        gates.theta_max = 0.5  # at which one write of a key of length 1 is complete
        gates.proj.weight.data.zero_()
        gates.proj.bias.data.fill_(20.0)
    surprise = model.trace_surprise(torch.tensor([5] * 11)).per_token(0)
    assert surprise[0] > 0.1
    assert (surprise[5:] < 1e-6).all(), "after the convolution has seen nothing else"


def test_relative_surprise_is_one_where_the_memory_holds_nothing():
    model = tiny_model("lmm", num_persistent_tokens=0)
    for layer in model.model.layers:
        for W in layer.mixer.memory.start.weights:
            W.data.zero_()
    trace = model.trace_surprise(some_tokens())
    torch.testing.assert_close(trace.relative()[..., 0], torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(trace.per_token()[0].item(), 1.0)


def test_half_precision_is_traced_in_float32():
    model = tiny_model("mag", torch.bfloat16)
    trace = model.trace_surprise(some_tokens())
    assert {getattr(trace, name).dtype for name in FIELDS} == {torch.float32}
    assert all(getattr(trace, name).isfinite().all() for name in FIELDS)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.ones(0, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.ones(3, dtype=torch.long), "piece": 0}, "piece"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=f"`{named}`"):
        tiny_model("lmm").trace_surprise(**arguments)


# Views


def traced(text: str):
    tokenizer = chat_tokenizer()
    model = tiny_model("mag", torch.float32, vocab_size=len(tokenizer))
    return model.trace_surprise(torch.tensor(tokenizer(text)["input_ids"]), tokenizer=tokenizer)


def test_tokens_spell_the_text_also_where_characters_are_several_tokens():
    tokenizer, text = chat_tokenizer(), "Grüße, 世界 \N{OWL}!\n"
    texts = token_texts(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(texts) == text
    assert len(texts) == len(text.encode())


def test_the_terminal_shows_every_word_its_legend_and_a_line_by_layer():
    page = io.StringIO()
    Console(file=page, force_terminal=True, color_system="truecolor", width=120).print(traced("A memory learns."))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", page.getvalue())
    assert "A memory learns." in plain
    assert "much   |M(k) - v|" in plain
    assert len(re.findall(r"^│ \d", plain, re.M)) == 2
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", page.getvalue()))) > 5, "tokens differ in colour"


def test_a_page_holds_the_text_and_never_its_markup(tmp_path):
    trace = traced("<script>alert('x')</script> & more")
    trace.save_html(tmp_path / "page.html", title="<b>title</b>")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>" not in page
    assert page.count("token ") == len(trace), "a tooltip each"
    assert trace._repr_html_() in page
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("length", [1, 40, 5_000])
def test_a_picture_is_drawn_of_any_length(length, tmp_path):
    trace = tiny_model("lmm", torch.float32).trace_surprise(some_tokens(length))
    trace.save_png(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert repr(trace).startswith(f"SurpriseTrace({length:,} tokens, 2 layers, 3 heads")


def test_long_texts_are_shown_in_part_and_say_so():
    trace = traced("word " * 500)
    assert f"The first 2,000 of {len(trace):,} tokens." in trace._repr_html_()
