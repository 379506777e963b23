"""Signatures of GPUs in words: torch's own checks, cuBLAS, cuDNN, cuFFT, NVML and the driver."""

from __future__ import annotations

from kdist_trainer.causes.row import Row, user
from kdist_trainer.config.exit_codes import Cause, Rerun

_TORCH = "torch/lib/libc10_cuda.so"
_CUDA = "torch/lib/libtorch_cuda.so"
_GPU = (
    "the GPU failed: if it does so again on the same node, take that node out of use and look for "
    "Xid in its kernel log"
)
_DRIVER = "repair the node's driver or its container toolkit, or give the job other nodes"
_LATE = (
    "run it again with CUDA_LAUNCH_BLOCKING=1: kernels report late, so the line of the traceback "
    "is not to be trusted"
)


def _node_in_words(name: str, text: str, source: str, example: str) -> Row:
    return Row(name, text, Cause.NODE, _DRIVER, source, example)


def _device_in_words(name: str, text: str, source: str, example: str, **more: object) -> Row:
    return Row(name, text, Cause.DEVICE, _GPU, source, example, **more)  # type: ignore[arg-type]  # the fields of a row


WORDED = (
    _node_in_words(
        "no-driver",
        r"Found no NVIDIA driver",
        f"{_TORCH} Found no NVIDIA driver on your system",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    ),
    _node_in_words(
        "no-gpu",
        r"No CUDA GPUs are available|No HIP GPUs are available",
        f"{_TORCH} No CUDA GPUs are available",
        "No CUDA GPUs are available",
    ),
    _node_in_words(
        "old-driver",
        r"The NVIDIA driver on your system is too old",
        f"{_TORCH} The NVIDIA driver on your system is too old",
        "The NVIDIA driver on your system is too old (found version 11040)",
    ),
    _node_in_words(
        "driver-initialization",
        r"CUDA driver initialization failed",
        f"{_TORCH} CUDA driver initialization failed, you might not have a CUDA gpu.",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
    ),
    _node_in_words(
        "nvml-mismatch",
        r"Driver/library version mismatch",
        "NVML nvml.h NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        "NVML: Driver/library version mismatch",
    ),
    _device_in_words(
        "nvml-lost",
        r"GPU is lost|GPU has fallen off the bus|GPU_IS_LOST",
        "NVML nvml.h NVML_ERROR_GPU_IS_LOST",
        "NVML: GPU is lost",
    ),
    _device_in_words("xid", r"\bXid\b", "the kernel log of the NVIDIA driver, NVRM: Xid", "NVRM: Xid 79"),
    _device_in_words(
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
        f"{_CUDA} CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        rerun=Rerun.FIXED,
    ),
    Row(
        "cublas-execution",
        r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
        Cause.DEVICE,
        _LATE,
        f"{_CUDA} CUBLAS_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    Row(
        "cudnn-execution",
        r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
        Cause.DEVICE,
        _LATE,
        f"{_CUDA} cuDNN error: ",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
    Row(
        "cufft-execution",
        r"cuFFT error: CUFFT_(EXEC_FAILED|INTERNAL_ERROR|SETUP_FAILED)",
        Cause.DEVICE,
        _LATE,
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
        f"{_CUDA} CUBLAS_STATUS_INVALID_VALUE",
        example="CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle)`",
    ),
    Row(
        "cuda-unlisted",
        r"CUDA error:|^AcceleratorError",
        Cause.UNKNOWN,
        _LATE,
        f"{_TORCH} CUDA kernel errors might be asynchronously reported",
        "CUDA error: a number that this table does not have",
        alike=2,
        rerun=Rerun.BLOCKING,
    ),
)
"""In order: the last one takes what no other row recognizes."""
