"""A virtual environment for each other tool, made on demand in benchmarks/.peers: a set for each torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / "benchmarks" / ".peers" / Path(sys.prefix).name
#: tool -> what pip installs. Torch and numpy come from this environment.
PACKAGES = {
    "traceml": "traceml-ai==0.5.0",
    "trackio": "trackio==0.43.0",
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "aim": "aim==3.29.1",
    "mlflow": "mlflow==3.17.1",
    "stormlog": "stormlog==0.4.3",
    "memray": "memray==1.20.0",
}


def python_of(tool: str) -> Path:
    """The interpreter of a tool's environment, which is made if there is none; this one without a package."""
    if tool not in PACKAGES:
        return Path(sys.executable)
    folder, python = CACHE / tool, CACHE / tool / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGES[tool]], check=True, capture_output=True)
        (folder / "complete").touch()
    return python
