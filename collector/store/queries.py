"""The named queries behind the dashboard's figures: what part of a run is looked at, and its steps.

Each takes a snapshot and gives a small table: whatever the length of the run, DuckDB reduces it to
at most a few thousand points before pandas sees it. Times come back as seconds since the
run was made (`elapsed_seconds`), sizes in bytes, durations in milliseconds. A missing value is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import pandas as pd

from collector.store import tiles

Window = Literal["5min", "500steps", "run"]
WINDOWS: tuple[Window, ...] = ("5min", "500steps", "run")
#: The streams that tell how far a run has come; the others tick along with one of them.
PULSE = ("step", "batch", "process", "host")
#: Buckets of a stack or a heat map, where every series shares one grid of time.
GRID_BUCKETS = 400
#: A figure of so many buckets still tells when something happened.
_FEWEST_BUCKETS = 40
#: No grid is finer than the fastest sampling, else it would have holes.
GRID_STEP_NS = 500_000_000
#: So many of the newest steps tell how many samples one is made of.
_NEWEST_STEPS = 100


#: A row or a tile is of the span.
OF_SPAN = "time_ns BETWEEN $from_ns AND $to_ns AND ($rank IS NULL OR rank = $rank)"


class Queryable(Protocol):
    """What the queries need of a snapshot (`collector.store.reader.Snapshot`)."""

    def query(self, sql: str, params: Any = None) -> pd.DataFrame:
        """Run SQL over the stream views and `event`."""


class Memo:
    """A snapshot that answers the same question once, and none that is among `answers`: panels share many."""

    def __init__(self, snapshot: Queryable, answers: Mapping[str, pd.DataFrame] = MappingProxyType({})) -> None:
        self._snapshot = snapshot
        self._answers = dict(answers)

    @property
    def answers(self) -> Mapping[str, pd.DataFrame]:
        """What has been asked by now."""
        return self._answers

    def query(self, sql: str, params: Any = None) -> pd.DataFrame:
        """As the snapshot's own; each caller gets a copy."""
        key = f"{sql}{params}"
        if key not in self._answers:
            self._answers[key] = self._snapshot.query(sql, params)
        return self._answers[key].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a run that is looked at: a window of time (ns, both ends included) and a rank.

    `origin_ns` is the moment that `elapsed_seconds` counts from; `rank` None means all ranks. The run has records
    from `first_ns` to `newest_ns`.
    """

    origin_ns: int
    from_ns: int
    to_ns: int
    first_ns: int
    newest_ns: int
    rank: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the SQL below."""
        return {"from_ns": self.from_ns, "to_ns": self.to_ns, "rank": self.rank}

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole run, of which tiles can tell too: they have no rows at its edges to leave out."""
        return self.from_ns <= self.first_ns and self.newest_ns <= self.to_ns

    def elapsed(self, time_ns: pd.Series) -> pd.Series:
        """Seconds since the run was made."""
        return (time_ns.astype("int64") - self.origin_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far the records of a run reach (ns) and how many there are."""

    first_ns: int
    newest_ns: int
    records_count: int


def origin_ns(manifest: Mapping[str, Any]) -> int | None:
    """The monotonic time at which the run was made, on the host that made it."""
    anchor = manifest.get("anchors", {}).get(manifest.get("host"))
    return int(anchor["time_ns"]) if anchor else None


def wall_ns(manifest: Mapping[str, Any], time_ns: int) -> int | None:
    """A monotonic time of the run's host as wall time."""
    anchor = manifest.get("anchors", {}).get(manifest.get("host"))
    return int(anchor["wall_ns"]) + time_ns - int(anchor["time_ns"]) if anchor else None


def extent(snapshot: Queryable) -> Extent | None:
    """The first and the newest record of the streams that pulse in every run; None if there is none."""
    parts = [f"FROM {name}_reach" for name in PULSE]
    row = snapshot.query(
        f"SELECT min(first_ns) lo, max(last_ns) hi, sum(n)::BIGINT n FROM ({' UNION ALL '.join(parts)})"
    ).iloc[0]
    if not row["n"]:
        return None
    return Extent(first_ns=int(row["lo"]), newest_ns=int(row["hi"]), records_count=int(row["n"]))


def span(snapshot: Queryable, whole: Extent, *, origin: int, window: Window, rank: int | None) -> Span:
    """The span that a window names, ending at the newest record."""
    start = min(whole.first_ns, origin)
    if window == "5min":
        start = max(start, whole.newest_ns - 300 * 10**9)
    elif window == "500steps":
        of_rank = "FROM step WHERE ($rank IS NULL OR rank = $rank)"
        newest = snapshot.query(f"SELECT max(step) step {of_rank}", {"rank": rank})["step"].iloc[0]
        # With the number itself DuckDB skips the files of the steps before.
        since = snapshot.query(
            f"SELECT min(time_ns) t {of_rank} AND step > {-1 if pd.isna(newest) else int(newest) - 500}",
            {"rank": rank},
        )["t"].iloc[0]
        start = max(start, int(since)) if pd.notna(since) else start
    return Span(
        origin_ns=origin,
        from_ns=start,
        to_ns=whole.newest_ns,
        first_ns=whole.first_ns,
        newest_ns=whole.newest_ns,
        rank=rank,
    )


