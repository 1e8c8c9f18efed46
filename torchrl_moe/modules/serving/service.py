"""The generation service: prompts in, completions out, over any set of replicas.

It knows replicas only by the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol. What vLLM adds (engine
arguments, devices, start-up) is in :class:`AsyncVLLM`; the fake engine of ``testing`` is this class over fake replicas.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from torchrl_moe._errors import NoReplicaError, ReplicaDiedError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Completion, PauseMode, Replica, ReplicaInfo, ReplicaStats
from torchrl_moe.modules.serving.dispatch import Dispatch, Placement
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.poller import Poller
from torchrl_moe.modules.serving.prompts import normalise_prompts
from torchrl_moe.modules.serving.requests import check_timeout, common_fields, make_request, one_each
from torchrl_moe.modules.serving.roster import Roster, RosterEntry
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.strategies import Strategy

__all__ = ["GenerationService"]

DEFAULT_SAMPLING_PARAMS = {"logprobs": 0}  # the sampled token's own log-prob, which RL always needs
CALL_SECONDS = 60.0


class GenerationService:
    """Generation over N replicas; safe to call from any thread.

    Args:
        replicas: at least one, not started yet.
        sampling_params: used where a call passes none: a mapping of vLLM's ``SamplingParams`` fields or such an
            object; by default vLLM's own defaults, with log-probs.
    """

    def __init__(self, replicas: Sequence[Replica], sampling_params: Any = None) -> None:
        if not replicas:
            raise ValueError("a service needs at least one replica, got none")
        self.sampling_params = DEFAULT_SAMPLING_PARAMS if sampling_params is None else sampling_params
        self.roster = Roster(replicas)
        self.load_balancer = LoadBalancer(self)
        self._poller: Poller | None = None
        self.infos: list[ReplicaInfo] = []
        self._running = False
        self._tokenizer: Any = None
        self._ids = itertools.count()
        self._id_prefix = uuid.uuid4().hex[:8]

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """How many replicas the service has, serving or not."""
        return len(self.roster)

    @property
    def is_running(self) -> bool:
        """Whether the service was started and not shut down."""
        return self._running

    @property
    def routing_layout(self) -> RoutingLayout | None:
        """What the model's routers look like; ``None`` if routes are not captured (a dense model, say)."""
        self._check_running("routing_layout")
        return self.infos[0].layout

    def _check_running(self, what: str) -> None:
        if not self._running:
            raise RuntimeError(f"{what}: the service is not running. Start it first; after shutdown() make a new one.")

    def shutdown(self) -> None:
        """End every replica, at the same time. Idempotent; whatever still waits fails with ``ReplicaDiedError``."""
        self._running = False
        self._stop_polling()
        for entry in self.roster:
            self.roster.mark_dead(entry.index)
        with ThreadPoolExecutor(max_workers=max(self.num_replicas, 1)) as pool:
            list(pool.map(lambda entry: entry.replica.shutdown(), self.roster))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        model = self.infos[0].model if self.infos else "not started"
        return f"{type(self).__name__}({model!r}, {', '.join(map(repr, self.roster))})"

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_ids: str | Sequence[str] | None = None,
        request_ids: str | Sequence[str] | None = None,
        priority: int = 0,
        min_version: int | None = None,
        group_ids: str | Sequence[str] | None = None,
        request_context: Mapping[str, Any] | None = None,
        return_routed_experts: bool = True,
    ) -> Completion | list[Completion]:
        """Generate for one prompt or many, and wait.

        Args:
            prompts: text, token ids (a list of ints is one prompt), ``TextPrompt``, ``TokensPrompt``, or a list.
            sampling_params: a mapping of vLLM's ``SamplingParams`` fields or such an object; default: the service's.
            prompt_token_ids: the same as ``prompts``, for token ids.
            use_tqdm: whether to show a progress bar.
            lora_request: vLLM's ``LoRARequest``.
            prompt_adapter_request: must be ``None``; vLLM has dropped prompt adapters.
            guided_options_request: fields of vLLM's ``StructuredOutputsParams`` (``regex``, ``json``, ``choice``, ...).
            timeout_seconds: per request, from this call on; late requests are aborted.
            actor_index: the replica to use, instead of the balancer's choice.
            session_ids: one per prompt, the same for all turns of a rollout.
            request_ids: one per prompt, to :meth:`abort` by, and not in flight already; made up if not given.
            priority: vLLM's request priority.
            min_version: the oldest weight version that will do.
            group_ids: one per prompt; requests of one group all go to one weight version.
            request_context: what a balancing strategy of yours wants to know of the call.
            return_routed_experts: whether to bring the routes back; evaluation does not need them.

        Returns:
            One :class:`~torchrl_moe.modules.backends.replica.Completion` for one prompt, else a list in input order.

        Raises:
            RuntimeError: the service is not running.
            ValueError: bad prompts, or a request that the engine refuses.
            GenerationTimeout: some requests were late; ``.partial`` holds the others.
            NoReplicaError: no replica serves.
            ReplicaDiedError: a replica died under a request.
        """
        self._check_running("generate")
        batch = normalise_prompts(prompts, prompt_token_ids)
        count = len(batch.prompts)
        ids = one_each(request_ids, count, "request_ids") or [self._new_id() for _ in batch.prompts]
        params = self.sampling_params if sampling_params is None else sampling_params
        common = common_fields(params, lora_request, prompt_adapter_request, guided_options_request, priority)
        requests = [
            make_request(prompt, request_id=request_id, return_routed_experts=return_routed_experts, **common)
            for request_id, prompt in zip(ids, batch.prompts, strict=True)
        ]
        placement = Placement(
            actor_index=actor_index,
            session_ids=one_each(session_ids, count, "session_ids"),
            min_version=min_version,
            group_ids=one_each(group_ids, count, "group_ids"),
            request_context=request_context,
        )
        dispatch = Dispatch(self.load_balancer, requests, placement, check_timeout(timeout_seconds))
        with self._noting_deaths():
            dispatch.send()
            completions = dispatch.wait(use_tqdm)
        return completions[0] if batch.single else completions

    @contextlib.contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except ReplicaDiedError:
            self._note_deaths()
            raise

    def _note_deaths(self) -> None:
        for entry in self.roster:
            if entry.state is not ReplicaState.STARTING and not entry.replica.is_alive():
                self.roster.mark_dead(entry.index)

    def _new_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids)}"

    async def agenerate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        lora_request: Any = None,
        guided_options_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        min_version: int | None = None,
        group_id: str | None = None,
        request_context: Mapping[str, Any] | None = None,
        return_routed_experts: bool = True,
    ) -> Completion:
        """Generate for one prompt without blocking the event loop; arguments as in :meth:`generate`.

        Cancelling the task aborts the request. A request aborted by :meth:`abort` returns what it had, with
        ``finish_reason="abort"``.
        """
        self._check_running("agenerate")
        batch = normalise_prompts(prompt, prompt_token_ids)
        if not batch.single:
            raise ValueError(f"agenerate takes one prompt, got a list of {len(batch.prompts)}: await one call for each")
        (item,) = batch.prompts
        params = self.sampling_params if sampling_params is None else sampling_params
        request = make_request(
            item,
            request_id=request_id or self._new_id(),
            return_routed_experts=return_routed_experts,
            **common_fields(params, lora_request, None, guided_options_request, priority),
        )
        placement = Placement(
            actor_index=actor_index,
            session_ids=None if session_id is None else [session_id],
            min_version=min_version,
            group_ids=None if group_id is None else [group_id],
            request_context=request_context,
        )
        dispatch = Dispatch(self.load_balancer, [request], placement, check_timeout(timeout_seconds))
        with self._noting_deaths():
            await dispatch.send_async()
            return await dispatch.wait_async()

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Cut requests short, wherever they run; unknown ids are ignored, since a request may just have finished."""
        self._check_running("abort")
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for entry in self._alive():
            entry.replica.abort(ids)

    # -- commands to all replicas -----------------------------------------------------------------------------------

    def _alive(self) -> list[RosterEntry]:
        """The replicas that can answer; one that has died unnoticed is noted here."""
        self._note_deaths()
        alive = [entry for entry in self.roster if entry.state is not ReplicaState.DEAD]
        if not alive:
            raise NoReplicaError(f"no replica is alive: {self.roster!r}. Make a new service.")
        return alive

    def call_all(self, command: str, timeout_seconds: float = CALL_SECONDS, **kwargs: Any) -> list[Any]:
        """Run a named command on every living replica at the same time and return the values in replica order.

        Raises:
            EngineError: a replica failed, or did not answer in time.
        """
        self._check_running(command)
        alive = self._alive()
        with ThreadPoolExecutor(max_workers=len(alive)) as pool:
            futures: list[Future[Any]] = [
                pool.submit(entry.replica.call, command, timeout_seconds, **kwargs) for entry in alive
            ]
        with self._noting_deaths():
            return [future.result() for future in futures]

    def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, timeout_seconds: float = CALL_SECONDS
    ) -> None:
        """Stop scheduling on all replicas.

        Args:
            mode: of requests in flight: ``keep`` freezes them until :meth:`resume`, ``wait`` lets them finish first,
                ``abort`` cuts them short.
            clear_cache: whether to drop the KV cache too; frozen requests are then recomputed.
            timeout_seconds: deadline per replica.
        """
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f"mode must be 'keep', 'wait' or 'abort', got {mode!r}")
        self.call_all("pause", timeout_seconds, mode=mode, clear_cache=clear_cache)
        if clear_cache:
            self._forget_prefixes()

    def resume(self, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Go on scheduling on all replicas."""
        self.call_all("resume", timeout_seconds)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false if some replica could not, because requests are running."""
        done = all(self.call_all("reset_prefix_cache"))
        self._forget_prefixes()
        return done

    def _forget_prefixes(self) -> None:
        for entry in self.roster:
            self.roster.forget_prefixes(entry.index)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of every vLLM worker of every replica; one list of results per replica. Plain data only."""
        seconds = CALL_SECONDS if timeout is None else timeout
        return self.call_all("collective_rpc", seconds, method=method, args=tuple(args), kwargs=kwargs)

    # -- figures ----------------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Requests in flight as the service counts them, of one replica or a list of all."""
        self._check_running("get_num_unfinished_requests")
        if actor_index is not None:
            return self.roster[actor_index].inflight
        return [entry.inflight for entry in self.roster]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Share of KV-cache blocks in use, 0 to 1, of one replica or a list of all: the engine's own figure.

        NaN stands for a dead replica in the list; to name one is a ``ReplicaDiedError``.
        """
        self._check_running("get_cache_usage")
        if actor_index is not None:
            return float(self.roster[actor_index].replica.stats(CALL_SECONDS).cache_usage)
        self._note_deaths()
        dead = ReplicaState.DEAD
        return [math.nan if e.state is dead else e.replica.stats(CALL_SECONDS).cache_usage for e in self.roster]

    def stats(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per replica: state, version, and its engine's counts since it started."""
        self._check_running("stats")
        self._note_deaths()
        rows = []
        for entry in self.roster:
            row = {
                "replica": entry.index,
                "state": entry.state.name,
                "version": entry.version,
                "inflight": entry.inflight,
            }
            if entry.state is not ReplicaState.DEAD:
                figures = entry.replica.stats(CALL_SECONDS)
                row |= {name: getattr(figures, name) for name in ReplicaStats.__slots__}
            rows.append(row)
        return rows

    def to_pandas(self) -> Any:
        """Return :meth:`stats` as a pandas ``DataFrame``."""
        import pandas

        return pandas.DataFrame(self.stats())

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, loaded by the first replica and kept."""
        self._check_running("get_tokenizer")
        if self._tokenizer is None:
            self._tokenizer = self._alive()[0].replica.call("tokenizer", CALL_SECONDS)
        return self._tokenizer

    def get_random_actor_index(self) -> int:
        """Return the index of some replica that serves, for ``actor_index``.

        Raises:
            NoReplicaError: none does.
        """
        self._check_running("get_random_actor_index")
        with self.roster.lock:
            serving = self.roster.serving()
            if not serving:
                raise NoReplicaError(f"no replica is serving: {self.roster!r}")
            return serving[random.randrange(len(serving))].index

    def create_load_balancer(
        self, strategy: str | Strategy | Sequence[str | Strategy] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Make a balancer for this service, and use it from now on; arguments as in :class:`LoadBalancer`.

        If a strategy looks at the replicas' own figures, a thread reads them twice a second.
        """
        self._check_running("create_load_balancer")
        self.load_balancer = balancer = LoadBalancer(self, strategy, **kwargs)
        self._stop_polling()
        if balancer.hierarchy.reads_figures:
            self._poller = Poller(balancer)
            self._poller.start()
        return balancer

    def _stop_polling(self) -> None:
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
