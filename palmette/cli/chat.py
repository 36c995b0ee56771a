"""`palmette chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from palmette.cli.options import add_engine_options, add_thaw_option, given_engine_options
from palmette.errors import InvalidRequest, PalmetteError, RequestAborted
from palmette.protocol import (
    FinishReason,
    Message,
    Piece,
    Request,
    SamplingParams,
    TokenBackend,
    Usage,
)

if TYPE_CHECKING:
    from rich.console import Console

_HELP = "Ctrl-C interrupts an answer, /reset starts over, Ctrl-D ends."
_SAMPLING = ("temperature", "top_p", "seed")

# Drawn from all that a small model finds possible, a conversation comes apart; so where a model's
# files say nothing of sampling, it is drawn from the likelier tokens. An answer that finds no end
# would take the whole context, and leave none for the next question.
_CALM = {"temperature": 0.6, "top_p": 0.9}
_MAX_TOKENS = 1024


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "chat", help="talk with a model", description=f"Talk with a model. {_HELP}"
    )
    parser.add_argument("model", metavar="MODEL", help="a known name, a GGUF file, or a folder")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 is greedy (default: the model's own, else {_CALM['temperature']})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"mass of the tokens drawn from (default: the model's own, else {_CALM['top_p']})",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=_MAX_TOKENS,
        metavar="N",
        help="tokens of an answer at most (default: %(default)s)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="say what each turn cost in tokens and time"
    )
    add_thaw_option(parser)
    add_engine_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    from rich.console import Console

    from palmette.runtime import AsyncEngine

    console = Console(highlight=False)
    is_terminal = sys.stdin.isatty()
    with contextlib.ExitStack() as stack:
        with console.status(f"Loading {arguments.model} ...") if is_terminal else stack:
            engine = AsyncEngine(arguments.model, **given_engine_options(arguments))
        with engine:
            for path in arguments.thaw:
                engine.thaw(path)
            chat = Chat(
                engine,
                system=arguments.system,
                sampling=sampling_of(engine, arguments),
                max_tokens=arguments.max_tokens,
            )
            if is_terminal:
                console.print(f"{engine.model_name}. {_HELP}", style="dim")
            talk(chat, console, _line_reader(is_terminal), shows_stats=arguments.stats)
    return 0


def sampling_of(backend: TokenBackend, arguments: argparse.Namespace) -> SamplingParams:
    """How answers are drawn: as given, else as the model's files say, else calmly."""
    given: dict[str, Any] = {
        name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None
    }
    own, plain = backend.default_sampling, SamplingParams()
    says_nothing = all(
        getattr(own, name) == getattr(plain, name)
        for name in ("temperature", "top_p", "top_k", "min_p")
    )
    # A temperature that is given stands for itself; what remains is the model's own.
    calm = _CALM if says_nothing and "temperature" not in given else {}
    return replace(own, min_tokens=0, **{**calm, **given})


def _line_reader(is_terminal: bool) -> Callable[[], str]:
    if not is_terminal:
        return input
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    return lambda: input("\n> ")


