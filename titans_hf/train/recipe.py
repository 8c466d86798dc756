"""A training run as a YAML file: read, merged with its base and the command line, and checked.

A recipe has the sections below. `base: other.yaml` starts from another recipe in the same folder;
`section.field=value` on the command line overrides both. For an unknown field the error names the nearest known one.
"""

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from .. import TitansConfig
from ..records.schema import ClosedSchema, no_such_field, validate

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"  # where the package is a checkout
FAMILIES = {"titans": TitansConfig, "llama": LlamaConfig}
Tracker = Literal["tensorboard", "trackio"]
TRACKERS = get_args(Tracker)
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(strict=False)]  # YAML reads 4e-4 as text


class ModelSection(ClosedSchema):
    """`config` are fields of the family's configuration that differ from its defaults, or from those of a `preset`.

    The families are "titans", with names for `TitansConfig.preset`, and "llama", a baseline without presets. A
    `checkpoint` is a folder of a Titans model to go on from, in place of all of this.
    """

    family: Literal["titans", "llama"] = "titans"
    preset: str | None = None
    config: dict[str, Any] = {}
    checkpoint: str | None = None


class NewTokenizer(ClosedSchema):
    vocab_size: int


class TokenizerSection(ClosedSchema):
    """`name` is a Hub id or a folder; `train` learns a byte-level BPE from the training data instead."""

    name: str | None = None
    train: NewTokenizer | None = None


class DataSection(ClosedSchema):
    """Where documents come from, and how they become rows.

    Args:
        source: "hub" (a dataset on the Hub, or a folder laid out like one), "jsonl" or "text" (local files), or
            "python" (the language reference that is part of Python: nothing to download).
        path: the dataset's id, or a glob of files.
        config, split, column: configuration and split of a Hub dataset, and the column that holds the text.
        documents: what one document of a text file is: "file", "paragraph" or "line".
        shuffle_seed: read the files in a random order; None keeps theirs.
        sequence_length: tokens of a row. Documents are cut where a row is full and continue in the next.
        reset_at_documents: read each document with a memory of its own; otherwise a row is one stream.
    """

    source: Literal["hub", "jsonl", "text", "python"] = "hub"
    path: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    documents: Literal["file", "paragraph", "line"] = "file"
    shuffle_seed: int | None = None
    sequence_length: Annotated[int, Field(ge=2)] = 4096
    reset_at_documents: bool = False


class HeldOutSection(ClosedSchema):
    """One document in `one_in`, chosen by its text, is never trained on; `rows` rows of them are evaluated."""

    one_in: Annotated[int, Field(ge=2)] = 100
    rows: Count = 128


class TrainingSection(ClosedSchema):
    """`batch_tokens` is the global batch: processes x accumulation x `rows_per_device` x sequence length."""

    tokens: Count = 15_000_000_000
    batch_tokens: Count = 524_288
    rows_per_device: Count = 4
    learning_rate: Annotated[Number, Field(ge=0, le=1)] = 4e-4
    warmup: Annotated[Number, Field(ge=0, le=0.99)] = 0.01
    weight_decay: Annotated[Number, Field(ge=0, le=10)] = 0.1
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    clip: Annotated[Number, Field(ge=0)] = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    gradient_checkpointing: bool = True
    data_workers: Literal[0, 1] = 1  # with two, each would have its own position in the stream
    log_every: Count = 10
    save_every: Count = 500
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3  # the previous one stays until the next is complete
    eval_every: Annotated[int, Field(ge=0)] = 1000
    report_to: list[Tracker] = []


class DistilSection(ClosedSchema):
    """How a graft (`titans graft`, given as `model.checkpoint`) learns from the model that it was grafted from.

    Args:
        teacher: folder of that model, which reads all of a row with full attention.
        gguf_file: the file in that folder, if it is GGUF.
        start: the first place of a row whose prediction counts; by default the student's window.
        places: of a row, drawn at random, whose predictions count; by default all from the first on. A large vocabulary
            makes predictions a large part of the work.
        hidden: weight of the distance between last hidden states, beside the divergence of predictions.
        lora_rank: of LoRA on attention's projections; 0 trains the memories alone.
    """

    teacher: str
    gguf_file: str | None = None
    start: Annotated[int, Field(ge=0)] | None = None
    places: Count | None = None
    hidden: Annotated[Number, Field(ge=0)] = 0.0
    lora_rank: Annotated[int, Field(ge=0)] = 0


