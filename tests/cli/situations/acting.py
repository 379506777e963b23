"""A process in the place of an active `kdist run`: it holds the lock of the run folder, its agents
answer as the recorded ones did, and it records a profile on request.

    python acting.py RUN_FOLDER

On SIGTERM it ends as a run that has saved its last step; it does not outlive its parent.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kdist_trainer.profiling import requests

OPERATIONS = [
    {"name": "aten::addmm", "calls": 12, "cpuSeconds": 0.0041, "deviceSeconds": 0.0},
    {"name": "gloo:all_reduce", "calls": 2, "cpuSeconds": 0.0027, "deviceSeconds": 0.0},
]


def serve(scratch: Path) -> None:
    """Answer `/status` and `/metrics` as recorded, and write down the port as an agent does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = {"/status": "status.json", "/metrics": "metrics.txt"}[self.path]
            self.send_response(200)
            self.end_headers()
            self.wfile.write((scratch / name).read_bytes())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (scratch / "agent.json").write_text(json.dumps({"port": server.server_port}))


def record_profile(root: Path) -> None:
    """Record what was requested of node-0, on both ranks."""
    checkpoints = root / "checkpoints"
    request = requests.take(requests.inbox(root / "node-0"))
    if request is None:
        return
    first, last = 65, 64 + request.steps
    requests.write_plan(checkpoints, request, ranks=[0, 1], first=first, last=last)
    folder = requests.folder_of(checkpoints, request.name)
    for rank in (0, 1):
        (folder / requests.trace_name(rank)).write_bytes(b"")
        summary = {"rank": rank, "first": first, "last": last, "operations": OPERATIONS}
        took = {"seconds": 0.011 * request.steps, "communicationSeconds": 0.002 * request.steps}
        requests.write_summary(folder, rank, summary | took)


def end(root: Path) -> None:
    """Leave what a run leaves that was stopped and has saved."""
    with (root / "checkpoints" / "ledger" / "events.jsonl").open("a") as ledger:
        ledger.write(json.dumps({"time": 1795441690.0, "event": "commit", "step": 64}) + "\n")
    run = json.loads((root / "run.json").read_text())
    run["invocations"][-1] |= {"ended": 1795441690.0, "outcome": "stopped"}
    (root / "run.json").write_text(json.dumps(run))


def main() -> None:
    root, parent = Path(sys.argv[1]), os.getppid()
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, str(os.getpid()).encode())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for scratch in sorted(root.glob("node-*")):
        serve(scratch)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.getppid() == parent and not stop.wait(0.02):
        record_profile(root)
    if stop.is_set():
        end(root)


if __name__ == "__main__":
    main()
