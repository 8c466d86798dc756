"""What a training run is made of, as a YAML file: read, merged with its base and the command line, and checked.

A recipe has the sections below. `base: other.yaml` starts from another recipe, beside it; `section.field=value` on the
command line has the last word. A field that does not exist is refused with the nearest one that does.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import yaml
from transformers import LlamaConfig, PreTrainedConfig

from .. import TitansConfig

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"  # where the package is a checkout
FAMILIES = {"titans": TitansConfig, "llama": LlamaConfig}


@dataclass
class ModelSection:
    """`config` are fields of the family's configuration that differ from its defaults, or from those of a `preset`.

    The families are "titans", with names for `TitansConfig.preset`, and "llama", a baseline without presets.
    """

    family: str = "titans"
    preset: str | None = None
    config: dict = field(default_factory=dict)


@dataclass
class NewTokenizer:
    vocab_size: int


@dataclass
class TokenizerSection:
    """`name` is a Hub id or a folder; `train` learns a byte-level BPE from the training data instead."""

    name: str | None = None
    train: NewTokenizer | None = None


@dataclass
class DataSection:
    """Where documents come from, and how they become rows.

    Args:
        source: "hub" (a dataset on the Hub, or a folder laid out like one), "jsonl" or "text" (local files), or
            "python" (the language reference that Python itself carries: nothing to download).
        path: the dataset's id, or a glob of files.
        config, split, column: of a Hub dataset its configuration and split, and where the text stands.
        documents: of text files, what one document is: "file", "paragraph" or "line".
        shuffle_seed: read the files in a random order; None leaves them in theirs.
        sequence_length: tokens of a row. Documents are cut where a row is full and go on in the next.
        reset_at_documents: read each document with a memory of its own, where otherwise a row is one stream.
    """

    source: str = "hub"
    path: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    documents: str = "file"
    shuffle_seed: int | None = None
    sequence_length: int = 4096
    reset_at_documents: bool = False


@dataclass
class HeldOutSection:
    """One document in `one_in`, chosen by its text, is never trained on; `rows` rows of them are evaluated."""

    one_in: int = 100
    rows: int = 128


@dataclass
class TrainingSection:
    """`batch_tokens` is the global batch: processes x accumulation x `rows_per_device` x sequence length."""

    tokens: int = 15_000_000_000
    batch_tokens: int = 524_288
    rows_per_device: int = 4
    learning_rate: float = 4e-4
    warmup: float = 0.01
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    precision: str = "bf16"
    gradient_checkpointing: bool = True
    data_workers: int = 1
    log_every: int = 10
    save_every: int = 500
    keep_checkpoints: int = 3
    eval_every: int = 1000
    report_to: list[str] = field(default_factory=list)


@dataclass
class HardwareSection:
    """What the plan assumes. A run counts its processes itself."""

    gpus: int = 8
    gpu: str | None = "h100"
    utilisation: float = 0.35


@dataclass
class Recipe:
    out: str = "runs/train"
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    data: DataSection = field(default_factory=DataSection)
    held_out: HeldOutSection = field(default_factory=HeldOutSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    hardware: HardwareSection = field(default_factory=HardwareSection)

    def model_config(self, **special_tokens) -> PreTrainedConfig:
        fields, kind = {**self.model.config, **special_tokens}, FAMILIES[self.model.family]
        return kind.preset(self.model.preset, **fields) if self.model.preset else kind(**fields)

    def to_yaml(self) -> str:
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    def check(self) -> None:
        """Raise a `ValueError` that names the first field that cannot work, and the fix."""
        for name, choices in CHOICES.items():
            if _at(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}; got {_at(self, name)!r}")
        kind = FAMILIES[self.model.family]
        if self.model.preset and not hasattr(kind, "preset"):
            raise ValueError(f"`model.preset` must be left out: the family {self.model.family!r} has no presets")
        _check_name("model.config", self.model.config, [f.name for f in dataclasses.fields(kind)])
        config = self.model_config()
        for name, (low, high) in RANGES.items():
            if not low <= _at(self, name) <= high:
                raise ValueError(f"`{name}` must be between {low:,} and {high:,}; got {_at(self, name)}")
        for name in self.training.report_to:
            if name not in TRACKERS:
                raise ValueError(f"`training.report_to` must be a list of {', '.join(TRACKERS)}; got {name!r}")
        if (self.tokenizer.name is None) == (self.tokenizer.train is None):
            raise ValueError("give exactly one of `tokenizer.name` and `tokenizer.train`")
        if self.tokenizer.train and not 300 <= self.tokenizer.train.vocab_size <= config.vocab_size:
            raise ValueError(
                f"`tokenizer.train.vocab_size` must be between 300 (bytes and a few merges) and the model's "
                f"`vocab_size` ({config.vocab_size:,}); got {self.tokenizer.train.vocab_size}"
            )
        if (self.data.path is None) != (self.data.source == "python"):
            raise ValueError("`data.path` must be given, except for `data.source: python`, which has none")


CHOICES = {
    "model.family": tuple(FAMILIES),
    "data.source": ("hub", "jsonl", "text", "python"),
    "data.documents": ("file", "paragraph", "line"),
    "training.precision": ("fp32", "bf16"),
    "training.data_workers": (0, 1),  # two would each have a place in the stream of its own
}
MANY = 10**15
RANGES = {
    "data.sequence_length": (2, MANY),
    "held_out.one_in": (2, MANY),
    "held_out.rows": (1, MANY),
    "training.tokens": (1, MANY),
    "training.batch_tokens": (1, MANY),
    "training.rows_per_device": (1, MANY),
    "training.learning_rate": (0, 1),
    "training.warmup": (0, 0.99),
    "training.weight_decay": (0, 10),
    "training.beta1": (0, 0.9999),
    "training.beta2": (0, 0.99999),
    "training.clip": (0, MANY),
    "training.log_every": (1, MANY),
    "training.save_every": (1, MANY),
    "training.keep_checkpoints": (2, MANY),  # the one before stays until the next is complete
    "training.eval_every": (0, MANY),
    "hardware.gpus": (1, MANY),
    "hardware.utilisation": (0.001, 1),
}
TRACKERS = ("tensorboard", "trackio")


def load_recipe(path: Path, overrides: list[str] = ()) -> Recipe:
    """The recipe of a file, its base and `section.field=value` settings; a `ValueError` says what is wrong with it."""
    values = _read(path)
    for setting in overrides:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not a setting: write section.field=value")
        _put(values, name.split("."), yaml.safe_load(value))
    recipe = _build(Recipe, values, "")
    recipe.check()
    return recipe


def first_difference(one: Recipe, other: Recipe, *ignored: str) -> str | None:
    """The name of the first field in which two recipes differ, apart from the ignored ones."""
    flat = [_flat(dataclasses.asdict(recipe)) for recipe in (one, other)]
    for name in {**flat[0], **flat[1]}:
        if flat[0].get(name) != flat[1].get(name) and not name.startswith(ignored):
            return name
    return None


def _read(path: Path) -> dict:
    if not path.is_file():
        near = get_close_matches(path.name, [p.name for p in RECIPES.glob("*.yaml")], 1, 0)
        raise ValueError(f"there is no recipe {path}" + (f"; did you mean scripts/recipes/{near[0]}?" if near else ""))
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold sections such as `model:` and `data:`")
    base = values.pop("base", None)
    return values if base is None else _merge(_read(path.parent / base), values)


def _merge(base: dict, values: dict) -> dict:
    both = {name: _merge(base[name], values[name]) for name in base if _is_section(base, values, name)}
    return {**base, **values, **both}


def _is_section(base: dict, values: dict, name: str) -> bool:
    return isinstance(base[name], dict) and isinstance(values.get(name), dict)


def _put(values: dict, names: list[str], value) -> None:
    for name in names[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[names[-1]] = value


def _build(section: type, values, where: str):
    """A section from its values: every name known, every value of the right type."""
    if not isinstance(values, dict):
        raise ValueError(f"`{where}` must be a section with fields of its own, got {values!r}")
    hints = typing.get_type_hints(section)
    _check_name(where, values, list(hints))
    missing = [f.name for f in dataclasses.fields(section) if _is_required(f) and f.name not in values]
    if missing:
        raise ValueError(f"`{_join(where, missing[0])}` is missing")
    return section(**{name: _typed(hints[name], value, _join(where, name)) for name, value in values.items()})


def _typed(hint, value, name: str):
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, name)
    if kind is float:
        try:
            return float(value)  # YAML reads 4e-4 as text
        except (TypeError, ValueError):
            pass
    if typing.get_origin(kind) is list and isinstance(value, list):
        return [_typed(typing.get_args(kind)[0], one, name) for one in value]
    plain = typing.get_origin(kind) or kind
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise ValueError(f"`{name}` must be {NAMES[plain]}, got {value!r}")
    return value


NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a section",
}


def _check_name(where: str, values: dict, known: list[str]) -> None:
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, 1, 0)[0]
            raise ValueError(f"there is no field `{_join(where, name)}`; the nearest is `{_join(where, near)}`")


def _is_required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _join(where: str, name) -> str:
    return f"{where}.{name}" if where else str(name)


def _at(recipe: Recipe, name: str):
    section, last = name.split(".")
    return getattr(getattr(recipe, section), last)


def _flat(values: dict, where: str = "") -> dict:
    """Fields by their full names."""
    found = {}
    for name, value in values.items():
        full = _join(where, name)
        found.update(_flat(value, full) if isinstance(value, dict) and value else {full: value})
    return found
