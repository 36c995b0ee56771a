"""How the prefix cache's operations and the scheduler's plans grow. No model: a page is an integer.

- Matching a long key, by nodes in the tree, by tokens in the key, and by branch points on its path.
- Inserting, leasing and releasing, by nodes in the tree; inserting by tokens.
- Evicting as many pages, by nodes in the tree.
- Evicting all pages, by pages, from trees of three shapes, and page by page. Beside it, the least
  that any order of use costs in Python: as many entries leave an OrderedDict, oldest first. Where
  its line is steeper than 1, it is the machine's memory that gets slower, not the tree.
- Planning a step and adding to the queue, by how many wait, for every policy.

Prints medians and 99th percentiles with the slope of a straight line through the medians on
logarithmic scales (0: constant, 1: linear), and plots them. Evicting takes so long that other
processes would be in its time: it is told in processor time. The ids in the keys that are looked up
are equal to those in the tree but other objects, as those of a new request are.

    python -m benchmarks.growth --plot docs/plots/growth.svg
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.plotting import svg_figure
from palmette.radix_cache import Namespace, RadixCache
from palmette.runtime.config import PolicyName, SchedulerSection
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.scheduler import Scheduler
from palmette.runtime.sequence import Sequence

PAGE_SIZE = 16
VOCABULARY = 40_000
KEY_TOKENS = 8_192
NUM_KEYS = 8
NUM_BRANCHES = 16  # on the path of a key, unless it is what varies
POLICIES: tuple[PolicyName, ...] = ("program", "lpm", "fcfs")

MATCH_GOAL_NODES = 10_000
MATCH_GOAL_US = 100.0
EVICTION_GOAL_EXCESS = 0.05  # over 1, or over what the machine makes of a linear one
FLOOR = "an OrderedDict, for comparison"


@dataclass(frozen=True, slots=True)
class Point:
    """Microseconds of one operation at one size."""

    size: int
    median: float
    p99: float


@dataclass(slots=True)
class Curve:
    """One operation over sizes of one kind."""

    name: str
    points: list[Point] = field(default_factory=list)

    def add(self, size: int, seconds: list[float]) -> None:
        ordered = sorted(1e6 * value for value in seconds)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        self.points.append(Point(size, statistics.median(ordered), p99))

    @property
    def slope(self) -> float | None:
        """Of the least-squares line through the medians on logarithmic scales."""
        if len(self.points) < 2:
            return None
        xs = [math.log(point.size) for point in self.points]
        ys = [math.log(point.median) for point in self.points]
        return statistics.linear_regression(xs, ys).slope


@dataclass(slots=True)
class Panel:
    """Curves over sizes of the same kind: a table, and a part of the plot."""

    title: str
    over: str  # what the sizes count
    curves: dict[str, Curve] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve(name))


class Figures:
    """All panels, filled as the measurements go on."""

    def __init__(self) -> None:
        tokens = f"{KEY_TOKENS:,}-token key"
        self.match_nodes = Panel(f"Match a {tokens}", "nodes in the tree")
        self.match_tokens = Panel("Match, by length", "tokens in the key")
        self.match_branches = Panel(f"Match a {tokens}, by branching", "branch points on its path")
        self.nodes = Panel("Insert, lease, release", "nodes in the tree")
        self.insert_tokens = Panel("Insert, by length", "new tokens")
        self.evict_nodes = Panel("Evict as many pages", "nodes in the tree")
        self.evict = Panel("Evict n pages, in all", "pages evicted")
        self.plan = Panel("Plan a step", "sequences waiting")
        self.queue = Panel("Add one to the queue", "sequences waiting")

    @property
    def panels(self) -> list[Panel]:
        return [
            self.match_nodes,
            self.match_tokens,
            self.match_branches,
            self.nodes,
            self.insert_tokens,
            self.evict_nodes,
            self.evict,
            self.plan,
            self.queue,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured; `samples` of each operation that is over quickly."""

    tree_nodes: int = MATCH_GOAL_NODES  # where the number of nodes is not what varies
    nodes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    tokens: tuple[int, ...] = (512, 1_024, 2_048, 4_096, 8_192)
    branches: tuple[int, ...] = (1, 4, 16, 64, 256)
    pages: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    evicted: int = 10_000  # where the number of nodes is what varies
    waiting: tuple[int, ...] = (10, 30, 100, 300, 1_000, 3_000, 5_000)
    samples: int = 400
    repeats: int = 5  # of evicting a whole tree
    steps: int = 40


