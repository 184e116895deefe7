"""`tidegauge run --workers auto`: settings that change from pass to pass, in real trainings."""

import inspect
import json
import re
import sys

import pytest
from torch.utils.data import DataLoader

from collector.agent import loader_settings
from collector.diagnosis import diagnose, load_tables
from collector.diagnosis.loading.loaders import all_loops, loops
from collector.store import list_runs
from tests.conftest import REPOSITORY, run_bare
from training_harness.layout import WORKERS_AUTO, WORKERS_VARIABLE

SCRIPT = REPOSITORY / "tests" / "scripts" / "auto_workers.py"
SLOW_ROWS = REPOSITORY / "tests" / "scripts" / "slow_rows.py"
AUTO = {WORKERS_VARIABLE: WORKERS_AUTO}
NEEDS_IN_ORDER = pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="this torch has no in_order"
)


def passes(done):
    """Return the setting of each pass."""
    return re.findall(r"pass \d+: (\S+)", done.stderr)


def changes(run):
    return [json.loads(body) for body in run.events("loader-set")["body"]]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("inline", ["2,2", "0,0"]),
        ("held", ["2,4"]),
        ("seeded", ["2,1"]),
        ("workers", ["3,4", "1,2"]),
        ("persistent", ["2,4", "1,2"]),
    ],
)
def test_losses_stay_the_same_with_another_setting(run_attached, case, settings):
    run = run_attached(SCRIPT, case, *settings, environ=AUTO)
    bare = run_bare(SCRIPT, case, *settings)
    assert run.done.returncode == 0, run.done.stderr
    assert run.done.stdout == bare.stdout != ""
    assert passes(run.done)[1:] == [one.replace("0,0", "0,None") for one in settings]
    assert passes(bare)[1:] == [passes(bare)[0]] * len(settings)
    events = changes(run)
    assert [event["obstacle"] for event in events] == [None] * len(settings)
    assert [event["num_workers"] for event in events] == [int(one.partition(",")[0]) for one in settings]
    assert [event["epochs_count"] for event in events] == list(range(1, len(settings) + 1))
    # Each record belongs to one setting, and a setting from before has its number again.
    numbers = run.table("batch")["loader"].unique()
    assert list(numbers) == list(range(min(2, len(settings) + 1)))
    assert run.events("hook-disabled").empty


def test_loader_that_each_pass_creates_is_set_in_each_pass(run_attached):
    settings = ["2,2", "2,2", "0,0"]
    run = run_attached(SCRIPT, "recreated", *settings, environ=AUTO)
    assert run.done.stdout == run_bare(SCRIPT, "recreated", *settings).stdout != ""
    assert passes(run.done) == ["0,None", "2,2", "2,2", "0,None"]
    assert [(event["replaces"], event["loader"]) for event in changes(run)] == [(0, 1)] * 2
    batches = run.table("batch").sort_values("time_ns")
    assert list(batches["loader"]) == [0] * 15 + [1] * 30 + [0] * 15
    assert run.events("hook-disabled").empty


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("stream", "iterable"),
        ("eager", "its sampler, Eager, would begin once more"),
        ("file", "holds an open BufferedRandom"),
        ("lambda", "its batches cannot be pickled"),
        pytest.param("unordered", "their order would change", marks=NEEDS_IN_ORDER),
        ("persistent-held", "its persistent iterator is still in use"),
    ],
)
def test_loader_that_could_give_other_results_is_left_as_it_is(run_attached, case, why):
    run = run_attached(SCRIPT, case, "2,2", "2,2", environ=AUTO)
    bare = run_bare(SCRIPT, case, "2,2", "2,2")
    assert run.done.stdout == bare.stdout != ""
    assert len(set(passes(run.done))) == 1
    (event,) = changes(run)  # once, not in each pass
    assert why in event["obstacle"]
    assert event["loader"] == event["replaces"]


def test_loader_whose_new_workers_cannot_start_gets_its_own_setting_back(run_attached):
    run = run_attached(SCRIPT, "failing", "2,2", "2,2", environ=AUTO)
    assert run.done.returncode == 0, run.done.stderr
    assert passes(run.done) == ["1,2"] * 3
    assert run.done.stdout == run_bare(SCRIPT, "failing", "2,2", "2,2").stdout != ""
    (event,) = changes(run)  # nothing more is changed then
    assert event["loader"] == event["replaces"]
    for text in (event["obstacle"], *run.events("hook-disabled")["body"]):
        assert "Resource temporarily unavailable" in text


