"""The record of an evaluation: a JSON file with the results and everything needed to reproduce them.

format, version     "titans evaluation", 1
suite               what was run: "table1", "table2" or "babilong"
command, date       how and when
commit              of titans-hf, with "-dirty" where files were changed; null outside of its repository
versions            of titans_hf, torch, transformers, lm_eval and datasets
machine             architecture and threads, and the device
seeds               python, numpy, torch, fewshot: lm-eval's
seconds             of the evaluation, without loading
model               name, variant (of a baseline its model type), parameters, dtype, memory ("on"; "off", never written;
                    "reset", reset at each segment; "none", of a baseline)
settings            limit (documents a task; null is all), batch_size, max_length, num_fewshot, bootstrap_iters;
                    of table2 and babilong also their lengths, and the limit is that of each; of a baseline also
                    inputs_cut, how many inputs lost their beginning to its max_length
data                by task: source ("files", "hub", or "noise", which needs neither), the dataset, lm-eval's version of
                    the task, documents scored, the benchmark's total, and the files' SHA-256
metrics             by column of the paper's tables (see `paper/`): value and stderr in the unit of the paper, unit,
                    task and metric of lm-eval. A value that is not finite is null, and so is a stderr that lm-eval
                    does not have
"""

import json
import math
from pathlib import Path

from ..records.schema import Schema, validate
from ..snapshots import whole_file

FORMAT, VERSION = "titans evaluation", 1


class Versions(Schema):
    titans_hf: str
    torch: str
    transformers: str
    lm_eval: str
    datasets: str


class Seeds(Schema):
    python: int
    numpy: int
    torch: int
    fewshot: int


class Model(Schema):
    name: str
    variant: str
    parameters: int
    dtype: str
    memory: str


class Settings(Schema):
    limit: int | None
    batch_size: int
    max_length: int
    num_fewshot: int
    bootstrap_iters: int


class Data(Schema):
    source: str
    dataset: str
    task_version: str | float | None
    documents: int
    total: int
    files: dict[str, str]


class Metric(Schema):
    value: float | None
    stderr: float | None
    unit: str
    task: str | None
    metric: str | None


class Record(Schema):
    format: str
    version: int
    suite: str
    command: str
    date: str
    commit: str | None
    versions: Versions
    machine: str
    seeds: Seeds
    seconds: float
    model: Model
    settings: Settings
    data: dict[str, Data]
    metrics: dict[str, Metric]


def check_record(record: object, where: str = "the record") -> dict:
    """The record, if it is one of this version; a ValueError names the field that is wrong."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{where} is not the record of a `titans eval`")
    if record.get("version") != VERSION:
        raise ValueError(
            f"{where} is of version {record.get('version')!r}; this titans-hf reads version {VERSION}: evaluate again"
        )
    validate(Record, record, where)
    return record


def without_nan(record: dict) -> dict:
    """The record as strict JSON has it: figures that are not finite become null."""
    return json.loads(json.dumps(record), parse_constant=lambda _: None)


def write_record(path: Path, record: dict) -> None:
    """Write a record, completely or not at all."""
    text = json.dumps(check_record(without_nan(record)), indent=1, allow_nan=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_record(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a record: {error}") from error
    return check_record(found, str(path))


def stderr_of_mean(errors: list[float | None]) -> float | None:
    """The standard error of a mean of independent figures; None where one of theirs is not known."""
    if not errors or any(error is None for error in errors):
        return None
    return math.sqrt(sum(error**2 for error in errors if error is not None)) / len(errors)
