"""The notebooks of tutorials/: what they have in common, how they are run, and what a run is compared by.

Run as a module, this executes them, and compares what they show with what is stored in them; ``--help`` says more. What
is written into a notebook holds no times and no paths, so that a second run differs in figures and pictures alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorials"
SETTINGS = FOLDER / "notebooks.toml"
MOST_BYTES, MOST_SECONDS = 400_000, 240
INSTALL, VARIES = "install", "form-varies"
"""Tags of cells: the one that installs; one whose text has another form in each run (sampled answers, say)."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = "application/vnd.jupyter.widget-view+json"
PLACE = re.compile(r"(?<![\w.:/])/(?:builds?|home|mnt|opt|root|srv|tmp|usr|var|work|Users)/[\w.-]+")
NUMBER = re.compile(
    r"0x[0-9a-f]+|(?<=\dx)\d+|(?<![A-Za-z_\d])[-+]?\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?|\bnan\b", re.IGNORECASE
)
RESTART = re.compile(r"replica \d+ (ended with exit code|died|serves again)")  # logged in whichever cell then runs
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
HOW = "make notebooks ARGS=--write runs them and stores what they show"


@dataclass(frozen=True)
class Settings:
    """What all notebooks share: tutorials/notebooks.toml."""

    repository: str
    branch: str
    extras: list[str]
    modules: list[str]
    in_tests: str

    @classmethod
    def read(cls) -> Settings:
        return cls(**tomllib.loads(SETTINGS.read_text(encoding="utf-8")))

    def badge(self, name: str) -> str:
        """The first lines of a notebook."""
        owner = self.repository.removeprefix("https://github.com/")
        place = f"https://colab.research.google.com/github/{owner}/blob/{self.branch}/tutorials/{name}.ipynb"
        return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({place})"

    def install(self) -> str:
        """The cell that installs what is missing, and has vLLM log errors alone."""
        wanted = f"torchrl_moe[{','.join(self.extras)}] @ git+{self.repository}@{self.branch}"
        return INSTALL_CELL.format(modules=json.dumps(self.modules), wanted=wanted)


INSTALL_CELL = """\
import importlib.util
import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm.triton_utils.importing").setLevel("ERROR")  # it speaks before vLLM reads the level


def missing():
    importlib.invalidate_caches()
    return [name for name in {modules} if importlib.util.find_spec(name) is None]


if missing():
    %pip install -q "{wanted}"
if missing():
    raise ModuleNotFoundError(f"{{', '.join(missing())}}: not installed. What pip printed above says why.")"""


def paths() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def save(notebook: NotebookNode, path: Path) -> None:
    nbformat.write(cleaned(notebook), path)


# -- what they have in common -----------------------------------------------------------------------------------------


def with_head(notebook: NotebookNode, name: str, settings: Settings) -> NotebookNode:
    """Return a notebook whose badge and install cell are what the settings say."""
    notebook = copy.deepcopy(notebook)
    first, *rest = notebook.cells
    text = re.sub(r"^\[!\[Open in Colab\].*\n*", "", first.source)
    first.source = f"{settings.badge(name)}\n\n{text}"
    for cell in rest:
        if INSTALL in cell.metadata.get("tags", []):
            cell.source = settings.install()
    return notebook


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook without a terminal's codes, and without what only one run has: times, bars, its Python."""
    notebook = copy.deepcopy(notebook)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if PROGRESS not in output.get("data", {})]
            cell.outputs = [output for output in kept if not RESTART.match(output.get("text", ""))]
            for kind in [output.data for output in cell.outputs if "text/plain" in output.get("data", {})]:
                kind["text/plain"] = STYLE.sub("", kind["text/plain"])  # beside HTML, which has the colors
    return notebook


