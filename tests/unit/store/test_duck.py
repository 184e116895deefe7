"""DuckDB instances that are used again."""

import duckdb

from collector.store.duck import open_connection

THREADS = "SELECT current_setting('threads')"


def test_instance_that_is_used_again_has_the_threads_that_are_asked_for():
    with duckdb.connect() as fresh:
        default = fresh.execute(THREADS).fetchone()
    for threads, expected in ((1, (1,)), (None, default), (1, (1,))):
        with open_connection(threads=threads) as connection:
            assert connection.execute(THREADS).fetchone() == expected
