"""Versions of a model's weights as files of safetensors, and the manifests that describe them.

A folder in memory serves one host, one on a shared file system several; one writer and any number of readers.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.store.manifest import Manifest as Manifest
    from torchrl_moe.store.manifest import TensorEntry as TensorEntry
    from torchrl_moe.store.manifest import check_tensors as check_tensors
    from torchrl_moe.store.reader import WeightStoreReader as WeightStoreReader
    from torchrl_moe.store.reader import adapter_tensors as adapter_tensors
    from torchrl_moe.store.reader import copy_adapter as copy_adapter
    from torchrl_moe.store.writer import WeightStoreWriter as WeightStoreWriter
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".manifest": "Manifest TensorEntry check_tensors",
            ".reader": "WeightStoreReader adapter_tensors copy_adapter",
            ".writer": "WeightStoreWriter",
        },
    )
