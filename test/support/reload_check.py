"""vLLM's own models without an engine: after a reload they must be bitwise what a start would have made.

Run as ``python -m support.reload_check FAMILY[:tied][:bf16] ...`` in a process of its own, since vLLM
sets process-wide state; it prints one JSON object: case -> what differed. Packed linear layers are compared by what
they compute, all else by its bytes. Every case loads three versions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

VERSIONS = (1, 2, 0)
CPU = torch.device("cpu")


def configuration(folder: Path, family: str, dtype: str) -> Any:
    from torchrl_moe import _compat
    from torchrl_moe.modules.backends.vllm import cpu_kernels
    from torchrl_moe.modules.backends.vllm.engine_args import build_engine_args

    cpu_kernels.register()
    _compat.keep_prefix_cache_with_latents()
    arguments = {"dtype": dtype, "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
    return build_engine_args({"model": str(folder), **arguments}).create_engine_config()


def start_vllm(config: Any) -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - as in a worker: what has no accelerator does nothing
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def started(config: Any) -> nn.Module:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - as in a worker: what has no accelerator does nothing
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        model: nn.Module = get_model(vllm_config=config)
    return model


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = [(name, getattr(module, "router", None)) for name, module in model.named_modules(remove_duplicate=False)]
    named += [(f"{name}.router", bias) for name, router in modules
              if (bias := getattr(router, "e_score_correction_bias", None)) is not None]  # fmt: skip
    return dict(named)


def differences(model: nn.Module, fresh: nn.Module) -> Iterator[str]:
    ours, theirs = all_tensors(model), all_tensors(fresh)
    yield from ours.keys() ^ theirs.keys()
    yield from (name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name]))
    others: dict[str, Any] = dict(fresh.named_modules())
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            width = module.input_size if hasattr(module, "input_size") else module.embedding_dim
            rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(module.params_dtype)
            results = [linear.cpu_linear(rows, linear.weight, None) for linear in (module, others[name])]
            if not torch.equal(*results):
                yield f"{name} computes otherwise"


def reloader(model: nn.Module, config: Any) -> Callable[[dict[str, Tensor]], None]:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - as in a worker: what has no accelerator does nothing
    from vllm.config import set_current_vllm_config

    from torchrl_moe.modules.backends.vllm.worker import WeightEngine

    worker = WeightEngine(None, config, CPU, model)

    def load(tensors: dict[str, Tensor]) -> None:
        with set_current_vllm_config(config):
            worker.start_weight_update()
            model.load_weights(iter(tensors.items()))  # type: ignore[operator]
            worker.finish_weight_update()

    return load


def check(case: str) -> list[str]:
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    family, *options = case.split(":")
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, str(seed)) for seed in range(3)]
        for seed, folder in enumerate(folders):
            save_tiny_moe(folder, family, seed=seed, num_hidden_layers=2, tie_word_embeddings="tied" in options)
        dtype = "bfloat16" if "bf16" in options else "float32"
        configs = [configuration(folder, family, dtype) for folder in folders]
        if not torch.distributed.is_initialized():
            start_vllm(configs[0])
        fresh = [started(config) for config in configs]
        wrong = []
        config = configuration(folders[0], family, dtype)
        model = started(config)
        load = reloader(model, config)
        for version in VERSIONS:
            load(load_file(folders[version] / "model.safetensors"))
            wrong += [f"{version}: {name}" for name in differences(model, fresh[version])]
        return wrong


if __name__ == "__main__":
    from torchrl_moe import _compat

    torch.set_num_threads(1)
    _compat.inspect_models_here()  # as an engine's process does: no other process imports vLLM for each family
    print(json.dumps({case: check(case) for case in sys.argv[1:]}))
