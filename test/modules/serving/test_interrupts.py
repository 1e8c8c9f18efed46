"""Ctrl-C is held back inside, and takes effect at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from torchrl_moe.modules.serving.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_inside_comes_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_passes_and_the_handler_is_put_back() -> None:
    with pytest.raises(KeyError), uninterrupted():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_may_be_nested() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)
    assert done == [1, 2]


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    seen = []

    def other() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        seen.append(signal.getsignal(signal.SIGINT))
    assert seen == [signal.default_int_handler, signal.SIG_IGN]
