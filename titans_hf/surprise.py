"""Records each memory's surprise, gates and norm at every token of a text (Section 3.1).

The surprise of a token is the memory's loss just before the token is written, `|M_{t-1}(k_t) - v_t|^2` (Eq. 12).
`trace` runs the unchanged model and records through forward hooks.

Axis letters: B batch, L layers with a memory, H memory heads, T tokens, D head width, n tokens of one chunk.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cache_titans import TitansCache
from .memory_closed_form import Coefficients, OpenChunk, advance, chunk_coefficients, read_tokens
from .memory_layer import NeuralMemory
from .memory_ops import recall
from .memory_rule import Rule
from .memory_state import MemoryState
from .snapshots import whole_file

FIELDS = ("surprise", "scale", "theta", "eta", "alpha", "norm")


@dataclass
class SurpriseTrace:
    """The record of one text; each tensor is [L, H, T], on the CPU, in float32 or float64.

    Attributes:
        surprise: the loss `|M(k) - v|^2` of the token, just before it was written.
        scale: `|v|^2`, the loss of an empty memory: `surprise / scale` is 1 where the memory knew nothing.
        theta, eta, alpha: the token's gates: step size, momentum decay and forget gate.
        norm: the norm of all the memory's weights after the token; computed from squares, which underflow to exactly 0
            for weights below about 1e-23 in float32.
        tokens: the text of each token, if a tokenizer was given.
    """

    surprise: Tensor
    scale: Tensor
    theta: Tensor
    eta: Tensor
    alpha: Tensor
    norm: Tensor
    tokens: list[str] | None = None

    def __len__(self) -> int:
        return self.surprise.shape[-1]

    def __repr__(self) -> str:
        layers, heads, tokens = self.surprise.shape
        mean = self.per_token().mean().item() if tokens else float("nan")
        return f"SurpriseTrace({tokens:,} tokens, {layers} layers, {heads} heads, mean relative surprise {mean:.3f})"

    def relative(self) -> Tensor:
        """[L, H, T] `surprise / scale`: 0 where the memory predicted the token, 1 where it knew nothing."""
        return self.surprise / self.scale.clamp(min=torch.finfo(self.scale.dtype).tiny)

    def per_token(self, layer: int | None = None) -> Tensor:
        """[T] relative surprise of one layer, or the mean over layers.

        A layer's value is the median of its heads, which a single diverged head does not change much.
        """
        by_layer = self.relative().median(dim=1).values  # [L, T]
        return by_layer.mean(0) if layer is None else by_layer[layer]

    def __add__(self, later: "SurpriseTrace") -> "SurpriseTrace":
        """The trace of two texts that were read one after the other."""
        fields = [torch.cat((getattr(self, name), getattr(later, name)), dim=-1) for name in FIELDS]
        both = self.tokens is not None and later.tokens is not None
        return SurpriseTrace(*fields, tokens=self.tokens + later.tokens if both else None)

    def __getitem__(self, part: slice) -> "SurpriseTrace":
        """The trace of a slice of the tokens."""
        fields = [getattr(self, name)[..., part] for name in FIELDS]
        return SurpriseTrace(*fields, tokens=None if self.tokens is None else self.tokens[part])

    def __rich__(self):
        from .surprise_views import terminal_view

        return terminal_view(self)

    def show(self) -> None:
        """Print the text, coloured by surprise, and a table with one row per layer."""
        from .surprise_views import terminal

        terminal().print(self)

    def _repr_html_(self) -> str:
        from .surprise_views import html_view

        return html_view(self)

    def save_html(self, path: str | os.PathLike, title: str = "Surprise") -> None:
        """Save the coloured text as a complete HTML page."""
        from .surprise_views import html_page

        with whole_file(path) as file:
            file.write_text(html_page(self, title), encoding="utf-8")

    def save_png(self, path: str | os.PathLike, title: str = "Surprise") -> None:
        """Save a plot of surprise by layer and head, gates and memory norm over the tokens."""
        from .surprise_views import figure

        with whole_file(path) as file:
            figure(self, title).savefig(file, format="png")


def trace(
    model: nn.Module,
    input_ids: Tensor,
    past_key_values: TitansCache | None = None,
    tokenizer=None,
    memory_read_only: bool = False,
    piece: int = 1024,
) -> SurpriseTrace:
    """The trace of one text, [T] or [1, T], read in pieces; see `TitansPreTrainedModel.trace_surprise`."""
    rows = input_ids[None] if input_ids.dim() == 1 else input_ids
    if rows.dim() != 2 or rows.shape[0] != 1 or not rows.shape[1]:
        raise ValueError(f"`input_ids` must be one text, [tokens] or [1, tokens], got shape {tuple(input_ids.shape)}")
    if piece < 1:
        raise ValueError(f"`piece` must be at least 1 token, got {piece}")
    stack = model.base_model
    rows = rows.to(stack.embed_tokens.weight.device)
    cache = TitansCache(model.config, rewind=False) if past_key_values is None else past_key_values
    tokens = None if tokenizer is None else token_texts(tokenizer, rows[0].tolist())
    memories = [layer.memory for layer in stack.layers if layer.memory is not None]
    if not memories:
        raise ValueError("the model has no memory to trace: `memory_layers` is empty")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _recorded(memories) as records:
            for part in rows.split(piece, dim=1):
                stack(part, past_key_values=cache, use_cache=True, memory_read_only=memory_read_only)
    finally:
        model.train(training)
    fields = {name: torch.stack([torch.cat([x[name] for x in parts], dim=-1) for parts in records]) for name in FIELDS}
    return SurpriseTrace(**fields, tokens=tokens)


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds. A character split over several tokens appears at its last token."""
    texts, known, pending = [], [], []
    for token in ids:
        pending.append(token)
        context, text = (tokenizer.decode(x, clean_up_tokenization_spaces=False) for x in (known, known + pending))
        whole = not text.endswith("\ufffd") or len(pending) == 4
        texts.append(text[len(context) :] if whole else "")
        if whole:
            known, pending = pending, []
    return texts


