"""The process that forks: it ends with its driver, however that dies, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.forkable import Forks
from support.waiting import until

DRIVERS = """
import json, os, psutil, signal, sys, time
from pathlib import Path
from support.forkable import Forks

def drive(how, folder):
    os.setpgid(0, 0)
    forks = Forks(Path(folder))
    changes = {"TORCHRL_MOE_REPLICA_FOLDER": f"{folder}/replica"}
    os.mkdir(f"{folder}/replica")
    if how == "ignores its children":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if how == "is killed while the server imports":
        server = forks.server(VLLM_TEST_PRELOAD=f"wait {folder}/never")
        asked = forks.ask(server, **changes)
        while not Path(f"{folder}/imports").exists():
            time.sleep(0.01)
        pids = []
    else:
        preload = {"is killed, a process is stopped": "hasty"}.get(how, "print")
        forked = forks.start(VLLM_TEST_PRELOAD=preload, **changes)
        forked.report()
        pids, server = [forked.process.pid], forks._servers[0]
    if how == "is killed, a process is stopped":
        os.kill(pids[0], signal.SIGSTOP)
    if how == "is killed, the server is stopped":
        os.kill(server.pid, signal.SIGSTOP)
        while psutil.Process(server.pid).status() != "stopped":  # the kernel wakes what is stopped by then
            time.sleep(0.01)
    if how == "is killed, another process has its sockets":
        pids.append(os.fork())
        if not pids[-1]:
            time.sleep(600)
    code = None
    if how == "ignores its children":
        forked.process.kill()
        code = forked.process.wait(60)
    Path(f"{folder}/found").write_text(json.dumps({"server": server.pid, "pids": pids, "code": code}))
    if how == "raises":
        raise RuntimeError("of the driver")
    if how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)

ways = json.loads(sys.argv[1])
for how, folder in ways.items():
    if not os.fork():
        drive(how, folder)
        sys.exit()
for _ in ways:
    os.wait()
"""
WAYS = (
    "returns",
    "raises",
    "is killed",
    "is killed while the server imports",
    "is killed, a process is stopped",
    "is killed, the server is stopped",
    "is killed, another process has its sockets",
    "ignores its children",
)
DEADLINE = 120.0  # on a machine that is busy


@pytest.fixture(scope="module")
def dead_drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, dict[str, Any]]]]:
    """What drivers said that have died, and each one's folder, by how they died."""
    folders = {how: tmp_path_factory.mktemp("driver") for how in WAYS}
    arguments = json.dumps({how: str(folder) for how, folder in folders.items()})
    environment = Forks(tmp_path_factory.mktemp("unused")).environment()
    subprocess.run([sys.executable, "-c", DRIVERS, arguments], env=environment, check=True, timeout=DEADLINE * 2)
    found = {how: json.loads((folder / "found").read_text()) for how, folder in folders.items()}
    yield {how: (folders[how], found[how]) for how in WAYS}
    for one in found.values():
        for pid in one["pids"]:
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                psutil.Process(pid).kill()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # where nobody asks how orphans ended
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", WAYS)
def test_the_server_ends_after_its_driver_and_nothing_is_left(
    dead_drivers: dict[str, tuple[Path, dict[str, Any]]], how: str
) -> None:
    folder, found = dead_drivers[how]
    until(lambda: is_gone(found["server"]), DEADLINE)
    if found["pids"]:
        until(lambda: is_gone(found["pids"][0]), DEADLINE)
    if how.startswith("is killed"):  # else the driver removes it
        until(lambda: not (folder / "replica").exists(), DEADLINE)


def test_what_importing_prints_is_in_no_processs_log(dead_drivers: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    folder, _ = dead_drivers["returns"]
    assert (folder / "log").read_text() == "running\n"


def test_exit_codes_arrive_in_a_driver_that_ignores_its_children(
    dead_drivers: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    assert dead_drivers["ignores its children"][1]["code"] == -9
