"""The text of the pages about waiting and lag: amounts, units, loops and reasons."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import make_run as runs
import pandas as pd
import pytest
from dashboard_pages import figures, open_view, texts, trace_names
from simulated_runs import MAIN, add_series, finish, jittered, simulate

from app.blocks import _unbroken
from app.figures import what_if as outlook_figures, workers
from app.runtime import loading
from app.runtime.loading import Recent
from app.theme import LIGHT
from app.views import agent_health, worker_stalls
from app.what_if import _begin, _metrics
from collector.agent.ingest_feed import Feed
from collector.agent.problems import Problems
from collector.diagnosis.loading.wait_breakdown import wait_breakdowns
from collector.diagnosis.tuning.what_if import forecast
from collector.diagnosis.verdict import diagnose
from collector.findings import Evidence, Finding, Locus, Rate
from collector.store.lake.ingest import IngestResult
from collector.store.runs.run import Run
from tests.recorded_runs import unpack
from training_harness.journal import EventLog, Identity

MEASURED = tuple(Evidence(name=name, value=0.5, unit="ratio", n=9, window="run") for name in ("one", "two"))
FEW = replace(runs.SLOW_WORKER, name="few", steps=6)


def recent_of(**script):
    slow = {"workers": 2, "prefetch": 2, "service": jittered(0.06), "consumer": jittered(0.01), "batches": 200}
    tables = simulate(**slow | script).tables()
    (seen,) = wait_breakdowns(tables)
    return Recent(run_id="r1", seen=seen)


def headline_of(recent, *findings):
    """Return the headline of a page without warnings."""
    return worker_stalls.answer_in_words(moment(recent, *findings))


def moment(recent, *findings):
    chosen = [finding for finding in findings if worker_stalls.VIEW.has_finding(finding)]
    known = {(loading.recent.__wrapped__, ()): recent}
    return SimpleNamespace(findings=chosen, values=known, run_id="r1", theme=LIGHT)


def info(kind, summary, *, loader=0, **more):
    return Finding(
        kind=kind,
        severity="info",
        confidence=1.0,
        summary=summary,
        evidence=MEASURED,
        locus=Locus(loader=loader, rank=more.pop("rank", None)),
        **more,
    )


@pytest.fixture(scope="module")
def outlook():
    recent = recent_of(workers=1)
    found = forecast(recent.seen.loop)
    assert not isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def few_batches_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("few")
    runs.make_run(home, FEW)
    return home


def test_headline_refers_to_the_finding_below():
    crowded = info(
        "compute-bound",
        "The training process waits for a core 20% of its time. Loader 0 keeps up.",
        limited_by="oversubscribed",
    )
    headline = headline_of(recent_of(), crowded)
    assert "over the last 200 batches, but over the whole run its batches were made in time" in headline
    assert headline.endswith("see compute-bound (oversubscribed) below.")
    assert "keeps up" not in headline
    assert headline_of(recent_of(), info("epoch-refill", "?")).endswith(
        "over the last 200 batches: see epoch-refill below."
    )


def test_headline_of_an_unknown_cause_points_to_the_reason():
    reason = info("cannot-tell", "It is not known whether loader 0 keeps up: too few batches.")
    growth = info("cannot-tell", "A worker grows.", rate=Rate(value=1, low=0, high=2, unit="bytes/second"))
    headline = headline_of(recent_of(), growth, reason)
    assert headline.endswith("and the cause is not known: the reason is below.")
    assert moment(recent_of(), growth, reason).findings == [reason]
    assert headline_of(recent_of()).endswith("and no rule says why.")
    other = info("straggler-samples", "?", loader=7)
    assert headline_of(recent_of(), other).endswith("and no rule says why.")


def test_page_names_its_batches_and_its_rank():
    ranked = recent_of(rank=3)
    assert "over the last 200 batches of rank 3" in headline_of(ranked)
    (block,) = worker_stalls._key_figures(moment(ranked))
    assert block.items[0].label == "Waiting, last 200 batches"
    assert "over the last 200 batches of rank 3" in block.items[0].help


def test_run_with_few_batches_explains_missing_figures(monkeypatch, few_batches_home):
    at = open_view(monkeypatch, few_batches_home, "worker_stalls")
    page = texts(at)
    assert "of its time over the last 6 batches, and the cause is not known" in page
    assert page.count("It is not known whether loader 0 keeps up") == 1
    assert "No worker can be named yet" in page


def test_inline_loading_has_no_charts_of_workers(monkeypatch, homes):
    at = open_view(monkeypatch, homes["inline"], "worker_stalls")
    said = texts(at)
    assert "batches are made inline, in the training process (num_workers = 0)" in said
    assert "**How long does training wait for a batch?**" in said
    for title in ("Which worker makes training wait?", "What does each worker do", "Which worker is slow"):
        assert title not in said
    assert at.dataframe[0].value["Fetch p50"].tolist() != ["—"]


def test_a_slow_worker_has_no_prediction_that_contradicts_the_advice(monkeypatch, homes):
    at = open_view(monkeypatch, homes["slow-worker"], "worker_stalls")
    assert "Until then, set num" in texts(at)
    assert (
        "No prediction for other settings: the replay assumes equally fast workers, and worker 1 is slower."
        in texts(at)
    )
    assert not at.slider
    assert re.search("n\u00a0=\u00a0\\d+, \\d+\u2011\\d+\u00a0s", texts(at))  # breaks at the comma


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("n = 292, 6-10 s", ["n\u00a0=\u00a0292,", "6\u201110\u00a0s"]),
        ("3 dumps of its stacks", ["3\u00a0dumps", "of", "its", "stacks"]),
        ("blocked on a lock (futex)", ["blocked", "on", "a", "lock", "(futex)"]),
    ],
)
def test_a_table_on_a_phone_breaks_between_words_and_not_before_a_unit(text, parts):
    assert _unbroken(text).split(" ") == parts


def test_a_setting_is_not_recommended_while_other_programs_use_the_cores(monkeypatch, tmp_path):
    unpack("oversubscribed", tmp_path)
    said = texts(open_view(monkeypatch, tmp_path, "worker_stalls"))
    assert "Free the cores first: until then other processes decide what these settings gain." in said
    assert "recommended" not in said


def test_forecast_uses_one_unit_and_names_the_sliders_start(monkeypatch, tmp_path):
    unpack("workers-too-slow", tmp_path)
    at = open_view(monkeypatch, tmp_path, "worker_stalls")
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Throughput"].endswith(" samples/s")
    assert shown["90% interval"].endswith(" samples/s")
    by_workers = next(figure for figure in figures(at) if "predicted" in trace_names(figure))
    assert by_workers["layout"]["yaxis"]["title"]["text"] == "throughput (samples/s)"
    workers, prefetch = at.slider
    start = f"num_workers = {workers.value}, prefetch_factor = {prefetch.value}"
    assert f"The sliders start at the recommended setting: {start}" in texts(at)


def test_a_setting_that_may_be_slower_is_not_recommended(outlook):
    assert "at the recommended setting" in _begin(outlook, is_first=True)
    unsure = replace(outlook, best=replace(outlook.best, low=outlook.measured.batches_per_second * 0.9))
    assert "at the best predicted setting" in _begin(unsure, is_first=True)


def test_sliders_start_at_the_current_setting_without_a_better_one(outlook):
    assert "sliders start at the setting of this run" in _begin(replace(outlook, best=None), is_first=True)


def test_throughput_is_labelled_with_its_rank(outlook):
    assert _metrics(outlook, outlook.current, " of rank 3")[0].label == "Throughput of rank 3"
    chart = outlook_figures.by_workers(
        [outlook.current],
        outlook.current,
        outlook,
        LIGHT,
        of=" of rank 3",
    )
    assert chart.figure.layout.yaxis.title.text.startswith("throughput of rank 3 (")


def test_hover_shows_the_interval_in_the_unit_of_the_axis(outlook):
    measured = replace(outlook.measured, samples_per_batch=64.0)
    sampled = replace(outlook, measured=measured)
    own = outlook.current
    chart = outlook_figures.by_workers([own], own, sampled, LIGHT)
    traces = {trace.name: trace for trace in chart.figure.data}
    assert traces["predicted"].y[0] == pytest.approx(64 * own.batches_per_second)
    assert max(traces["90% interval"].y) == pytest.approx(64 * own.high)
    for name in ("predicted", "chosen"):
        assert "%{text}" in traces[name].hovertemplate
        assert traces[name].text[0] == outlook_figures._interval(own, 64.0)
    assert "text" not in traces["measured"].hovertemplate  # Plotly would show the name of what is not there


@pytest.mark.parametrize(("size", "unit", "x"), [(2**28, "MiB", 256.0), (2**31, "GiB", 2.0)])
def test_memory_axis_has_the_unit_of_the_key_figure(outlook, size, unit, x):
    own = replace(outlook.current, memory_bytes=float(size))
    of_size = replace(outlook, current=own, options=(own,))
    chart = outlook_figures.front(of_size, own, LIGHT)
    assert chart.figure.layout.xaxis.title.text == f"host memory of the loop ({unit})"
    assert chart.figure.data[0].x[0] == x


def test_chart_with_a_single_pattern_has_a_legend():
    unmeasured = pd.DataFrame({"stage": ["other"], "batch_ms": [2.0], "cpu_ratio": [float("nan")]})
    chart = workers.costs(unmeasured, LIGHT, batches_count=9)
    assert [trace.name for trace in chart.figure.data] == ["CPU time not measured"]
    assert chart.figure.layout.showlegend
    assert chart.takeaway.startswith("the dataset code takes")


class FakeIngester:
    """Ingester whose steps are complete unless `whole` is False."""

    whole = True
    spent_ns = 0

    def rest(self):
        pass

    def step(self):
        problems = () if self.whole else ("no",)
        return IngestResult(
            records_count=1, lag_ns=20_000_000_000, lost_count=0, is_whole=self.whole, problems=problems
        )


def test_lag_grows_between_commits_and_falls_at_each(tmp_path):
    now = {"seconds": 100}
    log = EventLog(tmp_path, Identity(host="here", pid=1, start_ticks=2))
    ingester = FakeIngester()
    run = Run(tmp_path)
    feed = Feed(run, Problems(log), ingester, clock_ns=lambda: now["seconds"] * 10**9)

    def lag_seconds(at):
        now["seconds"] = at
        return feed.lag_ns(at * 10**9) / 1e9

    assert feed.lag_ns(0) is None

    def step():
        feed.step()
        while feed.is_busy:
            time.sleep(0.001)

    step()
    assert [lag_seconds(at) for at in (100, 107)] == [0, 7]
    step()
    assert lag_seconds(107) == 0
    ingester.whole = False
    lag_seconds(117)
    step()
    assert lag_seconds(120) == 13


def test_finished_and_stored_run_has_no_lag(monkeypatch, homes):
    at = open_view(monkeypatch, homes["slow-worker"], "agent_health")
    assert {metric.label: metric.value for metric in at.metric}["Lag"] == "none"
    assert at.dataframe[0].value["Lag"].tolist() == ["none"]


def test_collector_that_failed_to_store_or_still_runs_has_a_lag():
    def events(*kinds):
        rows = [{"kind": kind, "body": f'{{"part": "{part}"}}'} for kind, part in kinds]
        return agent_health._ended_well(pd.DataFrame(rows[::-1]))

    start, stop = ("collector-start", ""), ("collector-stop", "")
    assert events(start, stop)
    assert events(start, ("collector-problem", "ingest"), stop, start, stop)
    assert events(start, ("collector-problem", "devices"), stop)
    assert not events(start, ("collector-problem", "ingest"), stop)
    assert not events(start, stop, ("collector-problem", "ingest"))
    assert not events(start, stop, start)
    assert not events(start)


def lines_of(script):
    """Return the blocks about lines on the page of a simulated run."""
    verdict = diagnose(finish(script).tables())
    page = SimpleNamespace(
        verdict=verdict,
        findings=verdict.findings,
        all_findings=verdict.findings,
        loader=0,
        span=SimpleNamespace(rank=None),
        theme=LIGHT,
        manifest=script.manifest,
        table=lambda name, caption, columns: (caption, columns),
    )
    return list(worker_stalls._lines(page))


def slow_run():
    return simulate(workers=2, prefetch=2, service=jittered(0.1), consumer=jittered(0.01), batches=200)


def test_page_draws_the_stacks_of_the_awaited_time_and_lists_the_lines():
    torch = "/x/site-packages/torch/utils/data"
    wait = ["_try_get_data", f"{torch}/dataloader.py", 1291, None, None]
    sleep = ["load", "/home/me/data.py", 57, "time.sleep(0.1)", None]
    fetch = ["fetch", f"{torch}/_utils/fetch.py", 54, None, "other"]
    script = slow_run()
    times = [script.now_seconds - 4 + moment / 20 for moment in range(60)]
    stacks = {MAIN[1]: [[wait]] * 60, 1000: [[sleep, fetch]] * 60, 1001: [[sleep, fetch]] * 60}
    script = add_series(script, times, stacks)
    chart, (caption, columns) = lines_of(script)
    (named,) = [finding.waits_in for finding in diagnose(finish(script).tables()).findings if finding.waits_in]
    assert "load  data.py:57" in chart.figure.data[0].labels
    assert columns["Line"] == [line.site for line in named]
    assert columns["Source"] == ["time.sleep(0.1)"]
    assert columns["Share"] == ["100%"]
    assert "samples of stacks" in caption


def test_page_says_how_to_name_the_lines_of_a_stall():
    script = slow_run()
    (note,) = lines_of(script)
    assert note.text.startswith("`tidegauge run --investigate -- COMMAND` names the lines")
    script.manifest["argv"] = ["python", "train.py", "--name", "a b"]
    (note,) = lines_of(script)
    assert note.text.startswith("`tidegauge run --investigate -- python train.py --name 'a b'` names the lines")


def test_page_of_a_healthy_run_says_nothing_of_lines():
    assert (
        lines_of(simulate(workers=2, prefetch=2, service=jittered(0.01), consumer=jittered(0.1), batches=200)) == []
    )
