"""A child process: who forks it, what it inherits, its environment and log, and that all of it ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from support import forkable, toy_kind
from support.forkable import GONE, Forked, Forks
from support.processes import group, is_gone, toy_environment, toy_replica
from support.waiting import in_thread, until
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules.backends.process import fork_server, link, process_replica
from torchrl_moe.modules.backends.process.fork_server import CannotFork
from torchrl_moe.modules.backends.process.process_replica import Child


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """No server of another test file is asked or closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_servers", OrderedDict())
        patch.setattr(fork_server, "KEPT", 100)
        made = Forks(tmp_path_factory.mktemp("forks"))
        yield made
        made.close()


def check_hung_up(connection: Connection) -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        connection.recv()


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_processes_whose_environments_import_alike_share_one_server_and_one_import(forks: Forks) -> None:
    changes = [{"TMPDIR": "/", "CUDA_VISIBLE_DEVICES": "1"}, {"OF_THE_USER": "2"}, *[{} for _ in range(18)]]
    with ThreadPoolExecutor(8) as pool:
        forked = list(pool.map(lambda change: forks.start(**change), changes))
    reports = [one.report() for one in forked]
    server = forks.server()
    assert {report["ppid"] for report in reports} == {server.pid}
    assert {report["pid"] for report in reports} == {one.process.pid for one in forked}
    assert len({report["pid"] for report in reports}) == 20
    assert forks.imports() == [server.pid]
    assert [one.end() for one in forked] == [GONE] * 20


def test_what_is_read_at_import_is_part_of_the_key_and_nothing_else() -> None:
    read = {"OMP_NUM_THREADS": "1", "VLLM_USE_V1": "1", "PYTHONPATH": "a", "HF_HOME": "b", "LD_PRELOAD": "c"}
    later = {"TMPDIR": "a", "CUDA_VISIBLE_DEVICES": "0", "MASTER_PORT": "1", "OF_THE_USER": "2", "MY_OMP_": "3"}
    assert dict(fork_server.key_of({**read, **later})) == read
    assert fork_server.key_of({"TORCHRL_VLLM_TIMEOUT_SECONDS": "5"}) == ()


