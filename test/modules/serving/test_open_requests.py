"""The names of requests: one use at a time, and each call is asked to cut its own."""

from __future__ import annotations

import pytest

from torchrl_moe.modules.serving.open_requests import OpenRequests


def ignore(_: list[str]) -> None:
    """Cut nothing."""


def test_a_name_is_used_once_at_a_time() -> None:
    requests = OpenRequests()
    requests.add(["x", "y"], ignore)
    with pytest.raises(ValueError, match=r"request ids are in flight already: x, y\. Use an id once at a time"):
        requests.add(["y", "z", "x"], ignore)
    requests.add(["z"], ignore)  # the refused call took nothing
    requests.remove(["x"], ignore)
    requests.remove(["x"], ignore)
    requests.add(["x"], ignore)


def test_each_call_is_asked_once_for_all_of_its_own() -> None:
    requests, asked = OpenRequests(), []
    one, two = (lambda ids: asked.append((1, ids))), (lambda ids: asked.append((2, ids)))
    requests.add("ab", one)
    requests.add("cd", two)
    requests.cut(["a", "d", "unknown", "b"])
    assert asked == [(1, ["a", "b"]), (2, ["d"])]


def test_what_is_cut_may_remove_itself() -> None:
    requests = OpenRequests()

    def cut(ids: list[str]) -> None:
        requests.remove(ids, cut)

    requests.add("a", cut)
    requests.cut("a")
    requests.add("a", ignore)


def test_a_call_removes_no_name_of_another_call() -> None:
    requests = OpenRequests()
    asked: list[str] = []
    requests.add("a", asked.extend)
    requests.remove("a", ignore)
    requests.cut("a")
    assert asked == ["a"]
