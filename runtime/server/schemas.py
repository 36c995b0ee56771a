"""What the endpoints take. A field that is not here, or not honoured, is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
)

from palmette.protocol import (
    GrammarBackend,
    GrammarSyntax,
    JumpMode,
    OrderName,
    RegexSyntax,
    UndeclaredName,
    WhitespaceName,
)

T = TypeVar("T")


class _Fields(BaseModel):
    # Strict: a number is not taken from a string, nor a boolean from a number.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _refused(why: str, *, unless: tuple[Any, ...] = (), shape: Any = None) -> PlainValidator:
    """A field of the OpenAI API that is not honoured; null and `unless` ask for nothing."""

    def check(value: Any) -> None:
        if value is None or any(type(value) is type(v) and value == v for v in unless):
            return
        raise ValueError(f"is not supported: {why}")

    return PlainValidator(check, json_schema_input_type=shape or Any)


def _without_effect(*values: str) -> PlainValidator:
    """A field that changes nothing here and promises nothing if it has one of `values`."""

    def check(value: Any) -> None:
        if value is not None and value not in values:
            raise ValueError(f"must be one of {', '.join(values)}, got {value!r}")

    return PlainValidator(check, json_schema_input_type=str | None)


def _strings(value: Any) -> tuple[str, ...]:
    """A string, or a list of them."""
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise ValueError("must be a string or a list of strings")
    if not all(listed):
        raise ValueError("must not hold an empty string")
    return tuple(listed)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not _all_ids(value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


def _all_ids(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids in decimal, each with a number from -100 to 100."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"has the key {key[:100]!r}, which is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"gives token {key} the bias {bias!r}, not a number from -100 to 100")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each a string or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _all_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_id_lists(value):
            return tuple(tuple(item) for item in value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such")


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """One prompt, or a list of them, which may have but one."""

    prompts: tuple[T, ...]
    is_list: bool


def _texts(value: Any) -> Batch[str]:
    if isinstance(value, str):
        return Batch((value,), is_list=False)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return Batch(tuple(value), is_list=True)
    raise ValueError("must be a string or a list of strings")


def _id_lists(value: Any) -> Batch[tuple[int, ...]]:
    if isinstance(value, list) and value:
        if _all_ids(value):
            return Batch((tuple(value),), is_list=False)
        if _are_id_lists(value):
            return Batch(tuple(map(tuple, value)), is_list=True)
    raise ValueError("must be a list of token ids, or a list of such lists")


def _fork_path(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not _all_ids(value):
        raise ValueError("must be a list of integers, none of them below 0")
    return tuple(value)


def _options(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not value or not _are_id_lists(value):
        raise ValueError("must be a list of lists of token ids, none of them empty")
    return tuple(map(tuple, value))


def _are_id_lists(value: list[Any]) -> bool:
    return all(isinstance(item, list) and item and _all_ids(item) for item in value)


def _content(value: Any) -> str:
    """A string, or the text of a list of text parts, joined with nothing between them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"has a part without a type, at [{index}]")
        if kind != "text":
            raise ValueError(
                f"has a part of type {kind[:100]!r} at [{index}], which is not supported: "
                "the model reads text only"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"has a text part at [{index}] that is not a type and a text")
        texts.append(part["text"])
    return "".join(texts)


def _schema(value: Any) -> dict[str, Any] | bool | str:
    if not isinstance(value, (dict, bool, str)):
        raise ValueError("must be a JSON schema: an object, true or false, or one as a string")
    return value


def _structural_tag(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, (dict, str)):
        raise ValueError("must be a structural tag: an object, or one as a string")
    return value


