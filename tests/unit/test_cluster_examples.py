"""The examples for clusters and schedulers: files that their tools can read, with variables that exist."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.conftest import REPOSITORY
from training_harness import layout

#: Folder of examples -> the page that describes them.
PAGES = {"cluster": "cluster.md", "kubernetes": "schedulers.md", "ray": "schedulers.md", "slurm": "schedulers.md"}
EXAMPLES = [path for folder in PAGES for path in sorted((REPOSITORY / "examples" / folder).iterdir())]
DOCS = [REPOSITORY / "docs" / page for page in sorted(set(PAGES.values()))]
KNOWN = {value for name, value in vars(layout).items() if name.endswith("_VARIABLE")}


def name(path):
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", [*EXAMPLES, *DOCS], ids=name)
def test_examples_name_only_existing_variables(path):
    assert set(re.findall(r"TIDEGAUGE_[A-Z]\w+", path.read_text())) <= KNOWN


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.suffix == ".yaml"], ids=name)
def test_yaml_examples_parse_and_hold_no_password(path):
    assert yaml.safe_load(path.read_text())
    for line in path.read_text().splitlines():
        if (
            re.search(r"password|secret_key", line, re.IGNORECASE)
            and ": " in line
            and not line.lstrip().startswith("#")
        ):
            assert "${" in line, line


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.suffix in (".sh", ".sbatch")], ids=name)
def test_shell_examples_parse(path):
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_a_docs_page_links_to_every_example(path):
    page = (REPOSITORY / "docs" / PAGES[path.parent.name]).read_text()
    assert f"examples/{name(path)})" in page
