"""The child process: its environment, its log, and that all of it ends."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import forkable, toy_kind
from support.forkable import GONE, Forks
from support.processes import group, toy_environment, toy_replica
from support.waiting import until
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules.backends.process import child, fork_server, link
from torchrl_moe.modules.backends.process.child import Child
from torchrl_moe.modules.backends.process.fork_server import CannotFork


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def one_with_log(text: str, temporary: Path) -> Child:
    process = Child.__new__(Child)  # the log is all that is asked of it
    process.log, process._log_start = temporary / "log", 0
    process.log.write_text(text)
    return process


def test_the_tail_of_a_log_is_its_last_errors(temporary: Path) -> None:
    lines = [*(f"Error {number}" for number in range(9)), "INFO ok", "RuntimeError: Failed. See root cause above."]
    assert one_with_log("\n".join(lines), temporary).log_tail(2) == "Error 7\nError 8"


def test_the_tail_of_a_log_without_errors_is_its_last_lines(temporary: Path) -> None:
    lines = ["one", "WARNING two", "Loading shards: 3", "four", "five"]
    assert one_with_log("\n".join(lines), temporary).log_tail(3) == "one\nfour\nfive"
    assert one_with_log("", temporary).log_tail() == "(its log holds no error)"


def test_the_tail_of_a_log_is_short_whatever_the_log_is(temporary: Path) -> None:
    log = (
        "Error at the start\n"
        + "x" * (3 << 20)
        + "\nError at the end "
        + "y" * 1000
        + "\nbytes \ud800".encode("utf-8", "surrogatepass").decode("latin-1")
    )
    tail = one_with_log(log, temporary).log_tail()
    assert tail.startswith("Error at the end yyy")
    assert len(tail) == child.SHOWN_LOG_COLUMNS


def test_a_child_leads_a_group_in_our_session_and_its_output_goes_to_its_log(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Child(3, toy_kind, toy_environment())
    try:
        assert os.getpgid(process.process.pid) == process.process.pid
        assert os.getsid(process.process.pid) == os.getsid(0)  # and so the cores are shared fairly
        process.outbox.put(child.configuration({"model": "toy", "start": {"print": "hello log"}}))
        assert link.read(process.stream)[0] == "ready"
        assert process.log.parent.parent == temporary
        assert process.log.parent.name.startswith("torchrl_moe-replica-3-")
        assert process.log_tail() == "hello log"
    finally:
        process.end_and_forget()
    assert list(temporary.iterdir()) == []
    assert group(process.process.pid) == []
    assert not process.outbox._thread.is_alive()


def test_a_log_in_a_folder_of_the_users_stays_and_a_later_child_continues_in_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = temporary / "kept" / "logs"
    for words in ("RuntimeError: of the first", "hello"):
        process = Child(3, toy_kind, toy_environment(), folder)
        try:
            process.outbox.put(child.configuration({"model": "toy", "start": {"print": words}}))
            assert link.read(process.stream)[0] == "ready"
            assert process.log == folder / "replica-3.log"
            assert process.log_tail() == words  # of this child, not of the one before
        finally:
            process.end_and_forget()
    assert (folder / "replica-3.log").read_text() == "RuntimeError: of the first\nhello\n"
    assert list(temporary.iterdir()) == [temporary / "kept"]


def test_a_finalizer_may_run_in_the_thread_that_ends_the_child(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Child(0, toy_kind, toy_environment())
    wait = process.process.wait
    again = [process.end_and_forget]

    def wait_and_collect(*arguments: Any) -> int:
        while again:  # as Python's collector may, anywhere
            again.pop()()
        return wait(*arguments)

    monkeypatch.setattr(process.process, "wait", wait_and_collect)
    ending = threading.Thread(target=process.end, daemon=True)
    ending.start()
    ending.join(60.0)
    assert not ending.is_alive()
    assert group(process.process.pid) == []


def test_vllms_sockets_lie_in_the_childs_folder_if_the_kernel_takes_their_names(tmp_path: Path) -> None:
    name_bytes = 36  # vLLM calls them by a UUID
    fits = Path("/" + "x" * (107 - name_bytes - 2))
    driver = {child.DRIVER_VARIABLE: str(os.getpid())}
    assert child._with_places({"TMPDIR": "theirs", "A": "1"}, fits) == {
        "A": "1",
        "TMPDIR": str(fits),
        "VLLM_RPC_BASE_PATH": str(fits),
        child.FOLDER_VARIABLE: str(fits),
        **driver,
    }
    assert child._with_places({"TMPDIR": "theirs"}, Path(f"{fits}x")) == {
        "TMPDIR": "theirs",
        child.FOLDER_VARIABLE: f"{fits}x",
        **driver,
    }
    theirs = child._with_places({"VLLM_RPC_BASE_PATH": "theirs"}, fits)
    assert (theirs["VLLM_RPC_BASE_PATH"], theirs["TMPDIR"]) == ("theirs", str(fits))  # the user may choose


# -- forked or not ----------------------------------------------------------------------------------------------------


def talk(one: Child) -> Connection:
    """Its socket, by which ``forkable`` talks."""
    return Connection(os.dup(one.stream.fileno()))


@pytest.fixture
def forks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """Servers that are ended after the test; no other is asked or closed."""
    monkeypatch.setattr(fork_server, "_servers", OrderedDict())
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    for server in fork_server._servers.values():
        server.end()


def test_a_child_is_not_forked_if_nobody_wants_it_and_its_log_says_why(temporary: Path, forks: Forks) -> None:
    starts = [
        Child(0, forkable, forks.environment(), fork=False),
        Child(1, forkable, forks.environment(VLLM_WORKER_MULTIPROC_METHOD="spawn")),
    ]
    silent, told = starts
    try:
        for one in starts:
            talk(one).send(("report",))
            report = talk(one).recv()
            assert (report["ppid"], report["pgid"]) == (os.getpid(), one.process.pid)
            assert report["environment"][child.FOLDER_VARIABLE] == str(one.folder)
        assert silent.log.read_text() == "running\n"
        assert told.log.read_text() == (
            "torchrl_moe: this replica imports its engine itself: VLLM_WORKER_MULTIPROC_METHOD=spawn is set\nrunning\n"
        )
        assert fork_server._servers == {}
    finally:
        for one in starts:
            one.end_and_forget()
    assert list(temporary.iterdir()) == []


def test_a_forked_child_is_there_once_its_server_has_imported_and_one_that_was_given_up_never(
    temporary: Path, forks: Forks
) -> None:
    go = forks.folder / "go"
    environment = forks.environment(VLLM_TEST_PRELOAD=f"wait {go}")
    wanted, unwanted = Child(0, forkable, environment), Child(1, forkable, environment)
    assert wanted.is_alive()
    assert unwanted.is_alive()
    unwanted.end_and_forget()  # at once: nothing will be imported until there is the file
    assert not unwanted.is_alive()
    with pytest.raises(CannotFork):
        _ = unwanted.process
    assert unwanted.ending().startswith("could not be started")
    assert not go.exists()
    go.touch()
    try:
        (server,) = fork_server._servers.values()
        talk(wanted).send(("report",))
        assert talk(wanted).recv()["ppid"] == server.pid
        assert [process.pid for process in psutil.Process(server.pid).children()] == [wanted.process.pid]
        check_that_forked_processes_disturb_nobody(wanted)
        wanted.stream.close()
        until(lambda: not wanted.is_alive(), 60)
        assert wanted.ending() == f"ended with exit code {GONE}"
    finally:
        wanted.end_and_forget()
    assert list(temporary.iterdir()) == []


def check_that_forked_processes_disturb_nobody(one: Child) -> None:
    """Run the child's finalizer in a process that this one forks, as Python does at the end of that."""
    if not (pid := os.fork()):
        try:
            one.end_and_forget()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert one.log.exists()
    talk(one).send(("run", "1 + 1"))
    assert talk(one).recv() == 2


def test_a_process_that_is_forked_while_a_child_starts_does_not_hide_the_childs_death(
    temporary: Path, forks: Forks
) -> None:
    go = forks.folder / "go"
    one = Child(0, forkable, forks.environment(VLLM_TEST_PRELOAD=f"wait {go}"))
    if not (pid := os.fork()):  # a worker of a DataLoader, say
        time.sleep(600)
        os._exit(0)
    try:
        go.touch()
        one.process.kill()
        with pytest.raises((EOFError, ConnectionResetError)):
            talk(one).recv()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        one.end_and_forget()


def test_a_replica_whose_process_cannot_be_started_says_so_at_once(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusal:
        def wait(self) -> None:
            raise CannotFork("of the tests")

        def fork(self, *_: Any) -> Refusal:
            return self

    def no_memory(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(child, "fork_server", lambda *_: Refusal())
    monkeypatch.setattr(child.Child, "_spawn", no_memory)
    replica = toy_replica()
    replica.start()
    try:
        with pytest.raises(
            ReplicaDiedError, match=r"replica 0 could not be started: OSError: .*Cannot allocate memory"
        ):
            replica.wait_ready(240)
        assert not replica.is_alive()
    finally:
        replica.shutdown()
    assert list(temporary.iterdir()) == []
