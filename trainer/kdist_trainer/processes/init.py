"""Process 1 of a pod whose image has no init: `python -m kdist_trainer.processes.init`, then an
agent's command line.

It starts the agent, passes signals on to it, and waits for processes whose parents have ended, as
tini does in the trainer's own image. It imports only the standard library, to start at once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main() -> int:
    """Run the agent of this command line; returns its exit code, 128 + N after signal N."""
    command = [sys.executable, "-m", "kdist_trainer", *sys.argv[1:]]
    # blocked until the agent is known, so that none is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)
    agent = os.posix_spawn(sys.executable, command, dict(os.environ), setsigmask=())
    for number in _PASSED:
        signal.signal(number, lambda passed, _frame: _send(agent, passed))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED)
    while True:
        ended, status = os.wait()
        if ended == agent:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _send(agent: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(agent, number)


if __name__ == "__main__":
    os._exit(main())
