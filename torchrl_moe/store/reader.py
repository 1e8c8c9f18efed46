"""The reader of a weight store, in any process that sees its folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.store.content import (
    SAFETENSORS,
    Bytes,
    Identity,
    MappedFile,
    check_digest,
    identity_of,
    manifest_of,
    patch,
    read_header,
)
from torchrl_moe.store.folder import pinned
from torchrl_moe.store.manifest import Manifest, TensorEntry, one_by_one
from torchrl_moe.store.writer import bytes_path, newest_stable, version_path, version_paths

START_BYTES = 64


class WeightStoreReader:
    """Reads versions. Files stay mapped from one version to the next; safe to use from several threads.

    Args:
        folder: the writer's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._mapped: dict[Identity, MappedFile] = {}
        self._known: dict[bytes, Manifest] = {}  # of the last chain, by the start of the text, which has its checksum
        self._lock = threading.Lock()

    def newest(self) -> int | None:
        """Return the newest version in the store, or ``None``."""
        return newest_stable(self.folder)

    def versions(self) -> list[int]:
        """Return the versions in the store, in ascending order."""
        return sorted(version_paths(self.folder))

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version.

        Raises:
            ManifestMismatch: it was not published, was removed, or its file is damaged.
        """
        try:
            found = read_header(version_path(self.folder, version))
        except FileNotFoundError:
            raise ManifestMismatch(
                f"version {version} is not in the store, which holds {self.versions()}: it was removed, or "
                f"{str(self.folder)!r} is not shared"
            ) from None
        if found.version != version:
            raise ManifestMismatch(f"the manifest of version {version} is that of version {found.version}")
        return found

    def close(self) -> None:
        """Unmap what no tensor uses. Idempotent."""
        with self._lock:
            self._mapped.clear()

    @contextmanager
    def reading(self, manifest: Manifest, verify: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Keep a version from being removed; yield its tensors.

        A tensor that lies whole in a file is mapped, not copied; one that patches change is made when it is taken. Do
        not keep them afterwards, and do not write into them: that kills the process.

        Args:
            manifest: the version.
            verify: whether to compare a tensor's digest on access, if :meth:`verify` was not called; its bytes are then
                in the cache for a copy.

        Raises:
            ManifestMismatch: the version, or one that it is a patch of, is not there any more, or was cut short.
            DigestMismatch: on taking a tensor, its bytes are not those published.
        """
        with self._holding(manifest) as chain:
            yield VersionTensors(chain, verify)

    @contextmanager
    def flat(self, manifest: Manifest) -> Iterator[tuple[Manifest, Bytes]]:
        """:meth:`reading` of a version's raw bytes, to send them.

        Yields:
            The manifest of the version as a whole one, and its bytes: uint8 ``[manifest.extent]``, read-only.
        """
        with self._holding(manifest) as chain:
            if any(one.extent for one, _ in chain[:-1]):
                raise ManifestMismatch(f"version {manifest.version} is a patch: read it tensor by tensor")
            # one that was published again under this number lies where it lay
            whole, file = chain[-1]
            yield Manifest(manifest.version, None, whole.entries), np.frombuffer(file.tensors, np.uint8)[: whole.extent]

    def verify(self, manifest: Manifest, threads: int = 1) -> None:
        """Compare every tensor's digest.

        Args:
            manifest: the version.
            threads: number of threads that read and hash; more help where reading waits for a disk or network.

        Raises:
            DigestMismatch: bytes differ from those published; the message names a tensor.
        """
        with self._holding(manifest) as chain:
            tensors = VersionTensors(chain, verify=True)

            def look_at(share: Sequence[TensorEntry]) -> None:
                for entry in one_by_one(share):
                    tensors[entry.name]

            if threads <= 1:
                look_at(manifest.entries)
                return
            with ThreadPoolExecutor(threads, thread_name_prefix="weight-reader") as pool:
                list(pool.map(look_at, (manifest.entries[first::threads] for first in range(threads))))

    @contextmanager
    def _holding(self, manifest: Manifest) -> Iterator[list[tuple[Manifest, MappedFile]]]:
        """Keep a version; yield it, and what it is a patch of, each with its file."""
        with pinned(self.folder, manifest.version):
            if self.manifest(manifest.version) != manifest:  # now that it cannot be removed
                raise ManifestMismatch(f"version {manifest.version} was published again since its manifest was read")
            chain = [(manifest, self._open(manifest.version))]
            # back to a whole version; all of these stay as long as the pinned one
            while (base := chain[-1][0].base) is not None:
                file = self._open(base)
                start = bytes(file.header[:START_BYTES])
                found = self._known.get(start) or manifest_of(file.header)
                if found.version != base:
                    raise ManifestMismatch(f"{file.path.name} is the file of version {found.version}")
                chain.append((found, file))
            self._known = {bytes(file.header[:START_BYTES]): one for one, file in chain}
            for one, file in chain:
                file.check(one)
            # versions are removed, and the mappings of their files with them
            there = {identity_of(path) for path in self.folder.glob(f"*{SAFETENSORS}")}
            with self._lock:
                self._mapped = {identity: file for identity, file in self._mapped.items() if identity in there}
            yield chain

    def _open(self, version: int) -> MappedFile:
        """Map the file of a version, which is pinned, or of one that a pinned one is a patch of."""
        own = version_path(self.folder, version)
        # its writer may just hide it, or show it again
        for path in (own, bytes_path(self.folder, version), own):
            with self._lock, suppress(FileNotFoundError):
                file = MappedFile(path, self._mapped)
                self._mapped[file.identity] = file
                return file
        raise ManifestMismatch(f"{own.name} of the weight store is gone")


class VersionTensors(Mapping[str, Tensor]):
    """The tensors of a version by checkpoint name, in order: mapped where they lie whole, else made on access.

    Args:
        chain: the version, and what it is a patch of: a whole version last.
        verify: whether to compare digests on access.
    """

    def __init__(self, chain: Sequence[tuple[Manifest, MappedFile]], verify: bool) -> None:
        self._chain, self._verify = chain, verify
        self._manifest = chain[0][0]

    def __getitem__(self, name: str) -> Tensor:
        # from the newest file back to one that holds all elements
        patches: list[tuple[TensorEntry, MappedFile]] = []
        kind = self._manifest.tensors[name]
        for manifest, file in self._chain:
            entry = manifest.by_name.get(name)
            if entry is None or manifest.tensors[name] != kind:
                raise ManifestMismatch(f"{name} of version {self._manifest.version} is not what it is a patch of")
            if entry.is_whole:
                tensor = file.tensor(entry)
                break
            if entry.changed:
                patches.append((entry, file))
        else:
            raise ManifestMismatch(f"version {self._manifest.version} is a patch, of which {name} has no beginning")
        # and forward again
        if patches:
            tensor = tensor.clone()
        for entry, file in reversed(patches):
            patch(tensor.reshape(-1).view(torch.uint8).numpy(), entry, file.stored(entry))
        if self._verify:
            content = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
            check_digest(self._manifest.version, self._manifest.by_name[name], content.data)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.by_name)

    def __len__(self) -> int:
        return len(self._manifest.entries)


# Adapters in a weight store: a directory of versions, each with peft's two files as tensors of bytes.


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
