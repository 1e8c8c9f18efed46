"""Where the ranks of a group meet, and announce that they are ready; others are kept out.

That is a folder of this host, which only this user can open: there is no port. What a group sends afterwards goes
through gloo's own connections, which have neither authentication nor encryption.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs leave them out

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.weight_update.store.writing import at_end

__all__ = ["Board", "Meeting", "MeetingPlace", "board_of"]

POLL_SECONDS = (0.005, 0.2)  # between two polls: first, and at most


class Board(Protocol):
    """What the ranks of one group leave for each other: values by key. torch's stores have these methods."""

    def set(self, key: str, value: Any) -> None:
        """Leave a value, of bytes."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""


class Meeting(Store):
    """A board as gloo uses it, with our deadline and a way to close it: torch's own waits have neither."""

    def __init__(
        self,
        board: Board,
        seconds: float,
        check: Callable[[], object] = lambda: None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._board, self._deadline = board, time.monotonic() + seconds
        self._check_others, self._on_close = check, on_close
        self._closed = threading.Event()

    def set(self, key: str, value: Any) -> None:
        """Leave a value, of bytes."""
        self._board.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        self.wait([key])
        return self._board.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        return bool(self._board.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are there; ``timeout`` is gloo's, and the meeting's own deadline holds instead."""
        del timeout
        pause, longest = POLL_SECONDS
        while not self.check(keys):
            self._check_others()
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{', '.join(keys)} did not come")
            if self._closed.wait(pause):
                raise RuntimeError("the meeting was closed")
            pause = min(pause * 1.5, longest)

    def has_extended_api(self) -> bool:
        """Say that only the methods above are there."""
        return False

    def close(self) -> None:
        """End all waiting. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._on_close()


class MeetingPlace:
    """Where all groups of one trainer meet; each has a board of its own, a folder of this host."""

    def __init__(self) -> None:
        self._names = map(str, itertools.count())
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def begin(self) -> dict[str, Any]:
        """Make a board, and return what a rank needs to find it, as plain data."""
        with self._lock:
            if self._folder is None:  # of mode 0700
                self._folder = Path(tempfile.mkdtemp(prefix="torchrl_moe-meeting-"))
                self._clean = at_end(self, shutil.rmtree, str(self._folder), True)
            path = self._folder / next(self._names)
            path.mkdir(0o700)
            return {"folder": str(path)}

    def meet(self, where: Mapping[str, Any], seconds: float, check: Callable[[], object] = lambda: None) -> Meeting:
        """Return the trainer's own end of a meeting that it began; closing that ends it for all."""
        return Meeting(board_of(where), seconds, check, lambda: self.end(where))

    def end(self, where: Mapping[str, Any]) -> None:
        """Remove a board. Idempotent."""
        shutil.rmtree(where["folder"], ignore_errors=True)  # a rank may be writing into it

    def close(self) -> None:
        """Remove all boards. Idempotent."""
        with self._lock:
            if self._folder is not None:
                self._clean()
                self._folder = None


def board_of(where: Mapping[str, Any]) -> Board:
    """Return the board of a meeting, as any rank finds it."""
    if not os.path.isdir(where["folder"]):
        raise WeightSyncError(
            f"the trainer's {where['folder']} is not here, so this is another host, and transport='gloo' reaches one "
            "host: use transport='memmap', layout='versions' and folder= on a file system that the hosts share"
        )
    return _FolderBoard(Path(where["folder"]))


class _FolderBoard:
    """A board that is a folder, with a file for each value.

    torch's ``FileStore`` waits for minutes for a file whose folder is gone, and no other thread runs meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    @contextmanager
    def _known(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise RuntimeError("the trainer has given the group up") from None

    def set(self, key: str, value: Any) -> None:
        file = self._file(key)
        with self._known():
            whole = tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False)  # noqa: SIM115  it is moved
            with whole:
                whole.write(bytes(value))
            os.replace(whole.name, file)

    def get(self, key: str) -> bytes:
        with self._known():
            return self._file(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        with self._known():
            found = set(os.listdir(self._folder))
        return all(self._file(key).name in found for key in keys)
