"""Small Titans models for the tour, the studies and the benchmarks on a CPU."""

import torch

from .. import TitansConfig, TitansForCausalLM


def small_titans(variant: str, vocab_size: int, hidden_size: int, seed: int | None = 0, **fields) -> TitansForCausalLM:
    """A model of two layers with two heads, unless `fields` of the configuration say otherwise.

    With `seed` None the weights are drawn from the present state of torch's generator.
    """
    if seed is not None:
        torch.manual_seed(seed)
    defaults = {
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_persistent_tokens": 4,
        "initializer_range": hidden_size**-0.5,  # transformers' 0.02 suits widths in the thousands
    }
    sizes = {"variant": variant, "vocab_size": vocab_size, "hidden_size": hidden_size}
    return TitansForCausalLM(TitansConfig(**sizes, **{**defaults, **fields}))
