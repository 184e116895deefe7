"""The examples for a cluster: files that their tools can read, with variables that exist."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.conftest import REPOSITORY
from training_harness import layout

EXAMPLES = sorted((REPOSITORY / "examples" / "cluster").iterdir())
KNOWN = {value for name, value in vars(layout).items() if name.endswith("_VARIABLE")}


@pytest.mark.parametrize("path", [*EXAMPLES, REPOSITORY / "docs" / "cluster.md"], ids=lambda path: path.name)
def test_examples_name_only_existing_variables(path):
    assert set(re.findall(r"TIDEGAUGE_[A-Z_]+", path.read_text())) <= KNOWN


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_yaml_examples_parse_and_hold_no_password(path):
    assert yaml.safe_load(path.read_text())
    for line in path.read_text().splitlines():
        if (
            re.search(r"password|secret_key", line, re.IGNORECASE)
            and ": " in line
            and not line.lstrip().startswith("#")
        ):
            assert "${" in line, line


def test_docs_page_links_to_every_example():
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    for path in EXAMPLES:
        assert f"examples/cluster/{path.name})" in page
