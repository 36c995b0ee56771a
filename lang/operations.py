"""What a branch's coroutine carries out: one operation for each part of what a program appends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from palmette.errors import EngineError, InvalidRequest, RequestAborted, UnsupportedFeature
from palmette.lang.backend import Chooses
from palmette.lang.choices import (
    ChoiceRequest,
    ChoiceRule,
    ChoicesMethod,
    EncodedOptions,
    best_of,
    draw,
    encode_options,
    greedy_walk,
    log_likelihoods,
    mean_logprobs,
    method_name,
    normalize,
    normalized_by_unconditional,
    scored,
)
from palmette.lang.executor import ThreadPools
from palmette.lang.healing import index_of
from palmette.lang.limits import Grant
from palmette.lang.logprobs import logprobs_meta, with_top
from palmette.lang.nodes import Select
from palmette.lang.options import Report
from palmette.lang.outlook import ROLE_CHARS, Ahead
from palmette.lang.speculation import Speculating
from palmette.lang.tracing.recording import NUM_TOP, AskRecord, EventRecord
from palmette.lang.variables import Failure, Slot
from palmette.protocol import (
    ChatTemplate,
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenBackend,
    TokenEvent,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from palmette.lang.branch import Branch

P = ParamSpec("P")
T = TypeVar("T")

# Encoding takes about a microsecond for a character; going to a thread and back, some hundred.
_MANY_CHARS = 20_000

# Rules of programs may run programs that have rules; encoding must not wait for either.
_RULES = ThreadPools(32, "palmette-rule")

# Forks and branches are numbered from 0 on.
_NOWHERE = -1
_SAMPLES = -2  # of one `gen`


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """`name` and `where` tell the user which primitive it is; `slot` is what it sets, if any.

    `record` is what a trace knows of it, from when it is queued.
    """

    name: str
    where: str
    slot: Slot | None = None
    record: EventRecord | None = None

    @property
    def kind(self) -> str:
        """What a trace calls it."""
        raise NotImplementedError

    async def run(self, branch: Branch) -> None:
        """Carry it out."""
        raise NotImplementedError

    def ahead(self) -> Ahead:
        """What it will add to the branch, as far as one can tell before."""
        return Ahead()

    def fail(self, failure: Failure) -> None:
        """It will not be carried out, or not to its end. With the run's lock held."""
        if self.slot is not None and not self.slot.is_set:
            self.slot.failure = failure

    def orphans(self) -> Sequence[Branch]:
        """Branches that now will never be born."""
        return ()


@dataclass(slots=True, eq=False, kw_only=True)
class AppendText(Operation):
    """Add a constant."""

    text: str
    is_special: bool = False

    @property
    def kind(self) -> str:
        return "special" if self.is_special else "text"

    def ahead(self) -> Ahead:
        return Ahead(num_chars=len(self.text))

    async def run(self, branch: Branch) -> None:
        transcript = branch.transcript
        append = transcript.append_special if self.is_special else transcript.append
        branch.add_text(append(self.text))


@dataclass(slots=True, eq=False, kw_only=True)
class BeginRole(Operation):
    """Open a message."""

    role: str
    template: ChatTemplate

    @property
    def kind(self) -> str:
        return "role_begin"

    def ahead(self) -> Ahead:
        return Ahead(num_chars=ROLE_CHARS)

    async def run(self, branch: Branch) -> None:
        branch.add_text(branch.transcript.begin_role(self.template, self.role))


@dataclass(slots=True, eq=False, kw_only=True)
class EndRole(Operation):
    """Close the open message."""

    template: ChatTemplate

    @property
    def kind(self) -> str:
        return "role_end"

    def ahead(self) -> Ahead:
        return Ahead(num_chars=ROLE_CHARS)

    async def run(self, branch: Branch) -> None:
        branch.add_text(branch.transcript.end_role(self.template))


