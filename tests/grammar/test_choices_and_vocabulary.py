from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import GrammarCompiler, GrammarError, InvalidGrammar, Vocabulary
from palmette.grammar.testing import accepts, allowed, byte_vocabulary, mask_of
from palmette.grammar.token_trie import TokenTrie

small_tokens = st.lists(st.binary(max_size=4), max_size=30)


def test_the_package_imports_with_torch_absent() -> None:
    program = "import sys; sys.modules['torch'] = None; import palmette.grammar"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_package_needs_only_the_standard_library_and_numpy() -> None:
    """But for each adapter of another library, which imports that one."""
    import palmette.grammar

    for path in Path(str(palmette.grammar.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
            for name in names:
                adapted = {path.stem} if path.parent.name == "backends" else set()
                known = name.split(".")[0] in {*sys.stdlib_module_names, "numpy", *adapted}
                assert known or name.startswith("palmette.grammar"), f"{path} imports {name}"


@given(small_tokens)
@settings(deadline=None)
def test_the_trie_holds_exactly_the_prefixes_of_the_tokens(tokens: list[bytes]) -> None:
    trie = TokenTrie(tokens)
    prefixes = {token[:end] for token in tokens if token for end in range(len(token) + 1)} | {b""}
    paths = {0: b""}
    for node in range(trie.num_nodes):
        children, _ = trie.expand(np.array([node], np.int32))
        for child in children.tolist():
            paths[child] = paths[node] + bytes([int(trie.byte[child])])
            assert trie.child(node, int(trie.byte[child])) == child
    assert sorted(paths.values()) == sorted(prefixes)
    for node, path in paths.items():
        ending = trie.tokens_at(np.array([node], np.int32)).tolist()
        assert sorted(ending) == [i for i, token in enumerate(tokens) if token and token == path]


@given(small_tokens, st.binary(max_size=8))
@settings(deadline=None)
def test_fewest_tokens_spells_the_text_with_no_list_shorter(
    tokens: list[bytes], text: bytes
) -> None:
    vocabulary = Vocabulary([*tokens, b""], {len(tokens)})
    best: dict[bytes, int] = {b"": 0}
    for end in range(1, len(text) + 1):
        counts = [
            best[text[: end - len(token)]] + 1
            for token in tokens
            if token and text[:end].endswith(token) and text[: end - len(token)] in best
        ]
        if counts:
            best[text[:end]] = min(counts)
    found = vocabulary.fewest_tokens(text)
    if found is None:
        assert text not in best
    else:
        assert b"".join(vocabulary.token_bytes[i] for i in found) == text
        assert len(found) == best[text]


words = st.text(alphabet="ab\u00e9\U0001f600", max_size=5)


@given(
    st.lists(words, min_size=1, max_size=12),
    st.lists(st.sampled_from([b"a", b"ab", b"bb", b"\xc3", b"\xa9a", b"\xf0\x9f"]), max_size=4),
)
@settings(deadline=None)
def test_the_mask_of_choices_is_what_some_choice_continues_with(
    options: list[str], path: list[bytes]
) -> None:
    more = [b"ab", b"ba", b"bb", b"aab", b"\xc3\xa9", b"\xa9a", b"\xf0\x9f", b"b\xc3"]
    vocabulary = byte_vocabulary(more, num_padding=3)
    stop = 256 + len(more)
    matcher = GrammarCompiler(vocabulary).compile_choices(options).matcher()
    encoded = [option.encode() for option in options]
    prefix = b""
    for step in [b"", *path]:
        token_id = vocabulary.token_bytes.index(step) if step else None
        if token_id is not None:
            lives = any(word.startswith(prefix + step) for word in encoded)
            assert matcher.accept(token_id) == lives
            if not lives:
                return
            prefix += step
        expected = [
            i
            for i, token in enumerate(vocabulary.token_bytes)
            if token and any(word.startswith(prefix + token) for word in encoded)
        ]
        assert allowed(matcher, vocabulary) == expected + [stop] * (prefix in encoded)


def test_control_tokens_and_padding_are_never_allowed_and_stop_tokens_only_at_the_end() -> None:
    vocabulary = Vocabulary([b"a", b"", b"a", b"stop", b"b"], {3}, 8)
    matcher = GrammarCompiler(vocabulary).compile_regex("a|stop").matcher()
    assert not matcher.accept(3)
    with pytest.raises(
        ValueError, match=r"row must be bool \[8\] or int32 \[1\], .* got bool \[5\]"
    ):
        matcher.fill_mask(np.zeros(5, bool))
    assert allowed(matcher, vocabulary) == [0, 2]
    assert not any(map(matcher.accept, (1, 3, 5, 7, 8, -1)))
    assert matcher.accept(2)
    assert allowed(matcher, vocabulary) == [3]
    assert matcher.accept(3)
    assert not mask_of(matcher, vocabulary).any()


def test_a_token_may_end_inside_a_character_and_another_may_finish_it() -> None:
    tokens = ["e5", "a48f", "86ac", "21", "a4", "8f21", "e5a48f", "e5a4", "80"]
    vocabulary = Vocabulary([*map(bytes.fromhex, tokens), b""], {9})
    grammar = GrammarCompiler(vocabulary).compile_regex("(?:\u590f|\u51ac)!")
    expected: dict[tuple[int, ...], list[int]] = {
        (): [0, 6, 7],
        (0,): [1, 2, 4],
        (0, 4): [5],
        (0, 1): [3],
        (6,): [3],
        (7,): [5],
        (0, 1, 3): [9],
        (7, 5): [9],
    }
    for path, tokens_allowed in expected.items():
        matcher = grammar.matcher()
        assert all(matcher.accept(token_id) for token_id in path)
        assert allowed(matcher, vocabulary) == tokens_allowed


def test_a_space_at_the_front_of_a_token_is_part_of_the_text() -> None:
    vocabulary = Vocabulary([b" cat", b" dog", b"cat", b"dog", b" ", b" ", b""], {6})
    matcher = GrammarCompiler(vocabulary).compile_regex("cat dog").matcher()
    assert allowed(matcher, vocabulary) == [2]
    assert matcher.accept(2)
    assert allowed(matcher, vocabulary) == [1, 4, 5]
    assert matcher.accept(5)
    assert allowed(matcher, vocabulary) == [3]


def test_an_escape_may_be_split_over_tokens() -> None:
    tokens = [b"\\", b"n", b"q", b"\\n", b"u", b'"', b"00e9", b""]
    vocabulary = Vocabulary(tokens, {7})
    grammar = GrammarCompiler(vocabulary).compile_json_schema({"type": "string"})
    expected: dict[tuple[int, ...], list[int]] = {
        (): [5],
        (5,): [0, 1, 2, 3, 4, 5, 6],
        (5, 0): [0, 1, 3, 4, 5],
        (5, 0, 4): [6],
        (5, 0, 4, 6): [0, 1, 2, 3, 4, 5, 6],
        (5, 5): [7],
    }
    for path, tokens_allowed in expected.items():
        matcher = grammar.matcher()
        assert all(matcher.accept(token_id) for token_id in path)
        assert allowed(matcher, vocabulary) == tokens_allowed


def test_what_the_vocabulary_has_no_byte_for_is_not_begun() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"ac", b""], {3})
    compiler = GrammarCompiler(vocabulary)
    assert allowed(compiler.compile_regex("ad|b").matcher(), vocabulary) == [1]
    assert allowed(compiler.compile_choices(["ad", "b"]).matcher(), vocabulary) == [1]
    with pytest.raises(GrammarError, match="no text matches"):
        compiler.compile_regex("d+")
    stuck = compiler.compile_regex("bc").matcher()  # only "ac" has a c
    assert stuck.accept(1)
    with pytest.raises(GrammarError, match="no token of the vocabulary continues the text"):
        mask_of(stuck, vocabulary)
    with pytest.raises(GrammarError, match="cannot spell the shortest text"):
        _ = compiler.compile_regex("bc").shortest_length


