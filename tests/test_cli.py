"""The `titans` command: its figures are those of the model, and a memory goes on in another process."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import TOLERANCE, VARIANTS, assert_close, every_variant, hears_ctrl_c, tiny_config, tiny_model
from test_reading import TEXT, bytes_by_words
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer, set_seed
from transformers.utils import logging as of_transformers
from typer.testing import CliRunner

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM, TitansModel, memory_ops
from titans_hf.cli.app import app
from titans_hf.configuration_titans import BEFORE
from titans_hf.hub.describe import TORCH, TRITON
from titans_hf.memory_rule import rule_of
from titans_hf.snapshots import read_note

CHAT_TEMPLATE = (
    "{{ bos_token }}system: Be brief.{{ '\\n' }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWER = ["--max-new-tokens", 7]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = bytes_by_words()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory, tokenizer):
    """A folder with a model of each variant, named after it, and a book."""
    home = tmp_path_factory.mktemp("cli")
    for variant in VARIANTS:
        model = tiny_model(variant, torch.float32, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.eos_token_id] = 0  # never the likeliest: answers go on
        model.save_pretrained(home / variant)
        tokenizer.save_pretrained(home / variant)
    (home / "book.txt").write_text(TEXT[:1500], encoding="utf-8")
    return home


@pytest.fixture(autouse=True)
def _loud():
    """Commands keep transformers quiet; other tests want to hear it."""
    level = of_transformers.get_verbosity()
    yield
    of_transformers.set_verbosity(level)
    of_transformers.enable_progress_bar()


def run(*arguments, code: int = 0, text: str | None = None):
    done = CliRunner().invoke(app, [str(x) for x in arguments], input=text)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def load(folder: Path, dtype=torch.float32) -> TitansForCausalLM:
    return TitansForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logless_cache(model) -> TitansCache:
    """A cache as the commands make it: nothing is ever cropped."""
    return TitansCache(model.config, rewind=False)


def read(model, cache, ids: list[int], piece: int = 10_000) -> None:
    with torch.no_grad():
        for part in torch.tensor([ids]).split(piece, dim=1):
            model(part, past_key_values=cache)


def assert_same_memory(path: Path, cache: TitansCache, model, tmp_path: Path) -> None:
    """Bit for bit, and so are the logits of what is read next."""
    cache.save(tmp_path / "expected.safetensors", model)
    actual, expected = load_file(path), load_file(tmp_path / "expected.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    more = torch.tensor([[5, 7, 11]])
    with torch.no_grad():
        loaded = model(more, past_key_values=TitansCache.load(path, model)).logits
        assert torch.equal(loaded, model(more, past_key_values=cache.clone()).logits)


def memory_weights(cache: TitansCache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in layer.carry.memory.current()[0]]


# info


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_info_tells_the_bytes_that_a_real_cache_holds(home, variant, dtype):
    name = str(dtype).removeprefix("torch.")
    facts = json.loads(run("info", home / variant, "--json", "--dtype", name).stdout)
    model = load(home / variant, dtype)
    for field, rewind in (("cache_bytes_with_rewind", True), ("cache_bytes", False)):
        cache = TitansCache(model.config, rewind)
        for count in (1, 2, 200):
            read(model, cache, [3] * count)
            assert facts[field] == cache.nbytes
    counters = sum(layer.seen.nbytes for layer in cache.layers)
    assert sum(facts["cache_parts"].values()) == cache.nbytes - counters
    assert facts["cache_parts"]["memory"] == facts["memory_state_bytes"]["all"]
    states = [layer.carry.memory for layer in cache.layers]
    memory = sum(x.nbytes for state in states for x in (*state.weights, *state.momentum))
    assert facts["memory_state_bytes"] == {"per_layer": memory // 2, "all": memory}
    tables = model.config.vocab_size * model.config.hidden_size
    count = sum(x.numel() for x in model.parameters())
    assert facts["parameters"] == {"all": count, "without_embeddings": count - tables}


def test_info_compares_with_what_full_attention_really_keeps(home):
    facts = json.loads(run("info", home / "mag", "--json").stdout)
    config = tiny_config("mag")
    sizes = {name: getattr(config, name) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")}
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=7, hidden_size=24, intermediate_size=8, num_attention_heads=4, **sizes)
    )
    kept = llama(torch.ones(1, 8, dtype=torch.long)).past_key_values
    bytes_of_8 = sum(x.nbytes for layer in kept.layers for x in (layer.keys, layer.values))
    for name, tokens_read in (("4K", 4096), ("128K", 131_072), ("2M", 2_097_152)):
        full = facts["full_attention_cache_bytes"][name]
        assert full["bytes"] == bytes_of_8 * tokens_read // 8
        assert full["ratio"] == pytest.approx(full["bytes"] / facts["cache_bytes"])


def test_a_preset_is_described_in_a_second_and_without_making_it():
    run("info", "titans-lmm-170m")  # whatever torch loads at first
    started = time.process_time()
    printed = run("info", "titans-mac-760m").stdout
    assert time.process_time() - started < 1
    assert re.search(r"parameters +759,\d{3},\d{3}; 710,\d{3},\d{3} without embeddings", printed)
    assert "Titans mac, 18 layers" in printed


@pytest.mark.parametrize(
    "fields, here, there, why",
    [
        (BEFORE, TORCH, TRITON, "they serve this memory"),
        ({}, TORCH, TRITON, "they serve this memory"),
        ({"head_dim": 40}, TORCH, TORCH, "head width of 40"),
        ({"memory_depth": 3}, TORCH, TORCH, "memory of 3 layers"),
        ({"memory_implementation": "torch"}, TORCH, TORCH, "memory_implementation='torch'"),
        ({**BEFORE, "memory_implementation": "triton", "head_dim": 40}, "none", "none", "head width of 40"),
    ],
)
def test_info_names_the_kernels_that_would_run_and_why(tmp_path, fields, here, there, why):
    pytest.importorskip("titans_kernels", reason="triton is not installed")
    config = TitansConfig(**{"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, **fields})
    config.save_pretrained(tmp_path)
    kernels = json.loads(run("info", tmp_path, "--json").stdout)["kernels"]
    if torch.cuda.is_available():
        assert (kernels["here"], why in kernels["why"]) == (there, True)
        return
    assert (kernels["here"], kernels["on_a_gpu"], why in kernels["why_there"]) == (here, there, True)
    state = TitansForCausalLM(config).model.layers[0].mixer.memory.begin().state
    q = torch.zeros(1, 1, config.memory_num_heads, config.head_dim)
    asked = (config.memory_implementation, rule_of(config), state, q, config.memory_chunk_size)
    if here == "none":
        with pytest.raises(ValueError, match=why):
            memory_ops.choose_form(*asked)
    else:
        assert memory_ops.choose_form(*asked).scan is memory_ops.TORCH.scan


def test_info_says_what_is_missing_for_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "titans_kernels", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    TitansConfig(hidden_size=64, num_attention_heads=1, num_hidden_layers=1, **BEFORE).save_pretrained(tmp_path)
    kernels = json.loads(run("info", tmp_path, "--json").stdout)["kernels"]
    assert kernels["here"] == TORCH
    assert "pip install 'titans-hf[kernels]'" in kernels["why"]


# remember and ask


@every_variant
def test_asking_later_is_asking_at_once(home, tokenizer, variant, tmp_path):
    """The same answer and bit for bit the same memory as in one process that reads the text and is then asked."""
    book, asked = tmp_path / "book.safetensors", tmp_path / "asked.safetensors"
    printed = run("remember", home / "book.txt", "--model", home / variant, "--out", book, "--pieces", 100).stdout
    model = load(home / variant)
    cache, text = logless_cache(model), (home / "book.txt").read_text(encoding="utf-8")
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    read(model, cache, ids, 100)
    assert f"{len(ids):,} tokens in" in printed
    assert f'titans ask --memory {book} "' in printed
    assert_same_memory(book, cache, model, tmp_path)

    before = book.read_bytes()
    answer = run("ask", "--memory", book, "Who is it?", *ANSWER, "--save", asked).stdout
    question = tokenizer("Who is it?", add_special_tokens=False, return_tensors="pt").input_ids
    mask = torch.ones(1, len(ids) + question.shape[1])
    said = model.generate(question, attention_mask=mask, past_key_values=cache, max_new_tokens=7, do_sample=False)
    said = said[0, question.shape[1] :]
    assert len(said) == 7
    assert answer == tokenizer.decode(said, skip_special_tokens=True) + "\n"
    read(model, cache, said[-1:].tolist())
    assert_same_memory(asked, cache, model, tmp_path)
    assert book.read_bytes() == before


def test_the_perplexity_is_that_of_the_text(home, tokenizer, tmp_path):
    printed = run("remember", home / "book.txt", "--model", home / "mal", "-o", tmp_path / "m", "--pieces", 131).stdout
    ids = tokenizer((home / "book.txt").read_text(encoding="utf-8"), return_tensors="pt").input_ids
    with torch.no_grad():
        expected = math.exp(load(home / "mal")(ids, labels=ids).loss)
    assert f"perplexity  {expected:,.1f} while" in printed


def test_files_one_by_one_from_a_pipe_or_together_are_the_same_text(home, tokenizer, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(TEXT[:300])
    second.write_text(TEXT[300:700])
    options = ["--model", home / "mac", "--dtype", "float64", "--pieces", 64, "--out"]
    run("remember", first, second, *options, tmp_path / "together")
    run("remember", "-", second, *options, tmp_path / "piped", text=TEXT[:300])
    run("remember", first, *options, tmp_path / "one")
    run("remember", second, "--memory", tmp_path / "one", "--out", tmp_path / "both")
    model = load(home / "mac", torch.float64)
    ids = tokenizer(TEXT[:300]).input_ids + tokenizer(TEXT[300:700], add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    cache = logless_cache(model)
    read(model, cache, ids, 64)
    assert_same_memory(tmp_path / "together", cache, model, tmp_path)
    assert_same_memory(tmp_path / "piped", cache, model, tmp_path)
    both = TitansCache.load(tmp_path / "both", model)
    assert both.get_seq_length() == len(ids)
    for actual, expected in zip(memory_weights(both), memory_weights(cache), strict=True):
        assert_close(actual, expected, TOLERANCE[torch.float64])  # in other pieces


@pytest.fixture
def book(home, tmp_path):
    """The memory of the book."""
    run("remember", home / "book.txt", "--model", home / "mag", "--out", tmp_path / "book.safetensors")
    return tmp_path / "book.safetensors"


@pytest.mark.parametrize("read_only", [True, False])
def test_a_read_only_question_is_not_written(home, book, monkeypatch, read_only):
    forward, calls = TitansModel.forward, []

    def noting(self, *args, **kwargs):
        calls.append((kwargs.get("memory_read_only"), kwargs["past_key_values"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TitansModel, "forward", noting)
    run("ask", "--memory", book, "Who is it?", *ANSWER, *(["--read-only"] if read_only else []))
    assert [told for told, _ in calls[1:]] == [read_only] * 7  # the first call is that of `TitansCache.load`
    now, before = memory_weights(calls[-1][1]), memory_weights(TitansCache.load(book, load(home / "mag")))
    assert all(map(torch.equal, now, before)) == read_only


def test_an_answer_that_ends_by_itself_is_kept_without_its_end(home, tokenizer, book, tmp_path):
    model = load(home / "mag")
    cache, question = TitansCache.load(book, model), tokenizer("Who?", add_special_tokens=False).input_ids
    start = cache.get_seq_length()
    mask = torch.ones(1, start + len(question))
    style = {"max_new_tokens": 20, "do_sample": True, "temperature": 3.0}
    set_seed(5)
    said = model.generate(torch.tensor([question]), attention_mask=mask, past_key_values=cache, **style)
    said = said[0, len(question) :].tolist()
    end = next(token for token in said[3:] if token not in said[:3])
    model.generation_config.eos_token_id = [end]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = ["--model", tmp_path / "model", "--save", tmp_path / "asked", "--max-new-tokens", 20]
    answer = run("ask", "--memory", book, "Who?", *options, "--temperature", 3.0, "--seed", 5).stdout
    assert answer == tokenizer.decode(said[: said.index(end) + 1], skip_special_tokens=True) + "\n"
    kept = TitansCache.load(tmp_path / "asked", model).get_seq_length() - start - len(question)
    assert kept == said.index(end) < 19


def test_another_process_elsewhere_needs_the_memory_alone(home, book, tmp_path):
    """Without --model and from another folder."""
    asked, elsewhere = tmp_path / "asked.safetensors", tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = ["ask", "--memory", "../book.safetensors", "Who is it?", "--save", asked, *ANSWER]
    command = [sys.executable, "-m", "titans_hf.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert f"model: {home / 'mag'}, named by ../book.safetensors" in done.stderr.splitlines()
    here = run("ask", "--memory", book, "Who is it?", "--save", tmp_path / "here", *ANSWER)
    assert done.stdout == here.stdout
    model = load(home / "mag")
    assert_same_memory(asked, TitansCache.load(tmp_path / "here", model), model, tmp_path)
    assert list(elsewhere.iterdir()) == []


def test_a_memory_goes_on_in_its_own_precision(home, tmp_path):
    memory = tmp_path / "half.safetensors"
    run("remember", home / "book.txt", "--model", home / "lmm", "--out", memory, "--dtype", "bfloat16")
    run("ask", "--memory", memory, "Who?", *ANSWER)
    assert "bfloat16 and cannot go on in float32" in fail("ask", "--memory", memory, "Who?", "--dtype", "float32")


def test_sampling_follows_the_seed(book):
    options = ["ask", "--memory", book, "Who is it?", "--max-new-tokens", 20, "--temperature", 2.0, "--seed"]
    first, again, other = (run(*options, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_a_memory_that_a_program_saved_needs_a_model_to_be_named(home, tmp_path):
    model, path = load(home / "mag"), tmp_path / "plain.safetensors"
    cache = TitansCache(model.config)
    read(model, cache, [5, 6, 7])
    cache.save(path)
    assert read_note(path) == {}
    assert "does not say which model made it: pass --model" in fail("ask", "--memory", path, "Who?")
    run("ask", "--memory", path, "Who?", "--model", home / "mag", *ANSWER)


def test_nothing_that_a_stranger_sends_is_run(home, tmp_path, tokenizer):
    """Neither code beside the weights nor a name in the memory's file makes us run anything."""
    model, trap, marker = load(home / "mag"), tmp_path / "trap", tmp_path / "marker"
    model.save_pretrained(trap)
    tokenizer.save_pretrained(trap)
    poison = f"open({str(marker)!r}, 'w').close()\n"
    for file in trap.glob("*.py"):
        file.write_text(poison + file.read_text())
    (trap / "evil.py").write_text(poison + "class Evil: pass\n")
    gift, cache = tmp_path / "gift", TitansCache(model.config)
    read(model, cache, [5, 6, 7])
    cache.save(gift, model, note={"model": str(trap), "dtype": "float32"})
    spoil(trap / "config.json", attn_implementation="stranger/kernel")
    done = run("ask", "--memory", gift, "Who?", *ANSWER)  # with this package's code
    assert done.stderr.startswith(f"model: {trap}, named by {gift}\n")
    spoil(trap / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Evil"]}, tokenizer_class="Evil")
    assert "no tokenizer that can be loaded" in fail("ask", "--memory", gift, "Who?")
    for name in ("\x1b[31mred", "/nowhere/at/all", "stranger/model"):
        cache.save(gift, model, note={"model": name})
        assert "\x1b" not in fail("ask", "--memory", gift, "Who?")
    assert not marker.exists()


def spoil(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# chat


def conversation(tokenizer, *turns: str, model) -> tuple[list[str], TitansCache]:
    """The answers and the cache: every turn is what the rendered conversation has beyond the one before."""
    cache, messages, answers, text = logless_cache(model), [], [], ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        new = tokenizer(rendered[len(text) :], add_special_tokens=False, return_tensors="pt").input_ids
        mask = torch.ones(1, cache.get_seq_length() + new.shape[1])
        said = model.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=7, do_sample=False)
        said = said[0, new.shape[1] :].tolist()
        assert said[-1] != tokenizer.eos_token_id
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
        read(model, cache, [said[-1], *tokenizer("</s>\n", add_special_tokens=False).input_ids])
        messages.append({"role": "assistant", "content": answers[-1]})
        text = rendered + answers[-1] + "</s>\n"
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    return answers, cache


@every_variant
def test_a_conversation_goes_on_where_it_ended(home, tokenizer, variant, tmp_path):
    talk, options = tmp_path / "talk.safetensors", ["--memory", tmp_path / "talk.safetensors", *ANSWER]
    first = run("chat", "--model", home / variant, *options, text="Hello!\n\nWho are you?\n")
    second = run("chat", *options, text="And now?\n/exit\nnever read\n")
    model = load(home / variant)
    answers, cache = conversation(tokenizer, "Hello!", "Who are you?", "And now?", model=model)
    assert first.stdout + second.stdout == "".join(f"{answer}\n" for answer in answers)
    assert_same_memory(talk, cache, model, tmp_path)
    assert f"saved: {talk}" in second.stderr


def test_a_turn_reads_only_what_is_new(home, tokenizer, tmp_path, monkeypatch):
    forward, lengths = TitansModel.forward, []

    def noting(self, *args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TitansModel, "forward", noting)
    run("chat", "--model", home / "lmm", *ANSWER, text="Hello!\n" * 5)
    turns = len(lengths) // 5
    assert lengths[turns:] == lengths[turns : 2 * turns] * 4


def test_a_question_as_a_turn_follows_the_book_and_chat_follows_the_question(home, tokenizer, book, tmp_path):
    asked, talk = tmp_path / "asked.safetensors", tmp_path / "talk.safetensors"
    run("ask", "--memory", book, "Who is it?", "--chat", "--save", asked, *ANSWER)
    run("ask", "--memory", asked, "Really?", "--chat", "--save", talk, *ANSWER)
    run("chat", "--memory", asked, *ANSWER, text="Really?\n")
    assert all(map(torch.equal, load_file(asked).values(), load_file(talk).values()))
    turns = "system: Be brief.\nuser: Who is it?\nassistant: ", "</s>\n", "user: Really?\nassistant: ", "</s>\n"
    read_in_turns = sum(len(tokenizer(turn, add_special_tokens=False).input_ids) for turn in turns) + 2 * 7
    model = load(home / "mag")
    assert (
        TitansCache.load(talk, model).get_seq_length() == TitansCache.load(book, model).get_seq_length() + read_in_turns
    )


def test_commands_inside_a_chat(home, tmp_path):
    talk, other = tmp_path / "talk.safetensors", tmp_path / "other.safetensors"
    lines = ["/help", "/save", "Hello!", f"/save {other}", "/save /nowhere/x", "/what", "/forget", "Hello!"]
    done = run("chat", "--model", home / "mag", "--memory", talk, *ANSWER, text="\n".join(lines))
    assert all(word in done.stderr for word in ("/forget ", "nothing was said yet", "no folder /nowhere", "no /what"))
    assert all(map(torch.equal, load_file(talk).values(), load_file(other).values()))
    before = talk.read_bytes()
    run("chat", "--memory", talk, text="/forget\n")
    assert talk.read_bytes() == before


def test_an_interrupted_turn_was_never_said_and_the_rest_is_saved(home, tokenizer, tmp_path, monkeypatch):
    put, calls = TextStreamer.put, []

    def interrupted(self, value):
        calls.append(value)
        if len(calls) == 12:  # in the second answer
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    talk = tmp_path / "talk.safetensors"
    done = run("chat", "--model", home / "mac", "--memory", talk, *ANSWER, text="Hello!\nWho?\nWhy?\n", code=130)
    assert done.stderr.splitlines()[-1] == "titans: interrupted"
    model = load(home / "mac")
    _, cache = conversation(tokenizer, "Hello!", model=model)
    assert_same_memory(talk, cache, model, tmp_path)


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template: use `titans ask`"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "changes earlier turns"),
        ("{{ raise_exception('no users here') }}", "no users here"),
    ],
)
def test_a_template_that_cannot_be_read_turn_by_turn_is_refused(home, tmp_path, template, message):
    tokenizer = bytes_by_words()
    tokenizer.chat_template = template
    load(home / "lmm").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert message in fail("chat", "--model", tmp_path, text="Hello!\n")


