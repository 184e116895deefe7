"""docs/report.md documents the JSON report: each key that the code declares, and no other, with its type."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from collector.diagnosis import Verdict, load_tables
from collector.diagnosis.tuning import settings_json
from collector.findings import finite
from collector.store import find_run
from tests.conftest import REPOSITORY
from tests.golden import golden_files
from tests.golden.cases import CASES, RECORDED_GPU
from tests.recorded_runs import unpack

WORDS = {str: "text", int: "integer", float: "number", bool: "boolean"}
#: Keys of the form itself, which the verdict does not have.
FORM = {"schema": "integer", "run": "object", "run.run_id": "text", "run.name": "text"}
#: A finding without them has no such key.
LEFT_OUT = {f"findings[].{name}" for name in ("waits_in", "limited_by", "fault", "consequence_of", "known")}
#: The verdict has more than the report.
UNREPORTED = {"awaited", "watch_ended"}
TOP_LEVEL = {"findings", "checks", "summary", "ending"}


def documented() -> dict[str, tuple[str, str]]:
    """Return key path -> (type, meaning), from the tables of docs/report.md."""
    text = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
    found: dict[str, tuple[str, str]] = {}
    prefixes = [""]
    for line in text.partition("\n## JSON\n")[2].partition("\n## ")[0].splitlines():
        if line.startswith("### "):
            prefixes = [f"{path}." for path in re.findall(r"`([^`]+)`", line)]
        elif row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+) \|", line):
            assert prefixes
            for prefix in prefixes:
                assert f"{prefix}{row[1]}" not in found
                found[f"{prefix}{row[1]}"] = (row[2], row[3])
        else:
            assert not line.startswith("| `"), f"not a row of key, type and meaning: {line}"
    return found


def of_hint(hint: Any, path: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (path, type in the words of the page, closed list of its values) of a value and all in it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [list(of_hint(part, path)) for part in parts if part is not type(None)]
        words = [each[0][1] for each in inner]
        null = [" or null"] * (type(None) in parts)
        yield path, ", ".join(words) + "".join(null), tuple(word for each in inner for word in each[0][2])
        for each in inner:
            yield from each[1:]
    elif origin is Literal:
        yield path, "text", parts
    elif origin in (list, tuple):
        (_, item, _), *below = of_hint(parts[0], f"{path}[]")
        plural = {"text": "text", "object": "objects", "integer": "integers", "number": "numbers"}[item]
        yield path, f"list of {plural}", ()
        yield from below
    elif hint in WORDS:
        yield path, WORDS[hint], ()
    else:
        assert dataclasses.is_dataclass(hint) or typing.is_typeddict(hint), f"{path} has the type {hint}"
        yield path, "object", ()
        for name, part in typing.get_type_hints(hint).items():
            yield from of_hint(part, f"{path}.{name}")


def declared() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return key path -> (type, closed list of its values), from the types in the code."""
    found = {path: (kind, ()) for path, kind in FORM.items()}
    for name, hint in typing.get_type_hints(Verdict).items():
        if name not in UNREPORTED:
            for path, kind, values in of_hint(hint, name if name in TOP_LEVEL else f"run.{name}"):
                found[path] = (kind, values)
    return found


def values_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of a JSON value and all in it."""
    if isinstance(value, dict):
        for name, part in value.items():
            below = f"{path}.{name}" if path else name
            yield below, part
            yield from values_of(part, below)
    elif isinstance(value, list):
        for part in value:
            yield from values_of(part, f"{path}[]")


def fits(value: Any, kind: str) -> bool:
    """Return whether a JSON value has a type of the page, such as "integer or null"."""
    if value is None:
        return "null" in kind
    if isinstance(value, list):
        item = kind.partition("list of ")[2]
        return bool(item) and all(fits(part, item) for part in value)
    checked = {"text": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict}
    return any(isinstance(value, types_) for word, types_ in checked.items() if word in kind) and (
        not isinstance(value, bool) or "boolean" in kind
    )


def expect_documented(body: Any, path: str) -> None:
    page, paths = documented(), dict.fromkeys(path for path, _ in values_of(body, path))
    assert [path for path in paths if path not in page] == []
    wrong = [
        (path, page[path][0], value) for path, value in values_of(body, path) if not fits(value, page[path][0])
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [*CASES, *RECORDED_GPU])
def test_every_key_of_a_recorded_report_is_documented_with_its_type(name):
    expect_documented(golden_files.read_golden(name)["report"], "")


@pytest.mark.parametrize("name", [*CASES, *RECORDED_GPU])
def test_every_measurement_of_a_recorded_report_is_documented(name):
    docs = REPOSITORY / "docs"
    paths = [docs / "measurements.md", docs / "findings.md", *(docs / "findings").glob("*.md")]
    pages = [path.read_text(encoding="utf-8") for path in paths]
    findings = golden_files.read_golden(name)["report"]["findings"]
    names = {evidence["name"] for finding in findings for evidence in finding["evidence"]}
    assert {each for each in names if not any(f"`{each}`" in page for page in pages)} == set()


def test_the_page_has_the_keys_that_the_code_declares_and_no_others():
    page = {path for path in documented() if path.partition("[")[0] != "settings"}

    assert page ^ declared().keys() == set()


@pytest.mark.parametrize("path", declared())
def test_a_key_has_its_declared_type_and_every_word_that_it_may_be(path):
    kind, values = declared()[path]
    on_page, meaning = documented()[path]

    if path in LEFT_OUT:
        assert on_page == kind.removesuffix(" or null") + " or absent"
    elif "number" in kind:  # NaN and infinity become null, which no type says
        assert on_page in (kind, f"{kind} or null")
    else:
        assert on_page == kind
    assert [word for word in values if f"`{word}`" not in meaning] == []


def test_every_setting_that_a_loader_should_get_is_documented(tmp_path):
    """The recorded run has too few workers, so another setting is predicted to be better."""
    unpack("workers-too-slow", tmp_path)
    settings = finite(settings_json(load_tables(find_run(tmp_path, "workers-too-slow"))))
    keys = {path for path, _ in values_of({"settings": settings}, "")}

    assert keys == {path for path in documented() if path.partition("[")[0] == "settings"}
    expect_documented({"settings": settings}, "")


def test_every_key_has_one_sentence():
    assert [path for path, (_, meaning) in documented().items() if not meaning.endswith(".")] == []
