"""Ranks with different numbers of batches, where a collective hangs or fails."""

import pytest
from simulated_runs import MAIN, START_SECONDS, jittered, simulate, start_training
from stack_events import IN_BACKWARD, POLL, add_stacks, process

from collector.diagnosis.verdict import diagnose

LAUNCHER = ("node", 90, 4900)
OTHER_RANK = ("node", 200, 5100)
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:5798"


def ranks(*batches, dataset_length=None):
    """Return a training of two ranks in its first epoch; the first has left its loop."""
    script = None
    for rank, (key, number) in enumerate(zip((MAIN, OTHER_RANK), batches, strict=True)):
        run = {"workers": 0, "prefetch": 0, "service": jittered(0.01), "consumer": jittered(0.05)}
        length = {} if dataset_length is None else {"dataset_length": dataset_length[rank], "batch_size": 4}
        script = start_training(script, key=key, rank=rank)
        script = simulate(batches=number, script=script, key=key, rank=rank, **run, **length)
    return script


def hang(script):
    add_stacks(script, *(process(key, IN_BACKWARD, POLL) for key in (MAIN, OTHER_RANK)), silent=(MAIN, OTHER_RANK))
    return next(finding for finding in diagnose(script.tables()).findings if finding.kind == "hang")


def test_hang_of_ranks_with_uneven_shards_names_the_batches_of_each():
    found = hang(ranks(140, 141, dataset_length=(560, 800)))
    assert "Rank 0 has 140 batches in an epoch, rank 1 has 200" in found.summary
    assert "DistributedSampler" in found.advice[0].text
    assert "model.join()" in found.advice[0].text
    assert (found.value_of("fewest_batches_count"), found.value_of("most_batches_count")) == (140, 200)


def test_datasets_without_a_length_count_as_far_as_they_were_read():
    script = ranks(140, 141)
    script.event(START_SECONDS + 50, "workers-ended", MAIN, 0, loader=0, epoch=0, begun_ns=0)
    assert "Rank 0 has 140 batches in an epoch, rank 1 has 141" in hang(script).summary


def test_a_pass_that_an_exception_leaves_is_not_over():
    script = ranks(140, 141)
    at = START_SECONDS + 50
    script.event(at, "workers-ended", MAIN, 0, loader=0, epoch=0, begun_ns=0)
    script.event(at + 0.002, "exception", MAIN, 0, type="KeyboardInterrupt", message="", traceback="…")
    assert "batches in an epoch" not in hang(script).summary


@pytest.mark.parametrize("lengths", [(800, 800), None])
def test_ranks_that_are_not_equally_far_are_not_uneven(lengths):
    assert "batches in an epoch" not in hang(ranks(140, 141, dataset_length=lengths)).summary


@pytest.mark.parametrize(("message", "names"), [(CLOSED, True), ("the loss is not finite", False)])
def test_a_collective_that_fails_names_the_batches_of_each(message, names):
    script = ranks(140, 141, dataset_length=(560, 800))
    script.living = frozenset()
    end, script.now_seconds = script.now_seconds + 1, script.now_seconds + 2
    script.event(end - 0.5, "exception", OTHER_RANK, 1, type="RuntimeError", message=message, traceback="…")
    script.event(end, "command-exit", LAUNCHER, command_pid=MAIN[1], exit_status=1)
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "crashed"]
    assert ("Rank 0 has 140 batches in an epoch, rank 1 has 200" in found.summary) == names
    assert ("DistributedSampler" in found.advice[0].text) == names


def test_a_collective_that_timed_out_is_the_cause_and_names_what_another_rank_did():
    """Rank 0 evaluates; rank 1 waits for it for 3 s and raises, and the launcher ends rank 0 by SIGTERM."""
    script = ranks(140, 100, dataset_length=(800, 800))
    script.living = frozenset()
    raised = script.parts["batch"][0]["time_ns"].iloc[-1] / 1e9
    script.now_seconds = raised + 2
    message = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    )
    script.event(raised, "exception", OTHER_RANK, 1, type="RuntimeError", message=message, traceback="…")
    codes = f"exitcode  : -15 (pid: {MAIN[1]})  (SIGTERM)\n exitcode  : 1 (pid: {OTHER_RANK[1]})"
    script.event(raised + 1, "exception", LAUNCHER, type="ChildFailedError", message=codes, traceback="…")
    script.event(raised + 1.5, "command-exit", LAUNCHER, command_pid=LAUNCHER[1], exit_status=1)
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.group == "death"]
    assert (found.kind, found.locus.rank) == ("crashed", 1)
    assert "gloo: Timed out waiting 3000ms" in found.summary
    assert "within the timeout of 3 s. Meanwhile rank 0 (pid 100) got" in found.summary
    assert found.advice[0].text.startswith("Let no rank wait that long: let all ranks share")
