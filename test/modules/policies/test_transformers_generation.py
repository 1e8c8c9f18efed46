"""A model's own generation: what is said of each token is what a plain forward pass of the whole answer says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig

from support.families import build
from support.routes import recorded
from torchrl_moe.data import KeptTokens
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.transformers_generation import (
    GenerationSettings,
    changes_of,
    generate_answers,
    leaves_ids_out,
    temperature_of,
)
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [11]]
VOCABULARY = 259


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_tiny_moe()


@pytest.fixture(scope="module")
def replay(model: nn.Module) -> RouterReplay:
    return RouterReplay(model)


def config_of(model: Any, **generate_kwargs: Any) -> GenerationConfig:
    config = GenerationSettings.of({"max_new_tokens": 6, **generate_kwargs}).config(model)
    config.pad_token_id = 256
    return config


def whole(completion: Completion, output: CompletionOutput) -> Tensor:
    return torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids]))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "all words": {"do_sample": True},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_p, temperature": {"top_p": 0.6, "temperature": 1.7},
    "min_p": {"min_p": 0.4},
    "a ban": {"do_sample": True, "suppress_tokens": [3, 4]},
    "greedy": {"do_sample": False},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probs_are_of_what_was_drawn_from(model: nn.Module, replay: RouterReplay, sampling: str) -> None:
    torch.manual_seed(0)
    config = config_of(model, **SAMPLINGS[sampling])
    samples = 2 if config.do_sample else 1
    found = generate_answers(model, PROMPTS, config, samples, replay=replay)
    assert [len(one.outputs) for one in found] == [samples] * 3
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert completion.prompt_token_ids.tolist() == prompt
        for output in completion.outputs:
            ids = whole(completion, output)
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / (temperature_of(config) or 1.0)
            check_words(sampling, output, logits)
            for t, row in enumerate(logits):
                kept = words(output, t)
                wanted = row[kept].log_softmax(-1)[int((kept == ids[len(prompt) + t]).nonzero()[0, 0])]
                assert abs(float(wanted) - output.logprobs[t]) <= 1e-5
            if sampling == "greedy":
                assert torch.equal(logits.argmax(-1), ids[len(prompt) :])
            assert len(output.token_ids) == 6 or int(ids[-1]) == 258
            assert output.policy_versions.tolist() == [-1] * len(output.token_ids)
            assert_routes(output, recorded(model, replay, ids[None]))


def assert_routes(output: CompletionOutput, routes: Tensor) -> None:
    """Those of a forward pass of the whole answer, but for the last token."""
    got = torch.from_numpy(output.routed_experts)
    assert torch.equal(got.sort(-1).values, routes[0, :-1].sort(-1).values.to(got.dtype))


def words(output: CompletionOutput, t: int) -> Tensor:
    if output.kept is None:
        return torch.arange(VOCABULARY)
    kept = KeptTokens(ids=torch.from_numpy(output.kept.ids), sizes=torch.from_numpy(output.kept.sizes))
    kept.validate(vocabulary=VOCABULARY, tokens=torch.from_numpy(output.token_ids))
    return kept.ids_of(t, vocabulary=VOCABULARY)


def check_words(sampling: str, output: CompletionOutput, logits: Tensor) -> None:
    """The words, by hand; a word at the very border may fall on either side of it."""
    if sampling in ("all words", "temperature", "greedy"):
        assert output.kept is None
        return
    for t, row in enumerate(logits):
        kept, probabilities = words(output, t), row.softmax(-1)
        if sampling == "top_k":
            assert set(kept.tolist()) == set(row.topk(7).indices.tolist())
        elif sampling == "a ban":
            assert kept.tolist() == [word for word in range(VOCABULARY) if word not in (3, 4)]
        elif sampling == "min_p":
            assert set(kept.tolist()) == set((probabilities >= 0.4 * probabilities.max()).nonzero()[:, 0].tolist())
        else:
            least = probabilities[kept].sum() - probabilities[kept].min()
            assert float(least) <= 0.6 + 1e-5
            assert float(probabilities[kept].sum()) >= 0.6 - 1e-5


@pytest.fixture
def said(model: nn.Module, one_thread: None) -> list[int]:
    """Every word that a greedy answer to the first prompt has, in order."""
    (completion,) = generate_answers(model, PROMPTS[:1], config_of(model))
    return list(completion.outputs[0].token_ids.tolist())


def test_an_answer_ends_with_its_end_token(model: nn.Module, replay: RouterReplay, said: list[int]) -> None:
    """Pads stand behind it, in a batch whose other answers continue; they are no part of it."""
    third = said[2]
    up_to_it = said[: said.index(third) + 1]
    config = config_of(model, eos_token_id=[third, 258])
    first, second, _ = generate_answers(model, PROMPTS, config, replay=replay)
    (output,) = first.outputs
    assert (output.token_ids.tolist(), output.finish_reason) == (up_to_it, "stop")
    assert len(output.logprobs) == len(output.token_ids) == len(output.routed_experts) - 2
    lengths = [len(second.outputs[0].token_ids), second.outputs[0].finish_reason]
    assert lengths == [6, "length"] or second.outputs[0].token_ids[-1] in (third, 258)
    config = config_of(model, eos_token_id=third)
    config.pad_token_id = third
    (output,) = generate_answers(model, PROMPTS, config)[0].outputs
    assert output.token_ids.tolist() == up_to_it


def test_an_answer_ends_with_a_stop_string() -> None:
    tokenizer, model = ByteTokenizer(), make_tiny_moe("qwen3")
    ascii_only = {"suppress_tokens": list(range(128, VOCABULARY))}
    (completion,) = generate_answers(model, PROMPTS[:1], config_of(model, **ascii_only))
    said = completion.outputs[0].token_ids.tolist()
    config = config_of(model, stop_sequences=[chr(said[2])], **ascii_only)
    (output,) = generate_answers(model, PROMPTS[:1], config, tokenizer=tokenizer)[0].outputs
    assert output.token_ids.tolist() == said[: said.index(said[2]) + 1]
    assert output.finish_reason == "stop"
    config = config_of(model, stop_sequences=["x"])
    with pytest.raises(ValueError, match=r"stop_sequences=\['x'\] are found by a tokenizer"):
        generate_answers(model, PROMPTS[:1], config)


@pytest.mark.parametrize("change", [{"repetition_penalty": 1.3}, {"sequence_bias": [[[5], 2.0]]}])
def test_log_probs_of_changed_logits_are_refused(model: nn.Module, change: dict[str, Any]) -> None:
    """By name, although the model's own configuration may have brought it."""
    config = config_of(model, do_sample=True, **change)
    with pytest.raises(ValueError, match=rf"{next(iter(change))}=.* changes logits.* or pass return_log_probs=False"):
        generate_answers(model, PROMPTS, config)
    (completion,) = generate_answers(model, PROMPTS[:1], config, log_probs=False)
    assert completion.outputs[0].logprobs is None
    assert completion.outputs[0].kept is None


