"""The tree of errors is the one that its docstring draws, and each says in a sentence what was got and what to do."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_moe import errors as _errors
from torchrl_moe.errors import GenerationTimeout, TorchRLMoEError
from torchrl_moe.modules import AsyncVLLM, RouterReplay, TransformersWrapper
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers import GRPOConfig, MoEGRPOTrainer, load_config

LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(?: +\((?P<mixins>\w+(?:, \w+)*)\))?(?: |$)")


def drawn() -> dict[str, list[str]]:
    """Name -> parent, and builtins that it also is, read off the drawing."""
    tree: dict[str, list[str]] = {}
    above: list[tuple[int, str]] = [(-1, "Exception")]
    drawing = _errors.__doc__.split(".. code-block:: text\n\n")[1].split("\n\n")[0]
    for line in drawing.splitlines():
        found = LINE.match(line)
        assert found, line
        indent = len(found["indent"])
        while above[-1][0] >= indent:
            above.pop()
        tree[found["name"]] = [above[-1][1], *(found["mixins"].split(", ") if found["mixins"] else [])]
        above.append((indent, found["name"]))
    return tree


def test_the_classes_are_the_drawn_tree() -> None:
    built = {name: [base.__name__ for base in getattr(_errors, name).__bases__] for name in _errors.__all__}
    assert built == drawn()
    assert built["SyncTimeout"] == ["WeightSyncError", "TimeoutError"]  # the drawing was read
    assert built["MissingEntryError"] == ["TorchRLMoEError", "KeyError", "ValueError"]


@pytest.mark.parametrize("name", _errors.__all__)
def test_every_error_pickles(name: str) -> None:
    before = getattr(_errors, name)("why")
    before.add_note("where")
    error = pickle.loads(pickle.dumps(before))
    assert (type(error).__name__, str(error), error.__notes__) == (name, "why", ["where"])


def test_a_timeout_keeps_what_had_finished() -> None:
    error = GenerationTimeout("2 of 3 finished in 5 s", partial=("a", None, "c"))
    assert isinstance(error, TorchRLMoEError)
    assert error.partial == ["a", None, "c"]
    assert pickle.loads(pickle.dumps(error)).partial == ["a", None, "c"]
    assert GenerationTimeout("nothing finished").partial == []


ROWS = [{"prompt": "1+1=", "answer": "2"}] * 4


def right(completion: str) -> float:
    return float(completion == "2")


def trainer(
    *, dataset: Any = ROWS, rewards: Any = right, model: Any = None, tokenizer: Any = None, **config: Any
) -> Any:
    """A run on the second engine, of a model in the folder ``moe``."""
    given = {"log": {"loggers": []}, "engine": {"kind": "transformers"}, **config}
    return MoEGRPOTrainer(model or "./moe", tokenizer=tokenizer, dataset=dataset, rewards=rewards, config=given)


def without_template() -> Any:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    chats = [{"prompt": [{"role": "user", "content": "hi"}]}] * 4
    return trainer(model=make_tiny_moe("qwen3_moe"), tokenizer=tokenizer, dataset=chats)


def bare() -> str:
    """A model's folder without its tokenizer, and with weights that nobody can load."""
    for file in Path("moe").iterdir():
        if "token" in file.name or "chat" in file.name:
            file.unlink()
        elif file.suffix == ".safetensors":
            file.write_bytes(b"")
    Path("moe").rename("bare")
    return "bare"


def holds_a_run() -> Any:
    Path("old").mkdir()
    Path("old/metrics.csv").write_text("step\n1\n")
    return trainer(out="old")


# fmt: off
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no model's folder": (lambda: AsyncVLLM.from_pretrained("./none"),
        "no model at './none': .* model.save_pretrained"),
    "no tokenizer": (lambda: AsyncVLLM.from_pretrained(bare()), r"has no tokenizer: tokenizer.save_pretrained\("),
    "no tokenizer, as an argument": (lambda: AsyncVLLM.launch({"model": bare()}), "'bare' has no tokenizer: "),
    "no tokenizer, for the second engine": (lambda: AsyncVLLM.from_pretrained(bare(), engine="transformers"),
        "'bare' has no tokenizer: "),
    "no tokenizer, in a run": (lambda: trainer(model=bare()), "model.source=bare: 'bare' has no tokenizer"),
    "no model's folder, in a run": (lambda: trainer(model="./none"),
        "no model in that folder, and names on the hub are"),
    "a dense model": (lambda: RouterReplay(make_tiny_moe("qwen3")), "it is a dense model, .*set loss.replay=none"),
    "an argument": (lambda: AsyncVLLM.from_pretrained("./moe", max_model_length=9), "do you mean max_model_len"),
    "an engine": (lambda: AsyncVLLM.from_pretrained("./moe", engine="sglang"), "must be one of vllm, transformers"),
    "no GPU": (lambda: AsyncVLLM.from_pretrained("./moe", devices=[[0]]), "no CUDA device: leave devices out on a CPU"),
    "no replicas": (lambda: AsyncVLLM.from_pretrained("./moe", num_replicas=0), "an integer from 1 to 65536, got 0"),
    "a model alone": (lambda: trainer(model=make_tiny_moe("qwen3_moe")), r"MoEGRPOTrainer\(model, tokenizer"),
    "no chat template": (without_template, "set tokenizer.chat_template, or use texts as prompts"),
    "no such column": (lambda: trainer(rewards=lambda completion, gold: 1.0), "asks for 'gold'; there are .*'answer'"),
    "a reward of nothing": (lambda: trainer(rewards=lambda: 1.0), "give it a parameter such as 'completion'"),
    "a reward that is none": (lambda: trainer(rewards=3), "rewards are functions, or names such as .*, got 3"),
    "a reward's module": (lambda: trainer(rewards="mine:exact"), "there is no mine.py, .*Start in its folder"),
    "no reward": (lambda: trainer(rewards=None), "name a function, package.module:function, or give the trainer rew"),
    "no data": (lambda: trainer(dataset=None), "name a dataset, or give the trainer a dataset or an env"),
    "empty data": (lambda: trainer(dataset=[]), "there are no rows to train on"),
    "no data file": (lambda: trainer(dataset="none.jsonl"), "there is no file or folder 'none.jsonl'"),
    "no prompts": (lambda: trainer(dataset=[{"a": "?"}] * 4), "no column 'prompt'; its columns are 'a': name"),
    "a setting": (lambda: GRPOConfig(step=3), "there is no setting step: did you mean steps?"),
    "a setting's kind": (lambda: trainer(steps="many"), "steps=many must be a whole number, at least 1"),
    "a group of one": (lambda: trainer(rollout={"group_size": 1}), "group_size=1 must be a whole number, at least 2"),
    "TRL's argument": (lambda: MoEGRPOTrainer("./moe", args=ROWS), "no args: here it is config="),
    "a configuration": (lambda: load_config("tiny"), "there is no configuration tiny; the package has .*tiny_cpu"),
    "an old run": (holds_a_run, "set resume=True to continue it, overwrite=True to replace it, or out to another"),
    "a loss": (lambda: trainer(loss={"name": "PPOLoss"}), "loss.name=PPOLoss must be one of .*GRPOLoss"),
    "a replay": (lambda: TransformersWrapper(make_tiny_moe(), replay="r3"), "must be one of .*'R3'.*, got 'r3'"),
}
# fmt: on


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("saved") / "moe")


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_sentence_that_says_what_to_do(
    case: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "moe")
    run, said = CASES[case]
    with pytest.raises((ValueError, TypeError, TorchRLMoEError), match=said) as caught:
        run()
    assert len(str(caught.value).splitlines()) == 1