# what goes wrong


def fail(*arguments, code: int = 1, text: str | None = None) -> str:
    """The one line that says what is wrong."""
    done = run(*arguments, code=code, text=text)
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    *notes, line = done.stderr.splitlines()
    assert line.startswith("titans")
    assert all(note.startswith(("model: ", "memory: ")) for note in notes)
    return line


def test_bad_input_is_one_line_and_an_exit_code(home, book, tmp_path):
    model, out, file = home / "mag", tmp_path / "out.safetensors", home / "book.txt"
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "llama").mkdir()
    LlamaConfig().save_pretrained(tmp_path / "llama")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "titans", "hidden_size": "wide"}')
    (tmp_path / "weightless").mkdir()
    tiny_config("mag").save_pretrained(tmp_path / "weightless")
    keep = ["--model", model, "--out", out]
    for arguments, message in (
        (["info", "titans-mac-34m"], "nearest to it is titans-mac-340m"),
        (["info", tmp_path / "nothing"], "no folder"),
        (["info", tmp_path], "has no config.json"),
        (["info", tmp_path / "llama"], "of type 'llama', not a Titans model"),
        (["info", tmp_path / "broken"], "hidden_size"),
        (["info", file], "is a file; pass the folder"),
        (["remember", tmp_path / "nothing.txt", *keep], "nothing.txt: No such file"),
        (["remember", tmp_path / "empty.txt", *keep], "there is no text in"),
        (["remember", tmp_path / "latin.txt", *keep], "latin.txt is not UTF-8 text: see byte 3"),
        (["remember", file, "--model", tmp_path / "weightless", "--out", out], "model.safetensors"),
        (["remember", file, *keep, "--device", "cuda:77"], "cannot use device 'cuda:77'"),
        (["remember", file, *keep, "--memory", file], "not a snapshot"),
        (["ask", "Who?", "--memory", tmp_path / "nothing"], "nothing: No such file"),
        (["ask", "Who?", "--memory", model / "model.safetensors"], "not a snapshot of a Titans memory"),
        (["ask", "Who?", "--memory", book, "--model", home / "mac"], "it had `variant='mag'`, this one has 'mac'"),
        (["chat", "--memory", out], "is new, so it names no model"),
    ):
        assert message in fail(*arguments), arguments
    for arguments, message in (
        (["nonsense"], "No such command 'nonsense'"),
        (["remember", file, "--out", out], "which model?"),
        (["remember", file, "--model", model], "Missing option '--out'"),
        (["remember", file, *keep, "--pieces", 0], "--pieces"),
        (["ask", "--memory", book, ""], "the question is empty"),
        (["ask", "--memory", book, "Who?", "--read-only", "--save", out], "--read-only keeps nothing"),
        (["chat"], "which model?"),
    ):
        assert message in fail(*arguments, code=2), arguments
    assert not out.exists()


