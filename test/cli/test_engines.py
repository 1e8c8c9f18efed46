"""How commands start engines: defaults, and what the user gives goes before them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.cli import services as engines
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.services import engine_arguments, started
from torchrl_moe.modules import AsyncVLLM


def config(family: str = "qwen3_moe", positions: int = 512) -> Any:
    text = SimpleNamespace(max_position_embeddings=positions)
    return SimpleNamespace(model_type=family, get_text_config=lambda: text)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        calls.append((args[0], kwargs))
        return contextlib.nullcontext("an engine")

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", start)
    return calls


def test_values_are_json_or_text() -> None:
    assert engine_arguments(['a={"b": [1]}', "c=true", "d=x=y", "e="]) == {
        "a": {"b": [1]},
        "c": True,
        "d": "x=y",
        "e": "",
    }
    for bad in ("a", "=1", "a-b=1"):
        with pytest.raises(BadUse, match="KEY=VALUE"):
            engine_arguments([bad])


def test_an_engine_is_small_unless_told_otherwise(asked: Any) -> None:
    with started("m", config(), "vllm", "float32", ["max_model_len=64"]) as engine:
        assert engine == "an engine"
    ((folder, arguments),) = asked
    assert (folder, arguments.pop("engine")) == ("m", "vllm")
    assert arguments == {
        "dtype": "float32",
        "max_model_len": 64,
        "enforce_eager": True,
    }


def test_how_much_memory_it_takes_and_with_which_kernels_is_decided_where_all_engines_are_built(asked: Any) -> None:
    with started("m", config("deepseek_v3", 1 << 20), "vllm", "bfloat16", []):
        pass
    arguments = asked[0][1]
    assert arguments["max_model_len"] == 2048
    assert "kv_cache_memory_bytes" not in arguments and "compilation_config" not in arguments


def test_without_vllm_another_engine_is_named(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with (
        pytest.raises(BadUse, match=r"torchrl_moe\[vllm\].*--engine transformers"),
        started("m", config(), "vllm", "x", []),
    ):
        pass
    with started("m", config(), "transformers", "float32", []):
        pass
    assert asked == [("m", {"engine": "transformers", "dtype": "float32", "max_model_len": 512})]
