"""Signatures of failures on the host: `CODE` for the user's code and the processes that it starts,
`SYSTEM` for memory, disks, data loaders, and the hubs that files are fetched from.
"""

from __future__ import annotations

import errno

from kdist_trainer.causes.row import ANY_TEXT, IN_USE, NO_NAME, TORCH_CPU, TORCH_PYTHON, Row, user
from kdist_trainer.config.exit_codes import Cause, Fault, Rerun

_SHAPES = "fix the shapes at {place}"

REPLICAS_DIFFER = "replicas-differ"

CODE = (
    Row(
        "retry",
        ANY_TEXT,
        Cause.RETRY,
        "nothing: the script asked to be tried again",
        "kdist_trainer/errors.py class Retry",
        "",
        types=("Retry",),
        alike=0,
    ),
    Row(
        REPLICAS_DIFFER,
        ANY_TEXT,
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
        ANY_TEXT,
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
        ANY_TEXT,
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
        f"{TORCH_CPU} of tensors does not require grad and does not have a grad_fn",
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
        f"{TORCH_CPU} Trying to resize storage that is not resizable",
        example="Trying to resize storage that is not resizable",
        method="collate",
    ),
    user(
        "shape-product",
        r"mat1 and mat2 (shapes|must)|size mismatch, got|expected (input|weight|m1)|Given groups=",
        _SHAPES,
        f"{TORCH_CPU} mat1 and mat2 shapes cannot be multiplied",
        example="mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    ),
    user(
        "shape-match",
        r"must match the (size|existing size) of tensor|Sizes of tensors must match|is invalid for "
        r"input of size|not broadcastable|shape mismatch|Expected .*batch_size .*to match",
        _SHAPES,
        f"{TORCH_CPU} must match the size of tensor",
        example="The size of tensor a (3) must match the size of tensor b (4) at non-singleton",
        types=("RuntimeError", "ValueError"),
    ),
    user(
        "shape-index",
        r"Dimension out of range|index (\d+ )?(is )?out of (range|bounds)|too many indices"
        r"|cannot be converted to Scalar|only one element tensors",
        "fix the index at {place}",
        f"{TORCH_CPU} Dimension out of range",
        example="Dimension out of range (expected to be in range of [-2, 1], but got 2)",
        types=("RuntimeError", "IndexError", "ValueError"),
    ),
    user(
        "type-match",
        r"expected (scalar type|m1 and m2)|must have the same dtype|not implemented for '|should "
        r"be the same|can't be cast|doesn't match the desired|Found dtype|result type \w+ can't",
        "convert the tensors at {place} to one type",
        f"{TORCH_CPU} expected scalar type ",
        example="expected scalar type Float but found Double",
    ),
    user(
        "device-match",
        r"Expected all tensors to be on the same device",
        "move the tensors at {place} to one device",
        f"{TORCH_CPU} Expected all tensors to be on the same device",
        example="Expected all tensors to be on the same device, but found at least two devices",
    ),
    user(
        "gradient-twice",
        r"Trying to backward through the graph a second time|modified by an inplace operation|leaf "
        r"Variable that requires grad|requires grad is being used in an in-place|unused in the "
        r"graph",
        "fix the use of the graph at {place}",
        f"{TORCH_CPU} Trying to backward through the graph a second time",
        example="Trying to backward through the graph a second time (or directly access saved",
    ),
    user(
        "state-dict",
        r"Error\(s\) in loading state_dict",
        "load a state that is of this model at {place}",
        "torch/nn/modules/module.py Error(s) in loading state_dict for",
        example="Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: 'a'",
        types=("RuntimeError",),
    ),
    user(
        "weights-only",
        r"Weights only load failed",
        "if you trust the file, call torch.load with weights_only=False at {place}, or set "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in env: it contains more than tensors, which "
        "torch >= 2.6 does not load by default",
        "torch/serialization.py Weights only load failed",
        example="Weights only load failed. This file can still be loaded, to do so you have two",
        types=("UnpicklingError",),
    ),
)
"""In order: the first row that matches an error applies."""


_LOADER = "torch/utils/data/dataloader.py"
_DIED = (
    "find what ended the process of the data loader (its lines are above in the log): memory, "
    "/dev/shm or a signal; train.loader.workers: 0 loads in the rank itself"
)
SHARED_MEMORY = (
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
"""Parts of the paths of packages that fetch files from hubs."""
HUB_HOSTS = (
    r"huggingface\.co|hf\.co|pytorch\.org|amazonaws\.com|googleapis\.com|github(usercontent)?"
)
_OWN_FILE = "correct the path or the rights of {path}"


def _loader(name: str, text: str, source: str, example: str, **overrides: object) -> Row:
    return Row(name, text, Cause.LOADER, _DIED, source, example, **overrides)  # type: ignore[arg-type]  # the fields of a row


def _kernel(
    name: str, numbers: set[int], cause: Cause, advice: str, source: str, **overrides: object
) -> Row:
    example = source.partition(" ")[2].partition(" ")[2]  # a source is "errno.h ENAME TEXT"
    fields: dict[str, object] = {"types": ("OSError",), "errnos": frozenset(numbers), **overrides}
    return Row(name, ANY_TEXT, cause, advice, source, example, **fields)  # type: ignore[arg-type]  # the fields of a row


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
        f"{TORCH_PYTHON} DataLoader worker (pid {{}}) is killed by signal: {{}}. ",
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
        SHARED_MEMORY,
        f"{TORCH_PYTHON} This might be caused by insufficient shared memory (shm).",
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared "
        "memory (shm).",
        fault=Fault.USER,
    ),
    Row(
        "shm-full",
        r"unable to (allocate shared memory|open shared memory object|resize file|mmap \d+ bytes)"
        r"|Couldn't allocate shared memory segment|No space left on device: '/(dev/shm|psm_)",
        Cause.STORAGE,
        SHARED_MEMORY,
        f"{TORCH_CPU} unable to allocate shared memory(shm) for file <",
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
        ANY_TEXT,
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
        IN_USE,
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
        NO_NAME,
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
        f"{TORCH_CPU} PytorchStreamReader failed",
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
        ANY_TEXT,
        _OWN_FILE,
        "errno.h ENOENT No such file or directory",
        example="No such file or directory",
        types=("FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "FileExistsError"),
        only_users=True,
    ),
    user(
        "file-denied",
        ANY_TEXT,
        _OWN_FILE,
        "errno.h EACCES Permission denied",
        example="Permission denied",
        types=("PermissionError",),
        only_users=True,
    ),
)
"""In order: the first row that matches an error applies."""
