"""The CUDA sources: where they lie."""

from __future__ import annotations

from pathlib import Path


def source_directory() -> Path:
    """The directory of the ``.cu`` files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    for directory in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (directory / "common.cuh").is_file():
            return directory
    raise FileNotFoundError(
        f"cupyops: the kernel sources are not in {package / 'kernels_cu'}, nor beside the package; "
        "the installation is incomplete, reinstall cupyops"
    )
