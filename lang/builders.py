"""The functions that build what a program appends to its state.

Arguments are checked here, in the caller's thread, before anything runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.choices import ChoiceRule, ChoicesMethod, method_name
from palmette.lang.nodes import (
    Concatenation,
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    Special,
    as_expr,
    check_encodable,
)
from palmette.lang.options import Boundary, sampling_overrides
from palmette.lang.schemas import TypedOutput, output_of_dtype, output_of_schema
from palmette.protocol import (
    Constraint,
    GrammarBackend,
    GrammarSyntax,
    JumpMode,
    OrderName,
    RegexSyntax,
    UndeclaredName,
    WhitespaceName,
)

token_length_normalized = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
greedy_token_selection = ChoicesMethod.GREEDY_TOKEN_SELECTION
unconditional_likelihood_normalized = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: object = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | ChoiceRule | str | None = None,
    regex: str | None = None,
    json_schema: object = None,
    *,
    grammar: str | None = None,
    ebnf: str | None = None,
    structural_tag: Mapping[str, Any] | str | None = None,
    regex_syntax: RegexSyntax | None = None,
    grammar_syntax: GrammarSyntax | None = None,
    whitespace: WhitespaceName | None = None,
    property_order: OrderName | None = None,
    undeclared_properties: UndeclaredName | None = None,
    grammar_backend: GrammarBackend | None = None,
    jump_forward: JumpMode | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    append: bool = False,
    max_new_tokens: int | None = None,
    boundary: Boundary | None = None,
) -> Expr:
    """The model goes on; what it writes becomes variable `name`, if one is given.

    What is not given here comes from the options of the run, then from the model's own defaults;
    `max_tokens` is 128 where neither says. A generation ends at `max_tokens`, a string of `stop`, a
    match of `stop_regex` (in the syntax of Python's `re`) or a token of `stop_token_ids`, which are
    no part of the text, or at end-of-sequence.

    With `n` above 1 the variable is a list of so many texts, all drawn for the same prompt; the
    first of them goes into the text. `return_logprob` gives the log-probability of each token,
    `top_logprobs_num` the likeliest tokens at its place, `logprob_start_len` the log-probabilities
    of the prompt's tokens from that position on, `return_text_in_logprobs` the text of each: see
    `State.meta`.

    `regex`, `json_schema`, `grammar`, `structural_tag` and `dtype` say what the whole text must be;
    see `output_of_schema` and `output_of_dtype` for the value that results. `ebnf` is a `grammar`
    in GBNF. `choices` makes it a `select`. `regex_syntax`, `grammar_syntax`, `whitespace`,
    `property_order` and `undeclared_properties` (of JSON), `grammar_backend` and `jump_forward` are
    options of these; see `protocol.Constraint` and `protocol.SamplingParams`. With `append`, the
    variable is a list to which the text is added. `seed` makes sampling repeatable, in every branch
    differently. With ``boundary="heal"`` the first token may begin in the constant before it, which
    it then spells with other tokens.

    Raises InvalidRequest, ValueError or TypeError for an argument that makes no sense, and
    UnsupportedFeature, naming it, for one that is not honoured.
    """
    options = {
        "max_tokens": max_tokens,
        "max_new_tokens": max_new_tokens,
        "min_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "ignore_eos": ignore_eos,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
        "seed": seed,
        "jump_forward": jump_forward,
        "boundary": boundary,
    }
    _check_name(name, append)
    typed = {
        "dtype": dtype,
        "regex": regex,
        "json_schema": json_schema,
        "choices": choices,
        "grammar": grammar,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
    }
    wanted = [argument for argument, value in typed.items() if value is not None]
    if len(wanted) > 1:
        raise InvalidRequest(f"{' and '.join(wanted)} exclude each other", param=wanted[0])
    details = {
        "regex_syntax": regex_syntax,
        "grammar_syntax": grammar_syntax,
        "whitespace": whitespace,
        "property_order": property_order,
        "undeclared_properties": undeclared_properties,
        "grammar_backend": grammar_backend,
    }
    given = {name: value for name, value in details.items() if value is not None}
    for option in given:
        if not wanted or wanted[0] not in _CONSTRAINED_BY[option]:
            raise InvalidRequest(
                f"{option} needs {' or '.join(f'{each}=' for each in _CONSTRAINED_BY[option])}",
                param=option,
            )
    if choices is not None:
        return _gen_of_choices(name, choices, choices_method, options, append)
    if choices_method is not None:
        raise InvalidRequest("choices_method needs choices", param="choices_method")
    output = _typed_output(wanted[0] if wanted else "", typed, given)
    return Gen(
        name=name,
        overrides=sampling_overrides(options),
        extra_stop=output.extra_stop if output else (),
        constraint=output.constraint if output else None,
        reader=output.reader if output else None,
        append=append,
    )


def _gen_of(dtype: type, name: str, doc: str) -> Callable[..., Expr]:
    """`gen` of a type; the options that SGLang's has by position are in its order."""

    def build(
        name: str | None = None,
        max_tokens: int | None = None,
        n: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        **options: Any,
    ) -> Expr:
        return gen(
            name,
            max_tokens,
            n=n,
            stop=stop,
            stop_token_ids=stop_token_ids,
            stop_regex=stop_regex,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            ignore_eos=ignore_eos,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs,
            dtype=dtype,
            **options,
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = doc
    return build


gen_int = _gen_of(
    int, "gen_int", "An integer, which is the variable's value. Takes the options of `gen`."
)
gen_string = _gen_of(
    str,
    "gen_string",
    "A string in double quotes; the value is what stands between them. Takes `gen`'s options.",
)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | ChoiceRule | str = ChoicesMethod.PROBABILITY,
    *,
    seed: int | None = None,
    append: bool = False,
) -> Expr:
    """One of `choices`, taken literally: the most probable one, the first of equals.

    With a `temperature` it is drawn: probabilities to the power of 1 / `temperature`, normalised.
    ``state.meta(name)["probabilities"]`` are P(option | prompt, options) and sum to 1; with one
    option the model is not asked. `choices_method` names another rule, see `ChoicesMethod`, or is
    one: a callable as `ChoicesSamplingMethod` describes it.

    Raises TypeError for an option that is not a string, ValueError where there is none, an empty
    one, or the same one twice.
    """
    _check_name(name, append)
    if choices is None:
        raise InvalidRequest("select needs choices", param="choices")
    options = _checked_choices(choices)
    method = _method(choices_method)
    overrides = sampling_overrides({"temperature": temperature, "seed": seed})
    if temperature and method is not ChoicesMethod.PROBABILITY:
        raise UnsupportedFeature(
            f"temperature with choices_method={method_name(method)!r}",
            "only the default method draws from probabilities",
            param="temperature",
        )
    return Select(
        name=name,
        choices=options,
        temperature=overrides["temperature"],
        seed=seed,
        method=method,
        append=append,
    )


def system(content: Expr | str | None = None) -> Expr:
    """A whole message of the system."""
    return _message("system", content)


def user(content: Expr | str | None = None) -> Expr:
    """A whole message of the user."""
    return _message("user", content)


def assistant(content: Expr | str | None = None) -> Expr:
    """A whole message of the assistant."""
    return _message("assistant", content)


def system_begin() -> Expr:
    """Opens a message of the system."""
    return RoleBegin("system")


def system_end() -> Expr:
    """Closes the message of the system."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Opens a message of the user."""
    return RoleBegin("user")


def user_end() -> Expr:
    """Closes the message of the user."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Opens a message of the assistant, as the model's template has it before a generation."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """Closes the message of the assistant."""
    return RoleEnd("assistant")


def special(text: str) -> Expr:
    """Text with control tokens spelled out, as in ``special("<|im_end|>")``, in a role or outside.

    Appending it raises ProgramError if the model has no such token.
    """
    if not isinstance(text, str):
        raise TypeError(f"special takes a string, got {type(text).__name__}")
    return Special(text)


def image(*_: object, **__: object) -> NoReturn:
    """Raises UnsupportedFeature: the models here read text only."""
    raise UnsupportedFeature("image", "the models here read text only", param="image")


def video(*_: object, **__: object) -> NoReturn:
    """Raises UnsupportedFeature: the models here read text only."""
    raise UnsupportedFeature("video", "the models here read text only", param="video")


def separate_reasoning(*_: object, **__: object) -> NoReturn:
    """Raises UnsupportedFeature: end a gen with stop= where the reasoning ends instead."""
    raise UnsupportedFeature(
        "separate_reasoning", "give the reasoning a gen of its own that stops at its end mark"
    )


def _message(role: str, content: Expr | str | None) -> Expr:
    parts = () if content is None else tuple(as_expr(content).flatten())
    return Concatenation((RoleBegin(role), *parts, RoleEnd(role)))


def _gen_of_choices(
    name: str | None,
    choices: Sequence[str],
    method: ChoicesMethod | ChoiceRule | str | None,
    options: dict[str, Any],
    append: bool,
) -> Expr:
    temperature, seed = options["temperature"], options["seed"]
    for option, value in options.items():
        if value is not None and option not in ("temperature", "seed"):
            raise UnsupportedFeature(
                f"{option} with choices", "a choice is scored, not generated", param=option
            )
    return select(
        name,
        choices,
        0.0 if temperature is None else temperature,
        ChoicesMethod.PROBABILITY if method is None else method,
        seed=seed,
        append=append,
    )


# Which arguments an option of constraints goes with.
_CONSTRAINED_BY = {
    "regex_syntax": ("regex",),
    "grammar_syntax": ("grammar",),
    "whitespace": ("json_schema", "structural_tag"),
    "property_order": ("json_schema", "structural_tag"),
    "undeclared_properties": ("json_schema", "structural_tag"),
    "grammar_backend": ("regex", "json_schema", "grammar", "ebnf", "structural_tag", "dtype"),
}
# What the option is called there.
_FIELDS = {
    "regex_syntax": "syntax",
    "grammar_syntax": "syntax",
    "property_order": "order",
    "undeclared_properties": "undeclared",
    "grammar_backend": "backend",
}


def _typed_output(
    wanted: str, typed: Mapping[str, Any], details: Mapping[str, Any]
) -> TypedOutput | None:
    """What is wanted by the argument of that name, if any, with the options in `details`."""
    value: Any = typed.get(wanted)
    if wanted == "dtype":
        output = output_of_dtype(value)
    elif wanted == "json_schema":
        output = output_of_schema(value)
    elif wanted == "regex":
        output = TypedOutput(Constraint.regex(value), None)
    elif wanted in ("grammar", "ebnf"):
        output = TypedOutput(Constraint.grammar(value), None)
    elif wanted == "structural_tag":
        if not isinstance(value, str | Mapping):
            raise TypeError(f"structural_tag must be a dict or JSON text, got {value!r}")
        output = TypedOutput(Constraint.structural_tag(value), None)
    else:
        return None
    fields = {_FIELDS.get(name, name): value for name, value in details.items()}
    return replace(output, constraint=replace(output.constraint, **fields)) if fields else output


def _checked_choices(choices: Sequence[str]) -> tuple[str, ...]:
    if isinstance(choices, str):
        raise TypeError("choices must be a list of strings, got one string")
    options = tuple(choices)
    for option in options:
        if not isinstance(option, str):
            raise TypeError(f"choices must be strings, got {option!r}")
    if not options:
        raise InvalidRequest("choices must not be empty", param="choices")
    if "" in options:
        raise InvalidRequest("an empty choice cannot be scored", param="choices")
    seen: set[str] = set()
    for option in options:
        if option in seen:
            raise InvalidRequest(f"choices has {option!r} twice", param="choices")
        seen.add(option)
        check_encodable(option)
    return options


def _method(method: ChoicesMethod | ChoiceRule | str) -> ChoicesMethod | ChoiceRule:
    if isinstance(method, type):
        raise TypeError(f"choices_method takes a rule, not a class of them: {method.__name__}()")
    if inspect.iscoroutinefunction(method):
        raise TypeError(f"choices_method takes a plain function, {method.__name__} is async")
    if callable(method):
        return method
    try:
        return ChoicesMethod(method)
    except ValueError:
        known = ", ".join(repr(each.value) for each in ChoicesMethod)
        raise UnsupportedFeature(
            f"choices_method={method!r}", f"it is one of {known}", param="choices_method"
        ) from None


def _check_name(name: str | None, append: bool) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if append and not name:
        raise InvalidRequest("append needs a name", param="append")
