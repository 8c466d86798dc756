"""`titans studio` opens a page to read text, see the surprise, keep the memory and ask."""

import errno
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, Dtype, load, say
from .support import DeviceOption, DtypeOption, ModelOption, check_inputs, check_model


def studio(
    model: ModelOption = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            "--memory", metavar="FILE", help="The memory that every tab starts with; the file is not changed."
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the page; 0 takes a free one.")] = 7860,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 opens the page to the network.")
    ] = "127.0.0.1",
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Open a page in which to paste text, see the surprise, keep the memory and ask.

    Every tab of the browser has a memory of its own. A memory can be saved as a file, which `titans ask` understands,
    and loaded again. Nothing is fetched from the network, and nothing is left on the disk. Ctrl-C ends it.

    \b
    titans studio --model runs/demo
    titans studio --memory book.safetensors --port 8000
    """
    check_model(model, memory)
    if memory is not None:
        check_inputs([memory])
    port = check_port(host, port)
    with tempfile.TemporaryDirectory(prefix="titans-studio-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # read when gradio is imported
        build, open_page, close_page = page_tools()
        loaded = load(model, memory, dtype, device)
        page = build(loaded.model, loaded.tokenizer, loaded.recall(memory), loaded.note())
        try:
            typer.echo(f"{'studio':<12}{open_page(page, host, port)}")
            say("Ctrl-C ends it")
            threading.Event().wait()
        except KeyboardInterrupt:
            say("closed")
        finally:
            close_page(page)


def page_tools():
    """What makes, opens and closes a page, if gradio is installed."""
    try:
        from .studio_page import build, close_page, open_page
    except ImportError as error:
        raise CommandError(f'titans studio needs gradio ({error}): pip install "titans-hf[viz]"') from error
    return build, open_page, close_page


def check_port(host: str, port: int) -> int:
    """A port that can be listened on, before a model is loaded for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closed ones may linger
            listener.bind(address)
            return listener.getsockname()[1]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} of {host} is in use: pass another --port, or 0 for a free one") from error
        raise CommandError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
