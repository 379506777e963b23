"""Signatures of GPU failures: the CUDA runtime's error numbers with their texts, and the messages
of torch, cuBLAS, cuDNN, cuFFT, NVML and the driver.
"""

from __future__ import annotations

from kdist_trainer.causes.advice import LOWER_GPU_MEMORY
from kdist_trainer.causes.row import TORCH_CUDA, Row, user
from kdist_trainer.config.exit_codes import Cause, Fault, Rerun

_HEADER = "nvidia/cu13/include/driver_types.h"
_TORCH = "torch/lib/libc10_cuda.so"
_BLOCKING = (
    "run it again with CUDA_LAUNCH_BLOCKING=1: kernels report late, so the line of the traceback "
    "is not to be trusted"
)
_GPU = (
    "the GPU failed: if it does so again on the same node, take that node out of use and look for "
    "Xid in its kernel log"
)
_DRIVER = "repair the node's driver or its container toolkit, or give the job other nodes"
_WHEEL = "install a torch that is built for this GPU and this driver (the image's CUDA version)"
_MPS = "look at the MPS daemon of the node, or give the job nodes without MPS"
_CAPTURE = "fix the capture of the CUDA graph: what it records must not wait for the GPU"


def _of(number: int, text: str, enumerator: str, line: int, **fields: object) -> dict[str, object]:
    return {
        "text": rf"CUDA error: {text}",
        "example": f"CUDA error: {text}",
        "device_codes": frozenset({number}),
        "source": f"{_HEADER}:{line} {enumerator}",
        **fields,
    }


def _row(name: str, cause: Cause, advice: str, fields: dict[str, object]) -> Row:
    return Row(name=name, cause=cause, advice=advice, **fields)  # type: ignore[arg-type]  # the fields of a row


def _device(
    name: str, number: int, text: str, enumerator: str, line: int, **overrides: object
) -> Row:
    return _row(name, Cause.DEVICE, _GPU, _of(number, text, enumerator, line, **overrides))


def _late(name: str, number: int, text: str, enumerator: str, line: int) -> Row:
    """A fault of the GPU, or of a kernel, perhaps the user's: a second equal one ends the run."""
    overrides = {"alike": 2, "rerun": Rerun.BLOCKING, "fault": Fault.DEVICE}
    return _row(name, Cause.DEVICE, _BLOCKING, _of(number, text, enumerator, line, **overrides))


def _node(
    name: str, number: int, text: str, enumerator: str, line: int, **overrides: object
) -> Row:
    return _row(name, Cause.NODE, _DRIVER, _of(number, text, enumerator, line, **overrides))


def _mps(name: str, number: int, text: str, enumerator: str, line: int) -> Row:
    return _row(name, Cause.NODE, _MPS, _of(number, text, enumerator, line))


def _own(name: str, advice: str, fields: dict[str, object]) -> Row:
    return user(name, advice=advice, **fields)  # type: ignore[arg-type]  # the fields of a row


_LOWER = f"{LOWER_GPU_MEMORY}; {{peak}}"

