"""`python -m kdist_trainer.fetch`: fetches what a URL names into a folder, before a job starts.

Events of its log go to stdout, one JSON object a line. Credentials come from the environment alone.
Exit codes are those of `kdist_trainer.config.Exit`: 0 done, 64 the job must be corrected, 65 what
is there is not what the job asks for, 200 stopped by SIGTERM, 203 the server or the disk failed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.agent.exits import RECORD_HELP, failed, stopped, write_termination_message
from kdist_trainer.config import SECRET_VARIABLES, Cause, Exit
from kdist_trainer.config.sources import without_secrets
from kdist_trainer.errors import ConfigError, KdistTrainerError
from kdist_trainer.fetch import STALL_SECONDS, FetchRequest
from kdist_trainer.fetch.fetcher import Fetcher, is_full
from kdist_trainer.ipc.failure import Failure, describe
from kdist_trainer.processes import liveness
from kdist_trainer.processes.signals import StopRequested, StopSignals

_SHORTEST_SECRET = 6
_STDOUT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one fetch; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.fetch", description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="what to fetch, without credentials")
    add("--folder", type=Path, required=True, help="gets the files, in files/")
    add("--field", required=True, help="field of job.yaml that asks for it")
    add("--endpoint", help="address of the server, if it is not the usual one")
    add("--region", help="region of an s3:// bucket")
    add("--sha256", metavar="HEX", help="digest of the file, or of SHA256SUMS")
    add("--max-bytes", type=int, metavar="N", help="most bytes of all files")
    add("--weights", action="store_true", help="of a repository of hf://, only its weights")
    add("--termination-message", type=Path, metavar="FILE", help=RECORD_HELP)
    add("--parent-pipe", type=Path, metavar="FIFO", help="pipe whose end of file ends the fetch")
    add(
        "--stall-seconds",
        type=float,
        default=STALL_SECONDS,
        metavar="N",
        help="how long failed requests are repeated without any progress",
    )
    given = parser.parse_args(arguments)
    if given.parent_pipe is not None:
        liveness.watch(given.parent_pipe)
    log.write_to(lambda line: os.write(_STDOUT, redact(line.decode()).encode()))
    stop = StopSignals()
    stop.install()
    url = without_secrets(given.url)
    fields = {"url": url, "field": given.field}
    try:
        # A thread of its own: libraries that the fetch calls would take the exception that a signal
        # raises here for an error of theirs.
        fetch = ThreadPoolExecutor(1, "fetcher").submit(lambda: Fetcher(_request(given)).run())
        with stop.interruptible():
            fetch.result()
        return int(Exit.DONE)
    except StopRequested:
        message = f"stopped while {url} was fetched: what has come is kept"
        log.event("data-stopped", **fields, message=message)
        return _end(stopped(message, step=None), given)
    except Exception as error:  # noqa: BLE001 - whatever it is, Kubernetes gets a record of it
        failure = _failure(error, given.field)
        log.error(
            "data-failed",
            **fields,
            reason=redact(failure.message),
            cause=failure.cause.value,
            code=int(failure.code),
        )
        return _end(failed(failure), given)


def redact(text: str) -> str:
    """Without the values of variables that have credentials."""
    names = {name for each in SECRET_VARIABLES.values() for name in each}
    values = {os.environ.get(name, "").strip() for name in names}
    # of `Bearer …` the token alone, too
    values |= {part for value in values for part in value.split()}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


def _request(given: argparse.Namespace) -> FetchRequest:
    sha256 = (given.sha256 or "").lower()
    if sha256 and re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise ConfigError(f"{given.field}.sha256 must be 64 hexadecimal digits")
    return FetchRequest(
        url=given.url,
        folder=given.folder.absolute(),
        field=given.field,
        endpoint=given.endpoint or "",
        region=given.region or "",
        sha256=sha256,
        max_bytes=given.max_bytes,
        weights=given.weights,
        stall_seconds=given.stall_seconds,
    )


def _failure(error: Exception, field: str) -> Failure:
    node = os.environ.get("KDIST_NODE", "")
    if isinstance(error, KdistTrainerError):
        return Failure.of_node(error.cause, error.code, str(error), node=node)
    if isinstance(error, ImportError):
        return Failure.of_node(Cause.CONFIG, Exit.CONFIG, f"{field}: {error}", node=node)
    if isinstance(error, OSError):
        if is_full(error):
            message = f"{field}: no space is left: raise {field}.size, or make room ({error})"
            return Failure.of_node(Cause.DATA, Exit.DATA, message, node=node)
        return Failure.of_node(Cause.STORAGE, Exit.STORAGE, f"{field}: {error}", node=node)
    return describe(error, node=node)


def _end(record: dict[str, Any], given: argparse.Namespace) -> int:
    if given.termination_message is not None:
        shown = {
            name: redact(value) if isinstance(value, str) else value
            for name, value in record.items()
        }
        shown["traceback"] = [redact(line) for line in record.get("traceback") or ()]
        write_termination_message(shown, given.termination_message)
    return int(record["code"])


if __name__ == "__main__":
    code = main()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    # not sys.exit: it would wait for threads that wait for a server
    os._exit(code)
