"""Steps of constrained texts: at once where they are quick, else on threads beside the engine's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from palmette.grammar.patience import OutOfPatience, Patience, patient
from palmette.runtime.constraints import Step

# Processor time. A step is tried for so long on the engine's thread, while all others wait; and all
# of those between two forward passes together may take so long. Most take microseconds.
_SECONDS_AT_ONCE = 0.005
_SECONDS_PER_ROUND = 0.02

# So many constraints can be slow at the same time before one waits for another.
_NUM_THREADS = 4

Job = Callable[[], Step]


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a job that took longer; `error` if it failed."""

    request_id: str
    step: Step | None = None
    error: Exception | None = None


class Following:
    """Carries out jobs, one at a time for each request.

    Which thread a job runs on changes when its result is there, and not what it is. Not
    thread-safe; the jobs of one request must not touch what another's change.
    """

    def __init__(self, num_threads: int = _NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[str, tuple[Future[tuple[Step, float]], Patience]] = {}
        self._slow: set[str] = set()  # requests whose last job took long
        self._seconds_left = _SECONDS_PER_ROUND

    @property
    def is_busy(self) -> bool:
        """Whether any job is under way."""
        return bool(self._under_way)

    def begin_round(self) -> None:
        """Others have had their turn: jobs may be tried at once again."""
        self._seconds_left = _SECONDS_PER_ROUND

    def run(self, request_id: str, job: Job) -> Step | None:
        """The job's result, or None if it takes longer: then `take` gives it. Raises as it does."""
        if request_id in self._under_way:
            raise RuntimeError(f"request {request_id} is being followed already")
        seconds = min(_SECONDS_AT_ONCE, self._seconds_left)
        if seconds > 0 and request_id not in self._slow:
            patience = Patience(seconds)
            try:
                with patient(patience):
                    return job()
            except OutOfPatience:
                pass
            finally:
                self._seconds_left -= patience.seconds_spent
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, "palmette-follow")
        self._slow.add(request_id)
        patience = Patience(rests=True)
        self._under_way[request_id] = self._threads.submit(_carry_out, job, patience), patience
        return None

    def take(self) -> list[Found]:
        """What was found since the last call, in the order in which the jobs were begun."""
        if not self._under_way:
            return []
        done = [name for name, (future, _) in self._under_way.items() if future.done()]
        found = []
        for name in done:
            future, _ = self._under_way.pop(name)
            error = future.exception()
            if error is None:
                step, seconds = future.result()
                found.append(Found(name, step))
                if seconds < _SECONDS_AT_ONCE:
                    self._slow.discard(name)
            elif isinstance(error, Exception):
                found.append(Found(name, error=error))
            else:
                raise error
        return found

    def wait(self, seconds: float) -> None:
        """Until some job has ended, or for so long."""
        wait([future for future, _ in self._under_way.values()], seconds, FIRST_COMPLETED)

    def give_up(self, request_id: str) -> None:
        """The request has ended: its job, if there is one, ends soon, and nobody hears of it."""
        self._slow.discard(request_id)
        future, patience = self._under_way.pop(request_id, (None, None))
        if future is not None and patience is not None:
            patience.cancel()
            future.cancel()

    def close(self) -> None:
        """End all jobs; there will be no more."""
        for name in list(self._under_way):
            self.give_up(name)
        if self._threads is not None:
            self._threads.shutdown(wait=True)


def _carry_out(job: Job, patience: Patience) -> tuple[Step, float]:
    """What the job finds, and the processor time it takes."""
    with patient(patience):
        return job(), patience.seconds_spent
