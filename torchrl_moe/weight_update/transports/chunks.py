"""A version's bytes cut into chunks of whole tensors, which can be loaded one after another as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchrl_moe.weight_update.store import Manifest, TensorEntry
from torchrl_moe.weight_update.store.flat import check_digest

__all__ = ["Chunk", "chunks_of"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tensors that lie side by side in a version's file, at least one."""

    entries: tuple[TensorEntry, ...]

    @property
    def span(self) -> slice:
        """Its bytes among those of the version, gaps for alignment included."""
        return slice(self.entries[0].offset, max(entry.end for entry in self.entries))

    @property
    def size(self) -> int:
        """How many bytes these are."""
        return int(self.span.stop - self.span.start)

    def tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, of any number of dimensions, as views of its bytes, uint8 ``[size]``."""
        for entry, place in self._places():
            yield entry.name, flat[place].view(entry.torch_dtype).view(entry.shape)

    def verify(self, version: int, flat: Tensor) -> None:
        """Compare the digests of its bytes, uint8 ``[size]``, on the host.

        Raises:
            DigestMismatch: they are not those that were published.
        """
        content: Any = flat.cpu().numpy()
        for entry, place in self._places():
            check_digest(version, entry, content[place])

    def _places(self) -> Iterator[tuple[TensorEntry, slice]]:
        start = self.span.start
        for entry in self.entries:
            yield entry, slice(entry.offset - start, entry.end - start)


def chunks_of(manifest: Manifest, most_bytes: int) -> list[Chunk]:
    """Cut a version into chunks of at most ``most_bytes``; only a chunk of a single tensor may be larger.

    >>> entries = [TensorEntry(name, "uint8", (60,), at, "") for name, at in [("a", 0), ("b", 64), ("c", 128)]]
    >>> [[entry.name for entry in chunk.entries] for chunk in chunks_of(Manifest(1, 0, tuple(entries)), 128)]
    [['a', 'b'], ['c']]
    """
    chunks: list[list[TensorEntry]] = []
    for entry in sorted(manifest.entries, key=lambda entry: entry.offset):
        if not chunks or entry.end - chunks[-1][0].offset > most_bytes:
            chunks.append([])
        chunks[-1].append(entry)
    return [Chunk(tuple(chunk)) for chunk in chunks]
