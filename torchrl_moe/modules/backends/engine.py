"""What an engine can do: the one declaration of each verb, and the rules of weights that all engines have in common.

A driver calls a verb of an engine process by this class: ``replica.call(Engine.pause, seconds, "keep", False)``. Its
name and plain values are sent; the process runs the method of its own engine, see ``process/engine_program.py``.

Who may change an engine's weights: one driver at a time. A driver that lost its claim learns it from its next command
about weights, which is refused before anything is paused; and a swap names the digest of what was staged. So two
drivers never load halves of two versions. A claim ends with its driver, or when the driver gives it up.
"""

from __future__ import annotations

import abc
import asyncio
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.replica import (
    Completion,
    PauseMode,
    ProbeReport,
    ReplicaStats,
    StageReport,
    SwapReport,
    WeightClaim,
)

if TYPE_CHECKING:
    import torch

CALLER: ContextVar[str] = ContextVar("CALLER", default="")
"""The driver whose command runs; empty in a process that has one driver."""


class WeightOwner:
    """The driver that owns an engine's weights."""

    def __init__(self) -> None:
        self._driver: str | None = None
        self._name = ""

    def claim(self, driver: str, name: str, takeover: bool) -> WeightClaim:
        """Give a driver the weights, if none owns them, if it owns them already, or by ``takeover``.

        ``driver`` is its id, by which it is known when it leaves; ``name`` is for messages.
        """
        granted = self._driver in (None, driver) or takeover
        if granted:
            self._driver, self._name = driver, name
        return WeightClaim(granted=granted, owner=self._name)

    def holds(self, driver: str) -> bool:
        return driver == self._driver

    def check(self, driver: str) -> None:
        """Refuse a command of a driver that does not own the weights."""
        if self._name and driver != self._driver:  # nobody has claimed a new engine yet
            whose = "a driver that is gone" if self._driver is None else self._name
            raise WeightSyncError(
                f"the replica takes its weights from {whose} now: call init_all_workers_group(takeover=True) to take "
                "them back"
            )

    def why_not_swap(self, driver: str, version: int, digest: str, staged: str) -> str:
        """Return why a driver may not swap a version in, or "": it is not the owner, or another one was staged last.

        ``digest`` is of what the driver wants, ``staged`` of what was staged last; "" names nothing.
        """
        try:
            self.check(driver)
        except WeightSyncError as error:
            return str(error)
        return "" if digest and digest == staged else f"version {version} is not what was staged last"

    def give_up(self, driver: str) -> None:
        """End a driver's claim, unless another came since."""
        if driver == self._driver:
            self._driver = None


