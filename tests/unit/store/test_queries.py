"""The dashboard's queries, on real journals."""

import socket
from dataclasses import replace

import make_run as runs
import pytest

from collector.store.lake.reader import read
from collector.store.queries import gpu_memory, lines, loading, moments, process_memory, spans, training_steps
from collector.store.rollups import tables
from collector.store.runs.run import Run
from tests.recorded_runs import recorded, unpack
from training_harness.journal import Identity

MIB = 2**20


@pytest.fixture(scope="module")
def runs_by_name(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    scripts = (runs.SLOW_WORKER, runs.COPY_ON_READ, runs.RESTARTS)
    archives = {"cuda": "leak-to-the-end", "oom-worker": "oom-worker"}
    recorded_runs = {name: Run(unpack(archive, home)) for name, archive in archives.items()}
    return {script.name: Run(runs.make_run(home, script)) for script in scripts} | recorded_runs


@pytest.fixture
def open_span(runs_by_name):
    """Opens a run: gives the snapshot and the span of a window."""
    opened = []

    def open_run(name, window="run"):
        run = runs_by_name[name]
        context = read(run)
        snapshot = context.__enter__()
        opened.append(context)
        reach = spans.extent(snapshot)
        origin = spans.origin_ns(run.manifest)
        return snapshot, spans.span(snapshot, reach, origin=origin, window=window, rank=None)

    yield open_run
    for context in opened:
        context.__exit__(None, None, None)


def test_window_of_steps_begins_at_its_first_step(open_span):
    snapshot, within = open_span("copy-on-read", "500steps")
    assert training_steps.step_summary(snapshot, within)["n"] == 500
    assert training_steps.steps(snapshot, within)["step"].iloc[0] == 700


def test_no_peak_is_lost_when_a_line_is_thinned(open_span):
    snapshot, within = open_span("copy-on-read")
    found = lines.lines(snapshot, within, "step", {"took": "duration_ns"}, buckets=40)["took"]
    exact = snapshot.query("SELECT max(duration_ns) AS high, min(duration_ns) AS low FROM step").iloc[0]
    assert len(found.points) <= 80
    assert found.thinned
    assert found.samples_count == 1199  # the first step has no duration
    assert (found.points["value"].max(), found.points["value"].min()) == (exact["high"], exact["low"])
    assert found.points["elapsed_seconds"].is_monotonic_increasing


def test_key_figure_and_chart_agree_on_the_data_wait(open_span):
    snapshot, within = open_span("slow-worker")
    table = training_steps.steps(snapshot, within)
    of_chart = (table["wait_ms"] * table["n"]).sum() / ((table["wait_ms"] + table["rest_ms"]) * table["n"]).sum()
    assert training_steps.step_summary(snapshot, within)["wait_ratio"] == pytest.approx(of_chart)


def test_memo_queries_once_and_returns_copies(open_span):
    snapshot, _ = open_span("slow-worker")
    asked = []

    class Counting:
        def query(self, sql, params=None):
            asked.append(sql)
            return snapshot.query(sql, params)

    memo = spans.Memo(Counting())
    first = process_memory.host_limits(memo)
    first["capacity_bytes"] = 0
    assert (process_memory.host_limits(memo)["capacity_bytes"] > 0).all()
    assert len(asked) == 1


def _epochs(run, *, window="run", rank=None):
    with read(run) as snapshot:
        reach = spans.extent(snapshot)
        within = spans.span(snapshot, reach, origin=spans.origin_ns(run.manifest), window=window, rank=rank)
        table = moments.epoch_starts(snapshot, within)
    return [(round(at, 3), loader, epoch) for at, loader, epoch in table.itertuples(index=False)]


def test_epoch_begins_before_its_workers_start(tmp_path):
    run = Run(runs.make_run(tmp_path, runs.COPY_ON_READ))
    trainer = Identity(socket.gethostname(), runs.NO_SUCH_PID, 1000)
    runs.begin_epochs(run.path, trainer, {1: 40.0, 2: 80.0})
    runs.begin_epochs(run.path, trainer, {0: 41.0}, loader=1)
    assert _epochs(run) == [(2.0, 0, 0), (40.0, 0, 1), (41.0, 1, 0), (80.0, 0, 2)]
    assert _epochs(run, window="500steps") == [(80.0, 0, 2)]


def test_epochs_are_those_of_one_rank(tmp_path):
    run = Run(runs.make_run(tmp_path, replace(runs.HEALTHY, workers=0)))  # says nothing itself
    for rank in (1, 2):
        who = Identity(socket.gethostname(), runs.NO_SUCH_PID + rank, 1000, rank=rank)
        runs.begin_epochs(run.path, who, {0: 5.0 + rank, 1: 15.0 + rank})
    assert _epochs(run) == [(6.0, 0, 0), (16.0, 0, 1)]
    assert _epochs(run, rank=2) == [(7.0, 0, 0), (17.0, 0, 1)]


def test_epoch_without_workers_begins_with_its_first_batch(tmp_path, monkeypatch):
    run = Run(runs.make_run(tmp_path, runs.INLINE))
    ((began, loader, epoch),) = _epochs(run)
    assert (loader, epoch) == (0, 0)
    assert began == pytest.approx(2.0, abs=0.1)
    monkeypatch.setattr(tables, "ROWS_WITHOUT_ROLLUPS", 100)
    assert _epochs(run) == []


def test_steps_have_their_elapsed_time(open_span):
    snapshot, within = open_span("copy-on-read")
    assert moments.steps_elapsed(snapshot, within, [0, 100, 5000]) == [
        pytest.approx(2.1, abs=0.01),
        pytest.approx(2.1 + 100 * 0.1, abs=0.01),
        None,
    ]
    snapshot, within = open_span("copy-on-read", "500steps")
    before, first = moments.steps_elapsed(snapshot, within, [100, 900])
    assert before is None
    assert first == pytest.approx(2.1 + 90, abs=0.01)


def test_split_of_steps_adds_up_to_their_duration(open_span):
    snapshot, within = open_span("slow-worker")
    table = training_steps.steps(snapshot, within)
    assert table["n"].sum() == 399  # the first step has no duration
    assert (table["wait_ms"] * table["n"]).sum() == pytest.approx(100 * 90 + 299 * 0.5)
    assert table["slowest_ms"].max() == pytest.approx(106)
    assert ((table["wait_ms"] + table["rest_ms"]) <= table["slowest_ms"] + 1e-9).all()


def test_many_steps_are_groups_with_quantiles_and_few_are_single(open_span):
    snapshot, within = open_span("copy-on-read")
    took = snapshot.query("SELECT duration_ns / 1e6 AS ms FROM step WHERE duration_ns IS NOT NULL ORDER BY step")[
        "ms"
    ]
    groups = training_steps.steps(snapshot, within)
    assert len(groups) <= spans.MOST_GROUPS < groups["n"].sum() == len(took)
    first = took[: int(groups["n"].iloc[0])]
    found = groups[["median_ms", "p95_ms", "slowest_ms"]].iloc[0].tolist()
    assert found == pytest.approx([first.quantile(0.5), first.quantile(0.95), first.max()])
    near = replace(within, from_ns=within.to_ns - 20 * 10**9)
    single = training_steps.steps(snapshot, near)
    assert set(single["n"]) == {1}
    assert single["median_ms"].tolist() == pytest.approx(took[-len(single) :].tolist())
    assert single["median_ms"].equals(single["p95_ms"])


def test_many_batches_are_groups_with_quantiles_and_few_are_single(open_span):
    snapshot, within = open_span("copy-on-read")
    waited = snapshot.query("SELECT wait_ns / 1e6 AS ms FROM batch ORDER BY time_ns")["ms"]
    groups = loading.batch_waits(snapshot, within, 0)
    assert len(groups) <= spans.MOST_GROUPS + 1 < groups["n"].sum() == len(waited)
    first = waited[: int(groups["n"].iloc[0])]
    found = groups[["median_ms", "p95_ms", "longest_ms"]].iloc[0].tolist()
    assert found == pytest.approx([first.quantile(0.5), first.quantile(0.95), first.max()])
    single = loading.batch_waits(snapshot, replace(within, from_ns=within.to_ns - 20 * 10**9), 0)
    assert set(single["n"]) == {1}
    assert single["median_ms"].tolist() == pytest.approx(waited[-len(single) :].tolist())


def test_memory_by_role_sums_the_last_samples_of_processes(open_span):
    snapshot, within = open_span("slow-worker")
    table = process_memory.memory_by_role(snapshot, within, "pss_bytes")
    last = snapshot.query(
        "SELECT role, sum(pss_bytes)::BIGINT AS total FROM process "
        "WHERE time_ns = (SELECT max(time_ns) FROM process) GROUP BY role ORDER BY role"
    )["total"].tolist()
    assert list(table.columns) == ["elapsed_seconds", "main", "worker"]
    assert table[["main", "worker"]].iloc[-1].tolist() == last
    assert (table["worker"] > 0).all()


def test_process_counts_from_its_first_sample_before_smaps(tmp_path):
    run_dir = runs.make_run(tmp_path, replace(runs.HEALTHY, workers=0, steps=40))
    with read(Run(run_dir)) as snapshot:
        within = spans.span(snapshot, spans.extent(snapshot), origin=0, window="run", rank=None)
        begin = snapshot.query("SELECT min(time_ns) AS t FROM process")["t"].iloc[0]
        late = f"CASE WHEN time_ns > {begin} + 1500000000 THEN pss_bytes_high END"

        class Late:
            def query(self, sql, params=None):
                return snapshot.query(sql.replace("pss_bytes_high)", f"{late})"), params)

        table = process_memory.memory_by_role(Late(), within, "pss_bytes")
    assert (table["main"] > 0).all()


def test_memory_by_role_has_a_gap_where_samples_are_missing(open_span):
    snapshot, within = open_span("slow-worker")
    begin = snapshot.query("SELECT min(time_ns) AS t FROM process")["t"].iloc[0]

    class Paused:
        def query(self, sql, params=None):
            pause = (
                f"time_ns NOT BETWEEN {begin} + 4000000000 AND {begin} + 12000000000 AND time_ns BETWEEN $from_ns"
            )
            return snapshot.query(sql.replace("time_ns BETWEEN $from_ns", pause), params)

    whole, paused = (process_memory.memory_by_role(each, within, "pss_bytes") for each in (snapshot, Paused()))
    after = float(within.elapsed(begin)) + 4
    assert whole["elapsed_seconds"].between(after + 1, after + 7).sum() >= 5
    assert paused["elapsed_seconds"].between(after + 1, after + 7).sum() == 0
    assert paused.iloc[-1].equals(whole.iloc[-1])


def test_replaced_worker_is_not_counted_twice(open_span):
    snapshot, within = open_span("restarts")
    table = process_memory.memory_by_role(snapshot, within, "pss_bytes")
    assert table["worker"].max() < 1.2 * table["worker"].min()


def test_pages_that_a_fork_shares_are_not_counted_twice(open_span):
    snapshot, within = open_span("oom-worker")  # in a cgroup of 420 MiB
    table = process_memory.memory_by_role(snapshot, within, "pss_bytes")
    together = table[["main", "worker"]].sum(axis=1)
    assert 350 * MIB < together.max() <= 420 * MIB


def test_processes_have_their_restarts_and_slopes(open_span):
    snapshot, within = open_span("restarts")
    places = process_memory.processes(snapshot, within)
    assert places.groupby("series")["restart"].sum().to_dict() == {
        "training process": 0,
        "loader 0 worker 0": 3,
        "loader 0 worker 1": 3,
    }
    snapshot, within = open_span("copy-on-read")
    places = process_memory.processes(snapshot, within).set_index("series")
    assert places.loc["loader 0 worker 0", "private_dirty_slope"] > 4 * MIB
    assert abs(places.loc["training process", "private_dirty_slope"]) < MIB / 10


def test_metric_falls_back_to_rss_without_smaps(open_span, tmp_path):
    run = Run(runs.make_run(tmp_path, replace(runs.NO_SMAPS, steps=20)))
    with read(run) as snapshot:
        within = spans.span(snapshot, spans.extent(snapshot), origin=0, window="run", rank=None)
        assert process_memory.process_metric(snapshot, within, "pss_bytes") == "rss_bytes"


def test_limits_have_usage_peak_and_capacity(open_span):
    snapshot, _ = open_span("slow-worker")
    table = process_memory.host_limits(snapshot).set_index("limit")
    assert table["capacity_bytes"].to_dict() == {"cgroup": 8 * 2**30, "host": 16 * 2**30, "shm": 2 * 2**30}
    assert (table["peak_bytes"] >= table["now_bytes"]).all()
    snapshot, _ = open_span("cuda")
    device = gpu_memory.devices(snapshot).iloc[0]
    assert device["total_bytes"] == 640 * MIB
    reserved = recorded("leak-to-the-end").streams["device_memory"]["reserved_peak_bytes"]
    assert device["reserved_peak_bytes"] == reserved.max()


def test_slow_worker_shows_in_the_split_and_the_heat_map(open_span):
    snapshot, within = open_span("slow-worker")
    split = loading.worker_split(snapshot, within, 0).set_index("worker")
    assert split["n"].tolist() == [100, 100, 100, 100]
    assert split["median_ms"].idxmax() == 1
    heat = loading.fetch_heat(snapshot, within, 0)
    assert heat.groupby("worker")["fetch_ms"].median().idxmax() == 1
    assert heat["n"].sum() == 400


def test_an_empty_run_has_no_extent(tmp_path):
    with read(Run(runs.make_run(tmp_path, runs.NO_DATA))) as snapshot:
        assert spans.extent(snapshot) is None
