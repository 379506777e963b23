"""Causes of whole runs: whose fault a script's failure is, and how often it is tried."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.lab import Lab

TWO = {"min": 2, "max": 2}
_FIRST_TIME = "import os\nagain = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"


def run(folder: Path, text: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Run a script on one node; returns the exit code, the exit record and the restarts."""
    script = folder / "train.py"
    script.write_text(text)
    with Lab(folder, maxRestarts=10, script={"path": str(script)}) as lab:
        lab.start("node-0")
        code = lab.end("node-0")
        return code, lab.record("node-0"), lab.events("node-0", "restarting")


@pytest.mark.sampled
@pytest.mark.processes
def test_an_error_of_the_gpu_is_tried_again(tmp_path: Path) -> None:
    text = (
        "import torch\nerror = torch.AcceleratorError('CUDA error: uncorrectable ECC error')\n"
        "error.error_code = 214\nif not again: raise error\n"
    )
    code, _, restarts = run(tmp_path, _FIRST_TIME + text)
    assert code == 0
    (restart,) = restarts
    assert restart["cause"] == "device"
    assert "uncorrectable ECC error" in restart["failure"], "all nodes name what it was"


@pytest.mark.processes
@pytest.mark.sampled
def test_an_agent_whose_ranks_fail_to_compile_looks_at_what_is_cached(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport pathlib\nfrom torch._inductor.exc import InductorError\n"
        "cached = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "cached.mkdir(exist_ok=True)\n(cached / 'empty.py').touch()\n"
        "raise InductorError(AttributeError(\"no attribute 'call'\"), None)\n"
    )
    with Lab(tmp_path, script={"path": str(script)}, compileCache=str(tmp_path)) as lab:
        lab.start("node-0")
        assert lab.end("node-0") != 0
        assert lab.record("node-0")["message"].startswith("InductorError: ")
        told = lab.events("node-0", "compile-cache-failed")
    assert told[0]["message"].endswith("is damaged: remove it")


