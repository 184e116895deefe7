"""The history of one command: how its figures and findings change from run to run, and at which commit.

A change of level is reported only if it stands out of the differences between runs of the same level: Student's t
with the scatter within both levels, at a significance that allows for all places where the level could change.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from collector.diagnosis import student_t_quantile
from collector.findings import SEVERITIES, Identity
from collector.report.known import Command
from collector.report.listing import ListEntry
from collector.report.results import ResultFinding
from collector.units import counted, is_known, quantity

#: Probability with which a trend of runs of one level shows a change all the same.
_SIGNIFICANCE = 0.01
#: Runs of each level, at least: one run does not show how much runs differ.
_LEAST_RUNS = 2
#: Smallest change that is worth a sentence: as a ratio, and in points of a share.
_LEAST_RATIO, _LEAST_POINTS = 0.05, 0.05
#: Odds against another place of a change above which its commit is named.
_CERTAIN_ODDS = 20.0
#: Runs with fewer steps than this share of the median are left out: the start weighs more in them.
_LEAST_STEPS_RATIO = 0.5
#: Characters of a commit that are shown.
_COMMIT_CHARACTERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A figure of which the history is shown: its name in a sentence, and that of its field in a result."""

    key: str
    title: str
    unit: str
    field: str

    @property
    def is_share(self) -> bool:
        """True if changes are in points, since 2 % to 4 % is not twice as bad."""
        return self.unit == "ratio"


