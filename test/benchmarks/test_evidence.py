"""What `make evidence` measures: sample sizes and collapses by hand, exact gradients, and a table that resumes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens

from benchmarks.evidence import gradients, lengths, real, runs, tasks
from benchmarks.evidence.figures import by_task, medians, middle, of_runs
from benchmarks.evidence.table import DATA, KEYS, VERSIONS, Table
from benchmarks.evidence.tasks import TASKS
from torchrl_moe.testing import Noise, make_tiny_moe
from torchrl_moe.testing.arithmetic import CharacterTokenizer
from torchrl_moe.trainers.run_record import COLUMNS


def test_the_effective_sample_size_by_hand() -> None:
    assert lengths.ess(torch.zeros(4)) == pytest.approx(1.0)
    # weights 1, 1, 2: (1 + 1 + 2)^2 / (3 * (1 + 1 + 4))
    assert lengths.ess(torch.tensor([1.0, 1.0, 2.0]).log()) == pytest.approx(16 / 18)
    # a constant factor changes nothing, and a single large weight leaves one sample of four
    assert lengths.ess(torch.tensor([1.0, 1.0, 2.0]).log() + 300) == pytest.approx(16 / 18, rel=1e-4)
    assert lengths.ess(torch.tensor([0.0, 0.0, 0.0, 60.0])) == pytest.approx(0.25)


def test_figures_of_log_ratios_by_hand() -> None:
    # two answers of two tokens: sums 0.4 and -0.2
    found = lengths.figures(torch.tensor([[0.3, 0.1], [-0.1, -0.1]], dtype=torch.float64))
    weights = [math.exp(0.4), math.exp(-0.2)]
    assert float(str(found["ess"])) == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)), rel=1e-4)
    assert float(str(found["std"])) == pytest.approx(0.6 / math.sqrt(2), rel=1e-4)
    # of the four ratios only exp(0.3) is more than 0.2 from 1
    assert float(str(found["clipped"])) == 0.25
    assert float(str(found["kept_seq_mis"])) == 1.0 and float(str(found["kept_geo"])) == 0.0
    k3 = sum(math.exp(x) - 1 - x for x in (0.3, 0.1, -0.1, -0.1)) / 4
    assert float(str(found["kl"])) == pytest.approx(k3, rel=1e-4)


def curve(rewards: list[float], **last: float) -> list[dict[str, float]]:
    found = [{"reward": reward, "kl": 0.0, "grad_norm": 1.0} for reward in rewards]
    found[-1].update(last)
    return found


def test_when_a_run_has_collapsed() -> None:
    healthy = [1.0] * 40
    assert runs.collapsed(curve(healthy)) == -1
    # the mean of 20 steps is below 0.5 once more than half of them are 0: after the eleventh
    assert runs.collapsed(curve(healthy + [0.0] * 10)) == -1
    assert runs.collapsed(curve(healthy + [0.0] * 11)) == 50
    # a run that never was better has not collapsed
    assert runs.collapsed(curve([0.0] * 60)) == -1
    assert runs.collapsed(curve(healthy, kl=1.5)) == 39
    assert runs.collapsed(curve(healthy, grad_norm=math.nan)) == 39


def test_a_table_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    calls: list[int] = []

    def measured(seed: int) -> Iterator[dict[str, object]]:
        calls.append(seed)
        yield {"arm": "live", "ess": 0.5}
        if seed == 2:
            raise KeyboardInterrupt
        yield {"arm": "R3", "ess": 0.9}

    table = Table(tmp_path / "a" / "b.csv", ("seed",))
    for seed in (0, 1, 0):
        table.measure(measured, seed=seed)
    with pytest.raises(KeyboardInterrupt):
        table.measure(measured, seed=2)
    again = Table(tmp_path / "a" / "b.csv", ("seed",))
    # a setting is there in whole or not at all
    assert calls == [0, 1, 2] and len(again.rows) == 4 and not again.holds(seed=2)
    again.measure(measured, seed=1)
    assert calls == [0, 1, 2]
    assert [row["ess"] for row in again.select(arm="R3")] == ["0.9", "0.9"]
    assert {row["torch"] for row in again.rows} == {torch.__version__}
    with pytest.raises(ValueError, match="are needed: move it away"):
        Table(tmp_path / "a" / "b.csv", ("seed", "task"))
    with pytest.raises(ValueError, match="has the columns"):
        again.measure(lambda seed: [{"other": 1}], seed=3)


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WORDS", 3)
    monkeypatch.setattr(gradients, "LENGTH", 2)
    monkeypatch.setitem(gradients.ALL_NOISES, "none", Noise())
    monkeypatch.setitem(gradients.ALL_NOISES, "all flipped", Noise(flips=1.0, nearest=False))


def small(noise: str, masks: str = "yes") -> dict[str, Any]:
    """A setting of two layers, eight experts, top two."""
    return dict(zip(KEYS["gradients"], ("qwen3_moe", 2, 8, 2, noise, masks, 0, "fresh"), strict=True))


@pytest.mark.parametrize("noise", ["none", "all flipped"])
def test_exact_gradients_without_noise_and_under_replay_are_the_engines_own(few_words: None, noise: str) -> None:
    rows = list(gradients.measured(**small(noise)))
    error = {(row["arm"], row["weight"], row["target"]): float(str(row["error"])) for row in rows}
    mismatch = float(str(rows[0]["rows_mismatch"]))
    # R3 computes the engine's own policy: all ratios are 1, and its expected gradient is the engine's
    assert error["R3", "ratio", "engine"] < 1e-4 and ("R3", "none", "engine") not in error
    if noise == "none":
        assert mismatch == 0 and error["live", "ratio", "engine"] < 1e-4
        assert error["live", "ratio", "trainer"] < 1e-4
    else:
        # with the ratio, live routing is exactly the gradient of the trainer's own reward, and not the engine's
        assert mismatch > 0.5 and error["live", "ratio", "engine"] > 0.01
        assert error["live", "ratio", "trainer"] < 1e-4 < error["R3", "ratio", "trainer"]


def test_without_masks_the_words_that_were_left_out_count(few_words: None) -> None:
    kl = {
        masks: [
            abs(float(str(row["kl"])))
            for row in gradients.measured(**small("none", masks))
            if (row["arm"], row["weight"]) == ("R3", "ratio")
        ]
        for masks in ("yes", "no")
    }
    assert max(kl["yes"]) < 1e-5 < min(kl["no"])


def test_bias_and_variance_are_those_of_single_answers(few_words: None) -> None:
    rows = {(row["arm"], row["weight"], row["target"]): row for row in gradients.variances(**small("all flipped"))}
    measured = {(row["arm"], row["weight"], row["target"]): row for row in gradients.measured(**small("all flipped"))}
    assert {key: row["bias"] for key, row in rows.items() if key in measured and key[1] != "ratio"} == {
        key: row["error"] for key, row in measured.items() if key[1] != "ratio"
    }
    # the terms of all answers, one backward pass for each word of weights
    answers = gradients.Answers(0)
    (age,) = gradients._ages(answers, **small("all flipped"))
    mu, actor = age.log_mu.exp(), age.arms["live"]
    one_each = torch.eye(len(mu), dtype=torch.float64) * age.advantage
    terms = torch.stack([answers.gradient(actor, age.told, one) for one in one_each])
    mean = mu @ terms
    variance = mu @ (terms - mean).square().sum(1)
    row, norm = rows["live", "none", "trainer"], age.targets["trainer"].norm()
    assert float(str(row["std"])) == pytest.approx(float(variance.sqrt() / norm), rel=1e-3)
    assert float(str(row["answers"])) == pytest.approx(
        (float(str(row["std"])) / float(str(row["bias"]))) ** 2, rel=1e-2
    )
    # the best mixture has no more bias than what it mixes
    for arm, target in itertools.product(("live", "R3"), ("engine", "trainer")):
        ends = [float(str(rows[arm, weight, target]["bias"])) for weight in ("none", "seq_tis")]
        assert float(str(rows[arm, "mixture", target]["bias"])) <= min(ends) * (1 + 1e-3)


def test_updates_of_adapters_are_merged_and_those_over_the_same_answers_move_them_more() -> None:
    rows = {
        (ages, row["lr"], row["arm"]): {name: float(str(row[name])) for name in ("kl", "rows_moved")}
        for ages in ("stale", "passes", "LoRA")
        for row in lengths.measured("qwen3_moe", 2, 8, 2, "bfloat16", 0, 8, ages)
    }
    assert rows["passes", 1e-5, "R3"]["kl"] > rows["stale", 1e-5, "R3"]["kl"]
    assert rows["LoRA", 1e-3, "R3"]["kl"] > rows["LoRA", 1e-4, "R3"]["kl"] > rows["stale", 0.0, "R3"]["kl"]
    assert rows["LoRA", 1e-3, "R3"]["rows_moved"] > 0


def test_medians_are_over_the_seeds_of_a_setting() -> None:
    rows = [
        {"noise": "int8", "lr": "0.0", "updates": "0", "arm": arm, "tokens": "8", "seed": str(seed), "ess": str(ess)}
        for arm, of_seeds in (("live", (0.1, 0.9, 0.2)), ("R3", (0.75,)))
        for seed, ess in enumerate(of_seeds)
    ]
    assert medians(rows, ["noise"], "tokens", ["ess"]).splitlines()[::2] == [
        "| noise | lr | updates | arm | tokens | seeds | ess |",
        "| int8 | 0.0 | 0 | live | 8 | 3 | 0.2 |",
    ]
    assert medians(rows, ["noise"], "tokens", ["ess"]).endswith("| int8 | 0.0 | 0 | R3 | 8 | 1 | 0.75 |")


def test_what_an_engine_quantises_is_in_its_log_probs() -> None:
    kl = {}
    for noise in ("int8 and bfloat16", "int8 weights and activations"):
        rows = lengths.measured("qwen3_moe", 2, 8, 2, noise, 0, 8, "fresh")
        (kl[noise],) = (float(str(row["kl"])) for row in rows if row["arm"] == "R3")
    assert kl["int8 weights and activations"] > 1.2 * kl["int8 and bfloat16"] > 0


def test_replayed_combine_weights_leave_only_what_is_rounded_elsewhere() -> None:
    rows = list(lengths.measured("qwen3_moe", 2, 8, 2, "bfloat16", 0, 8, "with weights"))
    kl = {row["arm"]: float(str(row["kl"])) for row in rows if row["updates"] == 0}
    assert 0 < kl["R3, weights"] < kl["R3"] <= kl["live"]


@pytest.fixture
def short_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of few answers, from a start of two layers that has hardly practised."""

    class EvenLength:
        """What makes some of a start's answers right, so that updates move the model."""

        def __contains__(self, text: str) -> bool:
            return len(text) % 2 == 0

    sums = TASKS["sums"](0)
    problems: Any = [(query, EvenLength()) for query, _ in sums.problems]
    short = dataclasses.replace(sums, layers=2, practise=lambda *_: None, problems=problems)
    monkeypatch.setattr(runs, "TASKS", {"sums": lambda _: short})
    monkeypatch.setattr(tasks, "STARTS", tmp_path)
    for name, value in {"WINDOW": 2, "PROMPTS": 2, "GROUP": 2}.items():
        monkeypatch.setattr(runs, name, value)


