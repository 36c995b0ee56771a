"""What is asked of an engine and what it answers. Plain data; standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, Protocol, TypedDict, get_args, runtime_checkable

from palmette.errors import InvalidRequest, PalmetteError


class FinishReason(str, Enum):
    """Why a generation ended. The values are those of the OpenAI API where it has one."""

    STOP = "stop"  # a stop string, a stop token, the end of a constraint, or end-of-sequence
    LENGTH = "length"  # max_tokens, or the end of the model's context
    ABORT = "abort"  # by the caller, or because the caller went away
    ERROR = "error"  # see the event's `error`


ConstraintKind = Literal["regex", "json_schema", "choices", "grammar", "structural_tag"]
RegexSyntax = Literal["ecma", "python"]
GrammarSyntax = Literal["gbnf", "lark"]
WhitespaceName = Literal["compact", "flexible"]
OrderName = Literal["declared", "any"]
UndeclaredName = Literal["allowed", "forbidden"]
GrammarBackend = Literal["palmette", "outlines-core", "llguidance", "xgrammar"]
JumpMode = Literal["token", "canonical"]

# What each option may be, the default first; and the kinds of constraint that have it.
_CONSTRAINT_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[ConstraintKind, ...]]] = {
    "whitespace": (get_args(WhitespaceName), ("json_schema", "structural_tag")),
    "order": (get_args(OrderName), ("json_schema", "structural_tag")),
    "undeclared": (get_args(UndeclaredName), ("json_schema", "structural_tag")),
}
_MAX_STOP_PATTERNS = 16
_MAX_HEALED = 4096  # characters; a token has a few
_SYNTAXES = {"regex": get_args(RegexSyntax), "grammar": get_args(GrammarSyntax)}
_GRAMMAR_BACKENDS = get_args(GrammarBackend)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the generated text must match, in whole. Hashable: equal constraints share a compile.

    `syntax` is how a regex ("ecma", as JSON Schema has it, or "python") or a grammar ("gbnf" or
    "lark") is written; the first is the default, which is kept as None. A JSON text is "compact" or
    has "flexible" whitespace, and the properties of its objects come in the order that the schema
    declares or in any; "forbidden" keeps `undeclared` ones out of objects for which the schema
    lists some and says nothing of others. A structural tag takes these for the schemas in it.
    `backend` is who enforces it: Palmette itself, or another library.

    Raises InvalidRequest for an option that is unknown, or that the kind does not have.
    """

    kind: ConstraintKind
    # The pattern; the schema or the structural tag as JSON text, keys in the order given; a JSON
    # array of strings; the grammar.
    source: str
    syntax: str | None = None
    whitespace: WhitespaceName = "compact"
    order: OrderName = "declared"
    undeclared: UndeclaredName = "allowed"
    backend: GrammarBackend = "palmette"

    def __post_init__(self) -> None:
        known = _SYNTAXES.get(self.kind, ())
        if self.syntax is not None and self.syntax not in known:
            raise InvalidRequest(
                f"syntax of a {self.kind} is one of {', '.join(known)}, got {self.syntax!r}"
                if known
                else f"a {self.kind} has no syntax to choose, got {self.syntax!r}",
                param="syntax",
            )
        if self.syntax in known[:1]:  # so that it equals a constraint that does not say so
            object.__setattr__(self, "syntax", None)
        for name, (values, kinds) in _CONSTRAINT_OPTIONS.items():
            value = getattr(self, name)
            if value not in values:
                raise InvalidRequest(
                    f"{name} is one of {', '.join(values)}, got {value!r}", param=name
                )
            if value != values[0] and self.kind not in kinds:
                raise InvalidRequest(
                    f"{name} is an option of {' and '.join(kinds)}, not of {self.kind}", param=name
                )
        if self.backend not in _GRAMMAR_BACKENDS:
            raise InvalidRequest(
                f"backend is one of {', '.join(_GRAMMAR_BACKENDS)}, got {self.backend!r}",
                param="backend",
            )

    @classmethod
    def regex(
        cls, pattern: str, *, syntax: RegexSyntax = "ecma", backend: GrammarBackend = "palmette"
    ) -> Constraint:
        """The whole text matches `pattern`."""
        return cls("regex", _text("regex", pattern), syntax, backend=backend)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace: WhitespaceName = "compact",
        order: OrderName = "declared",
        undeclared: UndeclaredName = "allowed",
        backend: GrammarBackend = "palmette",
    ) -> Constraint:
        """The text is one JSON document valid under `schema` (a dict, a bool, or JSON text)."""
        source = _json_text("JSON schema", "json_schema", schema)
        return cls("json_schema", source, None, whitespace, order, undeclared, backend)

    @classmethod
    def choices(cls, options: Iterable[str], *, backend: GrammarBackend = "palmette") -> Constraint:
        """The text is one of `options`, taken literally."""
        listed = list(options)
        for option in listed:
            if not isinstance(option, str):
                raise TypeError(f"choices must be strings, got {type(option).__name__}")
        if not listed:
            raise InvalidRequest("choices must not be empty", param="choices")
        return cls("choices", json.dumps(listed, ensure_ascii=False), backend=backend)

    @classmethod
    def grammar(
        cls, source: str, *, syntax: GrammarSyntax = "gbnf", backend: GrammarBackend = "palmette"
    ) -> Constraint:
        """The whole text is derived from the first rule: `root` in GBNF, `start` in Lark's."""
        return cls("grammar", _text("grammar", source), syntax, backend=backend)

    @classmethod
    def structural_tag(
        cls,
        tag: Mapping[str, Any] | str,
        *,
        whitespace: WhitespaceName = "compact",
        order: OrderName = "declared",
        undeclared: UndeclaredName = "allowed",
        backend: GrammarBackend = "palmette",
    ) -> Constraint:
        """Free text, and between a tag's begin and end what the tag says (a dict, or JSON text)."""
        source = _json_text("structural tag", "structural_tag", tag)
        return cls("structural_tag", source, None, whitespace, order, undeclared, backend)

    @property
    def options(self) -> list[str]:
        """The options of a `choices` constraint."""
        options: list[str] = json.loads(self.source)
        return options


