"""Configurations from YAML: those of the package are whole, and every mistake is one line with its key."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pytest import MonkeyPatch

from torchrl_moe.trainers.compose import CONFIGS, load_config
from torchrl_moe.trainers.config import ConfigError, DataConfig, GRPOConfig, LoRAConfig, as_dict, as_yaml
from torchrl_moe.trainers.function_names import import_function
from torchrl_moe.trainers.samples import TASKS

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_each_configuration_of_the_package_can_be_meant(name: str) -> None:
    config = load_config(name)
    assert isinstance(config, GRPOConfig) and config.model.source is not None and config.data.source is not None
    assert config.data.source not in TASKS or config.data.held_out == 0  # TorchRL's tasks hold nothing out


@pytest.mark.needs_vllm
@pytest.mark.parametrize("name", NAMES)
def test_vllms_own_parser_takes_the_arguments_of_the_engine(name: str) -> None:
    """As ``vllm serve`` would: types and choices included."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = load_config(name).engine.arguments
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    line: list[str] = []
    for key, value in given.items():
        flag = "--" + key.replace("_", "-")
        values = [str(one) for one in (value if isinstance(value, list) else [value])]
        line += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, *values]
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(line))
    assert {key: getattr(parsed, key) for key in given} == given


def test_values_are_changed_by_dotted_keys() -> None:
    config = load_config("tiny_cpu", ["optim.lr=2e-5", "rollout.sampling={min_p: 0.1}", "model.lora.rank=4", "seed=3"])
    assert (config.optim.lr, config.rollout.sampling, config.model.lora) == (2e-5, {"min_p": 0.1}, LoRAConfig(rank=4))
    assert load_config("tiny_cpu", ["loss.router={z_coeff: 0.1}"]).loss.router == {"z_coeff": 0.1}
    for_template = load_config("tiny_cpu", ["chat_template_kwargs.enable_thinking=false", "save.dtype=bfloat16"])
    assert (for_template.chat_template_kwargs, for_template.save.dtype) == ({"enable_thinking": False}, "bfloat16")
    assert config.data.arguments["seed"] == config.model.arguments["seed"] == 3
    hardware = load_config("tiny_cpu", ["hardware.links.mine=3.5", "hardware.gpu_gb=24"]).hardware
    assert hardware.gpu_gb == 24 and hardware.links == {**GRPOConfig().hardware.links, "mine": 3.5}


def test_a_file_is_read_by_the_same_schema_and_may_begin_as_earlier_ones_did(tmp_path: Path) -> None:
    text = "optim: {lr: '2e-5'}\nsteps: '7'\nhardware: {links: {RoCE: 25.0}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "earlier.yaml").write_text("defaults: [grpo_config, _self_]\n" + text)
    links = {**GRPOConfig().hardware.links, "RoCE": 25.0}
    expected = GRPOConfig(steps=7, optim={"lr": 2e-5}, hardware={"links": links})  # type: ignore[arg-type]
    assert load_config(tmp_path / "mine.yaml") == load_config(tmp_path / "earlier.yaml") == expected


