"""``generate_kwargs`` as a ``GenerationConfig``: names, what implies what, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from torchrl_moe.modules.policies.transformers_generation import (
    GenerationSettings,
    changes_of,
    leaves_ids_out,
    temperature_of,
)


@pytest.mark.parametrize(
    ("given", "fields", "samples"),
    [
        (None, {}, 1),
        ({"max_new_tokens": 8}, {"max_new_tokens": 8}, 1),
        ({"max_tokens": 20, "max_new_tokens": 10}, {"max_new_tokens": 20}, 1),  # TorchRL's older name wins
        ({"n": 2, "num_return_sequences": 1, "do_sample": True}, {"do_sample": True}, 2),
        ({"temperature": 0.7}, {"temperature": 0.7, "do_sample": True}, 1),
        ({"top_p": 0.9}, {"top_p": 0.9, "do_sample": True}, 1),
        ({"temperature": 0}, {"do_sample": False}, 1),
        ({"temperature": 1e-6}, {"temperature": 0.01, "do_sample": True}, 1),
        ({"do_sample": False}, {"do_sample": False}, 1),
        ({"do_sample": False, "top_k": 3}, {"do_sample": False, "top_k": 3}, 1),
        ({"stop_sequences": ["\n"]}, {"stop_strings": ["\n"]}, 1),
        (
            {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "logprobs": True, "top_k": None},
            {"num_beams": 1},
            1,
        ),
        ({"output_scores": True, "return_dict_in_generate": True, "tokenizer": None}, {}, 1),
    ],
)
def test_names(given: Any, fields: dict[str, Any], samples: int) -> None:
    settings = GenerationSettings.of(given)
    assert (settings.fields, settings.samples) == (fields, samples)


def test_text_without_special_tokens() -> None:
    assert GenerationSettings.of({"skip_special_tokens": True}).skip_special_tokens
    assert not GenerationSettings.of({}).skip_special_tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "Temperature must be non-negative"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"top_k": 0}, "top_k must be positive"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"do_sample": False, "temperature": 0.7}, "When do_sample=False.*temperature must be 0"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True samples, and temperature=0 is greedy"),
        (
            {"num_beams": 4},
            r"generate_kwargs\['num_beams'\]=4: beam search .* leave it out, or call model.generate\(\)",
        ),
        ({"early_stopping": True}, "beam search"),
        ({"logprobs": 5}, r"generate_kwargs\['logprobs'\]=5: .* pass return_log_probs"),
        ({"include_stop_str_in_output": True}, r"\['include_stop_str_in_output'\], which transformers' Generation"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationSettings.of(given)


def model_with(**fields: Any) -> Any:
    return SimpleNamespace(generation_config=GenerationConfig(**fields))


def test_the_models_own_configuration_comes_second() -> None:
    own = model_with(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[1, 2], pad_token_id=7)
    config = GenerationSettings.of({"temperature": 0.9}).config(own)
    assert (config.temperature, config.top_k, config.do_sample) == (0.9, 20, True)
    assert (config.eos_token_id, config.pad_token_id) == ([1, 2], 7)
    assert temperature_of(GenerationSettings.of({}).config(own)) == 0.6
    assert temperature_of(GenerationSettings.of({"do_sample": False}).config(own)) == 0
    assert own.generation_config.temperature == 0.6


def test_all_words_are_sampled_from_unless_somebody_says_otherwise() -> None:
    """transformers fills in a top_k of 50."""
    config = GenerationSettings.of({"do_sample": True}).config(model_with())
    assert config.top_k == 0
    assert not leaves_ids_out(config)
    assert temperature_of(config) == 1
    assert GenerationSettings.of({"do_sample": True}).config(object()).top_k == 0
    assert GenerationSettings.of({"do_sample": False}).config(object()).top_k is None  # of which transformers warns


def test_another_search_is_refused_wherever_it_comes_from() -> None:
    for own, mode in (({"num_beams": 4}, "beam_search"), ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search")):
        with pytest.raises(ValueError, match=rf"the model's own generation_config, ask for {mode}"):
            GenerationSettings.of({}).config(model_with(**own))
    assert GenerationSettings.of({"num_beams": 1}).config(model_with(num_beams=4)).num_beams == 1
    assert GenerationSettings.of({}).config(model_with(return_dict_in_generate=True)).return_dict_in_generate is False


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({"do_sample": True, "top_k": 5}, True),
        ({"do_sample": True, "min_p": 0.1}, True),
        ({"do_sample": True, "typical_p": 0.9}, True),
        ({"do_sample": True, "top_p": 1.0, "top_k": 0}, False),
        ({"do_sample": False, "top_k": 5}, False),  # greedy takes the best word of all
        ({"do_sample": False, "suppress_tokens": [3]}, True),
        ({"min_new_tokens": 2}, True),
    ],
)
def test_whether_words_are_left_out(fields: dict[str, Any], leaves: bool) -> None:
    assert leaves_ids_out(GenerationConfig(**fields)) == leaves


def test_what_changes_logits_is_named() -> None:
    assert changes_of(GenerationConfig(repetition_penalty=1.1, guidance_scale=2.0)) == [
        "repetition_penalty=1.1",
        "guidance_scale=2.0",
    ]
    assert changes_of(GenerationConfig(temperature=0.5, repetition_penalty=1.0)) == []


def test_one_call_changes_what_it_names() -> None:
    settings = GenerationSettings.of({"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9})
    assert settings.changed({}) is settings
    assert settings.changed({"max_tokens": 4}).fields == {**settings.fields, "max_new_tokens": 4}
    assert settings.changed({"do_sample": False}).fields == {"max_new_tokens": 8, "top_p": 0.9, "do_sample": False}
    greedy = GenerationSettings.of({"do_sample": False})
    assert greedy.changed({"temperature": 0.5}).fields == {"temperature": 0.5, "do_sample": True}
