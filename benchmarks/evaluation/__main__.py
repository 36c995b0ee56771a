"""lm-eval over our server and over its own transformers backend: the same tasks and weights.

The tasks are those of `examples/lm_eval`. The model is written as a Hugging Face folder, from which
both compute in float32. lm-eval runs as a program of an environment of its own, in which somebody
has installed `lm-eval[api,hf]`; nothing of it is needed here, and nothing is downloaded:

    python -m benchmarks.evaluation --lm-eval /some/env/bin/lm_eval

The exit status is 1 if a figure differs, if two texts do, or if log-likelihoods are further apart
than the roundings of float32 put them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.weights import bfloat16_folder
from palmette.runtime.home import palmette_home
from palmette.runtime.loading.registry import resolve_model

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "lm_eval"
_READY = "Palmette is ready at "
_NAME = "evaluated"  # of the model that is served
_TOLERANCE = 1e-3  # nats, for a whole continuation

# A chat needs the model's template, which the transformers backend applies itself.
_CHAT = ("--apply_chat_template", "--fewshot_as_multiturn", "true")


@dataclass(frozen=True, slots=True)
class Run:
    """One task by one of lm-eval's models."""

    task: str
    model: str
    path: str  # of the server's endpoint; none for the backend of transformers
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model, and whether it chats."""
        return f"{self.model}, chat" if self.options == _CHAT else self.model


# By our server, and by transformers.
RUNS = (
    (
        Run("palmette_facts", "local-completions", "completions"),
        Run("palmette_facts", "hf", ""),
    ),
    (
        Run("palmette_answers", "local-completions", "completions"),
        Run("palmette_answers", "hf", ""),
    ),
    (
        Run("palmette_answers", "local-chat-completions", "chat/completions", _CHAT),
        Run("palmette_answers", "hf", "", _CHAT),
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run came to: lm-eval's figures by name, and what it was told for each row.

    That is a text, or the log-likelihood of each of the row's options.
    """

    metrics: dict[str, float]
    answers: Sequence[str | list[float]]
    seconds: float

    def distance(self, other: Found) -> float:
        """The largest difference of two log-likelihoods in nats, or how many texts differ."""
        distances = []
        for own, others in zip(self.answers, other.answers, strict=True):
            if isinstance(own, str) or isinstance(others, str):
                distances.append(float(own != others))
            else:
                distances.append(max(abs(a - b) for a, b in zip(own, others, strict=True)))
        return sum(distances) if isinstance(self.answers[0], str) else max(distances)

    def agrees_with(self, other: Found) -> bool:
        return self.metrics == other.metrics and self.distance(other) < _TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lm-eval", required=True, type=Path, help="the program lm_eval")
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a .gguf file")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parsed = parser.parse_args(argv)
    folder = bfloat16_folder(resolve_model(parsed.model), palmette_home() / "evaluation")
    console = Console()
    found: list[tuple[Found, Found]] = []
    with TemporaryDirectory() as work_dir, serving(folder) as url:
        for ours, theirs in RUNS:
            console.print(f"{ours.task} by {ours.name} ...")
            by_us, by_them = (
                carry_out(run, parsed.lm_eval, folder, url, Path(work_dir))
                for run in (ours, theirs)
            )
            found.append((by_us, by_them))
    console.print(table(found))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(figures(found), indent=1) + "\n", encoding="utf-8")
    return 0 if all(ours.agrees_with(theirs) for ours, theirs in found) else 1


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server over the folder's model in float32, ended when it is left."""
    command = [sys.executable, "-m", "palmette", "serve", str(folder), "--name", _NAME]
    command += ["--dtype", "float32", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(_READY):
                yield line.removeprefix(_READY).strip()
                return
        raise RuntimeError(f"the server ended with status {process.wait()}")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def carry_out(run: Run, program: Path, folder: Path, url: str, work_dir: Path) -> Found:
    """One run of lm-eval, offline. Raises CalledProcessError if it fails."""
    output = work_dir / f"{run.task} by {run.name}"
    weights = f"pretrained={folder},dtype=float32"
    endpoint = f"model={_NAME},base_url={url}/{run.path}"
    if run.model == "local-completions":  # which would else ask the server for every token
        endpoint += f",tokenizer_backend=huggingface,tokenizer={folder}"
    environment = {
        **os.environ,
        "HF_HOME": str(work_dir / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = time.monotonic()
    subprocess.run(
        [
            *(str(program), "--model", run.model),
            *("--model_args", endpoint if run.path else weights),
            *("--tasks", run.task, "--include_path", str(TASKS), "--batch_size", "1"),
            *("--output_path", str(output), "--log_samples", *run.options),
            *(() if run.path else ("--device", "cpu")),
        ],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - started
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    metrics = json.loads(results.read_text(encoding="utf-8"))["results"][run.task]
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: int(row["doc_id"]))
    told = [row["filtered_resps"] for row in rows]
    return Found(
        {name.partition(",")[0]: value for name, value in metrics.items() if _is_figure(name)},
        [
            answers[0] if isinstance(answers[0], str) else [float(value) for value, _ in answers]
            for answers in told
        ],
        seconds,
    )


def _is_figure(name: str) -> bool:
    return "," in name and "stderr" not in name


def figures(found: Sequence[tuple[Found, Found]]) -> list[dict[str, Any]]:
    """A line for each run."""
    return [
        {
            "task": run.task,
            "model": run.name,
            **each.metrics,
            "rows": len(each.answers),
            "seconds": round(each.seconds, 1),
            "distance": both[0].distance(both[1]),
        }
        for runs, both in zip(RUNS, found, strict=True)
        for run, each in zip(runs, both, strict=True)
    ]


def table(found: Sequence[tuple[Found, Found]]) -> Table:
    """The figures, and how far the two backends are apart."""
    shown = Table("task", "lm-eval's model", "figures", "rows", "seconds", "apart")
    for runs, both in zip(RUNS, found, strict=True):
        unit = "texts" if isinstance(both[0].answers[0], str) else "nats"
        for run, each in zip(runs, both, strict=True):
            shown.add_row(
                run.task,
                run.name,
                ", ".join(f"{name} {value:.4f}" for name, value in each.metrics.items()),
                f"{len(each.answers)}",
                f"{each.seconds:.1f}",
                f"{both[0].distance(both[1]):.2g} {unit}",
            )
    return shown


if __name__ == "__main__":
    sys.exit(main())
