"""A tiny Llama over a tiny byte-level BPE vocabulary: tokens of several bytes, some of them parts
of a character, so that where a text is cut makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from typing_extensions import Unpack

from palmette.grammar.pieces import byte_of_character
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine
from palmette.runtime.testing import tiny_model, tiny_twin
from palmette.runtime.tokenization import LoadedTokenizer
from palmette.runtime.tokenization.tokenizer import ChatTemplateSource
from tests.runtime.tokenization.tiny import byte_level, loaded

# Each is one token; its beginnings are too.
WORDS = ["ab", "abc", "bc", " a", " the", " then", "://", "http", "::", "é", "🐈"[:1], "\n\n", '"a']
SPECIAL = ("<|begin|>", "<|turn|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def _merges() -> tuple[tuple[str, str], ...]:
    character_of = {byte: character for character, byte in byte_of_character().items()}
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        pieces = [character_of[byte] for byte in word.encode()]
        for end in range(1, len(pieces)):
            merges["".join(pieces[:end]), pieces[end]] = None
    return tuple(merges)


@cache
def tokenizer(*, add_bos: bool = False) -> LoadedTokenizer:
    """Bytes, the beginnings of `WORDS`, and three control tokens."""
    given = byte_level(special=SPECIAL, merges=_merges())
    found = loaded(given)
    begin, _, end = sorted(found.special_token_ids)
    return loaded(
        given,
        bos_token_id=begin,
        add_bos=add_bos,
        stop_token_ids=[end],
        chat_template=ChatTemplateSource(TEMPLATE),
    )


def spelled(token_ids: Iterable[int]) -> str:
    """The text of what was generated: a control token that the model writes has none."""
    table = tokenizer().all_token_bytes()
    return b"".join(table[token_id] for token_id in token_ids).decode("utf-8", "replace")


def bpe_engine(*, seed: int = 0, add_bos: bool = False, **options: Unpack[EngineOptions]) -> Engine:
    """An engine over a model with the weights of `twin(seed=seed)`."""
    tokens = tokenizer(add_bos=add_bos)
    config = EngineConfig.of({"num_pages": 1024, "page_size": 4, **options})
    model = tiny_model(seed=seed, vocab_rows=tokens.vocab_size)
    return Engine.assemble("tiny-bpe", model, tokens, config)


def async_engine(**options: Any) -> AsyncEngine:
    """The same on a thread of its own."""
    return AsyncEngine.over(lambda: bpe_engine(**options))


@cache
def twin(seed: int = 0) -> Any:
    """transformers on the same weights, float32."""
    return tiny_twin(seed=seed, vocab_rows=tokenizer().vocab_size)


@cache
def next_logprobs(token_ids: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """log P(token | token_ids) for all tokens, the sequence evaluated alone. [vocab]"""
    with torch.inference_mode():
        logits = twin(seed)(torch.tensor([token_ids])).logits
    found: torch.Tensor = logits[0, -1].double().log_softmax(-1)
    return found
