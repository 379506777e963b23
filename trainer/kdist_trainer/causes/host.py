"""Signatures of what fails on the host: the user's code, the machine, and collectives.

The rows are of Python's and torch's errors and of processes that the code starts; of the kernel's
error numbers, memory, files, data loaders, and hubs from which files are fetched; and of gloo,
NCCL, torch's store and the sockets below them.
"""

from __future__ import annotations

import errno

from kdist_trainer.causes.row import ANYWHERE, Row, user
from kdist_trainer.config.exit_codes import Cause, Fault, Rerun

_CPU = "torch/lib/libtorch_cpu.so"
_SHAPES = "fix the shapes at {place}"

REPLICAS_DIFFER = "replicas-differ"

CODE = (
    Row(
        "retry",
        ANYWHERE,
        Cause.RETRY,
        "nothing: the script asked to be tried again",
        "kdist_trainer/errors.py class Retry",
        "",
        types=("Retry",),
        alike=0,
    ),
    Row(
        REPLICAS_DIFFER,
        ANYWHERE,
        Cause.RETRY,
        "keep what a step changes in a state (the optimizer's in self.state or param_groups, the "
        "model's in a buffer or get_extra_state()), or set train.recovery: restart",
        "kdist_trainer/errors.py class ReplicasDifferError",
        "rank 1 holds other weights or optimizer states after step 7 than rank 0",
        types=("ReplicasDifferError",),
        alike=0,
    ),
    Row(
        "interrupted",
        ANYWHERE,
        Cause.SIGNAL,
        "find who sent SIGINT: the process that starts ranks has died, or somebody pressed Ctrl-C",
        "Python KeyboardInterrupt",
        "",
        types=("KeyboardInterrupt",),
        alike=0,
    ),
    Row(
        "child-killed",
        r"terminated with signal",
        Cause.SIGNAL,
        "find who ended the process that {place} had started: memory, or a crash in C",
        "torch/multiprocessing/spawn.py terminated with signal",
        "process 0 terminated with signal SIGABRT",
        types=("ProcessExitedException",),
    ),
    user(
        "child-exited",
        r"terminated with exit code",
        "see the lines of the process that {place} had started",
        "torch/multiprocessing/spawn.py terminated with exit code",
        example="process 0 terminated with exit code 3",
        types=("ProcessExitedException",),
    ),
    user(
        "missing-package",
        ANYWHERE,
        "install it for the Python that runs the script, {python}{environment}: {install}",
        "Python ModuleNotFoundError",
        example="No module named 'timm'",
        types=("ModuleNotFoundError",),
    ),
    Row(
        "missing-library",
        r"cannot open shared object file|undefined symbol|GLIBC_",
        Cause.CONFIG,
        "install the library in the image, or a package that is built for {python}",
        "dlfcn.h cannot open shared object file",
        "libcudart.so.12: cannot open shared object file: No such file or directory",
        types=("ImportError", "OSError"),
        rerun=Rerun.FIXED,
    ),
    user(
        "loss-shape",
        r"grad can be implicitly created only for scalar outputs",
        "return one number from {place}: the loss must be a scalar, `.mean()` makes it one",
        "torch/autograd/__init__.py grad can be implicitly created only for scalar outputs",
        example="grad can be implicitly created only for scalar outputs",
        method="loss",
    ),
    user(
        "loss-gradient",
        r"does not require grad and does not have a grad_fn",
        "compute the loss at {place} from the model's output, without detach() or no_grad",
        f"{_CPU} of tensors does not require grad and does not have a grad_fn",
        example="element 0 of tensors does not require grad and does not have a grad_fn",
        method="loss",
    ),
    user(
        "collate-type",
        r"default_collate: batch must contain",
        "give samples at {place} that are tensors, numbers, or dicts and tuples of them, or a "
        "collate of your own",
        "torch/utils/data/_utils/collate.py default_collate: batch must contain",
        example="default_collate: batch must contain tensors, numpy arrays, numbers",
        types=("TypeError",),
        method="collate",
    ),
    user(
        "collate-size",
        r"each element in list of batch should be of equal size|stack expects each tensor to be "
        r"equal size|Batches of (nested|sparse) tensors are not currently supported",
        "give samples of equal size at {place}, or pad them in a collate of your own",
        "torch/utils/data/_utils/collate.py:208 each element in list of batch should be of equal",
        example="each element in list of batch should be of equal size",
        method="collate",
    ),
    user(
        "storage-resize",
        r"Trying to resize storage that is not resizable",
        "give samples of equal size at {place}, or pad them in a collate of your own",
        f"{_CPU} Trying to resize storage that is not resizable",
        example="Trying to resize storage that is not resizable",
        method="collate",
    ),
    user(
        "shape-product",
        r"mat1 and mat2 (shapes|must)|size mismatch, got|expected (input|weight|m1)|Given groups=",
        _SHAPES,
        f"{_CPU} mat1 and mat2 shapes cannot be multiplied",
        example="mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    ),
    user(
        "shape-match",
        r"must match the (size|existing size) of tensor|Sizes of tensors must match|is invalid for "
        r"input of size|not broadcastable|shape mismatch|Expected .*batch_size .*to match",
        _SHAPES,
        f"{_CPU} must match the size of tensor",
        example="The size of tensor a (3) must match the size of tensor b (4) at non-singleton",
        types=("RuntimeError", "ValueError"),
    ),
    user(
        "shape-index",
        r"Dimension out of range|index (\d+ )?(is )?out of (range|bounds)|too many indices"
        r"|cannot be converted to Scalar|only one element tensors",
        "fix the index at {place}",
        f"{_CPU} Dimension out of range",
        example="Dimension out of range (expected to be in range of [-2, 1], but got 2)",
        types=("RuntimeError", "IndexError", "ValueError"),
    ),
    user(
        "type-match",
        r"expected (scalar type|m1 and m2)|must have the same dtype|not implemented for '|should "
        r"be the same|can't be cast|doesn't match the desired|Found dtype|result type \w+ can't",
        "convert the tensors at {place} to one type",
        f"{_CPU} expected scalar type ",
        example="expected scalar type Float but found Double",
    ),
    user(
        "device-match",
        r"Expected all tensors to be on the same device",
        "move the tensors at {place} to one device",
        f"{_CPU} Expected all tensors to be on the same device",
        example="Expected all tensors to be on the same device, but found at least two devices",
    ),
    user(
        "gradient-twice",
        r"Trying to backward through the graph a second time|modified by an inplace operation|leaf "
        r"Variable that requires grad|requires grad is being used in an in-place|unused in the "
        r"graph",
        "fix the use of the graph at {place}",
        f"{_CPU} Trying to backward through the graph a second time",
        example="Trying to backward through the graph a second time (or directly access saved",
    ),
    user(
        "state-dict",
        r"Error\(s\) in loading state_dict|Weights only load failed",
        "load a state that is of this model at {place}",
        "torch/nn/modules/module.py Error(s) in loading state_dict for",
        example="Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: 'a'",
        types=("RuntimeError", "UnpicklingError"),
    ),
)
"""In order: the first that recognizes an error is its row."""


_LOADER = "torch/utils/data/dataloader.py"
_PYTHON = "torch/lib/libtorch_python.so"
_DIED = (
    "find what ended the process of the data loader (its lines are above in the log): memory, "
    "/dev/shm or a signal; train.loader.workers: 0 loads in the rank itself"
)
_SHM = (
    "raise spec.resources.memory, of which /dev/shm is a part{free}, or lower train.loader.workers"
)
_FILES = "raise the limit of open files (ulimit -n), or close what {place} opens"
_FREE = "free space on {path}{free}; committed checkpoints are safe"
_STORAGE = "repair or mount again the volume of {path}; committed checkpoints are safe"
_MEMORY = (
    "raise spec.resources.memory, or lower train.microBatch or train.loader.workers; what is free "
    "decides, not the limit alone"
)
_HUB = "the hub or the way to it failed: try again later, or fetch the files by spec.data instead"
HUBS = (
    "huggingface_hub",
    "transformers",
    "datasets",
    "torch/hub.py",
    "torchvision/datasets",
    "obstore",
    "botocore",
    "s3fs",
    "gcsfs",
)
"""Parts of the paths of packages that fetch from hubs."""
HUB_HOSTS = (
    r"huggingface\.co|hf\.co|pytorch\.org|amazonaws\.com|googleapis\.com|github(usercontent)?"
)
_OWN_FILE = "correct the path or the rights of {path}"


def _loader(name: str, text: str, source: str, example: str, **overrides: object) -> Row:
    return Row(name, text, Cause.LOADER, _DIED, source, example, **overrides)  # type: ignore[arg-type]  # the fields of a row


def _kernel(
    name: str, numbers: set[int], cause: Cause, advice: str, source: str, **overrides: object
) -> Row:
    example = source.partition(" ")[2].partition(" ")[2]
    fields: dict[str, object] = {"types": ("OSError",), "errnos": frozenset(numbers), **overrides}
    return Row(name, ANYWHERE, cause, advice, source, example, **fields)  # type: ignore[arg-type]  # the fields of a row


def _hub(name: str, text: str, source: str, example: str, *types: str) -> Row:
    return Row(name, text, Cause.NETWORK, _HUB, source, example, types=types, through=HUBS)


def _name(name: str, text: str, source: str, example: str, *types: str) -> Row:
    advice = "check the name and the DNS of the node (`kdist doctor`)"
    return Row(name, text, Cause.NETWORK, advice, source, example, types=types, alike=2)


def _data(name: str, text: str, source: str, example: str, *types: str) -> Row:
    return Row(
        name,
        text,
        Cause.DATA,
        "replace the file that {place} reads: it is damaged or was written in part",
        source,
        example,
        types=types,
        rerun=Rerun.FIXED,
    )


SYSTEM = (
    _loader(
        "loader-killed",
        r"DataLoader worker \(pid[^)]*\)+ is killed by signal",
        f"{_PYTHON} DataLoader worker (pid {{}}) is killed by signal: {{}}. ",
        "DataLoader worker (pid 71) is killed by signal: Aborted. ",
    ),
    _loader(
        "loader-exited",
        r"DataLoader worker \(pid.*\) exited unexpectedly",
        f"{_LOADER}:1307 exited unexpectedly",
        "DataLoader worker (pid(s) 71, 72) exited unexpectedly",
    ),
    _loader(
        "loader-thread",
        r"Pin memory thread exited unexpectedly",
        f"{_LOADER}:1461 Pin memory thread exited unexpectedly",
        "Pin memory thread exited unexpectedly",
    ),
    _loader(
        "loader-timeout",
        r"DataLoader timed out after",
        f"{_LOADER}:1452 DataLoader timed out after",
        "DataLoader timed out after 30 seconds",
    ),
    Row(
        "shm-bus-error",
        r"bus error.*insufficient shared memory|insufficient shared memory \(shm\)",
        Cause.STORAGE,
        _SHM,
        f"{_PYTHON} This might be caused by insufficient shared memory (shm).",
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared "
        "memory (shm).",
        fault=Fault.USER,
    ),
    Row(
        "shm-full",
        r"unable to (allocate shared memory|open shared memory object|resize file|mmap \d+ bytes)"
        r"|Couldn't allocate shared memory segment|No space left on device: '/(dev/shm|psm_)",
        Cause.STORAGE,
        _SHM,
        f"{_CPU} unable to allocate shared memory(shm) for file <",
        "unable to allocate shared memory(shm) for file </torch_71_1>: No space left on device",
        fault=Fault.USER,
    ),
    Row(
        "loader-descriptors",
        r"received 0 items of ancdata|Too many open files\. Communication with the",
        Cause.USER_CODE,
        _FILES,
        f"{_LOADER}:1329 Too many open files. Communication with the",
        "Too many open files. Communication with the workers is no longer possible.",
        final=True,
        rerun=Rerun.FIXED,
    ),
    Row(
        "host-memory",
        ANYWHERE,
        Cause.OOM_HOST,
        _MEMORY,
        "Python MemoryError",
        "",
        types=("MemoryError",),
        rerun=Rerun.FIXED,
    ),
    Row(
        "host-allocator",
        r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
        Cause.OOM_HOST,
        _MEMORY,
        "torch/lib/libc10.so DefaultCPUAllocator: can't allocate memory",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        rerun=Rerun.FIXED,
    ),
    _kernel(
        "no-memory",
        {errno.ENOMEM},
        Cause.OOM_HOST,
        _MEMORY,
        "errno.h ENOMEM Cannot allocate memory",
        rerun=Rerun.FIXED,
    ),
    Row(
        "no-threads",
        r"can't start new thread|Resource temporarily unavailable|pthread_create failed",
        Cause.NODE,
        "raise the limit of processes of the pod or the machine (pids), or start fewer",
        "Python can't start new thread",
        "can't start new thread",
    ),
    _kernel(
        "disk-full",
        {errno.ENOSPC, errno.EDQUOT},
        Cause.STORAGE,
        _FREE,
        "errno.h ENOSPC No space left on device",
    ),
    _kernel(
        "disk-read-only",
        {errno.EROFS},
        Cause.STORAGE,
        _STORAGE,
        "errno.h EROFS Read-only file system",
        users=True,
    ),
    _kernel(
        "disk-error",
        {errno.EIO, errno.EUCLEAN, errno.ENXIO, errno.EREMOTEIO},
        Cause.STORAGE,
        _STORAGE,
        "errno.h EIO Input/output error",
    ),
    _kernel(
        "mount-stale",
        {errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN},
        Cause.STORAGE,
        _STORAGE,
        "errno.h ESTALE Stale file handle",
    ),
    _kernel(
        "open-files",
        {errno.EMFILE},
        Cause.NODE,
        _FILES,
        "errno.h EMFILE Too many open files",
        users=True,
    ),
    _kernel(
        "open-files-of-all",
        {errno.ENFILE},
        Cause.NODE,
        "raise fs.file-max of the node, or find which process holds the files there",
        "errno.h ENFILE Too many open files in system",
    ),
    _kernel(
        "address-taken",
        {errno.EADDRINUSE, errno.EADDRNOTAVAIL},
        Cause.RENDEZVOUS,
        "let the system choose the port at {place} (port 0)",
        "errno.h EADDRINUSE Address already in use",
        users=True,
    ),
    user(
        "hub-denied",
        r"\b(401|403|404)\b|gated repo|not a valid model identifier",
        "correct the name of the repository, or give the job a token that may read it (spec.env)",
        "huggingface_hub/errors.py:313 class RepositoryNotFoundError",
        example="401 Client Error. Repository Not Found for url: https://huggingface.co/api/x",
        types=("RepositoryNotFoundError", "GatedRepoError", "HfHubHTTPError", "HTTPStatusError"),
    ),
    _hub(
        "hub-overloaded",
        r"\b(429|500|502|503|504)\b.*(Error|Too Many|Unavailable|Gateway|Time)|SlowDown",
        "huggingface_hub/errors.py:90 class HfHubHTTPError",
        "503 Server Error: Service Unavailable for url: https://huggingface.co/api/models/x",
        "HfHubHTTPError",
        "HTTPError",
        "HTTPStatusError",
        "ClientError",
    ),
    _hub(
        "hub-unreachable",
        r"Max retries exceeded|huggingface\.co|Failed to establish a new connection"
        r"|ConnectError|EndpointConnectionError",
        "urllib3/exceptions.py:100 Max retries exceeded with url: ",
        "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /",
        "MaxRetryError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "LocalEntryNotFoundError",
        "EndpointConnectionError",
        "ProxyError",
        "SSLError",
        "OSError",
    ),
    _name(
        "name-lookup",
        r"Temporary failure in name resolution|Name or service not known",
        "netdb.h EAI_AGAIN Temporary failure in name resolution",
        "[Errno -3] Temporary failure in name resolution",
        "gaierror",
        "URLError",
        "NameResolutionError",
        "ConnectError",
    ),
    _data(
        "archive-damaged",
        r"PytorchStreamReader failed|invalid header or archive is corrupted|File is not a zip file"
        r"|Error while deserializing header|HeaderTooLarge|InvalidHeader",
        f"{_CPU} PytorchStreamReader failed",
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError",
        "BadZipFile",
        "SafetensorError",
    ),
    _data(
        "pickle-damaged",
        r"invalid load key|pickle data was truncated|Ran out of input|unpickling stack underflow",
        "Python _pickle pickle data was truncated",
        "pickle data was truncated",
        "UnpicklingError",
        "EOFError",
    ),
    _data(
        "compressed-damaged",
        r"Compressed file ended before|CRC check failed|Not a gzipped file|incorrect header check",
        "Python gzip.py Compressed file ended before the end-of-stream marker was reached",
        "Compressed file ended before the end-of-stream marker was reached",
        "EOFError",
        "BadGzipFile",
        "error",
        "LZMAError",
    ),
    user(
        "file-missing",
        ANYWHERE,
        _OWN_FILE,
        "errno.h ENOENT No such file or directory",
        example="No such file or directory",
        types=("FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "FileExistsError"),
        only_users=True,
    ),
    user(
        "file-denied",
        ANYWHERE,
        _OWN_FILE,
        "errno.h EACCES Permission denied",
        example="Permission denied",
        types=("PermissionError",),
        only_users=True,
    ),
)
"""In order: the first that recognizes an error is its row."""


_CUDA = "torch/lib/libtorch_cuda.so"
_C10D = r"gloo|Gloo|NCCL|nccl|c10d|TCPStore|ProcessGroup|process group|monitoredBarrier|^Dist\w+:"
"""torch's own messages about a collective hold one of these; a user's hardly does."""
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
    """A pattern that counts only in a message about a collective."""
    return rf"(?s)\A(?=.*({_C10D})).*({text})"  # anchored: else tried from every character


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
        f"{_CPU} EADDRINUSE",
        "The server socket has failed to listen on any local network address. EADDRINUSE",
    ),
    Row(
        "port-taken-by-another",
        _near(r"[Aa]ddress already in use"),
        Cause.RENDEZVOUS,
        "the port of the process group was taken meanwhile: another try picks another",
        "errno.h EADDRINUSE Address already in use",
        f"{_GLOO}listener.cc] bind: Address already in use",
    ),
    _late(
        "gloo-timeout",
        _near(r"Timed out waiting \d+\s*ms for (recv|send) operation"),
        f"{_CPU} Timed out waiting ",
        f"{_GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
    ),
    _late(
        "gloo-closed-by-timeout",
        _near(r"Application timeout caused pair closure|Timeout waiting for"),
        f"{_CPU} Application timeout caused pair closure",
        f"{_GLOO}pair.cc:460] Application timeout caused pair closure",
    ),
    _late(
        "barrier-timeout",
        r"timed out in monitoredBarrier|failed to pass monitoredBarrier",
        f"{_CPU}  timed out in monitoredBarrier after ",
        "Rank 1 timed out in monitoredBarrier after 3000 ms.",
    ),
    _late(
        "nccl-watchdog",
        r"Watchdog caught collective operation timeout|NCCL operation timed out|ncclTimeout",
        f"{_CUDA} Watchdog caught collective operation timeout: ",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    ),
    _lost(
        "gloo-closed",
        _near(r"Connection closed by peer"),
        f"{_CPU} Connection closed by peer ",
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
        f"{_CPU} Gloo connectFullMesh failed with ",
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
        f"{_CPU} Unable to find address for",
        "[gloo/transport/tcp/device.cc:84] Unable to find address for: eth7",
    ),
    _lost(
        "store-recv",
        r"Failed to (recv|send), (got|sent) \d+ bytes|[Ff]ailed to (recv|send)\b",
        f"{_CPU} Failed to recv, got 0 bytes. Connection was likely closed.",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown",
    ),
    _lost(
        "store-connect",
        r"client socket has (timed out|failed to connect)|TCP client failed to connect",
        f"{_CPU} The client socket has timed out after {{}} while trying to connect to",
        "The client socket has timed out after 60000ms while trying to connect to (node-0, 29500).",
        _ROUTE,
    ),
    _lost(
        "store-clients",
        r"^Dist\w+: Timed out|Timed out after \d+ seconds waiting for clients"
        r"|wait timeout after \d+ms|Socket Timeout",
        f"{_CPU} wait timeout after {{}}ms, keys: {{}}",
        "wait timeout after 61000ms, keys: /default_pg/0//cpu//0/rank_1",
    ),
    _lost(
        "store-name",
        r"(getaddrinfo|c10d|host ?name).*(Name or service not known|Temporary failure in name)",
        "netdb.h EAI_AGAIN Temporary failure in name resolution",
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
        f"{_CUDA} ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ),
    Row(
        "nccl-cuda",
        r"ncclUnhandledCudaError",
        Cause.DEVICE,
        "look at the line of NCCL's log above it (NCCL_DEBUG=WARN): a call of CUDA failed there",
        f"{_CUDA} ncclUnhandledCudaError: Call to CUDA function failed.",
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
    ),
    _lost(
        "nccl-system",
        r"ncclSystemError",
        f"{_CUDA} ncclSystemError: System call (e.g. socket, malloc) or external library call",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        _ROUTE,
    ),
    _lost(
        "nccl-remote",
        r"ncclRemoteError|remote process (exited|has terminated)",
        f"{_CUDA} ncclRemoteError: A call failed possibly due to a network error or a remote",
        "NCCL error: remote process exited or there was a network error",
    ),
    Row(
        "nccl-internal",
        r"ncclInternalError",
        Cause.NODE,
        "run it with NCCL_DEBUG=INFO: NCCL's topology or its plugin does not fit the node",
        f"{_CUDA} ncclInternalError: Internal check failed.",
        "ncclInternalError: Internal check failed.",
    ),
    _lost(
        "nccl-aborted",
        r"communicator was aborted|NCCL communicator was",
        f"{_CUDA} NCCL communicator was aborted on rank ",
        "NCCL communicator was aborted on rank 1.",
    ),
    _lost(
        "nccl-other",
        r"NCCL error|nccl\w*Error|NCCL Error",
        f"{_CUDA} NCCL error: ",
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
        "torch/lib/libtorch_cpu.so Expected to have finished reduction in the prior iteration",
        example="Expected to have finished reduction in the prior iteration before starting a new",
    ),
)
"""In order: the first that recognizes an error is its row."""

SOCKETS = (
    Row(
        "peer-socket",
        ANYWHERE,
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
        ANYWHERE,
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
"""After the hubs, whose errors are of these types too."""