def test_a_checkpoint_that_lacks_weights_is_refused(home, tmp_path):
    model, lacking = load(home / "lmm"), "model.layers.1.mlp.up_proj.weight"
    weights = {name: x for name, x in model.state_dict().items() if name != lacking}
    model.save_pretrained(tmp_path, state_dict=weights)
    bytes_by_words().save_pretrained(tmp_path)
    keep = ["--model", tmp_path, "--out", tmp_path / "m"]
    assert f"lacks 1 of the model's weights, '{lacking}'" in fail("remember", home / "book.txt", *keep)


def test_an_output_is_checked_before_anything_is_read(home, book, tmp_path, monkeypatch):
    monkeypatch.setattr("titans_hf.cli.memory.load", lambda *args: pytest.fail("the reading began"))
    model, file = home / "mag", home / "book.txt"
    for out, message in (
        (tmp_path / "nowhere" / "out", "there is no folder"),
        (tmp_path, "is a folder; name a file"),
        (file, "exists and is not a memory"),
        (model / "model.safetensors", "exists and is not a memory"),
        (Path(os.devnull), "exists and is not a memory"),
    ):
        assert message in fail("remember", file, "--model", model, "--out", out)
        assert message in fail("ask", "--memory", book, "Who?", "--save", out)
    assert file.read_text(encoding="utf-8") == TEXT[:1500]


