"""One message per replica and turn of the loop; what ends wakes the loop once for all of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from support.requests import waiting_request
from support.waiting import PATIENCE
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.dispatch import Submissions
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.in_flight import InFlight


class Slow:
    """Ends nothing until it is told to."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.aborted: list[str] = []
        self.futures: list[Future[Completion]] = []
        self.error: BaseException | None = None

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        self.messages.append(len(requests))
        if self.error is not None:
            raise self.error
        made: list[Future[Completion]] = [Future() for _ in requests]
        self.futures += made
        return made

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids


def put(submissions: Submissions, replica: Slow, request: InFlight | None = None) -> asyncio.Future[Completion]:
    """Hand a request over to a replica; the future of what comes of it."""
    request = request or waiting_request()
    request.lease = LoadBalancer([replica]).acquire()
    return submissions.put(request, replica)  # type: ignore[arg-type]


def in_loop(work: Callable[[Submissions], Coroutine[Any, Any, Any]]) -> tuple[Any, list[str]]:
    """Run a coroutine in a service's loop; return its value, and what the loop was told to call meanwhile."""
    loop, over, value, calls = EventLoop("of-submissions"), threading.Event(), [], []
    submissions = Submissions(loop)

    async def main() -> None:
        try:
            value.append(await work(submissions))
        finally:
            over.set()

    def begin() -> None:
        tasks.append(asyncio.get_running_loop().create_task(main()))

    tasks: list[Any] = []
    real = loop.call

    def count(function: Any, *arguments: Any) -> bool:
        calls.append(function.__name__)
        return real(function, *arguments)

    loop.call = count  # type: ignore[method-assign]
    real(begin)
    assert over.wait(PATIENCE)
    loop.stop()
    return value[0], calls


def test_what_one_turn_places_is_one_message_for_each_replica() -> None:
    one, two = Slow(), Slow()

    async def work(submissions: Submissions) -> None:
        for replica in (one, two, one, one):
            put(submissions, replica)
        assert (one.messages, two.messages) == ([], [])
        await at_the_end_of_the_turn()
        put(submissions, two)
        await at_the_end_of_the_turn()

    in_loop(work)
    assert (one.messages, two.messages) == ([3], [1, 1])


async def at_the_end_of_the_turn() -> None:
    for _ in range(2):
        await asyncio.sleep(0)


def test_many_ends_wake_the_loop_once() -> None:
    replica = Slow()

    async def work(submissions: Submissions) -> list[Any]:
        waits = [put(submissions, replica) for _ in range(50)]
        await at_the_end_of_the_turn()

        def end() -> None:
            for number, future in enumerate(replica.futures):
                future.set_result(number)  # type: ignore[arg-type]

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()  # the loop is held up meanwhile
        return await asyncio.gather(*waits)

    values, calls = in_loop(work)
    assert values == list(range(50))
    assert calls == ["_collect"]


def test_what_ends_after_its_request_was_given_up_disturbs_no_other() -> None:
    replica = Slow()

    async def work(submissions: Submissions) -> Any:
        lost, other = put(submissions, replica), put(submissions, replica)
        await at_the_end_of_the_turn()
        lost.cancel()
        for number, future in enumerate(replica.futures):
            future.set_result(number)  # type: ignore[arg-type]
        return await other

    assert in_loop(work)[0] == 1


@pytest.mark.parametrize("end", [Future.cancel, lambda future: future.set_exception(StopIteration("odd"))])
def test_an_odd_end_of_one_request_keeps_no_other_from_its_answer(end: Callable[[Future[Completion]], Any]) -> None:
    replica = Slow()

    async def work(submissions: Submissions) -> list[Any]:
        answers = [put(submissions, replica) for _ in range(3)]
        await at_the_end_of_the_turn()
        first, odd, last = replica.futures
        for number, future in enumerate((first, last)):
            future.set_result(number)  # type: ignore[arg-type]
        end(odd)
        return await asyncio.gather(*answers, return_exceptions=True)

    first, odd, last = in_loop(work)[0]
    assert (first, last) == (0, 1)
    assert isinstance(odd, EngineError) and "the replica gave up the request" in str(odd)


def test_an_error_of_sending_is_that_of_the_whole_message_which_is_aborted() -> None:
    bad, good = Slow(), Slow()
    bad.error = TypeError("cannot pickle")

    async def work(submissions: Submissions) -> str:
        lost = [put(submissions, bad) for _ in range(2)]
        put(submissions, good)
        return " ".join(str(error) for error in await asyncio.gather(*lost, return_exceptions=True))

    assert in_loop(work)[0] == "cannot pickle cannot pickle"
    assert (bad.aborted, good.messages) == (["r", "r"], [1])


def test_what_is_taken_back_in_time_is_not_handed_over() -> None:
    replica, other = Slow(), Slow()

    async def work(submissions: Submissions) -> list[bool]:
        first, second, third = waiting_request(), waiting_request(), waiting_request()
        for request, to in ((first, replica), (second, replica), (third, other)):
            put(submissions, to, request)
        removed = [submissions.remove(request) for request in (first, first, third, waiting_request())]
        await at_the_end_of_the_turn()
        return [*removed, submissions.remove(second)]

    assert in_loop(work)[0] == [True, False, True, False, False]
    assert (replica.messages, other.messages) == ([1], [])
