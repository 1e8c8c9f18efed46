"""The driver's side of a collector in a Ray actor; base of the two collectors in Ray."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import RayReplayBuffer, ReplayBuffer

from torchrl_moe._checks import renamed
from torchrl_moe._errors import CollectionError
from torchrl_moe.collectors.arguments import EnvLike
from torchrl_moe.collectors.packed import unpack
from torchrl_moe.collectors.remote_host import RemoteHost, actor_options
from torchrl_moe.collectors.sample_reader import SampleReader
from torchrl_moe.render.samples import MOST_TOKENS, show_token_samples
from torchrl_moe.render.tables import html_table
from torchrl_moe.render.text_tables import print_table
from torchrl_moe.render.token_scale import Color

__all__ = ["RayCollector"]

LOG = logging.getLogger(__name__)

OF_RAY = ("ray_init_config", "remote_config", "num_cpus", "num_gpus", "sync_iter")
SHOW_SECONDS = 5.0
END_SECONDS = 15.0
JOIN_SECONDS = 5.0


class RayCollector(BaseCollector):
    """Forwards calls to the actor, which holds the local collector. Thread-safe.

    Args:
        kind: the local collector's name in ``torchrl_moe.collectors``.
        given: its arguments by name, and those of Ray; ``"self"`` and ``"__class__"`` are ignored.

    Raises:
        TypeError: an argument cannot be sent to an actor.
        ValueError: resources are given twice, and differ.
        CollectionError: the actor was not placed in time.
        Exception: what the local collector raises.
    """

    init_random_frames = 0
    """For TorchRL's trainer."""
    _rests = False
    """Whether the local collector works only when asked, and has a state only between batches."""

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        super().__init__()
        arguments = {name: value for name, value in given.items() if name not in ("self", "__class__", *OF_RAY)}
        self.sync_iter: bool = given["sync_iter"]
        self.verbose: bool = given["verbose"]
        self.replay_buffer = arguments["replay_buffer"]
        weight_updater = arguments.pop("weight_updater")  # it stays where the weights are
        self._extends_here = isinstance(self.replay_buffer, ReplayBuffer) and not isinstance(
            self.replay_buffer, RayReplayBuffer
        )
        self._is_over = False
        self._failure: BaseException | None = None
        self._taking = threading.Lock()
        self._awaited: Any = None  # the batch that was requested
        self._ahead: deque[TensorDictBase | None] = deque()  # batches of a state that was loaded
        self._changed = threading.Condition()
        self._pauses = 0
        self._is_writing = False
        self._writer: threading.Thread | None = None
        options = actor_options(given["remote_config"], num_cpus=given["num_cpus"], num_gpus=given["num_gpus"])
        self._host = RemoteHost(kind, self._sendable(arguments), options, given["ray_init_config"])
        self.total_dialog_turns = self.total_frames = given["total_dialog_turns"]
        self.dialog_turns_per_batch = self.requested_frames_per_batch = self._host.dialog_turns_per_batch
        self.weight_updater = weight_updater

    def _sendable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Replace a buffer by what the actor may use of it."""
        if isinstance(self.replay_buffer, RayReplayBuffer):
            return {**arguments, "replay_buffer": self.replay_buffer.client()}
        if self._extends_here:
            flatten = arguments["flatten_data"]
            if flatten is None and not arguments["yield_only_last_steps"]:
                flatten = True  # the default with a buffer, which the actor does not see
            return {**arguments, "replay_buffer": None, "flatten_data": flatten}
        return arguments

    # -- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the :class:`CollectorHost`.

        Raises:
            CollectionError: the actor was shut down, or has died.
        """
        if self._is_over:
            raise CollectionError("the collector was shut down")
        return self._host.wait(self._host.begin(method, *arguments))

    # -- batches ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; with a buffer, ``None`` for each one that it was extended with."""
        if self._failure is not None:
            raise self._failure
        while found := self._take():
            (batch,) = found
            if self._extends_here:
                self.replay_buffer.extend(batch)
                batch = None
            yield batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches. After an error the actor stays, so that its state can be saved."""
        return self.iterator()

    def next(self) -> TensorDictBase | None:
        """Return the next batch; ``None`` at the end, or if it went into the buffer."""
        return next(self.iterator(), None)

    def _take(self) -> tuple[TensorDictBase | None, ...]:
        """Wait for the next batch; an empty tuple at the end. After a Ctrl-C the next call waits for the same batch."""
        with self._taking:
            if self._is_over:
                return ()
            if self._ahead:
                return (self._ahead.popleft(),)
            try:
                if self._awaited is None:
                    self._check_unpaused()
                    self._awaited = self._begin()
                found: tuple[TensorDictBase | None, ...] = unpack(self._host.wait(self._awaited))
            except Exception:
                self._awaited = None
                if self._is_over:  # shut down meanwhile, which is why it failed
                    return ()
                raise
            asks_ahead = found and not self.sync_iter and not self._pauses
            self._awaited = self._begin() if asks_ahead else None
            return found

    def _begin(self) -> Any:
        return self._host.begin("next", threading.current_thread() is self._writer)

    def _check_unpaused(self) -> None:
        """Refuse to ask a paused local collector, which would yield nothing; a pause waits for the writer."""
        if self._rests and self._pauses and threading.current_thread() is not self._writer:
            raise RuntimeError("the collector is paused")

    def _is_here(self) -> bool:
        """Whether a requested batch has arrived; waits for it if the local collector works only when asked."""
        awaited = self._awaited
        return awaited is not None and self._host.is_done(awaited, None if self._rests else 0.0)

    # -- free running -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the replay buffer from now on, as the local collector does; a thread of this process asks for batches.

        Raises:
            RuntimeError: there is no buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer: pass replay_buffer=, or iterate over the collector")
        if not self.is_running():
            self._writer = threading.Thread(target=self._write, name="torchrl_moe-ray-writer", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        batches = self.iterator()
        try:
            while self._may_write() and next(batches, self) is not self:
                pass
        except BaseException as error:  # noqa: BLE001  the trainer gets it from getattr_rb
            self._failure = error
            LOG.error("the collector has ended: %r", error)
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _may_write(self) -> bool:
        """Wait for the end of a pause; return False if the collector was shut down."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses or self._is_over)
            self._is_writing = not self._is_over
            return self._is_writing

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread has not ended."""
        return self._writer is not None and self._writer.is_alive()

    @contextmanager
    def pause(self, resume: bool = True) -> Iterator[None]:
        """Pause the local collector within the context, and request nothing from it.

        Args:
            resume: whether to continue afterwards.
        """
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                # another one may wait for the weight update that comes after the pause
                self._changed.wait_for(lambda: not (self._rests and self._is_writing))
            self._is_here()
            self._ask("pause", resume)
            try:
                yield
            finally:
                if not self._is_over:
                    self._ask("end_pause")
        finally:
            if resume:
                with self._changed:
                    self._pauses -= 1
                    self._changed.notify_all()

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer.

        Raises:
            Exception: the error that ended the collection. TorchRL's trainer waits here for the first write.
        """
        if self._failure is not None:
            raise self._failure
        return getattr(self.replay_buffer, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy, which must be picklable."""
        return self._ask("call", "getattr_policy", attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment, which must be picklable."""
        return self._ask("call", "getattr_env", attr)

    # -- weights ----------------------------------------------------------------------------------------------------

    def increment_version(self) -> None:
        """Note a weight update; a sender calls it, see ``sender.register_collector``."""
        if self._is_over:
            return
        try:
            self._ask("increment_version")
        except CollectionError as error:
            self._failure = error  # only this collector's trainer gets it; the sender may have other collectors

    @property
    def policy_version(self) -> Any:
        """The newest version of the engine's weights, as the local collector knows it."""
        return self._ask("read", "policy_version")

    def get_policy_version(self) -> Any:
        """:attr:`policy_version`, as TorchRL has it."""
        return self.policy_version

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Push weights with TorchRL's weight updater, from this process; else the sync scheme's sender has done so."""
        if self.weight_updater is not None:
            self.weight_updater.push_weights(policy_or_weights, **kwargs)
        self.increment_version()

    # -- batches and reports ----------------------------------------------------------------------------------------

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set what is applied to each batch, in the actor.

        Raises:
            RuntimeError: it is set already.
        """
        self._ask("set_postproc", postproc)

    @property
    def post_collect_hook(self) -> Callable[[TensorDictBase], None] | None:
        """What is called with each batch, in the actor."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDictBase], None] | None) -> None:
        self._ask("call", "set_post_collect_hook", hook)
        self._post_collect_hook = hook

    def stats(self) -> dict[str, int | float | bool]:
        """Return metrics by name, plain numbers for a logger."""
        found: dict[str, int | float | bool] = self._ask("call", "stats")
        return found

    @renamed(colour="color")
    def show_samples(
        self,
        n: int = 4,
        characters: int = 160,
        *,
        color: Color | None = None,
        layer: int | None = None,
        tokens: int = MOST_TOKENS,
    ) -> None:
        """Show the newest samples of the last batch; see :meth:`LLMCollector.show_samples`."""
        if color is not None:
            show_token_samples(self._ask("call", "token_samples", n, tokens), color, layer)
            return
        title, cells = self._ask("call", "sample_cells", n, characters)
        print_table(title, SampleReader.COLUMNS, cells, wide=SampleReader.WIDE)

    def to_pandas(self) -> Any:
        """Return a pandas ``DataFrame`` with a row for each batch; see :meth:`LLMCollector.to_pandas`."""
        return self._ask("call", "to_pandas")

    def _repr_html_(self) -> str:
        """Return the table of the local collector; of one that is over, or says nothing, why."""
        is_known, text = self._shown("_repr_html_")
        return text if is_known else html_table(type(self).__name__, ("",), [], note=text)

    def evaluate(
        self, env: EnvLike, n: int, *, dataloader: Iterable[Any] | None = None, **generate_kwargs: Any
    ) -> TensorDictBase:
        """Answer ``n`` held-out prompts in the actor, at top priority, while the collection continues."""
        found: TensorDictBase = self._ask("evaluate", env, n, dataloader, generate_kwargs)
        return found

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the local collector's state; ``"ahead"``: a batch requested ahead, or interrupted by a Ctrl-C."""
        with self.pause() if self._rests else nullcontext():
            ahead = list(self._ahead)
            if self._taking.acquire(blocking=False):  # else a thread is taking it
                try:
                    if self._is_here():
                        with suppress(Exception):  # the next request for a batch raises it
                            ahead += [batch for batch in unpack(self._host.wait(self._awaited)) if batch is not None]
                finally:
                    self._taking.release()
            return {**self._ask("call", "state_dict"), "ahead": ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a collector of the same data stopped, even a local one. Call it before the first batch."""
        state = dict(state_dict)
        ahead = state.pop("ahead", ())
        with self._taking:
            self._is_here()  # else the batch that was requested could be made from what is loaded
            self._awaited = None
            self._ask("call", "load_state_dict", state)
            self._ahead = deque(ahead)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the actor's data and environment.

        Returns:
            The next seed to use.
        """
        return int(self._ask("call", "set_seed", seed, static_seed))

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Shut the local collector down and end the actor. Idempotent; the engine stays up for its owner.

        Args:
            timeout: seconds that the local collector gets to shut down.
            close_env: whether it closes its environments.
            raise_on_error: no effect.
        """
        del raise_on_error
        if self._is_over:
            return
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        seconds = END_SECONDS if timeout is None else timeout + JOIN_SECONDS
        self._host.end(seconds, self._awaited, timeout, close_env)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(JOIN_SECONDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown('__repr__')[1]})"

    def _shown(self, method: str) -> tuple[bool, str]:
        """Return what the local collector says of itself, or false and why it says nothing; nobody waits long for it.

        Args:
            method: of the collector, without arguments.
        """
        try:
            if self._is_over:
                raise CollectionError("the collector was shut down")
            reference = self._host.begin("call", method)
            if not self._host.is_done(reference, SHOW_SECONDS):
                raise CollectionError(f"its actor gave no answer within {SHOW_SECONDS:g} s")
            return True, str(self._host.wait(reference))
        except CollectionError as error:
            return False, str(error).partition("\n")[0]
