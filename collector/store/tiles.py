"""Tiles: what the rows of some seconds come to, kept beside them so that a look at a long run reads few of them.

The upkeep of a lake lays them: one row for each piece of time and each rank, loader, worker or process, with
counts, sums, extremes and their times, and a sample for quantiles. Whoever looks takes a tile and a row for the
same thing: a row stands for itself. So one query serves all runs, what is in tiles and the rows that are not yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from collector.store.engine import Ask, rows_of

#: As wide as a tile is; of workers and processes, of which there are many, wider.
_TILE_NS, _WIDE_TILE_NS = 10_000_000_000, 30_000_000_000
#: One value in so many stays for quantiles.
SAMPLED = 16
#: Of no more rows than this they are exact.
SAMPLED_BEYOND = 1_000_000
#: Of no more than this there are no tiles: to read the rows costs little.
TILED_BEYOND = 100_000
#: Of what the name of a table of tiles ends with, and that of the view that has tiles where there are any.
TILE, TILED = "_tile", "_tiled"
#: The same view of rows alone: for what is shorter than tiles.
ROWS = "_rows"


@dataclass(frozen=True, slots=True)
class _Fact:
    """A column of a tile: in SQL, of many rows together, of a row alone, and of many tiles together, if no sum."""

    name: str
    together: str
    alone: str
    kind: str = "BIGINT"
    of_tiles: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """What the tiles of a stream are of and tell; `sample` is the value in SQL whose quantiles are asked for.

    No figure has more than `most_buckets` of it.
    """

    keys: tuple[tuple[str, str], ...]
    facts: tuple[_Fact, ...]
    most_buckets: int
    sample: str = ""
    width_ns: int = _TILE_NS

    def all_facts(self, every: int = SAMPLED) -> tuple[_Fact, ...]:
        """With those that every tile tells; one value in so many is in the sample."""
        chosen = f"hash(time_ns) % {every} = 0"
        named = f"list({self.sample}) FILTER ({chosen})", f"CASE WHEN {chosen} THEN [{self.sample}] END"
        of_tiles = "flatten(list(sample))"
        return (*_COMMON, *self.facts, *([_Fact("sample", *named, "BIGINT[]", of_tiles)] if self.sample else []))


def _sum(column: str) -> _Fact:
    return _Fact(column, f"sum({column})", column)


def _least(name: str, together: str, alone: str) -> _Fact:
    return _Fact(name, together, alone, of_tiles=f"min({name})")


def _most(name: str, together: str, alone: str) -> _Fact:
    return _Fact(name, together, alone, of_tiles=f"max({name})")


def _extremes(column: str) -> tuple[_Fact, ...]:
    """The smallest and the largest value, how long after the first row each came, and of how many they are."""
    return (
        _least(f"{column}_low", f"min({column})", column),
        _after(f"{column}_low", f"arg_min(time_ns, {column})", "arg_min"),
        _most(f"{column}_high", f"max({column})", column),
        _after(f"{column}_high", f"arg_max(time_ns, {column})", "arg_max"),
        _Fact(f"{column}_n", f"count({column})", f"({column} IS NOT NULL)::INTEGER", "INTEGER"),
    )


def _after(extreme: str, when: str, choose: str) -> _Fact:
    of_tiles = f"{choose}(time_ns + {extreme}_after_ns, {extreme}) - min(time_ns)"
    return _Fact(f"{extreme}_after_ns", f"{when} - min(time_ns)", "0", of_tiles=of_tiles)


def _newest(column: str) -> _Fact:
    name = f"{column}_newest"
    return _Fact(name, f"arg_max({column}, time_ns)", column, of_tiles=f"arg_max({name}, time_ns)")


def _regression(column: str) -> tuple[_Fact, ...]:
    """Sums for a straight line through values over seconds since the tile's place in time; see `slope`."""
    n, at, total = f"{column}_n", f"{column}_at", f"{column}_sum"
    sums = {
        "sum": (column, total),
        "at": (_AT, f"{at} + {n} * {_LATER}"),
        "at_at": (f"{_AT} * {_AT}", f"{column}_at_at + 2 * {_LATER} * {at} + {n} * {_LATER} * {_LATER}"),
        "at_sum": (f"{_AT} * {column}", f"{column}_at_sum + {_LATER} * {total}"),
    }
    return tuple(
        _Fact(
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
    x = f"((time_ns - time_ns % {_WIDE_TILE_NS} - $from_ns) / 1e9)"
    n, sum_x, sum_y = f"sum({column}_n)", f"sum({column}_n * {x} + {column}_at)", f"sum({column}_sum)"
    sum_xx = f"sum({column}_n * {x} * {x} + 2 * {x} * {column}_at + {column}_at_at)"
    sum_xy = f"sum({x} * {column}_sum + {column}_at_sum)"
    return f"CASE WHEN {n} > 1 THEN ({n} * {sum_xy} - {sum_x} * {sum_y}) / ({n} * {sum_xx} - {sum_x} * {sum_x}) END"


_AT = f"((time_ns % {_WIDE_TILE_NS}) / 1e9)"
#: How much later the place of a tile is than that of the first of those that are put together (`coarser`).
_LATER = f"((time_ns - time_ns % {_WIDE_TILE_NS} - first_ns + first_ns % {_WIDE_TILE_NS}) / 1e9)"
_COMMON = (
    _least("time_ns", "min(time_ns)", "time_ns"),
    _Fact(
        "last_after_ns", "max(time_ns) - min(time_ns)", "0", of_tiles="max(time_ns + last_after_ns) - min(time_ns)"
    ),
    _Fact("n", "count(*)", "1", "INTEGER"),
)
_RANK, _LOADER, _WORKER = (("rank", "INTEGER"), ("loader", "INTEGER"), ("worker", "INTEGER"))
_FETCH_SUMS = ("idle_ns", "getitem_ns", "collate_ns", "cpu_ns", "run_queue_ns", "blocked_ns")
#: A step without a duration, as the first one, is not timed.
_IS_TIMED = "duration_ns IS NOT NULL"
_REST = "greatest(duration_ns - coalesce(data_wait_ns, 0), 0)"
TILINGS = {
    "step": _Tiling(
        keys=(_RANK,),
        facts=(
            _most("step_high", "max(step)", "step"),
            _least("timed_step_low", f"min(step) FILTER ({_IS_TIMED})", f"CASE WHEN {_IS_TIMED} THEN step END"),
            _Fact("timed_n", "count(duration_ns)", f"({_IS_TIMED})::INTEGER", "INTEGER"),
            _sum("duration_ns"),
            _most("slowest_ns", "max(duration_ns)", "duration_ns"),
            _Fact(
                "wait_ns", f"sum(data_wait_ns) FILTER ({_IS_TIMED})", f"CASE WHEN {_IS_TIMED} THEN data_wait_ns END"
            ),
            _Fact("rest_ns", f"sum({_REST})", _REST),
        ),
        sample="duration_ns",
        most_buckets=1000,
    ),
    "batch": _Tiling(
        keys=(_RANK, _LOADER),
        facts=(
            *_extremes("wait_ns"),
            *_extremes("parked_count"),
            *_extremes("ready_count"),
            *_extremes("outstanding_count"),
            _sum("samples_count"),
            _Fact(
                "samples_count_first",
                "arg_min(samples_count, time_ns)",
                "samples_count",
                of_tiles="arg_min(samples_count_first, time_ns)",
            ),
        ),
        most_buckets=500,
    ),
    "fetch": _Tiling(
        keys=(_RANK, _LOADER, _WORKER),
        facts=(
            *map(_sum, _FETCH_SUMS),
            _most(
                "longest_ns",
                "max(getitem_ns + coalesce(collate_ns, 0))",
                "getitem_ns + coalesce(collate_ns, 0)",
            ),
        ),
        sample="getitem_ns + collate_ns",
        most_buckets=200,
        width_ns=_WIDE_TILE_NS,
    ),
    "process": _Tiling(
        keys=(("host", "VARCHAR"), ("process_pid", "INTEGER"), ("process_start_ticks", "BIGINT")),
        facts=(
            *map(_newest, ("role", "loader", "worker", "process_rank")),
            _least("alive_low", "min(alive)", "alive"),
            *_extremes("private_dirty_bytes"),
            *_extremes("pss_bytes"),
            *_extremes("rss_bytes"),
            *_extremes("fd_count"),
            *map(_newest, ("private_dirty_bytes", "pss_bytes", "rss_bytes", "fd_count", "fd_limit_count")),
            *_regression("private_dirty_bytes"),
            *_regression("rss_bytes"),
        ),
        most_buckets=400,
        width_ns=_WIDE_TILE_NS,
    ),
}
#: table -> ((column, SQL type), ...), as in the lake.
TABLES = {
    f"{stream}{TILE}": (*tiling.keys, *((fact.name, fact.kind) for fact in tiling.all_facts()))
    for stream, tiling in TILINGS.items()
}


def one_in(rows_count: int) -> int:
    """One row in how many is in a sample of so many."""
    return max(rows_count - 1, 0) // SAMPLED_BEYOND + 1


def laid(stream: str, source: str, *, every: int = SAMPLED) -> str:
    """SQL: the tiles of the rows of `source`; one in so many is in the sample."""
    tiling = TILINGS[stream]
    keys = ", ".join(name for name, _ in tiling.keys)
    facts = ", ".join(f"({fact.together})::{fact.kind} AS {fact.name}" for fact in tiling.all_facts(every))
    return f"SELECT {keys}, {facts} FROM {source} GROUP BY {keys}, time_ns // {tiling.width_ns}"


def coarser(stream: str, source: str, span_ns: int, *, thinner: int) -> str:
    """SQL: the tiles of `source`, which lasts so long, put together; one in so many stays in the sample.

    They are no wider than a bucket of any figure over that time.
    """
    tiling = TILINGS[stream]
    width_ns = max(1, span_ns // tiling.most_buckets // tiling.width_ns) * tiling.width_ns
    keys = ", ".join(name for name, _ in tiling.keys)
    named = {fact.name: (fact.of_tiles or f"sum({fact.name})", fact.kind) for fact in tiling.all_facts()}
    if thinner > 1 and "sample" in named:
        values, kind = named["sample"]
        named["sample"] = (
            f"list_slice({values}, 1 + (hash(min(time_ns)) % {thinner})::BIGINT, 1000000000, {thinner})",
            kind,
        )
    facts = ", ".join(f"({value})::{kind} AS {name}" for name, (value, kind) in named.items())
    pieces = f"{keys}, time_ns // {width_ns}"
    first = f"SELECT *, min(time_ns) OVER (PARTITION BY {pieces}) AS first_ns {source}"
    return f"SELECT {keys}, {facts} FROM ({first}) GROUP BY {pieces}"


def alone(stream: str, source: str, *, every: int = SAMPLED) -> str:
    """SQL: the rows of `source`, each as a tile of its own; one in so many is in the sample."""
    tiling = TILINGS[stream]
    facts = ", ".join(f"{fact.alone} AS {fact.name}" for fact in tiling.all_facts(every))
    return f"SELECT {', '.join(name for name, _ in tiling.keys)}, {facts} FROM {source}"


def reach(source: str) -> str:
    """SQL: n (rows), first_ns and last_ns of a source, all from the catalog where it is a table of a lake."""
    return f"SELECT count(*) AS n, min(time_ns) AS first_ns, max(time_ns) AS last_ns FROM {source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """The tiles of a lake, which hold all rows from one time to before another, and the rows since, both as SQL."""

    first_ns: int
    until_ns: int
    tiles: str
    newer: str


def find_laid(ask: Ask, lake: str, stream: str) -> Laid | None:
    """What is laid of a lake; None if nothing is, or a row came late.

    The catalog knows how many rows there are, so only the newest ones are looked at. The files are named as they
    are: they stay while a look lasts, and DuckLake would take 4 ms for each query to find them anew.

    Raises:
        duckdb.Error: the tiles cannot be read.

    """
    width_ns = TILINGS[stream].width_ns
    found = ask(f"SELECT filename, max(time_ns // {width_ns}), sum(n) FROM {lake}.{stream}{TILE} GROUP BY filename")
    if not found:
        return None
    files, lasts, tiled_counts = zip(*found, strict=True)
    until_ns = (int(max(lasts)) + 1) * width_ns
    since = f"WHERE time_ns >= {until_ns}"
    newer = ask(f"SELECT filename, count(*) FROM {lake}.{stream} {since} GROUP BY filename")
    [(rows_count, first_ns, _)] = ask(reach(f"{lake}.{stream}"))
    if sum(tiled_counts) + sum(count for _, count in newer) != rows_count:
        return None
    newer_rows = f"{rows_of([file for file, _ in newer])} {since}" if newer else f"FROM {lake}.{stream} LIMIT 0"
    return Laid(first_ns=first_ns, until_ns=until_ns, tiles=rows_of(files), newer=newer_rows)
