"""`titans chat`: a conversation that continues where the last one ended."""

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hub.loading import CommandError, Dtype, Loaded, load, read_memory_note, say
from .memory import SeedOption, TemperatureOption, TokensOption
from .support import DeviceOption, DtypeOption, ModelOption, check_model, check_output

if TYPE_CHECKING:
    from ..cache_titans import TitansCache
    from .answering import Style, Turns

HELP = """\
/save [FILE]  keep the memory now
/forget       start from an empty memory; the file keeps the old one until the next save
/exit         save and leave, like Ctrl-D and Ctrl-C
/help         show this"""


@dataclass
class Conversation:
    """A model, its memory and the file of it.

    Attributes:
        opened: whether the memory ends with a closed turn, so that the next one continues the conversation.
        changed: whether something was said since the memory was last saved.
    """

    loaded: Loaded
    cache: "TitansCache"
    turns: "Turns"
    style: "Style"
    file: Path | None
    opened: bool = False
    changed: bool = field(default=False, init=False)

    def say(self, text: str) -> None:
        """One turn, read into a copy of the memory: an interrupted turn leaves no trace."""
        from transformers import TextStreamer

        from .answering import answer, read

        ids = self.turns.tokens(text, self.opened, fresh=self.cache.get_seq_length() == 0)
        cache = self.cache.clone()
        streamer = TextStreamer(self.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        _, unread = answer(self.loaded.model, cache, ids, self.style, streamer)
        read(self.loaded.model, cache, [*unread, *self.turns.closing])
        self.cache, self.opened, self.changed = cache, True, True

    def forget(self) -> None:
        self.cache, self.opened, self.changed = self.loaded.recall(None), False, False
        say("forgotten; the next turn is the first")

    def save(self, file: Path | None = None) -> None:
        file = file or self.file
        if file is None:
            raise CommandError("where to? /save FILE")
        if self.cache.get_seq_length() == 0:
            raise CommandError("nothing was said yet: there is nothing to save")
        check_output(file)
        self.cache.save(file, self.loaded.model, self.loaded.note(in_chat=self.opened))
        self.changed = self.changed and file != self.file
        say(f"saved: {file}, of {self.cache.get_seq_length():,} tokens")

    def finish(self) -> None:
        """Save what is new."""
        if self.changed and self.file is not None:
            self.save()
        elif self.changed:
            say("not saved: start with --memory FILE to keep a conversation")

    def obey(self, line: str) -> bool:
        """Run a command that starts with a slash; returns whether to continue."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        try:
            if name == "/save":
                self.save(Path(rest.strip()) if rest.strip() else None)
            elif name == "/forget":
                self.forget()
            else:
                say(HELP if name == "/help" else f"there is no {name}; /help shows what there is")
        except (CommandError, OSError) as error:  # no reason to end a conversation
            say(str(error))
        return True

    def run(self) -> None:
        """Turn by turn, until the lines end."""
        while (line := next_line()) is not None:
            if line.startswith("/"):
                if not self.obey(line):
                    return
            elif line.strip():
                self.say(line)


def next_line() -> str | None:
    """What the user types; None at the end. Piped lines come without a prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def edit_lines() -> None:
    """Arrow keys and a history at the prompt, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401  importing it is all it takes


def chat(
    model: ModelOption = None,
    memory: Annotated[
        Path | None,
        typer.Option("--memory", metavar="FILE", help="Go on from this memory, and save it here at the end."),
    ] = None,
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Talk to a model, and continue another day.

    Needs a tokenizer with a chat template. Every turn costs the same, however long the conversation is: the memory has
    read what was said, and only the new turn is read. Ctrl-D, Ctrl-C or /exit ends it and saves the memory; a turn that
    Ctrl-C interrupts is discarded. /help shows more. Turns may come from a pipe, one per line.

    \b
    titans chat --model runs/demo --memory talk.safetensors
    echo "What is a class?" | titans chat --memory talk.safetensors
    """
    check_model(model, memory)
    if memory is not None:
        check_output(memory)
    earlier = memory if memory is not None and memory.exists() else None
    if earlier is None and model is None:
        raise CommandError(f"{memory} is new, so it names no model: pass --model DIR")
    loaded = load(model, earlier, dtype, device)
    from transformers import set_seed

    from .answering import Style, Turns

    talk = Conversation(
        loaded,
        loaded.recall(earlier),
        Turns(loaded.tokenizer),
        Style(max_new_tokens, temperature),
        memory,
        opened="chat" in read_memory_note(earlier),
    )
    say(f"memory: {memory or 'not kept'}, of {talk.cache.get_seq_length():,} tokens; /help for help")
    set_seed(seed)
    edit_lines()
    try:
        talk.run()
    except KeyboardInterrupt:
        typer.echo("")  # end the line of the answer or the prompt
        raise
    finally:
        talk.finish()
