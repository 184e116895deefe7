"""Runs that were damaged, come from a newer Tidegauge, or were made to harm: one clear line, no harm."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from store_helpers import HOST, Writer, ask_the_lake, make_run

from collector import cli
from collector.errors import TidegaugeError
from collector.store.catalogue import list_runs
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.lake.store import store_of
from collector.store.prune.home import delete
from collector.store.runs.run import Run
from tests.conftest import PYTHON, REPOSITORY
from training_harness import layout

HOSTILE = '[/]../<b>"q"\n\x1b[31m![x](http://h/p.png)\udcff'


@pytest.fixture(scope="module")
def undamaged_run(tmp_path_factory):
    """A run with a lake and journal records beyond it."""
    run = make_run(tmp_path_factory.mktemp("whole"))
    writer = Writer(run, 11)
    writer.write(600)
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
    writer.write(7)
    return run


@pytest.fixture
def run(undamaged_run, tmp_path):
    """A copy of the undamaged run, in a home of its own."""
    return Run(shutil.copytree(undamaged_run.path, tmp_path / "home" / "runs" / undamaged_run.run_id))


@pytest.fixture
def tidegauge(run, monkeypatch, capsys):
    """Calls the entry point on the home; returns exit status, stdout and stderr."""
    monkeypatch.setenv("TIDEGAUGE_HOME", str(run.path.parent.parent))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tidegauge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


def parquet(run, table):
    return sorted((run.data_dir / "main" / table).glob("*.parquet"))[0]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def change_the_data(path):
    raw = bytearray(path.read_bytes())
    raw[4:40] = bytes(255 - byte for byte in raw[4:40])
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [truncate, change_the_data])
def test_damaged_parquet_file_is_one_line_and_others_are_read(run, tidegauge, tmp_path, damage):
    before = {path.name for path in run.journal_dir.iterdir()}
    damage(parquet(run, "step"))
    for command in (("report",), ("export", "--to", tmp_path / "out")):
        status, _, stderr = tidegauge(*command)
        assert status == 2
        assert stderr.count("\n") == 1
        assert "is damaged" in stderr
        assert "tidegauge collect" in stderr
    assert not (tmp_path / "out").exists()
    assert tidegauge("runs")[0] == 0
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM batch")["n"][0] == 607
    Writer(run, 12).write(5)
    with Ingester(run) as ingester:
        assert ingester.step().records_count == 24
    assert before <= {path.name for path in run.journal_dir.iterdir()}


def set_newer_ducklake_version(run):
    catalog = sqlite3.connect(run.catalog_path)
    with catalog:
        catalog.execute("UPDATE ducklake_metadata SET value = '99.0' WHERE key = 'version'")
    catalog.close()


def damage_write_ahead_log(run):
    run.catalog_path.with_name("lake.sqlite-wal").write_bytes(os.urandom(3000))
    run.catalog_path.write_bytes(run.catalog_path.read_bytes()[:10_000])


@pytest.mark.parametrize(
    ("change", "remedy"),
    [(set_newer_ducklake_version, "use the Tidegauge that wrote it"), (damage_write_ahead_log, "away")],
)
def test_unreadable_catalog_is_reported_and_journals_are_read(run, tidegauge, tmp_path, change, remedy):
    change(run)
    status, _, stderr = tidegauge("export", "--to", tmp_path / "out")
    assert status == 0
    assert "only the journals are shown" in stderr
    status, _, stderr = tidegauge("collect")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "cannot be opened" in stderr
    assert remedy in stderr
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM step")["n"][0] == 607


def test_tables_and_columns_of_a_newer_version_are_left_alone(run):
    with store_of(run).open_writable() as connection:
        connection.execute("CREATE TABLE lake.dream (time_ns BIGINT)")
        connection.execute("ALTER TABLE lake.step ADD COLUMN mood VARCHAR")
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
    with read(run) as snapshot:
        assert snapshot.problems == ()
        assert "mood" not in snapshot.query("SELECT * FROM step").columns
        assert len(snapshot.query("SELECT * FROM step")) == 607
    assert ask_the_lake(run, "SELECT count(mood) FROM lake.step") == 0


@pytest.mark.parametrize("part", ["journal", "events", "data", "lake.sqlite", "lake.lock"])
def test_target_of_a_symlink_in_a_run_is_not_changed_or_deleted(run, tmp_path, part):
    other = tmp_path / "others"
    shutil.copytree(run.path, other)
    (other / "data" / "main").mkdir(exist_ok=True)
    shutil.copy(parquet(run, "step"), other / "data" / "main" / "mine.parquet")
    (other / "lake.lock").write_text("mine\n")
    Writer(Run(other), 2**22 + 5, host=HOST).write(9)
    own = run.path / part
    shutil.rmtree(own) if own.is_dir() else own.unlink(missing_ok=True)
    own.symlink_to(other / part)
    layout.write_manifest(run.path, {**run.manifest, "end_time_ns": 1})
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}

    with pytest.raises(TidegaugeError) as refused:
        Ingester(run)

    assert part in str(refused.value)
    assert delete(run.path.parent.parent, [run]).keys() == ({run} if part == "lake.lock" else set())
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def test_deleting_a_symlinked_run_deletes_only_the_link(run, tmp_path):
    elsewhere = shutil.move(run.path, tmp_path / "elsewhere")
    run.path.symlink_to(elsewhere)
    os.utime(elsewhere)
    layout.write_manifest(elsewhere, {**run.manifest, "end_time_ns": 1})
    assert delete(run.path.parent.parent, [run]) == {}
    assert not os.path.lexists(run.path)
    assert (tmp_path / "elsewhere" / "lake.sqlite").exists()


def test_pipes_and_devices_in_a_run_are_skipped(run, tidegauge):
    for name in ("readers.lock", "result.json"):
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
    os.mkfifo(run.journal_dir / "h.1.step.1.journal")
    (run.events_dir / "h.1.jsonl").symlink_to("/dev/zero")
    os.mkfifo(run.events_dir / "h.2.jsonl")
    status, _, stderr = tidegauge("report")
    assert status == 0
    assert stderr.count("is skipped: it is no plain file") == 3
    assert tidegauge("runs")[0] == 0
    assert tidegauge("prune", "--keep", 0, "--dry-run")[0] == 0


@pytest.mark.parametrize(
    "text",
    ['{"schema": 1}', "[" * 100_000, '{"schema": 1, "name": "x", "anchors": {}, "command": {"pid": "7"}}', None],
    ids=["no fields", "deep", "another type", "too large"],
)
def test_damaged_manifest_is_one_line_and_others_are_listed(run, tidegauge, text):
    bad = Run(shutil.copytree(run.path, run.path.with_name("20990101-000000-bad-0000")))
    if text is None:
        os.truncate(bad.path / layout.MANIFEST, 2**40)
    else:
        (bad.path / layout.MANIFEST).write_text(text)
    for command in ("report", "collect"):
        status, _, stderr = tidegauge(command)
        assert (status, stderr.count("\n")) == (2, 1)
        assert "run.json is damaged" in stderr
    for command in (("runs",), ("prune", "--keep", 0, "--dry-run")):
        status, stdout, _ = tidegauge(*command)
        assert status == 0
        assert run.run_id in stdout
        assert "damaged" in stdout


@pytest.mark.parametrize(
    "result", ['{"schema": 1}', '{"schema": 1, "status": "killed", "findings": [4]}', "[" * 100_000]
)
def test_run_with_a_damaged_result_is_still_listed(run, tidegauge, result):
    (run.path / "result.json").write_text(result)
    status, stdout, _ = tidegauge("runs")
    assert status == 0
    assert run.run_id in stdout


@pytest.mark.parametrize("spec", ["x" * 300, "~nosuchuser", "../..", "\x1b[31m", "a\nb"])
def test_hostile_run_argument_is_a_one_line_error(tidegauge, spec):
    status, _, stderr = tidegauge("report", spec)
    assert (status, stderr.count("\n")) == (2, 1)
    assert "\x1b" not in stderr


def test_hostile_names_are_escaped_and_stay_in_the_home(tmp_path):
    environ = {**os.environ, "TIDEGAUGE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-P", "-m", "training_harness.command"]
    options = ["--name", HOSTILE + "n" * 300, "--tag", f"{HOSTILE}={HOSTILE}"]

    def call(*arguments):
        done = subprocess.run(
            [*command, *arguments], env=environ, cwd=REPOSITORY, capture_output=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
        return (done.stdout + done.stderr).decode()

    assert "[/]../<b>" in call("run", *options, "--", PYTHON, "-c", "pass", HOSTILE)
    (run,) = list_runs(tmp_path / "home")
    assert run.manifest["name"].startswith(HOSTILE)
    assert len(run.run_id) < 70
    run.path.rename(run.path.with_name("20990101-000000-[red]\x1b[31m"))
    assert "20990101-000000-[red]␛[31" in call("runs")
    call("report", "--output", str(tmp_path / "card.txt"))
    assert "[/]../<b>" in (tmp_path / "card.txt").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"home", "card.txt"}


def test_unreadable_runs_and_journals_hide_nothing_else(run, tmp_path):
    """An unprivileged user may not open one run and may not read one journal of the other."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    home = run.path.parent.parent
    private = shutil.copytree(run.path, run.path.with_name("20990101-000000-private-0000"))
    subprocess.run(["chmod", "-R", "a+rwX", str(home)], check=True)
    os.chmod(private, 0o700)
    secret = next(run.journal_dir.glob("*.batch.*"))
    os.chmod(secret, 0o600)
    # Pytest's folder is root's: the child goes there before it becomes another.
    code = (
        "import os, sys; from pathlib import Path\n"
        "from collector.diagnosis.run import tables; from collector.report.listing import list_entry, run_table\n"
        "from collector.store.catalogue import find_run, list_runs\n"
        "os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "runs = list_runs(Path('.')); run_table(map(list_entry, runs))\n"
        "found = tables.load_tables(runs[1])\n"
        "print(len(runs), found.rows_count('step'), *found.problems)\n"
        "try: print(find_run(Path('.'), 'latest').manifest)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("2 607 ")
    assert f"{secret.name} is skipped: Permission denied" in first
    assert second.startswith("TidegaugeError cannot read the manifest of run 20990101")
