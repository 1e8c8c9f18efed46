"""Groups of choices: what follows from them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.weight_update.options import CollectiveOptions, SwapOptions


@pytest.mark.parametrize(
    ("choices", "replicas", "hold", "serve"),
    [
        ({}, 1, 1, 0),
        ({}, 2, 1, 1),
        ({}, 4, 3, 3),
        ({"rolling": 3}, 4, 3, 1),
        ({"rolling": 9}, 4, 3, 0),
        ({"min_serving": 4}, 4, 4, 3),  # one may always be away
        ({"min_serving": 2, "rolling": 4}, 4, 2, 2),
        ({"min_serving": 0}, 4, 0, 0),
        ({}, 10, 9, 9),
        ({}, 64, 57, 58),  # nine tenths hold it, a tenth is away
        ({}, 1024, 921, 922),
        ({"rolling": 0.5, "min_serving": 0.25}, 8, 2, 2),
        ({"rolling": 0.5}, 8, 7, 4),
        ({"rolling": 0.01}, 8, 7, 7),  # one at least
        ({"min_serving": 1.0}, 8, 8, 7),
        ({"min_serving": 0.7}, 10, 7, 7),  # not 6, as floor(0.7 * 10) would be if 0.7 were a little less
    ],
)
def test_how_many_must_hold_a_version_and_how_many_must_serve_meanwhile(
    choices: dict[str, Any], replicas: int, hold: int, serve: int
) -> None:
    options = SwapOptions(**choices)
    assert (options.must_hold(replicas), options.must_serve(replicas)) == (hold, serve)


def test_a_collectives_arguments_that_have_a_meaning_pass() -> None:
    for address in ("127.0.0.1", "::1", "localhost"):
        CollectiveOptions(master_address=address, master_port=29500, gpus_per_replica=2, device="cpu").check("gloo")
    CollectiveOptions(buffer_bytes=1 << 20).check("gloo")
    for options in (CollectiveOptions(master_address="10.0.0.1"), CollectiveOptions(device=1), CollectiveOptions()):
        options.check("memmap")
