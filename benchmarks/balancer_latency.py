"""What choosing a replica costs: ours (select and lease) against TorchRL's ``LoadBalancer`` over real Ray actors.

Both run their default hierarchy, prefix-aware and then requests, on the same 256-token prompts, in turns. TorchRL asks
every actor for its load at every choice; ours keeps counts. Its actors here do nothing but reply, so the balancer is
measured and not an engine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Row, finish, median_range
from torchrl_moe.modules import Lease, LoadBalancer

TOKENS, VOCABULARY, GROUP = 256, 50_000, 8
FLEETS = (2, 64, 1024)
ROUNDS, OURS_PER_ROUND, THEIRS_PER_ROUND = 15, 400, 20
IN_FLIGHT = 4  # requests per replica
TARGET_US, TARGET_RATIO = 20.0, 100.0


class Prompts:
    """An endless stream of prompts: token lists, each repeated ``repeat`` times."""

    def __init__(self, repeat: int) -> None:
        self._rng = random.Random(0)
        self._repeat = repeat
        self._given, self._prompt = 0, self._new()

    def _new(self) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(TOKENS)]

    def take(self, count: int) -> list[list[int]]:
        """Return the next prompts."""
        taken = []
        for _ in range(count):
            if self._given == self._repeat:
                self._given, self._prompt = 0, self._new()
            self._given += 1
            taken.append(self._prompt)
        return taken


class Ours:
    """Our balancer at full load: each new request first releases the oldest one, which is not timed."""

    def __init__(self, num_replicas: int, repeat: int) -> None:
        self.balancer = LoadBalancer(list(range(num_replicas)))
        self.prompts = Prompts(repeat)
        self.leases: deque[Lease] = deque()
        for prompt in self.prompts.take(IN_FLIGHT * num_replicas):
            self.leases.append(self.balancer.acquire(prompt))

    def round(self) -> float:
        """Return the median microseconds of a choice."""
        seconds = []
        for prompt in self.prompts.take(OURS_PER_ROUND):
            self.leases.popleft().release()
            started = time.perf_counter()
            lease = self.balancer.acquire(prompt)
            seconds.append(time.perf_counter() - started)
            self.leases.append(lease)
        return statistics.median(seconds) * 1e6


class Theirs:
    """TorchRL's balancer over two Ray actors."""

    def __init__(self) -> None:
        import ray
        from torchrl.modules.llm.backends.vllm.vllm_async import LoadBalancer as TorchRLBalancer

        @ray.remote(num_cpus=0)
        class Actor:
            def get_num_unfinished_requests(self) -> int:
                return 0

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        self.balancer: Any = TorchRLBalancer([Actor.remote() for _ in range(2)])
        self.prompts = Prompts(1)
        self.round()  # a warm-up round, while the actors start

    def round(self) -> float:
        """Return the median microseconds of a choice."""
        seconds = []
        for prompt in self.prompts.take(THEIRS_PER_ROUND):
            started = time.perf_counter()
            self.balancer.select_actor(prompt)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds) * 1e6


def rows_of(name: str, figures: Sequence[float]) -> Row:
    """Return a row with the target of every fleet."""
    return Row(
        claim=f"ours, select and lease, {name}, us",
        value=median_range(figures, 1),
        target=f"<= {TARGET_US:.0f}",
        met=statistics.median(figures) <= TARGET_US,
    )


def main() -> None:
    """Run all balancers in turn, round by round."""
    theirs = Theirs()
    kinds = {"distinct prompts": 1, f"groups of {GROUP}": GROUP}
    ours = {(n, kind): Ours(n, repeat) for n in FLEETS for kind, repeat in kinds.items()}
    figures: dict[tuple[int, str], list[float]] = {key: [] for key in ours}
    peer = []
    for _ in range(ROUNDS):
        peer.append(theirs.round())
        for key, contender in ours.items():
            figures[key].append(contender.round())
    rows = [Row(claim="TorchRL, select, 2 Ray actors, distinct prompts, us", value=median_range(peer, 0))]
    rows += [rows_of(f"{n} replicas, {kind}", figures[n, kind]) for n, kind in ours]
    for kind in kinds:
        ratios = [a / b for a, b in zip(peer, figures[2, kind], strict=True)]
        met = statistics.median(ratios) >= TARGET_RATIO
        rows.append(
            Row(claim=f"TorchRL / ours, 2 replicas, {kind}", value=median_range(ratios, 0), target=">= 100", met=met)
        )
        growth = [a / b for a, b in zip(figures[1024, kind], figures[2, kind], strict=True)]
        rows.append(Row(claim=f"ours, 1024 replicas / 2 replicas, {kind}", value=median_range(growth)))
    finish("balancer_latency", rows)
    import ray

    ray.shutdown()


if __name__ == "__main__":
    main()
