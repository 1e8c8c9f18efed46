"""Adapters in a weight store: a directory of versions, each with peft's two files as tensors of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.weight_update.store.manifest import Manifest
from torchrl_moe.weight_update.store.reader import WeightStoreReader

__all__ = ["ADAPTER_FILES", "adapter_tensors", "copy_adapter"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return what a version is published from: uint8, by file name.

    Args:
        files: the bytes of each of :data:`ADAPTER_FILES`.
    """
    return {name: torch.frombuffer(bytearray(files[name]), dtype=torch.uint8) for name in ADAPTER_FILES}


def copy_adapter(folder: Path, version: int, into: Path) -> Manifest:
    """Copy a version's files into a folder, and return its manifest.

    Raises:
        ManifestMismatch: the store has no such version, or its file is damaged, or is not one of an adapter.
        DigestMismatch: the bytes are not those that were published.
    """
    reader = WeightStoreReader(folder)
    manifest = reader.manifest(version)
    if set(manifest.tensors) != set(ADAPTER_FILES):
        raise ManifestMismatch(f"version {version} in {str(folder)!r} is not one of an adapter")
    with reader.reading(manifest, verify=True) as tensors:
        files = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    for name, content in files.items():
        (into / name).write_bytes(content)
    return manifest
