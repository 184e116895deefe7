"""Settings for the DataLoaders of a run while it goes on: found by its verdicts, handed to the training in a file.

With `tidegauge run --workers auto` the training gives each loader its setting when it makes the next iterator, and
says so in an event. A setting is given up if the loader's throughput with it is lower than before.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collector.agent.problems import say
from collector.store import Run
from collector.units import number
from training_harness.layout import FOR_TRAINING, loader_settings_path, replace_file

#: Seconds from the start of a run, or from a changed setting, to the first verdict. Each further one comes when as
#: much time has passed as before it, so they cost less and less.
FIRST_SECONDS = 15.0
_OPTION = "--workers auto"

#: Training process, as the file names it, and number of a loader in it.
_Place = tuple[str, int]


class LoaderSettings:
    """The settings for the loaders of this host's training processes.

    Args:
        is_auto: True if the training applies them; else they are found once it asks for one.
    """

    def __init__(self, *, is_auto: bool = False) -> None:
        self.is_wanted = is_auto
        self._is_auto = is_auto
        self._host = socket.gethostname()
        self._path: Path | None = None
        #: The last verdict's settings, put there by the thread that waited for it.
        self._found: Sequence[Mapping[str, Any]] = ()
        self._names: dict[_Place, str] = {}
        #: Training process -> number of a loader -> its setting, as in the file.
        self._settings: dict[str, dict[str, dict[str, Any]]] = {}
        self._is_written = True
        #: The event about the setting that a loader got.
        self._changes: dict[_Place, Mapping[str, Any]] = {}
        self._judged: set[_Place] = set()
        #: Loaders whose own setting was faster.
        self._undone: set[_Place] = set()
        self._said: set[tuple[int, str]] = set()
        self._since_ns: int | None = None
        self._due_ns = 0

    def begin(self, run: Run) -> None:
        """Hand settings to this run from now on."""
        self._path = loader_settings_path(run.path, self._host)

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Take note of a setting that the training asked for, or that a loader got."""
        if event["kind"] == "setting-asked":
            self.is_wanted = True
        elif event["kind"] == "loader-set":
            before = _process(event), int(event["replaces"])
            name = self._names.get(before, f"loader {before[1]}")
            self._say(before[1], *_change_words(name, event))
            if event["obstacle"] is None:
                place = before[0], int(event["loader"])
                if place not in self._changes:  # one that each pass creates is set in each
                    self._since_ns = None
                self._changes[place], self._names[place] = event, name
                self._put(place, event, is_undo=event["is_undo"])

    def note(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Take the settings of a verdict; called in the thread that waited for it."""
        self._found = settings

    def tick(self, now_ns: int) -> bool:
        """Hand over what the last verdict found; return whether another verdict is due.

        Raises:
            OSError: the file cannot be written.
        """
        found, self._found = self._found, ()
        for one in found:
            if one["host"] == self._host:
                self._take(one)
        if not self._is_written and self._path is not None:
            replace_file(self._path, json.dumps(self._settings), FOR_TRAINING)
            self._is_written = True
        if not self.is_wanted:
            return False
        if self._since_ns is None:
            self._since_ns, self._due_ns = now_ns, now_ns + round(FIRST_SECONDS * 1e9)
        is_due = now_ns >= self._due_ns
        if is_due:
            self._due_ns = now_ns + max(now_ns - self._since_ns, round(FIRST_SECONDS * 1e9))
        return is_due

    def run_ended(self) -> None:
        """Delete the file."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _take(self, one: Mapping[str, Any]) -> None:
        """Take what a verdict says of a loader."""
        place = _process(one), int(one["loader"])
        name = self._names[place] = one["loader_name"] or f"loader {place[1]}"
        if place in self._changes:
            self._compare(place, one, self._changes[place])
        elif one["num_workers"] is not None and place not in self._undone:
            if not one["is_change"]:
                self._say(place[1], "keeps", f"{name}: {_words(one)} stays, since {one['reason']}")
            self._put(place, one, measured=one["batches_per_second"], expected=one["expected"])

    def _compare(self, place: _Place, one: Mapping[str, Any], change: Mapping[str, Any]) -> None:
        """Compare the throughput of a loader that got a setting with the one before; give a slower setting up."""
        now, earlier = one["batches_per_second"], change["measured"]
        if change["is_undo"] or place in self._judged or now is None or earlier is None:
            return
        self._judged.add(place)
        rates = f"{self._names[place]}: {number(now)} batches/s with {_words(change)}, {number(earlier)} before"
        if now >= earlier:
            self._say(place[1], "faster", rates)
            return
        self._say(place[1], "slower", f"{rates}; its next pass goes back")
        replaced = {name: change[f"replaced_{name}"] for name in ("num_workers", "prefetch_factor")}
        before = place[0], int(change["replaces"])
        self._undone.add(before)
        for either in (place, before):  # one that each pass creates has the earlier number
            self._put(either, replaced, is_undo=True, measured=now)

    def _put(
        self,
        place: _Place,
        setting: Mapping[str, Any],
        *,
        is_undo: bool = False,
        measured: float | None = None,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        """Note a loader's setting for the file."""
        self._settings.setdefault(place[0], {})[str(place[1])] = {
            "num_workers": setting["num_workers"],
            "prefetch_factor": setting["prefetch_factor"],
            "is_undo": is_undo,
            "measured": measured,
            "expected": expected,
        }
        self._is_written = False

    def _say(self, loader: int, about: str, text: str) -> None:
        """Write a line about a loader; ranks have the same loaders, so only the first of them is named."""
        if self._is_auto and (loader, about) not in self._said:
            self._said.add((loader, about))
            say(f"{_OPTION}: {text}")


def _process(of: Mapping[str, Any]) -> str:
    return f"{of['host']}.{of['pid']}.{of['start_ticks']}"


def _words(setting: Mapping[str, Any], prefix: str = "") -> str:
    workers, prefetch = (setting[f"{prefix}{name}"] for name in ("num_workers", "prefetch_factor"))
    return f"num_workers={workers}" + (f", prefetch_factor={prefetch}" if workers else "")


def _change_words(name: str, event: Mapping[str, Any]) -> tuple[str, str]:
    """Return what an event about a setting says, in a word and in a line."""
    setting, before = _words(event), _words(event, "replaced_")
    if event["obstacle"] is not None:
        return event["obstacle"], f"{name}: {before} stays, not {setting}, since {event['obstacle']}"
    if event["is_undo"]:
        return "undo", f"{name}: {setting} again from pass {event['epochs_count'] + 1} on"
    expected = event["expected"] or {}
    rate, low, high = (number(expected.get(key)) for key in ("batches_per_second", "low", "high"))
    return "set", (
        f"{name}: {setting} from pass {event['epochs_count'] + 1} on, not {before}. Expected: {rate} batches/s "
        f"({low}-{high}), measured before: {number(event['measured'])}. "
        "Same samples, same order; random augmentation differs"
    )
