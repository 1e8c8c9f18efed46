"""A connection that authenticates every frame: its sender, its content and its place in the order.

Both sides draw a nonce. From both nonces and the key they share, each derives a key per direction, so no frame of
another connection, or of the other direction, passes here. A frame is its length, its bytes, and the HMAC-SHA256 of its
number, its length and its bytes. Frames are authenticated, not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
from multiprocessing import AuthenticationError
from types import TracebackType
from typing import Self

import numpy as np

from torchrl_moe.modules.backends.process.wire import MOST_FRAME_BYTES

__all__ = ["SealedConnection", "TamperedError"]

LOG = logging.getLogger(__name__)
NONCE_BYTES = 32
NUMBER_BYTES = 8
CHUNK_BYTES = 1 << 18  # that are sent before they go into the MAC, so that the other side can start on them
TAG_BYTES = hashlib.sha256().digest_size
ACTOR, DRIVER = b"actor", b"driver"


class TamperedError(OSError):
    """A frame failed authentication, or is too large; the connection is closed."""


class SealedConnection:
    """One end of such a connection; one thread may write while another reads.

    Args:
        end: the socket, which is closed with the connection. Its timeout holds for the handshake.
        key: that both sides have.
        is_actor: which of the two sides this is.

    Raises:
        AuthenticationError: the other side has another key.
        EOFError: it closed the connection.
        OSError: it is gone, or says nothing for as long as the timeout is.
    """

    def __init__(self, end: socket.socket, key: bytes, is_actor: bool) -> None:
        self._end = end
        mine, theirs = (ACTOR, DRIVER) if is_actor else (DRIVER, ACTOR)
        nonce = secrets.token_bytes(NONCE_BYTES)
        end.sendall(nonce)
        other = self._read(NONCE_BYTES).tobytes()
        nonces = nonce + other if is_actor else other + nonce
        session = hmac.digest(key, b"torchrl_moe" + nonces, "sha256")
        self._sealing = hmac.new(hmac.digest(session, mine, "sha256"), digestmod="sha256")
        self._proving = hmac.new(hmac.digest(session, theirs, "sha256"), digestmod="sha256")
        self._sent = self._received = 0
        self.send_bytes(mine)
        try:
            self.recv_bytes(len(theirs))
        except TamperedError as error:
            raise AuthenticationError("the other side has another key") from error
        end.settimeout(None)

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""
        length = len(buf).to_bytes(NUMBER_BYTES, "big")
        mac = _begun(self._sealing, self._sent, length)
        self._sent += 1
        if len(buf) <= CHUNK_BYTES:
            mac.update(buf)
            self._end.sendall(b"".join((length, buf, mac.digest())))
            return
        self._end.sendall(length)
        whole = memoryview(buf)
        for start in range(0, len(buf), CHUNK_BYTES):
            chunk = whole[start : start + CHUNK_BYTES]
            self._end.sendall(chunk)
            mac.update(chunk)
        self._end.sendall(mac.digest())

    def recv_bytes(self, maxlength: int | None = None) -> memoryview:
        """Read one frame.

        Raises:
            EOFError: the other side is gone.
            TamperedError: the frame is longer than it may be, or failed authentication; that is logged.
            OSError: the connection broke.
        """
        most = MOST_FRAME_BYTES if maxlength is None else maxlength
        header = self._read(NUMBER_BYTES).tobytes()
        length = int.from_bytes(header, "big")
        if length > most:
            raise self._given_up(f"a frame of {length} bytes was announced; at most {most} are allowed")
        mac = _begun(self._proving, self._received, header)
        body = self._read(length, mac)
        if not hmac.compare_digest(mac.digest(), self._read(TAG_BYTES)):
            raise self._given_up("a frame failed authentication")
        self._received += 1
        return body

    def _given_up(self, reason: str) -> TamperedError:
        LOG.warning("the connection with %s is given up: %s", self._end.getpeername(), reason)
        return TamperedError(reason)

    def _read(self, size: int, mac: hmac.HMAC | None = None) -> memoryview:
        """Read ``size`` bytes, and update a MAC with them on the way."""
        view = np.empty(size, np.uint8).data
        done = 0
        while done < size:
            count = self._end.recv_into(view[done : done + CHUNK_BYTES])
            if not count:
                raise EOFError
            if mac is not None:
                mac.update(view[done : done + count])
            done += count
        return view

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._end.fileno()

    def close(self) -> None:
        """Close it."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _begun(keyed: hmac.HMAC, number: int, length: bytes) -> hmac.HMAC:
    """Return the MAC of a frame, begun with its number and its length."""
    mac = keyed.copy()
    mac.update(number.to_bytes(NUMBER_BYTES, "big") + length)
    return mac
