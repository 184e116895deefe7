"""Settings that the collector hands to the training, from verdicts and events that are written here."""

import json
import socket

import pytest

from collector.agent.loader_settings import FIRST_SECONDS, LoaderSettings
from collector.store.runs.run import Run
from training_harness.layout import loader_settings_path

HOST = socket.gethostname()
SECOND = 1_000_000_000


def found(loader=0, *, pid=7, rank=None, host=HOST, workers=4, rate=40.0, is_change=True):
    """Return a verdict's setting for a loader."""
    expected = {"batches_per_second": 100.0, "low": 90.0, "high": 110.0} if is_change else None
    return {
        "host": host,
        "pid": pid,
        "start_ticks": 11,
        "rank": rank,
        "loader": loader,
        "loader_name": "train_loader, main.py:37",
        "num_workers": workers,
        "prefetch_factor": 2 if workers else None,
        "is_change": is_change,
        "reason": None if is_change else "no setting that fits is predicted to be 5% faster",
        "batches_per_second": rate,
        "expected": expected,
    }


def changed(*, loader, replaces, workers, before, is_undo=False, obstacle=None, pid=7):
    """Return the training's event about the setting of a loader."""
    return {
        "kind": "loader-set",
        "host": HOST,
        "pid": pid,
        "start_ticks": 11,
        "loader": loader,
        "replaces": replaces,
        "num_workers": workers,
        "prefetch_factor": 2 if workers else None,
        "replaced_num_workers": before,
        "replaced_prefetch_factor": 2 if before else None,
        "epochs_count": 1,
        "is_undo": is_undo,
        "obstacle": obstacle,
        "measured": 40.0,
        "expected": {"batches_per_second": 100.0, "low": 90.0, "high": 110.0},
    }


@pytest.fixture
def settings(tmp_path):
    one = LoaderSettings(is_auto=True)
    one.begin(Run(tmp_path))
    return one


def written(tmp_path, pid=7):
    """Return number of a loader -> (num_workers, is_undo), as a training process reads it."""
    path = loader_settings_path(tmp_path, HOST)
    of_process = json.loads(path.read_text()).get(f"{HOST}.{pid}.11", {}) if path.exists() else {}
    return {int(number): (one["num_workers"], one["is_undo"]) for number, one in of_process.items()}


def test_setting_of_a_verdict_is_written_for_this_host_alone(settings, tmp_path):
    settings.note([found(), found(1, workers=None), found(2, host="another")])
    settings.tick(0)
    assert written(tmp_path) == {0: (4, False)}
    settings.run_ended()
    assert written(tmp_path) == {}


@pytest.mark.parametrize(("rate", "setting"), [(39.0, (0, True)), (41.0, (4, False))])
def test_setting_is_given_up_if_the_throughput_falls(settings, tmp_path, capfd, rate, setting):
    settings.note([found()])
    settings.tick(0)
    settings.note_event(changed(loader=1, replaces=0, workers=4, before=0))
    settings.note([found(1, workers=None, rate=None)])  # too few batches so far
    settings.tick(SECOND)
    assert written(tmp_path)[1] == (4, False)
    settings.note([found(1, workers=8, rate=rate)])  # one change is enough
    settings.tick(2 * SECOND)
    # A DataLoader that each pass creates has the number from before again.
    assert written(tmp_path) == {0: setting, 1: setting}
    settings.note([found(0, workers=4)])
    settings.tick(2 * SECOND)
    assert written(tmp_path)[0] == setting
    settings.note_event(changed(loader=0, replaces=1, workers=0, before=4, is_undo=True))
    settings.note([found(0, workers=4)])
    settings.tick(3 * SECOND)
    assert written(tmp_path)[0] == (0, True), "the loader keeps what it had at first"
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first == (
        "tidegauge: --workers auto: train_loader, main.py:37: num_workers=4, prefetch_factor=2 from pass 2 on, not "
        "num_workers=0. Expected: 100 batches/s (90-110), measured before: 40. Same samples, same order; random "
        "augmentation differs"
    )
    assert f"{rate:g} batches/s with num_workers=4, prefetch_factor=2, 40 before" in second
    assert second.endswith("goes back") == (rate < 40)


def test_ranks_have_one_line(settings, tmp_path, capfd):
    settings.note([found(pid=7, rank=0), found(pid=8, rank=1)])
    settings.tick(0)
    for pid in (7, 8):
        assert written(tmp_path, pid) == {0: (4, False)}
        settings.note_event(changed(loader=1, replaces=0, workers=4, before=0, pid=pid))
    assert capfd.readouterr().err.count("num_workers=4") == 1


def test_loader_that_stays_as_it_is_is_named_with_the_reason(settings, capfd):
    settings.note([found(workers=2, is_change=False)])
    settings.tick(0)
    settings.note([found(1)])
    settings.tick(1)
    settings.note_event(changed(loader=1, replaces=1, workers=4, before=0, obstacle="its dataset is odd"))
    stays, obstacle = capfd.readouterr().err.splitlines()
    assert stays.endswith(
        "num_workers=2, prefetch_factor=2 stays, since no setting that fits is predicted to be 5% faster"
    )
    assert obstacle.endswith("num_workers=0 stays, not num_workers=4, prefetch_factor=2, since its dataset is odd")


def test_verdicts_come_less_and_less_often_until_a_setting_changes(settings):
    def due(seconds):
        return [second for second in seconds if settings.tick(second * SECOND)]

    first = int(FIRST_SECONDS)
    assert due(range(20 * first)) == [first, 2 * first, 4 * first, 8 * first, 16 * first]
    settings.note_event(changed(loader=1, replaces=0, workers=4, before=0))
    assert due(range(20 * first, 23 * first)) == [21 * first, 22 * first]


def test_loader_that_each_pass_creates_does_not_hasten_verdicts(settings):
    first = int(FIRST_SECONDS)
    due = []
    for second in range(20 * first):
        if second % 5 == 0:
            settings.note_event(changed(loader=1, replaces=0, workers=4, before=0))
        due += [second] * settings.tick(second * SECOND)
    assert due == [first, 2 * first, 4 * first, 8 * first, 16 * first]


def test_without_the_option_settings_are_found_once_the_training_asks(tmp_path, capfd):
    settings = LoaderSettings()
    settings.begin(Run(tmp_path))
    assert not any(settings.tick(second * SECOND) for second in range(100))
    settings.note_event({"kind": "setting-asked"})
    assert any(settings.tick(second * SECOND) for second in range(100, 200))
    settings.note([found(), found(1, is_change=False)])
    settings.tick(200 * SECOND)
    assert written(tmp_path) == {0: (4, False), 1: (4, False)}
    assert capfd.readouterr().err == ""
