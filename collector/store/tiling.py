"""What a tile tells: facts of many rows together, such that tiles can be put together as rows can."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: As wide as a tile is; of workers and processes, of which there are many, wider.
TILE_NS, WIDE_TILE_NS = 10_000_000_000, 30_000_000_000
#: One value in so many stays for quantiles.
SAMPLED = 16


@dataclass(frozen=True, slots=True)
class Fact:
    """A column of a tile: in SQL, of many rows together, of a row alone, and of many tiles together, if no sum."""

    name: str
    together: str
    alone: str
    kind: str = "BIGINT"
    of_tiles: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling(ABC):
    """Tiles of pieces of time that are `width_ns` wide; no figure of them has more than `most_buckets`."""

    most_buckets: int
    width_ns: int = TILE_NS

    @property
    @abstractmethod
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column of a tile; among them time_ns and n, of how many rows it is."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, str]:
        """The streams whose rows are laid, with the columns of each in SQL."""

    @abstractmethod
    def laid(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: the tiles of the rows of `source`; one in so many is in the sample."""

    @abstractmethod
    def coarser(self, source: str, span_ns: int, *, thinner: int) -> str:
        """SQL: the tiles of `source`, which lasts so long, put together; one in so many stays in the sample.

        They are no wider than a bucket of any figure over that time.
        """

    @abstractmethod
    def alone(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: the rows of `source`, each as a tile of its own; one in so many is in the sample."""

    def gathered(self, of: Callable[[str], str]) -> str:
        """SQL: all rows that are laid, of a source for each stream."""
        selects = (f"SELECT {columns} FROM {of(stream)}" for stream, columns in self.parts.items())
        return f"({' UNION ALL BY NAME '.join(selects)})"

    def coarser_ns(self, span_ns: int) -> int:
        """How wide tiles over so long a time may be."""
        return max(1, span_ns // self.most_buckets // self.width_ns) * self.width_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Tiling):
    """One row for each piece of time and each value of `keys`, with facts of the rows of a stream.

    `sample` is the value in SQL whose quantiles are asked for.
    """

    stream: str
    keys: tuple[tuple[str, str], ...]
    facts: tuple[Fact, ...]
    sample: str = ""

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and SQL type of each column."""
        return (*self.keys, *((fact.name, fact.kind) for fact in self._all_facts()))

    @property
    def parts(self) -> Mapping[str, str]:
        """The stream, whole."""
        return {self.stream: "*"}

    def laid(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: the rows of `source` by key and piece."""
        facts = ", ".join(f"({fact.together})::{fact.kind} AS {fact.name}" for fact in self._all_facts(every))
        return f"SELECT {self._keys}, {facts} FROM {source} GROUP BY {self._keys}, time_ns // {self.width_ns}"

    def coarser(self, source: str, span_ns: int, *, thinner: int) -> str:
        """SQL: the tiles of `source` put together."""
        width_ns = self.coarser_ns(span_ns)
        named = {fact.name: (fact.of_tiles or f"sum({fact.name})", fact.kind) for fact in self._all_facts()}
        if thinner > 1 and "sample" in named:
            values, kind = named["sample"]
            named["sample"] = (
                f"list_slice({values}, 1 + (hash(min(time_ns)) % {thinner})::BIGINT, 1000000000, {thinner})",
                kind,
            )
        facts = ", ".join(f"({value})::{kind} AS {name}" for name, (value, kind) in named.items())
        pieces = f"{self._keys}, time_ns // {width_ns}"
        first = f"SELECT *, min(time_ns) OVER (PARTITION BY {pieces}) AS first_ns FROM {source}"
        return f"SELECT {self._keys}, {facts} FROM ({first}) GROUP BY {pieces}"

    def alone(self, source: str, *, every: int = SAMPLED) -> str:
        """SQL: each row of `source` for itself."""
        facts = ", ".join(f"{fact.alone} AS {fact.name}" for fact in self._all_facts(every))
        return f"SELECT {self._keys}, {facts} FROM {source}"

    @property
    def _keys(self) -> str:
        return ", ".join(name for name, _ in self.keys)

    def _all_facts(self, every: int = SAMPLED) -> tuple[Fact, ...]:
        """With those that every tile tells; one value in so many is in the sample."""
        chosen = f"hash(time_ns) % {every} = 0"
        named = f"list({self.sample}) FILTER ({chosen})", f"CASE WHEN {chosen} THEN [{self.sample}] END"
        of_tiles = "flatten(list(sample))"
        return (*_COMMON, *self.facts, *([Fact("sample", *named, "BIGINT[]", of_tiles)] if self.sample else []))


def total(column: str) -> Fact:
    """The sum of a column."""
    return Fact(column, f"sum({column})", column)


def least(name: str, together: str, alone: str) -> Fact:
    """What is smallest, of many rows and of a row alone."""
    return Fact(name, together, alone, of_tiles=f"min({name})")


def most(name: str, together: str, alone: str) -> Fact:
    """What is largest, of many rows and of a row alone."""
    return Fact(name, together, alone, of_tiles=f"max({name})")


def extremes(column: str) -> tuple[Fact, ...]:
    """The smallest and the largest value, how long after the first row each came, and of how many they are."""
    return (
        least(f"{column}_low", f"min({column})", column),
        _after(f"{column}_low", f"arg_min(time_ns, {column})", "arg_min"),
        most(f"{column}_high", f"max({column})", column),
        _after(f"{column}_high", f"arg_max(time_ns, {column})", "arg_max"),
        Fact(f"{column}_n", f"count({column})", f"({column} IS NOT NULL)::INTEGER", "INTEGER"),
    )


def _after(extreme: str, when: str, choose: str) -> Fact:
    of_tiles = f"{choose}(time_ns + {extreme}_after_ns, {extreme}) - min(time_ns)"
    return Fact(f"{extreme}_after_ns", f"{when} - min(time_ns)", "0", of_tiles=of_tiles)


def newest(column: str) -> Fact:
    """The last value of a column that is known."""
    name = f"{column}_newest"
    return Fact(name, f"arg_max({column}, time_ns)", column, of_tiles=f"arg_max({name}, time_ns)")


def own_peak(word: str) -> Fact:
    """The highest that an allocator counted, of which each record tells the highest so far."""
    value = f"greatest({word}_bytes, {word}_peak_bytes)"
    return most(f"{word}_peak_bytes", f"max({value})", value)


def counter(column: str) -> tuple[Fact, ...]:
    """A count so far: the highest, and how long after the first row, and in which step, it was reached."""
    high = f"{column}_high"

    def first(value: str, count: str, time: str) -> str:
        return f"arg_max({value}, row(coalesce({count}, 0), -({time})))"

    return (
        most(high, f"max({column})", column),
        Fact(
            f"{high}_after_ns",
            f"{first('time_ns', column, 'time_ns')} - min(time_ns)",
            "0",
            of_tiles=f"{first(f'time_ns + {high}_after_ns', high, f'time_ns + {high}_after_ns')} - min(time_ns)",
        ),
        Fact(
            f"{high}_step",
            first("step", column, "time_ns"),
            "step",
            of_tiles=first(f"{high}_step", high, f"time_ns + {high}_after_ns"),
        ),
    )


def regression(column: str) -> tuple[Fact, ...]:
    """Sums for a straight line through values over seconds since the tile's place in time; see `slope`."""
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
            f"sum({of_tile})",
        )
        for name, (value, of_tile) in sums.items()
    )


