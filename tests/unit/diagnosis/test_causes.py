"""Causes other than slow workers, on simulated runs whose truth is known, each with a healthy twin."""

import re

import numpy as np
import pytest
from loading_runs import STEADY, loading_findings
from simulated_runs import MAIN, MIB, START_SECONDS, finish, jittered, ns, sample_process, simulate

from collector.diagnosis.stalls.verdict import find_stalls
from collector.diagnosis.verdict import diagnose
from tests.recorded_runs import recorded
from training_harness.records import ROLE_MAIN


def with_longer_waits(script, seconds, *, blocked, **columns):
    """Return a run whose loop spends these seconds more in each `next()`."""
    for part in script.parts["batch"]:
        part["wait_ns"] += ns(seconds)
        part["blocked_ns"] += ns(seconds) if blocked else 0
        for name, value in columns.items():
            part[name] = value
    for part in script.parts["step"]:
        part["data_wait_ns"] += ns(seconds)
    return script


def test_collate_that_takes_most_of_a_fetch_is_found():
    run = STEADY | {"service": jittered(0.064), "consumer": jittered(0.005)}
    kinds, found = loading_findings(simulate(collate_share=0.9, **run))
    assert kinds == [("collate-bound", "warning")]
    assert found["collate-bound"].value_of("collate_ratio") == pytest.approx(0.9, abs=0.01)
    slow_kinds, slow = loading_findings(with_longer_waits(simulate(collate_share=0.3, **run), 2e-3, blocked=True))
    assert slow_kinds == [("workers-too-slow", "warning")]
    assert slow["workers-too-slow"].value_of("hand_over_seconds") is None, "all of the wait counts as starving"
    assert loading_findings(simulate(collate_share=0.9, **STEADY))[0] == []


@pytest.mark.parametrize(("collate", "wait"), [("default_collate", 0.014), ("pad", 0.009)])
def test_the_transfer_is_part_of_the_loss_unless_another_finding_has_it(collate, wait):
    """Each batch is made 5 ms before it comes, and default_collate leaves nothing to copy."""
    run = STEADY | {"workers": 1, "service": jittered(0.024), "consumer": jittered(0.010), "collate": collate}
    script = with_longer_waits(simulate(**run), 0.0, blocked=True, payload_bytes=48 * MIB)
    for part in script.parts["fetch"]:
        part["time_ns"] -= ns(0.005)
        part["getitem_ns"] *= 0.8
    _, found = loading_findings(script)
    assert ("copy-bound" in found) == (collate == "pad")
    assert found["workers-too-slow"].value_of("lost_seconds") == pytest.approx(300 * wait, rel=0.1)


def test_slow_sampler_is_distinguished_from_slow_workers():
    kinds, found = loading_findings(with_longer_waits(simulate(sampler="Slow", **STEADY), 0.024, blocked=False))
    assert kinds == [("sampler-bound", "warning")]
    assert found["sampler-bound"].value_of("sampler_seconds") == pytest.approx(0.024, rel=0.02)
    assert "Slow of loader 0" in found["sampler-bound"].summary
    assert loading_findings(with_longer_waits(simulate(**STEADY), 0.001, blocked=False))[0] == []


STARTS = {"persistent": False, "startup": 0.05, "batches": 15, "epochs": 20}


@pytest.mark.parametrize(
    ("changes", "sampler_seconds", "keeps_up"), [({}, 0.0, True), ({}, 0.024, False), (STARTS, 0.0, False)]
)
def test_a_loop_that_waits_otherwise_does_not_keep_up_while_waiting_for_a_core(changes, sampler_seconds, keeps_up):
    script = with_longer_waits(simulate(**STEADY | changes), sampler_seconds, blocked=False)
    seconds = 1000 + np.arange(12.0)
    used = {"cpu_ns": 0.4e9 * seconds, "run_queue_ns": 0.3e9 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(12), rss=np.ones(12), **used)
    (found,) = [f for f in diagnose(finish(script).tables()).findings if f.limited_by == "oversubscribed"]
    assert found.kind == "compute-bound"
    assert ("Loader 0 keeps up" in found.summary) == keeps_up