@pytest.mark.filterwarnings("ignore:the batch has the experts")
@pytest.mark.parametrize("arm", ["R3", "live, tis"])
def test_a_run_of_a_few_steps(arm: str, tmp_path: Path, short_runs: None) -> None:
    rows = list(runs.measured("sums", "random flips 1", 0, arm, 1e-4, 0, 4))
    assert [row["step"] for row in rows] == [2, 4] and {row["collapsed"] for row in rows} == {-1}
    # every row is flipped in the engine, and replay removes that
    kl = float(str(rows[0]["kl"]))
    assert kl < 1e-6 if arm == "R3" else kl > 1e-3
    # a second run begins with the same model, from the file
    assert [file.name for file in tmp_path.iterdir()] == ["start-sums-0.pt"]
    assert list(runs.measured("sums", "random flips 1", 0, arm, 1e-4, 0, 4)) == rows


def test_answers_of_countdown_are_right_by_another_reckoning() -> None:
    task = TASKS["countdown"](0)
    tokenizer = CharacterTokenizer()
    assert len(task.problems) == len({query for query, _ in task.problems}) == 64
    for query, right in task.problems:
        numbers, target = query.split("=")
        for answer in right:
            steps = [step.split("=") for step in answer.split(",")]
            assert all(eval(sum_) == int(result) for sum_, result in steps)
            (first, between), (second, last) = steps
            assert int(last) == int(target) and second.startswith(between)
            used = re.findall(r"\d+", first) + re.findall(r"\d+", second.removeprefix(between))
            assert sorted(used) == sorted(numbers.split(","))
            assert len(tokenizer(answer)["input_ids"]) < task.new_tokens
    # 3 * 7 = 21, 21 + 9 = 30; and no other way
    problems, ways = tasks.countdown_problems()
    assert dict(problems)["3,7,9=30"] == ("3*7=21,21+9=30", "7*3=21,21+9=30")
    assert "1+1=2,2+1=3" in ways["1,1,1"]


