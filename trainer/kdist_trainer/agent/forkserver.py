"""The forkservers: of the agents of `kdist run`, and on each node of workers that are functions and
of scripts. They import in advance: torch and what the first training step needs take about six
seconds of CPU time to import, which a run or a node pays once.

The forkserver of agents (`Spawner`) replaces an agent that dies in milliseconds instead of the many
seconds that its imports take on a busy machine. One shim per agent (`kdist_trainer.processes.shim`)
requests it. The spawner and all agents end with its parent-death pipe. If it exits earlier, agents
start by themselves.

The forkserver of functions is multiprocessing's; only its start differs: it is a fork of the agent,
which must have no running threads and no CUDA context yet. If it dies, multiprocessing starts the
next one as usual, as a new interpreter.

The forkserver of scripts (`script.preload`) is `kdist_trainer.processes.script_forkserver`,
and `ScriptForkserver` is the agent's side of it. While there is no such server, scripts start as
new interpreters. The ranks are children of the agent either way.
"""

from __future__ import annotations

import ast
import gc
import importlib
import multiprocessing
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from kdist_trainer import log
from kdist_trainer.agent import compile_cache
from kdist_trainer.agent.script_source import find_obstacle
from kdist_trainer.agent.settings import Settings, limit_threads
from kdist_trainer.config import START_VARIABLES, TrainConfig
from kdist_trainer.formats import SPAWNER
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json
from kdist_trainer.processes import liveness, process_tree
from kdist_trainer.processes.script_forkserver import DESCRIPTOR, GO, READY
from kdist_trainer.processes.signals import leave_stops_to_others, signal_name

AGENT_MODULES = (
    "kdist_trainer.agent.agent",
    "kdist_trainer.rendezvous.handler",
    "kdist_trainer.agent.worker_group",
)
RANK_MODULES = ("torch.distributed.elastic.multiprocessing.api", "kdist_trainer.agent.worker_group")
_TRAINING = (
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP(...) imports it: most of a second
    "torch.distributed.checkpoint.state_dict",
    "kdist_trainer.worker",
    "encodings.idna",  # the first name of a host that is resolved
)
_EVENT_FILES = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)
"""Imported by rank 0 only, which may be a new process while all other ranks wait for it."""


def training_modules(config: Path) -> Iterator[str]:
    """The modules that the workers of the managed training at `config` import. A user's own
    workload is not one of them, since it may do anything on import.
    """
    yield from _TRAINING
    with suppress(OSError, ValueError, KeyError, TypeError):
        train = parse_json(config.read_bytes())["train"]
        if train.get("tensorboard") != "off":
            yield from _EVENT_FILES
        name: str = train["workload"]
        if name.isidentifier():
            yield f"kdist_trainer.workloads.{name}"


def register_gloo() -> None:
    """Have torch register its backend gloo, for which it reads the metadata of every installed
    package: some ten milliseconds in each process that makes a process group.
    """
    from torch.distributed.distributed_c10d import BackendConfig

    BackendConfig("gloo")


def look_up_operators() -> None:
    """Have torch look up the operators of collectives, which each rank that records its collectives
    needs before its first one.
    """
    from kdist_trainer.instrumentation import torch_internals

    for operator in torch_internals.operators():
        torch_internals.overload(torch_internals.COLLECTIVES, operator)


def build_config() -> None:
    """Have pydantic build what reads and writes train.json, which it otherwise does in each process
    at the first use.
    """
    from kdist_trainer.config import TrainConfig, Training

    for model in (TrainConfig, Training):
        model.model_rebuild()


