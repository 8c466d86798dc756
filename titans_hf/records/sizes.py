"""How large a model is, from its configuration alone: nothing is allocated."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@dataclass
class Sizes:
    """Parameters of a model: all of them, those outside of the embeddings, those of one layer."""

    parameters: int
    without_embeddings: int
    per_layer: int


def empty_model(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The model of a configuration on the meta device; a causal language model unless `kind` is given."""
    with torch.device("meta"):
        return kind(config) if kind else AutoModelForCausalLM.from_config(config)


def count_parameters(model: PreTrainedModel) -> Sizes:
    """The sizes of a model. Embeddings are the tables at both ends, counted once where they are tied."""
    tables = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    embeddings = sum({id(table.weight): table.weight.numel() for table in tables}.values())
    total = model.num_parameters()
    layer = sum(parameter.numel() for parameter in model.base_model.layers[0].parameters())
    return Sizes(total, total - embeddings, layer)
