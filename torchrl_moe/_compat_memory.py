"""Memory of a computation, counted tensor by tensor, either as it runs or on shapes alone.

torch's class of tensors without memory and its operator for grouped products are private (torch 2.9 to 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class _GroupedMatmul(TorchDispatchMode):
    """Infers the shape of a grouped product of any dtype; torch's own rule accepts bfloat16 only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        # Forward or backward, by the shapes: the gradient of the weights is a product of two matrices.
        left, right = args[0], args[1]
        if right.ndim == 3:  # [rows, H] by [E, H, N]
            return left.new_empty(left.shape[0], right.shape[2])
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])  # the weights' gradient


@contextmanager
def without_memory() -> Iterator[None]:
    """Compute shapes and no values: tensors made inside take no memory."""

    def put(old: Tensor, new: Tensor) -> None:
        old.data = new.data  # module.to(...) would swap such tensors, which fails if anything holds a reference to one

    def none_packed(position_ids: Tensor) -> None:
        """Tell transformers, which would read it from values, that a row holds one sequence; then it makes no mask."""

    # Patches hold for the whole process: no other thread may run a model meanwhile.
    packed = patch("transformers.masking_utils.find_packed_sequence_indices", none_packed)
    with FakeTensorMode(), _GroupedMatmul(), patch.object(torch.utils, "swap_tensors", put), packed:
        yield


class _Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, from the first operator to the end of the storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for given in tree_iter((args, kwargs)):  # it existed before, so it does not count
            if isinstance(given, Tensor):
                self._known.setdefault(given.untyped_storage(), 0)
        # Storages, not tensors: views share one, and it lives as long as the last of them.
        out = func(*args, **(kwargs or {}))
        for made in tree_iter(out):
            if isinstance(made, Tensor) and made.untyped_storage() not in self._known:
                self._count(made.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of the tensors that ``run`` makes; those that existed before do not count.

    Works on tensors :func:`without_memory`, and on real ones.

    >>> peak_bytes(lambda: torch.ones(8) + torch.ones(8))
    96
    """
    with _Peak() as peak:
        run()
    return peak.most
