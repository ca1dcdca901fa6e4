"""The two-phase layer: plan once from metadata, run as often as wanted. Knows no operator.

Phase one (`plan_for`) checks the metadata of every argument and fixes all that follows from it.
Phase two (`Plan.run`) checks what a plan cannot know (addresses, the arrays' match with the plan)
and computes. The eager functions are both phases in a row, through a bounded cache of plans keyed
by metadata, so there is one validation path and one way to compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn, Protocol

import numpy as np

from cupyops import _arrays, _kernels
from cupyops._arrays import Array, Arrays, ArraySpec, Extent
from cupyops._checks import a_type, check_array, check_dtype, check_same_place, fail
from cupyops._launch import Launch

CACHED_PLANS = 512
"""Plans kept for the eager functions; a plan is a few kilobytes of metadata."""

_UINT8: np.dtype[Any] = np.dtype(np.uint8)

Specs = tuple[ArraySpec | None, ...]
Check = Callable[[str, str, object], ArraySpec]
"""(function, argument, value) -> the metadata of the value, or an error."""


@dataclass(frozen=True, eq=False)
class Operator:
    """What the plan layer must know of an operator: names, and how to plan it."""

    name: str
    inputs: tuple[str, ...]
    """In call order. The first is positional; an input named in `optional` may be None."""
    optional: frozenset[str]
    outputs: tuple[str, ...]
    result: Callable[..., Any] | None
    """Builds the return value from several outputs; None where the only output is returned."""
    build: Callable[..., Plan]
    """(operator, input specs, out specs, *options) -> Plan; raises for what does not fit."""
    options: tuple[str, ...] = ()
    """Names of the flags, in the order in which `build` takes them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What messages call inputs and outputs, where a face of the operator has names of its own."""

    def label(self, name: str) -> str:
        """What messages call an input or output: entries of a tuple are ``out.<name>``."""
        if name in self.labels:
            return self.labels[name]
        several = self.result is not None and name in self.outputs
        return f"out.{name}" if several else name


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """One operator, checked and laid out for arrays of known shape, dtype, strides and device.

    A plan is immutable and holds metadata, never arrays. It may run any number of times, and from
    several threads at once if each brings its own `out` and `workspace`. Make one with
    ``cupyops.plan_<operator>``, which takes the arguments of the function of that name. It cannot
    be pickled: TypeError.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> a = np.zeros((2, 3), np.float32)
    >>> plan = cupyops.plan_exp_segsum(a)
    >>> plan  # doctest: +ELLIPSIS
    <Plan exp_segsum(x=float32[2, 3]) -> out=float32[2, 3, 3]; numpy on cpu, workspace 0 bytes, ...>
    >>> plan.workspace_size, plan.traffic, plan.launches
    (0, 96, ())
    """

    operator: Operator
    """What is planned; its ``name`` is that of the function."""
    inputs: Specs
    """Layouts of the input arrays, in the order of the function; None for one that is absent."""
    outputs: Specs
    """Layouts of the results; None for a gradient that does not exist."""
    options: tuple[tuple[str, Any], ...]
    """(name, value) of each flag, such as ``one_plus_scale``."""
    in_place: frozenset[tuple[str, str]]
    """(output, input) pairs that may be the very same view."""
    traffic: int
    """Bytes that have to be read and written at the least."""
    compute: Callable[[Arrays, Arrays], None] | None = None
    """The NumPy arithmetic: reads the inputs, fills the outputs. None for a plan of launches."""
    launches: tuple[Launch, ...] = ()
    """The kernels to launch, in order; none on NumPy."""
    workspace_size: int = 0
    """Bytes of scratch memory that `run` needs; 0 on NumPy."""
    place: ArraySpec = field(init=False)
    """The first array, which says in which library and on which device the plan runs."""
    _specs: dict[str, ArraySpec] = field(init=False, repr=False)
    """Of the inputs and outputs that exist, by name."""
    _itemsizes: dict[str, int] = field(init=False, repr=False)
    _extents: dict[str, Extent | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = (*self.operator.inputs, *self.operator.outputs)
        both = zip(names, self.inputs + self.outputs, strict=True)
        specs = {name: spec for name, spec in both if spec is not None}
        object.__setattr__(self, "place", specs[names[0]])
        object.__setattr__(self, "_specs", specs)
        itemsizes = {name: spec.dtype.itemsize for name, spec in specs.items()}
        object.__setattr__(self, "_itemsizes", itemsizes)
        extents = {name: _arrays.extent_of(spec) for name, spec in specs.items()}
        object.__setattr__(self, "_extents", extents)

    def run(
        self,
        x: Array,
        /,
        *,
        out: Any = None,
        workspace: Array | None = None,
        stream: Any = None,
        **arrays: Array | None,
    ) -> Any:
        """Compute the planned operator on arrays that match the plan.

        Parameters
        ----------
        x : array
            The first input (`y` of ``exp_segsum_backward``), by position.
        out : array or tuple, optional
            As in the function that was planned, with the layout that was planned. May be absent
            only if that is C-contiguous.
        workspace : array, shape (n,), optional
            Contiguous uint8 of at least ``workspace_size`` bytes, at any alignment. Its contents
            are undefined before and after. Allocated in the stream's memory pool if absent.
        stream : cupy.cuda.Stream, optional
            Where to run; the current stream by default. NumPy arrays have no streams.
        **arrays : array
            The other inputs, named as in the function that was planned. All have the shapes,
            dtypes, strides and device of the plan; parameters absent from it stay absent.

        Returns
        -------
        array or ModulateGrads
            What the function returns: `out` where it was given, else new arrays.

        Raises
        ------
        TypeError
            An argument is not an array, or is unknown to the operator, or `stream` is no stream.
        ValueError
            An array does not match the plan, `out` is read-only or overlaps another array, the
            workspace is too small, not contiguous or not writable, or the stream belongs to
            another device. Nothing has been written then.

        Notes
        -----
        On a GPU nothing is synchronised, and nothing is allocated if both `out` and `workspace`
        are given, so that a run can be captured into a CUDA graph.

        Examples
        --------
        >>> import numpy as np, cupyops
        >>> x = np.ones((2, 3, 4), np.float32)
        >>> shift = np.full((2, 4), 2, np.float32)
        >>> plan = cupyops.plan_modulate(x, shift=shift)
        >>> out, workspace = np.empty_like(x), np.empty(plan.workspace_size, np.uint8)
        >>> plan.run(x, shift=shift, out=out, workspace=workspace) is out
        True
        >>> plan.run(x[:1], shift=shift)
        Traceback (most recent call last):
            ...
        ValueError: modulate: x has shape (1, 3, 4); expected (2, 3, 4), as in the plan
        """
        operator = self.operator
        others = operator.inputs[1:]
        inputs = (x, *(arrays.pop(name, None) for name in others))
        for name in arrays:
            accepted = ", ".join((*others, "out", "workspace", "stream"))
            fail(TypeError, operator.name, name, "is not an argument of this plan's run", accepted)
        outs = unpack_out(operator, out)
        addresses = self.check_run(inputs, outs, workspace, stream)
        return self.execute(inputs, outs, addresses, workspace, stream)

    def check_run(
        self, inputs: Arrays, outs: Arrays, workspace: Array | None, stream: Any
    ) -> dict[str, int]:
        """Refuse what does not fit the plan; returns what `execute` has to know of the arrays."""
        operator = self.operator
        for name, array, spec in zip(operator.inputs, inputs, self.inputs, strict=True):
            if array is None and spec is None:
                continue
            if spec is None or _arrays.spec_of(array) != spec:  # one comparison settles what fits
                self._check_planned(name, array, spec)
        for name, array, spec in zip(operator.outputs, outs, self.outputs, strict=True):
            if array is None:
                if spec is None or _arrays.is_contiguous(spec):
                    continue
            elif spec is not None and _arrays.spec_of(array) == spec:
                continue
            self._check_planned(name, array, spec)
        addresses = self.check_memory(inputs, outs)
        self._check_workspace(workspace, addresses)
        self.executor.check_stream(operator.name, stream, self.place.device)
        return addresses

    def check_memory(self, inputs: Arrays, outs: Arrays) -> dict[str, int]:
        """Refuse outputs that are read-only or share memory with another array.

        Returns the addresses of all arrays given, by name; nothing if no check needs one.
        """
        operator = self.operator
        given = [(n, a) for n, a in zip(operator.outputs, outs, strict=True) if a is not None]
        strict = _arrays.needs_alignment(self.place)
        if not given and not strict:
            return {}
        names = (*operator.inputs, *operator.outputs)
        addresses = _arrays.addresses_of(names, inputs + outs, self.place)
        if strict:
            itemsizes = self._itemsizes
            for name, address in addresses.items():
                if address % itemsizes[name]:
                    fail_alignment(operator, operator.label(name))
        for output, array in given:
            if not _arrays.is_writable(array):
                label = operator.label(output)
                fail(ValueError, operator.name, label, "is read-only", "a writable array")
        if given and not self._apart(addresses):
            self._check_overlap([output for output, _ in given], addresses)
        return addresses

    def _apart(self, addresses: dict[str, int]) -> bool:
        """Whether the arrays' spans are disjoint: the common case, judged in one pass."""
        extents = self._extents
        spans = sorted(
            [
                (address + extent[0], address + extent[1])
                for name, address in addresses.items()
                if (extent := extents[name]) is not None
            ]
        )
        end = 0
        for start, stop in spans:
            if start < end:
                return False
            end = stop
        return True

    def _check_overlap(self, outputs: list[str], addresses: dict[str, int]) -> None:
        operator = self.operator
        for count, output in enumerate(outputs):
            others = (*operator.inputs, *outputs[:count])
            for name in self._overlapping(self._extents[output], addresses[output], addresses):
                if name not in others:
                    continue
                may_be_same = (output, name) in self.in_place
                if may_be_same and self._same_view(output, name, addresses):
                    continue
                wanted = f", or the very same view as {operator.label(name)}" if may_be_same else ""
                label, got = operator.label(output), f"overlaps {operator.label(name)}"
                fail(ValueError, operator.name, label, got, f"memory of its own{wanted}")

    def _overlapping(
        self, extent: Extent | None, address: int, addresses: dict[str, int]
    ) -> list[str]:
        """The arrays that may share a byte with one of this extent, itself among them."""
        return [
            name
            for name, place in addresses.items()
            if _arrays.overlap(extent, address, self._extents[name], place)
        ]

    def _same_view(self, a: str, b: str, addresses: dict[str, int]) -> bool:
        mine, theirs = self._specs[a], self._specs[b]
        same_values = mine.dtype == theirs.dtype and mine.has_layout_of(theirs)
        return same_values and addresses[a] == addresses[b]

    def _check_planned(self, name: str, array: Array | None, spec: ArraySpec | None) -> None:
        """Refuse an array whose spec is not the planned one, unless it means the same."""
        function, name = self.operator.name, self.operator.label(name)
        if spec is None:
            fail(ValueError, function, name, "is given", "None, as in the plan")
        if array is None:
            layout = "" if _arrays.is_contiguous(spec) else f" with strides {spec.strides}"
            fail(TypeError, function, name, "is None", f"{spec}{layout}, as in the plan")
        got = check_array(function, name, array)
        check_same_place(function, name, got, "the plan", spec)
        for what in ("dtype", "shape"):
            mine, planned = getattr(got, what), getattr(spec, what)
            if mine != planned:
                fail(ValueError, function, name, f"has {what} {mine}", f"{planned}, as in the plan")
        if not got.has_layout_of(spec):
            fail(
                ValueError,
                function,
                name,
                f"has strides {got.strides}",
                f"{spec.strides}, as in the plan",
            )

    def _check_workspace(self, workspace: Array | None, addresses: dict[str, int]) -> None:
        if workspace is None:
            return
        function, name = self.operator.name, "workspace"
        spec = check_array(function, name, workspace)
        first = self.operator.label(self.operator.inputs[0])
        check_same_place(function, name, spec, first, self.place)
        if spec.dtype != _UINT8:
            fail(TypeError, function, name, f"has dtype {spec.dtype}", "uint8")
        if len(spec.shape) != 1 or (spec.size > 1 and spec.strides != (1,)):
            got = f"has shape {spec.shape} and strides {spec.strides}"
            fail(ValueError, function, name, got, "one contiguous axis")
        if spec.size < self.workspace_size:
            got = f"has {spec.size} bytes"
            fail(ValueError, function, name, got, f"at least {self.workspace_size}")
        if not _arrays.is_writable(workspace):
            fail(ValueError, function, name, "is read-only", "a writable array")
        start = _arrays.address_of(workspace)
        stop = start + spec.size
        for other, address in addresses.items():
            theirs = self._extents[other]
            if theirs is None or address + theirs.high <= start or stop <= address + theirs.low:
                continue  # apart, as all but always
            if _arrays.overlap(_arrays.extent_of(spec), start, theirs, address):
                got = f"overlaps {self.operator.label(other)}"
                fail(ValueError, function, name, got, "memory of its own")

    @property
    def executor(self) -> Executor:
        """What carries out plans of this array library."""
        return EXECUTORS[self.place.library]

    def execute(
        self,
        inputs: Arrays,
        outs: Arrays,
        addresses: dict[str, int],
        workspace: Array | None = None,
        stream: Any = None,
    ) -> Any:
        """Compute, on arrays that have been checked; `addresses` are what the check returned."""
        operator, place, executor = self.operator, self.place, self.executor
        with executor.context(place.device, stream):
            results = tuple(
                [
                    _arrays.empty(spec) if array is None and spec is not None else array
                    for array, spec in zip(outs, self.outputs, strict=True)
                ]
            )
            if workspace is None and self.workspace_size:
                size = (self.workspace_size,)
                workspace = _arrays.empty(_arrays.contiguous(size, place, _UINT8))
            if self.compute is not None:
                self.compute(inputs, results)
            if self.launches:
                for name, array, result in zip(operator.outputs, outs, results, strict=True):
                    if array is None and result is not None:
                        addresses[name] = _arrays.address_of(result)
                base = 0 if workspace is None else _arrays.address_of(workspace)
                executor.launch(self.launches, addresses, base, place.device, stream)
        return results[0] if operator.result is None else operator.result(*results)

    def __repr__(self) -> str:
        operator = self.operator
        arrays = [f"{n}={s}" for n, s in zip(operator.inputs, self.inputs, strict=True) if s]
        options = [f"{name}={value}" for name, value in self.options]
        outs = [f"{n}={s}" for n, s in zip(operator.outputs, self.outputs, strict=True) if s]
        launches = "".join(f"; {launch}" for launch in self.launches)
        return (
            f"<Plan {operator.name}({', '.join(arrays + options)}) -> {', '.join(outs)}; "
            f"{self.place.library} on {self.place.device}, workspace {self.workspace_size} bytes, "
            f"traffic {self.traffic} bytes{launches}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan belongs to its process and cannot be pickled; plan again there")


