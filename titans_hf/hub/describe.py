"""What a model is and needs, from its configuration alone: no weights are created or loaded."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .loading import Dtype

if TYPE_CHECKING:
    import torch

    from ..cache_titans import TitansCacheLayer
    from ..configuration_titans import TitansConfig

CONTEXTS = {"4K": 2**12, "128K": 2**17, "2M": 2**21}
CAUSAL = "TitansForCausalLM"
ARCHITECTURES = (CAUSAL, "TitansForSequenceClassification", "TitansModel")
TRITON, TORCH = "Triton kernels", "chunk form in torch"
NO_MEMORY = {"here": "none", "why": "no layer has a memory"}


def find_dtype(config: "TitansConfig", asked: Dtype) -> "torch.dtype":
    import torch

    own = config.dtype or torch.float32
    return (
        getattr(torch, asked.value) if asked is not Dtype.auto else getattr(torch, own) if isinstance(own, str) else own
    )


def describe(config: "TitansConfig", dtype: "torch.dtype") -> dict:
    """The figures of `titans info`."""
    layers, kinds = config.num_hidden_layers, read_one_token(config, dtype)
    cache, rewinding = cache_bytes(kinds), cache_bytes(read_one_token(config, dtype, rewind=True))
    remembering = [kind for kind in kinds if kind.layer.carry.own is not None]
    memories = sum(kind.count for kind in remembering)
    memory = remembering[0].layer.carry.parts()["memory"] if remembering else 0
    token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize  # a layer's keys and values of one token
    growth, keys = token * len(config.full_attention_layers or ()), token * layers
    return {
        "variant": config.variant,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": layers,
        "memory_layers": [layer for layer in range(layers) if config.has_memory(layer)],
        "full_attention_layers": list(config.full_attention_layers or ()),
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "parameters": count_all(config),
        "memory_state_bytes": {"per_layer": memory, "all": memory * memories},
        "cache_bytes": cache,
        "cache_bytes_per_token": growth,
        "cache_parts": cache_parts(kinds),
        "cache_bytes_with_rewind": rewinding,
        "full_attention_cache_bytes": {
            name: {"bytes": keys * tokens, "ratio": keys * tokens / (cache + growth * tokens)}
            for name, tokens in CONTEXTS.items()
        },
        "kernels": choose_kernels(config, remembering[0].layer) if remembering else NO_MEMORY,
    }


def count_all(config: "TitansConfig") -> dict[str, int]:
    """The parameters of the configuration's model: all, and without the embeddings."""
    from .. import modeling_titans
    from ..records.sizes import count_parameters, empty_model

    name = next((name for name in config.architectures or () if name in ARCHITECTURES), CAUSAL)
    sizes = count_parameters(empty_model(config, getattr(modeling_titans, name)))
    return {"all": sizes.parameters, "without_embeddings": sizes.without_embeddings}


@dataclass
class Kind:
    """Blocks whose caches hold the same: one of them, and how many they are."""

    layer: "TitansCacheLayer"
    count: int


def read_one_token(config: "TitansConfig", dtype: "torch.dtype", rewind: bool = False) -> list[Kind]:
    """The cache of one block of each kind after a token. The last block, which also keeps outputs, is its own kind."""
    import torch

    from ..cache_titans import TitansCache
    from ..records.sizes import empty_model

    last, kinds = config.num_hidden_layers - 1, {}
    for layer in range(last):
        kinds.setdefault((config.has_memory(layer), config.window_of(layer)), []).append(layer)
    alike = [*kinds.values(), [last]]
    config = only_layers(config, [layers[0] for layers in alike])
    config.memory_implementation = "torch"  # supports every shape, with the same cache
    cache = TitansCache(config, rewind)
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        empty_model(config).eval().to(dtype)(input_ids=token, past_key_values=cache)
    return [Kind(layer, len(layers)) for layer, layers in zip(cache.layers, alike)]


def only_layers(config: "TitansConfig", layers: list[int]) -> "TitansConfig":
    """A copy of the configuration for a model that has just these layers."""
    from ..configuration_titans import LAYER_LISTS

    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    for field in LAYER_LISTS:
        own = getattr(config, field)
        if own is not None:
            setattr(config, field, [place for place, layer in enumerate(layers) if layer in own])
    return config


def cache_bytes(kinds: list[Kind]) -> int:
    """The bytes of a cache, without those that grow with every token."""
    from ..carry_titans import GROWING

    return sum(
        kind.count * (sum(x.nbytes for x in kind.layer.tensors()) - kind.layer.carry.parts()[GROWING]) for kind in kinds
    )


def cache_parts(kinds: list[Kind]) -> dict[str, int]:
    """The same by part, without the few bytes that count tokens."""
    from ..carry_titans import GROWING

    parts = [(kind.count, kind.layer.carry.parts()) for kind in kinds]
    sums = {name: sum(count * own[name] for count, own in parts) for name in parts[0][1]}
    return {name: count for name, count in sums.items() if count and name != GROWING}


def choose_kernels(config: "TitansConfig", layer: "TitansCacheLayer") -> dict[str, str]:
    """What would write the memory here and on a GPU, and why; `memory_ops` makes the choice."""
    import torch

    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, why = _chosen(config, layer, here)
    if here.type == "cuda":
        return {"here": chosen, "why": why}
    there, reason = _chosen(config, layer, torch.device("cuda"))
    return {"here": chosen, "why": why, "on_a_gpu": there, "why_there": reason}


def _chosen(config: "TitansConfig", layer: "TitansCacheLayer", device: "torch.device") -> tuple[str, str]:
    import torch

    asked, weights = config.memory_implementation, layer.carry.memory.weights
    if asked in ("torch", "recurrent"):
        return (TORCH if asked == "torch" else "token loop"), f"memory_implementation={asked!r}"
    if asked == "cpu":
        return ("none" if device.type == "cuda" else TORCH), "memory_implementation='cpu'"
    if asked == "auto" and device.type != "cuda":
        return TORCH, "no CUDA device"
    try:
        from titans_kernels import refusal
    except ImportError as error:
        if asked == "auto":
            return TORCH, f"the kernels cannot be imported ({error}): pip install 'titans-hf[kernels]'"
        return "none", f"memory_implementation='triton', and the kernels cannot be imported: {error}"
    home = "meta" if device.type == "cuda" else device  # for which the kernels apply the rules of a GPU
    q = torch.empty(1, 1, *weights[0].shape[1:3], dtype=weights[0].dtype, device=home)
    unserved = refusal(weights, q, config.memory_chunk_size)
    if unserved is None:
        return TRITON, "they serve this memory"
    if asked == "auto":
        return TORCH, f"the kernels do not serve {unserved}"
    return "none", f"memory_implementation='triton', and the kernels do not serve {unserved}"
