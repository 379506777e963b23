"""`kdist`, also as `python -m kdist` and as kubectl's plugin, `kubectl kdist`."""

from __future__ import annotations

import gc
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        _run()
    except KeyboardInterrupt:  # while modules are imported, or again while kdist ends
        os._exit(_INTERRUPTED)


def _run() -> None:
    # start-up makes much and throws nothing away: looking for garbage takes a tenth of it
    gc.set_threshold(100_000)
    from kdist.app import cli

    plugin = os.path.basename(sys.argv[0]).startswith("kubectl-kdist")  # noqa: PTH119 - pathlib takes longer to import
    try:
        cli.main(prog_name="kubectl kdist" if plugin else "kdist")
    except SystemExit as end:
        if end.code != _INTERRUPTED:
            raise
        # Whoever pressed Ctrl-C does not wait for threads that still wait for a server.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)
    finally:
        # Otherwise Python searches all imported objects for garbage as it exits.
        gc.freeze()


if __name__ == "__main__":
    main()
