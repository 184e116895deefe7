"""Measure whether the lines behind a slow loader are named, and what the sampling of stacks costs the training.

    python -m benchmarks.lines [CASE ...] [--seconds 60] [--warning] [--cost PAIRS]

Each case is a real training under `tidegauge run --investigate` that waits in one known way (tests/scripts/
slow_lines.py, where a comment marks the lines). With `--warning` it runs under `--on-finding` instead, so stacks
are sampled only once a warning stands. `--cost` measures the step time of one training with two workers while
py-spy samples and while it does not, by turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_series import record_series
from training_harness.journal import start_ticks

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "slow_lines.py"
#: Case -> finding that it is expected to have.
CASES = {
    "sleep": "workers-too-slow",
    "opencv": "workers-too-slow",
    "parsing": "workers-too-slow",
    "collate": "collate-bound",
    "sampler": "sampler-bound",
    "slow_worker": "slow-worker",
    "lock": "workers-too-slow",
    "flock": "workers-too-slow",
    "file": "workers-too-slow",
    "inline": "inline-loading",
    "pause": "main-thread-pause",
    "child": "workers-too-slow",
    "threads": "workers-too-slow",
}


@dataclass(frozen=True)
class Outcome:
    case: str
    finding: str
    line: dict[str, Any] | None
    sampling_seconds: float
    run_seconds: float

    @property
    def is_right(self) -> bool:
        """True if the first line is one that the script marks."""
        return self.line is not None and _number(self.line["site"]) in marked_lines(self.case)


def marked_lines(case: str) -> set[int]:
    """Return the numbers of the lines behind a case."""
    lines = SCRIPT.read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if line.endswith(f"# line: {case}")}


def _number(site: str) -> int:
    return int(site.split(",")[0].rpartition(":")[2])


def run(case: str, seconds: float, option: list[str], folder: Path) -> Outcome:
    """Run one case to its end, and return the finding with lines, else the first one."""
    home = ["--home", str(folder / case)]
    program = [sys.executable, "-P", "-m", "collector"]
    command = [sys.executable, str(SCRIPT), case, str(seconds)]
    watched, quiet = [*program, "run", *home, *option, "--", *command], subprocess.DEVNULL
    subprocess.run(watched, check=False, stdin=quiet, stdout=quiet, stderr=quiet)
    text = subprocess.run([*program, "report", *home, "--format", "json"], capture_output=True, check=True).stdout
    report = json.loads(text)
    findings = report["findings"]
    chosen = next((finding for finding in findings if finding.get("waits_in")), next(iter(findings), None))
    events = [
        json.loads(line)
        for log in (folder / case).glob("runs/*/events/*.jsonl")
        for line in log.read_text().splitlines()
    ]
    spent = sum(event["cpu_seconds"] for event in events if event["kind"] == "stack-series")
    return Outcome(
        case=case,
        finding=chosen["kind"] if chosen else "",
        line=(chosen.get("waits_in") or [None])[0] if chosen else None,
        sampling_seconds=spent,
        run_seconds=report["run"]["duration_seconds"] or 0.0,
    )


def cost(pairs: int, case: str) -> tuple[float, float, float]:
    """Return (median, 5 % and 95 % of the change of the mean step time) while stacks are sampled, as shares."""
    seconds = 3
    with tempfile.NamedTemporaryFile() as log:
        training = subprocess.Popen(
            [sys.executable, "-c", _STEPS.format(script=SCRIPT, case=case, log=log.name)], stdin=subprocess.DEVNULL
        )
        process = LocalProcess(training.pid, start_ticks(training.pid))
        time.sleep(15)
        windows, spent = [], []
        for pair in range(2 * pairs):
            is_sampled = pair % 2 == (pair // 2) % 2
            begin = time.monotonic_ns()
            if is_sampled:
                spent.append(record_series(process, seconds, with_children=True)["cpu_seconds"])
            else:
                time.sleep(seconds)
            windows.append((is_sampled, begin, time.monotonic_ns()))
        training.kill()
        training.wait()
        ends = np.fromfile(log.name, dtype=np.int64)
    durations = np.diff(ends)
    means = [(flag, durations[(ends[:-1] >= begin) & (ends[1:] <= end)].mean()) for flag, begin, end in windows]
    changes = []
    for first, second in zip(means[::2], means[1::2], strict=True):
        sampled, bare = (first, second) if first[0] else (second, first)
        changes.append(float(sampled[1] / bare[1] - 1))
    quarters = statistics.quantiles(changes, n=4)
    rng = np.random.default_rng(0)
    medians = [float(np.median(rng.choice(changes, len(changes)))) for _ in range(2000)]
    Console().print(
        f"{case}: step {np.median(durations) / 1e6:.1f} ms; while stacks are sampled "
        f"{statistics.median(changes):+.2%} (95 %: {np.quantile(medians, 0.025):+.2%} … "
        f"{np.quantile(medians, 0.975):+.2%}; quartiles {quarters[0]:+.2%} … {quarters[2]:+.2%}; {pairs} pairs); "
        f"CPU of py-spy {statistics.mean(spent) / seconds:.1%} of a core meanwhile"
    )
    return statistics.median(changes), quarters[0], quarters[2]


#: The same training, which notes the time of each step.
_STEPS = """
import os, runpy, sys, time, torch
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
step = torch.optim.SGD.step
def timed(self, *args, **kwargs):
    os.write(log, time.monotonic_ns().to_bytes(8, "little"))
    return step(self, *args, **kwargs)
torch.optim.SGD.step = timed
torch.set_num_threads(1)
sys.argv = ["{script}", {case!r}, "100000"]
runpy.run_path("{script}", run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a training")
    parser.add_argument("--warning", action="store_true", help="sample only once a warning stands")
    parser.add_argument("--cost", type=int, default=0, metavar="PAIRS")
    options = parser.parse_args()
    cases = options.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; give some of {', '.join(CASES)}")
    if options.cost:
        for case in options.cases or ["sleep", "parsing"]:
            cost(options.cost, case)
        return
    table = Table(title=f"{len(cases)} trainings of {options.seconds:.0f} s")
    for name in ("case", "expected", "finding", "expected line", "named line", "share", "n", "right", "sampling"):
        table.add_column(name)
    option = ["--on-finding", "true"] if options.warning else ["--investigate"]
    right = 0
    with tempfile.TemporaryDirectory(prefix="tidegauge-lines-") as folder:
        for case in cases:
            outcome = run(case, options.seconds, option, Path(folder))
            right += outcome.is_right
            line = outcome.line or {"site": "", "ratio": 0.0, "n": 0}
            table.add_row(
                case,
                CASES[case],
                outcome.finding,
                ", ".join(map(str, sorted(marked_lines(case)))),
                re.sub(r".*/", "", line["site"]),
                f"{line['ratio']:.0%}",
                str(line["n"]),
                "yes" if outcome.is_right else "NO",
                f"{outcome.sampling_seconds:.2f} s ({outcome.sampling_seconds / max(outcome.run_seconds, 1):.2%})",
            )
    Console(width=150).print(table)
    print(f"{right} of {len(cases)} lines are right")


if __name__ == "__main__":
    main()