def test_many_kinds_of_servers_do_not_pile_up_and_closed_ones_serve_their_processes_to_the_end(
    forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_servers", OrderedDict())
    monkeypatch.setattr(fork_server, "KEPT", 1)
    environments = [forks.environment(OMP_NUM_THREADS=threads) for threads in "23"]  # OpenBLAS starts threads
    first = fork_server.fork_server("support.forkable", environments[0])
    assert fork_server.fork_server("support.forkable", environments[0]) is first
    launch, connection = forks.ask(first)
    held = os.dup(first._control.fileno())  # as a process has it that the driver forked
    second = fork_server.fork_server("support.forkable", environments[1])
    assert second is not first
    pid, process = first.pid, first._process
    del first
    late = Forked(launch.wait(), connection)
    assert late.report()["ppid"] == pid
    gc.collect()
    assert process.poll() is None
    assert late.end() == GONE
    del launch, late
    gc.collect()
    assert process.poll() is not None
    os.close(held)
    assert fork_server.fork_server("support.forkable", environments[1]) is second
    second.end()  # it still imports
    assert not second.is_alive()


def test_a_forked_process_has_inherited_from_its_driver_of_now(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.server()
    (tmp_path / "only_in_this_folder.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_USER", "of now \udcff")
    processors, limits = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.sched_setaffinity(0, {min(processors)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        forked = forks.start(TMPDIR=str(tmp_path))
    finally:
        os.sched_setaffinity(0, processors)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    report = forked.report()
    assert report["environment"] == forks.environment(TMPDIR=str(tmp_path))
    assert report["temporary"] == str(tmp_path)
    assert report["processors"] == {min(processors)}
    assert report["limits"] == (limits[0] - 1, limits[1])
    assert report["path"] == ""
    assert forked.ask("run", "__import__('only_in_this_folder').ANSWER") == 42
    assert report["pgid"] == report["pid"]
    assert report["sid"] == os.getsid(0)
    assert report["threads"] == 1


def test_a_forked_process_has_the_files_that_it_needs_and_no_others(forks: Forks) -> None:
    others = [forks.start(), forks.start()]
    launch, connection = forks.ask(forks.server())
    forked = Forked(launch.wait(), connection)
    files = forked.report()["files"]
    assert (files.pop("0"), files.pop("1"), files.pop("2")) == (os.devnull, str(forks.log), str(forks.log))
    kinds = sorted(target.partition(":")[0] for target in files.values())
    assert kinds == ["", "anon_inode", "socket"]  # of the listing, the driver's pidfd, and its own socket
    assert forked.end() == GONE
    for other in others:
        assert other.end() == GONE


def test_many_starts_leave_no_file_and_no_process(forks: Forks) -> None:
    server = psutil.Process(forks.server().pid)
    assert forks.start().end() == GONE
    others = server.children()
    gc.collect()  # what other tests left may close files of its own meanwhile
    before = len(os.listdir("/proc/self/fd")), server.num_fds()
    for _ in range(50):
        launch, connection = forks.ask(forks.server())
        assert Forked(launch.wait(), connection).end() == GONE
    until(lambda: len(os.listdir("/proc/self/fd")) <= before[0] and server.num_fds() <= before[1], 60)
    assert server.children() == others  # no zombies either


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["does not answer", "is killed"])
def test_the_processes_of_a_lost_server_continue_and_the_next_start_has_another(
    forks: Forks, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    server, forked = forks.server(), forks.start()
    if how == "is killed":
        os.kill(server.pid, signal.SIGKILL)
    else:
        os.kill(server.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
            launch, _ = forks.ask(server)
            with pytest.raises(CannotFork, match=r"did not answer within 0 s"):
                launch.wait()
    until(lambda: not server.is_alive(), 60)
    with pytest.raises(CannotFork, match="cannot be reached"):
        forks.ask(server)
    assert forked.process.poll() is None
    assert forked.report()["pid"] == forked.process.pid
    assert forks.start().report()["ppid"] == forks.server().pid != server.pid
    forked.process.kill()
    assert forked.process.wait(60) == 255  # nobody knows


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("refuse of a device", "^of a device$"),
        ("thread", r"^importing left 1 threads running$"),
        ("raise", r"(?s)^the fork server ended: Traceback.*ImportError: no such engine$"),
    ],
)
def test_a_server_that_may_not_fork_says_why(forks: Forks, how: str, reason: str) -> None:
    server = forks.server(VLLM_TEST_PRELOAD=how)
    launch, connection = forks.ask(server, VLLM_TEST_PRELOAD=how)
    with pytest.raises(CannotFork, match=reason):
        launch.wait()
    check_hung_up(connection)
    server.end()
    assert server.how_it_ended() == ""  # and not an error, in a thread that is late


@pytest.mark.parametrize(
    ("call", "fails", "words"),
    [
        ("pidfd_open", Mock(side_effect=error_of(errno.EMFILE)), "Too many open files"),  # it cannot be watched
        ("sched_getaffinity", lambda _: {1000}, "ended with exit code 1 before it ran"),  # nor take over what we have
    ],
)
def test_a_process_that_is_not_as_it_must_be_is_not_handed_out(
    forks: Forks, monkeypatch: pytest.MonkeyPatch, call: str, fails: Any, words: str
) -> None:
    server = forks.server()
    monkeypatch.setattr(os, call, fails)
    launch, connection = forks.ask(server)
    with pytest.raises(CannotFork, match=words):
        launch.wait()
    check_hung_up(connection)


@pytest.mark.parametrize("how", ["not in this Python", "not in this kernel"])
def test_there_is_no_server_where_forking_is_not_possible(
    forks: Forks, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "not in this Python":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=error_of(errno.ENOSYS)))
    with pytest.raises(CannotFork, match=r"are not available: .*('pidfd_open'|not implemented)"):
        forks.server()


# -- a driver's end, however it dies ----------------------------------------------------------------------------------

DRIVERS = """
import json, os, signal, sys, time
from pathlib import Path
from support.forkable import Forks

how, folder = sys.argv[1:]
forks = Forks(Path(folder))
os.mkdir(f"{folder}/replica")
changes = {"TORCHRL_MOE_REPLICA_FOLDER": f"{folder}/replica"}
pid, code = None, None
if how == "ignores its children":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if how == "is killed while the server imports":
    server = forks.server(VLLM_TEST_PRELOAD=f"wait {folder}/found")  # until just before it is killed
    asked = forks.ask(server, **changes)
    while not Path(f"{folder}/imports").exists():
        time.sleep(0.01)
else:
    preload = "hasty" if how == "is killed, a process is stopped" else "print"
    forked = forks.start(VLLM_TEST_PRELOAD=preload, **changes)
    forked.report()
    pid, server = forked.process.pid, forks._servers[0]
if how == "is killed, a process is stopped":
    os.kill(pid, signal.SIGSTOP)
if how == "ignores its children":
    forked.process.kill()
    code = forked.process.wait(60)
Path(f"{folder}/found").write_text(json.dumps({"server": server.pid, "pid": pid, "code": code}))
if how.startswith("is killed"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAYS = (
    "is killed while the server imports",
    "is killed, a process is stopped",
    "ignores its children",
)
DEADLINE = 120.0  # on a machine that is busy


@pytest.mark.timeout(600)
def test_the_server_ends_after_its_driver_and_nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Drivers that return, or have processes that live on, are in ``test_replica.py``."""
    folders = {how: tmp_path_factory.mktemp("driver") for how in WAYS}
    environment = Forks(tmp_path_factory.mktemp("unused")).environment()
    drivers = [
        subprocess.Popen([sys.executable, "-c", DRIVERS, how, str(folder)], env=environment)
        for how, folder in folders.items()
    ]
    for driver in drivers:
        driver.wait(DEADLINE * 2)
    for how, folder in folders.items():
        found = json.loads((folder / "found").read_text())
        until(lambda found=found: all(is_gone(pid) for pid in (found["server"], found["pid"]) if pid), DEADLINE)
        if how.startswith("is killed"):  # else the driver removes it
            until(lambda folder=folder: not (folder / "replica").exists(), DEADLINE)
        assert found["code"] == (-9 if how == "ignores its children" else None)  # exit codes arrive there, too


# -- the child --------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


NINE_ERRORS = "\n".join(f"Error {number}" for number in range(9))
LOST_BYTES = "bytes \ud800".encode("utf-8", "surrogatepass").decode("latin-1")


@pytest.mark.parametrize(
    ("log", "most", "tail"),
    [
        (f"{NINE_ERRORS}\nINFO ok\nRuntimeError: Failed. See root cause above.", 2, "Error 7\nError 8"),
        ("one\nWARNING two\nLoading shards: 3\nfour\nfive", 3, "one\nfour\nfive"),
        ("", 3, "(its log holds no error)"),
        (  # short, whatever the log is
            f"Error at the start\n{'x' * (3 << 20)}\nError at the end {'y' * 1000}\n{LOST_BYTES}",
            3,
            f"Error at the end {'y' * 1000}"[: process_replica.SHOWN_LOG_COLUMNS],
        ),
    ],
)
def test_the_tail_of_a_log_is_its_last_errors_or_lines(temporary: Path, log: str, most: int, tail: str) -> None:
    process = Child.__new__(Child)  # the log is all that is asked of it
    process.log, process._log_start = temporary / "log", 0
    process.log.write_text(log)
    assert process.log_tail(most) == tail


@contextmanager
def toy_child(index: int, *words: str, log_folder: Path | None = None, **changes: str) -> Iterator[Child]:
    """A child that serves, and has printed these words; at the end it and its folder are gone."""
    one = Child(index, toy_kind, toy_environment() | changes, log_folder)
    try:
        one.outbox.put(process_replica.configuration({"model": "toy", "start": {"print": " ".join(words)}}))
        assert link.read(one.stream)[0] == "ready"
        yield one
    finally:
        one.end_and_forget()
    assert group(one.process.pid) == []
    assert not one.folder.exists()


def test_a_child_leads_a_group_in_our_session_and_its_output_goes_to_its_log(temporary: Path) -> None:
    with toy_child(3, "hello log") as one:
        assert os.getpgid(one.process.pid) == one.process.pid
        assert os.getsid(one.process.pid) == os.getsid(0)  # and so the cores are shared fairly
        assert one.log.parent.parent == temporary
        assert one.log.parent.name.startswith("torchrl_moe-replica-3-")
        assert one.log_tail() == "hello log"
    assert list(temporary.iterdir()) == []
    assert not one.outbox._thread.is_alive()


def test_a_log_in_a_folder_of_the_users_stays_and_a_later_child_continues_in_it(temporary: Path) -> None:
    log = temporary / "kept" / "logs" / "replica-3.log"
    for words in ("RuntimeError: of the first", "hello"):
        with toy_child(3, words, log_folder=log.parent) as one:
            assert one.log == log
            assert one.log_tail() == words  # of this child, not of the one before
    assert log.read_text() == "RuntimeError: of the first\nhello\n"
    assert list(temporary.iterdir()) == [temporary / "kept"]


def test_a_finalizer_may_run_in_the_thread_that_ends_the_child(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Child(0, toy_kind, toy_environment())
    wait, again = process.process.wait, [process.end_and_forget]

    def wait_and_collect(*arguments: Any) -> int:
        while again:  # as Python's collector may, anywhere
            again.pop()()
        return wait(*arguments)

    monkeypatch.setattr(process.process, "wait", wait_and_collect)
    in_thread(process.end).result(60.0)
    assert group(process.process.pid) == []


def test_vllms_sockets_lie_in_the_childs_folder_if_the_kernel_takes_their_names() -> None:
    fits = "/" + "x" * (107 - 36 - 2)  # vLLM calls them by a UUID, of 36 bytes
    driver = {process_replica.DRIVER_VARIABLE: str(os.getpid())}
    ours = {"TMPDIR": fits, "VLLM_RPC_BASE_PATH": fits, process_replica.FOLDER_VARIABLE: fits, **driver}
    for given, folder, expected in (
        ({"TMPDIR": "theirs", "A": "1"}, fits, {"A": "1", **ours}),
        ({"TMPDIR": "theirs"}, f"{fits}x", {"TMPDIR": "theirs", process_replica.FOLDER_VARIABLE: f"{fits}x", **driver}),
        ({"VLLM_RPC_BASE_PATH": "theirs"}, fits, {**ours, "VLLM_RPC_BASE_PATH": "theirs"}),  # the user may choose
    ):
        assert process_replica._with_places(given, Path(folder)) == expected


def talk(one: Child) -> Connection:
    """Its socket, by which ``forkable`` talks."""
    return Connection(os.dup(one.stream.fileno()))


@pytest.fixture
def own_forks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """Servers that are ended after the test; no other is asked or closed."""
    monkeypatch.setattr(fork_server, "_servers", OrderedDict())
    own_forks = Forks(tmp_path_factory.mktemp("forks"))
    yield own_forks
    for server in fork_server._servers.values():
        server.end()


def test_a_child_is_not_forked_if_nobody_wants_it_and_its_log_says_why(temporary: Path, own_forks: Forks) -> None:
    with toy_child(1, "hello", VLLM_WORKER_MULTIPROC_METHOD="spawn") as one:
        child = psutil.Process(one.process.pid)
        assert (child.ppid(), os.getpgid(child.pid)) == (os.getpid(), child.pid)
        assert child.environ()[process_replica.FOLDER_VARIABLE] == str(one.folder)
        assert one.log.read_text() == (
            "torchrl_moe: this replica imports its engine itself: VLLM_WORKER_MULTIPROC_METHOD=spawn is set\nhello\n"
        )
        assert fork_server._servers == {}
    assert list(temporary.iterdir()) == []


def test_a_forked_child_is_there_once_its_server_has_imported_and_one_that_was_given_up_never(
    temporary: Path, own_forks: Forks
) -> None:
    go = own_forks.folder / "go"
    environment = own_forks.environment(VLLM_TEST_PRELOAD=f"wait {go}")
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
    temporary: Path, own_forks: Forks
) -> None:
    go = own_forks.folder / "go"
    one = Child(0, forkable, own_forks.environment(VLLM_TEST_PRELOAD=f"wait {go}"))
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
    launch = SimpleNamespace(wait=Mock(side_effect=CannotFork("of the tests")))
    monkeypatch.setattr(process_replica, "fork_server", lambda *_: SimpleNamespace(fork=lambda *_: launch))
    monkeypatch.setattr(Child, "_spawn", Mock(side_effect=error_of(errno.ENOMEM)))
    replica = toy_replica()
    replica.start()
    with pytest.raises(ReplicaDiedError, match=r"replica 0 could not be started: OSError: .*Cannot allocate memory"):
        replica.wait_ready(240)
    assert not replica.is_alive()
    replica.shutdown()
    assert list(temporary.iterdir()) == []


def test_a_child_that_cannot_be_started_leaves_no_log_and_no_socket(temporary: Path) -> None:
    def opened() -> set[str]:
        links = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # another thread has closed it
                links.add(os.readlink(f"/proc/self/fd/{name}"))
        return {link for link in links if link.startswith(("socket:", "pipe:", "/"))}  # by inode, or by name

    before = opened()
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not int"):
        Child(0, toy_kind, {"A": 1})  # type: ignore[dict-item]
    assert list(temporary.iterdir()) == []
    assert opened() <= before
