"""TorchRL's tools under the collector: state that is a sample's own, output in the next prompt, processes that end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import (
    ExecuteToolsInOrder,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)

from support.collecting import TOKENIZER, Questions, policy_of, queries
from support.waiting import in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]

TURNS = 2


def last_message(prompt: str) -> str:
    """The content of the last message before the generation prompt."""
    return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1]


def code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def keeping(word: str) -> str:
    return code(f"seen = globals().get('seen', []) + ['{word}']", "print('seen', seen)")


def counting(prompt: str) -> str:
    """First turn: keep the question in a variable that must be new. Second: add the tool's output, and say all."""
    return keeping("again" if "<|im_start|>tool" in prompt else last_message(prompt))


class Interpreters:
    """Makes chats with an interpreter, and keeps them."""

    def __init__(self) -> None:
        self.made: list[PythonInterpreter] = []

    def __call__(self) -> EnvBase:
        tool = PythonInterpreter(persistent=True, timeout=60.0)
        self.made.append(tool)
        env = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER).append_transform(tool)
        return env.append_transform(StepCounter(max_steps=TURNS))

    def running(self) -> list[Any]:
        # Another thread may be closing a tool, which takes the process from it at any moment.
        processes = [one.process for tool in self.made for one in list(tool.processes)]
        return [process for process in processes if process is not None and process.poll() is None]


@pytest.fixture
def collect(collect: Collect) -> Iterator[Collect]:
    """Makes collectors whose engine answers by a script."""
    with ExitStack() as stack:

        def make(env: Any, script: Callable[[str], str | None], **kwargs: Any) -> AsyncLLMCollector:
            engine = stack.enter_context(FakeAsyncVLLM(script=script))
            return collect(env, policy=policy_of(engine, 200), **{"max_staleness": 0, **kwargs})

        yield make


def turns(batch: TensorDictBase) -> list[tuple[TensorDictBase, ...]]:
    """The rows of each sample."""
    return list(zip(*[iter(batch.unbind(0))] * TURNS, strict=True))


def tool_output(row: TensorDictBase) -> list[str]:
    """What tools said after a turn."""
    after = row["next", "history"].prompt
    messages = list(zip(after.role, after.content, strict=True))
    return [content for role, content in messages[len(row["history"].full.role) :] if role == "tool"]


def test_an_interpreters_variables_are_its_samples_own(collect: Collect) -> None:
    """Three batches of four samples, so environments are used again: nobody finds what another one has seen."""
    interpreters = Interpreters()
    collector = collect(interpreters, counting, groups_per_batch=2)
    for batch in islice(collector, 3):
        assert batch.batch_size == (4 * TURNS,)
        for first, last in turns(batch):
            assert first["query"] == last["query"]
            (said,), (again,) = tool_output(first), tool_output(last)
            assert said == f"Code block 1 executed successfully:\nseen ['{first['query']}']\n"
            assert again == f"Code block 1 executed successfully:\nseen ['{first['query']}', 'again']\n"
    assert len(interpreters.made) <= 5  # 4 samples at a time, and the one that the collector looks at
    assert interpreters.running()
    collector.shutdown()
    assert interpreters.running() == []


def test_an_interpreter_that_dies_costs_its_samples_answer_only(collect: Collect) -> None:
    """The process of each sample of ``q0`` ends itself; the tool says so, and the next sample has a new one."""

    def script(prompt: str) -> str:
        if "<|im_start|>tool" not in prompt and "q0" in prompt:
            return code("import os", "os._exit(3)")
        return counting(prompt)

    batch = next(iter(collect(Interpreters(), script, groups_per_batch=2, order="fifo", max_in_flight=1)))
    for first, last in turns(batch):
        if first["query"] == "q0":
            assert tool_output(first)[0].startswith("Code block 1 failed:\nProcess terminated with return code 3")
            assert "failed" in tool_output(last)[0]
        else:
            assert tool_output(last)[0].endswith(f"seen ['{first['query']}', 'again']\n")


def test_a_group_that_fails_leaves_no_interpreter_behind(collect: Collect) -> None:
    interpreters = Interpreters()

    def failing() -> EnvBase:
        env = interpreters()
        env.transform[0]._format_result = lambda result: 1 / 0 if "q1" in result else result
        return env

    collector = collect(failing, counting, groups_per_batch=4)
    with pytest.raises(ZeroDivisionError):
        next(iter(collector))
    until(lambda: not interpreters.running())


