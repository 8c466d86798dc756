"""What a model is and needs, from its configuration alone: no weights are created or loaded."""

import copy
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


def find_dtype(config: "TitansConfig", asked: Dtype) -> "torch.dtype":
    import torch

    own = config.dtype or torch.float32
    return (
        getattr(torch, asked.value) if asked is not Dtype.auto else getattr(torch, own) if isinstance(own, str) else own
    )


def describe(config: "TitansConfig", dtype: "torch.dtype") -> dict:
    """The figures of `titans info`."""
    layers = config.num_hidden_layers
    first, last = read_one_token(config, dtype)
    cache, rewinding = (cache_bytes(layers, *pair) for pair in ((first, last), read_one_token(config, dtype, True)))
    memory = sum(x.nbytes for x in (*last.carry.memory.weights, *last.carry.memory.momentum))
    keys = 2 * layers * config.num_key_value_heads * config.head_dim * dtype.itemsize  # and values, of one token
    return {
        "variant": config.variant,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "parameters": count_all(config),
        "memory_state_bytes": {"per_layer": memory, "all": memory * layers},
        "cache_bytes": cache,
        "cache_parts": cache_parts(layers, first, last),
        "cache_bytes_with_rewind": rewinding,
        "full_attention_cache_bytes": {
            name: {"bytes": keys * tokens, "ratio": keys * tokens / cache} for name, tokens in CONTEXTS.items()
        },
        "kernels": choose_kernels(config, last),
    }


def count_all(config: "TitansConfig") -> dict[str, int]:
    """The parameters of the configuration's model: all, and without the embeddings."""
    from .. import modeling_titans
    from ..records.sizes import count_parameters, empty_model

    name = next((name for name in config.architectures or () if name in ARCHITECTURES), CAUSAL)
    sizes = count_parameters(empty_model(config, getattr(modeling_titans, name)))
    return {"all": sizes.parameters, "without_embeddings": sizes.without_embeddings}


def read_one_token(
    config: "TitansConfig", dtype: "torch.dtype", rewind: bool = False
) -> tuple["TitansCacheLayer", "TitansCacheLayer"]:
    """The cache of the first and of the last block after a token: all blocks but the last hold the same."""
    import torch

    from ..cache_titans import TitansCache
    from ..records.sizes import empty_model

    config = copy.deepcopy(config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    config.memory_implementation = "torch"  # supports every shape, with the same cache
    cache = TitansCache(config, rewind)
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        empty_model(config).eval().to(dtype)(input_ids=token, past_key_values=cache)
    return cache.layers[0], cache.layers[-1]


def cache_bytes(layers: int, first: "TitansCacheLayer", last: "TitansCacheLayer") -> int:
    """The bytes of a cache with that many blocks."""
    one, final = (sum(x.nbytes for x in layer.tensors()) for layer in (first, last))
    return (layers - 1) * one + final


def cache_parts(layers: int, first: "TitansCacheLayer", last: "TitansCacheLayer") -> dict[str, int]:
    """The same by part, without the few bytes that count tokens."""
    one, final = first.carry.parts(), last.carry.parts()
    parts = {name: (layers - 1) * one[name] + final[name] for name in one}
    return {name: count for name, count in parts.items() if count}


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
