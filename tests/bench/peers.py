"""Who is timed beside cupyops. Each is optional; one that is absent says why.

``bind(work)`` returns a call without arguments. Whatever can be done beforehand (sharing memory,
compiling) is done by `bind`, outside every time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyops
from bench.cases import THREADS, Absent, Work
from cupyops.cli.backends import one_line
from cupyops.cli.measure import Clock
from cupyops.cli.naive import NAIVE
from cupyops.cli.reference import FORMATS, Floats

Run = Callable[[], tuple[Any, ...]]
OURS, FLOOR = "cupyops", "floor"


class Peer(NamedTuple):
    title: str
    """Head of its column."""
    about: str
    bind: Callable[[Work], Run]
    """Raises `Absent` for a case it does not take."""
    needs: tuple[str, ...] = ()
    """Modules; the first is the library."""
    arithmetic: str = "storage"
    """In which dtype it computes, and so what is allowed to it: storage, compute, or contract
    (that of cupyops). "none": no operator, nothing to judge."""
    fetch: Callable[[Any], Floats] = np.asarray


def _ours(work: Work) -> Run:
    (_, first), *others = work.arrays.items()
    function = getattr(cupyops, work.case.operator)
    out = work.outs[0] if work.outs is not None and len(work.outs) == 1 else work.outs
    # The eager call, which finds its plan in a cache: what users write.
    call = partial(function, first, **dict(others), **work.case.options, out=out)

    def run() -> tuple[Any, ...]:
        results = call()
        return results if isinstance(results, tuple) else (results,)

    return run


def _naive(work: Work) -> Run:
    def run() -> tuple[Any, ...]:
        with np.errstate(all="ignore"):  # float16 overflows on its way
            return NAIVE[work.case.operator](np, work.arrays, work.outs)

    return run


def _of(module: str, function: str) -> Callable[[Any], Any]:
    """A function of a module that is imported when it is called."""

    def call(argument: Any) -> Any:
        return getattr(importlib.import_module(f"bench.{module}"), function)(argument)

    return call


# -- loops --------------------------------------------------------------------------------------


def _into(work: Work) -> tuple[Floats, ...]:
    if work.outs is None:
        raise Absent("only with out=")
    return work.outs


def _numba(parallel: bool, work: Work) -> Run:
    loops: Any = importlib.import_module("bench.numba_loops")
    outs, (operator, _, dtype) = _into(work), work.case
    *_, compute, _, memory = loops.TYPES[dtype]
    loop = loops.loop(operator, dtype, parallel)
    arguments = loops.arguments(operator, work.arrays, outs, memory, compute)
    loops.threads(THREADS)

    def run() -> tuple[Any, ...]:
        loop(*arguments)
        return outs

    return run


def _floor(clock: Clock, work: Work) -> Run:
    """Moves the bytes of the case; the quicker of one thread and several."""
    outs = _into(work)
    try:
        loops: Any = importlib.import_module("bench.numba_loops")
    except ImportError:
        return _copy(work)
    operator = work.case.operator
    memory = np.dtype(f"u{FORMATS[work.case.dtype].dtype.itemsize}")
    arguments = loops.arguments(operator, work.arrays, outs, memory, memory)
    loops.threads(THREADS)
    calls = [partial(loops.floor_loop(operator, several), *arguments) for several in (False, True)]
    for call in calls:
        call()
    best = min(calls, key=lambda call: min(clock(call, 3) for _ in range(3)))

    def run() -> tuple[Any, ...]:
        best()
        return outs

    return run


def _copy(work: Work) -> Run:
    """Half of the least bytes read and written once: the same total, in another mixture."""
    source = np.ones(max(1, work.case.least_bytes // 2), np.uint8)
    target = np.empty_like(source)

    def run() -> tuple[Any, ...]:
        np.copyto(target, source)
        return ()

    return run


def floor_meaning() -> str:
    """What the floor is on this machine."""
    if _why_absent(("numba",)) is None:
        return (
            "a compiled loop over the same arrays that reads and writes what the operator has to, "
            f"without arithmetic; the quicker of one and {THREADS} threads"
        )
    return (
        "a copy by NumPy, on one thread, that reads half of the least bytes and writes half (a "
        "loop over the arrays themselves needs numba)"
    )


# -- all of them --------------------------------------------------------------------------------


def all_peers(clock: Clock) -> dict[str, Peer]:
    """By name, in the order of the columns."""
    torch_fetch = _of("torch_peers", "fetch")
    several = f"{THREADS} threads"
    return {
        OURS: Peer("cupyops", "the eager call", _ours, arithmetic="contract"),
        "naive": Peer("NumPy", "plain lines in the dtype of the arrays, one thread", _naive),
        "torch": Peer(
            "torch",
            f"eager operations, {several}; backward operators: formulas written by hand",
            _of("torch_peers", "eager"),
            ("torch",),
            fetch=torch_fetch,
        ),
        "autograd": Peer(
            "autograd",
            f"torch's own backward pass through a graph that is kept, {several}",
            _of("torch_peers", "autograd"),
            ("torch",),
            fetch=torch_fetch,
        ),
        "compile": Peer(
            "compile",
            f"the torch formulas through torch.compile (Inductor, C++), {several}",
            _of("torch_peers", "compiled"),
            ("torch",),
            fetch=torch_fetch,
        ),
        "jax": Peer(
            "JAX",
            f"the plain lines through jax.jit, {several}",
            _of("jax_peer", "jitted"),
            ("jax", "jaxlib"),
            fetch=_of("jax_peer", "fetch"),
        ),
        "numba": Peer(
            "numba",
            "one compiled pass in the compute type, no checks, one thread",
            partial(_numba, False),
            ("numba",),
            "compute",
        ),
        "numba2": Peer(
            f"numba x{THREADS}",
            f"the same pass on {several}",
            partial(_numba, True),
            ("numba",),
            "compute",
        ),
        FLOOR: Peer("floor", floor_meaning(), partial(_floor, clock), arithmetic="none"),
    }


def absent(peers: dict[str, Peer]) -> dict[str, str]:
    """Those that cannot take part on this machine, with the reason."""
    reasons = {name: _why_absent(peer.needs) for name, peer in peers.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_absent(modules: Iterable[str]) -> str | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            found = getattr(error, "name", None) == module
            return f"{module} is not installed" if found else f"{module}: {one_line(error)}"
        except Exception as error:  # a broken installation may raise anything
            return f"{module} cannot be imported: {one_line(error)}"
    return None


def versions(peers: dict[str, Peer]) -> dict[str, str]:
    """Of the libraries that are here."""
    libraries = dict.fromkeys(module for peer in peers.values() for module in peer.needs)
    found = {}
    for module in libraries:
        if _why_absent((module,)) is None:
            found[module] = str(importlib.import_module(module).__version__)
    return found
