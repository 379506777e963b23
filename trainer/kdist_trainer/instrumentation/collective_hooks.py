"""Hooks on every collective of this process: one before its launch, one around each wait for it.

Everything that reaches a process group (`torch.distributed`, DDP's reducer, FSDP, DTensor) goes
through torch's dispatcher as an operator of the library `c10d`. Kernels registered there call the
hooks and pass the call on unchanged. `torch.distributed` waits in `Work.wait`; DTensor and compiled
code wait in an operator that takes the tensor which the collective fills.

`FlightRecorder` records each collective in the rank's heartbeat before it is launched, in memory
shared with the agent, which so knows the collective that each rank was in, also after an abort in
C++.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kdist_trainer import log
from kdist_trainer.distributed import group_abort
from kdist_trainer.instrumentation import torch_internals
from kdist_trainer.instrumentation.torch_internals import COLLECTIVES, OPERATORS, WAITS
from kdist_trainer.processes.liveness import Heartbeat, Phase, heartbeat_path, own_place

PostHook = Callable[[Work | None], object]
"""Called after a collective's launch with its handle; for a synchronous collective
(`async_op=False`) NCCL returns none.
"""


def on_completion(work: Work | None, callback: Callable[[object], object]) -> bool:
    """Call `callback` at the end of a collective; with NCCL, once the collective is enqueued.
    Without a handle, that is now: the collective is already on the current stream. Returns False if
    `work` has no future: the rank that waits for it completes gloo's reduce_scatter.
    """
    if work is None:
        callback(None)
        return True
    try:
        future = work.get_future()
    except RuntimeError:
        return False
    future.then(callback)
    return True


class LaunchHook(Protocol):
    """Called before each collective, on the thread that launches it."""

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """The collective `op`, such as `all_reduce`, is about to be launched; `tensors` are what
        each rank contributes or gets, none for a barrier. Returns what to call after the launch, if
        anything.
        """
        ...


launch_hooks: list[LaunchHook] = []
"""The registered hooks, the last one first."""
_launch_kernels: list[torch.library.Library] = []


def register_launch_hook(hook: LaunchHook) -> None:
    """Call `hook` before every collective from now on; the last one registered is called first."""
    if not launch_hooks:
        kernels = {operator: _kernel(operator) for operator in torch_internals.operators()}
        _launch_kernels.append(torch_internals.register_kernels(COLLECTIVES, kernels))
    launch_hooks.insert(0, hook)


def unregister_launch_hook(hook: object) -> None:
    """Stop calling `hook`. Without any hook, collectives bypass this module."""
    launch_hooks[:] = [other for other in launch_hooks if other is not hook]
    if not launch_hooks and _launch_kernels:
        torch_internals.unregister_kernels(_launch_kernels.pop())


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Sum a tensor over the ranks of a group, as `group.allreduce` does, and call the hooks.

    Without the way through torch's dispatcher and a kernel in Python, which takes about 0.1 ms on a
    busy CPU: gradients are reduced several times in each step.
    """
    post_hooks = _begin("all_reduce", (tensor,), group)
    work: Work = torch_internals.backend_of(group, tensor.device).allreduce([tensor])
    _finish(post_hooks, work)
    return work


_failed: set[type] = set()
"""The kinds of hooks whose failure was logged."""


