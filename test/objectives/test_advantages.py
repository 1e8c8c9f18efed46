"""Advantages by hand, in TorchRL's replay buffer, in whatever order trajectories come; MCAdvantage beside them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage

from torchrl_moe.objectives import DrGRPOAdvantage, GRPOAdvantage, ReinforcePlusPlusAdvantage, RLOOAdvantage

RETURNS = (1.0, 0.0, 0.0, 3.0)
"""Of four answers: mean 1, standard deviation sqrt(2)."""


def step(query: Any, reward: Any, done: bool = True, tokens: int = 3) -> TensorDict:
    reward = reward if isinstance(reward, Tensor) else torch.full((1, 1), float(reward))
    return TensorDict(
        {
            "query": query,
            "tokens": {"full": torch.arange(tokens)},
            "next": {"reward": reward, "done": torch.tensor([done])},
        }
    )


def answers(returns: Sequence[float], query: Any = "a") -> list[TensorDict]:
    """One-turn trajectories, ragged."""
    return [step(query, value, tokens=3 + i) for i, value in enumerate(returns)]


def advantages(td: TensorDictBase | None) -> list[float]:
    return [float(one["advantage"]) for one in td.unbind(0)]


# -- golden numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (RLOOAdvantage(4), [1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]),
        (DrGRPOAdvantage(4), [0, -1, -1, 2]),
        (GRPOAdvantage(4), [0, -(2**-0.5), -(2**-0.5), 2**0.5]),
        (GRPOAdvantage(), [0, -(2**-0.5), -(2**-0.5), 2**0.5]),
        (ReinforcePlusPlusAdvantage(4), [0, -(2**-0.5), -(2**-0.5), 2**0.5]),
        (MCAdvantage(4), [0, -(2**-0.5), -(2**-0.5), 2**0.5]),
    ],
)
def test_by_hand(transform: Any, expected: list[float]) -> None:
    assert advantages(transform.inv(lazy_stack(answers(RETURNS)))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("make", [RLOOAdvantage, DrGRPOAdvantage, GRPOAdvantage, ReinforcePlusPlusAdvantage])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("value", [0.5, 0.1])
def test_equal_returns_have_no_advantage(make: Any, size: int, value: float) -> None:
    """In float32 a mean of equal numbers may differ from them, and a standard deviation of 1e-9 makes that large."""
    found = advantages(make(size).inv(lazy_stack(answers((value,) * size))))
    assert found == [pytest.approx(0, abs=1e-9 * (value == 0.1))] * size


def test_reinforce_plus_plus_normalises_over_all_prompts() -> None:
    """Two prompts, returns 0, 2 and 4, 6: mean 3, variance 20 / 3; the baseline variant sees -1, 1, -1, 1."""
    batch = lazy_stack([*answers((0.0, 2.0), "a"), *answers((4.0, 6.0), "b")])
    plain = advantages(ReinforcePlusPlusAdvantage(4).inv(batch))
    assert plain == pytest.approx([value / (20 / 3) ** 0.5 for value in (-3, -1, 1, 3)])
    baseline = advantages(ReinforcePlusPlusAdvantage(4, group_size=2).inv(batch))
    assert baseline == pytest.approx([value / (4 / 3) ** 0.5 for value in (-1, 1, -1, 1)])


def test_steps_and_tokens_share_the_advantage_of_a_trajectorys_return() -> None:
    """Returns 1 + 2 and 1, of two steps and one."""
    turns = [step("a", 1, done=False), step("a", 2), step("a", 1)]
    assert advantages(RLOOAdvantage(2).inv(lazy_stack(turns))) == [2, 2, -2]
    rewards = [torch.tensor([[0.0], [0.0], [1.0]]), torch.zeros(4, 1)]
    out = DrGRPOAdvantage(2).inv(lazy_stack([step("a", r, tokens=len(r)) for r in rewards]))
    assert [one["advantage"].tolist() for one in out] == [[[0.5]] * 3, [[-0.5]] * 4]


# -- who waits for whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [RLOOAdvantage, DrGRPOAdvantage, GRPOAdvantage, MCAdvantage])
def test_groups_may_arrive_mixed_and_an_incomplete_one_waits(make: Any) -> None:
    buffer = ReplayBuffer(
        storage=LazyStackStorage(16), sampler=SamplerWithoutReplacement(), batch_size=4, transform=make(2)
    )
    a, b, c = answers((0.0, 1.0), "a"), answers((0.0, 3.0), "b"), answers((0.0, 9.0), "c")
    sizes = []
    for piece in ([a[0], b[0], c[0]], [b[1]], [a[1]]):
        buffer.extend(lazy_stack(piece))
        sizes.append(len(buffer))
    assert sizes == [0, 2, 4]
    out = buffer.sample()
    of_a, of_b = {RLOOAdvantage: (1.0, 3.0), DrGRPOAdvantage: (0.5, 1.5)}.get(make, (0.5**0.5, 0.5**0.5))
    for query, size in (("a", of_a), ("b", of_b)):
        found = [float(one["advantage"]) for one in out.unbind(0) if one["query"] == query]
        assert sorted(found) == pytest.approx([-size, size])
    assert buffer.transform[0].queued_trajectories == 1


def test_reinforce_plus_plus_waits_for_its_batch_and_for_its_groups() -> None:
    transform = ReinforcePlusPlusAdvantage(4, group_size=2)
    a, b, c = answers((0.0, 2.0), "a"), answers((0.0, 1.0), "b"), answers((5.0, 5.0), "c")
    assert transform.inv(lazy_stack([a[0], b[0], c[0], a[1]])) is None
    assert transform.queued_trajectories == 4
    out = transform.inv(lazy_stack([c[1]]))  # a and c are complete, b is not
    assert [one["query"] for one in out] == ["a", "a", "c", "c"]
    assert advantages(out) == pytest.approx([-(1.5**0.5), 1.5**0.5, 0, 0])
    assert transform.queued_trajectories == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_returns_of_many_tokens_are_summed_exactly(dtype: torch.dtype) -> None:
    rewards = torch.full((2000, 1), 60.0 if dtype == torch.float16 else 0.01, dtype=dtype)
    other = rewards.clone()
    other[0] += 0.5
    found = DrGRPOAdvantage().inv(lazy_stack([step("a", rewards), step("a", other)]))["advantage"][:, 0, 0]
    gap = float(other[0].double() - rewards[0].double())
    torch.testing.assert_close(found.double(), torch.tensor([-gap / 2, gap / 2]).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("storage", [LazyStackStorage, LazyTensorStorage])
def test_dense_batches_and_rows_of_trajectories(storage: Any) -> None:
    """``[2, 3]``: a row is a trajectory of three steps, whose group a tensor names."""
    after = {"reward": torch.tensor([[0.0, 0, 1], [0, 0, 3]])[..., None]}
    after["done"] = torch.tensor([[False, False, True]] * 2)[..., None]
    td = TensorDict({"query": torch.zeros(2, 3, 1), "next": TensorDict(after, [2, 3])}, [2, 3])
    buffer = ReplayBuffer(storage=storage(8), batch_size=6, transform=RLOOAdvantage(2))
    buffer.extend(td)
    assert "advantage" not in td.keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert buffer[:]["advantage"].tolist() == [[-2]] * 3 + [[2]] * 3
    pieces = [step(torch.tensor([1, i % 2]), i) for i in range(4)]
    out = RLOOAdvantage(2).inv(lazy_stack(pieces))
    assert [one["query"].tolist() for one in out] == [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert advantages(out) == [-2, 2, -2, 2]


def test_a_copy_waits_for_itself_and_a_buffer_shared_by_processes_is_refused() -> None:
    transform = RLOOAdvantage(2)
    transform.inv(lazy_stack(answers((1.0,))))
    twin = copy.deepcopy(transform)
    assert advantages(twin.inv(lazy_stack(answers((3.0,))))) == [-2, 2]
    assert transform.queued_trajectories == 1
    # each process would wait for the others' answers
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=RLOOAdvantage(2))
    with pytest.raises(RuntimeError, match="RLOOAdvantage keeps replay-buffer write state"):
        buffer.share()


# -- two groups of one prompt -----------------------------------------------------------------------------------------


def of_group(number: Any, reward: float, done: bool = True, query: str = "a") -> TensorDict:
    return step(query, reward, done).set("group_id", torch.as_tensor(number))


def by_group(td: TensorDictBase | None) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for one in td.unbind(0):
        found.setdefault(int(one["group_id"]), []).append(float(one["advantage"]))
    return found


MIXED = [(7, 0.0), (8, 0.0), (8, 3.0), (7, 2.0)]
"""Two groups of one prompt, mixed: returns 0, 2 and 0, 3."""


@pytest.mark.parametrize(
    ("transform", "of_7", "of_8"),
    [
        (GRPOAdvantage(), 0.5**0.5, 0.5**0.5),
        (GRPOAdvantage(2), 0.5**0.5, 0.5**0.5),
        (MCAdvantage(2, prompt_key="group_id"), 0.5**0.5, 0.5**0.5),
        (RLOOAdvantage(), 2, 3),
        (DrGRPOAdvantage(2), 1, 1.5),
        (ReinforcePlusPlusAdvantage(4, 2), (6 / 13) ** 0.5, (27 / 26) ** 0.5),
    ],
)
def test_two_groups_of_one_prompt_are_two(transform: Any, of_7: float, of_8: float) -> None:
    """REINFORCE++ sees -1, -1.5, 1.5, 1: variance 6.5 / 3."""
    found = by_group(transform.inv(lazy_stack([of_group(*one) for one in MIXED])))
    assert found == {7: pytest.approx([-of_7, of_7]), 8: pytest.approx([-of_8, of_8])}


def test_groups_that_come_whole_may_be_of_any_size() -> None:
    """A filter took answers out: 3, 2 and 1 are left. Of (0, 0, 3): mean 1, standard deviation sqrt(3)."""
    rows = [of_group(1, 0.0), of_group(2, 5.0), of_group(3, 9.0), of_group(1, 0.0), of_group(2, 5.0), of_group(1, 3.0)]
    transform = GRPOAdvantage()
    found = by_group(transform.inv(lazy_stack(rows)))
    assert found == {1: pytest.approx([-(3**-0.5), -(3**-0.5), 2 * 3**-0.5]), 2: [0, 0], 3: [0]}
    assert transform.queued_trajectories == 0
    assert advantages(RLOOAdvantage().inv(lazy_stack(rows[2:3]))) == [0]
    assert advantages(DrGRPOAdvantage().inv(lazy_stack(rows[2:3]))) == [0]


def test_a_group_starts_again_once_it_is_complete_and_each_batch_is_compared_with_itself() -> None:
    transform = DrGRPOAdvantage(2)
    assert advantages(transform.inv(lazy_stack(answers((0.0, 2.0, 10.0))))) == [-1, 1]
    assert transform.queued_trajectories == 1
    assert advantages(transform.inv(lazy_stack(answers((20.0,))))) == [-5, 5]
    transform = DrGRPOAdvantage()
    assert advantages(transform.inv(lazy_stack([of_group(1, 0.0), of_group(1, 2.0)]))) == [-1, 1]
    assert advantages(transform.inv(lazy_stack([of_group(1, 5.0), of_group(1, 9.0)]))) == [-2, 2]


def test_turns_share_their_samples_advantage_as_in_torchrl_with_a_trajectorys_return() -> None:
    """Samples of 2, 1 and 3 turns in one group, rewarded at their ends with 1, 0, 2: mean 1, standard deviation 1."""
    rewards = [[0.0, 1.0], [0.0], [0.0, 0.0, 2.0]]
    for transform in (GRPOAdvantage(), MCAdvantage(3, prompt_key="group_id", trajectory_return="sum")):
        turns = [of_group(4, reward, i == len(each) - 1) for each in rewards for i, reward in enumerate(each)]
        assert advantages(transform.inv(lazy_stack(turns))) == pytest.approx([0, 0, -1, 1, 1, 1])


def test_a_trajectory_of_two_groups_is_refused_and_nothing_of_its_batch_waits() -> None:
    transform = GRPOAdvantage()
    broken = [of_group(1, 1.0), of_group(2, 0.0, done=False), of_group(3, 1.0)]
    with pytest.raises(ValueError, match=r"steps of groups \(2,\) and \(3,\): .* Was a last step filtered out"):
        transform.inv(lazy_stack(broken))
    assert transform.queued_trajectories == 0


@pytest.mark.parametrize(
    ("td", "told"),
    [
        (step("a", 1), r"need a batch of steps, got a single step"),
        (lazy_stack([step("a", 1), step("a", 1, done=False)]), "the last trajectory of the batch is not done"),
        (lazy_stack([step("a", float("nan"))]), r"\('next', 'reward'\) must be finite, got nan"),
        (lazy_stack([step("a", torch.ones(1, 1, dtype=torch.int64))]), "must have a floating point dtype"),
        (lazy_stack([step("a", 1).exclude(("next", "reward"))]), r"RLOOAdvantage needs \('next', 'reward'\) in every"),
        (lazy_stack([step("a", 1).exclude(("next", "done"))]), r"RLOOAdvantage needs \('next', 'done'\) in every"),
        (lazy_stack([step("a", 1).exclude("query")]), "RLOOAdvantage needs 'query' in every"),
        (lazy_stack([step(3.5, 1).set_non_tensor("query", ["a"])]), "'query' must be text or a tensor, got list"),
    ],
)
def test_bad_trajectories_are_refused(td: TensorDictBase, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RLOOAdvantage(2).inv(td)