class HardwareSection(ClosedSchema):
    """What the plan assumes. A run counts its processes itself."""

    gpus: Count = 8
    gpu: str | None = "h100"
    utilisation: Annotated[Number, Field(gt=0, le=1)] = 0.35


class Recipe(ClosedSchema):
    out: str = "runs/train"
    seed: int = 0
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    held_out: HeldOutSection = HeldOutSection()
    training: TrainingSection = TrainingSection()
    hardware: HardwareSection = HardwareSection()
    distil: DistilSection | None = None

    def configuration(self, **special_tokens) -> PreTrainedConfig:
        """The configuration of the model."""
        if self.model.checkpoint is not None:
            return _saved_configuration(self.model.checkpoint)
        fields, kind = {**self.model.config, **special_tokens}, FAMILIES[self.model.family]
        return kind.preset(self.model.preset, **fields) if self.model.preset else kind(**fields)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def check(self) -> None:
        """Raise a `ValueError` where fields do not fit together; it names the first, and the fix."""
        kind = FAMILIES[self.model.family]
        if self.model.checkpoint is not None and (self.model.preset or self.model.config):
            raise ValueError("`model.checkpoint` has a configuration: leave out `model.preset` and `model.config`")
        if self.model.preset and not hasattr(kind, "preset"):
            raise ValueError(f"`model.preset` must be left out: the family {self.model.family!r} has no presets")
        known = [field.name for field in dataclasses.fields(kind)]
        for name in self.model.config:
            if name not in known:
                raise ValueError(no_such_field(name, known, "model.config"))
        vocab_size = self.configuration().vocab_size
        if (self.tokenizer.name is None) == (self.tokenizer.train is None):
            raise ValueError("give exactly one of `tokenizer.name` and `tokenizer.train`")
        if self.tokenizer.train and not 300 <= self.tokenizer.train.vocab_size <= vocab_size:
            raise ValueError(
                f"`tokenizer.train.vocab_size` must be between 300 (bytes and a few merges) and the model's "
                f"`vocab_size` ({vocab_size:,}); got {self.tokenizer.train.vocab_size}"
            )
        if (self.data.path is None) != (self.data.source == "python"):
            raise ValueError("`data.path` must be given, except for `data.source: python`, which has none")
        if self.distil is not None:
            self._check_distil()

    def _check_distil(self) -> None:
        if self.model.checkpoint is None:
            raise ValueError("`distil` needs `model.checkpoint`, the folder of a graft (titans graft SOURCE --out DIR)")
        if self.data.reset_at_documents:
            raise ValueError("`distil` needs `data.reset_at_documents: false`: the teacher reads a row as one text")
        start, length = self.distil.start, self.data.sequence_length
        if start is None:
            start = self.configuration().sliding_window
        if start >= length:
            raise ValueError(
                f"`data.sequence_length` ({length:,}) must be more than {start:,}, the first place whose prediction "
                "counts (`distil.start`, or the student's window)"
            )


def _saved_configuration(folder: str) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"`model.checkpoint`: cannot load {folder!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(config, TitansConfig):
        raise ValueError(f"`model.checkpoint`: {folder} is not a Titans model, but {config.model_type!r}")
    return config


def load_recipe(path: Path, overrides: list[str] = ()) -> Recipe:
    """The recipe of a file, its base and `section.field=value` settings; a `ValueError` says what is wrong with it."""
    values = _read(path)
    for setting in overrides:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not a setting: write section.field=value")
        _put(values, name.split("."), yaml.safe_load(value))
    recipe = validate(Recipe, values)
    recipe.check()
    return recipe


def first_difference(one: Recipe, other: Recipe, *ignored: str) -> str | None:
    """The name of the first field in which two recipes differ, apart from the ignored ones."""
    flat = [_flat(recipe.model_dump()) for recipe in (one, other)]
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


def _flat(values: dict, where: str = "") -> dict:
    """Fields by their full names."""
    found = {}
    for name, value in values.items():
        full = f"{where}.{name}" if where else name
        found.update(_flat(value, full) if isinstance(value, dict) and value else {full: value})
    return found
