"""Python types become schemas, and JSON becomes values of those types."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, Literal, Optional, TypedDict

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import NotRequired

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.schemas import output_of_schema


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Tag(TypedDict):
    key: str
    note: NotRequired[str]


@dataclass
class Inner:
    x: int
    y: float = 0.5


@dataclass
class Outer:
    name: str
    inner: Inner
    level: Level
    kind: Literal["a", 1, None]
    tags: list[Tag]
    scores: dict[str, float]
    anything: Any
    maybe: Optional[Inner] = None  # noqa: UP045 - both spellings are read
    either: int | str = 0
    many: tuple[int, ...] = ()
    marked: Annotated[bool, "why"] = False
    hidden: int = field(default=7, init=False)


OUTER = {
    "name": "n",
    "inner": {"x": 1},
    "level": "high",
    "kind": 1,
    "tags": [{"key": "k"}, {"key": "k", "note": "n"}],
    "scores": {"a": 1, "b": 2.5},
    "anything": [None],
    "many": [1, 2],
    "either": "s",
}


def schema_of(type_: object) -> dict[str, Any]:
    schema = json.loads(output_of_schema(type_).constraint.source)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema  # type: ignore[no-any-return]


def read(type_: object, text: str) -> Any:
    reader = output_of_schema(type_).reader
    assert reader is not None
    return reader.read(text)


def test_a_dataclass_becomes_a_closed_object_and_its_defaults_are_optional() -> None:
    schema = schema_of(Outer)
    assert schema["required"] == ["name", "inner", "level", "kind", "tags", "scores", "anything"]
    assert schema["additionalProperties"] is False
    assert "hidden" not in schema["properties"]
    properties = schema["properties"]
    assert properties["inner"]["required"] == ["x"]
    assert properties["level"] == {"enum": ["low", "high"]}
    assert properties["kind"] == {"enum": ["a", 1, None]}
    assert properties["tags"]["items"]["required"] == ["key"]
    assert properties["scores"] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert properties["either"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert properties["many"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["marked"] == {"type": "boolean"}
    jsonschema.validate(OUTER, schema)


def test_json_becomes_an_instance_all_the_way_down() -> None:
    value = read(Outer, json.dumps(OUTER))
    assert value == Outer(
        name="n",
        inner=Inner(1),
        level=Level.HIGH,
        kind=1,
        tags=[{"key": "k"}, {"key": "k", "note": "n"}],
        scores={"a": 1.0, "b": 2.5},
        anything=[None],
        many=(1, 2),
        either="s",
    )
    assert isinstance(value.scores["a"], float)
    with_inner = read(Outer, json.dumps({**OUTER, "maybe": {"x": 2, "y": 3}}))
    assert with_inner.maybe == Inner(2, 3.0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": 1},
        {"inner": {"x": "1"}},
        {"inner": {"x": True}},
        {"inner": {}},
        {"inner": {"x": 1, "z": 1}},
        {"level": "middle"},
        {"kind": True},
        {"tags": {}},
        {"scores": {"a": "b"}},
        {"either": None},
        {"maybe": 3},
        {"unknown": 1},
    ],
)
def test_json_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    value = {**OUTER, **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, schema_of(Outer))
    with pytest.raises(ValueError, match=r"."):
        read(Outer, json.dumps(value))


@dataclass
class Limited:
    code: Annotated[str, Field(max_length=3)]
    count: Annotated[int, Field(ge=5, le=6)]
    tags: Annotated[list[Annotated[str, "a word"]], Field(max_length=1)]


class LimitedDict(TypedDict):
    count: Annotated[int, Field(ge=5), Field(le=6)]


@pydantic_dataclass
class Checked:
    count: int = Field(ge=5, le=6)
    note: str = ""


def test_what_fields_say_in_pydantics_terms_is_in_the_schema_and_checked() -> None:
    properties = schema_of(Limited)["properties"]
    assert properties["code"] == {"type": "string", "maxLength": 3}
    assert (properties["count"]["minimum"], properties["count"]["maximum"]) == (5, 6)
    assert properties["tags"]["maxItems"] == 1
    value = read(Limited, '{"code": "abc", "count": 5, "tags": ["x"]}')
    assert value == Limited("abc", 5, ["x"])
    with pytest.raises(ValueError, match="less than or equal to 6"):
        read(Limited, '{"code": "abc", "count": 7, "tags": []}')
    assert schema_of(LimitedDict)["properties"]["count"]["minimum"] == 5
    assert read(LimitedDict, '{"count": 6}') == {"count": 6}


def test_a_dataclass_of_pydantic_is_read_as_a_model_is() -> None:
    schema = schema_of(Checked)
    assert schema["required"] == ["count"]
    assert schema["additionalProperties"] is False
    assert read(Checked, '{"count": 6}') == Checked(6)

    @dataclass
    class Around:
        inner: Checked

    assert schema_of(Around)["properties"]["inner"]["required"] == ["count"]
    assert read(Around, '{"inner": {"count": 5}}') == Around(Checked(5))


def test_a_dataclass_of_pydantic_without_a_schema_is_refused_by_name() -> None:
    @pydantic_dataclass
    class Calling:
        call: Callable[[], int]

    with pytest.raises(UnsupportedFeature, match="the type Calling of Calling"):
        output_of_schema(Calling)


def test_what_the_constructor_needs_besides_its_fields_is_refused_by_name() -> None:
    @dataclass
    class Needing:
        x: int
        seed: InitVar[int]

    with pytest.raises(UnsupportedFeature, match="the parameter seed of Needing"):
        output_of_schema(Needing)


@pytest.mark.parametrize("text", ["1", "1.0", "1e0"])
def test_an_integer_may_be_written_in_every_way_of_json(text: str) -> None:
    @dataclass
    class Whole:
        count: int
        kind: Literal[1, 2]

    value = read(Whole, f'{{"count": {text}, "kind": {text}}}')
    assert value == Whole(1, 1)
    assert type(value.count) is type(value.kind) is int
    for wrong in ("1.5", "true", "1e400", "NaN"):
        with pytest.raises(ValueError, match="is not of type integer"):
            read(Whole, f'{{"count": {wrong}, "kind": 1}}')


def test_a_typed_dict_becomes_a_dict() -> None:
    assert schema_of(Tag)["required"] == ["key"]
    assert read(Tag, '{"key": "k"}') == {"key": "k"}


class Part(BaseModel):
    size: int


class Model(BaseModel):
    name: str
    parts: list[Part] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


def test_a_pydantic_model_gives_its_own_schema_closed_where_it_does_not_say() -> None:
    schema = schema_of(Model)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Part"]["additionalProperties"] is False
    assert schema["required"] == ["name"]
    assert schema_of(Open)["additionalProperties"] is True
    assert read(Model, '{"name": "n", "parts": [{"size": 1}]}') == Model(
        name="n", parts=[Part(size=1)]
    )
    with pytest.raises(ValueError, match="name"):
        read(Model, "{}")


def test_dicts_and_json_text_are_taken_as_they_are() -> None:
    for schema in ({"type": "string"}, '{"type": "string"}', True):
        output = output_of_schema(schema)
        assert output.reader is None
    assert output_of_schema({"b": 1, "a": 2}).constraint.source == '{"b": 1, "a": 2}'


@dataclass
class Recursive:
    child: Recursive | None


@dataclass
class WithBytes:
    data: bytes


@dataclass
class WithKeys:
    data: dict[int, str]


@dataclass
class Unresolved:
    data: NoSuchType  # type: ignore[name-defined]  # noqa: F821


def test_types_without_a_schema_are_refused_by_name_and_place() -> None:
    for type_, words in (
        (Recursive, "recursive type Recursive"),
        (WithBytes, r"type bytes of WithBytes\.data"),
        (WithKeys, r"keys other than str of WithKeys\.data"),
    ):
        with pytest.raises(UnsupportedFeature, match=words):
            output_of_schema(type_)
    with pytest.raises(InvalidRequest, match="NoSuchType"):
        output_of_schema(Unresolved)
    with pytest.raises(TypeError, match="json_schema must be"):
        output_of_schema(int)
