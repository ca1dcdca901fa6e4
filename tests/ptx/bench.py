"""Planted faults: the kernels of ``planted.cu`` and a short way to launch them in tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import memory, nvrtc
from .abi import Kind
from .errors import LaunchError
from .executor import Executor, Report
from .memory import Memory, Pointer
from .module import Module

OPTIONS = ("--std=c++17", "-fmad=false", "-lineinfo", "-ftz=true")
TARGETS = (75, 90)


@functools.cache
def module(arch: int) -> Module:
    """Compile ``planted.cu`` for a virtual architecture."""
    source = (Path(__file__).parent / "planted.cu").read_text()
    options = [*OPTIONS, f"-arch=compute_{arch}"]
    return Module(nvrtc.compile_ptx(source, options, filename="planted.cu").ptx)


class Bench:
    """One memory and a short way to launch."""

    def __init__(self, planted: Module, checks: Any = "all", order: str = "forward") -> None:
        self.module, self.memory = planted, Memory()
        self.executor = Executor(self.memory, checks=checks, order=order, seed=3)

    def input(
        self, values: Any, name: str = "x", dtype: Any = np.float32, **keywords: Any
    ) -> Pointer:
        array = memory.copy(np.asarray(values, dtype))
        return self.memory.register(array, name, readonly=True, **keywords)

    def output(self, shape: Any, name: str = "y", dtype: Any = np.float32) -> Pointer:
        self.array = memory.empty(shape, dtype)
        return self.memory.register(self.array, name, poison=True)

    def run(
        self, kernel: str, *args: Any, grid: int = 1, block: int = 64, **keywords: Any
    ) -> Report:
        return self.executor.launch(
            self.module, kernel, grid=(grid,), block=(block,), args=args, **keywords
        )

    def fails(self, kind: Kind, kernel: str, *args: Any, **keywords: Any) -> str:
        with pytest.raises(LaunchError) as caught:
            self.run(kernel, *args, **keywords)
        assert caught.value.kind == kind, str(caught.value)
        return str(caught.value)
