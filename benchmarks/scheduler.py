"""What the scheduler costs and what it saves, without a model: computing is bookkeeping here.

Two tables. How near each policy comes to the fewest tokens that must be prefilled (each edge of the
prompts' prefix tree once), for a batch of prompts that share beginnings on three levels and arrive
in random order, in pools of different sizes. And how long a step's plan takes with 100 to 5,000
requests waiting.

    python -m benchmarks.scheduler
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from palmette.radix_cache import Namespace, RadixCache
from palmette.runtime.config import PolicyName, SchedulerSection
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.scheduler import Plan, Scheduler
from palmette.runtime.sequence import Sequence

PAGE_SIZE = 16
NUM_OUTPUTS = 8
POLICIES: tuple[PolicyName, ...] = ("program", "lpm", "fcfs")


class Simulation:
    """A scheduler over pages, and sequences that produce `NUM_OUTPUTS` tokens each."""

    def __init__(self, policy: PolicyName, pool_tokens: int) -> None:
        cache = RadixCache(num_pages=pool_tokens // PAGE_SIZE, page_size=PAGE_SIZE)
        self.kv = KVManager(cache, PAGE_SIZE)
        # A known batch: nobody is a newcomer who would have to be protected from it.
        config = SchedulerSection(policy=policy, max_wait=1e9)
        self.scheduler = Scheduler(config, self.kv, clock=lambda: 0.0)
        self.plan_seconds: list[float] = []

    def submit(self, token_ids: list[int]) -> Sequence:
        sequence = Sequence(
            request_id="",
            namespace=Namespace(),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            submitted_at=0.0,
            max_length=self.kv.num_pages * PAGE_SIZE,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        start = time.perf_counter()
        plan = self.scheduler.next_plan()
        self.plan_seconds.append(time.perf_counter() - start)
        self.kv.take_moves()
        for item in plan.work:
            sequence = item.sequence
            sequence.note_computed(item.num_tokens)
            self.kv.publish(sequence)
            if sequence.num_uncomputed_tokens:
                continue
            length = len(sequence.token_ids)
            if length - sequence.num_prompt_tokens + 1 >= NUM_OUTPUTS:
                self.scheduler.finish(sequence)
            else:
                sequence.token_ids.append(-length)
        return plan


def shared_prompts(seed: int) -> list[list[int]]:
    """400 prompts: one root, 20 trunks, 4 branches of each, 5 leaves of each branch, shuffled."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(40_000) for _ in range(count)]

    root = tokens(100)
    prompts = []
    for _ in range(20):
        trunk = root + tokens(200)
        for _ in range(4):
            branch = trunk + tokens(60)
            prompts += [branch + tokens(30) for _ in range(5)]
    rng.shuffle(prompts)
    return prompts


def print_hit_rates(seed: int) -> None:
    prompts = shared_prompts(seed)
    num_tokens = sum(map(len, prompts))
    fewest = len({tuple(p[: n + 1]) for p in prompts for n in range(len(p))})
    longest = max(map(len, prompts)) + NUM_OUTPUTS
    best = 1 - fewest / num_tokens
    print(f"{len(prompts)} prompts, {num_tokens:,} tokens, {fewest:,} of them different: at best")
    print(f"{best:.1%} cached. The longest request has {longest} tokens.\n")
    print(f"{'pool':>9} {'policy':>8} {'prefilled':>10} {'hit rate':>9} {'of the best':>12}")
    for pool in (2 * longest, 4 * longest, 16 * longest, 1 << 17):
        for policy in POLICIES:
            simulation = Simulation(policy, pool)
            sequences = [simulation.submit(prompt) for prompt in prompts]
            while simulation.scheduler.has_work:
                simulation.step()
            prefilled = sum(s.tally.prefilled for s in sequences)
            rate = 1 - prefilled / num_tokens
            print(f"{pool:>9,} {policy:>8} {prefilled:>10,} {rate:>9.1%} {rate / best:>12.1%}")


def print_step_costs(seed: int) -> None:
    print(f"\n{'prompts':>16} {'policy':>8} {'waiting':>8} {'median us':>10} {'p99 us':>8}")
    for is_shared in (False, True):
        for policy in POLICIES:
            for num_waiting in (100, 1_000, 5_000):
                rng = random.Random(seed)
                trunk = [rng.randrange(40_000) for _ in range(1_000)] if is_shared else []
                simulation = Simulation(policy, 1 << 21)
                for _ in range(num_waiting):
                    simulation.submit(trunk + [rng.randrange(40_000) for _ in range(200)])
                for _ in range(40):
                    simulation.step()
                microseconds = sorted(1e6 * seconds for seconds in simulation.plan_seconds)
                p99 = microseconds[int(0.99 * (len(microseconds) - 1))]
                name = "one long trunk" if is_shared else "nothing shared"
                print(
                    f"{name:>16} {policy:>8} {num_waiting:>8,} "
                    f"{statistics.median(microseconds):>10.0f} {p99:>8.0f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print_hit_rates(args.seed)
    print_step_costs(args.seed)


if __name__ == "__main__":
    main()
