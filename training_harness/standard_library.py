"""Imports of the standard library, where the user's folder has a module of the same name.

The folder of a script comes first on `sys.path`. So a `resource.py` next to `train.py` would run in place of the
standard module as soon as the harness imports that. This module imports built-in modules alone, and `os`, which
every interpreter has loaded.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder
from _thread import get_ident

TYPE_CHECKING = False  # `typing` is a module that a script may have too
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Self

#: Folders of the standard library.
_FOLDERS = [
    os.path.dirname(os.__file__),
    *(folder for folder in sys.path if os.path.basename(folder) == "lib-dynload"),
]


class StandardLibraryFirst:
    """A `with` block in which this thread gets standard modules, whatever the user's folders hold.

    At its end, a module that the script's own import would not have found leaves `sys.modules`: those who imported
    it in the block keep it, and the script gets its own.
    """

    def __enter__(self) -> Self:
        self._thread = get_ident()
        self._origins: dict[str, str | None] = {}
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name, origin in self._origins.items():
            spec = PathFinder.find_spec(name)
            if spec is None or spec.origin != origin:
                for module in [module for module in sys.modules if module.partition(".")[0] == name]:
                    del sys.modules[module]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a standard module that lies in a file; built-in ones are found before any file."""
        if path is not None or name not in sys.stdlib_module_names or get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, _FOLDERS)
        if spec is not None:
            self._origins[name] = spec.origin
        return spec