# Surprise


def test_surprise_shows_the_text_and_draws_it_over_an_older_picture(home, tmp_path):
    (tmp_path / "old.png").write_text("an older picture")
    out = [f"--out={tmp_path / name}" for name in ("old.png", "new.html")]
    done = run("surprise", home / "book.txt", "--model", home / "mag", "--limit", 60, *out)
    assert TEXT[:40] in done.stdout
    assert "by layer" in done.stdout
    assert (tmp_path / "old.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "new.html").read_text(encoding="utf-8")
    assert page.count("token ") == 60
    assert {file.name for file in tmp_path.iterdir()} == {"old.png", "new.html"}


def test_surprise_goes_on_from_a_memory_and_leaves_it_as_it_is(home, tmp_path):
    memory, page = tmp_path / "book.safetensors", tmp_path / "page.html"
    run("remember", home / "book.txt", "--model", home / "lmm", "--out", memory)
    before = memory.read_bytes()
    run("surprise", home / "book.txt", "--memory", memory, "--limit", 9, "--out", page)
    assert memory.read_bytes() == before
    model, tokenizer = load(home / "lmm"), AutoTokenizer.from_pretrained(home / "lmm")
    ids = torch.tensor(tokenizer(TEXT[:1500], add_special_tokens=False).input_ids[:9])
    expected = model.trace_surprise(ids, TitansCache.load(memory, model), tokenizer)
    assert expected._repr_html_() in page.read_text(encoding="utf-8")


def test_surprise_says_what_is_wrong_before_it_reads(home, tmp_path):
    (tmp_path / "empty.txt").touch()
    book, model = home / "book.txt", home / "lmm"
    assert "must end in .png or .html" in fail("surprise", book, "--model", model, "--out", "x.pdf", code=2)
    assert "no folder" in fail("surprise", book, "--model", model, "--out", tmp_path / "no" / "x.png")
    assert "there is no text" in fail("surprise", tmp_path / "empty.txt", "--model", model)
    assert "which model?" in fail("surprise", book, code=2)
    assert "No such file" in fail("surprise", tmp_path / "none.txt", "--model", model)


def test_debug_shows_where_an_error_comes_from(tmp_path):
    for arguments, environment in ((["--debug"], {}), ([], {"TITANS_DEBUG": "1"})):
        done = CliRunner(env=environment).invoke(app, [*arguments, "info", str(tmp_path)])
        assert "no config.json" in str(done.exception)
        assert not isinstance(done.exception, SystemExit)


def test_every_command_explains_itself_with_an_example():
    listed = run("--help").stdout
    assert run().stdout == listed
    commands = re.findall(r"^  ([a-z]+)  +\w", listed.split("Commands:")[1], re.MULTILINE)
    assert {"info", "remember", "ask", "chat", "surprise"} <= set(commands)
    for command in commands:
        assert re.search(rf"\btitans {command} [^\[]", run(command, "--help").stdout), command


def test_ctrl_c_while_reading_leaves_no_file(home, tmp_path):
    arguments = ["remember", "-", "--model", home / "lmm", "--out", tmp_path / "book.safetensors", "--pieces", "512"]
    command = [sys.executable, "-m", "titans_hf.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, preexec_fn=hears_ctrl_c, **pipes) as process:
        for _ in range(10):  # more than the pipe and the first windows hold: it is in the middle of the text
            process.stdin.write(TEXT.encode())
            process.stdin.flush()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert out == b""
    assert error.decode().splitlines()[-1] == "titans: interrupted"
    assert list(tmp_path.iterdir()) == []
