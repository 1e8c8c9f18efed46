"""Training runs (namesake: ``torchrl.trainers``): a GRPO trainer with TorchRL's stages of hooks and its loggers."""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.trainers.compose import load_config as load_config
    from torchrl_moe.trainers.config import CheckpointConfig as CheckpointConfig
    from torchrl_moe.trainers.config import ConfigError as ConfigError
    from torchrl_moe.trainers.config import DataConfig as DataConfig
    from torchrl_moe.trainers.config import EngineConfig as EngineConfig
    from torchrl_moe.trainers.config import EvalConfig as EvalConfig
    from torchrl_moe.trainers.config import GRPOConfig as GRPOConfig
    from torchrl_moe.trainers.config import HardwareConfig as HardwareConfig
    from torchrl_moe.trainers.config import LogConfig as LogConfig
    from torchrl_moe.trainers.config import LoRAConfig as LoRAConfig
    from torchrl_moe.trainers.config import LossConfig as LossConfig
    from torchrl_moe.trainers.config import ModelConfig as ModelConfig
    from torchrl_moe.trainers.config import OptimConfig as OptimConfig
    from torchrl_moe.trainers.config import PlacementConfig as PlacementConfig
    from torchrl_moe.trainers.config import RolloutConfig as RolloutConfig
    from torchrl_moe.trainers.config import SaveConfig as SaveConfig
    from torchrl_moe.trainers.grpo_trainer import MoEGRPOTrainer as MoEGRPOTrainer
    from torchrl_moe.trainers.plan import RunPlan as RunPlan
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".compose": "load_config",
            ".config": "CheckpointConfig ConfigError DataConfig EngineConfig EvalConfig GRPOConfig HardwareConfig "
            "LoRAConfig LogConfig LossConfig ModelConfig OptimConfig PlacementConfig RolloutConfig "
            "SaveConfig",
            ".grpo_trainer": "MoEGRPOTrainer",
            ".plan": "RunPlan",
        },
    )
