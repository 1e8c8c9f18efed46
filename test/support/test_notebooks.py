"""What is said of a notebook, and what running one does, on made-up notebooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
    cells = [
        new_markdown_cell("# A title"),
        new_code_cell(metadata={"tags": ["install"]}),
        *code,
        new_markdown_cell("## What to read next\n\nNothing."),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    return cleaned(with_head(new_notebook(cells=cells), "01_a", SETTINGS))


def found(notebook: NotebookNode, folder: Path = notebooks.FOLDER) -> list[str]:
    return list(problems(notebook, "01_a", SETTINGS, folder))


# -- as it is stored --------------------------------------------------------------------------------------------------


def test_a_head_is_written_and_replaced() -> None:
    notebook = made()
    assert notebook.cells[0].source.endswith(BADGE)
    assert 'torchrl_moe[vllm] @ git+https://github.com/someone/fork@dev"' in notebook.cells[1].source
    other = with_head(notebook, "01_a", Settings("https://github.com/a/b", "main", ["vllm"], ["torch"], "01_a"))
    assert other.cells[0].source.count("\n") == 2
    assert "fork" not in other.cells[0].source + other.cells[1].source
    assert with_head(other, "01_a", SETTINGS) == notebook
    assert len(found(other)) == 1
    assert "badge or install cell differ" in found(other)[0]


def test_a_notebook_without_fault() -> None:
    assert found(made(new_code_cell("1 + 1", outputs=[stream("2")]))) == []


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (new_code_cell("f()", outputs=[new_output("error", ename="KeyError", evalue="", traceback=[])]), "KeyError"),
        (new_code_cell("f()", outputs=[stream("a warning", "stderr")]), "prints to stderr: 'a warning'"),
        (new_code_cell('if __name__ == "__main__": f()'), "a guard by __name__"),
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


@pytest.mark.parametrize("text", ["https://a.org/usr/x", "`tutorials/home/x`", "a/tmp/b", "1 /2", "[x](#part)"])
def test_what_is_no_path_of_one_machine(text: str) -> None:
    assert found(made(new_markdown_cell(text))) == []


def test_links_that_hold(tmp_path: Path) -> None:
    (tmp_path / "page.md").touch()
    assert found(made(new_markdown_cell("[a](page.md#part), [b](https://a.org/b)")), tmp_path) == []


def broken(change: Any) -> list[str]:
    notebook = made(new_code_cell("1"))
    change(notebook)
    return found(notebook)


def test_a_fault_of_the_whole_is_named() -> None:
    assert "not run from its first" in broken(lambda n: n.cells[2].update(execution_count=7))[0]
    assert "the last cell must begin" in broken(lambda n: n.cells[-1].update(source="The end."))[0]
    assert "stores times" in broken(lambda n: n.cells[2].metadata.update(execution={"iopub.status.busy": "now"}))[0]
    assert "stores times" in broken(lambda n: n.metadata.language_info.update(version="3.12"))[0]
    second = broken(lambda n: n.cells[2].metadata.update(tags=["install"]))
    assert "the second cell, and no other" in second[0]
    assert "bytes, 400000 at most" in broken(lambda n: n.cells[2].outputs.append(shown(image_png="A" * 400_000)))[0]
    assert "the first cell must begin" in broken(lambda n: n.cells[0].update(source="# A title"))[0]


def test_neither_progress_bars_nor_the_log_of_a_restart_are_stored() -> None:
    bar = new_output("display_data", data={notebooks.PROGRESS: {"model_id": "a"}, "text/plain": "0%"})
    log = stream("replica 1 ended with exit code -9. Its last log lines:\n\nreplica 1 serves again, after restart 1\n")
    assert cleaned(made(new_code_cell("f()", outputs=[bar, log, stream("2")]))).cells[2].outputs == [stream("2")]


# -- compared with a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "run"),
    [
        (stream("loss 1.5, 3 of  10\n"), stream("loss -2e-07, 12 of 9")),
        (stream("nan 0x7f3a 2,15\n| 1|"), stream("1.0 0xbeef 13,4\n|  10|")),
        (
            shown(image_png="AA==", text_plain="<Figure size 700x400>"),
            shown(image_png="BB==", text_plain="<Figure size 1x2>"),
        ),
        (shown(text_html="<b>1</b>", text_plain="a"), shown(text_html="<i>other</i>", text_plain="a")),
    ],
)
def test_figures_and_pictures_may_differ(stored: NotebookNode, run: NotebookNode) -> None:
    old, new = (made(new_code_cell("f()", outputs=[output])) for output in (stored, run))
    assert list(differences(old, new)) == []


@pytest.mark.parametrize(
    ("stored", "run"),
    [
        (stream("loss 1"), stream("error 1")),
        (stream("loss 1"), stream("loss 1\nloss 2")),
        (stream("qwen3_moe"), stream("qwen2_moe")),
        (shown(image_png="AA=="), shown(text_plain="<Figure>")),
        (shown(text_plain="1"), stream("1")),
    ],
)
def test_form_may_not_differ(stored: NotebookNode, run: NotebookNode) -> None:
    old, new = (made(new_code_cell("f()", outputs=[output])) for output in (stored, run))
    assert len(list(differences(old, new))) == 1
    old.cells[2].metadata.tags = new.cells[2].metadata.tags = [notebooks.VARIES]
    assert len(list(differences(old, new))) == int(
        stored.keys() != run.keys() or stored.get("data", {}).keys() != run.get("data", {}).keys()
    )


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
    assert "left.txt" in text.text
    assert text.text.endswith("True True\n")
    assert value.data == {"text/plain": "2"}
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

    def raised(*_: Any) -> NotebookNode:
        raise CellExecutionError("", "KeyError", "nothing")

    def took_too_long(*_: Any) -> NotebookNode:
        raise CellTimeoutError("A cell timed out")

    for run, said in ((lambda *_: ran, "cell 3 showed"), (raised, "KeyError"), (took_too_long, "timed out")):
        monkeypatch.setattr(notebooks, "executed", run)
        assert notebooks.main(["01"]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        notebooks.main(["02"])
    assert "no notebook begins with 02: there are 01_a" in capsys.readouterr().err
