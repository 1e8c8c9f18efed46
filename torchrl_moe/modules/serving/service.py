"""The generation service: prompts in, completions out, over any set of replicas.

It knows replicas only by the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol. What vLLM adds (engine
arguments, devices, start-up) is in :class:`AsyncVLLM`; the fake engine of ``testing`` is this class over fake replicas.
"""

from __future__ import annotations

import itertools
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchrl_moe._checks import check_bool, shown
from torchrl_moe.errors import NoReplicaError
from torchrl_moe.modules.backends.checkpoint import checkpoint_kinds, load_tokenizer
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, OnResume, Replica, Request
from torchrl_moe.modules.serving.balancer import WEIGHTS, ActorHandle, LoadBalancer
from torchrl_moe.modules.serving.candidates import FaultPolicy
from torchrl_moe.modules.serving.dispatch import Admission, Dispatcher
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.in_flight import Call
from torchrl_moe.modules.serving.replica_service import ReplicaService
from torchrl_moe.modules.serving.requests import (
    ONE_TOKEN,
    GuidedOptions,
    LoRA,
    Placement,
    SamplingParams,
    check_resume,
    check_service,
    check_timeout,
    common_fields,
    integers,
    make_request,
    normalise_prompts,
    placements,
    request_ids_each,
    rows_each,
    scores_of,
    scorings,
    whole,
)
from torchrl_moe.modules.serving.strategies import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EngineInterface", "GenerationService", "Progress"]


# The progress bar of a call.


class Progress:
    """A bar with tokens per second."""

    def __init__(self, total: int, shown: bool, what: str = "generate") -> None:
        self._bar = tqdm(total=total, desc=what, unit="req", disable=None if shown else True)
        self._shown = not self._bar.disable
        self._tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, completion: Completion) -> None:
        """Count a finished request; from any thread, one at a time."""
        if not self._shown:
            return
        self._tokens += sum(len(output.token_ids) for output in completion.outputs)
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens / seconds:.0f} tok/s", refresh=False)
        self._bar.update()


DEFAULT_SAMPLING_PARAMS = {"logprobs": 0}  # the sampled token's own log-prob, which RL always needs
# Four times vLLM's usual batch: no engine runs empty, and all further requests wait here, as small records.
REQUESTS_PER_REPLICA = 1024


