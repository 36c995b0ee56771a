"""Traces in the form that is exported, made of nothing but a seed, for the page that reads them."""

from __future__ import annotations

import math
import random
from typing import Any

TEXT = (
    "the cause is likely a switch that was restarted before its backup had been loaded and so it "
    "forgot which ports belong together see ticket 118 for details then try again"
)
WORDS = TEXT.split()
VOCABULARY = {str(i): f" {word}" for i, word in enumerate(WORDS)}
REASONS = ("never seen", "evicted", "diverged", "other namespace")
USAGE = (
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "completion_tokens",
    "decoded_tokens",
    "forced_tokens",
)


def usage(cached: int = 0, prefilled: int = 0, decoded: int = 0, forced: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": cached + prefilled,
        "cached_tokens": cached,
        "prefilled_tokens": prefilled,
        "completion_tokens": decoded + forced,
        "decoded_tokens": decoded,
        "forced_tokens": forced,
    }


def tokens_of(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    """Tokens with log-probabilities and alternatives, the first third of them forced at times."""
    ids = [rng.randrange(len(WORDS)) for _ in range(num_tokens)]
    num_forced = num_tokens // 3 if rng.random() < 0.4 else 0
    logprobs: list[float | None] = [-rng.expovariate(1.2) for _ in ids]
    top: list[list[list[float]] | None] = []
    for i, value in enumerate(logprobs):
        assert value is not None
        if i < num_forced:
            logprobs[i] = None
            top.append(None)
            continue
        rest = 1 - math.exp(value)
        shares = [rest * share for share in (0.5, 0.2, 0.1)]
        others = [
            [(ids[i] + k + 1) % len(WORDS), math.log(max(s, 1e-9))] for k, s in enumerate(shares)
        ]
        top.append(sorted([[ids[i], value], *others], key=lambda pair: -pair[1]))
    return {
        "ids": ids,
        "texts": [VOCABULARY[str(i)] for i in ids],
        "logprobs": logprobs,
        "forced": list(range(num_forced)),
        "top": top,
    }


class RunMaker:
    """Appends events to branches of one run while its clock goes on."""

    def __init__(self, rng: random.Random, program: str, start: float) -> None:
        self.rng = rng
        self.program = program
        self.start = start
        self.branches: list[dict[str, Any]] = []
        self.num_tokens: list[int] = []
        self.branch([], start)

    def branch(self, path: list[int], start: float, **more: Any) -> int:
        born = {"path": path, "status": "ok", "start": start, "end": start, "events": [], **more}
        self.branches.append(born)
        parent = more.get("parent")
        self.num_tokens.append(0 if parent is None else self.num_tokens[parent])
        return len(self.branches) - 1

    def add(self, branch: int, kind: str, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
        where = self.branches[branch]
        start = where["end"]
        event = {
            "kind": kind,
            "name": kind,
            "where": f"examples/{self.program}.py:{20 + len(where['events'])}",
            "asked": max(self.start, start - 0.001),
            "start": start,
            "end": start + seconds,
            "status": "ok",
            **more,
        }
        where["events"].append(event)
        where["end"] = start + seconds
        return event

    def constant(self, branch: int, text: str, kind: str = "text", **more: Any) -> None:
        self.add(branch, kind, text=text, **more)
        self.num_tokens[branch] += len(text) // 4

    def prompt(self, branch: int) -> tuple[dict[str, Any], int, int]:
        """How many tokens of the prompt were cached, and stretches that say why."""
        total = max(2, self.num_tokens[branch])
        cached = int(total * self.rng.choice((0.0, 0.6, 0.9, 0.97)))
        stretches: list[dict[str, Any]] = [
            {"start": 0, "end": cached, "reason": "cached"},
            {
                "start": cached,
                "end": total - 1,
                "reason": self.rng.choice(REASONS),
                "detail": "after 12 other requests",
            },
            {"start": total - 1, "end": total, "reason": "needed for its logits"},
        ]
        kept = [each for each in stretches if each["start"] < each["end"]]
        prompt = {"tokens": total, "cached": cached, "prefilled": total - cached, "stretches": kept}
        return prompt, cached, total - cached

    def gen(self, branch: int, variable: str, num_tokens: int = 12, **more: Any) -> dict[str, Any]:
        prompt, cached, prefilled = self.prompt(branch)
        tokens = tokens_of(self.rng, num_tokens)
        forced = len(tokens["forced"])
        queued = self.rng.random() * 0.01
        prefill = prefilled * 0.0004
        decode = (num_tokens - forced) * 0.008
        self.num_tokens[branch] += num_tokens
        details = {
            "name": f"gen('{variable}')",
            "variable": variable,
            "text": "".join(tokens["texts"]),
            "usage": usage(cached, prefilled, num_tokens - forced, forced),
            "prompt": prompt,
            "queued": queued,
            "prefill": prefill,
            "decode": decode,
            "sampling": {"max_tokens": num_tokens, "temperature": 0.7},
            "finish_reason": "stop",
            "stop_reason": "\n",
            "tokens": tokens,
        }
        return self.add(branch, "gen", queued + prefill + decode, **(details | more))

    def select(self, branch: int, variable: str, options: list[str], **more: Any) -> dict[str, Any]:
        prompt, cached, prefilled = self.prompt(branch)
        weights = [self.rng.random() ** 3 for _ in options]
        shares = [weight / sum(weights) for weight in weights]
        chosen = shares.index(max(shares))
        self.num_tokens[branch] += 1
        told = [
            {
                "text": option,
                "probability": share,
                "log_likelihood": math.log(share),
                "score": share,
            }
            for option, share in zip(options, shares, strict=True)
        ]
        details = {
            "name": f"select('{variable}')",
            "variable": variable,
            "text": options[chosen],
            "usage": usage(cached, prefilled),
            "prompt": prompt,
            "method": "probability",
            "chosen": chosen,
            "options": told,
        }
        return self.add(branch, "select", 0.004 + prefilled * 0.0004, **(details | more))

    def fork(self, branch: int, width: int) -> list[int]:
        event = self.add(branch, "fork", name=f"fork({width})")
        place = len(self.branches[branch]["events"]) - 1
        path = self.branches[branch]["path"]
        born = self.branches[branch]["end"]
        number = sum(each["kind"] == "fork" for each in self.branches[branch]["events"]) - 1
        children = [
            self.branch([*path, number, i], born, parent=branch, forked_by=place)
            for i in range(width)
        ]
        event["children"] = children
        return children

    def join(self, branch: int, children: list[int]) -> None:
        start = self.branches[branch]["end"]
        end = max([start, *(self.branches[child]["end"] for child in children)])
        self.add(branch, "join", end - start, children=children, mode="gather_variable")

    def run(self, status: str = "ok", **more: Any) -> dict[str, Any]:
        events = [event for branch in self.branches for event in branch["events"]]
        counts = [event.get("usage", {}) for event in events]
        return {
            "run_id": f"{self.rng.getrandbits(64):016x}",
            "program": self.program,
            "backend": 0,
            "arguments": {"ticket": "'The switch in room 4 lost its ports'"},
            "detailed": True,
            "status": status,
            "start": self.start,
            "end": max(branch["end"] for branch in self.branches),
            "usage": {name: sum(each.get(name, 0) for each in counts) for name in USAGE},
            "branches": self.branches,
            **more,
        }


def ticket_run(rng: random.Random, start: float, width: int = 3) -> dict[str, Any]:
    """Roles, a select, a fork into branches with a gen each, a join, and a last gen."""
    maker = RunMaker(rng, "triage", start)
    maker.constant(0, "<|im_start|>system\n", "role_begin", name="system_begin()")
    maker.constant(0, "You sort support tickets. " * 12)
    maker.constant(0, "<|im_end|>\n", "role_end", name="system_end()")
    maker.constant(0, "<|im_start|>assistant\n", "role_begin", name="assistant_begin()")
    maker.constant(0, "Team: ")
    maker.select(0, "team", ["network", "billing", "accounts"])
    children = maker.fork(0, width)
    for i, child in enumerate(children):
        maker.constant(child, f"\nOn angle {i}: ")
        maker.gen(child, "note", rng.randint(4, 16))
    maker.join(0, children)
    maker.constant(0, "\nRecord: ")
    maker.gen(0, "record", 20, constraint={"kind": "json_schema", "source": '{"type": "object"}'})
    maker.constant(0, "<|im_end|>\n", "role_end", name="assistant_end()")
    return maker.run()


def troubled_run(rng: random.Random, start: float) -> dict[str, Any]:
    """A failure, what it cancelled, and what never began."""
    maker = RunMaker(rng, "answer", start)
    maker.constant(0, "Q: why?\nA: ")
    maker.gen(0, "draft", 8)
    maker.gen(0, "answer", 5, status="failed", error="BackendUnavailable: no answer within 3 s")
    maker.add(
        0, "gen", name="gen('later')", variable="later", start=None, end=None, status="not_done"
    )
    children = maker.fork(0, 2)
    maker.gen(children[0], "part", 6, status="cancelled", error="its sibling failed")
    return maker.run("failed", error="BackendUnavailable: no answer within 3 s")


def prefixes_of(num_runs: int) -> dict[str, Any]:
    """A shared beginning, behind which every run has its own."""
    nodes: list[dict[str, Any]] = [
        {
            "backend": 0,
            "start": 0,
            "num_tokens": 90,
            "text": "You sort support tickets.",
            "uses": num_runs,
            "ends": 0,
            "computed": 90,
            "first": [0, 0, 5],
        }
    ]
    for run in range(num_runs):
        own = {"parent": 0, "start": 90, "num_tokens": 12, "text": f" ticket {run}", "uses": 1}
        nodes.append(own | {"ends": 1, "computed": 12, "first": [run, 0, 5]})
    return {"nodes": nodes}


def make_trace(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "format": "palmette.trace",
        "version": 1,
        "palmette": "0.1.0",
        "created": "2026-03-01T12:00:00Z",
        "began": 1772366400000000,
        "duration": max([run["end"] for run in runs if run["end"] is not None], default=0.0),
        "backends": [{"kind": "Engine", "model_name": "smollm2-135m", "max_context": 8192}],
        "runs": runs,
        "prefixes": prefixes_of(len(runs)) if runs else {"nodes": []},
        "vocabulary": [VOCABULARY],
        **more,
    }


def ticket_trace(num_runs: int = 6, seed: int = 1) -> dict[str, Any]:
    """Runs that begin one after the other and overlap; the last but one of them fails."""
    rng = random.Random(seed)
    runs = [ticket_run(rng, i * 0.05) for i in range(num_runs)]
    return make_trace([*runs[:-1], troubled_run(rng, num_runs * 0.05), *runs[-1:]])


def large_trace(num_primitives: int, seed: int = 1) -> dict[str, Any]:
    """At least so many primitives, not counting constants: overlapping runs, of a few kinds."""
    rng = random.Random(seed)
    kinds = [ticket_run(rng, 0.0, width=rng.choice((2, 4, 6))) for _ in range(12)]
    runs: list[dict[str, Any]] = []
    num_made = 0
    while num_made < num_primitives:
        kind = kinds[len(runs) % len(kinds)]
        num_made += len(primitives_of(kind))
        runs.append(shifted(kind, len(runs) * 0.02))
    return make_trace(runs)


def shifted(run: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same run at a later time; what has no time in it is shared."""

    def later(each: dict[str, Any]) -> dict[str, Any]:
        times = {name: each[name] + seconds for name in ("asked", "start", "end") if name in each}
        return each | times

    branches = [
        later(branch) | {"events": [later(event) for event in branch["events"]]}
        for branch in run["branches"]
    ]
    return later(run) | {"branches": branches}


def primitives_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a run that are no constants."""
    constants = ("text", "special", "role_begin", "role_end", "scope_begin", "scope_end")
    events = [event for branch in run["branches"] for event in branch["events"]]
    return [event for event in events if event["kind"] not in constants]
