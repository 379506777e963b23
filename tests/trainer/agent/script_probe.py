"""A script that writes down all that it can see of its process, before and after it imports torch:
`script_probe.py FOLDER`, one file for each rank.
"""

import atexit
import faulthandler
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path


def describe_streams() -> dict[str, object]:
    """The three standard streams as Python has opened them."""
    return {
        stream.name: [
            stream.encoding,
            stream.errors,
            stream.line_buffering,
            stream.write_through,
            stream.fileno(),
        ]
        for stream in (sys.stdin, sys.stdout, sys.stderr)
        if isinstance(stream, io.TextIOWrapper)
    }


def describe_files() -> dict[str, str]:
    """What the open descriptors stand for, without the numbers of pipes."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = str(path.readlink()).partition("[")[0]
        except FileNotFoundError:
            continue  # the listing itself
    return found


def describe_process() -> dict[str, object]:
    """Everything that does not need torch."""
    status = Path("/proc/self/status").read_text()
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "command line": Path("/proc/self/cmdline").read_text().split("\0"),
        "path": sys.path,
        "flags": repr(sys.flags),
        "options": [sys._xoptions, sys.warnoptions, sys.dont_write_bytecode],
        "main": [
            __name__,
            __file__,
            repr(__spec__),
            repr(__package__),
            type(vars(sys.modules["__main__"])["__loader__"]).__name__,
            sorted(vars(sys.modules["__main__"])),
        ],
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": [str(child) for child in multiprocessing.active_children()],
        "threads": [thread.name for thread in threading.enumerate()],
        "main thread": threading.main_thread().native_id == os.getpid(),
        "session and group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "handlers": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "signals": [
            line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
        ],
        "wakeup": signal.set_wakeup_fd(-1),
        "faulthandler": faulthandler.is_enabled(),
        "streams": describe_streams(),
        "umask": [os.umask(0o22), os.umask(0o22)],
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "processors": [sorted(os.sched_getaffinity(0)), os.nice(0)],
        "locale": locale.getlocale(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
        "limits of Python": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
        "logging": [logging.root.level, [repr(handler) for handler in logging.root.handlers]],
        "young": time.process_time() < 60,
    }


def describe_torch() -> dict[str, object]:
    """What torch shows once it is imported."""
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    return {
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "device": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "default type": str(torch.get_default_dtype()),
        "is grad enabled": torch.is_grad_enabled(),
        "group": [dist.is_initialized(), dist.is_torchelastic_launched()],
        "start method with torch": torch.multiprocessing.get_start_method(allow_none=True),
        "threads with torch": [thread.name for thread in threading.enumerate()],
        # the measurement of collectives, which begins with torch, has opened one
        "files": describe_files(),
        "finders": [repr(type(finder)) for finder in sys.meta_path],
        "exit handlers": atexit._ncallbacks() > 0,
        "handlers with torch": {
            number.name: repr(signal.getsignal(number)) for number in signal.Signals
        },
    }


def describe_start_method(found: "multiprocessing.SimpleQueue[object]") -> None:
    """What a process that the script starts itself finds."""
    found.put([__name__, os.getppid() != 1, "torch" in sys.modules])


def main() -> None:
    """Write `rank-R.json`."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    own: dict[str, object] = {"draws": [random.random()]}
    modules = sorted(sys.modules)
    seen = describe_process() | describe_torch()
    import numpy as np
    import torch

    own["seed of torch"] = torch.initial_seed()
    own["draws of torch"] = torch.rand(3).tolist()
    own["draws of numpy"] = np.random.random()
    own["key"] = multiprocessing.current_process().authkey.hex()
    own["parent"] = os.getppid()
    multiprocessing.set_start_method("spawn")
    queue: multiprocessing.SimpleQueue[object] = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(target=describe_start_method, args=(queue,))
    process.start()
    seen["child"] = [multiprocessing.get_start_method(), queue.get()]
    process.join()
    seen["child's exit code"] = process.exitcode
    document = {
        "seen": seen,
        "own": own,
        "before": modules,
        "after": sorted(sys.modules),
        "filters": [repr(each) for each in warnings.filters],
    }
    (folder / f"probe-{rank}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main()
