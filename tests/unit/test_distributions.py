"""The distributions: a source distribution is complete, and two builds of it are equal byte by byte."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGES = ("app", "collector", "tidegauge", "training_harness")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
#: Some time at which this was no file of this checkout.
EPOCH = "1700000000"


def copy_of_the_tree(place: Path) -> Path:
    place.mkdir()
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, place)
    return place


def build(kind: str, source: Path) -> Path:
    """Return what setuptools builds of a tree, as `pip` and `build` call it."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return source / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return build("sdist", copy_of_the_tree(tmp_path_factory.mktemp("one") / "tree"))


def test_two_source_distributions_are_equal(archive, tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree")
    for path in tree.rglob("*.py"):
        path.chmod(0o600)  # another umask
    assert build("sdist", tree).read_bytes() == archive.read_bytes()


def test_a_wheel_built_from_the_source_distribution_has_what_runs_at_start_up_and_takes_no_name(archive, tmp_path):
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    with zipfile.ZipFile(build("wheel", tree)) as wheel:
        names = set(wheel.namelist())
    tool = "training_harness/tool/"
    assert {"tidegauge.pth", "tidegauge_pytest.py", "training_harness/bootstrap/sitecustomize.py"} <= names
    assert {f"{tool}app/icon.svg", f"{tool}app/.streamlit/config.toml"} <= names
    assert any(name.startswith(f"{tool}collector/commands/demo/recorded/") for name in names)
    tops = {name.partition("/")[0] for name in names if "dist-info" not in name}
    assert tops == {"tidegauge.pth", "tidegauge_pytest.py", "tidegauge", "training_harness"}
