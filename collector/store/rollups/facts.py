"""The columns of rollups: facts about many rows that can be merged, so that rollups combine as rows do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Width of a rollup in time; wider for workers, processes and GPUs, since a run has many.
ROLLUP_NS, WIDE_ROLLUP_NS = 10_000_000_000, 30_000_000_000
#: One value in 16 goes into the sample for quantiles.
SAMPLE_EVERY = 16
#: SQL: seconds from a grid line to the row; the lines are `WIDE_ROLLUP_NS` apart.
_AT = f"((time_ns % {WIDE_ROLLUP_NS}) / 1e9)"
#: SQL: seconds from the grid line of the first rollup in a merge (`merge_sql`) to that of this one.
_LATER = f"((time_ns - time_ns % {WIDE_ROLLUP_NS} - first_ns + first_ns % {WIDE_ROLLUP_NS}) / 1e9)"
#: Aggregate -> its SQL over many rows, over a single row, and over many rollups.
_AGGREGATES = {
    "sum": ("sum({value})", "{value}", "sum({name})"),
    "min": ("min({value})", "{value}", "min({name})"),
    "max": ("max({value})", "{value}", "max({name})"),
    "count": ("count({value})", "({value} IS NOT NULL)::INTEGER", "sum({name})"),
    "first": ("arg_min({value}, time_ns)", "{value}", "arg_min({name}, time_ns)"),
    "newest": ("arg_max({value}, time_ns)", "{value}", "arg_max({name}, time_ns)"),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A column of a rollup: its SQL over many rows, over a single row, and over many rollups."""

    name: str
    of_rows: str
    of_row: str
    of_rollups: str
    sql_type: str = "BIGINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollup:
    """A table of rollups: one row of facts about a stream per `width_ns` of time and value of `keys`.

    Attributes:
        keys: name and SQL type of the key columns.
        sample: the value, in SQL, whose quantiles are asked for; empty for none.
        most_buckets: most buckets of a figure of it.
    """

    stream: str
    keys: tuple[tuple[str, str], ...] = ()
    facts: tuple[Fact, ...] = ()
    sample: str = ""
    most_buckets: int
    width_ns: int = ROLLUP_NS

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column, among them time_ns and n, the number of rows rolled up."""
        return (*self.keys, *((fact.name, fact.sql_type) for fact in self._all_facts()))

    @property
    def stream_columns(self) -> Mapping[str, str]:
        """The streams that are rolled up, with the columns of each in SQL."""
        return {self.stream: "*"}

    def rollup_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that rolls up the rows of `source`; one value in `sample_every` goes into the sample."""
        facts = ", ".join(
            f"({fact.of_rows})::{fact.sql_type} AS {fact.name}" for fact in self._all_facts(sample_every)
        )
        return f"SELECT {self._keys}, {facts} FROM {source} GROUP BY {self._keys}, time_ns // {self.width_ns}"

    def merge_sql(self, source: str, span_ns: int, *, thin_by: int) -> str:
        """Return SQL that merges the rollups of `source`, which cover `span_ns`.

        They get no wider than a bucket of any figure over that time. One value in `thin_by` stays in the sample.
        """
        values = {fact.name: fact.of_rollups for fact in self._all_facts()}
        if thin_by > 1 and self.sample:
            first_index = f"1 + (hash(min(time_ns)) % {thin_by})::BIGINT"
            values["sample"] = f"list_slice({values['sample']}, {first_index}, 1000000000, {thin_by})"
        facts = ", ".join(f"({values[fact.name]})::{fact.sql_type} AS {fact.name}" for fact in self._all_facts())
        bucket = f"{self._keys}, time_ns // {self.merged_width_ns(span_ns)}"
        with_first = f"SELECT *, min(time_ns) OVER (PARTITION BY {bucket}) AS first_ns FROM {source}"
        return f"SELECT {self._keys}, {facts} FROM ({with_first}) GROUP BY {bucket}"

    def row_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that makes each row of `source` a rollup; one in `sample_every` has its value as sample."""
        facts = ", ".join(f"{fact.of_row} AS {fact.name}" for fact in self._all_facts(sample_every))
        return f"SELECT {self._keys}, {facts} FROM {source}"

    def union_sql(self, source_of: Callable[[str], str]) -> str:
        """Return SQL for the rows of all the streams, given the source of each."""
        selects = (f"SELECT {columns} FROM {source_of(stream)}" for stream, columns in self.stream_columns.items())
        return f"({' UNION ALL BY NAME '.join(selects)})"

    def merged_width_ns(self, span_ns: int) -> int:
        """Return the width of merged rollups that cover `span_ns`."""
        return max(1, span_ns // self.most_buckets // self.width_ns) * self.width_ns

    @property
    def _keys(self) -> str:
        return ", ".join(name for name, _ in self.keys)

    def _all_facts(self, sample_every: int = SAMPLE_EVERY) -> tuple[Fact, ...]:
        if not self.sample:
            return (*_COMMON, *self.facts)
        is_sampled = f"hash(time_ns) % {sample_every} = 0"
        sample = Fact(
            "sample",
            f"list({self.sample}) FILTER ({is_sampled})",
            f"CASE WHEN {is_sampled} THEN [{self.sample}] END",
            "flatten(list(sample))",
            "BIGINT[]",
        )
        return (*_COMMON, *self.facts, sample)


def aggregate(name: str, function: str, value: str, sql_type: str = "BIGINT") -> Fact:
    """Return the fact that one of `_AGGREGATES` makes of a value in SQL."""
    of_rows, of_row, of_rollups = (form.format(name=name, value=value) for form in _AGGREGATES[function])
    return Fact(name, of_rows, of_row, of_rollups, sql_type)


def total(column: str) -> Fact:
    """Return the sum of a column."""
    return aggregate(column, "sum", column)


def newest(column: str) -> Fact:
    """Return the last value of a column that is not missing."""
    return aggregate(f"{column}_newest", "newest", column)


def extremes(column: str) -> tuple[Fact, ...]:
    """Return the smallest and the largest value, the time of each after the first row, and the number of values."""
    low, high = f"{column}_low", f"{column}_high"
    return (
        aggregate(low, "min", column),
        _after(low, "arg_min({}, {})", column),
        aggregate(high, "max", column),
        _after(high, "arg_max({}, {})", column),
        aggregate(f"{column}_n", "count", column, "INTEGER"),
    )


def counter(column: str) -> tuple[Fact, ...]:
    """Return the highest value of a running count, its time after the first row, and its step."""
    high = f"{column}_high"
    at_first = "arg_max({0}, row(coalesce({1}, 0), -({2})))"
    return (
        aggregate(high, "max", column),
        _after(high, "arg_max({0}, row(coalesce({1}, 0), -({0})))", column),
        Fact(
            f"{high}_step",
            at_first.format("step", column, "time_ns"),
            "step",
            at_first.format(f"{high}_step", high, f"time_ns + {high}_after_ns"),
        ),
    )


def _after(extreme: str, select: str, column: str) -> Fact:
    """Return the time of an extreme of a column after the first row, given SQL that selects it by value."""
    name = f"{extreme}_after_ns"
    of_rows, of_rollups = select.format("time_ns", column), select.format(f"time_ns + {name}", extreme)
    return Fact(name, f"{of_rows} - min(time_ns)", "0", f"{of_rollups} - min(time_ns)")


def regression(column: str) -> tuple[Fact, ...]:
    """Return the sums that `slope` needs, over values and their seconds since the rollup's grid line.

    DuckDB's `regr_slope` takes rows alone; these sums combine as rollups do.
    """
    n, at, total = f"{column}_n", f"{column}_at", f"{column}_sum"
    sums = {
        "sum": (column, total),
        "at": (_AT, f"{at} + {n} * {_LATER}"),
        "at_at": (f"{_AT} * {_AT}", f"{column}_at_at + 2 * {_LATER} * {at} + {n} * {_LATER} * {_LATER}"),
        "at_sum": (f"{_AT} * {column}", f"{column}_at_sum + {_LATER} * {total}"),
    }
    has_value = f"CASE WHEN {column} IS NOT NULL THEN"
    return tuple(
        Fact(f"{column}_{name}", f"sum({has_value} {v} END)", f"{has_value} {v} END", f"sum({of_rollup})", "DOUBLE")
        for name, (v, of_rollup) in sums.items()
    )


def slope(column: str) -> str:
    """Return SQL for the least-squares slope per second through all values of a column of `process`."""
    x = f"((time_ns - time_ns % {WIDE_ROLLUP_NS} - $from_ns) / 1e9)"
    n, sum_x, sum_y = f"sum({column}_n)", f"sum({column}_n * {x} + {column}_at)", f"sum({column}_sum)"
    sum_xx = f"sum({column}_n * {x} * {x} + 2 * {x} * {column}_at + {column}_at_at)"
    sum_xy = f"sum({x} * {column}_sum + {column}_at_sum)"
    return f"CASE WHEN {n} > 1 THEN ({n} * {sum_xy} - {sum_x} * {sum_y}) / ({n} * {sum_xx} - {sum_x} * {sum_x}) END"


_COMMON = (
    aggregate("time_ns", "min", "time_ns"),
    Fact("last_after_ns", "max(time_ns) - min(time_ns)", "0", "max(time_ns + last_after_ns) - min(time_ns)"),
    Fact("n", "count(*)", "1", "sum(n)", "INTEGER"),
)
