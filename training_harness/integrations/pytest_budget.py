"""Tests that are held to a budget: `@pytest.mark.tidegauge(max_growth="0 B/step")`.

The process of the test is a run of its own while the test function runs. Then `tidegauge check` judges that run, in
another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from training_harness import command, layout, session
from training_harness.budget import Budget
from training_harness.installation import announce, attach, detach, start_collector

#: Seconds between samples: a test is short, and a trend takes twelve of them.
_INTERVAL_SECONDS = 0.2
#: Seconds that a collector has for its first sample, and to store everything.
_START_SECONDS, _END_SECONDS = 30.0, 60.0
_POLL_SECONDS = 0.02


class BudgetPlugin:
    """Plugin that observes and judges the tests with a mark.

    Args:
        mark: name of the mark.
        not_judged: name of the user property that says what was not judged.
    """

    def __init__(self, mark: str, not_judged: str) -> None:
        self._mark = mark
        self._not_judged = not_judged

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse a mark that is no budget before anything is trained."""
        limits = self._limits_of(item)
        if limits is None:
            return
        if problem := _problem(limits):
            pytest.fail(f"tidegauge: the mark of {item.name}: {problem}", pytrace=False)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Observe a marked test, and fail it if it is beyond its budget."""
        limits = self._limits_of(item)
        if limits is None:
            return (yield)
        if obstacle := _obstacle():
            item.user_properties.append((self._not_judged, obstacle))
            return (yield)
        with _observed(item) as run_dir:
            result = yield
        judged = _check(run_dir, limits)
        for each in judged["measures"]:
            if each["status"] == "not judged":
                item.user_properties.append((self._not_judged, each["text"][0]))
        beyond = [each["text"] for each in judged["measures"] if each["status"] == "beyond"]
        if beyond:
            lines = [
                f"tidegauge: {sentence}\n" + "\n".join(f"  {line}" for line in rest) for sentence, *rest in beyond
            ]
            pytest.fail("\n".join([*map(str.rstrip, lines), f"Run: tidegauge report {run_dir}"]), pytrace=False)
        return result

    def _limits_of(self, item: pytest.Item) -> dict[str, Any] | None:
        """Return the budget in the marks of a test, of which the nearest one counts; None without a mark."""
        marks = list(item.iter_markers(self._mark))
        if not marks:
            return None
        limits: dict[str, Any] = {}
        for mark in reversed(marks):
            limits |= {**mark.kwargs, **{repr(value): None for value in mark.args}}
        return limits


def _problem(limits: Mapping[str, Any]) -> str:
    """Return why a test cannot be held to these limits; empty if it can."""
    try:
        Budget.of(limits)
    except ValueError as error:
        return str(error)
    if missing := command.missing_packages():
        return f"{', '.join(missing)} cannot be imported: pip install 'tidegauge[collector]'"
    return ""


def _obstacle() -> str:
    """Return why this process cannot be observed by itself; empty if it can."""
    if os.environ.get(layout.DISABLED_VARIABLE) == "1":
        return f"{layout.DISABLED_VARIABLE}=1"
    run_dir = session.active.run_dir if session.active is not None else os.environ.get(layout.RUN_DIR_VARIABLE)
    return f"this process is part of the run {Path(run_dir).name} already" if run_dir else ""


@contextlib.contextmanager
def _observed(item: pytest.Item) -> Iterator[Path]:
    """Make this process a run of its own, which is stored at the end."""
    run_dir = layout.create_run(layout.home_path(), name=item.name, argv=sys.orig_argv, tags={"test": item.nodeid})
    if attach(run_dir) is None:
        pytest.fail("tidegauge: this process cannot be observed; the reason is on stderr", pytrace=False)
    announce()
    collector = start_collector(run_dir, "--interval", str(_INTERVAL_SECONDS))
    assert collector is not None  # setup made sure that it is installed
    try:
        _await_first_sample(run_dir, collector)
        yield run_dir
    finally:
        detach()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what it has not stored yet is read from its journals
            collector.wait(_END_SECONDS)


def _await_first_sample(run_dir: Path, collector: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not any((run_dir / "journal").glob(f"*.{collector.pid}.process.*")):
        if collector.poll() is not None or time.monotonic() > deadline:
            log = (run_dir / "collector.log").read_text().strip()
            pytest.fail(
                f"tidegauge: no sample within {_START_SECONDS:g} s; the collector says: {log}", pytrace=False
            )
        time.sleep(_POLL_SECONDS)


def _check(run_dir: Path, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `tidegauge check` says of a run, as JSON; fail the test with its line if it cannot judge."""
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "training_harness.command"),
            *("check", str(run_dir), "--budget", "-", "--format", "json"),
        ],
        input="".join(f"{name} = {json.dumps(value)}\n" for name, value in limits.items()),
        env={**os.environ, layout.DISABLED_VARIABLE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        judged: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        pytest.fail(done.stderr.strip() or f"tidegauge: the check ended with {done.returncode}", pytrace=False)
    return judged
