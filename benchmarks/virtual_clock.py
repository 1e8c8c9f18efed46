"""Real code on a simulated clock: time advances once every thread of this process is idle.

A fake engine's answers end at times of the clock, and a simulated trainer sleeps by it. Between two times the
collectors' real code runs, with its loops and threads, and takes no simulated time. Linux only: it reads the states of
threads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

__all__ = ["ClockedReplicas", "VirtualClock"]

LOOK_SECONDS, QUIET_SECONDS, QUIET_LOOKS = 0.001, 0.0002, 2


class VirtualClock:
    """Runs due functions in its own thread; other threads call :meth:`sleep`. A context manager."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="virtual-clock", daemon=True)

    def __enter__(self) -> VirtualClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def at(self, when: float, function: Callable[[], None]) -> None:
        """Schedule a call of a function in the clock's thread."""
        with self._lock:
            heapq.heappush(self._due, (max(when, self.now), next(self._numbers), function))

    def sleep(self, duration: float) -> None:
        """Wait for some simulated time; raise the error of a due function, if one failed."""
        woken = threading.Event()
        self.at(self.now + duration, woken.set)
        while not woken.wait(1.0):
            if not self._thread.is_alive():
                raise RuntimeError("the clock has stopped") from self._error

    def _run(self) -> None:
        try:
            self._go_on()
        except Exception as error:
            self._error = error  # of those who sleep
            raise

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self._wait_until_quiet()
            with self._lock:
                if not self._due:
                    continue
                self.now = self._due[0][0]
                functions = []
                while self._due and self._due[0][0] <= self.now:
                    functions.append(heapq.heappop(self._due)[2])
            for function in functions:
                function()

    def _wait_until_quiet(self) -> None:
        """Return once no other thread has run for a while, and none is runnable."""
        quiet = 0
        while quiet < QUIET_LOOKS:
            before = time.process_time() - time.thread_time()
            time.sleep(LOOK_SECONDS)
            others = time.process_time() - time.thread_time() - before
            quiet = quiet + 1 if others < QUIET_SECONDS and not self._others_are_runnable() else 0

    @staticmethod
    def _others_are_runnable() -> bool:
        own = str(threading.get_native_id())
        for task in Path("/proc/self/task").iterdir():
            try:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:  # it has ended
                continue
            if state in "RD" and task.name != own:
                return True
        return False


class ClockedReplicas:
    """Makes an engine's fakes answer in a fixed number of slots each, first come, first served.

    Args:
        engine: of fakes.
        clock: decides when an answer ends.
        slots: concurrent answers per replica.
        length: how long the next answer takes.
    """

    def __init__(self, engine: FakeAsyncVLLM, clock: VirtualClock, slots: int, length: Callable[[], float]) -> None:
        self._clock, self._length = clock, length
        self._held = self._held_until = 0.0
        self._lock = threading.Lock()
        for replica in engine.replicas:
            _Slots(self, replica, slots)

    def hold_up(self, duration: float) -> None:
        """Stop all replicas for some time."""
        with self._lock:
            self._held += duration
            self._held_until = self._clock.now + duration

    def end(self, function: Callable[[], None]) -> None:
        """Call a function when an answer that begins now has ended."""
        with self._lock:
            self._end_at(max(self._clock.now, self._held_until) + self._length(), self._held, function)

    def _end_at(self, when: float, held: float, function: Callable[[], None]) -> None:
        def due() -> None:
            with self._lock:
                later = self._held - held
                if later > 0:
                    self._end_at(when + later, self._held, function)
                    return
            function()

        self._clock.at(when, due)


class _Slots:
    """The slots of one replica."""

    def __init__(self, replicas: ClockedReplicas, replica: FakeReplica, count: int) -> None:
        self._replicas, self._replica, self._free = replicas, replica, count
        self._waiting: deque[tuple[Request, Future[Completion]]] = deque()
        self._lock = threading.Lock()
        self._answer = replica._begin  # at once
        replica.submit = self.submit  # type: ignore[method-assign]

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._lock:
            self._waiting.extend(zip(requests, futures, strict=True))
        self._begin()
        return futures

    def _begin(self) -> None:
        with self._lock:
            begun = [self._waiting.popleft() for _ in range(min(self._free, len(self._waiting)))]
            self._free -= len(begun)
        for one in begun:
            self._replicas.end(partial(self._end, *one))

    def _end(self, request: Request, future: Future[Completion]) -> None:
        completion = self._answer(request).result()
        self._replica.submitted.clear()
        with self._lock:
            self._free += 1
        self._begin()
        future.set_result(completion)
