"""Bringing a trainer's weights to its engines (namesake: ``torchrl.weight_update``).

The scheme, its sender, and reports. What a version is on disk is in ``data``; how an engine takes it, in ``modules``.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.weight_update.double_buffer import VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme
    from torchrl_moe.weight_update.metadata import get_model_metadata as get_model_metadata
    from torchrl_moe.weight_update.report import SyncReport as SyncReport
    from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme as VLLMWeightSyncScheme
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "SyncReport": ".report",
            "VLLMDoubleBufferSyncScheme": ".double_buffer",
            "VLLMWeightSyncScheme": ".scheme",
            "get_model_metadata": ".metadata",
        },
    )