@pytest.mark.parametrize(
    ("worker_queued", "kinds"), [(0.0, ["cannot-tell", "compute-bound"]), (0.6, ["compute-bound"])]
)
def test_slow_transfer_is_no_loading_that_keeps_up_where_cores_are_short(worker_queued, kinds):
    """Workers that wait for a core may also do so while they hand a batch over, so that its cause is not known."""
    split = (1 - worker_queued, worker_queued, 0.0)
    script = simulate(split=split, **STEADY | {"consumer": jittered(0.06)})
    script = with_longer_waits(script, 0.06, blocked=True, payload_bytes=9000)
    seconds = 1000 + np.arange(20.0)
    used = {"cpu_ns": 0.4e9 * seconds, "run_queue_ns": 0.3e9 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=np.ones(20), rss=np.ones(20), **used)
    findings = {f.kind: f for f in diagnose(finish(script).tables()).findings}
    assert sorted(findings) == kinds
    assert "keeps up" not in findings["compute-bound"].summary
    if "cannot-tell" in findings:
        assert findings["cannot-tell"].advice[0].text == "Set num_workers=0"


def test_unsplit_wait_is_blamed_on_neither_sampler_nor_transfer():
    script = with_longer_waits(simulate(**STEADY), 0.024, blocked=False, payload_bytes=64 * MIB, blocked_ns=np.nan)
    seen, found = loading_findings(script)
    assert seen == [("cannot-tell", "info")]
    assert found["cannot-tell"].value_of("hand_over_seconds") == pytest.approx(0.024, rel=0.1)
    assert found["cannot-tell"].value_of("data_wait_ratio") > 0.4


@pytest.mark.parametrize(
    ("payload", "collate", "kinds"),
    [
        (32 * MIB, "pad", [("copy-bound", "warning")]),
        (32 * MIB, "default_collate", [("cannot-tell", "info")]),
        (10_000, "pad", [("cannot-tell", "info")]),
    ],
)
def test_copying_is_blamed_only_if_the_bytes_explain_it_and_are_copied(payload, collate, kinds):
    script = simulate(collate=collate, **STEADY | {"consumer": jittered(0.06)})
    seen, found = loading_findings(
        with_longer_waits(script, 0.05, blocked=True, payload_bytes=payload, ready_count=2)
    )
    assert seen == kinds
    if "copy-bound" in found:
        assert "MiB/s" in found["copy-bound"].summary
        assert found["copy-bound"].value_of("made_before_asked_ratio") == pytest.approx(1.0, abs=0.02)
        rates = [float(word) for word in found["copy-bound"].advice[0].expected.split() if word[0].isdigit()]
        without_bytes, without_transfer = 1 / (0.06 - 1 / 32), 1 / (0.06 - 0.049)
        assert rates == pytest.approx([without_bytes, without_transfer, 1 / 0.06], rel=0.1)


@pytest.mark.parametrize(("what", "kinds"), [("census", ["straggler-samples"]), ("growth", ["compute-bound"])])
def test_fetches_that_a_trace_of_allocations_makes_slow_are_not_judged(what, kinds):
    """The trace is Tidegauge's own: `--investigate` asks a worker that leaks for it."""

    def service(generator, worker, index):
        return jittered(0.01)(generator) * (20 if 200 <= index < 240 else 1)

    script = simulate(**STEADY | {"service": service, "consumer": jittered(0.02), "batches": 800})
    slow = [row for part in script.parts["fetch"] for _, row in part.iterrows() if 200 <= row["index"] < 240]
    begun, ended = (choose(row["time_ns"] for row in slow) / 1e9 for choose in (min, max))
    script.event(ended + 0.01, "snapshot", what=what, begun_ns=ns(begun - 0.3))
    assert [finding.kind for finding in find_stalls(finish(script).tables())] == kinds


@pytest.mark.parametrize(("earlier", "kinds"), [(0.0, ["copy-bound"]), (3000.0, ["compute-bound"])])
def test_copies_of_a_loop_that_is_a_small_part_of_the_run_are_no_finding(earlier, kinds):
    """A validation, say: 15 % of its loop, but less than 1 % of a run of an hour."""
    script = simulate(collate="pad", **STEADY | {"consumer": jittered(0.06), "begin": START_SECONDS + earlier})
    script = with_longer_waits(script, 0.01, blocked=True, payload_bytes=32 * MIB, ready_count=2)
    assert [finding.kind for finding in find_stalls(finish(script).tables())] == kinds


