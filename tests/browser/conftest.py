"""Import path of the script that takes the pictures for the docs: it starts the dashboard and the browser."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[1] / "app"))
