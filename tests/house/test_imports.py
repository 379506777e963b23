"""What an import drags in: start-up stays light, and the contracts on who may import whom hold and
bite.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

LIGHT = {
    "kdist": "torch kubernetes pydantic jinja2 rich asyncio requests yaml click",
    "kdist.app": "torch kubernetes pydantic jinja2 rich asyncio requests prometheus_client",
    "kdist.agents.metrics": "torch kubernetes pydantic rich prometheus_client",
    "kdist.deploy": "torch kubernetes rich asyncio requests ssl kdist.cluster",
    "kdist.cluster": "torch kubernetes pydantic rich asyncio requests yaml click",
    "kdist_controller.__main__": "torch numpy kubernetes asyncio rich click",
    "kdist_trainer": "torch numpy pydantic prometheus_client",
    "kdist_trainer.config": "torch numpy kdist click",
    "kdist_trainer.log": "torch numpy kdist click",
    "kdist_trainer.processes.liveness": "torch numpy kdist click",
    "kdist_trainer.errors": "torch numpy kdist click",
    "kdist_trainer.ipc.failure": "torch numpy kdist click",
    "kdist_trainer.metrics.exporter": "torch numpy kdist click",
    "kdist_trainer.metrics.transport": "torch numpy kdist click",
    "kdist_trainer.metrics.rank_metrics": "torch numpy kdist click",
    "kdist_trainer.checkpoint.__main__": "torch numpy kdist click",
    "kdist_trainer.checkpoint.manifest": "torch numpy kdist click",
    "kdist_trainer.checkpoint.ledger": "torch numpy kdist click msgspec",
    "kdist_trainer.object_store.store": "torch numpy obstore asyncio kdist click",
    "kdist_trainer.fetch.__main__": "torch numpy obstore huggingface_hub kdist click",
    "kdist_trainer.tracker.__main__": "torch numpy wandb mlflow kdist click",
    "kdist_trainer.integrations": "torch accelerate lightning pytorch_lightning transformers",
}

# Each contract of pyproject.toml, and a line that breaks it, put at the end of a file (which is
# made where it is missing).
BREACHES = {
    "kdist: layers": ("cli/kdist/shed.py", "x = 1"),
    "kdist_trainer: layers": (
        "trainer/kdist_trainer/config/exit_codes.py",
        "import kdist_trainer.log",
    ),
    "kdist_controller: layers": ("controller/kdist_controller/shed.py", "x = 1"),
    "nobody knows the controller": ("cli/kdist/units.py", "import kdist_controller.resource"),
    "the controller decides without a cluster": (
        "controller/kdist_controller/reconcile.py",
        "import kdist.cluster",
    ),
    "only the controller imports a slice, that of recovery": (
        "cli/kdist/app.py",
        "import kdist.report.text",
    ),
    "neither the command line nor the controller reaches torch": (
        "cli/kdist/job_file/__init__.py",
        "def f():\n    import torch",
    ),
    "the trainer knows nothing of the command line": (
        "trainer/kdist_trainer/log.py",
        "import kdist.errors",
    ),
    "the bridges to the trainer: config, causes, formats, JSON, steps, HTTP": (
        "cli/kdist/render/__init__.py",
        "import kdist_trainer.log",
    ),
    "the controller takes from the trainer its server, JSON and the time left": (
        "controller/kdist_controller/cache.py",
        "import kdist_trainer.log",
    ),
    "only app, commands and console know click": ("cli/kdist/errors.py", "import click"),
    "only cluster knows the Kubernetes client": ("cli/kdist/manifest.py", "import kubernetes"),
    "what the agent's own loop reads is free of torch": (
        "trainer/kdist_trainer/processes/liveness.py",
        "import torch",
    ),
    "nobody who trains knows the agent": (
        "trainer/kdist_trainer/worker.py",
        "import kdist_trainer.agent",
    ),
    "only the client of object stores knows obstore": (
        "trainer/kdist_trainer/checkpoint/lock.py",
        "import obstore",
    ),
    "only the source of hubs knows huggingface_hub": (
        "trainer/kdist_trainer/data/loader.py",
        "import huggingface_hub",
    ),
    "only integrations know training frameworks": (
        "trainer/kdist_trainer/checkpoint/checkpointer.py",
        "import transformers",
    ),
    "what is in the wheels never imports the developers' tools": (
        "cli/kdist/dashboards/command.py",
        "import tools.dashboards",
    ),
    "commands do not know each other": (
        "cli/kdist/commands/validate.py",
        "import kdist.commands.run",
    ),
    "commands reach a job through kdist.job alone": (
        "cli/kdist/commands/why.py",
        "import kdist.job.local.job",
    ),
    "nobody in the trainer imports a slice": (
        "trainer/kdist_trainer/run_script.py",
        "import kdist_trainer.integrations",
    ),
    "workloads do not know each other": (
        "trainer/kdist_trainer/workloads/gpt.py",
        "import kdist_trainer.workloads.digits",
    ),
}


@pytest.mark.parametrize("module", LIGHT)
def test_an_import_stays_light(module: str) -> None:
    program = (
        f"import sys, {module}; print(*sorted(set({LIGHT[module].split()!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.split() == []


def test_everyone_imports_only_whom_they_may() -> None:
    report = lint_imports(ROOT)
    assert "0 broken" in report, report


def test_each_import_contract_notices_a_breach(tmp_path: Path) -> None:
    for room in ("cli", "controller", "trainer"):
        shutil.copytree(
            ROOT / room,
            tmp_path / room,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "manifests", "json"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, line in BREACHES.values():
        with (tmp_path / name).open("a") as file:
            file.write(f"\n{line}\n")
    report = lint_imports(tmp_path)
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*)?$", report, re.MULTILINE))
    assert verdicts == dict.fromkeys(BREACHES, "BROKEN")


def lint_imports(root: Path) -> str:
    """Report of import-linter on the packages below `root`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = os.environ | {
        "PYTHONPATH": ":".join(str(root / room) for room in ("cli", "controller", "trainer"))
    }
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize("program", ["drill/injection.py", "deploy/receive_code.py"])
def test_a_program_that_is_sent_to_a_pod_imports_only_the_standard_library(program: str) -> None:
    found = set()
    for node in ast.walk(ast.parse((ROOT / "cli/kdist" / program).read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    assert {name for name in found if name.split(".")[0] not in sys.stdlib_module_names} == set()