@contextmanager
def _recorded(memories: list[NeuralMemory]) -> Iterator[list[list[dict[str, Tensor]]]]:
    """A list per memory that gets, inside the context, one dict of fields [H, T] for every call."""
    records = [[] for _ in memories]
    hooks = [
        memory.register_forward_hook(_recorder(parts), with_kwargs=True)
        for memory, parts in zip(memories, records, strict=True)
    ]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def _recorder(parts: list[dict[str, Tensor]]):
    """A forward hook that appends the fields of each call to `parts`."""

    def record(memory: NeuralMemory, args: tuple, options: dict, output: tuple) -> None:
        if "chunk_size" in options:  # the call for the persistent tokens, which are not part of the text
            return
        _, carry, lengths, read_only = args
        written = output[2]
        real = slice(None if lengths is None else int(lengths[0]))
        k, v = (x[:, real].transpose(1, 2) for x in (written.k, written.v))  # [1, H, T, D]
        gates = written.gates[:, real].permute(2, 0, 3, 1)  # [3, 1, H, T]
        fields = _fields_when_read if read_only else _fields_when_written
        found = fields(carry.state, k, v, gates, memory.chunk_size, memory.rule)
        parts.append({name: x[0].cpu() for name, x in zip(FIELDS, found, strict=True)})

    return record


