"""The model that a command is given: a folder, a hub name, or ``tiny``, which is made temporarily.

Whether it can be replayed is tried on a model of the same code with few, narrow layers and random weights: routers are
found by running the model, and the real weights may be large, or elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_moe.cli.command import BAD_USE, PROBLEM, BadUse, note
from torchrl_moe.errors import RequestRefusedError, TorchRLMoEError, UnsupportedRouterError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

TINY = "tiny"
TINY_SIZES: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}
MODEL_HELP = f"a folder, a hub name, or {TINY!r}: a small Qwen3-MoE with random weights, made on the spot"
WIDTHS = ("intermediate_size", "ffn_hidden_size")
NARROW = 16
"""Width of experts and dense layers in the model that is tried: routers do not see it."""
SMALL_VOCABULARY = 64
MOST_LAYERS = 8
MOST_PARAMETERS = 1_500_000_000
DENSE_FIRST = "first_k_dense_replace"
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def is_tiny(source: str) -> bool:
    """Whether the model is to be made; a folder of that name is a user's own."""
    return source == TINY and not Path(source).is_dir()


@contextlib.contextmanager
def model_folder(source: str) -> Iterator[str]:
    """Give the folder or hub name of a model; ``tiny`` is made for as long as the context is open."""
    if not is_tiny(source):
        check_source(source)
        yield source
        return
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    _hide_bars()
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-tiny-") as folder:
        yield str(save_tiny_moe(folder, "qwen3_moe", **TINY_SIZES))


def check_weights_of(source: str) -> None:
    """Refuse a model whose weights cannot be had, before torch is loaded: that takes seconds."""
    if is_tiny(source):
        return
    check_source(source)
    from torchrl_moe.modules.backends.checkpoint import check_reachable, check_weights

    if not Path(source).is_dir():
        note(f"there is no folder {source}: asking the Hugging Face hub for it ...")
    check_reachable(source)
    check_weights(source)


def check_served(source: str, arguments: Mapping[str, object]) -> None:
    """Refuse a model that no engine can be started with: without weights, or without a tokenizer."""
    check_weights_of(source)
    from torchrl_moe.modules.backends.checkpoint import check_tokenizer

    if not arguments.get("skip_tokenizer_init"):
        check_tokenizer(source, arguments.get("tokenizer"))


@contextlib.contextmanager
def moe_and_trainer(
    source: str, arguments: Mapping[str, object], trainer: str | None
) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Give folder and config of a model with experts, and of the shape of the trainer's weights; ``None``: its own.

    What can be refused is refused before a model is made or an engine started.
    """
    if trainer is not None and is_tiny(trainer):
        raise BadUse(f"--trainer {TINY}: that model is made on the spot; name the folder of its weights, or a hub name")
    check_served(source, arguments)
    if trainer is not None:
        check_weights_of(trainer)
    with model_folder(source) as folder:
        from torchrl_moe.modules.replay.discovery import expert_counts

        served = config_of(folder)
        if not expert_counts(served):
            raise BadUse(f"{source} has no experts by its config: it is a dense model, and there is nothing to replay")
        own = served if trainer is None else config_of(trainer)
        other = f"--trainer {trainer} is of another model"
        for name in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_experts_per_tok"):
            theirs, ours = (getattr(one.get_text_config(), name, None) for one in (served, own))
            if theirs != ours:
                raise BadUse(f"{other}: its {name} is {ours}, that of MODEL {theirs}")
        if expert_counts(own) != expert_counts(served):
            numbers = [" and ".join(map(str, sorted(expert_counts(one)))) or "no" for one in (own, served)]
            raise BadUse(f"{other}: it has {numbers[0]} experts, MODEL has {numbers[1]}")
        yield folder, served


def check_source(source: str) -> None:
    """Refuse what can be neither a model's folder nor a hub name, without asking the hub."""
    from torchrl_moe.modules.backends.checkpoint import is_written_as_path

    path = Path(source)
    if source and path.is_dir():
        if not (path / "config.json").is_file():
            raise BadUse(f"{source} holds no model: it has no config.json; model.save_pretrained(path) writes one")
    elif path.is_file():
        raise BadUse(f"{source} is a file: name the folder that config.json is in")
    elif is_written_as_path(source) or not source.strip():
        raise BadUse(f"there is no folder {source!r}: name one that holds config.json, a hub name, or {TINY}")


