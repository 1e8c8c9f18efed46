"""Environments of a collector: their number of samples, their data loader, and which thread may use them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

from tensordict import NonTensorData, TensorDictBase, lazy_stack
from torchrl.envs import AsyncEnvPool, EnvBase, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer, RayDataLoadingPrimer
from torchrl.envs.transforms import Compose, Transform

from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.prompts import NOT_THE_TEMPLATES, OPTIONS
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest, vLLMWrapper

# -- one episode ------------------------------------------------------------------------------------------------------


Generate: TypeAlias = "Callable[[SampleRequest, int], Awaitable[Completion]]"
"""Answers one request of a sample, given by its index in the environment."""
T = TypeVar("T")
MAX_TURNS = 32
SHOWN = ("history", "text", "tokens")
"""The part of an answer that an environment sees, beside its own keys. The rest is added afterwards, because an
environment copies each leaf several times and routes are the largest."""


class InThread(Protocol):
    """Calls a function with an environment and further arguments, in a thread of that environment."""

    async def __call__(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what the function returns."""


async def play_episode(
    policy: vLLMWrapper,
    generate: Generate,
    in_thread: InThread,
    data: TensorDictBase,
    max_turns: int = MAX_TURNS,
    **generate_kwargs: Any,
) -> list[TensorDictBase]:
    """Run one environment's samples from reset to done, with one request to the engine per sample and turn.

    Returns:
        Each turn's data, ``[k]``.
    """
    turns: list[TensorDictBase] = []

    def requests_for(env: EnvBase, root: TensorDictBase) -> list[SampleRequest]:
        # what a ChatEnv has for the chat template counts here too: TorchRL's environment renders with it in text mode
        # only, and here it is the policy that renders
        given = getattr(env, "template_kwargs", None) or {}
        options = {name: value for name, value in given.items() if name not in NOT_THE_TEMPLATES}
        if options and root.get(OPTIONS, None) is None:
            root = root.copy().set(OPTIONS, NonTensorData(options, batch_size=root.batch_size))
        return policy.requests(root, **generate_kwargs)

    def reset(env: EnvBase) -> tuple[TensorDictBase, list[SampleRequest]]:
        root = env.reset(data)
        return root, requests_for(env, root)

    def step(
        env: EnvBase, root: TensorDictBase, requests: list[SampleRequest], completions: Sequence[Completion]
    ) -> tuple[TensorDictBase, list[SampleRequest]]:
        """Take a turn, and return the next one's prompts; none if it was the last."""
        answers = lazy_stack([policy.answer(*pair) for pair in zip(requests, completions, strict=True)])
        # the environment steps on what it may see, then the rest is added
        keys = set(answers.keys())
        root = root.exclude(*keys).update(answers.select(*(keys & set(SHOWN))))
        turn = env.step(root).update(answers.select(*(keys - set(SHOWN))))
        turns.append(turn)
        done = turn["next", "done"].reshape(len(requests), -1).any(-1)
        # several samples in one environment end together, after one turn
        if done.all():
            return root, []
        if done.any() or len(requests) > 1:
            raise ValueError(
                f"after turn {len(turns)} {int(done.sum())} of {len(done)} samples of a group are done. An "
                "environment that continues needs batch size (1,), one for each sample; one of a single turn needs a "
                "transform that says so, such as StepCounter(max_steps=1)"
            )
        if len(turns) >= max_turns:
            raise too_many_turns(max_turns, "the environment is not done")
        # earlier turns' tokens, log-probs and routes go to the root, where the policy reads them
        root = env.step_mdp(turn)
        return root, requests_for(env, root)

    # only requests are awaited in the loop: resets, rewards and tokenizing block, so they are in a thread
    root, requests = await in_thread(reset)
    while requests:
        completions = await gather([generate(request, i) for i, request in enumerate(requests)])
        root, requests = await in_thread(step, root, requests, completions)
    return turns


def too_many_turns(max_turns: int, what: str) -> ValueError:
    """Return the error of a sample that does not end."""
    return ValueError(
        f"{what} after max_turns={max_turns}: end it, such as by StepCounter(max_steps=...), or raise max_turns"
    )


