"""Frozen prefixes: what comes back is what was computed, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import (
    CacheFull,
    EngineStopped,
    FrozenPrefixError,
    InvalidRequest,
    ModelFileError,
    RequestTooLarge,
    UnsupportedFeature,
)
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenEvent,
)
from palmette.radix_cache import invariants
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.kv.frozen import FrozenPrefix, Identity, read_frozen, write_frozen
from palmette.runtime.loading import LoadedModel
from palmette.runtime.loading.digest import WeightFiles
from palmette.runtime.models.config import RopeConfig
from palmette.runtime.testing import tiny_engine, tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer

PREFIX = tuple(b"The keeper of the lantern writes down every ship that passes.\n")  # 62 tokens
QUESTION = tuple(b"Which ship passed first?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ask(
    engine: Engine,
    token_ids: tuple[int, ...],
    request_id: str = "ask",
    *,
    max_tokens: int = GREEDY.max_tokens,
) -> TokenEvent:
    """The whole answer, as one event."""
    sampling = replace(GREEDY, max_tokens=max_tokens)
    engine.submit(Request(request_id=request_id, token_ids=token_ids, sampling=sampling))
    ids: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            assert event.error is None
            ids += event.token_ids
            if event.finish_reason is not None:
                return TokenEvent(
                    request_id=request_id,
                    token_ids=tuple(ids),
                    finish_reason=event.finish_reason,
                    usage=event.usage,
                )
    raise AssertionError("no last event")


def check_ledger(engine: Engine) -> None:
    invariants.check(engine._kv.cache)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "prefix.safetensors"
    tiny_engine(page_size=4).freeze(PREFIX, path)
    return path


@pytest.mark.parametrize("page_size", [1, 4, 7, 16, 64])
def test_a_thawed_prefix_serves_as_a_computed_one_whatever_the_page_size(
    frozen: Path, page_size: int
) -> None:
    cold = ask(tiny_engine(page_size=page_size), PREFIX + QUESTION)
    engine = tiny_engine(page_size=page_size)
    assert engine.thaw(frozen) == len(PREFIX)
    check_ledger(engine)
    warm = ask(engine, PREFIX + QUESTION)
    assert warm.token_ids == cold.token_ids
    assert warm.usage is not None
    assert warm.usage.cached_tokens == len(PREFIX)
    assert warm.usage.prefilled_tokens == len(QUESTION)
    assert engine.stats().computed_tokens == len(QUESTION) + GREEDY.max_tokens - 1
    check_ledger(engine)


@given(
    num_tokens=st.integers(1, len(PREFIX)),
    num_shared=st.integers(0, len(PREFIX)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    pin=st.booleans(),
)
@settings(max_examples=30)
def test_any_part_of_any_prefix_comes_back_bit_for_bit_beside_what_is_cached(
    tmp_path_factory: pytest.TempPathFactory,
    num_tokens: int,
    num_shared: int,
    sizes: tuple[int, int],
    pin: bool,
) -> None:
    path = tmp_path_factory.mktemp("any") / "prefix"
    prefix = PREFIX[:num_tokens]
    source = tiny_engine(page_size=sizes[0])
    source.freeze(prefix, path)
    check_ledger(source)
    engine = tiny_engine(page_size=sizes[1])
    ask(engine, (*PREFIX[:num_shared], 200, 201))
    engine.thaw(path, pin=pin)
    check_ledger(engine)
    computed = engine.stats().computed_tokens
    back = engine.copy_prefix(prefix)
    assert engine.stats().computed_tokens == computed
    there = source.copy_prefix(prefix)
    shared = min(num_shared, num_tokens)
    # The part that was there is kept as it is; the rest is from the file.
    assert torch.equal(
        back.keys_and_values[:, :, :, shared:], there.keys_and_values[:, :, :, shared:]
    )
    torch.testing.assert_close(back.keys_and_values, there.keys_and_values)
    assert ask(engine, prefix + QUESTION).token_ids == ask(source, prefix + QUESTION).token_ids
    check_ledger(engine)


def test_freezing_computes_only_what_is_not_cached(tmp_path: Path) -> None:
    engine = tiny_engine(page_size=4)
    engine.freeze(PREFIX[:30], tmp_path / "a")
    engine.freeze(PREFIX, tmp_path / "b")
    engine.freeze(PREFIX[:50], tmp_path / "c")
    assert engine.stats().computed_tokens == len(PREFIX)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_freezing_between_steps_loses_no_event_of_others(tmp_path: Path) -> None:
    expected = ask(tiny_engine(), QUESTION).token_ids
    engine = tiny_engine(max_batch_tokens=16)
    engine.submit(Request(request_id="other", token_ids=QUESTION, sampling=GREEDY))
    first = engine.step()
    engine.freeze(PREFIX, tmp_path / "prefix")
    events = [*first]
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {"other"}
    assert sum((e.token_ids for e in events if isinstance(e, TokenEvent)), ()) == expected
    assert events[-1].finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_a_file_holds_the_tokens_of_the_prefix_and_no_rest_of_a_page(frozen: Path) -> None:
    engine = tiny_engine()
    prefix = read_frozen(frozen, engine.identity)
    assert prefix.token_ids == PREFIX
    assert tuple(prefix.keys_and_values.shape) == (2, 2, 2, len(PREFIX), 8)
    assert frozen.stat().st_size < prefix.keys_and_values.nbytes + 8 * len(PREFIX) + 1024
    assert frozen.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Refusals


def test_other_weights_are_refused(frozen: Path) -> None:
    engine = tiny_engine(seed=1)
    with pytest.raises(FrozenPrefixError, match=r"prefix\.safetensors: was frozen with other wei"):
        engine.thaw(frozen)
    assert engine.stats().num_free_pages == engine.stats().num_pages


def test_every_other_part_of_the_identity_is_compared(tmp_path: Path) -> None:
    def assemble(loaded: LoadedModel, tokenizer: ByteTokenizer | None = None) -> Engine:
        config = EngineConfig.of({"num_pages": 16})
        return Engine.assemble("tiny", loaded, tokenizer or ByteTokenizer(), config)

    loaded = tiny_model()
    path = tmp_path / "prefix"
    tiny_engine().freeze(PREFIX, path)
    config = replace(loaded.config, rope=RopeConfig(theta=500.0))
    with pytest.raises(FrozenPrefixError, match="another rope"):
        assemble(replace(loaded, config=config)).thaw(path)
    with pytest.raises(FrozenPrefixError, match=r"another dtype \(float32\) .* \(bfloat16\)"):
        assemble(replace(loaded, dtype=torch.bfloat16)).thaw(path)
    with pytest.raises(FrozenPrefixError, match="another tokenizer"):
        assemble(loaded, ByteTokenizer(add_bos=True)).thaw(path)
    for name, changed in (
        ("num_layers", tiny_model(num_layers=1)),
        ("num_kv_heads", tiny_model(num_kv_heads=1)),
        ("head_dim", tiny_model(head_dim=4)),
    ):
        same = replace(changed, weights_digest=loaded.weights_digest)
        with pytest.raises(FrozenPrefixError, match=f"another {name}"):
            assemble(same).thaw(path)


def _small_file(path: Path) -> Identity:
    identity = Identity.of(
        weights="w" * 64,
        tokenizer="t" * 64,
        dtype=torch.bfloat16,
        rope=RopeConfig(),
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
    )
    numbers = torch.arange(1 * 2 * 1 * 3 * 2).view(1, 2, 1, 3, 2).to(torch.bfloat16)
    write_frozen(path, FrozenPrefix((7, 8, 9), numbers), identity)
    return identity


def test_a_change_of_any_one_byte_is_refused(tmp_path: Path) -> None:
    path, damaged = tmp_path / "prefix", tmp_path / "damaged"
    identity = _small_file(path)
    whole = path.read_bytes()
    assert read_frozen(path, identity).token_ids == (7, 8, 9)
    for place, byte in enumerate(whole):
        for other in {byte ^ 1, byte ^ 0x80, 0x20, 0x0A} - {byte}:
            damaged.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            with pytest.raises(FrozenPrefixError, match="damaged: "):
                read_frozen(damaged, identity)


@given(data=st.data())
@settings(max_examples=200)
def test_damage_of_any_kind_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    identity = _small_file(folder / "prefix")
    whole = (folder / "prefix").read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    put = data.draw(st.binary(max_size=40))
    changed = whole[:start] + put + whole[end:]
    if changed == whole:
        return
    (folder / "damaged").write_bytes(changed)
    with pytest.raises(FrozenPrefixError, match="damaged: "):
        read_frozen(folder / "damaged", identity)


def test_a_flipped_byte_and_a_cut_in_a_real_file_are_refused(frozen: Path, tmp_path: Path) -> None:
    engine = tiny_engine()
    whole = frozen.read_bytes()
    path = tmp_path / "damaged"
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    with pytest.raises(FrozenPrefixError, match="its checksum does not fit"):
        engine.thaw(path)
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FrozenPrefixError, match=str(path)):
            engine.thaw(path)
    assert engine.stats().num_free_pages == engine.stats().num_pages


def test_what_is_no_frozen_prefix_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    identity = tiny_engine().identity
    with pytest.raises(FrozenPrefixError, match="there is no such file"):
        read_frozen(tmp_path, identity)
    with pytest.raises(FrozenPrefixError, match="there is no such file"):
        read_frozen(tmp_path / "absent", identity)
    path = tmp_path / "other"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(FrozenPrefixError, match="is not a frozen prefix"):
        read_frozen(path, identity)
    metadata = {"format": "palmette-frozen-prefix", "format_version": "99"}
    save_file({"x": torch.zeros(2)}, path, metadata)
    with pytest.raises(FrozenPrefixError, match="has format version '99', this Palmette reads"):
        read_frozen(path, identity)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(FrozenPrefixError, match="not a frozen prefix"):
        read_frozen(path, identity)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = tiny_engine()
    with pytest.raises(FrozenPrefixError, match="cannot be written: No such file"):
        engine.freeze(PREFIX, tmp_path / "absent" / "prefix")
    (tmp_path / "taken").mkdir()
    with pytest.raises(FrozenPrefixError, match="cannot be written: Is a directory"):
        engine.freeze(PREFIX, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_what_is_no_file_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """As /dev/null, which whoever may write there would otherwise replace."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "prefix")
    engine = tiny_engine()
    for name, why in (
        ("pipe", "it is no regular file"),
        ("link", "it is no regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("nowhere", "No such file or directory"),
        (".", "Is a directory"),
        ("a\0b", "embedded null byte"),
    ):
        with pytest.raises(FrozenPrefixError, match=f"cannot be written: {why}"):
            engine.freeze(PREFIX, tmp_path / name)
    assert engine.stats().computed_tokens == 0
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    with AsyncEngine.over(tiny_engine) as threaded:
        with pytest.raises(FrozenPrefixError, match="it is no regular file"):
            threaded.freeze(PREFIX, tmp_path / "pipe")
        assert threaded.stats().computed_tokens == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "prefix", tmp_path / "link"
    link.symlink_to(Path("folder") / "prefix")
    if is_there:
        target.write_bytes(b"of another time")
    engine = tiny_engine()
    engine.freeze(PREFIX, link)
    assert link.is_symlink()
    assert not target.is_symlink()
    assert read_frozen(target, engine.identity).token_ids == PREFIX
    assert [path.name for path in target.parent.iterdir()] == ["prefix"]


def test_a_prefix_that_could_be_no_prompt_is_refused(tmp_path: Path) -> None:
    engine = tiny_engine(max_context=32)
    with pytest.raises(InvalidRequest, match="prompt has 62 tokens"):
        engine.freeze(PREFIX, tmp_path / "prefix")
    with pytest.raises(InvalidRequest):
        engine.freeze((), tmp_path / "prefix")
    engine = tiny_engine(prefix_cache=False)
    for act in (lambda: engine.freeze(PREFIX, tmp_path / "p"), lambda: engine.copy_prefix(PREFIX)):
        with pytest.raises(UnsupportedFeature, match="prefix_cache=False"):
            act()
    assert list(tmp_path.iterdir()) == []


# Room


def test_a_pool_that_is_too_small_is_a_clear_error_and_changes_nothing(frozen: Path) -> None:
    engine = tiny_engine(page_size=4, num_pages=15)  # the prefix takes 16
    with pytest.raises(CacheFull, match="needs 16 more pages of 4 tokens, the KV pool has 15"):
        engine.thaw(frozen, pin=False)
    assert engine.stats().num_free_pages == 15
    check_ledger(engine)


def test_a_pool_in_use_makes_room_by_eviction_only(frozen: Path) -> None:
    engine = tiny_engine(page_size=4, num_pages=20)
    ask(engine, QUESTION)
    engine.thaw(frozen, pin=False)
    assert engine.copy_prefix(PREFIX).token_ids == PREFIX
    running = tiny_engine(page_size=4, num_pages=20)
    running.submit(Request(request_id="1", token_ids=QUESTION, sampling=GREEDY))
    running.step()
    with pytest.raises(CacheFull, match="needs 16 more pages"):
        running.thaw(frozen, pin=False)
    check_ledger(running)


def test_the_pin_budget_is_half_the_pool_and_counts_no_page_twice(
    frozen: Path, tmp_path: Path
) -> None:
    engine = tiny_engine(page_size=4, num_pages=31)
    with pytest.raises(CacheFull, match=r"needs 16 more pages, 15 are left of the 15 .* pin=False"):
        engine.thaw(frozen)
    assert engine.stats().num_free_pages == 31
    assert engine.thaw(frozen, pin=False) == len(PREFIX)
    with pytest.raises(CacheFull, match="15 are left"):
        engine.thaw(frozen)
    check_ledger(engine)

    # A longer prefix needs only what it has more.
    longer = (*PREFIX[:61], *QUESTION[:11])  # 72 tokens, 18 pages, 15 of them shared
    tiny_engine().freeze(longer, tmp_path / "longer")
    engine = tiny_engine(page_size=4, num_pages=40)
    engine.thaw(frozen)
    assert engine.thaw(frozen) == len(PREFIX)
    assert engine._kv.cache.num_pinned_pages == 16
    engine.thaw(tmp_path / "longer")
    assert engine._kv.cache.num_pinned_pages == 19
    check_ledger(engine)


def test_what_is_pinned_stays_and_may_go_after_it_was_unpinned(frozen: Path) -> None:
    engine = tiny_engine(page_size=4, num_pages=40)
    engine.thaw(frozen)
    for number in range(8):  # far more than the rest of the pool
        ask(engine, (number, *QUESTION, *QUESTION[:20]))
    engine.flush_cache()
    before = engine.stats().computed_tokens
    engine.copy_prefix(PREFIX)
    assert engine.stats().computed_tokens == before
    engine.unpin_prefixes()
    engine.flush_cache()
    assert engine.stats().num_free_pages == 40
    assert engine.thaw(frozen) == len(PREFIX)
    check_ledger(engine)


def test_a_request_ends_for_its_length_where_only_pinned_pages_are_left(frozen: Path) -> None:
    engine = tiny_engine(page_size=4, num_pages=40)
    engine.thaw(frozen)  # 16 pages, 15 of them whole
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)

    def length(prompt: tuple[int, ...], salt: str = "") -> int:
        request = Request(request_id="long", token_ids=prompt, salt=salt, sampling=long)
        engine.submit(request)
        ids: list[int] = []
        while True:
            for event in engine.step():
                assert isinstance(event, TokenEvent)
                ids += event.token_ids
                if event.finish_reason is not None:
                    assert event.finish_reason is FinishReason.LENGTH
                    return len(prompt) + len(ids)

    assert length(QUESTION) == 24 * 4
    assert length(PREFIX + QUESTION) == (24 + 15) * 4
    assert length(PREFIX) == (24 + 15) * 4
    assert length(PREFIX + QUESTION, salt="s") == 24 * 4
    assert length(PREFIX[:8] + QUESTION) == (24 + 2) * 4
    for salt, prompt in (("", QUESTION * 4), ("s", PREFIX + QUESTION[:-2] * 2)):
        with pytest.raises(RequestTooLarge, match="has 40, 16 of them pinned for other prompts"):
            engine.submit(Request(request_id="1", token_ids=prompt, salt=salt, sampling=long))
    engine.unpin_prefixes()
    assert length(QUESTION) == 40 * 4
    check_ledger(engine)


