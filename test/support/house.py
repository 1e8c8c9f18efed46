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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FrameType

from support.sources import PACKAGE, ROOT, Source, package_sources, python_sources

PAGE = ROOT / "docs" / "reference" / "design.md"
SHOWN = re.compile(r"(?<=<!-- house -->\n\n).*?(?=\n\n<!-- end of house -->)", re.DOTALL)
SMALL = 60
HEAD = ["room", "lines", "files", f"under {SMALL} lines", "comment lines per 1000", "`Any`", "`getattr`, `hasattr`"]


@dataclass(frozen=True, slots=True)
class Size:
    """Of one room, or of several together."""

    lines: int
    files: int
    small: int
    comments: int
    anys: int
    lookups: int

    @staticmethod
    def of(sources: Iterable[Source]) -> Size:
        """Count them."""
        sources = list(sources)
        lengths = [len(source.text.splitlines()) for source in sources]
        nodes = [node for source in sources for node in ast.walk(source.tree)]
        called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        return Size(
            lines=sum(lengths),
            files=len(sources),
            small=sum(length < SMALL for length in lengths),
            comments=sum(comment_lines(source.text) for source in sources),
            anys=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
            lookups=sum(name in ("getattr", "hasattr") for name in called),
        )

    def row(self, name: str) -> str:
        """One line of the table."""
        per_thousand = f"{1000 * self.comments / max(1, self.lines):.0f}"
        cells = [name, f"{self.lines:,}", self.files, self.small, per_thousand, self.anys, self.lookups]
        return "| " + " | ".join(map(str, cells)) + " |"


def comment_lines(text: str) -> int:
    """Lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def room(source: Source) -> str:
    """The folder that a file belongs to, with the folders of ``modules`` told apart."""
    folders = source.path.parts[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ("modules",) else 1]) or "(top)"


def repeated_names(sources: Iterable[Source]) -> dict[str, int]:
    """File names that occur more than once."""
    counts = Counter(source.path.name for source in sources)
    return {name: count for name, count in sorted(counts.items()) if count > 1 and name != "__init__.py"}


class Trace:
    """The package's functions that ran while it was ``on``, in any thread that began after its construction."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[tuple[str, str]] = set()
        self._seen: set[CodeType] = set()
        threading.setprofile(self._note)

    @property
    def files(self) -> list[str]:
        """Each file once."""
        return sorted({file for file, _ in self.functions})

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
        if not self.on or event != "call" or frame.f_code in self._seen:
            return
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
    """The third step of ``MoEGRPOTrainer`` of four."""
    from tensordict import set_list_to_stack

    from support.training import fake_config, fake_fleet, fake_run

    trace = Trace()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(set_list_to_stack(True))
        fleet = stack.enter_context(fake_fleet())
        trainer = stack.enter_context(fake_run(fleet, fake_config(Path(folder), 4)))
        for _ in range(2):  # what happens once only
            trainer.step()
        with trace.running():
            trainer.step()
    return trace


CALLS: dict[str, Callable[[], Trace]] = {
    "`vLLMWrapper.forward`": prompt,
    "`update_weights`": update,
    "a trainer's step": step,
}


def table() -> str:
    """The whole, in Markdown."""
    sources = package_sources()
    rooms = sorted({room(source) for source in sources})
    lines = ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    lines += [Size.of(s for s in sources if room(s) == name).row(f"`{name}`") for name in rooms]
    lines += [Size.of(sources).row("the package"), Size.of(python_sources("test")).row("`test/`")]
    repeated = repeated_names(sources)
    lines += ["", f"File names that occur more than once: {', '.join(f'`{name}`' for name in repeated) or 'none'}."]
    lines += ["", "| over a fake engine | files | functions |", "| --- | ---: | ---: |"]
    for name, call in CALLS.items():
        trace = call()
        lines.append(f"| {name} | {len(trace.files)} | {len(trace.functions)} |")
    return "\n".join([*lines, "", f"Counted {datetime.now(UTC):%Y-%m-%d}, by `make house`."])


def main() -> None:
    """Print the table, and write it into the page."""
    found = table()
    print(found)
    PAGE.write_text(SHOWN.sub(lambda _: found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
