"""``python -m cupyops info``: what is installed here, what can be used, and where things are."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupyops
from cupyops._arrays import import_cupy
from cupyops._kernels import source_directory
from cupyops.cli.backends import NAMES, one_line, state_of

PACKAGES = {"numpy": "numpy", "array-api-compat": "array_api_compat", "ml_dtypes": "ml_dtypes"}
"""Distribution: the module it is imported by."""
GIB = 1 << 30


def run(arguments: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0


def collect() -> dict[str, Any]:
    """Everything as plain values. Never raises because something is missing or broken."""
    states = {name: state_of(name) for name in NAMES}
    return {
        "cupyops": cupyops.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": cpu_count(),
        "packages": {
            **{name: _version(module) for name, module in PACKAGES.items()},
            "cupy": _cupy_version(),
        },
        "libraries": {name: state._asdict() for name, state in states.items()},
        "cuda": _cuda_versions(),
        "device": _device() if states["cupy"].usable else None,
        "kernel_cache": _kernel_cache(),
        "kernel_sources": _ask(lambda: str(source_directory())),
    }


def cpu_count() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # the answer is what is wrong
        return f"unknown ({one_line(error)})"


def _version(module: str) -> Any:
    return _ask(lambda: importlib.import_module(module).__version__)


def _cupy_version() -> str | None:
    """Of the distribution, whatever it is called, so that a broken one has a version too."""
    try:
        return str(import_cupy().__version__)
    except Exception:
        found = importlib.metadata.distributions()
        names = {d.metadata["Name"]: d.version for d in found}
        cupy = [f"{v} ({n})" for n, v in names.items() if n == "cupy" or n.startswith("cupy-cuda")]
        return ", ".join(sorted(cupy)) or None


def _cuda_versions() -> dict[str, Any] | None:
    """None without CuPy, through which they are asked for."""
    try:
        cuda = import_cupy().cuda
    except Exception:
        return None
    return {
        "driver": _ask(lambda: dotted(cuda.runtime.driverGetVersion())),
        "runtime": _ask(lambda: dotted(cuda.runtime.runtimeGetVersion())),
        "nvrtc": _ask(lambda: ".".join(map(str, cuda.nvrtc.getVersion()))),
    }


def dotted(version: int) -> str:
    """12090 is 12.9; 0 is what a missing driver says."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _device() -> dict[str, Any]:
    runtime = import_cupy().cuda.runtime
    found: dict[str, Any] = {"number": _ask(lambda: int(runtime.getDevice()))}
    properties = _ask(lambda: runtime.getDeviceProperties(runtime.getDevice()))
    if not isinstance(properties, dict):
        return found | {"name": properties}
    name = properties.get("name", "unknown")
    free = _ask(lambda: int(runtime.memGetInfo()[0]))
    return found | {
        "count": _ask(lambda: int(runtime.getDeviceCount())),
        "name": name.decode() if isinstance(name, bytes) else name,
        "compute_capability": f"{properties.get('major', '?')}.{properties.get('minor', '?')}",
        "multiprocessors": properties.get("multiProcessorCount"),
        "memory_bytes": properties.get("totalGlobalMem"),
        "free_bytes": free,
    }


def _kernel_cache() -> str:
    """Where CuPy keeps compiled kernels."""
    default = Path("~", ".cupy", "kernel_cache").expanduser()
    return os.environ.get("CUPY_CACHE_DIR", str(default))


def as_text(found: dict[str, Any]) -> str:
    lines = [
        ("cupyops", found["cupyops"]),
        ("Python", f"{found['python']}, {found['platform']}"),
        ("processors", str(found["cpu_count"])),
        *((name, version or "not installed") for name, version in found["packages"].items()),
        *(
            (f"{name} arrays", "usable" if state["usable"] else f"not usable: {state['reason']}")
            for name, state in found["libraries"].items()
        ),
    ]
    if found["cuda"] is not None:
        lines += [(f"CUDA {name}", version) for name, version in found["cuda"].items()]
    if found["device"] is not None:
        lines += _device_lines(found["device"])
    lines += [("kernel cache", found["kernel_cache"]), ("kernel sources", found["kernel_sources"])]
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in lines)


def _device_lines(device: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("device", f"{device['number']}: {device['name']}")]
    if "compute_capability" in device:
        lines.append(("compute capability", device["compute_capability"]))
        sizes = [device["free_bytes"], device["memory_bytes"]]
        free, total = (f"{s / GIB:.1f} GiB" if isinstance(s, int) else str(s) for s in sizes)
        lines.append(("device memory", f"{total}, {free} free"))
    return lines
