"""Plugins of pydantic, which the models of kdist do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pydantic import BaseModel
from kdist_trainer.config import Nodes, Optimizer
Nodes(min=1, max=2), Optimizer()
print("kdist:", "recorder" in sys.modules or "importlib.metadata" in sys.modules)
class Own(BaseModel):
    width: int
Own(width=1)
print("others:", "recorder" in sys.modules)
"""


def install_plugin(site: Path) -> None:
    """A distribution with a plugin, as pip would install it."""
    about = site / "recorder-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: recorder\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pydantic]\nrecorder = recorder:plugin\n")
    (site / "recorder.py").write_text(
        "class Plugin:\n"
        "    def new_schema_validator(self, *_, **__):\n"
        "        return None, None, None\n"
        "plugin = Plugin()\n"
    )


def run(site: Path, **environment: str) -> list[str]:
    """What the program prints where the plugin is installed."""
    before = {key: value for key, value in os.environ.items() if "PYDANTIC" not in key}
    path = os.pathsep.join(filter(None, (str(site), before.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**before, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


def test_the_models_load_no_plugin_and_those_of_a_training_still_do(tmp_path: Path) -> None:
    install_plugin(tmp_path)
    assert run(tmp_path) == ["kdist: False", "others: True"]


def test_plugins_that_the_user_disables_stay_disabled(tmp_path: Path) -> None:
    install_plugin(tmp_path)
    assert run(tmp_path, PYDANTIC_DISABLE_PLUGINS="__all__") == ["kdist: False", "others: False"]
