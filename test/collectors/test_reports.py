"""What people see: of an asynchronous collector, and of TorchRL's own with the same reports."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from support.clock import Clock
from support.collecting import TOKENIZER, Questions, chat, new_weights, policy_of, queries
from support.html_table import TableReader
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.collectors.reports import CollectionRecord, SampleReader
from torchrl_moe.render.tokens import rows_of
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]


# -- reports ----------------------------------------------------------------------------------------------------------
def parity(query: str) -> float:
    return float(int(query[1:]) % 2)


@pytest.fixture
def collect(collect: Collect) -> Collect:
    """Makes collectors in the data's order, whose reward is odd or even."""

    def make(env: Any = None, **kwargs: Any) -> AsyncLLMCollector:
        return collect(chat(2, reward=parity) if env is None else env, **{"order": "fifo", **kwargs})

    return make


def bar_lines(text: str) -> list[str]:
    return [line for line in text.replace("\r", "\n").split("\n") if line.strip()]


def table_lines(text: str) -> list[list[str]]:
    """The cells of rows that rich has printed in one line each."""
    return [line.split() for line in text.splitlines()[1:] if line.strip() and "─" not in line]


def test_the_newest_samples_of_the_last_batch_are_shown(collect: Collect, capsys: pytest.CaptureFixture[str]) -> None:
    collector = collect(groups_per_batch=3)
    capsys.readouterr()
    collector.show_samples()
    assert (capsys.readouterr().out[:12], len(collector.to_pandas())) == ("no batch yet", 0)
    (_, batch) = islice(collector, 2)
    for arguments, words in (((0,), "n must be"), ((1, 0), "characters must be")):
        with pytest.raises(ValueError, match=words):
            collector.show_samples(*arguments)
    capsys.readouterr()
    collector.show_samples(3, characters=10)
    shown = capsys.readouterr().out
    assert shown.startswith("batch 1, 3 of 6 samples")
    header, *rows = table_lines(shown)
    assert header == ["group", "prompt", "answer", "reward", "tokens", "version", "segments", "finish_reason"]
    assert [row[0] for row in rows] == ["4", "5", "5"]
    assert [row[-5:] for row in rows] == [[odd, "6", "0", "1", "length"] for odd in "011"]
    assert queries(batch)[-3:] == ["q4", "q5", "q5"]


def test_samples_are_shown_token_by_token(collect: Collect, capsys: pytest.CaptureFixture[str]) -> None:
    collector = collect(groups_per_batch=3)
    capsys.readouterr()
    collector.show_samples(color="versions")
    assert capsys.readouterr().out == "version of the weights that sampled a token: not known\n"
    next(iter(collector))
    collector.show_samples(1, color="versions")
    legend, title, prompt, answer = capsys.readouterr().out.splitlines()
    assert legend.endswith(": version 0")
    assert title.startswith("sample 5: ") and title.endswith("6 response tokens, reward 0")
    assert prompt.split(maxsplit=1)[0] == "prompt" and "<|im_start|>user↵q2<|im_end|>↵" in prompt
    assert answer.startswith("  response, version 0  ")
    collector.show_samples(2, color="experts", layer=3, tokens=4)
    assert "expert that stands first in layer 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="color must be one of"):
        collector.show_samples(color="red")  # type: ignore[arg-type]


