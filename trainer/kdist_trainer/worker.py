"""One rank of a managed training: joins the process group, checks the network, loads the workload
and trains. `main` is what an agent starts in torchrun's environment.

The network check (`spec.preflight`) runs in every new worker group, since after a restart the ranks
may be on other machines. It uses the fastest of a few rounds, so a moment's slowness ends no job.

By hand, one rank without an agent:  KDIST_CONFIG=train.json python -c 'from kdist_trainer.worker
import main; main()'
"""

from __future__ import annotations

import os
import traceback as tracebacks
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from kdist_trainer import log
from kdist_trainer.checkpoint.storage import open_location
from kdist_trainer.config import AllReduceCheck, Cause, Nodes, TrainConfig, Training, count_bytes
from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed.left_groups import left
from kdist_trainer.distributed.measure import (
    COLLECTIVES,
    Effort,
    Exchange,
    SlowLink,
    find_slow_link,
    measure,
)
from kdist_trainer.distributed.world import World, abandon, uses_gpus
from kdist_trainer.errors import (
    BandwidthError,
    ConfigError,
    PeersLostError,
    ReplicasDifferError,
    classify,
    is_user_code,
)
from kdist_trainer.instrumentation import collective_hooks, device_memory, fault_handler
from kdist_trainer.ipc import failure, output
from kdist_trainer.ipc.control import (
    PREBUILD,
    STOPS_VARIABLE,
    WAITING_VARIABLE,
    GroupControl,
)
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes import script_forkserver
from kdist_trainer.processes.liveness import Heartbeat, NullHeartbeat, Phase, own_place
from kdist_trainer.training import regroup, trainer
from kdist_trainer.training.builder import RankRuntime, assemble
from kdist_trainer.training.context import KeptState, TrainContext
from kdist_trainer.training.regroup import PreparedTraining
from kdist_trainer.training.sync import StopFlag
from kdist_trainer.workload import Workload

_EFFORT = Effort(rounds=10, warmup=2, seconds=20.0)
_SLOW_FACTOR = 2.0


def check(
    expected: AllReduceCheck,
    world: World,
    *,
    node: str,
    beat: Callable[[], object],
    exchange: Exchange | None = None,
) -> None:
    """Measure the all-reduce that the job expects. Collective. `beat` is called meanwhile, as a
    sign of life; a pair of ranks exchanges data by `exchange`, by default as the process group
    does. Raises `BandwidthError` if the ranks do not reach it; the slow rank raises it first, if
    there is one.
    """
    if world.size == 1:
        return
    collective = COLLECTIVES["all_reduce"]
    row = measure(collective, count_bytes(expected.size), world, _EFFORT, beat=beat)
    reached = row.size / row.fastest * collective.factor(world.size)
    demanded = count_bytes(expected.min_bus_bandwidth)
    if world.is_rank_zero:
        log.event(
            "preflight", busbw=round(reached), demanded=demanded, size=row.size, ranks=world.size
        )
    if reached >= demanded:
        return
    _, slow = find_slow_link(world, _SLOW_FACTOR, beat=beat, exchange=exchange)
    nodes = world.all_gather_object(node)
    if world.rank != (slow.ranks[0] if slow is not None else 0):
        world.barrier()  # the slow rank fails first, and its exit ends this wait
    raise BandwidthError(
        f"an all-reduce of {expected.size} among {world.size} ranks reaches a bus bandwidth "
        f"of {reached / 1e9:.3g} GB/s, "
        f"spec.preflight.allReduce.minBusBandwidth demands {expected.min_bus_bandwidth} "
        f"({demanded / 1e9:.3g} GB/s); " + _describe_slow_link(slow, nodes)
    )


def _describe_slow_link(slow: SlowLink | None, nodes: list[str]) -> str:
    if slow is None:
        return "no pair of ranks is slower than the others"
    who = " and ".join(f"rank {rank} on {nodes[rank]}" for rank in slow.ranks)
    what = "the pair " if len(slow.ranks) > 1 else ""
    return f"slow is {what}{who}: {slow.ratio:.1f} times the median of the others"


def main() -> str:
    """Train as one rank of the worker groups that the environment and the agent describe; returns
    "done" or "stopped". Raises whatever ended the training, after it is recorded for the agent.
    """
    rank = ManagedRank()
    try:
        return rank.run()
    except BaseException as error:
        if WAITING_VARIABLE not in os.environ:
            record(error, rank.heartbeat, rank.ctx)
        raise


