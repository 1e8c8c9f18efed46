"""What scorers read of a batch's sampling: by hand, and against the mask that was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.modules.policies.scoring import ScoringBatch, read_batch
from torchrl_moe.modules.policies.scoring_model import parts_by_temperature, read_sampling, says_nothing

V = 5
LENGTHS = (2, 4, 3)
LOG_PROBS = ("log_probs", "full")


def kept(ids: list[int], sizes: list[int]) -> KeptTokens:
    return KeptTokens(ids=torch.tensor(ids, dtype=torch.int32), sizes=torch.tensor(sizes, dtype=torch.int32))


def sample(length: int, temperature: float | None = None, words: Any = None) -> TensorDict:
    td = TensorDict(tokens=TensorDict(full=torch.arange(length)))
    if temperature is not None:
        td["sampling"] = TensorDict(temperature=torch.tensor(temperature))
        if words is not None:
            td["sampling", "kept"] = words
    return td


def mixed() -> TensorDictBase:
    """Of one temperature and all words, of another and few, and of nothing said."""
    return lazy_stack([sample(2, 0.5), sample(4, 2.0, kept([4, 2, 1], [0, 2, 0, -1])), sample(3)])


def batch_of(td: TensorDictBase) -> ScoringBatch:
    return read_batch(td, ("tokens", "full"), ("masks", "all_attention_mask"))


def read(td: TensorDictBase, temperature: float | None = None) -> Any:
    return read_sampling(td, batch_of(td), temperature)


def test_every_sample_is_read() -> None:
    found = read(mixed())
    assert found.temperatures.tolist() == [0.5, 2.0, 1.0]
    assert [None if one is None else one.sizes.tolist() for one in found.kept] == [None, [0, 2, 0, -1], None]


def test_what_says_nothing_has_the_temperature_that_it_must_have() -> None:
    assert read(lazy_stack([sample(2), sample(3)]), 0.7).temperatures.tolist() == pytest.approx([0.7, 0.7])
    assert read(lazy_stack([sample(2), sample(3, 0.7)]), 0.7).temperatures.tolist() == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_no_distribution_is_refused_by_sample(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"sample 1 was sampled at temperature .*: it is greedy, and has no distrib"):
        read(lazy_stack([sample(2, 1.0), sample(2, temperature)]))


def test_words_that_became_a_plain_tensordict_are_read() -> None:
    words = kept([4, 2, 1], [0, 2, 0, -1])
    (one,) = read(lazy_stack([sample(4, 1.0, words.to_tensordict())])).kept
    assert type(one) is KeptTokens
    assert (one.ids.tolist(), one.sizes.tolist()) == ([4, 2, 1], [0, 2, 0, -1])


def of_an_engine(td: TensorDict) -> TensorDict:
    per_token = torch.zeros_like(td["tokens", "full"])
    return td.update({"log_probs": {"full": per_token.float()}, "policy_versions": {"full": per_token.int()}})


def test_an_engines_answer_that_says_nothing_is_found() -> None:
    said, unsaid = of_an_engine(sample(2, 1.0)), of_an_engine(sample(3))
    assert says_nothing(lazy_stack([said, unsaid]), LOG_PROBS) == 1
    assert says_nothing(lazy_stack([said, said]), LOG_PROBS) is None
    dense = TensorDict(tokens=TensorDict(full=torch.zeros(2, 3).long(), batch_size=[2]), batch_size=[2])
    assert says_nothing(of_an_engine(dense), LOG_PROBS) == 0


@pytest.mark.parametrize("key", ["log_probs", "policy_versions"])
def test_what_no_engine_sampled_need_not_say_anything(key: str) -> None:
    assert says_nothing(lazy_stack([of_an_engine(sample(3)).exclude(key)]), LOG_PROBS) is None
    assert says_nothing(lazy_stack([of_an_engine(sample(3))]), ("mu", "full")) is None  # another key is the engine's


def test_temperatures_and_words_of_some_tokens_by_hand() -> None:
    td = mixed()
    batch = batch_of(td)
    wanted = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    temperature, words = read(td).of_tokens(batch, wanted)
    assert temperature.tolist() == [0.5, 2.0, 2.0, 2.0, 1.0, 1.0]
    assert (words[0].tolist(), words[1].tolist()) == ([4, 2, 1], [0, 2, 0, -1, 0, 0])
    wanted[1, 1] = wanted[2, 2] = False
    temperature, words = read(td).of_tokens(batch, wanted)
    assert temperature.tolist() == [0.5, 2.0, 2.0, 1.0]
    assert (words[0].tolist(), words[1].tolist()) == ([1], [0, 0, -1, 0])


def test_words_of_a_padded_batch() -> None:
    words = lazy_stack([kept([4, 2, 1], [0, 2, 0, -1]), kept([3], [0, 1])])
    batch = TensorDict(
        tokens=TensorDict(full=torch.zeros(2, 6).long(), batch_size=[2]),
        sampling=TensorDict(temperature=torch.tensor([0.5, 0.5]), kept=words.pad(6), batch_size=[2]),
        batch_size=[2],
    )
    wanted = torch.ones(2, 6).bool()
    temperature, (ids, sizes) = read(batch).of_tokens(batch_of(batch), wanted)
    assert temperature == 0.5
    assert (ids.tolist(), sizes.tolist()) == ([4, 2, 1, 3], [0, 0, 0, 2, 0, -1, 0, 0, 0, 0, 0, 1])


def test_dense_logits_lose_the_words_that_were_left_out() -> None:
    td = mixed()
    logits = torch.randn(3, 4, V, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cut = read(td).truncate(logits, batch_of(td))
    mask = torch.ones(3, 4, V, dtype=torch.bool)
    mask[1] = dense_mask(torch.tensor([4, 2, 1]), torch.tensor([0, 2, 0, -1]), V)
    assert torch.equal(cut[mask], logits[mask])
    assert (cut[~mask] == torch.finfo(torch.float32).min).all()
    assert (cut.softmax(-1)[~mask] == 0).all()
    cut.log_softmax(-1)[mask].sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[~mask].any()


def test_dense_logits_of_a_short_sample_are_cut_at_its_own_tokens() -> None:
    td = lazy_stack([sample(1, 1.0), sample(3, 1.0), sample(2, 1.0, kept([0], [0, 1]))])
    cut = read(td).truncate(torch.zeros(3, 3, V), batch_of(td))
    assert cut[2].eq(0).int().tolist() == [[1] * 5, [1] * 5, [1, 0, 0, 0, 0]]
    assert cut[:2].eq(0).all()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [(0.5, None)]),
        (torch.tensor([0.5, 2.0, 0.5]), [(0.5, [1, 0, 1]), (2.0, [0, 1, 0])]),
        (torch.tensor([0.7, 0.7]), [(pytest.approx(0.7), [1, 1])]),
        (torch.tensor([]), [(1.0, None)]),  # of no tokens: a forward pass is run all the same
    ],
)
def test_parts(temperature: float | Tensor, expected: list[Any]) -> None:
    found = [
        (value, None if part is None else part.int().tolist()) for value, part in parts_by_temperature(temperature)
    ]
    assert found == expected
