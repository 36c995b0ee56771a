from __future__ import annotations

import numpy as np
import pytest

from palmette.runtime.sampling import resolve_seed, uniform
from tests.runtime.sampling.reference import chi_square_excess


def test_a_number_depends_on_its_key_alone() -> None:
    keys = [
        (seed, path, position) for seed in (0, 11) for path in ((), (0, 1)) for position in (0, 9)
    ]
    forward = {key: uniform(*key) for key in keys}
    backward = {key: uniform(*key) for key in reversed(keys)}
    assert forward == backward
    assert len(set(forward.values())) == len(keys)


def test_numbers_stay_the_same_from_release_to_release() -> None:
    assert uniform(11, (0, 2), 7) == 0.6236682982630225


def test_paths_that_spell_alike_are_different_keys() -> None:
    keys = [
        (0, (1, 2), 3),
        (0, (12,), 3),
        (0, (1,), 23),
        (0, (), 123),
        (0, (3, 1), 2),
        (123, (), 0),
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_numpy_integers_in_a_path_count_as_integers() -> None:
    assert uniform(1, tuple(np.arange(3)), 4) == uniform(1, (0, 1, 2), 4)


@pytest.mark.parametrize("vary", ["seed", "path", "position"])
def test_numbers_are_uniform_and_independent_of_their_neighbours(vary: str) -> None:
    keys = [
        (
            n if vary == "seed" else 1,
            (n // 100, n % 100) if vary == "path" else (),
            n if vary == "position" else 5,
        )
        for n in range(20_000)
    ]
    numbers = np.array([uniform(*key) for key in keys])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert chi_square_excess(np.histogram(numbers, bins=100, range=(0, 1))[0]) < 4
    # Pairs of neighbours fill the square evenly.
    cells = np.histogram2d(numbers[:-1:2], numbers[1::2], bins=8, range=[[0, 1], [0, 1]])[0]
    assert chi_square_excess(cells.ravel()) < 4


def test_a_seed_is_resolved_into_the_range_of_keys() -> None:
    assert resolve_seed(5) == 5
    assert resolve_seed(-1) == 2**64 - 1
    assert resolve_seed(-(2**63)) == 2**63
    assert resolve_seed(2**64 - 1) == 2**64 - 1
    fresh = {resolve_seed(None) for _ in range(20)}
    assert len(fresh) == 20
    assert all(0 <= seed < 2**64 for seed in fresh)
