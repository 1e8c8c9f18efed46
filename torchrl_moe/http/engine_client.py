"""Our service as vLLM's ``EngineClient``: what vLLM's own server code needs of an engine, and nothing of HTTP.

vLLM's handlers render prompts, parse tools and reasoning, and write the answers of each API. They call ``generate``
with token ids and ``SamplingParams``; here that becomes one request of the service, in its session if it has one, and
the service's completion becomes vLLM's ``RequestOutput``. What a handler does not say is in :data:`CALL`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput as VLLMOutput
from vllm.outputs import RequestOutput, SamplingMask, WeightVersionSpan
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from torchrl_moe import _compat
from torchrl_moe.errors import (
    GenerationTimeout,
    NoReplicaError,
    ReplicaDiedError,
    RequestRefusedError,
    SessionClosedError,
    SessionLimitError,
    StaleReplicaError,
    TorchRLMoEError,
)
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds
from torchrl_moe.modules.backends.sampling_fields import check_fields
from torchrl_moe.modules.serving.requests import MOST

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from torchrl_moe.http.sessions import Limits, Session
    from torchrl_moe.modules.serving.service import GenerationService

# -- one call, beside what vLLM's handlers pass on --------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request.

    ``version`` is ``"pin"``, ``"latest"``, a number that is the oldest that will do, or ``None`` for any. ``messages``
    is the chat of its prompt, ``None`` if it has none. ``wants_routes`` says whether the client asked for routes in the
    body of its answer, and ``is_text`` whether the server made the ids of its prompt.
    """

    session: Session | None = None
    version: str | int | None = None
    messages: list[dict[str, Any]] | None = None
    wants_routes: bool = False
    is_text: bool = True
    tokens: int = 0  # that it may take at most, counted against the server's limit
    versions: set[int] = field(default_factory=set)  # of the tokens of its answers
    records: list[Callable[..., None]] = field(default_factory=list)  # its answers, without the messages they became
    tasks: list[asyncio.Future[Completion]] = field(default_factory=list)  # its requests to the engine


CALL: ContextVar[Call] = ContextVar("CALL")


class NamedTokens(GenerateTokensResponse):
    """vLLM's answer to tokens, with the names of tokens that its earlier releases wrote, and clients still read."""

    def model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return it as plain data."""
        plain = super().model_dump(*args, **kwargs)
        for choice in plain["choices"]:
            for entry in (choice["logprobs"] or {}).get("content") or ():
                entry["token"] = f"token_id:{entry['token_id']}"
        return plain


# -- errors -----------------------------------------------------------------------------------------------------------

STATUS: Mapping[type[Exception], HTTPStatus] = {
    SessionLimitError: HTTPStatus.TOO_MANY_REQUESTS,
    SessionClosedError: HTTPStatus.CONFLICT,
    StaleReplicaError: HTTPStatus.CONFLICT,
    GenerationTimeout: HTTPStatus.GATEWAY_TIMEOUT,
    NoReplicaError: HTTPStatus.SERVICE_UNAVAILABLE,
    ReplicaDiedError: HTTPStatus.SERVICE_UNAVAILABLE,
}


def http_error(error: TorchRLMoEError) -> VLLMError:
    """Return an error of ours as one that vLLM's server code turns into its answer, with the right status."""
    if isinstance(error, RequestRefusedError):
        return VLLMValidationError(str(error.__cause__ or error))
    found = next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)
    # only what happened: the lines after it may be the end of an engine's log
    return GracefulHTTPError(str(error).partition("\n")[0], found or HTTPStatus.INTERNAL_SERVER_ERROR)


# -- vLLM's configuration, for its frontend alone ---------------------------------------------------------------------

OF_MODEL = (
    "tokenizer", "tokenizer_mode", "trust_remote_code", "revision", "tokenizer_revision", "code_revision",
    "hf_config_path", "config_format", "hf_overrides", "generation_config", "override_generation_config",
)  # fmt: skip
"""Engine arguments that say what a prompt is made of, and how a request samples where it does not say."""


def frontend_config(
    model: str, max_model_len: int, dtype: str, arguments: Mapping[str, Any], served_names: Sequence[str]
) -> VllmConfig:
    """Return vLLM's configuration of a model, for rendering prompts and checking requests; no engine is made of it.

    Args:
        model: its folder or hub name, which this process must be able to read.
        max_model_len: the engines'.
        dtype: the engines', by torch's name.
        arguments: the engines' arguments; those that concern an engine alone are left out.
        served_names: what clients call the model.
    """
    logging.getLogger("vllm").setLevel(envs.VLLM_LOGGING_LEVEL)  # vLLM itself does so where it makes an engine
    given = {name: arguments[name] for name in OF_MODEL if arguments.get(name) is not None}
    with _compat.environment_kept():  # it has no engine, and its replicas inherit it
        names = list(served_names)
        engine_args = EngineArgs(model=model, dtype=dtype or "auto", served_model_name=names, **given)
        model_config = engine_args.create_model_config()
        model_config.max_model_len = min(max_model_len, model_config.max_model_len)
        return VllmConfig(model_config=model_config)


