"""Runs a torchrun script as it is: `python -u -m kdist_trainer.run_script train.py --lr 0.1`, in a
fresh interpreter, or in a fork of one that has imported torch (`script_forkserver`).

The script gets what torchrun would give it: environment, working directory, arguments, and itself
as `__main__`. The runner adds what the agent needs: the rank dies with its agent, prints to it,
dumps its stacks on request, records its failure, times its collectives (unless
KDIST_COLLECTIVE_TIMING=off), and continues its curve in trackers (unless
KDIST_TRACKER_IDENTITY=off). It exits by `os._exit` after Python's own finalization, so that gloo's
destructors cannot turn a success into SIGABRT. The script handles SIGTERM itself.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kdist_trainer import log
from kdist_trainer.errors import find_place
from kdist_trainer.instrumentation import fault_handler
from kdist_trainer.ipc import failure, output, result
from kdist_trainer.processes import liveness
from kdist_trainer.processes.liveness import own_place
from kdist_trainer.processes.threads import OnError, start_thread

_STARTS_INTERPRETERS = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
"""Modules of a process that has started others which are not seen."""
_END_SECONDS = 10.0
"""How long the threads and exit handlers of a failed script may take: its peers wait meanwhile."""


def main() -> NoReturn:
    """Run the script of the command line and exit with its exit code."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m kdist_trainer.run_script SCRIPT|-m MODULE [ARG]...\n")
        os._exit(2)
    is_module = sys.argv[1] == "-m" and len(sys.argv) > 2
    # as `python -m` does, and `python SCRIPT`
    sys.path[0] = str(Path.cwd() if is_module else Path(sys.argv[1]).absolute().parent)
    if "KDIST_FORKSERVER" in os.environ:
        from kdist_trainer.processes import script_forkserver

        script_forkserver.serve()
    _prepare()
    if is_module:
        spec = _find(sys.argv[2])
        _end(run(str(spec.origin), sys.argv[3:], spec) if spec is not None else 1)
    _end(run(sys.argv[1], sys.argv[2:]))


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of the module `name`, or of a package's `__main__`. None if there is none; the error
    is then reported as an exception of the script.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or not spec.has_location:
            raise ModuleNotFoundError(f"no module named {name} that can be run", name=name)
    except BaseException as error:  # noqa: BLE001 - finding a module imports its package
        failure.record(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return None
    return spec


def run(path: str, arguments: list[str], spec: importlib.machinery.ModuleSpec | None = None) -> int:
    """Execute a script as `__main__`; returns the exit code that Python would return. `spec` is
    that of the module if the script is one, so that it can import from its package.
    """
    sys.argv = [path, *arguments]
    absolute = str(Path(path).absolute())
    module = types.ModuleType("__main__")
    if spec is not None:
        vars(module).update(__spec__=spec, __package__=spec.parent)
    vars(module).update(
        __file__=absolute,
        __builtins__=__builtins__,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
        __annotations__={},
    )
    sys.modules["__main__"] = module
    try:
        code = compile(Path(path).read_bytes(), absolute, "exec")
        exec(code, vars(module))  # noqa: S102 - running the user's script is the purpose
    except SystemExit as error:
        ended_with = _exit_code(error)
        if ended_with == 0:
            # leave the line that ended the script early, if one of its own did
            if (place := own_place()) is not None:
                with contextlib.suppress(OSError):
                    result.left_path(*place).write_text(find_place(error) or "")
        elif ended_with == 1 and error.__context__ and not error.__suppress_context__:
            # Hydra and others print what ends a script, and exit
            failure.record(error.__context__, remark=_explain(error.__context__))
        return ended_with
    except BaseException as error:  # noqa: BLE001 - reported as by Python, and to the agent
        error.__traceback__ = _of_script(error.__traceback__, absolute)
        failure.record(error, remark=_explain(error))
        with contextlib.suppress(OSError):  # a log on a full disk
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _prepare() -> None:
    """Set up what the agent needs of this process."""
    if "KDIST_PARENT_PIPE" in os.environ:
        liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))
    if (place := own_place()) is not None:
        output.redirect(*place)
        fault_handler.install(*place)
        _mark_group(False)
    if "KDIST_GENERATION" in os.environ:  # an agent has started it
        _after_import("torch", _prepare_torch)
        if os.environ.get("KDIST_TRACKER_IDENTITY", "on") == "on" and "KDIST_RUN_ID" in os.environ:
            # have W&B and MLflow continue the curve of this rank in the next generation
            from kdist_trainer.script import tracker_identity as trackers

            identity = trackers.identify(
                os.environ["KDIST_RUN_ID"], int(os.environ.get("RANK", "0"))
            )
            _after_import("wandb", partial(trackers.continue_wandb, identity))
            _after_import("mlflow", partial(trackers.continue_mlflow, identity))
        if os.environ.get("RANK", "0") == "0":
            from kdist_trainer.script.accelerate_config import compare_accelerator

            _after_import("accelerate", compare_accelerator)
        if "KDIST_PROGRESS" in os.environ and os.environ.get("RANK") == "0":
            from kdist_trainer.script.printed_progress import PrintedProgress

            PrintedProgress(os.environ["KDIST_PROGRESS"]).install()


