"""The forms for issues: GitHub can show them, and the commands that they ask for exist."""

import re

import click
import pytest
import yaml

from collector import cli
from tests.conftest import REPOSITORY

FORMS = sorted(path for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
#: Kinds of fields of a form.
TYPES = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_there_is_a_form_for_a_bug_a_wrong_verdict_and_a_feature():
    assert [path.stem for path in FORMS] == ["bug", "feature", "verdict"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_github_can_show_a_form(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in TYPES
        assert field["attributes"]["label"]
        assert ("options" in field["attributes"]) == (field["type"] == "dropdown")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_exist(path):
    for name, words in re.findall(r"`tidegauge (\w+)([^`]*)`", path.read_text(encoding="utf-8")):
        options = {
            option
            for parameter in cli.cli.get_command(click.Context(cli.cli), name).params
            for option in parameter.opts
        }
        assert set(re.findall(r"--[\w-]+", words)) <= options


@pytest.mark.parametrize("kind", ["bug", "verdict"])
def test_a_report_needs_the_checks_of_the_machine_and_the_run_without_its_texts(kind):
    form = yaml.safe_load((REPOSITORY / ".github" / "ISSUE_TEMPLATE" / f"{kind}.yml").read_text(encoding="utf-8"))
    required = str([field for field in form["body"] if field.get("validations", {}).get("required")])
    assert "tidegauge doctor" in required
    assert re.search(r"tidegauge export \S+ --to \S+ .*--redact", required)
