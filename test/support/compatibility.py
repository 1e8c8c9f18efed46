"""The table in docs/replay.md, from what the tests find. Run as a module, this writes the installed release's part.

One column says what each release of transformers makes of a family; the cells beside it are the same for all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from packaging.version import Version
from torch import nn

from support.families import FAMILIES, REFUSED, is_absent, runs_in_bfloat16, shared_pair
from torchrl_moe.errors import UnsupportedRouterError

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
RELEASES = ("5.19", "5.24")
"""Those that the tests run with: beside an engine, and the newest."""
HERE = "{0.major}.{0.minor}".format(Version(transformers.__version__))
HOW = f"docs/replay.md is out of date: with transformers {HERE}, PYTHONPATH=.:test python -m support.compatibility"
ABSENT = "not there"
SHOWN = re.compile(r"(?<=<!-- table of families -->\n\n)(.*?)(?=\n\n<!-- end of table -->)", re.DOTALL)
TITLES = ["family", *RELEASES, "scoring", "dense layers", "notes"]

Cells = tuple[str, str, str]
"""Scoring, dense layers, notes."""


def _notes(model: nn.Module, written: str) -> str:
    """What the modules and the config show, then what is written by hand."""
    config = model.config.get_text_config()
    shared = any(re.search(r"\.shared_(experts?|mlp)$", name) for name, _ in model.named_modules())
    seen = ["shared experts"] * shared + ["groups of experts"] * ((getattr(config, "n_group", 1) or 1) > 1)
    return "; ".join([*seen, *[written] * bool(written)])


def found(name: str) -> tuple[str, Cells]:
    """What this release makes of a family that it has."""
    try:
        model, replay = shared_pair(name)
    except UnsupportedRouterError as error:
        return "refused", ("", "", str(error).rpartition(" cannot be replayed: ")[2])
    family = FAMILIES[name]
    dense = f"`{family.dense}`" if family.dense else "none"
    status = "exact" if runs_in_bfloat16(name) else "exact; bfloat16 fails"
    return status, (replay.scoring, dense, _notes(model, family.notes))


def shown() -> dict[str, dict[str, str]]:
    """The page's table: by family, by title."""
    match = SHOWN.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, f"{PAGE} has no table between its marks"
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[1].splitlines()]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def wanted() -> dict[str, dict[str, str]]:
    """That table, with all that this release knows: its own column, and the cells of the families that it has."""
    before = shown()
    rows = {}
    for name in (*FAMILIES, *REFUSED):
        row = {"family": name, **dict.fromkeys(TITLES[1:], ""), **before.get(name, {})}
        row |= {release: ABSENT for release in RELEASES if is_absent(name, release)}
        if not is_absent(name):
            row[HERE], cells = found(name)
            row |= dict(zip(TITLES[-3:], cells, strict=True))
        rows[name] = {title: row[title] for title in TITLES}
    return rows


def _markdown(rows: dict[str, dict[str, str]]) -> str:
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows.values())])


if __name__ == "__main__":
    assert HERE in RELEASES, f"the page has no column for transformers {HERE}"
    table = _markdown(wanted())
    PAGE.write_text(SHOWN.sub(lambda _: table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
