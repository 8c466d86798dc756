"""Validation of recipes and records by pydantic, with errors of one line that name the field and what it must be."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class Schema(BaseModel):
    """Fields must have exactly their declared types. Unknown fields are allowed: later versions may write them."""

    model_config = ConfigDict(strict=True, extra="allow")


class ClosedSchema(Schema):
    """A schema that refuses unknown fields, for files that people write: there they are typing errors."""

    model_config = ConfigDict(extra="forbid")


Checked = TypeVar("Checked", bound=Schema)


def validate(schema: type[Checked], values: object, where: str = "") -> Checked:
    """The values as an instance of the schema; a `ValueError` names the first wrong field, after `where`."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        misspelt = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        message = _explain(schema, values, (misspelt or problems)[0])
        raise ValueError(f"{where}: {message}" if where else message) from error


def no_such_field(name: object, known: Iterable[str], section: str = "") -> str:
    """The message that a section has no such field, with the nearest name."""
    near = get_close_matches(str(name), list(known), 1, 0)[0]
    return f"there is no field `{_join(section, name)}`; the nearest is `{_join(section, near)}`"


def _explain(schema: type[Schema], values: object, problem: dict) -> str:
    loc, kind, field = problem["loc"], problem["type"], _name(values, problem["loc"])
    if kind == "extra_forbidden":
        return no_such_field(loc[-1], _section(schema, loc[:-1]).model_fields, _name(values, loc[:-1]))
    if kind == "missing":
        return f"`{field}` is missing"
    if kind in ("model_type", "dict_type"):
        return f"`{field}` must be a section with fields of its own; got {problem['input']!r}"
    return f"`{field}` {problem['msg'].replace('Input should be', 'must be', 1)}; got {problem['input']!r}"


def _section(schema: type[Schema], loc: tuple) -> type[Schema]:
    """The schema of the section at that location."""
    for part in loc:
        if part in schema.model_fields:  # else an index or a key
            kind = schema.model_fields[part].annotation
            schema = next(each for each in get_args(kind) or (kind,) if hasattr(each, "model_fields"))
    return schema


def _name(values: Any, loc: tuple) -> str:
    """A field's full name, without the name of a type that pydantic adds for a union."""
    name = ""
    for part in loc:
        if isinstance(values, dict):
            name, values = _join(name, part), values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            name, values = f"{name}[{part}]", values[part]
    return name


def _join(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)
