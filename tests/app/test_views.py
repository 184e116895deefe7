"""Words and figures of the views, on runs of every kind."""

import json
import socket
from urllib.parse import parse_qs

import make_run as runs
import pytest
from dashboard_pages import (
    EMPTY_ON_GPU,
    checked_figures,
    figures,
    longest_trace,
    open_view,
    run_of,
    texts,
    trace_names,
    walk,
)
from make_records import NO_SUCH_PID, worker_id

from app.figures.base import MAX_POINTS
from app.format import plain
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.report import headings
from collector.store.catalogue import list_runs
from collector.store.runs.run import Run
from collector.units import percent, quantity, size
from tests.recorded_runs import recorded, unpack
from training_harness.journal import EventLog, Identity


def test_every_view_draws_a_gpu_run_within_the_point_budget(monkeypatch, homes):
    run_id = run_of(homes["cuda"]).name
    for view, at in walk(monkeypatch, homes["cuda"]):
        assert not at.error, [error.value for error in at.error]
        for figure in checked_figures(at, view, cuda=True):
            assert figure["layout"]["uirevision"] == run_id
            assert longest_trace(figure) <= MAX_POINTS


def test_healthy_cpu_run_has_no_gpu_figures(monkeypatch, homes):
    at = open_view(monkeypatch, homes["healthy"], "overview")
    assert "**Nothing needs attention.**" in texts(at)
    assert "no GPU in use" in texts(at)
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Steps"] == "400"
    assert shown["Step p50 / p95"] == "103 ms / 106 ms"
    assert shown["Workers reporting"] == "2 of 2"
    assert "GPU reserved peak" not in shown
    assert len(shown) <= 6


@pytest.mark.parametrize(("capacity_bytes", "has_share"), [(8 << 30, True), (1 << 20, False)])
def test_a_peak_above_the_limit_is_no_share_of_it(monkeypatch, homes, capacity_bytes, has_share):
    limit = {"capacity_bytes": capacity_bytes, "host": None, "limit": "cgroup"}
    monkeypatch.setattr("collector.store.queries.tightest_limit", lambda _: limit)
    at = open_view(monkeypatch, homes["healthy"], "overview")
    (peak,) = (metric.value for metric in at.metric if metric.label == "Peak host memory (PSS)")
    assert ("%" in peak) == has_share


def test_overview_and_report_give_the_same_figures(monkeypatch, homes):
    summary = diagnose(load_tables(Run(run_of(homes["healthy"])))).summary
    at = open_view(monkeypatch, homes["healthy"], "overview", window="last 500 steps")
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Data wait"] == percent(summary["data_wait_ratio"])
    assert shown["Peak host memory (PSS)"].startswith(size(summary["peak"]["run_pss_bytes"]))


@pytest.mark.parametrize("name", ["out-of-memory", "ddp"])  # memory grew after the last reading; two ranks
def test_overview_and_report_give_the_same_peak_and_throughput(monkeypatch, tmp_path, name):
    summary = diagnose(load_tables(Run(unpack(name, tmp_path)))).summary
    at = open_view(monkeypatch, tmp_path, "overview")
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Peak host memory (PSS)"].startswith(size(summary["peak"]["run_pss_bytes"]))
    assert shown["Throughput"] == quantity(summary["throughput"]["samples_per_second"], "samples/second")


def test_gpu_memory_is_shown_against_its_capacity(monkeypatch, homes):
    rows = recorded("leak-to-the-end").streams["device_memory"]
    overview = open_view(monkeypatch, homes["cuda"], "overview")
    shown = {m.label: m.value for m in overview.metric}["GPU reserved peak"]
    held = rows["reserved_bytes"].max()
    assert shown == f"{size(held)} ({percent(held / (640 << 20))})"
    at = open_view(monkeypatch, homes["cuda"], "oom_risk")
    gpu = figures(at)[0]
    assert trace_names(gpu) == ["reserved", "allocated", "used, all processes", "out of memory"]
    assert gpu["layout"]["yaxis"]["title"]["text"] == "used (MiB)"
    assert "640 MiB" in gpu["layout"]["annotations"][0]["text"]
    table = at.dataframe[0].value
    assert table["Limit"].tolist()[:2] == ["GPU 0", "host memory"]
    assert table["Capacity"].tolist()[0] == "640 MiB"