def problems(notebook: NotebookNode, name: str, settings: Settings, folder: Path = FOLDER) -> Iterator[str]:
    """Yield what is wrong with a notebook as it is stored."""
    nbformat.validate(notebook)
    cells = notebook.cells
    if not re.match(r"\[!\[Open in Colab\].*\n\n# ", cells[0].source):
        yield "the first cell must begin with the badge and a title: make notebooks ARGS=--heads writes the badge"
    if [number for number, cell in enumerate(cells) if INSTALL in cell.metadata.get("tags", [])] != [1]:
        yield f"the second cell, and no other, must have the tag {INSTALL!r}"
    if with_head(notebook, name, settings) != notebook:
        yield f"badge or install cell differ from {SETTINGS.name}: make notebooks ARGS=--heads writes them"
    if not cells[-1].source.startswith("## What to read next\n"):
        yield "the last cell must begin with '## What to read next'"
    if cleaned(notebook) != notebook:
        yield f"it stores times, progress bars, codes of a terminal or another kernel: {HOW}"
    code = [cell for cell in cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield f"it was not run from its first to its last cell: {HOW}"
    if (size := len(nbformat.writes(notebook).encode())) > MOST_BYTES:
        yield f"it has {size} bytes, {MOST_BYTES} at most: show less, or smaller pictures"
    for number, cell in enumerate(cells, 1):
        yield from (f"cell {number}: {problem}" for problem in _cell_problems(cell, folder))


def _cell_problems(cell: NotebookNode, folder: Path) -> Iterator[str]:
    for output in cell.get("outputs", []):
        if output.output_type == "error":
            yield f"ends with {output.ename}"
        if output.get("name") == "stderr":
            yield f"prints to stderr: {output.text.strip()[:80]!r}"
    if "if __name__" in cell.source:
        yield "a guard by __name__ has no meaning in a notebook"
    if cell.cell_type == "code" and re.search(r"^\s*!", cell.source, re.MULTILINE):
        yield "the site cannot show a shell line: call get_ipython().system"
    texts = [cell.source, *(text for output in cell.get("outputs", []) for _, text in _texts(output))]
    for found in {match[0] for text in texts for match in PLACE.finditer(text)}:
        yield f"{found} is a path of one machine"
    for link in LINK.findall(cell.source) if cell.cell_type == "markdown" else ():
        if not (folder / link).exists():
            yield f"links to {link}, which is not there"


# -- a run, and what it is compared by --------------------------------------------------------------------------------


def executed(notebook: NotebookNode, cell_seconds: int = MOST_SECONDS) -> NotebookNode:
    """Run a notebook by this Python in an empty folder, over this checkout; return it with what it showed."""
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        profile = {"IPYTHONDIR": f"{folder}/.ipython", "JUPYTER_CONFIG_DIR": f"{folder}/.jupyter"}
        environment = {**os.environ, **profile, "PYTHONPATH": str(ROOT)}
        how: dict[str, Any] = {"record_timing": False, "store_widget_state": False, "coalesce_streams": True}
        how |= {"resources": {"metadata": {"path": folder}}, "extra_arguments": ["--log-level=ERROR"]}
        client = NotebookClient(notebook, timeout=cell_seconds, kernel_name="python3", **how)
        client.execute(env=environment)
    return cleaned(notebook)


def differences(stored: NotebookNode, run: NotebookNode) -> Iterator[str]:
    """Yield where a run shows something of another kind than what is stored: figures may differ, their form may not."""
    if [(cell.id, cell.source) for cell in stored.cells] != [(cell.id, cell.source) for cell in run.cells]:
        yield f"other cells are stored than were run: {HOW}"
        return
    for number, (old, new) in enumerate(zip(stored.cells, run.cells, strict=True), 1):
        if old.cell_type != "code":
            continue
        exact = VARIES not in old.metadata.get("tags", [])
        was, now = ([_form(output, exact) for output in cell.outputs] for cell in (old, new))
        if was != now:
            yield f"cell {number} showed {now}, and {was} is stored: {HOW}"


def _form(output: NotebookNode, exact: bool) -> tuple[Any, ...]:
    """An output's type, the kinds of data that it has, and its text with numbers masked."""
    texts = [_masked(text) for kind, text in _texts(output) if kind == "text/plain"] if exact else []
    return output.output_type, output.get("name"), sorted(output.get("data", {})), texts


def _texts(output: NotebookNode) -> list[tuple[str, str]]:
    """Every text of an output, by its kind."""
    if output.output_type == "stream":
        return [("text/plain", output.text)]
    return [(kind, data) for kind, data in output.get("data", {}).items() if kind.startswith("text/")]


def _masked(text: str) -> list[str]:
    """Lines with ``#`` for each number, and one space for many: what is aligned moves with the numbers."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


# -- the command ------------------------------------------------------------------------------------------------------


def run_one(path: Path, settings: Settings, write: bool) -> list[str]:
    """Run a notebook; return what is wrong with it. With ``write``, store what it shows if it ran to its end."""
    stored = read(path)
    began = time.perf_counter()
    try:
        run = executed(with_head(stored, path.stem, settings) if write else stored)
    except (CellExecutionError, CellTimeoutError) as error:
        return [str(error)]
    seconds = time.perf_counter() - began
    slow = f", more than {MOST_SECONDS}" if seconds > MOST_SECONDS else ""
    print(f"{path.name}: {seconds:.0f} s{slow}", flush=True)
    if write:
        save(run, path)
        stored = read(path)
    return [*problems(stored, path.stem, settings), *differences(stored, run)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run notebooks, or write what they share."""
    parser = argparse.ArgumentParser(prog="support.notebooks", description="Run the notebooks of tutorials/.")
    parser.add_argument("names", nargs="*", help="beginnings of names, 01 say; default: all")
    parser.add_argument("--write", action="store_true", help="store what they show")
    parser.add_argument("--heads", action="store_true", help="only write badges and install cells; run nothing")
    options = parser.parse_args(arguments)
    chosen = [path for path in paths() if path.stem.startswith(tuple(options.names) or "")]
    if unknown := [name for name in options.names if not any(path.stem.startswith(name) for path in chosen)]:
        parser.error(f"no notebook begins with {', '.join(unknown)}: there are {', '.join(p.stem for p in paths())}")
    settings, failed = Settings.read(), 0
    for path in chosen:
        if options.heads:
            save(with_head(read(path), path.stem, settings), path)
            continue
        for problem in run_one(path, settings, options.write):
            failed += 1
            print(f"{path.name}: {problem}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
