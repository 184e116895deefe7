"""The shared store of a team: a PostgreSQL database and a data path, for the runs of many nodes.

Each run has its own lake there: the catalog is a schema of the database, the Parquet files are in a folder of the
data path. So the code for embedded lakes reads and writes these too, and the commits of one run never conflict with
those of another. One more table, `tidegauge.node`, holds the manifest of each node of each run. With it, a machine
finds runs that it took no part in. The table `tidegauge.document` holds the documents of runs, such as their notes.

Credentials stay where they are: PostgreSQL's in the URL or in libpq's own sources (`~/.pgpass`, `PGPASSWORD`,
`PGSSLMODE`, …), those of the S3 service where the AWS tools look for them. They are in no manifest and no message.

Every function raises a TidegaugeError if the environment names no valid store, or if that cannot be reached.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from collector.errors import TidegaugeError, one_line
from collector.store.duck import Place, open_connection, prepare, quote, short_error
from training_harness.layout import DATA_VARIABLE, MIRROR, STORE_VARIABLE

try:
    import psycopg
    from psycopg import conninfo, sql
except ImportError:
    raise TidegaugeError("the shared store needs psycopg: pip install 'tidegauge[cluster]'") from None

#: The shape of a URL whose parts are kept apart: a password has special characters as %XX.
_HOST = r"(?:\[[^\]]*\]|[^/@:#?,\[]*)(?::\d+)?"
_URL = re.compile(
    rf"postgres(?:ql)?://(?:[^/@:#\[]*(?::[^/@#\[]*)?@)?(?=[^/?]){_HOST}(?:,{_HOST})*(?:/[^/@:#?]*)?(?:\?[^#]*)?"
)
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
_PASSWORD_SECRET, _S3_SECRET = "tidegauge_postgres", "tidegauge_s3"
_MAKE_NODES = (
    "CREATE SCHEMA IF NOT EXISTS tidegauge; CREATE TABLE IF NOT EXISTS tidegauge.node "
    "(run_id text, host text, manifest text NOT NULL, PRIMARY KEY (run_id, host))"
)
#: One editor at a time, also of different documents: a change takes milliseconds. Without the lock, two that create
#: the table at once would fail.
_MAKE_DOCUMENTS = (
    "SELECT pg_advisory_xact_lock(hashtextextended('tidegauge.document', 0)); "
    "CREATE SCHEMA IF NOT EXISTS tidegauge; CREATE TABLE IF NOT EXISTS tidegauge.document "
    "(run_id text, name text, body text NOT NULL, PRIMARY KEY (run_id, name))"
)
#: Key of the documents that belong to no run.
NO_RUN = ""
#: SQL for the ids of pinned runs.
_PINNED = "SELECT run_id FROM tidegauge.document WHERE name = 'annotation' AND body::json->>'is_pinned' = 'true'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of the shared store that the environment names.

    Attributes:
        conninfo: libpq connection string of the database, without the password of the URL.
        data: the folder or `s3://` prefix of all runs, with a slash at its end.
    """

    conninfo: str
    password: str | None
    data: str


def store_address() -> Address:
    """Return the shared store that the environment names."""
    url, data = os.environ.get(STORE_VARIABLE, ""), os.environ.get(DATA_VARIABLE, "")
    if not url:
        raise TidegaugeError(f"the run is in a shared store: set {STORE_VARIABLE} and {DATA_VARIABLE} to find it")
    words, password = _read_url(url)
    if not data:
        raise TidegaugeError(
            f"{DATA_VARIABLE} is not set: give s3://BUCKET/PREFIX, or a folder that every node has"
        )
    if not data.startswith(("s3://", "/")):
        raise TidegaugeError(
            f"{DATA_VARIABLE}={data!r} is no place for a shared store's files: give s3://BUCKET/PREFIX, "
            "or the absolute path of a folder that every node has"
        )
    return Address(conninfo=words, password=password, data=data.rstrip("/") + "/")


