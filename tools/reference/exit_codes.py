"""The page of the exit codes: those of `kdist` and those of a training's agent."""

from __future__ import annotations

from kdist.errors import Code
from kdist_trainer.causes import TABLE, Row
from kdist_trainer.config.exit_codes import Exit
from kdist_trainer.formats import FIRST_RETRYABLE_CODE

_CODES = {
    Code.OK: "success",
    Code.ERROR: "an error that no other code names; also differences found by `kdist diff`",
    Code.USAGE: "the command line, or a file that it names, is invalid; nothing was done",
    Code.UNCHANGED: "nothing had to be changed, with `kdist apply --error-unchanged`",
    Code.NOT_FOUND: "the job, run, file or other object does not exist",
    Code.UNREACHABLE: "the cluster or an agent does not answer",
    Code.TIMEOUT: "the time given by `--timeout` has passed",
    Code.FORBIDDEN: "the cluster denies it: a permission is missing",
    Code.JOB_FAILED: "the job failed",
    Code.JOB_CANCELLED: "the job was stopped before its end; `kdist status` says what is saved",
    Code.HUNG_UP: "ended by SIGHUP",
    Code.INTERRUPTED: "interrupted by Ctrl-C",
    Code.TERMINATED: "ended by SIGTERM",
}
_EXITS = {
    Exit.DONE: "the training is complete",
    Exit.CONFIG: "the job, the machine or the group is configured wrongly",
    Exit.DATA: "the data set cannot be read or is invalid",
    Exit.USER: "the user's code raised an exception or ended with an error",
    Exit.DEVICE_OOM: "a GPU ran out of memory",
    Exit.HOST_OOM: "a process was killed because the machine or the pod ran out of memory",
    Exit.MISMATCH: "the checkpoint is of another model or run, or the ranks disagree",
    Exit.NONFINITE: "loss or gradients are NaN or infinite",
    Exit.BUDGET: "the limit of restarts, or `activeDeadlineSeconds`, is reached",
    Exit.STOPPED: "asked to stop; the state is saved where that was possible",
    Exit.PEERS_LOST: "other nodes are lost or could not be reached",
    Exit.HANG: "a rank made no progress",
    Exit.STORAGE: "the checkpoint folder cannot be written or read",
    Exit.DEVICE: "a GPU has failed, or is missing: uncorrectable memory, NVLink, an illegal access",
    Exit.NODE: "the node cannot train: its driver, its limits, its network interface",
    Exit.RETRY: "the script raised `kdist_trainer.Retry`",
    Exit.UNKNOWN: "an error that is in no table, or the agent's own: tried again once; alike a "
    "second time it is 70",
}


def _again(row: Row) -> str:
    if not row.code.retryable and row.primary:
        return "no"
    return f"ends when {row.alike} are alike" if row.alike else "yes"


def _causes() -> str:
    """A line for each row of the table of causes."""
    lines = []
    for row in TABLE:
        said = (row.example.splitlines() or [""])[0].replace("|", "\\|")
        says = f"`{said}`" if said else ", ".join(f"`{name}`" for name in row.types)
        whose = f"{row.fault}; of your own call yours" if row.users else str(row.fault)
        lines.append(f"| `{row.name}` | {says} | `{row.cause}` | {whose} | {_again(row)} |\n")
    return "".join(lines)


def render() -> str:
    """Text of the page."""
    own = "".join(f"| {code:d} | `{code.name}` | {_CODES[code]} |\n" for code in Code)
    agents = "".join(
        f"| {code:d} | `{code.name}` | {_EXITS[code]} | {'yes' if code.retryable else 'no'} |\n"
        for code in Exit
    )
    return f"""# Exit codes

## kdist

| code | name | meaning |
|---|---|---|
{own}
## Agents

A pod of a training ends with the code of its agent. Workload controllers treat codes below \
{FIRST_RETRYABLE_CODE} as permanent and start a pod again for the others.

| code | name | meaning | a restart may help |
|---|---|---|---|
{agents}
## Causes

Where an error was raised decides first. In a collective, or in kdist's own frames, it is not \
yours; what your own call raised is yours, with file and line, also in a process of a data \
loader or of `torch.multiprocessing.spawn`. Then the table decides, by the error number of the \
GPU or of the system where there is one, else by the words. What is in no table is `unknown`: it \
is tried again once, and is final (70) if it comes back alike without progress in between. Equal \
failures are those of one cause at one step with one message, whatever its numbers. A script \
that wants to be tried again raises `kdist_trainer.Retry`. A rank that leaves with exit code 0 \
while others wait for it in a collective is `early_exit`: all nodes name it, and the second time \
ends the run.

| signature | for instance | cause | whose fault | tried again |
|---|---|---|---|---|
{_causes()}"""
