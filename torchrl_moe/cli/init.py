"""``torchrl-moe init``: a folder with a run of your own, which trains as it is: settings, data, reward, README."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from torchrl_moe.cli.command import FINE, BadUse, Command, Output
from torchrl_moe.cli.models import TINY, check_source, is_tiny

SMALL = """\
model: # a tiny Mixture of Experts, made when the run starts: it half knows sums of one digit
  source: torchrl_moe.testing.tiny_moe:practised_tiny_moe # your own: a folder or a hub name, and no arguments
  arguments:
    num_hidden_layers: 2
    num_experts: 8
    num_experts_per_tok: 2
    task: {operation: sum, digits: 1, held_out: 20}
    warmup: {mistake: random, noise: 0.7, noisy_lr: 1e-3, batch_size: 256}

engine:
  arguments: # of vLLM
    dtype: bfloat16
    max_model_len: 64 # prompt and answer, in tokens
    kv_cache_memory_bytes: 33554432 # enough for this model; on a GPU leave it out

rollout:
  prompts_per_step: 16
  group_size: 8 # answers to each prompt
  max_new_tokens: 4

optim:
  lr: 5e-4
"""
OWN = """\
model:
  source: {source} # a folder or a hub name

engine:
  arguments: # of vLLM
    dtype: bfloat16
    max_model_len: 2048 # prompt and answer, in tokens

rollout:
  prompts_per_step: 16
  group_size: 8 # answers to each prompt
  max_new_tokens: 256

optim:
  lr: 1e-6
"""
CONFIG = """\
# torchrl-moe train --config config.yaml, in this folder. --cfg prints every setting there is.
out: run # metrics, samples, checkpoints and the trained model
steps: 30

{model}
data:
  source: data.jsonl
  held_out: 20 # prompts that are evaluated on, and never trained on
  rewards: [reward:exact] # functions of reward.py; several are summed

eval:
  every: 10
"""
REWARD = '''\
"""The reward of an answer: a number, or None to leave the answer out.

A function names what it wants: prompt, completion, completion_ids, or any column of data.jsonl. TRL's reward functions,
which take and return lists, work as they are.
"""


def exact(completion, answer):
    """1 for the right answer, else 0."""
    return float(completion.strip() == answer)
'''
README = """\
# A run of your own

```bash
torchrl-moe train --config config.yaml                # {what}
torchrl-moe train --config config.yaml resume=true    # continues after a kill or a Ctrl-C
torchrl-moe train --config config.yaml steps=2 out=short    # with a change: another run, in a folder of its own
torchrl-moe train --config config.yaml engine.kind=transformers out=slow    # without vLLM
```

| file | what to change |
| --- | --- |
| `config.yaml` | the model, and how it is trained; `--cfg` prints all settings |
| `data.jsonl` | a row for each prompt: `prompt` is text, or a list of chat messages; other columns go to the reward |
| `reward.py` | the reward |

Before you train a model of your own: `torchrl-moe doctor MODEL` says whether its routers can be replayed, and
`torchrl-moe probe MODEL` how far engine and trainer are apart, with replay and without.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="made if it is not there; must be empty")
    parser.add_argument(
        "--model",
        default=TINY,
        metavar="MODEL",
        help="a folder or a hub name (default: a tiny model that half knows the task, made when the run starts)",
    )


def _run(options: argparse.Namespace, output: Output) -> int:
    folder, model = Path(options.folder).expanduser(), options.model
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadUse(f"{folder} is there already, and not an empty folder: name another, or remove it")
    small = is_tiny(model)
    if not small:
        check_source(model)
    source = str(Path(model).resolve()) if Path(model).is_dir() else model  # a run starts in the folder that is made
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    files = {
        "config.yaml": CONFIG.format(model=SMALL if small else OWN.format(source=json.dumps(source))),
        "data.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "reward.py": REWARD,
        "README.md": README.format(what="a minute or two on a CPU" if small else "all steps"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    then = f"cd {shlex.quote(str(folder))} && torchrl-moe train --config config.yaml"
    text = f"{', '.join(files)} are in {folder}. Next:\n{then}"
    output.show(text, {"folder": str(folder), "files": list(files), "next": then})
    return FINE


COMMAND = Command(
    name="init",
    help="a folder with a run of your own: settings, data, reward",
    description="Writes a folder that trains as it is: config.yaml, data.jsonl, reward.py and README.md. Change them "
    "one by one into your own.",
    examples=[
        ("torchrl-moe init my_run", "with a tiny model, for a CPU"),
        ("torchrl-moe init my_run --model path/to/moe", "with your model"),
        ("torchrl-moe init my_run --json", "what was written, as JSON"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
