"""The studio shows what the model does: its steps one by one, and the page in a real browser."""

import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import hears_ctrl_c, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from titans_hf import TitansCache
from titans_hf.cli.answering import Style, answer, read
from titans_hf.cli.app import app
from titans_hf.snapshots import content_digest, read_note

pytest.importorskip("gradio", reason="gradio is not installed")

from titans_hf.cli import studio_page as studio_module  # noqa: E402
from titans_hf.cli.studio_page import Studio, build, close_page, coloured, open_page, told  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")  # of pandas, about gradio
TEXT = "Call me Ishmael. Some years ago I thought I would sail about a little, and see the watery part of the world."
TRICKS = (
    "<script>window.tricked = 1</script> <img src=x onerror='window.tricked = 2'> ${window.tricked = 3} "
    "{{value}} {{#each value}}x{{/each}} @children &lt;b&gt; \"'`\n</div></textarea>"
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Printable characters, one a token, so that whatever a model writes can be seen; <s> opens a text."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *string.printable[:95], "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Its answers end, depend on the question, and on whether the memory is written to: so seed 5."""
    return tiny_model("mag", torch.float32, seed=5, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def studio(model, tokenizer) -> Studio:
    return Studio(model, tokenizer, note={"model": "somewhere"})


@pytest.fixture(scope="module")
def memory(studio) -> TitansCache:
    return studio.read(studio.start, TEXT)[0]


def same(one: TitansCache, other: TitansCache) -> bool:
    """Bit for bit."""
    left, right = one._named(), other._named()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def plain(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def last(steps):
    *_, end = steps
    return end


# reading


def test_reading_shows_the_surprise_and_leaves_the_old_memory_as_it_was(studio, model, tokenizer):
    expected = TitansCache(model.config)
    trace = model.trace_surprise(torch.tensor(tokenizer(TEXT).input_ids), expected, tokenizer)
    after, seen, total = studio.read(studio.start, TEXT)
    assert total == len(TEXT) + 1 == len(seen)
    assert "".join(seen.tokens) == "<s>" + TEXT
    torch.testing.assert_close(seen.surprise, trace.surprise)
    assert same(after, expected)
    assert studio.start.get_seq_length() == 0
    again, seen, total = studio.read(after, TEXT)
    assert (total, seen.tokens[0]) == (len(TEXT), "C")  # only an empty memory is opened
    assert again.get_seq_length() == 2 * len(TEXT) + 1
    assert same(after, expected)


def test_of_a_long_text_the_beginning_is_shown_and_all_is_read(studio, model, tokenizer, monkeypatch):
    monkeypatch.setattr(studio_module, "PIECE", 17)
    monkeypatch.setattr(studio_module, "NOTEBOOK_TOKENS", 34)
    heard = []
    after, seen, total = studio.read(studio.start, TEXT, lambda *done: heard.append(done))
    whole = TitansCache(model.config)
    for start in range(0, total, 17):
        read(model, whole, tokenizer(TEXT).input_ids[start : start + 17])
    assert same(after, whole)
    assert "".join(seen.tokens) == "<s>" + TEXT[:33]
    assert heard == [(min(end, total), total) for end in range(17, total + 17, 17)]
    assert f"the first 34 of {total} tokens. All were read." in coloured(seen, total)
    assert "All were read" not in coloured(seen, len(seen))


def test_the_coloured_text_is_only_text(studio):
    _, seen, total = studio.read(studio.start, TRICKS)
    shown = coloured(seen, total)
    assert "&lt;script&gt;" in "".join(re.findall(r">([^<>]*)</span>", shown))
    assert set(re.findall(r"</?(\w+)", shown)) == {"div", "p", "span", "table", "thead", "tbody", "tr", "th", "td"}


def test_half_a_character_is_read_as_an_unknown_one(studio):
    _, seen, total = studio.read(studio.start, "a\ud800b")
    assert total == 4


# asking


@pytest.mark.parametrize("read_only", [False, True])
def test_asking_twice_from_the_same_place(studio, model, tokenizer, memory, read_only):
    before, copy = memory.clone(), memory.clone()
    written, _ = answer(model, copy, plain(tokenizer, "Who?"), Style(23), read_only=read_only)
    for _ in range(2):
        steps = list(studio.ask(memory, "Who?", Style(23), read_only))
        assert steps[-1][0] == tokenizer.decode(written) != ""
        assert all(steps[-1][0].startswith(text) and after is memory for text, after in steps)
    assert same(memory, before)


def test_an_answer_comes_word_by_word(studio, model, tokenizer, memory):
    def ask(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return [text for text, _ in studio.ask(memory, "Who?", Style(150, 1.5))]

    steps = next(steps for steps in map(ask, range(20)) if " " in steps[-1].strip())  # an answer of several words
    assert len({text for text in steps if text}) > 1
    assert steps == sorted(steps, key=len)


def test_a_remembered_conversation_is_what_was_read(studio, model, tokenizer, memory):
    """Question and whole answer: the memory goes on as if both had been pasted."""
    text, after = last(studio.ask(memory, "Who?", Style(7), remember=True))
    expected = memory.clone()
    for token in plain(tokenizer, "Who?" + text):
        read(model, expected, [token])
    assert after.get_seq_length() == memory.get_seq_length() + 4 + 7
    more = torch.tensor([plain(tokenizer, "Really")])
    with torch.no_grad():
        logits = [model(more, past_key_values=cache.clone()).logits for cache in (after, expected)]
    torch.testing.assert_close(*logits)


def test_a_question_can_be_the_first_thing_read(studio, tokenizer, model):
    text, after = last(studio.ask(studio.start, "Who?", Style(5), remember=True))
    assert len(text) == 5
    assert after.get_seq_length() == len("<s>") - 2 + 4 + 5


def test_an_answer_nobody_waits_for_ends(studio, memory, monkeypatch):
    written, put = [], studio_module.Words.put
    monkeypatch.setattr(studio_module.Words, "put", lambda self, value: written.append(value) or put(self, value))
    steps = studio.ask(memory, "Who?", Style(500))
    next(steps)
    steps.close()
    assert len(written) < 100
    assert not studio.busy.locked()
    monkeypatch.setattr(studio, "leaving", threading.Event())
    studio.leaving.set()
    for step in (lambda: list(studio.ask(memory, "Who?", Style(500))), lambda: studio.read(memory, TEXT)):
        with pytest.raises(studio_module.Abandoned):
            step()


def test_an_error_while_writing_reaches_the_page(studio, memory, monkeypatch):
    def broken(*args):
        raise ValueError("out of ink")

    monkeypatch.setattr(studio_module, "answer", broken)
    with pytest.raises(ValueError, match="out of ink"):
        list(studio.ask(memory, "Who?", Style(3)))


# files


def test_a_saved_memory_goes_on_where_it_was(studio, memory, tmp_path):
    path = studio.save(memory, tmp_path)
    assert path.name == f"memory-of-{len(TEXT) + 1}-tokens.safetensors"
    assert read_note(path) == {"model": "somewhere"}
    assert same(studio.load(path), memory)
    assert path.stat().st_size < studio.nbytes + studio_module.SLACK  # or it could not be loaded on the page


def with_config(path: Path, out: Path, **fields) -> None:
    """The same file, claiming another configuration, with a digest that is right."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), **fields})
    save_file(tensors, out, {**metadata, "digest": content_digest(tensors, metadata)})


def test_what_cannot_be_done_is_said(studio, model, memory, tmp_path, monkeypatch):
    junk, two, other = tmp_path / "junk.safetensors", tmp_path / "two.safetensors", tmp_path / "other.safetensors"
    junk.write_bytes(b"junk" * 9)
    pair = TitansCache(model.config)
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.long), past_key_values=pair)
    pair.save(two, model)
    with_config(two, other, variant="mac")
    monkeypatch.setitem(studio_module.LONGEST, "text", 99)
    for step, message in (
        (lambda: studio.read(memory, " \n"), "There is no text yet"),
        (lambda: studio.read(memory, TEXT), "has 108 characters, and this page takes 99"),
        (lambda: list(studio.ask(memory, "", Style(3))), "There is no question yet"),
        (lambda: list(studio.ask(memory, "Who?", Style(3), True, True)), "Read only keeps nothing"),
        (lambda: studio.save(studio.start, tmp_path), "nothing to save yet"),
        (lambda: studio.load(junk), "^'junk.safetensors' is damaged, or not a snapshot"),
        (lambda: studio.load(two), "'two.safetensors' holds the memories of 2 texts"),
        (lambda: studio.load(other), "^'other.safetensors' was made by another model: it had `variant='mac'`"),
        (lambda: studio.load(tmp_path / "gone"), "no snapshot at 'gone'"),
    ):
        with pytest.raises(ValueError, match=message):
            step()


