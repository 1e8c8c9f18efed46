"""A second model that changes places with the first: on plain modules here, on vLLM's own in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.processes import toy_environment
from torchrl_moe import _compat
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.vllm.weights.shadow import ShadowModel, reason_against
from torchrl_moe.weight_update.store import memory
from torchrl_moe.weight_update.store.memory import MemoryReservation

CPU = torch.device("cpu")


def test_vllms_models_are_bitwise_what_a_start_would_have_made() -> None:
    """Both ways of loading; tied heads, packed and absorbed weights, correction biases; the same model many times."""
    cases = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "qwen3:tied", "qwen3_moe:tied", "deepseek_v3:bf16"]
    command = [sys.executable, "-m", "support.reload_check", *cases]
    done = subprocess.run(command, env=toy_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {case: [] for case in cases}


# -- on plain modules -------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Its weight is packed away into a handle, as vLLM's are on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("scale", torch.ones(1))


class Model(nn.Module):
    """A linear layer that has two places, and a head tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = self.same_gate = Linear()
        self.embed, self.head = nn.Module(), nn.Module()
        self.embed.weight = self.head.weight = nn.Parameter(torch.zeros(3))
        self.alias = SimpleNamespace(weight=self.embed.weight)  # as a router refers to its correction bias

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def load_beside(model: Any, config: Any, device: Any, tensors: Any) -> None:
    model.load_weights(tensors)
    pack(model)


def pack(model: Any) -> None:
    packed = model.gate.weight.data.clone()
    model.gate.cpu_linear = lambda: packed
    model.gate.weight = nn.Parameter(torch.empty(0))


def values(start: float) -> dict[str, Tensor]:
    return {"gate.weight": torch.full((2, 2), start), "embed.weight": torch.full((3,), start + 1)}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ShadowModel]]:
    """Return a serving model that holds 1 and 2, and its shadow."""
    monkeypatch.setattr(_compat, "load_beside", load_beside)

    def build(beside: Callable[[], nn.Module] = Model) -> tuple[Any, ShadowModel]:
        live: Any = Model()
        live.load_weights(values(1.0).items())
        pack(live)
        monkeypatch.setattr(_compat, "build_beside", lambda config, device: (beside(), config))
        return live, ShadowModel(live, SimpleNamespace(), CPU)

    return build


def held(model: Any) -> list[float]:
    """What the model computes with, and what is seen through each of its references."""
    places = (model.gate.cpu_linear(), model.embed.weight, model.head.weight, model.alias.weight)
    return [place.flatten()[0].item() for place in places]


def test_only_the_swap_changes_the_model_and_it_changes_all_of_it(make: Any) -> None:
    live, shadow = make()
    parameters = list(live.parameters())
    for start in (10.0, 20.0, 30.0):
        before = held(live)
        assert shadow.load(values(start).items()) == ""
        assert held(live) == before
        shadow.swap()
        assert held(live) == [start, start + 1, start + 1, start + 1]
        shadow.release()
    assert all(new is old for new, old in zip(live.parameters(), parameters, strict=True))
    assert live.gate is live.same_gate


def test_a_second_swap_undoes_the_first(make: Any) -> None:
    live, shadow = make()
    shadow.load(values(10.0).items())
    shadow.swap()
    shadow.swap()
    assert held(live) == [1.0, 2.0, 2.0, 2.0]


def test_the_shadow_holds_memory_only_while_a_version_waits(make: Any) -> None:
    live, shadow = make()

    def size() -> int:
        return sum(p.numel() for p in shadow.model.parameters())

    assert (shadow.nbytes, size()) == (4 * (4 + 3), 0)
    shadow.load(values(10.0).items())
    assert size() == 3  # and the packed four
    assert shadow.model.gate.cpu_linear().numel() == 4
    shadow.swap()
    shadow.release()
    assert size() == 0
    assert not hasattr(shadow.model.gate, "cpu_linear")
    assert held(live) == [10.0, 11.0, 11.0, 11.0]


def test_a_load_that_broke_off_leaves_the_model_and_the_next_is_good(make: Any) -> None:
    live, shadow = make()
    with pytest.raises(RuntimeError, match="size of tensor"):
        shadow.load({"gate.weight": torch.ones(5)}.items())
    assert sum(p.numel() for p in shadow.model.parameters()) == 0
    shadow.swap()  # nothing is there to swap in
    assert held(live) == [1.0, 2.0, 2.0, 2.0]
    assert shadow.load(values(10.0).items()) == ""
    shadow.swap()
    assert held(live) == [10.0, 11.0, 11.0, 11.0]


