"""A DiT block in PyTorch whose modulation is this package's: one import and one line.

Two blocks with equal weights, one with DiT's own formula and one with cupyops.modulate, are
trained side by side in float32. Prints both losses as training goes on, which have to agree and to
fall; then the gradients of each modulation in the block, which have to be those of autograd
through the plain formula in float64, within the bounds that the manual states. On the GPU where
PyTorch and CuPy see one, else on the CPU:

    python docs/examples/torch_dit_block.py
"""

from __future__ import annotations

from collections.abc import Callable

try:
    import torch
except ImportError:
    print("PyTorch is not installed: nothing to show.")
    raise SystemExit(0) from None
from torch import Tensor, nn
from torch.nn import functional

import cupyops

BATCH, LENGTH, WIDTH, HEADS, CLASSES = 16, 32, 32, 4, 4
STEPS, LEARNING_RATE = 80, 0.01
LOSS_FACTOR = 5  # by which training must lower the loss
LOSS_TOLERANCE = 1e-3  # of the first loss: errors of float32, 80 steps later
EPS = torch.finfo(torch.float32).eps

Modulate = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """As in DiT's models.py."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def ours(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)


class Block(nn.Module):
    """adaLN-Zero: six rows of width D from the conditioning modulate attention and MLP."""

    def __init__(self, modulate: Modulate) -> None:
        super().__init__()
        self.modulate = modulate
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        nn.init.zeros_(self.ada[1].weight)
        nn.init.zeros_(self.ada[1].bias)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        rows = self.ada(c).chunk(6, dim=1)  # views, used where they lie
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = rows
        attended = self.attention(self.modulate(self.norm(x), shift_msa, scale_msa))
        x = x + gate_msa.unsqueeze(1) * attended
        transformed = self.mlp(self.modulate(self.norm(x), shift_mlp, scale_mlp))
        return x + gate_mlp.unsqueeze(1) * transformed


def batches(device: str) -> tuple[Tensor, list[Tensor]]:
    """The embedding of the classes, and the tokens of each step."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(CLASSES, WIDTH, generator=generator)
    tokens = [torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(STEPS)]
    return embedding.to(device), [x.to(device) for x in tokens]


def train(modulate: Modulate, device: str) -> tuple[Block, list[float]]:
    """The task: add the conditioning and the mean token to each token."""
    torch.manual_seed(0)
    block = Block(modulate).to(device)
    optimiser = torch.optim.Adam(block.parameters(), LEARNING_RATE)
    embedding, steps = batches(device)
    losses = []
    for x in steps:
        c = embedding[torch.arange(BATCH, device=device) % CLASSES]
        target = x + c.unsqueeze(1) + x.mean(1, keepdim=True)
        loss = functional.mse_loss(block(x, c), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return block, losses


def check_gradients(block: Block, device: str) -> None:
    """Of every modulation in a pass through the block, against float64."""
    calls = []

    def noted(*arguments: Tensor) -> Tensor:
        calls.append([value.detach().requires_grad_() for value in arguments])
        return ours(*arguments)

    block.modulate = noted
    embedding, (x, *_) = batches(device)
    block(x, embedding[torch.arange(BATCH, device=device) % CLASSES])
    print("\ngradient    largest error / bound")
    for arguments in calls:
        y = ours(*arguments)
        grad = torch.randn_like(y)
        got = torch.autograd.grad(y, arguments, grad)
        wide = [value.detach().double().requires_grad_() for value in arguments]
        want = torch.autograd.grad(plain(*wide), wide, grad.double())
        tokens, _, scale = (value.detach() for value in wide)
        terms = grad.double()
        bounds = [
            # Two roundings, and that of the result.
            1.5 * EPS * (terms * (1 + scale.unsqueeze(1))).abs(),
            16 * EPS * terms.abs().sum(1) + EPS / 2 * want[1].abs(),
            16 * EPS * (terms * tokens).abs().sum(1) + EPS / 2 * want[2].abs(),
        ]
        for name, g, w, bound in zip(("x", "shift", "scale"), got, want, bounds, strict=True):
            ratio = float(((g.double() - w).abs() / bound).max())
            print(f"{name:>8} {ratio:24.2f}")
            if not ratio <= 1:  # also when it is NaN
                raise SystemExit(f"the gradient of {name} is not within its bound")


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for each other
    device = "cpu"
    if torch.cuda.is_available():
        try:
            import cupy  # noqa: F401 - tensors on a GPU need it

            device = "cuda"
        except ImportError:
            pass
    print(f"PyTorch {torch.__version__} on {device}.\n\nstep   plain loss     our loss")
    _, want = train(plain, device)
    block, got = train(ours, device)
    for step in (0, *range(9, STEPS, 10)):
        print(f"{step + 1:4} {want[step]:12.6f} {got[step]:12.6f}")
    if not max(abs(a - b) for a, b in zip(got, want, strict=True)) < LOSS_TOLERANCE * want[0]:
        raise SystemExit("the losses differ")
    if not got[-1] * LOSS_FACTOR < got[0]:
        raise SystemExit(f"the loss did not fall by a factor of {LOSS_FACTOR}")
    check_gradients(block, device)
    print("\nThe losses agree, and the gradients are within their bounds.")


if __name__ == "__main__":
    main()
