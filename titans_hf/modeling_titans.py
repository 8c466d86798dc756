"""Titans: the decoder layer, the model and its heads.

Axis letters: B batch, T tokens, H heads. Inside the layers rows hold their real tokens at the front (`Rows`), so that
padding is never computed on and never written.
"""

import os
import shutil
import weakref

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation import GenerationMixin, GenerationMode
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging

try:  # transformers 5.16 and later
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:

    def slice_logits_to_keep(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """The hidden states whose logits are wanted: the last few, or those at the given positions."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return hidden_states[:, kept]


from .attention_titans import Rows, SegmentAttention, TitansAttention, TitansRotaryEmbedding
from .cache_titans import LAYER_TYPE, TitansCache, TitansCacheLayer, advance_all, check_cache, hide_past
from .carry_titans import LOG_LIMIT, REWIND
from .configuration_titans import TitansConfig
from .documents_titans import Documents, find_documents
from .fast_paths import operators, plain, weights_of
from .memory_layer import CausalConv, MemoryStart, NeuralMemory, TitansRMSNorm, WriteGates
from .mixers_titans import BranchNorm, GateNorm, mixer_of
from .rows import PackedRows
from .surprise import SurpriseTrace, trace
from .tails import Tail

logger = logging.get_logger(__name__)


class TitansMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act, self.is_swiglu = ACT2FN[config.hidden_act], config.hidden_act in ("silu", "swish")

    def forward(self, x: Tensor) -> Tensor:
        native = operators(x, x.shape[1]) if self.is_swiglu else None
        if native is not None and plain(self.gate_proj, self.up_proj, self.down_proj):
            return native.feed_forward(x, weights_of(self.gate_proj, self.up_proj, self.down_proj))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class TitansDecoderLayer(GradientCheckpointingLayer):
    """RMSNorm, mixer, residual; RMSNorm, SwiGLU, residual. The persistent tokens pass the first norm like any token."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.is_last = layer_idx, layer_idx == config.num_hidden_layers - 1
        self.persistent = None
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.num_persistent_tokens, config.hidden_size))
        self.input_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = mixer_of(config, layer_idx)
        self.post_attention_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TitansMLP(config)

    @property
    def memory(self) -> NeuralMemory | None:
        """The block's memory; None where `config.memory_layers` leaves it out."""
        return getattr(self.mixer, "memory", None)

    def forward(
        self,
        hidden_states: Tensor,
        rows: Rows | Documents,
        rotary: TitansRotaryEmbedding,
        past_key_values: Cache | None = None,
        read_only: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rows = rows.on(hidden_states.device)
        normed = self.input_layernorm(hidden_states)
        persistent = None if self.persistent is None else lambda: self.input_layernorm(self.persistent)
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        attention = carry = None
        if isinstance(rows, Documents):
            out = rows.apart(normed, lambda x, own: self.mixer(x, persistent, own, None, rotary, read_only)[0])
        else:
            past = None if layer is None else layer.carry
            out, attention, carry = self.mixer(normed, persistent, rows, past, rotary, read_only, output_attentions)
        hidden_states = hidden_states + out
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        if layer is not None:
            if self.is_last:
                carry.outputs = self._outputs(layer, hidden_states, rows)
            layer.store(carry, rows.seen_after())
        return hidden_states, attention

    def _outputs(self, layer: TitansCacheLayer, hidden_states: Tensor, rows: Rows) -> Tail:
        """The last tokens' outputs: what the model says of a row whose next columns are padding."""
        if layer.carry is None:
            past = Tail(hidden_states.new_zeros(rows.batch_size, 1 + rows.spare, hidden_states.shape[-1]))
        else:
            past = layer.carry.outputs
        return past.after([hidden_states], rows.lengths)


def _is_fresh(parameter: Tensor) -> bool:
    """Whether a parameter has not been loaded. A loaded one may be quantised, and then its neighbours too."""
    return not getattr(parameter, "_is_hf_initialized", False)


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
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ["memory.start"]
    _code = __file__  # which `save_pretrained` puts beside the weights, with what it imports
    _fill_card = None  # `hub.cards.fill_card` in titans_hf; as remote code the model leaves the card to transformers

    def __init__(self, config: TitansConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if config.cache_layer_type != LAYER_TYPE:  # the model is remote code, and its configuration is new
            config.cache_layer_type = LAYER_TYPE

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings as everywhere in transformers; the memory's parts as their docstrings say."""
        if isinstance(module, WriteGates):
            init.zeros_(module.proj.weight)
            init.copy_(module.proj.bias, module.start_bias())
        elif isinstance(module, TitansRotaryEmbedding):
            init.copy_(module.inv_freq, module.frequencies()[0])
        elif isinstance(module, CausalConv):
            init.copy_(module.weight, module.start())
        elif isinstance(module, TitansAttention):
            if isinstance(module, SegmentAttention) and _is_fresh(module.k_proj.weight):
                init.copy_(module.k_proj.weight, module.keys_like_queries())
            self._init_output(module.o_proj)
        elif isinstance(module, NeuralMemory):
            if module.k_proj is not None and _is_fresh(module.k_proj.weight):
                init.copy_(module.k_proj.weight, module.q_proj.weight)
            self._init_output(module.out_proj)
        elif isinstance(module, nn.Embedding):
            if _is_fresh(module.weight):
                init.normal_(module.weight, std=self.config.embedding_initializer_range)
                if module.padding_idx is not None:
                    init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, BranchNorm):
            init.constant_(module.weight, self.config.hidden_size * self.config.initializer_range**2)
        elif isinstance(module, GateNorm):
            init.constant_(module.weight, 0.1)
        elif isinstance(module, MemoryStart):
            for W, size in zip(module.weights, module.start_sizes(self.config.variant), strict=True):
                init.normal_(W, std=size)
        elif isinstance(module, TitansDecoderLayer) and module.persistent is not None:
            init.normal_(module.persistent, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    def _init_output(self, proj: nn.Linear) -> None:
        """The projection with which a mixer enters the residual stream: quiet, so that the token leads it at first."""
        if _is_fresh(proj.weight):
            init.normal_(proj.weight, std=self.config.initializer_range * self.config.mixer_initializer_scale)

    def _initialize_weights(self, module: nn.Module, *args, **kwargs) -> None:
        """Give `_init_weights` every module: out of tree, transformers would leave out those without own parameters.

        That is its guard against initialisers that overwrite loaded weights; `transformers.initialization` does not.
        """
        super()._initialize_weights(module)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):  # FSDP2 has given the model a class in a file of torch's: not our code
            cls._auto_class = None

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers. The code goes beside the weights, where `config.auto_map` points to it."""
        if is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            for file in (self._code, *get_relative_import_files(self._code)):
                shutil.copy(file, save_directory)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        """As in transformers, on the way to the Hub. A repository without a card gets one of this model."""
        if self._fill_card is not None:
            self._fill_card(working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def trace_surprise(
        self,
        input_ids: Tensor,
        past_key_values: TitansCache | None = None,
        tokenizer=None,
        memory_read_only: bool = False,
        piece: int = 1024,
    ) -> SurpriseTrace:
        """Read one text and note what every memory makes of every token: surprise, gates, size.

        Hooks on the memories do it: no other thread may use the model meanwhile.

        Args:
            input_ids: [tokens] or [1, tokens].
            past_key_values: a cache to go on from; it is updated. Without one the text starts from nothing.
            tokenizer: to show the text with the numbers.
            memory_read_only: look at the surprise without writing.
            piece: tokens to read at a time; the result is the same for any number.
        """
        return trace(self, input_ids, past_key_values, tokenizer, memory_read_only, piece)


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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Read tokens.

        Args:
            attention_mask: [B, T] or [B, past + T], 0 at padding, in any pattern. Padding is skipped: it shows the
                hidden state of the row's last token before it, so generation also works from a right-padded prompt.
            position_ids: a token's place is its rank among its document's real tokens, whatever is given here. Where
                positions start again, a packed document starts: it gets a memory of its own. `seq_idx` and
                `cu_seq_lens_q`, as collators make them, say the same. Packed documents leave no cache.
            past_key_values: a `TitansCache` to go on from; it is updated.
            use_cache: whether to return a cache. By default `config.use_cache`, and never in training.
            memory_read_only: answer from the memory without writing into it. Attention and convolutions still move on.
            output_attentions: with `attn_implementation="eager"`, return maps [B, H, T, columns]. The columns are
                [persistent | past tokens in the window | T] in mag and mal, and [persistent | retrieved | segment], the
                latter two by slot in the token's own segment, in mac, where no gradient reaches them. lmm has none. In
                a layer with full attention the window is all that was read. Sinks that some token's window has left
                behind come after the persistent tokens.
        """
        self._check_attention()
        given = self._check_input(input_ids, inputs_embeds)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        cache = self._open_cache(past_key_values, use_cache, given.shape[0])
        mask = self._new_token_mask(attention_mask, given.shape[:2], cache)
        documents = self._find_documents(given, mask, position_ids, kwargs)
        if documents is not None:
            self._check_packed(past_key_values, use_cache, output_attentions)
            cache = None
        if isinstance(cache, TitansCache) and not torch.compiler.is_compiling():
            cache.reader = weakref.ref(self)
        if cache is not None and attention_mask is not None and not torch.compiler.is_compiling():
            hide_past(cache, attention_mask[:, : -given.shape[1]].bool())
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if documents is None:
            passes = self._passes(embeds, mask, cache, whole=output_attentions)
        else:
            passes = [(documents.pack(embeds), documents, documents)]
        options = {"read_only": memory_read_only, "output_attentions": output_attentions}
        found = [self._run(*one, cache, output_hidden_states, **options) for one in passes]
        if cache is not None:
            advance_all(cache, mask, embeds.shape[1])
        states = found[0][0]
        for later, _, packed in found[1:]:
            states = [_join_passes(*pair, packed) for pair in zip(states, later, strict=True)]
        states[-1] = self.norm(states[-1])
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            past_key_values=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(found[0][1]) or None,
        )

    def _run(
        self, x: Tensor, rows: Rows | Documents, packed: PackedRows | Documents | None, cache, all_states, **options
    ):
        """One pass through the layers: the hidden states between them and the attention maps, by input column."""
        states, attentions = [], []
        before = None if cache is None or packed is None else _last_output(cache)
        layers = self.layers[: self.config.num_hidden_layers]  # generate's early exit lowers the number
        for index in range(len(layers) + 1):
            if index:
                x, attention = layers[index - 1](x, rows=rows, rotary=self.rotary_emb, past_key_values=cache, **options)
                if attention is not None:
                    attentions.append(attention)
            if all_states or index == len(layers):
                states.append(x if packed is None else packed.spread(x, before if index == len(layers) else None))
                if packed is not None:  # go on from what is returned, so that gradients reach it
                    x = packed.pack(states[-1])
        return states, attentions, packed

    def _passes(self, embeds: Tensor, mask: Tensor | None, cache: Cache | None, whole: bool):
        """The tokens as one pass, or as two when a long input fills a cache that can be cropped.

        The cache can go back `REWIND` tokens: these are read in a pass of their own, from a state that it keeps. This
        stays a generator: the second pass starts from what the first has stored.
        """
        layer = None if cache is None else cache.layers[0]
        rewinds = layer is not None and layer.spare and not whole and not torch.compiler.is_compiling()
        if mask is None:
            T, last = embeds.shape[1], 0
            if rewinds and T > LOG_LIMIT:
                last = REWIND
                chunk = self.config.memory_chunk_size
                if chunk <= REWIND:  # end the first pass on the chunk grid where rows agree: no chunk is torn
                    last += (T - last + (0 if layer.seen is None else int(layer.seen[0]))) % chunk
            for x in (embeds[:, : T - last], embeds[:, T - last :]):
                if x.shape[1]:
                    yield x, Rows.of(x, None, layer), None
            return
        parts, rank = [mask], mask.cumsum(1)
        if rewinds and int(rank[:, -1].max()) > LOG_LIMIT:
            first = mask & (rank <= rank[:, -1:] - REWIND)
            parts = [first, mask & ~first]
        for part in parts:
            packed = PackedRows(part)
            x = packed.pack(embeds)
            yield x, Rows.of(x, packed.lengths, layer, packed), packed

    def _open_cache(self, cache: Cache | None, use_cache: bool | None, batch_size: int) -> Cache | None:
        checkpointing = self.gradient_checkpointing and self.training
        if cache is None:
            if use_cache is None:  # nn.DataParallel could not gather the caches of its replicas
                use_cache = self.config.use_cache and not self.training and not getattr(self, "_is_replica", False)
            return TitansCache(self.config) if use_cache and not checkpointing else None
        check_cache(cache, self.config, batch_size, self.norm.weight.dtype)
        if checkpointing:
            raise ValueError(
                "gradient checkpointing cannot go on from `past_key_values`: call `model.eval()` to generate, or "
                "switch one of them off"
            )
        return cache

    def _new_token_mask(self, attention_mask, shape: tuple[int, int], cache: Cache | None) -> Tensor | None:
        """Which of the new tokens are real, [B, T] bool; None if all are."""
        if attention_mask is None:
            return None
        (B, T), compiling = shape, torch.compiler.is_compiling()
        past = 0 if cache is None or compiling else int(cache.get_seq_length())
        fits = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[0] == B
        if not fits or (not compiling and attention_mask.shape[1] not in (T, past + T)):
            got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            lengths = f"{T} or {past + T}" if past else T
            raise ValueError(f"`attention_mask` must be [{B}, {lengths}] (batch, tokens), got {got}")
        mask = attention_mask[:, -T:].bool()
        return mask if compiling or not bool(mask.all()) else None

    def _check_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The one of the two that is given, in the right shape."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
        given = input_ids if inputs_embeds is None else inputs_embeds
        name, width = ("input_ids", ()) if inputs_embeds is None else ("inputs_embeds", (self.config.hidden_size,))
        if given.dim() != 2 + len(width) or 0 in given.shape or given.shape[2:] != width:
            raise ValueError(
                f"`{name}` must be {['batch >= 1', 'tokens >= 1', *width]}, got shape {tuple(given.shape)}"
            )
        return given

    @staticmethod
    def _check_packed(past_key_values: Cache | None, use_cache: bool | None, output_attentions: bool) -> None:
        if past_key_values is not None or use_cache:
            raise ValueError(
                "packed documents leave no cache: pass `use_cache=False` and no `past_key_values`, or give every "
                "document a row of its own"
            )
        if output_attentions:
            raise ValueError("`output_attentions` is not available for packed documents: give each its own row")

    def _find_documents(self, given: Tensor, mask, position_ids: Tensor | None, kwargs: dict) -> Documents | None:
        marks = {"seq_idx": kwargs.get("seq_idx"), "cu_seq_lens": kwargs.get("cu_seq_lens_q")}
        if given.shape[1] == 1 or (position_ids is None and all(mark is None for mark in marks.values())):
            return None
        if torch.compiler.is_exporting():  # how many documents there are is not known here
            refusal = "an exported Titans model cannot read packed documents: give every document a row of its own"
            if position_ids is None:
                raise ValueError(refusal)
            if mask is None:
                torch._assert_async((position_ids.diff(dim=-1) > 0).all(), refusal)
            return None
        return find_documents(given.shape[:2], mask, given.device, position_ids, **marks)

    def _check_attention(self) -> None:
        implementation, config = self.config._attn_implementation or "eager", self.config
        if config.variant == "lmm" or implementation in ("eager", "sdpa", "flex_attention"):
            return
        prefix = config.num_persistent_tokens or config.attention_sinks
        if implementation != "flash_attention_2" or config.variant == "mac" or prefix:
            raise ValueError(
                f"`attn_implementation={implementation!r}` cannot express this model's mask: it works for mag and mal "
                "with `num_persistent_tokens=0` and `attention_sinks=0`. Use 'sdpa', 'eager' or 'flex_attention'."
            )


