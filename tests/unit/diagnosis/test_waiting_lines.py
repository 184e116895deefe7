"""The lines that findings on waiting name, from series of stacks at the moments of a simulated run."""

import json

import numpy as np
import pytest
from simulated_runs import MAIN, add_series, finish, jittered, per_worker, simulate

from collector.diagnosis.verdict import diagnose
from collector.findings import as_json, from_json

TORCH = "/venv/lib/python3.11/site-packages/torch/utils/data"
FETCH = [
    ["_MapDatasetFetcher.fetch.<locals>.<listcomp>", f"{TORCH}/_utils/fetch.py", 54, None, None],
    ["_MapDatasetFetcher.fetch", f"{TORCH}/_utils/fetch.py", 54, None, "other"],
]
LOOP = ["_worker_loop", f"{TORCH}/_utils/worker.py", 300, None, None]
ITEM = ["Photos.__getitem__", "/home/me/project/dataset.py", 40, "return self.load(index)", None]
LOAD = ["Photos.load", "/home/me/project/dataset.py", 57, "time.sleep(0.1)", None]
SPLIT = ["split", "/usr/lib/python3.11/re/__init__.py", 206, None, None]
TRAIN = ["main", "/home/me/project/train.py", 9, "for batch in loader:", None]
WAIT = ["_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/dataloader.py", 1291, None, None]
METRIC = ["f1", "/home/me/project/metrics.py", 12, "total += one", None]
IDLE, LOADS, ITEMS = [LOOP], [LOAD, ITEM, *FETCH, LOOP], [ITEM, *FETCH, LOOP]
WAITS, TRAINS, MEASURES = [WAIT, TRAIN], [TRAIN], [METRIC, TRAIN]


def finding_of(script, kind):
    script.manifest["cwd"] = "/home/me/project"
    verdict = diagnose(finish(script).tables())
    return next(finding for finding in verdict.findings if finding.kind == kind), verdict


def slow_workers(seconds=0.1):
    return simulate(workers=2, prefetch=2, service=jittered(seconds), consumer=jittered(0.01), batches=300)


def slow_worker():
    service = per_worker([0.02, 0.09, 0.02])
    return simulate(workers=3, prefetch=2, service=service, consumer=jittered(0.02), batches=400)


def times_of(script, count=60):
    return np.linspace(script.now_seconds - 4, script.now_seconds - 1, count)


def test_a_finding_names_the_line_its_share_and_its_callers():
    script = slow_workers()
    times = times_of(script)
    workers = {pid: [LOADS if moment % 4 else ITEMS for moment in range(60)] for pid in (1000, 1001)}
    finding, verdict = finding_of(add_series(script, times, {MAIN[1]: [WAITS] * 60, **workers}), "workers-too-slow")

    first, second = finding.waits_in
    assert first.site == "dataset.py:57, in Photos.load"
    assert first.source == "time.sleep(0.1)"
    assert first.callers == ("dataset.py:40, in Photos.__getitem__",)
    assert first.ratio == pytest.approx(0.75, abs=0.05)
    assert first.ratio + second.ratio == pytest.approx(1)
    assert second.site == "dataset.py:40, in Photos.__getitem__"
    assert first.n == sum(verdict.awaited[0].stacks.values())
    assert from_json(json.loads(json.dumps(as_json(finding)))) == finding


def test_a_worker_counts_only_while_the_training_waits_for_it():
    script = slow_worker()
    times = times_of(script)
    samples = {
        MAIN[1]: [WAITS if moment % 2 else TRAINS for moment in range(60)],
        1000: [ITEMS] * 60,
        1001: [LOADS if moment % 2 else ITEMS for moment in range(60)],
        1002: [IDLE] * 60,
    }
    finding, _ = finding_of(add_series(script, times, samples), "slow-worker")
    assert finding.locus.worker == 1
    assert [(line.site, line.ratio) for line in finding.waits_in] == [("dataset.py:57, in Photos.load", 1.0)]


def test_too_few_samples_name_no_line():
    script = slow_workers()
    samples = {MAIN[1]: [WAITS] * 9, 1000: [LOADS] * 9, 1001: [LOADS] * 9}
    finding, verdict = finding_of(add_series(script, times_of(script, 9), samples), "workers-too-slow")
    assert finding.waits_in == ()
    assert "waits_in" not in as_json(finding)
    assert verdict.awaited == ()


def test_time_in_a_library_counts_for_the_line_that_calls_it():
    script = slow_workers()
    stacks = [[SPLIT, *LOADS]] * 60
    samples = {MAIN[1]: [WAITS] * 60, 1000: stacks, 1001: stacks}
    finding, _ = finding_of(add_series(script, times_of(script), samples), "workers-too-slow")
    [line] = finding.waits_in
    assert line.site == "dataset.py:57, in Photos.load"
    assert line.calls == "re.split"


def test_a_dataset_of_a_library_is_named_itself():
    script = slow_workers()
    item = [
        "ImageFolder.__getitem__",
        "/venv/lib/python3.11/site-packages/torchvision/datasets/folder.py",
        245,
        None,
        None,
    ]
    stacks = [[SPLIT, item, *FETCH, LOOP]] * 60
    samples = {MAIN[1]: [WAITS] * 60, 1000: stacks, 1001: stacks}
    finding, _ = finding_of(add_series(script, times_of(script), samples), "workers-too-slow")
    [line] = finding.waits_in
    assert line.site.endswith("torchvision/datasets/folder.py:245, in ImageFolder.__getitem__")


def test_a_training_that_makes_its_batches_itself():
    script = simulate(workers=0, prefetch=2, service=jittered(0.1), consumer=jittered(0.02), batches=200)
    main = [[LOAD, ITEM, *FETCH, TRAIN] if moment % 5 else TRAINS for moment in range(60)]
    finding, _ = finding_of(add_series(script, times_of(script), {MAIN[1]: main}), "inline-loading")
    [line] = finding.waits_in
    assert (line.site, line.n, line.ratio) == ("dataset.py:57, in Photos.load", 48, 1.0)


def test_a_pause_is_named_by_the_steps_that_pause():
    def work(_, step):
        return 0.5 if step % 20 == 19 else 0.02

    script = simulate(workers=2, prefetch=2, service=jittered(0.005), consumer=work, batches=400)
    steps = script.parts["step"][0]
    pauses = steps[steps["duration_ns"] > 4e8]
    times, main = [], []
    for end in pauses["time_ns"].to_numpy()[-10:] / 1e9:
        times += [end - 0.6, end - 0.4, end - 0.3, end - 0.2, end - 0.1]
        main += [TRAINS, MEASURES, MEASURES, MEASURES, MEASURES]
    finding, _ = finding_of(add_series(script, times, {MAIN[1]: main}), "main-thread-pause")
    [line] = finding.waits_in
    assert (line.site, line.n, line.ratio) == ("metrics.py:12, in f1", 40, 1.0)


def test_a_damaged_series_leaves_the_finding_without_lines():
    script = slow_workers()
    add_series(script, times_of(script), {MAIN[1]: [WAITS] * 60, 1000: [LOADS] * 60})
    script.events[-1]["frames"] = [["only a name"]]
    finding, _ = finding_of(script, "workers-too-slow")
    assert finding.waits_in == ()
