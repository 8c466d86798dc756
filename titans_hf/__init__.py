"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers.

Like transformers, this package loads its parts when they are first used. It makes itself known to the Auto classes when
these are loaded, before or after.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import transformers

from .when_imported import when_imported

if TYPE_CHECKING:
    from .cache_titans import TitansCache as TitansCache
    from .configuration_titans import TitansConfig as TitansConfig
    from .memory_layer import NeuralMemory as NeuralMemory
    from .memory_ops import MemoryState as MemoryState
    from .memory_ops import neural_memory as neural_memory
    from .modeling_titans import TitansForCausalLM as TitansForCausalLM
    from .modeling_titans import TitansForSequenceClassification as TitansForSequenceClassification
    from .modeling_titans import TitansModel as TitansModel
    from .modeling_titans import TitansPreTrainedModel as TitansPreTrainedModel
    from .surprise import SurpriseTrace as SurpriseTrace

__version__ = "0.1.0"

_HOMES = {
    "MemoryState": "memory_ops",
    "NeuralMemory": "memory_layer",
    "SurpriseTrace": "surprise",
    "TitansCache": "cache_titans",
    "TitansConfig": "configuration_titans",
    "TitansForCausalLM": "modeling_titans",
    "TitansForSequenceClassification": "modeling_titans",
    "TitansModel": "modeling_titans",
    "TitansPreTrainedModel": "modeling_titans",
    "neural_memory": "memory_ops",
}
__all__ = list(_HOMES)


def _part(name: str):
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


class _Package(ModuleType):
    """This package, whose parts come when they are asked for."""

    def __getattr__(self, name: str):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _part(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


def _register_config(module: ModuleType) -> None:
    transformers.AutoConfig.register("titans", module.TitansConfig)
    module.TitansConfig.register_for_auto_class()


def _fill_card(folder, repo_id: str) -> None:
    import_module(".hub.cards", __name__).fill_card(folder, repo_id)


def _register_models(module: ModuleType) -> None:
    module.TitansPreTrainedModel._fill_card = staticmethod(_fill_card)
    for auto_class, model in (
        (transformers.AutoModel, module.TitansModel),
        (transformers.AutoModelForCausalLM, module.TitansForCausalLM),
        (transformers.AutoModelForSequenceClassification, module.TitansForSequenceClassification),
    ):
        auto_class.register(module.TitansConfig, model)
        # `transformers serve` and TRL look a checkpoint's class up by name in transformers, which while it is imported
        # may replace its own module by a second one
        for home in (transformers, sys.modules["transformers"]):
            setattr(home, model.__name__, model)


sys.modules[__name__].__class__ = _Package
for theirs, ours, register in (
    ("configuration_auto", ".configuration_titans", _register_config),
    ("modeling_auto", ".modeling_titans", _register_models),
):
    when_imported(__name__ + ours, register)
    when_imported(f"transformers.models.auto.{theirs}", lambda _, ours=ours: import_module(ours, __name__))
