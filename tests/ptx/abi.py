"""ctypes mirrors of ``runtime/abi.h`` and ``runtime/machine.h``."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_uint32, c_uint64, c_void_p
from enum import IntEnum


class Check(IntEnum):
    """Bits of ``Request.checks``; memcheck needs none, it comes with the checked build."""

    INIT = 1
    RACE = 2
    TRAFFIC = 4


class Kind(IntEnum):
    """Why a launch stopped."""

    FINE = 0
    OUT_OF_BOUNDS = 1
    MISALIGNED = 2
    READ_ONLY = 3
    SHARED_BOUNDS = 4
    POISON_STORED = 5
    POISONED_BRANCH = 6
    POISONED_ADDRESS = 7
    POISONED_OPERAND = 8
    RACE_IN_BLOCK = 9
    RACE_BETWEEN_BLOCKS = 10
    BARRIER_DIVERGED = 11
    WARP_STUCK = 12
    WARP_MISMATCH = 13
    WARP_NOT_MEMBER = 14
    TRAPPED = 15
    NO_MEMORY = 16


NOBODY = 0xFFFF


class Failure(Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("kind", "site", "thread", "other_thread")),
        *((name, c_uint32) for name in ("other_site", "write", "bytes", "shared")),
        *((name, c_uint64) for name in ("block", "other_block", "address")),
        *((name, c_uint32) for name in ("arrived", "expected", "elsewhere", "mask")),
    ]


class Segment(Structure):
    _fields_ = [
        ("low", c_uint64),
        ("high", c_uint64),
        ("host", c_void_p),
        ("state", c_void_p),
        ("owner", c_void_p),
        ("granule", c_uint64),
    ]


COUNTERS = ("read_requests", "write_requests", "read_sectors", "write_sectors")


class Counters(Structure):
    _fields_ = [(name, c_uint64) for name in COUNTERS]


class Variable(Structure):
    _fields_ = [("name", c_char_p), ("address", c_uint64), ("bytes", c_uint64)]


class KernelImage(Structure):
    _fields_ = [
        ("entry", c_void_p),
        ("synchronises", c_uint32),
        ("variable_count", c_uint32),
        ("variables", POINTER(Variable)),
    ]


class Request(Structure):
    _fields_ = [
        ("image", POINTER(KernelImage)),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("static_shared", c_uint32),
        ("dynamic_shared", c_uint32),
        ("params", c_char_p),
        ("block_order", c_void_p),
        ("thread_order", c_void_p),
        ("checks", c_uint32),
        ("segment_count", c_uint32),
        ("segments", POINTER(Segment)),
        ("counters", POINTER(Counters)),
        ("buffer_count", c_uint64),
        ("instructions", c_uint64),
        ("shared_requests", c_uint64),
        ("shared_wavefronts", c_uint64),
        ("shared_minimum", c_uint64),
        ("failure", Failure),
    ]
