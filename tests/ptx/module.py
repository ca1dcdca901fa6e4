"""A PTX module: its kernels, translated and compiled when first launched."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from . import build, parse
from .abi import KernelImage
from .translate import Translation, translate

# The largest shared memory of a block that a kernel can ask for, in bytes.
MAX_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass
class Kernel:
    """One kernel of a module."""

    module: Module
    entry: parse.Entry
    translation: Translation
    images: dict[str, KernelImage] = field(default_factory=dict)

    def image(self, mode: str) -> KernelImage:
        """Return the kernel compiled in a mode of ``build.MODES``."""
        if mode not in self.images:
            library = ctypes.CDLL(str(build.build(self.translation.source, mode)))
            image = KernelImage.in_dll(library, "ptx_image")
            self.images[mode] = image
        return self.images[mode]

    def where(self, site: int) -> str:
        """Describe an instruction by its PTX line, its text and its line in the .cu file."""
        line = site + self.entry.line - 1
        text = self.module.lines[line - 1].strip()
        place = f"PTX line {line}: {text}"
        numbers = self.entry.locations.get(line)
        if numbers:
            pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
            files = [f"{self.module.file_name(file)}:{number}" for file, number in pairs]
            place += f" ({', called from '.join(files)})"
        return place


class Module:
    """Parsed PTX text.

    Parameters
    ----------
    ptx : str
        As NVRTC made it.
    names : mapping, optional
        Name expression -> lowered name (``nvrtc.PtxResult.lowered``); kernels are then found by
        either.
    """

    def __init__(self, ptx: str, names: Mapping[str, str] | None = None) -> None:
        self.parsed = parse.parse(ptx)
        self.lines = ptx.splitlines()
        self.names = dict(names or {})
        self._kernels: dict[str, Kernel] = {}

    @property
    def kernel_names(self) -> list[str]:
        return list(self.parsed.entries)

    @property
    def architecture(self) -> int:
        match = re.match(r"sm_(\d+)", self.parsed.target)
        return int(match.group(1)) if match else 0

    def max_shared(self) -> int:
        """Return the bytes of shared memory that a block can have on this target."""
        return 1024 * MAX_SHARED.get(self.architecture, 48)

    def file_name(self, index: int) -> str:
        return PurePosixPath(self.parsed.files.get(index, f"file {index}")).name

    def kernel(self, name: str) -> Kernel:
        """Return a kernel by its name or name expression, translating it on first use."""
        name = self.names.get(name, name)
        if name not in self.parsed.entries:
            raise KeyError(f"no kernel {name!r} in the module; it has {self.kernel_names}")
        if name not in self._kernels:
            entry = self.parsed.entries[name]
            self._kernels[name] = Kernel(self, entry, translate(self.parsed, entry))
        return self._kernels[name]