def import_all(modules: Iterable[str]) -> None:
    """Import the modules, ignoring those that fail: their users will raise the error.

    Garbage is collected after it: imports leave little, and looking for it takes a quarter of the
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()


_PRELOAD = "kdist_trainer.agent.preload"
"""What the server imports in addition, while the agent joins the rendezvous."""


def start_worker_forkserver() -> None:
    """Import torch, then fork the server. Main thread only, before this process starts threads or
    uses a GPU.
    """
    import_all(AGENT_MODULES)
    multiprocessing.set_forkserver_preload([_PRELOAD])
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork  # what multiprocessing starts the server with
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _SPAWN


_SPAWN = util.spawnv_passfds


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:  # noqa: ARG001 - the standard library's signature
    """Start the server by a fork instead of `python -c PROGRAM`; returns its pid. The program is
    the last of `args`, and the interpreter at `path` is not used.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    with warnings.catch_warnings():
        # The other threads, if any, sleep in read() or belong to a numerical library, which handles
        # forks.
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        pid = os.fork()
    if pid == 0:
        _serve(args[-1], passfds)
    return pid


def _serve(program: str, kept: Sequence[int]) -> NoReturn:
    """Run the server in the fork, without the agent's descriptors, above all its parent-death pipe,
    and without its signal handlers.
    """
    code = 1
    try:
        close_descriptors(keep=kept)
        leave_stops_to_others()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        util.spawnv_passfds = _SPAWN
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the agent holds the inherited one
        arguments, keywords = read_call(program)
        forkserver.main(*arguments, **keywords)
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 - the agent's own code must not continue in the fork
        traceback.print_exc()
    finally:
        os._exit(code)


def close_descriptors(*, keep: Iterable[int] = ()) -> None:
    """Close all inherited descriptors except the standard streams and those in `keep`."""
    for descriptor in {int(path.name) for path in Path("/dev/fd").iterdir()} - {0, 1, 2, *keep}:
        with suppress(OSError):  # the descriptor of the listing itself
            os.close(descriptor)