@dataclass(slots=True, eq=False)
class Span:
    """Where a variable scope began."""

    start: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class BeginScope(Operation):
    """Remember where the text of a variable begins."""

    span: Span

    @property
    def kind(self) -> str:
        return "scope_begin"

    async def run(self, branch: Branch) -> None:
        self.span.start = branch.transcript.num_chars


@dataclass(slots=True, eq=False, kw_only=True)
class EndScope(Operation):
    """Set a variable to the text since its scope began."""

    span: Span

    @property
    def kind(self) -> str:
        return "scope_end"

    async def run(self, branch: Branch) -> None:
        assert self.slot is not None
        self.slot.chunks.append(branch.transcript.text[self.span.start :])
        branch.set_slot(self.slot)


@dataclass(slots=True, eq=False, kw_only=True)
class Fork(Operation):
    """Let children begin where the branch is now."""

    children: list[Branch]

    @property
    def kind(self) -> str:
        return "fork"

    def ahead(self) -> Ahead:
        return Ahead(num_asks=1)  # the children will ask, from here on

    async def run(self, branch: Branch) -> None:
        for child in self.children:
            child.be_born(branch.transcript)

    def orphans(self) -> Sequence[Branch]:
        return self.children


@dataclass(slots=True, eq=False, kw_only=True)
class AppendBranches(Operation):
    """Add what other branches made since their fork."""

    branches: Sequence[Branch]

    @property
    def kind(self) -> str:
        return "join"

    def ahead(self) -> Ahead:
        added = Ahead()
        for other in self.branches:
            added.add(other.submitted)
        return Ahead(num_chars=added.num_chars, num_generated=added.num_generated)

    async def run(self, branch: Branch) -> None:
        for other in self.branches:
            branch.add_text(branch.transcript.take_over(other.transcript))
        for first in self.branches[:1]:
            branch.close_later(first)


