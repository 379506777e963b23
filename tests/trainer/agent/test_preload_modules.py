"""What agents and workers import before their work begins."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.agent import forkserver
from kdist_trainer.config import Nodes, TrainConfig, Training
from kdist_trainer.instrumentation.torch_internals import OPERATORS, operators
from tests.trainer.agent.lab import Lab


def test_modules_are_imported_without_a_garbage_collection_and_one_that_fails_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_at_import.py").write_text("raise OSError\n")
    (tmp_path / "large_at_import.py").write_text("kept = [[] for _ in range(100_000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        forkserver.import_all(["broken_at_import", "large_at_import"])
        assert not collections
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(sys.modules.pop("large_at_import").kept) == 100_000


@pytest.mark.sampled
def test_an_agent_is_ready_to_stop_before_it_imports_torch() -> None:
    program = "import sys, kdist_trainer.__main__ as _; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


MAKES_A_GROUP = """
import importlib.metadata, torch.distributed as dist
from kdist_trainer.agent import forkserver
from kdist_trainer.torch_internals import HashStore

forkserver.register_gloo()
read = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **named: print(named) or read(**named)
dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
"""


@pytest.mark.sampled
def test_torch_does_not_look_for_its_backend_again_when_a_rank_joins_its_group() -> None:
    command = [sys.executable, "-c", MAKES_A_GROUP]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stdout


STARTS_A_RANK = """
import sys, torch
from kdist_trainer.agent import forkserver
from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.config.base import ConfigModel
from kdist_trainer.instrumentation import collective_hooks

forkserver.look_up_operators()
forkserver.build_config()
build = ConfigModel.model_rebuild.__func__
ConfigModel.model_rebuild = classmethod(lambda kind, **how: print(kind) or build(kind, **how))
find = type(torch.ops.c10d).__getattr__
type(torch.ops.c10d).__getattr__ = lambda names, name: print(name) or find(names, name)

config = TrainConfig.model_validate_json(sys.argv[1])
config.to_json()
config.train.model_dump(mode="json", by_alias=True)
collective_hooks.register_launch_hook(None)
"""


@pytest.mark.sampled
def test_a_new_rank_builds_no_model_of_its_config_and_looks_up_no_operator() -> None:
    training = Training(workload="digits", steps=1)
    config = TrainConfig(name="job", nodes=Nodes(min=2, max=2), train=training)
    command = [sys.executable, "-c", STARTS_A_RANK, config.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    missing = {name for name in OPERATORS if name not in operators()}  # asked for each time
    assert set(done.stdout.split()) <= missing


WRITES_EVENTS = """
import queue, sys
from pathlib import Path
from kdist_trainer.agent import forkserver
from kdist_trainer.tensorboard import writer

light = ("tensorboard", "encodings")
named = forkserver.training_modules(Path(sys.argv[1]))
forkserver.import_all(name for name in named if name.startswith(light))
before = set(sys.modules)
points = queue.Queue()
points.put((1, 0.0, {"loss": 0.5}))
points.put(None)
writer.write(Path(sys.argv[2]), 1, points)
print(*(name for name in set(sys.modules) - before if name.startswith("tensorboard.")))
"""


@pytest.mark.sampled
def test_a_new_rank_0_imports_nothing_to_write_event_files(tmp_path: Path) -> None:
    config, events = tmp_path / "train.json", tmp_path / "events"
    config.write_text(json.dumps({"train": {"workload": "digits", "tensorboard": "scalars"}}))
    command = [sys.executable, "-c", WRITES_EVENTS, str(config), str(events)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(events.iterdir())
    assert done.stdout.split() == []


FULL_WHERE_TORCH_IS = """
import os
from pathlib import Path

with Path(os.environ["LAB"], "answering").open("a") as noted:
    print(Path(os.environ["LAB"], "node-0", "agent.json").exists(), file=noted)
raise OSError(28, "No space left on device")
"""


@pytest.mark.processes
def test_a_script_agent_imports_torch_before_it_answers_and_records_that_it_cannot(
    tmp_path: Path,
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text(FULL_WHERE_TORCH_IS)
    path = os.pathsep.join((str(modules), os.environ.get("PYTHONPATH", "")))
    with Lab(tmp_path, script={"path": "unused.py"}, fresh=True) as lab:
        lab.start("node-0", PYTHONPATH=path)
        code = lab.end("node-0")
        record = lab.record("node-0")
    first, *_ = (tmp_path / "answering").read_text().split()
    assert first == "False", "torch takes longer to import than a liveness probe waits"
    assert (record["code"], record["cause"]) == (code, "storage")
    assert record["message"].endswith(
        "the agent failed: OSError: [Errno 28] No space left on device"
    )
