"""Signatures of the machine: the kernel's error numbers, memory, files, processes of a data loader,
and hubs from which files are fetched.
"""

from __future__ import annotations

import errno

from kdist_trainer.causes.row import ANYWHERE, Row, user
from kdist_trainer.config.exit_codes import Cause, Fault, Rerun

_LOADER = "torch/utils/data/dataloader.py"
_PYTHON = "torch/lib/libtorch_python.so"
_CPU = "torch/lib/libtorch_cpu.so"
_DIED = (
    "find what ended the process of the data loader (its lines are above in the log): memory, "
    "/dev/shm or a signal; train.loader.workers: 0 loads in the rank itself"
)
_SHM = "raise spec.resources.shm (here /dev/shm{free}), or lower train.loader.workers"
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


def _loader(name: str, text: str, source: str, example: str, **more: object) -> Row:
    return Row(name, text, Cause.LOADER, _DIED, source, example, **more)  # type: ignore[arg-type]  # the fields of a row


def _kernel(
    name: str, numbers: set[int], cause: Cause, advice: str, source: str, **more: object
) -> Row:
    example = source.partition(" ")[2].partition(" ")[2]
    fields: dict[str, object] = {"types": ("OSError",), "errnos": frozenset(numbers), **more}
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
