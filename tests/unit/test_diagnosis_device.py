"""GPU memory: what grows is told apart by its mechanism, and what merely looks like growth is silent.

No GPU is needed: the streams are simulated after the allocator's own counting (c10/cuda/CUDACachingAllocator.cpp).
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, Script, finished, ns, sample_process, started

from collector.diagnosis.device_growth import find_device_growth
from collector.diagnosis.device_risk import find_device_risk
from collector.diagnosis.findings import as_json
from collector.diagnosis.holders import ranked
from collector.diagnosis.verdict import diagnose
from collector.store.runs import Run
from collector.store.snapshots import Grown, GrownLine, grown_lines
from training_harness import layout
from training_harness.records import ROLE_MAIN

STEPS = 240
AT = np.arange(STEPS)
SECONDS = START_SECONDS + 1 + AT * 0.25
FLAT = np.zeros(STEPS)
RAMP = AT / STEPS
RANDOM = np.random.default_rng(0)
SIZES = np.exp(RANDOM.normal(size=STEPS))
HIGH_WATER = 100 * np.maximum.accumulate(SIZES)
WARM_UP = 1 - np.exp(-AT / 12)
CONTEXT = 500


def training(
    *,
    allocated=FLAT,
    count=FLAT,
    cached=FLAT,
    holes=FLAT,
    retries=FLAT,
    outside=FLAT,
    others=FLAT,
    pinned=FLAT,
    resident=FLAT,
    attributed=True,
    total=80 * 1024,
    device=True,
):
    """60 s of training on one GPU: MiB above what it has from the first step on."""
    script = started()
    script.living = frozenset({MAIN})
    script.now_seconds = SECONDS[-1] + 1
    held = 2000 + allocated + RANDOM.normal(size=STEPS)
    reserved = held + 600 + cached
    script.add(
        "device_memory",
        [
            {
                "time_ns": ns(SECONDS[i]),
                "step": i,
                "device": 0,
                "allocated_bytes": held[i] * MIB,
                "active_bytes": held[i] * MIB,
                "reserved_bytes": reserved[i] * MIB,
                "inactive_split_bytes": (20 + holes[i]) * MIB,
                "allocated_peak_bytes": (held.max(initial=0, where=i >= AT) + 500) * MIB,
                "allocation_count": 900 + np.floor(count[i]),
                "alloc_retry_count": np.floor(retries[i]),
                "pinned_allocated_bytes": (64 + pinned[i]) * MIB,
                "pinned_active_bytes": 32 * MIB,
            }
            for i in range(STEPS)
        ],
    )
    script.add("step", [{"time_ns": ns(SECONDS[i]), "step": i, "duration_ns": 250_000_000} for i in range(STEPS)])
    if device:
        own = reserved + CONTEXT + outside
        script.add(
            "device",
            [
                {
                    "time_ns": ns(SECONDS[i] + 0.1),
                    "device": 0,
                    "used_bytes": (own[i] + 100 + others[i]) * MIB,
                    "total_bytes": total * MIB,
                    "process_used_bytes": own[i] * MIB if attributed else np.nan,
                    "other_used_bytes": (100 + others[i]) * MIB if attributed else np.nan,
                }
                for i in range(0, STEPS, 2)
            ],
            ("node", 90, 4900),
        )
    resident = (3000 + resident + RANDOM.normal(size=STEPS)) * MIB
    return sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=resident, rss=resident)


def kinds(script):
    tables = script.tables()
    return [finding.kind for finding in (*find_device_growth(tables), *find_device_risk(tables))]


def only(script, kind):
    [found] = [f for f in find_device_growth(script.tables()) if f.kind == kind]
    assert len({evidence.name for evidence in found.evidence}) >= 2
    assert found.advice
    return found


@pytest.mark.parametrize(
    "healthy",
    [
        {},
        {
            "allocated": 2000 * WARM_UP,
            "count": 400 * WARM_UP,
            "outside": 300 * WARM_UP,
        },  # optimizer state, libraries
        {"allocated": 50 * SIZES, "cached": HIGH_WATER},  # batches of uneven size
        {"cached": HIGH_WATER, "pinned": HIGH_WATER, "resident": HIGH_WATER},
        {"allocated": 300 * (AT > 100), "count": 40 * (AT > 100), "outside": 200 * (AT > 100)},  # an evaluation
        {"allocated": 400 * (AT % 30 < 10), "count": 20 * (AT % 30 < 10)},
        {"retries": 1.0 * (AT > 3)},  # a library tried what fits
    ],
)
def test_what_is_no_growth(healthy):
    assert kinds(training(**healthy)) == []


def test_tensors_that_get_more_are_a_leak():
    leak = only(training(allocated=600 * RAMP, count=AT), "gpu-tensor-leak")
    assert leak.rate.value == pytest.approx(10 * MIB, rel=0.1)
    assert (leak.locus.device, leak.locus.pid) == (0, MAIN[1])
    assert "allocation_rise_count" in {evidence.name for evidence in leak.evidence}


def test_a_leak_names_the_lines_that_hold_it_or_how_to_learn_them(home):
    script = training(allocated=600 * RAMP, count=AT)
    [leak] = [f for f in diagnose(script.tables()).findings if f.kind == "gpu-tensor-leak"]
    assert leak.advice[-1].text == "`tidegauge snapshot RUN --kind growth`"
    ended = replace(finished(script).tables(), living=frozenset())
    [leak] = [f for f in diagnose(ended).findings if f.kind == "gpu-tensor-leak"]
    assert "--investigate" in leak.advice[-1].text

    run = Run(layout.create_run(home, name="train", argv=["train.py"]))
    frames = [["/lib/torch/nn/functional.py", 9, "linear"], [f"{Path.cwd()}/train.py", 40, "evaluate"]]
    for name, kept in (("first", 3), ("last", 8)):
        blocks = [{"size": MIB, "state": "active_allocated", "stack": 0}] * kept
        blocks += [{"size": 64 * MIB, "state": "active_allocated", "stack": 1}]  # the model
        segment = {"device": 0, "address": 1, "total_size": 2**30, "allocated_size": 2**20, "blocks": blocks}
        document = {"pid": 1, "segments": [segment], "stacks": [[0, 1], [0]], "frames": frames}
        (run.path / layout.SNAPSHOTS / f"{name}.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
        script.event(
            START_SECONDS + kept, "snapshot", what="allocator", path=f"snapshots/{name}.gz", pickle="p", step=kept
        )
    grown, problems = grown_lines(run, script.events)
    [leak] = [f for f in diagnose(replace(script.tables(), grown=grown)).findings if f.kind == "gpu-tensor-leak"]
    [held] = leak.held_by
    assert (held.site, held.grown_bytes, held.grown_count) == (f"{Path.cwd()}/train.py:40 evaluate", 5 * MIB, 5)
    assert (held.window, problems) == ("steps 3-8", [])


def graph(site, nodes, size):
    return GrownLine(
        site=site,
        callers=(),
        device="cpu",
        made_by="AddBackward0",
        grown_count=0,
        grown_bytes=size,
        grown_nodes_count=nodes,
    )


def test_what_autograd_keeps_is_told_by_the_graphs_that_grow():
    python = GrownLine(site="a.py:1", callers=(), device="", made_by="", grown_count=9, grown_bytes=MIB)
    lines = (python, graph("a.py:2", 2000, 400), graph("a.py:3", -40, MIB))
    told = ranked(Grown(event={}, window="steps 0-50", held_bytes={"cpu": 40 * MIB}, lines=lines), "cpu")
    assert [held.site for held in told] == ["a.py:2", "a.py:1", "a.py:3", "no line"]
    assert "2,000 nodes" in told[0].what
    assert told[-1].grown_bytes == 38 * MIB - 400
    known = ranked(Grown(event={}, window="steps 0-50", held_bytes={"cpu": 3 * MIB}, lines=lines), "cpu")
    assert [held.site for held in known] == ["a.py:1", "a.py:3"], "the lines explain it"


def test_larger_batches_are_not_called_a_leak():
    assert kinds(training(allocated=600 * RAMP))[0] == "cannot-tell"


def test_unknown_counts_are_said_to_be_missing():
    script = training(allocated=600 * RAMP, count=AT)
    script.parts["device_memory"][0]["allocation_count"] = np.nan
    assert kinds(script)[0] == "cannot-tell"


def test_the_cache_in_pieces_is_fragmentation():
    holes = only(training(cached=600 * RAMP, holes=500 * RAMP), "gpu-fragmentation")
    assert "inactive_split_rise_bytes" in {evidence.name for evidence in holes.evidence}


def test_expandable_segments_count_no_holes_but_failed_allocations_tell():
    script = training(cached=600 * RAMP, retries=AT // 40)
    script.parts["device_memory"][0]["inactive_split_bytes"] = 0
    assert "alloc_retry_steps_count" in {e.name for e in only(script, "gpu-fragmentation").evidence}


def test_memory_that_pytorch_does_not_hold():
    grown = only(training(outside=600 * RAMP), "gpu-non-pytorch-growth")
    assert grown.rate.value == pytest.approx(10 * MIB, rel=0.1)
    assert grown.locus.device == 0


def test_growth_of_somebody_elses_job_is_a_risk_and_no_growth_of_the_run():
    assert kinds(training(others=3000 * RAMP)) == ["gpu-oom-risk"]


def test_where_the_driver_names_no_process_it_cannot_be_told_whose_growth_it_is():
    assert kinds(training(others=600 * RAMP, attributed=False))[0] == "cannot-tell"


def test_a_pinned_cache_explains_the_growth_of_the_process():
    script = training(pinned=600 * RAMP, resident=600 * RAMP)
    only(script, "pinned-cache-growth")
    found = {finding.kind for finding in diagnose(script.tables()).findings}
    assert "pinned-cache-growth" in found
    assert "main-heap-leak" not in found
    more = training(pinned=600 * RAMP, resident=3000 * RAMP)
    assert "main-heap-leak" in {finding.kind for finding in diagnose(more.tables()).findings}


def test_a_pinned_cache_that_the_process_does_not_show_is_not_claimed():
    assert kinds(training(pinned=600 * RAMP)) == ["cannot-tell"]


def test_growth_towards_the_devices_memory_has_a_time_to_it():
    script = training(allocated=600 * RAMP, count=AT, total=5000)
    [risk] = find_device_risk(script.tables())
    left = 5000 - (2000 + 600 + CONTEXT + 100) - 500  # and the activations
    assert risk.eta.mid_seconds == pytest.approx(left / 10, rel=0.1)
    assert (risk.kind, risk.severity, risk.locus.device) == ("gpu-oom-risk", "critical", 0)
    assert risk.eta.mid_steps == pytest.approx(risk.eta.mid_seconds * 4, rel=0.01)
    script.living = frozenset()
    assert "was running out" in find_device_risk(finished(script).tables())[0].summary


def test_the_cache_is_no_demand():
    assert find_device_risk(training(cached=600 * RAMP, total=5000).tables()) == []


def test_the_whole_of_what_pytorch_counts_is_no_share_of_the_device():
    """NVML counts the memory that the driver keeps, PyTorch does not."""
    script = training(allocated=600 * RAMP, count=AT, total=5000)
    script.event(SECONDS[0], "cuda-device", device=0, total_bytes=4900 * MIB, allowed_ratio=1.0)
    [risk] = find_device_risk(script.tables())
    assert (risk.limit.name, risk.limit.value) == ("GPU 0", 5000 * MIB)


def test_a_share_of_the_device_is_met_before_the_device():
    script = training(allocated=600 * RAMP, count=AT, total=10_000)
    script.event(SECONDS[0], "cuda-device", device=0, total_bytes=10_000 * MIB, allowed_ratio=0.4)
    [risk] = find_device_risk(script.tables())
    assert (risk.limit.name, risk.limit.value) == ("its share of GPU 0", 4000 * MIB)
    left = 4000 - (2000 + 600) - 500  # without what is outside PyTorch
    assert risk.eta.mid_seconds == pytest.approx(left / 10, rel=0.1)


def test_memory_that_other_processes_take_is_told_as_theirs():
    [risk] = find_device_risk(training(others=600 * RAMP, total=5000).tables())
    assert "Other processes grow" in risk.summary
    assert 300 * MIB < risk.value_of("other_processes_rise_bytes") < 600 * MIB
    assert "another" in risk.advice[0].text


def test_a_library_meets_the_limit_while_pytorch_has_a_cache():
    """The driver knows nothing of PyTorch's cache, and refuses the library."""
    [risk] = find_device_risk(training(outside=600 * RAMP, total=5000).tables())
    left = 5000 - (2000 + 600 + CONTEXT + 600 + 100)  # with the cache of 600
    assert risk.eta.mid_seconds == pytest.approx(left / 10, rel=0.1)


