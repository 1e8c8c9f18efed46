"""Arguments of the wrapper that are split, started or refused; ``test_vllm_wrapper.py`` passes them."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.modules.policies.wrapper_arguments import (
    engine_of,
    keeps_routes,
    refuse,
    split_arguments,
    tokenizer_of,
)
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

PLAIN: dict[str, Any] = {
    "generate": True,
    "input_mode": "text",
    "pad_model_input": None,
    "batching": None,
    "min_batch_size": None,
    "max_batch_size": None,
    "layout": None,
    "num_samples": None,
}


def test_what_is_the_engines_is_taken_out_of_the_sampling_parameters() -> None:
    engine, sampling = split_arguments({"actor_index": 1, "temperature": 0.5}, actor_index=None, lora_request=None)
    assert engine == {"actor_index": 1, "lora_request": None}
    assert sampling == {"temperature": 0.5}
    engine, sampling = split_arguments({"on_resume": "live"}, actor_index=1)  # no argument of the wrapper's own
    assert (engine, sampling) == ({"actor_index": 1, "on_resume": "live"}, {})


def test_the_same_argument_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="actor_index: given twice"):
        split_arguments({"actor_index": 1}, actor_index=0, lora_request=None)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"generate": False}, "TransformersWrapper scores"),
        ({"input_mode": "image"}, "must be one of"),
        ({"pad_model_input": True}, "without padding"),
        ({"max_batch_size": 4}, "batching is the engine's"),
        ({"layout": 3}, "layout must be None"),
        ({"num_samples": 0}, "at least 1, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(bad: dict[str, Any], words: str) -> None:
    refuse(PLAIN)
    with pytest.raises(ValueError, match=words):
        refuse({**PLAIN, **bad})


def test_an_engine_is_itself_and_anything_else_is_refused() -> None:
    with FakeAsyncVLLM() as engine:
        assert engine_of(engine) is engine
    with pytest.raises(TypeError, match="model must be an AsyncVLLM, a folder or a hub name, got int"):
        engine_of(3)


def test_a_tokenizer_is_the_engines_unless_one_is_given() -> None:
    mine = ByteTokenizer()
    with FakeAsyncVLLM() as engine:
        assert tokenizer_of(mine, engine) is mine
        assert tokenizer_of(None, engine) is engine.get_tokenizer()


def test_routes_are_kept_if_there_are_any() -> None:
    with FakeAsyncVLLM() as engine, FakeAsyncVLLM(layout=None) as dense:
        assert keeps_routes(None, engine)
        assert not keeps_routes(False, engine)
        assert not keeps_routes(None, dense)
        with pytest.raises(ValueError, match="captures no routes"):
            keeps_routes(True, dense)
