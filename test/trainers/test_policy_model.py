"""The model that is trained: where it comes from, what of it is trained, and the folder that it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch, TempPathFactory
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, Phi3Config

from support.training import fake_model
from torchrl_moe._compat_transformers import lowered
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig, PlacementConfig
from torchrl_moe.trainers.policy_model import PolicyModel, new_start, starting_model
from torchrl_moe.trainers.ranks import Placement, Ranks

IDS = torch.tensor([[72, 105, 33, 10, 65, 66]])


def tiny(layers: int = 2, **config: Any) -> Any:
    return make_tiny_moe("qwen3_moe", num_hidden_layers=layers, **config)


def tiny_and_tokenizer(layers: int = 2) -> tuple[Any, Any]:
    return tiny(layers, seed=3), ByteTokenizer()


def only_a_model() -> Any:
    return tiny()


def two_of_another_kind() -> tuple[str, int]:
    return "model", 1


def without_words() -> Any:
    raise RuntimeError


def lora(target: str = "attention", **changes: Any) -> LoRAConfig:
    return LoRAConfig(rank=2, target=target, **changes)


def loaded(model: Any = None, tokenizer: Any = None, **config: Any) -> PolicyModel:
    return PolicyModel.load(model, tokenizer, ModelConfig(**config))


def given(config: ModelConfig | None = None, **hf_config: Any) -> PolicyModel:
    return PolicyModel.load(tiny(**hf_config), ByteTokenizer(), config or ModelConfig())


def disturb(policy_model: PolicyModel) -> None:
    """Give every trained weight another value: an adapter begins with 0."""
    generator = torch.Generator().manual_seed(1)
    for weight in policy_model.trained.values():
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(IDS, use_cache=False).logits
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)


# -- where it comes from ----------------------------------------------------------------------------------------------
def test_of_a_folder(folder: Path) -> None:
    for found in (loaded(source=str(folder)), loaded(folder), loaded(str(folder), source="unused")):
        assert found.source == str(folder) and len(found.tokenizer) == 259
        torch.testing.assert_close(logits(found.model), logits(tiny()), atol=1e-5, rtol=0)


def test_that_is_given_or_made_by_a_function() -> None:
    model, tokenizer = tiny(), ByteTokenizer()
    found = loaded(model, tokenizer, source="unused")
    assert found.model is model
    assert (found.tokenizer, found.source, found.dtype) == (tokenizer, None, torch.float32)
    assert found.trained.keys() == dict(model.named_parameters()).keys()
    assert not model.training  # no dropout: the engine has none
    made = loaded(source=f"{__name__}:tiny_and_tokenizer", arguments={"layers": 3})
    assert made.source is None and made.model.config.num_hidden_layers == 3  # an engine cannot start from it
    assert loaded(tokenizer=tokenizer, source=f"{__name__}:tiny_and_tokenizer").tokenizer is tokenizer


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "model.source=None: name a folder"),
        (f"{__name__}:no_such_function", "there is no"),
        (f"{__name__}:without_words", "RuntimeError"),
        (f"{__name__}:only_a_model", "must return a model and its tokenizer, got Qwen3MoeForCausalLM"),
        (f"{__name__}:two_of_another_kind", "must return a model and its tokenizer, got str, int"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(source: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(source=source)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"^model.source={tmp_path}: '{tmp_path}' has no weights"):
        loaded(source=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [("num_hidden_layers", r"lack \d+ tensor\(s\), such as model.layers.2"), ("hidden_size", "other shapes")],
)
def test_weights_that_are_not_all_there_are_not_made_up(tmp_path: Path, name: str, message: str) -> None:
    model, tokenizer = tiny_and_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, name: stored[name] * 2}))
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)
    with pytest.raises(ValueError, match=message):
        TransformersWrapper(str(tmp_path), tokenizer=tokenizer)


# -- what is trained --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "layers", "dtype"),
    [
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}, "float32"),
        ("experts", {"experts"}, "bfloat16"),
        ("all", {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}, "bfloat16"),
    ],
)
def test_an_adapter_is_all_that_is_trained(target: str, layers: set[str], dtype: str) -> None:
    found = given(ModelConfig(lora=lora(target), dtype=dtype))
    assert all("lora_" in name for name in found.trained)
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    assert {part for name in found.trained for part in name.split(".")} & known == layers
    frozen = {weight.dtype for weight in found.model.parameters() if not weight.requires_grad}
    assert {weight.dtype for weight in found.trained.values()} == {torch.float32}
    assert frozen == {found.dtype} == {getattr(torch, dtype)}


@pytest.mark.parametrize("is_saved", [True, False])
def test_beside_an_adapter_what_transformers_keeps_in_float32_is_not_rounded(is_saved: bool, tmp_path: Path) -> None:
    """Correction biases always; from 5.24 on the routers too."""
    model: Any = make_tiny_moe("deepseek_v3", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = loaded(tmp_path if is_saved else model, ByteTokenizer(), lora=lora(), dtype="bfloat16")
    state = found.model.base_model.model.state_dict()
    tensors = {name.replace(".base_layer", ""): tensor for name, tensor in state.items()}
    for name, tensor in wanted.state_dict().items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_trained_whole_is_float32(dtype: str) -> None:
    found = loaded(tiny(dtype=torch.bfloat16), ByteTokenizer(), dtype=dtype)
    assert {weight.dtype for weight in found.trained.values()} == {torch.float32}
    with found.precision():
        assert torch.is_autocast_enabled("cpu") == (dtype == "bfloat16")


@pytest.mark.parametrize(("router_dtype", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
@pytest.mark.parametrize("adapter", [LoRAConfig(), lora()])
def test_routers_compute_and_are_saved_in_float32_if_asked_to(
    tmp_path: Path, router_dtype: str, dtype: Any, adapter: Any
) -> None:
    found = given(ModelConfig(dtype="bfloat16", router_dtype=router_dtype, lora=adapter), dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    gate = next(module for name, module in found.model.named_modules() if name.endswith("layers.1.mlp.gate"))
    gate.register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    with torch.no_grad(), found.precision():
        found.model(IDS)
    assert seen == [dtype]
    disturb(found)
    saved = load_file(found.save(tmp_path / "model") / "model.safetensors")
    written = saved["model.layers.1.mlp.gate.weight"]
    assert written.dtype == dtype and torch.equal(written, gate.weight.to(dtype))
    assert saved["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("alpha", [0.5, 32.0])
def test_an_adapter_is_scaled_by_alpha_over_rank_and_there_is_no_second_one(alpha: float) -> None:
    first = given(ModelConfig(lora=lora(alpha=alpha)))
    scales = {module.scaling["default"] for module in first.model.modules() if hasattr(module, "lora_A")}
    assert scales == {alpha / 2}
    with pytest.raises(ConfigError, match="has an adapter already"):
        loaded(first.model, first.tokenizer, lora=lora())
    assert all("lora_" in name for name in loaded(first.model, first.tokenizer).trained)


SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 259}


def test_a_model_without_the_layers_that_are_asked_for_is_refused() -> None:
    dense = make_tiny_moe("qwen3", num_hidden_layers=1)
    odd = AutoModelForCausalLM.from_config(GPTNeoXConfig(num_attention_heads=2, **SMALL))
    in_float32 = {"dtype": "bfloat16", "router_dtype": "float32"}
    for model, config, message in (
        (dense, in_float32, r"^model\.router_dtype=float32: .* has no experts by its config"),
        (dense, {"lora": lora("experts")}, r"model\.lora\.target=experts: Qwen3ForCausalLM has no such layers"),
        (dense, {"lora": lora("all")}, r"model\.lora\.target=all: Qwen3ForCausalLM has no such layers"),
        (odd, {"lora": lora()}, "has no such layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded(model, ByteTokenizer(), **config)
    stacked = AutoModelForCausalLM.from_config(Phi3Config(num_attention_heads=2, pad_token_id=0, **SMALL))
    names = loaded(stacked, ByteTokenizer(), lora=lora()).trained  # its qkv_proj is no v_proj
    assert {name.split(".")[-4] for name in names} == {"qkv_proj", "o_proj"}


# -- the folder that it leaves ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "target", ["", "all", *(pytest.param(one, marks=pytest.mark.parity) for one in ("attention", "experts"))]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_saved_model_computes_the_same(tmp_path: Path, target: str, checkpointing: bool) -> None:
    config = ModelConfig(lora=lora(target) if target else LoRAConfig(), activation_checkpointing=checkpointing)
    policy_model = given(config)
    before = logits(policy_model.model)
    disturb(policy_model)
    trained = logits(policy_model.model)
    assert (trained - before).abs().max() > 1e-2
    path = policy_model.save(tmp_path / "deep" / "model")
    again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.testing.assert_close(logits(again), trained, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(policy_model.model), trained, atol=0, rtol=0)  # and it is left as it was
    assert AutoTokenizer.from_pretrained(path)("1+1=")["input_ids"] == ByteTokenizer()("1+1=")["input_ids"]
    assert again.generation_config.eos_token_id == policy_model.model.generation_config.eos_token_id is not None
    config_file = json.loads((path / "config.json").read_text())
    assert config_file["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config_file["use_cache"] is True  # how it was trained is no business of who generates with it
    assert [item.name for item in path.parent.iterdir()] == ["model"]


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("part", ["model", "tokenizer", "removal"])
def test_a_save_that_is_interrupted_leaves_a_whole_folder(tmp_path: Path, monkeypatch: MonkeyPatch, part: str) -> None:

    policy_model = given()
    path = policy_model.save(tmp_path / "model")
    older = {file.name: file.read_bytes() for file in path.iterdir()}
    disturb(policy_model)
    with monkeypatch.context() as patch:
        if part == "removal":
            patch.setattr(shutil, "rmtree", lambda path, **_: path.name.endswith(".draft") or interrupted())
        else:
            patch.setattr(type(getattr(policy_model, part)), "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            policy_model.save(path)
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    assert found.keys() == older.keys() and (found == older or part == "removal")
    policy_model.save(path)
    assert (path / "model.safetensors").read_bytes() != older["model.safetensors"]
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years of work")
    with pytest.raises(FileExistsError, match="holds something other than a model"):
        given().save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    assert (given().save(tmp_path / "empty") / "config.json").exists()


def test_what_is_beside_an_older_model_stays(tmp_path: Path) -> None:
    folder = given().save(tmp_path / "model")
    (folder / ".git").mkdir()
    for name in (".git/HEAD", "README.md", "modeling_own.py", "model-00001-of-00002.safetensors", "merges.txt"):
        (folder / name).write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    given().save(tmp_path / "link")
    assert (folder / ".git" / "HEAD").read_text() == (folder / "README.md").read_text() == "mine"
    assert (folder / "modeling_own.py").exists() and (tmp_path / "link").is_symlink()
    assert not [name for name in ("model-00001-of-00002.safetensors", "merges.txt") if (folder / name).exists()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]


# -- what users bring -------------------------------------------------------------------------------------------------
def kinds_of(folder: Path) -> dict[str, torch.dtype]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor.dtype for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "source"),
    [("model", torch.bfloat16), ("folder", torch.bfloat16), ("folder", torch.float32), ("adapter", torch.bfloat16)],
)
def test_a_model_is_saved_in_the_dtype_of_its_source(tmp_path: Path, kind: str, source: torch.dtype) -> None:
    model = tiny().to(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "folder":
        model.save_pretrained(tmp_path / "source")
    config = ModelConfig(lora=lora() if kind == "adapter" else LoRAConfig())
    found = PolicyModel.load(tmp_path / "source" if kind == "folder" else model, ByteTokenizer(), config)
    assert {weight.dtype for weight in found.trained.values()} == {torch.float32}
    saved = found.save(tmp_path / "saved")
    assert set(kinds_of(saved).values()) == {source}
    again = AutoModelForCausalLM.from_pretrained(saved)  # by its config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in before.items())
    assert {tensor.dtype for tensor in again.state_dict().values()} == {source}
    for dtype in ("float32", "bfloat16", "float16"):
        assert set(kinds_of(found.save(tmp_path / "other", dtype)).values()) == {getattr(torch, dtype)}


def test_what_transformers_keeps_in_float32_is_saved_so(tmp_path: Path) -> None:
    model = lowered(make_tiny_moe("deepseek_v3", num_hidden_layers=2), torch.bfloat16)
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}  # 5.24: the router, too
    assert "e_score_correction_bias" in kept
    saved = PolicyModel.load(model, ByteTokenizer(), ModelConfig()).save(tmp_path / "saved")
    for name, dtype in kinds_of(saved).items():
        assert dtype == (torch.float32 if any(part in name for part in kept) else torch.bfloat16), name


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_at_once(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.add_tokens(["<extra>"])
    message = (
        r"the tokenizer has the token '<extra>' with id 259, and the model has rows for 0 to 258: call "
        r"model\.resize_token_embeddings\(260\)"
    )
    for model in (tiny(), folder):
        with pytest.raises(ConfigError, match=message):
            loaded(model, tokenizer)
    with pytest.raises(ValueError, match=message):
        TransformersWrapper(tiny(), tokenizer=tokenizer)
    grown = tiny()
    grown.resize_token_embeddings(260)
    assert loaded(grown, tokenizer).tokenizer is tokenizer


MADE = f"{__name__}:made"


def made(value: float = 1.0) -> tuple[Any, Any]:
    model = fake_model()
    torch.nn.init.constant_(model.lm_head.weight, value)
    return model, ByteTokenizer()


def config_of(folder: Path, source: str | None = MADE, **arguments: Any) -> GRPOConfig:
    return GRPOConfig(out=str(folder), model=ModelConfig(source=source, arguments=arguments))


def head(policy_model: PolicyModel) -> float:
    return float(policy_model.model.lm_head.weight.detach()[0, 0])


class Two(Ranks):
    """The first of two ranks, the second of which is not asked."""

    size = 2


class Second(Ranks):
    """A rank that does what the first one says."""

    rank, size = 1, 2

    def __init__(self, said: Any) -> None:
        self.said = said

    def from_first(self, value: Any, phase: str) -> Any:
        assert phase == "making the model"
        return self.said


@pytest.fixture
def loads(monkeypatch: MonkeyPatch) -> list[Any]:
    """What several ranks would load."""
    calls: list[Any] = []
    load = PolicyModel.load

    def note(model: Any, tokenizer: Any, config: ModelConfig, placement: Placement | None = None) -> PolicyModel:
        if placement is None:
            return load(model, tokenizer, config)
        calls.append((model, config.lora.rank))
        return load(model, tokenizer, ModelConfig())

    monkeypatch.setattr(PolicyModel, "load", note)
    return calls


TWO = Placement(Two(), PlacementConfig())


def test_a_single_process_takes_what_it_gets(tmp_path: Path) -> None:
    model, tokenizer = made(3.0)
    given = starting_model(model, tokenizer, config_of(tmp_path, None), Placement())
    assert given.model is model and (given.source, given.start) == (None, None)
    assert head(starting_model(None, None, config_of(tmp_path, value=5.0), Placement())) == 5.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("placement", [Placement(), TWO], ids=["one rank", "two"])
def test_a_run_that_continues_takes_the_newest_start(tmp_path: Path, loads: list[Any], placement: Placement) -> None:
    config = config_of(tmp_path, value=5.0)
    for value in (2.0, 4.0):
        starting_model(*made(value), config, Placement()).save(new_start(tmp_path))
    assert head(starting_model(None, None, config, Placement())) == 5.0
    config.resume = True
    again = starting_model(None, None, config, placement)
    assert head(again) == 4.0 and again.start is None


def test_several_ranks_load_a_folder_or_what_rank_0_wrote(tmp_path: Path, folder: Path, loads: list[Any]) -> None:
    for model, config in ((None, config_of(tmp_path, str(folder))), (folder, config_of(tmp_path, None))):
        assert starting_model(model, None, config, TWO).start is None and loads.pop() == (str(folder), 0)
    assert not list(tmp_path.iterdir())
    config = config_of(tmp_path, value=5.0)
    config.model.lora = LoRAConfig(rank=2)
    found = starting_model(None, None, config, TWO)
    (start,) = tmp_path.glob("start-*")
    assert (head(found), found.start, found.source) == (5.0, start, str(start))
    assert loads == [(str(start), 2)]  # the adapter is not part of it
    adapted = PolicyModel.load(fake_model(), ByteTokenizer(), config.model).model
    with pytest.raises(ConfigError, match=r"give several the bare one, and set model\.lora"):
        starting_model(adapted, ByteTokenizer(), config_of(tmp_path, None), TWO)


@pytest.mark.parametrize("is_new", [False, True])
def test_rank_0_chooses_whatever_others_see(tmp_path: Path, folder: Path, loads: list[Any], is_new: bool) -> None:
    """A shared folder may look different on another host for a while, and a rank may be given something else."""
    starting_model(*made(2.0), config_of(tmp_path), Placement()).save(new_start(tmp_path))  # which rank 0 has not seen
    config = config_of(tmp_path, value=5.0)
    config.resume = True
    second = Placement(Second((str(folder), is_new)), PlacementConfig())
    for given in (None, "elsewhere", made()[0]):
        found = starting_model(given, None, config, second)
        assert loads.pop() == (str(folder), 0) and found.start == (folder if is_new else None)