def test_the_shift_of_routers_weighs_a_ratio() -> None:
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    old = make_tiny_moe(mlp_only_layers=[], **sizes)  # type: ignore[arg-type]
    now = copy.deepcopy(old)
    rows = [torch.tensor([65, 66, 67, 68, 69]), torch.tensor([70, 71, 72])]  # one is padded

    def shifts() -> list[Tensor]:
        batch = lazy_stack(
            [TensorDict(tokens=Tokens(full=row), log_probs=TensorDict(full=torch.zeros(len(row)))) for row in rows]
        )
        runs.weigh_router_shift(batch, old, now)
        return [row["log_probs", "full"] for row in batch.unbind(0)]

    assert all(torch.equal(one, torch.zeros(len(one))) for one in shifts())
    router = now.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        router.copy_(0.95 * router + 0.05 * router.roll(1, 0))  # others are chosen now and then
    for full, shift in zip(rows, shifts(), strict=True):
        assert float(shift[0]) == 0.0
        for t in range(1, len(full)):
            gap = 0.0
            for layer in range(2):
                r, r_old = (
                    model(full[None, :t], output_router_logits=True).router_logits[layer][-1].softmax(-1).tolist()
                    for model in (now, old)
                )
                chosen = sorted(range(4), key=lambda e, of=r_old: -of[e])[:2]
                gap += sum(abs(math.log(r[e] / r_old[e])) for e in chosen) / 2
            assert float(shift[t]) == pytest.approx(min(gap / 2, -math.log(0.8)), abs=1e-5)
    assert float(shifts()[0][1:].min()) > 0
    with torch.no_grad():
        router.zero_()
    assert float(shifts()[0][1:].max()) == pytest.approx(-math.log(0.8))  # the floor


