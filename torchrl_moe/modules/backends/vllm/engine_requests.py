"""The requests that an engine process runs: one task each, from the driver's message to the completion.

A weight swap may cut a request short (``pause="abort"``), or find it without a token, queued or half prefilled, with
cached prefixes of the old weights; either way its task asks vLLM again once the swap is over. What a swap cut continues
from its last token, answer by answer; what had no token yet, or cannot be continued, starts again. Only what the user
aborts comes back cut. A request that resumes a completion begins in the state that another is in after a swap.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrl_moe import _compat
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.process.engine_program import Load
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    KeptIds,
    PauseMode,
    Request,
    nothing_yet,
    without_known_rows,
)
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.sampling_fields import OURS
from torchrl_moe.modules.backends.vllm import continuation
from torchrl_moe.modules.backends.vllm.adapters import Adapters
from torchrl_moe.modules.backends.vllm.sampling import (
    SamplingParamsBuilder,
    check_bad_words,
    prompt_logprobs,
    scoring_params,
)

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.request import Request as SchedulerRequest


ABORT_SECONDS = 0.01
ENDING_SECONDS = 10.0  # until a core that was told to end is dead
PART_SECONDS, SECONDS_PER_STREAM = 0.05, 0.004
"""Between two parts of a request: the first, or the second for each request that streams, if that is longer.

A part costs up to half a millisecond on its way to a client, so all together they take no more than a tenth of a core.
"""
T = TypeVar("T")


# -- from vLLM's ``RequestOutput`` to our :class:`Completion`: every decision about a vLLM output field is here -------


def sampled_logprobs(logprobs: FlatLogprobs | list[dict[int, Logprob]] | None) -> NDArray[np.float32] | None:
    """Return the log-probs of the sampled tokens, float32 ``[G]``, from either of vLLM's containers.

    The sampled token is first at each position; the top ones that were asked for follow it.
    """
    if logprobs is None:
        return None
    if not isinstance(logprobs, list):
        return np.array(logprobs.logprobs, np.float32)[np.array(logprobs.start_indices, np.int64)]
    return np.array([next(iter(position.values())).logprob for position in logprobs], np.float32)


def completion_from_vllm(output: RequestOutput, request: Request, version: int) -> Completion:
    """Turn vLLM's final output of ``request`` into a :class:`Completion` of weight version ``version``."""
    outputs = []
    for item in sorted(output.outputs, key=lambda item: item.index):
        token_ids = np.array(item.token_ids, np.int64)
        outputs.append(
            CompletionOutput(
                index=item.index,
                token_ids=token_ids,
                text=item.text,
                finish_reason=item.finish_reason,
                stop_reason=item.stop_reason,
                logprobs=sampled_logprobs(item.logprobs),
                routed_experts=item.routed_experts if request.return_routed_experts else None,
                policy_versions=np.full(len(token_ids), version, np.int32),
                kept=KeptIds.of_masks(item.sampling_mask.token_ids if item.sampling_mask else (), len(token_ids)),
            )
        )
    metrics, stamps = CompletionMetrics(), output.metrics
    if stamps is not None:  # of the engine core's clock; a request that was cut before a stage has 0 there
        metrics.queue_seconds = max(stamps.scheduled_ts - stamps.queued_ts, 0.0)
        metrics.first_token_seconds = max(stamps.first_token_ts - stamps.queued_ts, 0.0)
        metrics.total_seconds = max(stamps.last_token_ts - stamps.queued_ts, 0.0)
    return Completion(
        request_id=request.request_id,
        prompt=output.prompt,
        prompt_token_ids=np.array(output.prompt_token_ids, np.int64),
        num_cached_tokens=output.num_cached_tokens or 0,
        outputs=outputs,
        metrics=metrics,
        prompt_logprobs=None
        if request.scoring is None
        else prompt_logprobs(output.prompt_token_id_logprobs, len(output.prompt_token_ids)),
    )