class ManagedRank:
    """One rank of a managed training, through all the worker groups that it is a member of.

    The process may have been started before there is a group for it. It then builds what needs no
    group, and waits. An error of that is raised in the group, where it would have been raised
    otherwise.
    """

    def __init__(self) -> None:
        self.ctx: TrainContext | None = None
        self._has_group = WAITING_VARIABLE not in os.environ
        self.heartbeat = collective_hooks.find_heartbeat() if self._has_group else None
        self._stop_flag = StopFlag()
        self._stop_flag.install()
        self._control: GroupControl | None = None
        self._workload: Workload | None = None
        self._prepared: PreparedTraining | None = None
        self._error: BaseException | None = None
        self._kept: KeptState | None = None

    def run(self) -> str:
        """Train in one group after the other; returns "done" or "stopped"."""
        while True:
            config, train = read_training(Path(os.environ["KDIST_CONFIG"]))
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if self._control is None and train.recovery != "restart" and not uses_gpus(local_size):
                self._control = GroupControl.connect(self._stop_flag.ask_to_leave)
                if self._control is not None:
                    left.report_crowd(self._report_crowd)
            if not self._has_group:
                self._wait_for_first_group(config, train)
                continue
            try:
                return self._train(config, train)
            except Exception as error:
                if self._control is None or not self._is_peers_fault(error):
                    raise
                self._leave(error, collective_timeout_seconds=config.collective_timeout_seconds)
            self._join(self._control.wait_for_group())

    def _report_crowd(self, groups: int) -> None:
        """Tell the agent of the groups that this rank keeps, so that it may replace the process:
        not while that writes a save alone, which would be lost with it.
        """
        ctx, kept = self.ctx, self._kept
        save = kept.carried if kept is not None else None
        is_carrying = ctx.checkpointing.carrying.is_in_progress if ctx is not None else False
        if self._control is not None:
            is_carrying |= save is not None and save.is_in_progress
            self._control.report_crowd(0 if is_carrying else groups)

    def _wait_for_first_group(self, config: TrainConfig, train: Training) -> None:
        """Prepare for the first group, and join it once the agent has it. Raises `PeersLostError`
        if the agent cannot be reached, so that there will be no group.
        """
        if self._control is None:
            raise PeersLostError("the agent of this worker cannot be reached")
        torch.set_num_threads(config.threads_per_rank)
        regroup.warm_up_torch()
        try:
            if os.environ[WAITING_VARIABLE] == PREBUILD:
                self._prepared = regroup.prepare(train, torch.device("cpu"))
        except BaseException as error:  # noqa: BLE001 - raised in the group, as otherwise
            self._error = error
        self._control.report_left(-1, "")
        self._join(self._control.wait_for_group())
        self._has_group = True

    def _build(self, config: TrainConfig, train: Training, runtime: RankRuntime) -> TrainContext:
        """Build the training of this group, with what was built or kept before."""
        if self._error is not None:
            raise self._error
        built, self._prepared = self._prepared, None
        if built is not None:
            self._workload = built.workload
        if self._workload is None:
            self._workload = regroup.load_workload(train, runtime.world.device)
        return assemble(config, train, self._workload, runtime, self._kept, built)

    def _train(self, config: TrainConfig, train: Training) -> str:
        """Train in the group that the environment describes."""
        heartbeat = self.heartbeat
        torch.set_num_threads(config.threads_per_rank)
        beat(heartbeat, Phase.RENDEZVOUS)
        collective_hooks.record_collectives(heartbeat)
        device_memory.record_history()
        with World.from_environment(
            timeout_seconds=config.collective_timeout_seconds,
            model_parallel=train.model_parallel or 1,
        ) as world:
            beat(heartbeat, Phase.INIT)
            log.bind(rank=world.rank, generation=world.generation)
            if config.preflight is not None and config.preflight.all_reduce is not None:
                check(
                    config.preflight.all_reduce,
                    world,
                    node=os.environ.get("KDIST_NODE", ""),
                    beat=lambda: beat(heartbeat, Phase.INIT),
                )
            stats = StepStats(rank=world.rank, generation=world.generation)
            location = os.environ.get("KDIST_CHECKPOINTS")
            with Reporter(stats) as reporter:
                runtime = RankRuntime(
                    world=world,
                    stop_flag=self._stop_flag,
                    stats=stats,
                    reporter=reporter,
                    heartbeat=heartbeat or NullHeartbeat(),
                    checkpoints=open_location(location) if location else None,
                    scratch=place[0] if (place := own_place()) else None,
                )
                self.ctx = self._build(config, train, runtime)
                outcome = trainer.train(self.ctx)
            beat(heartbeat, Phase.EXIT)
            return outcome

    def _is_peers_fault(self, error: Exception) -> bool:
        """Whether another rank has ended this group: the agent says so, or a connection broke. A
        collective that timed out is a hang, whose cause the agents find from all ranks' exits.
        """
        assert self._control is not None  # noqa: S101 - the caller has checked it
        if isinstance(error, ReplicasDifferError):
            return False  # what this process holds must not go on
        if self._control.asked_to_leave:
            return True
        cause, _, is_primary = classify(error)
        return not is_primary and cause is not Cause.COLLECTIVE_TIMEOUT

    def _leave(self, error: Exception, *, collective_timeout_seconds: float) -> None:
        """Leave the broken group with the training in memory."""
        assert self._control is not None  # noqa: S101 - the caller has checked it
        beat(self.heartbeat, Phase.SYNC)
        group_abort.abort()
        timeout = timedelta(seconds=collective_timeout_seconds)
        if self.ctx is not None:
            self._kept = regroup.keep(self.ctx)
        why, self.ctx = regroup.describe_error(error), None
        forget_frames(error)
        abandon(timeout)
        if self._kept is not None and (save := self._kept.carried) and save.is_in_progress:
            # before the agent is told that the rank has left, and may replace a crowded one
            self._control.report_crowd(0)
        self._control.report_left(self._kept.state.step if self._kept is not None else -1, why)
        # half a millisecond, and nothing else is to do until the agents have met
        script_forkserver.return_free_memory()

    def _join(self, environment: dict[str, str]) -> None:
        """Take over the environment of the next group."""
        os.environ.pop(WAITING_VARIABLE, None)
        os.environ.update(environment)
        if STOPS_VARIABLE in environment:
            self._stop_flag.requested = True
        # the channel's thread may have aborted once more, after the groups were destroyed
        group_abort.reset()
        collective_hooks.remove_recorder()
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.heartbeat = collective_hooks.find_heartbeat()
        if (place := own_place()) is not None:
            output.redirect(*place)
            fault_handler.install(*place)