QUICK = Sizes(
    nodes=(1_000, 10_000),
    tokens=(512, 8_192),
    branches=(1, 64),
    pages=(1_000, 10_000),
    waiting=(10, 300),
    samples=60,
    repeats=1,
    steps=10,
)


class GrownTree:
    """A cache with at least `num_nodes` edges: long keys with branches, short prompts around them.

    The short prompts fork off one another at random pages, so that some nodes have thousands of
    children and others one.
    """

    def __init__(
        self,
        rng: random.Random,
        num_nodes: int,
        *,
        key_tokens: int = KEY_TOKENS,
        num_branches: int = NUM_BRANCHES,
    ) -> None:
        self._rng = rng
        key_pages = key_tokens // PAGE_SIZE
        num_pages = 4 * num_nodes + NUM_KEYS * (key_pages + num_branches) + 200_000
        self.cache = RadixCache(num_pages, PAGE_SIZE)
        self.keys = [self.tokens(key_tokens) for _ in range(NUM_KEYS)]
        for key in self.keys:
            self.insert(key)
            for branch in range(num_branches):
                cut = branch * key_pages // num_branches * PAGE_SIZE
                self.insert(key[:cut] + self.tokens(PAGE_SIZE))
        prompts = [self.tokens(PAGE_SIZE)]
        while self.cache.tree.num_nodes < num_nodes:
            trunk = rng.choice(prompts)
            cut = rng.randrange(len(trunk) // PAGE_SIZE + 1) * PAGE_SIZE
            prompt = trunk[:cut] + self.tokens(rng.randint(1, 3) * PAGE_SIZE)
            self.insert(prompt)
            if len(prompt) < 64 * PAGE_SIZE:
                prompts.append(prompt)

    def tokens(self, num_tokens: int) -> list[int]:
        return random_tokens(self._rng, num_tokens)

    def insert(self, token_ids: list[int]) -> None:
        with self.cache.match_and_lease(token_ids) as lease:
            new = self.cache.allocate(len(token_ids) // PAGE_SIZE - lease.num_pages)
            assert new is not None
            lease.publish(token_ids, [*lease.page_ids, *new], tail=True)

    def lookups(self, num_lookups: int) -> Iterator[list[int]]:
        """Keys of the tree in random order, each made of ids of its own."""
        for _ in range(num_lookups):
            yield array("q", self._rng.choice(self.keys)).tolist()


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [int(VOCABULARY * rng.random()) for _ in range(num_tokens)]


@contextmanager
def no_collections() -> Iterator[None]:
    """Garbage is collected before, and not meanwhile: its cost is that of the whole process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def measure(sizes: Sizes, seed: int, figures: Figures, say: Callable[[str], None]) -> None:
    """Fill `figures`."""
    for num_nodes in sizes.nodes:
        say(f"trees of {num_nodes:,} nodes")
        measure_tree(GrownTree(random.Random(seed), num_nodes), num_nodes, sizes, figures)
    for num_tokens in sizes.tokens:
        say(f"keys of {num_tokens:,} tokens")
        tree = GrownTree(random.Random(seed), sizes.tree_nodes, key_tokens=num_tokens)
        measure_match(tree, figures.match_tokens.curve("whole key cached"), num_tokens, sizes)
        measure_insert(tree, figures.insert_tokens.curve("all new"), num_tokens, sizes)
    for num_branches in sizes.branches:
        say(f"{num_branches} branch points")
        tree = GrownTree(random.Random(seed), sizes.tree_nodes, num_branches=num_branches)
        measure_match(tree, figures.match_branches.curve("whole key cached"), num_branches, sizes)
    for num_nodes in sizes.nodes:
        say(f"evicting from {num_nodes:,} nodes")
        measure_eviction_by_nodes(num_nodes, sizes, seed, figures.evict_nodes)
    for num_pages in sizes.pages:
        say(f"evicting {num_pages:,} pages")
        measure_eviction(num_pages, sizes, seed, figures.evict)
    for is_shared in (False, True):
        for policy in POLICIES:
            for num_waiting in sizes.waiting:
                say(f"{policy}, {num_waiting:,} waiting")
                measure_plans(policy, num_waiting, is_shared, sizes, seed, figures)


def measure_tree(tree: GrownTree, num_nodes: int, sizes: Sizes, figures: Figures) -> None:
    cache, half = tree.cache, KEY_TOKENS // 2
    measure_match(tree, figures.match_nodes.curve("whole key cached"), num_nodes, sizes)
    halves: list[float] = []
    misses: list[float] = []
    leases: list[float] = []
    releases: list[float] = []
    inserts: list[float] = []
    with no_collections():
        for key in tree.lookups(sizes.samples):
            diverging = key[:half] + tree.tokens(half)
            halves.append(timed(lambda k=diverging: cache.match(k)))  # type: ignore[misc]
            unknown = tree.tokens(KEY_TOKENS)
            misses.append(timed(lambda k=unknown: cache.match(k)))  # type: ignore[misc]
            match = cache.match(key)
            start = time.perf_counter()
            lease = cache.lease(match)
            leases.append(time.perf_counter() - start)
            releases.append(timed(lease.release))
    with no_collections():
        for key in tree.lookups(max(20, sizes.samples // 4)):
            token_ids = key[:256] + tree.tokens(256)
            page_ids = cache.allocate(len(token_ids) // PAGE_SIZE)
            assert page_ids is not None
            start = time.perf_counter()
            cache.insert(token_ids, page_ids)
            inserts.append(time.perf_counter() - start)
    figures.match_nodes.curve("half of it cached").add(num_nodes, halves)
    figures.match_nodes.curve("nothing cached").add(num_nodes, misses)
    figures.nodes.curve("insert 256 tokens behind 256").add(num_nodes, inserts)
    figures.nodes.curve("lease a match").add(num_nodes, leases)
    figures.nodes.curve("release it").add(num_nodes, releases)


def measure_match(tree: GrownTree, curve: Curve, size: int, sizes: Sizes) -> None:
    seconds = []
    with no_collections():
        for key in tree.lookups(sizes.samples):
            start = time.perf_counter()
            match = tree.cache.match(key)
            seconds.append(time.perf_counter() - start)
            assert match.num_tokens == len(key)
            del match  # or the next one's time holds the end of its 8,192 ids
    curve.add(size, seconds)


def measure_insert(tree: GrownTree, curve: Curve, num_tokens: int, sizes: Sizes) -> None:
    seconds = []
    with no_collections():
        for _ in range(max(20, sizes.samples // 4)):
            token_ids = tree.tokens(num_tokens)
            page_ids = tree.cache.allocate(num_tokens // PAGE_SIZE)
            assert page_ids is not None
            start = time.perf_counter()
            tree.cache.insert(token_ids, page_ids)
            seconds.append(time.perf_counter() - start)
    curve.add(num_tokens, seconds)


def full_cache(shape: str, num_pages: int, rng: random.Random) -> RadixCache:
    """A cache with `num_pages` pages, all of them cached and held by nobody."""
    cache = RadixCache(num_pages, PAGE_SIZE)
    trunk: list[int] = []
    while cache.pages.num_free:
        if shape == "one page on each edge":
            token_ids = random_tokens(rng, PAGE_SIZE)
        elif shape == "512 pages on each edge":
            token_ids = random_tokens(rng, min(512, cache.pages.num_free) * PAGE_SIZE)
        else:  # prompts that fork off one another
            cut = rng.randrange(min(len(trunk) // PAGE_SIZE, 32) + 1) * PAGE_SIZE
            num_new = min(rng.randint(1, 3), cache.pages.num_free)
            token_ids = trunk = trunk[:cut] + random_tokens(rng, num_new * PAGE_SIZE)
        with cache.match_and_lease(token_ids) as lease:
            new = cache.allocate(len(token_ids) // PAGE_SIZE - lease.num_pages)
            assert new is not None
            lease.publish(token_ids, [*lease.page_ids, *new])
    return cache


def measure_eviction(num_pages: int, sizes: Sizes, seed: int, panel: Panel) -> None:
    def evict_singly(cache: RadixCache) -> None:
        for _ in range(num_pages):
            cache.evict(1)

    ways: list[tuple[str, str, Callable[[RadixCache], object]]] = [
        (shape, shape, lambda cache: cache.evict(num_pages))
        for shape in ("one page on each edge", "512 pages on each edge", "forking prompts")
    ]
    ways.append(("forking prompts", "forking prompts, page by page", evict_singly))
    for shape, name, evict in ways:
        seconds = []
        for repeat in range(sizes.repeats):
            cache = full_cache(shape, num_pages, random.Random(seed + repeat))
            with no_collections():
                seconds.append(timed(lambda c=cache, e=evict: e(c), time.thread_time))  # type: ignore[misc]
            assert cache.pages.num_free == num_pages
        panel.curve(name).add(num_pages, seconds)
    panel.curve(FLOOR).add(
        num_pages, [floor_of_eviction(num_pages, seed) for _ in range(sizes.repeats)]
    )


def tree_to_evict_from(num_nodes: int, num_evicted: int, rng: random.Random) -> RadixCache:
    """A cache of `num_nodes` edges, with twice the pages that are to be evicted at least."""
    pages_each = -(-2 * num_evicted // num_nodes)
    cache = RadixCache(4 * num_nodes * pages_each, PAGE_SIZE)
    trunks: list[list[int]] = [[]]
    while cache.tree.num_nodes < num_nodes:
        trunk = trunks[rng.randrange(len(trunks))]
        token_ids = trunk + random_tokens(rng, pages_each * PAGE_SIZE)
        with cache.match_and_lease(token_ids) as lease:
            new = cache.allocate(pages_each)
            assert new is not None
            lease.publish(token_ids, [*lease.page_ids, *new])
        if len(token_ids) < 8 * pages_each * PAGE_SIZE:
            trunks.append(token_ids)
    return cache


def measure_eviction_by_nodes(num_nodes: int, sizes: Sizes, seed: int, panel: Panel) -> None:
    seconds = []
    for repeat in range(sizes.repeats):
        cache = tree_to_evict_from(num_nodes, sizes.evicted, random.Random(seed + repeat))
        num_free = cache.pages.num_free
        with no_collections():
            seconds.append(timed(lambda c=cache: c.evict(sizes.evicted), time.thread_time))  # type: ignore[misc]
        assert cache.pages.num_free == num_free + sizes.evicted
    panel.curve(f"{sizes.evicted:,} pages of forking prompts").add(num_nodes, seconds)


def floor_of_eviction(num_pages: int, seed: int) -> float:
    """Seconds for as many entries to leave an OrderedDict, each with the tokens of a page."""
    rng = random.Random(seed)
    pages = OrderedDict((tuple(random_tokens(rng, PAGE_SIZE)), [n]) for n in range(num_pages))

    def empty() -> None:
        while pages:
            pages.popitem(last=False)

    with no_collections():
        return timed(empty, time.thread_time)


class Waiting:
    """A scheduler whose queue stays as long as it is; computing is bookkeeping."""

    def __init__(self, policy: PolicyName, *, is_shared: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._trunk = random_tokens(self._rng, 1_000) if is_shared else []
        cache = RadixCache(num_pages=1 << 17, page_size=PAGE_SIZE)
        self._kv = KVManager(cache, PAGE_SIZE)
        self.scheduler = Scheduler(
            SchedulerSection(policy=policy, max_wait=1e9), self._kv, clock=lambda: 0.0
        )
        self._ids = count()
        self.plan_seconds: list[float] = []
        self.add_seconds: list[float] = []

    def submit(self) -> None:
        token_ids = self._trunk + random_tokens(self._rng, 200)
        sequence = Sequence(
            request_id=str(next(self._ids)),
            namespace=Namespace(),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            submitted_at=0.0,
            max_length=1 << 20,
        )
        start = time.perf_counter()
        self.scheduler.add(sequence)
        self.add_seconds.append(time.perf_counter() - start)

    def step(self, num_outputs: int = 8) -> None:
        start = time.perf_counter()
        plan = self.scheduler.next_plan()
        self.plan_seconds.append(time.perf_counter() - start)
        self._kv.take_moves()
        for item in plan.work:
            sequence = item.sequence
            sequence.note_computed(item.num_tokens)
            self._kv.publish(sequence)
            if sequence.num_uncomputed_tokens:
                continue
            length = len(sequence.token_ids)
            if length - sequence.num_prompt_tokens + 1 >= num_outputs:
                self.scheduler.finish(sequence)
            else:
                sequence.token_ids.append(VOCABULARY + length)


def measure_plans(
    policy: PolicyName,
    num_waiting: int,
    is_shared: bool,
    sizes: Sizes,
    seed: int,
    figures: Figures,
) -> None:
    simulation = Waiting(policy, is_shared=is_shared, seed=seed)
    with no_collections():
        for _ in range(sizes.steps):
            while len(simulation.scheduler.waiting) < num_waiting:
                simulation.submit()
            simulation.step()
    name = f"{policy}, one trunk" if is_shared else policy
    figures.plan.curve(name).add(num_waiting, simulation.plan_seconds)
    # The queue is at its length in the end.
    figures.queue.curve(name).add(num_waiting, simulation.add_seconds[-max(10, sizes.steps) :])


def print_tables(figures: Figures) -> None:
    for panel in figures.panels:
        if not panel.curves:
            continue
        print(f"\n{panel.title}: microseconds, median (99th percentile)")
        sizes = sorted({point.size for curve in panel.curves.values() for point in curve.points})
        width = 2 + max(len(panel.over), *(len(name) for name in panel.curves))
        print(f"{panel.over:{width}}" + "".join(f"{size:>20,}" for size in sizes) + "   slope")
        for curve in panel.curves.values():
            by_size = {point.size: point for point in curve.points}
            cells = [_cell(by_size.get(size)) for size in sizes]
            slope = "" if curve.slope is None else f"{curve.slope:8.2f}"
            print(f"{curve.name:{width}}" + "".join(f"{cell:>20}" for cell in cells) + slope)


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    digits = 0 if point.median >= 100 else 1
    return f"{point.median:,.{digits}f} ({point.p99:,.{digits}f})"


def verdicts(figures: Figures) -> dict[str, bool]:
    """The goals that were measured, and whether they are met."""
    met = {}
    for point in figures.match_nodes.curve("whole key cached").points:
        if point.size == MATCH_GOAL_NODES:
            goal = (
                f"a match of {KEY_TOKENS:,} tokens among {MATCH_GOAL_NODES:,} nodes takes less "
                f"than {MATCH_GOAL_US:.0f} us: {point.median:.1f} us"
            )
            met[goal] = point.median < MATCH_GOAL_US
    for curve in figures.evict_nodes.curves.values():
        if curve.slope is not None:
            goal = (
                f"evicting {curve.name} grows no faster than linearly in the nodes of the tree: "
                f"slope {curve.slope:.2f}"
            )
            met[goal] = curve.slope <= 1.0 + EVICTION_GOAL_EXCESS
    floor = figures.evict.curve(FLOOR).slope
    for curve in figures.evict.curves.values():
        if curve.slope is not None and floor is not None and curve.name != FLOOR:
            goal = (
                f"evicting all of n pages grows no faster than linearly ({curve.name}): slope "
                f"{curve.slope:.2f}, that of an OrderedDict {floor:.2f}"
            )
            met[goal] = curve.slope <= max(1.0, floor) + EVICTION_GOAL_EXCESS
    return met


def plot(figures: Figures, path: Path) -> None:
    """Every panel on logarithmic scales. The same figures give the same file."""
    panels = [panel for panel in figures.panels if panel.curves]
    num_rows = -(-len(panels) // 2)
    with svg_figure(path, num_rows, 2, (10, 3.4 * num_rows)) as grid:
        for axes, panel in zip(grid.flat, panels, strict=False):
            for curve in panel.curves.values():
                slope = "" if curve.slope is None else f" (slope {curve.slope:.2f})"
                xs = [point.size for point in curve.points]
                ys = [point.median for point in curve.points]
                style = "--" if curve.name.endswith("one trunk") else "-"
                axes.loglog(xs, ys, style, marker="o", markersize=3, label=curve.name + slope)
            if panel is figures.match_nodes:
                axes.axhline(MATCH_GOAL_US, color="grey", linewidth=0.8, linestyle=":")
            sizes = sorted({p.size for curve in panel.curves.values() for p in curve.points})
            axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes], rotation=30)
            axes.set_xticks([], minor=True)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.over)
            axes.set_ylabel("microseconds, median")
            axes.grid(visible=True, which="major", linewidth=0.3)
            axes.legend(fontsize=7)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)


def save(figures: Figures, seed: int, path: Path) -> None:
    data = {
        "seed": seed,
        "panels": [
            {
                "title": panel.title,
                "over": panel.over,
                "curves": [
                    {**asdict(curve), "slope": curve.slope} for curve in panel.curves.values()
                ],
            }
            for panel in figures.panels
        ],
        "goals": verdicts(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None, sizes: Sizes | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few sizes and samples")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="plot the figures to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)
    figures = Figures()
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"  {time.monotonic() - start:5.0f} s  {what}", file=sys.stderr, flush=True)

    try:
        measure(sizes or (QUICK if args.quick else Sizes()), args.seed, figures, say)
    except KeyboardInterrupt:
        print("  interrupted: what follows is not complete", file=sys.stderr)
    print_tables(figures)
    print()
    for goal, is_met in verdicts(figures).items():
        print(f"{'met    ' if is_met else 'NOT MET'}  {goal}")
    if args.plot:
        plot(figures, args.plot)
    if args.json:
        save(figures, args.seed, args.json)


if __name__ == "__main__":
    main()
