"""CUDA out-of-memory errors: what held the memory, and the advice that frees most of it.

The runs were recorded (tests/recorded_runs.py): PyTorch's own allocator made their records on simulated devices.
"""

from dataclasses import replace

import numpy as np
import pytest
from altered_gpu_runs import flat, with_allocator
from simulated_runs import MIB

from collector.diagnosis.deaths.cuda_oom import find_cuda_ooms
from collector.diagnosis.run.cuda_message import message_figures
from collector.diagnosis.verdict import diagnose
from collector.findings import as_json
from tests.recorded_runs import (
    only_rows,
    recorded,
    with_changed_event,
    with_columns,
    with_event,
    with_hidden_processes,
)
from training_harness.records import UNIT_BATCH, UNIT_PASS

#: Bytes of a process's context on a simulated device.
CONTEXT = 256 * MIB
#: Bytes of the other job in the run `another-job`.
OTHER_JOB = 400 * MIB + CONTEXT


def post_mortem(tables):
    findings = diagnose(tables).findings
    assert not {"crashed", "killed"} & {finding.kind for finding in findings}
    [found] = [finding for finding in findings if finding.kind == "cuda-oom"]
    as_json(found)
    return found, " | ".join(advice.text.split(":")[0].split(" (")[0] for advice in found.advice)


def error_of(tables):
    [error] = tables.events_of("cuda-oom")
    return error


def without_growth(tables, usual):
    """Return a run whose steps before the error all took as much, `usual` bytes."""
    rows = tables.streams["device_memory"]
    level, is_step = rows["allocated_bytes"].iloc[5], rows["step"] < error_of(tables)["step"]
    return with_allocator(
        tables,
        allocated_bytes=np.where(is_step, level, rows["allocated_bytes"]),
        allocated_peak_bytes=np.where(is_step, level + usual, rows["allocated_peak_bytes"]),
    )


def test_fatal_error_is_reported_with_its_figures():
    run = recorded("another-job")
    found, advice = post_mortem(run)
    error, total = error_of(run), run.streams["device"]["total_bytes"].max()
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert (found.severity, found.since_step, found.limit.value) == ("critical", error["step"], total)
    for name in ("requested_bytes", "allocated_bytes", "free_bytes"):
        assert figures[name] == error[name]
    assert figures["other_processes_bytes"] == OTHER_JOB
    assert figures["outside_pytorch_bytes"] == CONTEXT
    assert advice == "End the other processes on this device, or use another device | Make a step smaller"
    assert post_mortem(recorded("out-of-memory"))[1] == "Bound what a step takes | Make a step smaller"


