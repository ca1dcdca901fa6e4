"""Blocks of a kernel that a multiprocessor holds at once, from what the kernel uses.

The limits are those of the CUDA Programming Guide, "Compute Capabilities", table of technical
specifications per compute capability; the way resources are handed out (registers per warp in
units of 256, warps in fours, shared memory in units of 128 bytes, 1 KiB of it kept by the system
from 8.0 on) is that of NVIDIA's CUDA Occupancy Calculator (`cuda_occupancy.h`). Where the guides
differ about 12.0, the Programming Guide's 24 blocks and 100 KiB are used.
"""

from __future__ import annotations

from typing import NamedTuple

WARP = 32
REGISTERS = 64 * 1024
REGISTER_UNIT = 256
"""Registers of a warp are handed out in such units."""
PARTITIONS = 4
"""Parts of a multiprocessor, each with a quarter of the registers: warps come in fours."""


class Limits(NamedTuple):
    """Of a multiprocessor."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_unit: int = 128
    reserved: int = 1024
    """Bytes of shared memory that every block costs beyond its own."""


LIMITS = {
    "sm_75": Limits(32, 16, 64 * 1024, shared_unit=256, reserved=0),
    "sm_80": Limits(64, 32, 164 * 1024),
    "sm_86": Limits(48, 16, 100 * 1024),
    "sm_89": Limits(48, 24, 100 * 1024),
    "sm_90": Limits(64, 32, 228 * 1024),
    "sm_100": Limits(64, 32, 228 * 1024),
    "sm_120": Limits(48, 24, 100 * 1024),
}


class Occupancy(NamedTuple):
    blocks: int
    """On one multiprocessor."""
    fraction: float
    """Of the warps that it can hold."""
    limit: str
    """What allows no more blocks: "warps", "blocks", "registers" or "shared memory"."""


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """For blocks of so many threads and bytes (static and dynamic), registers per thread."""
    limits = LIMITS[architecture]
    warps = -(-threads // WARP)
    of_warp = _round_up(registers * WARP, REGISTER_UNIT)
    warps_with_registers = REGISTERS // of_warp // PARTITIONS * PARTITIONS
    shared = _round_up(shared_bytes + limits.reserved, limits.shared_unit)
    fits = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_with_registers // warps,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], fits[limit] * warps / limits.warps, limit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