def test_a_message_is_short_and_only_text(monkeypatch):
    said = []
    monkeypatch.setattr(studio_module.gr, "Warning", said.append)
    with told():
        raise ValueError("<b>" + "x" * 9000)
    assert said[0].startswith("&lt;b&gt;xxx")
    assert len(said[0]) < 600
    with pytest.raises(ZeroDivisionError), told():  # a bug is not a message
        1 / 0  # noqa: B018


# the command


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("studio") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fail(*arguments, code: int = 1) -> str:
    done = CliRunner().invoke(app, ["studio", *map(str, arguments)])
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    return done.stderr.splitlines()[-1]


def test_the_command_says_in_a_line_what_is_wrong(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # which the command sets: put back at the end
    assert "has no config.json" in fail("--model", tmp_path, "--port", 0)
    assert "which model?" in fail("--port", 0, code=2)
    assert "nothing: No such file" in fail("--model", folder, "--memory", tmp_path / "nothing", "--port", 0)
    assert "cannot listen on port 0 of 192.0.2.1" in fail("--model", folder, "--port", 0, "--host", "192.0.2.1")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use: pass another --port" in fail("--model", folder, "--port", port)
    monkeypatch.delitem(sys.modules, "titans_hf.cli.studio_page")
    monkeypatch.delattr("titans_hf.cli.studio_page")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "needs gradio" in (line := fail("--model", folder, "--port", 0))
    assert line.endswith('pip install "titans-hf[viz]"')


def test_ctrl_c_ends_the_page_and_nothing_is_left(folder, memory, studio, tmp_path):
    start, rest = studio.save(memory, folder.parent), tmp_path / "rest"
    rest.mkdir()
    command = [sys.executable, "-m", "titans_hf.cli", "studio", "--model", folder, "--memory", start, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(rest)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, preexec_fn=hears_ctrl_c, **pipes) as process:
        line, told = process.stdout.readline(), [process.stderr.readline()]
        while told[-1] not in ("Ctrl-C ends it\n", ""):  # libraries may warn while they are imported
            told.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert re.fullmatch(r"studio +http://127\.0\.0\.1:\d+/\n", line), (told, error)
    assert (process.returncode, out, error) == (0, "", "closed\n")
    assert told[-2:] == [f"model: {folder}\n", "Ctrl-C ends it\n"]
    assert list(rest.iterdir()) == []


# the page


@pytest.fixture
def connections(monkeypatch) -> set[str]:
    """Whom this process connects to, or looks up in order to."""
    found, connect, look_up = set(), socket.socket.connect, socket.getaddrinfo

    def connecting(self, address):
        found.add(str(address[0]))
        return connect(self, address)

    def looking_up(host, *args, **kwargs):
        found.add(str(host))
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connecting)
    monkeypatch.setattr(socket, "getaddrinfo", looking_up)
    return found