@pytest.mark.parametrize(("lacking", "pools", "fragmented"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_expandable_segments_are_advised_only_if_the_cache_suffices(lacking, pools, fragmented):
    """Unused memory of private pools, as of CUDA graphs, serves no other allocation."""
    run = with_allocator(recorded("out-of-memory"), private_pool_bytes=pools)
    error = error_of(run)
    asked = error["reserved_bytes"] - error["allocated_bytes"] + lacking
    _, advice = post_mortem(with_changed_event(run, "cuda-oom", requested_bytes=asked, free_bytes=0))
    assert ("expandable" in advice or "PYTORCH_CUDA_ALLOC_CONF" in advice) == fragmented


def test_memory_of_hidden_processes_comes_from_the_error_message():
    run = with_hidden_processes(recorded("another-job"))
    figures = {evidence.name: evidence.value for evidence in post_mortem(run)[0].evidence}
    assert figures["other_processes_bytes"] == pytest.approx(OTHER_JOB, rel=0.02)
    assert figures["outside_pytorch_bytes"] == pytest.approx(CONTEXT, rel=0.02)


def test_unknown_memory_stays_unattributed():
    run = with_changed_event(
        with_hidden_processes(recorded("another-job")), "cuda-oom", message="CUDA out of memory."
    )
    figures = {evidence.name: evidence.value for evidence in post_mortem(run)[0].evidence}
    assert figures["unattributed_bytes"] == CONTEXT + OTHER_JOB
    assert not {"outside_pytorch_bytes", "other_processes_bytes"} & set(figures)


def test_figures_come_from_the_message_without_an_observer():
    """cudaMallocAsync has no observers (c10/cuda/CUDAMallocAsyncAllocator.cpp)."""
    run = recorded("malloc-async")
    error = error_of(run)
    assert "requested_bytes" not in error
    [found] = [finding for finding in diagnose(run).findings if finding.kind == "cuda-oom"]
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    said = message_figures(error["message"])
    for name in ("requested_bytes", "allocated_bytes", "free_bytes"):
        assert figures[name] == said[name] > 0
    assert found.limit.value == run.streams["device"]["total_bytes"].max()
    assert "Tensors held" in found.summary
    assert "does not say what held the rest" in found.summary


def test_process_share_that_binds_is_named():
    found, advice = post_mortem(recorded("share-met"))
    assert "may use 614 MiB of it" in found.summary
    assert advice.startswith("Give the process a larger share of the device")


def test_advice_with_the_largest_gain_is_first():
    """The cache held as much as was requested, and another job far more."""
    run = recorded("another-job")
    error = error_of(run)
    pieces = error["reserved_bytes"] - error["allocated_bytes"]
    assert 2 * pieces < OTHER_JOB
    advice = post_mortem(with_changed_event(run, "cuda-oom", requested_bytes=pieces))[1].split(" | ")
    assert [each.split()[0] for each in advice] == ["End", "Set", "Make"]


def test_growth_before_an_error_is_advised_on_first():
    found, advice = post_mortem(recorded("leak-to-the-end"))
    assert advice.startswith("See gpu-tensor-leak first")
    assert "allocated_rise_bytes" in {evidence.name for evidence in found.evidence}


def test_growth_is_that_of_gpu_tensor_leak_where_tensors_are_not_counted():
    """The allocator `cudaMallocAsync` does not count them."""
    run = with_allocator(recorded("leak-to-the-end"), allocation_count=np.nan)
    assert "gpu-tensor-leak" in {finding.kind for finding in diagnose(run).findings}
    assert post_mortem(run)[1].startswith("See gpu-tensor-leak first")


def test_growth_that_would_fill_a_larger_share_is_advised_on_first():
    run = recorded("leak-to-the-end")
    allowed = error_of(run)["reserved_bytes"]
    assert 2 * allowed <= run.streams["device"]["total_bytes"].max(), "the share could be doubled"
    found, advice = post_mortem(with_changed_event(run, "cuda-oom", limit_bytes=allowed, free_bytes=allowed))
    assert [each.split()[0] for each in advice.split(" | ")][:2] == ["See", "Give"]
    assert found.fault == "your code"


def test_unused_memory_that_is_larger_than_the_growth_is_advised_on_first():
    run = recorded("leak-to-the-end")
    error = error_of(run)
    unused = 2 * error["allocated_bytes"]
    fragmented = with_changed_event(run, "cuda-oom", reserved_bytes=error["allocated_bytes"] + unused, message=None)
    _, advice = post_mortem(fragmented)
    assert [each.split()[0] for each in advice.split(" | ")][:2] == ["Set", "See"]


def test_other_processes_are_blamed_only_if_they_hold_enough():
    run = recorded("another-job")
    for asked, is_enough in ((OTHER_JOB, True), (OTHER_JOB + 1, False)):
        advice = post_mortem(with_changed_event(run, "cuda-oom", requested_bytes=asked))[1]
        assert ("End the other processes" in advice) == is_enough


def test_unusually_large_batch_is_named():
    run = recorded("out-of-memory")
    usual = run.streams["batch"]["payload_bytes"].max()
    largest = with_columns(
        run,
        "batch",
        lambda rows: {"payload_bytes": np.where(rows["index"] == rows["index"].max(), 90 * usual, usual)},
    )
    found, advice = post_mortem(largest)
    assert "Bound the size of a batch" in advice
    assert {e.name: e.value for e in found.evidence}["batch_payload_bytes"] == 90 * usual


def test_long_batch_of_few_bytes_is_named_by_what_its_step_took():
    """Token ids take some KiB, the activations that they lead to hundreds of MiB."""
    longest = with_columns(
        recorded("out-of-memory"),
        "batch",
        lambda rows: {"payload_bytes": np.where(rows["index"] == rows["index"].max(), 90_000, 6_000)},
    )
    assert post_mortem(longest)[1].startswith("Bound the size of a batch")


def test_steps_that_grow_are_named_where_each_batch_is_little_larger_than_the_one_before():
    """A curriculum of lengths: the last batch alone explains little."""
    longer = with_columns(
        recorded("out-of-memory"), "batch", lambda rows: {"payload_bytes": 30 * MIB + 1000 * rows["index"]}
    )
    found, advice = post_mortem(longer)
    assert advice == "Bound what a step takes | Make a step smaller"
    assert found.fault == "your code"


def test_step_that_takes_more_than_any_before_is_named_if_no_batch_explains_it():
    """Its recorded steps took ever more; without that growth, only the last one is larger."""
    run, usual = recorded("out-of-memory"), 4 * MIB
    even = without_growth(run, usual)
    level = even.streams["device_memory"]["allocated_bytes"].iloc[0]
    found, advice = post_mortem(even)
    assert advice.startswith("Find what this step took")
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert figures["usual_step_bytes"] == usual < figures["allocated_since_step_bytes"]
    assert "no step before took more than 4 MiB" in found.summary
    _, advice = post_mortem(with_changed_event(even, "cuda-oom", allocated_bytes=int(level + usual), message=None))
    assert "Find what this step took" not in advice


def test_step_that_keeps_what_it_takes_is_like_those_before():
    run = recorded("leak-to-the-end")
    piece = 96 * MIB
    kept = with_allocator(
        run,
        allocated_bytes=lambda rows: rows["allocated_bytes"].iloc[0] + piece * np.arange(len(rows)),
        allocated_peak_bytes=lambda rows: rows["allocated_bytes"].iloc[0] + piece * np.arange(len(rows)),
    )
    last = int(kept.streams["device_memory"]["allocated_bytes"].iloc[-2])
    changes = {"allocated_bytes": last + piece, "reserved_bytes": last + piece, "message": None}
    found, advice = post_mortem(with_changed_event(kept, "cuda-oom", **changes))
    assert "Find what this step took" not in advice
    assert "no step before took more" not in found.summary


def test_long_request_to_a_model_is_named_though_no_batch_shows_it():
    """A loop of forward passes, without loader, backward pass and optimizer, has steps of its own."""
    run = without_growth(recorded("out-of-memory"), 4 * MIB)
    passes = with_columns(run, "step", lambda _: {"backward_ns": np.nan, "unit": UNIT_PASS})
    [found] = find_cuda_ooms(only_rows(passes, "batch", lambda rows: rows["index"] < 0))
    assert [advice.text.split()[0] for advice in found.advice] == ["Find", "Make"]


def test_batches_without_a_step_hold_memory():
    """An evaluation, or gradient accumulation, that keeps what each batch took."""
    run = only_rows(recorded("out-of-memory"), "step", lambda rows: rows["step"] < 6)
    found, advice = post_mortem(run)
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert advice.startswith("Let go of each batch's tensors before the next one")
    assert (figures["batches_since_step_count"], figures["batches_of_a_step_peak_count"]) == (10, 1)
    assert "10 batches came without a step, in which tensors took" in found.summary
    found, advice = post_mortem(only_rows(run, "step", lambda rows: rows["step"] < 0))
    assert not advice.startswith("Let go of each batch's tensors"), "no step shows how many batches are usual"
    assert "came without a step" not in found.summary


def test_first_evaluation_that_keeps_its_outputs_is_advised_to_let_go():
    """Its loader has no batches in any step to compare with: one batch does not explain what tensors took."""
    run = only_rows(recorded("out-of-memory"), "step", lambda rows: rows["step"] < 6)
    run = with_columns(run, "batch", lambda rows: {"loader": np.where(rows["index"] > 6, 1, 0)})
    found, advice = post_mortem(run)
    assert advice.startswith("Let go of each batch's tensors before the next one")
    assert found.advice[-1].text.startswith("Make the batches of this evaluation")
    assert "9 batches came without a step, in which tensors took" in found.summary
    level = run.streams["device_memory"]["allocated_bytes"].iloc[0]
    _, advice = post_mortem(with_changed_event(run, "cuda-oom", allocated_bytes=int(level), message=None))
    assert "Let go" not in advice, "one batch explains it"


def test_first_batch_of_another_loader_is_not_compared_with_those_of_the_training():
    run = recorded("out-of-memory")
    run = only_rows(run, "step", lambda rows: rows["step"] < rows["step"].max())
    last = run.streams["batch"]["index"].max()
    assert last > run.streams["step"]["step"].max()
    larger = with_columns(
        run,
        "batch",
        lambda rows: {
            "loader": np.where(rows["index"] == last, 1, 0),
            "payload_bytes": np.where(rows["index"] == last, 9, 1) * rows["payload_bytes"],
        },
    )
    found, advice = post_mortem(larger)
    assert "Bound the size of a batch" not in advice
    assert found.advice[-1].text.startswith("Make the batches of this loader smaller")
    assert "the first batch of a loader" in found.summary


def test_first_batch_of_the_only_loader_has_no_others_to_compare_with():
    run = recorded("out-of-memory")
    last = run.streams["batch"]["index"].max()
    found, _ = post_mortem(only_rows(run, "batch", lambda rows: rows["index"] == last))
    assert "It came with the first batch of a loader, of 128 KiB. " in found.summary


def test_first_batch_of_a_loader_that_is_made_again_is_compared_with_those_before():
    run = recorded("out-of-memory")
    last, before_last = run.streams["batch"]["index"].max(), run.streams["batch"]["time_ns"].iloc[-2]
    run = with_columns(
        run,
        "batch",
        lambda rows: {
            "loader": np.where(rows["index"] == last, 1, 0),
            "payload_bytes": np.where(rows["index"] == last, 90_000, 6_000),
        },
    )
    [setting] = run.events_of("loader")
    assert "the first batch of a loader" in post_mortem(run)[0].summary
    again = with_event(run, **{**setting, "loader": 1, "time_ns": int(before_last) + 1})
    found, advice = post_mortem(again)
    assert "Bound the size of a batch" in advice
    assert "the first batch of a loader" not in found.summary


def test_process_that_never_went_backward_needs_no_accumulation():
    run = with_columns(recorded("out-of-memory"), "step", lambda _: {"backward_ns": np.nan, "unit": UNIT_BATCH})
    assert post_mortem(run)[0].advice[-1].text.startswith("Make the batches of this evaluation")


def test_growth_of_one_tensor_is_advised_on_first():
    run = with_allocator(recorded("leak-to-the-end"), allocation_count=flat("allocation_count"))
    assert post_mortem(run)[1].startswith("Find what grew")


def test_last_batch_that_the_loop_still_holds_is_no_growth_of_its_own_where_steps_grow():
    run = recorded("out-of-memory")
    kept = 2**20 * run.streams["device_memory"]["step"].clip(upper=40) * 4
    held = with_allocator(
        run,
        allocated_bytes=lambda rows: rows["allocated_bytes"] + kept,
        allocated_peak_bytes=lambda rows: rows["allocated_peak_bytes"] + kept,
        allocation_count=flat("allocation_count"),
    )
    found, advice = post_mortem(held)
    assert found.value_of("allocated_rise_bytes") > 16 * MIB
    assert advice == post_mortem(run)[1]


def test_retry_in_the_handler_of_an_error_is_advised_against():
    run = recorded("out-of-memory")
    assert "Retry after" not in post_mortem(run)[1]
    assert post_mortem(with_changed_event(run, "cuda-oom", in_handler=True))[1].startswith("Retry after")


def test_error_of_an_optimizer_is_no_matter_of_the_batch():
    run = recorded("out-of-memory")
    last = int(run.streams["step"]["step"].max())
    in_step = only_rows(run, "step", lambda rows: rows["step"] < last)
    in_optimizer = only_rows(in_step, "batch", lambda rows: rows["index"] <= last)
    failed = with_changed_event(in_optimizer, "cuda-oom", step=last)
    assert post_mortem(failed)[1] == "Take an optimizer whose step needs less"

    def with_copy(rows):
        return rows["allocated_bytes"] + (rows["step"] == last) * 300 * MIB

    found, advice = post_mortem(with_allocator(failed, allocated_bytes=with_copy))
    assert "When the optimizer began, tensors held 300 MiB more than at the step before" in found.summary
    assert advice.startswith("Let go of what was made since the step before, or keep it on the CPU. Usual")
    assert advice.endswith("Take an optimizer whose step needs less")
    assert (found.fault, found.advice[0].expected) == ("your code", "300 MiB become free")


def test_error_that_is_raised_again_has_the_figures_of_its_message():
    """Attempts after it failed as well, so the observer saw another one last."""
    run = recorded("out-of-memory")
    error = error_of(run)
    changes = {"allocated_bytes": error["allocated_bytes"] + 90 * MIB, "free_bytes": 0, "errors_count": 4}
    found, advice = post_mortem(with_changed_event(run, "cuda-oom", **changes))
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert advice.startswith("Retry after"), "it was alive during the attempts"
    for name in ("allocated_bytes", "free_bytes", "reserved_bytes"):
        assert figures[name] == pytest.approx(error[name], rel=0.01)
    assert figures["other_processes_bytes"] == 0


def test_script_that_exits_while_it_handles_the_error_died_of_it():
    run = recorded("out-of-memory")
    error = error_of(run)
    told = {"handled": f"OutOfMemoryError: {error['message']}", "message": "exit status 3", "status": 3}
    run = replace(run, events=[event for event in run.events if event["kind"] != "exception"])
    run = with_changed_event(run, "cuda-oom", caught=None, message=None, type=None)
    found, _ = post_mortem(with_event(run, "exit-message", time_ns=error["time_ns"] + 1, **told))
    assert found.severity == "critical"
    assert found.summary.endswith("The script caught the error and ended.")


def test_growth_outside_pytorch_before_an_error_is_advised_on_first():
    run = recorded("library-growth")
    device = int(run.streams["device_memory"]["device"].iloc[0])
    last_ns = int(run.streams["step"]["time_ns"].iloc[-1])
    error = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes"), 64 * MIB)
    died = with_event(run, "cuda-oom", time_ns=last_ns, device=device, step=1, caught=False, free_bytes=0, **error)
    [found] = [each for each in diagnose(died).findings if each.kind == "cuda-oom"]
    assert found.advice[0].text.startswith("Fix gpu-non-pytorch-growth first")


def test_a_model_that_never_fitted_is_no_matter_of_the_batch_alone():
    run = recorded("out-of-memory")
    first_ns = int(min(run.stream(name)["time_ns"].min() for name in ("step", "batch")))
    assert "Make a step smaller" in post_mortem(run)[1]
    found, _ = post_mortem(with_changed_event(run, "cuda-oom", error_time_ns=first_ns - 1))
    assert "if the model itself does not fit" in found.advice[-1].text


def test_error_names_the_phase_that_a_callback_reported():
    run = recorded("out-of-memory")
    before_ns = error_of(run)["error_time_ns"] - 10**6
    told = with_event(run, "phase", time_ns=before_ns, phase="validation", epoch=0, step=3)
    assert "validation" in post_mortem(told)[0].summary


def test_device_on_which_dataparallel_gathers_is_named():
    run = recorded("two-devices")
    last_ns = int(run.streams["step"]["time_ns"].iloc[-1]) + 1
    died = {"time_ns": last_ns, "step": 40, "caught": False, "requested_bytes": 90 * MIB, "free_bytes": 0}
    found = {}
    for device in (0, 1):  # the second one holds more there
        [found[device]] = [
            each
            for each in diagnose(with_event(run, "cuda-oom", device=device, **died)).findings
            if each.kind == "cuda-oom"
        ]
    advice = {device: [each.text for each in one.advice] for device, one in found.items()}
    assert any(text.startswith("Use DistributedDataParallel") for text in advice[1])
    assert not any(text.startswith("Use DistributedDataParallel") for text in advice[0])
    assert "on the other devices of DataParallel" in found[1].summary


def test_line_that_took_the_memory_is_named():
    told = with_changed_event(recorded("out-of-memory"), "cuda-oom", site="/home/me/train.py:37, in fit")
    assert " at train.py:37, in fit: " in post_mortem(told)[0].summary


def test_error_without_figures_has_those_of_the_allocator():
    """Without NVML PyTorch fails while it composes its message, before its observers see the error."""
    run = recorded("out-of-memory")
    said = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1'
    record = run.streams["device_memory"].iloc[-1]
    names = ("device", "error_time_ns", "requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes")
    lacking = dict.fromkeys((*names, "reserved_bytes"))
    found, _ = post_mortem(with_changed_event(run, "cuda-oom", message=said, type="RuntimeError", **lacking))
    figures = {evidence.name: evidence.value for evidence in found.evidence}
    assert figures["reserved_bytes"] == record["reserved_bytes"]
    assert figures["allocated_peak_bytes"] == record["allocated_peak_bytes"]
    assert found.limit is not None
    assert "PyTorch's error has no figures. The allocator had reserved" in found.summary


@pytest.mark.parametrize("caught", [True, None], ids=["went on", "ended well soon after it"])
def test_caught_error_is_information(caught):
    found, _ = post_mortem(with_changed_event(recorded("caught-errors"), "cuda-oom", caught=caught))
    assert found.severity == "info"
    assert "went on" in found.summary


@pytest.mark.parametrize(("caught", "severity"), [(False, "critical"), (None, "warning")])
def test_error_that_ends_a_thread_is_none_that_was_caught(caught, severity):
    """The main thread goes on, and the command may end with exit status 0."""
    ended = with_changed_event(recorded("caught-errors"), "command-exit", exit_status=0)
    end_ns = int(ended.streams["step"]["time_ns"].iloc[-1]) + 1
    fields = {"time_ns": end_ns, "error_time_ns": end_ns, "thread": "trainer", "caught": caught}
    found, _ = post_mortem(with_changed_event(ended, "cuda-oom", **fields))
    assert (found.severity, "The error ended the thread 'trainer'." in found.summary) == (severity, True)
    earlier = with_changed_event(ended, "cuda-oom", **fields | {"time_ns": end_ns - 10**9, "caught": False})
    assert post_mortem(earlier)[0].severity == "warning", "another thread trains"


def test_error_that_was_caught_in_the_first_step_does_not_doubt_the_model():
    """The training went on, so the model fits."""
    run = recorded("caught-errors")
    first_ns = run.streams["step"]["time_ns"].iloc[0] - 1
    at_first = with_changed_event(run, "cuda-oom", caught=True, error_time_ns=first_ns)
    assert post_mortem(at_first)[1].endswith("Make a step smaller")
    assert post_mortem(with_changed_event(at_first, "cuda-oom", caught=False))[1].endswith("No step came before it")


@pytest.mark.parametrize(("reserved_bytes", "said_of_it"), [(8 * MIB, "8 MiB"), (None, "a part of the device")])
def test_worker_with_a_small_or_unknown_share_of_the_device_needs_no_smaller_step(reserved_bytes, said_of_it):
    run = only_rows(
        with_hidden_processes(recorded("another-job")), "device_memory", lambda rows: rows["device"] < 0
    )
    figures = {"allocated_bytes": reserved_bytes, "reserved_bytes": reserved_bytes, "requested_bytes": None}
    said = "Caught OutOfMemoryError in DataLoader worker process 0.\nCUDA out of memory."
    found, advice = post_mortem(with_changed_event(run, "cuda-oom", message=said, **figures))
    assert found.locus.role == "worker"
    assert advice == "Keep CUDA out of the DataLoader workers"
    assert said_of_it in found.advice[0].expected
    assert found.fault == "your code"


def test_state_that_the_model_had_loaded_is_the_first_thing_to_release():
    run = with_changed_event(recorded("another-job"), "cuda-oom", loaded_state_bytes=900 * MIB)
    found, advice = post_mortem(run)
    assert advice.startswith("Load the checkpoint on the CPU")
    assert "900 MiB of the tensors were a state" in found.summary
    assert found.value_of("loaded_state_bytes") == 900 * MIB


def test_errors_that_were_caught_are_counted():
    run = recorded("caught-errors")
    count = sum(error["errors_count"] for error in run.events_of("cuda-oom"))
    assert f"it caught {count} such errors" in post_mortem(run)[0].summary