def test_a_word_that_is_forced_has_log_prob_0(model: nn.Module) -> None:
    config = config_of(model, do_sample=True, forced_eos_token_id=258)
    (output,) = generate_answers(model, PROMPTS[:1], config)[0].outputs
    assert (int(output.token_ids[-1]), float(output.logprobs[-1])) == (258, 0.0)
    assert words(output, -1).tolist() == [258]


def test_what_there_is_nothing_to_sample_from(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="the prompt of sample 1 has no tokens"):
        generate_answers(model, [[1], []], config_of(model))
    with pytest.raises(ValueError, match="3 greedy answers to a prompt would be identical"):
        generate_answers(model, [[1]], config_of(model), 3)


def test_a_model_in_training_samples_without_dropout() -> None:
    model = make_tiny_moe(attention_dropout=0.9)
    wanted = generate_answers(model.eval(), PROMPTS, config_of(model))
    model.train()
    model.model.layers[0].eval()
    got = generate_answers(model, PROMPTS, config_of(model))
    assert [one.outputs[0].token_ids.tolist() for one in got] == [one.outputs[0].token_ids.tolist() for one in wanted]
    assert model.training
    assert not model.model.layers[0].training


@pytest.mark.parametrize("prompts", [PROMPTS, [[5]]])
def test_routes_without_a_cache(model: nn.Module, replay: RouterReplay, prompts: list[list[int]]) -> None:
    for completion in generate_answers(model, prompts, config_of(model, use_cache=False), replay=replay):
        (output,) = completion.outputs
        assert_routes(output, recorded(model, replay, whole(completion, output)[None]))


@pytest.mark.parametrize("family", ["minimax", "deepseek_v4", "qwen3_next", "jamba"])
def test_answers_to_prompts_of_any_lengths_are_those_to_each_alone(family: str) -> None:
    """In order, with their log-probs and routes; ``minimax`` and ``deepseek_v4`` would see pads before a prompt."""
    model = build(family)
    replay = RouterReplay(model)
    prompts = [list(range(3, 3 + n)) for n in (14, 5, 6, 5)]

    def ask(*prompts: list[int]) -> list[Completion]:
        config = config_of(model, temperature=0)
        config.pad_token_id = 0
        return generate_answers(model, prompts, config, replay=replay)

    together = ask(*prompts)
    assert [one.request_id for one in together] == ["0", "1", "2", "3"]
    for completion, prompt in zip(together, prompts, strict=True):
        (alone,) = ask(prompt)
        (got,), (wanted,) = completion.outputs, alone.outputs
        assert completion.prompt_token_ids.tolist() == prompt
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
        assert np.array_equal(np.sort(got.routed_experts), np.sort(wanted.routed_experts))


