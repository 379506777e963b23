"""How long commands that render and that ask a cluster take, next to helm's and kubectl's for the
same.

    python -m bench.commands

The cluster is that of $KUBECONFIG; without one, only rendering is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.startup import seconds
from bench.table import interleave, table, title

ROUNDS = 15
CHART = Path(__file__).parents[1] / "charts" / "kdist"
KDIST = [str(Path(sys.executable).with_name("kdist"))]


def main() -> None:
    """Measure and print."""
    title(f"Commands, {ROUNDS} runs of each, in turn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [*KDIST, "init"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        job = [*KDIST, "render", "job.yaml", "--set", "spec.image=registry.example.com/trainer:1"]
        (folder / "objects.yaml").write_bytes(
            subprocess.run(job, cwd=folder, check=True, capture_output=True).stdout
        )
        compare(folder, {"helm template": ["helm", "template", str(CHART)], "kdist render": job})
        if not cluster_answers():
            print("\n  (no cluster answers at $KUBECONFIG: the rest is left out)")
            return
        compare(
            folder,
            {
                "kubectl get jobs -A": ["kubectl", "get", "jobs", "-A"],
                "kdist get -A": [*KDIST, "get", "-A"],
            },
        )
        sent = [*KDIST, "apply", *job[-3:], "--dry-run=client"]
        peer = ["kubectl", "apply", "--dry-run=client", "-f", "objects.yaml"]
        compare(
            folder, {"kubectl apply --dry-run=client": peer, "kdist apply --dry-run=client": sent}
        )


def compare(folder: Path, commands: dict[str, list[str]]) -> None:
    """Print the commands' times, each as a ratio to the first; nothing where that is not
    installed.
    """
    base = next(iter(commands))
    if shutil.which(commands[base][0]) is None:
        print(f"\n  ({base}: not installed)")
        return
    taken = interleave(
        {label: partial(seconds, command, folder) for label, command in commands.items()},
        rounds=ROUNDS,
    )
    for index, what in enumerate(("by the clock", "of a core")):
        print(f"\n  {what}")
        table(
            {label: [values[index] for values in pairs] for label, pairs in taken.items()},
            unit="ms",
            scale=1e3,
            base=base,
        )


def cluster_answers() -> bool:
    """Whether there is a cluster to ask."""
    if shutil.which("kubectl") is None or not os.environ.get("KUBECONFIG"):
        return False
    asked = subprocess.run(
        ["kubectl", "get", "--raw", "/readyz"], capture_output=True, timeout=30, check=False
    )
    return asked.returncode == 0


if __name__ == "__main__":
    main()
