"""Bringing a trainer's weights to its engines (namesake: ``torchrl.weight_update``).

The scheme, its sender, the weight store, the transports and the reports. How an engine loads a version is in
``modules``.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.weight_update.double_buffer import VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme
    from torchrl_moe.weight_update.double_buffer import VLLMDoubleBufferTransport as VLLMDoubleBufferTransport
    from torchrl_moe.weight_update.double_buffer import VLLMDoubleBufferWeightReceiver as VLLMDoubleBufferWeightReceiver
    from torchrl_moe.weight_update.double_buffer import VLLMDoubleBufferWeightSender as VLLMDoubleBufferWeightSender
    from torchrl_moe.weight_update.report import SyncReport as SyncReport
    from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme as VLLMWeightSyncScheme
    from torchrl_moe.weight_update.sender import VLLMWeightReceiver as VLLMWeightReceiver
    from torchrl_moe.weight_update.sender import VLLMWeightSender as VLLMWeightSender
    from torchrl_moe.weight_update.source import get_model_metadata as get_model_metadata
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".double_buffer": "VLLMDoubleBufferSyncScheme VLLMDoubleBufferTransport VLLMDoubleBufferWeightReceiver "
            "VLLMDoubleBufferWeightSender",
            ".report": "SyncReport",
            ".scheme": "VLLMWeightSyncScheme",
            ".sender": "VLLMWeightReceiver VLLMWeightSender",
            ".source": "get_model_metadata",
        },
    )
