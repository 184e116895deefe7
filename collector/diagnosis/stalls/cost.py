"""Cost of a cause to the training: seconds, their share of the run, and the severity that follows."""

from __future__ import annotations

from dataclasses import dataclass

from collector.diagnosis.run.columns import ITERATIONS, SECOND_NS, floats, origin_ns, window_text, written
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables, once
from collector.findings import Evidence, Severity, measurements
from collector.store import ProcessKey
from collector.units import duration, percent

#: Share of the run's time that a cause must cost to be reported.
LEAST_LOST_RATIO = 0.05
#: Share of the run's time from which a cause is a warning.
_WARNING_RATIO = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Time that a cause costs the training.

    Attributes:
        seconds: the lost time.
        ratio: its share of the run's wall time, so that a short process weighs little.
        n: number of observations.
        window: the time of the observations, in words.
    """

    seconds: float
    ratio: float
    n: int
    window: str

    @classmethod
    def of(cls, tables: RunTables, seconds: float, n: int, span_ns: tuple[float, float]) -> Loss:
        """Return the loss of these seconds, from `n` observations between two times."""
        ratio = float(seconds / max(_wall_seconds(tables), seconds, 1e-9))
        return cls(seconds=seconds, ratio=ratio, n=n, window=window_text(tables, *span_ns))

    @property
    def words(self) -> str:
        """The loss, as a sentence."""
        return f"That costs {duration(self.seconds)}, {percent(self.ratio)} of the run."

    @property
    def severity(self) -> Severity:
        """Severity that follows from the share of the run's time."""
        return "warning" if self.ratio >= _WARNING_RATIO else "info"

    def confidence(self, enough: int) -> float:
        """Return the confidence that the observations give; see `confidence`."""
        return confidence(self.n, enough)

    def evidence(self, **values: float) -> tuple[Evidence, ...]:
        """Return the loss as evidence, and other values from the same observations."""
        return measurements(self.n, self.window, lost_wall_ratio=self.ratio, lost_seconds=self.seconds, **values)


@once
def _wall_seconds(tables: RunTables) -> float:
    """Return how long the run has lasted in seconds, 0 if nothing was recorded.

    The tables of a long run hold only its last batches and steps. Then it is the time since the first of those.
    """
    seconds = lifecycle_of(tables).wall_seconds or 0.0
    skipped = [
        (floats(rows, "time_ns")[0] - origin_ns(tables)) / SECOND_NS
        for name in ITERATIONS
        if 0 < len(rows := tables.stream(name)) < tables.rows_count(name)
    ]
    return max(seconds - max(skipped, default=0.0), 0.0)


def recorded_seconds(tables: RunTables, main: ProcessKey) -> float:
    """Return the seconds from the first batch or step of a training process to its last, 0 if it recorded none."""
    times = [series for name in ITERATIONS if len(series := floats(written(tables, name, main), "time_ns"))]
    if not times:
        return 0.0
    return float(max(series[-1] for series in times) - min(series[0] for series in times)) / SECOND_NS


def confidence(observations: int, enough: int) -> float:
    """Return a confidence that grows with the observations: 0.75 at `enough` of them, 0.95 at ten times as many."""
    return round(min(0.99, 1 - 0.5 / (1 + observations / enough)), 2)
