"""GRPO on a tiny MoE with real vLLM rollouts and Rollout Routing Replay, on a CPU.

A supervised warm-up, then steps of: roll out with the engine, score the rollouts, one optimizer step on the recorded
experts, weights back to the engine. ``config/train.yaml`` lists every knob; change one as ``key=value``.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from records import Row, RunFolder
from rich.console import Console
from settings import CONFIG, InputError, load_settings
from summary import summary
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs.transforms import SelectTransform
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import MCAdvantage
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_moe.collectors import LLMCollector
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, UnsupportedRouterError, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.render.curves import training_figure
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer, share_correct
from torchrl_moe.testing.warm_up import WarmUp, warm_up
from torchrl_moe.weight_update import VLLMWeightSyncScheme

console = Console(highlight=False)

# What the loss and the advantage read. Chats and texts are many small strings, and copying them into the buffer would
# take longer than all the rest of a step.
KEPT = (
    "query", "tokens", "masks", "log_probs", "routed_experts", "sampling", "policy_version", ("next", "reward"),
    ("next", "done"),
)  # fmt: skip


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("generate", "score", "train", "sync"), 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started


class Run:
    """One training run: its task, its model, its engine, its records.

    Args:
        settings: see ``config/train.yaml``.
        engine: one that serves a model of the same shape; default: the run starts its own, and ends it.
    """

    def __init__(self, settings: DictConfig, engine: AsyncVLLM | None = None) -> None:
        self.settings = settings
        self._owns_engine = engine is None
        torch.manual_seed(settings.seed)
        self.task = ArithmeticTask(**settings.task, seed=settings.seed)
        self.model, self.tokenizer = make_model(settings)
        self.actor = TransformersWrapper(self.model, tokenizer=self.tokenizer, replay=settings.replay)
        # nothing was written so far: a mistake in the settings leaves an older run's folder as it was
        self.folder = RunFolder(settings)
        self.state = self.folder.state
        self.first_step = self.state["step"] if self.state else 0
        if settings.resume and not self.state:
            console.print("there is no checkpoint yet: starting from the beginning")
        self._fill_model()
        self.scorer = self.actor.get_new_version(measure_agreement=settings.replay == "R3")
        self.live_scorer = self.actor.get_new_version(replay="none") if settings.replay == "R3" else None
        self.loss = GRPOLoss(self.actor, clip_epsilon=tuple(settings.train.clip), entropy_bonus=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.train.lr)
        if self.state:
            self.optimizer.load_state_dict(self.state["optimizer"])
        self.engine = self._start_engine() if engine is None else engine
        try:
            self._connect()
        except BaseException:
            self._end_engine()
            raise
        self.folder.restore_rng()
        # everything made so far stays: the collector need not look at it again and again
        gc.collect()
        gc.freeze()

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _fill_model(self) -> None:
        """Give the model the checkpoint's weights, or the warm-up's."""
        settings = self.settings
        if self.state:
            self.model.load_state_dict(self.state["model"])
        elif settings.model.path is None:
            options = WarmUp(**settings.warmup)
            reached = warm_up(self.model, self.task.train, self.tokenizer, options, settings.seed)
            console.print(f"warm-up done: exact answers have probability {reached:.2f}")
            if reached > settings.warmup.noisy_target:
                console.print("the warm-up ran out of steps (warmup.max_steps): GRPO may have little to move")

    def _connect(self) -> None:
        """Make everything between model and engine."""
        rollout = self.settings.rollout
        self.sender = self._make_sender()
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(rollout.answers),
            sampler=SamplerWithoutReplacement(),
            batch_size=rollout.answers,
            transform=MCAdvantage(grpo_size=rollout.group_size),
        )
        if self.state and self.state["buffer"] is not None:
            self.buffer.extend(self.state["buffer"])
        self.policy, self.collector = self._make_collector()

    def _start_engine(self) -> AsyncVLLM:
        settings = self.settings
        start = self.folder.path / "engine-start"
        self.model.save_pretrained(start)
        self.tokenizer.save_pretrained(start)
        console.print(f"starting {settings.engine.num_replicas} vLLM replica(s)")
        arguments = {key: value for key, value in settings.engine.items() if key != "num_replicas"}
        arguments["seed"] = settings.seed + self.first_step  # a resumed run draws other numbers
        return AsyncVLLM.from_pretrained(start, settings.engine.num_replicas, enforce_eager=True, **arguments)

    def _end_engine(self) -> None:
        if self._owns_engine:
            self.engine.shutdown()
            shutil.rmtree(self.folder.path / "engine-start", ignore_errors=True)

    def _make_sender(self) -> Any:
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(self.actor)
        sender.init_all_workers_group(None, vllm_engine=self.engine)
        if self.state or not self._owns_engine:
            # an engine of our own has these weights already; this gives them the number they had
            sender.version = (self.state["version"] if self.state else 0) - 1
            sender.update_weights()
        return sender

    def _make_collector(self) -> tuple[vLLMWrapper, LLMCollector]:
        settings = self.settings.rollout
        policy = vLLMWrapper(
            self.engine,
            tokenizer=self.tokenizer,
            generate_kwargs={name: settings[name] for name in ("max_new_tokens", "temperature", "top_p", "top_k")},
        )
        prompts = settings.answers // settings.group_size
        env = self.task.env(prompts, settings.group_size, self.tokenizer, start=self.first_step * prompts)
        collector = LLMCollector(
            env,
            policy=policy,
            dialog_turns_per_batch=settings.answers,
            replay_buffer=self.buffer,
            yield_completed_trajectories=True,
            postproc=SelectTransform(*KEPT, keep_rewards=False, keep_dones=False),
        )
        return policy, collector

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run all steps that are left."""
        rollouts = iter(self.collector)
        if not self.state:
            self.checkpoint(0)
        steps = range(self.first_step, self.settings.train.steps)
        with tqdm(steps, desc="GRPO", unit="step", initial=self.first_step, total=self.settings.train.steps) as bar:
            for step in bar:
                row = self.step(step, rollouts)
                self.folder.add(row)
                bar.set_postfix_str(
                    f"reward {row['reward']:.2f}, loss {row['loss']:.3f}, kl {row['kl']:.1e}, "
                    f"{row['tokens_per_second']:.0f} tok/s, version {row['version']}"
                )
                if (step + 1) % self.settings.train.checkpoint_every == 0:
                    self.checkpoint(step + 1)

    def step(self, step: int, rollouts: Iterator[Any]) -> Row:
        """Roll out, score, train, sync; return the step's row of metrics."""
        clock = Clock()
        held_out: float | str = self.evaluate() if step == 0 else ""
        with clock("generate"):
            self.buffer.empty()
            next(rollouts)
            batch = spoil(self.buffer.sample(), self.settings.control)
        with clock("score"):
            mismatch = self.mismatch(batch)
        with clock("train"):
            losses = self.update(batch)
        version = self.sender.version
        with clock("sync"):
            if self.settings.control != "no_sync" and (step + 1) % self.settings.train.sync_every == 0:
                report = self.sender.update_weights()
                version = report.version
                for replica, reason in report.failed.items():
                    console.print(f"replica {replica} does not hold version {version}: {reason}")
        if (step + 1) % self.settings.eval.every == 0:
            held_out = self.evaluate()
        lengths = [len(sample["tokens", "response"]) for sample in batch.unbind(0)]
        return {
            "step": step,
            "reward": batch["next", "reward"].mean().item(),
            "held_out_reward": held_out,
            "loss": losses.loss_objective.item(),
            **mismatch,
            "clip_fraction": losses.clip_fraction.item(),
            "ess": losses.ESS.item(),
            "length": sum(lengths) / len(lengths),
            "tokens_per_second": sum(lengths) / clock.seconds["generate"],
            "version": version,
            **{f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()},
        }

    def precision(self) -> torch.autocast:
        """Return the context of a forward pass; weights, gradients and the optimizer are float32 in any case."""
        dtype = getattr(torch, self.settings.train.dtype)
        return torch.autocast(self.actor.device.type, dtype, enabled=dtype != torch.float32)

    @torch.no_grad()
    def mismatch(self, batch: TensorDictBase) -> Row:
        """Compare the trainer's log-probs with the engine's, before the update; under R2 this records the routes."""
        with self.precision():
            log_probs, entropy, _ = self.scorer.score(batch)
            live = self.live_scorer.score(batch.copy(), entropy=False)[0] if self.live_scorer else None
        assert entropy is not None
        sampled = batch.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
        known = sampled.isfinite()
        gap = (log_probs - sampled)[known]
        agreement = batch.get(("routing", "agreement"), None)
        return {
            "kl": (gap.expm1() - gap).mean().item(),
            "dlogp_mean": gap.abs().mean().item(),
            "dlogp_max": gap.abs().max().item(),
            "dlogp_live": "" if live is None else (live - sampled)[known].abs().mean().item(),
            "agreement": "" if agreement is None or agreement.isnan().all() else agreement.nanmean().item(),
            "entropy": entropy[known].mean().item(),
        }

    def update(self, batch: TensorDictBase) -> Any:
        """Make one optimizer step on a batch."""
        with self.precision():
            losses = self.loss(batch)
        self.optimizer.zero_grad()
        losses.loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.train.max_grad_norm)
        self.optimizer.step()
        return losses

    def evaluate(self) -> float:
        """Return the share of held-out problems that greedy decoding gets right; nothing of it is kept."""
        chats, answers = self.task.chats("test")
        greedy = self.policy.get_new_version(
            generate_kwargs={"max_new_tokens": self.settings.rollout.max_new_tokens, "temperature": 0.0},
            return_routed_experts=False,
            inplace=False,
        )
        rollout = greedy(TensorDict(history=ChatHistory(prompt=History.from_chats(chats)), batch_size=[len(chats)]))
        return share_correct(answers, rollout)

    def checkpoint(self, step: int) -> None:
        """Save everything that a later start needs to go on from ``step``."""
        self.folder.save(
            {
                "step": step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "version": self.sender.version,
                "buffer": self.buffer[:] if len(self.buffer) else None,
            }
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Export the model, draw the figure, print the summary."""
        self.checkpoint(max(self.settings.train.steps, self.first_step))
        self.model.save_pretrained(self.folder.path / "model")
        self.tokenizer.save_pretrained(self.folder.path / "model")
        training_figure(self.folder.rows, f"GRPO, replay={self.settings.replay}").savefig(self.folder.path / "run.png")
        console.print(summary(self.folder.rows, self.evaluate()))
        console.print(f"metrics, events, figure and the trained model are in {self.folder.path}")

    def shutdown(self) -> None:
        """End the engine and remove what only the run needed."""
        self.collector.shutdown()
        self.sender.shutdown()
        gc.unfreeze()
        self._end_engine()


def make_model(settings: DictConfig) -> tuple[Any, Any]:
    """Return the model, not warmed up, and its tokenizer.

    Raises:
        InputError: there is no model at ``model.path``.
    """
    if settings.model.path is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
            return AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32), tokenizer
        except (OSError, ValueError) as error:
            raise InputError(f"model.path={settings.model.path}: {str(error).splitlines()[0]}") from error
    tokenizer = CharacterTokenizer()
    sizes = {key: value for key, value in settings.model.items() if key != "path"}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = make_tiny_moe(
        "qwen3_moe", seed=settings.seed, vocab_size=len(tokenizer), mlp_only_layers=[], **special, **sizes
    )
    return model, tokenizer


def spoil(batch: TensorDictBase, control: str) -> TensorDictBase:
    """Put a fault into a batch on purpose: a negative control, for tests of the checks."""
    if control == "shuffle_advantages":
        batch.set("advantage", batch.get("advantage")[torch.randperm(len(batch))])
    if control not in ("shift_routes", "wrong_ids"):
        return batch
    for sample in batch.unbind(0):
        routes = sample["routed_experts", "full"]
        if control == "shift_routes":
            wrong = torch.cat([routes[-1:], routes[:-1]])
        else:
            count = int(routes.max()) + 1
            wrong = torch.where(routes < 0, routes, (routes + 1) % count)
        sample.set(("routed_experts", "full"), wrong)
    return batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; bad input is one clear line and exit code 2."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(overrides):
        print(__doc__, (CONFIG / "train.yaml").read_text(), sep="\n")
        return 0
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    try:
        settings = load_settings(overrides)
        run = Run(settings)
    except (InputError, UnsupportedRouterError) as error:
        print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    try:
        run.train()
        run.finish()
    finally:
        run.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
