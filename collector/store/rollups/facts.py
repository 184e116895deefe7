"""The columns of rollups: facts about many rows that can be merged, so that rollups combine as rows do."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


@dataclass(frozen=True, slots=True)
class Fact:
    """A column of a rollup: its SQL over many rows, over a single row, and over many rollups (empty: their sum)."""

    name: str
    of_rows: str
    of_row: str
    sql_type: str = "BIGINT"
    of_rollups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollup(ABC):
    """A table of rollups: one row per `width_ns` of time and key; figures of it have at most `most_buckets`."""

    most_buckets: int
    width_ns: int = ROLLUP_NS

    @property
    @abstractmethod
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column, among them time_ns and n, the number of rows rolled up."""

    @property
    @abstractmethod
    def stream_columns(self) -> Mapping[str, str]:
        """The streams that are rolled up, with the columns of each in SQL."""

    @abstractmethod
    def rollup_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that rolls up the rows of `source`; one value in `sample_every` goes into the sample."""

    @abstractmethod
    def merge_sql(self, source: str, span_ns: int, *, thin_by: int) -> str:
        """Return SQL that merges the rollups of `source`, which cover `span_ns`.

        They get no wider than a bucket of any figure over that time. One value in `thin_by` stays in the sample.
        """

    @abstractmethod
    def row_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that makes each row of `source` a rollup; one in `sample_every` has its value as sample."""

    def union_sql(self, source_of: Callable[[str], str]) -> str:
        """Return SQL for the rows of all the streams, given the source of each."""
        selects = (f"SELECT {columns} FROM {source_of(stream)}" for stream, columns in self.stream_columns.items())
        return f"({' UNION ALL BY NAME '.join(selects)})"

    def merged_width_ns(self, span_ns: int) -> int:
        """Return the width of merged rollups that cover `span_ns`."""
        return max(1, span_ns // self.most_buckets // self.width_ns) * self.width_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRollup(Rollup):
    """Facts about the rows of one stream, per bucket of time and value of `keys`.

    `sample` is the value, in SQL, whose quantiles are asked for.
    """

    stream: str
    keys: tuple[tuple[str, str], ...]
    facts: tuple[Fact, ...]
    sample: str = ""

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column."""
        return (*self.keys, *((fact.name, fact.sql_type) for fact in self._all_facts()))

    @property
    def stream_columns(self) -> Mapping[str, str]:
        """The stream with all its columns."""
        return {self.stream: "*"}

    def rollup_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that groups the rows of `source` by key and bucket of time."""
        facts = ", ".join(
            f"({fact.of_rows})::{fact.sql_type} AS {fact.name}" for fact in self._all_facts(sample_every)
        )
        return f"SELECT {self._keys}, {facts} FROM {source} GROUP BY {self._keys}, time_ns // {self.width_ns}"

    def merge_sql(self, source: str, span_ns: int, *, thin_by: int) -> str:
        """Return SQL that groups the rollups of `source` by key and wider bucket of time."""
        width_ns = self.merged_width_ns(span_ns)
        values = {fact.name: fact.of_rollups or f"sum({fact.name})" for fact in self._all_facts()}
        if thin_by > 1 and "sample" in values:
            first_index = f"1 + (hash(min(time_ns)) % {thin_by})::BIGINT"
            values["sample"] = f"list_slice({values['sample']}, {first_index}, 1000000000, {thin_by})"
        facts = ", ".join(f"({values[fact.name]})::{fact.sql_type} AS {fact.name}" for fact in self._all_facts())
        bucket = f"{self._keys}, time_ns // {width_ns}"
        with_first = f"SELECT *, min(time_ns) OVER (PARTITION BY {bucket}) AS first_ns FROM {source}"
        return f"SELECT {self._keys}, {facts} FROM ({with_first}) GROUP BY {bucket}"

    def row_sql(self, source: str, *, sample_every: int = SAMPLE_EVERY) -> str:
        """Return SQL that gives each row of `source` the columns of a rollup."""
        facts = ", ".join(f"{fact.of_row} AS {fact.name}" for fact in self._all_facts(sample_every))
        return f"SELECT {self._keys}, {facts} FROM {source}"

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
            "BIGINT[]",
            "flatten(list(sample))",
        )
        return (*_COMMON, *self.facts, sample)


def total(column: str) -> Fact:
    """Return the sum of a column."""
    return Fact(column, f"sum({column})", column)


def minimum(name: str, of_rows: str, of_row: str) -> Fact:
    """Return a fact that is the smallest of many, given its SQL for many rows and for one."""
    return Fact(name, of_rows, of_row, of_rollups=f"min({name})")