@dataclass(eq=False, slots=True)
class Part:
    """One run of vLLM for a request: of all of its answers, or of one from where it was cut."""

    name: str
    answers: int
    lora: LoRARequest | None = None
    is_synced: bool = False
    version: int | None = None
    cut: bool = False
    answer: int | None = None
    restarted: set[int] = field(default_factory=set)
    lost: dict[int, int] = field(default_factory=dict)

    def over(self, output: CompletionOutput) -> bool:
        """Whether an answer is done, or was cut for good."""
        return output.index not in self.restarted and not (self.cut and output.finish_reason == "abort")

    def keeps(self, output: CompletionOutput, params: SamplingParams) -> bool:
        """Whether what was generated of an answer is kept."""
        if self.over(output):
            return True
        return output.index not in self.restarted and len(output.token_ids) > 0 and continuation.can_continue(params)


# -- the experts that a request follows, on their way to the workers: inside the request's ``SamplingParams`` ---------
#
# vLLM passes ``extra_args`` on unchanged, and drops them with the request. So rows need no message of their own, except
# those of a request that loses its cache and is read again: only the scheduler has what was recorded since.
#
# .. code-block:: text
#
#     engine process       scheduler (``MoEScheduler``)           worker (``ForcedRouting``)
#     attach(params) ----> params: rows key the cache blocks ----> params: rows of a new request
#                          preempted: keep the recorded rows ----> in the step's message: rows of a resumed request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forced:
    """Experts to follow ``[rows, L, K]``: L decoder layers, K experts per token."""

    rows: NDArray[np.integer] | None = None
    is_live: bool = False
    is_recorded: bool = False


def attach(params: SamplingParams, forced: Forced) -> SamplingParams:
    """Return vLLM's ``SamplingParams`` with what the request follows in them."""
    if forced.rows is None and not forced.is_live:
        return params
    packed: dict[str, object] = {"live": forced.is_live}
    if forced.rows is not None:
        packed |= {"rows": forced.rows.tobytes(), "dtype": forced.rows.dtype.str, "shape": list(forced.rows.shape)}
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), OURS: packed}
    return params


def forced_in(params: SamplingParams) -> Forced:
    """Return what :func:`attach` put into ``SamplingParams``; the rows share its memory."""
    packed: Mapping[str, Any] | None = ((params and params.extra_args) or {}).get(OURS)
    if packed is None:
        return Forced()
    rows = np.frombuffer(packed["rows"], packed["dtype"]).reshape(packed["shape"]) if "rows" in packed else None
    return Forced(rows=rows, is_live=packed["live"])


def forced_of(request: SchedulerRequest) -> Forced:
    """Return what a request of vLLM's scheduler follows; looked up once."""
    forced: Forced | None = getattr(request, "torchrl_moe_forced", None)
    if forced is None:
        forced = request.torchrl_moe_forced = forced_in(request.sampling_params)
    return forced


# -- requests ---------------------------------------------------------------------------------------------------------


class Weights(Protocol):
    """What requests need to know of :class:`~torchrl_moe.modules.backends.vllm.weights.EngineWeights`."""

    version: int
    accepting: asyncio.Event

    async def salt(self) -> dict[str, str]: ...

    def stamp(self, completion: Completion, keep: bool = False) -> Completion: ...

    async def deliver(self, completion: Completion) -> Completion | None: ...


@dataclass(eq=False, slots=True)
class Running:
    """One request in flight, and what vLLM runs for it now."""

    request: Request
    started: float
    parts: set[Part] = field(default_factory=set)
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set by an abort
    kept: int = 0  # tokens of what it resumes
    first: Completion | None = None  # what vLLM gave first, once something of that is kept
    answers: dict[int, CompletionOutput] = field(default_factory=dict)  # what is kept of each
    streams: bool = False
    told: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens and characters sent of each answer
    told_at: float = 0.0