def _last_output(cache: Cache) -> Tensor | None:
    """[B, hidden] the output of each row's last token, zeros where it has read none."""
    layer = cache.layers[-1]
    if layer.carry is None or layer.carry.outputs is None:
        return None
    last = layer.carry.outputs.last(1)[:, 0]
    return last.masked_fill((layer.seen == 0)[:, None], 0.0)


def _join_passes(first: Tensor, second: Tensor, packed: PackedRows | None) -> Tensor:
    """Hidden states of two passes as one: side by side without padding; with it, the second where it has begun."""
    if packed is None:
        return torch.cat((first, second), dim=1)
    return torch.where(packed.started[..., None].to(first.device), second, first)


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
        **kwargs: Unpack[TransformersKwargs],
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
        """For a static cache `generate` prepares masks ahead; a Titans model needs just the new tokens' padding.

        A copy: the strides of a slice change with every token, and a compiled step would be compiled again.
        """
        if attention_mask is None:
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "continuous batching keeps pages of keys and values and has no place for a Titans memory: use `generate` "
            "with a left-padded batch"
        )

    def _assisted_decoding(self, input_ids, generation_config, inputs_tensor=None, **kwargs):
        """As in transformers, but without drafts where attention maps are returned.

        transformers cuts the maps of a draft as if their columns were the text's. Greedy tokens are the same either
        way, and sampled ones have the same distribution.
        """
        if not (generation_config.return_dict_in_generate and generation_config.output_attentions):
            return super()._assisted_decoding(
                input_ids, generation_config=generation_config, inputs_tensor=inputs_tensor, **kwargs
            )
        if generation_config.assistant_ensemble_weight is not None:
            raise ValueError(
                "`output_attentions` leaves out the assistant that `assistant_ensemble_weight` needs: generate without "
                "it, and call `model(sequences, output_attentions=True)` on the result"
            )
        logger.warning_once("`output_attentions` needs a map for every token: generating without drafts.")
        for name in ("assistant_model", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        return self._sample(input_ids, generation_config=generation_config, **kwargs)

    def _get_candidate_generator(self, *args, **kwargs):
        """As in transformers, with drafts no longer than the cache can take back."""
        drafts = super()._get_candidate_generator(*args, **kwargs)
        update = drafts.update_candidate_strategy

        def limit():
            for name in ("num_assistant_tokens", "num_output_tokens"):
                if hasattr(drafts, name):
                    setattr(drafts, name, min(getattr(drafts, name), REWIND - 1))

        def update_within_limit(*args, **kwargs):
            update(*args, **kwargs)
            limit()

        limit()
        drafts.update_candidate_strategy = update_within_limit
        return drafts

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        """As in transformers, with a `TitansCache` where it would make a `DynamicCache`: that can be cloned.

        It can be cropped where drafts are taken back, and where it is returned; else the log for it is left out.
        """
        kind = generation_config.cache_implementation
        if kind is not None and kind not in ("dynamic", "static"):
            raise ValueError(
                f"`cache_implementation={kind!r}` cannot hold a Titans memory, which has a small, constant size: leave "
                "it out, or use 'static' to compile the decoding step"
            )
        if kind == "static" and self.config.full_attention_layers:
            raise ValueError(
                "`cache_implementation='static'` has a fixed size, and the cache of `full_attention_layers` grows: "
                "leave it out"
            )
        given, drafts = model_kwargs.get("past_key_values"), generation_mode == GenerationMode.ASSISTED_GENERATION
        if drafts and isinstance(given, TitansCache) and not given.layers[0].is_croppable:
            raise ValueError(
                "`past_key_values` was made with `rewind=False`, and drafts need to be taken back: pass a "
                "TitansCache(model.config)"
            )
        if given is None and generation_config.use_cache is not False and kind != "static":
            rewind = drafts or bool(generation_config.return_dict_in_generate)
            model_kwargs["past_key_values"] = TitansCache(self.config, rewind)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)


