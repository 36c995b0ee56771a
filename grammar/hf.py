"""Grammars with Hugging Face's transformers: vocabularies of tokenizers, and logits for `generate`.

Neither transformers nor torch is imported here: what is needed comes with the objects handed in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.errors import GrammarError, UnsupportedGrammar
from palmette.grammar.matcher import Matcher
from palmette.grammar.pieces import (
    SPACE_MARK,
    byte_level_piece,
    byte_of_character,
    byte_pieces,
    components,
    sentencepiece_piece,
)
from palmette.grammar.vocabulary import Vocabulary

Tensor = Any  # of torch, which is not imported here


def vocabulary_of(
    tokenizer: Any,
    *,
    stop_token_ids: Collection[int] | None = None,
    num_rows: int | None = None,
) -> Vocabulary:
    """The vocabulary of a tokenizer of transformers, or of the tokenizers library.

    Byte-level BPE (GPT-2, Llama 3, Qwen), SentencePiece with bytes to fall back on (Llama 2, Gemma,
    Mistral) and tokenizers whose entries are bytes themselves are read; any other kind raises
    UnsupportedGrammar. Control tokens stand for no text. `stop_token_ids` end a text; if they are
    not given, it is the tokenizer's own end-of-sequence token. `num_rows` is the width of the
    model's output layer, if that is more than there are tokens.
    """
    entries: dict[Any, int] = dict(tokenizer.get_vocab())
    size = max(entries.values(), default=-1) + 1
    if stop_token_ids is None:
        end = getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError("the tokenizer names no end-of-sequence token: give stop_token_ids")
        stop_token_ids = end if isinstance(end, list | tuple) else [end]
    to_bytes = _piece_reader(tokenizer, entries)
    token_bytes = [b""] * size
    for piece, token_id in entries.items():
        token_bytes[token_id] = piece if isinstance(piece, bytes) else to_bytes(piece)
    added, special = _added_tokens(tokenizer)
    for token_id, text in added.items():
        if token_id < size:
            token_bytes[token_id] = text.encode("utf-8", "surrogatepass")
    for token_id in special:
        if token_id < size:
            token_bytes[token_id] = b""
    rows = max(size, num_rows or 0, *(token_id + 1 for token_id in stop_token_ids))
    return Vocabulary(token_bytes, set(stop_token_ids), rows)


class GrammarLogitsProcessor:
    """Keeps what transformers' `generate` writes to a grammar, in each row of the batch.

    ::

        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        grammar = GrammarCompiler(vocabulary).compile_json_schema(schema)
        model.generate(**prompt, logits_processor=[GrammarLogitsProcessor(grammar)])

    `grammars` is one for all rows, or one for each prompt of the batch. With `max_new_tokens`, as
    given to `generate`, every text is complete within so many tokens, the one that ends it
    included; GrammarError is raised if there is no such text. Sampling, beams and assisted
    generation may be used: where a row stands depends on its tokens alone. Of beams, or of
    `num_return_sequences`, that outnumber the texts there are, those left over hold none. One
    processor serves one call of `generate`. Put it last: a processor after it could allow what the
    grammar does not.
    """

    supports_continuous_batching = False

    def __init__(
        self,
        grammars: CompiledGrammar | Sequence[CompiledGrammar],
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        self._grammars = [grammars] if isinstance(grammars, CompiledGrammar) else list(grammars)
        if not self._grammars:
            raise ValueError("there is no grammar")
        self._max_new_tokens = max_new_tokens
        for grammar in self._grammars:
            if max_new_tokens is not None and grammar.shortest_length >= max_new_tokens:
                raise GrammarError(
                    f"the shortest text takes {grammar.shortest_length} tokens and one that ends "
                    f"it, max_new_tokens is {max_new_tokens}"
                )
        self._prompt_length: int | None = None
        self._num_prompts = 0
        # Where the rows of the call before stood, by grammar and by the tokens generated.
        self._matchers: dict[tuple[int, tuple[int, ...]], Matcher] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [num_rows, vocab_rows] with what may not come next at minus infinity."""
        num_rows, width = scores.shape
        if self._prompt_length is None:
            self._prompt_length = int(input_ids.shape[1])
        if num_rows % len(self._grammars):
            raise ValueError(
                f"{len(self._grammars)} grammars cannot be shared out to {num_rows} rows"
            )
        rows = input_ids[:, self._prompt_length :].tolist()
        # The rows of one prompt, such as its beams, stand together.
        rows_per_grammar = num_rows // len(self._grammars)
        masks = np.ones((num_rows, width), np.bool_)
        matchers: dict[tuple[int, tuple[int, ...]], Matcher] = {}
        fault: GrammarError | None = None
        for index, row in enumerate(rows):
            which = index // rows_per_grammar
            try:
                matcher = self._matcher(which, tuple(row))
            except GrammarError as error:
                # Where beams outnumber what is allowed, one may be impossible, and stays so.
                fault = error
                masks[index] = False
                continue
            if matcher is not None:
                matchers[which, tuple(row)] = matcher
                self._fill(matcher, masks[index], len(row))
        if fault is not None and not matchers:
            raise fault
        self._matchers = matchers
        # Whoever has a tensor has imported torch.
        forbidden = sys.modules["torch"].from_numpy(~masks).to(scores.device)
        return scores.masked_fill(forbidden, -float("inf"))

    def _matcher(self, which: int, row: tuple[int, ...]) -> Matcher | None:
        """Behind the tokens of a row; None if its text has ended."""
        grammar = self._grammars[which]
        known = self._matchers.get((which, row))
        if known is not None:
            return known
        before = self._matchers.get((which, row[:-1])) if row else None
        matcher = grammar.matcher() if before is None else before.copy()
        stops = grammar.vocabulary.stop_token_ids
        for position in range(0 if before is None else len(row) - 1, len(row)):
            token_id = row[position]
            if token_id in stops and matcher.is_complete:
                return None
            if not matcher.accept(token_id):
                raise GrammarError(
                    f"token {token_id} at position {position} is not what the grammar allows: "
                    "is there a processor after this one, or was this one used before?"
                )
        return matcher

    def _fill(self, matcher: Matcher, mask: Any, num_done: int) -> None:
        num_rows = self._grammars[0].vocabulary.num_rows
        if len(mask) < num_rows:
            raise ValueError(
                f"the model has {len(mask)} logits, the vocabulary {num_rows} rows: "
                "it is another tokenizer's"
            )
        budget = None
        if self._max_new_tokens is not None:
            # The token that ends the text is one of them.
            budget = self._max_new_tokens - num_done - 1
        mask[num_rows:] = False
        if budget is not None and budget < 1 and matcher.is_complete:
            mask[:] = False
            mask[list(self._grammars[0].vocabulary.stop_token_ids)] = True
        else:
            matcher.fill_mask(mask[:num_rows], budget=budget)