def _text(name: str, source: str) -> str:
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a string, got {type(source).__name__}")
    return source


def _json_text(what: str, param: str, value: Mapping[str, Any] | bool | str) -> str:
    """`value` as JSON text; a string is JSON text already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {what} is not JSON: {error}", param=param) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is picked and when to stop. A temperature of 0 is greedy.

    `top_p` and `min_p` are measured on the temperature-scaled full distribution, `top_k` on its
    order; the result is the intersection, renormalised. `top_k` of 0 or -1 is off. Repetition
    penalty counts prompt and output, frequency and presence penalty the output only.
    `stop` strings, matches of `stop_regex` and stop tokens are not part of the text. Before
    `min_tokens` no stop token can be drawn; a stop string, a match and the end of a constraint end
    the text all the same. A pattern of `stop_regex` is in the syntax of Python's `re`; the text
    ends at the first character at which some part of it is a match. With
    `ignore_eos` the model's own stop tokens are never drawn. `seed=None` draws a fresh seed.
    `logprobs=n` reports the log-probability of every generated token and of the `n` likeliest ones,
    as log-softmax of the model's own logits, before temperature, penalties and masks.

    `jump_forward` is how a constrained text is put into tokens; None is as the engine is set up.
    "token" keeps the tokens that were drawn, and appends a token that is the only legal one without
    drawing it. With "canonical" the ids are those that the tokenizer itself has for the text: what
    the constraint forces is appended so, and drawn tokens that the tokenizer would not have chosen
    are replaced. Without a constraint it changes nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    jump_forward: JumpMode | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, None)
        _check_range("top_p", self.top_p, 0, 1, low_open=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("repetition_penalty", self.repetition_penalty, 0, None, low_open=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 100)
        for name in ("stop", "stop_regex"):
            texts = getattr(self, name)
            if isinstance(texts, str):
                raise InvalidRequest(f"{name} must be a tuple of strings", param=name)
            if not all(isinstance(text, str) and text for text in texts):
                raise InvalidRequest(f"{name} strings must be non-empty strings", param=name)
        if len(self.stop_regex) > _MAX_STOP_PATTERNS:  # each is followed on its own
            raise InvalidRequest(
                f"stop_regex takes at most {_MAX_STOP_PATTERNS} patterns, got "
                f"{len(self.stop_regex)}: join some with |",
                param="stop_regex",
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias", token_id, 0, None)
            _check_range("logit_bias", bias, -100, 100)
        if self.jump_forward not in (None, "token", "canonical"):
            raise InvalidRequest(
                f"jump_forward must be 'token' or 'canonical', got {self.jump_forward!r}",
                param="jump_forward",
            )


def _check_range(
    name: str, value: float, low: float, high: float | None, *, low_open: bool = False
) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > low if low_open else value >= low)
    if not ok or (high is not None and value > high):
        bound = f"above {low}" if low_open else f"at least {low}"
        bound += "" if high is None else f" and at most {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {value!r}", param=name)


def _check_int(name: str, value: int, low: int, high: int | None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not ok or (high is not None and value > high):
        bound = f"at least {low}" + ("" if high is None else f" and at most {high}")
        raise InvalidRequest(f"{name} must be an integer of {bound}, got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a program knows of its own future: advice to the scheduler, and no promise.

    Behind what was asked so far, all its branches together will still append about
    `constant_tokens` of constants and at most `generated_tokens` of generations. A program that
    cannot know more yet, since it waits for a value, says what it knows. `program_id` is one for
    each run. Of two outlooks of a program the one with the greater `version` is the newer one: a
    request may wait for its constraint to be compiled while the program announces more.
    """

    program_id: str
    version: int = 0
    constant_tokens: int = 0
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("version", "constant_tokens", "generated_tokens"):
            _check_int(name, getattr(self, name), 0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Continue `token_ids`.

    `path` is the place in the program's fork tree; random numbers are keyed by (seed, path,
    position), so that branches with one seed differ and a batch changes nothing. Requests of
    different `salt` never share cached prefixes.

    `outlook` says that the request is one of a program, and what comes behind it. With `goes_on`
    the branch at `path`, or one forked from it, may ask again: what it has computed is kept at hand
    until then, or until the program ends. With `explain`, the last event says which tokens of the
    prompt were cached and why the others were not.

    `healed` is the end of the prompt's text, taken back so that a token may reach from it into the
    output (token healing): `token_ids` end before it, the output's tokens begin with it, and its
    text is no part of the output's. A constraint and stop strings are for what follows. Only for a
    backend that is a `Heals`.

    With `trace_top` the events tell the log-probability of each token, and so many likeliest ones,
    as far as that comes without a further pass: of a token that was not drawn it is NaN. It changes
    nothing else, and counts for nothing where `sampling` asks for log-probabilities.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    path: tuple[int, ...] = ()
    salt: str = ""
    outlook: Outlook | None = None
    goes_on: bool = False
    explain: bool = False
    healed: str = ""
    trace_top: int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidRequest("the prompt is empty, it needs at least one token", param="prompt")
        if len(self.healed) > _MAX_HEALED:
            raise InvalidRequest(
                f"healed has {len(self.healed)} characters, it may have {_MAX_HEALED} at most",
                param="healed",
            )
        if self.trace_top is not None:
            _check_int("trace_top", self.trace_top, 0, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """How likely is each continuation of `token_ids`? Shared beginnings are computed once.

    With `num_top` the likeliest tokens in the place of each of theirs are wanted too, so many of
    them, 100 at most; these are not kept, so that tokens that were scored before are computed
    again. `path`, `outlook`, `goes_on` and `explain` as in `Request`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    path: tuple[int, ...] = ()
    salt: str = ""
    outlook: Outlook | None = None
    goes_on: bool = False
    explain: bool = False
    num_top: int = 0

    def __post_init__(self) -> None:
        _check_int("num_top", self.num_top, 0, 100)
        if not self.token_ids:
            raise InvalidRequest("the prompt is empty, it needs at least one token", param="prompt")
        if not self.continuations or not all(self.continuations):
            raise InvalidRequest("every continuation needs at least one token", param="choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request.

    prompt_tokens == cached_tokens + prefilled_tokens and completion_tokens == decoded_tokens +
    forced_tokens + shared_tokens; a stop token that ended the generation counts as decoded. The
    tokens that are shared were decoded or forced for an equal request of the same batch, and count
    there; of such a request all of the prompt counts as cached. Tokens computed again
    after a preemption are in `recomputed_tokens` only. `saved_passes` is how many more forward
    passes there would have been if each token had been drawn in one of its own: tokens that were
    forced, and those that were guessed and then drawn. `queued_seconds` until the first admission,
    `first_token_seconds` until the first token, `total_seconds` until the end, from submission.
    `cost` is what the tokens cost, where a backend was told prices.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    decoded_tokens: int = 0
    forced_tokens: int = 0
    shared_tokens: int = 0
    saved_passes: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    cost: float | None = None

    def plus(self, other: Usage) -> Usage:
        """Both together; where only one of them has a cost, that is the cost."""
        pairs = {
            each.name: (getattr(self, each.name), getattr(other, each.name))
            for each in fields(self)
        }
        return Usage(
            **{
                name: a + b if a is not None and b is not None else b if a is None else a
                for name, (a, b) in pairs.items()
            }
        )


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, and the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class PromptStretch:
    """Tokens [start, end) of a prompt: "cached", or the reason why they were computed.

    Reasons: "never seen", "evicted", "diverged", "other namespace", "needed for its logits", "the
    prefix cache is off". `detail` says more where there is more to say.
    """

    start: int
    end: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        text = f"tokens {self.start} to {self.end - 1}: {self.reason}"
        return f"{text} ({self.detail})" if self.detail else text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """News of one request. The last event has a `finish_reason` and `usage`.

    The joined `text` of a request's events is its text, the joined `token_ids` are its ids, and
    they agree (the ids begin with what the request has as `healed`): text that may still turn out
    to be the start of a stop string, or half a character, is held back together with its tokens.
    `logprobs` has one entry for each of `token_ids` if asked for. Where a stop string cuts a token
    in two, the part that stays is encoded again; such ids have a log-probability of NaN.
    `stop_reason` is the stop string or stop token that ended it, and `stop_logprob` the log-
    probability of such a token, which is none of `token_ids`. `prompt` explains the prompt, on the
    last event and if asked for. `forced` says of each of `token_ids` whether a constraint forced
    it; it is empty if none of them was.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stop_logprob: TokenLogprob | None = None
    usage: Usage | None = None
    error: PalmetteError | None = None
    prompt: tuple[PromptStretch, ...] = ()
    forced: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """`logprobs[i][j]` is log P(continuations[i][j] | token_ids + continuations[i][:j]).

    `top[i][j]` are the likeliest tokens there; `top` is empty unless `num_top` asks for them.
    `prompt` explains the prompt, if asked for.
    """

    request_id: str
    logprobs: tuple[tuple[float, ...], ...]
    usage: Usage
    top: tuple[tuple[TopLogprobs, ...], ...] = ()
    prompt: tuple[PromptStretch, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text on its way to becoming tokens.

    In a `special` piece, control tokens spelled out in the text (such as ``<|im_end|>``) become
    those tokens. In any other they stay plain text, so that what a user typed cannot end a turn.
    """

    text: str
    special: bool = False


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that stand for something."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What a raw prompt begins with: the begin-of-sequence token, if the model wants one."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation for this model."""
        ...

    def encode(self, text: str | Sequence[Piece]) -> list[int]:
        """Ids of the joined text, exactly as written: nothing is put before, between or after.

        A plain string is one piece that is not special.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included; broken bytes become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for control tokens."""
        ...


class ChatTemplate(Protocol):
    """A model's own chat template, as a whole and by role segment."""

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        """The whole conversation. Message contents are never special."""
        ...

    def begin(self, history: Sequence[Message], role: str) -> list[Piece]:
        """What stands between the end of `history` and the content of a new message of `role`.

        For the assistant that is the generation prompt.
        """
        ...

    def end(self, history: Sequence[Message]) -> list[Piece]:
        """What closes the last message of `history`, after its content."""
        ...


@runtime_checkable
class TokenBackend(Protocol):
    """An engine that takes token ids, as the language and the server see it."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises UnsupportedFeature if the model has none."""
        ...

    @property
    def default_sampling(self) -> SamplingParams:
        """The model's own generation defaults."""
        ...

    @property
    def max_context(self) -> int:
        """Prompt and output tokens together."""
        ...

    def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Submit when iteration starts; closing the iterator early aborts the request.

        A request that cannot be served raises from the first `__anext__`; a failure later is an
        event with an `error`.
        """
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult: ...

    def flush_cache(self) -> None:
        """Drop every cached prefix that no running request holds."""
        ...

    def close(self) -> None:
        """Stop; what still runs ends with EngineStopped. Safe to call twice."""
        ...


@runtime_checkable
class Repeatable(Protocol):
    """A backend that says whether it answers alike what is asked alike."""

    @property
    def is_repeatable(self) -> bool:
        """Whether greedy requests that differ in nothing but id, path, seed and outlook get the
        same tokens, and such score requests the same numbers, whatever else runs.
        """
        ...


@runtime_checkable
class Heals(Protocol):
    """A backend that honours `Request.healed`: its tokens are the model's own."""

    @property
    def heals(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class ProgramListener(Protocol):
    """A backend that wants to hear of whole programs, and not of their requests alone.

    All of it is advice. The methods return at once, may be called from any thread, and raise
    nothing: an engine that was closed has nothing left to schedule.
    """

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """What a program knows by now; the branches at the paths in `ended` ask no more."""
        ...

    def end_program(self, program_id: str) -> None:
        """The program asks no more."""
        ...