def test_augmentation_in_workers_gets_other_numbers(run_attached):
    """This is the limit that the line in the terminal names."""
    run = run_attached(SCRIPT, "noisy", "2,2", environ=AUTO)
    assert run.done.stdout != run_bare(SCRIPT, "noisy", "2,2").stdout


def test_without_the_option_nothing_is_set_and_the_setting_can_be_asked_for(run_attached):
    run = run_attached(SCRIPT, "inline", "2,2", "3,2")
    assert set(passes(run.done)) == {"0,None"}
    assert changes(run) == []
    answers = re.findall("recommended: (.*)", run.done.stderr)
    assert answers == [
        "None",
        "{'num_workers': 2, 'prefetch_factor': 2}",
        "{'num_workers': 3, 'prefetch_factor': 2}",
    ]
    assert len(run.events("setting-asked")) == 1


@pytest.fixture
def hasty(monkeypatch):
    """Lets the collector look for settings early, and often."""
    monkeypatch.setattr(loader_settings, "FIRST_SECONDS", 3.0)


def test_slow_loader_gets_the_setting_that_its_first_passes_suggest(home, under_tidegauge, hasty):
    done = under_tidegauge(
        home, "run", "--workers", "auto", "--", sys.executable, SLOW_ROWS, "set", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    count = done.stdout.count("pass ")
    assert 1 < count < 100, "it ends five passes after the change"
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    bare = run_bare(SLOW_ROWS, count)
    assert losses == [line for line in bare.stdout.splitlines() if line.startswith("loss")] != []

    (run,) = list_runs(home)
    tables = load_tables(run)
    (event,) = tables.events_of("loader-set")
    assert (event["replaced_num_workers"], event["obstacle"]) == (0, None)
    assert event["num_workers"] > 0
    line = f"loader, slow_rows.py:{event_of_loader(tables)['line']}, Rows, batch 4: "
    assert f"tidegauge: --workers auto: {line}num_workers={event['num_workers']}, " in done.stderr
    # The verdict is on the last setting, and each setting is a loop of its own.
    assert [loop.num_workers for loop in all_loops(tables)] == [0, event["num_workers"]]
    assert [loop.num_workers for loop in loops(tables)] == [event["num_workers"]]
    verdict = diagnose(tables)
    assert not {"inline-loading", "workers-not-reporting"} & {finding.kind for finding in verdict.findings}
    assert verdict.workers_reporting == (event["num_workers"],) * 2
    report = json.loads(under_tidegauge(home, "report", "--format", "json", "--settings").stdout)
    assert [one["loader"] for one in report["settings"]] == [event["loader"]]


def test_setting_is_undone_if_it_is_slower_than_predicted(home, under_tidegauge, hasty):
    done = under_tidegauge(
        home, "run", "--workers", "auto", "--", sys.executable, SLOW_ROWS, "worse", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    count = done.stdout.count("pass ")
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    bare = run_bare(SLOW_ROWS, count)
    assert losses == [line for line in bare.stdout.splitlines() if line.startswith("loss")] != []
    (run,) = list_runs(home)
    tables = load_tables(run)
    change, undo = tables.events_of("loader-set")
    assert (change["is_undo"], undo["is_undo"]) == (False, True)
    assert (undo["replaces"], undo["loader"]) == (change["loader"], change["replaces"])
    assert undo["num_workers"] == 0
    assert undo["measured"] < change["measured"]
    assert "its next pass goes back" in done.stderr
    assert [loop.num_workers for loop in loops(tables)] == [0]


def event_of_loader(tables):
    return tables.events_of("loader")[0]


def test_setting_that_the_training_asks_for_is_found_and_not_applied(home, under_tidegauge, hasty):
    done = under_tidegauge(home, "run", "--", sys.executable, SLOW_ROWS, "asked")
    assert done.returncode == 0, done.stderr
    (answer,) = re.findall("recommended: (.*)", done.stdout)
    assert re.fullmatch(r"{'num_workers': [1-9]\d*, 'prefetch_factor': \d}", answer)
    assert "--workers auto" not in done.stderr
    (run,) = list_runs(home)
    assert load_tables(run).events_of("loader-set") == []
    assert not [*run.path.glob("loader-settings*")]
