"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers."""

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
AutoModel.register(TitansConfig, TitansModel)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
AutoModelForSequenceClassification.register(TitansConfig, TitansForSequenceClassification)

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
