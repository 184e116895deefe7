"""Entry point of pytest's plugin: it looks for the mark, and loads the rest with the first marked test.

It lies next to the package: an import of the package would cost every session of pytest.
"""

from __future__ import annotations

import pytest

_MARK = "tidegauge"
#: User property of a report that says what was not judged.
NOT_JUDGED = "tidegauge: not judged"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers", f'{_MARK}(max_growth="0 B/step", …): hold the training in this test to a budget (docs/ci.md).'
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Load what observes tests if one of them has the mark."""
    if any(item.get_closest_marker(_MARK) for item in items):
        from training_harness.integrations import pytest_budget

        config.pluginmanager.register(pytest_budget.BudgetPlugin(_MARK, NOT_JUDGED))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was not judged, also in the processes of pytest-xdist."""
    lines = [
        f"{report.nodeid}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == NOT_JUDGED
    ]
    if lines:
        terminalreporter.section(NOT_JUDGED)
        for line in lines:
            terminalreporter.write_line(line)
