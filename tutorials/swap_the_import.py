"""TorchRL's GRPO with vLLM, where three import lines say torchrl_moe: nothing else of such a script changes.

The parts are those of TorchRL's own: a chat environment with a reward, rollouts by vLLM, a collector that fills a
replay buffer, the KL to a reference, ``GRPOLoss``, and a weight sync: after each batch (``--form sync``), every second
step while the collector continues (``async``), or after each batch with all of it in Ray actors (``ray``). A tiny model
on a CPU learns to answer in letters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv, RetrieveKL
from transformers import AutoModelForCausalLM, AutoTokenizer

# these lines said: torchrl.modules.llm, torchrl.objectives.llm, torchrl.weight_update.llm
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss, MCAdvantage
from torchrl_moe.weight_update import VLLMWeightSyncScheme, get_model_metadata

CPU = torch.device("cpu")
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
"""vLLM's own arguments, for a small model on a CPU."""
RAY: dict[str, Any] = {"backend": "ray", "resources": {"CPU": 1}}
"""Where TorchRL's engine lives always, and ours only if it is asked to."""
SHOWN = (
    "step {:3d}  policy {}  reward {:.3f}  loss {:+.4f}  kl to reference {:.1e}, to the sampler {:+.1e}  clipped {:.3f}"
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--form", choices=("sync", "async", "ray"), default="sync")
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer; default: a tiny MoE")
    parser.add_argument("--steps", type=int, default=20, help="batches with sync and ray, optimiser's steps with async")
    parser.add_argument("--prompts", type=int, default=4, help="of a batch")
    parser.add_argument("--repeats", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    for name in ("steps", "prompts", "repeats", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    return options


# -- models -----------------------------------------------------------------------------------------------------------


def get_tokenizer(options: argparse.Namespace) -> Any:
    """Return the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.padding_side = "left"
    return tokenizer


def get_train_model(options: argparse.Namespace) -> TransformersWrapper:
    """Return the policy that is trained: it scores tokens, by the experts that vLLM sampled them with."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return TransformersWrapper(
        model.eval(),
        tokenizer=get_tokenizer(options),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        device=CPU,
        pad_model_input=True,
    )


def get_ref_model(options: argparse.Namespace) -> TransformersWrapper:
    """Return the policy as it was at first, for the KL."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(False)
    return TransformersWrapper(
        model.eval(),
        tokenizer=get_tokenizer(options),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        device=CPU,
        log_probs_key="ref_log_probs",
    )


def get_engine(options: argparse.Namespace, **where: Any) -> AsyncVLLM:
    """Start vLLM."""
    return AsyncVLLM.from_pretrained(
        model_name=str(options.model),
        num_devices=1,
        num_replicas=1,
        enforce_eager=True,
        verbose=False,
        compile=False,
        enable_prefix_caching=True,
        **ENGINE,
        **where,
    )


def get_inference_policy(engine: AsyncVLLM, options: argparse.Namespace) -> vLLMWrapper:
    """Return the policy that answers, in chats."""
    return vLLMWrapper(
        engine,
        input_mode="history",
        return_log_probs=True,
        tokenizer=get_tokenizer(options),
        pad_output=False,
        generate_kwargs={"max_tokens": options.max_tokens, "temperature": 1.0, "top_p": 1.0},
    )


# -- what is learned --------------------------------------------------------------------------------------------------


class Questions:
    """An endless list of sums, in batches of one."""

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        number = 0
        while True:
            yield {"query": [f"{number % 10} + {number // 10 % 10}?"]}
            number += 1


class LettersReward(Transform):
    """Rewards the share of an answer's characters that are ASCII letters."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        answers = tensordict.get("text").response
        shares = [sum(c.isascii() and c.isalpha() for c in answer) / max(len(answer), 1) for answer in answers]
        next_tensordict.set("reward", torch.tensor(shares).reshape(-1, 1, 1))
        return next_tensordict


def make_env(options: argparse.Namespace) -> EnvBase:
    """Return chats with a question each, whose answers are rewarded."""
    env = DatasetChatEnv.from_dataloader(
        Questions(),
        repeats=options.repeats,
        batch_size=(options.prompts * options.repeats,),
        tokenizer=get_tokenizer(options),
    )
    return env.append_transform(LettersReward()).append_transform(StepCounter(max_steps=1))


def get_scorer(policy: vLLMWrapper) -> vLLMWrapper:
    """Return the policy that answers as one that scores answers."""
    scorer: vLLMWrapper = policy.get_new_version(
        generate=False, return_log_probs=True, input_mode="tokens", log_probs_key="gen_log_probs"
    )
    return scorer


def add_kl(buffer: Any, options: argparse.Namespace, policy: vLLMWrapper) -> None:
    """Have what is sampled from a buffer get the reference's log-probs, and the KL to it."""
    kl = RetrieveKL(
        gen_model=None,
        gen_model_factory=partial(get_scorer, policy),
        ref_model_factory=partial(get_ref_model, options),
        assistant_only=False,
        gen_log_probs_full_key=("gen_log_probs", "full"),
        add_to_reward=False,  # it is in the loss
        use_ray_service=options.form == "ray",
    )
    buffer.append_transform(kl)


# -- training ---------------------------------------------------------------------------------------------------------


def make_weight_sync_scheme(engine: Any) -> VLLMWeightSyncScheme:
    """Return the way of the weights, with what TorchRL's engine says of itself."""
    return VLLMWeightSyncScheme(
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        gpus_per_replica=engine.get_tp_size(),
        num_replicas=engine.num_replicas,
        strategy="state_dict",
    )


class Learner:
    """The policy that is trained, its loss and optimiser, and the way of its weights to the engine."""

    def __init__(self, options: argparse.Namespace, inference_policy: vLLMWrapper) -> None:
        self.policy = get_train_model(options)
        self.loss = GRPOLoss(
            actor_network=self.policy,
            kl_to_ref_coeff=1e-2,
            kl_to_inference_coeff=1e-3,
            entropy_coeff=1e-4,
            masking_strategy="sft",
            device=CPU,
        )
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=options.lr)
        engine = inference_policy.model
        self.sender = make_weight_sync_scheme(engine).create_sender()
        self.sender.register_model(self.policy.model)
        self.sender.init_all_workers_group(get_model_metadata(self.policy.model), vllm_engine=engine)

    def step(self, batch: TensorDictBase) -> dict[str, float]:
        """Take a step, and return what is shown of it."""
        loss = self.loss(batch)
        # loss.mean(reduce=True) would average these with the metrics, and ours has more of them
        sum(term for name, term in loss.items() if name.startswith("loss_")).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        reward = torch.cat(batch.get(("next", "reward"), as_list=True)).mean()
        return {
            "policy_version": int(batch["next", "policy_version"].min()),
            "reward": float(reward),
            "loss": float(loss.loss_objective.detach().mean()),
            "kl_to_ref": float(loss.kl_to_ref.mean()),
            "kl_approx": float(loss.kl_approx),
            "clip_fraction": float(loss.clip_fraction),
        }


def show(step: int, row: dict[str, float]) -> None:
    """Print a step's figures."""
    print(SHOWN.format(step, *(row[name] for name in row)), flush=True)


def train_sync(options: argparse.Namespace, policy: vLLMWrapper, buffer: Any, collector: Any) -> list[dict[str, float]]:
    """Collect, learn from all of it, bring the weights to the engine, and so on."""
    learner, rows = Learner(options, policy), []
    try:
        learner.sender.register_collector(collector)
        learner.sender.update_weights()
        for _, data in zip(range(options.steps), collector, strict=False):
            assert data is None  # it is in the buffer
            for batch in buffer:
                rows.append(learner.step(batch))
                show(len(rows), rows[-1])
            learner.sender.update_weights()
            buffer.empty(empty_write_count=False)
    finally:
        collector.shutdown()
        learner.sender.shutdown()
    return rows


def train_async(
    options: argparse.Namespace, policy: vLLMWrapper, buffer: Any, collector: Any
) -> list[dict[str, float]]:
    """Learn from the buffer while the collector fills it; bring the weights to the engine every second step."""
    learner, rows = Learner(options, policy), []
    try:
        learner.sender.update_weights()
        collector.start()
        learner.sender.register_collector(collector)
        while not buffer.write_count and collector.is_running():
            time.sleep(0.1)
        for step in range(options.steps):
            if not collector.is_running():
                raise RuntimeError("the collector has ended: its thread's error is above")
            rows.append(learner.step(buffer.sample(options.prompts * options.repeats)))
            show(len(rows), rows[-1])
            if step % 2:
                learner.sender.update_weights()
    finally:
        collector.shutdown()
        learner.sender.shutdown()
    return rows


# -- where it runs ----------------------------------------------------------------------------------------------------


def run_local(options: argparse.Namespace, engine: AsyncVLLM) -> list[dict[str, float]]:
    """Collect and train in this process."""
    size = options.prompts * options.repeats
    policy = get_inference_policy(engine, options)
    in_turn = options.form == "sync"
    buffer = ReplayBuffer(
        storage=LazyStackStorage(size if in_turn else 4 * size),
        sampler=SamplerWithoutReplacement() if in_turn else None,
        transform=MCAdvantage(grpo_size=options.repeats),
        batch_size=size,
    )
    add_kl(buffer, options, policy)
    collector = LLMCollector(
        env=partial(make_env, options),
        policy=policy,
        dialog_turns_per_batch=size,
        replay_buffer=buffer,
        track_policy_version=True,
    )
    return (train_sync if in_turn else train_async)(options, policy, buffer, collector)


def run_in_ray(options: argparse.Namespace, engine: AsyncVLLM) -> list[dict[str, float]]:
    """Collect, keep and train in an actor each; the engine has actors of its own."""
    import ray

    size = options.prompts * options.repeats
    policy = get_inference_policy(engine, options)
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, size),
        sampler=SamplerWithoutReplacement,
        transform_factory=partial(MCAdvantage, grpo_size=options.repeats),
        batch_size=size,
        remote_config={"num_cpus": 0},
    )
    add_kl(buffer, options, policy)
    shared = buffer.client()  # TorchRL 0.14 cannot pickle the buffer itself
    collector = RayLLMCollector(
        env=partial(make_env, options),
        policy=policy,
        dialog_turns_per_batch=size,
        replay_buffer=shared,
        ray_init_config=None,
        weight_updater=None,
        track_policy_version=True,
        remote_config={"num_cpus": 0, "num_gpus": 0},
        sync_iter=True,
    )
    train = ray.remote(num_cpus=0)(train_sync)
    rows: list[dict[str, float]] = ray.get(train.remote(options, policy, shared, collector))
    for number, row in enumerate(rows, 1):
        show(number, row)  # what an actor prints is in Ray's logs
    return rows


def join_ray() -> None:
    """Start Ray, or join the cluster that RAY_ADDRESS names."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Train, and return each step's figures."""
    options = parse(arguments)
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-") as folder:
        if options.model is None:
            from torchrl_moe.testing.tiny_moe import save_tiny_moe

            options.model = save_tiny_moe(folder)
        in_ray = options.form == "ray"
        if in_ray:
            join_ray()
        with get_engine(options, **(RAY if in_ray else {})) as engine:
            return (run_in_ray if in_ray else run_local)(options, engine)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