@pytest.mark.parametrize(
    ("computing", "made_in", "advice"),
    [(True, 0.02, "Find the thread"), (False, 0.02, "Set num_workers=0"), (True, 2e-4, "Set num_workers=0")],
    ids=["busy threads", "idle threads", "busy threads, batches cheaper than any transfer"],
)
def test_threads_that_compute_while_the_loop_waits_for_finished_batches_are_told(computing, made_in, advice):
    """The loop waits 83 % of its time; without workers it would wait for the interpreter as well."""
    run = STEADY | {"service": jittered(made_in), "consumer": jittered(0.06), "batches": 400}
    script = simulate(collate="pad", **run)
    script = with_longer_waits(script, 0.05, blocked=True, payload_bytes=10_000, ready_count=2)
    seconds = 1001.0 + np.arange(0.0, 25.0)
    used_ns = ns(2.0 if computing else 0.2) * (seconds - seconds[0])
    held = np.full(len(seconds), 300 * MIB)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=used_ns)
    finding = loading_findings(script)[1]["cannot-tell"]
    assert ("use 220% of a core, and the loop can't go on" in finding.summary) == computing
    assert [each.text[: len(advice)] for each in finding.advice] == [advice]


@pytest.mark.parametrize(("channel", "is_lock"), [("futex_do_wait", True), ("poll_schedule_timeout", False)])
def test_wait_for_the_interpreter_is_no_wait_for_a_core(channel, is_lock):
    """Workers wait for a core whenever they wake, so a transfer may be that as well. A wait for a lock is none."""
    run = STEADY | {"service": jittered(0.02), "consumer": jittered(0.06), "batches": 400}
    script = simulate(collate="pad", split=(0.05, 0.15, 0.8), **run)
    script = with_longer_waits(script, 0.05, blocked=True, payload_bytes=10_000, ready_count=2)
    seconds = 1001.0 + np.arange(0.0, 25.0)
    held, used_ns = np.full(len(seconds), 300 * MIB), ns(1.0) * (seconds - seconds[0])
    sample_process(
        script,
        seconds,
        MAIN,
        ROLE_MAIN,
        private=held,
        rss=held,
        cpu_ns=used_ns,
        wait_channel=[channel] * len(seconds),
    )
    kinds, found = loading_findings(script)
    assert kinds == ([("cannot-tell", "info")] if is_lock else [])
    assert not is_lock or found["cannot-tell"].advice[0].text.startswith("Find the thread")


@pytest.mark.parametrize(("made_in", "kind"), [(2e-4, "copy-bound"), (2e-3, "cannot-tell")])
def test_workers_that_cost_more_than_they_save_are_told_so(made_in, kind):
    """A batch that is made faster than any transfer takes needs no worker."""
    run = STEADY | {"service": jittered(made_in), "consumer": jittered(0.006), "batches": 4000}
    script = with_longer_waits(simulate(**run), 0.005, blocked=True, payload_bytes=200, ready_count=2)
    kinds, found = loading_findings(script)
    assert kinds == [(kind, "warning" if kind == "copy-bound" else "info")]
    assert ("cost more than they save: a batch is made in 200 µs" in found[kind].summary) == (kind == "copy-bound")
    assert found[kind].advice[0].text == "Set num_workers=0"


@pytest.mark.parametrize("payload", [10_000, np.nan])
def test_slow_transfer_of_batches_without_tensors_is_told_so(payload):
    script = simulate(collate="list", **STEADY | {"consumer": jittered(0.06), "batches": 400})
    script = with_longer_waits(script, 0.05, blocked=True, payload_bytes=payload, ready_count=2)
    finding = loading_findings(script)[1]["cannot-tell"]
    assert ("it consists of Python objects or of many tensors" in finding.summary) == np.isnan(payload)
    assert finding.advice[0].text.startswith("Let collate_fn return" if np.isnan(payload) else "Set num_workers=0")