async def gather(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all; the first failure cancels the others, so that no request runs on unused."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # a second cancel would end its wait for an environment's call
                task.cancel()
        await asyncio.wait(tasks)  # asyncio.wait: cancelling this does not cancel them
        raise


# -- environments as collectors get them ------------------------------------------------------------------------------


MOST_THREADS = 32
MOST_GIVEN_UP = 64
IDLE_SECONDS = 5.0
ONLY_ONE = "the environment did not return in time, and there is no other: pass a callable that makes environments."


def take_dataloader(env: EnvBase) -> tuple[EnvBase, Iterable[object] | None, int | None]:
    """Return an environment without its ``DataLoadingPrimer``, the dataloader of that, and its repeats.

    The given environment stays as it is; one without a primer is returned itself.
    """
    transforms = _transforms(env)
    if any(isinstance(transform, RayDataLoadingPrimer) for transform in transforms):
        raise ValueError(
            "the data of this environment comes from a Ray actor: pass dataloader= to the collector instead"
        )
    primer = primer_of(env)
    if primer is None:
        return env, None, None
    kept = [_ShownData() if isinstance(one, DataLoadingPrimer) else one.clone() for one in transforms]
    return TransformedEnv(env.base_env, Compose(*kept)), rows_of_primer(primer), primer.repeats or None


class _ShownData(Transform):
    """Copies the data of a sample to ``next`` too, as a primer does: TorchRL's rewards read the answer there."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name in set(tensordict.keys()) - set(next_tensordict.keys()) - set(SHOWN):
            next_tensordict.set(name, tensordict.get(name))
        return next_tensordict


class _AnswerVersions(Transform):
    """Writes an answer's weight version to ``next``; TorchRL's ``PolicyVersion`` writes the collector's count there."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("policy_version", tensordict.get("policy_version"))


def with_versions(env: EnvBase) -> EnvBase:
    """Make an environment write the version of each answer to ``next`` too."""
    if isinstance(env, AsyncEnvPool):
        raise ValueError("track_policy_version=True: TorchRL's AsyncEnvPool takes no transform; leave it out")
    return env.append_transform(_AnswerVersions())


def primer_of(env: EnvBase) -> DataLoadingPrimer | None:
    """Return the primer that loads an environment's data; ``None`` if there is none, or it is in another process."""
    return next((one for one in _transforms(env) if isinstance(one, DataLoadingPrimer)), None)


def rows_of_primer(primer: DataLoadingPrimer) -> Iterable[object]:
    """Return a primer's dataloader; if it can be read only once, its rest, with the rows that the primer holds."""
    loader: Iterable[object] = primer.dataloader
    if not isinstance(loader, Iterator):
        return loader
    # the primer has read a batch to know what is in it, and repeats each row in its queue
    return chain(list(primer._queue)[:: max(1, primer.repeats)], loader)


def with_batch_size(env: EnvBase, group_size: int) -> EnvBase:
    """Return an environment that holds one sample, or a whole group."""
    if tuple(env.batch_size) in ((1,), (group_size,)):
        return env
    base = env.base_env if isinstance(env, TransformedEnv) else env
    # not a subclass: its constructor is not known
    if type(base) is not ChatEnv:
        raise ValueError(
            f"the environment has batch size {list(env.batch_size)}: make it with (1,), an environment for each "
            f"sample, or with ({group_size},), one for each group of answers"
        )
    again = ChatEnv(
        input_mode=base.input_mode,
        batch_size=(group_size,),
        system_prompt=base.system_prompt,
        tokenizer=base.tokenizer,
        template_kwargs=base.template_kwargs,
        system_role=base.system_role,
        user_role=base.user_role,
        policy_role=base.policy_role,
        data_key=base.data_key,
        device=base.device,
    )
    transforms = [transform.clone() for transform in _transforms(env)]
    return TransformedEnv(again, Compose(*transforms)) if transforms else again


def _transforms(env: EnvBase) -> list[Transform]:
    if not isinstance(env, TransformedEnv):
        return []
    return list(env.transform) if isinstance(env.transform, Compose) else [env.transform]


# -- threads ----------------------------------------------------------------------------------------------------------


class EnvironmentTimeoutError(TimeoutError):
    """A call of an environment did not return in time; its thread is still in it."""


class Threads(ThreadPoolExecutor):
    """Daemon threads for functions that may hang: a call that is cancelled while it runs costs a thread, not its place.

    A plain pool would fill up with such calls, and the process would wait for them at its end. Idle threads end by
    themselves, so that pools may be forgotten.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)  # an event loop takes no other executor; it starts no thread of its own
        self._most, self._name, self._process = most, name, os.getpid()
        self._changed = threading.Condition(threading.RLock())  # a garbage collection may shut it down within a call
        self._calls: deque[_Call[Any]] = deque()
        self._workers = self._idle = 0
        self._given_up: set[_Call[Any]] = set()
        self._is_over = False

    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        call: _Call[T] = _Call(partial(function, *args, **kwargs), self._give_up)
        with self._changed:
            if self._is_over:
                raise RuntimeError("these threads have ended, and call nothing more")
            if len(self._given_up) >= MOST_GIVEN_UP:
                names = sorted({_name(call.function) for call in self._given_up})
                raise CollectionError(
                    f"{len(self._given_up)} calls that were given up still run in their threads, of "
                    f"{', '.join(names[:3])}: a function that may hang needs a time limit of its own"
                )
            self._calls.append(call)
            try:
                self._wake_thread()
            except RuntimeError:  # the system has no thread left
                self._calls.remove(call)
                raise
        return call

    def call(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call user code, for the running event loop; its errors are plain ones."""
        return asyncio.get_running_loop().run_in_executor(self, plainly, function, *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after their calls; none is waited for."""
        del wait
        if self._process != os.getpid():  # a forked one has none of the threads, and perhaps one's lock
            return
        with self._changed:
            self._is_over = True
            left = list(self._calls) if cancel_futures else []
            self._changed.notify_all()
        # outside of the lock: what waits for a call runs here
        for call in left:
            call.cancel()

    def _wake_thread(self) -> None:
        """Wake or start a thread for the calls that wait."""
        if self._idle >= len(self._calls):
            self._changed.notify()
        elif self._workers < self._most:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._workers += 1

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            with self._changed:
                if call in self._given_up:  # another thread has this one's place
                    self._given_up.discard(call)
                    return
                call.is_over = True
            del call  # what it returned is not kept until the next one

    def _next(self) -> _Call[Any] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls or self._is_over, IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._workers -= 1
            return None

    def _give_up(self, call: _Call[Any]) -> None:
        """Count a running call's thread as lost, and start another one for the calls that wait."""
        with self._changed:
            if not call.is_over and call not in self._given_up:
                self._given_up.add(call)
                self._workers -= 1
                if self._calls:
                    self._wake_thread()


class _Call(Future[T]):
    """A call in a thread; ``give_up`` is called if it is cancelled while it runs."""

    def __init__(self, function: Callable[[], T], give_up: Callable[[_Call[T]], None]) -> None:
        super().__init__()
        self.function, self.is_over = function, False
        self._give_up = give_up

    def cancel(self) -> bool:
        """Cancel it, or give it up; an event loop calls this when the future that it made of it is cancelled."""
        is_cancelled = super().cancel()
        if not is_cancelled:
            self._give_up(self)
        return is_cancelled

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            # an event loop's future does not take these two as what they are
            if isinstance(error, StopIteration | CancelledError):
                error = RuntimeError(f"{_name(self.function)} raised {error!r}")
            self.set_exception(error)
        else:
            self.set_result(result)
        finally:
            self.function = _done  # what it was called with may be as large as a model, and a future is kept


def _done() -> NoReturn:
    raise AssertionError("a call runs once")


def _name(function: object) -> str:
    """The name of a function, or environment, that helpers such as ``asyncio.to_thread`` call: their first argument."""
    while isinstance(function, partial):
        function = function.args[0] if function.args and callable(function.args[0]) else function.func
    while isinstance(function, TransformedEnv):
        function = function.base_env
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# -- the pool ---------------------------------------------------------------------------------------------------------


class EnvironmentPool:
    """Environments, each used by one thread at a time, and their threads."""

    def __init__(self, first: EnvBase, make: Callable[[], EnvBase] | None) -> None:
        self.group_size = first.batch_size[0]
        self._make = make
        # one of a single sample may hold its state, an interpreter's variables, say, until that is done
        self._is_kept = make is not None and self.group_size == 1
        self._free = [first]
        self._all = [first]
        self._room = asyncio.Semaphore(1 if make is None else MOST_THREADS)  # for calls
        self._threads = Threads(2 * MOST_THREADS, "torchrl_moe-env")  # some may hang
        self._hung = 0
        self._lock = threading.Lock()  # guards the fields below, which the threads use too
        self._in_use: set[int] = set()  # by a thread
        self._is_closed = False
        self._keep: EnvBase | None = None

    async def play(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        timeout: float | None,
        max_turns: int = MAX_TURNS,
        **generate_kwargs: Any,
    ) -> list[TensorDictBase]:
        """Run the samples of one environment; see :func:`play_episode`."""
        async with self.lend(timeout) as in_thread:
            samples = lazy_stack([data.copy() for _ in range(self.group_size)])
            return await play_episode(policy, generate, in_thread, samples, max_turns, **generate_kwargs)

    @asynccontextmanager
    async def lend(self, timeout: float | None) -> AsyncIterator[InThread]:
        """Reserve an environment for an episode; yields a function that calls another one with it, in a thread."""
        mine = await self._take() if self._is_kept else None

        def came_back(env: EnvBase, _: object) -> None:
            self._hung -= 1
            self._free.append(env)

        async def in_thread(function: Callable[..., T], *arguments: object) -> T:
            nonlocal mine
            async with self._room:
                env = mine or await self._take()
                call = self._threads.call(partial(self._use, env, function), *arguments)
                try:
                    done, _ = await asyncio.wait([call], timeout=timeout)
                except asyncio.CancelledError:
                    await asyncio.wait([call], timeout=timeout)  # a late call keeps the environment in use
                    raise
                finally:
                    call.add_done_callback(_read)
                    # a call that hangs keeps its environment until it returns; others get another one
                    if not call.done():
                        mine = None
                        self._hung += 1
                        call.add_done_callback(partial(came_back, env))
                    elif env is not mine:
                        self._free.append(env)
                if done:
                    return call.result()
                if self._make is None:
                    raise CollectionError(f"{ONLY_ONE} It had {timeout:g} s.")
                if self._hung > MOST_THREADS:
                    raise CollectionError(f"{self._hung} environments did not return in time")
                raise EnvironmentTimeoutError(f"the environment did not return within {timeout:g} s")

        try:
            yield in_thread
        finally:
            if mine is not None:
                self._free.append(mine)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        return await self._threads.call(function, *arguments)

    async def _take(self) -> EnvBase:
        if self._free:
            return self._free.pop()
        if self._make is None:
            raise CollectionError(ONLY_ONE)
        return await self._threads.call(partial(self._made, self._make))

    # -- in a thread ------------------------------------------------------------------------------------------------

    def _made(self, make: Callable[[], EnvBase]) -> EnvBase:
        env = make()
        with self._lock:
            self._all.append(env)
            is_late = self._is_closed
        if is_late:  # the pool was closed while it was made
            env.close(raise_if_closed=False)
        return env

    def _use(self, env: EnvBase, function: Callable[..., T], *arguments: object) -> T:
        """Call a function with an environment; close the environment afterwards if the pool was closed meanwhile."""
        with self._lock:
            self._in_use.add(id(env))
        try:
            return function(env, *arguments)
        finally:
            with self._lock:
                self._in_use.discard(id(env))
                is_late = self._is_closed and env is not self._keep
            if is_late:
                env.close(raise_if_closed=False)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, keep: EnvBase | None = None) -> None:
        """End the threads and close every environment but ``keep``; one in use is closed after its call.

        It is not closed earlier because tools restart a process that is killed under them. A thread that hangs ends
        with its call.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed, self._keep = True, keep
            idle = [env for env in self._all if id(env) not in self._in_use and env is not keep]
        for env in idle:
            env.close(raise_if_closed=False)


def plainly(function: Callable[..., T], *arguments: object) -> T:
    """Call user code; what would end the loop that waits for it, or a task silently, is an error like any."""
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"an environment raised {error!r}") from error


def _read(call: asyncio.Future[Any]) -> None:
    """Read the error of a call that nobody waits for any more, so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()