def events_until_idle(engine: Engine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            events.append(event)
    return events


def test_a_request_that_runs_while_a_prefix_is_pinned_ends_for_its_length() -> None:
    engine = tiny_engine(page_size=4, num_pages=8)
    prefix = engine.copy_prefix(PREFIX[:16])
    engine.flush_cache()
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    engine.submit(Request(request_id="1", token_ids=QUESTION[:3], sampling=long))
    events = [*engine.step(), *engine.step(), *engine.step()]
    engine.add_prefix(prefix)  # four of the eight pages
    events += events_until_idle(engine)
    last = events[-1]
    assert isinstance(last, TokenEvent)
    assert (last.finish_reason, last.error) == (FinishReason.LENGTH, None)
    ids = [i for event in events if isinstance(event, TokenEvent) for i in event.token_ids]
    assert len(QUESTION[:3]) + len(ids) == 4 * 4 + 1  # the last one was drawn and has no place
    assert ids == list(ask(tiny_engine(), QUESTION[:3], max_tokens=len(ids)).token_ids)
    check_ledger(engine)


@pytest.mark.parametrize("is_score", [False, True])
def test_a_request_without_output_for_which_a_pin_left_no_room_is_told_so(is_score: bool) -> None:
    engine = tiny_engine(page_size=4, num_pages=8)
    prefix = engine.copy_prefix(PREFIX[:16])
    if is_score:
        engine.submit(ScoreRequest(request_id="1", token_ids=QUESTION[:18], continuations=((1,),)))
    else:
        engine.submit(Request(request_id="1", token_ids=QUESTION[:18], sampling=GREEDY))
    engine.add_prefix(prefix)
    (event,) = engine.step()
    assert isinstance(event.error, CacheFull)
    assert "needs 5 pages of 4 tokens, and of the 8 of the KV pool 4 are pinned" in str(event.error)
    assert not engine.has_work
    check_ledger(engine)


def test_a_constrained_text_for_which_a_pin_left_no_room_is_not_half_a_text() -> None:
    engine = tiny_engine(page_size=4, num_pages=8)
    prefix = engine.copy_prefix(PREFIX[:16])
    sampling = replace(GREEDY, max_tokens=30)
    constraint = Constraint(kind="regex", source="[a-z]{25}")
    engine.submit(
        Request(request_id="1", token_ids=(97,), sampling=sampling, constraint=constraint)
    )
    engine.step()
    engine.add_prefix(prefix)
    last = events_until_idle(engine)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, CacheFull)
    check_ledger(engine)


