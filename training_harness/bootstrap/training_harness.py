"""Stand-in that makes `training_harness` importable where it is not installed, without its whole site-packages.

A module with a `__path__` is a package: the submodules are found in the real package's folder, and this
stand-in runs the real `__init__`.
"""

import os

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
__path__ = [_PACKAGE]
with open(os.path.join(_PACKAGE, "__init__.py")) as _source:
    exec(compile(_source.read(), os.path.join(_PACKAGE, "__init__.py"), "exec"))
