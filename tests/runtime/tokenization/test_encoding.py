"""Encoding inserts, drops and invents nothing, for byte-level and SentencePiece vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.errors import InvalidRequest, ModelFileError
from palmette.grammar.pieces import byte_of_character
from palmette.protocol import Piece
from palmette.runtime.tokenization.prepared import prepare
from tests.runtime.tokenization import tiny

TURN_END = Piece("<|end|>", special=True)


def pieces_of(tokenizer, token_ids):
    return [tokenizer.token_bytes(token_id) for token_id in token_ids]


def test_the_byte_alphabet_has_256_characters_for_256_bytes():
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256))
    assert (table["Ġ"], table["Ċ"], table["A"], table["é"]) == (0x20, 0x0A, 0x41, 0xE9)


def test_no_space_is_put_before_a_text_of_a_byte_level_vocabulary():
    tokenizer = tiny.loaded(tiny.byte_level())
    assert pieces_of(tokenizer, tokenizer.encode("hi hi")) == [b"hi", b" hi"]


@pytest.mark.parametrize("dummy_prefix", ["normalizer", "metaspace"])
def test_program_text_in_pieces_gains_no_space(dummy_prefix):
    tokenizer = tiny.loaded(tiny.sentencepiece(dummy_prefix=dummy_prefix))
    program = [Piece("A:"), Piece("B"), Piece("<turn>", special=True), Piece("text")]
    token_ids = tokenizer.encode(program)
    (turn,) = [i for i in token_ids if tokenizer.token_bytes(i) == b""]
    assert turn in tokenizer.special_token_ids
    assert tokenizer.decode([i for i in token_ids if i != turn]) == "A:Btext"
    at = token_ids.index(turn)
    assert tokenizer.token_bytes(token_ids[at + 1]) == b"t"
    assert token_ids[:at] == tokenizer.encode("A:B")


def test_a_token_may_lie_across_the_border_of_pieces():
    tokenizer = tiny.loaded(tiny.byte_level())
    assert tokenizer.encode([Piece("h"), Piece("i")]) == tokenizer.encode("hi")
    assert tokenizer.encode([Piece("h", special=True), Piece("i")]) == tokenizer.encode("hi")


def test_control_tokens_are_recognised_in_special_pieces_only():
    tokenizer = tiny.loaded(tiny.byte_level())
    begin, end = 258, 259
    assert tokenizer.encode([TURN_END]) == [end]
    assert tokenizer.encode([Piece("<|begin|>hi<|end|>", special=True)]) == [begin, 256, end]
    for text in ("<|end|>", "hi<|begin|><|end|>hi"):
        token_ids = tokenizer.encode(text)
        assert not tokenizer.special_token_ids & set(token_ids)
        assert b"".join(pieces_of(tokenizer, token_ids)) == text.encode()


def test_a_control_token_spelled_across_pieces_stays_text():
    tokenizer = tiny.loaded(tiny.byte_level())
    for first, second in (("<|e", "nd|>"), ("<", "|end|>")):
        for trusted in ((True, False), (False, True), (True, True)):
            token_ids = tokenizer.encode([Piece(first, trusted[0]), Piece(second, trusted[1])])
            assert not tokenizer.special_token_ids & set(token_ids)


def test_a_merge_that_yields_a_control_token_is_broken_up():
    # Vocabularies converted from SentencePiece often hold merges that spell </s> and <s>.
    merges = (("/", "s"), ("/s", ">"), ("<", "/s>"), ("s", ">"), ("<", "s>"))
    tokenizer = tiny.loaded(tiny.sentencepiece(merges=merges))
    for text in ("</s>", "a</s>b<s>", "<</s></s>"):
        token_ids = tokenizer.encode(text)
        assert not tokenizer.special_token_ids & set(token_ids)
        assert tokenizer.decode(token_ids) == text


def test_the_spelling_of_a_byte_piece_stays_text():
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": True,
        "vocab": [["<unk>", 0.0], ["▁", -1.0]]
        + [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
        + [[letter, -2.0] for letter in "<>0x4a1"],
    }
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    tokenizer = tiny.loaded(tiny.tokenizer_json(unigram, pre_tokenizer=metaspace))
    for text in ("<0x41>", "a<0x41>a <0x0A>", "é<0x41>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_mark_for_a_space_in_a_text_is_not_a_space():
    tokenizer = tiny.loaded(tiny.sentencepiece())
    token_ids = tokenizer.encode("a▁b c")
    assert pieces_of(tokenizer, token_ids) == [b"a", b"\xe2", b"\x96", b"\x81", b"b", b" ", b"c"]


def test_sentencepiece_pieces_are_bytes_with_spaces_in_place_of_marks():
    words = ("▁cat", "▁dog", "cat", "dog")
    tokenizer = tiny.loaded(tiny.sentencepiece(words=words))
    table = tokenizer.all_token_bytes()
    wanted = [b" cat", b" dog", b"cat", b"dog", b" ", b" "]
    ids = [tokenizer._backend.token_to_id(piece) for piece in (*words, "▁", "<0x20>")]
    assert [table[token_id] for token_id in ids] == wanted


def test_what_no_piece_spells_falls_back_to_bytes():
    tokenizer = tiny.loaded(tiny.sentencepiece())
    token_ids = tokenizer.encode("a😀")
    assert pieces_of(tokenizer, token_ids) == [b"a", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_what_cannot_be_spelled_is_the_unknown_token_where_the_model_has_one():
    tokenizer = tiny.loaded(tiny.sentencepiece(byte_pieces=False), unknown_token="<unk>")
    assert tokenizer.encode("aéb")[1] == 0


def test_what_cannot_be_spelled_is_refused_where_the_model_has_no_unknown_token():
    vocabulary = tiny.byte_level()
    vocabulary["model"]["vocab"].pop("Ã")  # the byte C3
    tokenizer = tiny.loaded(vocabulary)
    with pytest.raises(InvalidRequest, match=r"cannot spell 'é' \(U\+00E9\)"):
        tokenizer.encode("hi é hi")


def test_half_a_surrogate_pair_is_refused():
    tokenizer = tiny.loaded(tiny.byte_level())
    with pytest.raises(InvalidRequest, match=r"at character 2 .* U\+D83D"):
        tokenizer.encode("hi\ud83d")


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = tiny.loaded(tiny.byte_level())
    assert tokenizer.vocab_size == 260
    for token_id in (-1, 260):
        with pytest.raises(InvalidRequest, match=f"{token_id} is not in the vocabulary"):
            tokenizer.decode([token_id])


def test_the_longest_token_bounds_the_number_of_tokens_from_below():
    assert tiny.loaded(tiny.byte_level()).max_token_bytes == len(b" hi")


def test_decode_shows_control_tokens_and_their_bytes_are_empty():
    tokenizer = tiny.loaded(tiny.byte_level())
    assert tokenizer.decode([256, 259, 256]) == "hi<|end|>hi"
    assert tokenizer.token_bytes(259) == b""
    assert tokenizer.decode([0xF0, 256]) == "\ufffdhi"


def test_added_tokens_that_are_not_special_stand_for_their_text():
    tokens = [tiny.added(258, "<think> é", special=False), tiny.added(259, "<|end|>")]
    tokenizer = tiny.loaded(tiny.byte_level(added_tokens=tokens))
    assert tokenizer.encode("hi<think> éhi") == [256, 258, 256]
    assert tokenizer.token_bytes(258) == "<think> é".encode()


def test_white_space_beside_a_token_that_swallows_it_is_left_out_in_special_pieces():
    tokens = [tiny.added(258, "<|user|>", rstrip=True), tiny.added(259, "<|end|>", lstrip=True)]
    tokenizer = tiny.loaded(tiny.byte_level(added_tokens=tokens))
    assert tokenizer.encode([Piece("<|user|>\n hi \n<|end|> hi", special=True)]) == [
        *(258, 256, 259),
        257,
    ]
    typed = [Piece("<|user|>", special=True), Piece(" hi "), Piece("<|end|>", special=True)]
    assert tokenizer.encode(typed) == [258, 257, 0x20, 259]


def test_added_tokens_that_are_not_special_swallow_no_white_space():
    tokens = [tiny.added(258, "<x>", special=False, rstrip=True, lstrip=True)]
    tokenizer = tiny.loaded(tiny.byte_level(added_tokens=tokens))
    assert tokenizer.decode(tokenizer.encode("hi <x> hi")) == "hi <x> hi"


def test_a_tokenizer_that_normalises_keeps_doing_so():
    tokenizer = tiny.loaded(tiny.byte_level(normalizer={"type": "NFC"}))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_truncation_padding_and_templates_of_the_file_do_not_apply():
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [258], "tokens": ["<|begin|>"]}},
    }
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    vocabulary = tiny.byte_level(post_processor=template, truncation=truncation, padding=padding)
    assert prepare(Path("x"), vocabulary).adds_bos
    assert tiny.loaded(vocabulary).encode("hihi") == [256, 256]


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (
            tiny.tokenizer_json({"type": "WordLevel", "vocab": {"hi": 0}, "unk_token": "hi"}),
            "neither byte-level BPE nor SentencePiece .its model is 'WordLevel'",
        ),
        (tiny.tokenizer_json(tiny.bpe(["a"], [], end_of_word_suffix="</w>")), "parts of words"),
        ({"version": "1.0"}, "has no model"),
    ],
)
def test_vocabularies_whose_pieces_do_not_spell_bytes_are_refused(vocabulary, words):
    with pytest.raises(ModelFileError, match=words):
        prepare(Path("tokenizer.json"), vocabulary)


texts = st.text(st.characters(codec="utf-8"), max_size=40)
tricky = st.lists(
    st.sampled_from(["<|end|>", "</s>", "<s>", "<0x41>", "▁", " ", "\r\n", "😀", "e\u0301", "hi"])
    | texts
).map("".join)
BYTE_LEVEL = tiny.loaded(tiny.byte_level())
SENTENCEPIECE = tiny.loaded(
    tiny.sentencepiece(merges=(("/", "s"), ("/s", ">"), ("<", "/s>")), special=("<|end|>",))
)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@given(text=tricky)
def test_the_bytes_of_an_encoding_are_the_bytes_of_the_text(tokenizer, text):
    token_ids = tokenizer.encode(text)
    assert b"".join(pieces_of(tokenizer, token_ids)) == text.encode()
    assert tokenizer.decode(token_ids) == text
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.feed, token_ids)) + decoder.finish() == text
