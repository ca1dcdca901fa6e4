"""Run the PTX of CUDA kernels on the CPU: test equipment for machines without a GPU.

``nvrtc`` makes PTX, ``Module`` holds it, ``Memory`` registers NumPy arrays as device memory and
``Executor`` launches, plainly or under memcheck, initcheck, racecheck and a traffic
counter. Nothing here knows any particular kernel.
"""

from . import build, memory, model, nvrtc, reference
from .abi import Kind
from .arguments import ArgumentError
from .errors import LaunchError
from .executor import ALL_CHECKS, Executor, Report, Traffic
from .memory import Memory, NeverWrittenError, Pointer
from .module import Module
from .parse import PtxError

__all__ = [
    "ALL_CHECKS",
    "ArgumentError",
    "Executor",
    "Kind",
    "LaunchError",
    "Memory",
    "Module",
    "NeverWrittenError",
    "Pointer",
    "PtxError",
    "Report",
    "Traffic",
    "build",
    "memory",
    "model",
    "nvrtc",
    "reference",
]
