"""The shared store on a real PostgreSQL and a real S3 endpoint: nothing lost, nothing twice, no secret shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from store_helpers import HOST, Writer, ask_the_lake, in_the_lake, journalled, make_run, seen
from store_services import (
    BUCKET,
    PASSWORD,
    SECRET_KEY,
    Cable,
    Faulty,
    Postgres,
    faulty_s3,
    postgres_programs,
    s3_service,
)

from collector.agent import ingest_feed, problems
from collector.errors import TidegaugeError
from collector.report.known import change_known, known_findings
from collector.report.listing import list_entry
from collector.report.results import Result, ResultFinding, save_result
from collector.store import Edit, annotate
from collector.store.catalogue import find_run, list_runs
from collector.store.cluster import mirror, postgres as shared
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.prune import delete_runs
from collector.store.runs.run import Run
from tests.conftest import tidegauge, wait_for
from tidegauge import TidegaugeError as ApiError, open_run
from training_harness import layout
from training_harness.journal import EventLog

#: A training that has recorded 32 steps.
STEPS = """
import os, time
from pathlib import Path
from training_harness.journal import Identity, JournalWriter
from training_harness.records import MISSING, STREAMS

folder, stream = Path(os.environ["TIDEGAUGE_RUN_DIR"], "journal"), STREAMS["step"]
writer = JournalWriter(folder, stream, Identity.of_this_process())
rest = [MISSING[column.code] for column in stream.columns[2:]]
for step in range(32):
    writer.append(time.monotonic_ns(), step, *rest)
"""

pytestmark = pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed")


@pytest.fixture(scope="module")
def postgres():
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_service(tmp_path_factory.mktemp("s3")) as variables:
        yield variables


@pytest.fixture
def variables(postgres, s3, tmp_path):
    """Return the environment's settings of the store; each test has a place of its own for the files."""
    return {**s3, "TIDEGAUGE_STORE": postgres.url, "TIDEGAUGE_DATA": f"s3://{BUCKET}/{tmp_path.name}"}