@pytest.mark.parametrize(
    "text", ["007", "1e5", "1_000", "20261126", "runs/a,b", "/tmp/lr=1", "it's", "résumé", "a (copy)", "~x", "a\\"]
)
def test_a_text_is_taken_as_it_is(text: str) -> None:
    assert load_config("tiny_cpu", [f"out={text}"]).out == text


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"optim:\n\tlr: 1\n", r"mine.yaml, line 2: found character '\\t'"),
        (b"steps: 3\nsteps: 4\n", "mine.yaml, line 2: found duplicate key steps"),
        (b"steps: 3\n---\nsteps: 4\n", "mine.yaml, line 2: but found another document"),
        ("out: résumé".encode("latin-1"), "mine.yaml: 'utf-8' codec"),
        (b"3", "mine.yaml: Invalid loaded object type: int"),
        (b"optim: [1]", "optim=.1. must be OptimConfig"),
        (b"model: {lora: [1]}", "model.lora=.1. must be LoRAConfig"),
        (b"data: {arguments: &a {b: *a}}", "mine.yaml is nested too deeply, or in itself"),
        (b"steps: 1" + b"0" * 5000, "mine.yaml: Exceeds the limit"),
        (b"defaults: tiny_cpu\n", "mine.yaml: Invalid defaults list"),
        (b"defaults: [tiny_cp]\n", "Could not load 'tiny_cp'. The package has .*tiny_cpu"),
        (b"rollout: {group_sise: 3}\n", r"there is no setting rollout.group_sise: did you mean group_size\?"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(written: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(written)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "mine.yaml")


def test_a_file_of_another_ending_is_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("{}")
    with pytest.raises(ConfigError, match=r"mine\.yml is no .yaml file: rename it"):
        load_config(tmp_path / "mine.yml")


def test_a_file_builds_on_another_and_functions_lie_beside_it(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "defaults: [tiny_cpu, _self_]\ndata: {rewards: ['rewards_beside_it:letters']}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "rewards_beside_it.py").write_text("def letters(completion): return len(completion)")
    config = load_config(tmp_path / "mine.yaml")
    assert config.model == load_config("tiny_cpu").model
    assert import_function(config.data.rewards[0])("four") == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr=fast"], "optim.lr"),
        (["optim.lr"], "optim.lr"),
        (["stepps=3"], r"there is no setting stepps: did you mean steps\?; --cfg prints all settings"),
        (["model.path=x"], r"there is no setting model.path: there are source, arguments, .*; --cfg prints all"),
        (["steps=1,2"], r"'steps=1,2' is not one value: write .*, and quote text with special characters"),
        (["steps=1.5"], "steps=1.5 must be a whole number, at least 1"),
        (["model=null"], r"model=None must be ModelConfig\(\.\.\.\), or a dict of its settings"),
        (["optim.lr.fast=1"], "optim.lr={'fast': 1} must be a number above 0"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("tiny_cpu", overrides)
    assert "\n" not in str(caught.value)


def save(folder: Path, *overrides: str) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(as_dict(load_config("tiny_sums", overrides))))


def test_a_resumed_run_keeps_its_settings_and_changes_what_is_asked_for(tmp_path: Path) -> None:
    (folder := tmp_path / "it's (1), a=b").mkdir()
    save(folder, "optim.lr=7e-4", "steps=9", "model.lora.rank=2")
    config = load_config("tiny_cpu", [f"out={folder}", "resume=true", "steps=20", "rollout={top_p:0.5}"])
    assert (config.out, config.rollout.top_p, config.optim.lr) == (str(folder), 0.5, 7e-4)
    assert (config.steps, config.resume) == (20, True)
    assert config.model.lora == LoRAConfig(rank=2) and config.data.arguments["operation"] == "sum"
    # a file may ask for resumption
    (tmp_path / "mine.yaml").write_text(f'defaults: [tiny_cpu, _self_]\nresume: true\nout: "{folder}"\n')
    config = load_config(tmp_path / "mine.yaml", ["optim.lr=9e-4"])
    assert (config.resume, config.out, config.steps, config.optim.lr) == (True, str(folder), 9, 9e-4)


@pytest.mark.parametrize(
    "text",
    [
        "${seed}",
        "\\${seed}",
        "a \\\\${b",
        "$x {y}",
        "1e5",
        "1.5",
        "0x10",
        "nan",
        "null",
        "true",
        "a: b # c",
        "a\n${b}\n",
        "\\n",
        "",
    ],
)
def test_text_of_a_saved_configuration_stays_as_it_is(tmp_path: Path, text: str) -> None:
    config = replace(
        load_config("tiny_sums", []),
        data=DataConfig(arguments={"system": text, "more": [text, {text or "none": [text]}]}),
    )
    for explained in (False, True):
        (tmp_path / "config.yaml").write_text(as_yaml(config, explained))
        assert load_config("tiny_cpu", [f"out={tmp_path}", "resume=true"]).data == config.data


@pytest.mark.parametrize("change", ["seed=1", "loss.replay=none", "data.prompt=question", "model.dtype=bfloat16"])
def test_what_weights_and_data_depend_on_stays(tmp_path: Path, change: str) -> None:
    save(tmp_path)
    name = change.split("=")[0].split(".")[0]
    with pytest.raises(ConfigError, match=f"resume=true continues with {name}.*; it cannot be changed to"):
        load_config("tiny_cpu", [f"out={tmp_path}", "resume=true", change])


def test_a_saved_configuration_that_was_spoiled_is_named(tmp_path: Path) -> None:
    for text, message in (
        ("stepz: 3\n", ".*stepz"),
        ("3\n", "Invalid loaded object type: int"),
        ("- 1\n", "a configuration is a mapping of settings, got .1."),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"config\.yaml: {message}"):
            load_config("tiny_cpu", [f"out={tmp_path}", "resume=true"])