def _explain(error: BaseException) -> str:
    """What is known of the memory of a GPU that has run out of it, if it has."""
    if "torch.cuda" not in sys.modules:
        return ""
    from kdist_trainer.instrumentation import device_memory

    return device_memory.explain(error)


def _prepare_torch() -> None:
    if "KDIST_MEMORY_SNAPSHOT" in os.environ:
        from kdist_trainer.instrumentation import device_memory

        device_memory.record_history()
    _bind_store()
    # have the agent know whether this rank has formed a process group with others
    try:
        from kdist_trainer import torch_internals

        torch_internals.observe_groups(lambda size: _mark_group(True) if size > 1 else None)
    except Exception:  # noqa: BLE001 - of a torch without distributed it is not known
        _mark_group(None)
    is_timed = (
        "KDIST_METRICS_SOCKET" in os.environ
        and os.environ.get("KDIST_COLLECTIVE_TIMING", "on") == "on"
    )
    if is_timed and os.environ.get("WORLD_SIZE", "1") != "1":
        try:
            from kdist_trainer.script import collectives

            collectives.install()
        except Exception as error:  # noqa: BLE001 - missing metrics must never end a training
            log.warn(
                "timing-failed",
                message=f"collectives are not timed: {type(error).__name__}: {error}",
            )


def _bind_store() -> None:
    """Have the store of the script's process group listen at rank 0's address only."""
    try:
        from kdist_trainer import torch_internals
        from kdist_trainer.distributed import hosted_store

        torch_internals.replace_rendezvous_store(hosted_store.open_script_store)
    except Exception as error:  # noqa: BLE001 - a torch without distributed must not end a script
        log.warn(
            "store-unbound",
            message=f"a store of torch listens at all addresses: {type(error).__name__}: {error}",
        )


def _mark_group(group: bool | None) -> None:
    if (place := own_place()) is not None:
        with contextlib.suppress(OSError, ValueError):
            path = liveness.heartbeat_path(*place)
            with contextlib.closing(liveness.Heartbeat(path)) as heartbeat:
                heartbeat.mark_group(group)


def _after_import(name: str, call: Callable[[], None]) -> None:
    """Call `call` once the script has imported the module `name`, if it ever does; at once if it
    is imported already.
    """
    if name in sys.modules:
        call()
        return

    class Finder(importlib.abc.MetaPathFinder):
        is_searching = False

        def find_spec(
            self,
            wanted: str,
            path: object,  # noqa: ARG002
            target: object = None,  # noqa: ARG002
        ) -> importlib.machinery.ModuleSpec | None:
            if wanted != name or self.is_searching:
                return None
            self.is_searching = True
            try:
                # the script may only search for the spec
                spec = importlib.util.find_spec(wanted)
            finally:
                self.is_searching = False
            loader: Any = spec.loader if spec is not None else None
            if loader is not None:
                execute = loader.exec_module

                def exec_module(module: types.ModuleType) -> None:
                    with contextlib.suppress(ValueError):
                        sys.meta_path.remove(self)
                    del loader.exec_module
                    execute(module)
                    call()

                loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _of_script(trace: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """The traceback from the script's first frame on; None if the script does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _end(code: int) -> NoReturn:
    """Finalize as the interpreter does, then exit before C++ destructors run."""
    if code != 0:
        start_thread(partial(_exit_later, code), name="exit", on_error=OnError.EXIT)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's own threads
        atexit._run_exitfuncs()
        if any(name in sys.modules for name in _STARTS_INTERPRETERS):
            _mark_group(None)
        if code == 0 and (place := own_place()) is not None:
            # if the disk is full, only the exit code shows that the script has completed
            with contextlib.suppress(OSError):
                result.write_result(result.DONE, *place)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_later(code: int) -> None:
    time.sleep(_END_SECONDS)
    os._exit(code)


if __name__ == "__main__":
    main()
