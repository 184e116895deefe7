"""Parquet files that Tidegauge writes itself and adds to a lake of the shared store.

DuckLake deletes the files that it wrote when a commit fails. Over a network a commit can succeed in the database
and seem to fail here, if the answer is lost: then the catalog names files that are gone, and the lake is ruined for
all nodes. DuckLake does not delete files that were added to it. Files of commits that did fail are orphans, which
are deleted after a day.
"""

from __future__ import annotations

import os
import uuid

import duckdb

from collector.store.duck import quote
from collector.store.lake.lake import LAKE, TABLES, TARGET_BYTES


def insert(connection: duckdb.DuckDBPyConnection, data: str, table: str, source: str, present: list[str]) -> None:
    """Add rows to a table, within the transaction that is open.

    Args:
        connection: a connection with the lake attached.
        data: folder of the lake's files, with a slash at its end.
        table: name of the lake's table.
        source: SQL source of the rows.
        present: columns of the source; the table's others become NULL.

    Raises:
        duckdb.Error: the file cannot be written, or the database is away.

    """
    columns = ", ".join(
        (f'"{name}"' if name in present else "NULL") + f'::{kind} AS "{name}"' for name, kind in TABLES[table]
    )
    folder = f"{data}main/{table}/"
    if folder.startswith("/"):
        os.makedirs(folder, exist_ok=True)
    path = quote(f"{folder}{uuid.uuid4()}.parquet")
    connection.execute(
        f"COPY (SELECT {columns} FROM {source}) TO {path} (FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)"
    )
    connection.execute(f"CALL ducklake_add_data_files('{LAKE}', '{table}', {path})")


def merge(connection: duckdb.DuckDBPyConnection, data: str, table: str) -> None:
    """Merge the small files of a table, in a transaction of its own; after an error it stays open.

    Raises:
        duckdb.Error: a file cannot be read or written, another node merges too, or the database is away.

    """
    files = connection.execute(
        f"SELECT data_file, data_file_size_bytes FROM ducklake_list_files('{LAKE}', '{table}') ORDER BY 2"
    ).fetchall()
    small, total_bytes = [], 0
    for path, size_bytes in files:
        if total_bytes + size_bytes > TARGET_BYTES:
            break
        small.append(path)
        total_bytes += size_bytes
    if len(small) < 2:
        return
    is_small = f"filename IN [{', '.join(map(quote, small))}]"
    columns = [name for name, _ in TABLES[table]]
    connection.begin()
    insert(connection, data, table, f"(FROM {LAKE}.{table} WHERE {is_small})", columns)
    connection.execute(f"DELETE FROM {LAKE}.{table} WHERE {is_small}")
    connection.commit()
