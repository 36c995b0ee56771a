"""A model's own chat template: a conversation, or one segment of it, as trusted and plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, TemplateSyntaxError

from palmette.errors import InvalidRequest
from palmette.protocol import Message, Piece
from palmette.runtime.tokenization.sandbox import (
    RenderLimits,
    TemplateRefusal,
    TemplateSandbox,
)
from palmette.runtime.tokenization.special import SpecialTokens

_MAX_SOURCE = 1_000_000  # characters; the longest in use have some tens of thousands
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


class JinjaChatTemplate:
    """Renders messages with a model's Jinja template, and says who wrote which part.

    What the template wrote is special: its control tokens become those tokens. What a message
    holds never is, whatever it spells. The text comes out exactly as the template renders it.

    `token_texts` are the template's variables such as `bos_token`. With `bos_text` the
    conversation begins with that token, whether the template writes it or not, and never with two.

    Raises InvalidRequest if the source is malformed, the template refuses the messages (with its
    own words), or it costs more than `limits`.
    """

    def __init__(
        self,
        source: str,
        *,
        special: SpecialTokens,
        token_texts: Mapping[str, str] | None = None,
        bos_text: str = "",
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise InvalidRequest(
                f"the chat template has {len(source)} characters, at most {_MAX_SOURCE} are read",
                param="chat_template",
            )
        try:
            self._template = TemplateSandbox(limits or RenderLimits(), now=now).compile_template(
                source
            )
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is malformed: {error.message} (line {error.lineno})",
                param="chat_template",
            ) from error
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise InvalidRequest(
                f"the chat template cannot be compiled: {error}", param="chat_template"
            ) from error
        self.source = source
        self._special = special
        self._token_texts = dict(token_texts or {})
        self._bos_text = bos_text

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        """The whole conversation. Message contents are never special."""
        checked = _checked(messages)
        if not checked:
            raise InvalidRequest("messages must not be empty", param="messages")
        text = self._run(checked, add_generation_prompt)
        pieces = self._bordered(checked, add_generation_prompt, text)
        if pieces is None:
            pieces = self._disarmed(checked, add_generation_prompt, text)
        return self._with_bos(pieces)

    def begin(self, history: Sequence[Message], role: str) -> list[Piece]:
        """What stands between the end of `history` and the content of a new message of `role`.

        For the assistant that is the generation prompt; with an empty history it is everything
        that the template writes before a first message of the role, begin-of-sequence included.
        Only the roles of the history matter. Raises InvalidRequest if the template refuses such a
        history, or would render it differently once the new message is there.
        """
        roles = [message["role"] for message in _checked(history)]
        _check_role(role)
        if not roles:
            gap = self._gaps_with(roles, role)[0]
            return self._with_bos([Piece(gap, special=True)] if gap else [])
        end, before = self._end(roles)
        if role == "assistant":
            gaps = self._gaps(roles, add_generation_prompt=True)
        else:
            gaps = self._gaps_with(roles, role)
        if gaps is None or gaps[: len(roles)] != before or not gaps[len(roles)].startswith(end):
            raise InvalidRequest(
                f"the chat template rewrites the conversation when a message of role {role!r} "
                f"follows {', '.join(roles)}: it cannot be written segment by segment",
                param="messages",
            )
        begin = gaps[len(roles)][len(end) :]
        return [Piece(begin, special=True)] if begin else []

    def end(self, history: Sequence[Message]) -> list[Piece]:
        """What closes the last message of `history`, after its content.

        Where the template writes a message only together with the next (a system prompt inside
        the first user message), nothing closes it and the text between them begins the next. What
        it writes only at the end of a finished conversation closes no message.
        """
        roles = [message["role"] for message in _checked(history)]
        if not roles:
            raise InvalidRequest("an empty history has no message to close", param="messages")
        end, _ = self._end(roles)
        return [Piece(end, special=True)] if end else []

    def _run(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template(
                {
                    **self._token_texts,
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateRefusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except RecursionError as error:
            raise InvalidRequest(
                "the chat template calls itself too deeply", param="messages"
            ) from error
        except Exception as error:  # a template can provoke any of Python's errors
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error

    # Who wrote what

    def _bordered(
        self, messages: list[Message], add_generation_prompt: bool, text: str
    ) -> list[Piece] | None:
        """The pieces, found by marking where each content begins and ends; None if the marks
        change what the template does.

        The marks stand inside the white space around a content, so that trimming works as ever.
        """
        contents = [message["content"] for message in messages]
        cores = [content.strip() for content in contents]
        open_, close = _unused_characters(2, [self.source, *contents])
        marked: list[Message] = []
        for index, (message, core) in enumerate(zip(messages, cores, strict=True)):
            content = message["content"]
            if core:
                start = content.index(core)
                mark = f"{open_}{index}{close}"
                content = content[:start] + mark + core + mark + content[start + len(core) :]
            marked.append({"role": message["role"], "content": content})
        try:
            rendered = self._run(marked, add_generation_prompt)
        except InvalidRequest:
            return None
        parts = re.split(f"{open_}([0-9]+){close}", rendered)
        # template, index, content, index, template, ...
        pieces: list[Piece] = []
        gap = parts[0]
        for at in range(1, len(parts), 4):
            if at + 3 >= len(parts) or parts[at] != parts[at + 2]:
                return None
            index, inner, following = int(parts[at]), parts[at + 1], parts[at + 3]
            if index >= len(cores) or inner != cores[index]:
                return None
            left, right = _white_space(contents[index])
            if left and gap.endswith(left):
                gap, inner = gap[: -len(left)], left + inner
            if right and following.startswith(right):
                inner, following = inner + right, following[len(right) :]
            pieces += [Piece(gap, special=True), Piece(inner)]
            gap = following
        pieces.append(Piece(gap, special=True))
        if "".join(piece.text for piece in pieces) != text:
            return None
        return [piece for piece in pieces if piece.text]

    def _disarmed(
        self, messages: list[Message], add_generation_prompt: bool, text: str
    ) -> list[Piece]:
        """The pieces of a template that looks into its messages and cuts them up.

        Everything is special, but for one character within every spelling of a control token that
        a message holds or could help to form. Tried first with more marks than that: at whatever
        begins like a control token, in case the template takes out what stands in between.
        """
        (mark,) = _unused_characters(1, [self.source, *(m["content"] for m in messages)])
        for find in (self._suspicious, self._dangerous):
            marked: list[Message] = [
                {"role": m["role"], "content": _insert(m["content"], mark, find(m["content"]))}
                for m in messages
            ]
            try:
                rendered = self._run(marked, add_generation_prompt)
            except InvalidRequest:
                continue
            if rendered.replace(mark, "") == text:
                return list(_pieces_at(mark, rendered))
        raise InvalidRequest(
            "a message spells a control token of this model, and the chat template looks into "
            "messages in a way that does not let it be told from a real one",
            param="messages",
        )

    def _dangerous(self, content: str) -> set[int]:
        """Positions behind the first character of whatever is, begins or ends a control token."""
        positions = {start + 1 for start in self._special.starts(content)}
        for text in self._special.by_text:
            for length in range(1, len(text)):
                if content.endswith(text[:length]):
                    positions.add(len(content) - length + 1)
                if content.startswith(text[-length:]):
                    positions.add(1)
        return positions

    def _suspicious(self, content: str) -> set[int]:
        """`_dangerous`, and positions inside every two characters that begin a control token."""
        beginnings = {re.escape(text[:2]) for text in self._special.by_text}
        positions = self._dangerous(content)
        if beginnings:
            pattern = re.compile("|".join(sorted(beginnings)))
            positions.update(match.start() + 1 for match in pattern.finditer(content))
        return positions

    def _with_bos(self, pieces: list[Piece]) -> list[Piece]:
        if not self._bos_text:
            return pieces
        if pieces and pieces[0].special and pieces[0].text.startswith(self._bos_text):
            return pieces
        return [Piece(self._bos_text, special=True), *pieces]

    # Segments

    def _gaps(self, roles: Sequence[str], *, add_generation_prompt: bool) -> list[str] | None:
        """What the template writes before, between and after contents of messages of these roles;
        None if it does not write each content once and in order.
        """
        open_, close = _unused_characters(2, [self.source])
        messages: list[Message] = [
            {"role": role, "content": f"{open_}{index}{close}"} for index, role in enumerate(roles)
        ]
        rendered = self._run(messages, add_generation_prompt)
        parts = re.split(f"{open_}([0-9]+){close}", rendered)
        if parts[1::2] != [str(index) for index in range(len(roles))]:
            return None
        return parts[0::2]

    def _gaps_with(self, roles: list[str], role: str) -> list[str]:
        """The gaps up to the content of one more message, with a user's after it if need be."""
        gaps, refusal = None, None
        try:
            gaps = self._gaps([*roles, role], add_generation_prompt=False)
        except InvalidRequest as error:
            refusal = error
        if gaps is None and role != "user":
            try:
                gaps = self._gaps([*roles, role, "user"], add_generation_prompt=False)
            except InvalidRequest as error:
                refusal = refusal or error
        if gaps is None:
            raise refusal or InvalidRequest(
                f"the chat template does not write the content of a message of role {role!r} here",
                param="messages",
            )
        return gaps[: len(roles) + 1]

    def _end(self, roles: list[str]) -> tuple[str, list[str]]:
        """What closes the last message, and all gaps up to its content."""
        try:
            gaps = self._gaps(roles, add_generation_prompt=False)
        except InvalidRequest:
            gaps = None
        if gaps is None:
            return "", self._gaps_with(roles[:-1], roles[-1])
        end = gaps[-1]
        try:
            going_on = self._gaps(roles, add_generation_prompt=True)
        except InvalidRequest:
            going_on = None
        if going_on is not None and not going_on[-1].startswith(end):
            end = self._common_beginning(end, going_on[-1])
        return end, gaps[:-1]

    def _common_beginning(self, first: str, second: str) -> str:
        """What both begin with, in whole control tokens."""
        pairs = enumerate(zip(first, second, strict=False))
        length = next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
        for text in (first, second):
            for start, end, _ in self._special.spans(text):
                if start < length < end:
                    length = start
        return first[:length]


