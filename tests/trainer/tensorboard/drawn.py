"""Reads event files with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOSS = "train/loss"


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every scalar in the event files of `folder`."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def steps(folder: Path, curve: str = LOSS) -> list[int]:
    """The steps of one curve."""
    return [step for step, _ in read(folder).get(curve, [])]
