"""The typed commands: which name and which arguments each sends, and what it makes of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchrl_moe.modules.backends.commands import Commands
from torchrl_moe.modules.backends.replica import Replica, ReplicaStats, SwapReport, WeightClaim
from torchrl_moe.weight_update.transports.base import StageReport

STAGED = StageReport(seconds=1.0, nbytes=8, digest="d")
CLAIM = WeightClaim(epoch=4, owner="me")
KINDS = {"a": (torch.float32, torch.Size([2]))}


class Sending(Commands):
    """Keeps what was sent, and answers what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent: list[Any] = []

    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        self.sent.append((name, timeout, arguments))
        return self.answer


STAGE = {"verify": "off", "threads": 2, "manifest": None}
SWAP = {"pause": "wait", "clear_cache": True, "canary": {"token_ids": [1]}}
COMMANDS: dict[str, tuple[Callable[[Commands], Any], Any, Any, dict[str, Any]]] = {
    # name: how it is called with a limit of 3 s, what comes, what that becomes, what is sent
    "pause": (lambda r: r.pause("keep", True, 3), None, None, {"mode": "keep", "clear_cache": True}),
    "resume": (lambda r: r.resume(3), None, None, {}),
    "sleep": (lambda r: r.sleep(2, "wait", 3), None, None, {"level": 2, "mode": "wait"}),
    "wake_up": (lambda r: r.wake_up(("weights",), 3), None, None, {"tags": ["weights"]}),
    "stats": (lambda r: r.stats(3), ReplicaStats(running=1), ReplicaStats(running=1), {}),
    "reset_prefix_cache": (lambda r: r.reset_prefix_cache(3), 1, True, {}),
    "set_seed": (lambda r: r.set_seed(5, 3), None, None, {"seed": 5}),
    "collective_rpc": (lambda r: r.collective_rpc("m", [1], {"k": 2}, 3), ("x", "y"), ["x", "y"],
                       {"method": "m", "args": (1,), "kwargs": {"k": 2}}),
    "tokenizer": (lambda r: r.tokenizer(3), "a tokenizer", "a tokenizer", {}),
    "metadata": (lambda r: r.metadata(3), KINDS, KINDS, {}),
    "weights_version": (lambda r: r.weights_version(3), 7, 7, {}),
    "claim_weights": (lambda r: r.claim_weights("me", True, 3), CLAIM, CLAIM,
                      {"driver": "", "name": "me", "takeover": True}),
    "owns_weights": (lambda r: r.owns_weights(3), True, True, {"epoch": 0}),
    "give_up_weights": (lambda r: r.give_up_weights(3), None, None, {"epoch": 0}),
    "init_weights": (lambda r: r.init_weights("gloo", {"port": 1}, 3), None, None,
                     {"epoch": 0, "transport": "gloo", "options": {"port": 1}}),
    "stage_weights": (lambda r: r.stage_weights(7, **STAGE, timeout=3), STAGED, STAGED,
                      {"epoch": 0, "version": 7, **STAGE}),
    "swap_weights": (lambda r: r.swap_weights(7, **SWAP, timeout=3), SwapReport(), SwapReport(),
                     {"epoch": 0, "version": 7, "digest": "", **SWAP, "patience": math.inf}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_sends_its_name_its_limit_and_its_arguments(name: str) -> None:
    call, answer, value, arguments = COMMANDS[name]
    replica = Sending(answer)
    assert call(replica) == value
    assert replica.sent == [(name, 3, arguments)]


def test_commands_about_weights_carry_the_last_claim_and_what_was_staged_under_it() -> None:
    replica = Sending(WeightClaim(epoch=4, owner="me"))
    replica.claim_weights("me", False, 3)
    replica.answer = WeightClaim(epoch=0, owner="another")
    assert replica.claim_weights("me", False, 3).owner == "another"
    replica.answer = STAGED
    replica.stage_weights(7, **STAGE, timeout=3)
    replica.swap_weights(7, **SWAP, timeout=3)
    replica.init_weights("gloo", {}, 3)
    replica.give_up_weights(3)
    assert [arguments["epoch"] for name, _, arguments in replica.sent if name != "claim_weights"] == [4, 4, 4, 4]
    assert replica.sent[3][2]["digest"] == STAGED.digest


def test_all_commands_are_in_the_protocol_and_tried_above() -> None:
    public = {name for name, value in vars(Commands).items() if callable(value) and not name.startswith("_")}
    assert public == COMMANDS.keys()
    assert public <= vars(Replica).keys()
