"""Training runs (namesake: ``torchrl.trainers``): a GRPO trainer over TorchRL's ``Trainer``, its hooks and loggers."""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.trainers.config import ConfigError as ConfigError
    from torchrl_moe.trainers.config import GRPOConfig as GRPOConfig
    from torchrl_moe.trainers.grpo_trainer import MoEGRPOTrainer as MoEGRPOTrainer
else:
    __getattr__, __dir__, __all__ = attach(
        __name__, {"ConfigError": ".config", "GRPOConfig": ".config", "MoEGRPOTrainer": ".grpo_trainer"}
    )
