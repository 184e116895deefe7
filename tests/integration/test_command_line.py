"""The command line on real commands and real runs, as a user meets it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from collector.store.catalogue import list_runs
from tests.conftest import tidegauge
from training_harness import layout

ROOT = Path(__file__).parents[2]
QUERYING = ROOT / "docs" / "querying.md"
TRAINING = [sys.executable, "examples/plain_train.py", "--steps", "150", "--num-workers", "1"]


class Home:
    """A Tidegauge home and its command line, in a process of its own or, with `ask`, in this one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TIDEGAUGE_")}
        return subprocess.run(
            [sys.executable, "-P", "-m", "collector", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env={**clean, "TIDEGAUGE_HOME": str(self.path), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return tidegauge(self.path, *arguments)

    @property
    def newest(self) -> Path:
        return max((self.path / "runs").iterdir())


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture(scope="module")
def finished_training(tmp_path_factory) -> tuple[Home, subprocess.CompletedProcess[str]]:
    """A home with the run of one training, and what was printed meanwhile."""
    made = Home(tmp_path_factory.mktemp("trained"))
    done = made("run", "--name", "demo", "--tag", "lr=0.1", "--interval", "0.2", "--", *TRAINING)
    assert done.returncode == 0, done.stderr
    return made, done


def test_command_keeps_its_stdout_and_card_goes_to_stderr(finished_training):
    home, done = finished_training
    assert re.fullmatch(r"100 \d\.\d{4}\n", done.stdout)
    assert home.newest.name in done.stderr
    assert "finished, exit status 0" in done.stderr
    assert "1 of 1 workers" in done.stderr
    assert done.stderr.rstrip().endswith("tidegauge dashboard")


def test_report_prints_json_for_programs(finished_training):
    home, _ = finished_training
    done = home.ask("report", "--format", "json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert body["schema"] == 1
    assert body["run"]["name"] == "demo"
    assert (body["run"]["status"], body["run"]["exit_status"]) == ("finished", 0)
    assert (body["run"]["steps"], body["run"]["workers_reporting"]) == (150, [1, 1])
    parts = {"peak", "throughput", "data_wait_ratio", "outside_step", "exposed_stall", "overhead", "last_minute"}
    parts |= {"start", "earlier_workers_count"}
    assert set(body["summary"]) == parts
    for finding in body["findings"]:
        assert set(finding) >= {"kind", "severity", "confidence", "locus", "since_step", "evidence", "advice"}


def test_a_run_is_found_by_prefix_and_path(finished_training):
    home, _ = finished_training
    for spec in (home.newest.name[:-2], home.newest):
        done = home.ask("report", spec)
        assert done.returncode == 0, done.stderr
        assert home.newest.name in done.stdout
        assert "\x1b[" not in done.stdout


def test_report_writes_to_a_file(finished_training, tmp_path):
    home, _ = finished_training
    card, body = tmp_path / "card.txt", tmp_path / "report.json"
    assert home.ask("report", "--output", card).stdout == ""
    assert home.newest.name in card.read_text()
    # A command to copy is as long as the path of `tidegauge`.
    assert all(len(line) <= 80 for line in card.read_text().splitlines() if "/tidegauge " not in line)
    home.ask("report", "--format", "json", "--output", body)
    assert json.loads(body.read_text())["run"]["steps"] == 150
    refused = home.ask("report", "--output", tmp_path / "no" / "card.txt")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_compare_fails_if_a_condition_is_met(finished_training, tmp_path):
    home, _ = finished_training
    other = tmp_path / "other"
    shutil.copytree(home.newest, other)
    manifest = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**manifest, "run_id": "other", "tags": {"lr": "0.2"}}))
    done = home.ask("compare", "latest", other, "--fail-on", "step_p50>5")
    assert (done.returncode, done.stderr) == (0, "")
    same = r"Step p50 +(\S+ \w+) +\1 +\+0\.0%"
    assert re.search(same, done.stdout), done.stdout
    assert re.search(rf"tag lr +{home.newest.name} +0\.1\n +other +0\.2", done.stdout)
    assert f"{home.newest.name} (baseline)  other" in done.stdout
    assert "git commit" not in done.stdout, "it is the same in both"
    done = home.ask(
        "compare", "latest", other, "--format", "json", "--fail-on", "batches<5%", "--fail-on", "steps>1"
    )
    assert done.returncode == 3
    compared = json.loads(done.stdout)
    assert compared["baseline"] == home.newest.name
    measured = compared["runs"][1]["measures"]
    assert measured["step_p95"]["change_ratio"] == 0
    assert all(each["n"] >= 1 for each in measured.values() if each["value"] is not None)
    assert re.fullmatch(
        r"tidegauge: batches<5%: Batches per second of other is .*, of the baseline \S+ .*\n", done.stderr
    )


def test_copied_run_directory_can_be_reported_elsewhere(finished_training, tmp_path):
    home, _ = finished_training
    copy = tmp_path / "elsewhere"
    home.newest.rename(copy)
    try:
        done = Home(tmp_path / "other").ask("report", copy, "--format", "json")
    finally:
        copy.rename(home.path / "runs" / json.loads((copy / "run.json").read_text())["run_id"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["steps"] == 150


def test_run_list_shows_status_and_steps(finished_training):
    home, _ = finished_training
    done = home.ask("runs")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{home.newest.name} +lr=0.1 +finished +150 ", done.stdout)


def test_export_and_queries_of_the_docs_page_work(finished_training, tmp_path, monkeypatch, capsys):
    home, _ = finished_training
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGAUGE_HOME", str(home.path))
    page = QUERYING.read_text()
    [words] = re.findall(r"^tidegauge (export .*)$", page, re.MULTILINE)
    done = home.ask(*[str(tmp_path / word) if word == "exported" else word for word in words.split()])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^batch\.parquet +150 +[\d.]+ KiB$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(f"{home.newest.name} is in {tmp_path / 'exported'}\n")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```python")
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, QUERYING.name, "exec"), names)
    said = capsys.readouterr().out
    assert "of the training was waiting for data" in said
    assert "time in the DataLoader's `__iter__` and `__next__`" in said
    [(worker, batches)] = names["by_worker"].select("worker", "batches").rows()
    assert worker == 0
    assert batches >= 150  # some were made and not asked for
    assert len(names["late"].fetchall()) == 10
    assert names["connection"].execute("SELECT count(*) FROM lake.step").fetchall() == [(150,)]
    names["connection"].close()


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("echo out; exit 3", 3, "failed, exit status 3"),
        ("echo out; kill -9 $$", 137, "killed, signal 9 (SIGKILL)"),
    ],
)
def test_exit_status_is_that_of_the_command(home, under_tidegauge, script, status, said):
    done = under_tidegauge(home.path, "run", "--", "sh", "-c", script)
    assert done.returncode == status
    assert done.stdout == "out\n"
    assert said in " ".join(done.stderr.split())


def test_missing_command_exits_with_127_and_makes_no_run(home):
    done = home.ask("run", "--", "no-such-command", "--x")
    assert (done.returncode, done.stderr) == (127, "tidegauge: no-such-command: command not found\n")
    assert list_runs(home.path) == [], "a typo does not become the latest run"


def test_options_after_the_command_belong_to_it(home, under_tidegauge):
    done = under_tidegauge(
        home.path, "run", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--name", "x", "--home"
    )
    assert done.stdout == "['--name', 'x', '--home']\n"


def test_disabled_tidegauge_leaves_no_trace(home, under_tidegauge):
    done = under_tidegauge(home.path, "run", "--", "sh", "-c", "exit 5", TIDEGAUGE_DISABLED="1")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    assert not home.path.exists()


def test_built_in_job_is_recorded(home, under_tidegauge):
    done = under_tidegauge(home.path, "job", "fault", "slow-worker", "--steps", "150")
    assert done.returncode == 0, done.stderr
    assert re.search(r"done: \d+ steps", done.stdout)
    assert "fault-slow-worker" in home.newest.name
    assert "4 of 4 workers" in done.stderr


def test_help_of_a_job_makes_no_run(home):
    done = home("job", "diabetes", "--help")
    assert done.returncode == 0
    assert "--sweep" in done.stdout
    assert not home.path.exists()


def test_bad_input_to_a_job_is_one_line_and_makes_no_run(home, under_tidegauge):
    done = under_tidegauge(home.path, "job", "fault", "UNKNOWN")
    said = "tidegauge job fault: unknown fault 'UNKNOWN'; --list shows them; see tidegauge job fault --help\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert not list((home.path / "runs").iterdir())


def test_collect_ingests_a_run_without_a_collector(run_attached, home):
    recorded = run_attached(
        ROOT / TRAINING[1], *TRAINING[2:], run_dir=layout.create_run(home.path, name="alone", argv=[])
    )
    assert recorded.done.returncode == 0, recorded.done.stderr
    done = home.ask("collect")
    assert done.returncode == 0, done.stderr
    assert "150 steps" in done.stderr
    assert (home.newest / "lake.sqlite").exists()


def test_doctor_hooks_a_real_training(home):
    done = home.ask("doctor")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "not measured" not in words
    assert "ok waits for workers which worker made a batch" in words
    assert "ok lake" in words
    assert not home.path.exists()
