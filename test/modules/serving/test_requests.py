"""From arguments to requests: one name per prompt, deadlines, what vLLM has dropped; and where each may go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.modules.serving.requests import (
    Placement,
    check_timeout,
    common_fields,
    integers,
    make_request,
    one_each,
    placements,
)


def test_a_request_holds_text_or_ids() -> None:
    fields = common_fields({"n": 2}, "lora", None, {"regex": "a"}, False)
    text = make_request("hi", request_id="x", priority=3, **fields)
    assert (text.prompt, text.prompt_token_ids, text.request_id, text.priority) == ("hi", None, "x", 3)
    assert (text.sampling_params, text.lora_request, text.guided_options) == ({"n": 2}, "lora", {"regex": "a"})
    assert text.return_routed_experts is False
    ids = make_request(np.array([1, 2], np.int32), request_id="x", **fields)
    assert ids.prompt is None
    assert ids.prompt_token_ids is not None
    assert ids.prompt_token_ids.tolist() == [1, 2]


def test_a_prompt_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_adapter_request must be None: vLLM has dropped prompt adapters"):
        common_fields(None, None, object(), None, True)


def test_names_come_one_for_each_prompt() -> None:
    assert one_each(None, 3, "session_ids") is None
    assert one_each("s", 1, "session_ids") == ["s"]
    assert one_each(("s", "s"), 2, "session_ids") == ["s", "s"]
    with pytest.raises(ValueError, match="group_ids must have one entry per prompt: got 1 for 2 prompts"):
        one_each("s", 2, "group_ids")
    with pytest.raises(ValueError, match="request_ids must differ from each other"):
        one_each(["s", "s"], 2, "request_ids")


@pytest.mark.parametrize(
    "values", [[3, "3", None], [np.int64(3), torch.tensor(3), None], ("3", 3, None)], ids=["ints", "arrays", "tuple"]
)
def test_the_number_of_a_group_is_its_name_as_text(values: Any) -> None:
    assert one_each(values, 3, "group_ids") == ["3", "3", None]


@pytest.mark.parametrize("values", [torch.tensor([3, -4]), np.array([3, -4], np.int8), [3, -4], (3, np.int16(-4))])
def test_numbers_come_in_whatever_holds_them(values: Any) -> None:
    assert one_each(values, 2, "group_ids") == ["3", "-4"]
    assert integers(values, 2, "priority") == [3, -4]
    assert [where.min_version for where in placements(2, min_version=values)] == [3, -4]


@pytest.mark.parametrize("value", [5, np.int64(5), torch.tensor(5)])
def test_one_value_is_for_all_prompts(value: Any) -> None:
    assert integers(value, 3, "priority") == [5, 5, 5]
    assert (
        placements(2, min_version=value, request_context={"k": 1}, actor_index=1)
        == [Placement(min_version=5, request_context={"k": 1}, actor_index=1)] * 2
    )


def test_each_request_has_a_placement_of_its_own() -> None:
    assert placements(0) == []
    assert placements(2) == [Placement(), Placement()]
    assert placements(
        2,
        session_ids=["s", None],
        group_ids=[None, 7],
        min_version=[None, 3],
        request_context=[{"k": 1}, None],
    ) == [Placement(session_id="s", request_context={"k": 1}), Placement(group_id="7", min_version=3)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"session_ids": [1.5, "t"]}, r"session_ids\[0\] must be text, an int or None, got 1.5"),
        ({"group_ids": ["g", True]}, r"group_ids\[1\] must be text, an int or None, got True"),
        ({"group_ids": torch.tensor([[1], [2]])}, r"group_ids\[0\] must be text, an int or None, got \[1\]"),
        ({"min_version": ["1", 2]}, r"min_version\[0\] must be an int, got '1'"),
        ({"min_version": "1"}, "min_version must be an int, got '1'"),
        ({"request_context": [{}, "k"]}, r"request_context\[1\] must be a mapping or None, got 'k'"),
        ({"request_context": 3}, "request_context must be a mapping or None, got 3"),
    ],
)
def test_an_entry_of_another_type_is_named(arguments: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        placements(2, **arguments)


@pytest.mark.parametrize("value", [None, 1.0, torch.tensor(1.0), True, [0, None]])
def test_a_priority_is_an_int(value: Any) -> None:
    with pytest.raises(TypeError, match=r"priority.* must be an int, got"):
        integers(value, 2, "priority")


def test_a_request_id_is_text() -> None:
    with pytest.raises(TypeError, match=r"request_ids\[1\] must be text, got 3"):
        one_each(["a", 3], 2, "request_ids")


@pytest.mark.parametrize("name", ["session_ids", "group_ids", "min_version", "request_context"])
def test_a_list_has_one_entry_per_prompt(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must have one entry per prompt: got 1 for 2 prompts"):
        placements(2, **{name: [None]})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1.5])
def test_a_deadline_is_in_the_future(seconds: float) -> None:
    assert check_timeout(None) is None
    assert check_timeout(0.5) == 0.5
    with pytest.raises(ValueError, match=f"timeout_seconds must be positive or None, got {seconds:g}"):
        check_timeout(seconds)
