"""Sphinx's settings: ``make docs`` builds the site, with warnings as errors, and needs no network."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from sphinx.application import Sphinx

import torchrl_moe

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = os.environ.get("REPOSITORY_URL", "")
"""The folder of the sources on the web, ``https://…/blob/main``; without it, the site has copies of linked sources."""

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
exclude_patterns = ["_build", "notebooks/grpo", "**/runs", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = f"torchrl_moe {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
pygments_style, pygments_dark_style = "tango", "monokai"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks show the outputs that are committed; `make notebooks` runs them
nb_merge_streams = True

autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "conformance"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = False

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^\s)#]+)(#[^\s)]*)?(?=\))")


def link_sources(app: Sphinx, page: str, content: list[str], written_in: Path | None = None) -> None:
    """Make each link that leaves ``docs/`` one that holds in the site."""
    shown_in = Path(app.env.doc2path(page))
    file = (written_in or shown_in).resolve()  # notebooks/ is a link to tutorials/

    def linked(match: re.Match[str]) -> str:
        path, anchor = (file.parent / match[1]).resolve(), match[2] or ""
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # Sphinx says that it is missing
        name = path.relative_to(ROOT)
        if name.parts[0] == "tutorials" and name.suffix == ".ipynb":
            name = Path("docs", "notebooks", name.name)
        if name.parts[0] == "docs":
            return relpath(str(ROOT / name), str(shown_in.parent)) + anchor
        return f"{REPOSITORY}/{name}{anchor}" if REPOSITORY else f"path:{relpath(str(path), str(shown_in.parent))}"

    content[0] = LINK.sub(linked, content[0])


def link_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """The same for the README, which a page includes."""
    link_sources(app, page, content, app.srcdir / path)


def is_torchrls(obj: Any) -> bool:
    """Whether a class or a function, or what a member wraps, was written in another package."""
    function = getattr(obj, "fget", None) or getattr(obj, "__func__", None) or obj
    module = getattr(function, "__module__", None) or ""
    return (inspect.isroutine(function) or inspect.isclass(function)) and not module.startswith("torchrl_moe")


def show_own_names(_: Sphinx, _what: str, _name: str, obj: Any, *__: Any) -> bool | None:
    """Skip what a room has from TorchRL, and what its classes have from their bases there."""
    return True if is_torchrls(obj) else None


def list_names(_: Sphinx, what: str, _name: str, room: Any, __: Any, lines: list[str]) -> None:
    """Append to a room's docstring a table of its names, and those that are TorchRL's own."""
    if what != "module" or not hasattr(room, "__all__"):
        return
    theirs = [public for public in room.__all__ if is_torchrls(getattr(room, public))]
    own = [public for public in room.__all__ if public not in {*theirs, "conformance"}]
    lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {public}" for public in own), ""]
    if theirs:
        lines += [f"TorchRL's own, under the same names: {', '.join(f'``{public}``' for public in theirs)}.", ""]


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", link_sources)
    app.connect("include-read", link_included)
    app.connect("autodoc-skip-member", show_own_names)
    app.connect("autodoc-process-docstring", list_names)
