"""A job on this machine: the same agents and the same `train.json` as in a cluster, as local
processes.

`run_job` is the door. Behind it: `folder` keeps what outlives an invocation, `launch` says how
agents start, `kubelet` keeps them going, `follow` reads their logs, `poll` asks them for their
status, `progress` gathers what is known, `view` draws it, `narrate` turns events into lines, and
`session` is the loop that joins them. The end report comes from the room `report`. This room prints
nothing: it is given a `Display`.
"""

from __future__ import annotations

from kdist.local.launch import check_torch
from kdist.local.runner import Display, RunEnded, run_job

__all__ = ["Display", "RunEnded", "check_torch", "run_job"]