def _begin(op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> list[PostHook]:
    """Call the launch hooks; returns what to call after the launch. One that fails measures less,
    and ends no training.
    """
    found = []
    for hook in launch_hooks:
        try:
            post_hook = hook.begin(op, tensors, group)
        except Exception as error:  # noqa: BLE001 - an observer must never end a training
            _report_failure(hook, error)
            continue
        if post_hook is not None:
            found.append(post_hook)
    return found


def _finish(post_hooks: Sequence[PostHook], work: Work | None) -> None:
    for post_hook in post_hooks:
        try:
            post_hook(work)
        except Exception as error:  # noqa: BLE001 - as above
            _report_failure(post_hook, error)


def _report_failure(hook: object, error: Exception) -> None:
    """Log that a hook has failed, once for each kind."""
    if type(hook) not in _failed:
        _failed.add(type(hook))
        name = getattr(hook, "__qualname__", type(hook).__name__)
        message = f"{name} does not see some collectives: {type(error).__name__}: {error}"
        log.warn("observer-failed", message=message)


def _kernel(operator: str) -> torch_internals.Kernel:
    original = torch_internals.overload(COLLECTIVES, operator)
    group_at = torch_internals.argument_names(operator).index("process_group")
    name, tensors_at = OPERATORS[operator]

    def kernel(keys: Any, *arguments: Any) -> Any:
        amount = () if tensors_at is None else arguments[tensors_at]
        tensors = (amount,) if isinstance(amount, Tensor) else amount
        op = f"{name}_uneven" if torch_internals.is_uneven(operator, arguments) else name
        group = torch_internals.unbox_group(arguments[group_at])
        post_hooks = _begin(op, tensors, group)
        result = torch_internals.call_original(original, keys, *arguments)
        if post_hooks:
            _finish(post_hooks, torch_internals.unbox_work(result))
        return result

    return kernel


Wait = Callable[[], Any]


class WaitHook(Protocol):
    """Called instead of each wait, which it must call itself."""

    def wait(self, wait: Wait, awaited: Work | Tensor) -> Any:
        """Return what `wait` returns; runs on the thread that waits. `awaited` is the collective's
        handle, or the tensor that it fills.
        """
        ...


_wait_hooks: list[WaitHook] = []
_wait_kernels: list[torch.library.Library] = []


def register_wait_hook(hook: WaitHook) -> None:
    """Call `hook` around every wait from now on; the last one registered is the outermost."""
    if not _wait_kernels:
        # both ways to wait are wrapped for the life of this process: restoring `Work.wait` would
        # undo what others have wrapped around it since
        original_wait = Work.wait

        def wait(work: Work, *arguments: Any, **named: Any) -> Any:
            # when a wait with a timeout is over, NCCL aborts, and gloo closes the connection of a
            # send or receive
            may_abort = group_abort.is_enabled() and not torch_internals.is_point_to_point(work)
            if arguments or named or not may_abort:
                return _call(partial(original_wait, work, *arguments, **named), work)
            return _call(partial(_wait_unless_aborted, partial(original_wait, work)), work)

        Work.wait = wait  # type: ignore[method-assign, assignment]
        original = torch_internals.overload(WAITS, "wait_tensor")

        def kernel(keys: Any, tensor: Tensor) -> Any:
            return _call(partial(torch_internals.call_original, original, keys, tensor), tensor)

        _wait_kernels.append(torch_internals.register_kernels(WAITS, {"wait_tensor": kernel}))
    _wait_hooks.append(hook)


def unregister_wait_hook(hook: object) -> None:
    """Stop calling `hook`."""
    _wait_hooks[:] = [other for other in _wait_hooks if other is not hook]


def _call(wait: Wait, awaited: Work | Tensor) -> Any:
    for hook in _wait_hooks:
        wait = _Observed(hook, wait, awaited)
    return wait()


class _Observed:
    """A wait with a hook around it: an error of the wait is raised, one of the hook's is logged."""

    __slots__ = ("_awaited", "_began", "_ended", "_hook", "_result", "_wait")

    def __init__(self, hook: WaitHook, wait: Wait, awaited: Work | Tensor) -> None:
        self._hook = hook
        self._wait = wait
        self._awaited = awaited
        self._began = self._ended = False
        self._result: Any = None

    def __call__(self) -> Any:
        try:
            return self._hook.wait(self._run, self._awaited)
        except Exception as error:
            if self._began and not self._ended:
                raise
            _report_failure(self._hook, error)
            return self._result if self._ended else self._wait()

    def _run(self) -> Any:
        self._began = True
        self._result = self._wait()
        self._ended = True
        return self._result


_ABORT_POLL = timedelta(milliseconds=50)
_TIMED_OUT = "Operation timed out!"
"""What `Work.wait` with a timeout raises when it is over; see torch/csrc/distributed/c10d/Work.cpp.
"""


def _wait_unless_aborted(wait: Callable[[timedelta], Any]) -> Any:
    """Wait for as long as it takes, unless the process groups of this rank are aborted: gloo may
    not end the collective then.
    """
    while True:
        try:
            return wait(_ABORT_POLL)
        except RuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
            group_abort.raise_if_aborted()


def is_training_thread(main: int | None) -> bool:
    """Whether this is a thread of the training: the main one or, as Python knows nothing of C++'s
    threads, one of autograd's.
    """
    return threading.get_ident() == main or isinstance(
        threading.current_thread(), threading._DummyThread
    )


_Entry = tuple[str, int, str, str, str]  # operation, elements, element type, shape, group
_MAX_ENTRIES = 1024  # a model may keep using new shapes

_installed: list[FlightRecorder] = []


class FlightRecorder:
    """Writes this process's collectives into `heartbeat`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._groups: dict[str, str] = {}
        self._entries: dict[object, _Entry] = {}
        # kept alive also for a script, for the reason given in `world.leave`
        self._world: ProcessGroup | None = None
        self._main = threading.main_thread().ident

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Record a collective. Every step passes here, so each shape is described only once."""
        name = group.group_name
        key = (op, name, tensors[0].dtype, tensors[0].shape) if len(tensors) == 1 else None
        entry = self._entries.get(key) if key is not None else None
        if entry is None:
            entry = self._describe(op, tensors, group, name)
            if key is not None and len(self._entries) < _MAX_ENTRIES:
                self._entries[key] = entry
        op, numel, dtype, shape, label = entry
        self._heartbeat.enter(
            op, numel, dtype, shape=shape, group=label, current=is_training_thread(self._main)
        )
        return None

    def wait(self, wait: Callable[[], Any], awaited: object) -> Any:  # noqa: ARG002 - it is the last one entered
        """Return what `wait` returns, and record that the rank is in it meanwhile. A wait that
        raises stays recorded.
        """
        if not is_training_thread(self._main):
            return wait()
        self._heartbeat.wait()
        result = wait()
        self._heartbeat.leave()
        return result

    def _describe(
        self, op: str, tensors: Sequence[Tensor], group: ProcessGroup, name: str
    ) -> _Entry:
        label = self._groups.get(name)
        if label is None:
            label = self._groups[name] = _describe(group, name)
            if not label:
                self._world = group
        # between two ranks of the group: not counted with the collectives of all its ranks
        if op in ("send", "recv"):
            label = f"{label}p2p"
        dtype = str(tensors[0].dtype) if tensors else ""
        shape = ",".join(map(str, tensors[0].shape)) if len(tensors) == 1 else ""
        return op, sum(tensor.numel() for tensor in tensors), dtype, shape, label


def _describe(group: ProcessGroup, name: str) -> str:
    """The group's label: empty for all ranks, else one that its members share and no other group
    has.
    """
    if group is dist.group.WORLD:
        return ""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return f"?{name[:20]}"  # its members are unknown
    return f"{name[:12]}({ranks[0]}-{ranks[-1]})" if ranks else name[:12]


def find_heartbeat() -> Heartbeat | None:
    """This rank's heartbeat, which the agent watches; None without an agent."""
    if (place := own_place()) is None:
        return None
    path = heartbeat_path(*place)
    if not path.exists():
        Heartbeat.create(path).close()
    heartbeat = Heartbeat.attach(path)
    heartbeat.beat(Phase.START, -1)
    return heartbeat


def record_collectives(heartbeat: Heartbeat | None) -> None:
    """Record this rank's collectives in `heartbeat`, unless the rank is alone or there is none."""
    if heartbeat is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        install_recorder(heartbeat)


def install_recorder(heartbeat: Heartbeat, kind: type[FlightRecorder] = FlightRecorder) -> None:
    """Record all collectives of this process in `heartbeat` from now on, instead of in an earlier
    one.
    """
    remove_recorder()
    _installed.append(kind(heartbeat))
    register_launch_hook(_installed[0])
    register_wait_hook(_installed[0])


def remove_recorder() -> None:
    """Stop recording collectives."""
    for recorder in _installed:
        unregister_launch_hook(recorder)
        unregister_wait_hook(recorder)
    _installed.clear()