def _checked(messages: Sequence[Message]) -> list[Message]:
    """Copies of the messages. Raises InvalidRequest for anything but a role and a text."""
    checked: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{index}] must be a role and a content, is a {type(message).__name__}",
                param="messages",
            )
        for key in message:
            if key not in ("role", "content"):
                raise InvalidRequest(
                    f"messages[{index}] has a field {key!r}; only role and content are taken",
                    param="messages",
                )
        content = message.get("content")
        if not isinstance(content, str):
            raise InvalidRequest(
                f"messages[{index}].content must be a string, is {type(content).__name__}",
                param="messages",
            )
        role = message.get("role")
        _check_role(role)
        checked.append({"role": str(role), "content": content})
    return checked


def _check_role(role: object) -> None:
    # A role stands in text that the template wrote, so it must not be able to spell anything.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"a role is a word of letters, digits, '_', '.' and '-', got {role!r}",
            param="messages",
        )


def _white_space(content: str) -> tuple[str, str]:
    """What `str.strip` takes off on the left and on the right."""
    return content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]


def _unused_characters(count: int, texts: Sequence[str]) -> list[str]:
    """Private-use characters that occur in none of the texts."""
    used = set().union(*(_PRIVATE.findall(text) for text in texts))
    unused: list[str] = []
    for code in range(0xF0000, 0x10FFFE):
        if chr(code) not in used:
            unused.append(chr(code))
            if len(unused) == count:
                return unused
    raise InvalidRequest("the messages hold every private-use character there is", param="messages")


def _insert(text: str, mark: str, positions: set[int]) -> str:
    parts = []
    start = 0
    for position in sorted(positions):
        parts += [text[start:position], mark]
        start = position
    return "".join([*parts, text[start:]])


def _pieces_at(mark: str, rendered: str) -> Iterator[Piece]:
    """Special pieces, but for the character before each mark."""
    *marked, last = rendered.split(mark)
    for part in marked:
        if part[:-1]:
            yield Piece(part[:-1], special=True)
        if part:
            yield Piece(part[-1])
    if last:
        yield Piece(last, special=True)
