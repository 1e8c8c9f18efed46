"""Whatever holds the weights, checkpoint names and the engine's dtypes come of it; one rank speaks for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.modules.policies.unstack import ModelWeights, checkpoint_tensors, model_metadata
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update import get_model_metadata
from torchrl_moe.weight_update.source import (
    agreed,
    cast_kinds,
    dtypes_of_first,
    from_first,
    is_first,
    source_of,
    trained_model,
)

F32, F16, BF16, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int64
FP8 = torch.float8_e4m3fn


def same(source: Any, wanted: dict[str, Tensor]) -> bool:
    found = dict(source.tensors())
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()}
    return (
        found.keys() == wanted.keys()
        and kinds == source.kinds
        and all(map(torch.equal, found.values(), wanted.values()))
    )


def test_the_registered_model_is_sent_or_what_is_given_under_its_names_or_the_checkpoints() -> None:
    model, other = make_tiny_moe("deepseek_v3"), make_tiny_moe("deepseek_v3", seed=1)
    registered, expected, wanted = ModelWeights(model), model_metadata(model), checkpoint_tensors(other)
    assert same(source_of(None, registered, None), checkpoint_tensors(model))
    assert same(source_of(other, registered, None), wanted)
    for given in (wanted, list(wanted.items()), iter(wanted.items())):
        assert same(source_of(given, registered, expected), wanted)
    state = other.state_dict()
    assert set(state) != set(expected)  # experts are stacked
    for given in (state, TensorDict.from_module(other), TensorDict(dict(state)).unflatten_keys(".")):
        found = dict(source_of(given, registered, expected).tensors())
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ManifestMismatch, match="the weights name a tensor twice"):
        source_of([("a", torch.ones(1)), ("a", torch.ones(1))], None, None)


class Sharded(torch.Tensor):
    """Stands for one of which other ranks hold parts; all of them must gather equally often, and alike."""

    gathered: ClassVar[list[torch.dtype]] = []

    def full_tensor(self) -> Tensor:
        Sharded.gathered.append(self.dtype)
        return self.as_subclass(torch.Tensor)


def test_sharded_tensors_are_gathered_alike_whether_or_not_the_engine_is_known() -> None:
    """A dense model's own names are the checkpoint's, and a tied one's may be both the engine's, whom rank 0 knows."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=True, **small))
    given = {name: tensor.as_subclass(Sharded) for name, tensor in model.state_dict().items()}
    counts = []
    for expected in (model_metadata(model) | {"lm_head.weight": (F32, torch.Size([16, 8]))}, None):
        source = source_of(given, ModelWeights(model, expected or ()), expected)
        assert source.is_sharded
        Sharded.gathered.clear()
        found = dict(source.tensors())
        counts.append(len(Sharded.gathered))
        assert found.keys() == (expected or model_metadata(model)).keys()
    assert counts == [len(list(model.parameters()))] * 2


@pytest.mark.parametrize("has_model", [False, True])
def test_sharded_tensors_are_cast_before_they_are_gathered(has_model: bool) -> None:
    """To what all that is cut from them is written as, if that is one dtype, and a narrower one."""
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    given = {name: tensor.as_subclass(Sharded) for name, tensor in model.state_dict().items()}
    if not has_model:
        given = {name: tensor.as_subclass(Sharded) for name, tensor in checkpoint_tensors(model).items()}
    source = source_of(given, ModelWeights(model) if has_model else None, None)
    written = {name: (BF16, shape) for name, (_, shape) in source.kinds.items()}
    other = next(name for name in written if "experts.3.gate" in name)
    written["model.norm.weight"] = torch.float64, written["model.norm.weight"][1]
    written[other] = F16, written[other][1]
    dtypes = source.gathered_in(written)
    assert len(dtypes) == len(given)
    Sharded.gathered.clear()
    found = dict(source.tensors(dtypes))
    assert len(Sharded.gathered) == len(given)
    wanted = checkpoint_tensors(model)
    stacked = {name for name in wanted if has_model and name.rsplit(".", 2)[1] in ("gate_proj", "up_proj")}
    for name, tensor in found.items():
        as_it_is = name == "model.norm.weight" or name in stacked
        assert tensor.dtype == (F32 if as_it_is else written[name][0]), name
        assert torch.equal(tensor.to(written[name][0]), wanted[name].to(written[name][0]))


@pytest.mark.parametrize(
    ("own", "dtype", "checkpoint", "engine", "sent"),
    [
        (F32, "engine", BF16, BF16, BF16),
        (F32, "engine", F32, BF16, F32),  # the engine may keep this one in its checkpoint's dtype
        (F32, "engine", BF16, F32, F32),
        (F32, "engine", F16, BF16, F32),
        (BF16, "engine", F32, F32, BF16),  # nothing is gained by sending more
        (BF16, "engine", F16, F16, BF16),  # nor by another one of the same size
        (F32, "engine", BF16, None, F32),
        (F32, "engine", FP8, BF16, BF16),
        (F32, "trainer", BF16, BF16, F32),
        (F32, BF16, F32, F32, BF16),
        (BF16, F32, BF16, BF16, F32),
        (I64, BF16, I64, BF16, I64),
        (I64, "engine", I64, BF16, I64),
    ],
)
def test_none_is_sent_wider_than_the_engine_has_it(
    own: Any, dtype: Any, checkpoint: Any, engine: Any, sent: Any
) -> None:
    shape = torch.Size([2])
    assert cast_kinds({"a": (own, shape)}, dtype, {"a": (checkpoint, shape)}, engine) == {"a": (sent, shape)}
    for unknown in (None, {}):  # without an engine they are sent as they are
        assert cast_kinds({"a": (own, shape)}, "engine", unknown, engine) == {"a": (own, shape)}


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_a_wrapper_is_looked_through_and_a_model_is_not() -> None:
    model = make_tiny_moe()
    assert trained_model(Wrapper(model)) is model
    assert trained_model(model) is model  # though it has a ``model`` too
    assert get_model_metadata(Wrapper(model)) == get_model_metadata(model)
    assert trained_model(nn.DataParallel(Wrapper(model))) is model
    with pytest.raises(TypeError, match=r"one of transformers.*, got a Sequential around one: pass what is inside$"):
        get_model_metadata(nn.Sequential(model))
    plain = nn.Linear(1, 1)
    assert trained_model(Wrapper(plain)).model is plain  # no transformers model inside


def test_a_process_by_itself_and_a_group_of_one_have_their_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_first() and from_first(7) == agreed(lambda: 7) == 7
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert is_first() and from_first(1 << 40) == agreed(lambda: 1 << 40) == 1 << 40
        dtypes = [torch.bfloat16, None, torch.float32, torch.float8_e4m3fn]
        assert dtypes_of_first(dtypes) == dtypes
        assert dtypes_of_first([torch.int32]) == [None]  # no floating one: as it is
        with pytest.raises(ZeroDivisionError):  # its own error, unchanged
            agreed(lambda: 1 // 0)
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda: 1)
            assert not is_first()
    finally:
        dist.destroy_process_group()
