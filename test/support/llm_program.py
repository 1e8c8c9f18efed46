"""A script of somebody who has a ``vllm.LLM``: it generates and scores through our wrapper, and saves what came of it.

``python llm_program.py FOLDER OUT``
"""

from __future__ import annotations

import sys


def main(folder: str, out: str) -> None:
    import torch
    from tensordict import TensorDict, lazy_stack
    from torchrl.modules.llm.policies import Tokens
    from vllm import LLM

    from torchrl_moe.modules import vLLMWrapper

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=512,
        enable_return_routed_experts=True,
    )
    greedy = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    policy = vLLMWrapper(llm, input_mode="tokens", generate_kwargs=greedy)
    prompts = [[104, 105], list(b"what is 1+1?")]
    td = policy(lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(ids))) for ids in prompts]))
    names = {"tokens": "tokens", "log_probs": "log_probs", "routes": "routed_experts"}
    answers = [{name: one[key, "full"] for name, key in names.items()} for one in td.unbind(0)]
    bare = lazy_stack([TensorDict(tokens=Tokens(full=one["tokens"])) for one in answers])
    scorer = vLLMWrapper(llm, input_mode="tokens", generate=False, replay="none")
    scores = scorer(bare).get(("log_probs", "full"), as_list=True)
    torch.save({"layout": policy.engine.routing_layout, "answers": answers, "scores": scores}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
