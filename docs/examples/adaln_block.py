"""An adaLN-Zero transformer block (DiT), forward and backward by hand, checked and trained.

One linear layer turns the conditioning vector of each sample into six rows of width D: shift, scale
and gate of the attention branch and of the MLP branch. The rows are views into one array, forward
and backward; nothing is copied.

Prints the error of each gradient against central differences in float64, then the loss of a
training run in float32. On the GPU through CuPy where there is one, else on NumPy:

    python docs/examples/adaln_block.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyops

GRADIENT_TOLERANCE = 1e-8  # central differences with a step of 1e-5 leave about 1e-10
STEPS, LEARNING_RATE = 60, 0.01
LOSS_FACTOR = 5  # by which training must lower the loss


def array_library() -> Any:
    """CuPy if it is installed and sees a GPU, else NumPy."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else np
    except Exception:  # not installed, or no driver: CuPy raises several kinds of error
        return np


xp = array_library()

# Each layer returns its result and a function `backward` that takes the gradient of the loss with
# respect to the result and returns the gradients with respect to the layer's arguments.


def linear(x: Any, w: Any) -> tuple[Any, Any]:
    def rows(array: Any) -> Any:
        return array.reshape(-1, array.shape[-1])

    return x @ w, lambda grad: (grad @ w.T, rows(x).T @ rows(grad))


def silu(x: Any) -> tuple[Any, Any]:
    sigmoid = 1 / (1 + xp.exp(-x))
    return x * sigmoid, lambda grad: grad * sigmoid * (1 + x * (1 - sigmoid))


def layer_norm(x: Any) -> tuple[Any, Any]:
    """Without scale and shift of its own: the modulation brings them."""
    centred = x - x.mean(-1, keepdims=True)
    inverse_std = 1 / xp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    y = centred * inverse_std

    def backward(grad: Any) -> Any:
        along_y = y * (grad * y).mean(-1, keepdims=True)
        return inverse_std * (grad - grad.mean(-1, keepdims=True) - along_y)

    return y, backward


