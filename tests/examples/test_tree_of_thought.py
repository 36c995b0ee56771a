"""examples/tree_of_thought.py"""

from __future__ import annotations

import pytest

import palmette as pm
from tests.examples.conftest import LoadExample


def test_the_search_keeps_the_best_of_legal_steps(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("tree_of_thought")
    state = example.run(engine, [2, 5, 7], width=4, beam=2)
    root = state.ret_value
    assert root.children
    for thought in example.thoughts(root):
        for child in thought.children:
            assert example.moves(thought.left)[child.step] == child.left
            assert 0 <= child.score <= 1
            assert child.state.text().endswith(("good\n", "bad\n"))
            assert child.step in child.state.text()
    first = root.children
    second = [child for thought in first for child in thought.children]
    assert second
    assert all(thought.is_kept for thought in first if thought.children)
    for level in (first, second):
        kept = [thought for thought in level if thought.is_kept]
        assert len(kept) == min(2, len(level))
        dropped = [thought.score for thought in level if not thought.is_kept]
        unsolved = [thought.score for thought in kept if not thought.is_solved]
        assert min(unsolved, default=1.0) >= max(dropped, default=0.0)

    printed = capsys.readouterr().out
    assert printed.startswith("Numbers: 2 5 7\n")
    assert printed.count("P(good)") == len(first) + len(second)
    assert ("not solved" not in printed) == any(thought.is_solved for thought in second)


def test_a_wider_search_shares_what_it_starts_from(
    engine: pm.Engine, load_example: LoadExample
) -> None:
    example = load_example("tree_of_thought")
    prompt = engine.tokenizer.encode(f"{example.SHOWN}Numbers: 2 5 7\n")
    before = engine.stats()
    state = example.search.run([2, 5, 7], 4, 2, backend=engine)
    did = engine.stats().since(before)
    assert did.prompt_tokens > 5 * len(prompt)
    # All that is not the shared beginning: steps, and the options they were drawn from.
    assert state.usage().prefilled_tokens == did.computed_tokens
    assert did.computed_tokens - len(prompt) < did.prompt_tokens / 4


def test_moves_are_all_the_steps_of_the_game(load_example: LoadExample) -> None:
    moves = load_example("tree_of_thought").moves
    assert moves([3, 8]) == {
        "3 + 8 = 11, left: 11": (11,),
        "3 * 8 = 24, left: 24": (24,),
        "8 - 3 = 5, left: 5": (5,),
    }
    assert moves([2, 5, 7])["5 + 7 = 12, left: 2 12"] == (2, 12)
    assert len(moves([2, 5, 7])) == 9
    assert len(moves([4, 4, 4])) == 3
    assert moves([24]) == {}