class Chat:
    """A conversation whose token ids are kept as they came, so that each turn computes only what
    is new.

    Where a chat template cannot be written message by message, since it rewrites earlier ones, the
    whole conversation is rendered and encoded for each turn instead.
    """

    def __init__(
        self,
        backend: TokenBackend,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._backend = backend
        self._template = backend.chat_template
        self._system = system
        self._sampling = sampling or backend.default_sampling
        self._max_tokens = max_tokens
        self._request_numbers = itertools.count()
        self.usage: Usage | None = None  # of the last turn that came to its end
        self.finish_reason: FinishReason | None = None
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.messages: list[Message] = []
        self._token_ids: list[int] | None = []  # of the messages; None: not kept

    async def answer(self, text: str) -> AsyncIterator[str]:
        """Say something; the pieces of the answer.

        What has come when the iterator is closed is the answer from then on. A turn that cannot be
        had leaves the conversation as it was.
        """
        new = [Message(role="user", content=text)]
        if self._system is not None and not self.messages:
            new.insert(0, Message(role="system", content=self._system))
        messages = [*self.messages, *new]
        prompt, is_exact = self._prompt(new)
        room = max(self._backend.max_context - len(prompt), 1)
        max_tokens = room if self._max_tokens is None else min(self._max_tokens, room)
        request = Request(
            request_id=f"chat-{id(self)}-{next(self._request_numbers)}",
            token_ids=tuple(prompt),
            sampling=replace(self._sampling, max_tokens=max_tokens),
        )
        self.usage, self.finish_reason = None, None
        token_ids: list[int] = []
        parts: list[str] = []
        has_begun = False
        try:
            events = self._backend.generate(request)
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.finish_reason is FinishReason.ABORT:
                        raise RequestAborted("the answer was aborted")
                    has_begun = True
                    token_ids += event.token_ids
                    parts.append(event.text)
                    self.usage, self.finish_reason = event.usage, event.finish_reason
                    if event.text:
                        yield event.text
        finally:
            if has_begun:
                answer = Message(role="assistant", content="".join(parts))
                self.messages = [*messages, answer]
                self._token_ids = self._closed([*prompt, *token_ids]) if is_exact else None

    def _prompt(self, new: Sequence[Message]) -> tuple[list[int], bool]:
        """The ids up to the answer, and whether they go on from those that are kept."""
        messages = [*self.messages, *new]
        if self._token_ids is not None:
            pieces: list[Piece] = []
            history = self.messages
            try:
                for message in new:
                    pieces += self._template.begin(history, message["role"])
                    pieces.append(Piece(message["content"]))
                    history = [*history, message]
                    pieces += self._template.end(history)
                pieces += self._template.begin(history, "assistant")
            except InvalidRequest:
                pass  # what is wrong with the messages themselves, rendering them all will say
            else:
                return self._token_ids + self._backend.tokenizer.encode(pieces), True
        return self._backend.tokenizer.encode(self._template.render(messages)), False

    def _closed(self, token_ids: list[int]) -> list[int] | None:
        """The ids of a conversation whose last message has just ended."""
        try:
            pieces = self._template.end(self.messages)
        except InvalidRequest:
            return None
        return token_ids + self._backend.tokenizer.encode(pieces)


def talk(
    chat: Chat, console: Console, read_line: Callable[[], str], *, shows_stats: bool = False
) -> None:
    """Answer each line that is read, until there are no more."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        while True:
            try:
                text = read_line().strip()
            except EOFError:
                console.print()
                return
            except KeyboardInterrupt:  # clears the line, as in a shell
                console.print()
                continue
            if text == "/reset":
                chat.reset()
            elif text:
                _take_turn(loop, chat, console, text)
                if shows_stats:
                    _print_stats(chat, console)


def _take_turn(loop: asyncio.AbstractEventLoop, chat: Chat, console: Console, text: str) -> None:
    """Print the answer as it comes; Ctrl-C ends it."""
    task = loop.create_task(_print_answer(chat, console, text))
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        console.print(" [interrupted]", style="dim", markup=False)
    except PalmetteError as error:
        if isinstance(error, InvalidRequest):
            error_text = f"{error} (/reset starts over)"
        else:
            error_text = str(error)
        console.print(error_text, style="red", markup=False)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _print_answer(chat: Chat, console: Console, text: str) -> None:
    async with contextlib.aclosing(chat.answer(text)) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            # Not through the console's own layout: it would wrap lines in the middle of words.
            console.file.write(piece)
            console.file.flush()
    console.print()


def _print_stats(chat: Chat, console: Console) -> None:
    usage = chat.usage
    if usage is None:
        return
    seconds = max(usage.total_seconds - usage.first_token_seconds, 1e-9)
    rate = max(usage.completion_tokens - 1, 0) / seconds
    console.print(
        f"{usage.cached_tokens} cached, {usage.prefilled_tokens} prefilled, "
        f"{usage.decoded_tokens} decoded; first token after "
        f"{usage.first_token_seconds * 1000:.0f} ms, then {rate:.0f} tokens/s",
        style="dim",
    )