def config_of(source: str) -> PreTrainedConfig:
    """Return the transformers configuration of a folder or hub name."""
    from torchrl_moe.trainers.config import ConfigError
    from torchrl_moe.trainers.plan import model_config_of

    try:
        return model_config_of(source)
    except ConfigError as error:
        said = str(error).partition(": ")[2]
        if Path(source).is_dir():
            raise BadUse(f"{source}: transformers cannot read its config.json: {said}") from error
        raise BadUse(
            f"the hub gave no configuration of {source!r} ({said.rstrip('.:')}). Check the name; without a network, "
            "name a folder that holds the model"
        ) from error


def load(folder: str, dtype: str) -> PreTrainedModel:
    """Load a model for scoring, onto the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    from torchrl_moe._compat_transformers import load_whole

    _hide_bars()
    try:
        model = load_whole(folder, AutoModelForCausalLM.from_pretrained, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise BadUse(f"transformers cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _hide_bars() -> None:
    """Keep transformers' bars, one for each file, out of a terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class Replayable:
    """Whether a model's routers can be replayed; ``None``: it could not be tried, and ``why`` says why.

    ``routers`` says how they score, and of how many experts they choose how many.
    """

    answer: bool | None
    why: str = ""
    routers: str = ""
    top_k: int = 0
    num_experts: int = 0


def try_replay(config: PreTrainedConfig) -> Replayable:
    """Build a narrow model of a configuration and replay its routers, as ``RouterReplay`` tests itself."""
    from torchrl_moe.modules.replay.discovery import expert_counts

    if not expert_counts(config):
        return Replayable(False, "it is a dense model: its config names no experts")
    found = _try(config, 2)
    return _try(config, MOST_LAYERS) if found.answer is None else found  # a hybrid may need more layers to run


def _try(config: PreTrainedConfig, layers_with_experts: int) -> Replayable:
    import torch

    from torchrl_moe.errors import UnsupportedRouterError
    from torchrl_moe.modules.replay.router_replay import RouterReplay

    try:
        small = narrow(config, layers_with_experts)
        parameters = sum(weight.numel() for weight in _without_weights(small).parameters())
        if parameters > MOST_PARAMETERS:
            return Replayable(None, f"even a narrow model of it has {parameters / 1e9:.1f} billion parameters")
        dtype = torch.float32 if parameters < MOST_PARAMETERS / 4 else torch.bfloat16
        # it tests itself when it is made: a router that it cannot replay is refused here
        replay = RouterReplay(_built(small, dtype))
    except UnsupportedRouterError as error:
        return Replayable(False, str(error))
    except Exception as error:  # noqa: BLE001  a model's own code may refuse narrow sizes in any way, which is no verdict
        said = (str(error).strip().splitlines() or [""])[0]
        return Replayable(None, f"a narrow model of it cannot be built or run: {type(error).__name__}: {said}")
    routers = f"{replay.scoring}; {replay.top_k} of {replay.num_experts} experts"
    return Replayable(True, "", routers, replay.top_k, replay.num_experts)


