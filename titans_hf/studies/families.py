"""Models of equal size for the studies: Titans variants, and models of transformers as baselines.

All have the width, depth and heads that they are built with; the feed-forward width makes up for what a mixer holds.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .. import TitansConfig, TitansForCausalLM
from ..configuration_titans import VARIANTS

BASELINES = ("gdn", "llama", "sliding", "mamba2")
FAMILIES = (*VARIANTS, *BASELINES)
MIXER_OUTPUTS = ("o_proj.weight", "out_proj.weight")
ABOUT = {
    "gdn": "gated delta net (Qwen3-Next's linear layers alone)",
    "llama": "Transformer with full attention (Llama)",
    "sliding": "Transformer with the same sliding window (Mistral)",
    "mamba2": "Mamba2",
}


def build(family: str, sizes: dict, parameters: int, seed: int, **fields) -> PreTrainedModel:
    """A model with as many parameters, within the step of its feed-forward width.

    Args:
        sizes: vocab_size, hidden_size, num_hidden_layers, num_attention_heads, window.
        parameters: how many the model should have.
        fields: of the family's configuration. Baselines take two more, which give them the start that Titans has by its
            own fields: `embedding_range`, and `mixer_scale`, how much smaller the mixers' output projections start.
    """
    width = fitted_width(lambda width: count(family, {**sizes, "intermediate_size": width}, fields), parameters)
    torch.manual_seed(seed)
    return language_model(family, {**sizes, "intermediate_size": width}, fields)


def fitted_width(count: Callable[[int], int], parameters: int) -> int:
    """The feed-forward width, a multiple of 8, whose count is nearest to `parameters`; the count is linear in it."""
    narrow, wide = count(64), count(128)
    per_width = (wide - narrow) / 64
    return max(8, round((64 + (parameters - narrow) / per_width) / 8) * 8) if per_width else 64


def count(family: str, sizes: dict, fields: dict) -> int:
    with torch.device("meta"):
        return language_model(family, sizes, fields).num_parameters()


def state_bytes(model: PreTrainedModel) -> int | None:
    """Bytes that the model carries per sequence beside windows and convolutions, in float32; None for attention."""
    config = model.config
    if config.model_type == "titans":
        starts = [layer.memory.start for layer in model.base_model.layers if layer.memory is not None]
        copies = 2 if config.memory_momentum else 1
        return 4 * copies * sum(W.numel() for start in starts for W in start.weights)
    if config.model_type == "qwen3_next":
        heads, key, value = (
            getattr(config, f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        return 4 * config.num_hidden_layers * heads * key * value
    if config.model_type == "mamba2":
        return 4 * config.num_hidden_layers * config.num_heads * config.head_dim * config.state_size
    return None


def language_model(family: str, sizes: dict, fields: dict) -> PreTrainedModel:
    """A model with exactly these sizes, `intermediate_size` among them."""
    if family in VARIANTS:
        return TitansForCausalLM(titans_config(family, sizes, fields))
    fields = dict(fields)
    embedding_range, mixer_scale = fields.pop("embedding_range", None), fields.pop("mixer_scale", 1.0)
    model = _BUILDERS[family](sizes, fields)
    if model.device.type != "meta":
        with torch.no_grad():
            if embedding_range is not None:
                model.get_input_embeddings().weight.normal_(std=embedding_range)
            for name, parameter in model.named_parameters():
                if name.endswith(MIXER_OUTPUTS):
                    parameter.mul_(mixer_scale)
    return model


def titans_config(variant: str, sizes: dict, fields: dict) -> TitansConfig:
    """A configuration of these sizes, whose attention and memory have grids that fit the window."""
    window = sizes["window"]
    own = {
        "variant": variant,
        "sliding_window": window,
        "segment_size": window // 2,
        "memory_chunk_size": min(32, window // 2),
        "num_persistent_tokens": 4,
    }
    shared = {name: value for name, value in sizes.items() if name != "window"}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return TitansConfig(**{**shared, **own, **tokens, **fields})


def _gdn(sizes: dict, fields: dict) -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    width = sizes["hidden_size"] // heads
    own = {
        "num_key_value_heads": heads,
        "head_dim": width,
        **{"linear_num_key_heads": heads, "linear_num_value_heads": heads},
        **{"linear_key_head_dim": width, "linear_value_head_dim": width},
        "layer_types": ["linear_attention"] * layers,
        "mlp_only_layers": list(range(layers)),
        "num_experts": 0,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**_common(sizes), **own, **fields}))


def _llama(sizes: dict, fields: dict) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_common(sizes), max_position_embeddings=2**20, **fields))


def _sliding(sizes: dict, fields: dict) -> PreTrainedModel:
    from transformers import MistralConfig, MistralForCausalLM

    heads, more = sizes["num_attention_heads"], {"sliding_window": sizes["window"], "max_position_embeddings": 2**20}
    return MistralForCausalLM(MistralConfig(**_common(sizes), num_key_value_heads=heads, **more, **fields))


def _mamba2(sizes: dict, fields: dict) -> PreTrainedModel:
    """Mamba2 has no feed-forward: its blocks make up its size, two for each of the others' layers."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    width = sizes["hidden_size"]
    shared = {name: value for name, value in _common(sizes).items() if name in ("vocab_size", "tie_word_embeddings")}
    return Mamba2ForCausalLM(
        Mamba2Config(
            **{**shared, "hidden_size": width, "num_hidden_layers": 2 * sizes["num_hidden_layers"]},
            **{"expand": 2, "head_dim": 64, "num_heads": 2 * width // 64, "state_size": 64, "n_groups": 1},
            **{"use_cache": False, "chunk_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
            **fields,
        )
    )


def _common(sizes: dict) -> dict:
    own = {name: value for name, value in sizes.items() if name != "window"}
    return {**own, "tie_word_embeddings": True, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


_BUILDERS: dict[str, Callable[[dict, dict], PreTrainedModel]] = {
    "gdn": _gdn,
    "llama": _llama,
    "sliding": _sliding,
    "mamba2": _mamba2,
}
