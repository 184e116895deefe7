"""What a cause costs the training: seconds, and the share of its time, with the severity that follows."""

from __future__ import annotations

from collector.diagnosis.findings import Advice, Evidence, Finding, Locus, Severity
from collector.diagnosis.frames import ITERATIONS, SECOND_NS, floats, origin_ns, written
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey

#: Below this share of the run's time a cause is not worth a word.
TELL = 0.05
#: From this share on it is worth a warning.
WARN = 0.10


def wall_seconds(tables: RunTables) -> float:
    """Return how long the run has lasted, 0 if nothing of it was recorded.

    The tables of a long run hold its last batches and steps alone: then it is the time since the first of those.
    """

    def find() -> float:
        life = Lifecycle(tables)
        seconds = life.wall_seconds or 0.0
        cut = [
            (floats(rows, "time_ns")[0] - origin_ns(tables)) / SECOND_NS
            for name in ITERATIONS
            if 0 < len(rows := tables.stream(name)) < tables.rows_count(name)
        ]
        return max(seconds - max(cut, default=0.0), 0.0)

    return tables.once("wall_seconds", find)


def recorded_seconds(tables: RunTables, main: ProcessKey) -> float:
    """Return the time from the first batch or step of a training process to its last, 0 if it recorded none."""
    times = [floats(written(tables, name, main), "time_ns") for name in ("batch", "step")]
    known = [series for series in times if len(series)]
    if not known:
        return 0.0
    return float(max(series[-1] for series in known) - min(series[0] for series in known)) / SECOND_NS


def lost_ratio(tables: RunTables, seconds: float) -> float:
    """Return lost seconds as a share of the run's wall time, so that a short process weighs little."""
    return float(seconds / max(wall_seconds(tables), seconds, 1e-9))


def severity(ratio: float) -> Severity:
    """A share of the time that is lost, as a severity."""
    return "warning" if ratio >= WARN else "info"


def cost(ratio: float, seconds: float, n: int, window: str) -> tuple[Evidence, Evidence]:
    """What is lost, as a share and in seconds, as evidence from `n` observations."""
    return measured("lost_wall_ratio", ratio, "ratio", n, window), measured(
        "lost_seconds", seconds, "seconds", n, window
    )


def costly(
    kind: str,
    ratio: float,
    seconds: float,
    *,
    n: int,
    window: str,
    certainty: float,
    summary: str,
    locus: Locus,
    since_step: int | None,
    evidence: tuple[Evidence, ...],
    advice: tuple[Advice, ...],
    limited_by: str | None = None,
) -> Finding:
    """The finding of a cause that costs `seconds`: as grave as its share of the time, with both as evidence."""
    return Finding(
        kind=kind,
        severity=severity(ratio),
        confidence=certainty,
        summary=summary,
        locus=locus,
        since_step=since_step,
        evidence=(*cost(ratio, seconds, n, window), *evidence),
        advice=advice,
        limited_by=limited_by,
    )


def measured(name: str, value: float, unit: str, n: int, window: str) -> Evidence:
    """One number as evidence, rounded to what anyone reads."""
    return Evidence(name=name, value=round(float(value), 4), unit=unit, n=n, window=window)


def confidence(observations: int, enough: int) -> float:
    """Grows with the observations: 0.75 at `enough` of them, 0.95 at ten times as many."""
    return round(min(0.99, 1 - 0.5 / (1 + observations / enough)), 2)
