"""A real PostgreSQL and a real S3 endpoint for the tests of the shared store, both with TLS; and a cable to cut."""

from __future__ import annotations

import glob
import http.client
import http.server
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import boto3
import psutil

from tests.conftest import wait_for

PASSWORD = "do/not@tell:me"
SECRET_KEY = "nobodymayknowthis"
BUCKET = "tidegauge"
_AS_POSTGRES = ("runuser", "-u", "postgres", "--") if os.geteuid() == 0 else ()


def postgres_programs() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`."""
    found = shutil.which("initdb") or next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))), None)
    return Path(found).parent if found else None


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def certificate(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    paths = folder / "server.crt", folder / "server.key"
    subprocess.run(
        [
            *("openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName={names}", "-out", str(paths[0]), "-keyout", str(paths[1])),
        ],
        check=True,
        capture_output=True,
    )
    return paths


class Postgres:
    """A database cluster with a password and TLS, in a folder outside pytest's: it belongs to another user."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        folder = Path(tempfile.mkdtemp(prefix="tidegauge-postgres-"))
        programs = postgres_programs()
        assert programs is not None
        self._ctl, self._data = str(programs / "pg_ctl"), folder / "data"
        self.host, self.port = host, free_port(host)
        certificate(folder, f"DNS:localhost,IP:{host}")
        (folder / "password").write_text(PASSWORD)
        if _AS_POSTGRES:
            subprocess.run(["chown", "-R", "postgres", str(folder)], check=True)
        initialise = [programs / "initdb", "-D", self._data, "-U", "tide", "-A", "scram-sha-256", "-E", "UTF8"]
        self._do(*initialise, f"--pwfile={folder / 'password'}")
        settings = {
            "port": self.port,
            "listen_addresses": host,
            "unix_socket_directories": folder,
            "ssl": "on",
            "ssl_cert_file": folder / "server.crt",
            "ssl_key_file": folder / "server.key",
            "fsync": "off",
        }
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        if host != "127.0.0.1":
            with (self._data / "pg_hba.conf").open("a") as rules:
                rules.write("hostssl all all 0.0.0.0/0 scram-sha-256\n")
        self._log, self._authority = folder / "log", folder / "server.crt"
        self.start()

    @property
    def url(self) -> str:
        return (
            f"postgresql://tide:{PASSWORD.replace('/', '%2F').replace('@', '%40')}@{self.host}:{self.port}/postgres"
            f"?sslmode=verify-full&sslrootcert={self._authority}"
        )

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        self._do(self._ctl, "-D", self._data, "-l", self._log, "-w", "start")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._data.parent)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all processes for the block: connections stay, nothing answers."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children()]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def stop(self) -> None:
        self._do(self._ctl, "-D", self._data, "-m", "immediate", "-w", "stop")

    def _do(self, *command: object) -> None:
        with (self._data.parent / "said").open("ab") as said:  # a pipe would be held open by the server
            subprocess.run([*_AS_POSTGRES, *map(str, command)], check=True, stdout=said, stderr=said, cwd="/")


@contextmanager
def s3_service(folder: Path, host: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Run moto's server with a bucket; yield the variables by which the AWS tools find it."""
    cert, key = certificate(folder, f"DNS:localhost,IP:{host}")
    port = free_port(host)
    with (folder / "moto.log").open("wb") as log:
        command = [
            sys.executable,
            "-m",
            "moto.server",
            "-H",
            host,
            "-p",
            str(port),
            "-c",
            str(cert),
            "-k",
            str(key),
        ]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    variables = {
        "AWS_ACCESS_KEY_ID": "tide",
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"https://{host}:{port}",
        "AWS_CA_BUNDLE": str(cert),
    }
    try:
        wait_for(lambda: _answers(host, port, cert) or server.poll(), "moto answers")
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            verify=str(cert),
            aws_access_key_id="tide",
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        yield variables
    finally:
        for process in (*psutil.Process(server.pid).children(recursive=True), server):
            process.send_signal(signal.SIGKILL)
        server.wait()


def _answers(host: str, port: int, cert: Path) -> bool:
    connection = http.client.HTTPSConnection(
        host, port, timeout=5, context=ssl.create_default_context(cafile=str(cert))
    )
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


class Cable:
    """Forwarder of TCP to a port; it can be cut, so that nothing is answered, and healed."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._lost_after: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def lose_answer_to(self, words: bytes) -> None:
        """Pass on what holds these words, give it time to be done, and then nothing comes back."""
        self._lost_after = words

    def heal(self) -> None:
        self._lost_after = None
        self._whole.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            with suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._target))
                lost = threading.Event()
                threading.Thread(target=self._ask, args=(near, far, lost), daemon=True).start()
                threading.Thread(target=self._answer, args=(far, near, lost), daemon=True).start()

    def _ask(self, near: socket.socket, far: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError), near, far:
            while data := near.recv(65536):
                self._whole.wait()
                if self._lost_after is not None and self._lost_after in data:
                    lost.set()
                far.sendall(data)
                if lost.is_set():
                    time.sleep(1.0)  # the server commits
                    return
            far.shutdown(socket.SHUT_WR)
            time.sleep(0.1)

    def _answer(self, far: socket.socket, near: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := far.recv(65536):
                self._whole.wait()
                if not lost.is_set():
                    near.sendall(data)
            near.shutdown(socket.SHUT_WR)


class Faulty(http.server.BaseHTTPRequestHandler):
    """Handler that passes requests on to the S3 endpoint, or answers as a faulty service does."""

    protocol_version = "HTTP/1.1"
    target: tuple[str, int, str]
    #: Faults of the next requests that write: "500" or "silence".
    faults: ClassVar[list[str]] = []

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faults.pop(0) if self.faults and self.command in ("PUT", "POST") else ""
        if fault == "500":
            self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        if fault == "silence":
            self.close_connection = True
            time.sleep(3)
            return
        host, port, authority = self.target
        trusted = ssl.create_default_context(cafile=authority)
        with closing(http.client.HTTPSConnection(host, port, context=trusted)) as there:
            there.request(self.command, self.path, body, dict(self.headers))
            got = there.getresponse()
            self._answer(got.status, dict(got.getheaders()), got.read())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def faulty_s3(variables: dict[str, str]) -> Iterator[str]:
    """Yield the address of a faulty service in front of the real one."""
    address = urllib.parse.urlsplit(variables["AWS_ENDPOINT_URL"])
    Faulty.target = (str(address.hostname), int(address.port or 0), variables["AWS_CA_BUNDLE"])
    Faulty.faults.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faulty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
