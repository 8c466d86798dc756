"""The four ways to use the memory beside attention (Section 4): as context, as gate, as layer, and alone.

Axis letters: B batch, T tokens, H heads, D head width, P persistent tokens, C segment, W window. Rows hold their real
tokens at the front (`Rows`), so that padding is never computed on and never written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention_titans import Rows, SegmentAttention, SlidingAttention, rotate
from .carry_titans import LayerCarry
from .configuration_titans import TitansConfig
from .memory_layer import MemoryCarry, NeuralMemory, TitansRMSNorm, Written
from .memory_ops import MemoryState
from .rows import RowCut, on_host, where_rows
from .tails import Tail


class BranchNorm(TitansRMSNorm):
    """The norm at the end of a residual branch.

    With weights of 1 the branch would drown the embedding it is added to. They start at `hidden * initializer_range^2`,
    the size that two linear layers (values and output) would give the branch without a norm.
    """


class Combine(nn.Module):
    """The paper's (x): `norm(y) * sigmoid(norm(m))`, both norms with learned vectors (Section 4.2)."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.norm_y = BranchNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_m = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, y: Tensor, m: Tensor) -> Tensor:
        return self.norm_y(y) * torch.sigmoid(self.norm_m(m))


@dataclass
class Mixed:
    """What a mixer returns: its output, its attention weights, and what the cache keeps."""

    out: Tensor
    attention: Tensor | None = None
    carry: LayerCarry | None = None
    before: LayerCarry | None = None
    written: Written | None = None


Persistent = Callable[[], Tensor]  # makes the normed persistent tokens [P, hidden], where they are needed

PREFIX = ("prefix_keys", "prefix_values")  # what a carry keeps of the persistent tokens for attention


class MemoryMixer(nn.Module):
    """What the variants without segments share: the memory, its prologue, and its part of the carry."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.config = config
        self.memory = NeuralMemory(config)

    def begin(self, persistent: Persistent | None, rows: Rows) -> LayerCarry:
        """The carry of rows that read their first token: after the persistent tokens, if there are any."""
        _, memory = self._prologue(persistent, rows)
        return self._carry(memory)

    def _prologue(self, persistent: Persistent | None, rows: Rows) -> tuple[Tensor | None, MemoryCarry]:
        if persistent is None:
            return None, self.memory.begin(rows.batch_size, rows.spare)
        return self.memory.prologue(persistent(), rows.batch_size, rows.spare)

    def _carry(self, memory: MemoryCarry, tails: dict | None = None, fixed: dict | None = None) -> LayerCarry:
        state = memory.state.opened(self.config.memory_chunk_size)
        return LayerCarry(state, {"conv": memory.tail, **(tails or {})}, fixed or {})

    def _remember(self, x: Tensor, carry: LayerCarry, rows: Rows, read_only: bool):
        return self.memory(x, MemoryCarry(carry.memory, carry.tails["conv"]), rows.lengths, read_only)

    def _window(self, carry: LayerCarry) -> tuple[Tail, Tail] | None:
        return (carry.tails["keys"], carry.tails["values"]) if "keys" in carry.tails else None

    def _empty_window(self, x: Tensor, rows: Rows) -> dict[str, Tail]:
        config = self.config
        if not rows.keep:
            return {}
        slots = config.sliding_window - 1 + rows.spare
        empty = Tail(x.new_zeros(rows.batch_size, slots, config.num_key_value_heads, config.head_dim))
        return {"keys": empty, "values": empty}


class MemoryAlone(MemoryMixer):
    """LMM: the memory is the whole mixer (Section 4.3, last paragraph)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(persistent, rows))
        out, memory, written = self._remember(x, before, rows, read_only)
        return Mixed(out, None, self._carry(memory), before, written)


