"""Compile CUDA source text to PTX and to cubin with NVRTC; no driver and no GPU needed.

Only the public binding ``cuda.bindings.nvrtc`` is used. Both it and the NVRTC wheel are part of
the ``test`` extra.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HOW_TO_INSTALL = (
    "NVRTC is not available: install the extra 'test' "
    "(pip install 'cupyops[test]', which brings cuda-bindings and nvidia-cuda-nvrtc)"
)


class CompileError(RuntimeError):
    """NVRTC or ptxas refused the source; the message holds its log."""


@dataclass(frozen=True)
class PtxResult:
    """PTX text, the compiler's log and the lowered name of every name expression."""

    ptx: str
    log: str
    lowered: dict[str, str]


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel, in registers and in bytes per thread or block."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclass(frozen=True)
class CubinResult:
    """The machine code, the compiler's log and the resources of each kernel by lowered name."""

    cubin: bytes
    log: str
    lowered: dict[str, str]
    resources: dict[str, Resources]


def _binding() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped]
    except ImportError as error:
        raise RuntimeError(HOW_TO_INSTALL) from error
    return nvrtc


def _call(function: Any, *arguments: Any) -> Any:
    """Call the binding and turn a status into an exception."""
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:  # the binding is there, the library it loads is not
        raise RuntimeError(HOW_TO_INSTALL) from error
    if status != type(status).NVRTC_SUCCESS:
        raise CompileError(f"{function.__name__}: {status.name}")
    return values[0] if len(values) == 1 else values


def _text(nvrtc: Any, program: Any, what: str) -> bytes:
    size = _call(getattr(nvrtc, f"nvrtcGet{what}Size"), program)
    # The binding writes into a bytes object. One byte longer than needed, so that it is never one
    # of the single-byte objects that the interpreter shares.
    buffer = bytes(size + 1)
    _call(getattr(nvrtc, f"nvrtcGet{what}"), program, buffer)
    return buffer[:size]


def version() -> tuple[int, int]:
    """Return NVRTC's version, for example (13, 0)."""
    nvrtc = _binding()
    major, minor = _call(nvrtc.nvrtcVersion)
    return int(major), int(minor)


def _compile(
    source: str, options: Sequence[str], names: Sequence[str], filename: str, what: str
) -> tuple[bytes, str, dict[str, str]]:
    nvrtc = _binding()
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), filename.encode(), 0, [], [])
    try:
        for name in names:
            _call(nvrtc.nvrtcAddNameExpression, program, name.encode())
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != type(status).NVRTC_SUCCESS:
            raise CompileError(f"{filename}: {status.name}\n{log}")
        lowered = {
            name: _call(nvrtc.nvrtcGetLoweredName, program, name.encode()).decode()
            for name in names
        }
        return _text(nvrtc, program, what), log, lowered
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_ptx(
    source: str,
    options: Sequence[str],
    names: Sequence[str] = (),
    *,
    filename: str = "kernel.cu",
) -> PtxResult:
    """Compile to PTX; *options* must name a virtual architecture (``-arch=compute_75``).

    *names* are name expressions (``"rows<float, 4>"``); their lowered names come back by key.
    """
    code, log, lowered = _compile(source, options, names, filename, "PTX")
    return PtxResult(code.rstrip(b"\0").decode(), log, lowered)


def compile_cubin(
    source: str,
    options: Sequence[str],
    names: Sequence[str] = (),
    *,
    filename: str = "kernel.cu",
) -> CubinResult:
    """Compile to machine code for a real architecture (``-arch=sm_90``) and read ptxas's report."""
    options = [*options, "--ptxas-options=-v"]
    code, log, lowered = _compile(source, options, names, filename, "CUBIN")
    return CubinResult(code, log, lowered, parse_resources(log))


_FUNCTION = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$]+)'?")
_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "static_shared": re.compile(r"(\d+) bytes smem"),
}


def parse_resources(log: str) -> dict[str, Resources]:
    """Read registers, spills, stack and static shared memory per kernel from a verbose log."""
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            current = found.setdefault(match.group(1), dict.fromkeys(_FIELDS, 0))
        for field, pattern in _FIELDS.items():
            if match := pattern.search(line):
                current[field] = int(match.group(1))
    # Every kernel uses at least one register: an entry without any is not a kernel's report.
    return {name: Resources(**fields) for name, fields in found.items() if fields["registers"]}
