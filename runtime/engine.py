"""The engine: a synchronous, deterministic loop of steps over all requests at once."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import Unpack

from palmette.errors import (
    CacheFull,
    ConstraintError,
    EngineError,
    InvalidRequest,
    PalmetteError,
    PromptTooLong,
    RequestAborted,
    RequestTooLarge,
    UnsupportedFeature,
)
from palmette.protocol import (
    ChatTemplate,
    FinishReason,
    Outlook,
    PromptStretch,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
    Usage,
)
from palmette.radix_cache import Explanation, Namespace, RadixCache, Tier
from palmette.radix_cache.node import common_prefix_length
from palmette.runtime.config import DtypeName, EngineConfig, EngineOptions
from palmette.runtime.explaining import prompt_stretches
from palmette.runtime.following import Following, Found, Job
from palmette.runtime.kv.frozen import (
    FrozenPrefix,
    Identity,
    check_writable,
    read_frozen,
    tokenizer_digest,
    write_frozen,
)
from palmette.runtime.kv.host import HostPool
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.kv.prefixes import PrefixStore
from palmette.runtime.loading.digest import WeightFiles
from palmette.runtime.memory import trim
from palmette.runtime.metrics import EngineCounters, EngineStats
from palmette.runtime.sampling import SampledToken, Sampler, TokenCounts, needs_counts, resolve_seed
from palmette.runtime.scheduler import PlannedWork, Scheduler
from palmette.runtime.scheduler.programs import Program
from palmette.runtime.scoring import ScoreGroup, score_paths
from palmette.runtime.sequence import GenerationSequence, ScoringSequence, Sequence, Status
from palmette.runtime.tokenization.output import GrowingText, OutputBuffer
from palmette.runtime.tokenization.stop_regex import compiled_pattern
from palmette.runtime.worker.worker import Outcome, Worker

if TYPE_CHECKING:
    from palmette.runtime.constraints import CompiledConstraint, ConstraintCompiler, Step
    from palmette.runtime.loading import LoadedModel


class EngineTokenizer(Tokenizer, Protocol):
    """What an engine needs of a tokenizer."""

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises UnsupportedFeature if the model has none."""
        ...

    def all_token_bytes(self) -> list[bytes]: ...


# About once a minute: it takes some milliseconds.
_STEPS_BETWEEN_TRIMS = 1000

# While nothing can be computed for lack of masks that are being made.
_SECONDS_TO_WAIT_FOR_MASKS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreEvent:
    """News of one score request: the result, or why there is none."""

    request_id: str
    result: ScoreResult | None = None
    error: PalmetteError | None = None


Event = TokenEvent | ScoreEvent


@dataclass(slots=True, eq=False)
class Ahead:
    """What a step computed of a sequence on the chance that it goes on so.

    `guessed` are the tokens behind its first `start` ones, `rows` logits [vocab_rows] by position;
    `num_accepted` of the guesses have turned out right so far.
    """

    sequence: GenerationSequence
    start: int
    guessed: list[int]
    rows: dict[int, torch.Tensor]
    num_accepted: int = 0

    @classmethod
    def of(
        cls, sequence: GenerationSequence, num_guessed: int, rows: dict[int, torch.Tensor]
    ) -> Ahead:
        """Before the sequence goes on."""
        start = len(sequence.token_ids)
        return cls(sequence, start, sequence.ids_between(start, start + num_guessed), rows)

    def num_right(self) -> int:
        """How many of the guesses are the sequence's tokens now."""
        token_ids = self.sequence.token_ids
        end = min(len(token_ids), self.start + len(self.guessed))
        return common_prefix_length(token_ids[self.start : end], self.guessed, 0, end - self.start)

    def row_behind(self, num_right: int) -> torch.Tensor | None:
        """The logits behind the last of the sequence's tokens, if all new ones were guessed."""
        end = self.start + num_right
        return self.rows.get(end - 1) if end == len(self.sequence.token_ids) else None


def request_for_prefix(token_ids: SequenceOf[int]) -> Request:
    """A request that computes a prompt and generates nothing."""
    return Request(
        request_id=f"prefix-{uuid.uuid4().hex}",
        token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=0),
    )


