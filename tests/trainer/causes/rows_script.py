"""A rank that raises the error of each row of the table, and errors without a row, in a collective,
in kdist, in a library and by a `raise` of its own; it prints how each is classified.

The collective is torch's own `all_reduce`, of a process group whose backend raises the error.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import kdist_trainer
from kdist_trainer.causes import TABLE
from kdist_trainer.ipc import failure
from tests.trainer.causes.errors_of_rows import make

_RAISE = "def fail(*_):\n    raise error\n"


def _function(error: BaseException, file: str) -> object:
    """A function that raises the error, in a frame of this file."""
    names = {"error": error}
    exec(compile(_RAISE, file, "exec"), names)  # noqa: S102 - for the file of the frame
    return names["fail"]


class Raising(dist.ProcessGroup):
    """A backend whose all-reduce fails."""

    fail: object = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "raising"


def in_collective(error: BaseException) -> None:
    """Raise it in a collective that this line called."""
    Raising.allreduce = _function(error, "<backend>")  # type: ignore[method-assign, assignment]
    dist.all_reduce(torch.ones(1))


def in_kdist(error: BaseException) -> None:
    """Raise it in a frame of kdist."""
    file = Path(kdist_trainer.__file__).parent / "metrics" / "frame.py"
    _function(error, str(file))()  # type: ignore[operator]


def in_own_call(error: BaseException) -> None:
    """Raise it in a library that this line called."""
    _function(error, str(Path(torch.__file__).parent / "frame.py"))()  # type: ignore[operator]


def by_own_raise(error: BaseException) -> None:
    """Raise it by a statement in this file."""
    raise error


PLACES: dict[str, Callable[[BaseException], None]] = {
    "in_collective": in_collective,
    "in_kdist": in_kdist,
    "in_own_call": in_own_call,
    "by_own_raise": by_own_raise,
}
UNLISTED = (
    RuntimeError,
    torch.AcceleratorError,
    dist.DistBackendError,
    dist.DistNetworkError,
    SystemError,
)


def classify(name: str, place: str, error: BaseException) -> dict[str, object]:
    """How an error that is raised at this place is classified."""
    try:
        PLACES[place](error)
    except BaseException as caught:  # noqa: BLE001 - KeyboardInterrupt is a row too
        if caught is not error:
            traceback.print_exc()
            sys.exit(f"{name}: another error")
        found = failure.Failure.from_json(failure.describe(caught).to_json())
        record = found.to_document()
        names = ("cause", "code", "fault", "signature", "advice", "rerun")
        return {
            **{each: record[each] for each in names},
            "row": name,
            "place": place,
            "permanent": found.permanent,
            "line": found.place,
        }
    raise AssertionError("nothing was raised")


def main() -> None:
    """Classify all rows, then a hundred unlisted texts drawn by the command line's seed."""
    dist.Backend.register_backend("raising", lambda *_: Raising(0, 1), devices=["cpu"])
    dist.init_process_group("raising", rank=0, world_size=1, store=HashStore())
    found = [classify(row.name, place, make(row)) for row in TABLE for place in PLACES]
    drawn = random.Random(sys.argv[1])
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(100):
        words = ["".join(drawn.choices(letters, k=drawn.randint(2, 9))) for _ in range(7)]
        error = drawn.choice(UNLISTED)(" ".join(words))
        found.append(classify(f"unlisted-{number}", drawn.choice([*PLACES]), error))
    print(json.dumps(found))  # noqa: T201 - the test reads it


main()
