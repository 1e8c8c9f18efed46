"""``Follower``: makes the stand-ins that the other ranks of a run have for rank 0's engine, collector and folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from torchrl_moe.trainers.checkpoints import NothingKept
from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.parcel import unpack
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rank_group import Ranks
from torchrl_moe.trainers.rollout_source import RolloutSource
from torchrl_moe.trainers.run_record import Row
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

__all__ = ["FollowedEngine", "FollowedRollouts", "Follower", "NoRecord"]


class FollowedRollouts(NothingKept):
    """Iterates over this rank's shares of the batches that rank 0 collects, until rank 0 has no more.

    Args:
        ranks: of the run.
    """

    init_random_frames = 0  # TorchRL's trainer reads it

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            self._ranks.meet("rollouts", patient=True)
            parcel: bytes | None = self._ranks.scatter(None)
            if parcel is None:
                return
            yield unpack(parcel)

    def shutdown(self) -> None:
        """Do nothing: rank 0 collects."""


class FollowedEngine:
    """Takes part in sending weights to rank 0's engine: each rank holds a part of every weight.

    Args:
        policy_model: whose weights they are.
        config: of the run.
    """

    has_the_models_weights = False
    policy: Any = None
    dtype = ""
    start = None

    def __init__(self, policy_model: PolicyModel, config: GRPOConfig) -> None:
        self.sender = VLLMWeightSyncScheme(**config.engine.sync).create_sender()
        self.sender.register_model(policy_model.model)

    @property
    def version(self) -> int:
        """Version of the weights that were sent last."""
        return int(self.sender.version)

    def restore(self, version: int) -> None:
        """Send the weights, under rank 0's version number."""
        del version
        self.sync()

    def sync(self) -> SyncReport:
        """Send the weights."""
        return self.sender.update_weights()

    def sleep(self) -> None:
        """Do nothing, as :meth:`wake_up` and :meth:`forget_start`: the engine is rank 0's."""

    wake_up = forget_start = sleep

    def shutdown(self) -> None:
        """End the weight sync. Idempotent."""
        self.sender.shutdown()


class NoRecord:
    """A record that writes nothing: rank 0 writes the run's.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loggers: list[Any] = []
        self.rows: list[Row] = []

    def column(self, name: str) -> list[float]:
        """Return nothing."""
        del name
        return []


class Follower:
    """Stand-ins for what only rank 0 has, as far as the other ranks need them.

    Args:
        config: of the run; evaluation, loggers and progress are switched off in it.
        ranks: of the run.
    """

    def __init__(self, config: GRPOConfig, ranks: Ranks) -> None:
        self.config, self._ranks, self._folder = config, ranks, Path(config.out)
        config.eval.every = config.log.samples = 0
        config.log.loggers, config.log.progress = [], False

    def source(self, tokenizer: Any, given: dict[str, Any]) -> RolloutSource:
        """Return no data: only rank 0 reads it."""
        del tokenizer, given
        return RolloutSource(None, None)

    def lock(self) -> Callable[[], None]:
        """Take nothing."""
        return lambda: None

    def engine(self, policy_model: PolicyModel, engine: Any) -> FollowedEngine:
        """Return what takes part in sending weights."""
        del engine
        return FollowedEngine(policy_model, self.config)

    def collector(self, source: RolloutSource, rollout_engine: FollowedEngine) -> FollowedRollouts:
        """Return what waits for this rank's shares."""
        del source, rollout_engine
        return FollowedRollouts(self._ranks)

    def loggers(self) -> list[Any]:
        """Return none."""
        return []

    def record(self, steps_done: int, start: Path | None) -> NoRecord:
        """Return a record that writes nothing."""
        del steps_done, start
        return NoRecord(self._folder)
