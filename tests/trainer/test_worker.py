"""What a rank does with the error that made it leave its group."""

from __future__ import annotations

import gc
import weakref

from kdist_trainer.worker import forget_frames


class Group:
    """Stands in frames as a process group does."""


def communicate(seen: list[weakref.ref[Group]]) -> None:
    """Raise an error in a frame that refers to a group and to the error."""
    group = Group()
    seen.append(weakref.ref(group))
    error = RuntimeError("closed by peer")
    raise error


def fail(seen: list[weakref.ref[Group]]) -> None:
    """Raise an error from that."""
    try:
        communicate(seen)
    except RuntimeError as cause:
        raise ValueError("a rank is lost") from cause


def test_a_group_is_released_at_once_though_errors_and_frames_refer_to_each_other() -> None:
    seen: list[weakref.ref[Group]] = []
    gc.disable()
    try:
        try:
            fail(seen)
        except ValueError as error:
            forget_frames(error)
        assert seen[0]() is None
    finally:
        gc.enable()
