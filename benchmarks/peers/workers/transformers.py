"""Hugging Face's transformers: `generate`, in batches that are padded on the left.

It keeps nothing between two calls, so that prompts which share a beginning compute it each.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, serve

_AT_ONCE = 8  # more is slower, for padding and for masks


class Transformers(Peer):
    weights = "bf16"

    def __init__(self, options: Answer) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        torch.set_num_threads(options["threads"])
        self._version = transformers.__version__
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.bfloat16
        ).eval()
        self._pad = options["stop_ids"][0]

    def about(self) -> dict[str, str]:
        return {
            "transformers": self._version,
            "torch": str(self._torch.__version__),
            "attention": self._model.config._attn_implementation,
            "Python": platform.python_version(),
        }

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        watch = _Watch()
        start = time.perf_counter()
        (ids,) = self._generate([prompt], num_tokens, streamer=watch)
        return ids, watch.first - start

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        return [
            ids
            for some in _groups(list(prompts), _AT_ONCE)
            for ids in self._generate(some, num_tokens)
        ]

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        torch = self._torch
        texts = [
            (prompt, option)
            for prompt, each in zip(prompts, options, strict=True)
            for option in each
        ]
        found: list[float] = []
        for some in _groups(texts, _AT_ONCE):
            ids, mask = self._padded([[*prompt, *option] for prompt, option in some])
            longest = max(len(option) for _, option in some)
            with torch.inference_mode():
                logits = self._model(ids, attention_mask=mask, logits_to_keep=longest + 1).logits
            logprobs = torch.log_softmax(logits.float(), -1)
            for row, (_, option) in enumerate(some):
                behind = logprobs[row, -len(option) - 1 : -1]
                found.append(float(behind[range(len(option)), list(option)].sum()))
        scores = iter(found)
        return [[next(scores) for _ in each] for each in options]

    def _generate(
        self, prompts: Sequence[Ids], num_tokens: int, streamer: Any = None
    ) -> list[list[int]]:
        ids, mask = self._padded(prompts)
        with self._torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=self._pad,
                streamer=streamer,
            )
        rows: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return rows

    def _padded(self, texts: Sequence[Ids]) -> tuple[Any, Any]:
        longest = max(map(len, texts))
        ids = [[self._pad] * (longest - len(text)) + list(text) for text in texts]
        mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        return self._torch.tensor(ids), self._torch.tensor(mask)


class _Watch:
    """Called with the prompt, and then with every id."""

    def __init__(self) -> None:
        self.first = 0.0
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def _groups(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


if __name__ == "__main__":
    serve(Transformers)