def slope(column: str) -> str:
    """SQL: the slope per second of the straight line through all values of a column of `process`."""
    x = f"((time_ns - time_ns % {WIDE_TILE_NS} - $from_ns) / 1e9)"
    n, sum_x, sum_y = f"sum({column}_n)", f"sum({column}_n * {x} + {column}_at)", f"sum({column}_sum)"
    sum_xx = f"sum({column}_n * {x} * {x} + 2 * {x} * {column}_at + {column}_at_at)"
    sum_xy = f"sum({x} * {column}_sum + {column}_at_sum)"
    return f"CASE WHEN {n} > 1 THEN ({n} * {sum_xy} - {sum_x} * {sum_y}) / ({n} * {sum_xx} - {sum_x} * {sum_x}) END"


_AT = f"((time_ns % {WIDE_TILE_NS}) / 1e9)"
#: How much later the place of a tile is than that of the first of those that are put together (`coarser`).
_LATER = f"((time_ns - time_ns % {WIDE_TILE_NS} - first_ns + first_ns % {WIDE_TILE_NS}) / 1e9)"
_COMMON = (
    least("time_ns", "min(time_ns)", "time_ns"),
    Fact(
        "last_after_ns", "max(time_ns) - min(time_ns)", "0", of_tiles="max(time_ns + last_after_ns) - min(time_ns)"
    ),
    Fact("n", "count(*)", "1", "INTEGER"),
)
