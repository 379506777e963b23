"""Signatures of failures between ranks: of gloo, NCCL, torch's store and their sockets."""

from __future__ import annotations

import errno

from kdist_trainer.causes.row import ANY_TEXT, IN_USE, NO_NAME, TORCH_CPU, TORCH_CUDA, Row, user
from kdist_trainer.config.exit_codes import Cause

_C10D = r"gloo|Gloo|NCCL|nccl|c10d|TCPStore|ProcessGroup|process group|monitoredBarrier|^Dist\w+:"
"""torch's messages about a collective contain one of these, a user's message hardly ever."""
_FIRST = "find the rank that ended or was lost first: this one only lost its connection to it"
_BEHIND = (
    "find the rank that is behind (`kdist why`); spec.collectiveTimeoutSeconds is how long its "
    "peers wait"
)
_ROUTE = "check the network between the nodes (`kdist doctor`)"
_INTERFACE = (
    "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface between the nodes, or let the "
    "host name resolve to its address"
)
_SETUP = "fix the call of torch.distributed at {place}"


def _near(text: str) -> str:
    """A pattern that matches only in a message about a collective."""
    return rf"(?s)\A(?=.*({_C10D})).*({text})"  # anchored, or it is tried at every character


def _lost(name: str, text: str, source: str, example: str, advice: str = _FIRST) -> Row:
    return Row(name, text, Cause.NODE_LOST, advice, source, example, primary=False)


def _late(name: str, text: str, source: str, example: str) -> Row:
    return Row(name, text, Cause.COLLECTIVE_TIMEOUT, _BEHIND, source, example, primary=False)


_GLOO = "[gloo/transport/tcp/"