def test_a_process_without_records_of_the_allocator_is_judged_by_the_driver():
    tables = training(allocated=600 * RAMP, total=5000).tables()
    none = {name: tables.streams[name].iloc[:0] for name in ("device_memory", "step")}
    tables = replace(tables, streams=tables.streams | none)
    [risk] = find_device_risk(tables)
    assert (risk.kind, risk.limit.name) == ("gpu-oom-risk", "GPU 0")
    assert 300 * MIB < risk.value_of("process_used_rise_bytes") < 600 * MIB
    assert "tidegauge run" in risk.advice[0].text
    assert find_device_growth(tables) == []  # what grows there is not known


def test_a_peak_of_each_step_comes_on_top_of_what_is_held():
    """Evaluations need 900 MiB for a while, every 60 steps."""
    tables = training(allocated=600 * RAMP, total=5000).tables()
    records = tables.streams["device_memory"]
    extra = 20 + 900 * (records["step"] % 60 == 30)
    records = records.assign(allocated_peak_bytes=records["allocated_bytes"] + extra * MIB)
    [risk] = find_device_risk(replace(tables, streams=tables.streams | {"device_memory": records}))
    left = 5000 - (2000 + 600 + CONTEXT + 100 + 900)
    assert risk.eta.low_seconds <= left / 10 + 15  # the next evaluation
    assert risk.eta.high_seconds >= left / 10


