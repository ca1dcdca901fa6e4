"""Work on large arrays shared by two threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

THREADS = 2
"""Threads at most; two take most of what one socket's memory can give to such work."""

Work: TypeAlias = Callable[[int, int], None]


def run_in_threads(work: Work, count: int, *, minimum: int) -> None:
    """Call ``work(start, stop)`` on consecutive parts that cover ``range(count)``.

    At most `THREADS` parts, and no more than there are processors, each of at least `minimum`:
    one part where `count` is too small for two. Every part runs under ``errstate(all="ignore")``,
    since the caller's error state does not reach another thread. Returns, or raises what `work`
    raised, once all parts have ended. `work` must not depend on how the range is cut.
    """
    parts = min(THREADS, os.cpu_count() or 1, count // max(minimum, 1))
    if parts < 2:
        _quietly(work, 0, count)
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    try:
        others = [_pool().submit(_quietly, work, *bounds[i : i + 2]) for i in range(1, parts)]
    except RuntimeError:  # no thread can be started, as at the interpreter's exit
        _quietly(work, 0, count)
        return
    try:
        _quietly(work, *bounds[:2])
    finally:
        # The arrays are the caller's again once this returns, also after an exception.
        for part, other in enumerate(others, 1):
            # Threads busy for other callers: rather than wait for them, do their part here.
            if other.cancel():
                _quietly(work, *bounds[part : part + 2])
            else:
                other.result()


def _quietly(work: Work, start: int, stop: int) -> None:
    with np.errstate(all="ignore"):
        work(start, stop)


_executor: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    """The threads beside those of the callers, started when they are first needed."""
    global _executor
    with _lock:
        if _executor is None:
            from concurrent.futures import ThreadPoolExecutor  # late: small arrays never need it

            _executor = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="cupyops")
        return _executor


def _forget_threads() -> None:
    """A forked process has the objects of its parent's threads, but not the threads."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
