"""The tables of docs/reference/torchrl.md. Run as a module, this writes them."""

from __future__ import annotations

import re
from pathlib import Path

import torchrl

from support.torchrl_differences import KINDS, LABELS, REASONS, Book, Pair

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torchrl.md"
HOW = "torchrl.md is not what the signatures say: PYTHONPATH=.:test python -m support.torchrl_page writes it"
SHOWN = re.compile(r"(?<=<!-- )(\w+) -->\n\n.*?\n\n(?=<!-- end of \1 -->)", re.DOTALL)


def classes(book: Book) -> str:
    """Every pair, parameter by parameter."""
    return "\n\n".join(_section(book, pair) for pair in book.pairs)


def _section(book: Book, pair: Pair) -> str:
    reasons, like = book.reasons(pair), book.inherited(pair)
    rows, same, alike = [], [], []
    for name, row in pair.compared.items():
        why = {kind: text for kind, text in reasons.get(name, {}).items() if kind != "example"}
        if not why:
            same += [] if "." in name else [name]
        elif name not in pair.parameters and name in like:
            alike.append(name)
        else:
            labels = ", ".join(LABELS[kind] for kind in LABELS if kind in why)
            text = " ".join(why[kind] for kind in LABELS if kind in why)
            rows.append(f"| `{_call(name)}` | {_code(row.theirs)} | {_code(row.ours)} | {labels} | {text} |")
    missing = {name: book.members(pair)[name] for name in pair.missing}
    rows += [f"| `.{name}` | | | not here | {why} |" for name, why in missing.items() if name in pair.members]
    alike += [f".{name}" for name in missing if name not in pair.members]
    parts = [f"### {pair.title}", f"`{pair.theirs}` and `{pair.ours}`."]
    parts += ["\n".join(["| parameter | TorchRL | here | | |", "|---|---|---|---|---|", *rows])] if rows else []
    parts += [f"As {' and '.join(pair.like)}: {_list(alike)}."] if alike else []
    parts += [f"Same name, place and default: {_list(same)}."] if same else []
    parts += [f"Here alone: {_list(pair.alone)}."] if pair.alone else []
    return "\n\n".join(parts)


def _call(name: str) -> str:
    method, _, parameter = name.rpartition(".")
    return f"{method}({parameter})" if method else parameter


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _list(names: list[str]) -> str:
    return ", ".join(f"`{_call(name) if not name.startswith('.') else name}`" for name in names)


def names(book: Book) -> str:
    """What is imported from where."""
    lines = ["| TorchRL | here | the same names |", "|---|---|---|"]
    for space in book.namespaces:
        star = {name: r"\*" for name in space.taken_over}
        here = ", ".join(f"`{name}`{star.get(name, '')}" for name in space.names[1])
        lines.append(f"| `{space.theirs}` | `{space.ours}` | {here} |")
    lines += ["", "\\* TorchRL's own.", "", "| not here | why |", "|---|---|"]
    for space in book.namespaces:
        together: dict[str, list[str]] = {}
        for name, why in space.absent.items():
            together.setdefault(why, []).append(f"`{name}`")
        lines += [f"| {', '.join(same)} | {why} |" for why, same in together.items()]
    return "\n".join(lines)


def tests(book: Book) -> str:
    """TorchRL's own tests that do not pass with our classes."""
    lines = ["| test | | why |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{test['name']}` | {KINDS[test['kind']]} | {test['why']} |" for test in book.tests)]
    )


def version() -> str:
    """TorchRL's release."""
    return f"TorchRL {torchrl.__version__.partition('+')[0]}."


def written(text: str, book: Book) -> str:
    """Return a page with its generated parts as they should be."""
    parts = {"version": version, "names": lambda: names(book), "classes": lambda: classes(book)}
    parts["tests"] = lambda: tests(book)
    return SHOWN.sub(lambda match: f"{match[1]} -->\n\n{parts[match[1]]()}\n\n", text)


if __name__ == "__main__":
    book = Book.read()
    if found := list(book.problems()):
        raise SystemExit("\n".join([f"{REASONS.name} and the signatures do not agree:", *found]))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), book), encoding="utf-8")