def test_transfer_that_the_bytes_explain_as_a_whole_has_one_throughput_without_it():
    script = simulate(**STEADY | {"consumer": jittered(0.06)})
    _, found = loading_findings(
        with_longer_waits(script, 0.05, blocked=True, payload_bytes=96 * MIB, ready_count=2)
    )
    assert " to " not in found["copy-bound"].advice[0].expected


def test_slow_batches_are_not_charged_with_a_transfer_that_takes_long():
    run = STEADY | {"service": jittered(0.2, 0.7), "consumer": jittered(0.06), "batches": 600}
    plain = loading_findings(simulate(**run))[1]["straggler-samples"]
    slow_transfer = with_longer_waits(simulate(**run), 0.03, blocked=True, payload_bytes=64 * MIB, ready_count=2)
    found = loading_findings(slow_transfer)[1]["straggler-samples"]
    assert found.value_of("lost_seconds") < plain.value_of("lost_seconds") + 0.2 * 0.03 * 600


@pytest.mark.parametrize(
    ("collate", "advice"), [("default_collate", "Make the samples smaller"), ("pad", "Make collate_fn cheaper")]
)
def test_advice_on_collating_fits_the_function(collate, advice):
    run = STEADY | {"service": jittered(0.23), "consumer": jittered(0.05)}
    found = loading_findings(simulate(collate=collate, collate_share=0.9, **run))[1]
    assert found["collate-bound"].advice[0].text.startswith(advice)


@pytest.mark.parametrize(
    ("collate", "kind"), [("default_collate", "pin-bound"), ("pad", "cannot-tell"), (None, "cannot-tell")]
)
def test_pinning_is_found_if_nothing_else_is_copied(collate, kind):
    script = simulate(collate=collate, pin_memory=True, **STEADY | {"consumer": jittered(0.06)})
    pinned = recorded("pinned-cache").streams["device_memory"]["pinned_allocated_bytes"]
    script.add("device_memory", [{"time_ns": ns(1001.0), "pinned_allocated_bytes": pinned.iloc[-1]}])
    kinds, found = loading_findings(with_longer_waits(script, 0.05, blocked=True, payload_bytes=32 * MIB))
    assert [name for name, _ in kinds] == [kind]
    assert re.search(r"That costs [\d.]+ s, \d+% of the run\.", found[kind].summary)
    if kind == "cannot-tell":
        assert "pin_memory=False" in found[kind].advice[0].text


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({"persistent": False}, "worker-startup"),
        ({"persistent": True}, "epoch-refill"),
        ({"persistent": False, "iterable": True}, "epoch-refill"),
    ],
)
def test_first_samples_are_a_cost_of_new_workers_if_only_those_pay_it(setting, kind):
    def service(generator, _, index):
        return jittered(0.02)(generator) + (0.8 if index < 2 else 0.0)

    run = STEADY | {"workers": 2, "service": service, "batches": 20, "epochs": 12, "startup": 0.05}
    kinds, found = loading_findings(simulate(**run | setting))
    assert kinds == [(kind, "warning")]
    assert found[kind].value_of("first_fetch_seconds") == pytest.approx(0.82, abs=0.01)
    assert ("persistent_workers=True" in found[kind].advice[0].text) == (kind == "worker-startup")


def test_fetches_that_vary_are_no_cost_of_new_workers():
    def service(generator, *_):
        return float(generator.lognormal(np.log(0.03), 1.0))

    run = STEADY | {"workers": 2, "service": service, "consumer": jittered(0.03), "batches": 10, "epochs": 30}
    _, found = loading_findings(simulate(**run, persistent=False, startup=0.1))
    assert found["worker-startup"].value_of("first_fetch_seconds") is None