class Engine:
    """Loads a model and serves requests step by step.

    ::

        engine = Engine("smollm2-135m")
        engine.submit(Request(request_id="1", token_ids=tuple(engine.tokenizer.encode("Once"))))
        while engine.has_work:
            for event in engine.step():
                print(event.text, end="")

    Not thread-safe; `AsyncEngine` owns a thread for it. `model` is a known model's name, a GGUF
    file or a Hugging Face folder; `options` are the fields of the sections in
    `palmette.runtime.config`.
    """

    def __init__(self, model: str | Path, **options: Unpack[EngineOptions]) -> None:
        from palmette.runtime.loading import load_model
        from palmette.runtime.loading.registry import resolve_model
        from palmette.runtime.tokenization import load_tokenizer

        config = EngineConfig.of(options)
        if config.model.num_threads is not None:
            torch.set_num_threads(config.model.num_threads)
        path = resolve_model(model)
        tokenizer = load_tokenizer(path, chat_template=config.model.chat_template)
        loaded = load_model(
            path,
            dtype=config.model.dtype,
            device=config.model.device,
            kernels=config.model.kernels,
        )
        self._assemble(str(model), loaded, tokenizer, config, time.monotonic)

    @classmethod
    def assemble(
        cls,
        name: str,
        loaded: LoadedModel,
        tokenizer: EngineTokenizer,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Engine:
        """An engine of parts that are loaded already."""
        engine = cls.__new__(cls)
        engine._assemble(name, loaded, tokenizer, config or EngineConfig(), clock)
        return engine

    def _assemble(
        self,
        name: str,
        loaded: LoadedModel,
        tokenizer: EngineTokenizer,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        model_config = loaded.config
        self.model_name = name
        self.config = config
        self.dtype_name: DtypeName = "bfloat16" if loaded.dtype is torch.bfloat16 else "float32"
        self.tokenizer = tokenizer
        self.max_context = min(
            model_config.max_context, config.model.max_context or model_config.max_context
        )
        self.stop_token_ids = tokenizer.stop_token_ids | frozenset(model_config.stop_token_ids)
        self.default_sampling = SamplingParams(**dict[str, Any](model_config.generation_defaults))
        page_size = config.cache.page_size
        bytes_per_page = KVPool.bytes_per_page(model_config, page_size, loaded.dtype)
        num_pages = config.cache.resolve(bytes_per_page)
        pool = loaded.new_pool(num_pages, page_size, config.model.device)
        vocab_size = min(tokenizer.vocab_size, model_config.vocab_rows)
        cache = config.cache
        host = None
        if cache.host_memory:
            host = HostPool.of_size(pool, cache.host_memory, cache.host_directory)
        self._tier = Tier(host.num_slots, host.store) if host is not None else None
        self._kv = KVManager(
            RadixCache(num_pages=num_pages, page_size=page_size, clock=clock, tier=self._tier),
            page_size,
            prefix_cache=cache.prefix_cache,
        )
        self._kv_bytes = bytes_per_page * num_pages
        self._prefixes = PrefixStore(self._kv, pool)
        self._loaded = loaded
        self._weight_files = WeightFiles(loaded.path)
        self._identity: Identity | None = None
        self._scheduler = Scheduler(config.scheduler, self._kv, clock)
        self._worker = Worker(
            loaded.model,
            pool,
            Sampler(vocab_size=vocab_size, vocab_rows=model_config.vocab_rows),
            page_size,
            host=host,
        )
        self._vocab_size = vocab_size
        self._constraints: ConstraintCompiler | None = None
        self._constraints_lock = threading.Lock()
        self._following = Following()
        self._found: dict[str, Found] = {}  # of preempted sequences, which it waits for
        self._clock = clock
        self._live: dict[str, GenerationSequence | ScoreGroup] = {}
        self._groups: dict[str, list[ScoringSequence]] = {}
        self._counters = EngineCounters()
        self._pending: list[Event] = []
        # Of the step before: nothing could be done, and unless something is asked or announced,
        # nothing can for so long.
        self.idle_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    @property
    def constraints(self) -> ConstraintCompiler:
        """Compiles constraints for this model's vocabulary; made when first needed.

        Safe to use from any thread.
        """
        from palmette.runtime.constraints import ConstraintCompiler

        with self._constraints_lock:
            if self._constraints is None:
                self._constraints = ConstraintCompiler(
                    self.tokenizer.all_token_bytes()[: self._vocab_size],
                    {i for i in self.stop_token_ids if i < self._vocab_size},
                    self._worker.sampler.vocab_rows,
                    self.tokenizer.encode,
                )
            return self._constraints

    def stats(self) -> EngineStats:
        """Counters and what is held now."""
        tier = self._tier
        if tier is not None:
            self._counters.restored_pages = tier.stats.num_restored_pages
        return EngineStats(
            **asdict(self._counters),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_programs=self._scheduler.programs.num_begun,
            num_held_pages=self._kv.num_pages - self._kv.num_available_pages,
            num_pages=self._kv.num_pages,
            num_free_pages=self._kv.cache.pages.num_free,
            num_available_pages=self._kv.num_available_pages,
            page_size=self._kv.page_size,
            kv_bytes=self._kv_bytes,
            host_tier_size=tier.num_slots if tier is not None else 0,
            host_tier_pages=tier.num_pages if tier is not None else 0,
        )

    def validate(self, request: Request | ScoreRequest) -> None:
        """Raises InvalidRequest if the request could not be served. Touches no state."""
        longest = 0
        prompt = request.token_ids
        if isinstance(request, ScoreRequest):
            longest = max(len(c) for c in request.continuations) - 1
            used = max(prompt), *(max(c) for c in request.continuations)
            low = min(min(prompt), *(min(c) for c in request.continuations))
        else:
            used = (max(prompt),)
            low = min(prompt)
            sampling = request.sampling
            for pattern in sampling.stop_regex:
                compiled_pattern(pattern)
            for name, ids in (
                ("stop_token_ids", sampling.stop_token_ids),
                ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ):
                for token_id in ids:
                    if token_id >= self._vocab_size:
                        raise InvalidRequest(
                            f"{name} names token {token_id}, the vocabulary has "
                            f"{self._vocab_size} tokens",
                            param=name,
                        )
        if low < 0 or max(used) >= self._vocab_size:
            wrong = low if low < 0 else max(used)
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {self._vocab_size} tokens",
                param="prompt",
            )
        if len(prompt) + longest >= self.max_context:
            raise PromptTooLong(len(prompt) + longest, self.max_context)
        num_pages = self._kv.num_pages_for(len(prompt) + longest + 1)
        num_out_of_reach = self._prefixes.num_pages_out_of_reach(prompt, request.salt)
        if num_pages > self._kv.num_pages - num_out_of_reach:
            raise RequestTooLarge(
                num_pages, self._kv.num_pages, self._kv.page_size, num_pinned=num_out_of_reach
            )

    def submit(
        self, request: Request | ScoreRequest, *, compiled: CompiledConstraint | None = None
    ) -> None:
        """Queue a request; its events come out of `step`.

        `compiled` is the request's constraint, if it was compiled ahead. Raises InvalidRequest.
        """
        self.validate(request)
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if isinstance(request, ScoreRequest):
            self._submit_score(request)
        else:
            self._submit_generation(request, compiled)
        self._counters.requests_started += 1

    def _submit_generation(self, request: Request, compiled: CompiledConstraint | None) -> None:
        sampling = request.sampling
        if compiled is None and (request.constraint is not None or request.healed):
            compiled = self.constraints.compile_for(request)
        mode = sampling.jump_forward or self.config.scheduler.jump_mode
        is_canonical = request.constraint is not None and mode == "canonical"
        # So that it ends for its length, and not because a pinned page would be needed.
        num_pages = self._kv.num_pages - self._prefixes.num_pages_out_of_reach(
            request.token_ids, request.salt
        )
        sequence = GenerationSequence(
            request_id=request.request_id,
            namespace=Namespace(salt=request.salt),
            token_ids=list(request.token_ids),
            num_prompt_tokens=len(request.token_ids),
            submitted_at=self._clock(),
            max_length=min(self.max_context, num_pages * self._kv.page_size),
            request=request,
            seed=resolve_seed(sampling.seed),
            output=OutputBuffer(
                self.tokenizer.token_bytes,
                () if is_canonical else sampling.stop,
                () if is_canonical else sampling.stop_regex,
                num_healed=len(request.healed),
            ),
            stop_token_ids=self._stop_ids(sampling),
            suppressed_token_ids=tuple(self.stop_token_ids - set(sampling.stop_token_ids))
            if sampling.ignore_eos
            else (),
            path=request.path,
            program=self._program_of(request),
            goes_on=request.goes_on,
            explains=request.explain,
        )
        if needs_counts(sampling):
            sequence.prompt_counts = TokenCounts(request.token_ids)
            sequence.output_counts = TokenCounts()
        if compiled is not None:
            self._check_budget(sequence, compiled)
            # Logits that log-probabilities are told of are those of tokens that there are.
            guesses = self.config.scheduler.max_guesses and sampling.logprobs is None
            sequence.text = compiled.text(
                jumps=self.config.scheduler.jump_forward,
                canonical=is_canonical,
                stop_token_ids=sampling.stop_token_ids,
                salt=request.salt if guesses else None,
            )
            if is_canonical:
                sequence.growing = GrowingText(
                    sampling.stop, sampling.stop_regex, num_healed=len(request.healed)
                )
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self.stop_token_ids

    @staticmethod
    def _check_budget(sequence: GenerationSequence, compiled: CompiledConstraint) -> None:
        """A constrained text is complete or not begun."""
        shortest, room = compiled.shortest_length, sequence.num_tokens_left
        if shortest > room:
            raise InvalidRequest(
                f"the shortest text that satisfies the constraint takes {shortest} tokens, "
                f"there is room for {room} (max_tokens and context)",
                param="max_tokens",
            )

    def _submit_score(self, request: ScoreRequest) -> None:
        now = self._clock()
        paths = score_paths(request.continuations)
        inner = {path.tokens[:depth] for path in paths for depth in path.targets}
        group = ScoreGroup(request, now, num_sequences=len(paths), num_path_tokens=len(inner) - 1)
        sequences = []
        num_prompt = len(request.token_ids)
        program = self._program_of(request)
        for index, path in enumerate(paths):
            asked = {num_prompt - 1 + depth: ids for depth, ids in path.targets.items()}
            token_ids = [*request.token_ids, *path.tokens]
            sequences.append(
                ScoringSequence(
                    request_id=f"{request.request_id}/{index}",
                    namespace=Namespace(salt=request.salt),
                    token_ids=token_ids,
                    num_prompt_tokens=len(token_ids),
                    submitted_at=now,
                    max_length=len(token_ids),
                    group=group,
                    asked=asked,
                    path=request.path,
                    program=program,
                    goes_on=request.goes_on,
                    explains=request.explain,
                )
            )
        self._live[request.request_id] = group
        self._groups[request.request_id] = sequences
        if not request.num_top:  # which are known of no token that was scored before
            for sequence in sequences:
                sequence.recall(self._kv.known_logprobs(sequence, sequence.first_asked + 1))
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _program_of(self, request: Request | ScoreRequest) -> Program | None:
        if request.outlook is None or not self._scheduler.knows_programs:
            return None
        return self._scheduler.programs.hear(request.outlook)

    def announce(self, outlook: Outlook, ended: SequenceOf[tuple[int, ...]] = ()) -> None:
        """What a program knows by now; see `protocol.ProgramListener`."""
        if self._scheduler.knows_programs:
            self._scheduler.programs.hear(outlook)
            self._scheduler.programs.end_branches(outlook.program_id, ended)

    def end_program(self, program_id: str) -> None:
        """The program asks no more: what was held for it may be evicted."""
        self._scheduler.programs.end(program_id)

    def abort(self, request_id: str) -> bool:
        """End a request now; its last event says so. False if there is no such request."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._counters.requests_aborted += 1
        error = RequestAborted(f"request {request_id} was aborted")
        if isinstance(live, ScoreGroup):
            self._end_group(live, error)
        else:
            self._pending.append(self._end(live, FinishReason.ABORT))
        return True

    def fail_all(self, error: PalmetteError) -> None:
        """End every request with `error`; what they had computed is forgotten."""
        for live in list(self._live.values()):
            if isinstance(live, ScoreGroup):
                self._end_group(live, error)
            else:
                self._fail(live, error)

    def take_events(self) -> list[Event]:
        """What is new since the last step, without computing anything."""
        events, self._pending = self._pending, []
        return events

    def explain(self, token_ids: SequenceOf[int], *, salt: str = "") -> Explanation:
        """Which of a prompt's tokens are cached now, and why the others are not.

        For whoever runs the engine: it may name other salts.
        """
        return self._kv.cache.explain(token_ids, Namespace(salt=salt))

    def freeze(self, token_ids: SequenceOf[int], path: str | Path) -> None:
        """Save the keys and values of a prefix to a file, for `thaw` in a later process.

        What of it is not cached is computed first, by steps in which others go on too; their
        events come out of the next `step`. Raises InvalidRequest if the prefix could not be a
        prompt, FrozenPrefixError if the file cannot be written: before anything is computed where
        `path` is a folder, a device or the like.
        """
        check_writable(path)
        write_frozen(path, self.copy_prefix(token_ids), self.identity)

    def thaw(self, path: str | Path, *, pin: bool = True) -> int:
        """Cache the prefix in a file that `freeze` made; how many tokens it has.

        It serves requests without a salt, exactly as if it had been computed here. Unless `pin` is
        False it is not evicted until `unpin_prefixes`. Raises FrozenPrefixError if the file is
        damaged or was made with other weights, another number type or another tokenizer, and
        CacheFull if there is no room for it.
        """
        prefix = read_frozen(path, self.identity)
        self.add_prefix(prefix, pin=pin)
        return len(prefix.token_ids)

    def copy_prefix(self, token_ids: SequenceOf[int]) -> FrozenPrefix:
        """A copy of the keys and values of a prefix, computed as far as needed. See `freeze`."""
        self._check_keeps_prefixes()
        request = request_for_prefix(token_ids)
        self.validate(request)
        copied = self._prefixes.copy(request.token_ids)
        if copied is None:
            self._compute(request)
            copied = self._prefixes.copy(request.token_ids)
        if copied is None:
            raise EngineError("the prefix was evicted as soon as it was computed: try again")
        return copied

    def add_prefix(self, prefix: FrozenPrefix, *, pin: bool = True) -> None:
        """Cache keys and values that `copy_prefix` gave, here or elsewhere. See `thaw`."""
        self._check_keeps_prefixes()
        self._prefixes.add(prefix, pin=pin)

    def unpin_prefixes(self) -> None:
        """Let every thawed prefix be evicted from now on, as any other."""
        self._prefixes.unpin_all()

    @property
    def identity(self) -> Identity:
        """What keys and values of this engine depend on besides the tokens.

        Raises ModelFileError if the model's files have changed since it was loaded.
        """
        if self._identity is None:
            loaded, tokenizer = self._loaded, self.tokenizer
            token_bytes = tokenizer.all_token_bytes()
            empty = [token_id for token_id, known in enumerate(token_bytes) if not known]
            self._identity = Identity.of(
                weights=loaded.weights_digest or self._weight_files.digest(),
                tokenizer=tokenizer_digest(
                    token_bytes,
                    [(token_id, tokenizer.decode([token_id])) for token_id in empty],
                    tuple(tokenizer.prefix_ids),
                ),
                dtype=loaded.dtype,
                rope=loaded.config.rope,
                num_layers=loaded.config.num_layers,
                num_kv_heads=loaded.config.num_kv_heads,
                head_dim=loaded.config.head_dim,
            )
        return self._identity

    def _check_keeps_prefixes(self) -> None:
        if not self._kv.prefix_cache:
            raise UnsupportedFeature(
                "a frozen prefix with prefix_cache=False",
                "nothing is kept for later requests",
                param="prefix_cache",
            )

    def _compute(self, request: Request) -> None:
        """Carry out a request whose events concern nobody; those of others are kept."""
        self.submit(request)
        kept: list[Event] = []
        try:
            while request.request_id in self._live:
                kept += self.step()
                if self.idle_seconds:  # nobody who thinks can be heard of while this goes on
                    self._scheduler.programs.wait_for_nobody()
        finally:
            self._pending = kept + self._pending
        request_id = request.request_id
        mine = [event for event in self._pending if event.request_id == request_id]
        self._pending = [event for event in self._pending if event.request_id != request_id]
        error = mine[-1].error if mine else None
        if error is not None:
            raise error

    def flush_cache(self) -> None:
        """Drop every cached prefix that no running request holds."""
        self._scheduler.programs.drop_handles()
        self._kv.cache.flush()

    def step(self) -> list[Event]:
        """Compute one step of everything that runs, and say what is new.

        If the computation itself fails, the requests of this step end with an error event, what
        they had computed is forgotten, and the engine goes on with the others. An interrupt, as by
        Ctrl-C, goes to the caller; with it all that ran ends so, and nothing stays cached but what
        is pinned: some pages may lack what was to be copied to them.
        """
        try:
            return self._step()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted()
            raise

    def _step(self) -> list[Event]:
        self._following.begin_round()
        self._take_found()
        plan = self._scheduler.next_plan()
        self.idle_seconds = 0.0
        self._counters.preemptions += len(plan.preempted)
        if plan.work:
            self._run(plan.work)
        elif plan.wait_seconds is not None:
            self.idle_seconds = plan.wait_seconds
        elif plan.hopeless is not None:
            self._end_for_lack_of_pages(plan.hopeless)
        return self.take_events()

    def _end_for_lack_of_pages(self, sequence: Sequence) -> None:
        """The pool has come to have less room than when the request was submitted, as by a pin."""
        if isinstance(sequence, GenerationSequence):
            is_constrained = sequence.text is not None  # such a text is complete or none
            if sequence.num_output_tokens and not is_constrained:
                self._close(sequence, FinishReason.LENGTH)
                return
        kv = self._kv
        num_needed = kv.num_pages_for(len(sequence.token_ids))
        self._fail(
            sequence,
            CacheFull(
                f"the request needs {num_needed} pages of {kv.page_size} tokens, and of the "
                f"{kv.num_pages} of the KV pool {kv.num_pages - kv.num_available_pages} are "
                "pinned: shorten the prompt, unpin prefixes, or enlarge the pool",
                num_pages_needed=num_needed,
                num_pages_left=kv.num_available_pages,
            ),
        )

    def _interrupted(self) -> None:
        for sequence in list(self._scheduler.running):
            if sequence.status is Status.RUNNING:  # not of a group that failed already
                self._fail(sequence, EngineError("the step was interrupted"))
        self._kv.drop_moves()
        self.flush_cache()

    def _run(self, work: list[PlannedWork]) -> None:
        for item in work:
            if not item.sequence.admission_counted:
                self._note_admission(item.sequence)
        work = [item for item in work if self._is_ready(item)]
        if not work and self._following.is_busy:
            self._following.wait(_SECONDS_TO_WAIT_FOR_MASKS)
        start = self._clock()
        try:
            outcomes = self._worker.run(work, self._kv.take_moves())
        except (RuntimeError, ValueError, MemoryError) as error:
            self._fail_step([item.sequence for item in work], error)
            return
        now = self._clock()
        if work:
            self._scheduler.note_step(work, now - start)
        self._counters.steps += 1
        if self._counters.steps % _STEPS_BETWEEN_TRIMS == 0:
            trim()
        ahead = []
        for item, outcome in zip(work, outcomes, strict=True):
            sequence = item.sequence
            if sequence.status is not Status.RUNNING:
                continue  # its group failed in this very step
            num_guessed = max(0, item.end - len(sequence.token_ids))
            if num_guessed and isinstance(sequence, GenerationSequence):
                ahead.append(Ahead.of(sequence, num_guessed, outcome.rows_ahead))
                self._counters.guessed_tokens += num_guessed
            self._note_computed(sequence, item.num_tokens - num_guessed)
            if isinstance(sequence, ScoringSequence):
                if outcome.error is not None:
                    self._fail(sequence, outcome.error)
                else:
                    self._advance_scoring(sequence, outcome, now)
            elif isinstance(sequence, GenerationSequence):
                self._advance_generation(sequence, outcome, now)
        going = ahead
        while going:
            going = self._go_on(going, now)
        for each in ahead:
            if each.sequence.status is Status.RUNNING:
                self._kv.shrink(each.sequence)

    def _note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        recomputed = sequence.tally.recomputed
        sequence.note_computed(num_tokens)
        self._counters.computed_tokens += num_tokens
        self._counters.recomputed_tokens += sequence.tally.recomputed - recomputed
        if sequence.num_computed_tokens >= sequence.publish_at:
            self._kv.publish(sequence)

    def _go_on(self, ahead: list[Ahead], now: float) -> list[Ahead]:
        """Take guesses that turned out right, and draw once more where there are logits behind
        them; those for which that was possible.
        """
        goes_on, rows = [], []
        for item in ahead:
            sequence = item.sequence
            if sequence.status is not Status.RUNNING or sequence.num_computed_tokens < item.start:
                continue  # it has ended, or tokens before the guesses were replaced
            num_right = item.num_right()
            self._counters.accepted_tokens += num_right - item.num_accepted
            item.num_accepted = num_right
            # Without a mask the step that makes it is still under way.
            row = item.row_behind(num_right) if sequence.mask is not None else None
            end = item.start + num_right
            if row is None:  # the token to draw behind is computed once more
                end = min(end, len(sequence.token_ids) - 1)
            if end > sequence.num_computed_tokens:
                self._note_computed(sequence, end - sequence.num_computed_tokens)
            if row is not None:
                goes_on.append(item)
                rows.append(row)
        if goes_on:
            sequences = [item.sequence for item in goes_on]
            try:
                drawn = self._worker.draw(sequences, rows)
            except (RuntimeError, ValueError, MemoryError) as error:
                self._fail_step(sequences, error)
                return []
            for sequence, token in zip(sequences, drawn, strict=True):
                outcome = Outcome()
                outcome.take(token)
                sequence.tally.confirmed += outcome.error is None
                self._advance_generation(sequence, outcome, now)
        return goes_on

    def _fail_step(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        for sequence in sequences:
            failure = EngineError(f"the step failed: {error}")
            failure.__cause__ = error
            self._fail(sequence, failure)

    def _is_ready(self, item: PlannedWork) -> bool:
        """Whether it can be computed now. Where a mask is still being made, what was planned is
        tried again in the next step, and the others go on.
        """
        sequence = item.sequence
        if not isinstance(sequence, GenerationSequence) or sequence.text is None:
            return True
        found = self._found.pop(sequence.request_id, None)
        if found is not None:
            self._hear(sequence, found)
        elif not sequence.has_begun and sequence.request.sampling.max_tokens:
            sequence.has_begun = True
            text, limit = sequence.text, sequence.num_tokens_left
            self._follow(sequence, lambda: text.begin(limit))
        if sequence.status is not Status.RUNNING or item.num_tokens == 0:
            return False
        wanted = sequence.logit_positions(item.start, item.end)
        return sequence.mask is not None or not any(map(sequence.draws_after, wanted))

    def _follow(self, sequence: GenerationSequence, job: Job) -> None:
        """Carry out a step of its text, or begin to; if it fails, so does the request."""
        try:
            step = self._following.run(sequence.request_id, job)
            if step is not None:
                self._take_step(sequence, step)
        except (ConstraintError, EngineError) as error:
            self._fail(sequence, error)

    def _take_found(self) -> None:
        """Hear of steps that took longer. Sequences that were preempted meanwhile hear of them once
        they run again: while they wait, their tokens are their place in the queue.
        """
        for found in self._following.take():
            sequence = self._live.get(found.request_id)
            assert isinstance(sequence, GenerationSequence)
            if sequence.status is Status.RUNNING:
                self._hear(sequence, found)
            else:
                self._found[found.request_id] = found

    def _hear(self, sequence: GenerationSequence, found: Found) -> None:
        try:
            if found.error is not None:
                raise found.error
            assert found.step is not None
            self._take_step(sequence, found.step)
        except (ConstraintError, EngineError) as error:
            self._fail(sequence, error)

    def _note_admission(self, sequence: Sequence) -> None:
        sequence.admission_counted = True
        self._counters.prompt_tokens += sequence.num_prompt_tokens
        self._counters.cached_tokens += sequence.tally.cached
        if sequence.explains and isinstance(sequence, ScoringSequence):
            group = sequence.group
            # Of several paths the first one computes the prompt, as far as it is not cached.
            group.prompt = group.prompt or self._stretches(sequence, group.request.token_ids)

    def _advance_scoring(self, sequence: ScoringSequence, outcome: Outcome, now: float) -> None:
        group = sequence.group
        for position, logprobs in outcome.scores.items():
            group.record(sequence.node_at(position), logprobs)
        for position, top in outcome.top.items():
            group.top[sequence.node_at(position)] = top
        if sequence.num_uncomputed_tokens:
            return
        sequence.collect()
        self._scheduler.finish(sequence, goes_on=sequence.goes_on)
        group.tallies.append(sequence.tally)
        if group.admitted_at is None:
            group.admitted_at = sequence.admitted_at
        if group.is_complete:
            request_id = group.request.request_id
            del self._live[request_id], self._groups[request_id]
            self._counters.requests_finished += 1
            self._pending.append(ScoreEvent(request_id=request_id, result=group.result(now)))

    def _advance_generation(
        self, sequence: GenerationSequence, outcome: Outcome, now: float
    ) -> None:
        if outcome.error is not None:
            self._fail(sequence, outcome.error)
            return
        try:
            self._take_outcome(sequence, outcome, now)
        except (ConstraintError, EngineError) as error:
            self._fail(sequence, error)

    def _take_outcome(self, sequence: GenerationSequence, outcome: Outcome, now: float) -> None:
        sequence.rows.update(outcome.rows)
        sampled = outcome.sampled
        if sampled is None:
            if sequence.ending is not None:
                self._finish_if_told(sequence)
            elif sequence.num_uncomputed_tokens == 0:  # max_tokens=0: the prompt was all
                self._finish(sequence, FinishReason.LENGTH)
            return
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.tally.draws += 1
        token_id, text = sampled.token_id, sequence.text
        if token_id in sequence.stop_token_ids:
            sequence.stop_logprob = self._stop_logprob(sequence, sampled)
            self._close(sequence, FinishReason.STOP, token_id)
        elif text is None:
            self._append(sequence, sampled)
        else:
            limit = sequence.num_tokens_left
            sequence.keep_guesses(0)  # they were for before
            sequence.note_draw(sampled.logprob)
            self._follow(sequence, lambda: text.draw(token_id, limit))

    def _stop_logprob(
        self, sequence: GenerationSequence, sampled: SampledToken
    ) -> TokenLogprob | None:
        """That of a stop token that was drawn, if log-probabilities are wanted."""
        if not sequence.finds_logprobs:
            return None
        if not sequence.keeps_rows:
            return sampled.logprob
        row = sequence.rows[len(sequence.token_ids) - 1]
        num_top = sequence.request.sampling.logprobs or 0
        return self._worker.sampler.describe(row[None], [sampled.token_id], [num_top])[0]

    def _append(self, sequence: GenerationSequence, sampled: SampledToken) -> None:
        """Go on by a drawn token that no constraint speaks of."""
        token_id = sampled.token_id
        sequence.token_ids.append(token_id)
        sequence.tally.decoded += 1
        self._counters.decoded_tokens += 1
        if sequence.output_counts is not None:
            sequence.output_counts.add(token_id)
        if sampled.logprob is not None:
            position = len(sequence.token_ids) - 1
            if sequence.finds_logprobs:
                sequence.note_logprob(position, sampled.logprob)
            else:  # for a trace, and for nobody else
                sequence.logprobs[position] = sampled.logprob
        stop = sequence.output.feed(token_id)
        if stop is not None:
            self._close(sequence, FinishReason.STOP, stop)
        elif sequence.num_tokens_left <= 0:
            self._close(sequence, FinishReason.LENGTH)
        else:
            self._tell(sequence)

    def _take_step(self, sequence: GenerationSequence, step: Step) -> None:
        """Go on as the constrained text does: by a drawn token, and what is forced after it."""
        num_bytes: int | None = None
        if sequence.is_canonical:
            stop, num_bytes = self._take_canonical(sequence, step)
        else:
            stop = self._take_drawn(sequence, step)
        if stop is not None:
            self._close(sequence, FinishReason.STOP, stop, num_bytes)
        elif step.is_finished and sequence.num_output_tokens:
            self._close(sequence, FinishReason.STOP)
        elif sequence.num_tokens_left <= 0:
            self._close(sequence, FinishReason.LENGTH)
        else:
            self._tell(sequence)
            if step.is_free:
                sequence.be_free()

    def _take_drawn(self, sequence: GenerationSequence, step: Step) -> str | None:
        """Take the new tokens, up to a stop string if they hold one."""
        for index, token_id in enumerate(step.token_ids):
            stop = sequence.output.feed(token_id)
            if stop is not None:
                num_dropped = len(step.token_ids) - index - 1
                self._change_tokens(
                    sequence,
                    replace(
                        step,
                        token_ids=step.token_ids[: index + 1],
                        forced=step.forced[: index + 1],
                        num_final=step.num_final - num_dropped,
                        num_forced=step.num_forced - num_dropped,
                    ),
                )
                return stop
        self._change_tokens(sequence, step)
        return None

    def _take_canonical(
        self, sequence: GenerationSequence, step: Step
    ) -> tuple[str, int] | tuple[None, None]:
        """Take the new tokens; the stop string that the text completes, and how many bytes
        are before it.
        """
        self._change_tokens(sequence, step)
        growing, text = sequence.growing, sequence.text
        assert growing is not None
        assert text is not None
        stop = growing.feed(text.bytes_from(growing.num_bytes))
        if stop is not None:
            return stop.stop, growing.num_bytes_before(stop)
        self._feed_final(sequence, growing.num_bytes - growing.num_open_bytes)
        return None, None

    def _change_tokens(self, sequence: GenerationSequence, step: Step) -> None:
        tally, counters = sequence.tally, self._counters
        sequence.take_step(step)
        num_decoded = sequence.num_output_tokens - step.num_forced
        counters.forced_tokens += step.num_forced - tally.forced
        counters.decoded_tokens += num_decoded - tally.decoded
        tally.forced, tally.decoded = step.num_forced, num_decoded

    def _feed_final(self, sequence: GenerationSequence, num_bytes: int | None = None) -> None:
        """Show the tokens that stay, as far as they lie in the first `num_bytes` of the text."""
        first = sequence.num_prompt_tokens
        while sequence.num_fed_tokens < sequence.num_final_tokens:
            token_id = sequence.token_ids[first + sequence.num_fed_tokens]
            num_fed_bytes = sequence.num_fed_bytes + len(self.tokenizer.token_bytes(token_id))
            if num_bytes is not None and num_fed_bytes > num_bytes:
                return
            sequence.num_fed_tokens += 1
            sequence.num_fed_bytes = num_fed_bytes
            sequence.output.feed(token_id)

    def _tell(self, sequence: GenerationSequence) -> None:
        """Make an event of what can be told now."""
        if sequence.keeps_rows:
            self._describe(sequence, sequence.num_settled_tokens)
        token_ids, text = sequence.take_output()
        if token_ids:
            self._pending.append(
                TokenEvent(
                    request_id=sequence.request_id,
                    token_ids=tuple(token_ids),
                    text=text,
                    logprobs=sequence.take_logprobs(len(token_ids)),
                    forced=sequence.last_forced(len(token_ids)),
                )
            )

    def _describe(self, sequence: GenerationSequence, num_tokens: int) -> None:
        """Find the log-probabilities of the first `num_tokens` of all tokens, where rows tell."""
        rows = sequence.take_rows(num_tokens)
        if not rows:
            return
        token_ids = [sequence.token_ids[position] for position in rows]
        num_top = [sequence.request.sampling.logprobs or 0] * len(rows)
        logits = torch.stack(list(rows.values()))  # [R, vocab_rows]
        found = self._worker.sampler.describe(logits, token_ids, num_top)
        for position, logprob in zip(rows, found, strict=True):
            sequence.note_logprob(position, logprob)

    def _close(
        self,
        sequence: GenerationSequence,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        num_bytes: int | None = None,
    ) -> None:
        """Draw no more. With `num_bytes` only so much of the text of canonical tokens is kept."""
        if sequence.is_canonical:
            assert sequence.text is not None
            limit = sequence.num_output_tokens + sequence.num_tokens_left
            self._change_tokens(sequence, sequence.text.finish(limit, num_bytes))
            self._feed_final(sequence)
        if isinstance(stop_reason, int):
            sequence.tally.decoded += 1
            self._counters.decoded_tokens += 1
        sequence.ending = reason, stop_reason
        self._finish_if_told(sequence)

    def _finish_if_told(self, sequence: GenerationSequence) -> None:
        """End a sequence that draws no more, unless log-probabilities are still to be computed."""
        assert sequence.ending is not None
        if sequence.keeps_rows:
            self._describe(sequence, len(sequence.token_ids))
            if sequence.rows_wanted(0, len(sequence.token_ids)):
                return
        self._finish(sequence, *sequence.ending)

    def _finish(
        self,
        sequence: GenerationSequence,
        reason: FinishReason,
        stop_reason: str | int | None = None,
    ) -> None:
        self._counters.requests_finished += 1
        self._pending.append(self._end(sequence, reason, stop_reason))

    def _end(
        self,
        sequence: GenerationSequence,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: PalmetteError | None = None,
    ) -> TokenEvent:
        """The last event; the sequence leaves the engine."""
        cut_text = ""
        if sequence.output.matched is not None:
            token_ids, text = sequence.take_output()
            cut_text = sequence.output.cut_text
        elif reason in (FinishReason.ABORT, FinishReason.ERROR) and sequence.keeps_rows:
            token_ids, text = sequence.take_output()  # of the rest there are no log-probabilities
        else:
            token_ids, text = sequence.finish_output()
        logprobs = sequence.take_logprobs(len(token_ids))
        forced = sequence.last_forced(len(token_ids))
        if cut_text:
            kept = self.tokenizer.encode(cut_text)
            token_ids += kept
            text += sequence.output.shown(cut_text)
            if sequence.finds_logprobs or sequence.num_traced is not None:
                logprobs += tuple(TokenLogprob(token_id, math.nan) for token_id in kept)
            if forced:
                forced += (False,) * len(kept)
        # Keys and values beyond a stop string belong to no text that anyone will continue.
        kept_tokens = sequence.num_prompt_tokens + sequence.num_released_tokens
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, kept_tokens)
        has_ended_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if has_ended_well:
            # Of what was asked for, what there was room for: max_tokens may be any number.
            num_produced = sequence.num_output_tokens
            num_asked = num_produced + max(0, sequence.num_tokens_left)
            self._scheduler.programs.note_output(num_asked, num_produced)
        self._scheduler.finish(
            sequence, keep=error is None, goes_on=sequence.goes_on and has_ended_well
        )
        del self._live[sequence.request_id]
        self._following.give_up(sequence.request_id)
        self._found.pop(sequence.request_id, None)
        usage = self._usage(sequence)
        self._counters.saved_passes += usage.saved_passes
        return TokenEvent(
            request_id=sequence.request_id,
            token_ids=tuple(token_ids),
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            stop_logprob=sequence.stop_logprob,
            usage=usage,
            error=error,
            forced=forced,
            prompt=self._stretches(sequence, sequence.request.token_ids)
            if sequence.explains and sequence.admitted_at is not None
            else (),
        )

    def _stretches(self, sequence: Sequence, prompt: tuple[int, ...]) -> tuple[PromptStretch, ...]:
        assert sequence.admitted_at is not None
        num_tokens = len(prompt)
        return prompt_stretches(
            sequence.explanation,
            num_tokens=num_tokens,
            num_cached=min(num_tokens, sequence.tally.cached),
            now=sequence.admitted_at,
        )

    def _usage(self, sequence: GenerationSequence) -> Usage:
        now, tally = self._clock(), sequence.tally
        start = sequence.submitted_at
        return Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=tally.cached,
            prefilled_tokens=tally.prefilled,
            completion_tokens=tally.decoded + tally.forced,
            decoded_tokens=tally.decoded,
            forced_tokens=tally.forced,
            saved_passes=tally.decoded + tally.forced - (tally.draws - tally.confirmed),
            recomputed_tokens=tally.recomputed,
            num_preemptions=tally.num_preemptions,
            queued_seconds=(sequence.admitted_at or now) - start,
            first_token_seconds=(sequence.first_token_at or now) - start,
            total_seconds=now - start,
        )

    def _fail(self, sequence: Sequence, error: PalmetteError) -> None:
        """End the request this sequence belongs to with an error."""
        if isinstance(sequence, ScoringSequence):
            self._end_group(sequence.group, error)
        elif isinstance(sequence, GenerationSequence):
            self._counters.requests_failed += 1
            self._pending.append(self._end(sequence, FinishReason.ERROR, error=error))

    def _end_group(self, group: ScoreGroup, error: PalmetteError) -> None:
        request_id = group.request.request_id
        if self._live.pop(request_id, None) is None:
            return
        if not isinstance(error, RequestAborted):
            self._counters.requests_failed += 1
        for sequence in self._groups.pop(request_id):
            if sequence.status is not Status.FINISHED:
                self._scheduler.finish(sequence, keep=False)
        self._pending.append(ScoreEvent(request_id=request_id, error=error))
