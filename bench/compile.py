"""What a restart compiles again: the time in torch.compile, by torch's own counter, of the first
start, of the next one on the same node, of one on another node with the archive that is kept next
to the checkpoints, and of one with torch's own archive (`torch.compiler.save_cache_artifacts`).

    python -m bench.compile

The same small model as an unmodified script and in the managed loop, on the CPU, one rank, each
start by `kdist run`. The archive is that of an agent in a pod; the other node is an empty folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import columns, title
from kdist_trainer.agent.compile_cache import _PREFIX, CacheArchive

CODE = Path(__file__).with_name("code")
FIRST, AGAIN, MOVED = "first start", "again on the node", "on another node"
ARTIFACTS = "on another node, torch's archive"


def start(folder: Path, job: Path, **variables: str) -> dict[str, float]:
    """One run; returns what its rank has noted."""
    noted = folder / "noted"
    (folder / "tmp").mkdir(exist_ok=True)
    known = {"COMPILED": str(noted), "TMPDIR": str(folder / "tmp"), **variables}
    command = [str(Path(sys.executable).parent / "kdist"), "run", "--fresh", str(job)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = json.loads(noted.read_text())
    return found


def move(folder: Path) -> tuple[float, float]:
    """Take the folder of compiled code to another node; returns the seconds to write and to read
    the archive.
    """
    (cache,) = (folder / "tmp").glob(f"{_PREFIX}*/*")
    archive = CacheArchive(cache, folder / "compiled", "node-0", lambda: "k" * 32)
    began = time.perf_counter()
    archive.write()
    written = time.perf_counter()
    shutil.rmtree(folder / "tmp")  # torch keeps precompiled headers there, next to the cache
    archive.restore()
    return written - began, time.perf_counter() - written


def measure(name: str, section: dict[str, object]) -> list[tuple[str, ...]]:
    """The lines of a table."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        job = folder / "job.yaml"
        header = {"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"}
        spec = {"nodes": 1, "procsPerNode": 1, "code": str(CODE), **section}
        job.write_text(json.dumps({**header, "metadata": {"name": "compiled"}, "spec": spec}))
        kept = {"ARTIFACTS": str(folder / "artifacts")}
        found = {FIRST: start(folder, job, **kept), AGAIN: start(folder, job)}
        written, read = move(folder)
        found[MOVED] = start(folder, job)
        if (folder / "artifacts").exists():
            shutil.rmtree(folder / "tmp")
            found[ARTIFACTS] = start(folder, job, **kept)
    first = found[FIRST]["compile"]
    print(f"  {name}: the archive takes {written:.2f} s to write, and {read:.2f} s to read")
    return [
        (
            f"{name}, {which}",
            f"{one['imports']:.1f} s",
            f"{one['compile']:.1f} s",
            f"1/{first / one['compile']:.1f}",
        )
        for which, one in found.items()
    ]


def main() -> None:
    """Measure and print."""
    title("Compiling: one rank, inductor on the CPU")
    train = {"workload": "compiled:Compiled", "steps": 3, "globalBatch": 16, "compile": "inductor"}
    lines = measure("script", {"script": {"path": "compiled.py"}})
    lines += measure("managed loop", {"train": train})
    columns(("", "imports", "in torch.compile", "of the first"), lines)


if __name__ == "__main__":
    main()
