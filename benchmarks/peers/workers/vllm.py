"""vLLM on the CPU, in one process, with its prefix cache."""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, serve

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Vllm(Peer):
    weights = "bf16"

    def __init__(self, options: Answer) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._torch: Any = importlib.import_module("torch")
        self._lib: Any = importlib.import_module("vllm")
        self._params: Any = importlib.import_module("vllm.sampling_params")
        self._torch.set_num_threads(options["threads"])
        self._llm: Any = self._lib.LLM(
            options["model"],
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=64,
            enable_prefix_caching=True,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )
        self._engine = self._llm.llm_engine
        self._names = map(str, itertools.count())

    def about(self) -> dict[str, str]:
        return {
            "vllm": self._lib.__version__,
            "torch": str(self._torch.__version__),
            "Python": platform.python_version(),
        }

    def reset(self) -> None:
        self._llm.reset_prefix_cache()

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        seconds: list[float] = []
        start = time.perf_counter()

        def look(outputs: Sequence[Any]) -> None:
            if not seconds and any(each.outputs[0].token_ids for each in outputs):
                seconds.append(time.perf_counter() - start)

        (found,) = self._finished([prompt], [self._settings(num_tokens)], look)
        return list(found.token_ids), seconds[0]

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        settings = [self._settings(num_tokens) for _ in prompts]
        return [list(found.token_ids) for found in self._finished(prompts, settings)]

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        settings = [
            self._lib.SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                structured_outputs=self._params.StructuredOutputsParams(json=schema),
            )
            for _ in prompts
        ]
        return [
            {"text": found.text, "num_tokens": len(found.token_ids)}
            for found in self._finished(prompts, settings)
        ]

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        """A request of one token asks for the log-probability of an option's next id, behind the
        prompt and what comes before it in the option. The first one of all goes alone, so that the
        others find the shared block in the cache; ids behind the same text share a request.
        """
        wanted: dict[tuple[int, ...], set[int]] = {}
        for prompt, each in zip(prompts, options, strict=True):
            for option in each:
                for place, token_id in enumerate(option):
                    wanted.setdefault((*prompt, *option[:place]), set()).add(token_id)
        texts = list(wanted)
        settings = [
            self._settings(1, logprob_token_ids=sorted(wanted[text]), logprobs=len(wanted[text]))
            for text in texts
        ]
        found = self._finished(texts[:1], settings[:1]) + self._finished(texts[1:], settings[1:])
        logprobs = {text: each.logprobs[0] for text, each in zip(texts, found, strict=True)}

        def total(prompt: Ids, option: Ids) -> float:
            behind = [(*prompt, *option[:place]) for place in range(len(option))]
            parts = [logprobs[text][t].logprob for text, t in zip(behind, option, strict=True)]
            return float(sum(parts))

        return [
            [total(prompt, option) for option in each]
            for prompt, each in zip(prompts, options, strict=True)
        ]

    def _settings(self, num_tokens: int, **further: Any) -> Any:
        return self._lib.SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            **further,
        )

    def _finished(
        self,
        prompts: Sequence[Ids],
        settings: Sequence[Any],
        look: Callable[[Sequence[Any]], None] = lambda outputs: None,
    ) -> list[Any]:
        """What came of each prompt; `look` sees the outputs of every step."""
        names = [next(self._names) for _ in prompts]
        for name, prompt, params in zip(names, prompts, settings, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        found: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            look(outputs)
            found |= {each.request_id: each.outputs[0] for each in outputs if each.finished}
        return [found[name] for name in names]


if __name__ == "__main__":
    serve(Vllm)
