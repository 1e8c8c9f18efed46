"""A version's flat bytes as they arrive: the tensors in them, and whether their digests are those published."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torchrl_moe.weight_update.store import Manifest, TensorEntry
from torchrl_moe.weight_update.store.flat import check_digest

__all__ = ["Digests", "as_tensor", "tensor_in"]


def as_tensor(flat: Any) -> Tensor:
    """Return bytes as a tensor, without a copy, and without torch's warning that they cannot be written to."""
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * len(flat)).from_address(flat.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def tensor_in(flat: Tensor, entry: TensorEntry) -> Tensor:
    """Return a tensor of a version as a view of its bytes, uint8 ``[N]``."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


class Digests:
    """Compares the tensors that have arrived, while others arrive.

    Args:
        manifest: the version.
        flat: where its bytes are received, uint8 ``[N]``.
        pool: its threads compare; ``None``: nothing is compared.
    """

    def __init__(self, manifest: Manifest, flat: Tensor, pool: ThreadPoolExecutor | None) -> None:
        self._version, self._pool = manifest.version, pool
        self._left = sorted(manifest.entries, key=lambda entry: entry.offset, reverse=True)
        self._bytes: Any = flat.numpy()
        self._jobs: list[Future[None]] = []

    def arrived(self, count: int) -> None:
        """Note that the first ``count`` bytes have arrived."""
        whole = []
        while self._left and self._left[-1].end <= count:
            whole.append(self._left.pop())
        if self._pool is not None:
            self._jobs.append(self._pool.submit(self._compare, whole))

    def _compare(self, entries: list[TensorEntry]) -> None:
        for entry in entries:
            check_digest(self._version, entry, self._bytes[entry.offset : entry.end].data)

    def result(self) -> None:
        """Raise the ``DigestMismatch`` that was found, if any."""
        for job in self._jobs:
            job.result()
