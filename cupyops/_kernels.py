"""Kernels on a GPU: sources, compilation through ``cupy.RawModule``, and launches.

The only user of CuPy's compiler. CuPy is imported here only once arrays or plans of CuPy are at
hand; nothing of it is touched for NumPy arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from cupyops._arrays import CUDA_DEVICE, EXTRAS, import_cupy, require_device
from cupyops._checks import a_type, fail
from cupyops._launch import Kernel, Launch

if TYPE_CHECKING:
    from pathlib import Path

COMMON = "common.cuh"
OPTIONS = ("--std=c++17", "-fmad=false", "-lineinfo")
"""Besides these CuPy passes ``-arch`` and, always and last, ``-ftz=true``."""
DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that needs no permission."""


def source_directory() -> Path:
    """The directory of the ``.cu`` files: inside an installed package, beside it in a checkout."""
    from pathlib import Path  # late: NumPy users never need it, and it costs a tenth of our import

    package = Path(__file__).parent
    for directory in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (directory / COMMON).is_file():
            return directory
    raise FileNotFoundError(
        f"cupyops: the kernel sources are not in {package / 'kernels_cu'}, nor beside the package; "
        "the installation is incomplete, reinstall cupyops"
    )


@cache
def source_text(source: str) -> str:
    """A ``.cu`` file with the common header in front, and line markers for readable errors.

    CuPy's cache of compiled kernels is keyed by this text; it would not see a changed file behind
    an ``#include``.
    """
    directory = source_directory()
    return "".join(
        f'#line 1 "{name}"\n{(directory / name).read_text(encoding="utf-8")}\n'
        for name in (COMMON, source)
    )


def kernels_of(launches: tuple[Launch, ...]) -> list[tuple[Kernel, int]]:
    """Every kernel that a plan may launch, in both forms, with its dynamic shared memory."""
    forms = [form for launch in launches for form in (launch, launch.scalar) if form is not None]
    return [(form.kernel, form.shared_bytes) for form in forms]


class CupyExecutor:
    """Carries out plans of CuPy arrays."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, Kernel], Any] = {}
        self._lock = threading.Lock()

    def prepare(self, launches: tuple[Launch, ...], device: str) -> None:
        """Compile and load, so that a run only launches and can be captured into a CUDA graph."""
        needed = kernels_of(launches)
        require_device(_number(device))
        with self._lock, self.context(device, None):
            by_source: dict[str, list[Kernel]] = {}
            for kernel, _ in needed:
                names = by_source.setdefault(kernel.source, [])
                if (device, kernel) not in self._functions and kernel not in names:
                    names.append(kernel)
            for source, kernels in by_source.items():
                for kernel, function in _compile(source, kernels):
                    self._functions[device, kernel] = function
            for kernel, shared_bytes in needed:
                function = self._functions[device, kernel]
                # Asking for the attribute also loads the function, which must not wait for a launch
                # under graph capture. A launch beyond the default fails without permission, which
                # is given per device; no kernel asks for so much today.
                if shared_bytes > max(DEFAULT_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
                    function.max_dynamic_shared_size_bytes = shared_bytes

    def check_stream(self, function: str, stream: Any, device: str) -> None:
        if stream is None:
            return
        cupy = import_cupy()
        # The older class for foreign streams is deprecated, and will be gone one day.
        external = getattr(cupy.cuda, "ExternalStream", cupy.cuda.Stream)
        if not isinstance(stream, cupy.cuda.Stream | external):
            fail(TypeError, function, "stream", f"is {a_type(stream)}", "a cupy.cuda.Stream")
        # The null streams belong to no device (-1); an external one may not say.
        if stream.device_id not in (None, -1, _number(device)):
            got = f"belongs to device {CUDA_DEVICE}{stream.device_id}"
            fail(ValueError, function, "stream", got, f"a stream of {device}")

    def context(self, device: str, stream: Any) -> AbstractContextManager[Any]:
        return _Current(_number(device), stream)

    def launch(
        self,
        launches: tuple[Launch, ...],
        addresses: Mapping[str, int],
        workspace: int,
        device: str,
        stream: Any,
    ) -> None:
        for planned in launches:
            launch = planned.for_addresses(addresses)
            # Plain typed scalars: CuPy would pass any other number as a double or an int64.
            self._functions[device, launch.kernel](
                launch.grid,
                launch.block,
                launch.bind(addresses, workspace),
                shared_mem=launch.shared_bytes,
                stream=stream,
            )


class _Current:
    """Makes a device and a stream current, and on leaving what was current before."""

    # Not `with Device` and `with stream`: on leaving, those restore what an enclosing `with` had
    # set, and so would undo a `use()` of the caller. Nor a generator, which costs each run more
    # than all of this.

    __slots__ = ("_before", "_device", "_outer", "_runtime", "_stream")

    def __init__(self, device: int, stream: Any) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        cupy = import_cupy()
        self._runtime = cupy.cuda.runtime
        self._outer = self._runtime.getDevice()
        if self._outer != self._device:
            self._runtime.setDevice(self._device)
        if self._stream is not None:
            try:
                self._before = cupy.cuda.get_current_stream()
                self._stream.use()  # CuPy allocates from the pool of the current stream
            except BaseException:
                self._leave_device()
                raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._stream is not None:
                self._before.use()
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        if self._outer != self._device:
            self._runtime.setDevice(self._outer)


@cache
def _number(device: str) -> int:
    return int(device.removeprefix(CUDA_DEVICE))


def _compile(source: str, kernels: list[Kernel]) -> Iterator[tuple[Kernel, Any]]:
    """Compile instances of one source file for the current device and load them."""
    if not kernels:
        return
    cupy = import_cupy()
    names = tuple(kernel.name for kernel in kernels)
    module = cupy.RawModule(code=source_text(source), options=OPTIONS, name_expressions=names)
    try:
        for kernel in kernels:
            # A RawKernel finds its function anew on every look-up: keep it.
            yield kernel, module.get_function(kernel.name)
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(
            f"cupyops: {source} does not compile for this device\n{error}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # which one, depends on CuPy's version
        raise RuntimeError(
            f"cupyops: {source} could not be compiled and loaded: {error}; if the CUDA compiler "
            f"library (NVRTC) or the CUDA headers are missing, {EXTRAS}"
        ) from error