#: Figures of which the history is shown.
TRENDS = (
    Trend(key="throughput", title="throughput", unit="", field="throughput"),
    Trend(key="data_wait", title="data wait", unit="ratio", field="data_wait_ratio"),
    Trend(key="host_peak", title="peak host memory", unit="bytes", field="host_peak_bytes"),
    Trend(key="device_peak", title="peak GPU reserved", unit="bytes", field="device_peak_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """A change of level in a series: `place` is the index of the first value of the new level.

    `low` is the first and `high` the last place that the values do not rule out.
    """

    place: int
    before: float
    after: float
    before_count: int
    after_count: int
    low: int
    high: int


def level_changes(values: Sequence[float], *, is_share: bool) -> list[LevelChange]:
    """Return where the level of a series changes, in order; the mean of each level is geometric but for shares.

    The clearest change splits the series, and both parts are searched in turn.
    """
    if len(values) < 2 * _LEAST_RUNS:
        return []
    scaled = list(values) if is_share else [math.log(value) if value > 0 else math.nan for value in values]
    if not all(map(math.isfinite, scaled)):
        return []
    places = sorted(_splits(scaled, 0, _LEAST_POINTS if is_share else math.log1p(_LEAST_RATIO)))
    bounds = [0, *(place for place, _, _ in places), len(values)]
    levels = [statistics.fmean(scaled[begin:end]) for begin, end in itertools.pairwise(bounds)]
    means = levels if is_share else [math.exp(level) for level in levels]
    return [
        LevelChange(
            place=place,
            before=means[number],
            after=means[number + 1],
            before_count=place - bounds[number],
            after_count=bounds[number + 2] - place,
            low=low,
            high=high,
        )
        for number, (place, low, high) in enumerate(places)
    ]


def _splits(values: Sequence[float], offset: int, least: float) -> Iterator[tuple[int, int, int]]:
    """Yield (place, low, high) of each change of level of at least `least`."""
    count = len(values)
    candidates = range(_LEAST_RUNS, count - _LEAST_RUNS + 1)
    if not candidates:
        return
    residuals = {place: _residual(values[:place]) + _residual(values[place:]) for place in candidates}
    best = min(residuals, key=residuals.__getitem__)
    change = statistics.fmean(values[best:]) - statistics.fmean(values[:best])
    scatter = math.sqrt(residuals[best] / (count - 2) * (1 / best + 1 / (count - best)))
    bound = student_t_quantile(count - 2, 1 - _SIGNIFICANCE / 2 / len(candidates))
    if abs(change) < least or abs(change) <= bound * scatter:
        return
    possible = [place for place in candidates if _odds(residuals[place], residuals[best], count) < _CERTAIN_ODDS]
    yield offset + best, offset + min(possible), offset + max(possible)
    yield from _splits(values[:best], offset, least)
    yield from _splits(values[best:], offset + best, least)


def _residual(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _odds(residual: float, least: float, count: int) -> float:
    """Return the likelihood of the best split over that of another, for normal scatter."""
    if residual <= least:
        return 1.0
    return math.inf if least <= 0 else math.exp(min(700.0, count / 2 * math.log(residual / least)))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The runs of one command that can be compared, the oldest first; how many are left out, and the reason."""

    command: Command
    runs: tuple[ListEntry, ...]
    machine: str
    left_out: tuple[str, ...]


def commands_of(entries: Iterable[ListEntry]) -> dict[Command, list[ListEntry]]:
    """Return the runs of each command, in their given order."""
    groups: dict[Command, list[ListEntry]] = {}
    for entry in entries:
        if entry.command.text:
            groups.setdefault(entry.command, []).append(entry)
    return groups


def history_of(command: Command, entries: Iterable[ListEntry]) -> History:
    """Return the comparable runs of a command: judged, long enough, on the machine size that most had."""
    ordered = sorted(entries, key=lambda entry: entry.started_seconds)
    trained = [entry for entry in ordered if not entry.is_trial]
    judged = [(entry, entry.result) for entry in trained if entry.result is not None]
    steps = [result.steps for _, result in judged if result.steps]
    least = _LEAST_STEPS_RATIO * statistics.median(steps) if steps else 0.0
    long = [(entry, result) for entry, result in judged if (result.steps or 0.0) >= least]
    machines = [result.machine for _, result in reversed(long) if result.machine]
    machine = statistics.mode(machines) if machines else ""  # of several, that of the newest run
    runs = [entry for entry, result in long if result.machine in (machine, "")]
    counts = (
        (len(ordered) - len(trained), "of `tidegauge tune`"),
        (len(trained) - len(judged), "without a verdict"),
        (len(judged) - len(long), "with less than half the usual steps"),
        (len(long) - len(runs), "on machines of another size"),
    )
    left_out = tuple(f"{counted(count, 'run')} {why}" for count, why in counts if count)
    return History(command=command, runs=tuple(runs), machine=machine, left_out=left_out)


def trend_points(history: History, trend: Trend) -> list[tuple[ListEntry, float]]:
    """Return the runs with a figure, and its value. Only one unit of throughput is used, that of the newest run."""
    values = [(entry, getattr(entry.result, trend.field), entry.result) for entry in history.runs if entry.result]
    known = [(entry, float(value), result.throughput_unit) for entry, value, result in values if is_known(value)]
    return [(entry, value) for entry, value, unit in known if trend.unit or unit == known[-1][2]]


def trend_unit(history: History, trend: Trend) -> str:
    """Return the unit of a trend."""
    units = [
        entry.result.throughput_unit for entry in history.runs if entry.result and entry.result.throughput_unit
    ]
    return trend.unit or (units[-1] if units else "")


def change_sentences(history: History) -> list[str]:
    """Return a sentence for each change of level of each figure, the newest first."""
    sentences = []
    for trend in TRENDS:
        points, unit = trend_points(history, trend), trend_unit(history, trend)
        runs = [entry for entry, _ in points]
        sentences += [
            (change.after_count, _sentence(trend, change, runs, unit))
            for change in level_changes([value for _, value in points], is_share=trend.is_share)
        ]
    return [sentence for _, sentence in sorted(sentences, key=lambda pair: pair[0])]


def _sentence(trend: Trend, change: LevelChange, runs: Sequence[ListEntry], unit: str) -> str:
    """Return `Since commit a1b2c3d: data wait 43 %, before 12 % (+31 points; 4 runs before, 3 after).`."""
    if trend.is_share:
        difference = f"{100 * (change.after - change.before):+.0f} points"
    else:
        difference = f"{change.after / change.before - 1:+.0%}"
    after, before = quantity(change.after, unit), quantity(change.before, unit)
    return (
        f"{_since(change, runs)}: {trend.title} {after}, before {before} "
        f"({difference}; {counted(change.before_count, 'run')} before, {change.after_count} after)."
    )


def _since(change: LevelChange, runs: Sequence[ListEntry]) -> str:
    """Return the commit of a change, if the commit changed there and the runs leave no other place for it."""
    if change.low != change.high:
        first, last = (place_words(runs[place]) for place in (change.low, change.high))
        return f"Since about {first}" if first == last else f"Between {first} and {last}"
    before, first_run = runs[change.place - 1], runs[change.place]
    if first_run.commit is None or before.commit is None:
        return f"Since {first_run.run_id}"
    if version(before) == version(first_run):
        return f"Since {first_run.run_id}, at the same commit {commit_words(first_run)}"
    return f"Since {place_words(first_run)}"


def version(entry: ListEntry) -> tuple[str | None, bool]:
    """Return what is known of the code of a run: its commit, and True if files differed from it."""
    return entry.commit, bool(entry.is_dirty)


def commit_words(entry: ListEntry) -> str:
    """Return the short commit of a run, and that files differed from it; empty if it was in no repository."""
    if entry.commit is None:
        return ""
    return entry.commit[:_COMMIT_CHARACTERS] + (" (with uncommitted changes)" if entry.is_dirty else "")


def place_words(entry: ListEntry) -> str:
    """Return a run's place in the history: its commit, or its id outside a repository."""
    return f"commit {words}" if (words := commit_words(entry)) else entry.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingHistory:
    """One finding over the runs of a command.

    Attributes:
        severity: the gravest that it had.
        count: runs that have it, of `runs_count` that could.
        first: oldest run with it; None if that is the oldest of all, so that it may be older.
        gone: first run without it since then; None if the newest run has it.
        known: the reason for which it is accepted.
    """

    identity: Identity
    severity: str
    count: int
    runs_count: int
    first: ListEntry | None
    gone: ListEntry | None
    known: str | None


def finding_histories(history: History, entries: Iterable[ListEntry]) -> list[FindingHistory]:
    """Return the history of each finding that needs attention, those of the newest run first, then by severity.

    A run counts if it has the finding, or is long enough to be comparable: a run that ended after three steps shows
    no leak, and says nothing about one.
    """
    comparable = {entry.run_id for entry in history.runs}
    judged = sorted(
        (entry for entry in entries if entry.result and not entry.is_trial), key=lambda entry: entry.started_seconds
    )
    identities = {found.identity for entry in judged for found in _serious(entry)}
    return sorted(
        (_finding_history(identity, judged, comparable) for identity in identities),
        key=lambda one: (
            one.known is not None,
            one.gone is not None,
            _rank(one.severity),
            -one.count,
            one.identity,
        ),
    )


def _finding_history(
    identity: Identity, judged: Sequence[ListEntry], comparable: Collection[str]
) -> FindingHistory:
    found = {entry.run_id: [one for one in _serious(entry) if one.identity == identity] for entry in judged}
    counted = [entry for entry in judged if found[entry.run_id] or entry.run_id in comparable]
    having = [entry for entry in counted if found[entry.run_id]]
    after = counted[counted.index(having[-1]) + 1 :]
    return FindingHistory(
        identity=identity,
        severity=min((one.severity for entry in having for one in found[entry.run_id]), key=_rank),
        count=len(having),
        runs_count=len(counted),
        first=None if having[0] is counted[0] else having[0],
        gone=after[0] if after else None,
        known=found[having[-1].run_id][0].known,
    )


def _serious(entry: ListEntry) -> list[ResultFinding]:
    findings = entry.result.findings if entry.result else ()
    return [finding for finding in findings if finding.severity != "info"]


def _rank(severity: str) -> int:
    return [*SEVERITIES, severity].index(severity)