def maximum(name: str, of_rows: str, of_row: str) -> Fact:
    """Return a fact that is the largest of many, given its SQL for many rows and for one."""
    return Fact(name, of_rows, of_row, of_rollups=f"max({name})")


def extremes(column: str) -> tuple[Fact, ...]:
    """Return the smallest and the largest value, the time of each after the first row, and the number of values."""
    return (
        minimum(f"{column}_low", f"min({column})", column),
        _after(f"{column}_low", f"arg_min(time_ns, {column})", "arg_min"),
        maximum(f"{column}_high", f"max({column})", column),
        _after(f"{column}_high", f"arg_max(time_ns, {column})", "arg_max"),
        Fact(f"{column}_n", f"count({column})", f"({column} IS NOT NULL)::INTEGER", "INTEGER"),
    )


def _after(extreme: str, extreme_ns: str, select: str) -> Fact:
    of_rollups = f"{select}(time_ns + {extreme}_after_ns, {extreme}) - min(time_ns)"
    return Fact(f"{extreme}_after_ns", f"{extreme_ns} - min(time_ns)", "0", of_rollups=of_rollups)


def newest(column: str) -> Fact:
    """Return the last value of a column that is not missing."""
    name = f"{column}_newest"
    return Fact(name, f"arg_max({column}, time_ns)", column, of_rollups=f"arg_max({name}, time_ns)")


def allocator_peak(word: str) -> Fact:
    """Return the highest value that an allocator counted; each record has the highest so far."""
    value = f"greatest({word}_bytes, {word}_peak_bytes)"
    return maximum(f"{word}_peak_bytes", f"max({value})", value)


def counter(column: str) -> tuple[Fact, ...]:
    """Return the highest value of a running count, its time after the first row, and its step."""
    high = f"{column}_high"

    def first(value: str, count: str, time: str) -> str:
        return f"arg_max({value}, row(coalesce({count}, 0), -({time})))"

    return (
        maximum(high, f"max({column})", column),
        Fact(
            f"{high}_after_ns",
            f"{first('time_ns', column, 'time_ns')} - min(time_ns)",
            "0",
            of_rollups=f"{first(f'time_ns + {high}_after_ns', high, f'time_ns + {high}_after_ns')} - min(time_ns)",
        ),
        Fact(
            f"{high}_step",
            first("step", column, "time_ns"),
            "step",
            of_rollups=first(f"{high}_step", high, f"time_ns + {high}_after_ns"),
        ),
    )


def regression(column: str) -> tuple[Fact, ...]:
    """Return the sums that `slope` needs, over values and their seconds since the rollup's grid line."""
    n, at, total = f"{column}_n", f"{column}_at", f"{column}_sum"
    sums = {
        "sum": (column, total),
        "at": (_AT, f"{at} + {n} * {_LATER}"),
        "at_at": (f"{_AT} * {_AT}", f"{column}_at_at + 2 * {_LATER} * {at} + {n} * {_LATER} * {_LATER}"),
        "at_sum": (f"{_AT} * {column}", f"{column}_at_sum + {_LATER} * {total}"),
    }
    return tuple(
        Fact(
            f"{column}_{name}",
            f"sum({value}) FILTER ({column} IS NOT NULL)",
            f"CASE WHEN {column} IS NOT NULL THEN {value} END",
            "DOUBLE",
            f"sum({of_rollup})",
        )
        for name, (value, of_rollup) in sums.items()
    )


def slope(column: str) -> str:
    """Return SQL for the least-squares slope per second through all values of a column of `process`."""
    x = f"((time_ns - time_ns % {WIDE_ROLLUP_NS} - $from_ns) / 1e9)"
    n, sum_x, sum_y = f"sum({column}_n)", f"sum({column}_n * {x} + {column}_at)", f"sum({column}_sum)"
    sum_xx = f"sum({column}_n * {x} * {x} + 2 * {x} * {column}_at + {column}_at_at)"
    sum_xy = f"sum({x} * {column}_sum + {column}_at_sum)"
    return f"CASE WHEN {n} > 1 THEN ({n} * {sum_xy} - {sum_x} * {sum_y}) / ({n} * {sum_xx} - {sum_x} * {sum_x}) END"


_COMMON = (
    minimum("time_ns", "min(time_ns)", "time_ns"),
    Fact(
        "last_after_ns",
        "max(time_ns) - min(time_ns)",
        "0",
        of_rollups="max(time_ns + last_after_ns) - min(time_ns)",
    ),
    Fact("n", "count(*)", "1", "INTEGER"),
)
