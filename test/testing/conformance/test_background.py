"""What is done in a thread is waited for, and not for ever."""

from __future__ import annotations

import threading

import pytest

from torchrl_moe.testing.conformance.background import in_thread, result
from torchrl_moe.testing.conformance.report import DoesNotHold


def test_a_result_and_an_error_come_through() -> None:
    assert result(in_thread(lambda: 3), 60.0) == 3
    with pytest.raises(ZeroDivisionError):
        result(in_thread(lambda: 1 // 0), 60.0)


def test_what_takes_too_long_does_not_hold() -> None:
    over = threading.Event()
    with pytest.raises(DoesNotHold, match=r"the engine did not answer within 0\.01 s"):
        result(in_thread(over.wait), 0.01)
    over.set()


def test_an_engines_own_timeout_is_its_own() -> None:
    def give_up() -> None:
        raise TimeoutError("the engine is busy")

    with pytest.raises(TimeoutError, match="the engine is busy"):
        result(in_thread(give_up), 60.0)
