"""Python types as JSON Schemas, and JSON text back as values of those types."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.protocol import Constraint

Schema = dict[str, Any]
Build = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the text of a variable as a value; `wanted` names its type in error messages."""

    wanted: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class TypedOutput:
    """What the text must be, what may follow it, and how it becomes a value."""

    constraint: Constraint
    reader: Reader | None
    extra_stop: tuple[str, ...] = ()


def output_of_schema(schema: object) -> TypedOutput:
    """For the `json_schema` argument: a dict, a bool or JSON text gives text; a pydantic model, a
    dataclass or a TypedDict gives an instance (of a TypedDict, a dict).

    Raises UnsupportedFeature for an annotation that has no schema, TypeError for anything else.
    """
    if isinstance(schema, (bool, str, Mapping)):
        return TypedOutput(Constraint.json_schema(schema), None)
    if _is_pydantic(schema):
        assert isinstance(schema, type)
        closed = _close_objects(schema.model_json_schema())  # type: ignore[attr-defined]
        read = schema.model_validate_json  # type: ignore[attr-defined]
        return TypedOutput(Constraint.json_schema(closed), Reader(schema.__name__, read))
    if isinstance(schema, type) and hasattr(schema, "__pydantic_validator__"):  # its dataclasses
        name = schema.__name__
        made, read = _made_by_pydantic(schema, _unsupported(schema, name))
        return TypedOutput(Constraint.json_schema(made), Reader(name, read))
    if isinstance(schema, type) and (dataclasses.is_dataclass(schema) or _is_typed_dict(schema)):
        json_schema, build = _Types().of(schema, schema.__name__)
        reader = Reader(schema.__name__, lambda text: build(json.loads(text)))
        return TypedOutput(Constraint.json_schema(json_schema), reader)
    raise TypeError(
        "json_schema must be a dict, JSON text, a pydantic model, a dataclass or a TypedDict, "
        f"got {schema!r}"
    )


def output_of_dtype(dtype: object) -> TypedOutput:
    """For the `dtype` argument: int, float, bool or str, or their names; ``Literal[...]``, and
    ``list[...]`` and other types with arguments.

    A number ends at the first space or line break, which is no part of it. A str is written as a
    JSON string, quotes included; its value is what stands between them. A literal is written as
    Python's ``str`` has it, without quotes, a list as JSON.

    Raises UnsupportedFeature for any other type, InvalidRequest for literals of the same text.
    """
    origin = get_origin(dtype)
    if origin is Literal:
        return _literal_output(get_args(dtype))
    if origin is not None:
        return _generic_output(dtype)
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    made = _DTYPES.get(name) if isinstance(name, str) else None
    if made is None:
        raise _unknown_dtype(dtype)
    return made


def _literal_output(values: tuple[Any, ...]) -> TypedOutput:
    of_text: dict[str, Any] = {}
    for value in values:
        text = str(value)
        if isinstance(value, (bytes, enum.Enum)) or not text:
            raise _unknown_dtype(Literal[value])
        if text in of_text:
            raise InvalidRequest(
                f"dtype has {of_text[text]!r} and {value!r}, which are written the same",
                param="dtype",
            )
        of_text[text] = value

    def read(text: str) -> Any:
        if text not in of_text:
            raise ValueError(f"it is none of {list(values)}")
        return of_text[text]

    wanted = f"Literal[{', '.join(map(repr, values))}]"
    return TypedOutput(Constraint.choices(of_text), Reader(wanted, read))


def _generic_output(annotation: Any) -> TypedOutput:
    schema, read = _made_by_pydantic(annotation, _unknown_dtype(annotation))
    return TypedOutput(Constraint.json_schema(schema), Reader(str(annotation), read))


def _made_by_pydantic(
    annotation: Any, refusal: UnsupportedFeature
) -> tuple[Schema, Callable[[str], Any]]:
    """Its schema, and what reads JSON text as a value of it. Raises `refusal` if it has none."""
    from pydantic import PydanticSchemaGenerationError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        return _close_objects(adapter.json_schema()), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise refusal from error


def _unknown_dtype(dtype: object) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"dtype={dtype!r}",
        "it is int, float, bool, str, Literal[...], list[...] or another type with arguments; "
        "use json_schema= for models and schemas",
        param="dtype",
    )


def _read_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("it is neither True nor False")
    return text == "True"


