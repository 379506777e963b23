"""The save of a training that only memory holds, on a node that joins no further group: it was
asked to stop, or too few nodes have come.

One of the workers that have left the broken group forms a group alone, in a generation of its own,
saves and ends. The agents agree on that generation by compare-and-set. If the others have begun it,
they continue with the state, and there is nothing to save here; if they form a group later, they
take the lock of the checkpoint folder over, as after any other generation.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from kdist_trainer import failure, log, result
from kdist_trainer.agent import exit_analysis
from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.agent.generation import RESUME, STOP, Generation
from kdist_trainer.agent.restart_policy import RestartLedger
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.survivors import Survivors
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.control import STOPS_VARIABLE
from kdist_trainer.signals import StopSignals, stop_margin

_POLL_SECONDS = 0.05


def save_kept_state(
    former: int,
    *,
    settings: Settings,
    agent_store: AgentStore,
    ledger: RestartLedger,
    agents: dict[str, str],
    workers: WorkerProcesses,
    survivors: Survivors,
    stop: StopSignals,
) -> str | None:
    """Have the worker that has kept the newest step save it, and wait until it has ended.

    Args:
        former: The generation that the workers have left.
        settings: The settings of the agent.
        agent_store: The documents that agents share.
        ledger: Receives the generation of the save.
        agents: The instance id of this agent, by its node.
        workers: The workers of this node.
        survivors: Those that have left their group.
        stop: The requests to stop: the grace period counts from the first, and a second one ends
            the wait.

    Returns:
        "stopped", or "done" if the step was the last one; None if nothing was saved.
    """
    survivors.forget_exited(workers)
    step = survivors.finished_step
    if step is None or settings.checkpoints is None:
        return None
    try:
        number = open_generation(former, agent_store, ledger, agents=agents, step=step)
        exit_analysis.reset_files(settings.scratch, len(workers.local_ranks))
    except (dist.DistError, RuntimeError, OSError) as refusal:
        warn_unsaved(step, str(refusal), ledger)
        return None
    local_rank = next(number for number, kept in survivors.kept.items() if kept == step)
    log.event("saving-kept-state", step=step, generation=number)
    survivors.join_alone(workers, local_rank, describe_group(number))
    grace = settings.config.termination_grace_period_seconds
    since = time.monotonic() if stop.requested_at is None else stop.requested_at
    deadline = since + grace - stop_margin(grace)
    while local_rank in workers.living:
        if time.monotonic() > deadline or stop.urgent:
            why = "a second request to stop came" if stop.urgent else "the grace period was over"
            warn_unsaved(step, why, ledger)
            return None
        workers.wait(_POLL_SECONDS)
    outcome = result.read_result(settings.scratch, local_rank)
    if outcome is None:
        error = failure.read(settings.scratch, local_rank)
        why = "its worker was killed" if error is None else error.message
        warn_unsaved(step, why, ledger)
    return outcome


def warn_unsaved(step: int, why: str, ledger: RestartLedger) -> None:
    """Log how many steps, which only memory held, are not saved here."""
    committed = ledger.committed_step()
    steps = max(0, step - committed)
    log.warn(
        "kept-state-not-saved",
        step=step,
        steps=steps,
        message=f"not saved {steps} step{'s' * (steps != 1)}, up to step {step}: {why}; a later "
        f"start goes on from step {committed}",
    )


def open_generation(
    former: int,
    agent_store: AgentStore,
    ledger: RestartLedger,
    *,
    agents: dict[str, str],
    step: int,
) -> int:
    """Open the generation of the save of `step`, after generation `former`; returns its number.

    Raises:
        RuntimeError: If other agents have begun the generation after `former`.
    """
    number = former + 1
    newest = max(step, agent_store.generation(former).get("kept_step", 0))
    agent_store.open_generation(number, agents)
    agent_store.plan_stop(number, STOP)
    agent_store.post_kept_step(number, newest)
    ledger.append_generation(
        Generation(number, RESUME, sorted(agents), from_step=step, kept_step=step), world_size=1
    )
    return number


def describe_group(generation: int) -> dict[str, str]:
    """The environment of a rank that is alone in its group, and is to stop."""
    ranks = ("RANK", "GROUP_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(ranks, "0"),
        **dict.fromkeys(sizes, "1"),
        "KDIST_GENERATION": str(generation),
        STOPS_VARIABLE: "1",
    }