class Untied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(3))


class Half(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed.weight = self.head.weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))


class Biased(Model):
    def __init__(self) -> None:
        super().__init__()
        self.gate.bias = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Untied, "head.weight is tied in the serving model and was loaded untied"),
        (Half, r"embed.weight is \[3\] torch.float32, but was loaded as \[3\] torch.float16"),
        (Biased, r"gate has \['scale', 'weight'\] but was loaded as \['bias', 'scale', 'weight'\]"),
    ],
)
def test_models_of_two_forms_do_not_change_places(make: Any, kind: type[Model], words: str) -> None:
    live, shadow = make(kind)
    said = shadow.load(values(10.0).items())
    assert re.search(words, said), said
    shadow.swap()
    assert held(live) == [1.0, 2.0, 2.0, 2.0]


def test_a_layer_that_was_not_packed_is_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live, shadow = make()
    monkeypatch.setattr(_compat, "load_beside", lambda model, *_: setattr(model.gate, "weight", live.gate.weight))
    assert shadow.load(values(10.0).items()) == "a layer is packed in the serving model and was loaded unpacked"
    shadow.swap()
    assert held(live) == [1.0, 2.0, 2.0, 2.0]


def test_tensors_that_came_out_tied_are_not_swapped_twice(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live, shadow = make()
    live.gate.weight, live.embed.weight = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    live.head.weight = live.gate.weight
    monkeypatch.setattr(_compat, "load_beside", lambda model, *_: setattr(model.gate, "weight", model.embed.weight))
    assert shadow.load(values(10.0).items()) == "tensors that differ in the serving model were loaded tied"


def test_other_modules_are_refused_at_once(make: Any) -> None:
    class More(Model):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Module()

    with pytest.raises(WeightSyncError, match="the second model differs in extra"):
        make(More)


def test_memory_is_asked_for_before_it_is_taken(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shadow = make()
    shadow._reservation = MemoryReservation(tmp_path)
    monkeypatch.setattr(memory, "available_memory", lambda: 31)
    assert shadow.reserve_memory() == ""  # 28 bytes and a tenth
    assert MemoryReservation(tmp_path).reserve(2)
    shadow.end_reservation()
    monkeypatch.setattr(memory, "available_memory", lambda: 29)
    assert shadow.reserve_memory().startswith("0.0 GB are needed beside the model")


# -- which models can have one ----------------------------------------------------------------------------------------


def engine_config(**changes: Any) -> Any:
    config = {
        "parallel_config": SimpleNamespace(world_size_across_dp=1),
        "quant_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "lora_config": None,
        "speculative_config": None,
        "model_config": SimpleNamespace(enforce_eager=True),
    }
    return SimpleNamespace(**{**config, **changes})


def test_a_plain_model_on_cpu_can_have_a_shadow() -> None:
    assert reason_against(nn.Linear(2, 2), engine_config(), CPU) == ""


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, "cuda", "a shadow was proved on cpu only, not on cuda"),
        ({"parallel_config": SimpleNamespace(world_size_across_dp=2)}, "cpu", "on one worker only, the engine has 2"),
        ({"quant_config": object()}, "cpu", "the model is quantised"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_e5m2")}, "cpu", "the KV cache is quantised"),
        ({"lora_config": object()}, "cpu", "the engine has LoRA adapters"),
        ({"speculative_config": object()}, "cpu", "the engine has a draft model"),
        ({"model_config": SimpleNamespace(enforce_eager=False)}, "cpu", "the model may be compiled"),
    ],
)
def test_what_was_not_proved_is_refused_with_a_reason(changes: Any, device: str, words: str) -> None:
    assert words in reason_against(nn.Linear(2, 2), engine_config(**changes), torch.device(device))


@pytest.mark.parametrize("kept", [torch.ones(2), [torch.ones(2)], {"x": torch.ones(2)}])
def test_a_module_that_keeps_a_weight_to_itself_is_found(kept: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].__dict__["alias"] = [model[0].weight]
    assert reason_against(model, engine_config(), CPU) == ""
    model[0].__dict__["packed"] = kept
    assert reason_against(model, engine_config(), CPU) == "0 keeps a tensor of its own (packed)"


def test_an_attention_that_packs_weights_is_found() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

    model: Any = nn.Sequential(nn.Linear(2, 2))
    model[0].impl = object.__new__(CPUAttentionBackendImpl)
    assert reason_against(model, engine_config(), CPU) == ""
    model[0].impl = object.__new__(AMXMLAImpl)
    assert reason_against(model, engine_config(), CPU) == "0 packs weights of its own (AMXMLAImpl)"