class MemoryAsGate(MemoryMixer):
    """MAG: sliding-window attention beside the memory, on the same tokens (Section 4.2, Eqs. 26-28)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SlidingAttention(config, layer_idx)
        self.combine = Combine(config)

    def begin(self, persistent, rows) -> LayerCarry:
        _, memory = self._prologue(persistent, rows)
        return self._carry(memory, self._empty_window(memory.tail.values, rows), self._prefix(persistent, rows))

    def _prefix(self, persistent: Persistent | None, rows: Rows) -> dict[str, Tensor]:
        if persistent is None:
            return {}
        return _kept(self.attention.keys_values(persistent()[None]), self.memory.dtype, rows.batch_size)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(persistent, rows))
        m, memory, written = self._remember(x, before, rows, read_only)
        fixed = before.fixed
        if past is not None and torch.is_grad_enabled():  # gradients of this pass, too, reach the persistent tokens
            fixed = self._prefix(persistent, rows)
        y, weights, window = self.attention(x, _pair(fixed), self._window(before), rows, rotary, output_attentions)
        carry = self._carry(memory, window, fixed)
        return Mixed(self.combine(y, m), weights, carry, before, written)


class MemoryAsLayer(MemoryMixer):
    """MAL: the memory first, sliding-window attention on its output (Section 4.3, Eqs. 29-31).

    Each is a layer with a residual connection of its own (Section 4.4): without the memory's, attention would see
    nothing but what the memory made of a token, and the stack learned no more than how often words come.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SlidingAttention(config, layer_idx)
        self.norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)

    def begin(self, persistent, rows) -> LayerCarry:
        outputs, memory = self._prologue(persistent, rows)
        fixed = {}
        if outputs is not None:
            fixed = _kept(
                self.attention.keys_values(self.norm(persistent() + outputs)), self.memory.dtype, rows.batch_size
            )
        return self._carry(memory, self._empty_window(memory.tail.values, rows), fixed)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(persistent, rows))
        m, memory, written = self._remember(x, before, rows, read_only)
        prefix, window = _pair(before.fixed), self._window(before)
        y, weights, window = self.attention(self.norm(x + m), prefix, window, rows, rotary, output_attentions)
        carry = self._carry(memory, window, before.fixed)
        return Mixed(m + y, weights, carry, before, written)


def _kept(keys_values: tuple[Tensor, Tensor], dtype: torch.dtype, batch_size: int) -> dict[str, Tensor]:
    """The prefix for a carry: a row of it for each of the batch, in the model's dtype whatever autocast made of it."""
    rows = (x.to(dtype).expand(batch_size, -1, -1, -1) for x in keys_values)
    return dict(zip(PREFIX, rows, strict=True))