@dataclass(slots=True, eq=False, kw_only=True)
class Generate(Operation):
    """Have the model go on; `further` are the slots of what it writes besides, with n above 1."""

    sampling: SamplingParams
    constraint: Constraint | None
    report: Report
    further: tuple[Slot, ...] = ()
    is_bounded: bool = True  # the program or the run said how many tokens it may have

    @property
    def kind(self) -> str:
        return "gen"

    def ahead(self) -> Ahead:
        return Ahead(num_generated=self.sampling.max_tokens * self.report.n, num_asks=1)

    def fail(self, failure: Failure) -> None:
        for slot in (self.slot, *self.further):
            if slot is not None and not slot.is_set:
                slot.failure = failure

    async def run(self, branch: Branch) -> None:
        record, run = self.record, branch.run
        assert isinstance(record, AskRecord)
        prompt_ids, healed, num_taken_back = await self._commit(branch)
        branch.record.prompt_of(record, prompt_ids)
        record.sampling, record.constraint = self.sampling, self.constraint
        outlook, goes_on = branch.outlook(len(prompt_ids))
        sampling = self.sampling
        if num_taken_back:  # what was there before counts for none of its tokens
            sampling = replace(
                sampling,
                max_tokens=sampling.max_tokens + num_taken_back,
                min_tokens=sampling.min_tokens and sampling.min_tokens + num_taken_back,
            )
        if run.traces and sampling.logprobs is not None:
            # More than the program asked for, of which it gets what it did.
            sampling = replace(sampling, logprobs=max(sampling.logprobs, NUM_TOP))
        request = Request(
            request_id=run.next_request_id(branch),
            token_ids=prompt_ids,
            sampling=sampling,
            constraint=self.constraint,
            healed=healed,
            path=branch.path,
            outlook=outlook,
            goes_on=goes_on,
            explain=run.explains or run.traces,
            trace_top=NUM_TOP if run.traces else None,
        )
        prompt_logprobs = await self._score_prompt(branch, request, record)
        first = self._generate(branch, request, self.slot, prompt_logprobs, record)
        if not self.further:
            await first
            return
        # In places where the program has no branch, so that each draws its own numbers.
        others = [
            self._generate(
                branch,
                replace(
                    request,
                    request_id=branch.run.next_request_id(branch),
                    path=(*branch.path, _SAMPLES, index),
                    goes_on=False,
                ),
                slot,
                prompt_logprobs,
                record.new_sample(index + 1),
                is_part=False,
            )
            for index, slot in enumerate(self.further)
        ]
        await _all_of([first, *others])

    async def _commit(self, branch: Branch) -> tuple[tuple[int, ...], str, int]:
        """The ids of the prompt, the text that is to be healed, and how many tokens that had."""
        transcript = branch.transcript
        num_chars = transcript.num_pending_chars
        if self.report.boundary == "exact" or not num_chars or not self.sampling.max_tokens:
            return await _off_loop(num_chars, transcript.commit), "", 0
        index = await asyncio.to_thread(index_of, branch.run.backend.tokenizer)
        prompt_ids, healed = await _off_loop(num_chars, transcript.commit_healing, index)
        return prompt_ids, healed, transcript.num_ids - len(prompt_ids)

    async def _score_prompt(
        self, branch: Branch, request: Request, record: AskRecord
    ) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt's tokens, from where they are asked for. The first
        token of all has none: NaN.
        """
        begin, prompt = self.report.logprob_start_len, request.token_ids
        if begin is None:
            return ()
        start = max(1, begin)  # the first token follows nothing
        values: tuple[float, ...] = ()
        if start < len(prompt):
            result = await branch.run.backend.score(
                ScoreRequest(
                    request_id=branch.run.next_request_id(branch),
                    token_ids=prompt[:start],
                    continuations=(prompt[start:],),
                    path=request.path,
                    outlook=request.outlook,
                    goes_on=True,
                    explain=request.explain,
                )
            )
            branch.add_usage(result.usage)
            record.add_usage(result.usage)
            values = result.logprobs[0]
        if begin == 0:
            values = (math.nan, *values)
        return tuple(map(TokenLogprob, prompt[begin:], values))

    async def _generate(
        self,
        branch: Branch,
        request: Request,
        slot: Slot | None,
        prompt_logprobs: tuple[TokenLogprob, ...],
        record: AskRecord,
        *,
        is_part: bool = True,
    ) -> None:
        """Carry out the request, within the branch's budget, and set the slot; its text extends the
        branch if it `is_part`.
        """
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        if slot is not None:
            record.chunks = slot.chunks
        async with (
            _recorded(record, is_part=is_part),
            _granted(
                branch,
                request.sampling,
                num_taken_back=request.sampling.max_tokens - self.sampling.max_tokens,
            ) as grant,
            _closing(_generating(branch).generate(_within(request, grant))) as events,
        ):
            async for event in events:
                token_ids += event.token_ids
                grant.num_used = len(token_ids)
                record.take(event)
                branch.record.output_of(record, event.token_ids)
                if self.sampling.logprobs is not None:
                    logprobs += event.logprobs
                if is_part:
                    branch.transcript.extend(event.token_ids, event.text)
                branch.add_text(event.text, slot, is_part=is_part)
                if event.usage is not None:
                    branch.add_usage(event.usage)
                    record.add_usage(event.usage)
                    record.main_usage = event.usage
                    grant.num_used = event.usage.completion_tokens
                if event.finish_reason is None:
                    continue
                if is_part:
                    branch.transcript.end_generation()
                record.prompt = event.prompt
                if event.error is not None:
                    raise event.error
                if event.finish_reason is FinishReason.ABORT:
                    raise RequestAborted("the request was aborted")
                record.finish_reason = event.finish_reason.value
                record.stop_reason = event.stop_reason
                meta = {
                    "finish_reason": event.finish_reason.value,
                    "stop_reason": event.stop_reason,
                    "token_ids": tuple(token_ids),
                    **usage_figures(event.usage or Usage()),
                }
                if request.healed:
                    meta["healed"] = request.healed
                if branch.run.explains:
                    meta["prompt"] = event.prompt
                if self.sampling.logprobs is not None:
                    meta |= logprobs_meta(
                        with_top(logprobs, self.sampling.logprobs),
                        prompt_logprobs if self.report.logprob_start_len is not None else None,
                        decode=branch.run.backend.tokenizer.decode
                        if self.report.return_text_in_logprobs
                        else None,
                        has_top=bool(self.sampling.logprobs),
                    )
                branch.set_slot(slot, meta)
                return
        raise EngineError("the backend ended the generation without saying why")


@dataclass(slots=True, eq=False, kw_only=True)
class Choose(Operation):
    """Append the option that the model finds best."""

    select: Select
    seed: int | None

    @property
    def kind(self) -> str:
        return "select"

    def ahead(self) -> Ahead:
        options = self.select.choices
        return Ahead(num_chars=max(map(len, options)), num_asks=int(len(options) > 1))

    async def run(self, branch: Branch) -> None:
        options = self.select.choices
        transcript = branch.transcript
        record = self.record
        assert isinstance(record, AskRecord)
        if self.slot is not None:
            record.chunks = self.slot.chunks
        if len(options) == 1:  # nothing to decide, so nothing is asked of the model
            branch.add_text(transcript.append_option(options[0]), self.slot)
            meta = self._meta([0.0], [1.0], [0.0], [(0.0,)], [()], Usage())
            record.options = meta
            branch.set_slot(self.slot, meta)
            return
        backend = branch.run.backend
        if isinstance(backend, Chooses) and backend.chooses:
            await self._have_chosen(branch, backend)
            return
        encoded = await _off_loop(
            (transcript.num_pending_chars + len(max(options, key=len))) * len(options),
            encode_options,
            branch.run.backend.tokenizer,
            transcript.prompt_ids,
            transcript.pending,
            options,
        )
        branch.record.prompt_of(record, encoded.prompt_ids)
        outlook, goes_on = branch.outlook(len(encoded.prompt_ids))
        request = ScoreRequest(
            request_id=branch.run.next_request_id(branch),
            token_ids=encoded.prompt_ids,
            continuations=encoded.continuations,
            path=branch.path,
            outlook=outlook,
            goes_on=goes_on,
            explain=branch.run.explains or branch.run.traces,
        )
        result = await self._score(branch, request)
        usage = result.usage
        record.prompt, record.main_usage = result.prompt, usage
        totals = log_likelihoods(encoded.continuations, result.logprobs)
        probabilities = normalize(totals)
        chosen, scores, more = await self._pick(branch, encoded, request, result, totals)
        transcript.choose(encoded.prompt_ids + encoded.continuations[chosen], options[chosen])
        branch.record.output_of(record, encoded.continuations[chosen])
        branch.add_text(options[chosen], self.slot)
        meta = self._meta(
            totals, probabilities, scores, result.logprobs, encoded.continuations, usage
        )
        record.options = meta
        if branch.run.explains:
            meta["prompt"] = result.prompt
        branch.set_slot(self.slot, {**more, **meta})

    async def _have_chosen(self, branch: Branch, backend: Chooses) -> None:
        """By a backend that has no log-probabilities of given texts."""
        select, transcript = self.select, branch.transcript
        if select.method is not ChoicesMethod.PROBABILITY:
            raise UnsupportedFeature(
                f"choices_method {method_name(select.method)}",
                "it needs log-probabilities of every option, which a chat API does not give",
                param="choices_method",
            )
        record = self.record
        assert isinstance(record, AskRecord)
        prompt_ids = await _off_loop(transcript.num_pending_chars, transcript.commit)
        branch.record.prompt_of(record, prompt_ids)
        choice = await backend.choose(
            ChoiceRequest(
                request_id=branch.run.next_request_id(branch),
                token_ids=prompt_ids,
                options=select.choices,
                temperature=select.temperature,
                seed=self.seed,
                key=(branch.path, len(prompt_ids)),
            )
        )
        branch.add_usage(choice.usage)
        record.add_usage(choice.usage)
        record.main_usage = choice.usage
        option = select.choices[choice.index]
        encoded = [tuple(branch.run.backend.tokenizer.encode(each)) for each in select.choices]
        transcript.choose(prompt_ids + encoded[choice.index], option)
        branch.record.output_of(record, encoded[choice.index])
        branch.add_text(option, self.slot)
        known = choice.probabilities
        meta = {
            "method": choice.method,
            "probabilities": known and dict(zip(select.choices, known, strict=True)),
            "token_ids": dict(zip(select.choices, encoded, strict=True)),
            "finish_reason": FinishReason.STOP.value,
            **usage_figures(choice.usage),
        }
        record.options = meta
        branch.set_slot(self.slot, meta)

    async def _pick(
        self,
        branch: Branch,
        encoded: EncodedOptions,
        request: ScoreRequest,
        result: ScoreResult,
        totals: list[float],
    ) -> tuple[int, list[float], Mapping[str, Any]]:
        """The place of the chosen option, the scores it was chosen by, and what a rule of the
        program's own has to say.
        """
        select = self.select
        if select.method is ChoicesMethod.TOKEN_LENGTH_NORMALIZED:
            scores = mean_logprobs(result.logprobs)
            return best_of(scores), scores, {}
        if select.method is ChoicesMethod.GREEDY_TOKEN_SELECTION:
            scores = [values[0] for values in result.logprobs]
            return greedy_walk(result.logprobs), scores, {}
        if select.method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
            unconditional = await self._unconditional(branch, request)
            scores = normalized_by_unconditional(result.logprobs, unconditional)
            return best_of(scores), scores, {}
        if not isinstance(select.method, ChoicesMethod):
            return await self._decide(select.method, branch, encoded, request, result)
        if select.temperature == 0:
            return best_of(totals), totals, {}
        weights = normalize(totals, select.temperature)
        return draw(weights, self.seed, (branch.path, len(encoded.prompt_ids))), totals, {}

    async def _decide(
        self,
        rule: ChoiceRule,
        branch: Branch,
        encoded: EncodedOptions,
        request: ScoreRequest,
        result: ScoreResult,
    ) -> tuple[int, list[float], Mapping[str, Any]]:
        """As a rule of the program's own decides, which is called on a thread."""
        options, continuations = list(self.select.choices), encoded.continuations
        means = mean_logprobs(result.logprobs)
        unconditional = None
        if getattr(rule, "requires_unconditional_logprobs", False):
            unconditional = scored(continuations, await self._unconditional(branch, request))
        decide = partial(
            rule,
            choices=options,
            normalized_prompt_logprobs=means,
            input_token_logprobs=scored(continuations, result.logprobs),
            output_token_logprobs=[[] for _ in options],
            unconditional_token_logprobs=unconditional,
        )
        decided: Any = await _RULES.call(decide)
        decision = getattr(decided, "decision", decided)
        if decision not in options:
            raise InvalidRequest(
                f"choices_method {method_name(rule)} decided on {decision!r}, which is no choice",
                param="choices_method",
            )
        return options.index(decision), means, dict(getattr(decided, "meta_info", None) or {})

    async def _unconditional(
        self, branch: Branch, conditional: ScoreRequest
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of each option's tokens without the prompt; 0 for the first.

        They are asked for as the program's own, in a place where it has no branch: its pages must
        not be waited for as if the program did nothing, nor what the branch holds be replaced.
        """
        continuations = conditional.continuations
        prefix_ids = branch.run.backend.tokenizer.prefix_ids
        rest: dict[int, list[tuple[int, ...]]] = {}
        for ids in continuations:
            if len(ids) > 1:
                rest.setdefault(ids[0], []).append(ids[1:])
        known: dict[tuple[int, ...], tuple[float, ...]] = {}
        for first, tails in rest.items():
            distinct = tuple(dict.fromkeys(tails))
            request = ScoreRequest(
                request_id=branch.run.next_request_id(branch),
                token_ids=(*prefix_ids, first),
                continuations=distinct,
                path=(*branch.path, _NOWHERE, _NOWHERE),
                outlook=conditional.outlook,
                explain=conditional.explain,
            )
            result = await self._score(branch, request)
            for tail, values in zip(distinct, result.logprobs, strict=True):
                ids = (first, *tail)
                known[ids] = (0.0, *values)
        return [known.get(ids, (0.0,)) for ids in continuations]

    async def _score(self, branch: Branch, request: ScoreRequest) -> ScoreResult:
        result = await branch.run.backend.score(request)
        branch.add_usage(result.usage)
        assert isinstance(self.record, AskRecord)
        self.record.add_usage(result.usage)
        return result

    def _meta(
        self,
        totals: Sequence[float],
        probabilities: Sequence[float],
        scores: Sequence[float],
        logprobs: Sequence[Sequence[float]],
        continuations: Sequence[tuple[int, ...]],
        usage: Usage,
    ) -> dict[str, Any]:
        options = self.select.choices
        return {
            "method": method_name(self.select.method),
            "probabilities": dict(zip(options, probabilities, strict=True)),
            "log_likelihoods": dict(zip(options, totals, strict=True)),
            "scores": dict(zip(options, scores, strict=True)),
            "token_ids": dict(zip(options, continuations, strict=True)),
            "token_logprobs": dict(zip(options, map(tuple, logprobs), strict=True)),
            "finish_reason": FinishReason.STOP.value,
            **usage_figures(usage),
        }


async def _off_loop(
    num_chars: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `function`; on a thread where it has much to encode, so that other programs go on."""
    if num_chars < _MANY_CHARS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def _all_of(bodies: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of them. The first error is raised, once the others are cancelled and over."""
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _recorded(record: AskRecord, *, is_part: bool) -> AsyncIterator[None]:
    """Note how a text ends that is no part of the branch; of one that is, the branch does."""
    try:
        yield
    except BaseException as error:
        if not is_part:
            record.finish(error)
        raise
    if not is_part:
        record.finish()


@asynccontextmanager
async def _granted(
    branch: Branch, sampling: SamplingParams, *, num_taken_back: int
) -> AsyncIterator[Grant]:
    """Tokens out of the branch's budget, once it has them; as many as asked where it has none. For
    a healed prompt at least those that were taken back, and one more.
    """
    if branch.budget is None:
        yield Grant(sampling.max_tokens)
        return
    num_needed = max(sampling.min_tokens, num_taken_back + 1)
    async with branch.budget.grant(sampling.max_tokens, num_needed) as grant:
        yield grant


def _generating(branch: Branch) -> TokenBackend:
    """Who writes for the branch: under a limit of tokens, nobody who writes more than is asked."""
    backend = branch.run.backend
    if branch.budget is not None and isinstance(backend, Speculating):
        return backend.asked_by_itself
    return backend


def _within(request: Request, grant: Grant) -> Request:
    """The request for as many tokens as were granted."""
    if grant.num_tokens == request.sampling.max_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=grant.num_tokens))


@asynccontextmanager
async def _closing(events: AsyncIterator[TokenEvent]) -> AsyncIterator[AsyncIterator[TokenEvent]]:
    """Close the iterator however the block ends, which aborts a request that still runs."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def usage_figures(usage: Usage) -> dict[str, Any]:
    """The counts and times of one primitive, times in milliseconds."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "completion_tokens": usage.completion_tokens,
        "decoded_tokens": usage.decoded_tokens,
        "forced_tokens": usage.forced_tokens,
        "shared_tokens": usage.shared_tokens,
        "saved_passes": usage.saved_passes,
        "recomputed_tokens": usage.recomputed_tokens,
        "num_preemptions": usage.num_preemptions,
        "queued_milliseconds": usage.queued_seconds * 1000,
        "first_token_milliseconds": usage.first_token_seconds * 1000,
        "milliseconds": usage.total_seconds * 1000,
        **({} if usage.cost is None else {"cost": usage.cost}),
    }
