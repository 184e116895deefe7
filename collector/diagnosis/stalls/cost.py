"""Cost of a cause to the training: seconds, their share of the run, and the severity that follows."""

from __future__ import annotations

from dataclasses import dataclass

from collector.diagnosis.run.columns import ITERATIONS, SECOND_NS, floats, origin_ns, written
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import RunTables
from collector.findings import Evidence, Severity
from collector.store import ProcessKey

#: Share of the run's time that a cause must cost to be reported.
LEAST_LOST_RATIO = 0.05
#: Share of the run's time from which a cause is a warning.
_WARNING_RATIO = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Time that a cause costs the training.

    Attributes:
        ratio: share of the run's time (`lost_ratio`).
        seconds: the lost time.
        n: number of observations.
        window: the time of the observations, in words.

    """

    ratio: float
    seconds: float
    n: int
    window: str

    @property
    def severity(self) -> Severity:
        """Severity that follows from the share of the run's time."""
        return severity(self.ratio)

    @property
    def evidence(self) -> tuple[Evidence, Evidence]:
        """Lost share of the run's time, and lost seconds."""
        return (
            measurement("lost_wall_ratio", self.ratio, "ratio", self.n, self.window),
            measurement("lost_seconds", self.seconds, "seconds", self.n, self.window),
        )


def wall_seconds(tables: RunTables) -> float:
    """Return how long the run has lasted in seconds, 0 if nothing was recorded.

    The tables of a long run hold only its last batches and steps. Then it is the time since the first of those.
    """

    def find() -> float:
        life = Lifecycle(tables)
        seconds = life.wall_seconds or 0.0
        skipped = [
            (floats(rows, "time_ns")[0] - origin_ns(tables)) / SECOND_NS
            for name in ITERATIONS
            if 0 < len(rows := tables.stream(name)) < tables.rows_count(name)
        ]
        return max(seconds - max(skipped, default=0.0), 0.0)

    return tables.once("wall_seconds", find)


def recorded_seconds(tables: RunTables, main: ProcessKey) -> float:
    """Return the seconds from the first batch or step of a training process to its last, 0 if it recorded none."""
    times = [floats(written(tables, name, main), "time_ns") for name in ("batch", "step")]
    times = [series for series in times if len(series)]
    if not times:
        return 0.0
    return float(max(series[-1] for series in times) - min(series[0] for series in times)) / SECOND_NS


def lost_ratio(tables: RunTables, seconds: float) -> float:
    """Return lost seconds as a share of the run's wall time, so that a short process weighs little."""
    return float(seconds / max(wall_seconds(tables), seconds, 1e-9))


def severity(ratio: float) -> Severity:
    """Return the severity of losing this share of the run's time."""
    return "warning" if ratio >= _WARNING_RATIO else "info"


def measurement(name: str, value: float, unit: str, n: int, window: str) -> Evidence:
    """Return one number as evidence, rounded to four decimals."""
    return Evidence(name=name, value=round(float(value), 4), unit=unit, n=n, window=window)


def confidence(observations: int, enough: int) -> float:
    """Return a confidence that grows with the observations: 0.75 at `enough` of them, 0.95 at ten times as many."""
    return round(min(0.99, 1 - 0.5 / (1 + observations / enough)), 2)
