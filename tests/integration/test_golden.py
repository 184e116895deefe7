"""The recorded runs give the same reports and figures as when tests/data/golden was written.

After an intended change: python -m tests.golden --write, and check the difference. Without --write that
compares every page of every run.
"""

from __future__ import annotations

import pytest

from tests.golden import golden_files, run_outputs
from tests.golden.cases import CASES, COMPARISON, RECORDED_GPU, pages_of

#: Runs that are recorded as journals; ingested into a lake, they give the same report.
STORED = ("ddp", "crash")


def expect_no_difference(name, old, new):
    if lines := golden_files.differing(name, old, new):
        pytest.fail(lines, pytrace=False)


@pytest.mark.parametrize("name", [*CASES, *RECORDED_GPU])
def test_recorded_run_is_judged_as_before(name, tmp_path):
    pages, golden = pages_of(name), golden_files.read_golden(name)
    old = {**golden, "pages": {page: golden["pages"][page] for page in pages}}
    expect_no_difference(name, old, run_outputs.judge(name, tmp_path, pages))


def test_runs_are_compared_as_before(tmp_path):
    expect_no_difference(COMPARISON, golden_files.read_golden(COMPARISON), run_outputs.compare(tmp_path))


@pytest.mark.parametrize("name", STORED)
def test_printed_report_is_equal_from_journals_and_lake(name, tmp_path):
    run, golden = run_outputs.unpack(name, tmp_path), golden_files.read_golden(name)["report"]
    assert not (run / "lake.sqlite").exists()
    expect_no_difference(name, golden, run_outputs.printed_report(run))
    run_outputs.run_command("collect", str(run))
    assert (run / "lake.sqlite").exists()
    expect_no_difference(name, golden, run_outputs.printed_report(run))
