"""For any program: the engine computes each new token once, and the ids stand for the text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import Piece, Request

# Tokens of several bytes, so that where a text is cut makes a difference.
TOKENS = ["ab", "abc", "bc", " a", "b\n", "é", "🐈".encode()[1:3]]
TEXT = st.text(alphabet="abc \né🐈<", max_size=6)


@dataclass(frozen=True)
class Constant:
    text: str


@dataclass(frozen=True)
class Generation:
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Choice:
    options: tuple[str, ...]


@dataclass(frozen=True)
class Chat:
    role: str
    text: str


@dataclass(frozen=True)
class Split:
    branches: tuple[tuple[object, ...], ...]


LEAVES = st.one_of(
    st.builds(Constant, TEXT),
    st.builds(Generation, TEXT, st.integers(1, 5)),
    st.builds(
        Choice,
        st.lists(TEXT.filter(bool), min_size=1, max_size=3, unique=True).map(tuple),
    ),
    st.builds(Chat, st.sampled_from(["system", "user", "assistant"]), TEXT),
)
PROGRAMS = st.recursive(
    st.lists(LEAVES, max_size=5).map(tuple),
    lambda inner: st.lists(
        st.one_of(LEAVES, st.builds(Split, st.lists(inner, min_size=1, max_size=3).map(tuple))),
        max_size=5,
    ).map(tuple),
    max_leaves=8,
)


def execute(
    s: pm.State, steps: tuple[object, ...], texts: list[str], *, waits: bool
) -> list[pm.State]:
    """Append `steps` and return all states there are in the end.

    With `waits`, one after the other, branch after branch; otherwise as they come.
    """
    states = [s]
    for step in steps:
        if isinstance(step, Constant):
            s += step.text
        elif isinstance(step, Generation):
            texts.append(step.text)
            s += pm.gen("x", max_tokens=step.max_tokens, seed=len(texts) - 1)
        elif isinstance(step, Choice):
            s += pm.select("y", step.options)
        elif isinstance(step, Chat):
            s += getattr(pm, step.role)(step.text)
        elif isinstance(step, Split):
            branches = s.fork(len(step.branches))
            for branch, inner in zip(branches, step.branches, strict=True):
                states += execute(branch, inner, texts, waits=waits)
        if waits:
            s.sync()
    return states


class Model:
    """What each state holds in the end, and what an engine that forgets nothing has to compute."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: set[tuple[int, ...]] = set()  # every prefix that has been computed
        self.num_computed = 0
        self.ends: list[tuple[tuple[int, ...], str]] = []

    def compute_prompt(self, ids: tuple[int, ...]) -> None:
        prefixes = {ids[:end] for end in range(1, len(ids) + 1)}
        self.num_computed += max(1, len(prefixes - self.known))  # the last one in any case
        self.known |= prefixes

    def execute(
        self, steps: tuple[object, ...], ids: tuple[int, ...], pending: list[Piece], text: str
    ) -> None:
        encode = self.tokenizer.encode
        for step in steps:
            if isinstance(step, Constant):
                pending = [*pending, Piece(step.text, special=True)]
                text += step.text
            elif isinstance(step, Chat):
                begin, end = f"<|im_start|>{step.role}\n", "<|im_end|>\n"
                message = [Piece(begin, special=True), Piece(step.text), Piece(end, special=True)]
                pending = pending + message
                text += begin + step.text + end
            elif isinstance(step, Generation):
                ids, pending = (*ids, *encode(pending)), []
                self.compute_prompt(ids)
                made = encode(step.text)
                out = made[: step.max_tokens]
                # The token that ends it, be it the last allowed or end-of-sequence, is never fed.
                num_fed = len(out) - 1 if len(made) >= step.max_tokens else len(out)
                self.known |= {(*ids, *out[:end]) for end in range(1, num_fed + 1)}
                ids = (*ids, *out)
                text += self.tokenizer.decode(out)
            elif isinstance(step, Choice) and len(step.options) == 1:
                pending = [*pending, Piece(step.options[0])]
                text += step.options[0]
            elif isinstance(step, Choice):
                ids, option = self.choose(step.options, ids, pending)
                pending = []
                text += option
            elif isinstance(step, Split):
                for branch in step.branches:
                    self.execute(branch, ids, pending, text)
        self.ends.append(((*ids, *encode(pending)), text))

    def choose(
        self, options: tuple[str, ...], ids: tuple[int, ...], pending: list[Piece]
    ) -> tuple[tuple[int, ...], str]:
        encode = self.tokenizer.encode
        alone = tuple(encode(pending))
        full = [tuple(encode([*pending, Piece(option)])) for option in options]
        start = max(
            length
            for length in range(len(alone) + 1)
            if all(each[:length] == alone[:length] for each in full)
        )
        prompt = (*ids, *alone[:start])
        self.compute_prompt(prompt)
        inner = {(*ids, *each[:end]) for each in full for end in range(start + 1, len(each))}
        self.num_computed += len(inner - self.known)
        self.known |= inner
        size = self.tokenizer.vocab_size  # every token is equally likely

        def likelihood(each: tuple[int, ...]) -> Fraction:
            longer = {other[: len(each) + 1] for other in full if other[: len(each)] == each}
            num_ways_on = len(longer - {each})
            return Fraction(1, size) ** (len(each) - start) * Fraction(size - num_ways_on, size)

        best = max(range(len(full)), key=lambda i: (likelihood(full[i]), -i))
        return (*ids, *full[best]), options[best]


def run(steps: tuple[object, ...], tokenizer: ByteTokenizer, *, waits: bool) -> pm.State:
    texts: list[str] = []

    async def answer(prompt: str, request: Request) -> Reply:
        number = request.sampling.seed
        assert number is not None
        if not waits:
            await asyncio.sleep(0.001 * (number % 3))
        return Reply(text=texts[number])

    @pm.function
    def program(s: pm.State) -> list[pm.State]:
        s += "p"
        return execute(s, steps, texts, waits=waits)

    return program.run(backend=ScriptedBackend(answer, tokenizer=tokenizer))


def model_of(steps: tuple[object, ...], tokenizer: ByteTokenizer) -> Model:
    model = Model(tokenizer)
    bos = tuple(tokenizer.encode([Piece("<|bos|>", special=True)]))
    model.execute(steps, bos, [Piece("p", special=True)], "p")
    return model


def ends_of(state: pm.State) -> list[tuple[tuple[int, ...], str]]:
    return sorted((each.token_ids(), each.text()) for each in state.ret_value)


@given(steps=PROGRAMS)
@settings(deadline=None, max_examples=200)
def test_tokens_computed_are_those_that_are_new_and_ids_stand_for_the_text(
    steps: tuple[object, ...],
) -> None:
    tokenizer = ByteTokenizer(TOKENS, prefix="<|bos|>")
    state, model = run(steps, tokenizer, waits=True), model_of(steps, tokenizer)
    ends = ends_of(state)
    assert ends == sorted(model.ends)
    for ids, text in ends:
        assert tokenizer.decode(ids[1:]) == text
    assert state.usage().prefilled_tokens == model.num_computed


@given(steps=PROGRAMS)
@settings(deadline=None, max_examples=100)
def test_branches_at_once_end_as_branches_one_after_the_other(steps: tuple[object, ...]) -> None:
    tokenizer = ByteTokenizer(TOKENS, prefix="<|bos|>")
    assert ends_of(run(steps, tokenizer, waits=False)) == sorted(model_of(steps, tokenizer).ends)
