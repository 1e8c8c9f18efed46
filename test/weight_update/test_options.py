"""Groups of choices: what follows from them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_moe.weight_update.options import CollectiveOptions, SourceOptions, StoreOptions, SwapOptions


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


@pytest.mark.parametrize(
    ("kind", "choices", "words"),
    [
        (SwapOptions, {"rolling": 0}, "rolling must be at least 1, got 0"),
        (
            SwapOptions,
            {"rolling": 1.5},
            r"rolling must be a share above 0 and at most 1\.0, or a whole number",
        ),
        (SwapOptions, {"min_serving": 0.0}, "min_serving must be a share above 0"),
        (SwapOptions, {"min_serving": float("nan")}, "min_serving must be a share above 0"),
        (StoreOptions, {"layout": "files"}, "layout must be one of 'slots', 'versions', got 'files'"),
        (StoreOptions, {"keep_versions": 1}, "keep_versions must be an integer of at least 2"),
        (StoreOptions, {"fsync": True}, "fsync=True needs layout='versions'"),
        (SourceOptions, {"dtype": "float32"}, "dtype must be one of 'engine', 'trainer', got 'float32'"),
        (SourceOptions, {"dtype": torch.int8}, "dtype must be a floating one, got torch.int8"),
        (SourceOptions, {"lora": "both"}, "lora must be one of 'merged', 'adapter', got 'both'"),
    ],
)
def test_a_bad_choice_is_refused(kind: Any, choices: dict[str, Any], words: str) -> None:
    folders = {"folder": Path("x"), "seen_as": Path("x")} if kind is StoreOptions else {}
    with pytest.raises(ValueError, match=words):
        kind(**folders, **choices)


@pytest.mark.parametrize("choices", [{"rolling": True}, {"min_serving": "all"}])
def test_what_is_no_number_is_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a number of replicas or a share of them"):
        SwapOptions(**choices)


@pytest.mark.parametrize(
    ("transport", "choices", "words"),
    [
        ("gloo", {"master_port": 1 << 16}, "master_port must be an integer from 0 to 65535, or None, got 65536"),
        ("memmap", {"master_port": -1}, "master_port must be an integer from 0 to 65535, or None, got -1"),
        ("gloo", {"device": "cuda:0"}, "transport='gloo' sends from the CPU"),
        ("gloo", {"device": 0}, "device=0: transport='gloo' sends from the CPU"),
        ("gloo", {"gpus_per_replica": 0}, "gpus_per_replica must be an integer of at least 1, or None, got 0"),
        ("gloo", {"buffer_bytes": 0}, "buffer_bytes must be an integer of at least 1, or None, got 0"),
        ("gloo", {"master_address": "10.0.0.1"}, "master_address='10.0.0.1': transport='gloo' reaches .* one host"),
        ("gloo", {"master_address": "trainer.example"}, "use transport='memmap', layout='versions' and folder="),
        ("memmap", {"buffer_bytes": 1}, "buffer_bytes belongs to transport='gloo'"),
    ],
)
def test_a_collectives_argument_must_have_a_meaning(transport: str, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CollectiveOptions(**choices).check(transport)


def test_those_that_have_one_pass() -> None:
    for address in ("127.0.0.1", "::1", "localhost"):
        CollectiveOptions(master_address=address, master_port=29500, gpus_per_replica=2, device="cpu").check("gloo")
    CollectiveOptions(master_address="10.0.0.1").check("memmap")
    CollectiveOptions(device=1).check("memmap")
    assert CollectiveOptions(device=1).torch_device == torch.device("cuda:1")  # TorchRL's way to name it
    CollectiveOptions(buffer_bytes=1 << 20).check("gloo")
    CollectiveOptions().check("memmap")
