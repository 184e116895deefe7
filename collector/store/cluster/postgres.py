"""The shared store of a team: a PostgreSQL database and a data path, for the runs of many nodes.

Each run has its own lake there: the catalog is a schema of the database, the Parquet files are in a folder of the
data path. So the code for embedded lakes reads and writes these too, and the commits of one run never conflict with
those of another. One more table, `tidegauge.node`, holds the manifest of each node of each run. With it, a machine
finds runs that it took no part in.

Credentials stay where they are: PostgreSQL's in the URL or in libpq's own sources (`~/.pgpass`, `PGPASSWORD`,
`PGSSLMODE`, …), those of the S3 service where the AWS tools look for them. They are in no manifest and no message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from collector.errors import TidegaugeError
from collector.store.duck import Place, load_extension, open_connection, prepare, quote, short_error
from training_harness.layout import DATA_VARIABLE, MIRROR, STORE_VARIABLE

_SCHEMES = ("postgresql", "postgres")
#: PostgreSQL cuts names at 63 bytes.
_SCHEMA_PREFIX = "tg_"
#: The client gives up an unreachable store after some seconds, and tries again with the next commit. The server
#: gives up a node that is gone, since the others wait for the end of its transaction.
_SERVER_SETTINGS = {
    "lock_timeout": "20s",
    "idle_in_transaction_session_timeout": "600s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
_LIBPQ_DEFAULTS = {
    "connect_timeout": "10",
    "tcp_user_timeout": "20000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "application_name": "tidegauge",
    "options": " ".join(f"-c {name}={value}" for name, value in _SERVER_SETTINGS.items()),
}
_HTTP_TIMEOUT_SECONDS, _HTTP_RETRIES = 10, 2
_PASSWORD_SECRET, _S3_SECRET, _REGISTRY = "tidegauge_postgres", "tidegauge_s3", "registry"
_MAKE_NODES = (
    "CREATE SCHEMA IF NOT EXISTS tidegauge; CREATE TABLE IF NOT EXISTS tidegauge.node "
    "(run_id text, host text, manifest text NOT NULL, PRIMARY KEY (run_id, host))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The shared store that the environment names.

    Attributes:
        conninfo: libpq connection string of the database, without the password.
        password: password from the URL, if it has one.
        data: the folder or `s3://` prefix of all runs, with a slash at its end.

    """

    conninfo: str
    password: str | None
    data: str


def store_from_environment() -> Store:
    """Return the shared store that the environment names.

    Raises:
        TidegaugeError: it names none, or an invalid one.

    """
    url, data = os.environ.get(STORE_VARIABLE, ""), os.environ.get(DATA_VARIABLE, "")
    if not url:
        raise TidegaugeError(f"the run is in a shared store: set {STORE_VARIABLE} and {DATA_VARIABLE} to find it")
    conninfo, password = _read_url(url)
    if not data:
        raise TidegaugeError(
            f"{DATA_VARIABLE} is not set: give s3://BUCKET/PREFIX, or a folder that every node has"
        )
    if not data.startswith(("s3://", "/")):
        raise TidegaugeError(
            f"{DATA_VARIABLE}={data!r} is no place for a shared store's files: give s3://BUCKET/PREFIX, "
            "or the absolute path of a folder that every node has"
        )
    return Store(conninfo=conninfo, password=password, data=data.rstrip("/") + "/")


def place(run_id: str) -> Place:
    """Return the place of a run's lake in the shared store.

    Raises:
        TidegaugeError: the environment names no store, or an invalid one.

    """
    store = store_from_environment()
    on_s3 = store.data.startswith("s3://")
    return Place(
        catalog=f"postgres:{store.conninfo}",
        data=f"{store.data}{run_id}/",
        options=f"METADATA_SCHEMA {quote(_SCHEMA_PREFIX + run_id)}, META_SECRET '{_PASSWORD_SECRET}'",
        extensions=("postgres_scanner", *(("httpfs", "aws") if on_s3 else ())),
        prepare=(_password_secret(store), *(_s3_settings(os.environ) if on_s3 else ())),
    )


