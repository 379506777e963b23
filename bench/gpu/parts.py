"""The parts of the measurement, and how one is run: in a session of its own that is ended when its
time is over.

    python -m bench.gpu.parts ORDER RESULT

runs one; ORDER is JSON (`Order`), RESULT the file that gets the figures.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.gpu.records import Record

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 45.0
"""For a part to end what it started, after it was told to stop."""
LOG_BYTES = 4000
"""Of a part's log, what an error quotes."""


@dataclass(frozen=True)
class Part:
    """One part: `bench.gpu.<module>` has a function `measure` that takes an `Order`."""

    name: str
    module: str
    seconds: float
    """At most, whatever is left of the whole."""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """What a part's process is told."""

    module: str
    device: str
    end: float
    """On the clock that all processes of a machine share (`time.monotonic`): it should be done by
    then, if need be with fewer repetitions.
    """
    settings: Mapping[str, Any]


MACHINE = Part("machine", "machine", 120)
PARTS = (
    *(
        Part(f"precision-{name}", "precision", 180, {"precision": name})
        for name in ("fp32", "tf32", "bf16", "fp16")
    ),
    Part("timers", "timers", 180),
    Part("measuring-short", "measuring", 180, {"shape": "short"}),
    Part("measuring-long", "measuring", 240, {"shape": "long"}),
    Part("panels", "panels", 180),
    Part("restart", "restart", 300),
)


def run(part: Part, device: str, seconds: float, out: Path) -> Record:
    """Run a part in its own process, whose output goes to a log in `out`.

    Returns:
        `seconds` that it took, and its `figures` or the `error` that ended it.
    """
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    order = Order(part.module, device, began + 0.8 * seconds, dict(part.settings))
    with log.open("w") as output:
        process = start(order, result, output)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            late = process.poll() is None
            end(process)
    taken = time.monotonic() - began
    try:
        record: Record = json.loads(result.read_text())
    except (OSError, ValueError):
        why = (
            f"TimeoutError: it did not end within {seconds:.0f} s"
            if late
            else f"ChildProcessError: it ended with {process.returncode} and left no figures"
        )
        record = {"error": f"{log.read_text(errors='replace')[-LOG_BYTES:]}\n{why}"}
    result.unlink(missing_ok=True)
    return {**record, "seconds": round(taken, 1)}


def start(order: Order, result: Path, output: IO[str]) -> subprocess.Popen[bytes]:
    """Start a part's process, which writes its figures or its error to `result`."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    if order.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "bench.gpu.parts", json.dumps(asdict(order)), str(result)]
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )


def python_path() -> str:
    """$PYTHONPATH of what is started: this tree, then the caller's."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def end(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """End a part's process, first asking it to end what it started in other sessions."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(order: str, result: str) -> int:
    """Run a part in this process."""

    def stop(*_: object) -> NoReturn:
        sys.exit("the time of this part is over")  # an exception, so that `finally` blocks run

    signal.signal(signal.SIGTERM, stop)
    given = Order(**json.loads(order))
    try:
        figures = importlib.import_module(f"bench.gpu.{given.module}").measure(given)
        document = {"figures": figures}
    except Exception:  # noqa: BLE001 - it becomes the part's row
        document = {"error": traceback.format_exc()[-LOG_BYTES:]}
    draft = Path(f"{result}.tmp")
    draft.write_text(json.dumps(document))
    draft.replace(result)
    return int("error" in document)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
