"""A page to look into a memory: paste text, see the surprise, keep the memory, ask. `titans studio` opens it.

`Studio` is what the buttons do, without a browser; `build` puts it on a page. Every tab has a `TitansCache` of its own.
No step changes the cache it is given; it returns another. A step that fails leaves no trace.
"""

import html
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
from transformers import TextIteratorStreamer

from ..cache_titans import TitansCache
from ..hub.loading import size
from ..surprise import SurpriseTrace, token_texts
from ..surprise_views import NOTEBOOK_TOKENS, html_view
from .answering import Style, answer, read
from .reading import as_row, opening_tokens

LONGEST = {"text": 200_000, "question": 10_000}  # characters; `titans remember` reads any number
PIECE = 500  # tokens between two progress updates
MOST_TOKENS = 512  # of an answer
SLACK = 1 << 24  # bytes of an uploaded file besides its tensors: the fingerprint of a model's weights
SESSIONS = 32  # tabs whose memory is kept
ON_THE_PAGE = {"api_visibility": "private"}
IN_TURN = {**ON_THE_PAGE, "concurrency_id": "memory", "concurrency_limit": 1}  # each step finds the last one's memory
PROBLEMS = (ValueError, OSError, RuntimeError)  # bad input, full disks, out of memory

HINT = "<p>Paste a text and read it: every token is coloured by the memory's surprise at it.</p>"
REMEMBER = "Remember the conversation: go on from it"
DOWNLOAD = "(file) => { if (file) document.querySelector('#file').click() }"
SANS, MONO = ("ui-sans-serif", "system-ui", "sans-serif"), ("ui-monospace", "Consolas", "monospace")
CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto }
#about h1 { margin: 0 }
#about p, #surprise th { opacity: 0.7 }
#status { font-size: var(--text-lg) }
#surprise .titans-surprise > p:nth-child(2) { max-height: 65vh; overflow-y: auto; margin-top: 0.5em }
#surprise table { margin-top: 1em; font-size: var(--text-sm); border-spacing: 1em 0; margin-left: -1em }
#surprise th { font-weight: normal }
#surprise th, #surprise td { padding: 0; line-height: 1.6 }
"""


class Abandoned(Exception):
    """The page was closed while an answer was generated."""


class Words(TextIteratorStreamer):
    """Streams an answer, and stops it at the next token when the page is closed."""

    def __init__(self, tokenizer, leaving: threading.Event):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.leaving, self.abandoned = leaving, False

    def put(self, value) -> None:
        if self.abandoned or self.leaving.is_set():
            raise Abandoned
        super().put(value)


class Studio:
    """What the page does, for any number of tabs and one model.

    Args:
        start: the memory that every tab starts with; an empty one by default.
        note: the metadata of a saved memory's file.
    """

    def __init__(self, model, tokenizer, start: TitansCache | None = None, note: dict[str, str] | None = None):
        self.model, self.tokenizer, self.note = model, tokenizer, note
        self.start = TitansCache(model.config) if start is None else start
        self.busy = threading.Lock()  # tracing surprise would also record what another thread reads
        self.leaving = threading.Event()  # set to end work in progress
        probe = TitansCache(model.config)
        read(model, probe, [0])
        self.nbytes = probe.nbytes  # of every memory, whatever it read

    def tokens(self, memory: TitansCache, text: str, what: str) -> list[int]:
        """The tokens of a text that follows what the memory has read."""
        if not text.strip():
            raise ValueError(f"There is no {what} yet: type or paste one.")
        if len(text) > LONGEST[what]:
            raise ValueError(
                f"The {what} has {len(text):,} characters, and this page takes {LONGEST[what]:,}. A longer text can be "
                "read in parts, or with `titans remember`, whose memory this page loads."
            )
        text = text.encode("utf-8", "replace").decode("utf-8")  # a browser may send lone surrogates
        opening = [] if memory.get_seq_length() else opening_tokens(self.tokenizer)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise ValueError(f"The tokenizer makes nothing of the {what}.")
        return [*opening, *ids]

    def read(
        self, memory: TitansCache, text: str, report: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[TitansCache, SurpriseTrace, int]:
        """Read a text: the memory after it, the surprise of its first tokens, and how many it has."""
        ids, memory, trace = self.tokens(memory, text, "text"), memory.clone(), None
        for start in range(0, len(ids), PIECE):
            part = ids[start : start + PIECE]
            if self.leaving.is_set():
                raise Abandoned
            with self.busy:
                if start < NOTEBOOK_TOKENS:
                    seen = self.model.trace_surprise(as_row(self.model, part), memory)
                    trace = seen if trace is None else trace + seen
                else:
                    read(self.model, memory, part)
            report(start + len(part), len(ids))
        trace.tokens = token_texts(self.tokenizer, ids[: len(trace)])
        return memory, trace, len(ids)

    def ask(
        self, memory: TitansCache, question: str, style: Style, read_only: bool = False, remember: bool = False
    ) -> Iterator[tuple[str, TitansCache]]:
        """Read a question and generate: yields the answer so far, and the memory to continue from.

        This is the given memory until the answer is complete, if it is to be remembered.
        """
        if read_only and remember:
            raise ValueError("Read only keeps nothing: untick it, or untick remembering.")
        ids, copy = self.tokens(memory, question, "question"), memory.clone()
        words, text = Words(self.tokenizer, self.leaving), ""
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(self._write, copy, ids, style, words, read_only, remember)
            writing.add_done_callback(lambda _: words.text_queue.put(words.stop_signal))  # an error ends it too
            try:
                for part in words:
                    text += part
                    yield text, memory
            finally:
                words.abandoned = True
        yield writing.result(), copy if remember else memory

    def _write(self, memory: TitansCache, ids: list[int], style: Style, words: Words, read_only: bool, remember: bool):
        with self.busy:
            written, unread = answer(self.model, memory, ids, style, words, read_only)
            if remember:
                read(self.model, memory, unread)
        return self.tokenizer.decode(written, skip_special_tokens=True)

    def save(self, memory: TitansCache, folder: str | os.PathLike) -> Path:
        """Write the memory as a file."""
        if not memory.get_seq_length():
            raise ValueError("There is nothing to save yet: read a text first.")
        path = Path(folder) / f"memory-of-{memory.get_seq_length()}-tokens.safetensors"
        memory.save(path, self.model, self.note)
        return path

    def load(self, path: str | os.PathLike) -> TitansCache:
        """The memory of an uploaded file, which is untrusted."""
        try:
            with self.busy:
                memory = TitansCache.load(path, self.model)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(os.fspath(path), Path(path).name)) from error
        rows = memory.layers[0].batch_size
        if rows != 1:
            raise ValueError(f"{Path(path).name!r} holds the memories of {rows} texts, and this page goes on from one.")
        return memory

    def status(self, memory: TitansCache) -> str:
        """What is in the memory, as Markdown."""
        count = memory.get_seq_length()
        return f"Memory: **{count:,}** {'token' if count == 1 else 'tokens'} read, kept in **{size(self.nbytes)}**"

    def about(self) -> str:
        """The model in one line."""
        config = self.model.config
        count = len([layer for layer in self.model.base_model.layers if layer.memory is not None])
        some = "" if count == config.num_hidden_layers else f", {count} of them"
        parts = (
            f"`{Path(self.model.name_or_path).name or 'a model'}`",
            f"variant {config.variant}",
            f"{config.num_hidden_layers} layers{some} with {config.memory_num_heads} memory heads each",
            f"{self.model.num_parameters():,} parameters",
        )
        return ", ".join(parts)


def coloured(trace: SurpriseTrace, total: int) -> str:
    """The text with coloured background, as HTML; only the beginning of a long one."""
    rest = (
        f"<p>Shown are the first {len(trace):,} of {total:,} tokens. All were read.</p>" if total > len(trace) else ""
    )
    return html_view(trace) + rest


@contextmanager
def told() -> Iterator[None]:
    """Show an error on the page, which stays as it is. Messages are escaped: they may quote files."""
    try:
        yield
    except Abandoned:
        pass
    except PROBLEMS as error:
        message = str(error) or type(error).__name__
        gr.Warning(html.escape(message if len(message) < 500 else f"{message[:500]} ..."))


# The page


def build(model, tokenizer, cache: TitansCache | None = None, note: dict[str, str] | None = None) -> gr.Blocks:
    """The page for a model, to `open_page`; every tab starts with a copy of `cache`."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # no telemetry
    studio = Studio(model, tokenizer, cache, note)
    with gr.Blocks(title="Titans studio", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True) as page:
        gr.Markdown(f"# Titans studio\n{studio.about()}", elem_id="about")
        memory = gr.State(studio.start)
        with gr.Row():
            with gr.Column(scale=3, min_width=420):
                _reading_part(studio, memory)
            with gr.Column(scale=2, min_width=340):
                _memory_part(studio, memory)
                _asking_part(studio, memory)
    page.studio = studio
    return page


