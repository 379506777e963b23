"""What reaches a process group is noted before it begins, whoever calls it, by group, and told from
what goes on next to it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.script.collectives import ScriptRecorder
from tests.patience import soon
from tests.trainer.training.group import run_group


def call_everything(folder: Path) -> dict[str, list[str]]:
    with World.from_environment(timeout_seconds=60) as world:
        heartbeat = Heartbeat.create(folder / f"beat-{world.rank}")
        collective_hooks.install_recorder(heartbeat)
        reported: dict[str, list[str]] = {}

        def note(name: str) -> None:
            reported[name] = [
                str(call) for call in heartbeat.calls()[sum(map(len, reported.values())) :]
            ]

        x = torch.ones(4, 2)
        dist.all_reduce(x)
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        dist.all_to_all_single(
            torch.empty(3),
            torch.ones(3),
            *(([2, 1], [2, 1]) if world.rank == 0 else ([1, 2], [1, 2])),
        )
        dist.barrier()
        with torch.inference_mode():
            dist.broadcast(torch.ones(5), 0)
        note("own")
        pair = dist.new_group([0, 1])
        assert isinstance(pair, dist.ProcessGroup)
        dist.all_reduce(x, group=pair)
        (dist.send if world.rank == 0 else dist.recv)(x, 1 - world.rank)
        note("groups")
        functional.all_reduce(x, "sum", [0, 1]).sum()
        note("functional")
        waited = str(heartbeat.read().collective)
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        ddp(torch.ones(2, 4)).sum().backward()
        note("ddp")
        sharded = nn.Linear(4, 4)
        fully_shard(sharded)
        sharded(torch.ones(2, 4)).sum().backward()
        note("fsdp")
        waiting = dist.all_reduce(x, async_op=True)
        reported["waited"] = [waited]
        reported["inside"] = [str(heartbeat.read().collective)]
        if waiting is not None:
            waiting.wait()
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(7), group=pair))
        thread.start()
        thread.join()
        reported["outside"] = [str(heartbeat.read().collective), str(heartbeat.calls(1)[0])]
        reported["script"] = see_as_script(world.rank, heartbeat, folder / "seen")
        return reported


def see_as_script(rank: int, heartbeat: Heartbeat, seen: Path) -> list[str]:
    """What rank 0 is in while rank 1 keeps it waiting, and once the collective has ended and nobody
    has waited for it.
    """
    collective_hooks.install_recorder(heartbeat, ScriptRecorder)
    if rank == 1:
        assert soon(seen.exists, 60)
    work = dist.all_reduce(torch.ones(6), async_op=True)
    under_way = str(heartbeat.read().collective)
    seen.touch()
    assert soon(lambda: heartbeat.read().collective is None, 60)
    assert work is not None
    work.wait()
    return [under_way] if rank == 0 else []


@pytest.mark.processes
def test_every_collective_is_noted_whoever_calls_it(tmp_path: Path) -> None:
    first, second = run_group(call_everything, 2, tmp_path)
    assert first["own"] == [
        "all_reduce(float32[4,2]) #1",
        "all_gather(float32[3]) #2",
        "all_to_all_single_uneven(float32[3]) #3",
        "barrier #4",
        "broadcast(float32[5]) #5",
    ]
    assert first["groups"][-2:] == [
        "all_reduce(float32[4,2]) #1 of group 1(0-1)",
        "send(float32[4,2]) #1 of group p2p",
    ]
    assert second["groups"][-1] == "recv(float32[4,2]) #1 of group p2p"
    assert any(call.startswith("all_reduce(float32[4,2])") for call in first["functional"])
    assert first["waited"] == ["None"], "an operator waited for it"
    script = first.pop("script") + second.pop("script")
    assert [call.partition(" ")[0] for call in script] == ["all_reduce(float32[6])"], (
        "only who waits"
    )
    assert any(call.startswith("all_reduce(float32[20])") for call in first["ddp"]), (
        "DDP's reducer is C++"
    )
    assert any("all_gather" in call for call in first["fsdp"])
    assert any("reduce_scatter" in call for call in first["fsdp"])
    assert first["inside"][0].startswith("all_reduce(float32[4,2])")
    assert first["outside"][0] == "None"
    assert first["outside"][1].startswith("all_reduce(float32[7])")
    assert {name: calls for name, calls in first.items() if name != "groups"} == {
        name: calls for name, calls in second.items() if name != "groups"
    }
