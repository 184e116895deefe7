"""Ingesters that are killed while records arrive, each part of their work in turn; `make crashes` kills 500."""

from __future__ import annotations

from store_crashes import Crasher, crash_series


def test_sigkill_at_any_moment_loses_and_doubles_nothing(tmp_path):
    with Crasher(tmp_path) as crasher:
        hit = crash_series(crasher, tmp_path, 7, range(2, 12))
    assert hit.total() == 10
