"""The container's entrypoint: the agent of one node. Its exit codes are those of
`kdist_trainer.config.Exit`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from kdist_trainer.agent.exits import RECORD_HELP, failed
from kdist_trainer.agent.launch import end, launch
from kdist_trainer.agent.settings import ENDPOINTS, EXIT, ON_FINISH, WORKER, Settings, read_config
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.config import METRICS_PORT, NOT_FETCHED, Cause, Exit, Nodes, Script, TrainConfig
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.signals import StopSignals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent; returns its exit code."""
    given = _parser().parse_args(arguments)
    try:
        config = read_config(given.config, given.scratch)
        init = config.train.init if config.train is not None else None
        if init is not None and init.url is not None and given.init is None:
            raise ValueError(f"spec.train.init: {NOT_FETCHED.format(init.url)}")
        return launch(_settings(given, config))
    except (ValueError, ImportError, OSError) as error:  # a ValidationError is a ValueError
        return _report_start_failure(given, error)


def _settings(given: argparse.Namespace, config: TrainConfig) -> Settings:
    return Settings(
        config_path=given.config.absolute(),
        config=config,
        run_id=given.run_id,
        node=given.node,
        scratch=given.scratch.absolute(),
        rendezvous=given.rendezvous,
        checkpoints=_open_checkpoints(given.checkpoints),
        code=given.code and given.code.absolute(),
        data=dict(given.data),
        gpus=given.gpus,
        init=given.init and given.init.absolute(),
        port=given.port,
        address=given.address,
        listen=given.listen,
        termination_message=given.termination_message and given.termination_message.absolute(),
        on_finish=given.on_finish,
        take_over=given.take_over,
        rendezvous_id=given.rendezvous_id,
        parent_pipe=given.parent_pipe and given.parent_pipe.absolute(),
        entrypoint=given.entrypoint,
    )


def _open_checkpoints(text: str | None) -> StoragePath | None:
    if not text:
        return None
    found = open_location(text)
    return found.absolute() if isinstance(found, Path) else found


def _report_start_failure(given: argparse.Namespace, error: Exception) -> int:
    """End an agent that cannot start: its train.json or the URL of its checkpoints is invalid, the
    package for such a URL is missing, or a disk of this node fails.
    """
    stop = StopSignals()
    stop.install()
    is_invalid = isinstance(error, ValidationError) or getattr(error, "filename", None) == str(
        given.config
    )
    is_config = is_invalid or isinstance(error, ValueError | ImportError)
    cause, code = (Cause.CONFIG, Exit.CONFIG) if is_config else (Cause.STORAGE, Exit.STORAGE)
    message = f"{given.config}: {error}" if is_invalid else str(error)
    given.checkpoints = None
    failure = Failure.of_node(cause, code, message, node=given.node)
    with contextlib.suppress(OSError):
        given.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    unknown = TrainConfig(name="unknown", nodes=Nodes(min=1, max=1), script=Script(path="unknown"))
    return end(_settings(given, unknown), failed(failure), stop=stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer", description=__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="train.json of the job")
    add("--run-id", required=True, help="id of the run, which separates its agents from others")
    add("--node", required=True, help="name of this node, such as node-0")
    add("--scratch", type=Path, required=True, help="private folder of this agent")
    add("--rendezvous", required=True, help=f"rendezvous endpoint: {ENDPOINTS}")
    add("--checkpoints", help="folder or URL of the run's checkpoints and ledger")
    add("--code", type=Path, help="folder with the user's modules or script")
    add(
        "--data",
        type=_pair,
        action="append",
        default=[],
        metavar="MOUNT=PATH",
        help="path of a data set on this node",
    )
    add("--init", type=Path, help="folder with the weights fetched from train.init.url")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs that the job needs on this node")
    add("--port", type=int, default=METRICS_PORT, help="port of metrics and status; 0: a free one")
    add(
        "--address",
        help="address at which this node's ranks listen; locally 127.0.0.1, else this host's name",
    )
    add(
        "--listen",
        metavar="ADDRESS,...",
        help="addresses that serve metrics and status, besides loopback; by default --address",
    )
    add("--termination-message", type=Path, help=RECORD_HELP)
    add(
        "--on-finish",
        choices=ON_FINISH,
        default=EXIT,
        help="keep-alive: after a success or a permanent failure, stay alive until SIGTERM",
    )
    add("--take-over", action="store_true", help="take over checkpoints locked by another run")
    add("--rendezvous-id", default="", help="tells this rendezvous from others of the run")
    add("--parent-pipe", type=Path, help="parent-death pipe: end of file ends this agent")
    add("--entrypoint", default=WORKER, metavar="MODULE:FUNCTION", help="what each rank runs")
    return parser


def _pair(text: str) -> tuple[str, str]:
    mount, equals, path = text.partition("=")
    if not equals or not mount or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not MOUNT=PATH")
    return mount, path


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a log on a full disk
            stream.flush()
    # Not sys.exit: the kernel closes the parent-death pipe now and not a moment earlier.
    os._exit(code)
