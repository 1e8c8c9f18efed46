"""What a version holds: names, dtypes, shapes, places and digests of its tensors, as JSON that is checked when read.

A manifest names no path: a slot and a version are numbers, and an offset is looked up only within its file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from torchrl_moe._errors import ManifestMismatch

__all__ = ["ALIGNMENT", "Manifest", "TensorEntry", "TensorKind", "check_tensors"]

TensorKind = tuple[torch.dtype, torch.Size]
ALIGNMENT = 64
FORMAT = 2
SHOWN_NAMES = 4
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}
"""All that a manifest may name."""


class TensorEntry(NamedTuple):
    """One tensor: checkpoint name, dtype (torch's name), shape, place in its file, and the xxh3 digest of its bytes.

    ``base`` is the version whose file holds the bytes, if that is an older one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    digest: str
    base: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version, and its tensors in the order of publication.

    Attributes:
        version: its number.
        slot: which slot holds it; ``None`` in a directory of versions.
        entries: one per tensor.
    """

    version: int
    slot: int | None
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def extent(self) -> int:
        """Bytes of the version's own file that its tensors reach into, gaps for alignment included."""
        return max((entry.end for entry in self.entries if entry.base is None), default=0)

    @property
    def digest(self) -> str:
        """One digest of all names, dtypes, shapes and bytes, wherever the bytes lie."""
        text = json.dumps([(e.name, e.dtype, e.shape, e.digest) for e in self.entries])
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def tensors(self) -> dict[str, TensorKind]:
        """Name -> (dtype, shape)."""
        return {entry.name: (entry.torch_dtype, torch.Size(entry.shape)) for entry in self.entries}

    def to_json(self) -> str:
        """Return the manifest's file: one list per field, which is small and fast for many thousand tensors."""
        rows = zip(*self.entries, strict=True) if self.entries else ([] for _ in COLUMNS)
        columns = dict(zip(COLUMNS, map(list, rows), strict=True))
        return json.dumps({"format": FORMAT, "version": self.version, "slot": self.slot, **columns})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Undo :meth:`to_json`.

        Raises:
            ManifestMismatch: the text is not a manifest of this format.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ManifestMismatch(f"the manifest is not JSON ({error}): cut short, or not a weight store's") from None
        wrong = _first_fault(raw)
        if wrong is not None:
            raise ManifestMismatch(f"the manifest is not one of this format: {wrong}")
        columns = (raw[field] if field != "shape" else map(tuple, raw["shape"]) for field in COLUMNS)
        return cls(raw["version"], raw["slot"], tuple(map(TensorEntry._make, zip(*columns, strict=True))))


COLUMNS = TensorEntry._fields


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_shape(value: Any) -> bool:
    return type(value) is list and all(map(_is_count, value))


def _is_digest(value: Any) -> bool:
    return type(value) is str and len(value) == 16 and not value.strip("0123456789abcdef")


def _first_fault(raw: Any) -> str | None:
    """Return what is wrong with a manifest's JSON, if anything is."""
    if not isinstance(raw, dict) or set(raw) != {"format", "version", "slot", *COLUMNS}:
        return f"its fields are not format, version, slot, {', '.join(COLUMNS)}"
    version, slot, names = raw["version"], raw["slot"], raw["name"]
    if raw["format"] != FORMAT:
        return f"format {raw['format']!r}, this release reads {FORMAT}"
    if not _is_count(version) or not (slot is None or _is_count(slot)):
        return f"version {version!r} or slot {slot!r} is not a count"
    if not all(type(raw[field]) is list and len(raw[field]) == len(names) for field in COLUMNS):
        return "its lists differ in length"
    checks: Mapping[str, Callable[[Any], bool]] = {
        "name": lambda name: type(name) is str,
        "dtype": lambda dtype: type(dtype) is str and dtype in DTYPES,
        "shape": _is_shape,
        "offset": lambda offset: _is_count(offset) and offset % ALIGNMENT == 0,
        "digest": _is_digest,
        "base": lambda base: base is None or (slot is None and _is_count(base) and base < version),
    }
    for field, is_right in checks.items():
        if not all(map(is_right, raw[field])):
            wrong: Iterable[Any] = (value for value in raw[field] if not is_right(value))
            return f"{field} {next(iter(wrong))!r}"
    return "a name comes twice" if len(set(names)) != len(names) else None


def check_tensors(found: Mapping[str, TensorKind], expected: Mapping[str, TensorKind]) -> None:
    """Check that a version has exactly the tensors that a model expects.

    Args:
        found: name -> (dtype, shape) of what would be loaded.
        expected: the same of the model. Floating dtypes may differ, since loading casts; others may not.

    Raises:
        ManifestMismatch: names are missing or unknown, or shapes or kinds of dtype differ; some are named.
    """
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''})"
            for what, names in (("missing", missing), ("unknown to the engine", unknown))
            if names
        ]
        raise ManifestMismatch(
            f"the weights are not the engine's tensors: {'; '.join(parts)}. Publish the whole model that the engine "
            "was started from, with checkpoint names."
        )
    for name, (dtype, shape) in expected.items():
        got_dtype, got_shape = found[name]
        if tuple(shape) != tuple(got_shape):
            raise ManifestMismatch(f"{name} has shape {list(got_shape)}, the engine expects {list(shape)}")
        if dtype != got_dtype and not (dtype.is_floating_point and got_dtype.is_floating_point):
            raise ManifestMismatch(f"{name} is {got_dtype}, the engine expects {dtype}")
