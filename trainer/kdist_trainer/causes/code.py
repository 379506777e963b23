"""Signatures of errors in the user's code, in torch's words, and of processes that it starts."""

from __future__ import annotations

from kdist_trainer.causes.row import ANYWHERE, Row, user
from kdist_trainer.config.exit_codes import Cause, Rerun

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
