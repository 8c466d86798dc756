"""Attention over a window or a segment, with learned or retrieved tokens in front (Section 4), at local positions.

Axis letters: B batch, T tokens, H heads, D head width, P persistent tokens, C segment, W window, K keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_titans import TitansCacheLayer
from .carry_titans import LayerCarry
from .configuration_titans import TitansConfig
from .fast_paths import operators, plain, state_dtype, takes, weights_of
from .memory_layer import TitansRMSNorm
from .rows import PackedRows, on_host
from .tails import GrowingTail, Head, Tail

PIECE = 1024  # queries that full attention takes at a time
SINKS = ("sink_keys", "sink_values")


@dataclass
class Rows:
    """The rows of a batch in one pass through the layers: what each has read, and what it reads now.

    Attributes:
        seen: [B] real tokens each row has read before.
        lengths: [B] real tokens of this pass, at the front of each row; None means all. It is also None without a
            cache: tokens after a row's last real one change nothing before them, and no state is kept.
        width: token columns of this pass.
        keep: whether a cache takes over the state after this pass.
        spare: tokens that tails keep beyond what the next token needs (for `crop`); 0 where nothing is rewound.
        fresh: which rows have read nothing: True, False, or [B] where rows differ.
        reach: the most tokens that any row may have read before.
        packed: how the tokens of the pass were gathered from the input; None if the input had no padding.
    """

    seen: Tensor
    lengths: Tensor | None
    width: int
    keep: bool = False
    spare: int = 0
    fresh: bool | Tensor = True
    reach: int = 0
    packed: PackedRows | None = None
    _shared: dict = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        x: Tensor,
        lengths: Tensor | None,
        cache_layer: TitansCacheLayer | None,
        packed: PackedRows | None = None,
    ) -> "Rows":
        """The rows of `x` [B, T, hidden], given the cache of any layer: all layers have read the same tokens."""
        B, width = x.shape[:2]
        unread = torch.zeros(B, dtype=torch.long, device=x.device)
        if cache_layer is None:
            return cls(unread, None, width, packed=packed)
        kept = {"keep": True, "spare": cache_layer.spare, "packed": packed}
        if cache_layer.seen is None:
            return cls(unread, lengths, width, **kept)
        seen = cache_layer.seen.clone()  # a static cache counts in place, layer by layer
        counts = on_host(seen)
        if counts is None:
            return cls(seen, lengths, width, **kept, fresh=False, reach=2**31)
        fresh = seen == 0 if 0 in counts and any(counts) else not any(counts)
        return cls(seen, lengths, width, **kept, fresh=fresh, reach=max(*counts, int(cache_layer.columns)))

    @property
    def batch_size(self) -> int:
        return self.seen.shape[0]

    def seen_after(self) -> Tensor:
        """[B] real tokens each row has read after this pass."""
        return self.seen + (self.width if self.lengths is None else self.lengths)

    def on(self, device: torch.device) -> "Rows":
        """The same rows on another device, for layers that a device map has put there."""
        if device == self.seen.device:
            return self
        lengths = None if self.lengths is None else self.lengths.to(device)
        fresh = self.fresh.to(device) if isinstance(self.fresh, Tensor) else self.fresh
        return self.shared(
            str(device), lambda: replace(self, seen=self.seen.to(device), lengths=lengths, fresh=fresh, _shared={})
        )

    def shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A value that all layers share (a mask, a rotation), made once per pass."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def start(self, past: LayerCarry | None, begin: Callable[[], LayerCarry]) -> LayerCarry:
        """The carry this pass starts from: the past, and a new beginning for rows that have read nothing."""
        if past is None or self.fresh is True:
            return begin()
        if self.fresh is False:
            return past
        return begin().select(self.fresh, past)


class TitansRotaryEmbedding(nn.Module):
    """Rotary angles at local positions, in float32 or better.

    Types that scale with a text's length ("dynamic", "longrope") are scaled for the number of positions that attention
    can span, P + 2 C in a segment and W in a window, whatever the length of the text.
    """

    inv_freq: Tensor

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.config = config
        inv_freq, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._table: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies [D / 2] and the factor on cosines and sines, from the configuration alone."""
        config = self.config
        span = config.sliding_window
        if config.variant == "mac":
            span = config.num_persistent_tokens + 2 * config.segment_size
        rope_type = config.rope_parameters["rope_type"]
        return ROPE_INIT_FUNCTIONS.get(rope_type, self.compute_default_rope_parameters)(config, seq_len=span)

    @staticmethod
    def compute_default_rope_parameters(config: TitansConfig, device=None, **kwargs) -> tuple[Tensor, float]:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.at(x, positions)

    @torch.no_grad()
    def at(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., T, 1, D] for positions [..., T], in the dtype and on the device of `x`.

        The layers call this, not the module: a device map would answer on the module's device.
        """
        precise = state_dtype(x.dtype)
        angles = positions[..., None].to(precise) * self.inv_freq.to(x.device, precise)
        angles = torch.cat((angles, angles), dim=-1)[..., None, :]
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)

    def table(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [count, 1, D] for positions from 0, in float32 on the CPU; kept from call to call."""
        inv_freq, size = self.inv_freq.to("cpu", torch.float32), PIECE * -(-count // PIECE)
        if self._table is None or len(self._table[1][0]) < size or not torch.equal(self._table[0], inv_freq):
            self._table = inv_freq.clone(), self.at(inv_freq, torch.arange(size, device="cpu"))
        cos, sin = self._table[1]
        return cos[:count], sin[:count]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels of `x` [B, T, H, D] by its token's angle."""
    cos, sin = rotation
    native = operators(x, x.shape[1]) if cos.dtype is x.dtype else None
    if native is not None:
        return native.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_into(out: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """`rotate` in as few passes as can be, without gradients."""
    (cos, sin), half = rotation, x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, packed=None, **kwargs):
    """Attention in plain torch, with its weights: [B, H, T, D] as in transformers; the mask is True where visible.

    With `packed`, the weights are returned by input column, and the output is computed from the returned weights, so
    that gradients reach them.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * scaling
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=state_dtype(scores.dtype)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    shown = weights
    if packed is not None:
        shown = _by_column(weights, packed.width, packed.unpack)
        weights = _by_column(shown, packed.mask.shape[1], packed.pack)
    return (weights @ value).transpose(1, 2).contiguous(), shown


def _by_column(weights: Tensor, new_keys: int, move: Callable[[Tensor], Tensor]) -> Tensor:
    """`move` the queries of a map [B, H, T, K], and the last `new_keys` of its keys, between rows and input columns."""
    weights = move(weights.transpose(1, 2)).transpose(1, 2)
    before, new = weights[..., :-new_keys], weights[..., -new_keys:]
    return torch.cat((before, move(new.movedim(-1, 1)).movedim(1, -1)), dim=-1)


def _flex_mask(mask: Tensor):
    """A dense mask [B or 1, 1, T, K] for flex attention, whose kernels also read past the last row and column."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, _, T, K = mask.shape

    def visible(batch, head, query, key):
        return mask[batch if B > 1 else 0, 0, query.clamp(max=T - 1), key.clamp(max=K - 1)]

    return create_block_mask(visible, B if B > 1 else None, None, T, K, device=mask.device)


class TitansAttention(nn.Module):
    """Projections, rotation and the call into transformers' attention interface, for windows and for segments."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout, self.is_causal = config.attention_dropout, True
        hidden, bias, out_bias = config.hidden_size, config.attention_bias, config.attention_out_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=out_bias)
        self.q_norm = self.k_norm = None
        if config.attention_qk_norm:
            self.q_norm, self.k_norm = (TitansRMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def queries(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        return q if self.q_norm is None else self.q_norm(q)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return k if self.k_norm is None else self.k_norm(k), v

    def native(self, q: Tensor):
        """The C++ operators, if they attend as this layer is asked to."""
        plain = self.config._attn_implementation in ("sdpa", "eager") and not (self.training and self.attention_dropout)
        return operators(q, q.shape[1]) if plain else None

    def native_weights(self) -> list[Tensor | None] | None:
        """Weights and biases for an operator that projects as well; None where the layers do more than that."""
        own = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return weights_of(*own) if self.q_norm is None and plain(*own) else None

    def room(self, x: Tensor, tail: Tail, past: int, *more: int) -> tuple[Tensor, Tail]:
        """The last tokens of a tail with room for one more, which an operator fills; and the tail after that."""
        shape = (x.shape[0], 1, *more, self.config.num_key_value_heads, self.head_dim)
        extended, tail = tail.append(x.new_empty(shape))
        return extended[:, -past - 1 :], tail

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs) -> tuple[Tensor, Tensor | None]:
        """Attention of q [B, T, H, D] over k, v [B, K, H_kv, D] where `mask` [B or 1, 1, T, K] is True.

        Returns the heads side by side, [B, T, H D], and the weights [B, H, T, K] if the implementation has them.
        """
        implementation = self.config._attn_implementation
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if implementation == "flex_attention":
            mask = _flex_mask(mask)
        out, weights = attention(
            self,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return out[..., : self.head_dim].flatten(-2), weights  # values may have been given more channels


class SlidingAttention(TitansAttention):
    """Attention to the last W tokens, or in full attention to all of them, and to a prefix that is always visible.

    Keys are cached unrotated and rotated relative to the oldest visible key. The prefix is not rotated; its scores use
    the unrotated query, in channels of their own (`_lay_out`). A layer without rotary positions rotates nothing.

    A row's first S tokens, its sinks, join the prefix when the window has left them behind, at fixed distances of W to
    W + S - 1 tokens, however long the row is.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.window, self.rotates = config.window_of(layer_idx), config.has_rotary(layer_idx)
        self.sinks = 0 if self.window is None else config.attention_sinks

    def empty_window(self, x: Tensor, rows: Rows) -> dict[str, Tail]:
        """What the cache holds of keys and values before a row's first token; `x` is of their dtype."""
        if not rows.keep:
            return {}
        slots = 0 if self.window is None else self.window - 1 + rows.spare
        empty = x.new_zeros(rows.batch_size, slots, self.config.num_key_value_heads, self.head_dim)
        tail = GrowingTail(empty) if self.window is None else Tail(empty)
        return {"keys": tail, "values": tail, **self._no_sinks(empty)}

    def _no_sinks(self, x: Tensor) -> dict[str, Head]:
        """Empty slots for the sinks' keys and values, in the form of keys [B, K, H_kv, D]."""
        head = Head(x.new_zeros(x.shape[0], self.sinks, *x.shape[2:]))
        return dict.fromkeys(SINKS, head) if self.sinks else {}

    def forward(
        self,
        x: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        tails: dict[str, Tail],
        rows: Rows,
        rotary: TitansRotaryEmbedding,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None, dict[str, Tail]]:
        """x [B, T, hidden], prefix keys and values [B, P, H_kv, D], tails by the names of `empty_window`, if kept.

        Returns the output [B, T, hidden], the weights [B, H, T, P + S + past + T] or None, and the new tails. Weights
        of sinks are there as soon as any token may be beyond its window.
        """
        if "keys" in tails and rows.lengths is None and not output_attentions:
            found = self._whole(x, prefix, tails, rows, rotary)
            if found is not None:
                return found
        q = self.queries(x)
        k, v = self.keys_values(x)
        sinks = self._sinks_after(k, v, tails, rows)
        if sinks and rows.reach + x.shape[1] > self.window:
            prefix = self._with_sinks(prefix, sinks, rows, rotary)
        window, past = {}, 0
        if "keys" in tails:
            past = tails["keys"].size if self.window is None else min(self.window - 1, rows.reach)
            k, keys = tails["keys"].append(k, rows.lengths)
            v, values = tails["values"].append(v, rows.lengths)
            window = {"keys": keys, "values": values, **sinks}
            k, v = (kept[:, kept.shape[1] - past - x.shape[1] :] for kept in (k, v))
        if self.config._attn_implementation == "flash_attention_2":
            out, weights = self._flash(q, k, v, past, rows, rotary)
        elif not output_attentions and takes("query", x.shape[1]):
            out, weights = self._one_token(q, k, v, prefix, past, rows, rotary)
        elif not output_attentions and self.window is None and x.shape[1] > PIECE:
            out, weights = self._pieces(q, k, v, prefix, past, rows, rotary)
        elif output_attentions or self.window is None or x.shape[1] <= self.window:
            shown = {"packed": rows.packed} if output_attentions and rows.packed is not None else {}
            out, weights = self._dense(q, k, v, prefix, past, rows, rotary, **shown)
        else:
            out, weights = self._blocks(q, k, v, prefix, past, rows, rotary)
        return self.o_proj(out), weights if output_attentions else None, window

    def _sinks_after(self, k: Tensor, v: Tensor, tails: dict[str, Tail], rows: Rows) -> dict[str, Head]:
        """The sinks' keys and values after this pass."""
        if not self.sinks:
            return {}
        before = tails if "keys" in tails else self._no_sinks(k)
        return {name: before[name].filled(new, rows.seen, rows.lengths) for name, new in zip(SINKS, (k, v))}

    def _with_sinks(self, prefix, sinks: dict[str, Head], rows: Rows, rotary: TitansRotaryEmbedding):
        """The prefix with the sinks after it, whose keys are turned back by their distance from the query."""
        k, v = (sinks[name].values for name in SINKS)
        if self.rotates:
            farthest = self.window + self.sinks - 1
            places = torch.arange(self.sinks, device=k.device) - farthest
            turn = rows.shared("sink rotation", lambda: rotary.at(k, places))
            k = rotate(k, turn) * rotary.attention_scaling  # also that of the query, which is not turned
        if prefix is None:
            return k, v
        return tuple(torch.cat(pair, dim=1) for pair in zip(prefix, (k, v), strict=True))

    def _whole(self, x, prefix, tails, rows, rotary):
        """`forward` of one token in one C++ operator, or None where that does not serve."""
        native = self.native(x) if self._sinks_agree(rows) else None
        weights = None if native is None else self.native_weights()
        if weights is None:
            return None
        if self.sinks and rows.reach >= self.window:
            prefix = self._with_sinks(prefix, tails, rows, rotary)
        past = tails["keys"].size if self.window is None else min(self.window - 1, rows.reach)
        (k, keys), (v, values) = (self.room(x, tails[name], past) for name in ("keys", "values"))
        out = native.slide(x, weights, k, v, *self._sight(past, prefix, rows, rotary))
        return out, None, {**tails, "keys": keys, "values": values}

    def _sinks_agree(self, rows: Rows) -> bool:
        """Whether no row lacks a sink, and the window has left all of them behind, or none."""
        if not self.sinks:
            return True
        least = rows.shared("least seen", lambda: min(on_host(rows.seen) or [0]))
        return least >= self.window + self.sinks - 1 or (least >= self.sinks and rows.reach < self.window)

    def _sight(self, past: int, prefix, rows, rotary):
        """What a C++ operator needs to know besides the window: where it begins, the prefix, and rotations."""
        first = rows.shared(f"first of {past}", lambda: past - rows.seen)
        turns = rotary.table(past + 1) if self.rotates else (None, None)
        return first, self.scaling, *(prefix or (None, None)), *turns

    def _turns(self, kind: str, positions: Tensor, q: Tensor, rows: Rows, rotary: TitansRotaryEmbedding):
        """Cosines and sines of the positions, which all layers share that have as many."""
        if not self.rotates:
            still = q.new_zeros(len(positions), 1, self.head_dim)
            return still + 1, still
        return rows.shared(f"{kind} rotation {len(positions)}", lambda: rotary.at(q, positions))

    def _shared_mask(self, positions: Tensor, past: int, rows: Rows) -> Tensor:
        name = f"mask of {self.window} over {past}"
        return rows.shared(name, lambda: self._window_mask(positions[past:], positions, past, rows))

    def _dense(self, q, k, v, prefix, past, rows, rotary, **kwargs):
        """All queries over all keys of this pass."""
        K = k.shape[1]
        positions = torch.arange(K, device=q.device)
        turn, mask = self._turns("dense", positions, q, rows, rotary), self._shared_mask(positions, past, rows)
        q, k, v = self._lay_out(q, k, v, (turn[0][past:], turn[1][past:]), turn, prefix)
        return self.attend(q, k, v, self._see_prefix(mask, prefix, rows), **kwargs)

    def _one_token(self, q, k, v, prefix, past, rows, rotary):
        """A decoding step, without gradients. A prefix rotated by the one query's own angle gives unrotated scores."""
        B, K, H, D = k.shape
        native = self.native(q) if self._sinks_agree(rows) else None
        if native is not None:
            return native.attend(q, k, v, *self._sight(past, prefix, rows, rotary)), None
        P = 0 if prefix is None else prefix[0].shape[1]
        positions = torch.arange(K, device=q.device)
        turn, mask = self._turns("dense", positions, q, rows, rotary), self._shared_mask(positions, past, rows)
        last = tuple(x[past:] for x in turn)
        keys = k.new_empty(B, P + K, H, D)
        rotate_into(keys[:, P:], k, turn)
        if prefix is not None:
            rotate_into(keys[:, :P], prefix[0], last)
            if self.rotates and rotary.attention_scaling != 1:  # turned queries and keys have it, the prefix has not
                keys[:, :P].div_(rotary.attention_scaling**2)
            v = torch.cat((prefix[1], v), dim=1)
        return self.attend(rotate(q, last), keys, v, self._see_prefix(mask, prefix, rows))

    def _blocks(self, q, k, v, prefix, past, rows, rotary):
        """Queries in blocks of W / 2, each over its own and the two before it: linear in T, and positions below 2 W."""
        B, T = q.shape[:2]
        size = (self.window + 1) // 2
        short = -T % size
        q = F.pad(q, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, size))  # [B, blocks, size, H, D]
        k, v = (F.pad(x, (0, 0, 0, 0, 2 * size - past, short)).unflatten(1, (-1, size)) for x in (k, v))
        k, v = (torch.cat((x[:, :-2], x[:, 1:-1], x[:, 2:]), dim=2).flatten(0, 1) for x in (k, v))
        blocks = q.shape[1]
        positions = torch.arange(3 * size, device=q.device)
        turn = self._turns("block", positions, q, rows, rotary)
        mask = rows.shared("block mask", lambda: self._block_mask(positions, blocks, past, rows))
        if prefix is not None:
            prefix = tuple(x.repeat_interleave(blocks, dim=0) for x in prefix)
        q, k, v = self._lay_out(q.flatten(0, 1), k, v, (turn[0][2 * size :], turn[1][2 * size :]), turn, prefix)
        out, weights = self.attend(q, k, v, self._see_prefix(mask, prefix, rows, blocks))
        return out.unflatten(0, (B, blocks)).flatten(1, 2)[:, :T], weights

    def _pieces(self, q, k, v, prefix, past, rows, rotary):
        """Full attention, some queries at a time: a mask of all pairs would grow with the square of the text."""
        outputs, positions = [], torch.arange(k.shape[1], device=q.device)
        turn = self._turns("dense", positions, q, rows, rotary)
        for start in range(0, q.shape[1], PIECE):
            end = min(start + PIECE, q.shape[1])
            queries, keys = slice(past + start, past + end), slice(past + end)
            mask = self._window_mask(positions[queries], positions[keys], past, rows)
            turns = ([x[part] for x in turn] for part in (queries, keys))
            laid_out = self._lay_out(q[:, start:end], k[:, keys], v[:, keys], *turns, prefix)
            outputs.append(self.attend(*laid_out, self._see_prefix(mask, prefix, rows))[0])
        return torch.cat(outputs, dim=1), None

    def _flash(self, q, k, v, past, rows, rotary):
        """Flash attention's own sliding window; its padding mask hides the slots that a row has not filled yet."""
        positions = torch.arange(k.shape[1], device=q.device)
        turn = self._turns("dense", positions, q, rows, rotary)
        q, k = rotate(q, (turn[0][past:], turn[1][past:])), rotate(k, turn)
        mask, counts = None, on_host(rows.seen)
        if past and (counts is None or min(counts) < past):
            mask = positions >= past - rows.seen[:, None]
        return self.attend(q, k, v, mask, sliding_window=self.window)

    def _window_mask(self, queries: Tensor, keys: Tensor, past: int, rows: Rows) -> Tensor:
        distance = queries[:, None] - keys
        visible = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if past == 0:
            return visible[None, None]
        filled = keys >= past - rows.seen[:, None]
        return visible[None, None] & filled[:, None, None]  # [B, 1, T, K]

    def _block_mask(self, positions: Tensor, blocks: int, past: int, rows: Rows) -> Tensor:
        """[B blocks, 1, size, 3 size]: the window, and no key from before a row's first token."""
        size = len(positions) // 3
        visible = self._window_mask(positions[2 * size :], positions, 0, rows)[0]  # [1, size, 3 size]
        start = size * torch.arange(blocks, device=positions.device)[:, None] - 2 * size  # of each block's keys
        filled = start + positions >= -rows.seen.clamp(max=past)[:, None, None]  # [B, blocks, 3 size]
        return (visible & filled[:, :, None]).flatten(0, 1)[:, None]

    def _lay_out(self, q, k, v, turn_q, turn_k, prefix):
        """Queries, keys and values with the prefix before the keys; its scores use the unrotated queries.

        The prefix scores are extra channels of the queries, and each prefix key selects its own channel. In half
        precision, where scores as channels would lose digits, and for flex attention, which needs widths that are
        multiples of 16, the unrotated queries are the extra channels instead.
        """
        turned_q, turned_k = rotate(q, turn_q), rotate(k, turn_k)
        if prefix is None:
            return turned_q, turned_k, v
        keys, v = prefix[0], torch.cat((prefix[1], v), dim=1)
        if q.dtype == state_dtype(q.dtype) and self.config._attn_implementation != "flex_attention":
            P = keys.shape[1]
            q = torch.einsum("bthd,bphd->bthp", q, keys.repeat_interleave(self.num_key_value_groups, dim=2))
            keys = torch.eye(P, dtype=q.dtype, device=q.device)[:, None].expand(len(keys), -1, keys.shape[2], -1)
            v = F.pad(v, (0, P))  # fused attention wants as many channels in values as in keys
        keys = torch.cat((F.pad(keys, (self.head_dim, 0)), F.pad(turned_k, (0, q.shape[-1]))), dim=1)
        return torch.cat((turned_q, q), dim=-1), keys, v

    def _see_prefix(self, mask: Tensor, prefix, rows: Rows, blocks: int | None = None) -> Tensor:
        """The mask with columns for the prefix: persistent tokens are always visible, sinks beyond the window."""
        if prefix is None:
            return mask
        persistent = self.config.num_persistent_tokens
        if prefix[0].shape[1] > persistent:
            left = rows.shared(f"sinks in {blocks} blocks", lambda: self._sinks_left(mask.shape[-2], rows, blocks))
            mask = torch.cat((left, mask.expand(len(left), -1, -1, -1)), dim=-1)
        return F.pad(mask, (persistent, 0), value=True)

    def _sinks_left(self, queries: int, rows: Rows, blocks: int | None) -> Tensor:
        """[B, 1, T, S], or [B blocks, 1, size, S]: whether the window has left a row's first tokens behind."""
        places = rows.seen[:, None] + torch.arange(queries * (blocks or 1), device=rows.seen.device)
        left = places[:, :, None] - torch.arange(self.sinks, device=places.device) >= self.window
        return left.unflatten(1, (blocks or 1, queries)).flatten(0, 1)[:, None]