def test_holes_in_the_cache_cannot_be_given_back():
    [risk] = find_device_risk(training(cached=600 * RAMP, holes=600 * RAMP, total=5000).tables())
    assert risk.rate.value == pytest.approx(10 * MIB, rel=0.1)
    assert {"inactive_split_rise_bytes", "device_used_rise_bytes"} <= {e.name for e in risk.evidence}


def test_allocations_that_fail_again_and_again_on_a_full_device_are_a_risk():
    [risk] = find_device_risk(training(retries=AT // 40, total=3250).tables())
    assert (risk.kind, risk.severity, risk.eta) == ("gpu-oom-risk", "warning", None)
    assert find_device_risk(training(retries=AT // 40).tables()) == []
    assert kinds(training(retries=AT // 40, device=False)) == ["cannot-tell"]


MESSAGE = "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 3.42 GiB"


def out_of_memory(script, *, caught=False, requested=512, allocated=2500, reserved=2600, **fields):
    """The error in the last step, which ends the training unless it is caught."""
    end = SECONDS[-1] + 0.1
    told = {} if caught else {"type": "OutOfMemoryError", "message": MESSAGE}
    sizes = {"requested_bytes": requested, "limit_bytes": reserved + CONTEXT + 200, "free_bytes": 100}
    sizes |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
    script.event(
        end + 0.2,
        "cuda-oom",
        device=0,
        step=STEPS,
        caught=caught,
        errors_count=1,
        error_time_ns=ns(end),
        **{name: value * MIB for name, value in sizes.items()} | told | fields,
    )
    if not caught:
        script.event(end + 0.3, "exception", traceback="", **told)
        script.event(end + 0.4, "process-exit", lost_count=0)
        script.event(end + 0.5, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=1)
        script.living = frozenset()
    return script


def post_mortem(script):
    findings = diagnose(script.tables()).findings
    assert not {"crashed", "killed"} & {finding.kind for finding in findings}
    [found] = [finding for finding in findings if finding.kind == "cuda-oom"]
    as_json(found)
    return found, " | ".join(advice.text.split(":")[0].split(" (")[0] for advice in found.advice)


def test_an_error_that_ends_the_training_is_told_with_its_figures():
    found, advice = post_mortem(out_of_memory(training(total=3300)))
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert (found.severity, found.since_step, found.limit.value) == ("critical", STEPS, 3300 * MIB)
    assert figures["requested_bytes"] == 512 * MIB
    assert figures["allocated_bytes"] == 2500 * MIB
    assert figures["free_bytes"] == 100 * MIB
    assert figures["other_processes_bytes"] == 100 * MIB
    assert figures["outside_pytorch_bytes"] == CONTEXT * MIB
    assert advice == "Make a step smaller"


@pytest.mark.parametrize(("reserved", "fragmented"), [(3020, True), (3000, False)])
def test_expandable_segments_are_advised_only_if_the_cache_held_as_much_as_was_asked_for(reserved, fragmented):
    _, advice = post_mortem(out_of_memory(training(), reserved=reserved))
    assert ("expandable" in advice or "PYTORCH_CUDA_ALLOC_CONF" in advice) == fragmented


def test_where_the_driver_hides_processes_the_message_tells_what_the_others_hold():
    message = "Including non-PyTorch memory, this process has 3.03 GiB memory in use."
    script = out_of_memory(training(total=3300 + 2048, attributed=False), message=message, limit_bytes=5348 * MIB)
    figures = {evidence.name: evidence.value for evidence in post_mortem(script)[0].evidence}
    assert figures["other_processes_bytes"] == pytest.approx(2148 * MIB, rel=0.01)
    assert figures["outside_pytorch_bytes"] == pytest.approx(CONTEXT * MIB, rel=0.02)


def test_what_nobody_attributes_is_left_so():
    script = out_of_memory(training(total=3300, attributed=False))
    figures = {evidence.name: evidence.value for evidence in post_mortem(script)[0].evidence}
    assert figures["unattributed_bytes"] == (CONTEXT + 100) * MIB
    assert not {"outside_pytorch_bytes", "other_processes_bytes"} & set(figures)


def test_without_an_observer_the_message_tells_the_figures():
    """cudaMallocAsync has none (c10/cuda/CUDAMallocAsyncAllocator.cpp)."""
    message = (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 1.50 GiB\nRequested               : 300.00 MiB\n"
        "Device limit            : 2.00 GiB\nFree (according to CUDA): 200.00 MiB\n"
    )
    script = training(total=2048)
    script.event(SECONDS[-1] + 0.3, "cuda-oom", device=None, step=STEPS, caught=False, message=message)
    [found] = [finding for finding in diagnose(script.tables()).findings if finding.kind == "cuda-oom"]
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert (figures["requested_bytes"], figures["allocated_bytes"]) == (300 * MIB, 1536 * MIB)
    assert (found.limit.value, figures["free_bytes"]) == (2048 * MIB, 200 * MIB)


def test_a_share_of_the_device_that_binds_is_named():
    script = out_of_memory(training(), limit_bytes=2700 * MIB, free_bytes=70 * 1024 * MIB)
    found, advice = post_mortem(script)
    assert "may use 2.64 GiB of it" in found.summary
    assert advice.startswith("Give the process a larger share of the device")


def test_what_gains_most_is_advised_first():
    script = out_of_memory(training(others=FLAT + 9000, total=12300), reserved=3020, limit_bytes=12300 * MIB)
    assert post_mortem(script)[1].startswith("End the other processes on this device")


def test_growth_before_is_named_first():
    found, advice = post_mortem(out_of_memory(training(allocated=600 * RAMP, count=AT)))
    assert advice.startswith("Live tensors had been growing")
    assert "allocated_rise_bytes" in {evidence.name for evidence in found.evidence}


def test_other_processes_that_hold_what_was_missing_are_named():
    assert "End the other processes" in post_mortem(out_of_memory(training(others=FLAT + 900)))[1]


def test_the_largest_batch_so_far_is_named():
    script = training()
    sizes = [8 * MIB] * 20 + [90 * MIB]
    rows = [
        {"time_ns": ns(SECONDS[i]), "loader": 0, "epoch": 0, "index": i, "worker": 0, "payload_bytes": size}
        for i, size in enumerate(sizes)
    ]
    script.add("batch", rows)
    found, advice = post_mortem(out_of_memory(script))
    assert "Bound the size of a batch" in advice
    assert {e.name: e.value for e in found.evidence}["batch_payload_bytes"] == 90 * MIB


def test_the_phase_is_told_where_a_callback_tells_it():
    script = training().event(SECONDS[-1] - 1, "phase", phase="validation", epoch=0, step=3)
    assert "validation" in post_mortem(out_of_memory(script))[0].summary


def test_an_error_that_the_training_caught_is_information():
    found, _ = post_mortem(out_of_memory(training(), caught=True))
    assert found.severity == "info"
    assert "went on" in found.summary


def test_another_crash_stays_one():
    script = out_of_memory(training(), caught=True)
    script.event(SECONDS[-1] + 0.7, "exception", type="ValueError", message="boom", traceback="")
    script.event(SECONDS[-1] + 0.8, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=1)
    script.living = frozenset()
    assert {"crashed", "cuda-oom"} <= {finding.kind for finding in diagnose(script.tables()).findings}


def test_without_a_gpu_there_is_nothing_to_tell():
    assert kinds(Script()) == []


def test_host_memory_that_kept_tensors_take_follows_from_their_leak():
    script = training(allocated=6000 * RAMP, count=20 * AT, resident=60 * RAMP)
    kinds = {finding.kind: finding for finding in diagnose(script.tables()).findings}
    assert kinds["gpu-tensor-leak"].severity == "warning"
    assert kinds["main-heap-leak"].severity == "info"
    assert "gpu-tensor-leak" in kinds["main-heap-leak"].summary


def test_a_leak_of_the_host_beside_one_of_the_device_is_a_leak_of_its_own():
    script = training(allocated=600 * RAMP, count=AT, resident=300 * RAMP)
    warned = [finding.kind for finding in diagnose(script.tables()).findings if finding.severity == "warning"]
    assert {"gpu-tensor-leak", "main-heap-leak"} <= set(warned)


def test_the_largest_growth_comes_first():
    script = training(cached=900 * RAMP, holes=600 * RAMP, resident=100 * RAMP)
    leaks = [each.kind for each in diagnose(script.tables()).findings if each.severity == "warning"]
    assert leaks == ["gpu-oom-risk", "gpu-fragmentation", "main-heap-leak"]


def test_a_limit_that_was_met_is_no_forecast_any_more():
    script = out_of_memory(training(allocated=600 * RAMP, count=AT, total=5000))
    found = {finding.kind for finding in diagnose(script.tables()).findings}
    assert "cuda-oom" in found
    assert "gpu-oom-risk" not in found


def test_a_gpu_for_which_the_driver_stopped_answering_is_told_as_lost():
    tables = training(total=5000).tables()
    samples = tables.streams["device"]
    lost = samples["time_ns"] > samples["time_ns"].iloc[-6]
    silent = samples.assign(
        used_bytes=samples["used_bytes"].mask(lost), total_bytes=samples["total_bytes"].mask(lost)
    )
    told = diagnose(replace(tables, streams=tables.streams | {"device": silent})).findings
    [gone] = [each for each in told if "NVML stopped answering" in each.summary]
    assert (gone.kind, gone.severity, gone.locus.device) == ("cannot-tell", "warning", 0)
    assert not any("NVML" in each.summary for each in diagnose(tables).findings)
