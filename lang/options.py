"""The options that `gen` and `run` take, turned into fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.limits import Limits
from palmette.protocol import SamplingParams

DEFAULT_MAX_TOKENS = 128

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
_OTHERS = ("max_new_tokens", "stop", "stop_token_ids", "return_logprob", "top_logprobs_num")
_REFUSED = {
    "stop_regex": "use stop= with strings, or regex= to constrain the whole text",
    "logprob_start_len": "log-probabilities of a prompt are not reported; use select()",
    "return_text_in_logprobs": "decode the token ids of meta()['logprobs'] instead",
    "n": "only n=1 is generated; use fork(n) for several continuations",
}
OPTION_NAMES = frozenset((*_SAME_NAME, *_OTHERS, *_REFUSED))
# `run` and its like take what `gen` takes, and these.
_OF_RUN = frozenset(("explain", "timeout", "max_total_tokens"))
RUN_OPTION_NAMES = OPTION_NAMES | _OF_RUN


def sampling_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` for the options given; None means not given.

    Raises UnsupportedFeature, naming it, for an option that is not honoured, InvalidRequest for a
    value that makes no sense, and TypeError for a name that is no option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in OPTION_NAMES:
            raise TypeError(f"there is no option named {name!r}")
        if name in _REFUSED and not (name == "n" and value == 1):
            if name == "return_text_in_logprobs" and value is False:
                continue
            raise UnsupportedFeature(name, _REFUSED[name], param=name)
    if "max_new_tokens" in given and "max_tokens" in given:
        raise TypeError("max_tokens and max_new_tokens are two names for one option: give one")
    overrides = {name: given[name] for name in _SAME_NAME if name in given}
    if "max_new_tokens" in given:
        overrides["max_tokens"] = given["max_new_tokens"]
    if "stop" in given:
        overrides["stop"] = _as_strings(given["stop"])
    if "stop_token_ids" in given:
        overrides["stop_token_ids"] = tuple(given["stop_token_ids"])
    _add_logprobs(overrides, given)
    _check(overrides)
    return overrides


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run was asked for: the defaults of its `gen` calls, whether to explain prompts, and
    what it may take.
    """

    defaults: Mapping[str, Any]
    explains: bool
    limits: Limits

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunOptions:
        """The options given. Raises as `sampling_overrides` and `Limits` do, and TypeError for
        `explain`.
        """
        explain = options.get("explain")
        if not isinstance(explain, bool | None):
            raise TypeError(f"explain must be True or False, got {explain!r}")
        for_gen = {name: value for name, value in options.items() if name not in _OF_RUN}
        limits = Limits(options.get("timeout"), options.get("max_total_tokens"))
        return cls(sampling_overrides(for_gen), explains=bool(explain), limits=limits)


def resolve_sampling(
    base: SamplingParams,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
    extra_stop: Iterable[str] = (),
) -> SamplingParams:
    """The call's own options, else the run's, else the model's; 128 tokens where none says."""
    fields = {name: getattr(base, name) for name in SamplingParams.__dataclass_fields__}
    fields["max_tokens"] = DEFAULT_MAX_TOKENS
    fields.update(defaults)
    fields.update(overrides)
    fields["stop"] = tuple(dict.fromkeys((*extra_stop, *fields["stop"])))
    return SamplingParams(**fields)


def _as_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Iterable):
        raise InvalidRequest(
            f"stop must be a string or a list of strings, got {type(stop).__name__}", param="stop"
        )
    return tuple(stop)


def _add_logprobs(overrides: dict[str, Any], given: Mapping[str, Any]) -> None:
    wanted = given.get("return_logprob")
    num_top = given.get("top_logprobs_num")
    if wanted is False and num_top:
        raise InvalidRequest("top_logprobs_num needs return_logprob=True", param="top_logprobs_num")
    if wanted is False:
        overrides["logprobs"] = None
    elif wanted or num_top is not None:
        overrides["logprobs"] = num_top or 0


def _check(overrides: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a value that no combination with other options makes good."""
    fields = dict(overrides)
    if isinstance(fields.get("min_tokens"), int) and "max_tokens" not in fields:
        fields["max_tokens"] = max(DEFAULT_MAX_TOKENS, fields["min_tokens"])
    SamplingParams(**fields)