def test_a_shutdown_while_code_runs_leaves_no_process(collect: Collect, tmp_path: Path) -> None:
    """If a process ends under its code the tool starts another one, so all children are looked at, not those known."""
    over = tmp_path / "over"
    waiting = code("import os, time", f"while not os.path.exists({str(over)!r}): time.sleep(0.01)")

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    collector = collect(Interpreters(), lambda prompt: waiting)
    trainer = in_thread(lambda: next(iter(collector), None))
    until(lambda: len(children() - before) == 2)
    collector.shutdown(timeout=0.1)
    over.touch()
    assert trainer.result(60) is None
    until(lambda: not children() - before)


def calling(prompt: str) -> str:
    """Calls two tools, then says what came of it."""
    if "<|im_start|>tool" in prompt:
        return f"It is {last_message(prompt).splitlines()[-1]}"
    first = f'<tool name="double" tag="A">{{"of": {last_message(prompt)[1:]}}}</tool>'
    return f'{first} and <tool name="double">{{"of": 100}}</tool><tool name="lost">{{}}</tool>'


class Double:
    """A service that counts all its calls."""

    name = "double"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, of: int, **_: Any) -> dict[str, Any]:
        self.calls.append(of)
        return {"is": 2 * of}


@pytest.mark.parametrize("shares_one", [True, False])
def test_tools_without_state_may_be_shared(collect: Collect, shares_one: bool) -> None:
    """A single environment for all samples, or one for each; the calls of an answer in their order."""
    double = Double()

    def env() -> EnvBase:
        tools = ExecuteToolsInOrder(ToolRegistry([double]), XMLBlockParser())
        chat = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER).append_transform(tools)
        return chat.append_transform(StepCounter(max_steps=TURNS))

    batch = next(iter(collect(env() if shares_one else env, calling, groups_per_batch=3)))
    for first, last in turns(batch):
        (said,) = tool_output(first)
        number = int(first["query"][1:])
        assert re.findall(r"call (\d)\)(?: \[tag: (\w)\])? (\w+)", said) == [
            ("1", "A", "succeeded"), ("2", "", "succeeded"), ("3", "", "failed")
        ]  # fmt: skip
        assert re.findall(r'"is": (\d+)', said) == [str(2 * number), "200"]
        # the row of the first turn ends with its answer: the tool came after it
        assert first["history"].full.role == ["user", "assistant"]
        assert first["history"].response.content == [calling(TOKENIZER.decode(first["tokens", "prompt"]))]
        # the next prompt is the ids of the turn, and what the tool said
        had = first["tokens", "full"]
        assert torch.equal(last["tokens", "prompt"][: len(had)], had)
        added = TOKENIZER.decode(last["tokens", "prompt"][len(had) :])
        assert added == f"\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n"
        assert torch.equal(last["log_probs", "full"][: len(had)][-4:], first["log_probs", "response"][-4:])
        assert last["history"].prompt.content[-1] == said
        assert (last["history"].response.content, tool_output(last)) == (["It is </tool_results>"], [])
    asked = Counter(int(query[1:]) for query in queries(batch)[::TURNS])
    assert Counter(double.calls) == asked + Counter({100: 6})


def test_a_simple_tool_in_an_environment_with_its_own_data(collect: Collect) -> None:
    """The transforms are copied with all but the primer, so the copies must be tools still."""
    tool = SimpleToolTransform({"double": lambda of: 2 * of}, parser=XMLBlockParser())
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=2, batch_size=(1,), tokenizer=TOKENIZER)
    env = env.append_transform(tool).append_transform(StepCounter(max_steps=TURNS))
    collector = collect(env, calling, dataloader=None, group_size=None, groups_per_batch=2)
    batch = next(iter(collector))
    assert sorted(queries(batch)) == ["q0"] * 4 + ["q1"] * 4
    for first, last in turns(batch):
        number = int(first["query"][1:])
        assert tool_output(first) == [
            f"Tool double executed successfully:\n{2 * number}",
            "Tool double executed successfully:\n200",
            "Tool lost failed:\nTool lost not found",
        ]
        assert last["history"].prompt.role == ["user", "assistant", "tool", "tool", "tool"]
