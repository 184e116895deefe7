"""The golden files: how they are written, read and compared."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
#: Parts of a figure's layout that hardly vary: a golden file names them, and looks.json has them once.
LOOKS = GOLDEN / "looks.json"
_LOOK_WORDS = """
    align automargin autorange bargap barmode bgcolor colorbar colorscale fill fillcolor font gridcolor height
    hoverinfo hoverlabel hovermode hoverongaps hovertemplate layer legend line linecolor margin marker mode opacity
    paper_bgcolor plot_bgcolor rangemode showarrow showgrid showlegend stackgroup standoff textangle textfont type
    unifiedhovertitle xanchor xref xshift yanchor yref yshift zerolinecolor
"""
_OF_LOOK = frozenset(_LOOK_WORDS.split())
#: Letters of JSON; what is longer has data in it.
_LARGEST_LOOK = 250
#: Numbers that differ by less are equal.
RELATIVE, ABSOLUTE = 1e-9, 1e-12
_MOST_LINES = 18
_MOST_LETTERS = 160
_LINE_WIDTH = 112


def golden_path(name: str) -> Path:
    """Return the file of what was written of a run."""
    return GOLDEN / f"{name}.json"


def read_golden(name: str) -> Any:
    """Return what was written of a run."""
    return _unpacked(json.loads(golden_path(name).read_text()), json.loads(LOOKS.read_text()))


def write_golden(name: str, value: Any) -> None:
    """Write what is said of a run today."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    looks = json.loads(LOOKS.read_text()) if LOOKS.exists() else {}
    golden_path(name).write_text(written(_packed(value, looks)))
    LOOKS.write_text(written(dict(sorted(looks.items()))))


def drop_unused_looks() -> None:
    """Drop the layouts that no golden file names."""
    texts = [path.read_text() for path in GOLDEN.glob("*.json") if path != LOOKS]
    looks = json.loads(LOOKS.read_text())
    LOOKS.write_text(
        written({name: look for name, look in looks.items() if any(f'"{name}"' in text for text in texts)})
    )


def _packed(value: Any, looks: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_packed(each, looks) for each in value]
    if not isinstance(value, dict):
        return value
    small = {name for name in _OF_LOOK.intersection(value) if len(json.dumps(value[name])) <= _LARGEST_LOOK}
    rest = {name: _packed(each, looks) for name, each in value.items() if name not in small}
    if len(small) < 2:
        return {name: rest.get(name, each) for name, each in value.items()}
    look = {name: value[name] for name in sorted(small)}
    key = f"{zlib.crc32(json.dumps(look).encode()):08x}"
    looks[key] = look
    return {**rest, "look": key}


def _unpacked(value: Any, looks: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, looks) for each in value]
    if not isinstance(value, dict):
        return value
    whole = {name: _unpacked(each, looks) for name, each in value.items()}
    look = whole.pop("look", None)
    return whole if look is None else {**whole, **looks[look]}


def written(value: Any) -> str:
    """Return JSON as text that is short and easy to compare by eye: what fits stands on one line."""
    return _written(value, 0) + "\n"


def _written(value: Any, depth: int) -> str:
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or len(whole) + depth <= _LINE_WIDTH:
        return whole
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        begins = [f"{json.dumps(name, ensure_ascii=False)}: " for name in value]
        parts = [begin + _written(each, depth + 1) for begin, each in zip(begins, value.values(), strict=True)]
        return "{\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + _written(each, depth + 1) for each in value) + "\n" + " " * depth + "]"


def differing(name: str, old: Any, new: Any) -> str:
    """Return what differs, in at most 20 lines; empty if nothing does."""
    lines = list(differences(old, new, ""))
    if not lines:
        return ""
    head = f"{name}: {len(lines)} values differ; if they should, `python -m tests.golden --write {name}`"
    more = [f"… and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join([head, *lines[:_MOST_LINES], *more])


def differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """Yield a line for each value that differs: its path, the old and the new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{path}.{name}" if path else str(name)
            if name not in new:
                yield f"{below}: {_shown(old[name])} → nothing"
            elif name not in old:
                yield f"{below}: nothing → {_shown(new[name])}"
            else:
                yield from differences(old[name], new[name], below)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{path}: {len(old)} items → {len(new)} items"
        for place, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from differences(one, other, f"{path}[{place}{_title(one)}]")
    elif isinstance(old, str) and isinstance(new, str):
        if old != new:
            same = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            place = max(0, same - 40)
            yield f"{path}: {_shown(old, place)} → {_shown(new, place)}"
    elif _is_number(old) and _is_number(new):
        if not math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield f"{path}: {old!r} → {new!r}"
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield f"{path}: {_shown(old)} → {_shown(new)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _title(value: Any) -> str:
    """Return the title of an item of a list: the kind of a finding, the name of a trace, the text of a figure."""
    names = (
        [str(value[name]) for name in ("kind", "name", "words") if name in value] if isinstance(value, dict) else []
    )
    return f" {names[0][:40]}" if names else ""


def _shown(value: Any, place: int = 0) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    cut = text[place : place + _MOST_LETTERS].replace("\n", " ")
    return f"{'…' if place else ''}{cut}{'…' if place + _MOST_LETTERS < len(text) else ''}"