COLLECTIVES = (
    _lost(
        "nccl-infiniband",
        r"Call to ibv_\w+.*(failed|returned)|NET/IB ?:|IBV_(EVENT|WC)_\w+",
        "nvidia/nccl/lib/libnccl.so.2 Call to ibv_modify_qp failed with",
        "NCCL error: Call to ibv_modify_qp failed with 110 Connection timed out",
        "look at the InfiniBand port of the node (ibstat) and at its counters",
    ),
    Row(
        "port-taken",
        r"EADDRINUSE",
        Cause.RENDEZVOUS,
        "the port of the process group was taken meanwhile: another try picks another",
        f"{TORCH_CPU} EADDRINUSE",
        "The server socket has failed to listen on any local network address. EADDRINUSE",
    ),
    Row(
        "port-taken-by-another",
        _near(r"[Aa]ddress already in use"),
        Cause.RENDEZVOUS,
        "the port of the process group was taken meanwhile: another try picks another",
        IN_USE,
        f"{_GLOO}listener.cc] bind: Address already in use",
    ),
    _late(
        "gloo-timeout",
        _near(r"Timed out waiting \d+\s*ms for (recv|send) operation"),
        f"{TORCH_CPU} Timed out waiting ",
        f"{_GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
    ),
    _late(
        "gloo-closed-by-timeout",
        _near(r"Application timeout caused pair closure|Timeout waiting for"),
        f"{TORCH_CPU} Application timeout caused pair closure",
        f"{_GLOO}pair.cc:460] Application timeout caused pair closure",
    ),
    _late(
        "barrier-timeout",
        r"timed out in monitoredBarrier|failed to pass monitoredBarrier",
        f"{TORCH_CPU}  timed out in monitoredBarrier after ",
        "Rank 1 timed out in monitoredBarrier after 3000 ms.",
    ),
    _late(
        "nccl-watchdog",
        r"Watchdog caught collective operation timeout|NCCL operation timed out|ncclTimeout",
        f"{TORCH_CUDA} Watchdog caught collective operation timeout: ",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    ),
    _lost(
        "gloo-closed",
        _near(r"Connection closed by peer"),
        f"{TORCH_CPU} Connection closed by peer ",
        f"{_GLOO}pair.cc:537] Connection closed by peer [127.0.0.1]:2718",
    ),
    _lost(
        "gloo-reset",
        _near(r"Connection reset by peer"),
        "errno.h ECONNRESET Connection reset by peer",
        f"{_GLOO}pair.cc:537] Read error [127.0.0.1]:61666: Connection reset by peer",
    ),
    _lost(
        "gloo-refused",
        _near(r"Connection refused"),
        "errno.h ECONNREFUSED Connection refused",
        f"{_GLOO}pair.cc:220] connect [127.0.0.1]:61666: Connection refused",
    ),
    _lost(
        "gloo-pipe",
        _near(r"Broken pipe"),
        "errno.h EPIPE Broken pipe",
        f"{_GLOO}pair.cc:537] Write error [127.0.0.1]:61666: Broken pipe",
    ),
    _lost(
        "gloo-mesh",
        r"connectFullMesh",
        f"{TORCH_CPU} Gloo connectFullMesh failed with ",
        "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    ),
    _lost(
        "gloo-route",
        _near(r"No route to host|Network is (unreachable|down)|Connection timed out"),
        "errno.h EHOSTUNREACH No route to host",
        f"{_GLOO}pair.cc:220] connect [10.0.0.2]:61666: No route to host",
        _ROUTE,
    ),
    Row(
        "gloo-interface",
        r"Unable to (find|resolve) (address|host)|makeDeviceForHostname|makeDeviceForInterface"
        r"|Unable to find interface",
        Cause.NODE,
        _INTERFACE,
        f"{TORCH_CPU} Unable to find address for",
        "[gloo/transport/tcp/device.cc:84] Unable to find address for: eth7",
    ),
    _lost(
        "store-recv",
        r"Failed to (recv|send), (got|sent) \d+ bytes|[Ff]ailed to (recv|send)\b",
        f"{TORCH_CPU} Failed to recv, got 0 bytes. Connection was likely closed.",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown",
    ),
    _lost(
        "store-connect",
        r"client socket has (timed out|failed to connect)|TCP client failed to connect",
        f"{TORCH_CPU} The client socket has timed out after {{}} while trying to connect to",
        "The client socket has timed out after 60000ms while trying to connect to (node-0, 29500).",
        _ROUTE,
    ),
    _lost(
        "store-clients",
        r"^Dist\w+: Timed out|Timed out after \d+ seconds waiting for clients"
        r"|wait timeout after \d+ms|Socket Timeout",
        f"{TORCH_CPU} wait timeout after {{}}ms, keys: {{}}",
        "wait timeout after 61000ms, keys: /default_pg/0//cpu//0/rank_1",
    ),
    _lost(
        "store-name",
        r"(getaddrinfo|c10d|host ?name).*(Name or service not known|Temporary failure in name)",
        NO_NAME,
        "The hostname could not be resolved: getaddrinfo: Temporary failure in name resolution",
        _ROUTE,
    ),
    user(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected",
        "two ranks use one GPU: call torch.cuda.set_device(LOCAL_RANK) before init_process_group, "
        "and ask for as many GPUs as ranks",
        "NCCL src/init.cc Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx",
        example="ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device",
    ),
    user(
        "nccl-usage",
        r"ncclInvalid(Usage|Argument)",
        _SETUP,
        f"{TORCH_CUDA} ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ),
    Row(
        "nccl-cuda",
        r"ncclUnhandledCudaError",
        Cause.DEVICE,
        "look at the line of NCCL's log above it (NCCL_DEBUG=WARN): a call of CUDA failed there",
        f"{TORCH_CUDA} ncclUnhandledCudaError: Call to CUDA function failed.",
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error, NCCL version 2.28.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.",
    ),
    Row(
        "nccl-fabric",
        r"NVLS|NVLink SHARP|nvidia-fabricmanager|Fabric ?Manager",
        Cause.NODE,
        "restart the fabric manager of the node; NCCL_NVLS_ENABLE=0 does without",
        "nvidia/nccl/lib/libnccl.so.2 Failed to bind NVLink SHARP (NVLS) Multicast memory",
        "NCCL error: Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152",
        of_machine=True,
    ),
    _lost(
        "nccl-system",
        r"ncclSystemError",
        f"{TORCH_CUDA} ncclSystemError: System call (e.g. socket, malloc) or external library call",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        _ROUTE,
    ),
    _lost(
        "nccl-remote",
        r"ncclRemoteError|remote process (exited|has terminated)",
        f"{TORCH_CUDA} ncclRemoteError: A call failed possibly due to a network error or a remote",
        "NCCL error: remote process exited or there was a network error",
    ),
    Row(
        "nccl-internal",
        r"ncclInternalError",
        Cause.NODE,
        "run it with NCCL_DEBUG=INFO: NCCL's topology or its plugin does not fit the node",
        f"{TORCH_CUDA} ncclInternalError: Internal check failed.",
        "ncclInternalError: Internal check failed.",
    ),
    _lost(
        "nccl-aborted",
        r"communicator was aborted|NCCL communicator was",
        f"{TORCH_CUDA} NCCL communicator was aborted on rank ",
        "NCCL communicator was aborted on rank 1.",
    ),
    _lost(
        "nccl-other",
        r"NCCL error|nccl\w*Error|NCCL Error",
        f"{TORCH_CUDA} NCCL error: ",
        "NCCL error: unhandled error 9",
    ),
    user(
        "process-group-setup",
        r"Default process group has not been initialized|trying to initialize the default process "
        r"group twice|No backend type associated with device type|Tensors must be (contiguous|CUDA)"
        r"|Distributed package doesn't have",
        _SETUP,
        "torch/distributed/distributed_c10d.py Default process group has not been initialized",
        example="Default process group has not been initialized, please make sure to call",
        types=("ValueError", "RuntimeError"),
    ),
    user(
        "ddp-reduction",
        r"Expected to have finished reduction in the prior iteration|find_unused_parameters",
        "let every parameter take part in the loss, or wrap with find_unused_parameters=True",
        f"{TORCH_CPU} Expected to have finished reduction in the prior iteration",
        example="Expected to have finished reduction in the prior iteration before starting a new",
    ),
)
"""In order: the first row that matches an error applies."""

SOCKETS = (
    Row(
        "peer-socket",
        ANY_TEXT,
        Cause.NODE_LOST,
        _FIRST,
        "Python ConnectionError",
        "Connection reset by peer",
        types=("ConnectionError",),
        users=True,
        primary=False,
    ),
    Row(
        "network-socket",
        ANY_TEXT,
        Cause.NODE_LOST,
        _ROUTE,
        "errno.h EHOSTUNREACH No route to host",
        "No route to host",
        types=("OSError",),
        errnos=frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}),
        users=True,
        primary=False,
    ),
)
"""Tried after the rows of hubs, whose errors are of these types too."""
