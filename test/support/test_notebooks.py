"""What is said of a notebook, and what running one does, on made-up notebooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from support import notebooks
from support.notebooks import Settings, cleaned, differences, problems, with_head

SETTINGS = Settings("https://github.com/someone/fork", "dev", ["vllm"], ["torch"], "01_a")
BADGE = "https://colab.research.google.com/github/someone/fork/blob/dev/tutorials/01_a.ipynb)\n\n# A title"


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> NotebookNode:
    return new_output("display_data", data={kind.replace("_", "/"): value for kind, value in data.items()})


def made(*code: NotebookNode) -> NotebookNode:
    """A notebook without fault around some cells."""
    first, last = new_markdown_cell("# A title"), new_markdown_cell("## What to read next\n\nNothing.")
    cells = [first, new_code_cell(metadata={"tags": ["install"]}), *code, last]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    return cleaned(with_head(new_notebook(cells=cells), "01_a", SETTINGS))


def found(notebook: NotebookNode, folder: Path = notebooks.FOLDER) -> list[str]:
    return list(problems(notebook, "01_a", SETTINGS, folder))


def test_a_head_is_written_and_replaced() -> None:
    notebook = made()
    assert notebook.cells[0].source.endswith(BADGE)
    assert 'torchrl_moe[vllm] @ git+https://github.com/someone/fork@dev"' in notebook.cells[1].source
    other = with_head(notebook, "01_a", Settings("https://github.com/a/b", "main", ["vllm"], ["torch"], "01_a"))
    assert other.cells[0].source.count("\n") == 2
    assert "fork" not in other.cells[0].source + other.cells[1].source
    assert with_head(other, "01_a", SETTINGS) == notebook
    (said,) = found(other)
    assert "badge or install cell differ" in said


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (new_code_cell("f()", outputs=[new_output("error", ename="KeyError", evalue="", traceback=[])]), "KeyError"),
        (new_code_cell("f()", outputs=[stream("a warning", "stderr")]), "prints to stderr: 'a warning'"),
        (new_code_cell('if __name__ == "__main__": f()'), "a guard by __name__"),
        (new_code_cell("if new:\n    !git clone place"), "cannot show a shell line"),
        (new_code_cell("f('/home/me/model')"), "/home/me is a path of one machine"),
        (new_code_cell("f()", outputs=[stream("see /tmp/abc/x.py:3")]), "/tmp/abc is a path of one machine"),
        (new_code_cell("f()", outputs=[shown(text_html="<a href='/root/x'>")]), "/root/x is a path of one machine"),
        (new_markdown_cell("[a page](../docs/none.md#part)"), "links to ../docs/none.md, which is not there"),
    ],
)
def test_a_fault_of_a_cell_is_named(cell: NotebookNode, problem: str) -> None:
    said = found(made(cell))
    assert len(said) == 1
    assert said[0].startswith("cell 3: ")
    assert problem in said[0]


def test_what_is_no_path_of_one_machine_and_links_that_hold(tmp_path: Path) -> None:
    (tmp_path / "page.md").touch()
    links = "[a](page.md#part), [b](https://a.org/b), https://a.org/usr/x `tutorials/home/x` a/tmp/b 1 /2 [x](#part)"
    assert found(made(new_code_cell("1 + 1", outputs=[stream("2")]), new_markdown_cell(links)), tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: n.cells[2].update(execution_count=7), "not run from its first"),
        (lambda n: n.cells[-1].update(source="The end."), "the last cell must begin"),
        (lambda n: n.cells[2].metadata.update(execution={"iopub.status.busy": "now"}), "stores times"),
        (lambda n: n.metadata.language_info.update(version="3.12"), "stores times"),
        (lambda n: n.cells[2].metadata.update(tags=["install"]), "the second cell, and no other"),
        (lambda n: n.cells[2].outputs.append(shown(image_png="A" * 400_000)), "bytes, 400000 at most"),
        (lambda n: n.cells[0].update(source="# A title"), "the first cell must begin"),
    ],
)
def test_a_fault_of_the_whole_is_named(change: Any, said: str) -> None:
    notebook = made(new_code_cell("1"))
    change(notebook)
    assert said in found(notebook)[0]


def test_neither_progress_bars_nor_the_log_of_a_restart_are_stored() -> None:
    bar = new_output("display_data", data={notebooks.PROGRESS: {"model_id": "a"}, "text/plain": "0%"})
    log = stream("replica 1 ended with exit code -9. Its last log lines:\n\nreplica 1 serves again, after restart 1\n")
    assert cleaned(made(new_code_cell("f()", outputs=[bar, log, stream("2")]))).cells[2].outputs == [stream("2")]


FIGURES = [shown(image_png=data, text_plain=f"<Figure {size}>") for data, size in (("AA==", "7x4"), ("BB==", "1x2"))]


@pytest.mark.parametrize(
    ("stored", "run", "differs"),
    [  # figures and pictures may differ, and form may not
        (stream("loss 1.5, 3 of  10\n"), stream("loss -2e-07, 12 of 9"), False),
        (stream("nan 0x7f3a 2,15\n| 1|"), stream("1.0 0xbeef 13,4\n|  10|"), False),
        (stream("1,024 bytes"), stream("896 bytes"), False),
        (*FIGURES, False),
        (shown(text_html="<b>1</b>", text_plain="a"), shown(text_html="<i>other</i>", text_plain="a"), False),
        (stream("loss 1"), stream("error 1"), True),
        (stream("loss 1"), stream("loss 1\nloss 2"), True),
        (stream("qwen3_moe"), stream("qwen2_moe"), True),
        (shown(image_png="AA=="), shown(text_plain="<Figure>"), True),
        (shown(text_plain="1"), stream("1"), True),
    ],
)
def test_what_may_differ(stored: NotebookNode, run: NotebookNode, differs: bool) -> None:
    old, new = (made(new_code_cell("f()", outputs=[output])) for output in (stored, run))
    assert len(list(differences(old, new))) == differs
    old.cells[2].metadata.tags = new.cells[2].metadata.tags = [notebooks.VARIES]
    other_kind = stored.keys() != run.keys() or stored.get("data", {}).keys() != run.get("data", {}).keys()
    assert len(list(differences(old, new))) == other_kind


def test_other_cells_are_a_difference() -> None:
    assert "other cells are stored" in next(iter(differences(made(new_code_cell("1")), made(new_code_cell("2")))))


# -- run --------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, warnings
from pathlib import Path
import torchrl_moe
from tqdm.auto import tqdm
Path("left.txt").touch()
for _ in tqdm(range(3)): pass
root, python = os.environ["ROOT_OF_TEST"], os.environ["PYTHON_OF_TEST"]
print(os.listdir(), str(Path(torchrl_moe.__file__).parent.parent) == root, sys.executable == python)
1 + 1
"""