def test_every_host_limit_is_shown_with_its_capacity(monkeypatch, homes):
    table = open_view(monkeypatch, homes["healthy"], "oom_risk").dataframe[0].value
    assert table["Limit"].tolist() == [
        "cgroup memory",
        "host memory",
        "/dev/shm",
        "open files, loader 0 worker 0",
    ]
    assert table["Capacity"].tolist() == ["8 GiB", "16 GiB", "2 GiB", "100"]


def test_killed_run_begins_with_findings_and_links_to_evidence(monkeypatch, homes):
    at = open_view(monkeypatch, homes["killed"], "overview")
    assert "more finding" in texts(at)
    said = texts(at)
    assert "**killed**" in said
    assert "warning: copy-on-read-growth" in said
    gravest = diagnose(load_tables(Run(run_of(homes["killed"])))).findings[0]
    assert said.count(plain(gravest.summary)) == 1
    assert "| Measurement | Value | Sample |" in said
    assert any(link.proto.label.startswith("See Leak timeline") for link in at.get("page_link"))


def test_the_leak_is_marked_where_it_begins(monkeypatch, homes):
    at = open_view(monkeypatch, homes["killed"], "leak_timeline")
    lines = figures(at)[0]
    assert lines["layout"]["yaxis"]["title"]["text"] == "private dirty (GiB)"
    assert trace_names(lines) == ["training process", "loader 0 worker 0", "loader 0 worker 1"]
    assert "copy-on-read-growth from the first step on" in [mark["text"] for mark in lines["layout"]["annotations"]]
    overview = open_view(monkeypatch, homes["killed"], "overview", window="last 500 steps")
    run_id = run_of(homes["killed"]).name
    (killed,) = [mark["text"] for mark in figures(overview)[1]["layout"]["annotations"]]
    assert f'href="post-mortem?run={run_id}&amp;window=last+500+steps"' in killed
    assert "killed after 1,200 steps" in killed
    assert at.dataframe[0].value["Process"].iloc[0].startswith("loader 0 worker")


