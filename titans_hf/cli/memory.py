"""`titans remember` reads text into a memory and keeps it as a file; `titans ask` continues from it."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hub.loading import CommandError, Dtype, load, read_memory_note, say, size
from .support import DeviceOption, DtypeOption, ModelOption, check_inputs, check_model, check_output

if TYPE_CHECKING:
    from .reading import Reader

TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")]


def remember(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="UTF-8 text; - is the standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to keep the memory.")],
    model: ModelOption = None,
    memory: Annotated[
        Path | None, typer.Option("--memory", metavar="FILE", help="Go on from this memory instead of an empty one.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Tokens to read at a time.")] = 4096,
) -> None:
    """Read text, and keep the memory of it as a file.

    Any length is read at constant cost per token and in constant memory. Each file is tokenised as a text of its own,
    streamed, into the tokens it has as a whole: windows of it overlap and are joined where they agree. Only an empty
    memory gets the tokenizer's beginning-of-text token.

    \b
    titans remember book.txt --model runs/demo --out book.safetensors
    cat *.txt | titans remember - --memory book.safetensors --out more.safetensors
    """
    check_model(model, memory)
    check_inputs([*files, *([memory] if memory else [])])
    check_output(out)
    loaded = load(model, memory, dtype, device)
    from .reading import Reader, opening_tokens

    reader = Reader(loaded.model, loaded.recall(memory))
    opening = [] if memory else opening_tokens(loaded.tokenizer)
    started = time.perf_counter()
    read_files(reader, files, loaded.tokenizer, opening, pieces)
    seconds = time.perf_counter() - started
    if reader.tokens <= len(opening):
        raise CommandError(f"there is no text in {', '.join(map(str, files))}")
    reader.cache.save(out, loaded.model, loaded.note())
    rows = {
        "read": f"{reader.tokens:,} tokens in {seconds:,.1f} s, {reader.tokens / seconds:,.0f} tokens/s",
        "perplexity": "-" if reader.perplexity is None else f"{reader.perplexity:,.1f} while reading",
        "memory": f"{out}, {size(out.stat().st_size)}, of {reader.cache.get_seq_length():,} tokens",
        "next": f'titans ask --memory {out} "..."',
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12}{value}")


def read_files(reader: "Reader", files: list[Path], tokenizer, opening: list[int], length: int) -> None:
    """Read every file, after the tokens that open a text, with a progress bar on a terminal."""
    from tqdm import tqdm

    from .reading import characters, pieces, tokens

    total = None if Path("-") in files else sum(file.stat().st_size for file in files)
    bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False, desc="reading")

    def every_token():
        yield opening
        for file in files:
            with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
                yield from tokens(characters(source, str(file), bar.update), tokenizer)

    with bar:
        for piece in pieces(every_token(), length):
            reader.read(piece)
            spent = bar.format_dict["elapsed"] or 1
            bar.set_postfix_str(f"{reader.tokens:,} tokens, {reader.tokens / spent:,.0f} tokens/s")


def ask(
    question: Annotated[str, typer.Argument(help="Read as it stands, right after the text.")],
    memory: Annotated[Path, typer.Option("--memory", metavar="FILE", help="A memory that `titans remember` kept.")],
    model: ModelOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the question as a turn of the chat template.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Answer without writing into the memory.")] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", "--out", metavar="FILE", help="Keep the memory after question and answer."),
    ] = None,
    max_new_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Ask about what was read earlier.

    The answer is the one that the reading process would have given. The question continues the text, without a token
    in between, and the model continues it, as suits a model that was trained on plain text. With --chat it becomes a
    turn of the model's chat template. The memory's file stays as it is; --save keeps the memory with question and
    answer. The answer goes to the standard output, everything else to the standard error.

    \b
    titans ask --memory book.safetensors "A class is"
    titans ask --memory book.safetensors "Who is Ahab?" --chat --save asked.safetensors
    """
    if not question:
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    if read_only and save:
        raise typer.BadParameter("--read-only keeps nothing: leave out --save", param_hint="--save")
    check_inputs([memory])
    if save:
        check_output(save)
    loaded = load(model, memory, dtype, device)
    from transformers import TextStreamer, set_seed

    from .answering import Style, Turns, answer, read

    cache = loaded.recall(memory)
    say(f"memory: {memory}, of {cache.get_seq_length():,} tokens")
    turns = Turns(loaded.tokenizer) if chat else None
    if turns is None:
        ids = loaded.tokenizer(question, add_special_tokens=False).input_ids
    else:
        ids = turns.tokens(question, opened="chat" in read_memory_note(memory))
    if not ids:
        raise CommandError("the tokenizer makes nothing of the question")
    set_seed(seed)
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    _, unread = answer(loaded.model, cache, ids, Style(max_new_tokens, temperature), streamer, read_only)
    if save:
        read(loaded.model, cache, [*unread, *(turns.closing if turns else ())])
        cache.save(save, loaded.model, loaded.note(in_chat=chat))
        say(f"saved: {save}, {size(save.stat().st_size)}, of {cache.get_seq_length():,} tokens")