# -- tables -----------------------------------------------------------------------------------------------------------
def test_each_batch_is_a_row(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(groups_per_batch=3, max_staleness=1, total_dialog_turns=18)
    ages = []
    for version, batch in enumerate(collector):
        ages.append(version - int(batch["policy_version"].min()))
        new_weights(engine, version + 1)
    assert all(type(value) in (int, float, bool) for value in collector.stats().values())  # as loggers take them
    table = collector.to_pandas()
    expected = {
        "batch": [0, 1, 2],
        "rows": [6, 6, 6],
        "groups": [3, 3, 3],
        "tokens": [36, 36, 36],
        "frames": [6, 12, 18],
        "policy_version": [0, 1, 2],
        "inference/staleness_max": ages,
        "reward_mean": pytest.approx([1 / 3, 2 / 3, 1 / 3]),  # 0 1 2, 3 4 5, 6 7 8
        "reward_std": pytest.approx([math.sqrt(2) / 3] * 3),
    }
    assert {name: table[name].tolist() for name in expected} == expected
    assert table["waited"].sum() == pytest.approx(collector.stats()["collector/wait_for_batch"])
    assert str(table["time"].dtype.tz) == "UTC" and table["time"].is_monotonic_increasing  # type: ignore[union-attr]
    assert not table.isna().to_numpy().any()


def test_in_a_notebook_settings_and_figures_are_a_table_whatever_has_become_of_it(
    collect: Collect, engine: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nasty:
        def __call__(self, *rows: object) -> bool:
            if not rows:
                raise RuntimeError("<script>")
            return True

        def __repr__(self) -> str:
            return "<script>alert(1)</script>\n" + "x" * 1000

    collector = collect(groups_per_batch=3, group_filter=Nasty())
    next(iter(collector))
    for end in (lambda: None, engine.shutdown, collector.shutdown):
        end()
        assert repr(collector).startswith("AsyncLLMCollector(3 groups of 2 a batch")
        html = collector._repr_html_()
        read = TableReader(html)
        cells = {(kind, name): value for kind, name, value in read.rows["tbody"]}
        assert ("<script" in html, read.other) == (False, ["AsyncLLMCollector"])
        assert (cells["setting", "groups_per_batch"], len(cells["setting", "group_filter"])) == ("3", 80)
        assert (cells["metric", "frames"], cells["metric", "inference/staleness_mean"]) == ("6", "0")
    monkeypatch.setattr(collector, "stats", Nasty())
    # a group that failed because the engine had ended may have a line after it
    assert ["metric", "not known", "RuntimeError('<script>')"] in TableReader(collector._repr_html_()).rows["tbody"]
    unmade = AsyncLLMCollector.__new__(AsyncLLMCollector)
    assert TableReader(unmade._repr_html_()).other == ["AsyncLLMCollector(not made)"]


# -- the record -------------------------------------------------------------------------------------------------------


def test_seconds_that_the_trainer_waits_are_counted_for_the_batch_that_comes() -> None:
    clock = Clock()
    record = CollectionRecord(clock=clock)
    with pytest.raises(KeyboardInterrupt), record.wait():
        clock.now += 2
        raise KeyboardInterrupt
    clock.now += 7
    for seconds in (1, 5):
        with record.wait():
            clock.now += seconds
        record.add(TensorDict(), {"rows": 1})
    clock.now += 5
    assert (record.waited, record.scalars()) == (8, {"training/idle": 0.4, "collector/wait_for_batch": 8})
    assert [(row["batch"], row["waited"]) for row in record.rows()] == [(0, 3), (1, 5)]
    assert record.last == record.rows()[1]


def test_the_newest_rows_and_the_last_batch_are_kept() -> None:
    record = CollectionRecord(limit=3)
    assert record.batch is None and record.last == {}
    batches = [TensorDict({"number": torch.tensor(number)}) for number in range(5)]
    gone = weakref.ref(batches[3]["number"])
    for number, batch in enumerate(batches):
        record.add(batch, {"number": number})
        assert record.batch is batch
    batches.clear()
    gc.collect()
    assert gone() is None
    assert [row["number"] for row in record.rows()] == [2, 3, 4] and record.batches == 5


# -- the bar ----------------------------------------------------------------------------------------------------------
def test_the_bar_counts_answers_until_the_end(collect: Collect, capsys: pytest.CaptureFixture[str]) -> None:
    for is_verbose in (True, False):
        collector = collect(groups_per_batch=3, total_dialog_turns=12, verbose=is_verbose)
        capsys.readouterr()
        assert sum(1 for _ in collector) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        if is_verbose:
            last = bar_lines(shown.err)[-1]
            assert all(words in last for words in ("12/12", "reward=0.667", "age=0", "groups in line="))
        else:
            assert shown.err == ""
        collector.shutdown()
        assert capsys.readouterr() == ("", "")
    for end in (AsyncLLMCollector.shutdown, failing):
        collector = collect(chat(2, reward=lambda query: 1 / (query != "q3")), verbose=True)
        next(iter(collector))
        assert collector._progress._bar is not None
        end(collector)
        assert collector._progress._bar is None
        assert capsys.readouterr().err.endswith("\n")


def failing(collector: AsyncLLMCollector) -> None:
    with pytest.raises(ZeroDivisionError):
        sum(1 for _ in collector)


def test_a_ctrl_c_while_the_bar_is_drawn_loses_no_batch(collect: Collect, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = collect(groups_per_batch=2, verbose=True)
    assert queries(next(iter(collector)))[::2] == ["q0", "q1"]
    show = collector._progress.show

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(collector._progress, "show", show)
        raise KeyboardInterrupt

    monkeypatch.setattr(collector._progress, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    assert collector._progress._bar is not None  # it continues
    assert queries(next(iter(collector)))[::2] == ["q2", "q3"]
    assert (collector.to_pandas()["frames"].tolist(), collector.stats()["frames"]) == ([4, 8], 8)


# -- other collectors -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("error::FutureWarning")  # TorchRL's names an argument that neither collector takes
def test_the_synchronous_collector_reports_too(engine: FakeAsyncVLLM, capsys: pytest.CaptureFixture[str]) -> None:
    env = DatasetChatEnv.from_dataloader(Questions(64), repeats=2, batch_size=(4,), tokenizer=TOKENIZER)
    collector = LLMCollector(
        env.append_transform(StepCounter(max_steps=1)),
        policy=policy_of(engine),
        dialog_turns_per_batch=4,
        total_dialog_turns=8,
        verbose=True,
    )
    batches = list(collector)
    assert "8/8" in bar_lines(capsys.readouterr().err)[-1]
    table = collector.to_pandas()
    assert table["rows"].tolist() == [batch.numel() for batch in batches] == [4, 4]
    assert (table["tokens"].tolist(), table["groups"].tolist()) == ([24, 24], [0, 0])
    assert table["reward_mean"].isna().all()
    assert (collector.stats()["batches"], collector.stats()["completed"]) == (2, True)
    collector.show_samples(2)
    assert "batch 1, 2 of 4 samples" in capsys.readouterr().out
    assert repr(collector).startswith("LLMCollector(2 batches; ") and "\n" not in repr(collector)
    assert ("metric", "frames", "8") in {tuple(row) for row in TableReader(collector._repr_html_()).rows["tbody"]}
    collector.shutdown()


# -- sample reader ----------------------------------------------------------------------------------------------------
READER = SampleReader(SimpleNamespace(tokenizer=TOKENIZER))
SAID = {"version": "3 to 5", "segments": "2", "finish_reason": "stop"}


def ids(text: str) -> torch.Tensor:
    return torch.tensor(TOKENIZER.encode(text, add_special_tokens=False))


def row(answer: str = "42", reward: Any = 1.0, group: int = 7, **changed: Any) -> TensorDictBase:
    return TensorDict(
        {
            "text": TensorDict({"prompt": NonTensorData("1+1="), "response": NonTensorData(answer)}),
            "tokens": TensorDict({"prompt": ids("1+1="), "response": ids(answer)}),
            "next": TensorDict({"reward": torch.tensor(reward)}),
            "group_id": torch.tensor(group),
            "policy_versions": TensorDict({"full": torch.tensor([-1, -1, 3, 3, 5])}),
            "num_segments": torch.tensor(2),
            "finish_reason": NonTensorData("stop"),
            **changed,
        }
    )


def test_the_cells_of_a_row() -> None:
    cells = dict(zip(SampleReader.COLUMNS, READER.cells(row(reward=[[0.25]]), 80), strict=True))
    assert cells == {"group": "7", "prompt": "1+1=", "answer": "42", "reward": "0.25", "tokens": "2", **SAID}
    # what a row lacks is left open
    assert READER.cells(TensorDict(), 80) == ("–", "–", "–", "–", "0", "–", "–", "–")
    assert READER.cells(TensorDict({"policy_version": torch.tensor([4])}), 80)[5] == "4"
    unknown = row().exclude("num_segments")
    unknown["policy_versions", "full"][:] = -1
    assert READER.cells(unknown, 80)[5:7] == ("–", "–")


def test_figures_of_a_batch() -> None:
    rows = [row("ab", 0.0), row("abcd", [[1.0]]), row("", [[0.5], [0.5], [2.0]], group=8)]  # one with token rewards
    found = READER.metrics(lazy_stack(rows))
    assert found == {
        "rows": 3,
        "groups": 2,
        "tokens": 6,
        "reward_mean": pytest.approx(4 / 3),
        "reward_std": pytest.approx(math.sqrt((16 + 1 + 25) / 9 / 3)),  # 0, 1 and 3 about 4/3
    }


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad_output", [False, True])
def test_every_mode_shows_the_same_answer(
    engine: FakeAsyncVLLM, mode: Literal["history", "text", "tokens"], pad_output: bool
) -> None:
    texts = ["1+1=", "a longer question"]
    policy = policy_of(engine, input_mode=mode, pad_output=pad_output)
    if mode == "history":
        chats = [History(role=["user"], content=[text], batch_size=[1]) for text in texts]
        given = TensorDict({"history": ChatHistory(prompt=lazy_stack(chats), batch_size=[2])}, [2])
    elif mode == "text":
        given = TensorDict({"text": Text(prompt=texts, batch_size=[2])}, [2])
    else:
        given = lazy_stack([TensorDict({"tokens": Tokens(prompt=ids(text))}) for text in texts])
    done, reader = policy(given), SampleReader(policy)
    assert reader.metrics(done)["tokens"] == 12
    for one, text in zip(rows_of(done), texts, strict=True):
        cells = dict(zip(SampleReader.COLUMNS, reader.cells(one, 200), strict=True))
        shown = f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n" if mode == "history" else text
        answer = TOKENIZER.decode(one["tokens", "response"].tolist())
        assert (cells["prompt"], cells["answer"]) == (shown, answer)
        assert list(cells.values())[4:] == ["6", "0", "1", "length"]