def test_a_run_is_in_an_empty_folder_over_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the command writes what it shows; a cell that raises ends it."""
    settings = tmp_path / "notebooks.toml"
    lines = ['repository = "https://github.com/someone/fork"', 'branch = "dev"', 'in_tests = "01_a"']
    settings.write_text("\n".join([*lines, 'extras = ["vllm"]', 'modules = ["torch"]']), encoding="utf-8")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr(notebooks, "SETTINGS", settings)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "01_a.ipynb"
    # a notebook that names a path of this machine is refused
    monkeypatch.setenv("ROOT_OF_TEST", str(notebooks.ROOT))
    monkeypatch.setenv("PYTHON_OF_TEST", sys.executable)
    stored = made(new_code_cell(PROGRAM))
    stored.cells[0].source = "# A title"
    notebooks.save(stored, path)
    assert notebooks.main(["--heads"]) == 0
    assert notebooks.read(path).cells[0].source.endswith(BADGE)
    assert notebooks.main(["--write"]) == 0
    run = notebooks.read(path)
    text, value = run.cells[2].outputs
    assert "left.txt" in text.text and text.text.endswith("True True\n") and value.data == {"text/plain": "2"}
    assert not (tmp_path / "left.txt").exists()
    assert [cell.execution_count for cell in run.cells if cell.cell_type == "code"] == [1, 2]
    assert run.cells[1].outputs == []  # torch is here: nothing to install


def test_a_run_that_raises_or_shows_something_else_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a kernel: what a run gave is given here."""
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    notebooks.save(made(new_code_cell("print('one')")), tmp_path / "01_a.ipynb")
    ran = made(new_code_cell("print('one')", outputs=[stream("one\n")]))

    raised, late = CellExecutionError("", "KeyError", "nothing"), CellTimeoutError("A cell timed out")
    for end, said in ((ran, "cell 3 showed"), (raised, "KeyError"), (late, "timed out")):
        monkeypatch.setattr(notebooks, "executed", Mock(side_effect=[end]))
        assert notebooks.main(["01"]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        notebooks.main(["02"])
    assert "no notebook begins with 02: there are 01_a" in capsys.readouterr().err