@pytest.fixture
def environment(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def node(host: str, home: Path, variables: dict[str, str], *command: object) -> subprocess.CompletedProcess[str]:
    """Run `tidegauge` on a machine of that name, with a home of its own."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return subprocess.run(
        [*inside, sys.executable, "-m", "collector", *map(str, command)],
        env={**os.environ, **variables, "TIDEGAUGE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another host name")
def test_two_nodes_are_one_run_elsewhere_and_secrets_stay_hidden(variables, tmp_path):
    homes = {name: tmp_path / name for name in ("node-a", "node-b")}
    said = ""
    with ThreadPoolExecutor() as pool:
        train = ("run", "--run-id", "exp-1", "--", sys.executable, "-c", STEPS)
        ended = [pool.submit(node, name, home, variables, *train) for name, home in homes.items()]
    for done, home in zip((each.result() for each in ended), homes.values(), strict=True):
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
        assert not list((home / "runs" / "exp-1").rglob("*.parquet")), "its files are in the store"
    viewer = tmp_path / "viewer"
    listed = tidegauge(viewer, "runs", **variables)
    report = tidegauge(viewer, "report", "exp-1", "--format", "json", **variables)
    assert "exp-1" in listed.stdout
    verdict = json.loads(report.stdout)
    assert verdict["run"]["status"] == "finished"
    exported = tidegauge(viewer, "export", "exp-1", "--to", tmp_path / "out", "--format", "csv", **variables)
    assert exported.returncode == 0, exported.stderr
    text = (tmp_path / "out" / "step.csv").read_text()
    assert text.count("node-a") == text.count("node-b") > 0
    said += listed.stdout + report.stdout + listed.stderr + report.stderr
    doctor = tidegauge(viewer, "doctor", **variables).stdout
    assert "the shared store and its files can be read, " in " ".join(doctor.split())
    for secret in (PASSWORD, SECRET_KEY, PASSWORD.partition("@")[0]):
        assert secret not in said
        for home in (*homes.values(), viewer):
            assert not [path for path in home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_clocks_of_two_nodes_are_aligned(environment, tmp_path):
    run = make_run(tmp_path / "a")
    writer = Writer(run, 11, host="elsewhere")
    writer.write(10)
    manifest = run.manifest
    own = manifest["anchors"][manifest["host"]]
    behind_ns = 5_000_000_000  # it was booted later
    elsewhere = {**own, "time_ns": own["time_ns"] - behind_ns, "boot_id": "another"}
    shared.register({**manifest, "host": "elsewhere", "anchors": {"elsewhere": elsewhere}})
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
    mirror.refresh(tmp_path / "a")
    mirror.refresh(tmp_path / "b")
    (other,) = [found for found in list_runs(tmp_path / "b") if found.run_id == run.run_id]
    for seen_from in (run, other):
        with read(seen_from) as snapshot:
            times = snapshot.query("SELECT time_ns FROM step ORDER BY time_ns")["time_ns"]
        first_ns = min(row[0] for row in journalled(run)["step"])
        on_clock_of = seen_from.manifest["host"]
        assert times[0] == first_ns + (behind_ns if on_clock_of != "elsewhere" else 0)


def test_records_arrive_once_across_restarts_of_the_database(environment, postgres, tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, os.getpid(), host=HOST)
    with Ingester(run) as ingester:
        for round_number in range(4):
            writer.write(300)
            if round_number % 2:
                postgres.stop()
                failed = ingester.step()
                assert not failed.is_whole
                assert "stay in the journals" in failed.problems[0]
                assert PASSWORD not in failed.problems[0]
                with read(run) as snapshot:
                    assert "the shared store cannot be opened" in snapshot.problems[0]
                    assert "only the journals of this machine" in snapshot.problems[0]
                postgres.start()
            result = ingester.step()
            assert (result.is_whole, result.problems) == (True, ())
    assert seen(run) == journalled(run)
    assert in_the_lake(run) == 1200


def test_link_cut_during_a_commit_loses_and_doubles_nothing(environment, postgres, variables, tmp_path):
    cable = Cable(postgres.port)
    environment.setenv(
        "TIDEGAUGE_STORE",
        variables["TIDEGAUGE_STORE"].replace(f":{postgres.port}/", f":{cable.port}/") + "&tcp_user_timeout=1000",
    )
    run = make_run(tmp_path)
    writer = Writer(run, os.getpid(), host=HOST)
    with Ingester(run) as ingester:
        writer.write(200)
        ingester.step()
        writer.write(200)
        cable.cut()
        healed = threading.Timer(2.0, cable.heal)
        healed.start()
        ingester.step()
        healed.join()
        assert ingester.step().is_whole
    assert seen(run) == journalled(run)


@pytest.mark.parametrize("fault", ["500", "silence"])
def test_s3_errors_delay_records_and_lose_none(fault, environment, variables, tmp_path):
    with faulty_s3(variables) as address:
        environment.setenv("AWS_ENDPOINT_URL", address)
        environment.setattr(shared, "_HTTP_TIMEOUT_SECONDS", 1)
        run = make_run(tmp_path)
        writer = Writer(run, os.getpid(), host=HOST)
        with Ingester(run) as ingester:
            writer.write(200)
            assert ingester.step().is_whole
            writer.write(200)
            Faulty.faults.extend([fault] * 5)
            failed = ingester.step()
            assert not failed.is_whole
            assert "stay in the journals" in failed.problems[0]
            assert SECRET_KEY not in failed.problems[0]
            Faulty.faults.clear()
            assert ingester.step().is_whole
        assert seen(run) == journalled(run)
        assert in_the_lake(run) == 400


def test_commit_with_a_lost_answer_is_in_the_lake_once(environment, postgres, variables, tmp_path):
    cable = Cable(postgres.port)
    url = variables["TIDEGAUGE_STORE"].replace(f":{postgres.port}/", f":{cable.port}/").partition("?")[0]
    environment.setenv("TIDEGAUGE_STORE", f"{url}?sslmode=disable&gssencmode=disable")
    run = make_run(tmp_path)
    writer = Writer(run, os.getpid(), host=HOST)
    with Ingester(run) as ingester:
        for _ in range(3):
            writer.write(100)
            assert ingester.step().is_whole
        writer.write(100)
        cable.lose_answer_to(b"COMMIT")
        assert not ingester.step().is_whole
        cable.heal()
        assert ingester.step().is_whole
        cable.lose_answer_to(b"COMMIT")
        ingester.maintain()
        cable.heal()
        assert ingester.maintain() == ()
    assert seen(run) == journalled(run)
    assert in_the_lake(run) == 400


def test_frozen_database_times_out_at_the_end_and_records_wait(environment, postgres, tmp_path):
    environment.setattr(ingest_feed, "FINISH_SECONDS", 2.0)
    run = make_run(tmp_path)
    writer = Writer(run, os.getpid(), host=HOST)
    fed = ingest_feed.Feed(run, problems.Problems(EventLog(run.events_dir, writer.identity)))
    writer.write(100)
    fed.step()
    wait_for(lambda: fed.last, "the first ingest")
    writer.write(100)
    said = []
    with postgres.frozen():
        assert not fed.finish(lambda: said.append("last"))
        assert (fed.lag_ns(time.monotonic_ns()) or 0) > 1e9
    wait_for(lambda: not fed.is_busy, "the database answers again")
    assert seen(run) == journalled(run)


def test_maintenance_merges_small_files_and_keeps_records(environment, tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, os.getpid(), host=HOST)
    files = "SELECT count(*) FROM ducklake_list_files('lake', 'step')"
    with Ingester(run) as ingester:
        for _ in range(6):
            writer.write(50)
            assert ingester.step().is_whole
        assert ask_the_lake(run, files) == 6
        assert ingester.maintain() == ()
        assert ask_the_lake(run, files) == 1
    assert seen(run) == journalled(run)


def test_damaged_files_of_the_store_are_not_blamed_on_the_query(environment, variables, tmp_path):
    data = tmp_path / "data"
    environment.setenv("TIDEGAUGE_DATA", str(data))
    train = ("run", "--run-id", "spoilt", "--", sys.executable, "-c", STEPS)
    done = tidegauge(tmp_path / "home", *train, **{**variables, "TIDEGAUGE_DATA": str(data)})
    assert done.returncode == 0, done.stderr
    files = list(data.glob("**/step/**/*.parquet"))
    assert files
    for path in files:
        path.write_bytes(b"no table")
    with pytest.raises(ApiError, match="the shared store cannot read its files"):
        open_run("spoilt", home=tmp_path / "home").stream("step")


def test_second_node_with_the_same_host_name_is_refused(environment, tmp_path):
    run = make_run(tmp_path / "a")
    shared.register(run.manifest)
    manifest = {**run.manifest, "anchors": {run.manifest["host"]: layout.wall_anchor()}}
    with pytest.raises(TidegaugeError, match=r"another node .* takes part .* give each node its own host name"):
        shared.register(manifest)


@pytest.mark.parametrize(
    ("store", "data", "message"),
    [
        ("mysql://u@h/d", "s3://b/x", "TIDEGAUGE_STORE is no URL of a database: give postgresql://"),
        ("password=secret host=db", "s3://b/x", "TIDEGAUGE_STORE is no URL of a database"),
        ("postgresql://u:secret/x@h/d", "s3://b/x", "TIDEGAUGE_STORE is no URL of a database"),
        ("postgresql://u:secret#x@h/d", "s3://b/x", "TIDEGAUGE_STORE is no URL of a database"),
        ("postgresql://u:[secret@h/d", "s3://b/x", "TIDEGAUGE_STORE is no URL of a database"),
        ("postgresql://u@h/d?sslpassword=secret", "s3://b/x", "TIDEGAUGE_STORE has an sslpassword"),
        ("postgresql://u:a@127.0.0.1:1/d?password=secret", "/tmp/x", "the shared store cannot be"),
        ("postgresql://u:secret@h/d", "", "TIDEGAUGE_DATA is not set"),
        ("postgresql://u:secret@h/d", "relative/path", "TIDEGAUGE_DATA='relative/path' is no place"),
        ("postgresql://tide:secret@127.0.0.1:1/d", "/tmp/x", "the shared store cannot be"),
    ],
)
def test_invalid_store_is_a_one_line_error_without_its_password(store, data, message, home, monkeypatch):
    run = None
    monkeypatch.setenv("TIDEGAUGE_STORE", store)
    monkeypatch.setenv("TIDEGAUGE_DATA", data)
    run = make_run(home)
    with pytest.raises(TidegaugeError) as caught:
        Ingester(run)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_run_in_the_store_needs_the_store_variables(environment, tmp_path):
    run = make_run(tmp_path)
    environment.delenv("TIDEGAUGE_STORE")
    with pytest.raises(TidegaugeError, match="set TIDEGAUGE_STORE and TIDEGAUGE_DATA"), read(run):
        pass


def test_run_id_is_used_once_and_replaces_a_mirrored_manifest(environment, home):
    environment.setenv("TIDEGAUGE_RUN_ID", "exp-2")
    elsewhere = Run(layout.create_run(home.parent / "elsewhere", name="x", argv=[]))
    shared.register({**elsewhere.manifest, "host": "other", "anchors": {"other": layout.wall_anchor()}})
    mirrored = find_run(home, "exp-2")
    assert mirrored.manifest["host"] == "other"
    with pytest.raises(TidegaugeError, match="run exp-2 belongs to other nodes: collect it there"):
        Ingester(mirrored)
    assert Run(layout.create_run(home, name="x", argv=[])).manifest["host"] == elsewhere.manifest["host"]
    with pytest.raises(FileExistsError):
        layout.create_run(home, name="x", argv=[])


def ended_run(environment, home, run_id):
    environment.setenv("TIDEGAUGE_RUN_ID", run_id)
    run = Run(layout.create_run(home, name="x", argv=[], tags={"lr": "1"}))
    layout.write_manifest(run.path, {**run.manifest, "end_time_ns": time.monotonic_ns(), "exit_status": 0})
    Writer(run, os.getpid(), host=HOST).write(50)
    with Ingester(run) as ingester:
        assert ingester.step().is_whole
    environment.delenv("TIDEGAUGE_RUN_ID")
    return run


def test_notes_and_results_of_shared_runs_are_seen_on_every_machine(environment, home):
    run = ended_run(environment, home.parent / "node", "noted")
    assert run.has_ended_everywhere
    viewer = find_run(home, "noted")
    with ThreadPoolExecutor(3) as pool:  # from two machines at once
        edits = [
            (each, Edit(add={f"{each.path.parent.parent.name}{number}": "x"}))
            for each in (run, viewer)
            for number in range(9)
        ]
        edits += [(run, Edit(name="baseline")), (viewer, Edit(note="good", is_pinned=True))]
        list(pool.map(lambda both: annotate(*both), edits))
    slow = ResultFinding(kind="slow-worker", place="workers of loader 0", severity="warning")
    save_result(run, Result(status="finished", steps=50, findings=(slow,)))
    change_known(viewer, [slow.identity], "an old disk")
    third = home.parent / "third"
    mirror._refreshed.clear()
    seen_there = find_run(third, "baseline")
    assert seen_there.run_id == "noted"
    assert len(seen_there.tags) == 1 + 2 * 9
    assert (seen_there.annotation.note, seen_there.annotation.is_pinned) == ("good", True)
    assert list_entry(seen_there).gravest == "known: slow-worker"
    assert [why for (_, one), why in known_findings(third).items() if one == slow.identity] == ["an old disk"]
    shared.retire("noted", ".pruned-noted")  # it is pinned, so nothing happens
    assert delete_runs(third, [seen_there]) == {seen_there: "it is pinned"}
    annotate(seen_there, Edit(is_pinned=False))
    assert delete_runs(third, [seen_there]) == {}
    assert not shared.nodes("noted")
    assert not [key for key in shared.document_hashes() if key[0] == "noted"]
    assert not seen_there.path.exists()


def test_prune_deletes_finished_runs_and_their_files_from_the_store(environment, variables, home):
    runs = {}
    for name in ("over", "interrupted", "going-on"):
        environment.setenv("TIDEGAUGE_RUN_ID", f"prune-{name}")
        run = runs[name] = Run(layout.create_run(home.parent / name, name="x", argv=[]))
        if name != "going-on":
            layout.write_manifest(run.path, {**run.manifest, "end_time_ns": time.monotonic_ns(), "exit_status": 0})
        Writer(run, os.getpid(), host=HOST).write(50)
        with Ingester(run) as ingester:
            assert ingester.step().is_whole
    shared.retire("prune-interrupted", ".pruned-prune-interrupted")
    shared.retire("prune-going-on", ".pruned-prune-going-on")  # it is not over, so nothing happens

    shown = tidegauge(home, "prune", "--store", "--keep", "0", "--dry-run", **variables)
    assert "its part on" in shown.stdout
    assert len(shared.nodes()["prune-over"]) == 1
    done = tidegauge(home, "prune", "--store", "--keep", "0", "--yes", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert "and the rest of 1 whose deletion was interrupted" in done.stdout

    assert not [name for name in shared.nodes() if "over" in name or "interrupted" in name]
    assert {"prune-over", "prune-interrupted"}.isdisjoint(shared.sizes_bytes())
    keys = boto3.client("s3", verify=variables["AWS_CA_BUNDLE"]).list_objects_v2(
        Bucket=BUCKET, Prefix=f"{variables['TIDEGAUGE_DATA'].partition(BUCKET + '/')[2]}/"
    )["Contents"]
    assert {key["Key"].split("/")[1] for key in keys} == {"prune-going-on"}
    assert [run.run_id for run in list_runs(home) if run.run_id.startswith("prune")] == ["prune-going-on"]
    assert seen(runs["going-on"]) == journalled(runs["going-on"])
