"""Are the verdicts on memory right? Real trainings with known faults, their healthy twins, and real deaths.

    python -m benchmarks.accuracy memory [--cases WORD …] [--minutes N] [--keep DIR] [--side-by-side N]

Each case (memory_cases.py) is a training under the collector, with a memory cgroup and a /dev/shm of its own.
Runs stay in `--keep`: a case that ran is not run again, but judged again each time, so the benchmark can run in
parts. Forecasts are judged by replay: the rules see a recorded run as it was half of the way to its limit, and at
three quarters.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from benchmarks.accuracy.memory_baselines import METHODS, Trace, trace
from benchmarks.accuracy.memory_cases import UNSEEN, Case, cases
from benchmarks.accuracy.memory_replay import (
    CLOCKS,
    FORECASTS_HEAD,
    HALF,
    THREE_QUARTERS,
    Forecast,
    forecasts,
    forecasts_row,
    until,
    warnings,
)
from benchmarks.accuracy.memory_runs import kept, run_all
from benchmarks.accuracy.memory_synthetic import table
from collector.diagnosis.run.columns import SECOND_NS
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding
from tests.cgroups import lacking

_HEAD = """# Are the verdicts on memory right?

These figures come from real trainings with known leaks, their healthy twins, and real deaths, compared with other
methods on the same samples. [How it is measured](#how-it-is-measured) says where they flatter. `python -m
benchmarks.accuracy memory > docs/accuracy.md` writes this page.
"""
_METHOD = """
## How it is measured

Each case is a real training under the collector, with a cgroup and a /dev/shm of its own. The benchmark runs as
root on a machine with a memory cgroup of version 1.

- **Samples** are those of `tidegauge run` by default: one per second, and five per second of memory and descriptors
  in the first two minutes.
- **Leaks** are the faults of `tidegauge job fault`, and leaks of 2 KiB to 2 MiB a step, from the start or from
  the middle on, with and without varying lengths, evaluations and checkpoints.
- **Twins** are the same trainings without the leak.
- **Hard negatives** are healthy trainings that look like leaks.
- **Deaths** are trainings that die in a known way.
- **Other methods** see the same samples. They name neither kind nor place, so any alarm on a leaking training
  counts as right.
- **Caches** count as healthy. Before a cache is full, nothing distinguishes it from a leak.
- **Limits**: where no kill sets the limit, the limit is the demand near the end plus the kernel's own memory. It
  is met between two samples.
- **Pace**: trainings side by side change their pace. Those that leak to a limit ran twice with different noise. All
  ran six at a time, and the two cores had other work too.

The figures flatter in two ways:

- No threshold is fitted to cases, so none were held back. But cases that the rules once missed here have led to
  new rules: a leak that begins late, a beginning that passes for a warm-up, memory freed at the end of a
  training, a few jumps that are no growth, mapped files, the newest tick of a living run, growth that has come to
  rest, caches of the workers of one epoch. The figures of these cases flatter.
- The model of the forecasts was chosen among several with such runs and drawn series at hand. So its figures
  flatter too, except those for leaks of 64 and 640 KiB a step, which ran only after it had been chosen."""
_SURE = 0.9
#: Moments of a run at which it is asked who has warned by then.
_MOMENTS = 24
#: Number of series drawn from each family.
_DRAWN_COUNT = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], metavar="WORD", help="those whose name or group has it")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no further training is started")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/tidegauge-accuracy"))
    parser.add_argument("--side-by-side", type=int, default=6, metavar="N", help="trainings at a time")
    options = parser.parse_args()
    if lack := lacking():
        sys.exit(lack)
    chosen = [
        case
        for case in cases()
        if not options.cases or any(word in case.name or word == case.group for word in options.cases)
    ]
    deadline = time.monotonic() + 60 * options.minutes
    run_all(chosen, options.keep, side_by_side=options.side_by_side, deadline=deadline)
    for line in page(chosen, options.keep):
        print(line, flush=True)


def page(chosen: Sequence[Case], keep: Path) -> Iterator[str]:
    """The Markdown of what is kept."""
    traces: list[tuple[Case, Trace]] = []
    told: dict[str, list[Finding]] = {}
    taken_back: list[Case] = []
    forecast: list[Forecast] = []
    leads: list[str] = []
    deaths: list[tuple[Case, list[Finding]]] = []
    for case, tables in kept(chosen, keep):
        if case.group == "death":
            deaths.append((case, [f for f in diagnose(tables).findings if f.group == "death"]))
            continue
        told[case.name] = warnings(tables)
        seen = trace(tables)
        traces.append((case, seen))
        if not (case.kind or told[case.name]) and any(_warned(tables, seen, n) for n in _counts(seen)[1::2]):
            taken_back.append(case)
        if case.steady:
            forecast += forecasts(case, tables)
        if case.group == "kill":
            leads += _lead(case, tables)
    ran = len(traces) + len(deaths)
    yield _HEAD
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield f"{ran} of {len(chosen)} cases on {machine}, {date.today()}."
    if traces:
        yield from _leaks(traces, told)
        yield from _while_running(taken_back)
    if forecast:
        yield from _forecasts(forecast)
        yield from ("", "## Time to the limit of random series (memory_synthetic.py)", "")
        yield from table(_DRAWN_COUNT)
    if leads:
        yield from (
            "",
            "## Warned before the kernel's kill",
            "",
            _LEAD_HEAD,
            "|---" * (2 + len(_LEADING)) + "|",
        )
        yield from leads
    if deaths:
        yield from _deaths(deaths)
    yield _METHOD


def _leaks(traces: Sequence[tuple[Case, Trace]], told: dict[str, list[Finding]]) -> Iterator[str]:
    sick = [case for case, _ in traces if case.kind]
    well = [case for case, _ in traces if not case.kind]
    found = [case for case in sick if any(f.kind == case.kind for f in told[case.name])]
    placed = [c for c in found if any(f.kind == c.kind and f.locus.role == c.role for f in told[c.name])]
    wrong = {case.name: [f.kind for f in told[case.name] if _is_wrong(case, f)] for case, _ in traces}
    false_count = sum(map(len, wrong.values()))
    loud = {group: [c for c in well if c.group == group and wrong[c.name]] for group in ("twin", "healthy")}
    yield from ("", "## Leaks", "", "| method | precision | recall | warned of healthy runs |", "|---|---|---|---|")
    yield _row("Tidegauge", len(found), false_count, len(sick), sum(map(len, loud.values())), len(well))
    for name, method in METHODS.items():
        hits = sum(method(each) for case, each in traces if case.kind)
        alarms = sum(method(each) for case, each in traces if not case.kind)
        yield _row(name, hits, alarms, len(sick), alarms, len(well))
    yield ""
    yield f"Right locus: {len(placed)} of {len(found)}."
    for group, silent in (("twin", "twins"), ("healthy", "hard negatives")):
        yield f"Findings on {len(loud[group])} of {sum(c.group == group for c in well)} {silent}."
    yield f"Not found: {', '.join(c.name for c in sick if c not in found) or 'none'}."
    yield f"Wrong: {', '.join(f'{kind} of {name}' for name, kinds in wrong.items() for kind in kinds) or 'none'}."


def _while_running(taken_back: Sequence[Case]) -> Iterator[str]:
    count = Counter(case.group for case in taken_back)
    yield ""
    yield (
        f"Warned at one of {_MOMENTS // 2} moments during the run, but not at its end: {count['twin']} twins, "
        f"{count['healthy']} hard negatives ({', '.join(case.name for case in taken_back) or 'none'})."
    )


def _counts(seen: Trace) -> list[int]:
    """Return the number of readings up to each moment; the moments are spread evenly over all readings."""
    return [round(len(seen.seconds) * (k + 1) / _MOMENTS) for k in range(_MOMENTS)]


def _warned(tables: RunTables, seen: Trace, count: int) -> bool:
    return bool(warnings(until(tables, seen.seconds[count - 1] * SECOND_NS)))


def _is_wrong(case: Case, finding: Finding) -> bool:
    """Return whether the finding is false. A forecast never is: every leak brings a limit nearer."""
    if case.kind is None:
        return True
    return finding.group == "memory leak" and finding.kind not in (case.kind, *case.also)


def _row(name: str, hits: int, false_count: int, sick: int, alarms: int, well: int) -> str:
    precision = f"{hits / (hits + false_count):.2f}" if hits + false_count else "-"
    recall = f"{hits / sick:.2f} ({hits} of {sick})" if sick else "-"
    return f"| {name} | {precision} | {recall} | {alarms} of {well} |"


def _forecasts(found: Sequence[Forecast]) -> Iterator[str]:
    yield from ("", "## Time to the limit", "")
    yield from FORECASTS_HEAD
    unseen = [each for each in found if each.case.removeprefix("main-heap-").split("-")[0] in UNSEEN]
    for ratio, clock in itertools.product((HALF, THREE_QUARTERS), CLOCKS):
        rows = (
            forecasts_row(ratio, clock, leaks, group)
            for leaks, group in (("all", found), ("64 and 640 KiB", unseen))
        )
        yield from filter(None, rows)
    worst = sorted((each for each in found if not math.isnan(each.mid)), key=lambda each: -each.error_ratio)[:4]
    yield ""
    yield (
        "Worst: "
        + ", ".join(f"{w.case} at {w.way_ratio:.0%} in {w.clock}: {w.error_ratio:.0%}" for w in worst)
        + "."
    )


_LEADING = (
    "main RSS, 80 % of the limit",
    "summed RSS, 80 % of the limit",
    "OLS R² > 0.8, summed RSS",
    "Stormlog (100 MB, 10 % rising), main RSS",
    "earlyoom (10 % left), in the cgroup",
)
_LEAD_HEAD = "| killed | Tidegauge | " + " | ".join(_LEADING) + " |"


def _lead(case: Case, tables: RunTables) -> Iterator[str]:
    """Yield a row: each method's first lasting warning, seconds before the end, and headroom of the limit then."""
    whole = trace(tables)
    counts = _counts(whole)
    cells = []
    for method in (None, *(METHODS[name] for name in _LEADING)):
        said = [
            _warned(tables, whole, count) if method is None else method(whole.before(count)) for count in counts
        ]
        silent = [k for k, one in enumerate(said) if not one]
        first = silent[-1] + 1 if silent else 0
        if first == len(counts):
            cells.append("-")
            continue
        at = counts[first] - 1
        left = 1 - whole.demand[at] / whole.limit_bytes
        cells.append(f"{whole.seconds[-1] - whole.seconds[at]:.0f} s, {max(left, 0):.0%}")
    yield f"| {case.name.removeprefix('kill-')} | {' | '.join(cells)} |"


def _deaths(deaths: Sequence[tuple[Case, list[Finding]]]) -> Iterator[str]:
    right: Counter[str] = Counter()
    count: Counter[str] = Counter()
    wrong = []
    for case, found in deaths:
        name = case.name.rpartition("-")[0]
        count[name] += 1
        named = [f for f in found if f.severity != "info" and f.locus.role != "collector"]
        is_right = [(f.kind, f.locus.role) for f in named if f.severity == "critical" or len(named) == 1]
        sure_and_wrong = [f for f in named if f.kind != case.kind and f.confidence >= _SURE]
        if set(is_right) == {(case.kind, case.role)} and not sure_and_wrong:
            right[name] += 1
        else:
            wrong.append(f"{case.name}: {[(f.kind, f.locus.role, f.confidence) for f in found]}")
    yield from ("", "## Deaths", "", "| death | cause right |", "|---|---|")
    yield from (f"| {name} | {right[name]} of {n} |" for name, n in count.items())
    yield f"| all | {right.total()} of {count.total()} |"
    if wrong:
        yield from ("", *(f"- {line}" for line in wrong))
