"""Exceptions that a training caught from its DataLoaders, from the events that its process wrote."""

from __future__ import annotations

import pytest
from simulated_runs import MAIN, START_SECONDS, ns, start_training

from collector.diagnosis.loading.caught_errors import find_caught_errors

SITE = "/home/me/dataset.py:41, in __getitem__"


def failed(
    script, seconds, count, *, name="ValueError", loader=0, in_worker=True, site=SITE, message="no such file"
):
    fields = {"type": name, "message": message, "site": site, "in_worker": in_worker, "count": count}
    return script.event(START_SECONDS + seconds, "loader-error", loader=loader, **fields)


def test_the_newest_count_of_each_type_line_and_loader_makes_a_finding():
    script = start_training()
    for seconds, count in ((1, 1), (2, 2), (9, 37)):
        failed(script, seconds, count, message="no such file" if count < 37 else None)
    failed(script, 3, 1, name="KeyError", in_worker=False, loader=1)
    first, second = find_caught_errors(script.tables())
    assert first.summary == (
        "A worker of loader 0 raised ValueError at dataset.py:41, in __getitem__ 37 times, and the training caught "
        "it: those batches are missing."
    )
    assert {fact.name: fact.value for fact in first.evidence}["exception"] == "no such file"
    assert second.summary.startswith("Loader 1 raised KeyError at dataset.py:41, in __getitem__ once")
    assert second.value_of("caught_errors_count") == 1


@pytest.mark.parametrize(("count", "caught"), [(1, None), (5, 4)])
@pytest.mark.parametrize("end", ["ValueError", "RuntimeError", "exit"])
def test_the_error_that_ended_the_training_was_not_caught(end, count, caught):
    """Torch raises RuntimeError for an exception of many arguments; a script may raise its own, or exit."""
    script = failed(start_training(), 5, count)
    if end == "exit":
        script.event(START_SECONDS + 6, "command-exit", ("node", 90, 9), command_pid=MAIN[1], exit_status=1)
    else:
        script.event(START_SECONDS + 5, "exception", MAIN, type=end, message="failed", site="train.py:9, in main")
    found = find_caught_errors(script.tables())
    assert [finding.value_of("caught_errors_count") for finding in found] == ([] if caught is None else [caught])


def test_an_uncaught_error_after_another_batch_takes_nothing_from_the_count():
    script = failed(start_training(), 5, 3, in_worker=False)
    script.add("batch", [{"time_ns": ns(START_SECONDS + 5.5), "loader": 0}])
    script.event(START_SECONDS + 6, "exception", MAIN, type="ValueError", message="odd", site="train.py:9, in main")
    (finding,) = find_caught_errors(script.tables())
    assert finding.value_of("caught_errors_count") == 3


@pytest.mark.parametrize(("seconds", "thread"), [(5.1, "feed"), (4.0, None), (3600.0, None)])
def test_an_error_that_ended_the_thread_that_iterates_is_a_warning(seconds, thread):
    script = failed(start_training(), 5, 1, in_worker=False)
    script.event(START_SECONDS + seconds, "thread-exception", MAIN, thread="feed", type="ValueError", message="odd")
    (finding,) = find_caught_errors(script.tables())
    assert finding.severity == ("warning" if thread else "info")
    assert ("thread feed ended with it: it takes no more batches" in finding.summary) == bool(thread)
    assert ("the training caught it" in finding.summary) == (thread is None)
