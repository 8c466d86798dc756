"""Find and load a model by its folder or name, without running the code in its folder."""

import json
import logging
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..cache_titans import TitansCache
    from ..configuration_titans import TitansConfig
    from ..modeling_series import TitansForTimeSeriesPrediction
    from ..modeling_titans import TitansForCausalLM


class CommandError(Exception):
    """A mistake that the user can correct, with a message that says how."""


class Dtype(str, Enum):
    auto, float32, bfloat16, float16, float64 = "auto", "float32", "bfloat16", "float16", "float64"


def say(text: str) -> None:
    """Print a message to stderr, apart from the command's result."""
    typer.echo(text, err=True)


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024


def folder_name(folder: Path) -> str:
    """The folder's name; training calls every model's `model`, and the run's folder tells them apart."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def quiet() -> None:
    """Silence the libraries' messages."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()


@dataclass
class Loaded:
    """A model to read and answer with.

    Attributes:
        name: the absolute path of its folder, or its name on the Hub.
    """

    model: "TitansForCausalLM"
    tokenizer: "PreTrainedTokenizerBase"
    name: str

    def recall(self, memory: Path | None) -> "TitansCache":
        """The memory of that file, or an empty one."""
        from ..cache_titans import TitansCache

        return TitansCache(self.model.config, rewind=False) if memory is None else TitansCache.load(memory, self.model)

    def note(self, in_chat: bool = False) -> dict[str, str]:
        """The metadata of a memory's file, for continuing from it."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "dtype": dtype, **({"chat": "open"} if in_chat else {})}


def read_memory_note(memory: Path | None) -> dict[str, str]:
    """The note of a memory's file; empty without one."""
    if memory is None:
        return {}
    from ..snapshots import read_note

    return read_note(memory)


def load(model: str | None, memory: Path | None, dtype: Dtype = Dtype.auto, device: str = "auto") -> Loaded:
    """The named model, or the one that made the memory, by default in the memory's precision."""
    quiet()
    note = read_memory_note(memory)
    name = model or _noted_model(note, memory)
    config, precision, target = load_config(name), _precision(note, memory, dtype), find_device(device)
    say(f"model: {absolute(name)}" + ("" if model else f", named by {memory}"))
    weights = _load_weights(name, config, precision)
    return Loaded(weights.to(target).eval(), _load_tokenizer(name), absolute(name))


def load_to_measure(model: str, dtype: Dtype = Dtype.auto, device: str = "auto") -> Loaded:
    """A Titans model, or another causal model of transformers as a baseline."""
    quiet()
    if model_type(model) == "titans":
        return load(model, None, dtype, device)
    from transformers import AutoModelForCausalLM

    target = find_device(device)
    say(f"baseline: {absolute(model)}")
    weights = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype.value, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    return Loaded(weights.to(target).eval(), _load_tokenizer(model), absolute(model))


def model_type(name: str) -> str | None:
    """The configuration's model type; without one "titans", so that loading reports the error."""
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(name, local_files_only=True)[0].get("model_type")
    except (OSError, ValueError):
        return "titans"


def _noted_model(note: dict[str, str], memory: Path | None) -> str:
    """The model that a memory's file names. The file is untrusted: the name is shown, and no code is run for it."""
    name = note.get("model", "")
    if not name or not name.isprintable():
        raise CommandError(f"{memory} does not say which model made it: pass --model DIR")
    if os.path.isabs(name) and not os.path.isdir(name):
        raise CommandError(f"{memory} was made by {name}, which is not there: pass --model DIR")
    return name


def _precision(note: dict[str, str], memory: Path | None, asked: Dtype) -> str:
    """The requested precision; a memory can only be continued in its own."""
    own = note.get("dtype")
    if own not in [each.value for each in Dtype]:
        return asked.value
    if asked.value not in ("auto", own):
        raise CommandError(f"{memory} is in {own} and cannot go on in {asked.value}: leave out --dtype")
    return own


def absolute(name: str) -> str:
    return str(Path(name).resolve()) if os.path.isdir(name) else name


def load_forecaster(model: str, dtype: Dtype = Dtype.auto, device: str = "auto") -> "TitansForTimeSeriesPrediction":
    """A Titans model of time series, ready to forecast."""
    from ..configuration_series import TitansTimeSeriesConfig
    from ..modeling_series import TitansForTimeSeriesPrediction

    quiet()
    config, target = load_config(model, TitansTimeSeriesConfig), find_device(device)
    return _load_weights(model, config, dtype.value, TitansForTimeSeriesPrediction).to(target).eval()


def load_config(name: str, kind: "type[TitansConfig] | None" = None) -> "TitansConfig":
    """The configuration of a folder, or of a model in the Hub's local cache; what is not a Titans model is refused.

    Args:
        kind: the class of the configuration, by default that of language models.
    """
    from huggingface_hub.errors import StrictDataclassError

    from ..configuration_titans import TitansConfig

    kind = kind or TitansConfig
    wanted = "a Titans model" if kind is TitansConfig else "a Titans model of time series"
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CommandError(f"{name} is not the folder of a model: it has no config.json")
    if folder.is_file():
        raise CommandError(f"{name} is a file; pass the folder of a model")
    try:
        found, _ = kind.get_config_dict(name, local_files_only=True)
        if found.get("model_type") != kind.model_type:
            raise CommandError(f"{name} holds a model of type {found.get('model_type')!r}, not {wanted}")
        config = kind.from_dict(found)
    except (json.JSONDecodeError, StrictDataclassError, TypeError) as error:
        raise CommandError(f"{name} has a configuration that cannot be read: {error}") from error
    except OSError as error:
        if folder.is_dir():
            raise
        raise CommandError(
            f"no folder {name}, and no model of that name among those downloaded from the Hub"
        ) from error
    config._attn_implementation = None  # such a name could load code from the Hub
    return config


def _load_weights(name: str, config: "TitansConfig", dtype: str, kind: type | None = None):
    """The model, from safetensors and with this package's code: the folder's code is never run.

    Args:
        kind: the class of the model, by default `TitansForCausalLM`.
    """
    from safetensors import SafetensorError

    from ..modeling_titans import TitansForCausalLM

    try:
        model, found = (kind or TitansForCausalLM).from_pretrained(
            name, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except SafetensorError as error:
        raise CommandError(f"the weights in {name} are damaged: {error}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CommandError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]!r} among them")
    return model


def _load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CommandError(f"{name} has no tokenizer that can be loaded: save one beside the model") from error


def find_device(name: str):
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise CommandError(f"cannot use device {name!r}: {first}") from error
    return torch.device(name)
