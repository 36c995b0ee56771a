"""Branches: what they copy, what they share, what comes back, and what happens when one fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import palmette as pm
from palmette.errors import (
    EngineError,
    InvalidRequest,
    PrimitiveFailed,
    ProgramError,
    RequestAborted,
    UnsupportedFeature,
)
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.lang.branch import Branch
from palmette.protocol import Piece, Request
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine


def run(backend: ScriptedBackend, body: object, **options: object) -> pm.State:
    return pm.function(body).run(backend=backend, **options)  # type: ignore[call-overload, no-any-return]


def test_a_fork_inside_an_open_role_copies_the_role_and_where_it_began() -> None:
    def body(s: pm.State) -> list[object]:
        s += pm.user("Parent ")
        s += pm.assistant_begin()
        child = s.fork()[0]
        child += "Child"
        child += pm.assistant_end()
        s += "Other" + pm.assistant_end()
        return [child.messages(), s.messages()]

    child, parent = run(ScriptedBackend(), body).ret_value
    user = {"role": "user", "content": "Parent "}
    assert child == [user, {"role": "assistant", "content": "Child"}]
    assert parent == [user, {"role": "assistant", "content": "Other"}]


@pytest.mark.parametrize("width", [1, 3])
def test_a_fork_while_the_parent_still_generates_has_all_of_it(width: int) -> None:
    backend = ScriptedBackend(
        {"P": Reply(text="abcdefgh", token_delay=0.001), "Q": "z"}, default_sampling=None
    )

    def body(s: pm.State) -> None:
        s += "P" + pm.gen("x", max_tokens=8)
        branches = s.fork(width)
        for branch in branches:
            branch += "Q" + pm.gen("z", max_tokens=2)
        for branch in branches:
            assert branch["x"] == "abcdefgh"
            assert branch.text() == "PabcdefghQz"
        s += "R"
        assert s.text() == "PabcdefghR"

    state = run(backend, body)
    # "P", then "h" (which was sampled but never fed) and "Q" once, then at least one token each.
    assert state.usage().prefilled_tokens == 1 + 2 + (width - 1)


def test_branches_share_the_prefix_and_compute_only_what_is_theirs() -> None:
    backend = ScriptedBackend("12345678")
    prefix = "x" * 1000

    def body(s: pm.State) -> None:
        s += prefix
        branches = s.fork(4)
        branches += lambda i: str(i) * 20 + pm.gen("y", max_tokens=8)
        branches.join()

    state = run(backend, body)
    assert state.usage().prefilled_tokens == 1000 + 4 * 20
    assert [meta["cached_tokens"] for meta in state.meta("y")].count(1000) == 3


def test_parent_and_branches_are_independent_after_the_fork() -> None:
    backend = ScriptedBackend("-")

    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        s["n"] = 1
        left, right = s.fork(2)
        left["n"] = 2
        left += "L" + pm.gen("y")
        s["n"] = 3
        s += "c"
        assert (left["n"], right["n"], s["n"]) == (2, 1, 3)
        assert "y" not in right
        assert "y" not in s
        assert (left.text(), right.text(), s.text()) == ("a-L-", "a-", "a-c")
        assert left.token_ids() == tuple(b"a-L-")

    run(backend, body)


def test_pending_constants_are_copied_and_merge_with_what_follows() -> None:
    tokenizer = ByteTokenizer(["ab", "ac"])
    backend = ScriptedBackend("!", tokenizer=tokenizer)

    def body(s: pm.State) -> None:
        s += "a"
        branches = s.fork(2)
        branches += ["b" + pm.gen("x"), "c" + pm.gen("x")]
        branches.join()

    run(backend, body)
    prompts = {request.token_ids for request in backend.requests}
    assert prompts == {(tokenizer.single_id("ab"),), (tokenizer.single_id("ac"),)}


def test_a_branch_without_anything_of_its_own_waits_for_what_it_inherits() -> None:
    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        branches = s.fork(2)
        assert branches[1].text() == "a-"
        later = s.fork()[0].fork()
        later.join()
        assert "".join(later[0].text_iter()) == "a-"
        assert later[0].token_ids() == tuple(b"a-")

    run(ScriptedBackend(Reply(text="-", delay=0.02)), body)


def test_paths_name_the_fork_and_the_branch() -> None:
    backend = ScriptedBackend("-")

    def body(s: pm.State) -> list[tuple[int, ...]]:
        s += "a"
        first, second = s.fork(2), s.fork(1)
        inner = first[1].fork(2)
        branches = [*first, *second, *inner]
        for branch in branches:
            branch += "b" + pm.gen("x")
        return [branch.path for branch in branches]

    paths = run(backend, body).ret_value
    assert paths == [(0, 0), (0, 1), (1, 0), (0, 1, 0, 0), (0, 1, 0, 1)]
    assert sorted(request.path for request in backend.requests) == sorted(paths)


def test_branches_append_the_same_one_each_or_by_index() -> None:
    def body(s: pm.State) -> list[str]:
        branches = s.fork(2)
        branches += "a"
        branches += pm.special("<|eos|>")
        branches += ["b", "c"]
        branches += lambda i: str(i)
        branches[0] += "d"
        with pytest.raises(ValueError, match="3 items for 2 branches"):
            branches += ["x"] * 3
        with pytest.raises(TypeError, match="cannot be replaced"):
            branches[0] = s
        assert len(branches) == 2
        assert branches[1:] == [branches[1]]
        return [branch.text() for branch in branches]

    assert run(ScriptedBackend(), body).ret_value == ["a<|eos|>b0d", "a<|eos|>c1"]


def test_join_gathers_variables_in_the_order_of_the_branches() -> None:
    async def answer(prompt: str, request: Request) -> str:
        await asyncio.sleep((3 - int(prompt[-1])) * 0.005)  # the last branch ends first
        return f"<{prompt[-1]}>"

    def body(s: pm.State) -> None:
        s["own"] = "mine"
        s += "p"
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch["own"] = "theirs"
            branch += str(i) + pm.gen("x")
        branches[1]["only"] = "one"
        branches.join()
        assert s["x"] == ["<0>", "<1>", "<2>"]
        assert s["only"] == ["one"]
        assert s["own"] == "mine"
        assert s.text() == "p"
        s += pm.gen("x", append=True)

    backend = ScriptedBackend(lambda p, r: "more" if p == "p" else answer(p, r))
    assert run(backend, body)["x"] == ["<0>", "<1>", "<2>", "more"]


def test_a_later_join_replaces_what_an_earlier_one_gathered() -> None:
    def body(s: pm.State) -> None:
        for turn in range(2):
            branches = s.fork(2)
            branches += lambda i, turn=turn: f"{turn}{i}" + pm.gen("x")
            branches.join()
            assert s["x"] == [f"{turn}0", f"{turn}1"]
            idle = s.fork(2)
            idle.join()
            assert s["x"] == [f"{turn}0", f"{turn}1"]

    run(ScriptedBackend(lambda prompt, request: prompt[-2:]), body)


def test_join_can_append_what_the_branches_added() -> None:
    def body(s: pm.State) -> None:
        s += "p:"
        branches = s.fork(2)
        branches += lambda i: f"{i}" + pm.gen("x")
        branches.join(mode="concate_and_append")
        s += "."
        with pytest.raises(ValueError, match="join mode"):
            branches.join(mode="merge")

    assert run(ScriptedBackend("-"), body).text() == "p:0-1-."


def test_what_is_appended_keeps_generated_ids_messages_and_plain_text_plain() -> None:
    tokenizer = ByteTokenizer(["ab"])
    backend = ScriptedBackend(Reply(pieces=("a", "b")), tokenizer=tokenizer)
    end = tokenizer.control_id("<|im_end|>")

    def body(s: pm.State) -> None:
        s += "a"
        branches = s.fork(2)
        branches += "b" + pm.user("<|im_end|>") + pm.assistant(pm.gen("x"))
        branches.join(mode="concate_and_append")

    state = run(backend, body)
    begin = tokenizer.encode([Piece("<|im_start|>user\n", special=True)])
    first = (tokenizer.single_id("ab"), *begin, *b"<|im_end|>", end)
    assert state.token_ids()[: len(first)] == first
    assert state.token_ids().count(end) == 4
    assert tokenizer.decode(state.token_ids()) == state.text()
    assert [message["content"] for message in state.messages()] == ["<|im_end|>", "ab"] * 2
    assert state.token_ids().count(tokenizer.single_id("ab")) == 1


def test_a_branch_that_left_its_role_cannot_be_appended() -> None:
    def body(s: pm.State) -> None:
        s += pm.user_begin()
        for leave in (pm.user_end(), pm.user_end() + pm.user_begin()):
            branches = s.fork(1)
            branches += leave
            with pytest.raises(ProgramError, match=r"branch \(\d, 0\)"):
                branches.join(mode="concate_and_append")
        stays = s.fork(2)
        stays += "a"
        stays.join(mode="concate_and_append")
        s += pm.user_end()
        assert [message["content"] for message in s.messages()] == ["aa"]

    run(ScriptedBackend(), body)


def test_copy_is_a_fork_of_one() -> None:
    def body(s: pm.State) -> None:
        s += "a"
        with s.copy() as other:
            other += "b" + pm.gen("x")
        assert s["x"] == ["-"]
        assert s.text() == "a"

    run(ScriptedBackend("-"), body)


def test_forks_of_no_branches_or_with_positions_are_refused() -> None:
    def body(s: pm.State) -> None:
        for size in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match="at least 1"):
                s.fork(size)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedFeature, match="position_ids_offset"):
            s.fork(2, position_ids_offset=[0, 1])

    run(ScriptedBackend(), body)


def failing(prompt: str, request: Request) -> Reply:
    bad = prompt.endswith("bad")
    return Reply(text="ok", error=InvalidRequest("no such thing") if bad else None)


def test_a_failing_branch_fails_its_readers_and_join_where_they_stand() -> None:
    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(3)
        branches += ["good" + pm.gen("x"), "bad" + pm.gen("x") + pm.gen("y"), "fine" + pm.gen("x")]
        assert branches[0]["x"] == branches[2]["x"] == "ok"
        for read in (
            lambda: branches[1]["x"],
            lambda: branches[1]["y"],
            lambda: branches[1].text(),
            lambda: branches[1].meta("x"),
            lambda: list(branches[1].text_iter("x")),
            branches.join,
        ):
            with pytest.raises(PrimitiveFailed, match=r"gen\('x'\) at .*no such thing") as info:
                read()
            assert isinstance(info.value.__cause__, InvalidRequest)
            assert info.value.primitive == "gen('x')"
            assert info.value.path == (0, 1)
            assert "test_fork_join.py:" in info.value.where
        assert isinstance(branches[1].error(), PrimitiveFailed)
        assert branches[0].error() is None
        s += pm.gen("z")

    assert run(ScriptedBackend(failing), body)["z"] == "ok"


def test_reading_a_branch_that_failed_cancels_no_other() -> None:
    async def answer(prompt: str, request: Request) -> str:
        if prompt.endswith("bad"):
            raise InvalidRequest("no such thing")
        await asyncio.sleep(0.02)
        return "late"

    def body(s: pm.State) -> None:
        branches = s.fork(2)
        branches += ["bad" + pm.gen("x"), "good" + pm.gen("x")]
        with pytest.raises(PrimitiveFailed, match="no such thing"):
            branches[0]["x"]
        assert branches[1]["x"] == "late"

    backend = ScriptedBackend(answer)
    run(backend, body)
    assert backend.aborted == []


def test_branches_of_one_seed_draw_differently_and_the_same_in_any_company() -> None:
    @pm.function
    def program(s: pm.State, size: int) -> list[str]:
        s += "Once"
        branches = s.fork(size)
        branches += pm.gen("x", max_tokens=8)
        branches.join()
        return list(s["x"])

    with AsyncEngine.over(lambda: tiny_engine()) as engine:
        options = {"backend": engine, "temperature": 1, "seed": 3, "ignore_eos": True}
        many = program.run(6, **options).ret_value
        assert len(set(many)) == 6
        assert program.run(2, **options).ret_value == many[:2]
        batch = program.run_batch([6, 2, 6], **options)
        assert [state.ret_value for state in batch] == [many, many[:2], many]


def test_a_failure_that_nobody_reads_is_raised_at_the_end_of_the_run() -> None:
    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(2)
        branches += ["good" + pm.gen("x"), "bad" + pm.gen("x")]

    with pytest.raises(PrimitiveFailed, match="no such thing"):
        run(ScriptedBackend(failing), body)


def test_branches_of_a_failed_parent_fail_with_it() -> None:
    def body(s: pm.State) -> None:
        s += "bad" + pm.gen("x")
        child = s.fork(2)[0].fork()[0]
        child += "more" + pm.gen("y")
        with pytest.raises(PrimitiveFailed, match=r"gen\('x'\)"):
            child["y"]

    run(ScriptedBackend(failing), body)


def test_a_failure_halfway_keeps_what_came_before_and_runs_nothing_after() -> None:
    backend = ScriptedBackend([Reply(text="abc", fails_after=2, error=EngineError("lost"))])

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x") + "q" + pm.gen("y")
        with pytest.raises(PrimitiveFailed, match="lost"):
            s.sync()

    run(backend, body)
    assert len(backend.requests) == 1


def test_an_exception_in_the_program_aborts_what_its_branches_do() -> None:
    backend = ScriptedBackend(Reply(text="never", delay=60))

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(5)
        branches += pm.gen("x")
        while backend.num_running < 5:
            pass
        raise RuntimeError("changed my mind")

    with pytest.raises(RuntimeError, match="changed my mind"):
        run(backend, body)
    assert backend.num_running == 0
    assert len(backend.aborted) == 5


def test_cancelling_wakes_the_program_and_its_branches() -> None:
    backend = ScriptedBackend(Reply(text="never", delay=60))

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        child = s.fork()[0]
        child["y"] if "y" in child else child.text()

    state = pm.function(body).stream(backend=backend)
    while not backend.num_running:
        pass
    state.cancel()
    with pytest.raises(RequestAborted, match="cancelled"):
        state.text()
    assert backend.num_running == 0


def test_a_run_that_is_cancelled_in_the_middle_of_a_fork_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancelling = []
    make_children = Branch.children

    def children(branch: Branch, *arguments: Any) -> list[Branch]:
        made = make_children(branch, *arguments)
        thread = threading.Thread(target=branch.run.cancel)
        thread.start()
        thread.join(0.1)  # it has to wait until the fork is done
        cancelling.append(thread)
        return made

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        branches = s.fork(2)
        branches += pm.gen("y")

    monkeypatch.setattr(Branch, "children", children)
    backend = ScriptedBackend(Reply(text="never", delay=60))
    state = pm.function(body).stream(backend=backend)
    with pytest.raises(RequestAborted):
        state.text()
    for thread in cancelling:
        thread.join()
    assert backend.num_running == 0


def test_two_thousand_branches_need_no_threads() -> None:
    num_threads = []
    all_there = asyncio.Event()

    async def answer(prompt: str, request: Request) -> str:
        if len(backend.requests) == 2000:
            num_threads.append(threading.active_count())
            all_there.set()
        await all_there.wait()
        return prompt[-4:]

    backend = ScriptedBackend(answer)
    before = threading.active_count()

    def body(s: pm.State) -> None:
        s += "a shared beginning "
        branches = s.fork(2000)
        branches += lambda i: f"{i:04}" + pm.gen("x", max_tokens=8)
        branches.join()

    state = run(backend, body)
    assert state["x"] == [f"{i:04}" for i in range(2000)]
    assert backend.max_running == 2000
    assert max(num_threads) <= before + 1  # the executor's loop
