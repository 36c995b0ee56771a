"""The engine's options: what makes no sense is refused by name before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palmette.errors import InvalidRequest
from palmette.runtime.config import EngineConfig
from palmette.runtime.kv.pool import KVPool

INTEGERS = (
    "max_context",
    "num_threads",
    "page_size",
    "num_pages",
    "kv_memory",
    "max_batch_tokens",
    "max_running",
)


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig.of(options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, "16", True, float("nan")])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be an integer of at least") as refused:
        config_of(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("name", ["jump_forward", "prefix_cache"])
@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be True or False"):
        config_of(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), -0.5, "30", True])
def test_a_step_takes_seconds_or_what_it_takes(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_step_seconds must be a number"):
        config_of(max_step_seconds=value)
    for bound in (None, 0, 0.1, float("inf")):
        assert config_of(max_step_seconds=bound).scheduler.max_step_seconds == bound


@pytest.mark.parametrize("value", [float("nan"), -0.5, "30", None, True])
def test_a_bound_on_waiting_is_a_number_that_time_can_reach(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_wait must be a number"):
        config_of(max_wait=value)


def test_options_that_make_sense_are_kept() -> None:
    config = config_of(page_size=1, num_pages=None, max_wait=0, jump_forward=False)
    assert config.cache.page_size == 1
    assert config.cache.num_pages is None
    assert config.scheduler.max_wait == 0
    assert config.scheduler.jump_forward is False


def test_a_pool_that_does_not_fit_the_memory_is_refused_with_its_size() -> None:
    with pytest.raises(InvalidRequest, match="10000000000000 pages of 16 tokens takes") as refused:
        KVPool(
            num_layers=1,
            num_kv_heads=1,
            head_dim=64,
            num_pages=10**13,
            page_size=16,
            dtype=torch.float32,
        )
    assert refused.value.param == "num_pages"
