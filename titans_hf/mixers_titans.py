"""The four ways to use the memory beside attention (Section 4): as context, as gate, as layer, and alone.

Axis letters: B batch, T tokens, H heads, D head width, P persistent tokens, C segment, W window. Rows hold their real
tokens at the front (`Rows`), so that padding is never computed on and never written.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from .attention_titans import Rows, SegmentAttention, SlidingAttention, rotate
from .carry_titans import LOG_LIMIT, LayerCarry
from .configuration_titans import TitansConfig
from .memory_layer import MemoryCarry, NeuralMemory, TitansRMSNorm, Written
from .memory_state import MemoryState, where_all
from .rows import GridCut, Part, on_host
from .tails import Tail


class BranchNorm(TitansRMSNorm):
    """The norm at the end of a residual branch.

    With weights of 1 the branch would drown the embedding it is added to. They start at `hidden * initializer_range^2`,
    the size that two linear layers (values and output) would give the branch without a norm.
    """


class GateNorm(TitansRMSNorm):
    """The norm in front of a gate: its weights start at a tenth, so that all tokens are gated nearly alike at first."""


class Combine(nn.Module):
    """The paper's (x) of attention's output y and the memory's m (Section 4.2).

    Both pass a norm with a learned vector and a non-linearity, and are multiplied; which of them the non-linearity is
    on the paper leaves open. By default attention gates what the memory says, `m * 2 sigmoid(norm(y))`. The memory's
    norm is then the one inside it (`GatedNorm`): another one behind its output projection, which starts near zero,
    would multiply the gradient of all that is before it by hundreds.
    """

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.form, sizes = config.memory_combine, (config.hidden_size, config.rms_norm_eps)
        if self.form == "gate_memory":
            self.norm_y = GateNorm(*sizes)
        elif self.form == "gate_attention":
            self.norm_y, self.norm_m = BranchNorm(*sizes), TitansRMSNorm(*sizes)

    def forward(self, y: Tensor, m: Tensor) -> Tensor:
        if self.form == "add":
            return y + m
        if self.form == "gate_memory":
            return m * (2 * torch.sigmoid(self.norm_y(y)))
        return self.norm_y(y) * torch.sigmoid(self.norm_m(m))


# What a mixer returns: its output [B, T, hidden], its attention weights if it has any, and what the cache keeps.
Mixed = tuple[Tensor, Tensor | None, LayerCarry]
Persistent = Callable[[], Tensor]  # makes the normed persistent tokens [P, hidden], where they are needed

PREFIX = ("prefix_keys", "prefix_values")  # what a carry keeps of the persistent tokens for attention


class MemoryMixer(nn.Module):
    """What all variants share: the memory, its prologue, and its part of the carry."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.config = config
        self.memory = NeuralMemory(config)

    def begin(self, persistent: Persistent | None, rows: Rows) -> LayerCarry:
        """The carry of rows that read their first token: after the persistent tokens, if there are any."""
        _, memory = self._prologue(persistent, rows)
        return self._new_carry(memory, rows)

    def _prologue(self, persistent: Persistent | None, rows: Rows) -> tuple[Tensor | None, MemoryCarry]:
        if persistent is None:
            return None, self.memory.begin(rows.batch_size, rows.spare)
        return self.memory.prologue(persistent(), rows.batch_size, rows.spare)

    def _new_carry(self, memory: MemoryCarry, rows: Rows, tails=None, fixed=None, segment_weights=None) -> LayerCarry:
        own = memory.opened(self.config.memory_chunk_size)
        carry = LayerCarry(own, tails or {}, fixed or {}, segment_weights)
        return carry.restarting(rows.seen) if rows.spare else carry

    def _remember(self, x: Tensor, carry: LayerCarry, rows: Rows, read_only: bool) -> tuple[Tensor, LayerCarry]:
        """Write into the memory and read it: the outputs [B, T, hidden], and the carry with the memory after them."""
        m, memory, written = self.memory(x, carry.own, rows.lengths, read_only)
        carry = replace(carry, own=memory.opened(self.config.memory_chunk_size) if rows.keep else memory)
        return m, self._noted(carry, written, rows.lengths, rows, read_only)

    def _noted(self, carry: LayerCarry, written: Written, lengths, rows: Rows, read_only: bool) -> LayerCarry:
        """The carry with its log up to date. After a pass too long for the log, a new log starts."""
        if carry.log is None:
            return carry
        if rows.width > LOG_LIMIT:
            return carry.restarting(rows.seen_after())
        return carry.noting(written, lengths, read_only, self.config)


