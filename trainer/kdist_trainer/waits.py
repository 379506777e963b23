"""Every wait of this process for a collective, told to those who want to be around it.

`torch.distributed`'s own calls wait in `Work.wait`; DTensor and compiled code in an operator that is given the tensor which the
collective fills.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

Wait = Callable[[], Any]
_KEY = torch._C.DispatchKey.BackendSelect


class Surrounding(Protocol):
    """Who calls each wait."""

    def wait(self, wait: Wait, awaited: Work | Tensor) -> Any:
        """Return what `wait` returns; on the thread that waits."""
        ...


_surroundings: list[Surrounding] = []
_kernels: list[torch.library.Library] = []


def surround(surrounding: Surrounding) -> None:
    """Let `surrounding` call every wait from now on; those that came last are further outside."""
    if not _kernels:
        _install()
    _surroundings.append(surrounding)


def leave(surrounding: Surrounding) -> None:
    """Let `surrounding` call no wait any more."""
    _surroundings[:] = [other for other in _surroundings if other is not surrounding]


def _call(wait: Wait, awaited: Work | Tensor) -> Any:
    for surrounding in _surroundings:
        wait = partial(surrounding.wait, wait, awaited)
    return wait()


def _install() -> None:
    """For the life of this process: what others have put around `Work.wait` since would be lost if it were taken back."""
    bare = Work.wait

    def wait(work: Work, *arguments: Any, **named: Any) -> Any:
        return _call(partial(bare, work, *arguments, **named), work)

    Work.wait = wait  # type: ignore[method-assign, assignment]
    operator = torch.ops._c10d_functional.wait_tensor.default
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(  # type: ignore[no-untyped-call]
        "wait_tensor",
        lambda keys, tensor: _call(partial(operator.redispatch, keys.remove(_KEY), tensor), tensor),
        _KEY.name,
        with_keyset=True,
    )
    _kernels.append(library)
