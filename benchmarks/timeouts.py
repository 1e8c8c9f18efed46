"""Calls that time out together: how long after their deadline they have all returned, and what that costs in CPU.

1600 and then 3200 calls of one service over 16 fake engines, none of which ever answers, have one deadline. The limit
is that twice as many cost twice as much: each is aborted, its engine gives back what it has, and its call returns that.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.report import Row, finish, median_range
from torchrl_moe.errors import GenerationTimeout
from torchrl_moe.testing import FakeAsyncVLLM

COUNTS, REPLICAS, SECONDS, ROUNDS = (1600, 3200), 16, 3.0, 5
MOST_SECONDS, MOST_GROWTH = 1.0, 2.2


def time_out(count: int) -> tuple[float, float]:
    """Return the seconds past the deadline until all have returned, and the CPU seconds of the process."""
    with FakeAsyncVLLM(REPLICAS, token_seconds=3600.0, max_concurrent_requests=None) as engine:
        began, cpu = time.monotonic(), time.process_time()
        try:
            engine.generate([[1, 2]] * count, {"max_tokens": 4}, timeout_seconds=SECONDS, use_tqdm=False)
        except GenerationTimeout as error:
            assert len(error.partial) == count
        else:
            raise AssertionError("no call timed out")
        return time.monotonic() - began - SECONDS, time.process_time() - cpu


def main() -> None:
    """Measure both counts, one after the other."""
    time_out(COUNTS[0])  # imports and the first event loop
    rounds = [[time_out(count) for count in COUNTS] for _ in range(ROUNDS)]
    late = [many[0] for _, many in rounds]
    growth = [many[1] / few[1] for few, many in rounds]
    rows = [
        Row(
            claim=f"{COUNTS[1]} calls: seconds past the deadline until the last has returned",
            value=median_range(late),
            target=f"<= {MOST_SECONDS:g}",
            met=statistics.median(late) <= MOST_SECONDS,
        ),
        *(
            Row(claim=f"{count} calls: CPU seconds", value=median_range([one[place][1] for one in rounds]))
            for place, count in enumerate(COUNTS)
        ),
        Row(
            claim=f"CPU of {COUNTS[1]} calls / of {COUNTS[0]}",
            value=median_range(growth),
            target=f"<= {MOST_GROWTH:g}",
            met=statistics.median(growth) <= MOST_GROWTH,
        ),
    ]
    finish("timeouts", rows)


if __name__ == "__main__":
    main()
