"""Tokens per second of ``vLLMWrapper`` -> TensorDict against raw ``AsyncLLM``, and against TorchRL's own pair.

Same model, same engine arguments, same sampling parameters (routes and log-probs on), same prompts; the contenders take
turns within each round, and ratios are computed per round. Engines that wait for their turn are stopped. The raw engine
runs in this process and is awaited as in vLLM's examples; its outputs are not processed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

# before vllm, torch or ray are imported: their processes inherit these
SETTINGS = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
if __name__ == "__main__":
    os.environ.update(SETTINGS)

import psutil  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from benchmarks.engines.turns import Turns, engine_processes  # noqa: E402
from benchmarks.report import Row, finish, median_range  # noqa: E402

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 128, 24, 64
ROUNDS, WARM_UP, SETTLE_SECONDS = 14, 2, 0.2
SAMPLING = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 512,
    "max_num_seqs": PROMPTS,
    "enable_return_routed_experts": True,
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
}
Contender = Callable[[torch.Tensor], Any]


class RawEngine:
    """``AsyncLLM`` in this process, on its own event loop."""

    def __init__(self, path: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = asyncio.run_coroutine_threadsafe(self._start(path), self.loop).result()
        self.count = 0

    async def _start(self, path: str) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, disable_log_stats=True, **ENGINE))

    def __call__(self, prompts: torch.Tensor) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(self._all(prompts.tolist()), self.loop).result()

    async def _all(self, prompts: list[list[int]]) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**SAMPLING, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = await asyncio.gather(*(self._one(ids, params) for ids in prompts))
        assert all(output.outputs[0].routed_experts is not None for output in outputs)
        return outputs

    async def _one(self, ids: list[int], params: Any) -> Any:
        self.count += 1
        final = None
        async for output in self.engine.generate({"prompt_token_ids": ids}, params, f"raw-{self.count}"):
            final = output
        return final

    def shutdown(self) -> None:
        """End the engine."""
        self.loop.call_soon_threadsafe(self.engine.shutdown)


def ours(engine: Any, input_mode: str) -> Contender:
    """Return our wrapper as a contender."""
    from torchrl_moe.modules import vLLMWrapper

    policy = vLLMWrapper(engine, input_mode=input_mode, generate_kwargs=SAMPLING)
    return lambda prompts: policy(wrapper_input(prompts, input_mode))


def torchrl_pair(path: str) -> tuple[Contender, Contender, Callable[[], None]]:
    """Return TorchRL's wrapper over TorchRL's engine, the same with its own sampling defaults, and how to end it."""
    import ray
    from torchrl.modules.llm import vLLMWrapper
    from torchrl.modules.llm.backends.vllm import AsyncVLLM

    # TorchRL's actors get arguments from here, so that none loads vLLM's plugins, among them the CPU's kernels
    kernels = "torchrl_moe.modules.backends.vllm.cpu_kernels.register"
    environment = {"env_vars": SETTINGS, "worker_process_setup_hook": kernels}
    # its placement groups request a GPU, which the CPU engine never uses
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    engine = AsyncVLLM.from_pretrained(
        path, compile=False, verbose=False, distributed_executor_backend="uni", disable_log_stats=True, **ENGINE
    )
    policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs={**SAMPLING, "prompt_logprobs": None})
    # a user's settings; they also request log-probs of prompts, which no loss reads
    asked = {name: SAMPLING[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    shipped = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=asked)

    def shutdown() -> None:
        engine.shutdown()
        ray.shutdown()

    return (
        lambda prompts: policy(wrapper_input(prompts, "tokens")),
        lambda prompts: shipped(wrapper_input(prompts, "tokens")),
        shutdown,
    )


def wrapper_input(prompts: torch.Tensor, input_mode: str) -> TensorDict:
    """Return prompts as a wrapper reads them; chats and texts hold the characters of the same tokens."""
    from torchrl.data.llm import History
    from torchrl.modules.llm.policies import ChatHistory, Tokens

    if input_mode == "tokens":
        return TensorDict(tokens=Tokens(prompt=prompts), batch_size=[len(prompts)])
    texts = [bytes(row).decode() for row in prompts.tolist()]
    history = History.from_chats([[{"role": "user", "content": text}] for text in texts])
    return TensorDict(history=ChatHistory(prompt=history), batch_size=[len(prompts)])


def race(contenders: dict[str, Contender], processes: dict[str, set[psutil.Process]]) -> dict[str, list[float]]:
    """Let the contenders take turns on fresh prompts; return tokens per second, round by round.

    Args:
        contenders: by name; the part before the comma names the engine.
        processes: of each engine, to stop them while others run.
    """
    generator = torch.Generator().manual_seed(0)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with Turns(processes) as turns:
        for round_ in range(WARM_UP + ROUNDS):
            prompts = torch.randint(97, 123, (PROMPTS, PROMPT_TOKENS), generator=generator)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                turns.give(name.split(",")[0])
                time.sleep(SETTLE_SECONDS)
                started = time.perf_counter()
                contenders[name](prompts)
                seconds = time.perf_counter() - started
                if round_ >= WARM_UP:
                    speeds[name].append(PROMPTS * NEW_TOKENS / seconds)
    return speeds


def main() -> None:
    """Start the three engines, race, and compare."""
    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        before = set(psutil.pids())
        raw = RawEngine(path)
        processes = {"raw": engine_processes(before)}
        theirs, theirs_shipped, end_theirs = torchrl_pair(path)
        processes["TorchRL"] = engine_processes(before)
        with AsyncVLLM.from_pretrained(path, **ENGINE) as engine:
            contenders = {
                "raw": raw,
                "ours, tokens": ours(engine, "tokens"),
                "ours, history": ours(engine, "history"),
                "TorchRL, tokens": theirs,
                "TorchRL, tokens, its own sampling defaults": theirs_shipped,
            }
            processes["ours"] = engine_processes(before)
            print({name: len(pids) for name, pids in processes.items()}, "engine processes", flush=True)
            speeds = race(contenders, processes)
        end_theirs()
        raw.shutdown()
    rows = [Row(claim=f"{name}: tokens/s", value=median_range(values, 0)) for name, values in speeds.items()]
    for name, peer, target in (
        ("ours, tokens", "raw", 0.95),
        ("ours, history", "raw", None),
        ("ours, tokens", "TorchRL, tokens", 2.0),
        ("ours, tokens", "TorchRL, tokens, its own sampling defaults", 2.0),
    ):
        ratios = [a / b for a, b in zip(speeds[name], speeds[peer], strict=True)]
        met = None if target is None else statistics.median(ratios) >= target
        goal = "" if target is None else f">= {target:.2f}"
        rows.append(Row(claim=f"{name} / {peer}", value=median_range(ratios), target=goal, met=met))
    finish("generation", rows)


if __name__ == "__main__":
    main()