def _reading_part(studio: Studio, memory: gr.State) -> None:
    text = gr.Textbox(label="Text", lines=8, max_lines=16, placeholder="Paste a text.", elem_id="text")
    with gr.Row():
        button = gr.Button("Read", variant="primary", scale=3, size="md", elem_id="read")
        again = gr.Button("Start over", scale=1, size="md", elem_id="start-over")
    view = gr.HTML(HINT, elem_id="surprise", padding=True, container=True, min_height=120, apply_default_css=False)

    def read_text(before: TitansCache, text: str, progress=gr.Progress()):  # noqa: B008  gradio's way to hand it over
        with told():
            after, trace, total = studio.read(before, text, lambda *done: progress(done, unit="tokens"))
            return after, coloured(trace, total)
        return gr.skip()

    button.click(read_text, [memory, text], [memory, view], show_progress_on=view, **IN_TURN)
    again.click(lambda: (studio.start.clone(), HINT), None, [memory, view], **IN_TURN)


def _memory_part(studio: Studio, memory: gr.State) -> None:
    status = gr.Markdown(studio.status(studio.start), elem_id="status", container=True)
    with gr.Row():
        save = gr.Button("Save the memory", size="md", elem_id="save")
        load = gr.UploadButton("Load a memory", size="md", file_types=[".safetensors"], elem_id="load")
    file = gr.DownloadButton(visible="hidden", elem_id="file")

    def save_memory(memory: TitansCache):
        with told(), tempfile.TemporaryDirectory() as folder:
            yield str(studio.save(memory, folder))  # gradio copies the file before the generator resumes
            return
        yield None

    def load_memory(path: str):
        with told():
            return studio.load(path)
        return gr.skip()

    saving = save.click(save_memory, memory, file, **IN_TURN)
    saving.then(None, file, None, js=DOWNLOAD)
    load.upload(load_memory, load, memory, **IN_TURN)
    memory.change(studio.status, memory, status, show_progress="hidden", **ON_THE_PAGE)


