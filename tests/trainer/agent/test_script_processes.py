"""Scripts that are forked from a process that has imported torch: what they see, how they end, and
what happens when that process is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT
from tests.patience import soon
from tests.trainer.agent.lab import PATIENCE, Lab, children, command_of, descendants, is_alive, kill

PROBE = "tests/trainer/agent/script_probe.py"
NEW, FORKED = "none", "torch"
# What belongs to one agent or one start of its ranks, in both ways.
CHANGING = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE")


def probe(folder: Path, preload: str) -> list[dict[str, Any]]:
    """What the two ranks of one node have written down, without the name of their folder."""
    with Lab(
        folder,
        procsPerNode=2,
        script={"path": PROBE, "args": [str(folder), "--lr", "0.1"], "preload": preload},
    ) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 0, lab.logs()
        assert not lab.events("node-0", "preload-unavailable")
        agent = lab.agents["node-0"].pid
    documents = []
    for rank in range(2):
        text = (folder / f"probe-{rank}.json").read_text().replace(str(folder), "FOLDER")
        documents.append(json.loads(text))
        assert documents[-1]["own"].pop("parent") == agent
        for name in CHANGING:
            assert documents[-1]["seen"]["environment"].pop(name)
    return documents


@pytest.mark.sampled
@pytest.mark.processes
def test_a_forked_script_sees_what_it_sees_in_a_new_interpreter_and_more_modules(
    tmp_path: Path,
) -> None:
    new, forked = probe(tmp_path / "new", NEW), probe(tmp_path / "forked", FORKED)
    for ours, theirs in zip(forked, new, strict=True):
        for name, value in theirs["seen"].items():
            assert ours["seen"][name] == value, name
        assert ours["seen"].keys() == theirs["seen"].keys()
        for name in ("before", "after", "filters"):
            assert set(theirs[name]) <= set(ours[name]), "a module more, or its filter of warnings"
        assert "torch" not in theirs["before"]
        assert {"torch", "torch._dynamo", "torch.nn.parallel"} <= set(ours["before"])
    for documents in (new, forked):
        first, second = (document["own"] for document in documents)
        assert all(first[name] != second[name] for name in first), "drawn by each rank itself"


ENDS = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "exit handler")
print("out", flush=False)
print("error", file=sys.stderr)
def end(how):
    if how == "thread":
        threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"), sys.exit(9))).start()
    elif how == "daemon":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif how == "error":
        raise KeyError("label")
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif how.isdecimal():
        sys.exit(int(how))
    elif how == "text":
        sys.exit("no data")
    elif how == "at once":
        os._exit(5)
    elif how == "handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "child":
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    elif how == "input":
        print(repr(sys.stdin.read()))
    elif how == "folder":
        print(os.path.relpath(os.getcwd(), os.path.dirname(__file__)))
    elif how != "nothing":
        os.kill(os.getpid(), signal.Signals[how])
end(os.environ["HOW"])
"""
HOW = ["nothing", "thread", "daemon", "error", "interrupt", "0", "3", "256", "text", "at once"]
HOW += ["handled", "child", "input", "folder", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"]

AGENT = """
import json, os, subprocess, sys
from pathlib import Path
from kdist_trainer.agent.forkserver import RUN_SCRIPT, ScriptForkserver

script, *cases = sys.argv[1:]
folder = Path(script).parent
(folder / "elsewhere").mkdir()
server = ScriptForkserver([script], Path.cwd())
server.start()
server.wait_until_ready()
os.chdir(folder / "elsewhere")
streams = [os.dup(number) for number in range(3)]
ends = {}
for how in cases:
    for way in ("new", "forked"):
        environment = {**os.environ, "HOW": how}
        command = [sys.executable, *RUN_SCRIPT, script]
        (folder / "input").write_text("typed")
        for number, name in enumerate(("input", "output", "output")):
            opened = os.open(folder / name, os.O_RDWR | os.O_CREAT | (number and os.O_APPEND))
            os.dup2(opened, number)
            os.close(opened)
        if way == "new":
            process = subprocess.Popen(command, env=environment, start_new_session=True)
        else:
            process = server.start_script(command, environment)
        code = process.wait(60)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        ends[f"{how} {way}"] = [code, process.poll(), (folder / "output").read_text()]
        (folder / "output").unlink()
server.close()
print(json.dumps(ends))
"""


def run_agent(folder: Path, code: str, script: str, *arguments: str) -> Any:
    """What a program prints as JSON that starts `script` as an agent does."""
    (folder / "agent.py").write_text(code)
    (folder / "script.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, folder / "agent.py", folder / "script.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.stdout, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.sampled
@pytest.mark.processes
def test_a_forked_script_ends_as_in_a_new_interpreter_with_the_same_output(tmp_path: Path) -> None:
    ends = run_agent(tmp_path, AGENT, ENDS, *HOW)
    for how in HOW:
        assert ends[f"{how} forked"] == ends[f"{how} new"], how
    codes = {how: ends[f"{how} forked"][0] for how in HOW}
    failed = {"error": 1, "interrupt": 1, "3": 3, "text": 1, "at once": 5, "handled": 6}
    killed = {name: -signal.Signals[name] for name in HOW if name.startswith("SIG")}
    assert codes == {**dict.fromkeys(HOW, 0), **failed, **killed}
    said = {how: ends[f"{how} forked"][2] for how in HOW}
    assert said["thread"] == "out\nerror\na thread\nexit handler\n"
    assert "KeyError: 'label'" in said["error"]
    assert "typed" in said["input"]
    assert "elsewhere" in said["folder"]


FAILURES = """
import json, os, resource, signal, sys
from pathlib import Path
from kdist_trainer import log
from kdist_trainer.agent import forkserver

script, = sys.argv[1:]
forkserver._FORK_SECONDS = 1.0
warnings = []
log.write_to(lambda line: warnings.append(json.loads(line)["message"]))
server = forkserver.ScriptForkserver([script], Path.cwd())
command = [sys.executable, *forkserver.RUN_SCRIPT, script]

def start(**environment):
    process = server.start_script(command, {**os.environ, **environment})
    said = [warnings.pop(0) for _ in range(len(warnings))]
    return [None if process is None else process.wait(60), *said]

told = {}
server.start()
told["early"] = start()
server.wait_until_ready()
told["ready"] = start()
told["environment"] = start(OMP_NUM_THREADS="77", KMP_BLOCKTIME="0")
told["again"] = start(OMP_NUM_THREADS="77", KMP_BLOCKTIME="0")
told["of the rank"] = start(RANK="3", NCCL_DEBUG="INFO")
first = server.supervise()
limits = resource.prlimit(first, resource.RLIMIT_NOFILE)
held = len(os.listdir(f"/proc/{first}/fd")) + 4
resource.prlimit(first, resource.RLIMIT_NOFILE, (held, limits[1]))
told["no pipe"] = start()
resource.prlimit(first, resource.RLIMIT_NOFILE, limits)
told["pipes again"] = start()
os.kill(first, signal.SIGSTOP)
told["stopped"] = start()
second = server.supervise()
server.wait_until_ready()
told["replaced"] = start()
os.kill(second, signal.SIGKILL)
os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
told["killed"] = start()
server.wait_until_ready()
told["replaced again"] = start()
third = server.supervise()
told["pids"] = len({None, first, second, third})
server.close()
os.kill(os.getpid(), 0)
told["closed"] = start()
os.environ["PYTHONPATH"] = str(Path(script).parent / "broken")
server.start()
server.wait_until_ready()
told["broken"] = start()
told["broken still"] = [server.supervise(), *start()]
print(json.dumps(told))
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_without_a_server_that_can_fork_ranks_are_new_interpreters_and_the_reason_is_told_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudart is missing')")
    told = run_agent(tmp_path, FAILURES, "raise SystemExit(4)")
    reasons = {
        "early": "still imports torch",
        "environment": "KMP_BLOCKTIME, OMP_NUM_THREADS must be there when a process starts",
        "no pipe": "the fork failed: [Errno 24] Too many open files",
        "stopped": "did not answer within 1 s",
        "killed": "ended with SIGKILL",
        "broken": "ended with exit code 1 before it had imported torch",
        "closed": "there is no process that forks scripts",
    }
    for name, reason in reasons.items():
        code, *warnings = told.pop(name)
        assert code is None, name
        assert any(reason in warning for warning in warnings), (name, warnings)
        assert all("ranks then start as new interpreters" in warning for warning in warnings)
    assert told.pop("again") == [None], "told once"
    assert told.pop("broken still") == [None, None], "it would not start the next time either"
    assert told.pop("pids") == 4
    forked = ("ready", "of the rank", "pipes again", "replaced", "replaced again")
    assert told == {name: [4] for name in forked}


TRAINING = """
import os, pathlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, generation = pathlib.Path(os.environ["LAB"]), os.environ["KDIST_GENERATION"]
dist.init_process_group("gloo")
model, enough = DistributedDataParallel(torch.nn.Linear(8, 8)), torch.zeros(1)
steps = 0
while not enough:
    model(torch.ones(2, 8)).sum().backward()
    steps += 1
    if steps == 3:
        note = folder / f"{generation}-{dist.get_rank()}"
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
    enough += dist.get_rank() == 0 and (folder / "finish").exists()
    dist.broadcast(enough, 0)
dist.destroy_process_group()
"""


class Forks:
    """A lab in which two ranks of one node train until they are told to finish."""

    def __init__(self, folder: Path, before: str = "", **settings: str) -> None:
        script = folder / "train.py"
        script.write_text(before + TRAINING)
        section = {"path": str(script), **settings}
        self.lab = Lab(folder, procsPerNode=2, maxRestarts=10, script=section)
        self.script = str(script)

    def pids(self, generation: int) -> list[int]:
        """The ranks of a generation, once they train."""
        notes = [self.lab.folder / f"{generation}-{rank}" for rank in range(2)]
        self.lab.wait(
            lambda: all(note.exists() for note in notes), f"training of generation {generation}"
        )
        return [int(note.read_text()) for note in notes]

    def server(self, ranks: list[int]) -> int:
        """The process that forks the ranks."""
        found = self.lab.wait(
            lambda: [
                pid
                for pid in children(self.lab.agents["node-0"].pid)
                if self.script in command_of(pid) and pid not in ranks and is_alive(pid)
            ],
            "a process that forks",
        )
        (server,) = found
        return int(server)

    def unavailable(self) -> list[str]:
        """Why ranks were not forked."""
        return [event["message"] for event in self.lab.events("node-0", "preload-unavailable")]


@pytest.mark.processes
def test_a_plain_script_is_forked_by_default_and_one_that_sets_what_torch_reads_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "sets").mkdir()
    forks = Forks(tmp_path / "plain")
    with forks.lab as lab:
        lab.start("node-0")
        ranks = forks.pids(1)
        server = forks.server(ranks)
        kill(ranks[1], signal.SIGKILL)
        assert forks.server(forks.pids(2)) == server
        lab.tell("finish")
        assert lab.end("node-0") == 0
        assert not lab.events("node-0", "preload-off")
        assert not forks.unavailable()
    before = "import os, sys\nos.environ['TORCH_LOGS'] = 'recompiles'\n"
    before += "assert 'torch' not in sys.modules\n"
    with Forks(tmp_path / "sets", before).lab as lab:
        lab.tell("finish")
        lab.start("node-0")
        assert lab.end("node-0") == 0, lab.logs()
        (event,) = lab.events("node-0", "preload-off")
        assert "train.py:2 sets TORCH_LOGS" in event["message"]
        assert "spec.script.preload: torch" in event["message"]
        assert event["level"] == "info"


STARTED = """
import json, os, pathlib, torch
loaded = "libanl" in pathlib.Path("/proc/self/maps").read_text()
seen = [hash("text"), torch.get_num_threads(), loaded]
pathlib.Path(os.environ["LAB"], "seen").write_text(json.dumps(seen))
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_variables_that_a_process_reads_when_it_starts_have_their_effect_in_a_fork(
    tmp_path: Path,
) -> None:
    seen = []
    for preload in (NEW, FORKED):
        (tmp_path / preload).mkdir()
        script = tmp_path / preload / "train.py"
        script.write_text(STARTED)
        with Lab(tmp_path / preload, script={"path": str(script), "preload": preload}) as lab:
            variables = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
            lab.start("node-0", LD_PRELOAD="libanl.so.1", **variables)
            assert lab.end("node-0") == 0, lab.logs()
            assert not lab.events("node-0", "preload-unavailable")
        seen.append(json.loads((tmp_path / preload / "seen").read_text()))
    new, forked = seen
    assert forked == new
    assert new[1:] == [1, True]


@pytest.mark.sampled
@pytest.mark.processes
def test_a_killed_rank_is_forked_again_and_the_server_ends_with_the_run(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    with forks.lab as lab:
        lab.start("node-0")
        ranks = forks.pids(1)
        server = forks.server(ranks)
        for generation, number in ((2, signal.SIGKILL), (3, signal.SIGSEGV)):
            kill(ranks[1], number)
            ranks = forks.pids(generation)
            assert forks.server(ranks) == server
        lab.tell("finish")
        assert lab.end("node-0") == 0
        assert not is_alive(server)
        assert not forks.unavailable()
        assert [event["cause"] for event in lab.ledger("failure")] == ["signal", "signal"]


@pytest.mark.sampled
@pytest.mark.processes
def test_a_killed_server_is_replaced_while_its_ranks_train_on(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    with forks.lab as lab:
        lab.start("node-0")
        ranks = forks.pids(1)
        first = forks.server(ranks)
        kill(first, signal.SIGKILL)
        lab.wait(lambda: forks.server(ranks) != first, "another process that forks")
        (reason,) = lab.wait(forks.unavailable, "the report of the server's end")
        assert "ended with SIGKILL" in reason
        assert all(map(is_alive, ranks))
        kill(ranks[0], signal.SIGKILL)
        forks.pids(2)
        lab.tell("finish")
        assert lab.end("node-0") == 0
        assert len(lab.ledger("generation")) == 2


@pytest.mark.sampled
@pytest.mark.processes
def test_two_seconds_after_its_agent_was_killed_forked_ranks_and_their_server_are_gone(
    tmp_path: Path,
) -> None:
    forks = Forks(tmp_path)
    with forks.lab as lab:
        lab.start("node-0")
        ranks = forks.pids(1)
        family = descendants(lab.agents["node-0"].pid)
        assert {forks.server(ranks), *ranks} <= set(family)
        lab.agents["node-0"].kill()
        lab.agents["node-0"].wait()
        assert soon(lambda: not any(map(is_alive, family)))
