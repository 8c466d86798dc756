"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers."""

import sys

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_ops import MemoryState, neural_memory
from .modeling_titans import (
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansModel,
    TitansPreTrainedModel,
)
from .neural_memory import NeuralMemory

__version__ = "0.1.0"

AutoConfig.register("titans", TitansConfig)
TitansConfig.register_for_auto_class()
for auto_class, model_class in {
    AutoModel: TitansModel,
    AutoModelForCausalLM: TitansForCausalLM,
    AutoModelForSequenceClassification: TitansForSequenceClassification,
}.items():
    auto_class.register(TitansConfig, model_class)
    # `transformers serve` and TRL look a checkpoint's class up by name in transformers, which while it is imported may
    # replace its own module by a second one
    for module in (transformers, sys.modules["transformers"]):
        setattr(module, model_class.__name__, model_class)

__all__ = [
    "MemoryState",
    "NeuralMemory",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansModel",
    "TitansPreTrainedModel",
    "neural_memory",
]
