"""TRL's GRPOTrainer with this package's engine and replay, from PyPI, in a process with packages of its own.

It needs what ``requirements/trl.txt`` lists: installed, or in the folder that ``TORCHRL_MOE_TRL`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.engines import EngineShelf

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tutorials" / "trl_grpo.py"
FOLDER = os.environ.get("TORCHRL_MOE_TRL", "")
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from trl_grpo import AsyncVLLM, Dataset, GRPOConfig, R3Trainer, letters, save_tiny_moe

class Watching(R3Trainer):
    def _compute_loss(self, model, inputs):
        self.part = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if kwargs.get("compute_entropy"):  # those of the loss, of a shuffled micro-batch
            gap = (found[0] - self.part["sampling_per_token_logps"]).detach().abs() * self.part["completion_mask"]
            self.gaps.append(float(gap.max()))
        return found

class Shifted(Watching):  # each token by the experts of the one before
    def padded(self, *args):
        return super().padded(*args).roll(1, 0)

def run(kind, engine, model):
    args = GRPOConfig(
        "run", max_steps=2, learning_rate=1e-2, bf16=False, use_cpu=True, report_to="none", logging_steps=1,
        per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2, max_completion_length=8,
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": ["1 + 1 =", "A mixture of experts", "no", "What is 2?"]})
    trainer = kind(model, letters, args, prompts, engine=engine)
    trainer.gaps = []
    trainer.train()
    steps = [row for row in trainer.state.log_history if "reward" in row]
    old = [row["sampling/sampling_logp_difference/max"] for row in steps]
    return {"of the loss": trainer.gaps, "old": old, "versions": engine.stats()[0]["version"]}

if __name__ == "__main__":
    model = str(save_tiny_moe("moe"))
    with AsyncVLLM.from_pretrained(model, dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 25) as engine:
        found = run(Watching, engine, model)
    with AsyncVLLM.from_pretrained(model, dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 25) as engine:
        print(json.dumps([found, run(Shifted, engine, model)]))
"""


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 80


@pytest.mark.needs_vllm
@pytest.mark.engine
@pytest.mark.skipif(not FOLDER and find_spec("trl") is None, reason="needs requirements/trl.txt, see there")
def test_trls_log_probs_follow_the_engines_experts(shelf: EngineShelf, tmp_path: Path) -> None:
    shelf.clear()
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(part for part in (str(ROOT), FOLDER) if part)
    done = subprocess.run(
        [sys.executable, "program.py", str(SCRIPT.parent)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    right, shifted = found
    # two steps of two micro-batches; the second step's rollouts are by weights that were sent
    assert len(right["of the loss"]) == 4 and len(right["old"]) == 2 and right["versions"] == 2
    assert max(*right["of the loss"], *right["old"]) < 1e-4  # float32 on both sides
    assert min(*shifted["of the loss"], *shifted["old"]) > 0.05
