"""The forkserver as a fork of the agent: what it is made of in the standard library, and what a
fork must not carry over.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

from kdist_trainer.agent.forkserver import read_call
from tests.house.tree import ROOT
from tests.trainer.agent.lab import PATIENCE, Lab, children, command_of
from tests.trainer.training.test_loader import make_loader

AGENT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from tests.trainer.agent import test_forkserver
from kdist_trainer.agent import forkserver
from kdist_trainer.processes.liveness import ParentDeathPipe

if __name__ == "__main__":
    os.environ.update(KDIST_PARENT_PIPE=sys.argv[1], KDIST_ENTRYPOINT="other:one")
    pipe = ParentDeathPipe.create(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: None)
    forkserver.start_worker_forkserver()
    context = multiprocessing.get_context("forkserver")
    inherited = multiprocessing.forkserver._forkserver._forkserver_pid

    def ask(task):
        receiver, sender = context.Pipe(duplex=False)
        rank = context.Process(target=task, args=(sender,))
        rank.start()
        told = receiver.recv()
        rank.join()
        return rank.pid, told, multiprocessing.forkserver._forkserver._forkserver_pid

    _, told, server = ask(test_forkserver.look)
    print(*told, server == inherited, flush=True)
    pid, (parent, group, environment), server = ask(test_forkserver.load)
    print(parent == server, group == pid, environment, flush=True)
    os.kill(inherited, signal.SIGKILL)
    os.waitid(os.P_PID, inherited, os.WEXITED | os.WNOWAIT)
    _, told, server = ask(test_forkserver.look)
    print(*told, server == inherited, flush=True)
"""


class Whereabouts:
    """A data set whose samples say which process made them: its parent, its process group, and what
    its environment holds.
    """

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, int, str]:
        return os.getppid(), os.getpgid(0), os.environ.get("RANK", "nothing")


def load(sender: object) -> None:
    """What a rank with loader processes finds."""
    os.setpgid(0, 0)
    os.environ["RANK"] = "3"
    first = next(make_loader(Whereabouts(), workers=1, size=1).batches(step=0, position=0))
    parents, groups, reported = first.micro_batches[0].batch
    sender.send([int(parents[0]), int(groups[0]), reported[0]])  # type: ignore[attr-defined]


def look(sender: object) -> None:
    """What a rank finds."""
    lock = forkserver._forkserver._lock  # type: ignore[attr-defined]
    sender.send(  # type: ignore[attr-defined]
        [
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            not lock.locked(),
            "torch" in sys.modules,
            util.spawnv_passfds.__module__ == "multiprocessing.util",
        ]
    )


def test_the_standard_library_has_what_is_replaced_in_it() -> None:
    assert list(inspect.signature(util.spawnv_passfds).parameters) == ["path", "args", "passfds"]
    source = inspect.getsource(forkserver.ForkServer)
    assert "util.spawnv_passfds(" in source
    assert "'-c', cmd" in source
    assert "main(%d, %d, %r, **%r)" in source
    program = (
        "from multiprocessing.forkserver import main; main(5, 6, ['one'], **{'sys_path': "
        "['/a', 'b'], 'key': None})"
    )
    assert read_call(program) == ([5, 6, ["one"]], {"sys_path": ["/a", "b"], "key": None})
    assert isinstance(forkserver._forkserver._lock, type(threading.Lock()))  # type: ignore[attr-defined]


def run_agent(folder: Path, code: str) -> list[str]:
    """What a program that starts ranks as an agent does has printed, line by line."""
    (folder / "agent.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, folder / "agent.py", folder / "parent-pipe"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        start_new_session=True,  # the pipe ends a whole process group
        check=False,
    )
    assert ended.stdout, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.sampled
@pytest.mark.processes
def test_ranks_are_as_of_a_fresh_server_their_loaders_are_its_too_and_a_dead_one_has_a_successor(
    tmp_path: Path,
) -> None:
    first, loader, second = run_agent(tmp_path, AGENT)
    assert first == "True True True True True True"
    assert loader == "True True 3", "the rank's server, its process group and its environment"
    assert second == "True True True True True False"


@pytest.mark.sampled
@pytest.mark.processes
def test_the_server_holds_nothing_that_is_the_agents_alone(tmp_path: Path) -> None:
    with Lab(tmp_path, fresh=True) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        agent = lab.agents["node-0"].pid
        (server,) = (pid for pid in children(agent) if "resource_tracker" not in command_of(pid))
        held = {path.name: str(path.readlink()) for path in Path(f"/proc/{server}/fd").iterdir()}
        (pipe,) = (number for number, name in held.items() if name.endswith("parent-pipe"))
        assert held[pipe] == str(tmp_path / "node-0" / "parent-pipe")
        flags = int(
            Path(f"/proc/{server}/fdinfo/{pipe}").read_text().split("flags:")[1].split()[0], 8
        )
        assert flags & os.O_ACCMODE == os.O_RDONLY, (
            "with the end for writing it would keep the ranks alive, and itself"
        )
        lab.tell("finish")
        assert lab.end("node-0") == 0