class MemoryAlone(MemoryMixer):
    """LMM: the memory is the whole mixer (Section 4.3, last paragraph)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        carry = rows.start(past, lambda: self.begin(persistent, rows))
        out, carry = self._remember(x, carry, rows, read_only)
        return out, None, carry


class AttentionAlone(nn.Module):
    """A block without a memory (`config.memory_layers`): attention to the window, or to all that was read."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.attention = SlidingAttention(config, layer_idx)

    def _prefix(self, persistent: Persistent | None, x: Tensor, rows: Rows) -> dict[str, Tensor]:
        if persistent is None:
            return {}
        return _kept(self.attention.keys_values(persistent()[None]), x.dtype, rows.batch_size)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        window = lambda: self.attention.empty_window(x, rows)  # noqa: E731
        carry = rows.start(past, lambda: LayerCarry(None, window(), self._prefix(persistent, x, rows)))
        if past is not None and torch.is_grad_enabled():  # gradients of this pass, too, reach the persistent tokens
            carry = replace(carry, fixed=self._prefix(persistent, x, rows))
        y, weights, tails = self.attention(x, _pair(carry.fixed), carry.tails, rows, rotary, output_attentions)
        return y, weights, replace(carry, tails=tails)


class MemoryAsGate(MemoryMixer):
    """MAG: sliding-window attention beside the memory, on the same tokens (Section 4.2, Eqs. 26-28)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SlidingAttention(config, layer_idx)
        self.combine = Combine(config)

    def begin(self, persistent, rows) -> LayerCarry:
        _, memory = self._prologue(persistent, rows)
        window, fixed = self.attention.empty_window(memory.tail.values, rows), self._prefix(persistent, rows)
        return self._new_carry(memory, rows, window, fixed)

    def _prefix(self, persistent: Persistent | None, rows: Rows) -> dict[str, Tensor]:
        if persistent is None:
            return {}
        return _kept(self.attention.keys_values(persistent()[None]), self.memory.dtype, rows.batch_size)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        carry = rows.start(past, lambda: self.begin(persistent, rows))
        if past is not None and torch.is_grad_enabled():  # gradients of this pass, too, reach the persistent tokens
            carry = replace(carry, fixed=self._prefix(persistent, rows))
        m, carry = self._remember(x, carry, rows, read_only)
        y, weights, window = self.attention(x, _pair(carry.fixed), carry.tails, rows, rotary, output_attentions)
        return self.combine(y, m), weights, replace(carry, tails=window)


class MemoryAsLayer(MemoryMixer):
    """MAL: the memory first, sliding-window attention on its output (Section 4.3, Eqs. 29-31).

    Each has a residual connection of its own (Section 4.4). Without the memory's, attention would see nothing but the
    memory's output, and the stack learned no more than how often words occur.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SlidingAttention(config, layer_idx)
        normed = config.memory_layer_norm
        self.norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()

    def begin(self, persistent, rows) -> LayerCarry:
        outputs, memory = self._prologue(persistent, rows)
        fixed = {}
        if outputs is not None:
            fixed = _kept(
                self.attention.keys_values(self.norm(persistent() + outputs)), self.memory.dtype, rows.batch_size
            )
        return self._new_carry(memory, rows, self.attention.empty_window(memory.tail.values, rows), fixed)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        carry = rows.start(past, lambda: self.begin(persistent, rows))
        m, carry = self._remember(x, carry, rows, read_only)
        x, prefix = self.norm(x + m), _pair(carry.fixed)
        y, weights, window = self.attention(x, prefix, carry.tails, rows, rotary, output_attentions)
        return m + y, weights, replace(carry, tails=window)


def _kept(keys_values: tuple[Tensor, Tensor], dtype: torch.dtype, batch_size: int) -> dict[str, Tensor]:
    """The prefix for a carry: one copy for each row of the batch, in the model's dtype whatever autocast chose."""
    rows = (x.to(dtype).expand(batch_size, -1, -1, -1) for x in keys_values)
    return dict(zip(PREFIX, rows, strict=True))