Strings = Annotated[tuple[str, ...], PlainValidator(_strings, str | list[str] | None)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids, list[int] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_logit_bias, dict[str, float] | None)
]
Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(_prompts, str | list[str] | list[int] | list[list[int]]),
]
Content = Annotated[str, PlainValidator(_content, str | list[dict[str, str]])]
Schema = Annotated[
    dict[str, Any] | bool | str, PlainValidator(_schema, dict[str, Any] | bool | str)
]
StructuralTag = Annotated[
    dict[str, Any] | str, PlainValidator(_structural_tag, dict[str, Any] | str)
]
Choices = Annotated[list[str], Field(min_length=1)]
Salt = Annotated[str | None, Field(max_length=256)]
Texts = Annotated["Batch[str]", PlainValidator(_texts, str | list[str])]
IdLists = Annotated[
    "Batch[tuple[int, ...]]", PlainValidator(_id_lists, list[int] | list[list[int]])
]
ForkPath = Annotated[tuple[int, ...], PlainValidator(_fork_path, list[int])]
Options = Annotated[tuple[tuple[int, ...], ...], PlainValidator(_options, list[list[int]])]

_NO_TOOLS = "this server does not run tool calls"
_BACKEND = "use grammar_backend"
_WHITESPACE = "use whitespace, which is compact or flexible"


class StreamOptions(_Fields):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[
        None, _refused("chunks are sent as they are", unless=(False,), shape=bool | None)
    ] = None


class StructuredOutputs(_Fields):
    """A constraint as vLLM's clients send it: one of the first six."""

    regex: str | None = None
    choice: Choices | None = None
    json_: Schema | None = Field(default=None, alias="json")
    grammar: str | None = None
    structural_tag: StructuralTag | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[None, _refused(_WHITESPACE)] = None
    disable_fallback: bool | None = None  # without effect: there is none
    disable_additional_properties: Annotated[
        None, _refused("say so in the schema", unless=(False,), shape=bool | None)
    ] = None


class SamplingFields(_Fields):
    """How to draw, when to stop and what to match: the same for every endpoint that generates."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool | None = None
    logit_bias: LogitBias = ()
    # Constraints; at most one of them, under one of its names.
    regex: str | None = None
    choices: Choices | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    ebnf: str | None = None
    structural_tag: StructuralTag | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_json: Schema | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # Options of theirs.
    regex_syntax: RegexSyntax | None = None
    grammar_syntax: GrammarSyntax | None = None
    whitespace: WhitespaceName | None = None
    property_order: OrderName | None = None
    undeclared_properties: UndeclaredName | None = None
    grammar_backend: GrammarBackend | None = None
    jump_forward: JumpMode | None = None
    guided_decoding_backend: Annotated[None, _refused(_BACKEND)] = None
    guided_whitespace_pattern: Annotated[None, _refused(_WHITESPACE)] = None


class GenerationFields(SamplingFields):
    """What both endpoints of the OpenAI API take."""

    model: str | None = None  # None: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt = None
    user: str | None = None  # without effect


class Message(_Fields):
    """One message of a conversation; what an answer's message holds may be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Annotated[None, _without_effect("text", "message")] = None
    name: Annotated[None, _refused("no chat template shows it")] = None
    refusal: Annotated[None, _refused("no chat template shows it")] = None
    audio: Annotated[None, _refused("the model reads text only")] = None
    annotations: Annotated[None, _refused("no chat template shows them", unless=([],))] = None
    tool_calls: Annotated[None, _refused(_NO_TOOLS, unless=([],))] = None
    function_call: Annotated[None, _refused(_NO_TOOLS)] = None


class JsonSchema(_Fields):
    """A named schema. `strict` changes nothing: every schema is enforced exactly, or refused."""

    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(_Fields):
    type: Literal["text"]


class JsonObjectFormat(_Fields):
    type: Literal["json_object"]


