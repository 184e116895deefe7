"""Lay out a wheel so that it takes no name of the user's; the rest is in pyproject.toml.

Two files lie next to the packages, in a wheel and in an editable install. Python runs `tidegauge.pth` at start-up.
It does nothing outside a run, and attaches where a command sets PYTHONPATH anew. Every session of pytest imports
`tidegauge_pytest.py`. It loads nothing else before a test has the mark.

`collector` and `app` are names that many projects use. In a wheel they lie in a folder that only Tidegauge's own
processes have on their path (`training_harness.command`), so that nobody else can import them.

With SOURCE_DATE_EPOCH, two builds give the same bytes. Setuptools does so for wheels.
"""

import gzip
import os
import shutil
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

BOOTSTRAP = Path("training_harness") / "bootstrap"
BESIDE = ("tidegauge.pth", "tidegauge_pytest.py")
TOOL = Path("training_harness") / "tool"


class BuildOwnLayout(build_py):
    """Build the packages, the files next to them, and the folder of the tool."""

    def run(self) -> None:
        """Copy the files and move the packages once they are there."""
        super().run()
        # An editable wheel takes its files from the folder of the `install` command.
        folder = self.distribution.get_command_obj("install").install_lib if self.editable_mode else self.build_lib
        for name in BESIDE:
            self.copy_file(str(BOOTSTRAP / name), str(Path(folder) / name))
        if not self.editable_mode:
            tool = Path(self.build_lib) / TOOL
            for name in ("app", "collector"):
                shutil.rmtree(tool / name, ignore_errors=True)  # of an earlier build
                shutil.move(Path(self.build_lib) / name, tool / name)


class ReproducibleSdist(sdist):
    """Pack the source distribution with one time, owner and order of its files."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):  # noqa: ANN001, ANN201
        """Return the path of the archive; without SOURCE_DATE_EPOCH, setuptools makes it."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def uniform(member: tarfile.TarInfo) -> tarfile.TarInfo:
            mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member.replace(mtime=int(epoch), mode=mode, uid=0, gid=0, uname="", gname="", deep=False)

        path = Path(f"{base_name}.tar.gz")
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=uniform)
        return str(path)


setup(cmdclass={"build_py": BuildOwnLayout, "sdist": ReproducibleSdist})