class SegmentAttention(TitansAttention):
    """Attention of a segment's tokens over [persistent | retrieved | segment], each at its fixed rotary slot.

    Persistent token p has slot p, retrieved token j slot P + j and segment token j slot P + C + j. Token i sees every
    persistent token, and retrieved and segment tokens j <= i: nothing later in its own segment.

    Keys start as twice the queries, so that every token attends to itself first. The memory is written with the output
    of attention: an even average over the context would make all tokens alike.
    """

    def keys_like_queries(self) -> Tensor:
        """Twice the first query head of every key head's group, as a weight for `k_proj`."""
        heads = self.q_proj.weight.unflatten(0, (-1, self.head_dim))
        return 2 * heads[:: self.num_key_value_groups].flatten(0, 1)

    def forward(self, q, kv, persistent_kv, past: int, places: Tensor, output_attentions: bool):
        """Attend in one piece of a segment.

        Args:
            q: queries [B, T, H, D], rotated.
            kv: keys, rotated, and values of the open segment's tokens, past ones first: [B, past + T, 2, H_kv, D] each,
                the retrieved token and the segment's own side by side.
            persistent_kv: [B, P, H_kv, D] twice, or None.
            past: how many tokens of `kv` are from earlier pieces; some may belong to a segment before.
            places: [B] tokens in each row's open segment.
        """
        k, v = (x.flatten(1, 2) for x in kv)
        native = None if output_attentions else self.native(q)
        if native is not None:
            return self.o_proj(native.attend(q, k, v, 2 * (past - places), self.scaling, *persistent_kv or ())), None
        keys = torch.arange(past + q.shape[1], device=q.device)
        visible = (keys <= keys[past:, None])[None]  # [1, T, past + T]
        if past:
            visible = visible & (keys >= past - places[:, None])[:, None]
        mask = visible.repeat_interleave(2, dim=-1)[:, None]
        if persistent_kv is not None:
            k, v = torch.cat((persistent_kv[0], k), dim=1), torch.cat((persistent_kv[1], v), dim=1)
            mask = F.pad(mask, (persistent_kv[0].shape[1], 0), value=True)
        out, weights = self.attend(q, k, v, mask)
        weights = self._by_slot(weights, past, places) if output_attentions and weights is not None else None
        return self.o_proj(out), weights

    def _by_slot(self, weights: Tensor, past: int, places: Tensor) -> Tensor:
        """Move the columns [P | past + T pairs of a retrieved and a segment token] to their slots [P | C | C]."""
        C, P = self.config.segment_size, self.config.num_persistent_tokens
        keys = (weights.shape[-1] - P) // 2
        slot = (torch.arange(keys, device=weights.device) - past + places[:, None]).clamp(0, C - 1)  # [B, keys]
        persistent = torch.arange(P, device=weights.device).expand(len(slot), P)
        pairs = torch.stack((P + slot, P + C + slot), dim=-1).flatten(1)
        index = torch.cat((persistent, pairs), dim=1)[:, None, None].expand_as(weights)
        return weights.new_zeros(*weights.shape[:-1], P + 2 * C).scatter_add(-1, index, weights)
