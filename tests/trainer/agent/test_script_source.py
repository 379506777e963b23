"""What the source of a script must not do for its ranks to be forks of a process that has imported
torch.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from kdist_trainer.agent import script_source
from kdist_trainer.agent.script_source import _READ_LATER, find_obstacle
from kdist_trainer.config import START_VARIABLES
from tests.house.tree import ROOT
from tests.trainer.config.test_script import READ_AT_START

PLAIN = """
import os, sys, json
import torch
from torch import nn
env = {**os.environ, "A": "1"}
rank, home = int(os.environ["RANK"]), os.environ.get("HOME")
if "WORLD_SIZE" in os.environ:
    print(dict(os.environ), os.environ.copy(), sorted(os.environ), sys.modules[__name__])
"""


def look(folder: Path, source: str, **modules: str) -> str | None:
    """What stands against a script with these lines after plain ones, and these modules."""
    (folder / "train.py").write_text(source)
    for name, text in modules.items():
        path = folder.joinpath(*name.split("__in__")[::-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return find_obstacle(["train.py", "--lr", "0.1"], folder)


SAFE = [
    'os.environ["NCCL_DEBUG"] = "INFO"',
    'os.environ.setdefault("MASTER_ADDR", "localhost")',
    'os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
    'os.environ.update({"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"})',
    'os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")',
    'del os.environ["MASTER_PORT"]',
    "import subprocess; subprocess.run(['true'], env=os.environ)",
    "model = nn.Linear(2, 2); model.eval()",
    "sys.stdout = open('log', 'w')",
    "import ssl; ssl._create_default_https_context = ssl._create_unverified_context",
    "torch.backends.cudnn.benchmark = True",
    "import numpy as np, no_such_module",
]


@pytest.mark.parametrize("line", SAFE)
def test_a_plain_script_may_be_forked(line: str, tmp_path: Path) -> None:
    assert look(tmp_path, PLAIN + line) is None


UNSAFE = {
    'os.environ["TORCH_LOGS"] = "recompiles"': "sets TORCH_LOGS",
    'os.environ["OMP_NUM_THREADS"] = "4"': "sets OMP_NUM_THREADS",
    'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "a")': "sets PYTORCH_CUDA_ALLOC_CONF",
    'os.environ.update({"NCCL_DEBUG": "INFO", "TORCHDYNAMO_DISABLE": "1"})': "TORCHDYNAMO_DISABLE",
    'os.environ.update(LD_PRELOAD="lib.so")': "sets LD_PRELOAD",
    'os.environ["MY_OWN"] = "1"': "sets MY_OWN",
    'os.environ.pop("TORCH_LOGS", None)': "sets TORCH_LOGS",
    'del os.environ["PYTHONPATH"]': "sets PYTHONPATH",
    'os.environ[f"NCCL_{rank}"] = "1"': "names are not known",
    "os.environ.update(json.load(open('env.json')))": "names are not known",
    "os.environ.update(**env)": "names are not known",
    "os.environ |= env": "names are not known",
    "variables = os.environ": "names are not known",
    "os.environb[b'TORCH_LOGS'] = b'all'": "names are not known",
    "from os import environ\nenviron['TORCH_LOGS'] = 'all'": "sets TORCH_LOGS",
    "from os import environ as e": "imports environ as e",
    "getattr(os, 'environ')['A'] = '1'": "names are not known",
    "os.putenv('TORCH_LOGS', 'all')": "uses putenv",
    "from os import putenv": "imports putenv",
    "from dotenv import load_dotenv": "imports load_dotenv",
    "def late():\n    os.environ['TORCH_LOGS'] = 'all'": "sets TORCH_LOGS",
    "sys.setdlopenflags(2)": "uses setdlopenflags",
    "import ctypes; ctypes.CDLL('lib.so', mode=ctypes.RTLD_GLOBAL)": "uses RTLD_GLOBAL",
    "'torch' in sys.modules": "uses sys.modules",
    "sys.modules['torch'] = None": "uses sys.modules",
    "sys.path.insert(0, 'src')": "uses sys.path",
    "from sys import path": "imports path",
    "import sys as s": "imports sys as s",
    "sys.meta_path.insert(0, None)": "uses meta_path",
    "import importlib; importlib.import_module(home)": "uses import_module",
    "exec(open('configurator.py').read())": "uses exec",
    "eval(home)": "uses eval",
    "import builtins": "imports builtins",
    "import gevent.monkey": "imports gevent.monkey",
    "import threading; threading.Thread = None": "changes threading.Thread",
}


@pytest.mark.parametrize("line", UNSAFE)
def test_what_a_fork_may_do_otherwise_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    found = look(tmp_path, PLAIN + line)
    assert found is not None
    assert UNSAFE[line] in found
    place, what = found.split(" ", 1)
    file, number = place.split(":")
    assert file == "train.py"
    assert int(number) > PLAIN.count("\n")
    assert find_obstacle(["-m", "train"], tmp_path) == f"{place} {what}"


def test_modules_of_the_script_are_looked_at_wherever_it_imports_them(tmp_path: Path) -> None:
    bad = "import os\nos.environ['TORCH_LOGS'] = 'all'\n"
    package = {"__init____in__mine": "", "steps__in__mine": "from . import deep"}
    for source in ("import mine.steps", "from mine import steps", "def f():\n  import mine.steps"):
        found = look(tmp_path, PLAIN + source, **package, deep__in__mine=bad)
        assert found is not None
        assert found.startswith("mine/deep.py:2 sets TORCH_LOGS")
        assert look(tmp_path, PLAIN + source, **package, deep__in__mine="x = 1") is None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "set_by_another.py").write_text(bad)
    sys.path.append(str(tmp_path / "elsewhere"))
    try:
        found = look(tmp_path, PLAIN + "import set_by_another")
    finally:
        sys.path.remove(str(tmp_path / "elsewhere"))
    assert found is not None
    assert "set_by_another.py:2 sets TORCH_LOGS" in found


def test_a_package_is_looked_at_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "__main__.py").write_text("import torch\nfrom .model import x\n")
    (tmp_path / "mine" / "model.py").write_text("x = 1\n")
    assert find_obstacle(["-m", "mine"], tmp_path) is None
    (tmp_path / "mine" / "__init__.py").write_text("import sys\nsys.path.append('.')\n")
    assert find_obstacle(["-m", "mine"], tmp_path) == "mine/__init__.py:2 uses sys.path"
    missing = find_obstacle(["-m", "pytest"], tmp_path)
    assert missing == f"module pytest is not in {tmp_path}, where alone it is looked at"


def test_a_script_that_does_not_import_torch_gains_nothing(tmp_path: Path) -> None:
    assert look(tmp_path, "print('done')") == ""
    assert look(tmp_path, "import helper", helper="import json") == ""
    assert look(tmp_path, "import helper", helper="import torch.nn") is None
    assert look(tmp_path, "import accelerate") is None, "which imports torch"


@pytest.mark.parametrize("name", ["random.py", "numpy.py", f"queue{EXTENSION_SUFFIXES[0]}"])
def test_a_module_with_the_name_of_one_that_torch_imports_is_named(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "logging").mkdir()  # a folder of files is no module
    assert look(tmp_path, PLAIN) is None
    (tmp_path / name).write_text("")
    found = look(tmp_path, PLAIN)
    assert found == f"{name} has the name of a module that torch may import"


def test_what_cannot_be_looked_at_counts_as_unsafe(tmp_path: Path) -> None:
    assert "(train.py, line " in str(look(tmp_path, PLAIN + "print 'old'"))
    assert "No such file" in str(find_obstacle(["absent.py"], tmp_path))
    assert "Is a directory" in str(find_obstacle(["."], tmp_path))
    assert "too much code" in str(look(tmp_path, PLAIN + "#" * (1 << 20)))
    assert "null bytes" in str(look(tmp_path, PLAIN + "\0"))
    (tmp_path / f"fast{EXTENSION_SUFFIXES[0]}").write_text("")
    assert look(tmp_path, PLAIN + "import fast") == "module fast has no source"
    names = [f"part_{number}" for number in range(201)]
    many = dict.fromkeys(names, "")
    assert "too much code" in str(look(tmp_path, PLAIN + f"import {', '.join(names)}", **many))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": "2147483648"}, None),
        ({"memory.max": "2000000000"}, "1907Mi of memory leave no room for forks"),
        ({"memory/memory.limit_in_bytes": "1000000000"}, "953Mi of memory leave"),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_a_container_with_little_memory_starts_no_process_more(
    files: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_source, "_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup" / "memory").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).write_text(f"{text}\n")
    obstacle = look(tmp_path, PLAIN)
    assert (obstacle is None) == (found is None)
    assert str(obstacle).startswith(str(found))


def test_no_variable_that_a_process_reads_when_it_starts_counts_as_read_later() -> None:
    assert not [name for name in READ_AT_START if _READ_LATER.match(name)]
    for name in (
        "TORCH_LOGS",
        "TORCHDYNAMO_VERBOSE",
        "TORCH_DISTRIBUTED_DEBUG",
        "TRITON_INTERPRET",
    ):
        assert not _READ_LATER.match(name)
    later = ("NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING", "LOCAL_RANK")
    assert all(_READ_LATER.match(name) and not START_VARIABLES.match(name) for name in later)


@pytest.mark.parametrize("script", sorted((ROOT / "examples" / "script").glob("*.py")))
def test_the_examples_are_forked(script: Path) -> None:
    assert find_obstacle([script.name], script.parent) is None
