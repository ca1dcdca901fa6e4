"""Memory instructions in the machine code of the kernels, by how many bytes they move.

    python tests/bench/sass.py [ARCHITECTURE]

Needs NVIDIA's disassembler: ``python -m pip install nvidia-cuda-nvdisasm``, or a CUDA toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import simulated  # noqa: E402
from cupyops._kernels import source_text  # noqa: E402
from ptx import nvrtc  # noqa: E402

KERNELS = {
    "modulate.cu": "modulate<{0}, {0}, true>",
    "modulate_backward.cu": "modulate_backward_rows<{0}, {0}, true>",
    "exp_segsum.cu": "exp_segsum<{0}, true>",
    "exp_segsum_backward.cu": "exp_segsum_backward_rows<{0}, true>",
}
MEMORY = re.compile(r"\b((?:LDG|STG|LDS|STS|LDL|STL)\b[.\w]*)")


def disassembler() -> str:
    found = shutil.which("nvdisasm")
    for path in Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"):
        found = found or str(path)
    if found is None:
        raise SystemExit("nvdisasm is missing: python -m pip install nvidia-cuda-nvdisasm")
    return found


def memory_instructions(source: str, name: str, architecture: str) -> Counter[str]:
    options = simulated.options(architecture)
    made = nvrtc.compile_cubin(source_text(source), options, [name], filename=source)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.cubin)
        file.flush()
        command = [disassembler(), "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(MEMORY.findall(text))


def main() -> None:
    architecture = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    for source, template in KERNELS.items():
        for dtype in ("f16", "bf16", "f32", "f64"):
            name = template.format(dtype)
            counts = memory_instructions(source, name, architecture)
            print(f"{name:<44}", *(f"{k} {n}" for k, n in sorted(counts.items())), sep="  ")


if __name__ == "__main__":
    main()