# The engine on its own thread


async def test_an_async_engine_freezes_and_thaws_from_any_thread(tmp_path: Path) -> None:
    async def answer(engine: AsyncEngine, request_id: str) -> tuple[tuple[int, ...], int]:
        ids: list[int] = []
        cached = 0
        request = Request(request_id=request_id, token_ids=PREFIX + QUESTION, sampling=GREEDY)
        async for event in engine.generate(request):
            ids += event.token_ids
            if event.usage is not None:
                cached = event.usage.cached_tokens
        return tuple(ids), cached

    path = tmp_path / "prefix"
    with AsyncEngine.over(lambda: tiny_engine(max_batch_tokens=16)) as engine:
        expected, _ = await answer(engine, "cold")
        engine.flush_cache()
        other = asyncio.ensure_future(answer(engine, "meanwhile"))
        await asyncio.to_thread(engine.freeze, PREFIX, path)
        assert (await other)[0] == expected
        engine.freeze(PREFIX, path)  # on the loop's own thread as well
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            engine.freeze([99999], path)
    with AsyncEngine.over(lambda: tiny_engine(page_size=7)) as engine:
        assert engine.thaw(path) == len(PREFIX)
        assert await answer(engine, "warm") == (expected, len(PREFIX))
        engine.unpin_prefixes()
        engine.flush_cache()
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages
    with pytest.raises(EngineStopped):
        engine.freeze(PREFIX, path)
    with pytest.raises(EngineStopped):
        engine.thaw(path)


