"""Lines over time, thinned to the smallest and the largest value of each bucket, so that no peak is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.store.queries import Queryable, Span, only, width_ns

#: Buckets of one line: with two points each, a trace has at most 2,000.
LINE_BUCKETS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Thinned lines: `points` has series, elapsed_seconds, value; `samples_count` says of how many."""

    points: pd.DataFrame
    samples_count: int

    @property
    def thinned(self) -> bool:
        """Whether there are fewer points than samples."""
        return len(self.points) < self.samples_count


def lines(
    snapshot: Queryable,
    within: Span,
    source: str,
    values: Mapping[str, str],
    *,
    series: str | None = None,
    where: str = "TRUE",
    buckets: int = LINE_BUCKETS,
) -> dict[str, Lines]:
    """Of each name, one thinned line per value of the SQL expression `series`, of its SQL expression over `source`.

    Each bucket gives its smallest and its largest value, in the order in which they occurred. All the lines come
    from one scan: on a long run that is what costs.
    """
    parts = [
        f"arg_min(time_ns, v{k}) t_low{k}, min(v{k}) low{k}, arg_max(time_ns, v{k}) t_high{k}, max(v{k}) high{k}, "
        f"count(v{k}) n{k}"
        for k in range(len(values))
    ]
    named = "".join(f", {value} AS v{k}" for k, value in enumerate(values.values()))
    of_series = f", {series} AS series" if series else ""
    table = snapshot.query(
        f"SELECT {', '.join(parts)}{', series' if series else ''} FROM (SELECT time_ns{named}{of_series} "
        f"FROM {source} WHERE time_ns BETWEEN $from_ns AND $to_ns AND ({where})) "
        f"GROUP BY {'series, ' if series else ''}(time_ns - $from_ns) // {width_ns(within, buckets)}",
        only(within.params, "from_ns", "to_ns", *(["rank"] if "$rank" in where else [])),
    )
    if not series:
        table["series"] = ""
    return lines_of(table, within, values)


def tiled_lines(
    snapshot: Queryable, within: Span, source: str, columns: Sequence[str], *, where: str, series: str, width: int
) -> dict[str, Lines]:
    """The same of columns whose extremes are in tiles, with `source` and width of these (`pieces`)."""
    table = tiled_extremes(snapshot, within, source, columns, where=where, by={"series": series}, width=width)
    return lines_of(table, within, columns)


def tiled_extremes(
    snapshot: Queryable,
    within: Span,
    source: str,
    columns: Sequence[str],
    *,
    where: str,
    by: Mapping[str, str],
    width: int,
) -> pd.DataFrame:
    """What lines are made of (`lines_of`), by the SQL expressions `by`, of which one is the `series`."""
    parts = [
        f"arg_min(time_ns + {column}_low_after_ns, {column}_low) t_low{k}, min({column}_low) low{k}, "
        f"arg_max(time_ns + {column}_high_after_ns, {column}_high) t_high{k}, max({column}_high) high{k}, "
        f"sum({column}_n)::BIGINT n{k}"
        for k, column in enumerate(columns)
    ]
    return snapshot.query(
        f"SELECT {', '.join(f'{value} AS {name}' for name, value in by.items())}, {', '.join(parts)} FROM {source} "
        f"WHERE time_ns BETWEEN $from_ns AND $to_ns AND ({where}) "
        f"GROUP BY {', '.join(by.values())}, (time_ns - $from_ns) // {width}",
        only(within.params, "from_ns", "to_ns", *(["rank"] if "$rank" in where else [])),
    )


def lines_of(table: pd.DataFrame, within: Span, names: Iterable[str]) -> dict[str, Lines]:
    """The lines of each of the names, in the order in which they were asked for."""
    return {name: _line(table, within, k) for k, name in enumerate(names)}


def _line(table: pd.DataFrame, within: Span, k: int) -> Lines:
    """The points of the k-th value of a table of buckets."""
    table = table[table[f"n{k}"] > 0]
    of_series, names = pd.factorize(table["series"], sort=True)
    series = np.tile(of_series, 2)
    times, values = (
        np.concatenate([table[f"{first}{k}"].to_numpy(dtype), table[f"{second}{k}"].to_numpy(dtype)])
        for first, second, dtype in (("t_low", "t_high", np.int64), ("low", "high", np.float64))
    )
    order = np.lexsort((times, series))
    series, times, values = series[order], times[order], values[order]
    again = (np.diff(series, prepend=-1) == 0) & (np.diff(times, prepend=0) == 0)  # a bucket of one value
    points = pd.DataFrame({"series": names.take(series), "time_ns": times, "value": values})[~again]
    points["elapsed_seconds"] = within.elapsed(points.pop("time_ns"))
    points = points[["series", "elapsed_seconds", "value"]].reset_index(drop=True)
    return Lines(points=points, samples_count=int(table[f"n{k}"].sum()))
