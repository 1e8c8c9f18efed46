"""``make house``: how large the house is, room by room, and how many files three everyday calls run through.

It prints the table and writes it into ``docs/reference/design.md``. Counted by reading, but for the calls: those run
here, over a fake engine, with a profiler that notes each function of the package.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FrameType

from support.sources import PACKAGE, ROOT, Source, package_sources, python_sources

PAGE = ROOT / "docs" / "reference" / "design.md"
SHOWN = re.compile(r"(?<=<!-- house -->\n\n).*?(?=\n\n<!-- end of house -->)", re.DOTALL)
SMALL = 60
HEAD = ["room", "lines", "files", f"under {SMALL} lines", "comment lines per 1000", "`Any`", "`getattr`, `hasattr`"]


def row(name: str, sources: Iterable[Source]) -> str:
    """One line of the table: of one room, or of several together."""
    sources = list(sources)
    lengths = [len(source.text.splitlines()) for source in sources]
    names = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Name)]
    called = [node.func for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    tokens = [token for source in sources for token in tokenize.generate_tokens(io.StringIO(source.text).readline)]
    comments = sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)
    cells = [name, f"{sum(lengths):,}", len(sources), sum(length < SMALL for length in lengths)]
    cells += [f"{1000 * comments / max(1, sum(lengths)):.0f}", sum(node.id == "Any" for node in names)]
    cells.append(sum(isinstance(node, ast.Name) and node.id in ("getattr", "hasattr") for node in called))
    return "| " + " | ".join(map(str, cells)) + " |"


def room(source: Source) -> str:
    """The folder that a file belongs to, with the folders of ``modules`` told apart."""
    folders = source.path.parts[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ("modules",) else 1]) or "(top)"


class Trace:
    """The package's functions that ran while it was ``on``, in any thread that began after its construction."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[tuple[str, str]] = set()
        self._seen: set[CodeType] = set()
        threading.setprofile(self._note)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Note what runs meanwhile."""
        sys.setprofile(self._note)
        self.on = True
        try:
            yield
        finally:
            self.on = False
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        # called for each call and return in all threads, of torch and tensordict mostly: each function is read once
        if self.on and event == "call" and frame.f_code not in self._seen:
            self._seen.add(frame.f_code)
            _, found, file = frame.f_code.co_filename.rpartition(f"/{PACKAGE}/")
            # the fake engine stands for a real one, whose files are not counted either
            if found and not file.startswith("testing/"):
                self.functions.add((file, frame.f_code.co_qualname))


def prompt() -> Trace:
    """``vLLMWrapper.forward`` with one prompt."""
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.modules.llm.policies import Text

    from torchrl_moe.modules import vLLMWrapper
    from torchrl_moe.testing import FakeAsyncVLLM

    trace = Trace()
    with set_list_to_stack(True), FakeAsyncVLLM(2) as engine:
        policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_new_tokens": 4}, inplace=False)
        batch = TensorDict(text=Text(prompt=["1 + 1 ="]), batch_size=[1])
        policy(batch)  # what happens once only
        with trace.running():
            policy(batch)
    return trace


def update() -> Trace:
    """``sender.update_weights`` to two replicas."""
    from support.training import fake_fleet, fake_model
    from torchrl_moe.weight_update import VLLMWeightSyncScheme

    trace = Trace()
    with fake_fleet(2) as fleet:
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(fake_model())
        sender.init_all_workers_group(None, vllm_engine=fleet)
        sender.update_weights()
        with trace.running():
            sender.update_weights()
        sender.shutdown()
    return trace


def step() -> Trace:
    """Steps of ``MoEGRPOTrainer`` between the first and the last; several, since answers are made ahead of them."""
    from tensordict import set_list_to_stack

    from support.training import fake_config, fake_fleet, fake_run

    trace = Trace()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(set_list_to_stack(True))
        fleet = stack.enter_context(fake_fleet())
        trainer = stack.enter_context(fake_run(fleet, fake_config(Path(folder), 8)))
        for _ in range(2):  # what happens once only
            trainer.step()
        with trace.running():
            for _ in range(4):
                trainer.step()
    return trace


CALLS = {"`vLLMWrapper.forward`": prompt, "`update_weights`": update, "a trainer's step": step}


def table() -> str:
    """The whole, in Markdown."""
    sources = package_sources()
    lines = ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    for name in sorted({room(source) for source in sources}):
        lines.append(row(f"`{name}`", [source for source in sources if room(source) == name]))
    lines += [row("the package", sources), row("`test/`", python_sources("test"))]
    counts = Counter(source.path.name for source in sources)
    repeated = [f"`{name}`" for name, count in sorted(counts.items()) if count > 1 and name != "__init__.py"]
    lines += ["", f"File names that occur more than once: {', '.join(repeated) or 'none'}."]
    lines += ["", "| over a fake engine | files | functions |", "| --- | ---: | ---: |"]
    for name, call in CALLS.items():
        functions = call().functions
        lines.append(f"| {name} | {len({file for file, _ in functions})} | {len(functions)} |")
    return "\n".join([*lines, "", f"Counted {datetime.now(UTC):%Y-%m-%d}, by `make house`."])


if __name__ == "__main__":
    found = table()
    print(found)
    PAGE.write_text(SHOWN.sub(lambda _: found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
