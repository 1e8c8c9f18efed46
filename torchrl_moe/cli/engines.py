"""Engines that a command starts for itself: small, with one replica; they end with the command."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchrl_moe.cli.command import BadUse, note

if TYPE_CHECKING:
    from torchrl_moe.modules import AsyncVLLM

__all__ = [
    "DTYPES",
    "ENGINES",
    "add_engine_arguments",
    "check_engine",
    "check_installed",
    "engine_arguments",
    "started",
]

ENGINES = ("vllm", "transformers")
DTYPES = ("bfloat16", "float32", "float16")
MOST_TOKENS = 2048


def add_engine_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add the options of every command that starts an engine."""
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"dtype of the engine (default: {dtype})")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="engine_args",
        help="a vLLM engine argument, with its value as JSON or text; may be given several times",
    )


def engine_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return engine arguments of ``KEY=VALUE``.

    Raises:
        BadUse: one has no ``=``.

    >>> engine_arguments(["tensor_parallel_size=2", "load_format=dummy"])
    {'tensor_parallel_size': 2, 'load_format': 'dummy'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadUse(f"--engine-arg {pair}: write it as KEY=VALUE, such as tensor_parallel_size=2")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def check_engine(kind: str, given: Sequence[str]) -> None:
    """Refuse an engine that is not installed, or arguments that it does not have, before anything is loaded.

    Raises:
        BadUse: vLLM is asked for and not installed, or an argument is none.
        ValueError: the engine has no such argument.
    """
    arguments = engine_arguments(given)
    if "model" in arguments:
        raise BadUse(f"--engine-arg model={arguments['model']}: the model is the first argument, MODEL")
    check_installed(kind, "--engine transformers")
    from torchrl_moe.modules.backends.engine_kind import find_kind

    find_kind(f"torchrl_moe.modules.backends.{kind}.kind").arguments_of({"model": "?", **arguments})


def check_installed(kind: str, instead: str) -> None:
    """Refuse an engine that is not installed; ``instead`` is the option that chooses the other engine.

    Raises:
        BadUse: vLLM is asked for, and is not installed.
    """
    if kind == "vllm" and find_spec("vllm") is None:
        raise BadUse(
            "vLLM is not installed: pip install 'torchrl_moe[vllm]' (a CPU needs its own build, see docs/install.md), "
            f"or use {instead}"
        )


@contextlib.contextmanager
def started(folder: str, config: Any, kind: str, dtype: str, given: Sequence[str]) -> Iterator[AsyncVLLM]:
    """Start an engine of a model; it ends with the context.

    Args:
        folder: of the model, or a hub name.
        config: its transformers configuration.
        kind: one of ``ENGINES``.
        dtype: to compute in.
        given: engine arguments of the user's, ``KEY=VALUE``.

    Raises:
        BadUse: vLLM is not installed.
        EngineError: it did not come up.
    """
    arguments = engine_arguments(given)
    check_installed(kind, "--engine transformers")
    from torchrl_moe.modules import AsyncVLLM

    longest = int(getattr(config.get_text_config(), "max_position_embeddings", MOST_TOKENS) or MOST_TOKENS)
    defaults: dict[str, Any] = {"dtype": dtype, "max_model_len": min(longest, MOST_TOKENS)}
    if kind == "vllm":
        defaults["enforce_eager"] = True  # on a GPU, too: it starts sooner
    note(f"starting {kind} ...")
    with AsyncVLLM.from_pretrained(folder, engine=kind, **{**defaults, **arguments}) as engine:  # type: ignore[arg-type]
        yield engine