@pytest.mark.sampled
@pytest.mark.processes
def test_equal_faults_of_a_gpu_do_not_spend_the_restarts_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch\n"
        "if int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 3:\n"
        "    error = torch.AcceleratorError('CUDA error: uncorrectable ECC error')\n"
        "    error.error_code = 214\n    raise error\n"
        "raise ValueError('one that is final')\n"
    )
    with Lab(tmp_path, maxRestarts=1, script={"path": str(script)}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 70
        restarts = lab.events("node-0", "restarting")
        last = lab.ledger("generation")[-1]
    told = [(one["restarts"], one["budget"], one["counted"]) for one in restarts]
    assert told == [(1, 10, "machines"), (2, 10, "machines"), (3, 10, "machines")]
    assert (last["limit"], last["total_restarts"]) == ("machines", 3)


@pytest.mark.sampled
@pytest.mark.processes
def test_all_agents_count_the_faults_of_each_machine_and_ledger_and_record_name_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
        "again, rank = int(os.environ['TORCHELASTIC_RESTART_COUNT']), dist.get_rank()\n"
        "if again < 2 and os.environ['KDIST_MACHINE'] == 'gpu-8':\n"
        "    error = torch.AcceleratorError('CUDA error: uncorrectable ECC error')\n"
        "    error.error_code = 214\n    raise error\n"
        "while again == 2 and not os.path.exists(os.environ['LAB'] + '/finish'):\n"
        "    time.sleep(0.05)\n    dist.barrier()\n"
        "if os.environ['KDIST_MACHINE'] == 'gpu-8':\n"
        "    raise ValueError('one that is final')\ndist.barrier()\n"
    )
    with Lab(tmp_path, maxRestarts=1, nodes=TWO, script={"path": str(script)}) as lab:
        lab.start("node-0", KDIST_MACHINE="gpu-7")
        lab.start("node-1", KDIST_MACHINE="gpu-8")

        def read(node: str) -> list[dict[str, Any]]:
            port = json.loads((tmp_path / node / "agent.json").read_text())["port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as reply:
                found: list[dict[str, Any]] = json.load(reply)["machine_faults"]
            return found

        lab.wait(lambda: len(lab.events("node-0", "rendezvous-completed")) == 3, "the third group")
        (first,), (second,) = read("node-0"), read("node-1")
        assert first == second
        assert (first["machine"], first["faults"], first["cause"]) == ("gpu-8", 2, "device")
        assert first["message"] == "AcceleratorError: CUDA error: uncorrectable ECC error"
        failures = lab.ledger("failure")
        assert [(one["machine"], one["fault"]) for one in failures] == [("gpu-8", "device")] * 2
        assert first["time"] == failures[-1]["time"]
        lab.tell("finish")
        assert [lab.end(node) for node in ("node-0", "node-1")] == [70, 70]
        assert [lab.record(node)["machine"] for node in ("node-0", "node-1")] == ["gpu-8"] * 2
        assert "fault" not in lab.ledger("failure")[-1], "the code is at fault, not the machine"


@pytest.mark.processes
def test_an_error_in_no_table_is_tried_again_and_is_final_when_it_comes_back_alike(
    tmp_path: Path,
) -> None:
    # a library raises it, for all that is known
    text = "import tarfile\ntarfile.open(__file__)\n"
    code, record, restarts = run(tmp_path, text)
    assert [one["cause"] for one in restarts] == ["unknown"]
    assert (code, record["cause"], record["fault"]) == (70, "unknown", "unknown")
    assert record["message"].startswith("the same failure 2 times in a row without progress: ")
    assert record["place"] == f'File "{tmp_path / "train.py"}", line 2, in <module>'


@pytest.mark.sampled
@pytest.mark.processes
def test_a_script_that_asks_to_be_tried_again_is(tmp_path: Path) -> None:
    text = "import kdist_trainer\nif not again: raise kdist_trainer.Retry('the service is away')\n"
    code, _, restarts = run(tmp_path, _FIRST_TIME + text)
    assert (code, [one["cause"] for one in restarts]) == (0, ["retry"])


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=5)\n", 2),
        ("import errno\nraise OSError(errno.EROFS, 'Read-only file system', '/data/x')\n", 2),
        (
            "import socket\na, b = socket.socket(), socket.socket()\na.bind(('127.0.0.1', 0))\n"
            "b.bind(a.getsockname())\n",
            4,
        ),
        (
            "import torch\nfrom torch.utils.data import DataLoader\n"
            "class Own:\n"
            "    def __len__(self): return 4\n"
            "    def __getitem__(self, index): return {}['label']\n"
            "for batch in DataLoader(Own(), num_workers=1): pass\n",
            5,
        ),
    ],
    ids=["refused", "read-only", "port", "sample"],
)
def test_what_the_scripts_own_call_raised_is_its_own_at_once_with_its_line(
    tmp_path: Path, text: str, line: int
) -> None:
    code, record, restarts = run(tmp_path, text)
    assert (code, record["cause"], record["fault"], restarts) == (70, "user_code", "user", [])
    assert record["place"].startswith(f'File "{tmp_path / "train.py"}", line {line}, in ')


@pytest.mark.sampled
@pytest.mark.processes
def test_a_process_of_a_loader_that_aborts_is_named_and_tried_again(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "class Own:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        if not again: os.abort()\n"
        "        return index\n"
        "for batch in DataLoader(Own(), num_workers=1): pass\n"
    )
    code, _, restarts = run(tmp_path, _FIRST_TIME + text)
    assert (code, [one["cause"] for one in restarts]) == (0, ["loader"])


@pytest.mark.sampled
@pytest.mark.processes
def test_a_missing_package_names_the_python_and_the_command(tmp_path: Path) -> None:
    code, record, restarts = run(tmp_path, "import no_such_package_of_anyone\n")
    assert (code, record["signature"], restarts) == (70, "missing-package", [])
    assert "no_such_package_of_anyone" in record["advice"].rpartition(": ")[2]
    assert "/python" in record["advice"]


@pytest.mark.sampled
@pytest.mark.processes
def test_a_rank_that_leaves_while_others_wait_is_named_and_ends_the_run_when_it_does_so_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    sys.exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    with Lab(tmp_path, maxRestarts=10, nodes=TWO, script={"path": str(script)}) as lab:
        for node in ("node-0", "node-1"):
            lab.start(node)
        assert [lab.end(node) for node in ("node-0", "node-1")] == [70, 70]
        records = [lab.record(node) for node in ("node-0", "node-1")]
        restarts = [lab.events(node, "restarting") for node in ("node-0", "node-1")]
    for record in records:
        assert (record["cause"], record["rank"]) == ("early_exit", 1)
        assert record["place"] == f'File "{script}", line 6, in <module>'
    assert [[one["cause"] for one in each] for each in restarts] == [["early_exit"]] * 2
    assert all("rank 1 left with exit code 0" in each[0]["failure"] for each in restarts)
