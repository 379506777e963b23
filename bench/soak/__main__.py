"""Disturbs trainings again and again, and writes down what they hold and do meanwhile.

    python -m bench.soak [--minutes 30] [--only SCENARIO] [--row 30] [FOLDER]
    make soak MINUTES=30

Each scenario gets its share of the minutes. Every row is appended to FOLDER/soak.jsonl
(`.kdist/soak`) when it is known: killed or stopped, the same command goes on where it was, and what
was begun is resumed from its checkpoints. `setsid nohup make soak MINUTES=600 &` outlasts the
terminal. At the end, or with `--minutes 0`, it prints what the rows say together. For other
settings, another folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.soak.disturbance import Disturbance
from bench.soak.scenarios import SCENARIOS, Scenario
from bench.soak.trend import summarize
from bench.soak.usage import Observer
from bench.table import title
from kdist_trainer.formats.json_text import encode_json
from tests.faults.training_run import TrainingRun

LOOK_SECONDS = 0.02
REMEMBER_SECONDS = 1.0
"""How often the CPU of threads is read: they may end soon."""
END_SECONDS = 120.0


def main(folder: Path, minutes: float, only: str | None, row_seconds: float) -> None:
    """Run what is left of each scenario, and print what all rows say."""
    chosen = [each for each in SCENARIOS if only in (None, each.name)]
    share = minutes * 60 / len(chosen)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    title(f"A soak of {minutes:g} minutes, in {folder}")
    for scenario in chosen:
        done = sum(row["seconds"] for row in read_rows(folder, scenario.name))
        if share - done > row_seconds:
            soak(folder, scenario, share - done, row_seconds)
    for scenario in chosen:
        rows = list(read_rows(folder, scenario.name))
        print(f"\n{scenario.name}: {len(rows)} rows")
        for what, value in summarize(rows) if rows else ():
            print(f"  {what:<34} {value}")


def read_rows(folder: Path, scenario: str) -> Iterator[dict[str, Any]]:
    """The whole rows of a scenario, oldest first."""
    path = folder / "soak.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}") and (row := json.loads(line))["scenario"] == scenario:
            yield row


def soak(folder: Path, scenario: Scenario, seconds: float, row_seconds: float) -> None:
    """Run one scenario for so long, and append its rows."""
    hold = folder / f"{scenario.name}.hold"
    hold.unlink(missing_ok=True)
    with (
        (folder / "soak.jsonl").open("a") as rows,
        TrainingRun(folder, scenario.job(hold)) as run,
    ):
        disturbance = Disturbance(run, scenario, hold)
        observer = Observer(run)
        end = time.monotonic() + seconds
        try:
            for now in look(run, until=end):
                disturbance.advance()
                if now >= observer.looked + REMEMBER_SECONDS:
                    observer.look()
                if now >= observer.since + row_seconds:
                    row = {"scenario": scenario.name, "at": round(time.time())}
                    row |= {**disturbance.take(), **observer.row()}
                    rows.write(encode_json(row) + "\n")
                    rows.flush()
                    print(brief(row), flush=True)
        finally:
            hold.unlink(missing_ok=True)
            if not run.has_ended():
                run.process.send_signal(signal.SIGINT)
                run.wait(END_SECONDS)


def look(run: TrainingRun, *, until: float) -> Iterator[float]:
    """The monotonic time, again and again, as long as the run lasts."""
    for now in iter(time.monotonic, None):
        if now >= until:
            return
        if run.has_ended():
            raise SystemExit(f"{run.name} has ended:\n{run.output()[-4000:]}")
        yield now
        time.sleep(LOOK_SECONDS)


def brief(row: dict[str, Any]) -> str:
    """A row in one line."""
    ranks = {name: held for name, held in row["processes"].items() if name.startswith("rank")}
    held = next(iter(ranks.values()), {"descriptors": 0, "threads": 0, "privateKib": 0})
    gloo = row["cores"].get("gloo_tcp_loop", 0.0)
    slowest = max(row["recoveries"], default=None)
    pace = row["stepsPerSecond"]  # a script's steps are in no ledger
    return (
        f"{row['scenario']}: {'unknown' if pace is None else pace} steps/s, "
        f"{row['accidents']} accidents, "
        f"slowest recovery {slowest} s, {row['commits']} commits; a rank: "
        f"{held['privateKib'] >> 10} MiB, {held['descriptors']} descriptors, "
        f"{held['threads']} threads; gloo {gloo:.2f} cores"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".kdist/soak"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--row", type=float, default=30.0, help="seconds between two rows")
    given = parser.parse_args()
    main(given.folder.resolve(), given.minutes, given.only, given.row)
