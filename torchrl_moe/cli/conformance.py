"""``torchrl-moe conformance``: whether an engine's routes, log-probs and versions can be trained on."""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torchrl_moe.cli.command import FINE, PROBLEM, BadUse, Command, Output, listing, note
from torchrl_moe.cli.models import MODEL_HELP, check_served, check_weights_of, config_of, load, model_folder
from torchrl_moe.cli.services import ENGINES, add_engine_arguments, check_engine, engine_arguments, started

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.testing.conformance.adapter import EngineAdapter

GENERATE = "generate(prompts, sampling, request_ids)"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what the engine serves: {MODEL_HELP}")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--engine", choices=ENGINES, help="start this engine and check it (default: vllm)")
    engine.add_argument("--adapter", metavar="MODULE:NAME", help="an adapter, or a class or function that makes one")
    parser.add_argument("--only", metavar="CHECKS", help="names of checks, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the checks, with what each says")
    parser.add_argument("--tolerance", type=float, help="allowed error of log-probs (default: 1e-4, for float32)")
    parser.add_argument("--tie", type=float, help="router scores this close count as equal (default: 1e-5)")
    add_engine_arguments(parser, "float32")


def adapter_by_name(name: str) -> EngineAdapter:
    """Return an adapter by name: an object with ``generate``, or what a class or function of that name makes."""
    # an object that generates is an adapter; anything else is called for one
    made = _named(name)
    if isinstance(made, type) or not hasattr(made, "generate"):
        made = made()
    if not hasattr(made, "generate"):
        raise BadUse(f"--adapter {name}: a {type(made).__name__} has no {GENERATE}")
    return made


def _named(name: str) -> EngineAdapter | Callable[[], EngineAdapter]:
    """Return an adapter, or what makes one without arguments, which is not called yet."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise BadUse(f"--adapter {name}: write it as module:name, such as my_engine:MyAdapter")
    from torchrl_moe.trainers.function_names import import_users_module

    try:
        found: object = import_users_module(module_name)
    except ValueError as error:
        raise BadUse(f"--adapter {name}: {error}") from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BadUse(f"--adapter {name}: {module_name} has no {path!r}") from None
    if not isinstance(found, type) and hasattr(found, "generate"):
        return found
    if not callable(found):
        raise BadUse(f"--adapter {name}: a {type(found).__name__} has no {GENERATE}")
    with contextlib.suppress(ValueError):  # some of C have no signature: the call itself will say
        signature = inspect.signature(found)
        try:
            signature.bind()
        except TypeError as error:
            raise BadUse(
                f"--adapter {name}: it needs arguments ({error}): name an adapter, or what makes one without arguments"
            ) from None
    return found


def _run(options: argparse.Namespace, output: Output) -> int:
    if options.list:
        from torchrl_moe.testing.conformance import CHECKS

        listed = {one.name: one.meaning for one in CHECKS}
        output.show(listing(listed), listed)
        return FINE
    # visible mistakes first: the checks load torch, which takes seconds
    from torchrl_moe.testing.conformance import Settings

    only = None if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    if only == []:
        raise BadUse("--only '': it names no check; --list names them")
    if options.model is None and options.adapter is None:
        raise BadUse(f"name the MODEL that the engine serves: {MODEL_HELP}")
    if options.adapter is not None and options.engine_args:
        raise BadUse(f"--engine-arg: --adapter {options.adapter} starts no engine")
    given = {"tolerance": options.tolerance, "tie": options.tie}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    kind, arguments = options.engine or ENGINES[0], engine_arguments(options.engine_args)
    if options.adapter is not None:
        _named(options.adapter)
    else:
        check_engine(kind, options.engine_args)
    if options.model is not None:
        check_served(options.model, arguments) if options.adapter is None else check_weights_of(options.model)
    from torchrl_moe.testing.conformance import CHECKS, check

    unknown = set(only or ()) - {one.name for one in CHECKS}
    if unknown:
        raise BadUse(f"--only {', '.join(sorted(unknown))}: no such check; --list names them")
    # the model, in transformers, and the adapter of the engine that serves it
    with contextlib.ExitStack() as stack:
        adapter = None if options.adapter is None else adapter_by_name(options.adapter)
        model = None
        if options.model is not None:
            folder = stack.enter_context(model_folder(options.model))
            config = config_of(folder)
            model = load(folder, "float32")
            if adapter is None:
                engine = started(folder, config, kind, options.dtype, options.engine_args)
                adapter = stack.enter_context(_updatable(stack.enter_context(engine), model))
        assert adapter is not None
        note("checking; a minute or two ...")
        report = check(adapter, model, only=only, settings=settings)
    output.show(report.table(), report.to_dict())
    # what is not offered is no pass: where nothing holds, nothing was proved
    return FINE if not report.failures and any(one.holds for one in report.results) else PROBLEM


@contextlib.contextmanager
def _updatable(engine: AsyncVLLM, model: PreTrainedModel) -> Iterator[EngineAdapter]:
    """Give the adapter of an engine of ours, with a sender, so that weight updates are checked too."""
    from torchrl_moe.testing.conformance import ServiceAdapter
    from torchrl_moe.weight_update import VLLMWeightSyncScheme

    sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(None, vllm_engine=engine)
    try:
        yield ServiceAdapter(engine)
    finally:
        sender.shutdown()


COMMAND = Command(
    name="conformance",
    help="can an engine's routes, log-probs and versions be trained on? 26 checks",
    description="Asks an engine, compares its answers with what the same model computes in transformers, and says of "
    "each check whether it holds and how far off the engine is.",
    examples=[
        ("torchrl-moe conformance tiny", "vLLM, as it is installed"),
        ("torchrl-moe conformance path/to/moe --engine transformers", "the second engine"),
        ("torchrl-moe conformance path/to/moe --adapter my_engine:MyAdapter", "your own engine"),
        ("torchrl-moe conformance tiny --only rows,native_routes --json", "two checks, as JSON"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
