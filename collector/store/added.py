"""Parquet files that Tidegauge writes itself and adds to a lake of the shared store.

DuckLake deletes the files that it wrote when a commit fails. Over a network a commit can fail for us and succeed in
the database, if its answer is lost on the way: then the catalog names files that are gone, and the lake is ruined
for all nodes. Files that were added it leaves alone. Those of commits that did fail are orphans, which are deleted
after a day.
"""

from __future__ import annotations

import os
import uuid

import duckdb

from collector.store.engine import quoted
from collector.store.lake import LAKE, TABLES, TARGET_BYTES


def insert(connection: duckdb.DuckDBPyConnection, data: str, table: str, source: str, have: list[str]) -> None:
    """Add rows to a table, within the transaction that is open.

    Args:
        connection: with the lake attached.
        data: folder of the lake's files, with a slash at its end.
        table: of the lake.
        source: of the rows, in SQL.
        have: the columns that it has; others become NULL.

    Raises:
        duckdb.Error: the file cannot be written, or the database is away.

    """
    columns = ", ".join(
        f'{f"{chr(34)}{name}{chr(34)}" if name in have else "NULL"}::{kind} AS "{name}"'
        for name, kind in TABLES[table]
    )
    folder = f"{data}main/{table}/"
    if folder.startswith("/"):
        os.makedirs(folder, exist_ok=True)
    path = quoted(f"{folder}{uuid.uuid4()}.parquet")
    connection.execute(
        f"COPY (SELECT {columns} FROM {source}) TO {path} (FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)"
    )
    connection.execute(f"CALL ducklake_add_data_files('{LAKE}', '{table}', {path})")


def merge(connection: duckdb.DuckDBPyConnection, data: str, table: str) -> None:
    """Put the small files of a table into one, in a transaction of its own; after an error it stays open.

    Raises:
        duckdb.Error: a file cannot be read or written, another node merges too, or the database is away.

    """
    found = connection.execute(
        f"SELECT data_file, data_file_size_bytes FROM ducklake_list_files('{LAKE}', '{table}') ORDER BY 2"
    ).fetchall()
    small, total_bytes = [], 0
    for path, size_bytes in found:
        if total_bytes + size_bytes > TARGET_BYTES:
            break
        small.append(path)
        total_bytes += size_bytes
    if len(small) < 2:
        return
    files = f"[{', '.join(map(quoted, small))}]"
    columns = [name for name, _ in TABLES[table]]
    connection.begin()
    insert(connection, data, table, f"(FROM {LAKE}.{table} WHERE filename IN {files})", columns)
    connection.execute(f"DELETE FROM {LAKE}.{table} WHERE filename IN {files}")
    connection.commit()