def _not_here(_: EngineClient, *args: object, **kwargs: object) -> NoReturn:
    what = f"what was asked with {args} and {kwargs} is its owner's to do"
    raise GracefulHTTPError(f"this server does not control its engine: {what}", HTTPStatus.NOT_IMPLEMENTED)


async def _nothing(_: EngineClient, *args: object, **kwargs: object) -> None:
    """Do nothing."""


# -- the client -------------------------------------------------------------------------------------------------------


class ServiceClient(EngineClient):
    """A :class:`GenerationService` behind vLLM's interface. For one event loop.

    Args:
        engine: the service.
        config: see :func:`frontend_config`.
        limits: of answers and tokens, and the seconds of a request.
    """

    def __init__(self, engine: GenerationService, config: VllmConfig, limits: Limits) -> None:
        self.engine, self._limits = engine, limits
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.tokens = 0  # of the calls under way
        config.scheduler_config.max_num_seqs = limits.answers  # what `/inference/v1/generate` compares n with

    # -- what handlers use --------------------------------------------------------------------------------------------

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse more answers than a request may have; called before a stream begins."""
        del request_id
        if n > self._limits.answers:
            raise VLLMValidationError(f"n must be at most {self._limits.answers} here, got {n}", parameter="n")

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check a request, so that what is wrong with it has a status, and return its outputs, deltas if it streams."""
        del prompt_text, tokenization_kwargs, trace_headers, data_parallel_rank, kv_hints
        del reasoning_ended, reasoning_parser_kwargs
        call = CALL.get()
        self.check_admission(sampling_params.n)
        if abs(priority) > MOST:
            raise VLLMValidationError(f"priority must be at least -{MOST} and at most {MOST}", parameter="priority")
        ids = _prompt_ids(prompt)
        try:
            if call.session is not None and call.is_text:
                ids = call.session.prompt_ids(ids, call.messages)
            params = self._checked(sampling_params, ids, call)
            where = self._where(call, session_id)
        except TorchRLMoEError as error:
            raise http_error(error) from error
        wanted = len(ids) + (params.max_tokens or 0) * params.n
        if self.tokens + wanted > self._limits.tokens:
            raise GracefulHTTPError(
                f"requests under way may take {self.tokens} of {self._limits.tokens} tokens, and this one {wanted}: "
                "try again later, or with a smaller max_tokens",
                HTTPStatus.TOO_MANY_REQUESTS,
            )
        call.tokens += wanted
        self.tokens += wanted
        deltas = _Deltas(request_id, sampling_params, call.wants_routes, self.model_config.get_vocab_size())
        return self._outputs(call, ids, params, deltas, lora_request=lora_request, priority=priority, **where)

    def over(self, call: Call) -> None:
        """Note that a call has ended, and abort what is left of it.

        A generator that is left at a ``yield``, as by a client that does not read, ends when garbage is collected.
        """
        self.tokens -= call.tokens
        for task in call.tasks:
            task.cancel()

    def _checked(self, given: SamplingParams, ids: Sequence[int], call: Call) -> SamplingParams:
        prompt_tokens, start = len(ids), given.routed_experts_prompt_start
        if prompt_tokens >= self.model_config.max_model_len:
            raise VLLMValidationError(
                f"the prompt has {prompt_tokens} tokens, and the model's maximum context length is "
                f"{self.model_config.max_model_len}, of which an answer needs one"
            )
        # 1 is what many clients ask for to get the sampled token's own; that is then the only one
        if given.logprobs not in (None, 0, 1) or given.prompt_logprobs is not None or given.logprob_token_ids:
            raise VLLMValidationError(
                "log-probs are those of the sampled tokens only: leave out top_logprobs and prompt_logprobs, and ask "
                "for logprobs=true in a chat, logprobs=0 elsewhere",
                parameter="logprobs",
            )
        vocabulary = self.model_config.get_vocab_size()
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise VLLMValidationError(f"the prompt has ids outside 0..{vocabulary - 1}", parameter="prompt")
        if start > prompt_tokens:
            raise VLLMValidationError(
                f"routed_experts_prompt_start={start} is beyond the prompt's {prompt_tokens} tokens",
                parameter="routed_experts_prompt_start",
            )
        params = given.clone()
        params.logprobs = None if given.logprobs is None and call.session is None else 0
        params.max_tokens = min(
            self.model_config.max_model_len - prompt_tokens,
            self.model_config.max_model_len if params.max_tokens is None else params.max_tokens,
        )
        if call.session is not None:
            known = call.session.known_rows(ids)
            params.routed_experts_prompt_start = min(start, known) if call.wants_routes else known
        check_fields(params)  # now, since a stream that has begun has status 200
        params.verify(self.model_config, None, None, None)
        if params.extra_args:  # a session's name is no parameter of sampling
            params.extra_args = {k: v for k, v in params.extra_args.items() if k != "session_id"} or None
        return params

    def _where(self, call: Call, session_id: str | None) -> dict[str, Any]:
        """Return where the request may run: near its session's earlier calls, on weights that will do."""
        name = session_id if call.session is None else call.session.key
        where: dict[str, Any] = {"session_id": name}
        if call.version == "pin":
            if call.session is None:
                raise VLLMValidationError("X-Weight-Version: pin keeps the version of a session: name one")
            where["group_id"] = name
        elif call.version == "latest":
            where["min_version"] = self.engine.replica_table.latest_version
        elif call.version is not None:
            where["min_version"] = call.version
        return where

    async def _outputs(
        self, call: Call, ids: list[int], params: SamplingParams, deltas: _Deltas, **where: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. When the generator ends early, because the client is gone, the request is aborted."""
        session, loop = call.session, asyncio.get_running_loop()
        generate: Any = self.engine.agenerate
        arguments: dict[str, Any] = {
            "prompt_token_ids": ids,
            "sampling_params": params,
            "return_routed_experts": self.engine.routing_layout is not None
            and (call.wants_routes or session is not None),
            "timeout_seconds": self._limits.request_seconds,
            **where,
        }
        rows = None
        if session is not None:
            generate = session.generate or generate
            if not self.engine.infos[0].forced_routing_unavailable_reason:
                rows = session.routes_to_follow(ids, self.engine.replica_table.latest_version)
            arguments["routed_experts"] = rows
        news: asyncio.Queue[Completion | None] = asyncio.Queue()
        if deltas.streams and (session is None or session.generate is None):
            arguments["on_part"] = news.put_nowait
        task = asyncio.ensure_future(generate(**arguments))
        call.tasks.append(task)
        task.add_done_callback(lambda _: news.put_nowait(None))

        def close() -> None:  # from any thread
            loop.call_soon_threadsafe(task.cancel)

        try:
            with nullcontext() if session is None else session.under_way(close):
                while (part := await news.get()) is not None:
                    if (delta := deltas.of_part(part)) is not None:
                        yield delta
                completion = await task
                for output in completion.outputs:
                    call.versions |= set(output.policy_versions.tolist())
                if session is not None:
                    followed = 0 if rows is None else len(rows)
                    record = partial(session.record, ids, completion, sampling_params=params, followed=followed)
                    if call.messages is None:
                        record()
                    else:  # once it is known which messages its client gets
                        call.records.append(record)
            yield deltas.of_whole(completion)
        except TorchRLMoEError as error:
            raise http_error(error) from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            is_gone = current is not None and current.cancelling() > 0  # the client, too: nobody asks for an error
            if session is not None and session.is_closed and not is_gone:
                raise GracefulHTTPError("the session was closed meanwhile", HTTPStatus.CONFLICT) from None
            raise
        finally:
            task.cancel()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the service runs."""
        return self.engine.is_running

    @property
    def errored(self) -> bool:
        """Whether no request can be answered any more."""
        return not self.engine.is_running

    is_stopped = errored

    @property
    def dead_error(self) -> BaseException:
        """Why not."""
        return GracefulHTTPError("the service is not running", HTTPStatus.SERVICE_UNAVAILABLE)

    async def check_health(self) -> None:
        """Raise if no replica serves."""
        if not any(entry.may_take for entry in self.engine.replica_table):
            raise GracefulHTTPError("no replica is serving", HTTPStatus.SERVICE_UNAVAILABLE)

    async def is_tracing_enabled(self) -> bool:
        """Requests are not traced."""
        return False

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """Return vLLM's names of what the server does."""
        return ("generate",)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Accept an adapter: replicas load it with its first request."""
        del lora_request
        return True

    abort = _nothing  # a request ends with its generator
    do_log_stats = _nothing  # the service has metrics of its own
    notify_kv_transfer_request_rejected = _nothing  # no KV cache is transferred

    def shutdown(self, timeout: float | None = None) -> None:
        """End the renderer's threads; the service is its owner's."""
        del timeout
        self.renderer.shutdown()

    # -- what a door has not: an engine is its owner's ----------------------------------------------------------------

    encode = start_profile = stop_profile = reset_mm_cache = reset_encoder_cache = reset_prefix_cache = _not_here
    sleep = release_kv_cache_memory = wake_up = is_sleeping = pause_generation = resume_generation = _not_here
    is_paused = _not_here


def _prompt_ids(prompt: Any) -> list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if (
        ids is None
        or prompt.get("multi_modal_data")
        or prompt.get("mm_kwargs")
        or prompt.get("prompt_embeds") is not None
    ):
        raise VLLMValidationError("this server takes text only: no images, audio, or embeddings")
    return list(ids)


# -- completions as vLLM's outputs ------------------------------------------------------------------------------------


class _Deltas:
    """Turns parts and completions into vLLM's outputs: what a request that streams has not had yet, or all of it."""

    def __init__(self, request_id: str, params: SamplingParams, wants_routes: bool, vocabulary: int) -> None:
        self.streams = params.output_kind == RequestOutputKind.DELTA
        self._request_id, self._wants_routes, self._vocabulary = request_id, wants_routes, vocabulary
        self._logprobs, self._first_row = params.logprobs is not None, params.routed_experts_prompt_start
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        # so many characters may belong to a stop string that is not complete
        self._held = 0 if params.include_stop_str_in_output else max((len(stop) - 1 for stop in stops), default=0)
        self._prompt: list[int] = []
        self._had: dict[int, tuple[int, int, str]] = {}  # of each answer: tokens and characters sent, text held back

    def of_part(self, part: Completion) -> RequestOutput | None:
        """Return the output of a part; ``None`` if there is nothing to show yet."""
        self._prompt = self._prompt or part.prompt_token_ids.tolist()
        outputs = []
        for output in part.outputs:
            tokens, characters, held = self._had.get(output.index, (0, 0, ""))
            text = held + output.text
            shown = text[: max(len(text) - self._held, 0)]
            self._had[output.index] = tokens + len(output.token_ids), characters + len(shown), text[len(shown) :]
            outputs.append(self._output(output, shown, 0, None))
        return self._request_output(part, outputs, finished=False) if outputs else None

    def of_whole(self, whole: Completion) -> RequestOutput:
        """Return the last output, with what parts do not have."""
        self._prompt = whole.prompt_token_ids.tolist()
        outputs = []
        for output in whole.outputs:
            tokens, characters, _ = self._had.get(output.index, (0, 0, ""))
            outputs.append(self._output(output, output.text[characters:], tokens, output.finish_reason))
        return self._request_output(whole, outputs, finished=True)

    def _output(self, output: CompletionOutput, text: str, first: int, finish_reason: str | None) -> VLLMOutput:
        token_ids = output.token_ids[first:].tolist()
        rows = output.routed_experts if self._wants_routes else None
        if rows is not None:  # they are those of the last tokens
            rows = rows[max(self._first_row - (len(self._prompt) + len(output.token_ids) - 1 - len(rows)), 0) :]
        logprobs = None
        if self._logprobs and output.logprobs is not None:
            values = output.logprobs[first:].tolist()
            logprobs = [{token: Logprob(value)} for token, value in zip(token_ids, values, strict=True)]
        return VLLMOutput(
            index=output.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=logprobs,
            routed_experts=rows,
            finish_reason=finish_reason,
            stop_reason=output.stop_reason if finish_reason is not None else None,
            sampling_mask=_mask(output.kept, first, self._vocabulary) if self._wants_routes else None,
            weight_versions=None if finish_reason is None else _spans(output.policy_versions),
        )

    def _request_output(self, of: Completion, outputs: list[VLLMOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=None,
            prompt_token_ids=self._prompt,
            prompt_logprobs=None,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=of.num_cached_tokens,
        )


def _mask(kept: KeptIds | None, first: int, vocabulary: int) -> SamplingMask | None:
    """Return the ids that each token was drawn from; an empty list where none was left out."""
    if kept is None:
        return None
    rest = kept.after(first)
    found, start = [], 0
    for size in rest.sizes.tolist():
        ids = rest.ids[start : start + abs(size)]
        start += abs(size)
        found.append((ids if size >= 0 else np.setdiff1d(np.arange(vocabulary), ids)).tolist())
    return SamplingMask(found)


def _spans(versions: Any) -> list[WeightVersionSpan]:
    spans, start = [], 0
    for version, run in groupby(versions.tolist()):
        length = sum(1 for _ in run)
        spans.append(WeightVersionSpan(str(version), start, start + length))
        start += length
    return spans
