"""Put `tidegauge.pth` beside the packages, in a wheel and in an editable install; the rest is in pyproject.toml.

Python runs that file at start-up. It does nothing outside a run, and attaches where a command sets PYTHONPATH anew.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = Path("training_harness") / "bootstrap" / "tidegauge.pth"


class BuildWithPth(build_py):
    """Build the packages and the file."""

    def run(self) -> None:
        """Copy the file once the packages are there."""
        super().run()
        # An editable wheel takes its files from the folder of the `install` command.
        folder = self.distribution.get_command_obj("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(str(PTH), str(Path(folder) / PTH.name))


setup(cmdclass={"build_py": BuildWithPth})