def steps(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Where the step time goes, by step.

    Returns:
        step (first of its group), n, wait_ms (NaN where no DataLoader is known to be waited for) and rest_ms
        (means), slowest_ms.

    """
    source, _ = pieces(snapshot, within, "step", 2 * GRID_BUCKETS)
    timed = f"FROM {source} WHERE timed_n > 0 AND {OF_SPAN}"
    reach = rank_steps(snapshot, within)
    low = 0 if reach["low"].isna().all() else int(reach["low"].min())
    width = 1 if reach.empty else (int(reach["step"].max()) - low) // (2 * GRID_BUCKETS) + 1
    return snapshot.query(
        "SELECT min(timed_step_low) AS step, sum(timed_n)::BIGINT n, "
        "sum(wait_ns) / sum(timed_n) / 1e6 wait_ms, sum(rest_ns) / sum(timed_n) / 1e6 rest_ms, "
        f"max(slowest_ns) / 1e6 slowest_ms {timed} GROUP BY (timed_step_low - {low}) // {width} ORDER BY 1",
        within.params,
    )


def step_samples(snapshot: Queryable, within: Span) -> float | None:
    """How many samples a step is made of, of the chosen ranks together: the median of the newest steps in the span.

    None where that was not recorded.
    """
    newest = rank_steps(snapshot, within)["step"].max()
    if pd.isna(newest):
        return None
    # With the number itself DuckDB skips the files of the steps before.
    newest_steps = f"FROM step WHERE {OF_SPAN} AND step > {int(newest) - _NEWEST_STEPS}"
    of_ranks = f"SELECT step, max(samples_count) n {newest_steps} GROUP BY step, rank"
    samples = snapshot.query(
        f"SELECT median(n) n FROM (SELECT sum(n) n FROM ({of_ranks}) GROUP BY step)", within.params
    )["n"].iloc[0]
    return None if pd.isna(samples) else float(samples)


def observed(snapshot: Queryable, most: int) -> dict[str, int]:
    """Of how many records of the whole run each figure of a verdict is, which looks at no more than about `most`.

    Returns:
        data_wait (timed steps, or batches where there are none), shm_peak (samples of hosts), allocated_peak and
        reserved_peak (steps with a device); and of however many, host_peak (samples of processes) and steps.

    """
    reaches = {"shm_peak": "host", "allocated_peak": "device_memory", "reserved_peak": "device_memory"}
    counts = (f", (SELECT n FROM {stream}_reach) {name}" for name, stream in {**reaches, "steps": "step"}.items())
    found = snapshot.query(
        "SELECT coalesce((SELECT sum(timed_n) FILTER (wait_ns IS NOT NULL) "
        f"FROM step{tiles.TILED}), (SELECT n FROM batch_reach))::BIGINT data_wait{''.join(counts)}, "
        f"(SELECT sum(pss_bytes_n) FROM process{tiles.TILED})::BIGINT host_peak"
    ).fillna(0)
    every = {str(name): int(n) for name, n in found.iloc[0].items()}  # the largest process is never thinned out
    return {name: n if name in ("host_peak", "steps") else min(n, most) for name, n in every.items()}


def step_summary(snapshot: Queryable, within: Span) -> pd.Series:
    """Of the steps in the span: n, newest step, p50_ms, p95_ms, wait_ratio."""
    ranks = rank_steps(snapshot, within)
    count, (waited, took) = int(ranks["n"].sum()), ranks[["wait_ns", "duration_ns"]].sum(min_count=1)
    sums = pd.Series({"n": count, "step": ranks["step"].max(), "wait_ratio": waited / took})
    quantiles = snapshot.query(
        f"SELECT q[1] / 1e6 p50_ms, q[2] / 1e6 p95_ms FROM (SELECT {quantile(within, count)}(value, [0.5, 0.95]) q "
        f"FROM {sampled(within, 'step', OF_SPAN, count)})",
        within.params,
    ).iloc[0]
    told: pd.Series = pd.concat([sums, quantiles])
    return told


def rank_steps(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """Of the steps in the span, by rank (NaN outside a distributed job).

    Returns:
        rank, n (those that are timed), low (the first of them), step (the newest), duration_ns and wait_ns (sums),
        slowest_ns.

    """
    return snapshot.query(
        "SELECT rank, sum(timed_n)::BIGINT n, min(timed_step_low) AS low, max(step_high) AS step, "
        "sum(duration_ns)::DOUBLE duration_ns, sum(wait_ns)::DOUBLE wait_ns, max(slowest_ns) slowest_ns "
        f"FROM {tiled(within, 'step')} WHERE {OF_SPAN} GROUP BY rank ORDER BY rank",
        within.params,
    )


def tiled(within: Span, stream: str) -> str:
    """The view of a stream as tiles that serves for a span."""
    return f"{stream}{tiles.TILED if within.is_whole else tiles.ROWS}"


def pieces(snapshot: Queryable, within: Span, stream: str, buckets: int) -> tuple[str, int]:
    """The same for a figure of so many buckets, and how wide they are (ns): none is narrower than a tile.

    So of a long stream in a short time there are fewer of them, or too few for a figure: then each row is read.
    """
    width, tile_ns = width_ns(within, buckets), tiles.TILINGS[stream].width_ns
    if width < tile_ns:
        rows_count = snapshot.query(f"SELECT n FROM {stream}_reach")["n"].iloc[0]
        is_long = within.to_ns - within.from_ns >= _FEWEST_BUCKETS * tile_ns
        if not (within.is_whole and is_long and rows_count > tiles.SAMPLED_BEYOND):
            return f"{stream}{tiles.ROWS}", width
        width = tile_ns * 5 // 4  # tiles begin with a row: of their width, a bucket may get none
    return tiled(within, stream), width


def sampled(within: Span, stream: str, where: str, rows_count: int) -> str:
    """A source in SQL of values for quantiles, with the keys of the stream's tiles.

    Sorting is what they cost, so of more than `tiles.SAMPLED_BEYOND` rows, `rows_count` of them, a sample is taken.
    With a million rows its median has a standard error of 0.2 % of the rows; of each of four groups, of 0.4 %.
    """
    tiling = tiles.SUMMARIES[stream]
    keys = ", ".join(name for name, _ in tiling.keys)
    if _is_sampled(within, rows_count):
        return f"(SELECT {keys}, unnest(sample) AS value FROM {tiled(within, stream)} WHERE {where})"
    chosen = f"hash(time_ns) % {tiles.one_in(rows_count)} = 0"
    return f'(SELECT {keys}, {tiling.sample} AS value FROM "{stream}" WHERE {where} AND {chosen})'


def quantile(within: Span, rows_count: int) -> str:
    """The function for quantiles of `sampled`: of a sample, a value that is in it does, and takes half as long."""
    return "quantile_disc" if _is_sampled(within, rows_count) else "quantile_cont"


def _is_sampled(within: Span, rows_count: int) -> bool:
    return within.is_whole and rows_count > tiles.SAMPLED_BEYOND


def agent_summary(snapshot: Queryable, within: Span) -> pd.DataFrame:
    """How the collector of each host fared in the span.

    Returns:
        host, n (its ticks), interval_ms and interval_p95_ms (achieved between two samples), lag_seconds (age of the
        oldest record not in the lake, newest), ingested_count, lost_count, cpu_ratio (of one core), smaps_ratio (of
        it, for reading smaps), rss_bytes and rss_peak_bytes.

    """
    return snapshot.query(
        "SELECT host, count(*) n, median(interval_ns) / 1e6 interval_ms, "
        "quantile_cont(interval_ns, 0.95) / 1e6 interval_p95_ms, "
        "arg_max(ingest_lag_ns, time_ns) / 1e9 lag_seconds, "
        "max(records_ingested_count) ingested_count, max(records_lost_count) lost_count, "
        "(max(cpu_ns) - min(cpu_ns)) / nullif(max(time_ns) - min(time_ns), 0) cpu_ratio, "
        "(max(smaps_ns) - min(smaps_ns)) / nullif(max(time_ns) - min(time_ns), 0) smaps_ratio, "
        "arg_max(rss_bytes, time_ns) rss_bytes, max(rss_bytes) rss_peak_bytes "
        "FROM agent WHERE time_ns BETWEEN $from_ns AND $to_ns GROUP BY host ORDER BY host",
        only(within.params, "from_ns", "to_ns"),
    )


def whole(within: Span, reach: Extent) -> Span:
    """The same rank over the whole run."""
    return replace(within, from_ns=min(reach.first_ns, within.origin_ns), to_ns=reach.newest_ns)


def width_ns(within: Span, buckets: int) -> int:
    """The width of one of so many buckets over the span."""
    return (within.to_ns - within.from_ns) // buckets + 1


def only(params: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These parameters alone: DuckDB refuses one that the SQL does not name."""
    return {name: params[name] for name in names}
