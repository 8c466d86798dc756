"""Titans: the four ways to use the memory (Section 4), the decoder layer, the model and its heads.

Axis letters: B batch, T tokens, H heads, D head width, P persistent tokens, C segment, W window. Inside the layers rows
hold their real tokens at the front (`Rows`), so that padding is never computed on and never written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

try:  # transformers 5.16 and later
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:

    def slice_logits_to_keep(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """The hidden states whose logits are wanted: the last few, or those at the given positions."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return hidden_states[:, kept]


from .attention_titans import Rows, SegmentAttention, SlidingAttention, TitansRotaryEmbedding, rotate
from .cache_titans import LOG_LIMIT, REWIND, LayerCarry, Step, TitansCache, check_cache
from .configuration_titans import TitansConfig
from .memory_ops import GridCut, MemoryState, PackedRows, on_host, where_rows
from .neural_memory import (
    CausalConv,
    MemoryCarry,
    MemoryStart,
    NeuralMemory,
    TitansRMSNorm,
    WriteGates,
    Written,
    last_tokens,
)


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


class MemoryMixer(nn.Module):
    """What the variants without segments share: the memory, its prologue, and its part of the carry."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.config = config
        self.memory = NeuralMemory(config)

    def begin(self, persistent: Tensor | None, rows: Rows) -> LayerCarry:
        """The carry of rows that read their first token: after the persistent tokens, if there are any."""
        _, memory = self._prologue(persistent, rows)
        return self._carry(memory)

    def _prologue(self, persistent: Tensor | None, rows: Rows) -> tuple[Tensor | None, MemoryCarry]:
        if persistent is None:
            return None, self.memory.begin(rows.batch_size, rows.spare)
        return self.memory.prologue(persistent, rows.batch_size, rows.spare)

    def _carry(self, memory: MemoryCarry, tails: dict | None = None, fixed: dict | None = None) -> LayerCarry:
        state = memory.state.opened(self.config.memory_chunk_size)
        return LayerCarry(state, {"conv": memory.tail, **(tails or {})}, fixed or {})

    def _remember(self, x: Tensor, carry: LayerCarry, rows: Rows, read_only: bool):
        return self.memory(x, MemoryCarry(carry.memory, carry.tails["conv"]), rows.lengths, read_only)

    def _window(self, carry: LayerCarry) -> tuple[Tensor, Tensor] | None:
        return (carry.tails["keys"], carry.tails["values"]) if "keys" in carry.tails else None

    def _empty_window(self, x: Tensor, rows: Rows) -> dict[str, Tensor]:
        config = self.config
        if not rows.keep:
            return {}
        slots = config.sliding_window - 1 + rows.spare
        empty = x.new_zeros(rows.batch_size, slots, config.num_key_value_heads, config.head_dim)
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
        return self._carry(memory, self._empty_window(memory.tail, rows))

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(persistent, rows))
        m, memory, written = self._remember(x, before, rows, read_only)
        prefix = None
        if persistent is not None:
            prefix = tuple(
                kv[None].expand(rows.batch_size, -1, -1, -1) for kv in self.attention.keys_values(persistent)
            )
        y, weights, window = self.attention(x, prefix, self._window(before), rows, rotary, output_attentions)
        carry = self._carry(memory, window)
        return Mixed(self.combine(y, m), weights, carry, before, written)


class MemoryAsLayer(MemoryMixer):
    """MAL: the memory first, sliding-window attention on its normed output (Section 4.3, Eqs. 29-31)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config)
        self.attention = SlidingAttention(config, layer_idx)
        self.norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)

    def begin(self, persistent, rows) -> LayerCarry:
        outputs, memory = self._prologue(persistent, rows)
        fixed = {}
        if outputs is not None:
            fixed = dict(
                zip(("prefix_keys", "prefix_values"), self.attention.keys_values(self.norm(outputs)), strict=True)
            )
        return self._carry(memory, self._empty_window(memory.tail, rows), fixed)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(persistent, rows))
        m, memory, written = self._remember(x, before, rows, read_only)
        prefix = (before.fixed["prefix_keys"], before.fixed["prefix_values"]) if before.fixed else None
        y, weights, window = self.attention(self.norm(m), prefix, self._window(before), rows, rotary, output_attentions)
        carry = self._carry(memory, window, before.fixed)
        return Mixed(y, weights, carry, before, written)


