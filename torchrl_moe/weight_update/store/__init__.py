"""Versions of a model's weights as bytes, and the manifests that describe them.

One host: slots in shared memory (``slots``). Several hosts: files of safetensors on a shared file system
(``versions``). One reader for both.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.weight_update.store.manifest import Manifest as Manifest
    from torchrl_moe.weight_update.store.manifest import TensorEntry as TensorEntry
    from torchrl_moe.weight_update.store.manifest import check_tensors as check_tensors
    from torchrl_moe.weight_update.store.reader import WeightStoreReader as WeightStoreReader
    from torchrl_moe.weight_update.store.reader import adapter_tensors as adapter_tensors
    from torchrl_moe.weight_update.store.reader import copy_adapter as copy_adapter
    from torchrl_moe.weight_update.store.slots import WeightStoreWriter as WeightStoreWriter
    from torchrl_moe.weight_update.store.versions import VersionsWriter as VersionsWriter
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Manifest": ".manifest",
            "TensorEntry": ".manifest",
            "VersionsWriter": ".versions",
            "WeightStoreReader": ".reader",
            "WeightStoreWriter": ".slots",
            "adapter_tensors": ".reader",
            "check_tensors": ".manifest",
            "copy_adapter": ".reader",
        },
    )