def _pair(fixed: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The prefix's keys and values, if there is one."""
    return tuple(fixed[name] for name in PREFIX) if fixed else None


SEGMENT_TAILS = ("segment_keys", "segment_values")  # of pairs: the retrieved token, and the segment's own


class MemoryAsContext(nn.Module):
    """MAC: what the memory holds for a segment stands before it in attention's context (Section 4.1, Eqs. 21-25)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.memory = NeuralMemory(config)
        self.attention = SegmentAttention(config, layer_idx)
        self.write_norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.combine = Combine(config)

    def begin(self, x: Tensor, persistent: Persistent | None, rows: Rows, rotary) -> LayerCarry:
        config, memory = self.config, self.memory.begin(rows.batch_size, rows.spare)
        slots = config.segment_size - 1 + rows.spare
        empty = Tail(x.new_zeros(rows.batch_size, slots, 2, config.num_key_value_heads, config.head_dim))
        queries = memory.tail.map(lambda x: x[..., : x.shape[-1] // 3])
        tails = {"conv": memory.tail, "conv_retrieval": queries, **dict.fromkeys(SEGMENT_TAILS, empty)}
        fixed = self._prefix(persistent, rows, rotary)
        return LayerCarry(memory.state.opened(config.memory_chunk_size), tails, fixed, memory.state.weights)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(x, persistent, rows, rotary))
        C = self.config.segment_size
        places = None if rows.fresh is True else rows.seen % C
        cut = RowCut.at_next_line(places, rows.lengths, rows.width, C)
        retrieval, tail = self.memory.queries(x, before.tails["conv_retrieval"], rows.lengths)
        tokens = (retrieval, self.attention.queries(x), *self.attention.keys_values(x))
        fixed = before.fixed
        if past is not None and torch.is_grad_enabled():  # gradients of this pass, too, reach the persistent tokens
            fixed = self._prefix(persistent, rows, rotary)

        carry = LayerCarry(before.memory, {**before.tails, "conv_retrieval": tail}, fixed, before.segment_weights)
        parts = []
        for piece in self._pieces(cut, tokens, places, rows):
            part, carry = self._piece(piece, carry, rows, rotary, read_only, output_attentions)
            parts.append(part)
        return self._join(cut, parts, carry, before, rows)

    def _pieces(self, cut: RowCut, tokens, places: Tensor | None, rows: Rows):
        """The pass in pieces that end where a segment ends: (tokens, real tokens per row, places in the segment)."""
        C, on_line = self.config.segment_size, torch.zeros_like(rows.seen)
        if cut.head_width:
            yield [cut.head(x) for x in tokens], cut.head_counts, places, True
        if cut.body_width:
            body = [cut.body(x) for x in tokens]
            for start in range(0, cut.body_width, C):
                counts = None if cut.body_counts is None else (cut.body_counts - start).clamp(0, C)
                yield [x[:, start : start + C] for x in body], counts, on_line, False

    def _piece(self, piece, carry: LayerCarry, rows: Rows, rotary, read_only, output_attentions):
        """Retrieve, attend, write and read (Eqs. 21-25) for tokens of one segment."""
        (retrieval, q, k, v), counts, places, is_head = piece
        C, P, T = self.config.segment_size, self.config.num_persistent_tokens, q.shape[1]
        slots = places[:, None] + torch.arange(T, device=q.device)
        retrieved_at, segment_at = rotary.at(q, P + slots), rotary.at(q, P + C + slots)

        h_k, h_v = self.attention.keys_values(self.memory.retrieve(carry.segment_weights, retrieval))
        kv = [torch.stack(pair, dim=2) for pair in ((rotate(h_k, retrieved_at), rotate(k, segment_at)), (h_v, v))]
        tails, past = {}, 0
        if rows.keep:
            past = min(C - 1, rows.reach) if is_head else 0
            for i, name in enumerate(SEGMENT_TAILS):
                extended, tails[name] = carry.tails[name].go_on(kv[i], counts)
                kv[i] = extended[:, extended.shape[1] - past - T :]
        prefix, q = _pair(carry.fixed), rotate(q, segment_at)
        y, weights = self.attention(q, kv, prefix, past, places, output_attentions)
        m, memory, written = self.memory(
            self.write_norm(y), MemoryCarry(carry.memory, carry.tails["conv"]), counts, read_only
        )
        carry = LayerCarry(
            memory.state,
            {**carry.tails, "conv": memory.tail, **tails},
            carry.fixed,
            self._segment_start(carry, memory.state, places + (T if counts is None else counts)),
        )
        return Mixed(self.combine(y, m), weights, written=written), carry

    def _segment_start(self, carry: LayerCarry, state: MemoryState, places: Tensor) -> tuple[Tensor, ...]:
        """The memory that the next token retrieves from: the present one for rows whose segment is complete."""
        complete = places == self.config.segment_size
        reached = on_host(complete)
        if reached is not None and not any(reached):
            return carry.segment_weights
        weights, _ = state.current()
        if reached is not None and all(reached):
            return weights
        return tuple(where_rows(complete, *pair) for pair in zip(weights, carry.segment_weights, strict=True))

    def _prefix(self, persistent: Persistent | None, rows: Rows, rotary) -> dict[str, Tensor]:
        if persistent is None:
            return {}
        k, v = self.attention.keys_values(persistent()[None])
        k = rotate(k, rotary.at(k, torch.arange(k.shape[1], device=k.device)))
        return _kept((k, v), self.memory.dtype, rows.batch_size)

    def _join(self, cut: RowCut, parts: list[Mixed], carry: LayerCarry, before: LayerCarry, rows: Rows) -> Mixed:
        """The pieces of the pass as one: outputs, attention weights and written tokens in the order of the tokens."""
        heads = 1 if cut.head_width else 0

        def join(pick: Callable[[Mixed], Tensor]) -> Tensor:
            found = [pick(part) for part in parts]
            body = torch.cat(found[heads:], dim=1) if found[heads:] else None
            return cut.join(found[0] if heads else None, body)

        attention = None
        if parts[0].attention is not None:
            attention = join(lambda part: part.attention.transpose(1, 2))  # [B, T, H, columns]
            attention = (attention if rows.packed is None else rows.packed.unpack(attention)).transpose(1, 2)
        written = None
        if rows.keep:
            written = Written(
                *(join(lambda part, name=name: getattr(part.written, name)) for name in ("k", "v", "gates"))
            )
        carry.memory = carry.memory.opened(self.config.memory_chunk_size)
        return Mixed(join(lambda part: part.out), attention, carry, before, written)


MIXERS = {"mac": MemoryAsContext, "mag": MemoryAsGate, "mal": MemoryAsLayer, "lmm": MemoryAlone}