@pytest.mark.parametrize(("persistent", "kind"), [(False, "worker-startup"), (True, "epoch-refill")])
@pytest.mark.parametrize(("samples", "is_left"), [(10_000, True), (160, False)])
def test_epochs_that_the_loop_leaves_are_one_iterator_too_many(persistent, kind, samples, is_left):
    """Each epoch has ten batches of sixteen samples, which may be all or the first few."""
    run = STEADY | {"workers": 4, "service": jittered(0.3), "batches": 10, "epochs": 12, "gap": 0.0}
    starts = {"persistent": persistent, "startup": 1.0, "dataset_length": samples, "batch_size": 16}
    advice = loading_findings(simulate(**run | starts))[1][kind].advice
    assert advice[0].text.startswith("Keep one iterator") == is_left
    assert any("persistent_workers=True" in each.text for each in advice) != persistent


@pytest.mark.parametrize("epochs", [3, 8])
def test_worker_startup_per_epoch_is_a_warning_unless_persistent(epochs):
    run = STEADY | {"batches": 40, "epochs": epochs, "startup": 1.0}
    kinds, found = loading_findings(simulate(persistent=False, **run))
    assert kinds == [("worker-startup", "warning")]
    assert found["worker-startup"].value_of("startup_wait_seconds") == pytest.approx(1.0, abs=0.01)
    assert found["worker-startup"].advice[0].text == "Set persistent_workers=True"
    made_again = simulate(persistent=False, **run).event(1002.0, "loader-again", loader=0)
    (advice,) = loading_findings(made_again)[1]["worker-startup"].advice
    assert advice.text == "Set persistent_workers=True, and make the DataLoader once, not in each epoch"
    next(event for event in made_again.events if event["kind"] == "loader")["persistent_workers"] = True
    started = loading_findings(made_again)[1]["worker-startup"]
    assert [advice.text for advice in started.advice] == ["Make the DataLoader once, not in each epoch"]
    assert started.summary.startswith("Starting new workers of loader 0 in each epoch costs")
    kinds, found = loading_findings(simulate(**run))
    assert kinds == [("worker-startup", "info")]
    assert "a longer run pays no more" in found["worker-startup"].summary
    assert found["worker-startup"].advice == ()


def test_start_of_workers_one_after_the_other_costs_until_the_last_one_is_there():
    """Spawned workers with a large dataset: the first is ready after 1 s, the training goes on after 3 s."""
    script = simulate(persistent=False, **STEADY | {"batches": 40, "epochs": 3, "gap": 4.0})
    for event in script.events:
        if event["kind"] == "epoch-start":
            event["begun_ns"] = event["time_ns"] - ns(3.0)
        elif event["kind"] == "worker-ready":
            event["time_ns"] -= ns(2.0)
    found = loading_findings(script)[1]["worker-startup"]
    assert found.value_of("startup_wait_seconds") == pytest.approx(3.0, abs=0.01)
    assert found.value_of("worker_ready_seconds") == pytest.approx(1.0, abs=0.01)


def test_end_of_the_workers_of_the_epoch_before_belongs_to_the_cost_of_starting_them_again():
    script = simulate(persistent=False, **STEADY | {"batches": 40, "epochs": 4, "startup": 1.0, "gap": 1.5})
    begun = [event["time_ns"] for event in script.events if event["kind"] == "epoch-start"]
    for at_ns in begun[1:]:
        ended = {"loader": 0, "epoch": 0, "begun_ns": at_ns - ns(0.5)}
        script.event(at_ns / 1e9, "workers-ended", MAIN, **ended)
    found = loading_findings(script)[1]["worker-startup"]
    assert found.value_of("startup_wait_seconds") == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize(("persistent", "kinds"), [(True, []), (False, [("worker-startup", "warning")])])
def test_sampler_that_draws_an_epoch_at_its_start_is_found(persistent, kinds):
    run = STEADY | {"batches": 100, "epochs": 5, "persistent": persistent, "startup": 0.0 if persistent else 1.0}
    seen, found = loading_findings(simulate(sampler="BySize", drawing=3.0, **run))
    assert ("sampler-bound", "warning") in seen
    # Indices that are late for workers that are not ready yet cost nothing.
    late = 3.0 if persistent else 2.0
    assert found["sampler-bound"].value_of("sampler_start_seconds") == pytest.approx(late, abs=0.02)
    assert "BySize of loader 0" in found["sampler-bound"].summary
    assert loading_findings(simulate(**run))[0] == kinds


