"""The page Runs: its table, the notes on a run, deletion, and the history of a command."""

from datetime import UTC
from types import SimpleNamespace

import make_run as runs
import pytest
from dashboard_pages import figures, open_view, texts

from app.runtime import visitors
from app.views.runs import Facts, edit_between, memory_unit, parse_tags, run_rows
from collector.diagnosis import diagnose, load_tables
from collector.findings import identity
from collector.report.known import change_known
from collector.report.listing import ListEntry
from collector.report.results import Result, ResultFinding, save_result
from collector.store import Edit, annotate
from collector.store.runs.run import Run
from training_harness import layout

SLOW = ResultFinding(kind="workers-too-slow", place="train_loader", severity="warning")


@pytest.fixture
def editor(monkeypatch):
    monkeypatch.setattr("app.runtime.visitors.may_edit", lambda: True)


def judged_run(home, number, *, commit="a", wait=0.1, findings=(), name="train"):
    run = Run(layout.create_run(home, name=name, argv=["python", "train.py"], tags={"lr": "0.1"}))
    manifest = run.manifest
    anchor = manifest["anchors"][manifest["host"]]
    anchor["wall_ns"] += number * 10**9
    layout.write_manifest(
        run.path, {**manifest, "git_commit": commit * 40, "git_dirty": False, "end_time_ns": 1, "exit_status": 0}
    )
    result = Result(
        status="finished",
        steps=100,
        duration_seconds=60.0,
        throughput=100.0 + number % 2,
        throughput_unit="samples/second",
        data_wait_ratio=wait,
        host_peak_bytes=2.0**30,
        memory_bytes=(1.0, 2.0, 3.0),
        findings=findings,
    )
    save_result(run, result)
    return run


def choose(at, *rows):
    at.session_state[at.dataframe[0].key] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
    at.run()
    assert not at.exception, at.exception
    return at


def labels(at):
    return [link.proto.label for link in at.get("page_link")]


def test_home_without_runs_says_how_to_start_one(monkeypatch, tmp_path):
    at = open_view(monkeypatch, tmp_path, "runs")
    assert "No runs yet" in texts(at)
    assert "tidegauge run -- python" in texts(at)


def test_one_run_has_a_row_and_no_history_yet(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.HEALTHY)
    at = open_view(monkeypatch, tmp_path, "runs")
    (row,) = at.dataframe[0].value.to_dict("records")
    assert (row["Run"], row["Status"], row["Gravest finding"]) == ("healthy", "ended", "—")
    assert "four are needed" in texts(at)
    assert "0 of 1 run · " in texts(at)  # it has not ended well
    assert "has no verdict yet; `tidegauge report RUN` makes it" in texts(at)
    assert "needs attention" not in texts(at)
    assert not figures(at)
    assert at.selectbox[0].label == "Command"  # no controls of one run