class WeightUpdates(Protocol):
    """How an engine's weights are updated. The engine has checked whose they are, and what was staged."""

    async def open(self, transport: str, options: Mapping[str, object]) -> None:
        """Open the engine's end of a transport."""

    async def stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Fetch a version and check it."""

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, object] | None, patience: float
    ) -> SwapReport:
        """Serve the version that was staged."""


class Engine(abc.ABC):
    """One engine with its weights. Public coroutines are its verbs; arguments and results are plain data.

    Those that are not abstract may be left out. Where something was expected of them, a ``ValueError`` says that the
    engine has no such thing.
    """

    def __init__(self) -> None:
        self.owner = WeightOwner()
        self.updates: WeightUpdates | None = None  # without them, updates are refused
        self._staged = ""  # the digest of what was staged last, if it is there still
        self._stagings = 0
        self._swapping = asyncio.Lock()  # staging overwrites what a swap reads

    # -- health and state -------------------------------------------------------------------------------------------

    async def probe(self, seconds: float) -> ProbeReport:
        """Return the engine's health; its core, if it is another process, gets ``seconds`` to answer a ping."""
        del seconds
        return ProbeReport(core_answered=True)

    @abc.abstractmethod
    async def stats(self) -> ReplicaStats:
        """Return the current stats."""

    @abc.abstractmethod
    async def snapshot(self) -> list[Completion]:
        """Return what each request of the caller in flight has so far: tokens, log-probs, routes and versions.

        The requests continue. An answer that is not finished counts as cut, so ``generate(resume=...)`` can continue
        from a copy after a crash.
        """

    async def tokenizer(self) -> dict[str, object]:
        """Return the files of the model's tokenizer, for ``checkpoint.load_tokenizer``."""
        raise self._lacks("tokenizer")

    async def metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return what the checkpoint holds: name -> dtype and shape."""
        raise self._lacks("checkpoint")

    def _lacks(self, what: str, *given: object) -> ValueError:
        del given
        return ValueError(f"this engine has no {what}")

    # -- scheduling -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop scheduling; ``mode`` says what happens to requests in flight."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Undo :meth:`pause`."""

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Free the memory of the cache, and of the weights: level 1 keeps them in host memory, 2 drops them.

        New requests wait. ``mode`` says what happens to those in flight; a weight update wakes the weights.
        """
        raise self._lacks("sleep mode", level, mode)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Undo :meth:`sleep`, or part of it: ``tags`` holds ``"weights"``, ``"kv_cache"`` or both; ``None``: both."""
        raise self._lacks("sleep mode", tags)

    async def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; false if requests are running."""
        return True

    async def set_seed(self, seed: int) -> None:
        """Seed the sampler, for requests without their own seed."""
        del seed

    async def collective_rpc(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object] | None
    ) -> list[Any]:
        """Call a method of every worker; one result for each. Plain data only."""
        raise self._lacks("workers to call", method, args, kwargs)

    # -- weights ----------------------------------------------------------------------------------------------------

    async def weights_version(self) -> int:
        """Return the version of the weights; 0 for the checkpoint's."""
        return 0

    async def claim_weights(self, name: str, takeover: bool) -> WeightClaim:
        """Make the weights the caller's: commands about weights of any other driver are refused from now on.

        Args:
            name: of the driver, for messages.
            takeover: whether to take them from another driver that is alive; otherwise the claim is refused, and names
                the owner.
        """
        async with self._swapping:  # a swap of the former owner completes first
            return self.owner.claim(CALLER.get(), name, takeover)

    async def owns_weights(self) -> bool:
        """Whether the weights are still the caller's."""
        return self.owner.holds(CALLER.get())

    async def give_up_weights(self) -> None:
        """Undo :meth:`claim_weights`, so that another driver may claim them."""
        self.owner.give_up(CALLER.get())

    async def init_weights(self, transport: str, options: Mapping[str, object]) -> None:
        """Open the engine's end of a weight transport."""
        self.owner.check(CALLER.get())
        await self._updates().open(transport, options)

    async def stage_weights(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Fetch a version and check it, while requests run; ``threads`` read and hash.

        ``verify``: ``"digest"``, ``"canary"`` or ``"off"``. ``manifest``: the version's, for a transport that cannot
        look it up.
        """
        async with self._swapping:
            self.owner.check(CALLER.get())
            # nothing may be swapped in until this version is there, and is the last one
            self._staged = ""
            self._stagings = mine = self._stagings + 1
        report = await self._updates().stage(version, verify, threads, manifest)
        # it ran beside a later one, which has overwritten what it fetched
        if mine != self._stagings:
            raise WeightSyncError("another version was staged meanwhile")
        self._staged = report.digest
        return report

    async def swap_weights(
        self,
        version: int,
        digest: str,
        pause: PauseMode,
        clear_cache: bool,
        canary: Mapping[str, object] | None,
        patience: float = math.inf,
    ) -> SwapReport:
        """Pause, load a version that was staged, check it, and continue.

        Args:
            version: its number.
            digest: what must have been staged last, by whichever sender.
            pause: what happens to requests in flight.
            clear_cache: whether frozen requests are recomputed under the new weights.
            canary: the trainer's log-probs, for the weight check; ``None``: any finite log-prob passes.
            patience: seconds after which the driver gives the replica up; the weight check stays well within them.
        """
        async with self._swapping:
            # before the pause: a refused swap costs no request anything
            if reason := self.owner.why_not_swap(CALLER.get(), version, digest, self._staged):
                return SwapReport(started=False, error=reason)
            return await self._updates().swap(version, pause, clear_cache, canary, patience)

    def _updates(self) -> WeightUpdates:
        if self.updates is None:
            raise self._lacks("weights to update")
        return self.updates


# What shows that an engine computes with the trainer's weights: both give a prompt's tokens the same log-probs.


def compare_log_probs(got: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Compare the engine's log-probs of a prompt's tokens with the trainer's.

    Example:
        >>> compare_log_probs([-1.0, -2.0], [-1.0, -2.5], tolerance=1e-3)
        Traceback (most recent call last):
        ...
        torchrl_moe.errors.WeightSyncError: the new weights' log-probs differ from the trainer's by up to 5.0e-01 \
(at token 2: -2 and -2.5), allowed: 1.0e-03
    """
    if len(got) != len(expected):
        raise WeightSyncError(f"the canary has {len(expected)} log-probs for a prompt of {len(got) + 1} tokens")
    differences = [abs(ours - theirs) for ours, theirs in zip(got, expected, strict=True)]
    if all(difference <= tolerance for difference in differences):  # also false of NaN
        return
    place = max(range(len(got)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    raise WeightSyncError(
        f"the new weights' log-probs differ from the trainer's by up to {differences[place]:.1e} "
        f"(at token {place + 1}: {got[place]:.6g} and {expected[place]:.6g}), allowed: {tolerance:.1e}"
    )
