"""The process that forks the agents of `kdist run`: what it saves, and that nobody depends on
it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.cli.running import Run, Start, processes_of
from tests.patience import soon

SCRIPT = """
import os, pathlib, time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(f"daemon-{os.environ['KDIST_GENERATION']}").write_text(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
while not pathlib.Path("end").exists():
    time.sleep(0.02)
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def daemon_of(run: Run, generation: int) -> int:
    """The daemon that the script of this generation has started."""
    path = run.home / f"daemon-{generation}"
    run.wait_until(lambda: path.exists() and path.read_text(), f"generation {generation}")
    return int(path.read_text())


@pytest.mark.sampled
@pytest.mark.processes
def test_a_killed_agent_is_forked_again_and_starts_by_itself_where_nobody_forks_it(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    spec = {"nodes": 1, "maxRestarts": 10, "script": {"path": "script.py"}}
    spec |= {"procsPerNode": 1}
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "daemons"},
        "spec": spec,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = start("job.yaml")
    note = run.folder("daemons") / "node-0" / "agent.json"

    daemons = [daemon_of(run, 1)]
    first = json.loads(note.read_text())["pid"]
    spawner = parent_of(first)
    os.kill(first, signal.SIGKILL)
    daemons.append(daemon_of(run, 2))
    assert not Path(f"/proc/{daemons[0]}").exists(), "an agent leaves nothing behind"
    second = json.loads(note.read_text())["pid"]
    assert parent_of(second) == spawner, "it was forked by who has imported torch"

    os.kill(spawner, signal.SIGKILL)
    daemons.append(daemon_of(run, 3))
    third = json.loads(note.read_text())["pid"]
    assert parent_of(third) == run.process.pid
    assert soon(lambda: not Path(f"/proc/{second}").exists()), "nobody could see its end"

    (tmp_path / "end").touch()
    run.wait(0)
    folder = run.folder("daemons")
    assert soon(lambda: not processes_of(folder)), processes_of(folder)
    assert not any(Path(f"/proc/{daemon}").exists() for daemon in daemons)


WORKLOAD = """
import pathlib
from kdist_trainer.workloads.digits import Digits

class Noting(Digits):
    def loss(self, model, batch):
        import torch._inductor.config as config

        pathlib.Path("noted").write_text(str(config.cpp_cache_precompile_headers))
        return super().loss(model, batch)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_what_imports_torch_in_advance_has_it_compile_no_headers_outside_of_the_cache(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "noting.py").write_text(WORKLOAD)
    train = {"workload": "noting:Noting", "steps": 1, "globalBatch": 8}
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "noting"},
        "spec": {"nodes": 1, "procsPerNode": 1, "code": ".", "train": train},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    start("job.yaml").wait(0)
    assert (tmp_path / "noted").read_text() == "False"