def test_job_restart_is_marked_on_charts_over_time(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    runs.begin_attempts(run_dir, Identity(socket.gethostname(), NO_SUCH_PID, 1000), {0: 2.0, 1: 21.0})
    for view in ("overview", "oom_risk", "leak_timeline", "worker_stalls"):
        for figure in figures(open_view(monkeypatch, tmp_path, view)):
            marked = [mark for mark in figure["layout"].get("annotations", ()) if "restart 1" in mark["text"]]
            assert [mark["x"] for mark in marked] == ([21.0] if "elapsed" in str(figure["layout"]["xaxis"]) else [])
            assert all("post-mortem?run=" in mark["text"] for mark in marked)


def test_rss_is_labelled_where_smaps_cannot_be_read(monkeypatch, homes):
    at = open_view(monkeypatch, homes["no-smaps"], "leak_timeline")
    assert [figure["layout"]["yaxis"]["title"]["text"] for figure in figures(at)] == ["RSS (GiB)", "RSS (GiB)"]
    assert "Private dirty" not in at.dataframe[0].value.columns


def test_the_slow_worker_is_named_above_its_figures(monkeypatch, homes):
    at = open_view(monkeypatch, homes["slow-worker"], "worker_stalls")
    assert at.header[0].value == "What does training wait for, and which worker causes it?"
    assert "**Worker 1 of loader 0 holds up the training" in texts(at)
    lanes, fold = figures(at)[:2]
    assert lanes["layout"]["yaxis"]["categoryarray"] == ["training", *(f"worker {n}" for n in range(4))]
    assert fold["data"][0]["x"] == ["0", "1", "2", "3"]
    assert at.dataframe[0].value["Worker"].tolist() == [f"worker {n}" for n in range(4)]


def test_headline_names_a_minor_finding_that_explains_the_wait(monkeypatch, homes):
    monkeypatch.setattr("app.blocks.needs_attention", lambda findings: [])  # as if it were no more than an advice
    said = "of its time over the last 400 batches: see slow-worker"
    assert said in texts(open_view(monkeypatch, homes["slow-worker"], "worker_stalls"))


def test_sliders_change_the_forecast(monkeypatch, tmp_path):
    unpack("workers-too-slow", tmp_path)
    at = open_view(monkeypatch, tmp_path, "worker_stalls")
    workers, prefetch = at.slider
    before = {m.label: m.value for m in at.metric}
    workers.set_value(1)
    prefetch.set_value(1)
    at.run()
    after = {m.label: m.value for m in at.metric}
    assert not at.exception
    assert {name for name in before if before[name] != after[name]} >= {
        "Throughput",
        "90% interval",
        "Host memory",
    }
    assert "prefetch_factor = 1" in texts(at)


def test_stage_table_has_the_wait_and_the_target_per_batch(monkeypatch, homes):
    at = open_view(monkeypatch, homes["slow-worker"], "pipeline_stages")
    assert "Training waits 23% of its time" in texts(at)
    table = at.dataframe[0].value.set_index("Stage")
    assert table.loc["decode", "Per batch"] == "124 ms"
    assert table.loc["decode", "Target per batch"] != "—"
    assert table.loc["collate", "Calls"] == "400"
    healthy = open_view(monkeypatch, homes["healthy"], "pipeline_stages")
    assert "None: training waits only 0.5%" in texts(healthy)


def test_workers_are_inline_only_if_their_loader_is_known(monkeypatch, homes, tmp_path):
    def reporting(home):
        at = open_view(monkeypatch, home, "agent_health")
        return next(metric.value for metric in at.metric if metric.label == "Workers reporting")

    assert reporting(homes["inline"]) == "inline"
    run_dir = runs.make_run(tmp_path, runs.INLINE)
    for log in (run_dir / "events").iterdir():
        lines_left = [line for line in log.read_text().splitlines(keepends=True) if '"kind": "loader"' not in line]
        log.write_text("".join(lines_left))
    assert reporting(tmp_path) == "—"


def test_loading_without_workers_is_called_inline(monkeypatch, homes):
    at = open_view(monkeypatch, homes["inline"], "worker_stalls")
    assert "num_workers = 0" in texts(at)
    assert at.dataframe[0].value["Worker"].tolist() == ["inline"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see `![x](u)` in\nmy_set", "see `![x](u)` in my_set"),
        ("![x](http://h) :red[a] $b$ _c_", "!\\[x\\](`http://h)` \\:red\\[a\\] \\$b\\$ \\_c\\_"),
        ("see www.h/_p_ or a@b.cd", "see `www.h/_p_` or `a@b.cd`"),
        ("in __getitem__ of my_set", "in \\_\\_getitem\\_\\_ of my_set"),
        ("```![x](u)` <b>&lt;", "\\`\\`\\`!\\[x\\](u)\\` \\<b>\\&lt;"),
    ],
)
def test_markdown_in_a_text_is_escaped(text, shown):
    assert plain(text) == shown


def test_address_selects_the_run_and_the_window(monkeypatch, tmp_path):
    first = runs.make_run(tmp_path, runs.KILLED)
    runs.make_run(tmp_path, runs.INLINE)
    newest = open_view(monkeypatch, tmp_path, "overview")
    assert {m.label: m.value for m in newest.metric}["Steps"] == "400"
    at = open_view(monkeypatch, tmp_path, "overview", run=first.name, window="last 500 steps")
    assert {m.label: m.value for m in at.metric}["Steps"] == "1,200"
    assert at.selectbox[0].value == first.name
    step_time = next(metric for metric in at.metric if metric.label == "Step p50 / p95")
    assert "over 500 steps" in step_time.proto.help


