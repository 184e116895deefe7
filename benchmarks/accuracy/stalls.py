"""Is the cause of a stall right, is a healthy loader left alone, and are predictions for other settings right?

    python -m benchmarks.accuracy stalls [--repeats 5] [--only CASE …] [--parts causes settings …] [--keep DIR]

`causes` runs each case of `stalls_job` and its twin without the fault, drawn again for each repeat. `settings`
compares predictions for settings that did not run with measurements (`stalls_settings`). With `--keep` the runs
stay there, and existing runs are only judged again: an interrupted benchmark goes on, and a changed rule is
judged without running anything. The benchmark prints a page in Markdown at the end. It takes about 40 minutes on
2 cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy import stalls_settings
from benchmarks.accuracy.kept import disturbed, kept_run
from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.run.columns import floats
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding

HEALTHY = "healthy"
SECONDS = 6.0
#: Always healthy, so they have no twin.
HARD_NEGATIVES = ("healthy", "overtaken", "hidden-stragglers", "spawned")
CASES = (
    *HARD_NEGATIVES,
    "too-slow",
    "slow-worker",
    "stragglers",
    "io",
    "collating",
    "sampling",
    "startup",
    "refill",
    "inline",
    "skew",
    "cpu",
    "oversubscribed",
    "copies",
    "pauses",
)
HEALTHY_REPEATS = 4  # times as many
SHARES = (0.10, 0.20)  # of the time in next(): the rule that most tools have


@dataclass(frozen=True)
class Judged:
    """One run: what is true, and what was said of it."""

    case: str
    truth: str
    said: str
    besides: tuple[str, ...]
    worker_is_right: bool | None
    recall: float | None  # of the straggler batches
    next_ratio: float  # of the loop's time
    disturbed: bool


def label(kind: str, limited_by: str | None) -> str:
    return f"{kind} ({limited_by})" if limited_by and kind == "workers-too-slow" else kind


def judge(folder: Path, case: str, seed: int, fixed: bool) -> Judged:
    """Run one training, unless it was kept, and judge it."""
    truth_path = folder / "truth.json"
    job = ("-m", "benchmarks.accuracy.stalls_job", case, str(seed), str(SECONDS), str(truth_path))
    run = kept_run(folder, [sys.executable, *job, *(["--fixed"] if fixed else [])])
    truth, tables = json.loads(truth_path.read_text()), load_tables(run)
    warned = [finding for finding in diagnose(tables).findings if finding.severity != "info"]
    labels = [label(finding.kind, finding.limited_by) for finding in warned]
    batch = tables.stream("batch")
    waits, times = floats(batch, "wait_ns")[1:], floats(batch, "time_ns")
    first = warned[0] if warned else None
    return Judged(
        case=f"{case}{', fixed' if fixed else ''}",
        truth=label(truth["kind"], truth["limited_by"]),
        said=labels[0] if labels else HEALTHY,
        besides=tuple(labels[1:]),
        worker_is_right=None
        if truth["kind"] != "slow-worker"
        else first is not None and first.locus.worker == truth["worker"],
        recall=None if truth["kind"] != "straggler-samples" else recall(first, truth["slow_batches"], len(batch)),
        next_ratio=float(waits.sum() / max(times[-1] - times[0], 1.0)),
        disturbed=disturbed(tables, loops(tables)[0].main),
    )


def recall(finding: Finding | None, slow: Sequence[int], batches_count: int) -> float:
    """The share of the slow batches that the training met and the finding lists."""
    said = {each.name: str(each.value) for each in (finding.evidence if finding is not None else ())}
    listed = said.get("straggler_batches", "")
    known = {int(batch.split(":")[1]) for batch in listed.split(", ") if batch}
    met = [index for index in slow if index < batches_count]
    return len(known.intersection(met)) / len(met) if met else 1.0


def causes(home: Path, cases: Sequence[str], repeats: int) -> list[Judged]:
    """Judge every case and its twin, `repeats` times each; by turns: side by side they disturb each other."""
    found = []
    for case in cases:
        for seed in range(repeats * (HEALTHY_REPEATS if case == HEALTHY else 1)):
            for fixed in (False,) if case in HARD_NEGATIVES else (False, True):
                one = judge(home / f"{case}-{seed}{'-fixed' if fixed else ''}", case, seed, fixed)
                right = "ok" if one.truth == one.said else f"WRONG, truth is {one.truth}"
                verdict = "disturbed" if one.disturbed else right
                print(f"{one.case} {seed}: {one.said} {one.besides or ''} {verdict}", file=sys.stderr)
                found.append(one)
    return found


def macro_f1(pairs: Iterable[tuple[str, str]]) -> float:
    """The mean F1 over the labels that are true of some run."""
    counted = Counter(pairs)
    scores = []
    for truth in {truth for truth, _ in counted}:
        hits = counted[truth, truth]
        true = sum(count for (label, _), count in counted.items() if label == truth)
        said = sum(count for (_, label), count in counted.items() if label == truth)
        scores.append(2 * hits / (true + said))
    return statistics.mean(scores)


def causes_page(found: Sequence[Judged]) -> str:
    """The tables of the causes."""
    if all(one.disturbed for one in found):
        return f"## Causes\n\nAll {len(found)} runs were disturbed by other programs."
    left_out, found = sum(one.disturbed for one in found), [one for one in found if not one.disturbed]
    lines = [
        "## Causes",
        "",
        "| case | truth | runs | right | verdict instead | further findings |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(one.case for one in found):
        mine = [one for one in found if one.case == case]
        wrong = Counter(one.said for one in mine if one.said != one.truth)
        besides = Counter(each for one in mine for each in one.besides)
        said = [", ".join(f"{name} ({n})" for name, n in counts.items()) or "—" for counts in (wrong, besides)]
        right = len(mine) - wrong.total()
        lines.append(f"| {case} | {mine[0].truth} | {len(mine)} | {right} | {said[0]} | {said[1]} |")
    well = [one for one in found if one.truth == HEALTHY]
    workers = [one.worker_is_right for one in found if one.worker_is_right is not None]
    recalls = [one.recall for one in found if one.recall is not None]
    rows = [("cause, macro-F1", "≥ 0.95", f"{macro_f1((one.truth, one.said) for one in found):.3f}")]
    rows += [("right worker", "≥ 98 %", f"{statistics.mean(workers):.0%} of {len(workers)}")] if workers else []
    rows += [("straggler batches listed, recall", "≥ 0.9", f"{statistics.mean(recalls):.2f}")] if recalls else []
    false = sum(one.said != HEALTHY for one in well)
    rows.append(("warnings on healthy runs", "0", f"{false} of {len(well)}"))
    lines += ["", "| measure | bar | Tidegauge | " + " | ".join(f"next() ≥ {share:.0%}" for share in SHARES) + " |"]
    lines += ["|---|---|---|---|---|"]
    for name, bar, ours in rows:
        others = ["—"] * len(SHARES)
        if name.startswith("cause"):
            others = [f"{macro_f1((one.truth, by_share(one, share)) for one in found):.3f}" for share in SHARES]
        elif name.startswith("warnings"):
            others = [f"{sum(one.next_ratio >= share for one in well)} of {len(well)}" for share in SHARES]
        lines.append(f"| {name} | {bar} | {ours} | {' | '.join(others)} |")
    if left_out:
        lines += ["", f"{left_out} runs were disturbed by other programs and are left out."]
    return "\n".join(lines)


def by_share(run: Judged, share: float) -> str:
    """Return the verdict that the share of next() alone gives."""
    return "workers-too-slow" if run.next_ratio >= share else HEALTHY


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=(*CASES, *stalls_settings.LOADERS), metavar="CASE")
    parser.add_argument("--parts", nargs="+", choices=("causes", "settings"), default=["causes", "settings"])
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as scratch:
        home = options.keep or Path(scratch)
        pages = []
        if "causes" in options.parts and (cases := [case for case in CASES if case in (options.only or CASES)]):
            pages.append(causes_page(causes(home, cases, options.repeats)))
        loaders = [name for name in stalls_settings.LOADERS if name in (options.only or stalls_settings.LOADERS)]
        if "settings" in options.parts and loaders:
            pages.append(stalls_settings.page(home, loaders, options.repeats))
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, commit {commit.stdout.strip()}, load {os.getloadavg()[2]:.1f}, "
        f"{options.repeats} repeats\n"
    )
    print("\n\n".join(pages))


if __name__ == "__main__":
    main()