SEGMENT_TAILS = ("retrieved_keys", "retrieved_values", "segment_keys", "segment_values")


class MemoryAsContext(nn.Module):
    """MAC: what the memory holds for a segment stands before it in attention's context (Section 4.1, Eqs. 21-25).

    The memory's keys start equal to its queries. Without that, it first learns which values were written, and only much
    later under which keys.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.memory = NeuralMemory(config)
        self.attention = SegmentAttention(config, layer_idx)
        self.write_norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.combine = Combine(config)

    def begin(self, x: Tensor, rows: Rows) -> LayerCarry:
        config, memory = self.config, self.memory.begin(rows.batch_size, rows.spare)
        slots = config.segment_size - 1 + rows.spare
        empty = x.new_zeros(rows.batch_size, slots, config.num_key_value_heads, config.head_dim)
        queries = memory.tail[..., : memory.tail.shape[-1] // 3]
        tails = {"conv": memory.tail, "conv_retrieval": queries, **dict.fromkeys(SEGMENT_TAILS, empty)}
        return LayerCarry(memory.state.opened(config.memory_chunk_size), tails, {}, memory.state.weights)

    def forward(self, x, persistent, rows: Rows, past, rotary, read_only=False, output_attentions=False) -> Mixed:
        before = rows.start(past, lambda: self.begin(x, rows))
        C = self.config.segment_size
        places = None if rows.fresh is True else rows.seen % C
        cut = GridCut(places, rows.lengths, rows.width, C)
        retrieval, tail = self.memory.queries(x, before.tails["conv_retrieval"], rows.lengths)
        tokens = (retrieval, self.attention.queries(x), *self.attention.keys_values(x))
        persistent_kv = self._persistent(persistent, rows, rotary)

        carry = LayerCarry(before.memory, {**before.tails, "conv_retrieval": tail}, {}, before.segment_weights)
        parts = []
        for piece in self._pieces(cut, tokens, places, rows):
            part, carry = self._piece(piece, persistent_kv, carry, rows, rotary, read_only, output_attentions)
            parts.append(part)
        return self._join(cut, parts, carry, before, rows)

    def _pieces(self, cut: GridCut, tokens, places: Tensor | None, rows: Rows):
        """The pass in pieces that end where a segment ends: (tokens, real tokens per row, places in the segment)."""
        C, on_line = self.config.segment_size, torch.zeros_like(rows.seen)
        if cut.head_width:
            yield [cut.head(x) for x in tokens], cut.head_counts, places, True
        if cut.body_width:
            body = [cut.body(x) for x in tokens]
            for start in range(0, cut.body_width, C):
                counts = None if cut.body_counts is None else (cut.body_counts - start).clamp(0, C)
                yield [x[:, start : start + C] for x in body], counts, on_line, False

    def _piece(self, piece, persistent_kv, carry: LayerCarry, rows: Rows, rotary, read_only, output_attentions):
        """Retrieve, attend, write and read (Eqs. 21-25) for tokens of one segment."""
        (retrieval, q, k, v), counts, places, is_head = piece
        C, P, T = self.config.segment_size, self.config.num_persistent_tokens, q.shape[1]
        slots = places[:, None] + torch.arange(T, device=q.device)
        retrieved_at, segment_at = rotary(q, P + slots), rotary(q, P + C + slots)

        h_k, h_v = self.attention.keys_values(self.memory.retrieve(carry.segment_weights, retrieval))
        kv = [rotate(h_k, retrieved_at), h_v, rotate(k, segment_at), v]
        tails = [carry.tails[name] for name in SEGMENT_TAILS]
        past = min(C - 1, rows.reach) if is_head else 0
        y, weights = self.attention(rotate(q, segment_at), kv, persistent_kv, tails, past, places, output_attentions)
        m, memory, written = self.memory(
            self.write_norm(y), MemoryCarry(carry.memory, carry.tails["conv"]), counts, read_only
        )
        kept = tails
        if rows.keep:
            pairs = zip(tails, kv, strict=True)
            kept = [last_tokens(torch.cat((tail, new), dim=1), counts, tail.shape[1]) for tail, new in pairs]
        carry = LayerCarry(
            memory.state,
            {**carry.tails, "conv": memory.tail, **dict(zip(SEGMENT_TAILS, kept, strict=True))},
            {},
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

    def _persistent(self, persistent: Tensor | None, rows: Rows, rotary) -> tuple[Tensor, Tensor] | None:
        if persistent is None:
            return None
        k, v = self.attention.keys_values(persistent[None])
        k = rotate(k, rotary(k, torch.arange(k.shape[1], device=k.device)))
        return tuple(x.expand(rows.batch_size, -1, -1, -1) for x in (k, v))

    def _join(self, cut: GridCut, parts: list[Mixed], carry: LayerCarry, before: LayerCarry, rows: Rows) -> Mixed:
        """The pieces of the pass as one: outputs, attention weights and written tokens in the order of the tokens."""
        heads = 1 if cut.head_width else 0

        def join(pick: Callable[[Mixed], Tensor]) -> Tensor:
            found = [pick(part) for part in parts]
            body = torch.cat(found[heads:], dim=1) if found[heads:] else None
            return cut.join(found[0] if heads else None, body)

        attention = None
        if parts[0].attention is not None:
            attention = join(lambda part: part.attention.transpose(1, 2)).transpose(1, 2)
        written = None
        if rows.keep:
            written = Written(
                *(join(lambda part, name=name: getattr(part.written, name)) for name in ("k", "v", "gates"))
            )
        carry.memory = carry.memory.opened(self.config.memory_chunk_size)
        return Mixed(join(lambda part: part.out), attention, carry, before, written)


MIXERS = {"mac": MemoryAsContext, "mag": MemoryAsGate, "mal": MemoryAsLayer, "lmm": MemoryAlone}


class TitansMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class TitansDecoderLayer(GradientCheckpointingLayer):
    """RMSNorm, mixer, residual; RMSNorm, SwiGLU, residual. The persistent tokens pass the first norm like any token."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.persistent = None
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.num_persistent_tokens, config.hidden_size))
        self.input_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = MIXERS[config.variant](config, layer_idx)
        self.post_attention_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TitansMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        rows: Rows,
        rotary: TitansRotaryEmbedding,
        past_key_values: Cache | None = None,
        read_only: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rows = rows.on(hidden_states.device)
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx].carry
        persistent = None if self.persistent is None else self.input_layernorm(self.persistent)
        mixed = self.mixer(
            self.input_layernorm(hidden_states), persistent, rows, past, rotary, read_only, output_attentions
        )
        if past_key_values is not None:
            step = Step(rows.seen, rows.lengths, rows.width, rows.fresh, mixed.before, mixed.written, read_only)
            past_key_values.layers[self.layer_idx].store(step, mixed.carry)
        hidden_states = hidden_states + mixed.out
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, mixed.attention


