"""From arguments to requests: one name per prompt, deadlines, what vLLM has dropped."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_moe.modules.serving.requests import check_timeout, common_fields, make_request, one_each


def test_a_request_holds_text_or_ids() -> None:
    fields = common_fields({"n": 2}, "lora", None, {"regex": "a"}, 3)
    text = make_request("hi", request_id="x", **fields)
    assert (text.prompt, text.prompt_token_ids, text.request_id, text.priority) == ("hi", None, "x", 3)
    assert (text.sampling_params, text.lora_request, text.guided_options) == ({"n": 2}, "lora", {"regex": "a"})
    ids = make_request(np.array([1, 2], np.int32), request_id="x", **fields)
    assert ids.prompt is None
    assert ids.prompt_token_ids is not None
    assert ids.prompt_token_ids.tolist() == [1, 2]


def test_a_prompt_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_adapter_request must be None: vLLM has dropped prompt adapters"):
        common_fields(None, None, object(), None, 0)


def test_names_come_one_for_each_prompt() -> None:
    assert one_each(None, 3, "session_ids") is None
    assert one_each("s", 1, "session_ids") == ["s"]
    assert one_each(("s", "s"), 2, "session_ids") == ["s", "s"]
    with pytest.raises(ValueError, match="group_ids must have one entry per prompt: got 1 for 2 prompts"):
        one_each("s", 2, "group_ids")
    with pytest.raises(ValueError, match="request_ids must differ from each other"):
        one_each(["s", "s"], 2, "request_ids")


@pytest.mark.parametrize("seconds", [0, -1.5])
def test_a_deadline_is_in_the_future(seconds: float) -> None:
    assert check_timeout(None) is None
    assert check_timeout(0.5) == 0.5
    with pytest.raises(ValueError, match=f"timeout_seconds must be positive or None, got {seconds:g}"):
        check_timeout(seconds)