def test_gpu_memory_page_shows_account_segments_and_allocation_sites(monkeypatch, homes):
    run = recorded("leak-to-the-end")
    rows = run.streams["device_memory"]
    peak, total = rows["allocated_bytes"].max(), 640 << 20
    at = open_view(monkeypatch, homes["cuda"], "gpu_memory")
    stack, segments = figures(at)
    parts = ["allocated", "fragmentation", "non-PyTorch", "unattributed"]  # nothing is cached
    assert trace_names(stack) == [*parts, "cache flushed", "out of memory"]
    assert "capacity 640 MiB" in stack["layout"]["annotations"][0]["text"]
    said = texts(at)
    assert f"Peak {size(total)}, 100% of the capacity of 640 MiB. {size(peak)} of it are live tensors." in said
    assert "Cache flushed: once." in said
    assert trace_names(segments) == ["free", "in use"]
    account, sites = (table.value for table in at.dataframe)
    at_peak = account.iloc[0]
    assert at_peak[["GPU", "Allocated", "Total", "Share of capacity"]].tolist() == [
        "GPU 0",
        size(peak),
        size(total),
        "100%",
    ]
    assert account["When"].iloc[1].startswith("last, ")
    assert sites["Allocated at"].str.fullmatch(r".*/growth\.py:\d+ \S+").all()
    assert sites["In use"].iloc[0] == size(298 << 20)  # 1 MiB of each of its steps


def test_each_view_has_tables_that_can_be_downloaded(monkeypatch, homes):
    for view, at in walk(monkeypatch, homes["cuda"]):
        taken = [button.proto.label for button in at.get("download_button")]
        assert len(taken) == len(at.dataframe), view
        assert at.dataframe or view in EMPTY_ON_GPU, view


def test_host_memory_and_step_time_have_tables(monkeypatch, homes):
    at = open_view(monkeypatch, homes["slow-worker"], "overview")
    memory, steps = (table.value for table in at.dataframe)
    assert memory["Processes"].tolist() == ["training process", "workers", "together"]
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Peak host memory (PSS)"].startswith(memory["PSS, highest"].iloc[-1])
    assert steps.columns.tolist() == ["Steps", "Mean step", "Slowest", "Data wait"]
    assert steps["Data wait"].tolist() == [shown["Data wait"]]


def test_charts_over_time_can_be_drawn_over_steps(monkeypatch, homes):
    at = open_view(monkeypatch, homes["healthy"], "overview", x="step")
    host, step = figures(at)
    assert host["layout"]["xaxis"]["title"]["text"] == step["layout"]["xaxis"]["title"]["text"] == "step"
    at = open_view(monkeypatch, homes["healthy"], "overview")
    assert {figure["layout"]["xaxis"]["title"]["text"] for figure in figures(at)} == {"elapsed (s)"}


def test_address_of_a_run_that_is_gone_says_so_and_shows_the_newest(monkeypatch, homes):
    at = open_view(monkeypatch, homes["killed"], "overview", run="nonsense")
    (warning,) = at.warning
    assert "No run nonsense in" in warning.value
    assert run_of(homes["killed"]).name in at.selectbox(key="run").options[0]


def test_link_of_a_finding_names_the_run_and_its_part(monkeypatch, homes):
    run_id = run_of(homes["killed"]).name
    selected = {"window": "last 500 steps", "x": "step"}
    at = open_view(monkeypatch, homes["killed"], "overview", **selected)
    links = [parse_qs(link.proto.query_string) for link in at.get("page_link")]
    assert links
    for query in links:
        query.pop("focus", None)
        assert query == {"run": [run_id], "window": ["last 500 steps"], "x": ["step"]}


def test_charts_show_single_steps_and_batches_of_a_short_focus(monkeypatch, homes):
    kinds = {}
    for words in ("", "20-30"):
        query = {"focus": words} if words else {}
        overview = open_view(monkeypatch, homes["killed"], "overview", **query)
        stalls = open_view(monkeypatch, homes["killed"], "worker_stalls", **query)
        kinds[words] = {name for at in (overview, stalls) for each in figures(at) for name in trace_names(each)}
    groups = {"rest of the step", "step, 95th percentile", "wait, median", "wait, 95th percentile"}
    assert groups <= kinds[""]
    assert {"step", "wait"} <= kinds["20-30"]
    assert not groups & kinds["20-30"]


