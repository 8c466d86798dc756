"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers.

`import titans_hf` registers the models with transformers: the Auto classes load them, and tools that look up a
checkpoint's class by name find it.
"""

import sys
from importlib import import_module

import transformers

from .cache_titans import TitansCache
from .configuration_series import TitansTimeSeriesConfig
from .configuration_titans import TitansConfig
from .memory_layer import NeuralMemory
from .memory_ops import MemoryState, neural_memory
from .modeling_series import SeriesCache, TitansForTimeSeriesPrediction
from .modeling_titans import (
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansModel,
    TitansPreTrainedModel,
)
from .surprise import SurpriseTrace

__version__ = "0.1.0"

__all__ = [
    "MemoryState",
    "NeuralMemory",
    "SeriesCache",
    "SurpriseTrace",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansForTimeSeriesPrediction",
    "TitansModel",
    "TitansPreTrainedModel",
    "TitansTimeSeriesConfig",
    "neural_memory",
]


def _fill_card(folder, repo_id: str) -> None:
    import_module("titans_hf.hub.cards").fill_card(folder, repo_id)  # when a model is pushed; hub needs pydantic


def _register() -> None:
    for config in (TitansConfig, TitansTimeSeriesConfig):
        transformers.AutoConfig.register(config.model_type, config)
        config.register_for_auto_class()
    TitansPreTrainedModel._fill_card = staticmethod(_fill_card)
    for auto_class, model in (
        (transformers.AutoModel, TitansModel),
        (transformers.AutoModelForCausalLM, TitansForCausalLM),
        (transformers.AutoModelForSequenceClassification, TitansForSequenceClassification),
        (transformers.AutoModel, TitansForTimeSeriesPrediction),
        (transformers.AutoModelForTimeSeriesPrediction, TitansForTimeSeriesPrediction),
    ):
        auto_class.register(model.config_class, model)
        # `transformers serve` and TRL look a class up by its name in transformers. There may be two such modules:
        # transformers.processing_utils imports the package once more.
        for module in (transformers, sys.modules["transformers"]):
            setattr(module, model.__name__, model)


_register()