class GenerationService(ReplicaService):
    """Generation over N replicas; safe to call from any thread.

    Args:
        replicas: at least one, not started yet.
        sampling_params: used where a call passes none: a mapping of vLLM's ``SamplingParams`` fields or such an
            object; by default vLLM's own defaults, with log-probs. A call's parameters replace it: the two are not
            merged.
        metrics: whether :attr:`metrics` counts requests.
        max_concurrent_requests: how many requests the engines run at a time; the others wait in the service, by
            priority and order of arrival. ``"auto"``: 1024 for each replica. ``None``: no limit.
        faults: how faults are handled.
        make_replica: makes a replica for an index, to replace one that died or to add one; else neither is possible.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        sampling_params: SamplingParams | None = None,
        *,
        metrics: bool = True,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
        make_replica: Callable[[int], Replica] | None = None,
    ) -> None:
        check_service(sampling_params, metrics, max_concurrent_requests, faults)
        super().__init__(replicas, faults, make_replica, metrics=metrics)
        self._limit_follows = max_concurrent_requests == "auto"
        if max_concurrent_requests == "auto":
            max_concurrent_requests = REQUESTS_PER_REPLICA * len(replicas)
        self.admission = Admission(max_concurrent_requests)
        self.sampling_params = DEFAULT_SAMPLING_PARAMS if sampling_params is None else sampling_params
        self.load_balancer = LoadBalancer(self)
        self._dispatcher = Dispatcher(
            self.replica_table,
            self.admission,
            self.faults.attempts,
            partial(self.metrics.count, "retried"),
            self._loop,
        )
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._ids = itertools.count()
        self._id_prefix = uuid.uuid4().hex[:8]

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: object = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: object = None,
        resume: Completion | Sequence[Completion] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA | None = None,
        prompt_adapter_request: None = None,
        guided_options_request: GuidedOptions | None = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_ids: str | int | Sequence[str | int | None] | None = None,
        request_ids: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        min_version: int | Sequence[int | None] | None = None,
        group_ids: str | int | Sequence[str | int | None] | None = None,
        request_context: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None = None,
        return_routed_experts: bool = True,
        routed_experts: object = None,
        on_resume: OnResume | None = None,
    ) -> Completion | list[Completion]:
        """Generate for one prompt or many, and wait.

        Args:
            prompts: text, token ids (a list of ints is one prompt), ``TextPrompt``, ``TokensPrompt``, or a list.
            sampling_params: a mapping of vLLM's ``SamplingParams`` fields or such an object, used as it is; default:
                the service's.
            prompt_token_ids: the same as ``prompts``, for token ids.
            resume: instead of prompts: completions to finish, such as an error's ``.partial``. Complete ones are
                returned unchanged. The others continue after their last tokens, answer by answer, under new request
                ids, and look as if never cut. An answer without tokens, or with parameters that depend on where it
                started (a grammar, penalties), starts again. Pass the other arguments of the original call:
                ``max_tokens`` includes the existing tokens.
            use_tqdm: whether to show a progress bar, on a terminal or in a notebook; a log file gets none.
            lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
            prompt_adapter_request: must be ``None``; vLLM has dropped prompt adapters.
            guided_options_request: fields of vLLM's ``StructuredOutputsParams`` (``regex``, ``json``, ``choice``, ...).
            timeout_seconds: per request, from this call on; late requests are aborted.
            actor_index: the replica to use, instead of the balancer's choice.
            session_ids: one per prompt, text or a number, the same for all turns of a rollout; ``None``: no session.
            request_ids: one per prompt, for :meth:`abort`, not in use already; generated by default.
            priority: lower is earlier, for a place in the service, and in an engine with
                ``scheduling_policy="priority"``. This and the next two: one for all, or one per prompt.
            min_version: the oldest weight version that is acceptable.
            request_context: input for your own balancing strategies.
            group_ids: one per prompt, like ``session_ids``; 3 and ``"3"`` are one group. All requests of a group go to
                one weight version.
            return_routed_experts: whether to return the routes; evaluation does not need them.
            routed_experts: for a prompt of token ids: the experts ``[rows, L, K]`` that its first tokens follow, -1 in
                rows that the model routes; for several prompts a list, with ``None`` for those without. With ``resume``
                they apply to answers without tokens; the others follow their recorded experts.
            on_resume: how an answer that is resumed, after a weight swap, a preemption or by ``resume``, re-reads its
                first part: ``"forced"``, with the experts that it was sampled with, or ``"live"``, as the model then
                routes it. Default: forced where the engine can; else
                ``infos[i].forced_routing_unavailable_reason`` has the reason.

        Returns:
            One :class:`~torchrl_moe.modules.backends.replica.Completion` for one prompt, else a list in input order.

        Raises:
            RuntimeError: the service is not running.
            ValueError: bad prompts, a list with another number of entries, or request ids that are in flight.
            TypeError: a prompt, or an entry of a list, of a wrong type.
            RequestRefusedError: the engine refused a request; raised once the others have finished.
            GenerationTimeout: some requests did not finish in time and were aborted. Here, in the errors below and in
                a Ctrl-C's ``KeyboardInterrupt``, ``.partial`` holds one completion per request, in input order:
                complete if it had finished, else with its tokens so far.
            NoReplicaError: no replica serves, and none will in time.
            StaleReplicaError: no replica holds the version asked for, and none will in time.
            ReplicaDiedError: too many replicas died under a request, or the one of ``actor_index`` did.
        """
        self._check_running("generate")
        batch = normalise_prompts(prompts, prompt_token_ids, resume)
        count = len(batch.prompts)
        ids = request_ids_each(request_ids, count) or [self._new_id() for _ in batch.prompts]
        params = self.sampling_params if sampling_params is None else sampling_params
        common = common_fields(
            count,
            self._longest,
            params,
            lora_request,
            prompt_adapter_request,
            guided_options_request,
            return_routed_experts,
            on_resume,
        )
        turns, rows = integers(priority, count, "priority"), rows_each(routed_experts, batch)
        requests = [
            make_request(prompt, request_id=request_id, priority=turn, routed_experts=followed, **common)
            for prompt, request_id, turn, followed in zip(batch.prompts, ids, turns, rows, strict=True)
        ]
        done = self._check_resumes(requests)
        where = placements(
            count,
            actor_index=actor_index,
            session_ids=session_ids,
            min_version=min_version,
            group_ids=group_ids,
            request_context=request_context,
        )
        completions = self._run(requests, where, timeout_seconds, use_tqdm, done)
        return completions[0] if batch.single else completions

    @property
    def _longest(self) -> int | None:
        """The ``max_model_len`` of the engines, once one is known."""
        return min((info.max_model_len for info in self.infos), default=None)

    def _run(
        self,
        requests: Sequence[Request],
        where: Sequence[Placement],
        timeout_seconds: float | None,
        use_tqdm: bool,
        done: Sequence[Completion] = (),
        what: str = "generate",
    ) -> list[Completion]:
        """Run requests to their end, and wait; ``done`` are those that were already complete."""
        timeout = check_timeout(timeout_seconds)
        check_bool("use_tqdm", use_tqdm)
        asked = len(requests) - len(done)
        with self.metrics.call(asked, done) as finished, Progress(asked, use_tqdm, what) as progress:
            completions = self._dispatcher.run(Call(self.load_balancer, requests, where, timeout, progress.add))
            finished(completions)
        return completions

    def score(
        self,
        tokens: object,
        routed_experts: object = None,
        *,
        temperature: float | Sequence[float] = 1.0,
        kept: object = None,
        min_version: int | Sequence[int | None] | None = None,
        lora_request: LoRA | None = None,
        actor_index: int | None = None,
        timeout_seconds: float | None = None,
        use_tqdm: bool = False,
    ) -> Tensor | list[Tensor]:
        """Return the log-probs of given tokens under the engine's current weights, without gradients.

        Old log-probs can so come from a running replica, and those of a reference policy from a second engine that is
        never updated, instead of from a second model in the trainer.

        Args:
            tokens: ids of one sequence, or a list of sequences.
            routed_experts: the experts that tokens follow, as in :meth:`generate`; else the model routes.
            temperature: at which they were sampled, for all sequences or for each.
            kept: the ids that each token was sampled from, ``KeptTokens``; for several sequences a list, with ``None``
                where no id was cut off.
            min_version: the oldest weight version that is acceptable, for all or for each.
            lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
            actor_index: the replica to use, instead of the balancer's choice.
            timeout_seconds: per sequence.
            use_tqdm: whether to show a progress bar, as in :meth:`generate`.

        Returns:
            float32 ``[T]``, of token t given those before it, NaN for the first; for several sequences a list. A
            sequence must be a token shorter than the engine's ``max_model_len``.

        Raises:
            ValueError: text, a temperature that is not positive, or another number of entries than of sequences.
            RequestRefusedError: bad routes, or a sequence that is too long.
            GenerationTimeout: some sequences did not finish in time.
            EngineError: ``abort()`` ended one.
        """
        self._check_running("score")
        batch = normalise_prompts(prompt_token_ids=tokens)
        count, rows = len(batch.prompts), rows_each(routed_experts, batch)
        common = common_fields(count, self._longest, ONE_TOKEN, lora_request, None, None, False, None)
        requests = [
            make_request(prompt, request_id=self._new_id(), routed_experts=followed, scoring=scoring, **common)
            for prompt, followed, scoring in zip(batch.prompts, rows, scorings(batch, temperature, kept), strict=True)
        ]
        where = placements(count, actor_index=actor_index, min_version=min_version)
        scores = scores_of(self._run(requests, where, timeout_seconds, use_tqdm, what="score"))
        return scores[0] if batch.single else scores

    def _check_resumes(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions that are already complete; raise ``ValueError`` for those that cannot be resumed."""
        layout = self.routing_layout
        for position, request in enumerate(requests):
            check_resume(request, position, layout)
        return [done for request in requests if (done := whole(request)) is not None]

    def _new_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids)}"

    async def agenerate(
        self,
        prompt: object = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: object = None,
        resume: Completion | None = None,
        lora_request: LoRA | None = None,
        guided_options_request: GuidedOptions | None = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_id: str | int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        min_version: int | None = None,
        group_id: str | int | None = None,
        request_context: Mapping[str, object] | None = None,
        return_routed_experts: bool = True,
        routed_experts: object = None,
        on_resume: OnResume | None = None,
    ) -> Completion:
        """Generate for one prompt without blocking the event loop; arguments as in :meth:`generate`.

        Cancelling the task aborts the request. A request aborted by :meth:`abort` returns its tokens so far, with
        ``finish_reason="abort"``.
        """
        self._check_running("agenerate")
        batch = normalise_prompts(prompt, prompt_token_ids, resume)
        if not batch.single:
            raise ValueError(f"agenerate takes one prompt, got a list of {len(batch.prompts)}: await one call for each")
        (item,), (turn,) = batch.prompts, integers(priority, 1, "priority")
        (name,) = request_ids_each(request_id, 1) or [self._new_id()]
        params = self.sampling_params if sampling_params is None else sampling_params
        common = common_fields(
            1, self._longest, params, lora_request, None, guided_options_request, return_routed_experts, on_resume
        )
        (followed,) = rows_each(routed_experts, batch)
        request = make_request(item, request_id=name, priority=turn, routed_experts=followed, **common)
        done = self._check_resumes([request])
        where = placements(
            1,
            actor_index=actor_index,
            session_ids=session_id,
            min_version=min_version,
            group_ids=group_id,
            request_context=request_context,
        )
        call = Call(self.load_balancer, [request], where, check_timeout(timeout_seconds))
        with self.metrics.call(1 - len(done), done) as finished:
            completions = await self._dispatcher.run_async(call)
            finished(completions)
        return completions[0]

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Abort requests wherever they run; unknown ids are ignored, since a request may just have finished."""
        self._check_running("abort")
        if isinstance(request_ids, bytes) or not isinstance(request_ids, Iterable):
            raise TypeError(f"request_ids must be text or a list of it, got {shown(request_ids)}")
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._dispatcher.abort(ids)

    def shutdown(self) -> None:
        """End every replica, at the same time. Idempotent; calls that wait end with an ``EngineError``."""
        self._dispatcher.close("the service was shut down")
        super().shutdown()
        self._dispatcher.stop()

    def _resized(self) -> None:
        if self._limit_follows:
            self._dispatcher.set_limit(REQUESTS_PER_REPLICA * self.num_replicas)

    # -- tools ------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, loaded by the first replica and kept."""
        self._check_running("get_tokenizer")
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._fleet.alive()[0].replica.call(Engine.tokenizer, CALL_SECONDS))
        return self._tokenizer

    def get_random_actor_index(self) -> int:
        """Return the index of a serving replica, for ``actor_index``.

        Raises:
            NoReplicaError: none serves.
        """
        self._check_running("get_random_actor_index")
        with self.replica_table.lock:
            serving = self.replica_table.serving()
            if not serving:
                raise NoReplicaError(f"no replica is serving: {self.replica_table!r}")
            return serving[random.randrange(len(serving))].index

    def create_load_balancer(
        self, strategy: str | Strategy | Sequence[str | Strategy] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Make a balancer for this service, and use it from now on; arguments as in :class:`LoadBalancer`."""
        self._check_running("create_load_balancer")
        self.load_balancer = LoadBalancer(self, strategy, **kwargs)
        return self.load_balancer


# What TorchRL's code uses of an engine besides ``generate``: its ``RLvLLMEngine``, and related methods.
#
# Names and meanings are TorchRL's; what has no meaning here is refused, with what to do instead.


BASE = "torchrl.modules.llm.backends.vllm.base"
WEIGHT_CALLS = frozenset({"init_weight_update_group", "load_weights_from_storage", "update_weight_broadcast"})
"""Methods of the workers that TorchRL's weight updates call."""


class EngineInterface(GenerationService):
    """A service that TorchRL's code accepts as its own engine: ``isinstance(service, RLvLLMEngine)`` holds."""

    _master_port: int | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[EngineInterface]:
        """The class. ``isinstance`` asks for it: only then is it known that TorchRL is loaded, which takes seconds."""
        base = getattr(sys.modules.get(BASE), "RLvLLMEngine", None)
        if base is not None:
            base.register(EngineInterface)
        return type(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse: no other process could reach the replicas."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its replicas are children of this process. With backend='ray' "
            "an engine pickles as a handle that joins it; or have policy_factory make the policy where it is used: "
            "lambda: vLLMWrapper(AsyncVLLM.connect('name'))"
        )

    # -- actors -----------------------------------------------------------------------------------------------------

    @property
    def actors(self) -> list[ActorHandle]:
        """Handles of the replicas, in place of TorchRL's actors; their methods can be called directly."""
        return [ActorHandle(self, entry.index) for entry in self.replica_table]

    # -- what the weight sync asks ----------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return the number of devices that one replica spreads its tensors over."""
        self._check_running("get_tp_size")
        return self.infos[0].tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return checkpoint name -> (dtype, shape) of every tensor, experts one by one, as the checkpoint has them."""
        self._check_running("get_model_metadata")
        return checkpoint_kinds(self._fleet.alive()[0].replica, CALL_SECONDS)

    def get_master_address(self) -> str:
        """Return the address for your own process group. Our senders do not need it."""
        return "127.0.0.1"

    def get_master_port(self) -> int:
        """Return a port for it, free at the first call, and the same each time."""
        if self._master_port is None:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._master_port = int(probe.getsockname()[1])
        return self._master_port

    def init_weight_update_group(self) -> None:
        """Do nothing if a sender has this engine: it has opened what weights come by. TorchRL's updaters call this.

        Raises:
            RuntimeError: the service is not running, or no sender has it.
        """
        self._check_running("init_weight_update_group")
        self._check_sender("init_weight_update_group")

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[list[Any]]:
        """Call a method of every vLLM worker of every replica, and wait; one list of results per replica.

        Plain data only. TorchRL returns Ray references in their place.

        Raises:
            RuntimeError: the service is not running.
            ValueError: a method by which TorchRL sends weights; the message says what to do instead.
            EngineError: there is no such method, or it failed.
        """
        if method in WEIGHT_CALLS:
            raise ValueError(f"collective_rpc({method!r}): {WEIGHTS}")
        return super().collective_rpc(method, timeout, args, kwargs)

    # -- tests of what the workers hold -----------------------------------------------------------------------------

    def save_model_params(self) -> None:
        """Make every worker keep a copy of its parameters in host memory, for :meth:`validate_model_params`."""
        self.collective_rpc("torchrl_moe_save_params")

    def validate_model_params(
        self, function: Callable[[Mapping[str, torch.Tensor], torch.nn.Module], object]
    ) -> list[list[Any]]:
        """Run a check of yours inside every worker: ``function(saved_params, model)``.

        The function is pickled by value where it cannot be imported, and unpickled in the engine's own processes, which
        trust this process. Names and layouts are vLLM's: fused projections, packed experts.

        Returns:
            What the function returned, which must be plain data: one list per replica, with one value per worker.

        Raises:
            EngineError: the function raised; the message ends with its error.
        """
        import cloudpickle

        from torchrl_moe.modules.backends.process import link

        answers = self.collective_rpc("torchrl_moe_validate", args=(cloudpickle.dumps(function),))
        return [[link.decode(answer) for answer in workers] for workers in answers]