def narrow(config: PreTrainedConfig, layers_with_experts: int = 2) -> PreTrainedConfig:
    """Return a configuration with the same routers, but few layers, narrow experts and a small vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    # a config of text and one around it may both have sizes; special ids lie beyond the small vocabulary
    for part in {id(one): one for one in (small, text)}.values():
        for name in part.to_dict():
            value = getattr(part, name, None)
            if name.endswith(WIDTHS) and isinstance(value, int) and not isinstance(value, bool):
                setattr(part, name, min(value, NARROW))
        for name in SPECIAL_TOKENS:
            if hasattr(part, name):
                setattr(part, name, None)
    text.vocab_size = min(int(text.vocab_size), SMALL_VOCABULARY)
    if int(getattr(text, DENSE_FIRST, 0) or 0):
        setattr(text, DENSE_FIRST, 1)
    # so few layers that as many as are wanted have experts, or all that have any, among the first few; lists with an
    # entry for each layer are cut along
    layers = int(text.num_hidden_layers)
    listed = {name: value for name, value in text.to_dict().items() if isinstance(value, list)}
    of_each = {name: value for name, value in listed.items() if len(value) == layers}
    for count in range(2, min(layers, MOST_LAYERS) + 1):
        text.num_hidden_layers = count
        for name, values in of_each.items():
            setattr(text, name, values[:count])
        names = [name for name, _ in _without_weights(small).named_modules()]
        if sum(name.endswith(".experts") for name in names) >= layers_with_experts:
            break
    return small


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    import torch

    with torch.device("meta"):
        return _built(config, torch.float32)


def _built(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


# Errors as one line that says what to do.
EXTRAS = {
    "datasets": "hub",
    "hydra": "train",
    "omegaconf": "train",
    "peft": "train",
    "tensorboard": "train",
    "yaml": "train",
    "matplotlib": "render",
    "pandas": "render",
    "rich": "render",
    "prometheus_client": "prometheus",
    "gguf": "real",
    "ray": "ray",
    "reasoning_gym": "real",
    "vllm": "vllm",
}
"""Module -> the extra of this package that installs it."""
STDOUT = "standard output"
"""The name of the stream of results, as an error's ``filename``."""
FULL = {errno.ENOSPC, errno.EDQUOT}
CAUSE = re.compile(r"\b\w+(Error|Exception): .+")
VAGUE = "See root cause above"
"""vLLM's message for an error in one of its processes, which only the log names."""
WHERE = "--traceback shows where it comes from"


def explain(error: Exception) -> tuple[str, int]:
    """Return an error as one line that says what to do, and the exit code.

    >>> explain(ModuleNotFoundError("No module named 'ray'", name="ray"))
    ("needs ray, which is not installed: pip install 'torchrl_moe[ray]'", 2)
    """
    # a cause says more if it is a missing module, or an error of the operating system
    root: BaseException = error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) or (isinstance(cause, OSError) and cause.errno is not None):
            root = cause
            break
        cause = cause.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()] or [type(root).__name__]
    # most telling first: a missing package, the disk, the port, memory, then errors of our own
    if isinstance(root, ModuleNotFoundError):
        module = (root.name or "").partition(".")[0]
        if module in EXTRAS:
            return missing_extra(module), BAD_USE
        if root is error:  # what else installs, only its name says, and that may be the user's own
            return f"{lines[0]} ({WHERE})", BAD_USE
    if isinstance(root, OSError) and root.filename == STDOUT:
        return f"{STDOUT} cannot be written to ({root.strerror}): redirect it to a place with room", PROBLEM
    if isinstance(root, OSError) and root.errno in FULL:
        where = root.filename or f"{os.getcwd()} or {tempfile.gettempdir()}"
        mend = "make room there; TMPDIR names another place for temporary files"
        return f"the disk is full at {where}: {mend}", PROBLEM
    if isinstance(root, OSError) and root.errno == errno.EADDRINUSE:
        return f"{lines[0]}: free the port, or use another", BAD_USE
    first, *log = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, PermissionError):
        return f"{first}: use a folder that you may read and write", BAD_USE
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({first}): use a narrower dtype, or a smaller model", PROBLEM
    if isinstance(error, BadUse | RequestRefusedError | UnsupportedRouterError | ValueError | ImportError):
        return first, BAD_USE
    if not isinstance(error, TorchRLMoEError):
        return f"{type(error).__name__}: {first} ({WHERE})", PROBLEM
    if not log:
        return first, PROBLEM
    # the line of the engine's log that says why, if there is one
    named = [found[0] for line in log if (found := CAUSE.search(line)) and VAGUE not in line]
    why = f" It was {named[-1]}" if VAGUE in first and named else ""
    return f"{first}{why} (--traceback shows the rest, with the engine's log)", PROBLEM


def missing_extra(module: str) -> str:
    """Return what to do about a module of ``EXTRAS`` that is not installed."""
    return f"needs {module}, which is not installed: pip install 'torchrl_moe[{EXTRAS[module]}]'"
