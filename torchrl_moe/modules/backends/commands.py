"""A replica's typed commands, over an engine that takes commands by name, with keyword arguments.

A name and plain values are sent to the engine process. The service sees these methods, which are those of the
:class:`~torchrl_moe.modules.backends.replica.Replica` protocol. Each raises an ``EngineError`` past its deadline, and a
``ReplicaDiedError`` if the engine is gone.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_moe.modules.backends.replica import PauseMode
from torchrl_moe.modules.backends.reports import ReplicaStats, SwapReport
from torchrl_moe.modules.backends.weight_claim import WeightClaim
from torchrl_moe.weight_update.transports.base import StageReport

if TYPE_CHECKING:
    import torch

__all__ = ["Commands"]


class Commands(abc.ABC):
    """Typed methods over one method that sends a command by name. ``timeout`` is in seconds.

    Attributes:
        driver: the id by which the engine knows this driver; "" if it has only one.
    """

    driver: str = ""
    _epoch: int = 0  # of this driver's claim to the weights
    _digest: str = ""  # of what this driver staged last

    @abc.abstractmethod
    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        """Run a command of the engine process and return its value."""

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop scheduling; see the protocol."""
        self._command("pause", timeout, mode=mode, clear_cache=clear_cache)

    def resume(self, timeout: float) -> None:
        """Undo :meth:`pause`."""
        self._command("resume", timeout)

    def sleep(self, level: int, mode: PauseMode, timeout: float) -> None:
        """Free the memory of weights and cache; see the protocol."""
        self._command("sleep", timeout, level=level, mode=mode)

    def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        """Undo :meth:`sleep`, or part of it."""
        self._command("wake_up", timeout, tags=None if tags is None else list(tags))

    def stats(self, timeout: float) -> ReplicaStats:
        """Ask for the engine's current stats."""
        return cast(ReplicaStats, self._command("stats", timeout))

    def reset_prefix_cache(self, timeout: float) -> bool:
        """Drop cached prefixes; false if requests are running."""
        return bool(self._command("reset_prefix_cache", timeout))

    def set_seed(self, seed: int, timeout: float) -> None:
        """Seed the sampler; see the protocol."""
        self._command("set_seed", timeout, seed=seed)

    def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float
    ) -> list[Any]:
        """Call a method of every worker; one result for each. Plain data only."""
        return list(self._command("collective_rpc", timeout, method=method, args=tuple(args), kwargs=kwargs))

    def tokenizer(self, timeout: float) -> Any:
        """Return the model's tokenizer."""
        return self._command("tokenizer", timeout)

    def metadata(self, timeout: float) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return what the checkpoint holds: name -> dtype and shape."""
        return cast("dict[str, tuple[torch.dtype, torch.Size]]", self._command("metadata", timeout))

    def weights_version(self, timeout: float) -> int:
        """Return the version of the engine's weights; 0 for the checkpoint's."""
        return int(self._command("weights_version", timeout))

    def claim_weights(self, name: str, takeover: bool, timeout: float) -> WeightClaim:
        """Make the weights this driver's; see the protocol."""
        claim: WeightClaim = self._command("claim_weights", timeout, driver=self.driver, name=name, takeover=takeover)
        if claim.epoch:
            self._epoch = claim.epoch
        return claim

    def owns_weights(self, timeout: float) -> bool:
        """Whether the last claim of this driver holds; see the protocol."""
        return bool(self._command("owns_weights", timeout, epoch=self._epoch))

    def give_up_weights(self, timeout: float) -> None:
        """Undo :meth:`claim_weights`."""
        self._command("give_up_weights", timeout, epoch=self._epoch)

    def init_weights(self, transport: str, options: Mapping[str, Any], timeout: float) -> None:
        """Open the engine's end of a weight transport."""
        self._command("init_weights", timeout, epoch=self._epoch, transport=transport, options=dict(options))

    def stage_weights(
        self, version: int, *, verify: str, threads: int, manifest: str | None, timeout: float
    ) -> StageReport:
        """Fetch and check a version, while requests run; see the protocol."""
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
        canary: Mapping[str, Any] | None,
        digest: str | None = None,
        patience: float = math.inf,
        timeout: float,
    ) -> SwapReport:
        """Serve a version that was staged; see the protocol."""
        what = {"epoch": self._epoch, "version": version, "digest": self._digest if digest is None else digest}
        how = {"pause": pause, "clear_cache": clear_cache, "canary": canary, "patience": patience}
        return cast(SwapReport, self._command("swap_weights", timeout, **what, **how))
