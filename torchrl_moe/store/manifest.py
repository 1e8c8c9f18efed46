"""The manifest of a version: names, dtypes, shapes, places and digests of its tensors, and its text form.

A version is whole, and its file holds every tensor; or it is a patch, and its file holds the elements that differ from
those of its base, an older version. The digests are always those of the resulting tensors.

The text is the header of a safetensors file: of a whole version, any tool reads every tensor; of a patch it finds one
array of bytes, and the tensors are listed in ``__metadata__``. The text is written and read a few hundred tensors at a
time, each a line, so that an event loop in the same process is not blocked; a process parses each text only once. A
manifest names no path: a version is a number, and an offset is looked up only within its file.
"""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO, Annotated, TypeVar

import msgspec
import torch
import xxhash

from torchrl_moe.errors import ManifestMismatch

TensorKind = tuple[torch.dtype, torch.Size]
FORMAT = "4"
PATCH = "patch"  # the one array of a patch, as safetensors sees it
SHOWN_NAMES = 4
KEPT_MANIFESTS = 4
LINE_TENSORS = 512
GAP_BYTES = 2  # of the distance between two changed elements
YIELD_SECONDS = 2e-5
NAMES: Mapping[str, str] = {
    **{f"F{bits}": f"float{bits}" for bits in (64, 32, 16)},
    **{"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)},
    **{f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)},
    "BOOL": "bool",
}
"""All dtypes that a manifest may name: safetensors' name -> torch's."""
SHORT = {name: short for short, name in NAMES.items()}
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in SHORT}
T = TypeVar("T")
OPENING = '{"__metadata__":'
START = OPENING + '{"xxh3":"'
DIGEST_DIGITS = 16
MARK = "tensor "  # of the names of tensors between other fields
CHECKED = len(START) + 32  # where the text that the checksum covers begins

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[str, msgspec.Meta(min_length=DIGEST_DIGITS, max_length=DIGEST_DIGITS)]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: checkpoint name, dtype (torch's name), shape, place in its file, and the xxh3 digest of its bytes.

    ``changed`` is, in a patch, how many of its elements the file holds; ``None`` in a whole version. Python's garbage
    collector does not track entries: thousands of them would trigger full collections, which take a second in a process
    with vLLM.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    digest: str
    changed: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_whole(self) -> bool:
        """Whether its file holds all of its elements, one after the other."""
        return self.changed is None or self.changed == math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Bytes of it in the file: its elements, and in a patch the distance of each from the one before."""
        if self.is_whole:
            return self.nbytes
        assert self.changed is not None
        return self.changed * (DTYPES[self.dtype].itemsize + GAP_BYTES)

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.offset + self.stored


@dataclass(frozen=True)
class Manifest:
    """One version, and its tensors in the order of publication. Derived values are computed once.

    Attributes:
        version: its number.
        base: the older version that it is a patch of; ``None``: it is whole.
        entries: one per tensor.
    """

    version: int
    base: int | None
    entries: tuple[TensorEntry, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in one_by_one(self.entries))

    @cached_property
    def extent(self) -> int:
        """Bytes of the file that its tensors reach into."""
        return max((entry.end for entry in one_by_one(self.entries)), default=0)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in one_by_one(self.entries)}

    @cached_property
    def digest(self) -> str:
        """One digest of all names, dtypes, shapes and bytes, wherever the bytes lie."""
        found = xxhash.xxh3_128()
        for some in in_lines(self.entries):
            found.update(msgspec.json.encode([(e.name, e.dtype, e.shape, e.digest) for e in some]))
        return str(found.hexdigest())

    @cached_property
    def tensors(self) -> dict[str, TensorKind]:
        return {entry.name: _kind(entry.dtype, entry.shape) for entry in one_by_one(self.entries)}

    @cached_property
    def _text(self) -> str:
        return _text_of(self)

    def to_json(self) -> str:
        """Return the text; a name that a file of safetensors cannot have is a ``ManifestMismatch``."""
        return self._text

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Undo :meth:`to_json`; the same text gives the same object, as long as it is one of the last few.

        A text that is no manifest of this format is a ``ManifestMismatch``.
        """
        raw = text.encode(errors="replace")
        checksum = text[len(START) : CHECKED]
        if not text.startswith(START) or checksum != xxhash.xxh3_128_hexdigest(memoryview(raw)[CHECKED:]):
            raise ManifestMismatch("the manifest is damaged: cut short, written over, or not a weight store's")
        with _reading:
            known = _read.pop(checksum, None)
            if known is None:
                yield_interpreter()
                known = _parsed(raw)
                known.__dict__["_text"] = text
            _read[checksum] = known
            while len(_read) > KEPT_MANIFESTS:
                _free(_read.pop(next(iter(_read))))
        return known


_read: dict[str, Manifest] = {}  # checksum -> what was read, the last one last
_reading = threading.Lock()


def _free(manifest: Manifest) -> None:
    """Free the memory of a manifest in steps, if nothing else refers to it."""
    entries = list(manifest.entries)
    del manifest
    while entries:
        del entries[-LINE_TENSORS:]
        yield_interpreter()


def yield_interpreter() -> None:
    """Let another thread run: Python's switch interval of 5 ms is too long a wait for an event loop."""
    time.sleep(YIELD_SECONDS)


def in_lines(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield as many items at a time as a line of the text holds, and release the GIL in between."""
    for start in range(0, len(items), LINE_TENSORS):
        if start:
            yield_interpreter()
        yield items[start : start + LINE_TENSORS]


def one_by_one(items: Sequence[T]) -> Iterator[T]:
    """Yield items one by one, and release the GIL after as many as a line of the text holds."""
    for some in in_lines(items):
        yield from some


@lru_cache(maxsize=4096)
def _kind(dtype: str, shape: tuple[int, ...]) -> TensorKind:
    return DTYPES[dtype], torch.Size(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ManifestMismatch(f"tensors of {dtype} cannot be sent; only {', '.join(DTYPES)}")
    return name


# -- the text ---------------------------------------------------------------------------------------------------------


class _Here(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tensor in the version's own file, as safetensors has it."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Patched(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A tensor in a patch."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    changed: Count
    digest: Digest


def _text_of(manifest: Manifest) -> str:
    whole = manifest.base is None
    lines, digests = [], []
    for some in in_lines(manifest.entries):
        for name in (entry.name for entry in some):
            if name == "__metadata__" or name.encode(errors="ignore").decode() != name:
                raise ManifestMismatch(f"no tensor may be named {name!r}: a file of safetensors cannot have that name")
        if whole:
            found: object = {e.name: _Here(SHORT[e.dtype], e.shape, (e.offset, e.end)) for e in some}
            digests += [e.digest for e in some]
        else:
            found = {
                f"{MARK}{e.name}": _json(_Patched(SHORT[e.dtype], e.shape, e.offset, e.changed or 0, e.digest))
                for e in some
            }
        lines.append(f"\n,{_json(found)[1:-1]}")
    fields = {"format": "pt", "manifest": FORMAT, "version": str(manifest.version)}
    # lines of a whole version stand beside the metadata, those of a patch inside of it
    if whole:
        parts = ['",', _json({**fields, "digests": "".join(digests)})[1:-1], "\n}", *lines, "\n}"]
    else:
        array = {PATCH: _Here("U8", (manifest.extent,), (0, manifest.extent))}
        fields["base"] = str(manifest.base)
        parts = ['",', _json(fields)[1:-1], *lines, "\n}", f"\n,{_json(array)[1:-1]}", "\n}"]
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part.encode())
    return "".join([START, checksum.hexdigest(), *parts])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _parsed(text: bytes) -> Manifest:
    """Parse a manifest; every value in it is checked."""
    lines = io.BytesIO(text)
    lines.seek(len(OPENING))
    try:
        fields = msgspec.json.decode(lines.readline() + b"}", type=dict[str, str])
        if fields["manifest"] != FORMAT:
            raise ValueError(f"format {fields['manifest']!r}, this release reads {FORMAT!r}")
        version: int = msgspec.json.decode(fields["version"], type=Count)
        # a patch lists its tensors here, inside the metadata; of a whole version they stand behind it
        listed = _objects(lines, msgspec.json.Decoder(dict[str, str]))
        if "base" not in fields:
            base = None
            if any(True for _ in listed):
                raise ValueError("a whole version lists elements")
            entries = _whole(_objects(lines, msgspec.json.Decoder(dict[str, _Here])), fields["digests"])
        else:
            base = msgspec.json.decode(fields["base"], type=Count)
            if base >= version:
                raise ValueError(f"version {version} is a patch of version {base}")
            entries = _patched(listed)
            arrays = dict(_objects(lines, msgspec.json.Decoder(dict[str, _Here])))
            end = max((entry.end for entry in entries), default=0)
            if set(arrays) != {PATCH} or arrays[PATCH].data_offsets != (0, end):
                raise ValueError(f"its array is not one of {end} bytes")
        if lines.read():
            raise ValueError("there is more text after its end")
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ManifestMismatch(f"the manifest is not one of this format: {words}") from None
    return Manifest(version, base, tuple(entries))


def _objects(lines: IO[bytes], decoder: msgspec.json.Decoder[dict[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the names and values of an object, up to the line that closes it."""
    names: set[str] = set()
    while (line := lines.readline()).startswith(b","):
        if names:
            yield_interpreter()
        values = decoder.decode(b"{%b}" % line[1:])
        if not names.isdisjoint(values):
            raise ValueError("a name comes twice")
        names.update(values)
        yield from values.items()
    if line.strip() != b"}":
        raise ValueError(f"a line begins with {line[:9]!r}")


@lru_cache(maxsize=4096)
def _facts(short: str, shape: tuple[int, ...]) -> tuple[str, torch.Size, int, int]:
    """Return torch's name of a dtype, the shape, and the bytes of an element and of all."""
    dtype, size = DTYPES[NAMES[short]], torch.Size(shape)
    return NAMES[short], size, dtype.itemsize, math.prod(shape) * dtype.itemsize


def _whole(objects: Iterable[tuple[str, _Here]], digests: str) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    place = 0
    for name, found in objects:
        dtype, shape, width, nbytes = _facts(found.dtype, found.shape)
        begin, end = found.data_offsets
        if begin % width or end - begin != nbytes:
            raise ValueError(f"{name} of {nbytes} bytes begins at {begin} and ends at {end}")
        entries.append(TensorEntry(name, dtype, shape, begin, digests[place : place + DIGEST_DIGITS]))
        place += DIGEST_DIGITS
    if len(digests) != place:
        raise ValueError(f"{len(entries)} tensors, and {len(digests)} digits of digests")
    _check_digits(digests)
    return entries


def _patched(objects: Iterable[tuple[str, str]]) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    decoder = msgspec.json.Decoder(_Patched)
    for marked, text in objects:
        e, name = decoder.decode(text), marked.removeprefix(MARK)
        dtype, shape, width, nbytes = _facts(e.dtype, e.shape)
        if marked == name or e.offset % width or e.changed * width > nbytes:
            raise ValueError(f"{marked} has {e.changed} changed elements of {nbytes // width} at {e.offset}")
        _check_digits(e.digest)
        entries.append(TensorEntry(name, dtype, shape, e.offset, e.digest, e.changed))
    return entries


def _check_digits(digests: str) -> None:
    if wrong := digests.encode().translate(None, b"0123456789abcdef"):
        raise ValueError(f"digests have {wrong[:SHOWN_NAMES]!r} in them")


# -- what an engine expects -------------------------------------------------------------------------------------------


def check_tensors(found: Mapping[str, TensorKind], expected: Mapping[str, TensorKind]) -> None:
    """Check that a version has exactly the tensors that a model expects.

    Args:
        found: name -> (dtype, shape) of what would be loaded.
        expected: the same of the model. Floating dtypes may differ, since loading casts; others may not.

    Raises:
        ManifestMismatch: names are missing or unknown, or shapes or kinds of dtype differ; some are named.
    """
    parts = []
    for what, these, those in (("missing", found, expected), ("unknown to the engine", expected, found)):
        if names := sorted(name for name in one_by_one(list(those)) if name not in these):
            shown = f"{', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''}"
            parts.append(f"{len(names)} {what} ({shown})")
    if parts:
        raise ManifestMismatch(
            f"the weights are not the engine's tensors: {'; '.join(parts)}. Publish the whole model that the engine "
            "was started from, with checkpoint names."
        )
    for name in one_by_one(list(expected)):
        (dtype, shape), (got_dtype, got_shape) = expected[name], found[name]
        if shape != got_shape:
            raise ManifestMismatch(f"{name} has shape {list(got_shape)}, the engine expects {list(shape)}")
        if dtype != got_dtype and not (dtype.is_floating_point and got_dtype.is_floating_point):
            raise ManifestMismatch(f"{name} is {got_dtype}, the engine expects {dtype}")
