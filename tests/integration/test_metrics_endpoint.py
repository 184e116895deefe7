"""Metrics of a real run, as a scraper and a real Prometheus get them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import REPOSITORY, bare_environment, wait_for

STEPS = 40
PAUSED = REPOSITORY / "tests" / "scripts" / "paused.py"
#: Folder of the binaries of `make prometheus`, for machines without the package.
BINARIES = REPOSITORY / ".venv" / "prometheus" / "usr" / "bin"


def binary(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=BINARIES)
    if found is None:
        pytest.skip(f"{name} is not installed: `make prometheus` gets it")
    return found


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


class Collector:
    """A command line of Tidegauge that serves metrics; its training ends once the file `go-on` is there."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.go_on = folder / "go-on"
        self._stderr = folder / "stderr"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "collector", *map(str, arguments)],
                stderr=stderr,
                env={**bare_environment(), "TIDEGAUGE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
            )
        self.url = wait_for(self._printed_url, "the URL of the metrics")

    def _printed_url(self) -> str | None:
        found = re.search(r"tidegauge: metrics at (\S+)\n", self.stderr)
        return found and found[1]

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(get(self.url)):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def recorded(self, stream: str, column: str) -> list[int]:
        """A column of all records that the training has written by now."""
        (path,) = (self.go_on.parent / "home" / "runs").iterdir()
        with read(Run(path)) as snapshot:
            return snapshot.query(f'SELECT {column} FROM "{stream}" WHERE {column} IS NOT NULL')[column].tolist()

    def end(self) -> int:
        self.go_on.touch()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def served_run(tmp_path_factory):
    """A run whose training waits after its steps."""
    folder = tmp_path_factory.mktemp("metrics")
    command = [sys.executable, PAUSED, folder / "done", folder / "go-on", STEPS]
    served = Collector(folder, "run", "--name", "demo", "--interval", 0.2, "--prometheus", 0, "--", *command)
    wait_for((folder / "done").exists, "the steps")

    def is_known() -> bool:
        samples = served.samples()
        measured = {labels["role"] for labels, _ in samples.get("tidegauge_memory_pss_bytes", ())}
        return "tidegauge_steps_total" in samples and measured >= {"main", "collector"}

    wait_for(is_known, "the steps' records and the memory of the processes")
    yield served
    served.end()
    served.process.kill()


def test_scrape_equals_the_records(served_run):
    samples = served_run.samples()
    ((labels, steps),) = samples["tidegauge_steps_total"]
    assert steps == len(served_run.recorded("step", "step")) == STEPS
    assert labels == {"run": labels["run"], "host": socket.gethostname(), "rank": ""}
    assert samples["tidegauge_batches_total"][0][1] == len(served_run.recorded("batch", "wait_ns"))
    assert samples["tidegauge_samples_total"][0][1] == sum(served_run.recorded("batch", "samples_count"))
    for name, column in (("step_duration", "duration_ns"), ("data_wait", "data_wait_ns")):
        seconds = samples[f"tidegauge_{name}_seconds_total"][0][1]
        assert seconds == pytest.approx(sum(served_run.recorded("step", column)) / 1e9)
    assert samples["tidegauge_run_info"] == [({"run": labels["run"], "name": "demo"}, 1)]
    roles = {labels["role"]: value for labels, value in samples["tidegauge_memory_pss_bytes"]}
    assert roles["main"] > 2**20
    assert roles["collector"] > 2**20
    (memory,) = [value for _, value in samples["tidegauge_host_memory_size_bytes"]]
    assert memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert samples["tidegauge_collector_cpu_seconds_total"][0][1] > 0


def test_promtool_accepts_the_metrics(served_run):
    done = subprocess.run(
        [binary("promtool"), "check", "metrics"],
        input=get(served_run.url), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def prometheus(served_run, tmp_path):
    """A Prometheus that scrapes the run; gives the function that asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = urllib.parse.urlsplit(served_run.url).netloc
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms}\n"
        f"scrape_configs: [{{job_name: tidegauge, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    server = subprocess.Popen(
        [
            binary("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )

    def ask(expression: str) -> list[dict]:
        query = urllib.parse.urlencode({"query": expression})
        try:
            body = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{query}"))
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return []
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:  # it does not listen yet
            return []
        return body["data"]["result"]

    yield ask
    server.kill()
    server.wait()


def test_prometheus_answers_every_query_of_the_grafana_dashboard(served_run, prometheus):
    (steps,) = wait_for(lambda: prometheus("tidegauge_steps_total"), "a scrape")
    assert steps["value"][1] == str(len(served_run.recorded("step", "step")))
    assert wait_for(lambda: prometheus("rate(tidegauge_steps_total[10m])"), "two scrapes")
    body = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())
    for panel in body["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10m").replace("$run", ".*")
            found = prometheus(expression)
            if not re.search("finding|device|allocator|cgroup|ingest_lag", expression):
                assert found, expression


def test_hanging_scraper_does_not_delay_the_end_of_the_run(served_run):
    where = urllib.parse.urlsplit(served_run.url)
    with socket.create_connection((where.hostname, where.port)) as hangs:
        hangs.send(b"GET /metrics HTTP/1.1\r\n")
        assert served_run.end() == 0
    assert "finished, exit status 0" in served_run.stderr
    assert "Traceback" not in served_run.stderr


def test_port_in_use_is_a_one_line_error_before_the_command_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["run", "--prometheus", str(port), "--", "touch", str(tmp_path / "ran")]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "collector", *command],
            env={**bare_environment(), "TIDEGAUGE_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"tidegauge: metrics cannot be served at 127.0.0.1:{port} (Address already in use)"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_watched_process_has_metrics(tmp_path):
    watched = subprocess.Popen(["sleep", "120"])
    try:
        served = Collector(tmp_path, "watch", "--interval", 0.2, "--prometheus", "127.0.0.1:0", watched.pid)
        samples = wait_for(
            lambda: (found := served.samples()).get("tidegauge_memory_pss_bytes") and found, "a sample"
        )
        assert "tidegauge_steps_total" not in samples
        assert {labels["role"] for labels, _ in samples["tidegauge_processes"]} == {"other", "collector"}
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
    finally:
        watched.kill()
        watched.wait()
