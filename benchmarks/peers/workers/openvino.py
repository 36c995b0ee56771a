"""OpenVINO GenAI's continuous batching with its prefix cache, on the GGUF file or on a folder.

A folder of transformers is made one of OpenVINO's first, by optimum-intel, and computed in
bfloat16. A request finds what is cached when it is added, so of requests that are added at once
none finds what another of them computes.
"""

from __future__ import annotations

import importlib
import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, serve


class OpenVino(Peer):
    def __init__(self, options: Answer) -> None:
        self.weights = options["weights"]
        self._lib: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._np: Any = importlib.import_module("numpy")
        scheduling = self._lib.SchedulerConfig()
        scheduling.cache_size = 1  # GB
        scheduling.enable_prefix_caching = True
        scheduling.max_num_seqs = 64
        scheduling.max_num_batched_tokens = 512
        settings = {"INFERENCE_NUM_THREADS": options["threads"]}
        model = options["model"]
        if self.weights == "bf16":
            model = _exported(Path(model), Path(options["work_dir"]))
            settings["INFERENCE_PRECISION_HINT"] = "bf16"
        self._pipeline: Any = self._lib.ContinuousBatchingPipeline(
            str(model), scheduling, "CPU", settings
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._stop_ids = set(options["stop_ids"])
        self._numbers = itertools.count()

    def about(self) -> dict[str, str]:
        return {
            "openvino-genai": self._lib.__version__.split("-")[0],
            "openvino": self._openvino.__version__.split("-")[0],
            "Python": platform.python_version(),
        }

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        seconds: list[float] = []
        start = time.perf_counter()

        def look(handles: Sequence[Any]) -> None:
            if not seconds and handles[0].can_read():
                seconds.append(time.perf_counter() - start)

        (found,) = self._finished([prompt], self._settings(num_tokens), look)
        return list(found.generated_ids), seconds[0]

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        found = self._finished(prompts, self._settings(num_tokens))
        return [list(each.generated_ids) for each in found]

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        settings = self._lib.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.eos_token_id = min(self._stop_ids)
        settings.stop_token_ids = self._stop_ids
        settings.structured_output_config = self._lib.StructuredOutputConfig(
            json_schema=json.dumps(schema)
        )
        answers = []
        for each in self._finished(prompts, settings):
            ids = list(each.generated_ids)
            text = self._tokenizer.decode([i for i in ids if i not in self._stop_ids])
            answers.append({"text": text, "num_tokens": len(ids)})
        return answers

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        """The echo's log-probabilities. The first text goes alone, so that the others find what all
        share; they come for computed tokens only, the last of which are the option's.
        """
        settings = self._settings(1)
        settings.echo = True
        settings.logprobs = 1
        texts = [
            ([*prompt, *option], len(option))
            for prompt, each in zip(prompts, options, strict=True)
            for option in each
        ]
        found: list[Any] = []
        for some in (texts[:1], texts[1:]):
            found += self._finished([text for text, _ in some], settings)
        totals = []
        for each, (_, length) in zip(found, texts, strict=True):
            logprobs = list(each.generated_log_probs)
            if len(logprobs) <= length:
                raise RuntimeError("a log-probability is lacking, since its place was cached")
            totals.append(float(sum(logprobs[-length - 1 : -1])))
        scores = iter(totals)
        return [[next(scores) for _ in each] for each in options]

    def _settings(self, num_tokens: int) -> Any:
        settings = self._lib.GenerationConfig()
        settings.max_new_tokens = num_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        return settings

    def _finished(
        self,
        prompts: Sequence[Ids],
        settings: Any,
        look: Callable[[Sequence[Any]], None] = lambda handles: None,
    ) -> list[Any]:
        """What came of each prompt; `look` is called behind every step."""
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._np.array([prompt], dtype=self._np.int64))
            handles.append(self._pipeline.add_request(next(self._numbers), ids, settings))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            look(handles)
        return [handle.read_all()[0] for handle in handles]


def _exported(folder: Path, work_dir: Path) -> Path:
    """The folder that OpenVINO reads, made unless it is there."""
    found = work_dir / f"{folder.name}-openvino"
    if not (found / "openvino_model.xml").is_file():
        export: Any = importlib.import_module("optimum.exporters.openvino")
        export.main_export(str(folder), str(found), task="text-generation-with-past")
    return found


if __name__ == "__main__":
    serve(OpenVino)