def _read_str(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError("it is not a string")
    return value


_BREAKS = (" ", "\n")
_DTYPES = {
    "int": TypedOutput(
        Constraint.regex(r"-?(0|[1-9][0-9]*)[ \n]*"), Reader("int", int), extra_stop=_BREAKS
    ),
    "float": TypedOutput(
        Constraint.regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?[ \n]*"),
        Reader("float", float),
        extra_stop=_BREAKS,
    ),
    "bool": TypedOutput(Constraint.regex("True|False"), Reader("bool", _read_bool)),
    "str": TypedOutput(Constraint.json_schema({"type": "string"}), Reader("str", _read_str)),
}


class _Types:
    """Schema and builder of a type, both by one walk over its annotations."""

    def __init__(self) -> None:
        self._open: list[object] = []  # the classes we are inside of

    def of(self, annotation: Any, where: str) -> tuple[Schema, Build]:
        if annotation is None or annotation is type(None):
            return {"type": "null"}, _exactly(type(None), "null")
        if annotation is Any:
            return {}, lambda value: value
        if annotation in _SCALARS:
            return _SCALARS[annotation]
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is typing.Annotated:
            if any(map(_is_of_pydantic, arguments[1:])):
                return _by_pydantic(annotation, where)
            return self.of(arguments[0], where)
        if origin is Literal:
            return self._literal(arguments, where)
        if origin in (Union, types.UnionType):
            return self._union(arguments, where)
        if annotation is list or origin in (list, Sequence):
            return self._list(arguments or (Any,), list, where)
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return self._list(arguments[:1], tuple, where)
        if annotation is dict or origin in (dict, Mapping):
            return self._dict(arguments or (str, Any), where)
        if isinstance(annotation, type):
            return self._class(annotation, where)
        raise _unsupported(annotation, where)

    def _class(self, cls: type, where: str) -> tuple[Schema, Build]:
        if issubclass(cls, enum.Enum):
            values, check = self._literal(tuple(member.value for member in cls), where)
            return values, lambda value: cls(check(value))
        if cls in self._open:
            raise UnsupportedFeature(
                f"the recursive type {cls.__name__}",
                f"{where} contains itself; give a JSON schema with $ref, or a pydantic model",
                param="json_schema",
            )
        if not (dataclasses.is_dataclass(cls) or _is_typed_dict(cls)):
            raise _unsupported(cls, where)
        if hasattr(cls, "__pydantic_validator__"):  # one of its dataclasses
            return _by_pydantic(cls, where)
        self._open.append(cls)
        fields = _typed_dict_fields(cls) if _is_typed_dict(cls) else _dataclass_fields(cls)
        built = {
            name: self.of(annotation, f"{where}.{name}") for name, (annotation, _) in fields.items()
        }
        self._open.pop()
        required = [name for name, (_, is_required) in fields.items() if is_required]
        schema: Schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in built.items()},
            "required": required,
            "additionalProperties": False,
        }

        def build(value: Any) -> Any:
            if not isinstance(value, dict):
                raise ValueError(f"{where} is not an object")
            missing = [name for name in required if name not in value]
            unknown = [name for name in value if name not in built]
            if missing or unknown:
                raise ValueError(f"{where} lacks {missing}, does not know {unknown}")
            return cls(**{name: built[name][1](part) for name, part in value.items()})

        return schema, build

    def _literal(self, values: tuple[Any, ...], where: str) -> tuple[Schema, Build]:
        for value in values:
            if not isinstance(value, (str, int, bool, type(None))):
                raise _unsupported(value, where)

        def build(value: Any) -> Any:
            value = _integral(value)
            for allowed in values:
                if type(value) is type(allowed) and value == allowed:
                    return allowed
            raise ValueError(f"{value!r} is none of {list(values)}")

        return {"enum": list(values)}, build

    def _union(self, arms: tuple[Any, ...], where: str) -> tuple[Schema, Build]:
        built = [self.of(arm, where) for arm in arms]

        def build(value: Any) -> Any:
            for _, build_arm in built:
                try:
                    return build_arm(value)
                except ValueError:
                    continue
            raise ValueError(f"{where}: {value!r} fits none of its types")

        return {"anyOf": [schema for schema, _ in built]}, build

    def _list(
        self, items: tuple[Any, ...], make: type[list[Any] | tuple[Any, ...]], where: str
    ) -> tuple[Schema, Build]:
        schema, build_item = self.of(items[0], f"{where}[]")

        def build(value: Any) -> Any:
            if not isinstance(value, list):
                raise ValueError(f"{where} is not an array")
            return make(build_item(item) for item in value)

        return {"type": "array", "items": schema}, build

    def _dict(self, arguments: tuple[Any, ...], where: str) -> tuple[Schema, Build]:
        if arguments[0] is not str:
            raise _unsupported("dict with keys other than str", where)
        schema, build_value = self.of(arguments[1], f"{where}{{}}")

        def build(value: Any) -> Any:
            if not isinstance(value, dict):
                raise ValueError(f"{where} is not an object")
            return {key: build_value(part) for key, part in value.items()}

        return {"type": "object", "additionalProperties": schema}, build