def _fields_when_written(state: MemoryState, k: Tensor, v: Tensor, gates: Tensor, chunk_size: int, rule: Rule):
    """The fields of a trace, each [B, H, T], for tokens that are written into the given state."""
    k, v, gates = (x.to(state.weights[0].dtype) for x in (k, v, gates))
    state = state.opened(chunk_size)
    weights, momentum, place = state.weights, state.momentum, int(state.length[0])
    start, found = 0, []
    while start < k.shape[2]:
        part = slice(start, start + chunk_size - place)
        chunk = state.open_chunk() if place else OpenChunk.empty(weights, chunk_size)
        memory = weights, momentum, state.start
        inputs, errors = rule.factors(*memory, chunk, gates[..., part], k[:, :, part], v[:, :, part])
        open_gates = gates[..., part]
        if place:  # the chunk already holds tokens of the last call
            inputs = _behind(state.inputs, inputs, place, dim=-2)
            errors = _behind(state.errors, errors, place, dim=-2)
            open_gates = _behind(state.gates, open_gates, place, dim=-1)
        after = chunk_coefficients(*open_gates)
        answers = read_tokens(*memory, inputs, errors, _before(after, place), k[:, :, part])
        norm = _norms(*memory, inputs, errors, after)[..., place:]
        found.append((rule.loss(answers, v[:, :, part]), norm))
        weights, momentum = advance(*memory, inputs, errors, after.last())
        start, place = part.stop, 0
    surprise, norm = (torch.cat(parts, dim=-1) for parts in zip(*found))
    return surprise, v.square().sum(-1), *gates, norm


def _fields_when_read(state: MemoryState, k: Tensor, v: Tensor, gates: Tensor, chunk_size: int, rule: Rule):
    """The same for tokens that are not written: the memory does not change, and all gates are 0."""
    weights, _ = state.current()
    answers = recall(weights, k.transpose(1, 2)).transpose(1, 2)
    norm = _norm(weights)[..., None].expand(k.shape[:3])
    return rule.loss(answers, v), v.square().sum(-1), *torch.zeros_like(gates), norm


def _norm(weights: tuple[Tensor, ...]) -> Tensor:
    """[B, H] the norm over all layers of the memory."""
    return sum(W.square().sum((-2, -1)) for W in weights).sqrt()


def _behind(old: tuple[Tensor, ...], new: tuple[Tensor, ...] | Tensor, place: int, dim: int) -> tuple[Tensor, ...]:
    """The first `place` tokens of the open chunk, followed by the new ones."""
    return tuple(torch.cat((x.narrow(dim, 0, place), y), dim) for x, y in zip(old, new, strict=True))


def _before(after: Coefficients, place: int) -> Coefficients:
    """The coefficients of the memory just before each token from `place` on: those after the token before it."""
    start = Coefficients(*(torch.zeros_like(x[..., :1, :]) for x in after))
    start = start._replace(A=torch.ones_like(start.A), m=torch.ones_like(start.m))
    return Coefficients(*(torch.cat((x, y[..., :-1, :]), -2)[..., place:, :] for x, y in zip(start, after)))


def _norms(weights, momentum, start, inputs, errors, after: Coefficients) -> Tensor:
    """[B, H, n] the norm of `M_t = A W + B S + (1 - A) start - sum C_i u_i` over all layers, without computing any."""
    A, B, C = after.A[..., 0], after.B[..., 0], after.C
    shares = torch.stack((A, B) if start is None else (A, B, 1 - A), dim=-1)  # [B, H, n, 2 or 3]
    total = 0.0
    for *state, a, g in zip(*(weights, momentum, *([] if start is None else [start])), inputs, errors, strict=True):
        state = torch.stack(torch.broadcast_tensors(*state), dim=2)  # [B, H, 2 or 3, in, out]
        flat = state.flatten(3)
        of_u = ((a[:, :, None] @ state) * g[:, :, None]).sum(-1)  # [B, H, 2 or 3, n]: inner products with every u
        uu = (a @ a.mT) * (g @ g.mT)  # [B, H, n, n]
        total = total + ((shares @ (flat @ flat.mT)) * shares).sum(-1) + ((C @ uu) * C).sum(-1)
        total = total - 2 * ((C @ of_u.mT) * shares).sum(-1)
    return total.clamp(min=0).sqrt()
