"""Rollups of a long run: figures equal those of the raw rows, whatever happened to the rollups."""

from __future__ import annotations

import copy
import random
import shutil
import time
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import pytest
from store_helpers import ask_the_lake, in_the_lake, make_run

from collector.store.lake import lake
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.lake.store import store_of
from collector.store.queries import gpu_memory, loading, moments, process_memory, spans, training_steps
from collector.store.rollups import tables as rollups
from collector.store.runs.run import Run
from tests.recorded_runs import recorded
from training_harness.journal import Identity, JournalWriter
from training_harness.records import MISSING, STREAMS

SECOND_NS = 10**9
EVERY_NS = 4 * SECOND_NS
STEPS = 3600
RANKS = WORKERS = 2
SPIKE_AT = 2161


#: Bytes that PyTorch held and that the driver reported, in each record of a recorded run.
HELD, USED = (
    recorded("uneven-batches").streams[stream][list(names)].to_dict("records")
    for stream, names in {
        "device_memory": (
            *("allocated_bytes", "reserved_bytes", "inactive_split_bytes"),
            *("allocated_peak_bytes", "reserved_peak_bytes"),
        ),
        "device": ("used_bytes",),
    }.items()
)


class Training:
    """Four hours of two ranks with two workers each; the second worker is slow, one batch is awaited for long."""

    def __init__(self, run, every_ns=EVERY_NS):
        self._every_ns = every_ns
        self.begin_ns = max(time.monotonic_ns() - STEPS * every_ns, every_ns)  # where the clock began
        self._random = random.Random(7)
        self._write_to(run)

    def copied_to(self, directory):
        """Return the training with a copy of its run, to which it goes on writing."""
        copied = copy.copy(self)
        copied._random = copy.copy(self._random)
        copied._write_to(Run(shutil.copytree(self.run.path, directory)))
        return copied

    def _write_to(self, run):
        self.run = run
        self._writers = {
            (stream, rank): JournalWriter(run.journal_dir, STREAMS[stream], Identity("node", 100 + rank, 1, rank))
            for stream in ("step", "batch", "fetch", "process", "device_memory", "device")
            for rank in range(RANKS)
        }

    def train(self, steps):
        for step in steps:
            for rank in range(RANKS):
                self.step(step, rank)

    def step(self, step, rank):
        noise = self._random.randrange(10**6)
        worker = step % WORKERS
        common = {"time_ns": self.begin_ns + step * self._every_ns + noise, "loader": 0, "epoch": 0, "index": step}
        wait_ns = 5 * SECOND_NS - rank if step == SPIKE_AT else 10**6 + noise  # there is one longest
        duration_ns = MISSING["q"] if step == 0 else EVERY_NS + noise
        self._write("step", rank, common | {"step": step, "duration_ns": duration_ns, "data_wait_ns": wait_ns})
        of_batch = {"wait_ns": wait_ns, "ready_count": step % 3, "parked_count": 0, "samples_count": 64}
        self._write("batch", rank, common | of_batch | {"worker": worker})
        fetched = {"idle_ns": 10**6, "getitem_ns": (1 + worker) * 10**8 + noise, "collate_ns": 10**6}
        self._write("fetch", rank, common | fetched | {"cpu_ns": 5 * 10**7, "worker": worker})
        sampled = {"process_pid": 100 + rank, "process_start_ticks": 1, "process_rank": rank, "role": 0, "alive": 1}
        grown = {"private_dirty_bytes": 10**8 + step * 4096, "fd_count": 10 + step % 7, "fd_limit_count": 1024}
        pss = {"pss_bytes": 10**8 + noise} if step % 3 == 0 else {}
        self._write(
            "process", rank, common | sampled | grown | pss | {"loader": MISSING["i"], "rss_bytes": 2 * 10**8}
        )

        # The GPU is larger than the recorded one, and another part of it is used each time: one sample is largest.
        factor = self._random.uniform(16, 32)
        scaled = {name: int(value * factor) for name, value in HELD[step % len(HELD)].items()}
        troubles = {"alloc_retry_count": step // 500, "oom_count": int(step >= 3000) * rank}
        self._write("device_memory", rank, common | {"device": 0, "step": step} | scaled | troubles)
        if step % 2 == rank:
            scaled = {name: int(value * factor) for name, value in USED[step % len(USED)].items()}
            self._write("device", 0, common | {"device": 0} | scaled | {"total_bytes": 2**36})

    def _write(self, stream, rank, values):
        columns = STREAMS[stream].columns
        self._writers[stream, rank].append(*(values.get(column.name, MISSING[column.code]) for column in columns))


@pytest.fixture(autouse=True, scope="module")
def small_limits():
    """Rollups are written and read in runs of a few thousand rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollups, "ROWS_WITHOUT_ROLLUPS", 3000)
        patch.setattr(rollups, "EXACT_QUANTILE_ROWS", 3000)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The training before any of it is in the lake."""
    training = Training(make_run(tmp_path_factory.mktemp("trained")))
    training.train(range(STEPS))
    return training


@pytest.fixture
def training(trained, tmp_path):
    return trained.copied_to(tmp_path / "runs" / "copy")


class RolledUp(NamedTuple):
    """A run with rollups, and its figures by rank as they were read from the raw rows before."""

    run: Run
    raw: dict


@pytest.fixture(scope="module")
def rolled_up(trained, tmp_path_factory, small_limits):
    """One run for the tests that only read."""
    training = trained.copied_to(tmp_path_factory.mktemp("rolled-up") / "runs" / "copy")
    with Ingester(training.run) as ingester:
        ingester.step()
        raw = {rank: read_figures(training.run, rank) for rank in (None, 1)}
        assert ingester.maintain() == ()
    return RolledUp(training.run, raw)


@pytest.fixture
def copied(rolled_up, tmp_path):
    """A copy of that run, which may be changed."""
    return rolled_up._replace(run=Run(shutil.copytree(rolled_up.run.path, tmp_path / "runs" / "copy")))


def read_figures(run, rank=None):
    """Return every figure that can come from rollups, the counts of samples, and whether rollups were read."""
    with read(run) as snapshot:
        reach = spans.extent(snapshot)
        within = spans.span(snapshot, reach, origin=0, window="run", rank=rank)
        within = spans.replace(within, from_ns=reach.first_ns, origin_ns=reach.first_ns)
        lines = loading.queue_lines(snapshot, within, 0)
        of_processes = process_memory.process_lines(
            snapshot, within, "private_dirty_bytes", ["rank 0 training process"]
        )
        [gpu] = gpu_memory.devices(snapshot)["gpu"]
        found = {
            "steps": training_steps.steps(snapshot, within),
            "step summary": training_steps.step_summary(snapshot, within).to_frame().T.astype("float64"),
            "throughput": loading.throughput(snapshot, within).to_frame().T.astype("float64"),
            "ranks": training_steps.rank_steps(snapshot, within),
            "made": pd.Series(moments.steps_elapsed(snapshot, within, [0, STEPS // 2, STEPS - 1])).to_frame(),
            "clock": moments.step_clock(snapshot, within),
            "split": loading.worker_split(snapshot, within, 0),
            "heat": loading.fetch_heat(snapshot, within, 0),
            "waits": loading.batch_waits(snapshot, within, 0),
            **{f"line {name}": each.points for name, each in lines.items()},
            "line of process": of_processes.points,
            "by role": process_memory.memory_by_role(snapshot, within, "pss_bytes"),
            "processes": process_memory.processes(snapshot, within),
            "open files": process_memory.open_files(snapshot),
            "gpus": gpu_memory.devices(snapshot),
            **{f"gpu {name}": each.points for name, each in gpu_memory.device_lines(snapshot, within, gpu).items()},
            "flushes": gpu_memory.cache_flushes(snapshot, within),
            "errors": gpu_memory.cuda_errors(snapshot, within),
            **dict(zip(("driver", "allocators"), gpu_memory.device_grid(snapshot, within), strict=True)),
        }
        assert loading.used_loaders(snapshot, within) == [0]
        assert process_memory.process_metric(snapshot, within, "pss_bytes") == "pss_bytes"
        counts = {name: each.samples_count for name, each in lines.items()}
        views = snapshot.query("SELECT view_name, sql FROM duckdb_views() WHERE view_name LIKE '%tiled'")
        assert len(views) == len(rollups.ROLLUPS)
        return found, counts, views["sql"].str.contains("rollups_").all()


def assert_same(found, expected):
    """Check that sums, extremes and their times are equal; a value may be in the neighbouring bucket."""
    (tables, counts, _), (raw_tables, raw_counts, _) = found, expected
    assert counts == raw_counts
    for name in ("throughput", "processes", "open files", "ranks", "gpus"):
        pd.testing.assert_frame_equal(tables[name], raw_tables[name], check_dtype=False, rtol=1e-6)
    rollup_seconds = rollups.ROLLUPS["step"].width_ns / 1e9
    assert tables["made"][0].tolist() == pytest.approx(raw_tables["made"][0].tolist(), abs=rollup_seconds)
    for name in ("step summary", "split"):
        exact = [column for column in tables[name] if column[:2] not in ("p5", "p9", "me")]
        pd.testing.assert_frame_equal(tables[name][exact], raw_tables[name][exact], check_dtype=False)
        for column in {"p50_ms", "p95_ms", "median_ms"} & {*tables[name]}:  # of samples
            assert tables[name][column].tolist() == pytest.approx(raw_tables[name][column].tolist(), rel=0.01)
    for name in ("line ready", "line of process", "gpu allocated", "gpu reserved", "gpu used"):
        line, raw = (each[name].set_index("elapsed_seconds")["value"] for each in (tables, raw_tables))
        assert (line.max(), line.min()) == (raw.max(), raw.min())
        assert len(line) == pytest.approx(len(raw), rel=0.05)
    waits, raw = (each["waits"].set_index("elapsed_seconds") for each in (tables, raw_tables))
    bucket_seconds = waits.index.to_series().diff().max()
    assert waits["longest_ms"].idxmax() == pytest.approx(raw["longest_ms"].idxmax(), abs=bucket_seconds)
    assert waits["median_ms"].median() == pytest.approx(raw["median_ms"].median(), rel=0.25)  # two values each
    for name, summed, highest in (
        ("steps", "n", "slowest_ms"),
        ("heat", "n", "fetch_ms"),
        ("waits", "n", "longest_ms"),
    ):
        assert tables[name][summed].sum() == raw_tables[name][summed].sum()
        assert tables[name][highest].max() == raw_tables[name][highest].max()
    total = [(table["wait_ms"] * table["n"]).sum() for table in (tables["steps"], raw_tables["steps"])]
    assert total[0] == pytest.approx(total[1])
    assert tables["by role"].max().tolist() == pytest.approx(raw_tables["by role"].max().tolist(), rel=0.01)
    assert tables["clock"].iloc[-1].tolist() == raw_tables["clock"].iloc[-1].tolist()
    for trouble, count in (("flushes", "count"), ("errors", "errors_count")):
        columns = ["elapsed_seconds", "step", count]
        found, raw = (each[trouble].sort_values(columns)[columns] for each in (tables, raw_tables))
        assert found[count].sum() > 0
        assert found.to_numpy().tolist() == raw.to_numpy().tolist()
    assert fullest_moment(tables) == fullest_moment(raw_tables)


def fullest_moment(tables):
    """Return the moment at which most of the GPU was in use, and the processes that used it."""
    driver, allocators = tables["driver"].set_index("time_ns"), tables["allocators"].set_index("time_ns")
    held = allocators.groupby("time_ns")["reserved_bytes"].sum()
    when = driver["used_bytes"].combine(held, max, fill_value=0).idxmax()
    holders = allocators.loc[[when], ["pid", "allocated_bytes", "reserved_bytes"]].sort_values("pid")
    return when, driver["used_bytes"].get(when), holders.to_numpy().tolist()


@pytest.mark.parametrize("rank", [None, 1])
def test_rollups_equal_raw_rows(rolled_up, rank):
    raw, found = rolled_up.raw[rank], read_figures(rolled_up.run, rank)
    assert (raw[2], found[2]) == (False, True)
    assert in_the_lake(rolled_up.run, "step_tile") < in_the_lake(rolled_up.run, "step") / 2
    assert_same(found, raw)


def test_gpu_moments_in_rollups_equal_raw_records(rolled_up):
    tables, _, has_rollups = read_figures(rolled_up.run)
    assert has_rollups
    with read(rolled_up.run) as snapshot:
        records = snapshot.query(
            "SELECT pid, time_ns, allocated_bytes, reserved_bytes FROM device_memory ORDER BY 2"
        )
        samples = snapshot.query("SELECT time_ns, used_bytes FROM device ORDER BY time_ns")
    before = pd.merge_asof(
        tables["driver"][["time_ns", "used_bytes"]], samples, on="time_ns", suffixes=("", "_was")
    )
    after = pd.merge_asof(before, samples, on="time_ns", suffixes=("", "_then"), direction="forward")
    assert len(after) > 300
    assert (after["used_bytes"] == after[["used_bytes_was", "used_bytes_then"]].min(axis=1)).all()
    names = ["allocated_bytes", "reserved_bytes"]
    held = tables["allocators"].sort_values("time_ns")[["time_ns", "pid", *names]]
    was, then = (
        pd.merge_asof(held[["time_ns", "pid"]], records, on="time_ns", by="pid", direction=way)[names]
        for way in ("backward", "forward")
    )
    assert len(held) > 600
    expected = was.mask(then["reserved_bytes"] > was["reserved_bytes"], then)  # that reserved more
    assert (held[names].to_numpy() == expected.to_numpy()).all()


def test_figures_of_dense_records_are_as_coarse_as_rollups(tmp_path):
    training = Training(make_run(tmp_path), every_ns=SECOND_NS // 2)
    training.train(range(STEPS))
    with Ingester(training.run) as ingester:
        ingester.step()
        raw = read_figures(training.run)
        ingester.maintain()
        rolled_up = read_figures(training.run)
    assert rolled_up[2]
    assert_same(rolled_up, raw)
    assert len(rolled_up[0]["waits"]) < 400 < STEPS * RANKS
    cells = rolled_up[0]["heat"].groupby(["rank", "worker"]).size()
    assert cells.nunique() == 1, "no worker has a hole"


def test_merged_process_rollups_equal_raw_rows(rolled_up, monkeypatch):
    raw, *_ = rolled_up.raw[None]
    fine, *_ = read_figures(rolled_up.run)
    monkeypatch.setitem(rollups.ROLLUPS, "process", replace(rollups.ROLLUPS["process"], most_buckets=20))
    coarse, *_ = read_figures(rolled_up.run)
    assert len(coarse["line of process"]) < len(fine["line of process"]) / 4
    for name in ("processes", "open files"):
        pd.testing.assert_frame_equal(coarse[name], raw[name], check_dtype=False, rtol=1e-6)


def test_quantiles_of_a_loader_with_few_batches_are_exact(training):
    for index in range(11):
        time_ns = training.begin_ns + 10**12 + index
        fetched = {"index": index, "getitem_ns": (index + 1) * 10**6, "collate_ns": 0, "worker": 0}
        training._write("fetch", 0, {"time_ns": time_ns, "loader": 1, "epoch": 0, **fetched})
    with Ingester(training.run) as ingester:
        ingester.step()
        ingester.maintain()
    with read(training.run) as snapshot:
        reach = spans.extent(snapshot)
        within = spans.span(snapshot, reach, origin=reach.first_ns, window="run", rank=None)
        split = loading.worker_split(snapshot, within, 1)
    assert split["median_ms"].tolist() == [6]


def test_records_after_the_rollups_are_read_and_then_rolled_up(training):
    with Ingester(training.run) as ingester:
        ingester.step()
        ingester.maintain()
        rollups_count = in_the_lake(training.run, "batch_tile")
        training.train(range(STEPS, STEPS + 700))
        beyond = read_figures(training.run)
        ingester.step()
        assert_same(read_figures(training.run), beyond)
        ingester.maintain()
        more = read_figures(training.run)
    assert beyond[2]
    assert beyond[0]["step summary"]["n"].item() == RANKS * (STEPS + 700 - 1)
    assert_same(more, beyond)
    assert in_the_lake(training.run, "batch_tile") > rollups_count


def test_late_row_is_counted_and_its_rollups_are_rebuilt(training):
    with Ingester(training.run) as ingester:
        ingester.step()
        ingester.maintain()
        training.step(1000, 0)
        in_journal = read_figures(training.run)
        ingester.step()
        in_lake = read_figures(training.run)
        ingester.maintain()
        rebuilt = read_figures(training.run)
    assert (in_journal[2], in_lake[2], rebuilt[2]) == (True, False, True)
    assert in_lake[0]["step summary"]["n"].item() == RANKS * (STEPS - 1) + 1
    assert_same(in_journal, in_lake)
    assert_same(rebuilt, in_lake)


@pytest.mark.parametrize("damage", ["gone", "overwritten"])
def test_damaged_rollups_do_not_change_figures(copied, damage):
    for path in copied.run.data_dir.rglob("*_tile/*.parquet"):
        if damage == "gone":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[4 : len(content) * 3 // 4] = bytes(len(content) * 3 // 4 - 4)
            path.write_bytes(content)
    found = read_figures(copied.run)
    assert not found[2]
    assert_same(found, copied.raw[None])


def test_older_lake_without_rollups_is_read_from_raw_rows(copied):
    with store_of(copied.run).open_writable() as connection:
        for table in rollups.TABLES:
            connection.execute(f"DROP TABLE lake.{table}")
    assert_same(read_figures(copied.run), copied.raw[None])


def test_rollups_of_an_older_lake_that_lack_a_column_are_not_used(training, monkeypatch):
    with monkeypatch.context() as older:
        batch = replace(rollups.ROLLUPS["batch"], sample="")
        older.setitem(rollups.ROLLUPS, "batch", batch)
        older.setitem(lake.TABLES, "batch_tile", batch.columns)
        with Ingester(training.run) as ingester:
            ingester.step()
            assert ingester.maintain() == ()
    found = read_figures(training.run)
    assert not found[2]
    assert found[0]["waits"]["n"].sum() == RANKS * STEPS


@pytest.mark.parametrize("with_rollups", [False, True])
def test_quantiles_of_a_short_run_are_exact(training, monkeypatch, with_rollups):
    monkeypatch.setattr(rollups, "EXACT_QUANTILE_ROWS", 10**6)
    monkeypatch.setattr(rollups, "ROWS_WITHOUT_ROLLUPS", 3000 if with_rollups else 10**6)
    with Ingester(training.run) as ingester:
        ingester.step()
        assert ingester.maintain() == ()
    assert (in_the_lake(training.run, "step_tile") > 0) == with_rollups
    tables, _, _ = read_figures(training.run)
    median = ask_the_lake(training.run, "SELECT quantile_cont(duration_ns, 0.5) / 1e6 FROM lake.step")
    assert tables["step summary"]["p50_ms"].item() == pytest.approx(median)


@pytest.mark.parametrize(("window", "steps_count"), [("500steps", 500 * RANKS), ("5min", 76 * RANKS)])
def test_short_window_is_read_from_raw_rows(rolled_up, window, steps_count):
    with read(rolled_up.run) as snapshot:
        within = spans.span(snapshot, spans.extent(snapshot), origin=0, window=window, rank=None)
        assert training_steps.step_summary(snapshot, within)["n"] == pytest.approx(steps_count, abs=RANKS)
