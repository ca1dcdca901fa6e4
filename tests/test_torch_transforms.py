"""What torch does around the operators: compilation, checks of its own, modes, transforms."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
import cupyops._torch_modes
import cupyops.torch
from support import LAYOUT_NAMES, forward_part
from tensors import call, equal_bits, leaves, modulation

OPS = torch.ops.cupyops
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def segments(t: int = 5) -> Tensor:
    return -torch.rand(2, t, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gradients(function: Callable[..., Tensor], given: dict[str, Tensor]) -> list[Tensor]:
    y = function(**given)
    return [y, *torch.autograd.grad(y.square().sum(), list(given.values()))]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(equal_bits(a, b) for a, b in zip(got, want, strict=True))


# -- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("module", [cupyops, cupyops.torch], ids=lambda m: m.__name__)
def test_compiled_code_is_one_graph_with_the_same_bits(module: Any, backend: str) -> None:
    def block(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = module.modulate(torch.tanh(x), scale=scale, shift=shift, one_plus_scale=True)
        return torch.einsum("bij,bjd->bid", module.exp_segsum(y[..., 0]), y)

    given = leaves(modulation("B,D", "D"))
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert_equal(gradients(compiled, given), gradients(block, given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_functions_and_out_are_compiled_too(backend: str) -> None:
    def by_hand(x: Tensor, g: Tensor, scale: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        grads = cupyops.modulate_backward(x, grad_output=g, scale=scale)
        out = torch.empty_like(x)
        cupyops.modulate(x, scale=scale, out=out)
        inner = cupyops.modulate_backward(
            x, grad_output=g, scale=scale, out=(None, scale + 1, None)
        )
        y = cupyops.exp_segsum(a, out=a.new_empty(2, 5, 5))
        grad_a = cupyops.exp_segsum_backward(y, grad_output=y, out=torch.empty_like(a))
        return grads.grad_input, grads.grad_scale, out * 2, *inner[:2], y, grad_a

    p, a = modulation("B,D", None), segments()
    arguments = (p["x"], p["grad_output"], p["scale"], a)
    compiled = torch.compile(by_hand, fullgraph=True, backend=backend)
    assert_equal(list(compiled(*arguments)), list(by_hand(*arguments)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does
def test_a_compiled_backward_pass_may_use_the_functions() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (a,) = ctx.saved_tensors
            return cupyops.modulate(cupyops.exp_segsum(a), shift=grad)[:, 0]

    def derivative(function: Any) -> Tensor:
        a = segments().requires_grad_()
        (grad,) = torch.autograd.grad(function(a).sum(), a)
        return grad

    def run(a: Tensor) -> Tensor:
        return Outer.apply(a * 1)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert equal_bits(derivative(compiled), derivative(run))


def test_one_graph_serves_any_length() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def block(x: Tensor, scale: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return cupyops.modulate(x, scale=scale), cupyops.exp_segsum(a)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 6, 7):
        x, scale, a = torch.randn(2, length, 4), torch.randn(2, 4), torch.randn(3, length)
        assert_equal(list(compiled(x, scale, a)), list(block(x, scale, a)))
    assert len(graphs) == 1


def test_kernels_are_not_traced_after_a_graph_break() -> None:
    def block(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return cupyops.modulate(x, shift=x[:, 0]) + 1

    x = torch.randn(2, 3, 4)
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(block, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert equal_bits(compiled(x), block(x))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert "cupyops.modulate.default" in targets


def test_a_wrong_shape_is_found_while_compiling() -> None:
    compiled = torch.compile(cupyops.modulate, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"modulate: scale has shape \(2, 3\); expected \(B, D\)"):
        compiled(torch.randn(2, 5, 4), scale=torch.randn(2, 3))


def test_exported_programs_keep_the_operators() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, a: Tensor) -> Tensor:
            return cupyops.modulate(x, scale=x[:, 0]) @ cupyops.exp_segsum(a)

    arguments = (torch.randn(2, 3, 4), torch.randn(2, 4))
    for strict in (False, True):
        program = torch.export.export(Block(), arguments, strict=strict)
        targets = {str(node.target) for node in program.graph.nodes}
        assert {"cupyops.modulate.default", "cupyops.exp_segsum.default"} <= targets
        assert equal_bits(program.module()(*arguments), Block()(*arguments))


# -- torch's own checks -------------------------------------------------------------------------


def operator_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every registered operator with arguments, also with absent and with constant ones."""
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for layout in (None, *LAYOUT_NAMES):
        for plus in (False, True):
            p = modulation(layout, layout)
            grads = leaves(p)
            scale, shift = grads.get("scale"), grads.get("shift")
            calls[f"modulate {layout} {plus}"] = OPS.modulate, (grads["x"], scale, shift, plus)
            inputs = (grads["x"], p["grad_output"].requires_grad_(), scale, shift, plus)
            calls[f"modulate_backward {layout} {plus}"] = OPS.modulate_backward, inputs
    p = modulation("B,D", "D", dtype="float32")
    x, g, scale, shift = (p[key] for key in ("x", "grad_output", "scale", "shift"))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    calls["strided"] = OPS.modulate, (strided, scale, shift, False)
    calls["modulate_out"] = OPS.modulate_out, (x, scale, None, True, torch.empty_like(x))
    outs = (torch.empty_like(x), torch.empty_like(scale), None)
    calls["backward_out"] = OPS.modulate_backward_out, (x, g, scale, None, True, *outs)
    a, y = segments(), cupyops.exp_segsum(segments())
    calls["exp_segsum"] = OPS.exp_segsum, (segments().requires_grad_(),)
    both = (y.clone().requires_grad_(), y.clone().requires_grad_())
    calls["exp_segsum_backward"] = OPS.exp_segsum_backward, both
    calls["exp_segsum_out"] = OPS.exp_segsum_out, (a, torch.empty_like(y))
    calls["exp_segsum_backward_out"] = OPS.exp_segsum_backward_out, (y, y, torch.empty_like(a))
    return calls