@pytest.fixture
def page(model, tokenizer, connections, monkeypatch, tmp_path):
    """The page's address."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    page = build(model, tokenizer)
    yield open_page(page, "127.0.0.1", port)
    close_page(page)


@pytest.fixture
def tab(page):
    """The page in a browser, and what went wrong there: complaints of the console, and requests to elsewhere."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("there is no chromium")
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        tab, wrong = browser.new_page(), []
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: None if request.url.startswith(page) else wrong.append(request.url))
        tab.goto(page)
        yield tab, wrong
        browser.close()


def test_a_person_reads_asks_saves_and_goes_on(tab, studio, model, connections, tmp_path):
    tab, wrong = tab

    def wait(condition: str, value=None) -> None:
        tab.wait_for_function(condition, arg=value, timeout=15_000)

    def says(place: str, text: str) -> None:
        wait("([place, text]) => document.querySelector(place)?.innerText.includes(text)", [place, text])

    def warned(text: str) -> None:
        says(".toast-wrap", text)
        tab.locator(".toast-close").first.click()
        wait("() => !document.querySelector('.toast-body')")

    says("#status", "0 tokens read")
    tab.click("#read")
    warned("There is no text yet")
    tab.click("#save")
    warned("nothing to save yet")

    tab.fill("#text textarea", TRICKS)
    tab.click("#read")
    tab.wait_for_selector("#surprise .titans-surprise")
    says("#status", f"{len(TRICKS) + 1:,} tokens read")
    spans = tab.locator("#surprise span[title]")
    assert "".join(spans.all_text_contents()) == "<s>" + TRICKS
    assert len(set(spans.evaluate_all("spans => spans.map(span => span.style.background)"))) > 9
    assert "little surprise" in tab.inner_text("#surprise")

    memory = studio.read(studio.start, TRICKS)[0]
    for question in ("Who?", "Where?", "Who?"):  # each from the same place
        tab.fill("#question textarea", question)
        tab.click("#ask")
        expected = last(studio.ask(memory, question, Style(64)))[0]
        wait("text => document.querySelector('#answer textarea').value === text", expected)
    says("#status", f"{len(TRICKS) + 1:,} tokens read")

    with tab.expect_download() as download:
        tab.click("#save")
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    assert same(TitansCache.load(saved, model), memory)

    tab.click("#remember input")
    tab.click("#ask")
    tab.click("#read")  # waits its turn: nothing of either is lost
    says("#status", f"{2 * len(TRICKS) + 1 + 4 + len(expected):,} tokens read")
    tab.click("#start-over")
    says("#status", "0 tokens read")
    evil = tmp_path / "evil.safetensors"
    with_config(saved, evil, variant=TRICKS)
    tab.set_input_files("input[type=file]", evil)
    warned("'evil.safetensors' was made by another model: it had `variant='<script>")
    tab.set_input_files("input[type=file]", saved)
    says("#status", f"{len(TRICKS) + 1:,} tokens read")

    assert tab.evaluate("window.tricked") is None
    assert wrong == []
    assert connections == {"127.0.0.1"}
