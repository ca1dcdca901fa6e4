"""Modulation (adaLN) and exponential segment sum (Mamba-2), forward and backward.

The functions take NumPy or CuPy arrays and return arrays of the same library. Each has a plan,
``plan_<function>``: all checks once, then any number of runs. ``cupyops.aclnn``, which has to be
imported by name, offers the operators in the form of a two-phase C API. Importing this package
imports no array library but NumPy.
"""

from cupyops._arrays import ArraySpec
from cupyops._exp_segsum import (
    exp_segsum,
    exp_segsum_backward,
    plan_exp_segsum,
    plan_exp_segsum_backward,
)
from cupyops._modulate import (
    ModulateGrads,
    modulate,
    modulate_backward,
    plan_modulate,
    plan_modulate_backward,
)
from cupyops._plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ArraySpec",
    "ModulateGrads",
    "Plan",
    "__version__",
    "exp_segsum",
    "exp_segsum_backward",
    "modulate",
    "modulate_backward",
    "plan_exp_segsum",
    "plan_exp_segsum_backward",
    "plan_modulate",
    "plan_modulate_backward",
]