class JsonSchemaFormat(_Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BaseModel):
    """Its other fields are those of a structural tag, see `palmette.grammar.structural_json`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class ChatRequest(GenerationFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # Without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Annotated[None, _without_effect("auto", "default")] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Annotated[None, _without_effect("in_memory")] = None
    # Known, and refused.
    tools: Annotated[None, _refused(_NO_TOOLS, unless=([],))] = None
    tool_choice: Annotated[None, _refused(_NO_TOOLS, unless=("none",))] = None
    parallel_tool_calls: Annotated[None, _refused(_NO_TOOLS)] = None
    functions: Annotated[None, _refused(_NO_TOOLS, unless=([],))] = None
    function_call: Annotated[None, _refused(_NO_TOOLS, unless=("none",))] = None
    audio: Annotated[None, _refused("the model writes text only")] = None
    modalities: Annotated[None, _refused("the model writes text only", unless=(["text"],))] = None
    prediction: Annotated[None, _refused("predicted outputs are not used")] = None
    reasoning_effort: Annotated[None, _refused("the model has no effort to set")] = None
    verbosity: Annotated[None, _refused("the model has no verbosity to set")] = None
    web_search_options: Annotated[None, _refused("this server does not search")] = None
    moderation: Annotated[None, _refused("this server does not moderate")] = None
    prompt_cache_options: Annotated[None, _refused("every prefix is cached alike")] = None


class CompletionRequest(GenerationFields):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Known, and refused.
    best_of: Annotated[
        None, _refused("every choice is returned; use n", unless=(1,), shape=int | None)
    ] = None
    suffix: Annotated[
        None, _refused("text is only continued, not filled in", unless=("",), shape=str | None)
    ] = None


class NativeSampling(SamplingFields):
    """The `sampling_params` of ``POST /generate``: SGLang's names for some fields, and all ours."""

    max_tokens: int | None = Field(
        default=None, validation_alias=AliasChoices("max_new_tokens", "max_tokens")
    )
    min_tokens: int | None = Field(
        default=None, validation_alias=AliasChoices("min_new_tokens", "min_tokens")
    )
    seed: int | None = Field(default=None, validation_alias=AliasChoices("sampling_seed", "seed"))
    spaces_between_special_tokens: bool | None = None  # without effect: a text has none of them
    # Known, and refused.
    skip_special_tokens: Annotated[
        None,
        _refused("a text has no control tokens", unless=(True,), shape=bool | None),
    ] = None
    no_stop_trim: Annotated[
        None, _refused("a stop string is no part of a text", unless=(False,), shape=bool | None)
    ] = None
    stop_regex: Annotated[None, _refused("stop takes plain strings", unless=("", []))] = None
    custom_params: Annotated[None, _refused("no code of others is run here")] = None


# So that what is wrong with one of a list is told, and not that a list is no object.
NativeSamplings = Annotated[
    Annotated[NativeSampling, Tag("object")] | Annotated[list[NativeSampling], Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "object"),
]

_TEXT_ONLY = "the model reads text only"
_NO_ADAPTERS = "the model has no adapters"


class PromptFields(_Fields):
    """A prompt of the native endpoints, as text or as token ids, and where it belongs."""

    text: Texts | None = None
    input_ids: IdLists | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: Salt = None
    path: ForkPath = ()  # the place in a program's fork tree, which keys random numbers


class GenerateRequest(PromptFields):
    """The body of ``POST /generate``."""

    sampling_params: NativeSamplings | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None  # a chunk has what is new, not all there is
    rid: str | None = None
    # Known, and refused.
    image_data: Annotated[None, _refused(_TEXT_ONLY, unless=([],))] = None
    video_data: Annotated[None, _refused(_TEXT_ONLY, unless=([],))] = None
    audio_data: Annotated[None, _refused(_TEXT_ONLY, unless=([],))] = None
    modalities: Annotated[None, _refused(_TEXT_ONLY, unless=([],))] = None
    input_embeds: Annotated[None, _refused("the model reads token ids")] = None
    lora_path: Annotated[None, _refused(_NO_ADAPTERS)] = None
    lora_id: Annotated[None, _refused(_NO_ADAPTERS)] = None
    session_params: Annotated[None, _refused("prefixes are cached without a session")] = None
    token_ids_logprob: Annotated[None, _refused("use /score")] = None
    return_hidden_states: Annotated[
        None, _refused("no hidden states are kept", unless=(False,), shape=bool | None)
    ] = None
    custom_logit_processor: Annotated[None, _refused("no code of others is run here")] = None


class ScoreOptionsRequest(PromptFields):
    """The body of ``POST /score``."""

    options: Options


class FlushRequest(_Fields):
    """The body of ``POST /flush_cache``, which may be left out."""

    empty_cache: bool | None = None  # without effect: of no device's memory more is held


class TokenizeRequest(_Fields):
    """The body of ``POST /tokenize``: a raw prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # false: no prefix before a raw prompt


class DetokenizeRequest(_Fields):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
