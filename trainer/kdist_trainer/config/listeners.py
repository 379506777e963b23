"""Every socket at which a process of a training or the controller listens, declared once: for the
page about security, and for a test that finds one that is not here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kdist_trainer.formats import METRICS_PORT


class Listener(NamedTuple):
    """A listening socket.

    Attributes:
        name: what it is.
        process: which process opens it, and when.
        port: its port on a cluster.
        pod: where it is bound in a pod.
        local: where it is bound with `kdist run`.
        admits: what a client must know.
        without: what somebody who reaches it can do.
        modules: the modules of ours that open it; empty if it is not ours.
    """

    name: str
    process: str
    port: str
    pod: str
    local: str
    admits: str
    without: str
    modules: tuple[str, ...] = ()


_POD: Final = "the pod's addresses"
_WITH_LOOPBACK: Final = f"{_POD} and loopback"
_LOOPBACK: Final = "loopback"
_BOUNDED: Final = "connections, bytes and seconds are bounded"

LISTENERS: Final = (
    Listener(
        "exporter: `/metrics`, `/status`, `/healthz`, `/readyz`",
        "each agent",
        str(METRICS_PORT),
        _WITH_LOOPBACK,
        _LOOPBACK,
        "nothing",
        f"read ranks, steps, losses and hosts; {_BOUNDED}",
        ("kdist_trainer.metrics.exporter",),
    ),
    Listener(
        "exchange of the agents of a round, with membership and JOIN",
        "the agents that host a round",
        "any",
        _POD,
        _LOOPBACK,
        "the round's token",
        f"nothing without the token; {_BOUNDED}",
        ("kdist_trainer.rendezvous.exchange",),
    ),
    Listener(
        "controller: `/metrics`, `/healthz`, `/readyz`",
        "each replica of the controller",
        "9402",
        _WITH_LOOPBACK,
        "-",
        "nothing",
        f"read counts of TrainingJobs and requests; {_BOUNDED}",
        ("kdist_controller.metrics",),
    ),
    Listener(
        "torch's TCPStore of a group",
        "rank 0, while its group lasts",
        "any",
        _POD,
        _LOOPBACK,
        "nothing; newcomers are dropped once all ranks are connected",
        "read and set keys of the group, and use up memory",
        ("kdist_trainer.distributed.world",),
    ),
    Listener(
        "torch's TCPStore of the rendezvous",
        "a process of its own next to the agent of node 0, with `rendezvous: c10d` only",
        "29400",
        _POD,
        _LOOPBACK,
        "nothing, for the whole job: newcomers are how a node joins",
        "read and set the state of the rendezvous, and use up memory",
        ("kdist_trainer.rendezvous.stores",),
    ),
    Listener(
        "torch's TCPStore of a script",
        "rank 0 of a script that calls `init_process_group`",
        "any (`MASTER_PORT`)",
        _POD,
        _LOOPBACK,
        "nothing; newcomers from other machines than the ranks' are dropped once all are connected",
        "read and set keys of the group, and use up memory",
    ),
    Listener(
        "gloo's and NCCL's connections",
        "each rank",
        "any",
        "the interface that gloo or NCCL chooses",
        _LOOPBACK,
        "nothing; gloo's of the managed loop drop newcomers once all ranks are connected",
        "disturb the collectives, and run code in a rank",
    ),
    Listener(
        "TensorBoard",
        "`kdist tensorboard`, in a pod of its own",
        "any",
        _LOOPBACK,
        _LOOPBACK,
        "nothing; reached by port-forward",
        "read curves",
    ),
)