def attention(x: Any, w_qkv: Any, w_out: Any) -> tuple[Any, Any]:
    """Self-attention with one head."""
    qkv, qkv_backward = linear(x, w_qkv)
    q, k, v = xp.split(qkv, 3, axis=-1)
    factor = q.shape[-1] ** -0.5
    logits = factor * (q @ k.swapaxes(1, 2))
    exponentials = xp.exp(logits - logits.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    y, out_backward = linear(weights @ v, w_out)

    def backward(grad: Any) -> tuple[Any, Any, Any]:
        grad_heads, grad_w_out = out_backward(grad)
        grad_v = weights.swapaxes(1, 2) @ grad_heads
        weighted = weights * (grad_heads @ v.swapaxes(1, 2))
        grad_logits = factor * (weighted - weights * weighted.sum(-1, keepdims=True))
        grad_qkv = [grad_logits @ k, grad_logits.swapaxes(1, 2) @ q, grad_v]
        return *qkv_backward(xp.concatenate(grad_qkv, axis=-1)), grad_w_out

    return y, backward


def mlp(x: Any, w_up: Any, w_down: Any) -> tuple[Any, Any]:
    up, up_backward = linear(x, w_up)
    active, silu_backward = silu(up)
    y, down_backward = linear(active, w_down)

    def backward(grad: Any) -> tuple[Any, Any, Any]:
        grad_active, grad_w_down = down_backward(grad)
        return *up_backward(silu_backward(grad_active)), grad_w_down

    return y, backward


def branch(layer: Any, x: Any, weights: list[Any], rows: list[Any]) -> tuple[Any, Any]:
    """x + gate * layer(layer_norm(x) * (1 + scale) + shift), with rows = shift, scale, gate."""
    shift, scale, gate = rows
    normed, norm_backward = layer_norm(x)
    modulated = cupyops.modulate(normed, scale=scale, shift=shift, one_plus_scale=True)
    y, layer_backward = layer(modulated, *weights)

    def backward(grad: Any, out: list[Any]) -> tuple[Any, ...]:
        """Gradients of x and the weights; those of shift, scale and gate are written to out."""
        grad_shift, grad_scale, grad_gate = out
        # A gate is a modulation too: gate instead of 1 + scale, and no shift.
        to_y = cupyops.modulate_backward(
            y, grad_output=grad, scale=gate, out=(None, grad_gate, None)
        )
        grad_modulated, *grad_weights = layer_backward(to_y.grad_input)
        to_normed = cupyops.modulate_backward(
            normed,
            grad_output=grad_modulated,
            scale=scale,
            shift=shift,
            one_plus_scale=True,  # the flag of the forward call
            out=(None, grad_scale, grad_shift),
        )
        return grad + norm_backward(to_normed.grad_input), *grad_weights

    return x + cupyops.modulate(y, scale=gate), backward


def loss_and_grads(p: dict[str, Any], target: Any) -> tuple[Any, dict[str, Any]]:
    """Mean squared error of the block for p["x"] (B, L, D) and p["c"] (B, D), and all gradients."""
    active, silu_backward = silu(p["c"])
    projected, projection_backward = linear(active, p["w_ada"])
    ada = projected + p["b_ada"]
    chunks = xp.split(ada, 6, axis=1)  # views: (B, D), rows 6 * D apart; no copy
    x1, backward1 = branch(attention, p["x"], [p["w_qkv"], p["w_out"]], chunks[:3])
    y, backward2 = branch(mlp, x1, [p["w_up"], p["w_down"]], chunks[3:])

    grads = {}
    # Outputs must not overlap. The chunks interleave in memory but share no element: allowed.
    grad_ada = xp.empty_like(ada)
    grad_chunks = xp.split(grad_ada, 6, axis=1)
    grad_y = (y - target) * (2 / y.size)
    grad_x1, grads["w_up"], grads["w_down"] = backward2(grad_y, grad_chunks[3:])
    grads["x"], grads["w_qkv"], grads["w_out"] = backward1(grad_x1, grad_chunks[:3])
    grads["b_ada"] = grad_ada.sum(0)
    grad_active, grads["w_ada"] = projection_backward(grad_ada)
    grads["c"] = silu_backward(grad_active)
    return ((y - target) ** 2).mean(), grads


def initial_parameters(d: int, rng: np.random.Generator) -> dict[str, Any]:
    """adaLN-Zero: the projection starts at 0, so all gates are 0 and the block is the identity."""
    shapes = {"w_qkv": (d, 3 * d), "w_out": (d, d), "w_up": (d, 4 * d), "w_down": (4 * d, d)}
    p = {name: rng.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
    p |= {"w_ada": np.zeros((d, 6 * d)), "b_ada": np.zeros(6 * d)}
    return {name: xp.asarray(array) for name, array in p.items()}


def check_gradients(rng: np.random.Generator, step: float = 1e-5) -> None:
    b, length, d = 2, 5, 8
    parameters = initial_parameters(d, rng)
    x, target = (xp.asarray(rng.standard_normal((b, length, d))) for _ in range(2))
    p = parameters | {"x": x, "c": xp.asarray(rng.standard_normal((b, d)))}
    _, grads = loss_and_grads(p, target)
    learning = [name for name in parameters if (grads[name] != 0).any()]
    print(f"At the zero initialisation only {' and '.join(learning)} have a gradient.")
    if learning != ["w_ada", "b_ada"]:
        raise SystemExit("w_ada and b_ada, and no others, were expected to have one")

    for name in learning:  # so that every gradient has something to say
        p[name] = xp.asarray(rng.normal(0, 0.5, p[name].shape))
    _, grads = loss_and_grads(p, target)
    print(f"\nAfter a random one:\n{'gradient':>8} {'shape':>10} {'error':>8}")
    for name, value in p.items():
        worst = 0.0
        for _ in range(5):
            direction = xp.asarray(rng.standard_normal(value.shape))
            direction /= xp.linalg.norm(direction)
            ahead, _ = loss_and_grads(p | {name: value + step * direction}, target)
            behind, _ = loss_and_grads(p | {name: value - step * direction}, target)
            error = (ahead - behind) / (2 * step) - (grads[name] * direction).sum()
            worst = max(worst, float(abs(error) / xp.linalg.norm(grads[name])))
        print(f"{name:>8} {value.shape!s:>10} {worst:8.1e}")
        if not worst < GRADIENT_TOLERANCE:
            raise SystemExit(f"the error of {name} is not below {GRADIENT_TOLERANCE:.0e}")


def train(rng: np.random.Generator) -> None:
    """Adam, new samples in each step. The task: add the conditioning and the mean token to a token.

    The conditioning is the embedding of one of a few classes.
    """
    b, length, d, classes = 32, 8, 16, 4
    p = {name: array.astype("float32") for name, array in initial_parameters(d, rng).items()}
    mean, square = ({name: 0 * array for name, array in p.items()} for _ in range(2))
    embedding = xp.asarray(rng.standard_normal((classes, d), "float32"))
    losses = []
    print(f"\nTraining in float32:\n{'step':>8} {'loss':>10}")
    for t in range(1, STEPS + 1):
        x = xp.asarray(rng.standard_normal((b, length, d), "float32"))
        c = embedding[xp.asarray(rng.integers(classes, size=b))]
        target = x + c[:, None] + x.mean(1, keepdims=True)
        loss, grads = loss_and_grads(p | {"x": x, "c": c}, target)
        losses.append(float(loss))
        if t == 1 or t % 10 == 0:
            print(f"{t:8} {losses[-1]:10.4f}")
        for name in p:
            mean[name] += 0.1 * (grads[name] - mean[name])
            square[name] += 0.001 * (grads[name] ** 2 - square[name])
            root = xp.sqrt(square[name] / (1 - 0.999**t)) + 1e-8
            p[name] -= LEARNING_RATE * mean[name] / (1 - 0.9**t) / root
    if not losses[-1] * LOSS_FACTOR < losses[0]:
        raise SystemExit(f"the loss did not fall by a factor of {LOSS_FACTOR}")
    print(f"The loss fell by a factor of {losses[0] / losses[-1]:.0f}.")


def main() -> None:
    print(f"Arrays of {xp.__name__}.")
    rng = np.random.default_rng(0)
    check_gradients(rng)
    train(rng)


if __name__ == "__main__":
    main()