class Executor(Protocol):
    """How the plans of one array library are carried out."""

    def prepare(self, launches: tuple[Launch, ...], device: str) -> None:
        """Compile and load all that may be launched."""

    def check_stream(self, function: str, stream: Any, device: str) -> None:
        """Refuse what is not a stream of the device."""

    def context(self, device: str, stream: Any) -> AbstractContextManager[Any]:
        """Makes device and stream current, for allocations."""

    def launch(
        self,
        launches: tuple[Launch, ...],
        addresses: Mapping[str, int],
        workspace: int,
        device: str,
        stream: Any,
    ) -> None:
        """Launch in order on the stream, on arrays and a workspace at these addresses."""


class HostExecutor:
    """NumPy: plans compute and have nothing to launch."""

    def prepare(self, launches: tuple[Launch, ...], device: str) -> None:
        assert not launches

    def check_stream(self, function: str, stream: Any, device: str) -> None:
        if stream is not None:
            fail(TypeError, function, "stream", "is given", "None for NumPy arrays")

    def context(self, device: str, stream: Any) -> AbstractContextManager[Any]:
        # The caller's error state must neither warn about IEEE results nor stop half-way.
        return np.errstate(all="ignore")

    def launch(
        self,
        launches: tuple[Launch, ...],
        addresses: Mapping[str, int],
        workspace: int,
        device: str,
        stream: Any,
    ) -> None:
        assert not launches