def read_call(program: str) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of the call at the end of `program`, such as `import it;
    it(1, "two", **{"three": 3})`.
    """
    last = ast.parse(program).body[-1]
    assert isinstance(last, ast.Expr)  # noqa: S101 - the program is multiprocessing's
    assert isinstance(last.value, ast.Call)  # noqa: S101
    keywords: dict[str, Any] = {}
    for keyword in last.value.keywords:
        value = ast.literal_eval(keyword.value)
        keywords.update(value if keyword.arg is None else {keyword.arg: value})
    return [ast.literal_eval(argument) for argument in last.value.args], keywords


_READY_SECONDS = 120.0
_FORK_SECONDS = 10.0
_POLL_SECONDS = 0.1
RUN_SCRIPT = ("-u", "-m", "kdist_trainer.run_script")
"""The arguments of the interpreter that runs a script."""


class ForkedScript:
    """A rank that the forkserver has forked, with the part of `subprocess.Popen` that the agent and
    torch use.
    """

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit; returns the exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._wait(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkserverError(Exception):
    """The forkserver cannot fork a rank."""


class ScriptForkserver:
    """The forkserver of the scripts of this node, whose working directory is `directory`; `command`
    has the arguments of `run_script`. A server that dies is replaced, unless it did not get as far
    as to have imported torch.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = [sys.executable, *RUN_SCRIPT, *command]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._is_ready = False
        self._reported = ""

    def start(self) -> None:
        """Start the server, which then imports torch. Needs the environment that the scripts will
        get. Main thread only: the server is continued when the thread that started it exits.
        """
        if not process_tree.adopt():
            self._report("this system cannot make the agent the parent of forked processes")
            return
        ours, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        self._is_ready = False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._directory,
                    env={**self._environment, DESCRIPTOR: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                self._report(f"the process that forks scripts did not start: {error}")
                return
        self._requests = ours

    def supervise(self) -> int | None:
        """The pid of the server; None without one. A server that has died is replaced."""
        if self._process is not None and (code := self._process.poll()) is not None:
            had_imported = self._poll_ready()
            self.close()
            ended = signal_name(code) or f"exit code {code}"
            when = "" if had_imported else " before it had imported torch"
            self._report(f"the process that forks scripts ended with {ended}{when}")
            if had_imported:
                self.start()
        return None if self._process is None else self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until scripts can be forked, or it is clear that they cannot."""
        deadline = time.monotonic() + _READY_SECONDS
        while self.supervise() is not None and not self._poll_ready(_POLL_SECONDS):
            if time.monotonic() > deadline:
                self._report(f"torch was not imported within {_READY_SECONDS:.0f} s")
                return

    def start_script(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedScript | None:
        """Start a rank, with this process's working directory and standard streams, and this whole
        environment; `command` would start a new interpreter for it. Returns the running rank; None
        if it must be a new interpreter, which is reported.
        """
        try:
            pid = self._request(command, environment)
        except (ForkserverError, OSError, ValueError) as error:
            self._report(str(error))
            return None
        self._reported = ""
        return ForkedScript(pid, command)

    def close(self) -> None:
        """End the server; its ranks go on."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._requests = self._process = None

    def _request(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        if list(command) != self._command:
            raise ForkserverError(f"it was started for {self._command}, not for {command}")
        differing = sorted(
            name
            for name in {*environment, *self._environment}
            if START_VARIABLES.match(name) and environment.get(name) != self._environment.get(name)
        )
        if differing:
            raise ForkserverError(
                f"the environment has changed, and {', '.join(differing)} must be there when a "
                "process starts"
            )
        if self.supervise() is None or self._requests is None:
            raise ForkserverError(self._reported or "there is no process that forks scripts")
        if not self._poll_ready():
            raise ForkserverError("the process that forks scripts still imports torch")
        try:
            return self._exchange(self._requests, environment)
        except TimeoutError:
            self.close()
            self.start()
            raise ForkserverError(
                f"the process that forks scripts did not answer within {_FORK_SECONDS:.0f} s"
            ) from None

    def _exchange(self, requests: socket.socket, environment: Mapping[str, str]) -> int:
        """Have the server fork; returns the pid of the rank, which is then this process's child."""
        request = {"directory": str(Path.cwd()), "environment": dict(environment)}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(requests, [b"fork"], [theirs.fileno(), 0, 1, 2])
            ours.settimeout(_FORK_SECONDS)
            ours.sendall(encode_json(request).encode() + b"\n")
            answer = parse_json(ours.recv(4096) or b'{"error": "it has exited"}')
            if "error" in answer:
                raise ForkserverError(f"the fork failed: {answer['error']}")
            ours.sendall(GO)
        return int(answer["pid"])

    def _poll_ready(self, seconds: float = 0.0) -> bool:
        """Whether the server has imported torch; waits for it at most `seconds`."""
        if not self._is_ready and self._requests is not None:
            readable, _, _ = select.select([self._requests], [], [], seconds)
            with suppress(OSError):
                self._is_ready = bool(readable) and self._requests.recv(len(READY)) == READY
        return self._is_ready

    def _report(self, problem: str) -> None:
        """Warn of a problem, once until a script has been forked again."""
        if problem != self._reported:
            self._reported = problem
            log.warn(
                "preload-unavailable",
                message=f"script.preload: {problem}; ranks then start as new interpreters, which "
                "takes seconds longer",
            )


_running: list[ScriptForkserver] = []


def start_script_forkserver(settings: Settings) -> None:
    """Start the forkserver of this agent's scripts, if the job asks for one or it is safe."""
    script = settings.config.script
    if script is None or script.preload == "none":
        return
    folder = settings.code or Path.cwd()
    found = find_obstacle(script.command, folder) if script.preload == "auto" else None
    if found is None:
        server = ScriptForkserver(script.command, folder)
        server.start()
        _running.append(server)
    elif found:
        message = f"ranks start as new interpreters, which takes seconds longer: {found}"
        advice = "spec.script.preload: torch forks them all the same, none leaves this message out"
        log.event("preload-off", message=f"{message}; {advice}")


def running_script_forkserver() -> ScriptForkserver | None:
    """The forkserver of this agent's scripts; None if there is none to be."""
    return _running[0] if _running else None


def close_script_forkserver() -> None:
    """End the forkserver, if there is one."""
    while _running:
        _running.pop().close()


_ORPHAN_SECONDS = 2.0


class Spawner:
    """Serves the requests that arrive at `requests`, each with a connection, stdout and stderr.
    Only `serve` reaps children.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._agents: dict[int, socket.socket] = {}
        """The connection of each running agent to its shim, by pid."""
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()

    def serve(self) -> NoReturn:
        """Fork agents and report their exits to their shims, until this process is killed."""
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake)
        leave_stops_to_others()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the handler only enables the wake-up
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    self._handle_request()
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                else:
                    self._kill_without_shim(key.fileobj)

    def _handle_request(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._requests, 16, 3)
        connection, streams = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            with connection.makefile("rb") as lines:
                request = parse_json(lines.readline(), keep_surrogates=True)
        except (OSError, MalformedTextError):  # the shim has ended meanwhile
            connection.close()
        else:
            self._fork(request, connection, streams)
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(
        self, request: dict[str, Any], connection: socket.socket, streams: Sequence[int]
    ) -> None:
        with warnings.catch_warnings():
            # The only other thread sleeps in read() and holds no lock.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._release_in_child(connection, streams)
            run_as_agent(request)
        self._agents[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        _send(connection, pid=pid)

    def _release_in_child(self, connection: socket.socket, streams: Sequence[int]) -> None:
        """Release the spawner's descriptors, handlers and session in a forked child."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
            os.dup2(descriptor, number)
        self._selector.close()
        for held in (connection, *self._agents.values(), self._requests):
            held.close()
        close_descriptors()

    def _reap(self) -> None:
        """Reap every child that has exited: agents, and orphans of agents that have exited."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                connection = self._agents.pop(pid, None)
                if connection is not None:
                    self._kill_orphans()
                    self._forget(connection)
                    _send(connection, code=os.waitstatus_to_exitcode(status))
                    connection.close()

    def _kill_orphans(self) -> None:
        """Kill the orphans of agents that have exited; this process has adopted them."""
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while time.monotonic() < deadline:
            orphans = [pid for pid in process_tree.find_children() if pid not in self._agents]
            if not process_tree.find(below=orphans):
                return
            process_tree.kill(below=orphans, seconds=_ORPHAN_SECONDS)

    def _kill_without_shim(self, connection: Any) -> None:
        """Kill an agent whose shim was killed."""
        self._forget(connection)
        for pid, known in self._agents.items():
            if known is connection:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _forget(self, connection: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(connection)


def run_as_agent(request: dict[str, Any]) -> NoReturn:
    """Run as the requested agent, as if this process had been started for it."""
    code = 1
    try:
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        agent: Any = importlib.import_module("kdist_trainer.__main__")
        sys.modules["__main__"] = agent  # otherwise workers would import the spawner's
        code = agent.main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the spawner's own code must not continue in the fork
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a log on a full disk
                stream.flush()
        os._exit(code)


def _send(connection: socket.socket, **message: int) -> None:
    with suppress(OSError):  # the shim has ended
        connection.sendall(encode_json(message).encode() + b"\n")


def main(config_path: Path, parent_pipe: Path) -> NoReturn:
    """Import what the agents of the job at `config_path` and their workers need, then fork agents
    on request; `parent_pipe` ends this process.
    """
    requests = socket.socket(fileno=int(os.environ.pop(SPAWNER)))
    process_tree.adopt()  # orphans of agents become children of this process, which kills them
    liveness.watch(parent_pipe)
    config = TrainConfig.read(config_path)
    limit_threads(config)
    compile_cache.skip_headers(config)
    import_all(AGENT_MODULES)
    if config.train is not None:
        import_all(RANK_MODULES)
        import_all(training_modules(config_path))
    gc.collect()
    gc.freeze()  # garbage collection in an agent then writes to no shared pages
    Spawner(requests).serve()


if __name__ == "__main__":
    # the module that agents import: a fork of `__main__` would import it once more
    importlib.import_module("kdist_trainer.agent.forkserver").main(*map(Path, sys.argv[1:3]))
