"""The command line without a training: its surface, its errors and the list of runs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import make_run
import pytest

from collector import cli
from collector.agent.launch import RunOutcome
from collector.commands import run as running
from collector.report import listing
from collector.report.results import Result, ResultFinding, save_result
from collector.store.catalogue import find_run, list_runs
from collector.store.runs.run import Run
from tests.conftest import render
from training_harness.jobs.__main__ import JOBS
from training_harness.layout import MANIFEST, create_run, read_manifest, write_manifest

DOCS = Path(__file__).parents[3] / "docs"
COMMANDS = {
    "check",
    "compare",
    "completion",
    "run",
    "report",
    "runs",
    "dashboard",
    "job",
    "demo",
    "collect",
    "doctor",
    "mcp",
    "snapshot",
    "stacks",
    "watch",
    "export",
    "prune",
    "tag",
    "ignore",
    "tune",
}


@pytest.fixture
def tidegauge(monkeypatch, capsys, tmp_path):
    """Calls the entry point; returns exit status, stdout and stderr."""
    monkeypatch.setenv("TIDEGAUGE_HOME", str(tmp_path / "home"))

    def call(*arguments: object):
        monkeypatch.setattr(sys, "argv", ["tidegauge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


def all_commands() -> dict[str, click.Command]:
    context = click.Context(cli.cli)
    commands = {name: cli.cli.get_command(context, name) for name in cli.cli.list_commands(context)}
    return {name: command for name, command in commands.items() if command is not None}


def test_every_command_and_option_is_documented():
    assert {name for name, command in all_commands().items() if not command.hidden} == COMMANDS
    text = (DOCS / "cli.md").read_text()
    for name in COMMANDS:
        command = all_commands()[name]
        assert f"`tidegauge {name}" in text
        for option in (option for option in command.params if isinstance(option, click.Option)):
            assert option.opts[-1] in text, f"{option.opts[-1]} of {name} is not in docs/cli.md"


def test_every_command_takes_a_home():
    for command in set(all_commands().values()) - {cli.completion}:  # that one reads no run
        assert any("--home" in parameter.opts for parameter in command.params)


def test_job_names_match_the_existing_jobs():
    assert set(running.JOBS) == set(JOBS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "No such command 'bogus'; see tidegauge --help"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'? See tidegauge --help"),
        (["run"], "Missing argument 'COMMAND...'; see tidegauge run --help"),
        (["run", "--nmae", "x", "--", "true"], "No such option '--nmae'"),
        (["tune", "--trail-seconds", "3", "--", "true"], "Did you mean one of: '--trial-seconds', '--trials'? See"),
        (["run", "--tag", "color", "--", "true"], "'color' is not of the form KEY=VALUE"),
        (
            ["run", "--on-hang", "--", "true"],
            "'--on-hang': '--' is the end of the options, not a value; give cancel|CMD",
        ),
        (["run", "--on-finding", "--", "true"], "'--' is the end of the options, not a value; give CMD before it"),
        (
            ["run", "--name", "--tag", "a=b", "--", "true"],
            "'--tag' is another option, not a value; give NAME before",
        ),
        (["run", "--tag", "--", "true"], "'--' is not of the form KEY=VALUE"),
        (["run", "--run-id", "--", "true"], "'--' is the end of the options, not a value; give ID before it"),
        (["run", "--webhook", "--", "true"], "'--' is the end of the options, not a value; give URL before it"),
        (["run", "--prometheus", "--", "true"], "not a value; give [HOST:]PORT before it"),
        (["run", "--home", "--", "true"], "'--home': '--' is the end of the options, not a value"),
        (["tune", "--trials", "--", "true"], "'--' is not a whole number"),
        (["run", "--interval", "often", "--", "true"], "'often' is not a valid float"),
        (["run", "--interval", "1000", "--", "true"], "1000"),
        (["compare", "latest"], "give two to four runs to compare, not 1"),
        (["compare", "a", "b", "--fail-on", "speed>1"], "METRIC is one of samples"),
        (["watch", "99999999"], "no process 99999999 runs here; `pgrep -f train.py`"),
        (["watch", "1", "--interval", "0"], "0 s is not between 0.05 and 60 s"),
        (["report", "--format", "pdf"], "no format 'pdf'; give one of text, json, html"),
        (["report", "--settings"], "--settings is for --format json, not text"),
        (["run", "--workers", "4", "--", "true"], "'4' is not 'auto'"),
        (["report", "nope"], "no run 'nope'"),
        (["report", "--home", "/dev/null/x"], "/dev/null/x"),
        (
            ["job", "nope"],
            "'NAME': 'nope' is not one of 'images', 'diabetes', 'accumulate', 'dataparallel', 'ddp', 'fault',",
        ),
        (["job", "images", "--home"], "Option '--home' requires an argument; see tidegauge job --help"),
        (["dashboard", "--port", "99999"], "99999 is not in the range 1<=x<=65535"),
        (["collect", "nope"], "no run 'nope'"),
        (["export"], "Missing option '--to'"),
        (["export", "--to", __file__], "test_cli.py' is a file"),
        (["export", "nope", "--to", f"{__file__}.exported"], "no run 'nope'"),
        (["prune"], "give --keep N, --max-size SIZE, or both"),
        (["prune", "--keep", "-1"], "-1 is not in the range x>=0"),
        (["tune"], "Missing argument 'COMMAND...'; see tidegauge tune --help"),
        (["tune", "--trials", "0", "--", "true"], "0 is not in the range 1<=x<=50"),
        (["tune", "--trial-seconds", "soon", "--", "true"], "'soon' is not a number"),
        (["tune", "--", "/no/such/command"], "/no/such/command: command not found"),
        (["prune", "--max-size", "20 apples"], "'20 apples' is not a size; write it like 20GB or 500MiB"),
    ],
)
def test_usage_error_is_one_line_with_exit_status_2(tidegauge, arguments, said):
    status, out, err = tidegauge(*arguments)
    assert status == 2
    assert out == ""
    assert said in err
    assert err.startswith("tidegauge: ")
    assert err.count("\n") == 1


def test_damaged_manifest_is_a_one_line_error(tidegauge, tmp_path):
    run_dir = create_run(tmp_path / "home", name="x", argv=["x"])
    (run_dir / MANIFEST).write_text("{")
    status, _, err = tidegauge("report", run_dir.name)
    assert status == 2
    assert "is damaged" in err
    assert err.count("\n") == 1


def test_unexpected_error_names_the_file_with_its_traceback(tidegauge, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("collector.store.catalogue.list_runs", lambda _home: 1 / 0)
    status, _, err = tidegauge("runs")
    assert status == 1
    assert err.count("\n") == 1
    saved = re.search(r"unexpected ZeroDivisionError.*the traceback is in (\S+)", err)
    assert saved
    assert "list_runs" in Path(saved[1]).read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--home", "/h", "images", "--steps", "3"),
        ("images", "--home", "/h", "--steps", "3"),
        ("images", "--steps", "3", "--home=/h"),
    ],
)
def test_home_option_of_a_job_may_be_anywhere(tidegauge, monkeypatch, arguments):
    started = []

    def start(command, _open_outlets, *, home, **_):
        started.append((home, command[-3:]))
        return RunOutcome(run=None, exit_status=0), None

    monkeypatch.setattr(running, "_run", start)
    tidegauge("job", *arguments)
    assert started == [(Path("/h"), ["images", "--steps", "3"])]


def test_ctrl_c_before_the_verdict_leaves_the_status_and_says_where_the_verdict_is(
    tidegauge, monkeypatch, tmp_path
):
    run = Run(create_run(tmp_path / "home", name="x", argv=["true"]))
    monkeypatch.setattr(
        "collector.agent.launch.run_command", lambda *_, **__: RunOutcome(run=run, exit_status=3, is_stored=True)
    )

    def judge(_: Run):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running, "judge", judge)
    status, _, stderr = tidegauge("run", "--", "true")
    assert status == 3
    assert re.fullmatch(
        rf"tidegauge: interrupted before the verdict: `\S*tidegauge report {run.run_id}` shows it\n", stderr
    )


def test_help_is_shown_without_a_command(tidegauge):
    status, out, _ = tidegauge()
    assert status == 0
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_a_shell_asks_the_command_itself(tidegauge, shell):
    status, stdout, _ = tidegauge("completion", shell)
    assert status == 0
    assert f"_TIDEGAUGE_COMPLETE={shell}_complete" in stdout


def test_runs_of_an_empty_home_says_how_to_start_one(tidegauge):
    status, out, _ = tidegauge("runs")
    assert status == 0
    assert "tidegauge run -- COMMAND" in out


def test_runs_are_listed_newest_first_from_saved_results(tmp_path):
    made = [create_run(tmp_path, name=f"job{number}", argv=["x"]) for number in range(3)]
    judged, ended, _living = list(reversed(list_runs(tmp_path)))
    assert [judged.path, ended.path] == made[:2]
    killed = ResultFinding(kind="killed", place="", severity="critical")
    save_result(judged, Result(status="killed", steps=1234, duration_seconds=61.2, findings=(killed,)))
    write_manifest(ended.path, {**read_manifest(ended.path), "end_time_ns": 1})
    lines = render(listing.run_table(map(listing.list_entry, list_runs(tmp_path)))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [path.name for path in reversed(made)]
    assert re.search(r"killed +1,234 +61 s +✖ killed", lines[3])
    assert re.search(r"ended +— +— +—", lines[2])
    assert re.search(r"abandoned +— +— +—", lines[1])


def test_runs_are_filtered_by_tag_and_printed_as_json(tidegauge, tmp_path):
    made = [
        create_run(tmp_path / "home", name=f"job{number}", argv=["x"], tags={"lr": str(number % 2), "by": "me"})
        for number in range(4)
    ]
    status, out, _ = tidegauge("runs", "--format", "json", "--tag", "lr=1", "--tag", "by=me", "--limit", "1")
    assert status == 0
    (only,) = json.loads(out)
    assert (only["run_id"], only["status"], only["tags"]) == (made[3].name, "abandoned", {"lr": "1", "by": "me"})
    assert only["steps"] is None
    save_result(Run(made[3]), Result(status="killed"))
    result = json.loads((made[3] / "result.json").read_text())
    (made[3] / "result.json").write_text(json.dumps({**result, "steps": "many", "duration_seconds": math.nan}))
    assert json.loads(tidegauge("runs", "--format", "json")[1])[0]["duration_seconds"] is None
    assert re.search(r"job3\S+ +lr=1, by=me +killed +— +— ", tidegauge("runs")[1])
    assert "have lr=2" in tidegauge("runs", "--tag", "lr=2")[1]
    assert find_run(tmp_path / "home", "job2").path == made[2]


def test_removing_a_tag_that_a_run_does_not_have_is_an_error(tidegauge, tmp_path):
    run = create_run(tmp_path / "home", name="train", argv=["x"], tags={"lr": "1", "by": "me"})
    status, out, err = tidegauge("tag", run.name, "new name", "--remove", "nosuch")
    assert (status, out) == (2, "")
    assert err == (f"tidegauge: {run.name} has no tag 'nosuch', so nothing was changed; its tags are lr, by\n")
    assert "name    train" in tidegauge("tag", run.name, "--remove", "lr", "--remove", "by")[1]
    assert "it has no tags" in tidegauge("tag", run.name, "--remove", "lr")[2]


def test_trials_of_tune_are_listed_on_request_and_are_never_the_latest_run(tidegauge, tmp_path):
    home = tmp_path / "home"
    own = create_run(home, name="train", argv=["x"])
    trials = [create_run(home, name="tune-as it is", argv=["x"], is_trial=True) for _ in range(2)]
    status, out, err = tidegauge("runs")
    assert status == 0
    assert own.name in out
    assert not any(trial.name in out for trial in trials)
    assert err == "tidegauge: not listed: 2 trials of `tidegauge tune`; --trials lists them\n"
    assert [entry["run_id"] for entry in json.loads(tidegauge("runs", "--format", "json")[1])] == [own.name]
    _, out, err = tidegauge("runs", "--trials", "--format", "json")
    assert err == ""
    assert [entry["trial"] for entry in json.loads(out)] == [True, True, False]
    assert find_run(home, "latest").path == own
    assert find_run(home, trials[0].name).path == trials[0]


def test_without_other_runs_the_latest_run_is_a_trial(tidegauge, tmp_path):
    trial = create_run(tmp_path / "home", name="tune-as it is", argv=["x"], is_trial=True)
    assert "not listed: 1 trial of" in tidegauge("runs")[2]
    assert find_run(tmp_path / "home", "latest").path == trial


def test_a_run_is_renamed_tagged_and_found_by_its_name(tidegauge, tmp_path):
    old, new = (create_run(tmp_path / "home", name="train", argv=["x"], tags={"lr": "1"}) for _ in range(2))
    status, out, err = tidegauge("tag", old.name, "first try", "--add", "by=me", "--remove", "lr", "--pin")
    assert (status, err) == (0, "")
    assert out == f"run     {old.name}\nname    first try\ntags    by=me\nnote\npinned  yes\n"
    tidegauge("tag", "first try", "--note", "with two workers")
    assert "with two workers" in tidegauge("tag", old.name)[1]
    entries = {entry["run_id"]: entry for entry in json.loads(tidegauge("runs", "--format", "json")[1])}
    assert (entries[old.name]["name"], entries[old.name]["tags"]) == ("first try", {"by": "me"})
    assert (entries[old.name]["note"], entries[old.name]["pinned"]) == ("with two workers", True)
    assert (entries[new.name]["name"], entries[new.name]["tags"]) == ("train", {"lr": "1"})
    assert re.search(rf"{old.name} +first try, by=me, pinned +abandoned", tidegauge("runs")[1])
    assert old.name in tidegauge("runs", "--tag", "by=me")[1]
    tidegauge("tag", new.name, "first try")
    status, _, err = tidegauge("tag", "first try")
    assert (status, "'first try' fits 2 runs" in err) == (2, True)
    assert tidegauge("tag", old.name, "--add", "by")[0] == 2
    assert read_manifest(old)["name"] == "train"


def test_a_known_finding_is_information_in_every_run_of_the_command(tidegauge, tmp_path):
    one, two, other = (make_run.make_run(tmp_path / "home", make_run.SLOW_WORKER) for _ in range(3))
    write_manifest(other, {**read_manifest(other), "argv": ["python", "other.py"]})

    def severities():
        reports = [json.loads(tidegauge("report", run.name, "--format", "json")[1]) for run in (one, two, other)]
        found = [next(f for f in report["findings"] if f["kind"] == "slow-worker") for report in reports]
        return [(finding["severity"], finding.get("known")) for finding in found]

    status, _, err = tidegauge("ignore", one.name, "fd-leak", "--reason", "x")
    assert (status, "has no finding 'fd-leak'; it has: slow-worker" in err) == (2, True)
    assert tidegauge("ignore", one.name, "slow-worker")[0] == 2
    status, out, err = tidegauge("ignore", one.name, "slow-worker", "--reason", "one disk is old")
    assert (status, err) == (0, "")
    assert out == "known in runs of python train.py:\n  slow-worker in workers of Photographs: one disk is old\n"
    assert severities() == [("info", "one disk is old")] * 2 + [("warning", None)]
    card = tidegauge("report", two.name)[1]
    assert "WARNING" not in card
    assert "Known: one disk is old. Worker 1 of loader 0" in " ".join(card.split())
    gravest = {run.name: "known: slow-worker" for run in (one, two)} | {other.name: "warning: slow-worker"}
    listed = json.loads(tidegauge("runs", "--format", "json")[1])
    assert {entry["run_id"]: entry["gravest"] for entry in listed} == gravest
    assert (
        tidegauge("ignore", two.name, "slow-worker", "--stop")[1] == "known in runs of python train.py: nothing\n"
    )
    assert severities() == [("warning", None)] * 3


def test_result_of_a_partly_readable_run_is_not_saved(tidegauge, tmp_path):
    made = create_run(tmp_path / "home", name="half", argv=["x"])
    command = {"host": os.uname().nodename, "pid": 2**22 + 1, "start_ticks": 1}
    write_manifest(made, {**read_manifest(made), "command": command})
    catalog = made / "lake.sqlite"
    catalog.write_bytes(b"no database at all")
    status, _, err = tidegauge("report")
    assert (status, err.count("only the journals are shown")) == (0, 1)
    assert not (made / "result.json").exists()
    catalog.unlink()
    status, _, err = tidegauge("report")
    assert (status, err) == (0, "")
    assert (made / "result.json").exists()
    assert json.loads(tidegauge("runs", "--format", "json")[1])[0]["status"] == "killed"


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    broken, whole = (create_run(tmp_path, name=name, argv=["x"]) for name in ("broken", "whole"))
    (broken / MANIFEST).write_text("[]")
    (whole / "result.json").write_text("{")
    text = render(listing.run_table(map(listing.list_entry, list_runs(tmp_path))))
    assert re.search(rf"{broken.name} +damaged", text)
    assert re.search(rf"{whole.name} +abandoned", text)


@pytest.fixture
def three_runs(tmp_path):
    """Three runs that have ended, the oldest first."""
    made = [create_run(tmp_path / "home", name=f"job{number}", argv=["x"]) for number in range(3)]
    for path in made:
        write_manifest(path, {**read_manifest(path), "end_time_ns": 1})
    return made


def test_prune_shows_runs_and_asks_before_it_deletes(tidegauge, three_runs):
    for options, said in ((["--dry-run"], ""), ([], "no terminal can confirm it: give --yes")):
        status, out, err = tidegauge("prune", "--keep", "1", *options)
        assert (status, said in err, err.count("\n")) == (2 if said else 0, True, 1 if said else 0)
        assert [line.split()[0] for line in out.splitlines()[1:3]] == [path.name for path in three_runs[:2]]
        assert re.search(r"^to delete: 2 runs, \d+ KiB \(of 3 runs, \d+ KiB\)$", out, re.MULTILINE)
        assert all(path.exists() for path in three_runs)


def test_prune_deletes_the_oldest_first_until_the_rest_fits(tidegauge, three_runs):
    (three_runs[1] / "snapshots" / "large").write_bytes(bytes(2 * 1000**2))
    status, out, err = tidegauge("prune", "--max-size", "2MB", "--yes")
    assert (status, err) == (0, "")
    assert re.search(r"^deleted: 2 runs, 1\.9\d MiB$", out, re.MULTILINE)
    assert list((three_runs[0].parent).iterdir()) == three_runs[2:]
    status, out, err = tidegauge("prune", "--max-size", "1 MiB", "--keep", "1")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"to delete: 0 runs, 0 B \(of 1 run, \d+ KiB\)\n", out)


def test_prune_leaves_pinned_runs_alone(tidegauge, three_runs):
    tidegauge("tag", three_runs[0].name, "--pin")
    status, out, _ = tidegauge("prune", "--keep", "0", "--yes")
    assert (status, f"{three_runs[0].name}" in out, "stays: it is pinned" in out) == (0, True, True)
    assert list(three_runs[0].parent.iterdir()) == three_runs[:1]
    tidegauge("tag", three_runs[0].name, "--unpin")
    tidegauge("prune", "--keep", "0", "--yes")
    assert not list(three_runs[0].parent.iterdir())


def test_prune_finishes_an_interrupted_prune(tidegauge, three_runs):
    leftover = three_runs[0].with_name(f".pruned-{three_runs[0].name}")
    three_runs[0].rename(leftover)
    said = "0 runs, 0 B, and the rest of 1 whose deletion was interrupted"
    _, out, _ = tidegauge("prune", "--keep", "2", "--dry-run")
    assert re.fullmatch(rf"to delete: {said} \(of 2 runs, \d+ KiB\)\n", out)
    assert leftover.exists()
    status, out, err = tidegauge("prune", "--keep", "2")
    assert (status, err) == (0, "")
    assert out.endswith(f"deleted: {said}\n")
    assert sorted(three_runs[0].parent.iterdir()) == sorted(three_runs[1:])


def test_prune_names_runs_that_it_cannot_delete(tidegauge, three_runs):
    (three_runs[0] / "lake.lock").mkdir()
    status, out, err = tidegauge("prune", "--keep", "0", "--yes")
    assert (status, err.count("\n")) == (0, 1)
    assert f"{three_runs[0].name} stays: " in err
    assert "deleted: 2 runs" in out
    assert [run.path for run in list_runs(three_runs[0].parents[1])] == three_runs[:1]


def test_port_in_use_is_a_one_line_error(tidegauge):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = tidegauge("dashboard", "--port", port)
    assert status == 2
    assert f"port {port} cannot be used (Address already in use): give another with --port" in err


def test_old_runs_of_a_home_are_deleted_without_the_packages_of_a_shared_store(tmp_path):
    code = "import sys; sys.modules['psycopg'] = None; from collector.cli import main; main()"
    argv = [sys.executable, "-c", code, "prune", "--keep", "20", "--dry-run", "--home", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("to delete: 0 runs")
