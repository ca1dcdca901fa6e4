"""JAX on the CPU: the plain lines, compiled as a whole by XLA for exactly these shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases import Absent, Work
from cupyops.cli.naive import NAIVE
from cupyops.cli.reference import Floats

jax.config.update("jax_enable_x64", True)  # else float64 becomes float32
jax.config.update("jax_platforms", "cpu")


def jitted(work: Work) -> Callable[[], tuple[Any, ...]]:
    """Arrays of its own, filled before any time is taken; every call waits for its results."""
    if work.outs is not None:
        raise Absent("takes no out=")
    arrays = {name: jnp.asarray(array) for name, array in work.arrays.items()}
    plain = NAIVE[work.case.operator]
    function = jax.jit(lambda given: plain(jnp, given, None))
    return partial(_finished, function, arrays)


def _finished(function: Callable[[Any], Any], arrays: Any) -> Any:
    return jax.block_until_ready(function(arrays))


def fetch(result: Any) -> Floats:
    return np.asarray(result)