@pytest.mark.parametrize("iterable", [False, True])
def test_slow_first_batch_of_each_epoch_is_found_without_workers(iterable):
    run = STEADY | {"workers": 0, "service": jittered(0.001), "batches": 100, "epochs": 5, "iterable": iterable}
    kinds, found = loading_findings(simulate(sampler="BySize", drawing=3.0, **run))
    assert kinds == [("inline-loading", "warning")]
    assert found["inline-loading"].value_of("first_batch_excess_seconds") == pytest.approx(3.0, abs=0.02)
    assert ("BySize" in found["inline-loading"].summary) != iterable
    assert loading_findings(simulate(drawing=0.1, **run))[0] == []


def test_workers_still_busy_with_an_epoch_that_was_left_are_no_slow_sampler():
    script = simulate(drawing=3.0, **STEADY | {"batches": 100, "epochs": 5})
    for part in script.parts["fetch"]:
        busy = part["worker"] == 3
        part.loc[busy, "idle_ns"] = part.loc[busy, "idle_ns"].clip(upper=1e6)
    assert "sampler-bound" not in loading_findings(script)[1]


def _loaded_by_thread(script, computed_ratio=1.0):
    """Have a thread spend all its time in `next()`: the training waits for it outside the step."""
    for part in script.parts["batch"]:
        part["wait_ns"] = part["blocked_ns"] = part["time_ns"].diff().fillna(part["wait_ns"])
    for part in script.parts["step"]:
        work = part["other_ns"].copy()
        part["other_ns"] += part["data_wait_ns"]
        part["forward_ns"], part["outside_cpu_ns"] = 0.0, work * computed_ratio
        part["batches_count"], part["data_wait_ns"] = 1, np.nan
    return finish(script)


@pytest.mark.parametrize(("workers", "fetch"), [(0, 0.03), (2, 0.1)])
def test_waits_for_a_thread_that_loads_ahead_have_their_cause(workers, fetch):
    run = STEADY | {"workers": workers, "service": jittered(fetch), "consumer": jittered(0.02), "batches": 300}
    (found,) = find_stalls(simulate(**run).tables())
    assert (found.kind, found.severity) == ("workers-too-slow" if workers else "inline-loading", "warning")
    verdict = diagnose(_loaded_by_thread(simulate(**run)).tables())
    (ahead,) = (finding for finding in verdict.findings if finding.locus.loader == 0)
    assert (ahead.kind, ahead.severity) == (found.kind, found.severity)
    assert 0.3 < ahead.value_of("starved_ratio") <= found.value_of("starved_ratio")
    assert "the wait is an upper bound" in ahead.summary
    assert ahead.value_of("consumer_seconds") is ahead.value_of("capacity_ratio") is None, "not known"
    assert any("no prediction yet" in advice.expected for advice in ahead.advice)
    assert verdict.summary["data_wait_ratio"] is None, "that of the thread is not the training's"
    assert verdict.summary["outside_step"]["cpu_ratio"] < 0.7


def test_a_step_that_waits_for_the_gpu_is_no_wait_for_the_thread_that_loads_ahead():
    run = STEADY | {"workers": 2, "service": jittered(0.1), "consumer": jittered(0.02), "batches": 300}
    (exact,) = find_stalls(simulate(**run).tables())
    script = _loaded_by_thread(simulate(**run), computed_ratio=0.0)
    (ahead,) = (finding for finding in diagnose(script.tables()).findings if finding.locus.loader == 0)
    assert ahead.value_of("lost_seconds") == pytest.approx(exact.value_of("lost_seconds"), rel=0.1)


def test_a_training_with_batches_in_store_does_not_wait_for_the_thread_that_loads_ahead():
    run = STEADY | {"workers": 0, "service": jittered(0.03), "consumer": jittered(0.001), "batches": 300}
    script = _loaded_by_thread(simulate(**run), computed_ratio=0.0)  # it waits for the GPU, say
    for part in script.parts["step"]:  # three times as long as the batches take
        begin = part["time_ns"].iloc[0]
        part["time_ns"] = begin + 3 * (part["time_ns"] - begin)
        part["other_ns"] *= 3
    assert [finding.kind for finding in find_stalls(script.tables())] == ["compute-bound"]


