"""Dumps of PyTorch's Flight Recorder: the collectives that each rank has entered, and the first that one has not.

Each rank has a dump of its own: NCCL's watchdog writes it when a collective times out, or the program asks for it.
Pure functions on values; `agent.recorder_dumps` reads the files.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple, Never

from collector.stacks import Frame
from collector.units import listed

#: Largest dump that is read: some 30,000 collectives, where 2,000 are usual.
MOST_BYTES = 8 << 20
#: Collectives of a group that an event holds before the first one that is not complete, and from it on.
_KEPT_COUNT = 8
#: Entries, process groups, and characters of a name or of a list of ranks, that are read of a dump.
_MOST_ENTRIES, _MOST_GROUPS, _NAME_CHARACTERS, _RANKS_CHARACTERS = 50_000, 64, 300, 100_000
#: Group that all ranks are in.
_DEFAULT_GROUP = "default_pg"
#: Collectives in which all ranks give tensors of the same sizes.
_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
#: Ranks that a sentence lists.
_LISTED_COUNT = 4
#: Errors that a value of another type or form raises.
_DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


class DumpError(Exception):
    """A file is no dump that can be used; the message says why."""


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler of plain values: it refuses every name, so a file can call nothing.

    Python's, not C's: that one allocates a memo as large as the file asks for.
    """

    #: Without BYTEARRAY8, which allocates the size that the file names before it reads.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Never:
        raise DumpError(f"it holds more than plain values ({module}.{name})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that a rank has entered.

    Attributes:
        number: its number among the collectives of its group, from 1.
        sizes: sizes of the tensors that the rank gives.
        is_complete: True if the rank is through.
        begun_ns: time at which the rank entered it.
        waited_seconds: time from then until the dump was written.
        timeout_seconds: time after which it fails; None if unknown.
        place: the line of the user's own code that called it; None if no frame of it was recorded.
    """

    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    is_complete: bool
    begun_ns: int
    waited_seconds: float
    timeout_seconds: float | None
    place: Frame | None

    @property
    def at(self) -> str:
        """Its line, in brackets, for the end of a sentence; empty if unknown."""
        return f" ({PurePath(self.place.path).name}:{self.place.line})" if self.place else ""

    @property
    def words(self) -> str:
        """Operation, number and line: `all_reduce number 4 (train.py:17)`."""
        return f"{self.operation} number {self.number}{self.at}"

    @property
    def has_timed_out(self) -> bool:
        """True if the rank had waited for as long as its timeout when the dump was written."""
        return bool(self.timeout_seconds) and self.waited_seconds >= (self.timeout_seconds or 0)

    @property
    def contents(self) -> tuple[object, ...]:
        """The part of it that is the same in all ranks."""
        return (self.operation, self.sizes) if self.operation in _SAME_SIZES else (self.operation,)


class Group(NamedTuple):
    """A process group: the name that torch gives it, its description, and its ranks, None if not recorded."""

    name: str
    desc: str
    ranks: tuple[int, ...] | None

    @property
    def words(self) -> str:
        """Its description, or else its name."""
        return self.desc if self.desc not in ("", "undefined") else f"process group {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The dump of one rank.

    Attributes:
        written_ns: time at which it was written.
        is_whole: True if it goes back to the rank's first collective.
        groups: the last collectives of each group, in order.
    """

    rank: int
    written_ns: int
    is_whole: bool
    groups: Mapping[Group, tuple[Collective, ...]]

    def last_number(self, group: Group) -> int | None:
        """Return the number of the last collective of a group, 0 before the first; None if that is not known."""
        if collectives := self.groups.get(group):
            return collectives[-1].number
        is_member = group.desc == _DEFAULT_GROUP if group.ranks is None else self.rank in group.ranks
        return 0 if is_member and self.is_whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A collective that not all ranks of its group have entered, or in which they do different things.

    Attributes:
        entered: ranks that have entered it.
        missing: ranks that have not -> the last one that they have entered, None if there is none.
        unknown: ranks of the group without a dump, or whose dump is too old to tell.
    """

    group: Group
    number: int
    entered: Mapping[int, Collective]
    missing: Mapping[int, Collective | None]
    unknown: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have entered it and are not through."""
        return tuple(rank for rank, collective in self.entered.items() if not collective.is_complete)

    @property
    def is_mismatch(self) -> bool:
        """True if the ranks in it do different things."""
        return len({collective.contents for collective in self.entered.values()}) > 1

    def may_be_due_to(self, rank: int | None) -> bool:
        """Return whether the others can wait for this rank: it is missing or unknown, or all are in it."""
        return rank in self.missing or rank in self.unknown or (not self.missing and rank in self.entered)

    @property
    def begun_ns(self) -> int:
        """Time at which the first rank entered it."""
        return min(collective.begun_ns for collective in self.entered.values())

    @property
    def name(self) -> str:
        """Operation, number and group: `all_reduce number 4 of default_pg`."""
        return f"{next(iter(self.entered.values())).operation} number {self.number} of {self.group.words}"

    @property
    def words(self) -> str:
        """The sentence on it, without a full stop and a capital."""
        if self.is_mismatch:
            alike: dict[tuple[object, ...], list[int]] = {}
            for rank, collective in self.entered.items():
                alike.setdefault(collective.contents, []).append(rank)
            parts = [
                f"{self._content(ranks[0])} in {ranks_words(ranks)}{self.entered[ranks[0]].at}"
                for ranks in alike.values()
            ]
            return f"collective number {self.number} of {self.group.words} is {' and '.join(parts)}"
        at = next((collective.at for collective in self.entered.values() if collective.at), "")
        if not self.missing:
            waits = f"{_subject(self.waiting, 'waits', 'wait')} in {self.name}{at}"
            return f"{waits}; no dump tells of {ranks_words(self.unknown)}"
        if self.waiting:
            others = f"in which {_subject(self.waiting, 'waits', 'wait')}{at}"
        else:
            others = f"which {_subject(self.entered, 'has', 'have')}{at}"
        return f"{_subject(self.missing, 'has', 'have')} not entered {self.name}, {others}"

    def _content(self, rank: int) -> str:
        collective = self.entered[rank]
        are_alike = len({one.operation for one in self.entered.values()}) == 1
        sizes = f" of {', '.join(map(str, map(list, collective.sizes)))}" if are_alike else ""
        return f"{collective.operation}{sizes}"


def ranks_words(ranks: Iterable[int]) -> str:
    """Return ranks in words: `rank 1`, `ranks 1 and 3`, `5 ranks (0, 2, 3, 5, …)`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > _LISTED_COUNT:
        return f"{len(ordered)} ranks ({', '.join(map(str, ordered[:_LISTED_COUNT]))}, …)"
    return f"ranks {listed(ordered)}"


def _subject(ranks: Collection[int], singular: str, plural: str) -> str:
    return f"{ranks_words(ranks)} {singular if len(ranks) == 1 else plural}"


def find_standstills(dumps: Sequence[Dump]) -> list[Standstill]:
    """Return the first collective of each group that ranks wait in and others have not entered.

    A rank can be missing since it waits in a collective of another group. So those of ranks that wait nowhere come
    first, then the oldest.
    """
    groups = sorted({group for dump in dumps for group in dump.groups}, key=str)
    found = [one for group in groups if (one := _standstill(group, dumps)) is not None]
    blocked = {rank for one in found for rank in one.waiting}
    return sorted(found, key=lambda one: (not one.missing, not blocked.isdisjoint(one.missing), one.begun_ns))


def _standstill(group: Group, dumps: Sequence[Dump]) -> Standstill | None:
    last = {dump.rank: number for dump in dumps if (number := dump.last_number(group)) is not None}
    entered = {dump.rank: {one.number: one for one in dump.groups.get(group, ())} for dump in dumps}
    missing: dict[int, int] = {}
    too_old = set()
    for dump in dumps:
        later = [
            collective.begun_ns
            for rank, collectives in entered.items()
            for number, collective in collectives.items()
            if dump.rank in last and rank != dump.rank and number > last[dump.rank]
        ]
        if later and min(later) < dump.written_ns:
            missing[dump.rank] = last[dump.rank] + 1
        elif later:
            too_old.add(dump.rank)
    known = last.keys() - too_old
    unknown = tuple(sorted({*(group.ranks or ()), *too_old} - known))
    candidates = [*_mismatches(entered), *missing.values()]
    if not candidates and unknown:
        candidates = [one.number for ones in entered.values() for one in ones.values() if not one.is_complete]
    if not candidates:
        return None
    number = min(candidates)
    inside = {rank: ones[number] for rank, ones in sorted(entered.items()) if number in ones}
    outside = sorted(rank for rank, of_rank in missing.items() if of_rank == number)
    if not inside:
        return None
    return Standstill(
        group=group,
        number=number,
        entered=inside,
        missing={rank: entered[rank].get(number - 1) for rank in outside},
        unknown=unknown,
    )


def _mismatches(entered: Mapping[int, Mapping[int, Collective]]) -> list[int]:
    """Return the numbers under which ranks do different things and one of them is not through."""
    alike: dict[int, list[Collective]] = {}
    for collectives in entered.values():
        for number, collective in collectives.items():
            alike.setdefault(number, []).append(collective)
    return [
        number
        for number, ones in alike.items()
        if len({one.contents for one in ones}) > 1 and not all(one.is_complete for one in ones)
    ]


def dump_fields(data: bytes, *, now_ns: int, since_ns: int) -> dict[str, Any]:
    """Return the fields of a `flight-recorder` event that come from the contents of a dump.

    Args:
        data: the dump, a pickle.
        now_ns: wall clock; the event holds ages.
        since_ns: wall clock at the start of the training; an older collective is another training's.

    Raises:
        DumpError: it is no dump that this version understands, or another training's.
    """
    dump = _plain(data)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise DumpError("it holds no entries of collectives")
    entries = dump["entries"][-_MOST_ENTRIES:]
    try:
        version = _text(dump.get("version") or "unknown")
        collectives = [
            (_names(entry), _collective(entry, now_ns))
            for entry in entries  # other ranks of a group have no part in a send or a receive
            if entry.get("is_p2p") is not True and not _operation(entry).startswith(("send", "recv"))
        ]
        is_whole = not entries or entries[0]["record_id"] == 0
    except (*_DAMAGE, OverflowError) as error:
        raise DumpError(f"its entries are not understood: {type(error).__name__}") from None
    if any(one["age_seconds"] > (now_ns - since_ns) / 1e9 for _, one in collectives):
        raise DumpError("it is of a training that began before this one")
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for names, collective in collectives:
        groups.setdefault(names, {})[collective["number"]] = collective
    return {
        "version": version,
        "is_whole": is_whole,
        "groups": [
            {
                "name": name,
                "desc": desc,
                "ranks": _ranks(dump.get("pg_config"), name),
                "collectives": _telling([numbered[number] for number in sorted(numbered)]),
            }
            for (name, desc), numbered in [*groups.items()][:_MOST_GROUPS]
        ],
    }


def from_event(event: Mapping[str, Any]) -> Dump | None:
    """Return the dump that a `flight-recorder` event holds; None if it could not be read, or is damaged."""
    try:
        if event["error"] is not None:
            return None
        return Dump(
            rank=int(event["of_rank"]),
            written_ns=_moment(event, event),
            is_whole=bool(event["is_whole"]),
            groups={
                Group(
                    group["name"], group["desc"], None if group["ranks"] is None else tuple(group["ranks"])
                ): tuple(_from_fields(collective, event) for collective in group["collectives"])
                for group in event["groups"]
            },
        )
    except _DAMAGE:
        return None


def _from_fields(fields: Mapping[str, Any], event: Mapping[str, Any]) -> Collective:
    return Collective(
        number=int(fields["number"]),
        operation=str(fields["operation"]),
        sizes=tuple(map(tuple, fields["sizes"])),
        is_complete=bool(fields["is_complete"]),
        begun_ns=_moment(fields, event),
        waited_seconds=fields["age_seconds"] - event["age_seconds"],
        timeout_seconds=fields["timeout_seconds"],
        place=None if fields["place"] is None else Frame(*fields["place"]),
    )


def _moment(fields: Mapping[str, Any], event: Mapping[str, Any]) -> int:
    return int(event["time_ns"] - fields["age_seconds"] * 1e9)


def _collective(entry: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
    frames = (
        Frame(_text(one["name"]), _text(one["filename"]), int(one["line"])) for one in entry.get("frames", ())
    )
    timeout_ms = entry.get("timeout_ms")
    return {
        "number": int(entry["collective_seq_id"]),
        "operation": _operation(entry),
        "sizes": [
            [int(size) for size in sizes[:_KEPT_COUNT]] for sizes in entry.get("input_sizes", [])[:_KEPT_COUNT]
        ],
        # Backends without events of a device, such as gloo, never change the state.
        "is_complete": entry.get("state") == "completed" or entry.get("retired") is True,
        "age_seconds": (now_ns - int(entry["time_created_ns"])) / 1e9,
        "timeout_seconds": int(timeout_ms) / 1e3 if timeout_ms else None,
        "place": next((list(frame) for frame in frames if frame.is_own), None),
    }


def _names(entry: Mapping[str, Any]) -> tuple[str, str]:
    name, desc = entry["process_group"]
    return _text(name), _text(desc)


def _operation(entry: Mapping[str, Any]) -> str:
    """Return the name of a collective without its backend: `all_reduce` of `nccl:all_reduce`."""
    return _text(entry["profiling_name"]).rpartition(":")[2]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value[:_NAME_CHARACTERS]


def _telling(collectives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the collectives around the first that is not complete, and the last one."""
    counts = (place for place, one in enumerate(collectives) if not one["is_complete"])
    first = next(counts, len(collectives))
    around = collectives[max(first - _KEPT_COUNT, 0) : first + _KEPT_COUNT]
    return around if collectives[-1] in around else [*around, collectives[-1]]


def _ranks(config: Any, name: str) -> list[int] | None:
    """Return the ranks of a group; a dump has them as text, `[0, 1]`."""
    try:
        text = config[name]["ranks"]
        return sorted(map(int, text.strip("[]").split(","))) if len(text) <= _RANKS_CHARACTERS else None
    except _DAMAGE:
        return None


def _plain(data: bytes) -> object:
    """Return the dicts, lists, tuples, strings and numbers that a pickle holds."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (*_DAMAGE, EOFError, OverflowError, struct.error, pickle.UnpicklingError):
        raise DumpError("it is no whole pickle of plain values") from None