EXECUTORS: dict[str, Executor] = {"numpy": HostExecutor(), "cupy": _kernels.CupyExecutor()}
"""By array library."""


def fail_alignment(operator: Operator, label: str) -> NoReturn:
    got = "has elements at addresses that are not multiples of their size"
    fail(ValueError, operator.name, label, got, "aligned elements on a GPU")


def unpack_out(operator: Operator, out: Any) -> Arrays:
    """One entry for each output, None where it has to be allocated."""
    if operator.result is None:
        return (out,)
    count = len(operator.outputs)
    if out is None:
        return (None,) * count
    expected = f"a tuple ({', '.join(operator.outputs)})"
    if not isinstance(out, tuple) or isinstance(out, ArraySpec):
        fail(TypeError, operator.name, "out", f"is {a_type(out)}", expected)
    if len(out) != count:
        fail(ValueError, operator.name, "out", f"has {len(out)} entries", expected)
    return tuple(out)


@lru_cache(maxsize=CACHED_PLANS)
def _cached_plan(operator: Operator, inputs: Specs, outs: Specs, options: tuple[Any, ...]) -> Plan:
    # lru_cache is thread-safe; two threads may plan the same thing once each, which is harmless.
    names = (*operator.inputs, *operator.outputs)
    named = [(operator.label(n), s) for n, s in zip(names, inputs + outs, strict=True)]
    first_name, first = named[0]
    assert first is not None
    for name, spec in named:
        if spec is not None:
            check_same_place(operator.name, name, spec, first_name, first)
            if _arrays.needs_alignment(spec) and not _arrays.has_aligned_strides(spec):
                fail_alignment(operator, name)
    plan = operator.build(operator, inputs, outs, *options)
    plan.executor.prepare(plan.launches, plan.place.device)
    return plan


