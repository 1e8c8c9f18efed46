"""What a collector makes of its arguments; refusals are in ``test_async_collector.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest
from torchrl.envs import StepCounter
from torchrl.envs.llm import DatasetChatEnv

from support.collecting import TOKENIZER, Questions, chat, policy_of
from support.values import VALUES
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.rollouts import Settings
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.collectors.workflow import source_of
from torchrl_moe.testing import FakeAsyncVLLM


def dataset_env() -> DatasetChatEnv:
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=4, batch_size=(16,), tokenizer=TOKENIZER)
    return env.append_transform(StepCounter(max_steps=1))


def test_an_environment_brings_its_data_and_its_repeats_and_what_is_given_wins() -> None:
    env, given = dataset_env(), Questions(3)
    source = source_of(env, None, None)
    assert (source.env.batch_size, source.make, source.group_size) == ((4,), None, 4)
    assert isinstance(source.dataloader, Questions)
    assert (env.batch_size, len(env.reset().get("query"))) == ((16,), 16)  # it is left alone
    fewer = source_of(dataset_env(), given, 2)
    assert (fewer.env.batch_size, fewer.group_size) == ((2,), 2)
    assert fewer.dataloader is given


def test_a_callable_makes_more_that_fit_alike_and_those_of_one_sample_stay_so() -> None:
    make = source_of(dataset_env, None, None).make
    assert make is not None and make().batch_size == (4,)
    assert make() is not make()
    assert source_of(lambda: chat(1), Questions(), 8).env.batch_size == (1,)


@pytest.mark.parametrize(("groups", "turns", "expected"), [(None, None, 1), (3, None, 3), (None, 8, 2), (2, 8, 2)])
def test_groups_in_a_batch(
    collect: Callable[..., AsyncLLMCollector], groups: int | None, turns: int | None, expected: int
) -> None:
    collector = collect(group_size=4, groups_per_batch=groups, dialog_turns_per_batch=turns)
    assert (collector.settings.groups_per_batch, collector.dialog_turns_per_batch) == (expected, 4 * expected)


def test_in_history_mode_later_turns_send_the_ids_of_earlier_ones(
    collect: Callable[..., AsyncLLMCollector], engine: FakeAsyncVLLM
) -> None:
    plain, tokens = policy_of(engine), policy_of(engine, input_mode="tokens")
    assert collect(policy=plain).policy.prefer_tokens and not plain.prefer_tokens
    assert collect(policy=None, policy_factory=lambda: tokens).policy is tokens


def test_torchrls_other_values_are_taken(collect: Callable[..., AsyncLLMCollector]) -> None:
    given = {"yield_completed_trajectories": True, "async_envs": False, "flatten_data": True}
    assert collect(**given, reset_at_each_iter=True, yield_only_last_steps=True).settings.only_last_turns


def test_the_defaults_of_settings_are_the_collectors() -> None:
    defaults = {name: one.default for name, one in inspect.signature(AsyncLLMCollector).parameters.items()}
    settings = Settings(reward_timeout=None, over_sample=2.0, on_stale="drop").by_name()
    other = {"group_size": 1, "groups_per_batch": 1, "over_sample": 2.0, "on_stale": "drop", "only_last_turns": False}
    assert settings == {name: other.get(name, defaults.get(name)) for name in settings}


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_each_setting_takes_a_value_or_refuses_it_by_its_name(name: str) -> None:
    for value in VALUES:
        try:
            settings = Settings(**{name: value})
            Schedule(settings.groups_per_batch, settings.max_staleness, settings.order, settings.window)
        except ValueError as error:
            assert name in str(error), (value, str(error))
