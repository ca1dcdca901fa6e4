"""A C program that calls aclnnModulateBackward, in Python and line by line.

Each comment `// ...` is the line of the C program that the Python line below it replaces. Runs on
the GPU through CuPy where there is one, else on NumPy:

    python docs/examples/port_from_c.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyops
from cupyops.aclnn import (
    ACLNN_ERR_PARAM_INVALID,
    ACLNN_SUCCESS,
    aclDestroyAclOpExecutor,
    aclGetRecentErrMsg,
    aclnnModulateBackward,
    aclnnModulateBackwardGetWorkspaceSize,
    aclnnStatus,
    aclSetAclOpExecutorRepeatable,
)

Tensors = dict[str, Any]


def CHECK(status: aclnnStatus) -> None:
    """The macro of the C program: report and leave."""
    if status != ACLNN_SUCCESS:
        raise SystemExit(f"{status.name} {status.value}: {aclGetRecentErrMsg()}")


def init() -> tuple[Any, Any]:
    """The array library and the stream: CuPy if it is installed and sees a GPU, else NumPy."""
    try:
        import cupy

        cupy.cuda.Device(0).use()  # // aclrtSetDevice(0);
        stream = cupy.cuda.Stream()  # // aclrtCreateStream(&stream);
    except Exception:  # not installed, or no driver: CuPy raises several kinds of error
        return np, None
    stream.use()  # copies and allocations follow the current stream, so that all is in one order
    return cupy, stream


def synchronize(stream: Any) -> None:
    if stream is not None:  # NumPy has no streams: its results are there on return
        stream.synchronize()


def to_host(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.get()


def create_tensors(xp: Any, shape: tuple[int, int, int], seed: int) -> Tensors:
    """All tensors of a call in the order of C: four inputs, three outputs."""
    b, _, d = shape
    rng = np.random.default_rng(seed)
    host = {
        "grad_output": rng.standard_normal(shape, np.float32),
        "input": rng.standard_normal(shape, np.float32),
        "scale": rng.standard_normal((b, d), np.float32),
        "shift": rng.standard_normal((b, d), np.float32),
    }
    # // aclrtMalloc(...); aclrtMemcpy(..., ACL_MEMCPY_HOST_TO_DEVICE); aclCreateTensor(...);
    inputs = {name: xp.asarray(values) for name, values in host.items()}
    outputs = {f"grad_{name}": xp.empty_like(inputs[name]) for name in ("input", "scale", "shift")}
    return inputs | outputs


def run_once(xp: Any, stream: Any, tensors: Tensors) -> None:
    """Size, allocate, execute, wait. The executor is used up by its run."""
    # // ret = aclnnModulateBackwardGetWorkspaceSize(grad_output, input, scale, shift,
    # //     grad_input, grad_scale, grad_shift, &workspaceSize, &executor); CHECK(ret);
    status, workspace_size, executor = aclnnModulateBackwardGetWorkspaceSize(*tensors.values())
    CHECK(status)
    # // if (workspaceSize > 0) { ret = aclrtMalloc(&workspace, workspaceSize, ...); CHECK(ret); }
    workspace = xp.empty(workspace_size, np.uint8) if workspace_size > 0 else None
    # // ret = aclnnModulateBackward(workspace, workspaceSize, executor, stream); CHECK(ret);
    CHECK(aclnnModulateBackward(workspace, workspace_size, executor, stream))
    # // ret = aclrtSynchronizeStream(stream); CHECK(ret);
    synchronize(stream)


def run_repeatedly(xp: Any, stream: Any, tensors: Tensors, batches: list[Tensors]) -> None:
    """One executor for many runs: it is bound to its tensors, so new values go into those."""
    status, workspace_size, executor = aclnnModulateBackwardGetWorkspaceSize(*tensors.values())
    CHECK(status)
    # // ret = aclSetAclOpExecutorRepeatable(executor); CHECK(ret);
    CHECK(aclSetAclOpExecutorRepeatable(executor))
    workspace = xp.empty(workspace_size, np.uint8) if workspace_size > 0 else None
    for i, batch in enumerate(batches):
        for name in ("grad_output", "input", "scale", "shift"):
            tensors[name][...] = batch[name]
        CHECK(aclnnModulateBackward(workspace, workspace_size, executor, stream))
        synchronize(stream)
        compare(tensors, f"run {i + 1} of a repeatable executor")
    # // ret = aclDestroyAclOpExecutor(executor); CHECK(ret);
    CHECK(aclDestroyAclOpExecutor(executor))
    status = aclnnModulateBackward(workspace, workspace_size, executor, stream)
    expect(status, ACLNN_ERR_PARAM_INVALID)


def expect(status: aclnnStatus, expected: aclnnStatus) -> None:
    """A failure that is meant to happen."""
    if status != expected:
        raise SystemExit(f"got {status!r}, expected {expected!r}")
    print(f"{status.name} {status.value}: {aclGetRecentErrMsg()}")


def compare(tensors: Tensors, what: str) -> None:
    """The same bits as the eager function, whose default is the factor without the 1, too."""
    grads = cupyops.modulate_backward(
        tensors["input"],
        grad_output=tensors["grad_output"],
        scale=tensors["scale"],
        shift=tensors["shift"],
    )
    for name, want in grads._asdict().items():
        if to_host(tensors[name]).tobytes() != to_host(want).tobytes():
            raise SystemExit(f"{what}: {name} differs from modulate_backward")
    print(f"{what}: the bits of cupyops.modulate_backward")


def main() -> None:
    xp, stream = init()
    print(f"arrays of {xp.__name__}")

    # The values of the sample program in the documentation of the C function.
    small = create_tensors(xp, (2, 1, 1), seed=0)
    for name, values in {"grad_output": (10, 20), "input": (10, 20), "scale": (20, 30)}.items():
        small[name][...] = xp.asarray(values, dtype=np.float32).reshape(small[name].shape)
    run_once(xp, stream, small)
    for name in ("grad_input", "grad_scale", "grad_shift"):
        # // aclrtMemcpy(..., ACL_MEMCPY_DEVICE_TO_HOST);
        print(f"  {name}: {to_host(small[name]).ravel().tolist()}")

    # A scale of the wrong shape: a status, a text, no executor, and outputs as they were.
    wrong = small | {"scale": small["scale"][:1]}
    status, workspace_size, executor = aclnnModulateBackwardGetWorkspaceSize(*wrong.values())
    expect(status, ACLNN_ERR_PARAM_INVALID)
    if (workspace_size, executor) != (0, None):
        raise SystemExit("a failure has no executor")

    tensors = create_tensors(xp, (2, 256, 1152), seed=1)
    run_once(xp, stream, tensors)
    compare(tensors, "a single run")
    batches = [create_tensors(xp, (2, 256, 1152), seed) for seed in (2, 3, 4)]
    run_repeatedly(xp, stream, tensors, batches)
    # // aclDestroyTensor(...); aclrtFree(...); aclrtDestroyStream(stream); have no counterpart.


if __name__ == "__main__":
    main()
