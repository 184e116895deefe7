"""The Python API of Tidegauge: runs, their streams as tables, findings, verdicts and charts.

    import tidegauge

    run = tidegauge.open_run("latest")
    print(run.report().findings)
    steps = run.stream("step")

In a notebook, `%load_ext tidegauge` adds the magic `%tidegauge`. To watch a training, see `training_harness`.
"""

from typing import Any

from tidegauge.findings import (
    Advice,
    AllocationSite,
    Check,
    Eta,
    Evidence,
    Finding,
    Limit,
    Locus,
    Rate,
    WaitingLine,
)
from tidegauge.process import TidegaugeError
from tidegauge.runs import Chart, Report, Run, list_runs, open_run

__all__ = [
    "Advice",
    "AllocationSite",
    "Chart",
    "Check",
    "Eta",
    "Evidence",
    "Finding",
    "Limit",
    "Locus",
    "Rate",
    "Report",
    "Run",
    "TidegaugeError",
    "WaitingLine",
    "list_runs",
    "load_ipython_extension",
    "open_run",
]


def load_ipython_extension(shell: Any) -> None:
    """Add the magic `%tidegauge`; `%load_ext tidegauge` calls this."""
    from tidegauge.magics import add_magic

    add_magic(shell)
