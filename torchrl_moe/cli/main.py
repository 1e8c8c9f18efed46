"""``torchrl-moe``: reads the command line, runs a command, and says in one line what went wrong.

Help loads neither torch nor an engine: the files of commands import what they need in the functions that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from torchrl_moe import __version__
from torchrl_moe.cli import bisect, conformance, doctor, init, probe, serve, train
from torchrl_moe.cli import services as top
from torchrl_moe.cli.command import BAD_USE, FINE, INTERRUPTED, Command, NamedStream, Output
from torchrl_moe.cli.models import STDOUT, explain

COMMANDS: tuple[Command, ...] = (
    init.COMMAND, doctor.COMMAND, probe.COMMAND, bisect.COMMAND, serve.COMMAND, top.COMMAND, train.COMMAND,
    conformance.COMMAND,
)  # fmt: skip
PROGRAM = "torchrl-moe"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return its exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    command = next((one for one in COMMANDS if one.name == options.command), None)
    if command is None:
        parser.print_help()
        return BAD_USE
    # settings of "train" may stand behind options, where argparse leaves them over
    unknown = [word for word in rest if command.name != "train" or word.startswith("-")]
    if unknown:
        parser.error(f"{command.name} does not know {' '.join(unknown)}: see {PROGRAM} {command.name} --help")
    if rest:
        options.overrides.extend(rest)
    # libraries' logs and warnings are hidden unless wanted: what matters comes as an error or as a result
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        if not (options.traceback or command.keeps_logs):
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module="torchrl_moe")
        try:
            return _run(command, options)
        finally:
            logging.disable(before)


def _run(command: Command, options: argparse.Namespace) -> int:
    program = f"{PROGRAM} {command.name}"
    stdout = NamedStream(sys.stdout, STDOUT)
    output = Output(stdout, options.json)
    # what libraries print must not get between the lines of JSON
    printed = sys.stderr if options.json else stdout
    try:
        with contextlib.redirect_stdout(printed):
            return command.run(options, output)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {command.after_interrupt}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()  # the reader has gone (head, say)
        return FINE
    except Exception as error:  # noqa: BLE001  whatever it is, the user gets a line and not a traceback
        # the whole story if asked for, and always the line
        if options.traceback:
            traceback.print_exc()
        if isinstance(error, OSError) and error.filename == STDOUT:
            _leave_stdout()
        line, code = explain(error)
        print(f"{program}: {line}", file=sys.stderr)
        return code


def _leave_stdout() -> None:
    """Stop writing to stdout: otherwise Python would flush the rest at exit, and fail in the same way."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Mixture-of-Experts routing for TorchRL's LLM stack: check, measure, watch and train.",
        epilog=f"{PROGRAM} COMMAND --help shows a command's options, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"torchrl_moe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="write the result as JSON")
        one.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser
