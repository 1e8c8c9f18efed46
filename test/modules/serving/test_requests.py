"""From arguments to requests: one name per prompt, deadlines, what vLLM has dropped; and where each may go."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import lazy_stack

from torchrl_moe.data import RoutedExperts
from torchrl_moe.errors import RouteValueError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.serving.requests import (
    Placement,
    PromptBatch,
    check_timeout,
    common_fields,
    integers,
    make_request,
    placements,
    request_ids_each,
    rows_each,
)


def test_a_request_holds_text_or_ids() -> None:
    lora = {"lora_path": "folder"}
    fields = common_fields(1, None, {"n": 2}, lora, None, {"regex": "a"}, False, "live")
    text = make_request("hi", request_id="x", priority=3, **fields)
    assert (text.prompt, text.prompt_token_ids, text.request_id, text.priority) == ("hi", None, "x", 3)
    assert (text.sampling_params, text.lora_request, text.guided_options) == ({"n": 2}, lora, {"regex": "a"})
    assert (text.return_routed_experts, text.routed_experts, text.on_resume) == (False, None, "live")
    ids = make_request(np.array([1, 2], np.int32), request_id="x", **fields)
    assert ids.prompt is None
    assert ids.prompt_token_ids is not None
    assert ids.prompt_token_ids.tolist() == [1, 2]


def test_a_prompt_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_adapter_request must be None: vLLM has dropped prompt adapters"):
        common_fields(1, None, None, None, object(), None, True, None)


@pytest.mark.parametrize("word", ["none", "Live", True, ""])
def test_an_answer_continues_in_one_of_two_ways(word: Any) -> None:
    with pytest.raises(ValueError, match=rf"on_resume must be None or one of \('forced', 'live'\), got {word!r}"):
        common_fields(1, None, None, None, None, None, True, word)


def test_names_come_one_for_each_prompt() -> None:
    assert request_ids_each(None, 3) is None
    assert [where.session_id for where in placements(3)] == [None] * 3
    assert [where.session_id for where in placements(1, session_ids="s")] == ["s"]
    assert [where.session_id for where in placements(2, session_ids=("s", "s"))] == ["s", "s"]
    with pytest.raises(ValueError, match="group_ids must have one entry per prompt: got 1 for 2 prompts"):
        placements(2, group_ids="s")
    with pytest.raises(ValueError, match="request_ids must differ from each other"):
        request_ids_each(["s", "s"], 2)


@pytest.mark.parametrize(
    "values", [[3, "3", None], [np.int64(3), torch.tensor(3), None], ("3", 3, None)], ids=["ints", "arrays", "tuple"]
)
def test_the_number_of_a_group_is_its_name_as_text(values: Any) -> None:
    assert [where.group_id for where in placements(3, group_ids=values)] == ["3", "3", None]


@pytest.mark.parametrize("values", [torch.tensor([3, -4]), np.array([3, -4], np.int8), [3, -4], (3, np.int16(-4))])
def test_numbers_come_in_whatever_holds_them(values: Any) -> None:
    assert [where.group_id for where in placements(2, group_ids=values)] == ["3", "-4"]
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
        request_ids_each(["a", 3], 2)


@pytest.mark.parametrize("name", ["session_ids", "group_ids", "min_version", "request_context"])
def test_a_list_has_one_entry_per_prompt(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must have one entry per prompt: got 1 for 2 prompts"):
        placements(2, **{name: [None]})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1.5, math.nan, "5", True, []])
def test_a_deadline_is_in_the_future(seconds: Any) -> None:
    assert check_timeout(None) is None
    assert check_timeout(math.inf) is None
    assert check_timeout(0.5) == 0.5
    with pytest.raises(
        ValueError, match=f"timeout_seconds must be a number above 0, or None, got {re.escape(repr(seconds))}"
    ):
        check_timeout(seconds)


# -- routes to follow -------------------------------------------------------------------------------------------------

IDS = np.array([1, 2, 3], np.int32)
ONE, TWO = PromptBatch([IDS], single=True), PromptBatch([IDS, IDS], single=False)
ROWS = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
"""Two rows of a model of three layers."""


@pytest.mark.parametrize(
    "value",
    [
        ROWS,
        torch.from_numpy(ROWS),
        RoutedExperts(full=torch.tensor(ROWS)),
    ],
    ids=["array", "tensor", "RoutedExperts"],
)
def test_routes_of_one_prompt_come_in_whatever_holds_them(value: Any) -> None:
    (rows,) = rows_each(value, ONE)
    assert isinstance(rows, np.ndarray)
    assert (rows.dtype, rows.tolist()) == (np.int16, ROWS.tolist())


def test_lists_of_numbers_are_routes_too() -> None:
    (rows,) = rows_each(ROWS.tolist(), ONE)
    assert rows is not None
    assert rows.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    "values",
    [
        [ROWS, ROWS + 1],
        (torch.from_numpy(ROWS), RoutedExperts(full=torch.tensor(ROWS + 1))),
        np.stack([ROWS, ROWS + 1]),
        torch.from_numpy(np.stack([ROWS, ROWS + 1])),
        RoutedExperts(full=torch.from_numpy(np.stack([ROWS, ROWS + 1])), batch_size=[2]),
        lazy_stack([RoutedExperts(full=torch.tensor(ROWS)), RoutedExperts(full=torch.tensor(ROWS + 1))]),
    ],
    ids=["arrays", "mixed", "array", "tensor", "RoutedExperts", "lazy stack"],
)
def test_several_prompts_have_routes_each(values: Any) -> None:
    first, second = rows_each(values, TWO)
    assert first is not None and second is not None
    assert (first.tolist(), second.tolist()) == (ROWS.tolist(), (ROWS + 1).tolist())


def test_some_prompts_have_none_and_others_another_number_of_rows() -> None:
    assert rows_each(None, ONE) == [None]
    assert rows_each(None, TWO) == [None, None]
    assert rows_each([None, None], TWO) == [None, None]
    first, second = rows_each([None, ROWS[:1]], TWO)
    assert first is None and second is not None
    assert second.tolist() == ROWS[:1].tolist()
    (alone,) = rows_each([ROWS], PromptBatch([IDS], single=False))
    assert alone is not None
    assert alone.shape == (2, 3, 2)


@pytest.mark.parametrize("values", [[ROWS], [ROWS] * 3, ROWS[None], []])
def test_there_are_as_many_routes_as_prompts(values: Any) -> None:
    with pytest.raises(ValueError, match=rf"one entry per prompt: got {len(values)} for 2 prompts"):
        rows_each(values, TWO)


@pytest.mark.parametrize(
    "value",
    [
        *("experts", object(), np.array(["a"]), b"abc", 1.5, True),
        *(torch.zeros(2, 4, 2, dtype=torch.bfloat16), torch.zeros(2, 4, 2, dtype=torch.int8, device="meta")),
    ],
)
def test_what_is_no_array_of_integers_is_named(value: Any) -> None:
    with pytest.raises(RouteValueError, match=r"routed_experts\[0\] must be an array of integers"):
        rows_each(value, ONE)
    with pytest.raises(RouteValueError, match=r"routed_experts\[1\] must be an array of integers"):
        rows_each([None, value], TWO)


def test_routes_of_another_byte_order_are_read_and_masked_or_endless_ones_are_not() -> None:
    (read,) = rows_each(ROWS.astype(">i4"), ONE)
    assert read is not None
    assert np.array_equal(read, ROWS)
    assert read.dtype == np.int32
    with pytest.raises(RouteValueError, match=r"routed_experts\[0\] has masked entries: fill them"):
        rows_each(np.ma.masked_array(ROWS, mask=np.ones_like(ROWS, bool)), ONE)
    with pytest.raises(RouteValueError, match=r"routed_experts\[0\] has \d+ bytes, 2147483648 at most"):
        rows_each(np.broadcast_to(ROWS[:1], (2**40, *ROWS.shape[1:])), ONE)


@pytest.mark.parametrize("values", ["experts", 3, {"full": ROWS}, RoutedExperts(full=torch.tensor(ROWS))])
def test_the_routes_of_one_prompt_are_not_those_of_several(values: Any) -> None:
    with pytest.raises(TypeError, match="routed_experts must be a list with an entry per prompt, got"):
        rows_each(values, TWO)


def test_rows_may_come_with_what_is_resumed() -> None:
    """An answer that has no token yet begins again, and nobody else remembers what it was to follow."""
    had = Completion(
        request_id="r", prompt=None, prompt_token_ids=IDS.astype(np.int64), num_cached_tokens=0, outputs=[]
    )
    assert rows_each(None, PromptBatch([had], single=True)) == [None]
    (one,) = rows_each(ROWS, PromptBatch([had], single=True))
    assert one is not None
    assert (one == ROWS).all()
    first, second = rows_each([None, ROWS], PromptBatch([had, had], single=False))
    assert first is None
    assert second is not None
