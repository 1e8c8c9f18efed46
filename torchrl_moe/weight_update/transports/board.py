"""A board: what the ranks of a group leave for each other. Across hosts, only ranks that have a secret reach it.

A replica gets the secret with its other commands. Each query is a connection of its own, in which both sides draw a
nonce; query and reply carry a MAC of both nonces and their own bytes, so that nothing can be forged, changed or
replayed. They are authenticated, not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Board", "BoardServer", "RemoteBoard"]

STRANGER_SECONDS = 10.0  # that a query may take in total
LEAST_SECONDS = 0.001
MOST_VISITORS = 256  # at the same time
STOP_SECONDS = 0.1  # that ending the server may take
BACKLOG = 1024  # connections that wait to be accepted: all workers connect at the same time
NONCE_BYTES = 32
LENGTH_BYTES = 4
MOST_BYTES = 1 << 16  # of a query or a reply: their values are short
ASK, ANSWER = b"ask", b"answer"


class Board(Protocol):
    """What the ranks of one group leave for each other: values by key. torch's stores have these methods."""

    def set(self, key: str, value: Any) -> None:
        """Leave a value, of bytes."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""


class BoardServer(socketserver.ThreadingTCPServer):
    """Answers clients that have the secret; any other client reads 32 random bytes, and no more."""

    daemon_threads = True
    allow_reuse_address = True  # the user's port may have been in use a minute ago
    request_queue_size = BACKLOG
    block_on_close = False

    def __init__(self, address: str, port: int = 0) -> None:
        super().__init__((address, port), _Visit)
        self.secret = secrets.token_bytes(NONCE_BYTES)
        self.boards: dict[str, Board] = {}
        self._places = threading.BoundedSemaphore(MOST_VISITORS)
        threading.Thread(target=self.serve_forever, args=(STOP_SECONDS,), name="weight-meetings", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a client; beyond the limit it is disconnected, and asks again."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client in its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def end(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()


class _Visit(socketserver.BaseRequestHandler):
    """One query."""

    server: BoardServer

    def handle(self) -> None:
        """Answer it, or hang up."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            reader = _Reader(self.request, STRANGER_SECONDS)
            self.request.sendall(nonce)
            other = reader.read(NONCE_BYTES)
            question = _read(reader, self.server.secret, ASK + nonce + other)
            if question is not None:
                answer = self._answer(json.loads(question))
                self.request.sendall(_sealed(self.server.secret, ANSWER + other + nonce, answer))
        except OSError:  # it is gone, or said nothing
            return

    def _answer(self, question: Mapping[str, Any]) -> bytes:
        board = self.server.boards.get(question["name"])
        if board is None:  # the group was given up
            return b""
        if question["do"] == "set":
            board.set(question["keys"][0], bytes.fromhex(question["value"]))
            return b"1"
        if question["do"] == "check":
            return b"1" if board.check(question["keys"]) else b"0"
        return board.get(question["keys"][0])


class RemoteBoard:
    """A board of a server on another host: each query is a connection of its own, with its own authentication."""

    def __init__(self, address: str, port: int, name: str, secret: bytes) -> None:
        self._where, self._name, self._secret = (address, port), name, secret

    def set(self, key: str, value: Any) -> None:
        """Leave a value, of bytes."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._ask({"do": "set", "keys": [key], "value": raw.hex()})

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return self._ask({"do": "get", "keys": [key]})

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        return self._ask({"do": "check", "keys": keys}) == b"1"

    def _ask(self, question: dict[str, Any]) -> bytes:
        """Return the server's reply.

        Raises:
            OSError: nothing answers, or the server has another secret.
            RuntimeError: the group was given up.
        """
        mine = secrets.token_bytes(NONCE_BYTES)
        with socket.create_connection(self._where, STRANGER_SECONDS) as end:
            reader = _Reader(end, STRANGER_SECONDS)
            nonce = reader.read(NONCE_BYTES)
            if len(nonce) < NONCE_BYTES:
                raise ConnectionError(
                    f"the server at {self._where[0]}:{self._where[1]} has hung up: it is full, or is ending"
                )
            body = json.dumps({**question, "name": self._name}).encode()
            end.sendall(mine + _sealed(self._secret, ASK + nonce + mine, body))
            answer = _read(reader, self._secret, ANSWER + mine + nonce)
        if answer is None:
            address, port = self._where
            raise ConnectionError(f"the server at {address}:{port} does not have the trainer's secret")
        if not answer:
            raise RuntimeError("the trainer has given the group up")
        return answer


def _sealed(secret: bytes, context: bytes, body: bytes) -> bytes:
    """Return a message: its length, its bytes, and a MAC of both nonces, its direction, and its bytes."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body + hmac.digest(secret, context + body, "sha256")


class _Reader:
    """Reads from a socket, with one deadline for all of it: a client that sends a byte now and then cannot stay."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def read(self, count: int) -> bytes:
        """Return ``count`` bytes; fewer if the other side hangs up.

        Raises:
            TimeoutError: the deadline passed.
        """
        content = bytearray()
        while len(content) < count:
            self._connection.settimeout(max(self._deadline - time.monotonic(), LEAST_SECONDS))
            part = self._connection.recv(count - len(content))
            if not part:
                break
            content += part
            if time.monotonic() > self._deadline:
                raise TimeoutError("the other side took too long")
        return bytes(content)


def _read(reader: _Reader, secret: bytes, context: bytes) -> bytes | None:
    """Return the bytes of a message; ``None`` if its MAC does not prove the secret and both nonces."""
    length = int.from_bytes(reader.read(LENGTH_BYTES), "big")
    if length > MOST_BYTES:
        return None
    body: bytes = reader.read(length)
    proof = hmac.digest(secret, context + body, "sha256")
    return body if hmac.compare_digest(proof, reader.read(len(proof))) else None