def _find_plan(
    operator: Operator, inputs: Arrays, outs: Arrays, options: tuple[Any, ...], check: Check
) -> Plan:
    name, optional = operator.name, operator.optional
    # Lists, since a small operation feels what a generator costs.
    specs = [
        None
        if array is None and argument in optional
        else check_dtype(name, argument, check(name, argument, array))
        for argument, array in zip(operator.inputs, inputs, strict=True)
    ]
    out_specs = [
        None
        if array is None
        else check_dtype(name, operator.label(output), check(name, operator.label(output), array))
        for output, array in zip(operator.outputs, outs, strict=True)
    ]
    return _cached_plan(operator, tuple(specs), tuple(out_specs), options)


def _check_described(function: str, argument: str, value: object) -> ArraySpec:
    return value if isinstance(value, ArraySpec) else check_array(function, argument, value)


def plan_for(operator: Operator, inputs: Arrays, out: Any, options: tuple[Any, ...] = ()) -> Plan:
    """Phase one: check the arguments and lay out the run. Any array may be an `ArraySpec`."""
    outs = unpack_out(operator, out)
    plan = _find_plan(operator, inputs, outs, options, _check_described)
    plan.check_memory(_without_specs(inputs), _without_specs(outs))
    return plan


def _without_specs(arrays: Arrays) -> Arrays:
    return tuple(None if isinstance(array, ArraySpec) else array for array in arrays)


def run_eagerly(operator: Operator, inputs: Arrays, out: Any, options: tuple[Any, ...] = ()) -> Any:
    """Both phases in a row; or what a layer above the arrays makes of the call."""
    layer = _arrays.layer_of(inputs)
    if layer is not None:
        # torch.compile follows the look-up, but no import.
        module = sys.modules.get(layer) or import_module(layer)
        named = dict(zip(operator.inputs[1:], inputs[1:], strict=True))
        named |= zip(operator.options, options, strict=True)
        return getattr(module, operator.name)(inputs[0], out=out, **named)
    return run_on_arrays(operator, inputs, unpack_out(operator, out), options)


def run_on_arrays(
    operator: Operator, inputs: Arrays, outs: Arrays, options: tuple[Any, ...]
) -> Any:
    """Both phases in a row, for arrays of the libraries that plans are for."""
    plan = _find_plan(operator, inputs, outs, options, check_array)
    return plan.execute(inputs, outs, plan.check_memory(inputs, outs))
