"""A scheduler of ours in this process, with vLLM's own code below it and no model: it schedules, and tokens come."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from torchrl_moe import _compat
from torchrl_moe.modules.backends.vllm.weights import CHECK

BLOCK = 16


class Steps:
    """The steps of an engine core, one by one; if ``overlapping``, one is scheduled before the last has ended.

    Of the ``blocks`` of the cache, of 16 tokens each, one is vLLM's own. ``arguments`` are the engine's.
    """

    def __init__(self, folder: Path, overlapping: bool, blocks: int = 1000, **arguments: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from torchrl_moe.modules.backends.vllm import forced_routing as schedulers

        common = {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 20}
        args = AsyncEngineArgs(model=str(folder), async_scheduling=overlapping, **common, **arguments)
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        _compat.reserve_check_slot(config.scheduler_config)
        attention = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
        make = schedulers.AsyncMoEScheduler if overlapping else schedulers.MoEScheduler
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["attention"], attention)])
        self.core: Any = make(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self._begun: deque[Any] = deque()
        self._depth = 2 if overlapping else 1
        self.tokens: dict[str, int] = {}  # made, by request
        self.most = 0  # requests in a step

    def add(self, name: str, prompt: int, max_tokens: int, check: bool = False, priority: int = 0) -> None:
        """Add a request of so many tokens."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import Request

        kv_cache_utils.init_none_hash(sha256)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={CHECK: True} if check else None)
        how = {"priority": priority, "arrival_time": len(self.tokens), "cache_salt": name}
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        request = Request(name, list(range(prompt)), params, None, block_hasher=hasher, **how)
        self.tokens[name] = 0
        self.core.add_request(request)

    def step(self) -> dict[str, int]:
        """Begin a step, end the oldest if enough are under way, and return the new one's tokens by request."""
        output = self.core.schedule()
        self._begun.append(output)
        self.most = max(self.most, len(output.num_scheduled_tokens))
        if len(self._begun) >= self._depth:
            self._end()
        return dict(output.num_scheduled_tokens)

    def drain(self) -> None:
        """End all steps, as a pause does."""
        while self._begun:
            self._end()

    def _end(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._begun.popleft()
        new = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed = {**new, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.core.requests.get(name)
            read = request is not None and computed[name] + output.num_scheduled_tokens[name] >= request.num_tokens
            sampled.append([7] if read else [])
        runner = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)
        for outputs in self.core.update_from_output(output, runner).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += len(one.new_token_ids)
