"""The configuration of a Titans model, and the presets named after the paper's model sizes."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VARIANTS = ("mac", "mag", "mal", "lmm")
MEMORY_GATES = ("token", "chunk")
MEMORY_STEPS = ("plain", "normalised")
MEMORY_WRITES = ("chunk", "delta")
MEMORY_FORGET_TO = ("zero", "start")
MEMORY_COMBINES = ("gate_attention", "gate_memory", "add")
MEMORY_IMPLEMENTATIONS = ("auto", "torch", "triton", "cpu", "recurrent")
CLASSIFIER_POOLINGS = ("last", "mean")
LAYER_LISTS = ("memory_layers", "full_attention_layers", "rotary_layers")

# Saved with every checkpoint, beside the code itself: it loads with `trust_remote_code=True` where titans_hf is not
# installed. Where it is, its own classes come first.
AUTO_MAP = {
    "AutoConfig": "configuration_titans.TitansConfig",
    "AutoModel": "modeling_titans.TitansModel",
    "AutoModelForCausalLM": "modeling_titans.TitansForCausalLM",
    "AutoModelForSequenceClassification": "modeling_titans.TitansForSequenceClassification",
}


@strict
class TitansConfig(PreTrainedConfig):
    """What a Titans model computes. Every reading of the paper that a researcher may want to switch is a field.

    Args:
        variant: "mac" (memory as context), "mag" (memory as gate), "mal" (memory as layer) or "lmm" (memory alone).
        segment_size: tokens of a MAC segment; a multiple of `memory_chunk_size`.
        sliding_window: tokens a MAG or MAL token attends to, itself included.
        initializer_range: standard deviation of linear layers at the start.
        embedding_initializer_range: the same of the embeddings; by default `1 / sqrt(hidden_size)`, so that the token
            leads the residual stream and logits start near 1 at any width.
        mixer_initializer_scale: how much smaller than `initializer_range` the projections start with which memory and
            attention enter the residual stream.
        num_persistent_tokens: learned tokens per layer before every sequence; 0 is an ablation of Table 5.
        attention_bias, attention_out_bias, mlp_bias: whether queries, keys and values, attention's output and the
            feed-forward layers have biases. These, and the next three, are for what was grafted (`titans graft`).
        attention_qk_norm: whether every query and key head passes a norm, before its rotation.
        rotary_layers: numbers, from 0, of the mag or mal layers with rotary positions; by default all. The others know
            no positions.
        memory_layer_norm: whether mal's attention reads `norm(x + m)`; else it reads `x + m`.
        memory_layers: numbers, from 0, of the mag or mal layers with a memory; by default all. The others are attention
            alone.
        full_attention_layers: numbers, from 0, of the mag or mal layers whose attention has no window; by default none.
            Their part of the cache grows with every token.
        attention_sinks: first tokens of a row that attention in mag and mal still sees when its window has left them
            behind, as if they were just before it. What was pretrained with full attention leans on its first token.
        memory_num_heads: memory heads, each `head_dim` wide; by default as many as attention heads.
        memory_depth: layers of the memory MLP; 1 is the linear memory of Table 5.
        memory_expansion: width of the memory's hidden layers in units of `head_dim`.
        memory_chunk_size: spacing of the grid on which the memory's gradients are taken (Eq. 16). It is part of what
            was trained: do not change it afterwards.
        memory_max_surprise: cap on the norm of each token's gradient per memory layer; None is the paper as printed.
        memory_theta_max: upper end of `theta / (1 - eta)`, which at a steady eta is what a gradient moves the memory by
            once momentum has spent it. By default 1/2 with `memory_write="delta"`, where that replaces the whole value
            of a key, and else `1 / (4 * memory_chunk_size)`, saved as a number: it does not follow a chunk size that is
            changed later.
        memory_eta_max: upper end of the momentum decay eta. Where eta rises behind a large step, the step counts up to
            `1 / (1 - memory_eta_max)` times, and what that does to gradients through the memory grows with the length
            of the text.
        memory_write: "chunk" takes all gradients of a chunk at its start (Eq. 16). "delta" takes each token's error in
            the memory's last layer after the writes of the tokens before it, so that larger steps are stable.
        memory_step: "plain", or "normalised": the gradient of a layer behind the first is divided by the squared norm
            of the layer's input, where that exceeds 1, so that a step means the same at any width.
        memory_hidden_step: the share of each step that the memory's hidden layers take; 1 is the paper as printed.
        memory_shared_keys: whether the memory's queries and keys have one projection, and differ by their convolutions
            alone; by default where there is a convolution. False is the paper as printed: two projections that start
            alike drift apart in the first few hundred steps, and a query no longer finds what was written.
        memory_value_limit: whether values longer than 1 are shortened to length 1. Otherwise nothing holds their size.
        memory_norm_floor: a weak answer of the memory stays weak: the norm behind it adds `memory_norm_floor /
            head_dim` to the mean square, and a recalled value of length 1 has `1 / head_dim`. With 0, an answer about
            nothing counts as much as a fact.
        memory_combine: how mac and mag join attention's output y and the memory's m: "gate_memory" is
            `m * 2 sigmoid(norm(y))`, "gate_attention" is `norm(y) * sigmoid(norm(m))`, and "add" is their sum.
        memory_theta_start, memory_eta_start: where the step size and the momentum decay start, as shares of their
            maximum.
        memory_alpha_start: where the forget gate starts in the first and in the last head; in between by equal ratios.
        memory_gates: "token" (gates per token) or "chunk" (gates of a chunk from its first token, Section 3.2).
        memory_momentum, memory_forget, memory_conv: switches for the ablations of Table 5.
        memory_forget_to: where the forget gate leads. "zero" is the paper as printed. "start" is the memory before a
            row's first token, `M_t = (1 - alpha) M_(t-1) + alpha start + S_t`: what fades is what was written since,
            and not what training has learned.
        memory_conv_width: taps of the causal depthwise convolution on the memory's queries, keys and values.
        memory_implementation: "torch" (the chunk form), "triton" (its kernels, on GPUs), "cpu" (decoding steps in C++,
            else torch), "auto" (kernels and C++ where they are there and serve the tensors, else torch) or "recurrent"
            (the token loop, for checks).
        max_position_embeddings: what tools take for the longest input. Positions are local, so nothing in the model
            depends on it.
        classifier_pooling: what `TitansForSequenceClassification` classifies a row by: its "last" token, or the "mean"
            of its tokens.
    """

    model_type = "titans"
    cache_layer_type = "titans"  # a model sets it to the name of its own cache layers
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = None
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2**21
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    mixer_initializer_scale: float | int = 0.1
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    variant: str = "mac"
    segment_size: int = 256
    sliding_window: int = 512
    num_persistent_tokens: int = 16
    memory_num_heads: int | None = None
    memory_depth: int = 2
    memory_expansion: int = 2
    memory_chunk_size: int = 64
    memory_max_surprise: float | int | None = 10.0
    memory_theta_max: float | int | None = None
    memory_eta_max: float | int = 0.9
    memory_write: str = "delta"
    memory_step: str = "normalised"
    memory_hidden_step: float | int = 0.1
    memory_shared_keys: bool | None = None
    memory_value_limit: bool = True
    memory_norm_floor: float | int = 1.0
    memory_combine: str = "gate_memory"
    memory_theta_start: float | int = 0.5
    memory_eta_start: float | int = 0.1
    memory_alpha_start: list[float] | None = None
    memory_gates: str = "token"
    memory_momentum: bool = True
    memory_forget: bool = True
    memory_forget_to: str = "start"
    memory_conv: bool = True
    memory_conv_width: int = 4
    memory_implementation: str = "auto"

    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_qk_norm: bool = False
    rotary_layers: list[int] | None = None
    memory_layer_norm: bool = True
    memory_layers: list[int] | None = None
    full_attention_layers: list[int] | None = None
    attention_sinks: int = 0
    classifier_pooling: str = "last"

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.memory_num_heads is None:
            self.memory_num_heads = self.num_attention_heads
        if self.memory_theta_max is None and self.memory_chunk_size > 0:
            self.memory_theta_max = 0.5 if self.memory_write == "delta" else 1 / (4 * self.memory_chunk_size)
        if self.memory_shared_keys is None:
            self.memory_shared_keys = self.memory_conv
        if self.memory_alpha_start is None:
            self.memory_alpha_start = [0.05, 1e-5]
        if self.embedding_initializer_range is None and self.hidden_size > 0:
            self.embedding_initializer_range = self.hidden_size**-0.5
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`num_attention_heads` ({self.num_attention_heads}) does not divide `hidden_size` "
                    f"({self.hidden_size}): choose a divisor, or set `head_dim`"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", 10000.0)}
        self.check()
        super().__post_init__(**{"auto_map": dict(AUTO_MAP), **kwargs})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers. `variant="fp16"`, given to `from_pretrained`, names a weight file: it is handed back.

        A field that a saved configuration does not name is newer than its model, which computes as it did without it.
        """
        config_dict = {**BEFORE, **config_dict}
        weight_file = {}
        if "variant" in kwargs and kwargs["variant"] not in VARIANTS:
            weight_file["variant"] = kwargs.pop("variant")
        found = super().from_dict(config_dict, **kwargs)
        return (found[0], {**found[1], **weight_file}) if isinstance(found, tuple) else found

    @property
    def layer_types(self) -> list[str]:
        """The cache layer of every block. Derived, never saved: tools without this package do not know the name."""
        return [self.cache_layer_type] * self.num_hidden_layers

    def has_memory(self, layer: int) -> bool:
        """Whether the layer of that number, from 0, has a memory."""
        return self.memory_layers is None or layer in self.memory_layers

    def window_of(self, layer: int) -> int | None:
        """How many tokens the layer of that number attends to; None is all of them."""
        return None if layer in (self.full_attention_layers or ()) else self.sliding_window

    def has_rotary(self, layer: int) -> bool:
        """Whether the layer of that number has rotary positions."""
        return self.rotary_layers is None or layer in self.rotary_layers

    def to_dict(self) -> dict:
        """As in transformers, without `cache_layer_type`: it has a meaning in this process only."""
        return {name: value for name, value in super().to_dict().items() if name != "cache_layer_type"}

    def validate_layer_type(self):
        """The name is ours, so transformers' list of known layer types does not apply."""

    @classmethod
    def preset(cls, name: str, as_printed: bool = False, **overrides) -> "TitansConfig":
        """The configuration named `titans-{mac,mag,mal,lmm}-{170m,340m,400m,760m}`, with any field overridden.

        With `as_printed` the memory is written by the paper's rule: all gradients of a chunk at its start,
        in every layer alike, without a cap, forgetting towards zero.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        _, variant, size = name.split("-")
        layers, intermediate_size = PRESET_STACKS[size]["lmm" if variant == "lmm" else "attention"]
        stack = {"num_hidden_layers": layers, "intermediate_size": intermediate_size}
        printed = AS_PRINTED if as_printed else {}
        return cls(**{"variant": variant, **PRESET_SIZES[size], **stack, **printed, **overrides})

    def check(self) -> None:
        """Raise a `ValueError` that names the first field that cannot work, and the fix."""
        for field, choices in (
            ("variant", VARIANTS),
            ("memory_write", MEMORY_WRITES),
            ("memory_step", MEMORY_STEPS),
            ("memory_gates", MEMORY_GATES),
            ("memory_forget_to", MEMORY_FORGET_TO),
            ("memory_combine", MEMORY_COMBINES),
            ("memory_implementation", MEMORY_IMPLEMENTATIONS),
            ("classifier_pooling", CLASSIFIER_POOLINGS),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(f"`{field}` must be one of {choices}, got {getattr(self, field)!r}")
        for field in POSITIVE_FIELDS:
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1, got {getattr(self, field)}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of transformers' activations, got {self.hidden_act!r}")
        rope = self.rope_parameters.get("rope_type", "default")
        if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
            known = ("default", *ROPE_INIT_FUNCTIONS)
            raise ValueError(f"`rope_parameters` must have a `rope_type` of {known}, got {rope!r}")
        if rope != "proportional" and self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("`rope_parameters` has a `partial_rotary_factor`: every channel is rotated, leave it out")
        if self.num_persistent_tokens < 0:
            raise ValueError(f"`num_persistent_tokens` must not be negative, got {self.num_persistent_tokens}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` ({self.num_key_value_heads}) must divide `num_attention_heads` "
                f"({self.num_attention_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary positions, got {self.head_dim}")
        if self.variant == "mac" and self.segment_size % self.memory_chunk_size:
            raise ValueError(
                f"`memory_chunk_size` ({self.memory_chunk_size}) must divide `segment_size` ({self.segment_size}) "
                "in the mac variant: choose a multiple"
            )
        self._check_layers()
        self._check_sinks()
        self._check_ranges()

    def _check_layers(self) -> None:
        last = self.num_hidden_layers - 1
        for field in LAYER_LISTS:
            layers = getattr(self, field)
            if layers is None:
                continue
            if self.variant not in ("mag", "mal"):
                raise ValueError(f"`{field}` is for mag and mal, and `variant` is {self.variant!r}: leave it out")
            if layers != sorted(set(layers)) or not all(0 <= layer <= last for layer in layers):
                raise ValueError(f"`{field}` must be rising layer numbers from 0 to {last}, each once; got {layers}")
        rope = self.rope_parameters.get("rope_type", "default")
        if self.full_attention_layers and rope in ("dynamic", "longrope"):
            raise ValueError(
                f"`full_attention_layers` cannot have rotary positions of type {rope!r}, which are scaled for the "
                "window: leave them out, or choose another `rope_type`"
            )

    def _check_sinks(self) -> None:
        sinks = self.attention_sinks
        if sinks and self.variant not in ("mag", "mal"):
            raise ValueError(f"`attention_sinks` is for mag and mal, and `variant` is {self.variant!r}: leave it out")
        if not 0 <= sinks <= self.sliding_window:
            raise ValueError(
                f"`attention_sinks` must be from 0 to `sliding_window` ({self.sliding_window}), got {sinks}"
            )

    def _check_ranges(self) -> None:
        if self.memory_max_surprise is not None and not self.memory_max_surprise > 0:
            raise ValueError(f"`memory_max_surprise` must be positive, or None; got {self.memory_max_surprise}")
        if self.memory_theta_max is None or not self.memory_theta_max > 0:
            raise ValueError(
                f"`memory_theta_max` must be positive, got {self.memory_theta_max}: leave it out for "
                "1 / (4 * memory_chunk_size)"
            )
        starts = self.memory_alpha_start
        for field, value in (
            ("memory_theta_start", self.memory_theta_start),
            ("memory_eta_start", self.memory_eta_start),
            *(("memory_alpha_start", alpha) for alpha in starts),
        ):
            if not 0 < value < 1:
                raise ValueError(f"`{field}` must be between 0 and 1, both excluded, got {value}")
        if len(starts) != 2:
            raise ValueError(f"`memory_alpha_start` must be two numbers, of the first and the last head; got {starts}")
        if not self.memory_hidden_step > 0:
            raise ValueError(f"`memory_hidden_step` must be positive, got {self.memory_hidden_step}")
        if self.memory_norm_floor < 0:
            raise ValueError(
                f"`memory_norm_floor` must not be negative, got {self.memory_norm_floor}: 0 switches it off"
            )
        for field in ("initializer_range", "embedding_initializer_range", "mixer_initializer_scale"):
            if not getattr(self, field) > 0:
                raise ValueError(f"`{field}` must be positive, got {getattr(self, field)}")
        if not 0 < self.memory_eta_max <= 0.999:
            raise ValueError(
                f"`memory_eta_max` must be in (0, 0.999], got {self.memory_eta_max}: "
                "a momentum that never decays grows without bound"
            )


# What the memory computes in models that were saved before these fields were: the paper's rule under a cap.
BEFORE = {
    "memory_write": "chunk",
    "memory_step": "plain",
    "memory_hidden_step": 1.0,
    "memory_shared_keys": False,
    "memory_value_limit": False,
    "memory_norm_floor": 0.0,
    "memory_combine": "gate_attention",
    "memory_forget_to": "zero",
}
AS_PRINTED = {**BEFORE, "memory_max_surprise": None, "memory_eta_max": 0.999}

# Every field is in one of three groups. A cache filled, or a snapshot saved, under one value of a field of SHAPE or
# READING cannot be read under another.
SHAPE = (  # gives a cache its shape
    "variant",
    "num_hidden_layers",
    "hidden_size",
    "num_key_value_heads",
    "head_dim",
    "segment_size",
    "sliding_window",
    "attention_sinks",
    "num_persistent_tokens",
    "memory_num_heads",
    "memory_depth",
    "memory_expansion",
    "memory_chunk_size",
    "memory_conv",
    "memory_conv_width",
    "memory_layers",
    "full_attention_layers",
)
READING = (  # changes what a model makes of what it reads
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "memory_max_surprise",
    "memory_theta_max",
    "memory_eta_max",
    "memory_write",
    "memory_step",
    "memory_hidden_step",
    "memory_gates",
    "memory_momentum",
    "memory_forget",
    "memory_forget_to",
    "memory_shared_keys",
    "memory_value_limit",
    "memory_norm_floor",
    "memory_combine",
    "memory_layer_norm",
    "rotary_layers",
    "attention_bias",
    "attention_out_bias",
    "attention_qk_norm",
    "mlp_bias",
)
NEITHER = (  # concerns training, tools or the choice between equal implementations
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "embedding_initializer_range",
    "mixer_initializer_scale",
    "memory_theta_start",
    "memory_eta_start",
    "memory_alpha_start",
    "use_cache",
    "tie_word_embeddings",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "memory_implementation",
    "classifier_pooling",
)

POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "segment_size",
    "sliding_window",
    "memory_num_heads",
    "memory_depth",
    "memory_expansion",
    "memory_chunk_size",
    "memory_conv_width",
)

# Widths follow the size. Depth and feed-forward width make up the parameter count, which differs by what a mixer holds:
# attention and memory (mac, mag, mal), or the memory alone (lmm).
PRESET_SIZES = {
    "170m": {"hidden_size": 768, "num_attention_heads": 12},
    "340m": {"hidden_size": 1024, "num_attention_heads": 16},
    "400m": {"hidden_size": 1024, "num_attention_heads": 16},
    "760m": {"hidden_size": 1536, "num_attention_heads": 24},
}
PRESET_STACKS = {
    "170m": {"attention": (12, 3072), "lmm": (14, 3392)},
    "340m": {"attention": (16, 3392), "lmm": (20, 3520)},
    "400m": {"attention": (20, 3136), "lmm": (24, 3520)},
    "760m": {"attention": (18, 4352), "lmm": (24, 4288)},
}
PRESETS = tuple(f"titans-{variant}-{size}" for variant in VARIANTS for size in PRESET_SIZES)
