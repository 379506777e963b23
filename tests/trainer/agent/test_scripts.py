"""Scripts: what torchrun would show them, their failures in their own words, and their children's
end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import kdist_trainer
from tests.house.tree import ROOT
from tests.patience import soon
from tests.trainer.agent.lab import Lab, descendants, is_alive, kill

WALL = ("unobserved", "init", "productive_step", "idle")
SCRIPT = "tests/trainer/agent/torchrun_script.py"


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw at its first try, and the weights that it has in the end: a busy machine
    may make either program try again.
    """
    return [
        {
            **json.loads((folder / f"{rank}-try-0.json").read_text()),
            "weights": json.loads((folder / f"{rank}.json").read_text()),
        }
        for rank in range(2)
    ]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_script_sees_and_computes_the_same_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "torchrun").mkdir()
    (tmp_path / "kdist").mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=10",
        SCRIPT,
    ]
    subprocess.run(
        [*command, str(tmp_path / "torchrun"), "--lr", "0.1"],
        cwd=ROOT,
        env={**os.environ},
        check=True,
    )
    arguments = [str(tmp_path / "kdist"), "--lr", "0.1"]
    with Lab(tmp_path / "lab", procsPerNode=2, script={"path": SCRIPT, "args": arguments}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 0

    theirs, ours = read_ranks(tmp_path / "torchrun"), read_ranks(tmp_path / "kdist")
    for their, our in zip(theirs, ours, strict=True):
        assert our["weights"] == their["weights"]
        assert our["argv"] == [SCRIPT, *arguments]
        assert [our[name] for name in ("cwd", "file", "path")] == [
            their[name] for name in ("cwd", "file", "path")
        ]
        added = {name for name in our["environment"] if name.startswith("KDIST_")} | {"LAB"}
        # where all ranks are on this machine, libraries listen on the loopback
        added |= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
        added |= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
        added |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"}
        assert set(our["environment"]) - added == set(their["environment"])
        stable = [
            name
            for name in their["environment"]
            if name.endswith(("RANK", "WORLD_SIZE", "RESTARTS", "RESTART_COUNT"))
        ]
        stable += ["ROLE_NAME", "OMP_NUM_THREADS", "PATH"]
        assert len(stable) >= 12
        assert {name: our["environment"][name] for name in stable} == {
            name: their["environment"][name] for name in stable
        }


UNCHANGED = """
import os, pathlib, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, enough = DistributedDataParallel(torch.nn.Linear(64, 64)), torch.zeros(1)
while not enough:
    model(torch.ones(8, 64)).sum().backward()
    enough += dist.get_rank() == 0 and pathlib.Path(os.environ["LAB"], "enough").exists()
    dist.broadcast(enough, 0)
dist.destroy_process_group()
"""


def read_metrics(lab: Lab, node: str) -> str:
    port = json.loads((lab.folder / node / "agent.json").read_bytes())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def check_that_nothing_is_claimed(text: str) -> None:
    """All-reduces are on the page of metrics, and nothing of steps, saves or goodput."""
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = {series.partition("{")[0] for series in shown}
    assert {"kdist_collective_seconds_total", "kdist_allreduce_duration_seconds_bucket"} <= names
    unknown = (
        "kdist_step",
        "kdist_samples",
        "kdist_loss",
        "kdist_lost",
        "kdist_nonfinite",
        "kdist_last",
        "kdist_checkpoint",
    )
    assert not [name for name in names if name.startswith(unknown)], "absent, for nobody knows"
    wall = {
        category: float(shown[f'kdist_wall_seconds_total{{category="{category}",kdist_job="lab"}}'])
        for category in WALL
    }
    assert wall["unobserved"] > 0
    assert wall["init"] == wall["productive_step"] == wall["idle"] == 0


@pytest.mark.sampled
@pytest.mark.processes
def test_an_unchanged_script_shows_its_all_reduces_and_nothing_that_nobody_knows(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNCHANGED)
    with Lab(tmp_path, procsPerNode=2, script={"path": str(script)}) as lab:
        lab.start("node-0")
        reported = 'kdist_collectives_total{kdist_job="lab",op="all_reduce",rank="1"}'
        lab.wait(lambda: (tmp_path / "node-0" / "agent.json").exists(), "the start of the agent")
        lab.wait(lambda: reported in read_metrics(lab, "node-0"), "the count of all-reduces")
        text = read_metrics(lab, "node-0")
        lab.tell("enough")
        assert lab.end("node-0") == 0
    check_that_nothing_is_claimed(text)


PRINTING = """
import os, pathlib, sys, time
for step in range(10, 60, 10):
    print(f"step {step}/50", end=" ")
    print("loss", 1 / step)
    sys.stderr.write(f"\\r{step}%")
while not pathlib.Path(os.environ["LAB"], "enough").exists():
    time.sleep(0.02)
"""


@pytest.mark.processes
def test_steps_and_losses_are_found_in_what_an_unchanged_script_prints(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTING)
    pattern = r"step (?P<step>\d+)/(?P<target>\d+).*loss (?P<loss>[\d.]+)"
    section = {"path": str(script), "progress": {"pattern": pattern}}
    with Lab(tmp_path, procsPerNode=2, script=section) as lab:
        lab.start("node-0")
        lab.wait(lambda: (tmp_path / "node-0" / "agent.json").exists(), "the start of the agent")
        lab.wait(lambda: "kdist_loss{" in read_metrics(lab, "node-0"), "the first loss")
        reached = 'kdist_last_step{kdist_job="lab"} 50.0\n'
        lab.wait(lambda: reached in read_metrics(lab, "node-0"), "the last step")
        text = read_metrics(lab, "node-0")
        lab.tell("enough")
        assert lab.end("node-0") == 0
        assert lab.events("node-0", "progress")
        assert "[rank0]: step 50/50 loss 0.02" in lab.logs()
    assert 'kdist_loss{kdist_job="lab"} 0.02' in text
    assert 'kdist_steps_total{kdist_job="lab",rank="0"} 41.0' in text, "the first line is one step"


UNEVEN = """
import os, pathlib, time
import torch
import torch.distributed as dist

folder, rank = pathlib.Path(os.environ["LAB"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
(folder / f"ranks-{os.environ['KDIST_GENERATION']}-{rank}").write_text(\
f"{os.environ['KDIST_NODE']} {dist.get_world_size()}")
while not (folder / "finish").exists() or dist.get_world_size() == 2:
    while rank == 0 and (folder / "slow").exists():
        time.sleep(0.02)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.02)
"""


@pytest.mark.chaos
@pytest.mark.wide
def test_a_silent_node_is_left_behind_by_a_script_too_but_not_for_a_pause_of_its_agent(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNEVEN)
    with Lab(
        tmp_path,
        nodes={"min": 1, "max": 2},
        hangTimeoutSeconds=3000,
        maxRestarts=10,
        script={"path": str(script)},
    ) as lab:
        lab.start("node-0", "node-1")
        notes = [tmp_path / f"ranks-1-{rank}" for rank in range(2)]
        lab.wait(
            lambda: all(note.exists() and note.read_text() for note in notes), "a group of two"
        )
        first, second = (note.read_text().split()[0] for note in notes)
        lab.tell("slow")
        kill(lab.agents[first].pid, signal.SIGSTOP)
        began = time.monotonic()
        lab.wait(
            lambda: time.monotonic() - began > 12,
            "a pause, while the other rank waits in a collective",
        )
        kill(lab.agents[first].pid, signal.SIGCONT)
        lab.untell("slow")
        began = time.monotonic()
        lab.wait(lambda: time.monotonic() - began > 3, "a look at what came of it")
        assert len(lab.ledger("generation")) == 1
        for pid in [*descendants(lab.agents[first].pid), lab.agents[first].pid]:
            kill(pid, signal.SIGSTOP)
        third = tmp_path / "ranks-2-0"
        lab.wait(
            lambda: third.exists() and third.read_text() == f"{second} 1",
            "a group of the node that is left",
        )
        lab.tell("finish")
        assert lab.end(second) == 0


SPAWNING = """
import os, socket, sys
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

def train(number):
    dist.init_process_group("gloo", init_method="env://", world_size=1, rank=0)
    raise KeyError("label")

if __name__ == "__main__":
    taken = socket.socket()
    if os.environ["KDIST_GENERATION"] == "1":
        taken.bind(("", int(os.environ["MASTER_PORT"])))
        taken.listen()
    spawn(train, nprocs=1)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_what_ends_a_process_that_a_script_has_started_is_reported_from_an_exception_in_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "classic.py"
    script.write_text(SPAWNING)
    with Lab(tmp_path, maxRestarts=10, script={"path": str(script)}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 70
        failures = lab.ledger("failure")
        assert [one["cause"] for one in failures] == ["rendezvous", "user_code"], (
            "a port that was taken, then a KeyError"
        )
        assert "KeyError: 'label'" in lab.record("node-0")["message"]


STOPPING = """
import json, os, pathlib, time
import kdist_trainer

folder, rank = pathlib.Path(os.environ["LAB"]), os.environ["RANK"]
assert kdist_trainer.stop_requested() is None
(folder / f"started-{rank}").touch()
while (stop := kdist_trainer.stop_requested()) is None:
    time.sleep(0.02)
told = [time.time(), stop.deadline, stop.seconds_left]
(folder / f"told-{rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.processes
def test_every_rank_of_a_script_learns_that_a_node_is_asked_to_end_and_when_it_is_killed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPING)
    nodes, grace = {"min": 2, "max": 2}, 600
    with Lab(
        tmp_path,
        nodes=nodes,
        script={"path": str(script)},
        terminationGracePeriodSeconds=grace,
        rendezvousTimeoutSeconds=5,
    ) as lab:
        lab.start("node-0", "node-1")
        for rank in range(2):
            lab.wait((tmp_path / f"started-{rank}").exists, f"the start of rank {rank}")
        asked = time.time()
        lab.agents["node-0"].send_signal(signal.SIGTERM)
        assert lab.end("node-0") == 200
        files = [tmp_path / f"told-{rank}.json" for rank in range(2)]
        lab.wait(lambda: all(one.exists() and one.read_bytes() for one in files), "both answers")
        for at, deadline, left in map(json.loads, (file.read_bytes() for file in files)):
            assert 0 <= deadline - asked - (grace - 5) <= at - asked
            assert left == pytest.approx(deadline - at, abs=5)


@pytest.mark.sampled
@pytest.mark.processes
def test_a_job_that_is_active_for_too_long_is_asked_to_stop_and_fails_for_good(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPING + "while not (folder / 'signalled').exists(): time.sleep(0.02)\n")
    with Lab(
        tmp_path,
        nodes={"min": 2, "max": 2},
        script={"path": str(script)},
        activeDeadlineSeconds=10,
        maxRestarts=10,
    ) as lab:
        lab.start("node-0", "node-1")
        told = [tmp_path / f"told-{rank}.json" for rank in range(2)]
        lab.wait(lambda: all(one.exists() for one in told), "the request to stop")
        for agent in lab.agents.values():
            agent.send_signal(signal.SIGTERM)  # meanwhile, which changes nothing
        lab.tell("signalled")
        assert [lab.end(node) for node in ("node-0", "node-1")] == [75, 75]
        for node in ("node-0", "node-1"):
            record = lab.record(node)
            assert (record["cause"], record["message"]) == (
                "deadline",
                "the job was active longer than activeDeadlineSeconds (10 s)",
            )
        assert len(lab.ledger("generation")) == 1


def test_a_script_outside_kdist_is_never_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDIST_SCRATCH", raising=False)
    former = signal.getsignal(signal.SIGTERM)
    assert kdist_trainer.stop_requested() is None
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.processes
def test_an_exception_in_a_script_is_the_users_and_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def load():\n    raise KeyError('label')\n\nload()\n")
    with Lab(tmp_path, script={"path": str(script)}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 70
        record = lab.record("node-0")
        assert (record["cause"], record["message"]) == ("user_code", "KeyError: 'label'")
        assert record["traceback"][1] == f'  File "{script}", line 4, in <module>', (
            "the runner's own frames are left out"
        )
        assert f'File "{script}", line 2, in load' in lab.logs()
        assert not lab.events("node-0", "restarting")


@pytest.mark.processes
def test_a_script_that_leaves_by_os_exit_with_code_0_is_done_as_under_torchrun_and_that_is_reported(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos._exit(0)\n")
    with Lab(tmp_path, script={"path": str(script)}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 0
        (reported,) = lab.events("node-0", "ended-early")
        assert reported["rank"] == 0


@pytest.mark.processes
def test_a_script_that_crashes_alike_each_time_is_reported_so_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ctypes\ndef fetch():\n    ctypes.string_at(1)\nfetch()\n")
    with Lab(tmp_path, maxRestarts=10, script={"path": str(script)}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 75
        record, reported = lab.record("node-0"), lab.events("node-0", "restarting")
    expected = "the same failure 3 times in a row without progress: rank 0 was killed by SIGSEGV"
    assert record["message"] == expected
    assert record["place"] == f'File "{script}", line 3, in fetch', "not ctypes, which crashed"
    assert "ctypes" in record["traceback"][-1]
    assert len(reported) == 2
    assert all(
        event["message"].startswith("the script starts again from the beginning")
        for event in reported
    )


@pytest.mark.processes
def test_two_seconds_after_its_agent_was_killed_a_script_and_its_children_are_gone(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "for own in (False, True):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=own)\n"
        f"pathlib.Path({str(tmp_path / 'started')!r}).touch()\n"
        "time.sleep(600)\n"
    )
    with Lab(tmp_path, script={"path": str(script)}) as lab:
        lab.start("node-0")
        lab.wait((tmp_path / "started").exists, "the start of the script")
        family = descendants(lab.agents["node-0"].pid)
        assert len(family) >= 3
        lab.agents["node-0"].kill()
        lab.agents["node-0"].wait()
        assert soon(lambda: not any(map(is_alive, family)))