# The hash of the weights


def test_the_digest_of_a_file_is_its_sha256_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALMETTE_HOME", str(tmp_path / "home"))
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert WeightFiles(model).digest() == expected
    (known,) = (tmp_path / "home" / "digests").iterdir()
    known.write_text("a" * 64)
    assert WeightFiles(model).digest() == "a" * 64
    known.write_text("not a digest")
    assert WeightFiles(model).digest() == expected
    copied = tmp_path / "n.gguf"
    shutil.copyfile(model, copied)
    assert WeightFiles(copied).digest() == expected


def test_files_that_changed_since_they_were_loaded_have_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALMETTE_HOME", "/proc/no-home")  # and nothing can be remembered
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    files = WeightFiles(model)
    assert files.digest() == hashlib.sha256(b"weights").hexdigest()
    model.write_bytes(b"other weights")
    with pytest.raises(ModelFileError, match="has changed since it was loaded"):
        files.digest()
    with pytest.raises(ModelFileError, match="has changed"):
        WeightFiles(tmp_path / "absent").digest()


def test_the_digest_of_a_folder_covers_every_file_with_weights_or_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALMETTE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    names = ("config.json", "a.safetensors", "b.safetensors", "model.safetensors.index.json")
    for name in names:
        (folder / name).write_bytes(name.encode())
    digests = {WeightFiles(folder).digest()}
    for name in names:
        (folder / name).write_bytes(b"changed")
        digests.add(WeightFiles(folder).digest())
    assert len(digests) == len(names) + 1
    (folder / "readme.md").write_bytes(b"x")
    assert WeightFiles(folder).digest() in digests


# The real model


def test_the_real_model_answers_from_a_thawed_prefix_as_from_a_computed_one(
    smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prefix"
    engine = Engine(smollm2, dtype="float32", num_pages=64)
    prefix = tuple(engine.tokenizer.encode("A lighthouse keeper writes down every ship. " * 8))
    prompt = prefix + tuple(engine.tokenizer.encode("The first ship"))
    cold = ask(engine, prompt)
    engine.freeze(prefix, path)
    other = Engine(smollm2, dtype="float32", num_pages=64, page_size=24)
    assert other.thaw(path) == len(prefix)
    warm = ask(other, prompt)
    assert warm.token_ids == cold.token_ids
    assert warm.usage is not None
    assert warm.usage.cached_tokens == len(prefix)
    with pytest.raises(FrozenPrefixError, match="another dtype"):
        Engine(smollm2, dtype="bfloat16", num_pages=64).thaw(path)
