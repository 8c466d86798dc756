"""Generate from a cache: a continuation of what was read, or turns of the model's chat template."""

from dataclasses import dataclass

import torch

from ..cache_titans import TitansCache
from .reading import as_row

ASKED, SAID = "a", "b"  # placeholders for earlier turns, which are in the memory and nowhere else


@dataclass(frozen=True)
class Style:
    """How to write: greedily at temperature 0, else sampled."""

    max_new_tokens: int = 128
    temperature: float = 0.0

    def options(self) -> dict:
        sampling = {"temperature": self.temperature} if self.temperature else {}
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, "do_sample": bool(sampling), **sampling}


@torch.no_grad()
def read(model, cache: TitansCache, ids: list[int]) -> None:
    """Read tokens, if there are any."""
    if ids:
        model.model(input_ids=as_row(model, ids), past_key_values=cache)


def answer(
    model, cache: TitansCache, ids: list[int], style: Style, streamer=None, read_only: bool = False
) -> tuple[list[int], list[int]]:
    """Read tokens and generate.

    Returns the tokens written, without an end-of-text, and those of them that the cache has not read yet: `generate`
    does not read its last one.
    """
    start = cache.get_seq_length() + len(ids)
    seen = torch.ones(1, start, dtype=torch.bool, device=model.device)  # says that the cache holds more than `ids`
    found = model.generate(
        as_row(model, ids),
        attention_mask=seen,
        past_key_values=cache,
        memory_read_only=read_only,
        streamer=streamer,
        **style.options(),
    )
    written = found[0, len(ids) :].tolist()
    if written and written[-1] in _ends(model):
        written = written[:-1]
    return written, written[cache.get_seq_length() - start :]


def _ends(model) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


class Turns:
    """A chat template, turn by turn: the tokens that a turn adds to a conversation, whatever was said before.

    A template renders whole conversations. What a turn adds is the difference between two of them, and they must begin
    alike: a template that rewrites earlier turns is refused.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template: use `titans ask`, which continues the text")
        self.tokenizer = tokenizer
        self._past = [_user(ASKED), {"role": "assistant", "content": SAID}]
        self._past_text = self._render(self._past)
        asked = self._render(self._past[:1], to_answer=True) + SAID
        self.closing = self._encode(self._added(asked, self._past_text))  # what follows an answer

    def tokens(self, text: str, opened: bool, fresh: bool = False) -> list[int]:
        """What the user's next turn adds.

        Args:
            opened: whether the last thing read was a closed answer; else this turn opens a conversation.
            fresh: whether nothing was read before: only then may a conversation open with a beginning-of-text token.
        """
        if opened:
            return self._encode(self._added(self._past_text, self._render([*self._past, _user(text)], to_answer=True)))
        rendered, begin = self._render([_user(text)], to_answer=True), self.tokenizer.bos_token
        return self._encode(rendered if fresh or not begin else rendered.removeprefix(begin))

    def _added(self, before: str, after: str) -> str:
        if not after.startswith(before):
            raise ValueError(
                "this model's chat template changes earlier turns when a new one comes, so it cannot be read turn by "
                "turn: use `titans ask`"
            )
        return after[len(before) :]

    def _render(self, messages: list[dict], to_answer: bool = False) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer)
        except TemplateError as error:
            raise ValueError(f"this model's chat template cannot render the conversation: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def _user(text: str) -> dict:
    return {"role": "user", "content": text}