class TitansForSequenceClassification(GenericForSequenceClassification, TitansPreTrainedModel):
    """Titans with a classification head on each row's last token, or on the mean of its tokens."""

    def __init__(self, config: TitansConfig):
        TitansPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """A row's logits, and the loss against `labels`; arguments as in `TitansModel`. `config.classifier_pooling`:

        "last" takes the last token that is not `config.pad_token_id`, as in transformers. "mean" takes the mean of the
        tokens that `attention_mask` keeps, and without it, of those that are not `config.pad_token_id`.
        """
        given = dict(attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds)
        given |= dict(past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        if self.config.classifier_pooling == "last":
            return super().forward(input_ids, labels=labels, **given)
        outputs: BaseModelOutputWithPast = self.model(input_ids, **given)
        states = outputs.last_hidden_state
        real = self._real_tokens(input_ids, attention_mask, states)
        mean = (states * real).sum(1) / real.sum(1).clamp(min=1)
        logits = self.score(mean.to(states.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _real_tokens(self, input_ids: Tensor | None, attention_mask: Tensor | None, states: Tensor) -> Tensor:
        """[B, T, 1], float32 at least: 1 at the tokens whose mean classifies their row, 0 at padding."""
        B, T, _ = states.shape
        if attention_mask is not None:
            real = attention_mask[:, -T:] != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            real = torch.ones(B, T, dtype=torch.bool)
        return real[..., None].to(states.device, torch.promote_types(states.dtype, torch.float32))


# Trainer (label smoothing) and pipelines look names up in these tables, which `AutoModel...register` does not fill.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["titans"] = "TitansForCausalLM"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["titans"] = "TitansForSequenceClassification"

__all__ = ["TitansForCausalLM", "TitansForSequenceClassification", "TitansModel", "TitansPreTrainedModel"]
