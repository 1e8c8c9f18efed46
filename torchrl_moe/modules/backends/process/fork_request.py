"""A driver's request to a fork server: one packet on a socket, with file descriptors. Both ends of it are here.

The descriptors are of a file that holds a pickled :class:`ForkRequest`, of the working directory, of the engine's
socket, its log, and the status socket. A packet arrives whole or not at all, and however large an environment is,
sending it does not wait for the server.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import resource
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torchrl_moe.modules.backends.process.parent_watch import FOLDER_VARIABLE

__all__ = ["Arrived", "ForkRequest", "receive", "remove_folders", "request_like_this", "send", "withdraw"]

DESCRIPTORS = 5
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What a forked process takes over from its driver, as a child of the driver would.

    Args:
        environment: the whole environment.
        processors: the CPUs that it may run on.
        limits: resource number -> soft and hard limit.
    """

    environment: Mapping[bytes, bytes]
    processors: frozenset[int]
    limits: Mapping[int, tuple[int, int]]

    @property
    def folder(self) -> bytes | None:
        """The replica's folder; the driver removes it, and the fork server if the driver is gone."""
        return self.environment.get(FOLDER_VARIABLE.encode())


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request and the descriptors that came with it."""

    request: ForkRequest
    folder: int
    engine: int
    log: int
    status: Connection

    def close(self) -> None:
        """Close all but the status socket."""
        for descriptor in (self.folder, self.engine, self.log):
            os.close(descriptor)


def request_like_this(environment: Mapping[str, str]) -> ForkRequest:
    """Return the request for a process like this one, with another environment."""
    return ForkRequest(
        environment={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        processors=frozenset(os.sched_getaffinity(0)),
        limits={number: resource.getrlimit(number) for number in LIMITS},
    )


def send(control: socket.socket, request: ForkRequest, engine: int, log: int, status: int) -> None:
    """Send a request; returns at once.

    Raises:
        OSError: the server is gone, has too many requests to read, or this process can open no more files.
    """
    folder = os.open(".", os.O_PATH)  # its name may lead elsewhere by then, or nowhere
    try:
        with os.fdopen(os.memfd_create("request"), "wb") as file:
            file.write(pickle.dumps(request))
            file.flush()
            descriptors = [file.fileno(), folder, engine, log, status]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            control.sendmsg([b"fork"], [rights], socket.MSG_DONTWAIT)  # ``socket.send_fds`` ignores flags
    finally:
        os.close(folder)


def receive(control: socket.socket, flags: int = 0) -> Arrived:
    """Read one request.

    Raises:
        EOFError: the driver has closed the socket, or this process can open no more files.
    """
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(DESCRIPTORS * descriptors.itemsize)
    _, messages, _, _ = control.recvmsg(16, space, flags | socket.MSG_CMSG_CLOEXEC)
    for _, _, rights in messages:
        descriptors.frombytes(rights)
    if len(descriptors) < DESCRIPTORS:
        raise EOFError
    file, folder, engine, log, status = descriptors
    with os.fdopen(file, "rb") as text:
        text.seek(0)  # the driver's descriptor has the same position
        return Arrived(pickle.load(text), folder, engine, log, Connection(status))


def withdraw(control: socket.socket) -> set[bytes]:
    """Read the requests that a driver left behind, without carrying them out, and return their folders."""
    found = set()
    with contextlib.suppress(EOFError, OSError):  # no more of them
        while True:
            arrived = receive(control, socket.MSG_DONTWAIT)
            arrived.close()
            if arrived.request.folder is not None:
                found.add(arrived.request.folder)
    return found


def remove_folders(folders: Iterable[bytes]) -> None:
    """Remove what a driver that is gone has left."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