def forget_frames(error: BaseException) -> None:
    """Forget what the frames of an error's traceback refer to, and those of the errors that it came
    from: otherwise a group that was left may stay until garbage is collected, which is rare.
    """
    links: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and link not in links:
            links.append(link)
            tracebacks.clear_frames(link.__traceback__)
            waiting += (link.__cause__, link.__context__)


def read_training(path: Path) -> tuple[TrainConfig, Training]:
    """Read `train.json`, and its section `train`; $KDIST_NODES, which the agent sets, replaces its
    node limits. Raises `ConfigError` if the file cannot be read, is not valid, or has no such
    section.
    """
    try:
        config = TrainConfig.read(path)
        fewest, colon, most = os.environ.get("KDIST_NODES", "").partition(":")
        if colon:
            nodes = Nodes(min=int(fewest), max=int(most))
            config = config.model_copy(update={"nodes": nodes})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if config.train is None:
        raise ConfigError(
            "train.json has no train section: a script is not started by this entrypoint"
        )
    return config, config.train


def beat(heartbeat: Heartbeat | None, phase: Phase) -> None:
    """Record the phase of this rank between start and training."""
    if heartbeat is not None:
        heartbeat.beat(phase, heartbeat.read().step)


def record(error: BaseException, heartbeat: Heartbeat | None, ctx: TrainContext | None) -> None:
    """Record the failure for the agent, with the step and the collective that this rank was in."""
    collective = heartbeat.read().collective if heartbeat is not None else None
    if ctx is not None:
        ctx.step_log.close()
    failure.record(
        error,
        step=ctx.state.step if ctx is not None else None,
        collective=collective,
        methods=partial(find_method, ctx.workload) if ctx is not None else None,
        remark=device_memory.explain(error),
    )


def find_method(workload: Workload, name: str) -> str | None:
    """The place of a method that the user has written, in a traceback's form; for `collate` that of
    the samples if it is not overridden. None if it is in a library.
    """
    for each in (name, "dataset") if name == "collate" else (name,):
        code = getattr(getattr(type(workload), each, None), "__code__", None)
        if code is not None and is_user_code(code.co_filename):
            where = f'File "{code.co_filename}", line {code.co_firstlineno}'
            return f"{where}, in {type(workload).__name__}.{each}"
    return None
