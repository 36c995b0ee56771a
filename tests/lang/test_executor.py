"""The threads that programs share."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import time

import pytest

from palmette.lang.executor import LoopThread, ThreadPool
from palmette.lang.signals import Signal

place = contextvars.ContextVar("place", default="")


def test_a_pool_has_no_more_threads_than_its_size_and_loses_no_work() -> None:
    pool = ThreadPool(3, "test-pool")
    names: set[str] = set()

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        time.sleep(0.0005)
        return number

    futures = [pool.submit(lambda number=number: work(number)) for number in range(50)]
    assert [future.result() for future in futures] == list(range(50))
    assert 1 <= len(names) <= 3
    pool.close()


def test_an_idle_thread_is_used_again() -> None:
    pool = ThreadPool(8, "test-idle")
    for _ in range(20):
        name = pool.submit(lambda: threading.current_thread().name).result()
        while not pool._num_idle:
            time.sleep(0.0005)
        assert name == "test-idle-1"
    pool.close()


def test_a_closed_pool_ends_its_threads_after_what_was_submitted() -> None:
    pool = ThreadPool(2, "test-close")
    futures = [pool.submit(lambda: time.sleep(0.002)) for _ in range(5)]
    pool.close()
    for future in futures:
        future.result()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("test-close") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_work_runs_in_the_context_of_who_submits_it_and_raises_there() -> None:
    pool = ThreadPool(1, "test-context")
    place.set("here")
    assert pool.submit(place.get).result() == "here"
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    assert pool.submit(lambda: 1).result() == 1
    pool.close()


def test_a_loop_thread_starts_when_it_is_needed() -> None:
    loop = LoopThread("test-loop")
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}

    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, loop.is_current()

    assert loop.spawn(where()).result() == ("test-loop", True)
    assert not loop.is_current()


def test_a_signal_wakes_threads_and_loops() -> None:
    lock = threading.Lock()
    signal = Signal(lock)
    box: list[int] = []

    def check() -> int | None:
        return box[0] if box else None

    pool = ThreadPool(2, "test-signal")
    in_thread = pool.submit(lambda: signal.wait(check))
    in_loop = pool.submit(lambda: asyncio.run(signal.wait_async(check)))
    time.sleep(0.01)
    assert signal.poll(check) is None
    with lock:
        signal.notify()  # nothing to see yet
    with lock:
        box.append(7)
        signal.notify()
    assert in_thread.result(10) == in_loop.result(10) == signal.poll(check) == 7
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_runs_programs_of_its_own() -> None:
    program = """
import os, sys
import palmette as pm

@pm.function
def program(s):
    s += "a" + pm.gen("x")

def both(answer):
    backend = pm.ScriptedBackend(answer)
    return program.run(backend=backend)["x"] + program.stream(backend=backend)["x"]

print(both("1"), flush=True)
child = os.fork()
os.write(1, (both("2") + "\\n").encode())
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["11", "22", "22"]
    assert done.returncode == 0