class EngineRequests:
    """Requests in flight; those that are done are counted."""

    def __init__(
        self,
        engine: AsyncLLM,
        weights: Weights,
        send: Callable[[Completion], None],
        refuse: Callable[[str, BaseException], None],
        sampling: SamplingParamsBuilder | None = None,
        routes: RequestRoutes | None = None,
        tell: Callable[[list[Completion]], None] = lambda _: None,
        load: Load | None = None,
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.adapter: LoRARequest | None = None
        self.cuts_all = False  # since a user's pause or sleep in mode "abort"
        self.load = load or Load()
        self._send = send
        self._refuse = refuse
        self._tell = tell
        self._telling = False
        self._open: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._sampling = sampling or SamplingParamsBuilder()
        self._retryable = _compat.retryable_error()
        self._adapters = Adapters(engine)
        self._serial = itertools.count(1)
        self._routes = routes or RequestRoutes(None, "the engine captures no routes")

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: Request) -> None:
        self._open[request.request_id] = running = Running(request, time.monotonic())
        self._spawn(self._run(running), partial(self._done, running))

    def _spawn(self, coroutine: Coroutine[object, None, T], *on_done: Callable[[asyncio.Task[T]], None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        for callback in (self._tasks.discard, *on_done):
            task.add_done_callback(callback)

    def _done(self, running: Running, task: asyncio.Task[Completion]) -> None:
        del self._open[running.request.request_id]
        if task.cancelled():  # the process is ending: the driver fails what is open
            return
        error = task.exception()
        if error is not None:
            self._refuse(running.request.request_id, error)
            return
        self.load.count(running.request, task.result(), time.monotonic() - running.started, running.kept)
        self._send(without_known_rows(task.result(), running.request))

    # -- one request ------------------------------------------------------------------------------------------------

    async def _run(self, running: Running) -> Completion:
        request = running.request = self._routes.checked(running.request)
        params = self._sampling(request.sampling_params, request.guided_options)
        if getattr(params, "bad_words", None):
            check_bad_words(params, self.engine.get_tokenizer())
        given = request.resume
        if request.stream and continuation.can_continue(params):  # else it may start again, and be another answer
            outputs = [] if given is None else given.outputs
            running.streams = True
            running.told = {output.index: (len(output.token_ids), len(output.text)) for output in outputs}
            if not self._telling:
                self._telling = True
                self._spawn(self._tell_parts())
        if given is None:
            completion, part = await self._ask(running, request, params)
        else:
            completion, part = given, Part(request.request_id, len(given.outputs), cut=True)
            running.kept = sum(len(output.token_ids) for output in given.outputs if part.keeps(output, params))
        # nothing to keep: all answers start again, together
        while not any(part.keeps(output, params) for output in completion.outputs):
            await self.weights.salt()
            if running.stop.is_set():
                break
            again = replace(request, request_id=self._name(request))
            completion, part = await self._ask(running, again, params)
        running.first = completion
        answers = [
            asyncio.ensure_future(self._finish(running, completion, part, output, params))
            for output in completion.outputs
        ]
        try:
            outputs = await asyncio.gather(*answers)
        finally:
            for answer in answers:  # if one is refused, the others are not needed
                answer.cancel()
        metrics = completion.metrics
        if part.name != request.request_id or not all(map(part.over, completion.outputs)):
            before = metrics.total_seconds if completion is given else 0.0
            metrics = replace(metrics, total_seconds=before + time.monotonic() - running.started)
        prompt = completion.prompt if given is None else given.prompt
        return replace(completion, request_id=request.request_id, prompt=prompt, outputs=outputs, metrics=metrics)

    def _name(self, request: Request) -> str:
        return f"{request.request_id}~{next(self._serial)}"

    async def _ask(
        self, running: Running, request: Request, params: SamplingParams, answer: int | None = None
    ) -> tuple[Completion, Part]:
        """Run vLLM once, with the present weights; again if these fail the weight check, or once a pause is over."""
        while True:
            try:
                completion, part = await self._generate(running, request, params, answer)
            except self._retryable:
                # until vLLM takes requests again, or this one is aborted
                waits = {asyncio.ensure_future(event.wait()) for event in (self.weights.accepting, running.stop)}
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                if not running.stop.is_set():
                    continue
                nothing = nothing_yet(request)
                outputs = nothing.outputs if answer is None else nothing.outputs[:1]
                return replace(nothing, outputs=outputs), Part(request.request_id, len(outputs), answer=answer)
            if (good := await self.weights.deliver(completion)) is not None:
                if any(output.finish_reason == "abort" and part.over(output) for output in good.outputs):
                    await self._refuse_unasked(running)
                return self._noted(good, part, request), part

    def _noted(self, completion: Completion, part: Part, request: Request) -> Completion:
        """Note which answers continued after they had lost their cache, so that their tokens were read again."""
        for output in completion.outputs:
            if 0 < part.lost.get(output.index, 0) < len(output.token_ids):
                output.resume = self._routes.how(request)
        return completion

    async def _generate(
        self, running: Running, request: Request, params: SamplingParams, answer: int | None
    ) -> tuple[Completion, Part]:
        lora = await self._adapters.load(request.lora_request)
        prompt: dict[str, object] = {**await self.weights.salt()}
        if request.prompt_token_ids is None:
            prompt["prompt"] = request.prompt
        else:
            prompt["prompt_token_ids"] = request.prompt_token_ids.tolist()
        is_synced = lora is None and self.adapter is not None
        if is_synced:
            lora = self.adapter  # nothing is awaited from here until the part is known, so no update comes between
        part = Part(request.request_id, getattr(params, "n", 1), lora, is_synced, answer=answer)
        running.parts.add(part)
        if request.scoring is not None:
            assert request.prompt_token_ids is not None  # the service makes such requests this way
            params = scoring_params(params, request.scoring, request.prompt_token_ids)
        if not self._routes.forced_routing_unavailable_reason:
            is_live = self._routes.how(request) == "live"
            params = attach(params, Forced(rows=request.routed_experts, is_live=is_live))
        final = None
        try:
            async for output in self.engine.generate(
                prompt, params, request.request_id, lora_request=lora, priority=request.priority
            ):
                final = output
        finally:
            running.parts.discard(part)
        if final is None:
            raise RuntimeError(f"vLLM ended request {request.request_id!r} without an output")
        if any(output.finish_reason == "error" for output in final.outputs):
            raise ValueError("vLLM ended an answer with an error; a grammar that no token fits does that")
        version = self.weights.version if part.version is None else part.version
        return completion_from_vllm(final, request, version), part

    async def _refuse_unasked(self, running: Running) -> None:
        """Raise an error if nobody aborted a request: a core that is told to end, by SIGTERM, aborts all that it has.

        It is dead a moment later, and the service sends its requests elsewhere.
        """
        deadline = time.monotonic() + ENDING_SECONDS
        while not (running.stop.is_set() or self.cuts_all):
            if self.engine.errored:
                raise self.engine.dead_error
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM aborted request {running.request.request_id!r}, which nobody had asked for")
            await asyncio.sleep(ABORT_SECONDS)

    async def _finish(
        self, running: Running, completion: Completion, part: Part, output: CompletionOutput, params: SamplingParams
    ) -> CompletionOutput:
        """Generate the rest of one answer, however many swaps cut it."""
        index, over = output.index, part.over(output)
        kept = output if part.keeps(output, params) else None
        decode = partial(self._decode, params)
        if kept is not None:
            running.answers[index] = kept
        while not over:
            await self.weights.salt()
            if running.stop.is_set():
                break
            prompt_ids = completion.prompt_token_ids
            rows = self._routes.of_part(running.request, kept)
            rest = continuation.request_for_rest(running.request, self._name(running.request), prompt_ids, kept, rows)
            on_resume = self._routes.how_read(running.request, len(prompt_ids), kept)
            how = continuation.sampling_for_rest(params, index, kept, decode)
            more, part = await self._ask(running, rest, how, index)
            (output,) = more.outputs
            over = part.over(output)
            if part.keeps(output, params):
                running.answers[index] = kept = output = continuation.join(
                    index, kept, output, params, decode, on_resume
                )
                over = over or output.finish_reason != "abort"  # a stop string across the cut ends it
        return replace(output if kept is None else kept, index=index)

    def _decode(self, params: SamplingParams, ids: Sequence[int]) -> str:
        text: str = self.engine.get_tokenizer().decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text

    # -- parts of answers, for requests that stream ----------------------------------------------------------------

    async def _tell_parts(self) -> None:
        """Send what there is to tell, a few times a second, while a request streams."""
        try:
            while any(running.streams for running in self._open.values()):
                await asyncio.sleep(PART_SECONDS)
                await self.weights.salt()  # during a swap it is not known which tokens stay
                streams = [running for running in self._open.values() if running.streams]
                told_by = time.monotonic() - max(PART_SECONDS, SECONDS_PER_STREAM * len(streams))
                if parts := self._new_parts([running for running in streams if running.told_at <= told_by]):
                    self._tell(parts)
        finally:
            self._telling = False

    def _new_parts(self, streams: Sequence[Running]) -> list[Completion]:
        names = {part.name for running in streams for part in running.parts}
        since: dict[str, Mapping[int, int]] = {}
        for running in streams:
            if running.first is None and running.request.resume is None:
                # one run of vLLM, from the prompt: what is known of it need not be read again
                known = {index: tokens for index, (tokens, _) in running.told.items()}
                since |= {part.name: known for part in running.parts}
        live = _compat.running_outputs(self.engine, names, since)
        found = []
        for running in streams:
            so_far, told, outputs = self._so_far(running, live, since), running.told, []
            prompt = so_far.prompt_token_ids[:0] if told else so_far.prompt_token_ids  # with the first part only
            has_new_only = any(part.name in since for part in running.parts)
            for output in so_far.outputs:
                tokens, characters = told.get(output.index, (0, 0))
                first = 0 if has_new_only else tokens
                new = len(output.token_ids) - first
                if new > 0 and output.finish_reason == "abort":  # an end is told with the whole: it may cut text off
                    told[output.index] = tokens + new, max(len(output.text), characters)
                    outputs.append(output.after(first, characters))
            if outputs:
                running.told_at = time.monotonic()
                found.append(replace(so_far, prompt=None, prompt_token_ids=prompt, outputs=outputs, finished=False))
        return found

    # -- what there is of them so far -------------------------------------------------------------------------------

    async def snapshot(self) -> list[Completion]:
        """Return what each request has so far, without disturbing any; answers that are not over count as cut.

        Waits for a running swap, during which it is not known which tokens stay.
        """
        await self.weights.salt()
        live = _compat.running_outputs(self.engine)
        return [self._so_far(running, live) for running in self._open.values()]

    def _so_far(
        self,
        running: Running,
        live: Mapping[str, RequestOutput],
        since: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
    ) -> Completion:
        """Return what a request has so far, from the outputs that vLLM has of its parts."""
        request = running.request
        parts = {
            part.answer: self._of_part(part, request, live[part.name], since.get(part.name, {}))
            for part in running.parts
            if part.name in live
        }
        if running.first is None:
            whole = parts.get(None) or nothing_yet(request)
            known = {output.index: output for output in whole.outputs}
            missing = [output for output in nothing_yet(request).outputs if output.index not in known]
            outputs = sorted([*whole.outputs, *missing], key=lambda output: output.index)
            return replace(whole, request_id=request.request_id, outputs=outputs)
        params = self._sampling(request.sampling_params, request.guided_options)
        outputs = []
        for output in running.first.outputs:
            kept, part = running.answers.get(output.index), parts.get(output.index)
            if part is not None and part.outputs and len(part.outputs[0].token_ids):
                decode = partial(self._decode, params)
                on_resume = self._routes.how_read(request, len(running.first.prompt_token_ids), kept)
                outputs.append(continuation.join(output.index, kept, part.outputs[0], params, decode, on_resume))
            elif kept is not None:
                outputs.append(kept)
            else:
                outputs.append(nothing_yet(replace(request, resume=None)).outputs[output.index])
        prompt = running.first.prompt if request.resume is None else request.resume.prompt
        return replace(running.first, request_id=request.request_id, prompt=prompt, outputs=outputs)

    def _of_part(self, part: Part, request: Request, output: RequestOutput, known: Mapping[int, int]) -> Completion:
        version = self.weights.version if part.version is None else part.version
        completion = completion_from_vllm(output, replace(request, request_id=part.name), version)
        for answer in completion.outputs:  # marks count from its first token
            answer.policy_versions = np.full(known.get(answer.index, 0) + len(answer.token_ids), version, np.int32)
        self.weights.stamp(completion, keep=True)
        for answer in completion.outputs:
            answer.policy_versions = answer.policy_versions[known.get(answer.index, 0) :]
        return self._noted(completion, part, request)

    # -- adapters ---------------------------------------------------------------------------------------------------

    def change_adapter(self, adapter: LoRARequest | None, version: int) -> None:
        """Give new requests another adapter; those in flight keep the one that they began with."""
        for part in self._parts():
            if part.version is None:
                part.version = self.weights.version
        self.adapter, self.weights.version = adapter, version

    def take_versions(self, delivered: Iterable[str]) -> dict[str, int]:
        """Return, for requests in a paused engine, the version that adapter updates have given to all of their tokens.

        Their next tokens get the version of the weights, whichever that will be.
        """
        taken: dict[str, int] = {}
        for part in self._parts():
            if part.version is not None and part.name in delivered:
                taken[part.name], part.version = part.version, None
        return taken

    def uses(self, adapter: LoRARequest | None) -> bool:
        return any(part.lora is adapter for part in self._parts())

    # -- cutting requests short -------------------------------------------------------------------------------------

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short; repeated until they are gone, since vLLM may still be taking a request in."""
        self.cut([self._open[name] for name in request_ids if name in self._open])

    def in_flight(self) -> list[Running]:
        return list(self._open.values())

    def cut(self, chosen: list[Running]) -> None:
        """Cut requests short, as :meth:`abort` does; one that is over may have left its id to another."""
        for running in chosen:
            running.stop.set()
        self._spawn(self._abort(chosen))

    async def _abort(self, chosen: list[Running]) -> None:
        # by the request and not by its id, which the driver may use again the moment it is free
        while chosen := [running for running in chosen if self._open.get(running.request.request_id) is running]:
            if names := [part.name for running in chosen for part in running.parts]:
                await self.engine.abort(names)
            await asyncio.sleep(ABORT_SECONDS)

    def pausing(self, mode: PauseMode) -> None:
        """Note that a swap is about to pause the engine: what it aborts continues afterwards."""
        if mode == "abort":
            for part in self._parts():
                part.cut = True

    async def paused(self, delivered: Mapping[str, Mapping[int, int]], clear_cache: bool) -> None:
        """Have answers continue, or start again, after a swap, in an engine that it has paused.

        Args:
            delivered: how many tokens each has.
            clear_cache: whether they lose their cache: then those that continue read their tokens again. Else those
                without a token start again: they could still read the old cache.
        """
        adapted: dict[Part, set[int]] = {}
        late: dict[Part, set[int]] = {}
        for part in self._parts():
            had = delivered.get(part.name, {})
            without = {index for index in range(part.answers) if not had.get(index)}
            if part.is_synced:
                # without the trainer's adapter: the weights that come have it, or another, merged in, and with the
                # adapter on top they would be no version at all
                part.cut = True
                part.restarted |= without
                adapted[part] = set(range(part.answers))
            if clear_cache:
                part.lost |= had
            elif without:
                part.restarted |= without
                late[part] = without
        if adapted:  # now, before the engine resumes; again later, for what vLLM had not yet taken in
            await _compat.abort_answers(self.engine, {part.name: answers for part, answers in adapted.items()})
        for parts in (adapted, late):
            self._spawn(self._cut(parts))

    def _parts(self) -> list[Part]:
        return [part for running in self._open.values() for part in running.parts]

    async def _cut(self, late: dict[Part, set[int]]) -> None:
        while late:
            found = await _compat.abort_answers(self.engine, {part.name: answers for part, answers in late.items()})
            await asyncio.sleep(ABORT_SECONDS)
            left = {part: late[part] - found.get(part.name, set()) for part in self._parts() if part in late}
            late = {part: answers for part, answers in left.items() if answers}