def shades(at):
    """Return begin and end of the times that are shaded in the first chart."""
    shapes = figures(at)[0]["layout"].get("shapes", [])
    return [(shape["x0"], shape["x1"]) for shape in shapes if shape["type"] == "rect"]


def test_address_of_a_finding_zooms_charts_over_time_to_it(monkeypatch, homes):
    at = open_view(monkeypatch, homes["killed"], "leak_timeline", focus="20-40")
    assert figures(at)[0]["layout"]["xaxis"]["range"] == [10.0, 50.0]
    assert shades(at) == [(20.0, 40.0)]
    at.button[0].click().run()  # "Show all"
    assert not shades(at)


@pytest.mark.parametrize("words", ["40-20", "-1-5", "a-b", "5", "1e9-2e9"])
def test_address_with_a_malformed_time_shows_the_whole_run(monkeypatch, homes, words):
    at = open_view(monkeypatch, homes["killed"], "leak_timeline", focus=words)
    assert not shades(at)


def test_post_mortem_names_the_processes_of_the_last_minute(monkeypatch, homes):
    at = open_view(monkeypatch, homes["killed"], "post_mortem")
    assert "**killed**" in texts(at)
    assert "| Signal | SIGKILL |" in texts(at)
    assert "| end | " in texts(at)
    lines = figures(at)[0]
    assert trace_names(lines) == ["training process", "loader 0 worker 0", "loader 0 worker 1"]
    assert set(at.dataframe[0].value["Exit seen"]) == {"no"}
    at = open_view(monkeypatch, homes["healthy"], "post_mortem")
    assert "No. The run finished normally (exit status 0)." in texts(at)


def test_compare_page_shows_figures_and_settings_of_each_run(monkeypatch, tmp_path):
    unpack("leak-to-the-end", tmp_path)
    for script in (runs.HEALTHY, runs.SLOW_WORKER, runs.HEALTHY):
        runs.make_run(tmp_path, script)
    at = open_view(monkeypatch, tmp_path, "overview")
    at.switch_page("views/compare.py").run()
    newest, before, oldest, cuda = [run.name for run in sorted_runs(tmp_path)]
    newest, before, oldest, cuda = headings([newest, before, oldest, cuda], short=True)
    table = at.dataframe[0].value
    assert table.columns.tolist() == ["Figure", f"{oldest} (baseline)", newest]  # unasked, of the same script
    at.multiselect(key="compare").set_value([run.name for run in sorted_runs(tmp_path)[1:]]).run()
    table, settings = (frame.value.set_index(frame.value.columns[0]) for frame in at.dataframe)
    assert table.columns.tolist() == [f"{before} (baseline)", newest, oldest, cuda]
    assert table.loc["Step p50", f"{before} (baseline)"] == "103 ms (n = 399)"
    assert table.loc["Step p50", oldest] == "103 ms (+0.0%, n = 399)"
    assert table.loc["Peak GPU allocated", oldest] == "—"
    allocated = recorded("leak-to-the-end").streams["device_memory"]["allocated_peak_bytes"]
    assert table.loc["Peak GPU allocated", cuda].startswith(size(allocated.max()))
    assert settings.loc["loader 0: num workers"].tolist() == ["4", "2", "2", "0"]
    lines = [name for name in trace_names(figures(at)[0]) if not name.endswith(", 95th percentile")]
    assert lines == [before, newest, oldest, cuda]
    assert not at.exception


def sorted_runs(home):
    return [run.path for run in list_runs(home)]


def test_agent_health_shows_reporting_workers_and_cost(monkeypatch, homes):
    at = open_view(monkeypatch, homes["healthy"], "agent_health")
    assert "No records lost" in texts(at)
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Workers reporting"] == "2 of 2"
    assert shown["Interval p50 / p95"] == "501 ms / 502 ms"
    assert shown["Collector memory"] == "—"  # its private memory was not read
    assert shown["Collector CPU"] == "0.5%"
    assert at.dataframe[0].value["Records in the lake"].tolist() == ["3,950"]


