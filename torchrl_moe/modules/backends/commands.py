"""A replica's typed commands, over an engine that takes commands by name, with keyword arguments.

A name and plain values are sent to the engine process. The service sees these methods, which are those of the
:class:`~torchrl_moe.modules.backends.replica.Replica` protocol. Each raises an ``EngineError`` past its deadline, and a
``ReplicaDiedError`` if the engine is gone.
"""

from __future__ import annotations

import abc
import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.replica import PauseMode, ReplicaStats, SwapReport, WeightClaim, WeightOwner
from torchrl_moe.weight_update.transports.base import StageReport

if TYPE_CHECKING:
    import torch

__all__ = ["Commands", "WeightCommands", "compare_log_probs"]


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


class Commands(abc.ABC):
    """Typed methods over one method that sends a command by name. ``timeout`` is in seconds."""

    driver: str = ""
    _epoch: int = 0  # of this driver's claim to the weights
    _digest: str = ""  # of what this driver staged last

    @abc.abstractmethod
    def _command(self, name: str, timeout: float, /, **arguments: object) -> Any:
        """Run a command of the engine process and return its value."""

    # What each does stands in the protocol.

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        self._command("pause", timeout, mode=mode, clear_cache=clear_cache)

    def resume(self, timeout: float) -> None:
        self._command("resume", timeout)

    def sleep(self, level: int, mode: PauseMode, timeout: float) -> None:
        self._command("sleep", timeout, level=level, mode=mode)

    def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        self._command("wake_up", timeout, tags=None if tags is None else list(tags))

    def stats(self, timeout: float) -> ReplicaStats:
        return cast(ReplicaStats, self._command("stats", timeout))

    def reset_prefix_cache(self, timeout: float) -> bool:
        return bool(self._command("reset_prefix_cache", timeout))

    def set_seed(self, seed: int, timeout: float) -> None:
        self._command("set_seed", timeout, seed=seed)

    def collective_rpc(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object] | None, timeout: float
    ) -> list[Any]:
        return list(self._command("collective_rpc", timeout, method=method, args=tuple(args), kwargs=kwargs))

    def tokenizer(self, timeout: float) -> Any:
        return self._command("tokenizer", timeout)

    def metadata(self, timeout: float) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return cast("dict[str, tuple[torch.dtype, torch.Size]]", self._command("metadata", timeout))

    def weights_version(self, timeout: float) -> int:
        return int(self._command("weights_version", timeout))

    def claim_weights(self, name: str, takeover: bool, timeout: float) -> WeightClaim:
        claim: WeightClaim = self._command("claim_weights", timeout, driver=self.driver, name=name, takeover=takeover)
        # a refused claim leaves the one before, whose commands are then refused by the engine
        if claim.epoch:
            self._epoch = claim.epoch
        return claim

    def owns_weights(self, timeout: float) -> bool:
        return bool(self._command("owns_weights", timeout, epoch=self._epoch))

    def give_up_weights(self, timeout: float) -> None:
        self._command("give_up_weights", timeout, epoch=self._epoch)

    def init_weights(self, transport: str, options: Mapping[str, object], timeout: float) -> None:
        self._command("init_weights", timeout, epoch=self._epoch, transport=transport, options=dict(options))

    def stage_weights(
        self, version: int, *, verify: str, threads: int, manifest: str | None, timeout: float
    ) -> StageReport:
        how = {"verify": verify, "threads": threads, "manifest": manifest}
        report: StageReport = self._command("stage_weights", timeout, epoch=self._epoch, version=version, **how)
        self._digest = report.digest
        return report

    def swap_weights(
        self,
        version: int,
        *,
        pause: PauseMode,
        clear_cache: bool,
        canary: Mapping[str, object] | None,
        digest: str | None = None,
        patience: float = math.inf,
        timeout: float,
    ) -> SwapReport:
        what = {"epoch": self._epoch, "version": version, "digest": self._digest if digest is None else digest}
        how = {"pause": pause, "clear_cache": clear_cache, "canary": canary, "patience": patience}
        return cast(SwapReport, self._command("swap_weights", timeout, **what, **how))


# The commands of an engine process that concern weights: who owns them, and what was staged for whom.
#
# A driver's commands carry the epoch of its claim, and a swap the digest of what that driver staged. So two drivers
# that update one engine never mix: one of them is refused before anything is paused.


class WeightCommands(abc.ABC):
    """A part of an engine process, whose ``command_...`` methods are called by name."""

    def __init__(self) -> None:
        self.owner = WeightOwner()
        self._staged = ""  # the digest of what was staged last, if it is there still
        self._stagings = 0
        self._swapping = asyncio.Lock()  # staging overwrites what a swap reads

    # -- what an engine does ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def command_weights_version(self) -> int:
        """Return the version of the weights; 0 for the checkpoint's."""

    @abc.abstractmethod
    async def _open_transport(self, transport: str, options: Mapping[str, object]) -> None:
        """Open the engine's end of a transport."""

    @abc.abstractmethod
    async def _stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Fetch a version and check it."""

    @abc.abstractmethod
    async def _swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, object] | None, patience: float
    ) -> SwapReport:
        """Serve the version that was staged."""

    # -- what they have in common -----------------------------------------------------------------------------------

    async def command_claim_weights(self, driver: str, name: str, takeover: bool) -> WeightClaim:
        async with self._swapping:  # a swap of the former owner completes first
            return self.owner.claim(driver, name, takeover)

    async def command_owns_weights(self, epoch: int) -> bool:
        return self.owner.holds(epoch)

    async def command_give_up_weights(self, epoch: int) -> None:
        self.owner.give_up(epoch)

    async def command_init_weights(self, epoch: int, transport: str, options: dict[str, object]) -> None:
        self.owner.check(epoch)
        await self._open_transport(transport, options)

    async def command_stage_weights(
        self, epoch: int, version: int, verify: str, threads: int, manifest: str | None
    ) -> StageReport:
        async with self._swapping:
            self.owner.check(epoch)
            # nothing may be swapped in until this version is there, and is the last one
            self._staged = ""
            self._stagings = mine = self._stagings + 1
        report = await self._stage(version, verify, threads, manifest)
        # it ran beside a later one, which has overwritten what it fetched
        if mine != self._stagings:
            raise WeightSyncError("another version was staged meanwhile")
        self._staged = report.digest
        return report

    async def command_swap_weights(
        self,
        epoch: int,
        version: int,
        digest: str,
        pause: PauseMode,
        clear_cache: bool,
        canary: dict[str, object] | None,
        patience: float = math.inf,
    ) -> SwapReport:
        async with self._swapping:
            # both checks come before the pause: a refused swap costs no request anything
            if reason := self.owner.why_not_swap(epoch, version, digest, self._staged):
                return SwapReport(started=False, error=reason)
            return await self._swap(version, pause, clear_cache, canary, patience)