def _exactly(wanted: type, name: str) -> Build:
    def build(value: Any) -> Any:
        if type(value) is not wanted:
            raise ValueError(f"{value!r} is not of type {name}")
        return value

    return build


def _by_pydantic(annotation: Any, where: str) -> tuple[Schema, Build]:
    """What pydantic makes of a type that says in its terms what is allowed."""
    refusal = _unsupported(annotation, where)
    schema, read = _made_by_pydantic(annotation, refusal)
    if "$defs" in schema:  # its references begin at the root, where other things are
        raise refusal
    return schema, lambda value: read(json.dumps(value))


def _is_of_pydantic(mark: object) -> bool:
    """Whether something beside a type, in Annotated, may say more of what is allowed."""
    module = (mark if isinstance(mark, type) else type(mark)).__module__
    return module.partition(".")[0] in ("annotated_types", "pydantic", "pydantic_core")


def _integral(value: Any) -> Any:
    """JSON has one kind of number: ``1.0`` and ``1e3`` are integers, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _build_int(value: Any) -> Any:
    return _exactly(int, "integer")(_integral(value))


def _build_float(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not of type number")
    return float(value)


_SCALARS: dict[Any, tuple[Schema, Build]] = {
    str: ({"type": "string"}, _exactly(str, "string")),
    int: ({"type": "integer"}, _build_int),
    float: ({"type": "number"}, _build_float),
    bool: ({"type": "boolean"}, _exactly(bool, "boolean")),
}


def _dataclass_fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Each field that the constructor takes: its annotation, and whether it must be there."""
    hints = _hints(cls)
    missing = dataclasses.MISSING
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    for name, parameter in inspect.signature(cls).parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_needed and name not in names:
            raise UnsupportedFeature(
                f"the parameter {name} of {cls.__name__}",
                "its constructor needs it, and it is no field",
                param="json_schema",
            )
    return {
        field.name: (
            hints[field.name],
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(cls)
        if field.init
    }


def _typed_dict_fields(cls: type) -> dict[str, tuple[Any, bool]]:
    required: frozenset[str] = cls.__required_keys__  # type: ignore[attr-defined]
    fields = {}
    for name, annotation in _hints(cls).items():
        # With postponed annotations the class itself cannot know about Required and NotRequired.
        mark = getattr(get_origin(annotation), "_name", None)
        if mark in ("Required", "NotRequired"):
            fields[name] = (get_args(annotation)[0], mark == "Required")
        else:
            fields[name] = (annotation, name in required)
    return fields


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise InvalidRequest(
            f"the annotations of {cls.__name__} cannot be resolved: {error}; "
            "define the types they name at module level",
            param="json_schema",
        ) from error


def _unsupported(annotation: object, where: str) -> UnsupportedFeature:
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return UnsupportedFeature(
        f"the type {shown} of {where}",
        "use str, int, float, bool, None, list, dict with str keys, Literal, Enum, Optional, "
        "a dataclass or a TypedDict",
        param="json_schema",
    )


def _is_typed_dict(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, dict) and hasattr(cls, "__required_keys__")


def _is_pydantic(cls: object) -> bool:
    return isinstance(cls, type) and callable(getattr(cls, "model_json_schema", None))


_MAX_INTEGER = 2**53 - 1
_MAPS_OF_SCHEMAS = ("properties", "$defs", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")


def _close_objects(schema: Any) -> Any:
    """The schema with no other properties than the declared ones, except where it speaks of them,
    and with integers no greater than pydantic reads in every spelling (``1.0e3`` is one).

    What it allows is a subset of what the model accepts.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _MAPS_OF_SCHEMAS:
        if key in closed:
            closed[key] = {name: _close_objects(part) for name, part in closed[key].items()}
    for key in _LISTS_OF_SCHEMAS:
        if key in closed:
            closed[key] = [_close_objects(part) for part in closed[key]]
    for key in ("items", "additionalProperties"):
        if key in closed:
            closed[key] = _close_objects(closed[key])
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    if closed.get("type") == "integer":
        if "exclusiveMinimum" not in closed:
            closed.setdefault("minimum", -_MAX_INTEGER)
        if "exclusiveMaximum" not in closed:
            closed.setdefault("maximum", _MAX_INTEGER)
    return closed