def _asking_part(studio: Studio, memory: gr.State) -> None:
    question = gr.Textbox(label="Question", placeholder="The model reads it and writes on.", elem_id="question")
    button = gr.Button("Ask", variant="primary", size="md", elem_id="ask")
    reply = gr.Textbox(label="Answer", lines=6, max_lines=20, interactive=False, elem_id="answer")
    with gr.Group():
        remember = gr.Checkbox(label=REMEMBER, elem_id="remember")
        read_only = gr.Checkbox(label="Read only: answer without writing into the memory", elem_id="read-only")
        with gr.Row():
            length = gr.Slider(1, MOST_TOKENS, value=64, step=1, precision=0, label="Tokens", elem_id="length")
            warmth = gr.Slider(0, 2, value=0, step=0.1, label="Temperature", elem_id="temperature")

    def ask(before: TitansCache, question: str, length: int, warmth: float, read_only: bool, remember: bool):
        with told():
            yield from studio.ask(before, question, Style(length, warmth), read_only, remember)

    gr.on(
        [button.click, question.submit],
        ask,
        [memory, question, length, warmth, read_only, remember],
        [reply, memory],
        show_progress="minimal",
        **IN_TURN,
    )


def open_page(page: gr.Blocks, host: str, port: int) -> str:
    """Serve the page in the background, without links, history or files of others; returns its address."""
    fonts = {"font": SANS, "font_mono": MONO}  # the system's: none is fetched
    for name in ("no_proxy", "NO_PROXY"):  # gradio requests its own page at the start
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "localhost", "127.0.0.1", host)))
    _, address, _ = page.queue(max_size=SESSIONS).launch(
        server_name=host,
        server_port=port,
        share=False,
        inline=False,
        prevent_thread_lock=True,
        quiet=True,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        max_file_size=page.studio.nbytes + SLACK,
        state_session_capacity=SESSIONS,
        theme=gr.themes.Default(**fonts),
        css=CSS,
    )
    return address


def close_page(page: gr.Blocks) -> None:
    """Stop work in progress and the server, without waiting for open tabs."""
    page.studio.leaving.set()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would log every open tab
    page.server.force_exit = True
    page.close(verbose=False)
