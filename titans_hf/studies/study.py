"""A study as a YAML file: models x settings x seeds of one task, read and checked.

    about: what the study asks, in a sentence
    task: mqar                                  # one of `tasks.TASKS`
    settings: {small: {pairs: 8}, large: {}}    # of the task, by name
    models: {lmm: {}, linear: {family: lmm, memory_depth: 1}, gdn: {}}
    sizes: {hidden_size: 64, num_hidden_layers: 2, window: 64, parameters: 600000}
    training: {steps: 1000, batch_tokens: 8192, lr: [3e-3, 1e-2]}
    seeds: [0, 1, 2]
    quick: {training: {steps: 20}}              # what `--quick` changes

A model is one of `families.FAMILIES` with fields of its configuration; its name is the family unless it says another.
More sections, for studies that need them:

    grid: {memory_depth: [1, 2]}                # every model with every combination of these fields
    read_with: [{memory_chunk_size: 8}]         # Titans' trained weights are tested under these fields, too,
    then:                                       # and after more steps of training under these
      - {fields: {memory_chunk_size: 8}, steps: 60}
    paper: {table: 5, column: ppl, rows: {lmm: LMM}}  # its row for each model: the table shows both orders
"""

import itertools
import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..configuration_titans import VARIANTS, TitansConfig
from ..evals.paper_tables import paper_table
from ..records.schema import ClosedSchema, validate
from .families import FAMILIES
from .tasks import TASKS

STUDIES = Path(__file__).parents[2] / "scripts" / "studies"  # where the package is a checkout
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(strict=False, gt=0)]  # YAML reads 3e-3 as text
Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class Sizes(ClosedSchema):
    """What all models of a study share. Feed-forward layers make up for what a mixer holds."""

    hidden_size: Count
    num_hidden_layers: Count = 2
    num_attention_heads: Count = 1
    window: Count = 64
    parameters: Count


class Training(ClosedSchema):
    steps: Count
    batch_tokens: Count = 8192
    lr: Annotated[list[Number], Field(min_length=1)]
    weight_decay: Annotated[float, Field(strict=False, ge=0)] = 0.01
    warmup: Share = 0.1  # of the steps; then the rate falls evenly
    last_lr: Share = 0.05  # of the highest


class Stage(ClosedSchema):
    """More training of the trained model; the rate is the first stage's unless it says another."""

    fields: dict[str, Any] = {}
    steps: Count
    lr: Number | None = None


class Paper(ClosedSchema):
    """A column of one of the paper's tables, and its row for each model."""

    table: int
    column: str
    rows: dict[str, str]


class Study(ClosedSchema):
    about: str
    task: str
    settings: dict[str, dict[str, Any]] = {"": {}}
    models: dict[str, dict[str, Any]]
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    sizes: Sizes
    training: Training
    read_with: list[dict[str, Any]] = []
    then: list[Stage] = []
    paper: Paper | None = None
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    quick: dict[str, Any] = {}


@dataclass(frozen=True)
class Run:
    """One training of one model. Whatever changes its result is in it, as text where it is not a number."""

    setting: str
    model: str
    family: str
    fields: str  # of the model's configuration, as JSON
    task: str
    task_settings: str  # as JSON
    sizes: str  # as JSON
    steps: int
    batch_tokens: int
    weight_decay: float
    warmup: float
    last_lr: float
    lr: float
    seed: int
    read_with: str = "[]"  # as JSON
    then: str = "[]"  # as JSON

    @property
    def name(self) -> str:
        """The name of its file: readable, and another one where anything differs."""
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return "-".join(
            part for part in (self.setting, self.model, f"lr{self.lr:g}", f"seed{self.seed}", digest) if part
        )

    def model_fields(self) -> dict[str, Any]:
        """Fields for `families.build`. Baselines get the quiet start that Titans has by its own defaults."""
        width = json.loads(self.sizes)["hidden_size"]
        quiet = {"embedding_range": width**-0.5, "mixer_scale": TitansConfig.mixer_initializer_scale}
        return {**({} if self.family in VARIANTS else quiet), **json.loads(self.fields)}


def known() -> list[Path]:
    return sorted(STUDIES.glob("*.yaml"))


def read_study(name: str, quick: bool = False) -> Study:
    """The study of that name, or in that file; with `quick` its reduced form."""
    import yaml

    path = Path(name) if name.endswith((".yaml", ".yml")) else STUDIES / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(path.stem for path in known()) or "none: give the path of a YAML file"
        raise ValueError(f"there is no study {name!r}; those of this checkout are {names}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    study = validate(Study, values, path.name)
    if quick:
        study = validate(Study, merged(values, study.quick), f"{path.name}, quick")
    if study.task not in TASKS:
        raise ValueError(f"{path.name}: `task` must be one of {', '.join(TASKS)}; got {study.task!r}")
    for model, fields in study.models.items():
        if fields.get("family", model) not in FAMILIES:
            raise ValueError(f"{path.name}: `models.{model}` has no `family` of {', '.join(FAMILIES)}")
    if study.paper is not None:
        check_paper(study, path.name)
    return study


def check_paper(study: Study, where: str) -> None:
    """Refuse a table, a column or a row that the paper does not have."""
    table = paper_table(study.paper.table)
    rows = [row.model for group in table.groups.values() for row in group]
    for field, name, known in (
        ("column", study.paper.column, [column.key for column in table.columns]),
        *(("rows", row, rows) for row in study.paper.rows.values()),
    ):
        if name not in known:
            raise ValueError(f"{where}: `paper.{field}` must be of {', '.join(known)}; got {name!r}")


def merged(values: dict, changes: dict) -> dict:
    """Values with changes, section by section. A list or a number is replaced, and null takes an entry away."""
    found = dict(values)
    for name, change in changes.items():
        if change is None:
            found.pop(name, None)
        elif isinstance(change, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], change)
        else:
            found[name] = change
    return found


def models_of(study: Study) -> dict[str, dict[str, Any]]:
    """Every model with every combination of the grid, named by what differs."""
    names, found = [name.removeprefix("memory_") for name in study.grid], {}
    for model, fields in study.models.items():
        for values in itertools.product(*study.grid.values()):
            name = "-".join([model, *(f"{field}={value}" for field, value in zip(names, values))])
            found[name] = {"family": model, **fields, **dict(zip(study.grid, values))}
    return found


def runs_of(study: Study, lr: float, seed: int) -> list[Run]:
    """Every model in every setting, with that learning rate and seed."""
    found, shared = [], study.training.model_dump(exclude={"lr"})
    later = {"read_with": study.read_with, "then": [stage.model_dump() for stage in study.then]}
    for setting, task_settings in study.settings.items():
        for model, fields in models_of(study).items():
            own = {name: value for name, value in fields.items() if name != "family"}
            found.append(
                Run(
                    setting=setting,
                    model=model,
                    family=fields["family"],
                    fields=json.dumps(own, sort_keys=True),
                    task=study.task,
                    task_settings=json.dumps(task_settings, sort_keys=True),
                    sizes=study.sizes.model_dump_json(),
                    lr=lr,
                    seed=seed,
                    **shared,
                    **{name: json.dumps(value, sort_keys=True) for name, value in later.items()},
                )
            )
    return found
