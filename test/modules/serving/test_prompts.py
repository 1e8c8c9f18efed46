"""What counts as one prompt and what as many, in every form that vLLM and TorchRL users pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.requests import normalise_prompts
from torchrl_moe.testing.fake_engine import FakeReplica


def plain(prompts: Any = None, prompt_token_ids: Any = None) -> Any:
    """One prompt as it is, many as a list; token ids as lists."""
    batch = normalise_prompts(prompts, prompt_token_ids)
    for prompt in batch.prompts:
        assert isinstance(prompt, str) or (isinstance(prompt, np.ndarray) and prompt.dtype == np.int32)
    listed = [prompt if isinstance(prompt, str) else prompt.tolist() for prompt in batch.prompts]
    return listed[0] if batch.single else listed


ONE = [
    pytest.param("hi", "hi", id="text"),
    pytest.param([1, 2], [1, 2], id="list"),
    pytest.param([7], [7], id="list of one id"),
    pytest.param((1, 2), [1, 2], id="tuple"),
    pytest.param(range(3), [0, 1, 2], id="range"),
    pytest.param([np.int64(1), np.int64(2)], [1, 2], id="list of numpy ids"),
    pytest.param(np.array([1, 2]), [1, 2], id="numpy int64"),
    pytest.param(np.array([1, 2], np.uint8), [1, 2], id="numpy uint8"),
    pytest.param(torch.tensor([1, 2]), [1, 2], id="tensor int64"),
    pytest.param(torch.tensor([1, 2], dtype=torch.int32), [1, 2], id="tensor int32"),
    pytest.param({"prompt": "hi"}, "hi", id="TextPrompt"),
    pytest.param({"prompt_token_ids": [1, 2]}, [1, 2], id="TokensPrompt"),
    pytest.param({"prompt_token_ids": torch.tensor([1, 2])}, [1, 2], id="TokensPrompt of a tensor"),
    pytest.param({"prompt_token_ids": [1, 2], "prompt": "hi"}, [1, 2], id="TokensPrompt with its text"),
    pytest.param({"prompt_token_ids": None, "prompt": "hi"}, "hi", id="TextPrompt with an unset field"),
]

MANY = [
    pytest.param(["hi"], ["hi"], id="one-item list of text"),
    pytest.param(["a", "b"], ["a", "b"], id="texts"),
    pytest.param([[1, 2]], [[1, 2]], id="one-item list of ids"),
    pytest.param([[1, 2], [3]], [[1, 2], [3]], id="lists"),
    pytest.param(((1, 2), (3,)), [[1, 2], [3]], id="tuples"),
    pytest.param([np.array([1, 2]), np.array([3])], [[1, 2], [3]], id="list of arrays"),
    pytest.param(np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]], id="numpy 2-D"),
    pytest.param(torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]], id="tensor 2-D"),
    pytest.param(torch.tensor([[1, 2]]), [[1, 2]], id="tensor of one row"),
    pytest.param([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]], id="list of tensors"),
    pytest.param([{"prompt": "a"}], ["a"], id="one-item list of TextPrompts"),
    pytest.param([{"prompt": "a"}, {"prompt_token_ids": [1]}], ["a", [1]], id="dictionaries"),
    pytest.param(["a", [1, 2], {"prompt": "b"}], ["a", [1, 2], "b"], id="mixed"),
]


@pytest.mark.parametrize(("given", "expected"), ONE)
def test_one_prompt(given: Any, expected: Any) -> None:
    assert normalise_prompts(given).single
    assert plain(given) == expected


@pytest.mark.parametrize(("given", "expected"), MANY)
def test_many_prompts_keep_their_order(given: Any, expected: Any) -> None:
    assert not normalise_prompts(given).single
    assert plain(given) == expected


@pytest.mark.parametrize("given", [[1, 2], [[1, 2], [3]], torch.tensor([[1, 2], [3, 4]]), np.array([5])], ids=str)
def test_token_ids_may_come_under_their_own_name(given: Any) -> None:
    assert plain(prompt_token_ids=given) == plain(given)


def test_ids_are_a_copy() -> None:
    given = np.array([1, 2], np.int32)
    (ids,) = normalise_prompts(given).prompts
    given[0] = 9
    assert ids.tolist() == [1, 2]


def test_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="must specify either prompts or prompt_token_ids"):
        normalise_prompts()


@pytest.mark.parametrize("empty", ["", []])
def test_both_are_refused_even_if_one_is_empty(empty: Any) -> None:
    with pytest.raises(ValueError, match="cannot specify both prompts and prompt_token_ids"):
        normalise_prompts("hi", [1])
    with pytest.raises(ValueError, match="cannot specify both"):
        normalise_prompts(empty, [1])


@pytest.mark.parametrize("name", ["prompts", "prompt_token_ids"])
@pytest.mark.parametrize("empty", [[], (), np.zeros((0, 3), int), torch.zeros((0, 3), dtype=torch.long)], ids=repr)
def test_an_empty_list_is_refused_by_the_name_it_came_under(name: str, empty: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} cannot be empty"):
        normalise_prompts(**{name: empty})


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("", "prompts"),
        (["a", ""], r"prompts\[1\]"),
        ([[1], []], r"prompts\[1\]"),
        (np.array([], int), "prompts"),
        (torch.tensor([], dtype=torch.long), "prompts"),
        (torch.zeros((2, 0), dtype=torch.long), r"prompts\[0\]"),
        ({"prompt": ""}, r"prompts\['prompt'\]"),
        ([{"prompt_token_ids": []}], r"prompts\[0\]\['prompt_token_ids'\]"),
    ],
)
def test_an_empty_prompt_is_refused_by_its_place(given: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"^{where} is an empty prompt"):
        normalise_prompts(given)


@pytest.mark.parametrize(
    "given", [[[1], [4, -1]], torch.tensor([[1, 2], [-1, 0]]), np.array([[1, 2], [3, -1]])], ids=str
)
def test_a_negative_id_is_refused_by_its_place(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts\[1\] holds the negative token id -1; take padding out first"):
        normalise_prompts(given)


@pytest.mark.parametrize("given", [[1, 2**31], np.array([2**40, 2**31]), np.array([2**31], np.uint32)], ids=str)
def test_an_id_that_does_not_fit_is_refused_and_not_wrapped_around(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts holds the token id \d+; the largest possible one is 2147483647"):
        normalise_prompts(given)
    assert plain([2**31 - 1]) == [2**31 - 1]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([1, 2.5], id="a float among ids"),
        pytest.param(np.array([1.0, 2.0]), id="float array"),
        pytest.param(torch.tensor([1.0]), id="float tensor"),
        pytest.param(torch.tensor([1.0], dtype=torch.bfloat16), id="bfloat16 tensor"),
        pytest.param([True, False], id="bools"),
        pytest.param(torch.tensor([True]), id="bool tensor"),
        pytest.param([1, "a"], id="ids and text"),
        pytest.param([1, [2]], id="an id and a list"),
        pytest.param([[1, [2]]], id="a nested list"),
        pytest.param([[[1]]], id="too deep"),
        pytest.param(np.zeros((2, 2, 2), int), id="3-D"),
        pytest.param(b"hi", id="bytes"),
        pytest.param([1, 2**70], id="beyond 64 bits"),
        pytest.param([torch.tensor(1), torch.tensor(2)], id="list of scalars"),
    ],
)
def test_something_else_than_a_flat_list_of_integers_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompts(\[0\])? must be a flat list of integer token ids"):
        normalise_prompts(given)


@pytest.mark.parametrize(
    "given", [3, 2.5, object(), {1, 2}, iter([1]), np.array(3), torch.tensor(3)], ids=lambda value: type(value).__name__
)
def test_something_that_is_no_prompt_is_refused_by_its_type(given: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"prompts must be text, token ids or a list of them, got {type(given).__name__}"
    ):
        normalise_prompts(given)


@pytest.mark.parametrize("given", [[1.0, 2.0], ["a", 1], [None]], ids=repr)
def test_an_item_that_is_no_prompt_is_refused_by_its_place(given: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts\[[01]\] must be text or token ids, got (float|int|NoneType)"):
        normalise_prompts(given)


# -- completions to resume --------------------------------------------------------------------------------------------


def answer() -> Completion:
    return FakeReplica().submit([Request(request_id="a", sampling_params=None, prompt="hi")])[0].result()


def test_completions_to_resume_are_prompts_too() -> None:
    one, two = answer(), answer()
    batch = normalise_prompts(resume=one)
    assert batch.single and batch.prompts[0] is one
    for several in ([one, two], (one, two)):
        batch = normalise_prompts(resume=several)
        assert not batch.single and batch.prompts[0] is one and batch.prompts[1] is two


@pytest.mark.parametrize("other", ["prompts", "prompt_token_ids"])
def test_completions_and_prompts_together_are_refused(other: str) -> None:
    with pytest.raises(ValueError, match=f"cannot specify both {other} and resume: pass one of them"):
        normalise_prompts(**{other: [1], "resume": answer()})


@pytest.mark.parametrize(
    ("given", "words"),
    [("hi", "got str"), ([object()], "got a list with object at 0"), ({}, "got dict"), (iter([]), "got list_iterator")],
)
def test_something_else_than_completions_is_not_resumed(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"resume must be a Completion or a list of them, .*{words}"):
        normalise_prompts(resume=given)


def test_completions_of_nothing_are_not_resumed() -> None:
    one = answer()
    with pytest.raises(ValueError, match="resume cannot be empty: the error that it is from did not end a generate"):
        normalise_prompts(resume=[])
    with pytest.raises(ValueError, match=r"resume\[1\] has no answer"):
        normalise_prompts(resume=[one, replace(one, outputs=[])])
    with pytest.raises(ValueError, match=r"resume\[1\] has no prompt"):
        normalise_prompts(resume=[one, replace(one, prompt=None, prompt_token_ids=np.empty(0, np.int64))])


def test_a_dictionary_without_a_prompt_is_refused_by_its_keys() -> None:
    with pytest.raises(
        TypeError, match=r"prompts has neither 'prompt_token_ids' nor 'prompt'; its keys are \['text'\]"
    ):
        normalise_prompts({"text": "hi"})