def register(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write this node's manifest of a run to the store; it replaces the one before.

    Returns:
        The manifests of all nodes of the run.

    Raises:
        TidegaugeError: another node of the same name takes part in the run, this one does not, or the store cannot
            be reached.

    """
    if manifest.get(MIRROR):
        raise TidegaugeError(f"run {manifest['run_id']} is of other nodes: collect it there")
    run_id, host = str(manifest["run_id"]), str(manifest["host"])
    key = f"run_id = {quote(run_id)} AND host = {quote(host)}"
    text = quote(json.dumps(manifest))
    with _registry() as connection:
        _run(connection, _MAKE_NODES)
        _run(
            connection,
            f"INSERT INTO tidegauge.node VALUES ({quote(run_id)}, {quote(host)}, {text}) ON CONFLICT DO NOTHING",
        )
        if _ask(
            connection,
            f"SELECT 1 FROM tidegauge.node WHERE lower(run_id) = lower({quote(run_id)}) "
            f"AND run_id < {quote(run_id)} LIMIT 1",
        ):
            _run(connection, f"DELETE FROM tidegauge.node WHERE {key}")
            raise TidegaugeError(f"a run has the id {run_id} in other capitals: give another --run-id")
        rows = _ask(connection, f"SELECT manifest FROM tidegauge.node WHERE {key}")
        if json.loads(rows[0][0])["anchors"].get(host) != manifest["anchors"][host]:
            raise TidegaugeError(
                f"another node {host!r} takes part in run {run_id}: give each node its own host name, "
                "or the run another --run-id"
            )
        _run(connection, f"UPDATE tidegauge.node SET manifest = {text} WHERE {key}")
        return _manifests(connection, run_id).get(run_id, [])


def nodes(run_id: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return, by run id, the manifests of all nodes of one run, or of all runs in the store.

    Raises:
        TidegaugeError: the store cannot be reached.

    """
    with _registry() as connection:
        if not _ask(connection, "SELECT 1 FROM pg_tables WHERE schemaname = 'tidegauge' AND tablename = 'node'"):
            return {}
        return _manifests(connection, run_id)


def sizes_bytes() -> dict[str, int]:
    """Return run id -> size of its files in bytes.

    Raises:
        TidegaugeError: the store cannot be reached.

    """
    with _registry() as connection:
        schemas = _ask(connection, "SELECT schemaname FROM pg_tables WHERE tablename = 'ducklake_data_file'")
        parts = [
            f"SELECT {quote(schema.removeprefix(_SCHEMA_PREFIX))}, coalesce(sum(file_size_bytes), 0)::bigint "
            f'FROM "{schema}".ducklake_data_file'
            for (schema,) in schemas
            if schema.startswith(_SCHEMA_PREFIX)
        ]
        return dict(_ask(connection, " UNION ALL ".join(parts))) if parts else {}


def retire(run_id: str, name: str) -> None:
    """Rename a run in the table of nodes if the parts of all its nodes have ended; otherwise do nothing.

    Raises:
        TidegaugeError: the store cannot be reached.

    """
    is_run = f"WHERE run_id = {quote(run_id)}"
    with _registry() as connection:
        _run(
            connection,
            f"UPDATE tidegauge.node SET run_id = {quote(name)} {is_run} AND NOT EXISTS "
            f"(SELECT 1 FROM tidegauge.node {is_run} AND manifest::json->>'end_time_ns' IS NULL)",
        )


def forget(run_id: str, name: str) -> None:
    """Delete the schema of a run, and the rows in the table of nodes under `name`.

    Raises:
        TidegaugeError: the store cannot be reached.

    """
    schema = f"{_SCHEMA_PREFIX}{run_id}".replace('"', '""')
    with _registry() as connection:
        _run(
            connection,
            f'DROP SCHEMA IF EXISTS "{schema}" CASCADE; DELETE FROM tidegauge.node WHERE run_id = {quote(name)}',
        )


def check_data() -> None:
    """Check that the files of the store can be listed.

    Raises:
        TidegaugeError: they cannot.

    """
    root = place("")
    try:
        with open_connection(threads=1) as connection:
            prepare(connection, root)
            connection.execute(f"SELECT count(*) FROM glob({quote(root.data.rstrip('/') + '/*')})").fetchall()
    except duckdb.Error as error:
        raise TidegaugeError(f"the shared store's files cannot be listed ({short_error(error)})") from None


@contextlib.contextmanager
def _registry() -> Iterator[duckdb.DuckDBPyConnection]:
    store = store_from_environment()
    try:
        with open_connection(threads=1) as connection:
            load_extension(connection, "postgres_scanner")
            connection.execute(_password_secret(store))
            connection.execute(
                f"ATTACH {quote(store.conninfo)} AS {_REGISTRY} (TYPE postgres, SECRET {_PASSWORD_SECRET})"
            )
            try:
                yield connection
            finally:
                connection.execute(f"DETACH {_REGISTRY}")
    except duckdb.Error as error:
        raise TidegaugeError(f"the shared store cannot be reached ({short_error(error)})") from None


def _run(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    connection.execute(f"CALL postgres_execute('{_REGISTRY}', {quote(sql)})")


def _ask(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    return connection.execute(f"FROM postgres_query('{_REGISTRY}', {quote(sql)})").fetchall()


def _manifests(connection: duckdb.DuckDBPyConnection, run_id: str | None) -> dict[str, list[dict[str, Any]]]:
    where = "" if run_id is None else f"WHERE run_id = {quote(run_id)}"
    manifests: dict[str, list[dict[str, Any]]] = {}
    for key, text in _ask(connection, f"SELECT run_id, manifest FROM tidegauge.node {where}"):
        manifests.setdefault(key, []).append(json.loads(text))
    return manifests


def _read_url(url: str) -> tuple[str, str | None]:
    """Return libpq's connection string for a PostgreSQL URL, and the password.

    The format is that of postgresql.org/docs/current/libpq-connect.html. Errors do not quote the URL: it may hold a
    password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.SplitResult("", "", "", "", "")
    login, _, hosts = parts.netloc.rpartition("@")
    addresses = [re.fullmatch(r"(?:\[(.*)\]|([^:]*))(?::(\d+))?", host) for host in hosts.split(",")]
    options = dict(urllib.parse.parse_qsl(parts.query))
    if parts.scheme not in _SCHEMES or not parts.netloc or parts.fragment or None in addresses or ":" in parts.path:
        raise TidegaugeError(
            f"{STORE_VARIABLE} is no URL of a database: give postgresql://USER@HOST:PORT/DATABASE, and in a "
            "password write /, @, : and # as %2F, %40, %3A and %23"
        )
    if "sslpassword" in options:
        raise TidegaugeError(f"{STORE_VARIABLE} has a sslpassword: give a key without one, readable for you alone")
    user, _, password = login.partition(":")
    in_query = options.pop("password", "")
    if "options" in options:
        options["options"] = f"{_LIBPQ_DEFAULTS['options']} {options['options']}"
    words = {
        "host": ",".join(address[1] or address[2] for address in addresses if address),
        "port": ",".join(address[3] or "" for address in addresses if address).strip(","),
        "user": urllib.parse.unquote(user),
        "dbname": urllib.parse.unquote(parts.path.lstrip("/")),
    }
    words = {**_LIBPQ_DEFAULTS, **{name: value for name, value in words.items() if value}, **options}
    conninfo = " ".join(f"{name}={_libpq_value(value)}" for name, value in words.items())
    return conninfo, urllib.parse.unquote(password) or in_query or None


def _libpq_value(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _password_secret(store: Store) -> str:
    password = f", PASSWORD {quote(store.password)}" if store.password else ""
    return f"CREATE OR REPLACE SECRET {_PASSWORD_SECRET} (TYPE postgres{password})"


def _s3_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return SQL that takes credentials and, for a service other than AWS, its address where the AWS tools do."""
    address = urllib.parse.urlsplit(environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "")
    elsewhere = ""
    if address.netloc:
        use_ssl = str(address.scheme == "https").lower()
        elsewhere = f", ENDPOINT {quote(address.netloc)}, URL_STYLE 'path', USE_SSL {use_ssl}"
    authorities = environ.get("AWS_CA_BUNDLE") or ssl.get_default_verify_paths().cafile or ""
    return (
        f"CREATE OR REPLACE SECRET {_S3_SECRET} (TYPE s3, PROVIDER credential_chain{elsewhere})",
        f"SET GLOBAL http_timeout = {_HTTP_TIMEOUT_SECONDS}",
        f"SET GLOBAL http_retries = {_HTTP_RETRIES}",
        "SET GLOBAL enable_server_cert_verification = true",
        f"SET GLOBAL ca_cert_file = {quote(authorities)}",
    )
