"""A signal to end: what runs may finish, and then the signal has its usual effect."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchrl_moe.trainers.grpo_trainer import finishing


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """As in a shell; one that starts in the background ignores Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_runs_may_finish() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), finishing(lambda: done.append("asked"), lambda: done.append("ended"), 60):
        signal.raise_signal(signal.SIGINT)
        done.append("finished")
    assert done == ["asked", "finished"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_ends_it_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), finishing(lambda: None, lambda: done.append("ended"), 60):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("finished")
    assert done == []


def test_the_deadline_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt), finishing(lambda: None, lambda: None, 0.01):
        signal.raise_signal(signal.SIGINT)
        signal.pause()


def test_without_time_a_signal_ends_it_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), finishing(lambda: None, lambda: None, 0):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")


def test_a_users_own_handler_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with finishing(lambda: heard.append(0), lambda: heard.append(0), 60):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_from_outside_has_its_exit_code(name: str) -> None:
    program = f"""
import signal
signal.signal(signal.{name}, signal.SIG_DFL)
from torchrl_moe.trainers.grpo_trainer import finishing
with finishing(lambda: None, lambda: print("ended", flush=True), 60):
    signal.raise_signal(signal.{name})
    print("finished")
print("not reached")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (-signal.Signals[name], "finished\nended\n")
    assert f"{name}: the running step is finished and saved, in at most 60 s" in run.stderr