def test_a_run_that_goes_on_or_is_damaged_is_listed(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    broken = runs.make_run(tmp_path, runs.HEALTHY)
    (broken / layout.MANIFEST).write_text("{")
    at = open_view(monkeypatch, tmp_path, "runs")
    assert set(at.dataframe[0].value["Status"]) == {"running", "damaged"}


def test_search_finds_names_tags_commands_and_findings(monkeypatch, tmp_path):
    first, second = judged_run(tmp_path, 0), judged_run(tmp_path, 1, findings=(SLOW,))
    annotate(first, Edit(name="baseline", add={"change": "none"}))
    for words, expected in {
        "baseline": {first.run_id},
        "change=none train.py": {first.run_id},
        "too-slow": {second.run_id},
        "train": {first.run_id, second.run_id},
    }.items():
        at = open_view(monkeypatch, tmp_path, "runs", search=words)
        assert set(at.dataframe[0].value["Id"]) == expected
    at = open_view(monkeypatch, tmp_path, "runs", search="nothing like it")
    assert "No run matches" in texts(at)


def test_trials_of_tune_are_shown_on_request(monkeypatch, tmp_path):
    own = judged_run(tmp_path, 0)
    trial = Run(layout.create_run(tmp_path, name="tune-as it is", argv=["python", "train.py"], is_trial=True))
    at = open_view(monkeypatch, tmp_path, "runs")
    assert list(at.dataframe[0].value["Id"]) == [own.run_id]
    (toggle,) = at.toggle
    assert toggle.label == "Trials of `tidegauge tune` (1)"
    toggle.set_value(True).run()
    assert set(at.dataframe[0].value["Id"]) == {own.run_id, trial.run_id}
    at = open_view(monkeypatch, tmp_path, "overview")
    assert at.selectbox[0].options == [f"latest ({own.run_id})", own.run_id, f"{trial.run_id} (trial)"]


def test_two_chosen_runs_can_be_compared(monkeypatch, tmp_path):
    for number in range(2):
        judged_run(tmp_path, number)
    at = open_view(monkeypatch, tmp_path, "runs")
    assert labels(at) == []
    assert labels(choose(at, 0)) == ["Open train"]
    assert labels(choose(at, 0, 1)) == ["Open train", "Compare 2 runs"]


def test_name_tags_note_and_pin_are_edited(monkeypatch, tmp_path, editor):
    run = judged_run(tmp_path, 0)
    at = choose(open_view(monkeypatch, tmp_path, "runs"), 0)
    name, tags = (box for box in at.text_input if box.label in ("Name", "Tags"))
    assert (name.value, tags.value) == ("train", "lr=0.1")
    name.set_value("baseline")
    tags.set_value("lr=0.1, by=me")
    at.text_area[0].set_value("before the change")
    at.checkbox[0].check()
    annotate(run, Edit(add={"from": "another editor"}))  # meanwhile
    next(button for button in at.button if button.label == "Save").click().run()
    assert not at.exception
    assert run.name == "baseline"
    assert dict(run.tags) == {"lr": "0.1", "by": "me", "from": "another editor"}
    assert (run.annotation.note, run.annotation.is_pinned) == ("before the change", True)
    assert at.dataframe[0].value["Run"].tolist() == ["baseline"]


def test_a_tag_of_another_form_is_refused(monkeypatch, tmp_path, editor):
    run = judged_run(tmp_path, 0)
    at = choose(open_view(monkeypatch, tmp_path, "runs"), 0)
    next(box for box in at.text_input if box.label == "Tags").set_value("fast")
    next(button for button in at.button if button.label == "Save").click().run()
    assert "'fast' is not of the form KEY=VALUE" in at.error[0].value
    assert dict(run.tags) == {"lr": "0.1"}


def test_deletion_asks_again_and_leaves_pinned_runs(monkeypatch, tmp_path, editor):
    pinned, loose = judged_run(tmp_path, 0), judged_run(tmp_path, 1)
    annotate(pinned, Edit(is_pinned=True))
    at = choose(open_view(monkeypatch, tmp_path, "runs"), 0, 1)
    assert f"Delete 1 run and all their records: {loose.run_id}?" in texts(at).replace("\\", "")
    assert f"Pinned and running runs stay: {pinned.run_id}." in texts(at).replace("\\", "")
    assert loose.path.exists()
    at.button(key="delete-for-good").click().run()
    assert not at.exception
    assert not loose.path.exists()
    assert at.dataframe[0].value["Id"].tolist() == [pinned.run_id]


def test_a_shared_dashboard_only_shows_runs(monkeypatch, tmp_path):
    judged_run(tmp_path, 0)
    monkeypatch.setattr("app.runtime.visitors.may_edit", lambda: False)
    at = choose(open_view(monkeypatch, tmp_path, "runs"), 0)
    assert "only shows runs" in texts(at)
    assert not at.text_area
    assert not [button for button in at.button if button.label == "Save" or button.key == "delete-for-good"]


def test_history_names_the_commit_and_the_findings(monkeypatch, tmp_path):
    for number, wait in enumerate((0.10, 0.11, 0.10, 0.09, 0.40, 0.41, 0.39)):
        commit, found = ("a", ()) if number < 4 else ("b", (SLOW,))
        judged_run(tmp_path, number, commit=commit, wait=wait, findings=found)
    judged_run(tmp_path, 9, commit="c", wait=0.40)
    at = open_view(monkeypatch, tmp_path, "runs")
    said = texts(at).replace("\\", "")
    assert "Since commit bbbbbbb: data wait 40%, before 10% (+30 points; 4 runs before, 4 after)." in said
    waits = next(figure for figure in figures(at) if "data wait" in str(figure["layout"]["yaxis"]))
    assert [mark["text"] for mark in waits["layout"]["annotations"]] == ["commit bbbbbbb"]
    (finding,) = at.dataframe[1].value.to_dict("records")
    assert (finding["Finding"], finding["Runs"]) == ("workers-too-slow in train_loader", "3 of 8")
    assert (finding["First"], finding["Gone since"]) == ("commit bbbbbbb", "commit ccccccc")


def test_a_finding_is_ignored_with_a_reason(monkeypatch, tmp_path, editor):
    for number in range(2):
        judged_run(tmp_path, number, findings=(SLOW,))
    at = open_view(monkeypatch, tmp_path, "runs")
    assert at.button(key="ignore").disabled
    at.text_input(key="ignored-reason").set_value("the disk is slow here").run()
    at.button(key="ignore").click().run()
    assert not at.exception
    assert at.dataframe[1].value["Known"].tolist() == ["the disk is slow here"]
    assert at.dataframe[0].value["Gravest finding"].tolist() == ["known: workers-too-slow"] * 2
    at.button(key="count-again").click().run()
    assert at.dataframe[0].value["Gravest finding"].tolist() == ["warning: workers-too-slow"] * 2


def test_overview_shows_a_known_finding_as_information(monkeypatch, tmp_path):
    run = Run(runs.make_run(tmp_path, runs.SLOW_WORKER))
    assert "**slow-worker" in texts(open_view(monkeypatch, tmp_path, "overview"))
    tables = load_tables(run)
    change_known(run, map(identity, diagnose(tables).findings), "by design")
    said = texts(open_view(monkeypatch, tmp_path, "overview"))
    assert "No warnings. The findings below are information." in said
    assert "**slow-worker" not in said
    assert "slow-worker: Known: by design. Worker 1" in said


def test_hostile_names_are_shown_as_text(monkeypatch, tmp_path, editor):
    for number in range(2):
        judged_run(tmp_path, number, name="<img src=x>[x](http://e.st)", commit="<")
    at = choose(open_view(monkeypatch, tmp_path, "runs"), 0)
    for figure in figures(at):
        assert "<img" not in str(figure["data"])


def test_a_form_changes_only_what_was_entered():
    shown = Facts(name="a", tags="x=1, y=2", note="n", is_pinned=False)
    entered = Facts(name="a", tags="y=3, z=4", note="n", is_pinned=True)
    edit = edit_between(shown, entered)
    assert edit == Edit(add={"y": "3", "z": "4"}, remove=frozenset({"x"}), is_pinned=True)
    assert edit_between(shown, shown).is_empty
    assert parse_tags(" a = 1 ,, b=") == {"a": "1", "b": ""}


@pytest.mark.parametrize(
    ("address", "host", "secrets", "expected"),
    [
        ("localhost", "localhost:8501", {}, True),
        ("127.0.0.1", "127.0.0.1:8501", {}, True),
        ("localhost", "[::1]:8501", {}, True),
        ("0.0.0.0", "localhost:8501", {}, False),
        (None, "localhost:8501", {}, False),
        ("localhost", "evil.example.org:8501", {}, False),
        ("localhost", "localhost:8501", {"auth": {}}, False),
        ("localhost", "localhost:8501", {"auth": {}, "tidegauge": {"visitors": ["@e.org"]}}, False),
        ("0.0.0.0", "tide.e.org", {"auth": {}, "tidegauge": {"editors": ["ada@e.org"]}}, True),
        ("localhost", "localhost", {"auth": {}, "tidegauge": {"editors": ["bob@e.org"]}}, False),
    ],
)
def test_only_local_or_named_visitors_may_edit(monkeypatch, address, host, secrets, expected):
    class Secrets(dict):
        def load_if_toml_exists(self):
            return bool(self)

    server = SimpleNamespace(
        user={"email": "ada@e.org"},
        context=SimpleNamespace(headers={"Host": host}),
        get_option=lambda _: address,
        secrets=Secrets(secrets),
    )
    monkeypatch.setattr(visitors, "st", server)
    assert visitors.may_edit() is expected


def test_peaks_of_small_runs_are_in_mib():
    def entries(*peaks):
        results = [Result(status="finished", host_peak_bytes=peak) for peak in peaks]
        return [ListEntry(run_id=str(i), status="finished", result=result) for i, result in enumerate(results)]

    assert run_rows(entries(300.0 * 2**20, 150.0 * 2**20), UTC)["Peak"].tolist() == [300.0, 150.0]
    assert memory_unit(entries(300.0 * 2**20))[1] == "MiB"
    assert run_rows(entries(30.0 * 2**30, 512.0 * 2**20), UTC)["Peak"].tolist() == [30.0, 0.5]
    assert memory_unit(entries(30.0 * 2**30))[1] == "GiB"