def test_equal_sources_are_compiled_once() -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    assert compiler.compile_choices(["a"]) is compiler.compile_choices(["a"])
    assert compiler.compile_regex("a") is not compiler.compile_choices(["a"])
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    turned = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert compiler.compile_json_schema(schema) is compiler.compile_json_schema(schema)
    assert compiler.compile_json_schema(schema) is not compiler.compile_json_schema(turned)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "choices must not be empty"),
        ([1], "choices must be strings, got int"),
        (["\ud800"], "not valid Unicode"),
    ],
)
def test_unusable_choices_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        GrammarCompiler(byte_vocabulary()).compile_choices(options)


def test_choices_are_taken_literally() -> None:
    grammar = GrammarCompiler(byte_vocabulary()).compile_choices(["a.b", "a.", ""])
    assert [accepts(grammar, text) for text in ("a.b", "a.", "", "axb")] == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("tokens", "stops", "num_rows", "message"),
    [
        ([b"a"], {1}, None, "stop token 1 is outside the 1 rows"),
        ([b"a", b"b"], {0}, 1, "num_rows is 1, but there are 2 tokens"),
    ],
)
def test_an_inconsistent_vocabulary_is_refused(
    tokens: list[bytes], stops: set[int], num_rows: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(tokens, stops, num_rows)
