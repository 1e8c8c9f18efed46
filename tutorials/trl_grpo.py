"""TRL's GRPOTrainer with this package's engine and replay: log-probs follow the experts that the engine chose (R3).

A tiny model learns to answer in letters; ``--live`` leaves the routers alone. Needs requirements/trl.txt: docs/trl.md.
"""

import sys
from types import SimpleNamespace

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from torchrl_moe.data import RoutedExperts
from torchrl_moe.modules import AsyncVLLM, RouterReplay
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme


class R3Trainer(GRPOTrainer):
    """TRL's trainer, whose completions come from an ``AsyncVLLM``, and whose log-probs follow its experts."""

    def __init__(self, *args, engine, live=False, **kwargs):
        super().__init__(*args, rollout_func=lambda prompts, trainer: trainer.rollout(prompts), **kwargs)
        self.engine, self.live = engine, live
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(self.model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        # as with TRL's own vLLM: weights go out before a rollout, the mismatch is logged and corrected for
        self.vllm_generation = SimpleNamespace(sync_weights=sender.update_weights)
        self.use_vllm, self._last_loaded_step = True, -1

    def rollout(self, prompts):  # each prompt is there as often as it has completions
        prompt_ids = self._tokenize_prompts(prompts)[0]
        sampling = {"max_tokens": self.max_completion_length, "temperature": self.temperature, "logprobs": 0}
        answers = self.engine.generate([{"prompt_token_ids": ids} for ids in prompt_ids], sampling, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        width = max(len(ids) for ids in prompt_ids), max(len(output.token_ids) for output in outputs)
        self.routes = torch.stack([self.padded(*one, *width) for one in zip(prompt_ids, outputs, strict=True)])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(output.token_ids) for output in outputs],
            "logprobs": [output.logprobs.tolist() for output in outputs],
        }

    def padded(self, prompt, output, left, right):  # [left + right, L, K], where TRL puts the tokens
        answer = len(output.token_ids)
        routes = RoutedExperts.from_vllm(
            output.routed_experts, num_tokens=len(prompt) + answer, layout=self.engine.routing_layout
        )
        return torch.nn.functional.pad(routes.full, (0, 0, 0, 0, left - len(prompt), right - answer), value=-1)

    def _generate_and_score_completions(self, inputs):  # what it returns is shuffled, and split into micro-batches
        return {**super()._generate_and_score_completions(inputs), "routes": self.routes}

    def _compute_loss(self, model, inputs):
        self.routes = inputs["routes"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, batch_size=None, **kwargs):
        routes, routers = iter(self.routes.split(batch_size or len(ids))), RouterReplay.of(model)

        def following(attention_mask, **inputs):  # called for each part of the batch
            with routers.replay(next(routes), attention_mask):
                return model(attention_mask=attention_mask, **inputs)

        called = model if self.live else following
        return super()._get_per_token_logps_and_entropies(called, ids, mask, keep, batch_size, **kwargs)


def letters(completions, **_):  # TRL's kind of a reward; it works in MoEGRPOTrainer as it is
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    model = str(save_tiny_moe("runs/trl-moe"))
    sizes = {"max_steps": 20, "gradient_accumulation_steps": 4, "max_completion_length": 12, "logging_steps": 1}
    args = GRPOConfig("runs/trl", learning_rate=2e-3, use_cpu=not torch.cuda.is_available(), **sizes)
    data = Dataset.from_dict({"prompt": [f"{a} + {b} =" for a in range(10) for b in range(10)]})
    with AsyncVLLM.from_pretrained(model, dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=1 << 26) as engine:
        R3Trainer(model, letters, args, data, engine=engine, live="--live" in sys.argv).train()
