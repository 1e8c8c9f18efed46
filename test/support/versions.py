"""Weights swapped into real replicas by hand, and what transformers makes of each token under the version it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.engines import EngineShelf
from support.processes import ids_request
from support.reference import TOLERANCE, Reference
from support.waiting import until
from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds, OnResume, Request, this_process
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports.base import StageOptions, Transport
from torchrl_moe.weight_update.transports.gloo import GlooTransport
from torchrl_moe.weight_update.transports.registry import MemmapTransport

SECONDS = 60.0


class Versions:
    """Versions of a model's weights, brought to the replicas of an engine one by one.

    Replicas are called directly, so that a test chooses how they pause; the replica table's versions stay as they are.
    """

    def __init__(self, engine: AsyncVLLM, shelf: EngineShelf, family: str, folder: Path, transport: str) -> None:
        self.replicas = [entry.replica for entry in engine.replica_table]
        self.reference = Reference(shelf.folder(family))
        self.store = WeightStoreWriter(folder)
        kinds: dict[str, Callable[[Path], Transport]] = {"memmap": MemmapTransport, "gloo": GlooTransport}
        self.transport = kinds[transport](folder)
        for replica in self.replicas:  # a test before may have updated it by a sender
            replica.call(Engine.claim_weights, SECONDS, this_process(), True)
            self.transport.open(replica, SECONDS)
        self.held = self.replicas[0].call(Engine.weights_version, SECONDS)
        self.now = self.held
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.keep(self.now)

    def keep(self, version: int) -> None:
        state = self.reference.model.state_dict()
        self.now, self.weights[version] = version, {name: tensor.clone() for name, tensor in state.items()}

    def load(self, version: int) -> None:
        self.reference.model.load_state_dict(self.weights[version])

    def change(self, seed: int, scale: float = 0.1) -> None:
        """Move every weight of the newest version."""
        self.load(self.now)
        self.reference.change(seed, scale=scale)

    def prepare(self, seed: int, scale: float = 0.1) -> Manifest:
        """Make a version and stage it on all replicas."""
        self.change(seed, scale)
        manifest = self.publish(max(self.weights) + 1)
        self.keep(manifest.version)
        self.stage(manifest)
        return manifest

    def stage(self, manifest: Manifest) -> None:
        """Bring a version to all replicas."""
        for replica in self.replicas:
            assert self.transport.stage(replica, manifest, StageOptions(), SECONDS).digest == manifest.digest

    def publish(self, version: int) -> Manifest:
        return self.store.publish(checkpoint_tensors(self.reference.model).items(), version)

    def swap(self, manifest: Manifest, pause: str = "keep", clear_cache: bool = False) -> None:
        """Swap in what was staged, on all replicas."""
        for replica in self.replicas:
            what = (manifest.version, manifest.digest, pause, clear_cache, None)
            report = replica.call(Engine.swap_weights, SECONDS, *what)
            assert report.error is None, report.error

    def update(self, seed: int, pause: str = "keep", clear_cache: bool = False) -> int:
        """Make a version, bring it to all replicas, and return its number."""
        manifest = self.prepare(seed)
        self.swap(manifest, pause, clear_cache)
        return manifest.version

    def close(self) -> None:
        """Leave the replicas with the weights, and the version, that they had."""
        self.load(self.held)
        manifest = self.publish(self.held)
        self.stage(manifest)
        self.swap(manifest)
        self.transport.close()

    # -- what is true of an answer ----------------------------------------------------------------------------------

    def check(
        self, completion: Completion, output: CompletionOutput, only: int | None = None, live: bool = False
    ) -> None:
        """Each token's log-prob, and each row, is what its version makes of all that stands before it.

        Log-probs are over the words that sampling kept. Earlier versions' tokens are read with the experts that were
        recorded for them, or as this version routes them, if ``live``. ``only``: look at tokens of this version alone.
        """
        prompt, answer = len(completion.prompt_token_ids), len(output.token_ids)
        made_by = torch.from_numpy(output.policy_versions.astype(np.int64))
        assert (made_by.diff() >= 0).all()
        rows = torch.from_numpy(output.routed_experts.astype(np.int64))
        assert len(rows) == prompt + answer - 1
        row_by = torch.cat([made_by[:1].expand(prompt - 1), made_by])  # row t is made together with token t + 1
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))
        for version in set(made_by.tolist()) if only is None else {only}:
            self.load(version)
            followed = None if live else row_by < version
            faults = self._faults(ids, rows, output, made_by == version, row_by == version, followed)
            if faults and live:
                # the engine has read other versions' rows again, and may have taken the other side at a tie in them
                for row, layer, chosen in self.reference.ties(ids, rows):
                    if row < len(rows) and row_by[row] != version:
                        other = rows.clone()
                        other[row, layer] = chosen
                        if not self._faults(ids, other, output, made_by == version, row_by == version, None):
                            faults = ""
                            break
            assert not faults, f"version {version} of {made_by.unique_consecutive(return_counts=True)}: {faults}"

    def distance(self, completion: Completion, output: CompletionOutput) -> float:
        """Return how far an answer's log-probs are from its versions', earlier rows as recorded, as R3 replays them."""
        prompt = len(completion.prompt_token_ids)
        made_by = torch.from_numpy(output.policy_versions.astype(np.int64))
        row_by = torch.cat([made_by[:1].expand(prompt - 1), made_by])
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))
        found = []
        for version in made_by.unique().tolist():
            self.load(version)
            log_probs, _ = self.reference(ids, routes=output.routed_experts, followed=row_by < version)
            off = (torch.from_numpy(output.logprobs.copy()) - log_probs[prompt:]).abs()
            found.append(float(off[made_by == version].max()))
        return max(found)

    def _faults(
        self, ids: Tensor, sides: Tensor, output: CompletionOutput, tokens: Tensor, own: Tensor, followed: Tensor | None
    ) -> str:
        """Return in what an answer differs from the model as it is.

        Looked at are some ``tokens`` and the rows of ``own``, beside ``sides`` at ties and those ``followed``.
        """
        words = None if output.kept is None else self._words(output.kept, ids)
        log_probs, routes = self.reference(ids, routes=sides, followed=followed, words=words)
        off = (torch.from_numpy(output.logprobs.copy()) - log_probs[-len(tokens) :]).abs()
        wrong = (off > TOLERANCE) & tokens
        if wrong.any():
            return f"tokens {wrong.nonzero().flatten().tolist()} are off by up to {off[wrong].max():.1e}"
        rows = torch.from_numpy(output.routed_experts.astype(np.int64))
        for layer, expected in routes.items():
            same = (rows[:, layer].sort(-1).values == expected[:-1].sort(-1).values).all(-1)
            if not same[own].all():
                return f"rows {(~same & own).nonzero().flatten().tolist()} of layer {layer} differ"
        return ""

    def _words(self, kept: KeptIds, ids: Tensor) -> Tensor:
        """Return which words each token was sampled from, bool ``[T, V]``; it must be one of them."""
        vocabulary = self.reference.model.config.vocab_size
        sizes = torch.zeros(len(ids), dtype=torch.int32)
        sizes[-len(kept.sizes) :] = torch.from_numpy(kept.sizes.copy())
        words = KeptTokens(ids=torch.from_numpy(kept.ids.copy()), sizes=sizes)
        words.validate(vocabulary=vocabulary, num_tokens=len(ids), tokens=ids)
        return dense_mask(words.ids, words.sizes, vocabulary)

    def changed(self, before: int, after: int) -> float:
        """Return by how much two versions differ, as log-probs show it."""
        found = []
        for version in (before, after):
            self.load(version)
            found.append(self.reference(torch.arange(40, 90))[0][1:])
        return float((found[0] - found[1]).abs().max())


def let_run(replica: Any, futures: Sequence[Future[Completion]], seconds: float = 0.2) -> None:
    """Wait until requests run, and a little longer: long enough for tokens, too short for all of them."""
    until(
        lambda: replica.call(Engine.stats, SECONDS).running or any(future.done() for future in futures),
        SECONDS,
        look_every=0.005,
    )
    time.sleep(seconds)


def ask(name: str, ids: Any, on_resume: OnResume | None = None, **params: Any) -> Request:
    common = {"ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    return ids_request(name, ids, sampling_params={**common, **params}, on_resume=on_resume)


def random_ids(seed: int, length: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, length)
