"""What every engine process does with messages, over an engine that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from support.processes import ids_request
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.process import engine_program, wire
from torchrl_moe.modules.backends.process import wire as packing
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Load
from torchrl_moe.modules.backends.replica import Completion, ReplicaInfo, ReplicaStats, Request


class Inbox:
    """The driver's messages, put by hand."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def put(self, *message: Any) -> None:
        self.messages.put_nowait(message)


class Program(EngineProgram):
    """Answers each request at once with no token, and refuses the one called "bad"."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.sent: list[tuple[Any, ...]] = []
        self.heard: list[Any] = []
        self.dead = ""
        self.worked = False
        info = ReplicaInfo(model="counter", layout=None, max_model_len=8)
        super().__init__(info, Load(), self.inbox, self._note)  # type: ignore[arg-type]

    def _note(self, message: tuple[Any, ...]) -> None:
        if message[0] != "stats":
            self.sent.append(message)

    def start(self, request: Request) -> None:
        if request.request_id == "bad":
            self._refuse("bad", ValueError("too long"))
        else:
            self._send(("completion", completion(request.request_id)))

    def abort(self, request_ids: list[str]) -> None:
        self.heard.append(request_ids)

    def left(self, driver: str) -> None:
        self.heard.append(driver)

    def _stats(self) -> ReplicaStats:
        return ReplicaStats(requests=7)

    def _death(self) -> str:
        return self.dead

    def close(self) -> None:
        self.heard.append("closed")

    def _background(self) -> list[Any]:
        async def work() -> None:
            self.worked = True

        return [work()]

    async def command_add(self, a: int, b: int) -> int:
        return a + b

    async def command_fail(self, mine: bool) -> None:
        raise EngineError("broken") if mine else RuntimeError from TypeError("yours")


def completion(request_id: str) -> Completion:
    ids: Any = np.array([1, 2])
    return Completion(request_id=request_id, prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=[])


def run(script: Callable[[Program], Awaitable[None]]) -> Program:
    """Run a script against a program that serves, and have it end, if it has not."""

    async def main() -> Program:
        program = Program()
        serving = asyncio.create_task(program.serve())
        await script(program)
        program.inbox.put("shutdown")
        await asyncio.wait_for(serving, 60.0)
        return program

    return asyncio.run(main())


async def until_sent(program: Program, count: int) -> None:
    async with asyncio.timeout(60.0):
        while len(program.sent) < count:
            await asyncio.sleep(0.001)


def test_each_message_reaches_what_it_is_for() -> None:
    async def script(program: Program) -> None:
        program.inbox.put("generate", packing.pack_requests([ids_request("a"), ids_request("bad")]))
        program.inbox.put("abort", ["a"])
        program.inbox.put("left", "d1")
        program.inbox.put("call", 1, "add", wire.parcel({"a": 2, "b": 3}))
        program.inbox.put("call", 2, "stats", wire.parcel({}))
        await until_sent(program, 4)

    program = run(script)
    assert program.heard == [["a"], "d1"]
    assert program.worked
    assert program.sent[0][1].request_id == "a"
    assert program.sent[1] == ("refused", "bad", "value", "too long")
    assert [wire.open_parcel(parcel) for _, _, parcel in program.sent[2:]] == [5, ReplicaStats(requests=7)]


@pytest.mark.parametrize(
    ("command", "kwargs", "kind", "words"),
    [
        ("sub", {}, "value", "an engine process has no command 'sub'; known: add, fail, stats"),
        ("add", {"c": 1}, "value", "unexpected keyword argument"),
        ("fail", {"mine": True}, "engine", "EngineError: broken"),
        ("fail", {"mine": False}, "value", "yours"),
    ],
)
def test_a_command_that_fails_says_whose_fault_it_is(command: str, kwargs: Any, kind: str, words: str) -> None:
    async def script(program: Program) -> None:
        program.inbox.put("call", 5, command, wire.parcel(kwargs))
        await until_sent(program, 1)

    (error,) = run(script).sent
    assert error[:3] == ("error", 5, kind)
    assert words in error[3]


def test_a_death_is_reported_once_and_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "WATCH_SECONDS", 60)  # nobody else looks

    async def script(program: Program) -> None:
        program.dead = "the engine is gone"
        program.inbox.put("call", 1, "fail", wire.parcel({"mine": True}))
        program.inbox.put("generate", packing.pack_requests([ids_request("bad")]))
        await until_sent(program, 1)

    assert run(script).sent == [("died", "the engine is gone")]


def test_completions_that_are_ready_together_share_a_message() -> None:
    one, other = completion("a"), completion("b")
    frames = engine_program._frame([("completion", one), ("ready", 1), ("completion", other), ("result", 1, [])])
    assert [wire.decode(first, rest)[0] for first, *rest in frames] == ["completions", "ready", "result"]
    assert engine_program._frame([("ready", "info")]) == [wire.encode(("ready", "info"))]


def test_a_message_has_room_for_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "MESSAGE_BYTES", 1)
    frames = engine_program._frame([("completion", completion(name)) for name in "abc"])
    assert len(frames) == 3
