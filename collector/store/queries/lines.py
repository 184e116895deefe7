"""Lines over time, thinned to the smallest and the largest value of each bucket, so that no peak is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from collector.store.queries.spans import IN_TIME, Queryable, Span, width_ns

#: Buckets of one line: with two points each, a trace has at most 2,000.
LINE_BUCKETS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Thinned lines: `points` has series, elapsed_seconds, value; `samples_count` is the number of samples."""

    points: pd.DataFrame
    samples_count: int

    @property
    def thinned(self) -> bool:
        """True if there are fewer points than samples."""
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
    """Return thinned lines over `source`: by name, one line per value of the SQL expression `series`.

    `values` maps each name to its SQL expression. Each bucket gives its smallest and its largest value, in the
    order in which they occurred. All the lines come from one scan, which is the cost on a long run.
    """
    parts = [
        f"arg_min(time_ns, v{k}) t_low{k}, min(v{k}) low{k}, arg_max(time_ns, v{k}) t_high{k}, max(v{k}) high{k}, "
        f"count(v{k}) n{k}"
        for k in range(len(values))
    ]
    expressions = "".join(f", {value} AS v{k}" for k, value in enumerate(values.values()))
    if series:
        expressions += f", {series} AS series"
    table = snapshot.query(
        f"SELECT {', '.join(parts)}{', series' if series else ''} FROM (SELECT time_ns{expressions} "
        f"FROM {source} WHERE {IN_TIME} AND ({where})) "
        f"GROUP BY {'series, ' if series else ''}(time_ns - $from_ns) // {width_ns(within, buckets)}",
        within.bounds,
    )
    if not series:
        table["series"] = ""
    return split_lines(table, within, values)


def rollup_lines(
    snapshot: Queryable, within: Span, source: str, columns: Sequence[str], *, where: str, series: str, width: int
) -> dict[str, Lines]:
    """Return thinned lines of columns whose extremes are in rollups; source and width are of `bucket_source`."""
    table = rollup_extremes(snapshot, within, source, columns, where=where, by={"series": series}, width=width)
    return split_lines(table, within, columns)


def rollup_extremes(
    snapshot: Queryable,
    within: Span,
    source: str,
    columns: Sequence[str],
    *,
    where: str,
    by: Mapping[str, str],
    width: int,
) -> pd.DataFrame:
    """Return a table for `split_lines`, grouped by the SQL expressions `by`; one of them is named `series`."""
    parts = [
        f"arg_min(time_ns + {column}_low_after_ns, {column}_low) t_low{k}, min({column}_low) low{k}, "
        f"arg_max(time_ns + {column}_high_after_ns, {column}_high) t_high{k}, max({column}_high) high{k}, "
        f"sum({column}_n)::BIGINT n{k}"
        for k, column in enumerate(columns)
    ]
    return snapshot.query(
        f"SELECT {', '.join(f'{value} AS {name}' for name, value in by.items())}, {', '.join(parts)} FROM {source} "
        f"WHERE {IN_TIME} AND ({where}) GROUP BY {', '.join(by.values())}, (time_ns - $from_ns) // {width}",
        within.params if "$rank" in where else within.bounds,
    )


def split_lines(table: pd.DataFrame, within: Span, names: Iterable[str]) -> dict[str, Lines]:
    """Return the lines of each name from a table of buckets; the k-th name has the columns that end in k."""
    return {name: _line(table, within, k) for k, name in enumerate(names)}


def _line(table: pd.DataFrame, within: Span, k: int) -> Lines:
    table = table[table[f"n{k}"] > 0]
    series, names = pd.factorize(table["series"], sort=True)
    series = np.tile(series, 2)
    times, values = (
        np.concatenate([table[f"{first}{k}"].to_numpy(dtype), table[f"{second}{k}"].to_numpy(dtype)])
        for first, second, dtype in (("t_low", "t_high", np.int64), ("low", "high", np.float64))
    )
    order = np.lexsort((times, series))
    series, times, values = series[order], times[order], values[order]
    # A bucket with one value has it as its smallest and as its largest.
    is_repeated = (np.diff(series, prepend=-1) == 0) & (np.diff(times, prepend=0) == 0)
    points = pd.DataFrame({"series": names.take(series), "time_ns": times, "value": values})[~is_repeated]
    points["elapsed_seconds"] = within.elapsed(points.pop("time_ns"))
    points = points[["series", "elapsed_seconds", "value"]].reset_index(drop=True)
    return Lines(points=points, samples_count=int(table[f"n{k}"].sum()))
