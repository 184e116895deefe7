"""The identity of a command over runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Command:
    """The identity of a command over runs: its words, with the interpreter and the script as short as possible."""

    text: str = ""
    folder: str = ""


def command_of(manifest: Mapping[str, Any]) -> Command:
    """Return the command of a run: neither where Python is installed nor `./` before the script is a difference."""
    words = [str(word) for word in manifest.get("argv") or ()]
    folder = str(manifest.get("cwd") or "")
    if words:
        words[0] = re.sub(r"^(python|pypy)[\d.]*$", r"\1", os.path.basename(words[0]))
    return Command(shlex.join([words[0], *(_shorten(word, folder) for word in words[1:])] if words else []), folder)


def _shorten(word: str, folder: str) -> str:
    """Return a path relative to the folder of the command, if it is in it."""
    if folder and word.startswith(f"{folder}/"):
        return word[len(folder) + 1 :]
    return word.removeprefix("./")