def place(run_id: str) -> Place:
    """Return the place of a run's lake in the shared store."""
    store = store_address()
    on_s3 = store.data.startswith("s3://")
    password = f", PASSWORD {quote(store.password)}" if store.password else ""
    return Place(
        catalog=f"postgres:{store.conninfo}",
        data=f"{store.data}{run_id}/",
        options=f"METADATA_SCHEMA {quote(_SCHEMA_PREFIX + run_id)}, META_SECRET '{_PASSWORD_SECRET}'",
        extensions=("postgres_scanner", *(("httpfs", "aws") if on_s3 else ())),
        prepare=(
            f"CREATE OR REPLACE SECRET {_PASSWORD_SECRET} (TYPE postgres{password})",
            *(_s3_settings(os.environ) if on_s3 else ()),
        ),
    )


def register(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Replace this node's manifest of a run in the store; return the manifests of all nodes of the run.

    Raises:
        TidegaugeError: another node of the same name takes part in the run, this one does not, or the store cannot
            be reached.
    """
    if manifest.get(MIRROR):
        raise TidegaugeError(f"run {manifest['run_id']} belongs to other nodes: collect it there")
    run_id, host = str(manifest["run_id"]), str(manifest["host"])
    of_node, row = "run_id = %s AND host = %s", (run_id, host)
    with _registry() as registry:
        registry.execute(_MAKE_NODES)
        registry.execute(
            "INSERT INTO tidegauge.node VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (*row, json.dumps(manifest))
        )
        same_letters = "SELECT 1 FROM tidegauge.node WHERE lower(run_id) = lower(%s) AND run_id < %s LIMIT 1"
        if registry.execute(same_letters, (run_id, run_id)).fetchone():
            registry.execute(f"DELETE FROM tidegauge.node WHERE {of_node}", row)
            raise TidegaugeError(f"a run has the id {run_id} in other capitals: give another --run-id")
        [(stored,)] = registry.execute(f"SELECT manifest FROM tidegauge.node WHERE {of_node}", row).fetchall()
        if json.loads(stored)["anchors"].get(host) != manifest["anchors"][host]:
            raise TidegaugeError(
                f"another node {host!r} takes part in run {run_id}: give each node its own host name, "
                "or the run another --run-id"
            )
        registry.execute(f"UPDATE tidegauge.node SET manifest = %s WHERE {of_node}", (json.dumps(manifest), *row))
    return nodes(run_id).get(run_id, [])


def nodes(run_id: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return, by run id, the manifests of all nodes of one run, or of all runs in the store."""
    manifests: dict[str, list[dict[str, Any]]] = {}
    with _registry() as registry, contextlib.suppress(psycopg.errors.UndefinedTable):  # no node registered yet
        of_run = "WHERE %(run_id)s::text IS NULL OR run_id = %(run_id)s"
        for key, text in registry.execute(
            f"SELECT run_id, manifest FROM tidegauge.node {of_run}", {"run_id": run_id}
        ):
            manifests.setdefault(key, []).append(json.loads(text))
    return manifests


def change_document(run_id: str, name: str, change: Callable[[str | None], str]) -> str:
    """Change a document of a run, given its text or None, and return the new text; editors wait for each other.

    Raises:
        TidegaugeError: the store cannot be reached, or may not be written.
    """
    key = (run_id, name)
    with _registry() as registry, registry.transaction():
        registry.execute(_MAKE_DOCUMENTS)
        rows = registry.execute(
            "SELECT body FROM tidegauge.document WHERE run_id = %s AND name = %s", key
        ).fetchall()
        text = change(rows[0][0] if rows else None)
        registry.execute(
            "INSERT INTO tidegauge.document VALUES (%s, %s, %s) "
            "ON CONFLICT (run_id, name) DO UPDATE SET body = excluded.body",
            (*key, text),
        )
    return text


def document_hashes() -> dict[tuple[str, str], str]:
    """Return (run id, name) -> MD5 of each document's text."""
    with _registry() as registry, contextlib.suppress(psycopg.errors.UndefinedTable):  # no document yet
        rows = registry.execute("SELECT run_id, name, md5(body) FROM tidegauge.document")
        return {(run_id, name): digest for run_id, name, digest in rows}
    return {}


def documents(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return (run id, name) -> text of these documents."""
    run_ids, names = map(list, zip(*keys, strict=True))
    with _registry() as registry:
        rows = registry.execute(
            "SELECT run_id, name, body FROM tidegauge.document "
            "JOIN unnest(%s::text[], %s::text[]) AS wanted (run_id, name) USING (run_id, name)",
            (run_ids, names),
        )
        return {(run_id, name): body for run_id, name, body in rows}


def sizes_bytes() -> dict[str, int]:
    """Return run id -> size of its files in bytes."""
    with _registry() as registry:
        lakes = "SELECT schemaname FROM pg_tables WHERE tablename = 'ducklake_data_file'"
        schemas = [name for (name,) in registry.execute(lakes).fetchall() if name.startswith(_SCHEMA_PREFIX)]
        size = sql.SQL("SELECT {}, coalesce(sum(file_size_bytes), 0)::bigint FROM {}.ducklake_data_file")
        sizes = [
            size.format(sql.Literal(name.removeprefix(_SCHEMA_PREFIX)), sql.Identifier(name)) for name in schemas
        ]
        return dict(registry.execute(sql.SQL(" UNION ALL ").join(sizes)).fetchall()) if sizes else {}


def retire(run_id: str, name: str) -> None:
    """Rename a run in the table of nodes if all its nodes have ended their parts and it is not pinned."""
    goes_on = "SELECT 1 FROM tidegauge.node WHERE run_id = %(id)s AND manifest::json->>'end_time_ns' IS NULL"
    with _registry() as registry, registry.transaction():
        registry.execute(_MAKE_DOCUMENTS)
        registry.execute(
            f"UPDATE tidegauge.node SET run_id = %(name)s WHERE run_id = %(id)s AND NOT EXISTS ({goes_on}) "
            f"AND %(id)s NOT IN ({_PINNED})",
            {"id": run_id, "name": name},
        )


def forget(run_id: str, name: str) -> None:
    """Delete the schema and the documents of a run, and the rows in the table of nodes under `name`."""
    schema = sql.Identifier(f"{_SCHEMA_PREFIX}{run_id}")
    with _registry() as registry:
        registry.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(schema))
        with registry.transaction():
            registry.execute(_MAKE_DOCUMENTS)
            registry.execute("DELETE FROM tidegauge.document WHERE run_id = %s", (run_id,))
            registry.execute("DELETE FROM tidegauge.node WHERE run_id = %s", (name,))


def check_shared_store() -> int:
    """Return the number of runs in the store, if its files can be listed too."""
    runs_count = len(nodes())
    check_data()
    return runs_count


def check_data() -> None:
    """Check that the files of the store can be listed."""
    root = place("")
    try:
        with open_connection(threads=1) as connection:
            prepare(connection, root)
            connection.execute(f"SELECT count(*) FROM glob({quote(root.data.rstrip('/') + '/*')})").fetchall()
    except duckdb.Error as error:
        raise TidegaugeError(f"the shared store's files cannot be listed ({short_error(error)})") from None


@contextlib.contextmanager
def _registry() -> Iterator[psycopg.Connection]:
    store = store_address()
    try:
        with psycopg.connect(store.conninfo, password=store.password, autocommit=True) as connection:
            yield connection
    except psycopg.Error as error:  # with a line for each address of the host that was tried
        raise TidegaugeError(f"the shared store cannot be reached ({one_line(str(error))})") from None


def _read_url(url: str) -> tuple[str, str | None]:
    """Return libpq's connection string for a PostgreSQL URL, and the password.

    Errors do not quote the URL: it may hold a password.
    """
    try:
        parsed = conninfo.conninfo_to_dict(url) if _URL.fullmatch(url) else {}
    except psycopg.ProgrammingError:
        parsed = {}
    words = {name: str(value) for name, value in parsed.items()}
    if not words:
        raise TidegaugeError(
            f"{STORE_VARIABLE} is no URL of a database: give postgresql://USER@HOST:PORT/DATABASE, and in a "
            "password write /, @, : and # as %2F, %40, %3A and %23"
        )
    if "sslpassword" in words:
        raise TidegaugeError(
            f"{STORE_VARIABLE} has an sslpassword: give a key without a password that only you can read"
        )
    password = words.pop("password", None)
    if "options" in words:
        words["options"] = f"{_LIBPQ_DEFAULTS['options']} {words['options']}"
    return conninfo.make_conninfo(**{**_LIBPQ_DEFAULTS, **words}), password


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