def test_the_table_of_runs_by_hand(tmp_path: Path) -> None:
    assert middle([3.0, 1.0, 2.0, math.nan, 4.0]) == (2.5, 1.75, 3.25)  # median and quartiles

    def rows(arm: str, seed: int, rewards: list[float], collapsed: int = -1) -> list[dict[str, str]]:
        what = {"task": "sums", "noise": "none", "stale": "0", "lr": "0.1", "steps": "40", "arm": arm}
        found = {"seed": str(seed), "kl": "0.25", "collapsed": str(collapsed)}
        return [{**what, **found, "step": str(20 * i), "reward": str(r)} for i, r in enumerate(rewards, 1)]

    table = Table(tmp_path / "none.csv", KEYS["runs"])
    # the second run of R3 ended early: it is compared over the step that both have; the third has no partner
    table.rows = [
        *rows("live", 0, [0.2, 0.4]), *rows("live", 1, [0.1, 0.9]),
        *rows("R3", 0, [0.4, 0.6]), *rows("R3", 1, [0.0], collapsed=3), *rows("R3", 2, [0.0, 0.5]),
    ]  # fmt: skip
    first, second = of_runs(table).splitlines()[2:]
    assert first == "| sums | none | 0 | R3 | 3 | 0.500 | -0.100 to 0.200 (2) | 0.2 | 1 |"
    assert second == "| sums | none | 0 | live | 2 | 0.650 |  | 0.2 | 0 |"


def test_the_real_model_is_left_out_where_it_was_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(real.settings()) == [] and "`make real-model` makes it" in capsys.readouterr().err
    made = Path(real.MODEL.format(real.SUPERVISED))
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    wanted = list(real.settings())
    assert [(one["seed"], one["task"]) for one in wanted[:3]] == [(0, "even"), (0, "sums"), (1, "even")]
    assert all({*one} == {*KEYS["real"]} for one in wanted)


def test_a_run_of_the_real_model_is_rows_like_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def train(command: list[str], **_: object) -> None:
        asked.extend(command)
        (out,) = (Path(one.removeprefix("out=")) for one in command if one.startswith("out="))
        out.mkdir()
        written = {name: "" for name in COLUMNS} | {"step": "0", "reward": "0.5", "held_out_reward": "0.25"}
        (out / "metrics.csv").write_text(f"{','.join(written)}\n{','.join(written.values())}\n")

    monkeypatch.setattr(real.subprocess, "run", train)
    what = {"task": "even", "seed": 2, "steps": 30, "supervised": 15}
    (row,) = real.measured(**what)
    assert (row["step"], row["reward"], row["held_out_reward"], row["dlogp_mean"]) == ("0", "0.5", "0.25", "")
    assert {"model.source=runs/real_moe_warm_15", "seed=2", "steps=30", "optim.lr=5e-4"} <= {*asked}
    kept = Table(DATA / "real.csv", KEYS["real"])
    assert [*kept.rows[0]] == [*what, *row, *VERSIONS]
    by_task(kept, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
