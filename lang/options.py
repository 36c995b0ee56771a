"""The options that `gen` and `run` take, turned into fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.limits import Limits
from palmette.protocol import SamplingParams

DEFAULT_MAX_TOKENS = 128

# Where a `gen` begins: behind the tokens of the constants before it, or with their last text, so
# that a token may reach from it into what is generated (token healing).
Boundary = Literal["exact", "heal"]

_SAME_NAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
    "jump_forward",
)
_OTHERS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "return_text_in_logprobs",
    "n",
    "boundary",
)
OPTION_NAMES = frozenset((*_SAME_NAME, *_OTHERS))
# `run` and its like take what `gen` takes, and these.
RUN_OPTION_NAMES = OPTION_NAMES | {
    "explain",
    "trace",
    "timeout",
    "max_total_tokens",
    "use_thread",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is wanted of a `gen` beyond one text.

    `n` texts; the log-probabilities of its prompt's tokens from position `logprob_start_len` on,
    if that is not None; the text of each token beside its log-probability; where it begins.
    """

    n: int = 1
    logprob_start_len: int | None = None
    return_text_in_logprobs: bool = False
    boundary: Boundary = "exact"


def sampling_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` and of `Report` for the options given, and the two options for
    log-probabilities; None means not given.

    Raises InvalidRequest for a value that makes no sense, and TypeError for a name that is no
    option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in OPTION_NAMES:
            raise TypeError(f"there is no option named {name!r}")
    if "max_new_tokens" in given and "max_tokens" in given:
        raise TypeError("max_tokens and max_new_tokens are two names for one option: give one")
    overrides = {name: given[name] for name in _SAME_NAME if name in given}
    if "max_new_tokens" in given:
        overrides["max_tokens"] = given["max_new_tokens"]
    for name in ("stop", "stop_regex"):
        if name in given:
            overrides[name] = _as_strings(name, given[name])
    if "stop_token_ids" in given:
        overrides["stop_token_ids"] = tuple(given["stop_token_ids"])
    _add_logprobs(overrides, given)
    _add_report(overrides, given)
    _check(overrides)
    return overrides


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run was asked for: the defaults of its `gen` calls, whether to explain prompts and to
    record all that a trace can have, and what it may take.
    """

    defaults: Mapping[str, Any]
    explains: bool
    traces: bool
    limits: Limits

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunOptions:
        """The options given. Raises as `sampling_overrides` and `Limits` do, TypeError for
        `explain` and `trace`, and UnsupportedFeature for ``use_thread=False``.
        """
        use_thread = options.get("use_thread")
        for name in ("explain", "trace"):
            if not isinstance(options.get(name), bool | None):
                raise TypeError(f"{name} must be True or False, got {options[name]!r}")
        if use_thread not in (True, None):
            raise UnsupportedFeature(
                f"use_thread={use_thread!r}",
                "what a state is given to do is always done in the background; sync() waits for it",
                param="use_thread",
            )
        for_gen = {name: value for name, value in options.items() if name in OPTION_NAMES}
        limits = Limits(options.get("timeout"), options.get("max_total_tokens"))
        return cls(
            sampling_overrides(for_gen),
            explains=bool(options.get("explain")),
            traces=bool(options.get("trace")),
            limits=limits,
        )


def resolve_sampling(
    base: SamplingParams,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
    extra_stop: Iterable[str] = (),
) -> tuple[SamplingParams, Report]:
    """The call's own options, else the run's, else the model's; 128 tokens where none says.

    Raises InvalidRequest for options of call and run that make no sense together.
    """
    fields = {name: getattr(base, name) for name in SamplingParams.__dataclass_fields__}
    fields["max_tokens"] = DEFAULT_MAX_TOKENS
    fields.update(defaults)
    fields.update(overrides)
    fields["stop"] = tuple(dict.fromkeys((*extra_stop, *fields["stop"])))
    report = Report(**{name: fields.pop(name) for name in _REPORT_NAMES if name in fields})
    sampling = _sampling(fields)
    if sampling.logprobs is None:
        for name, is_asked in (
            ("logprob_start_len", report.logprob_start_len is not None),
            ("return_text_in_logprobs", report.return_text_in_logprobs),
        ):
            if is_asked:
                raise InvalidRequest(f"{name} needs return_logprob=True", param=name)
    if report.logprob_start_len is not None and sampling.logprobs:
        raise UnsupportedFeature(
            "logprob_start_len with top_logprobs_num",
            "of a prompt's tokens the log-probabilities are known, those of likelier ones are not",
            param="logprob_start_len",
        )
    return sampling, report


def _as_strings(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise InvalidRequest(
            f"{name} must be a string or a list of strings, got {type(value).__name__}", param=name
        )
    return tuple(value)


def _add_logprobs(overrides: dict[str, Any], given: Mapping[str, Any]) -> None:
    wanted = given.get("return_logprob")
    num_top = given.get("top_logprobs_num")
    if wanted is False and num_top:
        raise InvalidRequest("top_logprobs_num needs return_logprob=True", param="top_logprobs_num")
    if wanted is None and num_top is not None:
        wanted = True
    if wanted is not None:
        overrides["return_logprob"] = wanted
    if num_top is not None:
        overrides["top_logprobs_num"] = num_top


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    """`fields`, in which log-probabilities are asked for by two options, which call and run may
    each give one of.
    """
    wanted, num_top = fields.pop("return_logprob", None), fields.pop("top_logprobs_num", 0)
    if wanted is not None:
        fields["logprobs"] = num_top if wanted else None
    return SamplingParams(**fields)


_REPORT_NAMES = tuple(Report.__dataclass_fields__)


def _add_report(overrides: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, low in (("n", 1), ("logprob_start_len", -1)):
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidRequest(f"{name} must be at least {low}, got {value!r}", param=name)
        overrides[name] = None if value == -1 else value  # as in SGLang, -1 is nothing of a prompt
    with_text = given.get("return_text_in_logprobs")
    if not isinstance(with_text, bool | None):
        raise TypeError(f"return_text_in_logprobs must be True or False, got {with_text!r}")
    if with_text is not None:
        overrides["return_text_in_logprobs"] = with_text
    boundary = given.get("boundary")
    if boundary is not None:
        if boundary not in get_args(Boundary):
            raise InvalidRequest(
                f"boundary is one of {', '.join(get_args(Boundary))}, got {boundary!r}",
                param="boundary",
            )
        overrides["boundary"] = boundary


def _check(overrides: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a value that no combination with other options makes good."""
    fields = {name: value for name, value in overrides.items() if name not in _REPORT_NAMES}
    if isinstance(fields.get("min_tokens"), int) and "max_tokens" not in fields:
        fields["max_tokens"] = max(DEFAULT_MAX_TOKENS, fields["min_tokens"])
    _sampling(fields)
