"""transformers on the weights of the small model, run over given tokens."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from palmette.runtime.testing import transformers_twin


@lru_cache(maxsize=1)
def _twin(path: Path) -> Any:
    return transformers_twin(path)


def teacher_forced_logits(path: Path, token_ids: list[int], first: int) -> torch.Tensor:
    """Logits after each of `token_ids[first:]`, in one pass. [len(token_ids) - first, vocab]"""
    with torch.inference_mode():
        logits = _twin(path)(torch.tensor([token_ids])).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0, first:]
