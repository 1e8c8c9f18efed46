"""``RunReports``: the tables, figures and files that a run shows its user."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from torchrl_moe._checks import renamed
from torchrl_moe.render.curves import training_figure
from torchrl_moe.render.data_frames import data_frame
from torchrl_moe.render.numbers import number_text
from torchrl_moe.render.tables import html_table
from torchrl_moe.render.token_scale import Color
from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rank_group import Ranks
from torchrl_moe.trainers.rich_tables import Table
from torchrl_moe.trainers.run_record import RunRecord
from torchrl_moe.trainers.summary import summary

__all__ = ["RunReports"]


class RunReports:
    """Tables, figures and files of a run; the trainer holds the run itself."""

    config: GRPOConfig
    policy_model: PolicyModel
    record: RunRecord
    steps_done: int
    collector: Any
    ranks: Ranks

    @abstractmethod
    def evaluate(self) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""

    def summary(self) -> Table:
        """Return a table of the run's results, and of the effect of replay."""
        if not self.record.rows:
            raise RuntimeError("no step has run: there is nothing to summarise")
        return summary(self.record.rows, self.evaluate())

    def plot(self) -> Any:
        """Return a figure of reward, mismatch, length and seconds per phase."""
        return training_figure(self.record.rows, f"GRPO, replay={self.config.loss.replay}")

    @renamed(colour="color")
    def show_samples(
        self, n: int = 4, characters: int = 160, *, color: Color | None = None, layer: int | None = None
    ) -> None:
        """Print the newest samples, as a table, or token by token in color; see :meth:`LLMCollector.show_samples`."""
        self.collector.show_samples(n, characters, color=color, layer=layer)

    def to_pandas(self) -> Any:
        """Return a ``DataFrame`` with a row for each step."""
        return data_frame(self.record.rows).replace("", None)

    def save_pretrained(self, folder: str | Path | None = None) -> Path:
        """Write model, tokenizer and generation config as the hub has them; default: ``model`` in ``config.out``.

        Weights are written in ``config.save.dtype``, by default that of the source.

        All ranks must call it; rank 0 writes.
        """
        with self.ranks.guard():
            self.ranks.meet("writing the model", patient=True)
            where = Path(folder) if folder is not None else self.record.folder / "model"
            return self.policy_model.save(where, self.config.save.dtype)

    def __repr__(self) -> str:
        model, config = type(self.policy_model.model).__name__, self.config
        return (
            f"MoEGRPOTrainer({model}, {config.loss.name}, replay={config.loss.replay!r}, step {self.steps_done} of "
            f"{config.steps}, max_staleness={config.rollout.max_staleness}, out={config.out!r})"
        )

    def _repr_html_(self) -> str:
        """Return the last row as a table, for notebooks."""
        row = self.record.rows[-1] if self.record.rows else {}
        cells = [(name, number_text(value)) for name, value in row.items() if value != ""]
        return html_table(repr(self), ("metric of the last step", "value"), cells, note="" if row else "no step yet")