def _piece_reader(tokenizer: Any, entries: dict[Any, int]) -> Any:
    """From an entry of the vocabulary to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    described: dict[str, Any] = json.loads(backend.to_str()) if hasattr(backend, "to_str") else {}
    if isinstance(described.get("model"), dict):
        model = described["model"]
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise _unread(tokenizer)
    kinds = {part.get("type") for part in components(described)}
    if "ByteLevel" in kinds:
        return byte_level_piece()
    bytes_there = byte_pieces({piece: i for piece, i in entries.items() if isinstance(piece, str)})
    texts = [piece for piece in entries if isinstance(piece, str)]
    if bytes_there or any(SPACE_MARK in piece for piece in texts):
        return sentencepiece_piece(has_byte_pieces=bool(bytes_there))
    if len(texts) < len(entries):  # the others are bytes
        return lambda piece: piece.encode("utf-8", "surrogatepass")
    alphabet = byte_of_character()
    if all(character in entries for character in alphabet):
        return byte_level_piece()
    raise _unread(tokenizer)


def _unread(tokenizer: Any) -> UnsupportedGrammar:
    return UnsupportedGrammar(
        f"the vocabulary of {type(tokenizer).__name__} is neither byte-level BPE nor SentencePiece "
        "with marks for spaces, and its entries are no bytes: it does not say what they spell",
        feature="tokenizer",
    )


def _added_tokens(tokenizer: Any) -> tuple[dict[int, str], set[int]]:
    """Tokens that were added as plain text, by id, and the ids of all control tokens."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if decoder is None:
        get = getattr(tokenizer, "get_added_tokens_decoder", None)
        decoder = get() if get is not None else {}
    added = {token_id: token.content for token_id, token in decoder.items()}
    special = {token_id for token_id, token in decoder.items() if token.special}
    special.update(getattr(tokenizer, "all_special_ids", ()))
    return added, special
