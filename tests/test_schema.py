"""A value that does not fit is named, with what it must be, in one line."""

import pytest
from pydantic import Field

from titans_hf.records.schema import ClosedSchema, Schema, validate


class Inner(ClosedSchema):
    size: int = Field(ge=2)


class Outer(ClosedSchema):
    inner: Inner | None = None
    either: str | float = "x"
    many: list[Inner] = []
    table: dict[str, Inner] = {}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"inner": {"size": "3"}}, "`inner.size` must be a valid integer; got '3'"),
        ({"inner": {"size": True}}, "`inner.size` must be a valid integer; got True"),
        ({"inner": {"size": 1}}, "`inner.size` must be greater than or equal to 2; got 1"),
        ({"inner": {}}, "`inner.size` is missing"),
        ({"inner": {"sise": 3}}, "there is no field `inner.sise`; the nearest is `inner.size`"),
        ({"iner": {"size": 3}}, "there is no field `iner`; the nearest is `inner`"),
        ({"inner": 3}, "`inner` must be a section with fields of its own; got 3"),
        ({"either": []}, "`either` must be a valid string; got []"),
        ({"many": [{"size": 2}, {}]}, "`many[1].size` is missing"),
        ({"many": [{"size": 2, "sise": 3}]}, "there is no field `many[0].sise`; the nearest is `many[0].size`"),
        ({"table": {"a": {}}}, "`table.a.size` is missing"),
    ],
)
def test_the_message_names_the_field_and_what_it_must_be(values, message):
    with pytest.raises(ValueError) as raised:
        validate(Outer, values, "a.json")
    assert str(raised.value) == f"a.json: {message}"


def test_files_of_later_versions_may_have_more_fields():
    class Open(Schema):
        size: int

    assert validate(Open, {"size": 3, "more": 4}).size == 3
    with pytest.raises(ValueError, match="^`size` is missing$"):
        validate(Open, {"more": 4})