def _pair(fixed: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The prefix's keys and values, if there is one."""
    return tuple(fixed[name] for name in PREFIX) if fixed else None


SEGMENT_TAILS = ("segment_keys", "segment_values")  # of pairs: the retrieved token, and the segment's own


class MemoryAsContext(MemoryMixer):
    """MAC: what the memory holds for a segment precedes it in attention's context (Section 4.1, Eqs. 21-25)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SegmentAttention(config, layer_idx)
        self.write_norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.combine = Combine(config)

    def begin(self, x: Tensor, persistent: Persistent | None, rows: Rows, rotary) -> LayerCarry:
        config, memory = self.config, self.memory.begin(rows.batch_size, rows.spare)
        slots = config.segment_size - 1 + rows.spare
        empty = Tail(x.new_zeros(rows.batch_size, slots, 2, config.num_key_value_heads, config.head_dim))
        queries = memory.tail.map(lambda x: x[..., : x.shape[-1] // 3])
        tails = {"conv_retrieval": queries, **dict.fromkeys(SEGMENT_TAILS, empty)}
        return self._new_carry(memory, rows, tails, self._prefix(persistent, rows, rotary), memory.state.weights)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        carry = rows.start(past, lambda: self.begin(x, persistent, rows, rotary))
        if past is not None and torch.is_grad_enabled():  # gradients of this pass, too, reach the persistent tokens
            carry = replace(carry, fixed=self._prefix(persistent, rows, rotary))
        if rows.width == 1 and rows.lengths is None and rows.keep and not output_attentions:
            found = self._one_token(x, carry, rows, rotary, read_only)
            if found is not None:
                return found
        retrieval, tail = self.memory.queries(x, carry.tails["conv_retrieval"], rows.lengths)
        carry = replace(carry, tails={**carry.tails, "conv_retrieval": tail})
        tokens = (retrieval, self.attention.queries(x), *self.attention.keys_values(x))

        places = None if rows.fresh is True else rows.seen % self.config.segment_size
        cut = GridCut.of(places, rows.lengths, rows.width, self.config.segment_size)
        outputs, maps = [], []
        for piece in self._pieces(cut, places, rows):
            out, weights, carry = self._piece(piece, tokens, carry, rows, rotary, read_only, output_attentions)
            outputs.append(out)
            maps.append(weights)
        if rows.keep:
            carry = self._finished(carry, rows)
        return _joined(cut, outputs), self._joined_maps(cut, maps, rows), carry

    def _pieces(self, cut: GridCut, places: Tensor | None, rows: Rows) -> Iterator[tuple[Part, Tensor, bool]]:
        """The pass in pieces of one segment each.

        Yields the tokens of the piece, how many [B] tokens each row's segment had before them, and whether an earlier
        pass has opened that segment.
        """
        C, at_boundary = self.config.segment_size, torch.zeros_like(rows.seen)
        if cut.head.width:
            yield cut.head, places, True
        for n in range(cut.cells.width // C):
            yield cut.cells.cell(n, C), at_boundary, False
        if cut.rest.width:
            yield cut.rest, at_boundary, False

    def _piece(self, piece, tokens, carry: LayerCarry, rows: Rows, rotary, read_only, output_attentions):
        """Retrieve, attend, write and read (Eqs. 21-25) for tokens of one segment."""
        part, places, is_open = piece
        (retrieval, q, k, v), counts = part.of(tokens), part.counts
        C, T = self.config.segment_size, q.shape[1]
        retrieved_at, segment_at = self._shared("rotations", rows, lambda: self._rotations(q, places, rotary))

        h_k, h_v = self.attention.keys_values(self.memory.retrieve(carry.segment_weights, retrieval))
        kv = [torch.stack(pair, dim=2) for pair in ((rotate(h_k, retrieved_at), rotate(k, segment_at)), (h_v, v))]
        tails, past = {}, 0
        if rows.keep:
            past = min(C - 1, rows.reach) if is_open else 0
            for i, name in enumerate(SEGMENT_TAILS):
                extended, tails[name] = carry.tails[name].append(kv[i], counts)
                kv[i] = extended[:, extended.shape[1] - past - T :]
        y, weights = self.attention(rotate(q, segment_at), kv, _pair(carry.fixed), past, places, output_attentions)
        out, carry = self._write(y, replace(carry, tails={**carry.tails, **tails}), counts, places, rows, read_only)
        return out, weights, carry

    def _one_token(self, x: Tensor, carry: LayerCarry, rows: Rows, rotary, read_only: bool) -> Mixed | None:
        """A decoding step with C++ operators, or None where they do not serve."""
        native, weights = self.attention.native(x), self.attention.native_weights()
        if native is None or weights is None or rows.fresh is True:
            return None
        found = self.memory.retrieve_one(x, carry.tails["conv_retrieval"], carry.segment_weights)
        if found is None:
            return None
        h, tail = found
        C = self.config.segment_size
        places, past = rows.shared("places", lambda: rows.seen % C), min(C - 1, rows.reach)
        first = rows.shared("first of the segment", lambda: 2 * (past - places))
        turns = rows.shared("rotations", lambda: self._rotations(x, places, rotary))
        (k, keys), (v, values) = (self.attention.room(x, carry.tails[name], past, 2) for name in SEGMENT_TAILS)
        prefix = _pair(carry.fixed) or (None, None)
        y = native.segment(x, h, weights, k, v, first, self.attention.scaling, *prefix, *turns[0], *turns[1])
        tails = {"conv_retrieval": tail, **dict(zip(SEGMENT_TAILS, (keys, values), strict=True))}
        out, carry = self._write(y, replace(carry, tails=tails), None, places, rows, read_only)
        return out, None, self._finished(carry, rows)

    def _write(self, y: Tensor, carry: LayerCarry, counts, places: Tensor, rows: Rows, read_only: bool):
        """Write what attention says and read (Eqs. 24 and 25): the outputs, and the carry after a piece."""
        T = y.shape[1]
        m, memory, written = self.memory(self.write_norm(y), carry.own, counts, read_only)
        segment = self._segment_start(carry, memory.state, places + (T if counts is None else counts), rows)
        carry = replace(carry, own=memory, segment_weights=segment)
        if rows.width <= LOG_LIMIT:
            carry = self._noted(carry, written, counts, rows, read_only)
        return self.combine(y, m), carry

    @staticmethod
    def _shared(name: str, rows: Rows, make: Callable):
        """A value of a piece. All layers share it where the pass is a single token, and so a single piece."""
        return rows.shared(name, make) if rows.width == 1 else make()

    def _completed(self, places: Tensor) -> tuple[Tensor, list[bool] | None]:
        """Which rows are at the end of their segment, [B], and the same on the host."""
        complete = places == self.config.segment_size
        return complete, on_host(complete)

    def _rotations(self, q: Tensor, places: Tensor, rotary):
        """Of a piece's retrieved tokens, and of its own."""
        slots = self.config.num_persistent_tokens + places[:, None] + torch.arange(q.shape[1], device=q.device)
        return rotary.at(q, slots), rotary.at(q, self.config.segment_size + slots)

    def _segment_start(self, carry: LayerCarry, state: MemoryState, places: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """The memory that the next token retrieves from: the present one for rows whose segment is complete."""
        complete, reached = self._shared("completed segments", rows, lambda: self._completed(places))
        if reached is not None and not any(reached):
            return carry.segment_weights
        weights, _ = state.current()
        if reached is not None and all(reached):
            return weights
        return where_all(complete, weights, carry.segment_weights)

    def _finished(self, carry: LayerCarry, rows: Rows) -> LayerCarry:
        """The carry for the cache: open-chunk fields present, and a new log after a pass too long for one."""
        if carry.memory.length is None:
            carry = replace(carry, own=carry.own.opened(self.config.memory_chunk_size))
        too_long = carry.log is not None and rows.width > LOG_LIMIT
        return carry.restarting(rows.seen_after()) if too_long else carry

    def _prefix(self, persistent: Persistent | None, rows: Rows, rotary) -> dict[str, Tensor]:
        if persistent is None:
            return {}
        k, v = self.attention.keys_values(persistent()[None])
        k = rotate(k, rotary.at(k, torch.arange(k.shape[1], device=k.device)))
        return _kept((k, v), self.memory.dtype, rows.batch_size)

    def _joined_maps(self, cut: GridCut, maps: list[Tensor | None], rows: Rows) -> Tensor | None:
        """The attention weights of the pieces as one map, by input column."""
        if maps[0] is None:
            return None
        joined = _joined(cut, [weights.transpose(1, 2) for weights in maps])  # [B, T, H, columns]
        return (joined if rows.packed is None else rows.packed.unpack(joined)).transpose(1, 2)


def _joined(cut: GridCut, outputs: list[Tensor]) -> Tensor:
    """Outputs of the pieces of a pass, in the order of its tokens."""
    outputs = list(outputs)
    head = outputs.pop(0) if cut.head.width else None
    rest = outputs.pop() if cut.rest.width else None
    return cut.join(head, torch.cat(outputs, dim=1) if outputs else None, rest)


MIXERS = {"mac": MemoryAsContext, "mag": MemoryAsGate, "mal": MemoryAsLayer, "lmm": MemoryAlone}


def mixer_of(config: TitansConfig, layer_idx: int) -> nn.Module:
    """The mixer of one block: its variant's, or attention alone where the block has no memory."""
    kind = MIXERS[config.variant] if config.has_memory(layer_idx) else AttentionAlone
    return kind(config, layer_idx)