def test_an_adapter_s_model_generates_with_routes() -> None:
    model = get_peft_model(make_tiny_moe(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    replay = RouterReplay(model)
    (completion,) = generate_answers(model, PROMPTS[:1], config_of(model), replay=replay)
    (output,) = completion.outputs
    assert_routes(output, recorded(model, replay, whole(completion, output)[None]))


def test_another_thread_s_forward_pass_is_no_step(model: nn.Module, replay: RouterReplay) -> None:
    """It runs between two steps, where no context is open."""
    wanted = generate_answers(model, PROMPTS, config_of(model), replay=replay)
    passes: list[Any] = []

    def between(module: nn.Module, _: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            passes.append(pool.submit(module, torch.tensor([[1, 2]])).result())

    with ThreadPoolExecutor(1) as pool:
        hook = model.register_forward_pre_hook(between)
        try:
            got = generate_answers(model, PROMPTS, config_of(model), replay=replay)
        finally:
            hook.remove()
    assert len(passes) >= 6
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(one.outputs[0].routed_experts, other.outputs[0].routed_experts)


def test_a_failed_generation_leaves_nothing_on_the_model(model: nn.Module, replay: RouterReplay) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in a layer")

    hook = model.model.layers[1].register_forward_pre_hook(fail)  # type: ignore[union-attr,index]
    with pytest.raises(ArithmeticError, match="in a layer"):
        generate_answers(model, PROMPTS, config_of(model), replay=replay)
    hook.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert generate_answers(model, PROMPTS, config_of(model), replay=replay)


# -- generate_kwargs as a GenerationConfig: names, what implies what, and what is refused


@pytest.mark.parametrize(
    ("given", "fields", "samples"),
    [
        (None, {}, 1),
        ({"max_tokens": 20, "max_new_tokens": 10}, {"max_new_tokens": 20}, 1),  # TorchRL's older name wins
        ({"n": 2, "num_return_sequences": 1, "do_sample": True}, {"do_sample": True}, 2),
        ({"temperature": 0.7}, {"temperature": 0.7, "do_sample": True}, 1),
        ({"temperature": 0}, {"do_sample": False}, 1),
        ({"temperature": 1e-6}, {"temperature": 0.01, "do_sample": True}, 1),
        ({"do_sample": False, "top_k": 3}, {"do_sample": False, "top_k": 3}, 1),
        ({"stop_sequences": ["\n"]}, {"stop_strings": ["\n"]}, 1),
        ({"logprobs": True, "top_k": None}, {}, 1),
        ({"output_scores": True, "return_dict_in_generate": True, "tokenizer": None}, {}, 1),
    ],
)
def test_vllms_and_torchrls_names_become_transformers(given: Any, fields: dict[str, Any], samples: int) -> None:
    settings = GenerationSettings.of(given)
    assert (settings.fields, settings.samples) == (fields, samples)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "Temperature must be non-negative"),
        ({"do_sample": False, "temperature": 0.7}, "When do_sample=False.*temperature must be 0"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True samples, and temperature=0 is greedy"),
        ({"num_beams": 4}, r"\['num_beams'\]=4: beam search .* leave it out, or call model.generate\(\)"),
        ({"logprobs": 5}, r"\['logprobs'\]=5: .* pass return_log_probs"),
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
    assert temperature_of(GenerationSettings.of({}).config(own)) == 0.6 == own.generation_config.temperature
    assert temperature_of(GenerationSettings.of({"do_sample": False}).config(own)) == 0


def test_all_words_are_sampled_from_unless_somebody_says_otherwise() -> None:
    """transformers fills in a top_k of 50."""
    for model in (model_with(), object()):
        config = GenerationSettings.of({"do_sample": True}).config(model)
        assert (config.top_k, leaves_ids_out(config), temperature_of(config)) == (0, False, 1)
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
        ({"do_sample": True, "typical_p": 0.9}, True),
        ({"do_sample": True, "top_p": 1.0, "top_k": 0}, False),
        ({"do_sample": False, "top_k": 5}, False),  # greedy takes the best word of all
        ({"do_sample": False, "suppress_tokens": [3]}, True),
        ({"min_new_tokens": 2}, True),
    ],
)
def test_whether_words_are_left_out(fields: dict[str, Any], leaves: bool) -> None:
    assert leaves_ids_out(GenerationConfig(**fields)) == leaves


def test_one_call_changes_what_it_names() -> None:
    settings = GenerationSettings.of({"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9})
    assert settings.changed({}) is settings
    assert settings.changed({"max_tokens": 4}).fields == {**settings.fields, "max_new_tokens": 4}
    assert settings.changed({"do_sample": False}).fields == {"max_new_tokens": 8, "top_p": 0.9, "do_sample": False}
    greedy = GenerationSettings.of({"do_sample": False})
    assert greedy.changed({"temperature": 0.5}).fields == {"temperature": 0.5, "do_sample": True}
    assert GenerationSettings.of({"skip_special_tokens": True}).skip_special_tokens
    assert not GenerationSettings.of({}).skip_special_tokens
    changed = changes_of(GenerationConfig(repetition_penalty=1.1, guidance_scale=2.0))
    assert changed == ["repetition_penalty=1.1", "guidance_scale=2.0"]
    assert changes_of(GenerationConfig(temperature=0.5, repetition_penalty=1.0)) == []