def test_agent_health_and_the_card_tell_the_same_memory_of_the_collector(monkeypatch, tmp_path):
    unpack("slow-worker", tmp_path)
    verdict = diagnose(load_tables(list_runs(tmp_path)[0]))
    at = open_view(monkeypatch, tmp_path, "agent_health")
    private = size(verdict.summary["overhead"]["collector_private_dirty_bytes"])
    assert {metric.label: metric.value for metric in at.metric}["Collector memory"] == private
    assert at.dataframe[0].value["Private dirty, peak"].tolist() == [private]
    assert figures(at)[1]["layout"]["yaxis"]["title"]["text"] == "private dirty (MiB)"


def test_each_figure_explains_its_terms(monkeypatch, homes):
    at = open_view(monkeypatch, homes["cuda"], "gpu_memory")
    helps = [markdown.proto.help for markdown in at.markdown]
    assert any("[**fragmentation**](terms#fragmentation): free memory" in text for text in helps)


def test_terms_page_works_without_a_run(monkeypatch, tmp_path):
    at = open_view(monkeypatch, tmp_path, "terms")
    assert [(term.value, term.anchor) for term in at.subheader][:2] == [
        ("allocated", "allocated"),
        ("reserved", "reserved"),
    ]
    assert ("private dirty", "private-dirty") in [(term.value, term.anchor) for term in at.subheader]
    assert "Batches that have arrived before their turn" in texts(at)
    assert "No runs yet" not in texts(at)


def test_post_mortem_shows_the_stacks_of_a_hang_the_odd_one_first(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.KILLED)
    log = next((run_dir / "events").glob(f"*.{NO_SUCH_PID}.jsonl"))
    main = json.loads(log.read_text().splitlines()[0])
    lines = [line for path in log.parent.iterdir() for line in path.read_text().splitlines()]
    last_ns = max(json.loads(line)["time_ns"] for line in lines)
    library = "/opt/lib/python3.12/site-packages/torch/utils/data"
    in_lock = [["load", "/home/me/dataset.py", 41], ["fetch", f"{library}/_utils/fetch.py", 1]]
    for_batch = [["_try_get_data", f"{library}/dataloader.py", 1], ["main", "/home/me/train.py", 20]]

    def entry(identity, role, frames, **place):
        threads = [{"thread": "MainThread", "waits": "blocked on a lock (futex)", "frames": frames}]
        names = {"role": role, "rank": None, "loader": None, "worker": None, **place}
        return {**identity, **names, "cpu_seconds": 1.0, "threads": threads, "error": None}

    process = {"pid": main["pid"], "start_ticks": main["start_ticks"]}
    worker = worker_id(main["host"], 1, 0)
    silent = {**process, "silent_seconds": 40.0, "longest_seconds": 1.0, "budget_seconds": 30.0}
    place = {"pid": worker.pid, "start_ticks": worker.start_ticks}
    events = EventLog(run_dir / "events", Identity(main["host"], NO_SUCH_PID + 1, 900))
    EventLog(run_dir / "events", Identity(main["host"], NO_SUCH_PID, 1000)).append(
        "epoch-start", loader=0, epoch=0, worker_pids=[worker.pid - 1, worker.pid], begun_ns=last_ns
    )
    for number in range(3):
        events.append(
            "stacks",
            time_ns=last_ns + number,
            is_last=number == 2,
            silent=[silent],
            idle_seconds=None,
            helpers_cpu_seconds=0.0,
            helpers_runnable_count=0,
            processes=[
                entry(process, "main", for_batch),
                entry(place, "worker", in_lock, loader=0, worker=1),
            ],
        )
    at = open_view(monkeypatch, tmp_path, "post_mortem")
    culprit, victim = (code.value for code in at.code if "/home/me/" in code.value)
    assert culprit.startswith("load  /home/me/dataset.py:41")
    assert "main  /home/me/train.py:20" in victim
    words = texts(at)
    assert words.index("waited for") < words.index("makes a batch") < words.index("waits for a batch")
