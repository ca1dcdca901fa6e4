"""Compile C++ with g++ into shared libraries, cached by content.

The key is a hash of the source, of the runtime's files, of the flags and of the compiler's
version, so nothing ever has to be invalidated. Files appear by an atomic rename: several test
processes may build the same kernel at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
CACHE_VARIABLE = "CUPYOPS_PTX_CACHE"

# -ffp-contract=off: a multiplication and an addition are never fused; the arithmetic is IEEE's.
COMMON = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
)
# A kernel runs on a fibre's stack of 256 KiB.
FRAME_LIMIT = "-Werror=frame-larger-than=131072"
# Without it a fused multiply-add is a slow call of the C library; the bits are the same.
FUSED = ("-mfma", "-msse4.1")
MODES = {
    "plain": ("-O2", FRAME_LIMIT),
    "checked": ("-O1", "-DPTX_CHECKED", FRAME_LIMIT),
    "runtime": ("-O2", "-Wall", "-Wextra"),
}


class BuildError(RuntimeError):
    """g++ is missing or refused the generated text."""


def cache_directory() -> Path:
    """Return the directory of compiled kernels: $CUPYOPS_PTX_CACHE, or one beside the tests."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    beside = RUNTIME.parent.parent / ".ptx_cache"
    if os.access(beside.parent, os.W_OK):
        return beside
    return Path(tempfile.gettempdir()) / f"ptx_cache_{os.getuid()}"


@functools.cache
def compiler() -> tuple[str, str]:
    """Return the path of g++ and its identity."""
    path = shutil.which("g++")
    if path is None:
        raise BuildError("g++ not found; the kernels' tests need it: apt-get install g++")
    flags = ("-dumpfullversion", "-dumpmachine")
    words = [subprocess.check_output([path, flag], text=True).strip() for flag in flags]
    return path, " ".join(words)


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Let g++ use the instructions for fma and rounding where this machine has them."""
    try:
        features = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return FUSED if {"fma", "sse4_1"} <= features else ()


@functools.cache
def _runtime_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(RUNTIME.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def build(source: str, mode: str) -> Path:
    """Compile *source* in one of MODES and return the library's path."""
    path, identity = compiler()
    flags = (*MODES[mode], *_machine_flags(), *COMMON)
    key = "\0".join((source, _runtime_hash(), identity, *flags))
    directory = cache_directory()
    library = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as scratch:
        text = Path(scratch) / "kernel.cpp"
        text.write_text(source)
        made = Path(scratch) / "kernel.so"
        command = [path, *flags, f"-I{RUNTIME}", "-o", str(made), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"g++ failed:\n{done.stderr[:4000]}")
        os.replace(made, library)
    return library


@functools.cache
def runtime() -> ctypes.CDLL:
    """Load the scheduler and the checks, compiled on first use."""
    files = sorted(RUNTIME.glob("*.cpp"))
    text = "".join(f'#include "{file.name}"\n' for file in files)
    return ctypes.CDLL(str(build(text, "runtime")))
