"""The table in docs/replay.md, from what the tests find. Run as a module, this writes it."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from torch import nn

from support.families import FAMILIES, REFUSED, is_absent, shared_pair
from torchrl_moe._errors import UnsupportedRouterError

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
HOW = "the table in docs/replay.md is out of date: PYTHONPATH=.:test python -m support.compatibility"
HEADER = "| family | status | scoring | dense layers | notes |\n|---|---|---|---|---|"
SHOWN = re.compile(r"(?<=<!-- table of transformers )(\S+) -->\n\n(.*?)\n\n(?=<!-- end of table -->)", re.DOTALL)


def _notes(model: nn.Module, written: str) -> str:
    """What the modules and the config show, then what is written by hand."""
    config = model.config.get_text_config()
    shared = any(re.search(r"\.shared_(experts?|mlp)$", name) for name, _ in model.named_modules())
    seen = ["shared experts"] * shared + ["groups of experts"] * ((getattr(config, "n_group", 1) or 1) > 1)
    return "; ".join([*seen, *[written] * bool(written)])


def _row(name: str) -> str:
    if is_absent(name):
        return f"| {name} | not in this release | | | |"
    try:
        model, replay = shared_pair(name)
    except UnsupportedRouterError as error:
        return f"| {name} | refused | | | {str(error).rpartition(' cannot be replayed: ')[2]} |"
    family = FAMILIES[name]
    dense = f"`{family.dense}`" if family.dense else "none"
    return f"| {name} | exact | {replay.scoring} | {dense} | {_notes(model, family.notes)} |"


def table() -> str:
    """In Markdown, one row per family."""
    return "\n".join([HEADER, *(_row(name) for name in FAMILIES), *(_row(name) for name in REFUSED)])


def _shown() -> re.Match[str]:
    match = SHOWN.search(PAGE.read_text())
    assert match is not None, f"{PAGE} has no table between its marks"
    return match


def version_shown() -> str:
    """The release of transformers that the page's table is of."""
    return _shown()[1]


def table_shown() -> str:
    """The page's table."""
    return _shown()[2]


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(lambda _: f"{transformers.__version__} -->\n\n{table()}\n\n", PAGE.read_text()))
