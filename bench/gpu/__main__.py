"""Runs the parts one after another and writes a page with their figures.

    python -m bench.gpu [--device cuda|cpu] [--minutes 30] [--out build/bench-gpu] [--parts A,B]

The output folder gets `results.jsonl` (a line for each attempt), `page.md`, and a log of each part.
The same command continues an interrupted run: parts that are done on the same device with the same
versions of driver, torch and kdist are not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import page, records
from bench.gpu.parts import MACHINE, PARTS, ROOT, Part, run

LEAST_SECONDS = 15.0
"""A part is not started with less time than this."""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is not done yet, and write the page after each part.

    Returns:
        0 if every part that was asked for is done.
    """
    options = parse(arguments, parts)
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    machine = run(MACHINE, options.device, MACHINE.seconds, options.out)
    if "error" in machine:
        print(f"bench.gpu: {machine['error'].strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    facts, results = machine["figures"], options.out / "results.jsonl"
    command = " ".join(["python -m bench.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    for part in parts:
        if part.name not in options.parts or records.is_done(results, part.name, facts):
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{part.name}: not run, the {options.minutes:g} minutes are over", flush=True)
            continue
        print(f"{part.name}: at most {min(left, part.seconds):.0f} s", flush=True)
        record = run(part, options.device, min(left, part.seconds), options.out)
        about = {"part": part.name, "machine": facts, "commit": find_commit()}
        records.append(results, record | about)
        outcome = f"failed: {page.last_error(record['error'])}" if "error" in record else "done"
        print(f"{part.name}: {outcome} ({record['seconds']:.0f} s)", flush=True)
        page.write(options.out / "page.md", parts, records.newest(results, facts), facts, command)
    done = records.newest(results, facts)
    page.write(options.out / "page.md", parts, done, facts, command)
    print(f"the figures are in {options.out / 'page.md'}")
    return int(any("figures" not in done.get(name, {}) for name in options.parts))


def find_commit() -> str:
    """The commit of this tree; `unknown` outside of a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser("python -m bench.gpu", description="Measures kdist on a GPU.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs all in miniature"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="limit for all parts together (30)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench-gpu"), help="output folder (build/bench-gpu)"
    )
    names = [part.name for part in parts]
    parser.add_argument(
        "--parts", default=",".join(names), help=f"those to run, of: {', '.join(names)}"
    )
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(names):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