def test_waits_for_a_thread_are_not_told_where_the_training_computing_is_unknown():
    run = STEADY | {"workers": 0, "service": jittered(0.03), "consumer": jittered(0.02), "batches": 300}
    script = simulate(**run)
    for part in script.parts["step"]:
        part["data_wait_ns"] = 0
    verdict = diagnose(finish(script).tables())
    (found,) = (finding for finding in verdict.findings if finding.locus.loader == 0)
    assert (found.kind, found.severity) == ("cannot-tell", "info")
    assert verdict.summary["exposed_stall"] == []
    assert verdict.summary["data_wait_ratio"] is None
    assert "ahead of the thread that trains" in found.summary


@pytest.mark.parametrize(("ahead", "kind"), [(0, "cannot-tell"), (1, "inline-loading")])
def test_waits_for_a_loader_of_the_training_itself_are_known_where_a_thread_takes_another_ones_batches(ahead, kind):
    run = STEADY | {"workers": 0, "service": jittered(0.03), "consumer": jittered(0.02), "batches": 300}
    script = simulate(**run)
    for part in script.parts["step"]:
        part["data_wait_ns"] = 0
    script.event(START_SECONDS + 1, "loads-ahead", loader=ahead)
    (found,) = (finding for finding in diagnose(finish(script).tables()).findings if finding.locus.loader == 0)
    assert found.kind == kind


def test_short_epochs_have_an_epoch_refill_finding():
    run = STEADY | {"service": jittered(0.06), "consumer": jittered(0.02), "gap": 0.01}
    kinds, found = loading_findings(simulate(**run | {"batches": 8, "epochs": 40}))
    assert kinds == [("epoch-refill", "warning")]
    assert found["epoch-refill"].value_of("refill_seconds") == pytest.approx(0.06, rel=0.1)
    assert loading_findings(simulate(**run | {"batches": 320, "epochs": 4}))[0] == []


@pytest.mark.parametrize("iterable", [False, True])
def test_refill_by_an_iterable_dataset_that_is_slow_to_begin_names_it_and_no_sampler(iterable):
    run = STEADY | {"consumer": jittered(0.02), "gap": 0.01, "batches": 40, "epochs": 10, "iterable": iterable}
    run["service"] = lambda _random, _worker, index: 0.01 if index else 0.4
    _, found = loading_findings(simulate(**run))
    refill = found["epoch-refill"]
    assert ("iterable dataset takes 400 ms to its first batch" in refill.summary) == iterable
    assert any("sampler" in advice.text for advice in refill.advice) != iterable


def test_short_epochs_of_slow_workers_have_no_epoch_refill_finding():
    run = STEADY | {"service": jittered(0.2), "consumer": jittered(0.005), "batches": 40, "epochs": 10}
    kinds, _ = loading_findings(simulate(**run))
    assert kinds[0][0] == "workers-too-slow"


def test_warm_cache_is_judged_without_the_first_epoch():
    def caches(epoch_batches):
        seen = iter(range(10**6))
        usual = jittered(0.01)
        return lambda generator, *_: usual(generator) * (10 if next(seen) < epoch_batches else 1)

    findings = diagnose(finish(simulate(**STEADY | {"service": caches(300), "epochs": 3})).tables()).findings
    assert [f.kind for f in findings] == ["compute-bound"]
    assert "The first epoch is left out: a fetch took 100" in findings[0].summary


def test_time_lost_is_that_of_all_epochs_where_a_slower_first_one_has_the_same_cause():
    def slow_disk(times):
        seen = iter(range(10**6))
        usual = jittered(0.4)
        return lambda generator, *_: usual(generator) * (times if next(seen) < 300 else 1)

    run = STEADY | {"batches": 300, "epochs": 3}
    slower, alike = (loading_findings(simulate(**run | {"service": slow_disk(times)}))[1] for times in (3.0, 1.0))
    lost = [each["workers-too-slow"].value_of("lost_seconds") for each in (slower, alike)]
    assert "The time lost is that of all batches." in slower["workers-too-slow"].summary
    assert lost[0] == pytest.approx(lost[1] + 300 * 2 * 0.4 / STEADY["workers"], rel=0.1)