NUMBERED = (
    Row(
        "cuda-out-of-memory",
        r"^OutOfMemoryError\b|CUDA out of memory|HIP out of memory|CUDA error: out of memory",
        Cause.OOM_DEVICE,
        _LOWER,
        f"{_TORCH} CUDA out of memory. Tried to allocate",
        example="CUDA out of memory. Tried to allocate 20.00 MiB",
        device_codes=frozenset({2}),
        rerun=Rerun.FIXED,
    ),
    _node("cuda-initialization", 3, "initialization error", "cudaErrorInitializationError", 217),
    _device("cuda-unloading", 4, "driver shutting down", "cudaErrorCudartUnloading", 224),
    _node("cuda-stub", 34, "CUDA driver is a stub library", "cudaErrorStubLibrary", 399),
    _node(
        "cuda-old-driver",
        35,
        "CUDA driver version is insufficient for CUDA runtime version",
        "cudaErrorInsufficientDriver",
        406,
    ),
    _node(
        "cuda-newer-driver",
        36,
        "API call is not supported in the installed CUDA driver",
        "cudaErrorCallRequiresNewerDriver",
        413,
    ),
    _row(
        "cuda-busy",
        Cause.DEVICE,
        "another process holds the GPU, or it has fallen off the bus: look at nvidia-smi there",
        {
            **_of(46, "", "cudaErrorDevicesUnavailable", 447),
            "text": r"CUDA error: (all )?CUDA-capable device\(s\) is/are busy or unavailable",
            "example": "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        },
    ),
    _device(
        "cuda-prior-launch",
        53,
        "unspecified launch failure in prior launch",
        "cudaErrorPriorLaunchFailure",
        475,
    ),
    _own(
        "cuda-device-function",
        _WHEEL,
        _of(98, "invalid device function", "cudaErrorInvalidDeviceFunction", 531),
    ),
    _node("cuda-no-device", 100, "no CUDA-capable device is detected", "cudaErrorNoDevice", 537),
    _own(
        "cuda-device-ordinal",
        "the node has fewer GPUs than ranks: lower spec.procsPerNode, or use "
        "`cuda:$LOCAL_RANK` and ask for as many GPUs as ranks",
        _of(101, "invalid device ordinal", "cudaErrorInvalidDevice", 544),
    ),
    _node(
        "cuda-licence",
        102,
        "device doesn't have valid Grid license",
        "cudaErrorDeviceNotLicensed",
        549,
    ),
    _device(
        "cuda-integrity",
        103,
        "integrity checks failed",
        "cudaErrorSoftwareValidityNotEstablished",
        558,
    ),
    _node("cuda-startup", 127, "startup failure in cuda runtime", "cudaErrorStartupFailure", 563),
    _own(
        "cuda-no-kernel-image",
        _WHEEL,
        _of(
            209,
            "no kernel image is available for execution on the device",
            "cudaErrorNoKernelImageForDevice",
            607,
        ),
    ),
    _device(
        "cuda-ecc",
        214,
        "uncorrectable ECC error encountered",
        "cudaErrorECCUncorrectable",
        635,
        of_machine=True,
    ),
    _node(
        "cuda-exclusive",
        216,
        "exclusive-thread device already in use by a different thread",
        "cudaErrorDeviceAlreadyInUse",
        647,
    ),
    _node(
        "cuda-peer-access",
        217,
        "peer access is not supported between these two devices",
        "cudaErrorPeerAccessUnsupported",
        653,
    ),
    _device(
        "cuda-nvlink",
        220,
        "uncorrectable NVLink error detected during the execution",
        "cudaErrorNvlinkUncorrectable",
        670,
        of_machine=True,
    ),
    _node(
        "cuda-ptx-version",
        222,
        "the provided PTX was compiled with an unsupported toolchain.",
        "cudaErrorUnsupportedPtxVersion",
        684,
    ),
    _device(
        "cuda-contained",
        226,
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "cudaErrorContained",
        713,
        of_machine=True,
    ),
    _node(
        "cuda-os-call",
        304,
        "OS call failed or operation not supported on this OS",
        "cudaErrorOperatingSystem",
        738,
    ),
    _late(
        "cuda-illegal-access",
        700,
        "an illegal memory access was encountered",
        "cudaErrorIllegalAddress",
        782,
    ),
    _own(
        "cuda-launch-resources",
        "lower the threads or the registers that the kernel asks for",
        _of(701, "too many resources requested for launch", "cudaErrorLaunchOutOfResources", 791),
    ),
    _device(
        "cuda-launch-timeout",
        702,
        "the launch timed out and was terminated",
        "cudaErrorLaunchTimeout",
        802,
    ),
    _device(
        "cuda-context", 709, "context is destroyed", "cudaErrorContextIsDestroyed", 842, alike=2
    ),
    _own(
        "cuda-assert",
        f"an index or a label is out of range, in most cases: {_BLOCKING}",
        {
            **_of(710, "device-side assert triggered", "cudaErrorAssert", 849),
            "rerun": Rerun.BLOCKING,
        },
    ),
    _device("cuda-stack", 714, "hardware stack error", "cudaErrorHardwareStackError", 877),
    _late(
        "cuda-illegal-instruction",
        715,
        "an illegal instruction was encountered",
        "cudaErrorIllegalInstruction",
        885,
    ),
    _late("cuda-misaligned", 716, "misaligned address", "cudaErrorMisalignedAddress", 894),
    _late(
        "cuda-address-space",
        717,
        "operation not supported on global/shared address space",
        "cudaErrorInvalidAddressSpace",
        905,
    ),
    _late("cuda-program-counter", 718, "invalid program counter", "cudaErrorInvalidPc", 913),
    _late("cuda-launch-failure", 719, "unspecified launch failure", "cudaErrorLaunchFailure", 924),
    _node("cuda-not-permitted", 800, "operation not permitted$", "cudaErrorNotPermitted", 946),
    _node(  # its fabric manager does not run
        "cuda-system",
        802,
        "system not yet initialized",
        "cudaErrorSystemNotReady",
        961,
        of_machine=True,
    ),
    _node(
        "cuda-driver-mismatch",
        803,
        "system has unsupported display driver / cuda driver combination",
        "cudaErrorSystemDriverMismatch",
        968,
    ),
    _node(
        "cuda-compatibility",
        804,
        "forward compatibility was attempted on non supported HW",
        "cudaErrorCompatNotSupportedOnDevice",
        977,
    ),
    _mps(
        "cuda-mps-connection",
        805,
        "MPS client failed to connect to the MPS control daemon or the MPS server",
        "cudaErrorMpsConnectionFailed",
        982,
    ),
    _mps(
        "cuda-mps-call",
        806,
        "the remote procedural call between the MPS server and the MPS client failed",
        "cudaErrorMpsRpcFailure",
        987,
    ),
    _mps(
        "cuda-mps-not-ready",
        807,
        "MPS server is not ready to accept new MPS client requests",
        "cudaErrorMpsServerNotReady",
        993,
    ),
    _mps(
        "cuda-mps-terminated",
        810,
        "the MPS client has been terminated by the server",
        "cudaErrorMpsClientTerminated",
        1008,
    ),
    _own(
        "cuda-capture",
        _CAPTURE,
        _of(
            900,
            "operation not permitted when stream is capturing",
            "cudaErrorStreamCaptureUnsupported",
            1023,
        ),
    ),
    _own(
        "cuda-capture-invalidated",
        _CAPTURE,
        _of(
            901,
            "operation failed due to a previous error during capture",
            "cudaErrorStreamCaptureInvalidated",
            1029,
        ),
    ),
    _device("cuda-unknown", 999, "unknown error", "cudaErrorUnknown", 1132),
)


def _node_message(name: str, text: str, source: str, example: str) -> Row:
    return Row(name, text, Cause.NODE, _DRIVER, source, example)


def _device_message(name: str, text: str, source: str, example: str, **overrides: object) -> Row:
    return Row(name, text, Cause.DEVICE, _GPU, source, example, **overrides)  # type: ignore[arg-type]  # the fields of a row


WORDED = (
    _node_message(
        "no-driver",
        r"Found no NVIDIA driver",
        f"{_TORCH} Found no NVIDIA driver on your system",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    ),
    _node_message(
        "no-gpu",
        r"No CUDA GPUs are available|No HIP GPUs are available",
        f"{_TORCH} No CUDA GPUs are available",
        "No CUDA GPUs are available",
    ),
    _node_message(
        "old-driver",
        r"The NVIDIA driver on your system is too old",
        f"{_TORCH} The NVIDIA driver on your system is too old",
        "The NVIDIA driver on your system is too old (found version 11040)",
    ),
    _node_message(
        "driver-initialization",
        r"CUDA driver initialization failed",
        f"{_TORCH} CUDA driver initialization failed, you might not have a CUDA gpu.",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
    ),
    _node_message(
        "nvml-mismatch",
        r"Driver/library version mismatch",
        "NVML nvml.h NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        "NVML: Driver/library version mismatch",
    ),
    _device_message(
        "nvml-lost",
        r"GPU is lost|GPU has fallen off the bus|GPU_IS_LOST",
        "NVML nvml.h NVML_ERROR_GPU_IS_LOST",
        "NVML: GPU is lost",
        of_machine=True,
    ),
    _device_message(
        "xid",  # but those that NVIDIA's device plugin takes for errors of the program
        r"\bXid\b(?: \([^)]*\):)?(?:(?!GPU)[^\d(]){0,10}\b(?!(?:13|31|43|45|68|109)\b)\d+",
        "the kernel log of the NVIDIA driver, NVRM: Xid",
        "NVRM: Xid 79",
        of_machine=True,
    ),
    Row(
        "xid-program",
        r"\bXid\b",
        Cause.DEVICE,
        _BLOCKING,
        "the kernel log of the NVIDIA driver, NVRM: Xid",
        "NVRM: Xid (PCI:0000:cb:00): 31, pid=71, name=python, Ch 00000008",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    _device_message(
        "cuda-driver",
        r"CUDA driver error:",
        f"{_TORCH} CUDA driver error: ",
        "CUDA driver error: unknown error",
        alike=2,
    ),
    user(
        "cuda-fork",
        r"Cannot re-initialize CUDA in forked subprocess",
        "start processes that use the GPU by spawn: mp.set_start_method('spawn')",
        "torch/cuda/__init__.py:605 Cannot re-initialize CUDA in forked subprocess",
        example="Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing",
    ),
    user(
        "no-cuda-build",
        r"Torch not compiled with CUDA enabled",
        "install a torch that is built with CUDA, or run the script without .cuda()",
        "torch/cuda/__init__.py:609 Torch not compiled with CUDA enabled",
        example="Torch not compiled with CUDA enabled",
        types=("AssertionError", "RuntimeError"),
    ),
    user(
        "gpu-out-of-range",
        r"GPU device may be out of range, do you have enough GPUs",
        "the node has fewer GPUs than ranks: lower spec.procsPerNode or ask for more GPUs",
        f"{_TORCH} GPU device may be out of range, do you have eno",
        example="GPU device may be out of range, do you have enough GPUs?",
    ),
    Row(
        "cublas-memory",
        r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED",
        Cause.OOM_DEVICE,
        "lower the batch of one pass: a library of CUDA found no memory for its workspace; {peak}",
        f"{TORCH_CUDA} CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        rerun=Rerun.FIXED,
    ),
    Row(
        "cublas-execution",
        r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
        Cause.DEVICE,
        _BLOCKING,
        f"{TORCH_CUDA} CUBLAS_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    Row(
        "cudnn-execution",
        r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
        Cause.DEVICE,
        _BLOCKING,
        f"{TORCH_CUDA} cuDNN error: ",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    Row(
        "cufft-execution",
        r"cuFFT error: CUFFT_(EXEC_FAILED|INTERNAL_ERROR|SETUP_FAILED)",
        Cause.DEVICE,
        _BLOCKING,
        "ATen/cuda/CUFFTUtils.h cuFFT error: ",
        "cuFFT error: CUFFT_EXEC_FAILED",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    user(
        "cublas-usage",
        r"CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH)|CUDNN_STATUS_(BAD_PARAM|NOT_"
        r"SUPPORTED)",
        "fix the shapes, strides or types at {place}: the library does not support them",
        f"{TORCH_CUDA} CUBLAS_STATUS_INVALID_VALUE",
        example="CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle)`",
    ),
    Row(
        "cuda-unlisted",
        r"CUDA error:|^AcceleratorError",
        Cause.UNKNOWN,
        _BLOCKING,
        f"{_TORCH} CUDA kernel errors might be asynchronously reported",
        "CUDA error: a number that this table does not have",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
)
"""In order: the last row matches every CUDA error that no other row matches."""
