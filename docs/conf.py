"""Sphinx's settings: ``make docs`` builds the site, with warnings as errors, and needs no network."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import torchrl_moe

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS, NOTEBOOKS = ROOT / "tutorials", ROOT / "docs" / "notebooks"

project, author, copyright = "torchrl_moe", "torchrl_moe contributors", "torchrl_moe contributors"
version = release = torchrl_moe.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"torchrl_moe {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks show the outputs that are committed; `make notebooks` runs them
nb_merge_streams = True

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = False

ERRORS = "torchrl_moe.errors"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^\s)#]+)(#[^\s)]*)?(?=\))")


def copy_notebooks(_: Sphinx, __: Any) -> None:
    """Bring the notebooks to where Sphinx reads, and remove old copies; unchanged ones keep their times."""
    NOTEBOOKS.mkdir(exist_ok=True)
    written = {path.name: path.read_bytes() for path in TUTORIALS.glob("*.ipynb")}
    for copy in NOTEBOOKS.glob("*.ipynb"):
        if written.get(copy.name) != copy.read_bytes():
            copy.unlink()
    for name, content in written.items():
        if not (NOTEBOOKS / name).exists():
            (NOTEBOOKS / name).write_bytes(content)


def link_sources(app: Sphinx, page: str, content: list[str], written_in: Path | None = None) -> None:
    """Make each link that leaves ``docs/`` one that holds in the site."""
    shown = Path(app.env.doc2path(page))
    file = written_in or (TUTORIALS / shown.name if shown.parent == NOTEBOOKS else shown)

    def linked(match: re.Match[str]) -> str:
        path, anchor = (file.parent / match[1]).resolve(), match[2] or ""
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # Sphinx says that it is missing
        name = path.relative_to(ROOT)
        if name.parts[0] == "tutorials" and name.suffix == ".ipynb":
            name = Path("docs", "notebooks", name.name)
        if name.parts[0] == "docs":
            return f"/{name.relative_to('docs')}{anchor}"
        return f"path:/../{name}"  # the site has copies of linked sources

    content[0] = LINK.sub(linked, content[0])


def link_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """The same for the README, which a page includes."""
    link_sources(app, page, content, (app.srcdir / path).resolve())


def is_torchrls(obj: Any) -> bool:
    """Whether a class or a function, or what a member wraps, was written in another package."""
    function = getattr(obj, "fget", None) or getattr(obj, "__func__", None) or obj
    module = getattr(function, "__module__", None) or ""
    return (inspect.isroutine(function) or inspect.isclass(function)) and not module.startswith("torchrl_moe")


def show_own_names(_: Sphinx, _what: str, _name: str, obj: Any, *__: Any) -> bool | None:
    """Skip what a room has from TorchRL, and what its classes have from their bases there."""
    return True if is_torchrls(obj) else None


def restore_docstring(_: Sphinx, what: str, _name: str, obj: Any, __: Any, lines: list[str]) -> None:
    """Show what is written under a class where ``dataclass`` has put its signature: tensorclasses lose theirs."""
    if what == "class" and (obj.__doc__ or "").startswith(f"{obj.__name__}("):
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(obj))).body
        lines[:] = (ast.get_docstring(cast(ast.ClassDef, written)) or "").splitlines()


def constant(name: str) -> list[str]:
    """Return the entry of a name that is neither class nor function: Sphinx looks for its docstring in the room."""
    for module in [module for module in sys.modules if module.startswith("torchrl_moe.")]:
        if not hasattr(sys.modules[module], name) or hasattr(sys.modules[module], "__path__"):
            continue
        if docstring := ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name)):
            return [f".. py:data:: {name}", "", *(f"   {line}" for line in docstring), ""]
    return []


def list_names(_: Sphinx, what: str, _name: str, room: Any, __: Any, lines: list[str]) -> None:
    """Append to a room's docstring a table of its names, and those that are TorchRL's own."""
    if what != "module" or not hasattr(room, "__all__"):
        return
    values = {public: getattr(room, public) for public in room.__all__}
    theirs = [public for public, value in values.items() if is_torchrls(value)]
    errors = [public for public, value in values.items() if getattr(value, "__module__", "") == ERRORS != room.__name__]
    own = [public for public in values if public not in theirs + errors and not inspect.ismodule(values[public])]
    entries = [public for public in own if inspect.isroutine(values[public]) or inspect.isclass(values[public])]
    lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {public}" for public in entries), ""]
    if theirs:
        lines += [f"TorchRL's own, under the same names: {', '.join(f'``{public}``' for public in theirs)}.", ""]
    if errors:
        lines += [f"Errors: {', '.join(f':exc:`~{ERRORS}.{public}`' for public in errors)}.", ""]
    if hasattr(room, "__path__"):  # autodoc finds the constants of a file, and not those that a room exports
        lines += [line for public in own if public not in entries for line in constant(public)]


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("config-inited", copy_notebooks)
    app.connect("source-read", link_sources)
    app.connect("include-read", link_included)
    app.connect("autodoc-skip-member", show_own_names)
    app.connect("autodoc-process-docstring", restore_docstring, priority=400)  # before napoleon reads it
    app.connect("autodoc-process-docstring", list_names)
