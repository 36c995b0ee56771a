"""Vocabularies of Hugging Face's tokenizers, and transformers' `generate` under a grammar."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.grammar.hf import GrammarLogitsProcessor, vocabulary_of
from tests.runtime.tokenization.tiny import byte_level, loaded, sentencepiece

SCHEMA = {
    "type": "object",
    "properties": {
        "hi": {"type": "string", "maxLength": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["hi", "n"],
    "additionalProperties": False,
}


def fast(described: dict[str, Any], **options: Any) -> Any:
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)


@cache
def tokenizer() -> Any:
    return fast(byte_level(), eos_token="<|end|>", pad_token="<|begin|>", padding_side="left")


@cache
def model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer()) + 5,  # padded, as output layers are
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
    )
    return transformers.LlamaForCausalLM(config).eval()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary.from_tokenizer(tokenizer(), num_rows=len(tokenizer()) + 5))


def generate(
    grammars: CompiledGrammar | list[CompiledGrammar],
    prompts: list[str],
    *,
    budget: int | None = None,
    **options: Any,
) -> list[str]:
    """What comes behind the prompts."""
    torch.manual_seed(0)
    asked = tokenizer()(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    written = model().generate(
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
        logits_processor=[GrammarLogitsProcessor(grammars, max_new_tokens=budget)],
        **{"max_new_tokens": 80, **options},
    )
    texts = tokenizer().batch_decode(
        written[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return list(texts)


@pytest.mark.parametrize(
    "described", [byte_level(), sentencepiece(words=("hello",)), sentencepiece(byte_pieces=False)]
)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_tokenizers_entries_stand_for_the_bytes_that_the_runtime_finds(
    described: dict[str, Any], is_wrapped: bool
) -> None:
    end = described["added_tokens"][-1]
    theirs = fast(described, eos_token=end["content"])
    if not is_wrapped:
        theirs = theirs.backend_tokenizer
    vocabulary = vocabulary_of(theirs, stop_token_ids=None if is_wrapped else [end["id"]])
    ours = loaded(described)
    assert list(vocabulary.token_bytes) == ours.all_token_bytes()
    assert vocabulary.stop_token_ids == {end["id"]}


def test_tokens_that_were_added_as_plain_text_stand_for_that_text() -> None:
    theirs = fast(byte_level(), eos_token="<|end|>")
    theirs.add_tokens(["né w"])
    vocabulary = vocabulary_of(theirs)
    assert vocabulary.token_bytes[-1] == "né w".encode()


def test_entries_that_are_bytes_are_taken_as_they_are() -> None:
    class Ranks:
        eos_token_id = 257

        def get_vocab(self) -> dict[Any, int]:
            return {bytes([i]): i for i in range(256)} | {b"\xe2\x82": 256, "<end>": 257}

        all_special_ids = (257,)

    vocabulary = vocabulary_of(Ranks())
    assert vocabulary.token_bytes[256] == b"\xe2\x82"
    assert vocabulary.token_bytes[257] == b""


def test_a_vocabulary_that_does_not_say_what_it_spells_is_refused() -> None:
    words = {"[UNK]": 0, "hello": 1, "##lo": 2, "[SEP]": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]")
    with pytest.raises(UnsupportedGrammar, match="does not say what they spell"):
        vocabulary_of(theirs)


def test_a_tokenizer_without_an_end_needs_to_be_told_one() -> None:
    with pytest.raises(ValueError, match="give stop_token_ids"):
        vocabulary_of(fast(byte_level()))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 2.0},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2, "temperature": 2.0},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_every_text_of_a_batch_is_valid_under_the_schema(options: dict[str, Any]) -> None:
    grammar = compiler().compile_json_schema(SCHEMA)
    texts = generate(grammar, ["hi", "a much longer prompt", ""[:0] + "x"], **options)
    assert len(texts) == 3 * options.get("num_return_sequences", 1)
    for text in texts:
        value = json.loads(text)
        assert list(value) == ["hi", "n"]
        assert len(value["hi"]) <= 3


@pytest.mark.parametrize("num_beams", [1, 3])
def test_each_prompt_may_have_its_own_grammar(num_beams: int) -> None:
    patterns = ["[a-c]{4}", "no|yes", "[0-9]{2}-[0-9]{3}"]
    grammars: list[CompiledGrammar] = [compiler().compile_regex(each) for each in patterns]
    texts = generate(grammars, ["hi", "hello you", "x"], num_beams=num_beams, do_sample=False)
    for pattern, text in zip(patterns, texts, strict=True):
        assert re.fullmatch(pattern, text)


def test_within_max_new_tokens_every_text_is_complete() -> None:
    grammar = compiler().compile_json_schema(SCHEMA)
    # The token that ends the text is one of them.
    for room in range(grammar.shortest_length + 1, grammar.shortest_length + 8):
        for text in generate(
            grammar, ["hi", "ho"], budget=room, max_new_tokens=room, do_sample=True
        ):
            json.loads(text)


def test_assisted_generation_writes_the_same_as_without() -> None:
    grammar = compiler().compile_json_schema(SCHEMA)
    plain = generate(grammar, ["hi"], do_sample=False)
    assisted = generate(grammar, ["hi"], do_sample=False, prompt_lookup_num_tokens=3)
    assert plain == assisted


def test_logits_beyond_the_vocabulary_are_closed_and_those_allowed_are_unchanged() -> None:
    narrow = GrammarCompiler(Vocabulary.from_tokenizer(tokenizer()))
    processor = GrammarLogitsProcessor(narrow.compile_regex("h|q"))
    scores = torch.randn(1, len(tokenizer()) + 5)
    after = processor(torch.tensor([[3, 4]]), scores)
    allowed = np.flatnonzero(torch.isfinite(after[0]).numpy())
    assert [narrow.vocabulary.token_bytes[i] for i in allowed] == [b"h", b"q"]
    assert torch.equal(after[0, allowed], scores[0, allowed])


def test_misuse_is_said() -> None:
    grammar = compiler().compile_regex("ab")
    with pytest.raises(ValueError, match="there is no grammar"):
        GrammarLogitsProcessor([])
    with pytest.raises(ValueError, match="2 grammars cannot be shared out to 3 rows"):
        GrammarLogitsProcessor([grammar, grammar])(torch.zeros(3, 1).long(), torch.zeros(3, 300))
    with pytest.raises(ValueError, match="it is another tokenizer's"):
        GrammarLogitsProcessor(grammar)(torch.zeros(1, 1).long(), torch.zeros(1, 10))
    processor = GrammarLogitsProcessor(grammar)
    scores = torch.zeros(1, grammar.vocabulary.num_rows)
    processor(torch.tensor([[1]]), scores)
    with pytest.raises(GrammarError, match="is there a processor after this one"):
        processor(torch.tensor([[1, 5]]), scores)


def test_fewer_new_tokens_than_any_text_has_are_refused() -> None:
    grammar = GrammarCompiler(vocabulary_of(tokenizer())).compile_regex("hihihi")
    GrammarLogitsProcessor(grammar, max_new_tokens=grammar.shortest_length + 1)
    with pytest.raises(GrammarError, match="tokens and one that ends it, max_new_tokens is"):
        GrammarLogitsProcessor(grammar, max_new_tokens=grammar.shortest_length)
