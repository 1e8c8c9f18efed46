"""``RunLock``: one run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from torchrl_moe.trainers.config import ConfigError

__all__ = ["RunLock"]


class RunLock:
    """Keeps a second run out of a folder, until it is closed or its process ends.

    A file system without locks (some NFS mounts) keeps nobody out.

    Args:
        folder: of the run; made if it is not there.

    Raises:
        ConfigError: another run has the folder, or it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"out={folder} cannot be written to: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            self.close()
            raise ConfigError(f"out={folder} cannot be written to: it is read-only")
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"out={folder} is used by another run: name another folder, or end that run") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    def close(self) -> None:
        """Let the next run in. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)
