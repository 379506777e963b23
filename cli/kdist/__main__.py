"""`kdist`, also as `python -m kdist` and as kubectl's plugin, `kubectl kdist`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        _run()
    except KeyboardInterrupt as error:  # while modules are imported, or again while kdist ends
        os._exit(128 + (*error.args, signal.SIGINT)[0])


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _run() -> None:
    # start-up makes much and throws nothing away: looking for garbage takes a tenth of it
    gc.set_threshold(100_000)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # whoever has started kdist has closed it
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115, PTH123 - open for as long as kdist runs
    for each in _SIGNALS:  # SIGTERM and SIGHUP end a command as Ctrl-C does
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, _interrupt)
    from kdist.app import cli

    plugin = os.path.basename(sys.argv[0]).startswith("kubectl-kdist")  # noqa: PTH119 - pathlib takes longer to import
    try:
        cli.main(prog_name="kubectl kdist" if plugin else "kdist")
    except SystemExit as end:
        if (code := end.code) not in [128 + each for each in _SIGNALS]:
            raise
        # Whoever has sent a signal does not wait for threads that still wait for a server.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))
    finally:
        # Otherwise Python searches all imported objects for garbage as it exits.
        gc.freeze()


if __name__ == "__main__":
    main()
