"""The container's entrypoint: the agent of one node. Its exit status is the table in
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

from kdist_trainer.agent.exit_record import failed
from kdist_trainer.agent.launch import end, launch
from kdist_trainer.agent.settings import EXIT, ON_END, WORKER, Settings
from kdist_trainer.config import Cause, Exit, Nodes, Script, TrainConfig
from kdist_trainer.errors import Failure
from kdist_trainer.rendezvous.endpoint import PLACES
from kdist_trainer.signals import StopSignals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent as the command line says; returns its exit code."""
    given = _parser().parse_args(arguments)
    try:
        return launch(_settings(given, TrainConfig.read(given.config)))
    except (ValidationError, OSError) as error:
        return _refuse(given, error)


def _settings(given: argparse.Namespace, config: TrainConfig) -> Settings:
    return Settings(
        config_path=given.config.absolute(),
        config=config,
        run_id=given.run_id,
        node=given.node,
        scratch=given.scratch.absolute(),
        rendezvous=given.rendezvous,
        checkpoints=given.checkpoints and given.checkpoints.absolute(),
        code=given.code and given.code.absolute(),
        data=dict(given.data),
        port=given.port,
        address=given.address,
        termination_message=given.termination_message and given.termination_message.absolute(),
        on_end=given.on_end,
        take_over=given.take_over,
        rendezvous_id=given.rendezvous_id,
        lifeline=given.lifeline and given.lifeline.absolute(),
        entrypoint=given.entrypoint,
    )


def _refuse(given: argparse.Namespace, error: Exception) -> int:
    """Say why the agent could not even begin: the job's document is wrong, or this node's disk."""
    stop = StopSignals()
    stop.install()
    wrong = isinstance(error, ValidationError) or getattr(error, "filename", None) == str(
        given.config
    )
    cause, code = (Cause.CONFIG, Exit.CONFIG) if wrong else (Cause.STORAGE, Exit.STORAGE)
    failure = Failure(
        cause, code, True, f"{given.config}: {error}" if wrong else str(error), node=given.node
    )
    with contextlib.suppress(OSError):
        given.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    unknown = TrainConfig(name="unknown", nodes=Nodes(min=1, max=1), script=Script(path="unknown"))
    return end(_settings(given, unknown), failed(failure), stop=stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="train.json of the job")
    parser.add_argument("--run-id", required=True, help="what tells this run's agents from others")
    parser.add_argument("--node", required=True, help="name of this node, such as node-0")
    parser.add_argument("--scratch", type=Path, required=True, help="private folder of this agent")
    parser.add_argument("--rendezvous", required=True, help=f"where agents meet: {PLACES}")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of the run's checkpoints and ledger"
    )
    parser.add_argument("--code", type=Path, help="folder with the user's modules or script")
    parser.add_argument(
        "--data",
        type=_pair,
        action="append",
        default=[],
        metavar="MOUNT=PATH",
        help="a data set's place here",
    )
    _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the remaining options, all of them optional."""
    parser.add_argument(
        "--port", type=int, default=9401, help="port of metrics and status; 0 picks a free one"
    )
    parser.add_argument(
        "--address", help="where this node's ranks listen; locally 127.0.0.1, else this host's name"
    )
    parser.add_argument(
        "--termination-message",
        type=Path,
        help="file that shall hold the exit record, as Kubernetes reads it",
    )
    parser.add_argument(
        "--on-end",
        choices=ON_END,
        default=EXIT,
        help="park: after a success or a failure for good, stay until SIGTERM",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the folder of checkpoints from another run that holds it",
    )
    parser.add_argument(
        "--rendezvous-id",
        default="",
        help="tells agents that meet from others of their run, whose end is not theirs",
    )
    parser.add_argument("--lifeline", type=Path, help="pipe whose end of file ends this agent")
    parser.add_argument(
        "--entrypoint",
        default=WORKER,
        metavar="MODULE:FUNCTION",
        help="what each rank of a training runs",
    )


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
    # Not sys.exit: what ends with this process is ended by the lifeline, which the kernel closes
    # now and not a moment earlier.
    os._exit(code)
