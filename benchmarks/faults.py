"""Is the verdict on the built-in faults right, and are their healthy twins silent?

    python -m benchmarks.faults [--repeats 3] [--steps N] [KIND …]

Each fault of `tidegauge job fault` runs next to its twin, under the collector. For the fault and for its twin, a
row says how often the fault's own finding was among the warnings, which share of the run it costs by that
finding, and which other warnings there were. Without KIND, all faults run that need no GPU and do not die.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from training_harness.jobs.faults import FAULTS

TIDEGAUGE = (sys.executable, "-P", "-m", "collector")


def start(home: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """A run of the `fault` job, in a home of its own."""
    command = [*TIDEGAUGE, "run", "--home", str(home), "--", sys.executable, "-P", "-m", "training_harness.jobs"]
    return subprocess.Popen([*command, "fault", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def warned(home: Path) -> dict[str, dict[str, Any]]:
    """Return the warnings of the run's report: kind -> finding."""
    report = [*TIDEGAUGE, "report", "--home", str(home), "--format", "json"]
    findings = json.loads(subprocess.run(report, check=True, capture_output=True).stdout)["findings"]
    return {each["kind"]: each for each in findings if each["severity"] != "info"}


def cost(finding: dict[str, Any]) -> float:
    """The share of the run that a finding is said to cost, 0 if it says nothing of that."""
    return next((each["value"] for each in finding["evidence"] if each["name"] == "lost_wall_ratio"), 0.0)


def row(kind: str, repeats: int, steps: list[str]) -> str:
    """Run one fault and its twin `repeats` times."""
    expected, hits, costs = FAULTS[kind].finding, 0, [0.0]
    beside: Counter[str] = Counter()
    false: Counter[str] = Counter()
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="tidegauge-") as folder:
            homes = Path(folder) / "faulty", Path(folder) / "twin"
            for process in [start(homes[0], [kind, *steps]), start(homes[1], [kind, "--fixed", *steps])]:
                process.wait()
            found, twin = (warned(home) for home in homes)
        if expected in found:
            hits += 1
            costs.append(cost(found.pop(expected)))
        beside.update(found)
        false.update(twin)
    said = f"{statistics.median(costs[1:] or costs):.0%}"
    others = [", ".join(f"{name} {n}" for name, n in counts.items()) or "-" for counts in (beside, false)]
    return f"{kind:18} {expected:20} {hits}/{repeats:<4} {said:>5}  {others[0]:30} {others[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    healthy = [kind for kind, fault in sorted(FAULTS.items()) if not (fault.needs_gpu or fault.dies)]
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[*FAULTS, []], default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", help="optimizer steps [default: enough to show each fault]")
    options = parser.parse_args()
    print(f"{'fault':18} {'finding':20} {'found':6} {'cost':>5}  {'warned of besides':30} by the twin", flush=True)
    for kind in options.kinds or healthy:
        print(row(kind, options.repeats, ["--steps", options.steps] if options.steps else []), flush=True)


if __name__ == "__main__":
    main()
