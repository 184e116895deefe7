"""The pins of requirements.txt."""

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
#: Parts of the interpreter's own environment.
UNPINNED = {"setuptools"}


def needed(name: str, extras: set[str], found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return all packages that a package needs with these extras, as far as they are installed."""
    new = extras - found.get(name, set()) or (set() if name in found else {""})
    if not new:
        return found
    found.setdefault(name, set()).update(new)
    try:
        requirements = map(Requirement, requires(name) or ())
    except PackageNotFoundError:
        return found
    for each in requirements:
        if any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in new | {""}):
            needed(canonicalize_name(each.name), set(each.extras), found)
    return found


def test_make_demo_installs_pinned_packages_alone():
    pins = [re.fullmatch(r"([\w.-]+)==[\w.]+", line) for line in REQUIREMENTS.read_text().splitlines()]
    assert all(pins)
    packages = set(needed("tidegauge", {"app", "jobs"}, {})) - {"tidegauge"} - UNPINNED
    assert {"torch", "streamlit", "duckdb", "opencv-python-headless"} < packages
    assert packages <= {canonicalize_name(pin[1]) for pin in pins}
    assert "mypy" not in packages
