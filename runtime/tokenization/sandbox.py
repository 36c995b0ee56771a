"""Jinja for chat templates that nobody vetted: no way out of the sandbox, bounded time and size."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# What templates use. Left out are those that make much from little (center, batch, slice, format,
# wordwrap, urlize), and those that only make sense for HTML.
_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max"),
    *("min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr"),
    *("sort", "string", "sum", "title", "trim", "unique", "upper", "wordcount"),
)
_GLOBALS = frozenset({"range", "dict", "namespace"})
_MAX_INTEGER_ARGUMENT = 10_000  # a width, a count: real templates stay far below
_MAX_BITS = 1_000  # of an integer that arithmetic makes
_LONG_WIDTH = re.compile(r"\*|\d{4}")  # in a %-format


class TemplateRefusal(TemplateError):
    """The template called raise_exception: its own words on why it does not render this."""


class TemplateTooCostly(TemplateError):
    """The template passed a limit of time or size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may cost. Real templates take milliseconds and a few times their output.

    `seconds` of wall clock, looked at in every turn of a loop and every call; `steps` turns and
    calls; `characters` over all strings and lists that the template makes on the way.
    """

    seconds: float = 5.0
    steps: int = 1_000_000
    characters: int = 64_000_000


class _Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: RenderLimits, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + limits.seconds
        self._steps = limits.steps
        self._characters = limits.characters

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateTooCostly("the chat template takes too many steps")
        if self._clock() > self._deadline:
            raise TemplateTooCostly("the chat template takes too long")

    def spend(self, num_characters: int) -> None:
        self._characters -= num_characters
        if self._characters < 0:
            raise TemplateTooCostly("the chat template makes too much text")


_budget: ContextVar[_Budget | None] = ContextVar("_budget", default=None)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment in which chat templates are compiled and rendered.

    Blocks are trimmed as chat templates expect (`trim_blocks`, `lstrip_blocks`); `break` and
    `continue` work; `raise_exception`, `strftime_now` and `tojson` are there.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self,
        limits: RenderLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=_charged,
            optimized=False,
            cache_size=0,
        )
        self._limits = limits
        self._clock = clock
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.filters = {name: _bounded(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = _bounded("tojson", _to_json)
        self.filters["bounded"] = _charged

    def compile_template(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """The template as a function of its variables, compiled once.

        It raises jinja2's TemplateError, and whatever a template can provoke in Python
        (TypeError, RecursionError and so on).
        """
        template = self.from_string(source)

        def render(variables: Mapping[str, Any]) -> str:
            token = _budget.set(_Budget(self._limits, self._clock))
            try:
                return template.render(variables)
            finally:
                _budget.reset(token)

        return render

    # What follows is called by compiled templates.

    def step(self, num_static: int) -> str:
        """Charge a turn of a loop, or a call of a macro, that writes `num_static` characters."""
        budget = _budget.get()
        if budget is not None:
            budget.step()
            budget.spend(num_static)
        return ""

    def concatenate(self, *parts: object) -> str:
        """The `~` operator, charged before the result is made."""
        texts = [str(part) for part in parts]
        _spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, with the size of the result looked at first."""
        if operator == "+":
            _spend(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str) and _LONG_WIDTH.search(left):
            raise SecurityError("a %-format with such a width is not allowed in a chat template")
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and not (
            isinstance(left, (int, float))
            and isinstance(right, (int, float))
            and int(left).bit_length() * abs(right) <= _MAX_BITS
        ):
            raise SecurityError("a power of this size is not allowed in a chat template")
        return _charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call in a template, with its arguments looked at first and its result charged."""
        budget = _budget.get()
        if budget is not None:
            budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float, list, tuple, dict)):
            _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuses str.format, which jinja2 would wrap: its widths make gigabytes of a few words."""
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(
            getattr(value, "__self__", None), str
        ):
            raise SecurityError("str.format is not allowed in a chat template")
        return super().wrap_str_format(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Metering().visit(template)
        template.set_environment(self)
        return template


class _Metering(NodeTransformer):
    """Puts a `step` into every loop and macro, and sends what makes text through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self._meter(node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self._meter(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("concatenate", node.nodes, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def _meter(self, node: nodes.For | nodes.Macro) -> None:
        num_static = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _environment_call("step", [nodes.Const(num_static)], node.lineno)
        node.body.insert(0, nodes.Output([step], lineno=node.lineno))


def _environment_call(name: str, arguments: list[Any], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model wrote, for training; the text is as without it."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _size(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


def _spend(num_characters: int) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.spend(num_characters)


def _charged(value: Any) -> Any:
    """The value, its size charged to the budget."""
    _spend(_size(value))
    return value


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise SecurityError("an integer of this size is not allowed in a chat template")
        return
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
            _spend(len(sequence) * max(count, 0))


def _check_integers(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    for argument in (*arguments, *named.values()):
        if isinstance(argument, (int, float)) and abs(argument) > _MAX_INTEGER_ARGUMENT:
            raise SecurityError(
                f"{name} with an argument of {argument} is not allowed in a chat template"
            )


def _check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would make very much text, before it does."""
    if name in ("format", "format_map"):
        raise SecurityError("str.format is not allowed in a chat template")
    if name != "get":
        _check_integers(name, args, kwargs)
    if name == "replace" and len(args) >= 2 and isinstance(owner, str):
        _check_replacement(owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _spend(sum(_size(part) + len(owner) for part in args[0]))
    elif name in ("expandtabs", "translate") and isinstance(owner, str):
        raise SecurityError(f"str.{name} is not allowed in a chat template")


def _check_replacement(text: str, old: object, new: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _spend(text.count(old) * len(new) + len(text))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its arguments looked at first and its result charged."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[num_passed], args[num_passed + 1 :]
        budget = _budget.get()
        if budget is not None:
            budget.step()
        if name not in ("d", "default"):
            _check_integers(f"the filter {name}", arguments, kwargs)
        if name == "replace" and len(arguments) >= 2:
            _check_replacement(str(value), arguments[0], arguments[1])
        elif name == "join" and isinstance(value, (list, tuple)):
            _spend(
                sum(map(_size, value)) + len(value) * len(str(arguments[0] if arguments else ""))
            )
        elif name == "indent" and isinstance(value, str):
            width = arguments[0] if arguments else kwargs.get("width", 4)
            _spend(value.count("\n") * (width if isinstance(width, int) else _size(width)))
        return _charged(function(*args, **kwargs))

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: not escaped for HTML, unlike jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))