class TitansPreTrainedModel(PreTrainedModel):
    config: TitansConfig
    config_class = TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TitansDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _keep_in_fp32_modules_strict = ["memory.start"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings as everywhere in transformers; the memory's parts as their docstrings say."""
        if isinstance(module, WriteGates):
            init.zeros_(module.proj.weight)
            init.copy_(module.proj.bias, module.start_bias())
        elif isinstance(module, CausalConv):
            bound = module.weight.shape[1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, SegmentAttention):
            init.copy_(module.k_proj.weight, module.keys_like_queries())
        elif isinstance(module, MemoryAsContext):
            init.copy_(module.memory.k_proj.weight, module.memory.q_proj.weight)
        elif isinstance(module, BranchNorm):
            init.constant_(module.weight, self.config.hidden_size * self.config.initializer_range**2)
        elif isinstance(module, MemoryStart):
            for W, size in zip(module.weights, module.start_sizes(self.config.variant), strict=True):
                init.normal_(W, std=size * W.shape[-2] ** -0.5)
        elif isinstance(module, TitansDecoderLayer) and module.persistent is not None:
            init.normal_(module.persistent, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module: nn.Module, *args, **kwargs) -> None:
        """Give `_init_weights` every module: out of tree, transformers would leave out those without own parameters.

        That is its guard against initialisers that overwrite loaded weights; `transformers.initialization` does not.
        """
        super()._initialize_weights(module)


class TitansModel(TitansPreTrainedModel):
    """The stack of Titans blocks. Everything it remembers is in the cache; the module itself holds no state."""

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(TitansDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = TitansRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._check_attention()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        memory_read_only: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Read tokens.

        Args:
            attention_mask: [B, T] or [B, past + T], 0 at padding, in any pattern. Padding is skipped.
            position_ids: accepted and not used; a token's place is its rank among its row's real tokens. Positions that
                start again, as in packed documents, are refused: give every document a row of its own.
            past_key_values: a `TitansCache` to go on from; it is updated.
            use_cache: whether to return a cache. By default `config.use_cache`, and never in training.
            memory_read_only: answer from the memory without writing into it. Attention and convolutions still move on.
            output_attentions: with `attn_implementation="eager"`, return maps [B, H, T, columns]. The columns are
                [persistent | past tokens in the window | T] in mag and mal, and [persistent | retrieved | segment], the
                latter two by slot in the token's own segment, in mac. lmm has none.
        """
        self._check_attention()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
        given = input_ids if inputs_embeds is None else inputs_embeds
        name, width = ("input_ids", ()) if inputs_embeds is None else ("inputs_embeds", (self.config.hidden_size,))
        if given.dim() != 2 + len(width) or 0 in given.shape or given.shape[2:] != width:
            raise ValueError(
                f"`{name}` must be {['batch >= 1', 'tokens >= 1', *width]}, got shape {tuple(given.shape)}"
            )
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        _refuse_packed_documents(position_ids if attention_mask is None else None, kwargs)
        cache = self._open_cache(past_key_values, use_cache, given.shape[0])
        mask = self._new_token_mask(attention_mask, given.shape[:2], cache)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

        options = {"read_only": memory_read_only, "output_attentions": output_attentions}
        passes = self._passes(embeds, mask, cache, whole=output_attentions)
        found = [self._run(*one, cache, output_hidden_states, **options) for one in passes]
        if cache is not None:
            for layer in cache.layers:
                layer.advance(mask, embeds.shape[1])
        states = [_join_passes(parts, mask) for parts in zip(*(states for states, _ in found), strict=True)]
        states[-1] = self.norm(states[-1])
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            past_key_values=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(found[0][1]) or None,
        )

    def _run(self, x: Tensor, rows: Rows, packed: PackedRows | None, cache, all_states: bool, **options):
        """One pass through the layers: the hidden states between them and the attention maps, by input column."""
        unpack = (lambda x: x) if packed is None else packed.unpack
        states, attentions = [unpack(x)] if all_states else [], []
        for layer in self.layers:
            x, attention = layer(x, rows=rows, rotary=self.rotary_emb, past_key_values=cache, **options)
            if all_states or layer is self.layers[-1]:
                states.append(unpack(x))
            if attention is not None:
                attentions.append(self._unpack_attention(attention, packed))
        return states, attentions

    def _unpack_attention(self, weights: Tensor, packed: PackedRows | None) -> Tensor:
        if packed is None:
            return weights
        weights = packed.unpack(weights.transpose(1, 2)).transpose(1, 2)  # queries back in place
        if self.config.variant == "mac":
            return weights
        before, new = weights[..., : -packed.width], weights[..., -packed.width :]
        new = packed.unpack(new.movedim(-1, 1)).movedim(1, -1)
        return torch.cat((before, new), dim=-1)

    def _passes(self, embeds: Tensor, mask: Tensor | None, cache: Cache | None, whole: bool):
        """The tokens as one pass, or as two when a long input fills a croppable cache.

        The cache can go back `REWIND` tokens: these are read in a pass of their own, from a state that it keeps.
        """
        layer = None if cache is None else cache.layers[0]
        croppable = layer is not None and layer.is_croppable and not whole
        if mask is None:
            T, last = embeds.shape[1], 0
            if croppable and T > LOG_LIMIT:
                last = REWIND
                chunk = self.config.memory_chunk_size
                if chunk <= REWIND:  # end the first pass on the chunk grid where rows agree: no chunk is torn
                    last += (T - last + (0 if layer.seen is None else int(layer.seen[0]))) % chunk
            for x in (embeds[:, : T - last], embeds[:, T - last :]):
                if x.shape[1]:
                    yield x, Rows.of(x, None, layer), None
            return
        parts, rank = [mask], mask.cumsum(1)
        if croppable and int(rank[:, -1].max()) > LOG_LIMIT:
            first = mask & (rank <= rank[:, -1:] - REWIND)
            parts = [first, mask & ~first]
        for part in parts:
            packed = PackedRows(part)
            x = packed.pack(embeds)
            yield x, Rows.of(x, packed.lengths, layer), packed

    def _open_cache(self, cache: Cache | None, use_cache: bool | None, batch_size: int) -> Cache | None:
        checkpointing = self.gradient_checkpointing and self.training
        if cache is None:
            use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
            return TitansCache(self.config) if use_cache and not checkpointing else None
        check_cache(cache, self.config, batch_size, self.layers[0].mixer.memory.q_proj.weight.dtype)
        if checkpointing:
            raise ValueError("gradient checkpointing cannot go on from `past_key_values`: switch one of them off")
        return cache

    def _new_token_mask(self, attention_mask, shape: tuple[int, int], cache: Cache | None) -> Tensor | None:
        """Which of the new tokens are real, [B, T] bool; None if all are."""
        if attention_mask is None:
            return None
        (B, T), compiling = shape, torch.compiler.is_compiling()
        lengths = {T} if compiling else {T, T + int(0 if cache is None else cache.get_seq_length())}
        fits = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[0] == B
        if not fits or (not compiling and attention_mask.shape[1] not in lengths):
            got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(
                f"`attention_mask` must be [{B}, {' or '.join(map(str, sorted(lengths)))}] (batch, tokens), got {got}"
            )
        mask = attention_mask[:, -T:].bool()
        return mask if compiling or not bool(mask.all()) else None

    def _check_attention(self) -> None:
        implementation, config = self.config._attn_implementation or "eager", self.config
        if config.variant == "lmm" or implementation in ("eager", "sdpa", "flex_attention"):
            return
        if implementation != "flash_attention_2" or config.variant == "mac" or config.num_persistent_tokens:
            raise ValueError(
                f"`attn_implementation={implementation!r}` cannot express this model's mask: it works for mag and mal "
                "with `num_persistent_tokens=0`. Use 'sdpa', 'eager' or 'flex_attention'."
            )


def _refuse_packed_documents(position_ids: Tensor | None, kwargs: dict) -> None:
    """Read as one row, several documents would share one memory."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` marks packed documents: pass every document as a row of its own")
    if position_ids is None or torch.compiler.is_compiling() or position_ids.dim() != 2:
        return
    if bool((position_ids.diff(dim=1) < 0).any()):
        raise ValueError("`position_ids` start again within a row: pass every document as a row of its own")


def _join_passes(parts: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Hidden states of the passes as one: side by side without padding, added up where each fills its own columns."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1) if mask is None else sum(parts)


class TitansForCausalLM(TitansPreTrainedModel, GenerationMixin):
    """Titans with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        memory_read_only: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss against `labels` (-100 is ignored). Other arguments as in `TitansModel`."""
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memory_read_only=memory_read_only,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def create_masks_for_generate(attention_mask, inputs_embeds, **kwargs) -> Tensor | None:
        """For a static cache `generate` prepares masks ahead; a Titans model needs just the new tokens' padding."""
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """As in transformers, with a `TitansCache` where it would make a `DynamicCache`: it can be cloned and saved."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if type(model_kwargs.get("past_key_values")) is DynamicCache:
            model_kwargs["past_key_values"] = TitansCache.adopt(model_kwargs["past_key_values"])


class TitansForSequenceClassification(GenericForSequenceClassification, TitansPreTrainedModel):
    """Titans with a classification head on each row's last token."""

    def __init__(self, config: TitansConfig):
        TitansPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


__all__ = ["TitansForCausalLM", "TitansForSequenceClassification", "TitansModel", "TitansPreTrainedModel"]
