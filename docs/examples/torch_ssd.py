"""A Mamba-2 SSD layer in PyTorch: chunks through cupyops.exp_segsum, trained by autograd.

Within a chunk, y = (C B^T * L) x with L = exp_segsum(a); the states at the ends of the chunks obey
a recurrence of their own, whose decays are the exponentials of segment sums once more (Dao and Gu,
arXiv:2405.21060, listing 1). A log decay of -inf empties the state.

First the gradients of a sequence, with and without resets, against autograd through the
recurrence in float64, one step at a time. Then a small layer is trained twice, through cupyops and
through the listing's own segment sum; the losses have to agree and to fall. On the GPU where
PyTorch and CuPy see one, else on the CPU:

    python docs/examples/torch_ssd.py
"""

from __future__ import annotations

from collections.abc import Callable

try:
    import torch
except ImportError:
    print("PyTorch is not installed: nothing to show.")
    raise SystemExit(0) from None
from torch import Tensor

import cupyops

BATCH, HEADS, CHUNKS, T, N, P = 2, 2, 4, 32, 8, 16  # N: state size, P: head dimension
RESETS = [0, 20, 21, 50, 96]  # first tokens of documents; the second document is one token long
TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6}  # of the largest magnitude
STEPS, LEARNING_RATE = 60, 0.03
LOSS_FACTOR = 5  # by which training must lower the loss
LOSS_TOLERANCE = 1e-3  # of the first loss

Decays = Callable[[Tensor], Tensor]


def plain(a: Tensor) -> Tensor:
    """exp(segsum(a)) as in the paper's listing 1."""
    t = a.shape[-1]
    steps = a[..., None].expand(*a.shape, t)
    mask = torch.ones(t, t, dtype=torch.bool, device=a.device)
    sums = steps.masked_fill(~mask.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~mask.tril(), -torch.inf).exp()


def ssd(x: Tensor, a: Tensor, b: Tensor, c: Tensor, decays: Decays = cupyops.exp_segsum) -> Tensor:
    """y (..., length, P) of x (..., length, P), a (..., length), b and c (..., length, N)."""
    x, b, c = (value.unflatten(-2, (-1, T)) for value in (x, b, c))
    a = a.unflatten(-1, (-1, T))  # (..., chunks, T)
    inside = decays(a)
    y = (c @ b.mT * inside) @ x
    if a.shape[-2] == 1:
        return y.flatten(-3, -2)
    # What each chunk adds to the state at its end, decayed from there to the end of later chunks;
    # a chunk starts from what the chunk before it ended with.
    added = (b * inside[..., -1, :, None]).mT @ x  # (..., chunks, N, P)
    between = decays(a.sum(-1))
    states = torch.einsum("...ij,...jnp->...inp", between, added)[..., :-1, :, :]
    from_start = inside[..., 1:, :, 0] * a[..., 1:, 0, None].exp()
    y_before = (c[..., 1:, :, :] * from_start[..., None]) @ states
    return (y + torch.cat([torch.zeros_like(y[..., :1, :, :]), y_before], -3)).flatten(-3, -2)


def recurrence(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The same, one time step after the other."""
    state, ys = x.new_zeros(*x.shape[:-2], N, P), []
    for t in range(x.shape[-2]):
        state = a[..., t, None, None].exp() * state + b[..., t, :, None] * x[..., t, None, :]
        ys.append((c[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(ys, -2)


def inputs(generator: torch.Generator, length: int) -> list[Tensor]:
    """x, a, b, c in float64."""
    shapes = [(BATCH, HEADS, length, width) for width in (P, 1, N, N)]
    x, a, b, c = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [x, -0.3 * a[..., 0].abs(), b, c]


def check_gradients(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = inputs(generator, CHUNKS * T)
    grad = torch.randn(values[0].shape, generator=generator, dtype=torch.float64)
    print("resets          dtype         y    grad_x    grad_a    grad_B    grad_C")
    for resets in ([], RESETS):
        values[1][..., resets] = -torch.inf
        for dtype, tolerance in TOLERANCES.items():
            given = [v.to(device, dtype, copy=True).requires_grad_() for v in values]
            exact = [v.detach().to("cpu", torch.float64, copy=True).requires_grad_() for v in given]
            y, want = ssd(*given), recurrence(*exact)
            got = [y, *torch.autograd.grad(y, given, grad.to(y))]
            wanted = [want, *torch.autograd.grad(want, exact, grad.to(dtype).double())]
            errors = [
                float((g.detach().cpu().double() - w.detach()).abs().max() / w.detach().abs().max())
                for g, w in zip(got, wanted, strict=True)
            ]
            print(f"{len(resets):6} {dtype!s:>14}", *(f"{error:9.1e}" for error in errors))
            if not max(errors) < tolerance:
                raise SystemExit(f"an error is not below {tolerance:.0e}")


def train(decays: Decays, device: str) -> list[float]:
    """Learn the decays of the heads, and B and C, of a layer that is known by its output alone."""
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(BATCH, HEADS, CHUNKS * T, P, generator=generator) for _ in range(STEPS)]
    b, c = (torch.randn(HEADS, N, generator=generator) for _ in range(2))

    def layer(x: Tensor, p: list[Tensor], decays: Decays) -> Tensor:
        decay, b, c = p
        shape = x.shape[:-1]
        a = -torch.nn.functional.softplus(decay)[:, None].expand(shape)
        rows = (row[:, None].expand(*shape, N) for row in (b, c))
        return ssd(x, a, *rows, decays)

    teacher = [torch.tensor([-2.0, 1.0]).to(device), b.to(device), c.to(device)]
    student = [value + 0.5 * torch.ones_like(value) for value in teacher]
    student = [value.requires_grad_() for value in student]
    optimiser = torch.optim.Adam(student, LEARNING_RATE)
    losses = []
    for x in steps:
        x = x.to(device)
        with torch.no_grad():
            target = layer(x, teacher, plain)
        loss = torch.nn.functional.mse_loss(layer(x, student, decays), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for each other
    device = "cpu"
    if torch.cuda.is_available():
        try:
            import cupy  # noqa: F401 - tensors on a GPU need it

            device = "cuda"
        except ImportError:
            pass
    print(f"PyTorch {torch.__version__} on {device}.\n")
    check_gradients(device)
    want, got = train(plain, device), train(cupyops.exp_segsum, device)
    print("\nstep   plain loss     our loss")
    for step in (0, *range(9, STEPS, 10)):
        print(f"{step + 1:4} {want[step]:12.6f} {got[step]:12.6f}")
    if not max(abs(a - b) for a, b in zip(got, want, strict=True)) < LOSS_TOLERANCE * want[0]:
        raise SystemExit("the losses differ")
    if not got[-1] * LOSS_FACTOR < got[0]:
        raise SystemExit(f"the loss did not fall by a factor of {LOSS_FACTOR}")
    print("\nThe layer agrees with the recurrence, and learns as with the listing.")


if __name__ == "__main__":
    main()