CALLS = operator_calls()


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator.default, arguments)


def test_every_operator_is_checked() -> None:
    registered = {
        name.removeprefix("cupyops::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("cupyops::")
    }
    assert registered == {operator.__name__ for operator, _ in CALLS.values()}


# -- tensors without memory ---------------------------------------------------------------------


def test_shapes_and_dtypes_without_memory() -> None:
    p = {key: value.to("meta") for key, value in modulation("B,D", "1,L,D", "bfloat16").items()}
    y, grads = call("modulate", forward_part(p)), call("modulate_backward", p)
    assert (y.shape, y.dtype, y.device) == (p["x"].shape, torch.bfloat16, torch.device("meta"))
    assert [grad.shape for grad in grads] == [p[k].shape for k in ("x", "scale", "shift")]
    a = torch.empty(3, 7, device="meta")
    assert cupyops.exp_segsum(a).shape == (3, 7, 7)
    assert cupyops.exp_segsum_backward(
        cupyops.exp_segsum(a), grad_output=a.new_empty(3, 7, 7)
    ).shape == (3, 7)
    with pytest.raises(ValueError, match=r"modulate: scale has shape \(3,\); expected \(B, D\)"):
        cupyops.modulate(p["x"], scale=a[:, 0])
    with pytest.raises(ValueError, match=r"exp_segsum: x has shape \(\); expected at least one"):
        cupyops.exp_segsum(a[0, 0])
    with FakeTensorMode() as mode:
        fake = cupyops.modulate(mode.from_tensor(torch.ones(2, 3, 4)))
    assert fake.shape == (2, 3, 4)


# -- modes --------------------------------------------------------------------------------------


class Hearing:
    """A mode that notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def hear(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


class Listener(Hearing, TorchDispatchMode):
    __torch_dispatch__ = Hearing.hear


class Overhearer(Hearing, TorchFunctionMode):
    __torch_function__ = Hearing.hear


def layer(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = cupyops.modulate(x, scale=scale, shift=shift)
    return cupyops.exp_segsum(y[..., 0]) @ y


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", [Listener, Overhearer])
def test_modes_hear_of_the_operators(mode: Any, requires_grad: bool) -> None:
    """Without one, calls go past the dispatcher; the bits are the same."""
    given = modulation("B,D", "D")
    given = leaves(given) if requires_grad else forward_part(given)
    with mode() as listener:
        got = layer(**given)
    assert equal_bits(got, layer(**given))
    assert {"cupyops.modulate.default", "cupyops.exp_segsum.default"} <= set(listener.heard)


def test_modes_hear_of_the_backward_pass() -> None:
    given = leaves(modulation("B,D", "D"))
    want = gradients(layer, given)
    y = layer(**given)
    with Listener() as listener:
        got = torch.autograd.grad(y.square().sum(), list(given.values()))
    assert_equal([y, *got], want)
    names = {"cupyops.modulate_backward.default", "cupyops.exp_segsum_backward.default"}
    assert names <= set(listener.heard)


def derivatives(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    y = function(*given)
    first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), given)
    return [y, *first, *second]


@pytest.mark.parametrize("layout", [*LAYOUT_NAMES, "segments"])
def test_both_ways_have_the_same_derivatives(layout: str) -> None:
    if layout == "segments":
        given = [segments().requires_grad_()]
        direct, told = cupyops.exp_segsum, OPS.exp_segsum
    else:
        given = list(leaves(modulation(layout, layout)).values())

        def direct(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)

        def told(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return OPS.modulate(x, scale, shift, True)

    got, want = derivatives(direct, given), derivatives(told, given)
    assert type(got[0].grad_fn) is not type(want[0].grad_fn), "there is only one way"
    assert_equal(got, want)


def test_a_profile_has_the_operators_by_name() -> None:
    with torch.autograd.profiler.profile() as profile:
        gradients(layer, leaves(modulation("B,D", "D")))
    names = {event.key for event in profile.key_averages()}
    assert {"cupyops::modulate", "cupyops::exp_segsum_backward"} <= names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_function_computes() -> None:
    given = modulation("B,D", "D")
    arguments = (given["x"], given["scale"], given["shift"])
    traced = torch.jit.trace(layer, arguments)
    others = [value + 1 for value in arguments]
    assert equal_bits(traced(*others), layer(*others))


def test_subclasses_of_tensors_keep_their_say() -> None:
    heard = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    given = modulation("B,D", "D")
    for key in ("x", "shift"):
        heard.clear()
        y = layer(**(forward_part(given) | {key: given[key].as_subclass(Own)}))
        assert type(y) is Own
        assert "cupyops.modulate.default" in heard
    parameters = {key: torch.nn.Parameter(value) for key, value in forward_part(given).items()}
    assert type(layer(**parameters)) is Tensor


@pytest.mark.parametrize(
    "name", ["_dispatch_keys", "_get_tracing_state", "_len_torch_dispatch_stack"]
)
def test_another_torch_sends_all_through_the_dispatcher(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells whether that is needed is not public."""
    monkeypatch.delattr(torch._C, name)
    modes = runpy.run_path(cupyops._torch_modes.__file__)
    x = torch.ones(2, 3, 4)
    assert not modes["is_plain"]((x,), modes["ON_CPU"])


def printed_by(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not done.stderr, "a warning"
    return done.stdout.split()


QUIET = """
import sys, torch
with torch.inference_mode():
    import cupyops.torch
x = torch.ones(2, 3, 4, requires_grad=True)
y = cupyops.modulate(x, scale=x[:, 0])
(cupyops.exp_segsum(y[..., 0]) @ y).sum().backward()
with torch.inference_mode():
    cupyops.modulate(x + 1, shift=x[0, 0])
print("torch._dynamo" in sys.modules)
torch.ops.cupyops.modulate(x, None, None, True)
print("torch._dynamo" in sys.modules)
"""


def test_plain_tensors_do_not_wake_the_compiler() -> None:
    """What the dispatcher calls, torch wraps in its compiler, whose import takes a second."""
    assert printed_by(QUIET) == ["False", "True"]


FIRST = {
    "export": "run = torch.export.export(Block(), (x,), strict=False).graph.nodes",
    "make_fx": "run = make_fx(lambda x: cupyops.exp_segsum(x))(x).graph.nodes",
    "fake tensors": """
with FakeTensorMode():
    cupyops.exp_segsum(torch.zeros(3))
run = []
""",
    "functionalize": "torch.func.functionalize(cupyops.exp_segsum)(x); run = []",
    "compile": "torch.compile(cupyops.exp_segsum, backend='aot_eager')(x); run = []",
}
FIRST_CALL = """
import torch, cupyops
from torch.fx.experimental.proxy_tensor import make_fx
from torch._subclasses import FakeTensorMode

class Block(torch.nn.Module):
    def forward(self, x):
        return cupyops.exp_segsum(x)

x = torch.zeros(3)
{}
print(*[node.target for node in run if node.op == "call_function"])
from cupyops import _torch_modes
print(_torch_modes.is_plain((x,), _torch_modes.ON_CPU))
"""


@pytest.mark.parametrize("way", FIRST)
def test_a_first_call_that_is_watched_leaves_no_traces(way: str) -> None:
    """It imports the layer, in the midst of whatever watches it."""
    *nodes, plain = printed_by(FIRST_CALL.format(FIRST[way]))
    assert nodes == (["cupyops.exp_segsum.default"] if way in ("export", "make_fx") else [])
    assert plain == "True"


def test_autocast_changes_nothing() -> None:
    """Inputs are taken as they come: in mixed precision, the result has the dtype of x."""
    given = leaves(modulation("B,D", "D", "float32"))
    want = gradients(lambda **p: call("modulate", p), given)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(lambda **p: call("modulate", p), given)
        linear = torch.nn.Linear(4, 8)
        scale, shift = linear(torch.randn(2, 4)).chunk(2, dim=1)
        y = cupyops.modulate(torch.randn(2, 3, 4), scale=scale, shift=shift)
    assert_equal(got, want)
    assert scale.dtype is torch.bfloat16
    assert y.dtype is torch.float32


def test_no_grad_and_inference_mode() -> None:
    given = leaves(modulation("B,D", "D"))
    want = call("modulate", given).detach()
    with torch.no_grad():
        assert not (y := call("modulate", given)).requires_grad
        assert equal_bits(y, want)
    with torch.inference_mode():
        assert (y := call("modulate", given)).is_inference()
        assert equal_bits(y, want)


def test_what_inference_mode_does_not_record_is_not_recorded() -> None:
    x, a = torch.ones(1, 2, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        for y in (cupyops.modulate(x), cupyops.exp_segsum(a), OPS.exp_segsum(a), a * 2):
            assert y.is_inference()
            assert not y.requires_grad


# -- transforms ---------------------------------------------------------------------------------


def test_vmap_runs_the_samples_one_by_one() -> None:
    x, scale = torch.randn(5, 2, 3, 4), torch.randn(2, 4)
    got = torch.func.vmap(lambda v: cupyops.modulate(v, scale=scale))(x)
    assert_equal(list(got), [cupyops.modulate(v, scale=scale) for v in x])
    a = torch.randn(3, 4)
    assert equal_bits(torch.func.vmap(cupyops.exp_segsum)(a), cupyops.exp_segsum(a))


def test_jacobians_by_reverse_mode() -> None:
    x = segments(4)[0]
    for vectorize in (False, True):
        jacobian = torch.autograd.functional.jacobian(cupyops.exp_segsum, x, vectorize=vectorize)
        assert jacobian.shape == (4, 4, 4)
        want = cupyops.exp_segsum(x)[3, 0]
        torch.testing.assert_close(jacobian[3, 0], want * torch.tensor([0, 1, 1, 1]).double())
    _, product = torch.autograd.functional.jvp(cupyops.exp_segsum, x, torch.ones_like(x))
    assert product[3, 0] == 3 * cupyops.exp_segsum(x)[3, 0]


loads_scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
"""Forward mode loads a part of torch that torch itself calls deprecated."""


@loads_scripts
@pytest.mark.parametrize(
    "function", [cupyops.exp_segsum, lambda x: cupyops.modulate(x[None, None], scale=segments()[1])]
)
def test_transforms_that_would_lose_derivatives_are_refused(function: Any) -> None:
    """Else forward mode would give zeros: torch.library does not know it."""
    x = segments()[0]
    refused = pytest.raises(NotImplementedError, match=r": x .*expected reverse mode")
    with refused:
        torch.func.jvp(function, (x,), (x,))
    with refused:
        torch.func.grad(lambda v: function(v).sum())(x)
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        y = function(leaf)
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match="tangent of forward-mode"):
            torch.autograd.grad(y, leaf, dual)


@loads_scripts
def test_forward_mode_is_refused_in_compiled_code() -> None:
    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(cupyops.exp_segsum, (x,), (x,))[1]

    with pytest.raises(Exception, match="Observed exception"):
        torch.compile(tangent, fullgraph=True, backend="aot_eager")(segments())
    compiled = torch.compile(cupyops.exp_segsum, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="Observed exception"), forward_ad.dual_level():
        compiled(forward_ad.make_dual(segments(), segments()))
