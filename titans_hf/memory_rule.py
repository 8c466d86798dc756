"""The update rule of the neural memory (Section 3.1, Eqs. 12-16), and the token loop that defines every other form.

The memory is an MLP `M` without biases. It memorises while it reads: every token is one step of gradient descent on
`|M(k) - v|^2`, with momentum `S` and forgetting. `Rule` is what a researcher may change about such a step. `token_loop`
applies it token by token, with gradients from autograd: slow, and obviously right.

Paper to code: `theta` step size, `eta` momentum decay, `alpha` forget gate, `u` the gradient or momentary surprise, `S`
past surprise, `M` the memory now, `W` the memory at the last chunk boundary `t'`. Axis letters: B batch, T tokens,
H heads, D head width. Weights are [B, H, in, out] per layer, `M(x) = x W`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory_closed_form import OpenChunk, delta_factors, gradient_factors
from .memory_state import MemoryState, where_all
from .rows import on_host, where_rows


@dataclass(frozen=True)
class Rule:
    """What one write does: the inner loss, and how its gradient is scaled and capped.

    A new rule is a subclass, chosen in `rule_of`. The token loop and the closed form (`memory_closed_form`) serve every
    rule. The fast forms (hand-written backward, decoding step, Triton kernels) name the rules they serve, and `auto`
    passes them over for any other.

    Attributes:
        max_surprise: cap on the norm of each token's gradient, per memory layer. None is the paper as printed, which
            diverges on repetitive input.
        normalised: whether the gradient of a layer behind the first is divided by the squared norm of the layer's
            input, where that exceeds 1. A step of 1/2 then moves the layer's answer to this input by its whole error,
            however many hidden units there are, as it does in the first layer, whose inputs, the keys, have norm 1.
        hidden_step: the share of each step that the layers before the last take. With all of it every layer corrects
            the whole error, and together they overshoot.
    """

    max_surprise: float | None = None
    normalised: bool = False
    hidden_step: float = 1.0

    def __post_init__(self):
        if self.max_surprise is not None and not self.max_surprise > 0:
            raise ValueError(f"`max_surprise` must be positive, or None for no cap; got {self.max_surprise!r}")

    def loss(self, answer: Tensor, v: Tensor) -> Tensor:
        """The memory's own loss at every token, `|M(k) - v|^2` (Eq. 12): [..., D] to [...]."""
        return (answer - v).square().sum(-1)

    def error(self, answer: Tensor, v: Tensor) -> Tensor:
        """The derivative of `loss` by the answer, [..., D]: what back-propagation through the memory starts from."""
        return 2 * (answer - v)

    def gradient_point(self, boundary: tuple[Tensor, ...], present: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The weights at which a token's gradient is taken: those of the last chunk boundary (Eq. 16)."""
        return boundary

    def factors(self, weights, momentum, start, chunk: OpenChunk, gates, k: Tensor, v: Tensor):
        """Factors `a` and `g` of the gradients `u = a g^T` of new tokens [B, H, n, ...] of a chunk, in closed form."""
        return gradient_factors(self, weights, k, v)

    def scale(self, layer: int, depth: int, input: Tensor, error: Tensor) -> Tensor | float:
        """The factor on the gradient `a g^T` of one of `depth` layers, from the squared norms of its input and error.

        The norm of what is left is at most `max_surprise`.
        """
        scale = self.step_scale(layer, depth, input)
        if self.max_surprise is None:
            return scale
        squared_norm = input * error * scale**2
        return scale * self.max_surprise * squared_norm.clamp(min=self.max_surprise**2).rsqrt()

    def step_scale(self, layer: int, depth: int, input: Tensor) -> Tensor | float:
        """The same before the cap: what `hidden_step` and `normalised` make of it."""
        share = 1.0 if layer == depth - 1 else self.hidden_step
        return share / input.clamp(min=1) if self.normalised and layer else share


class DeltaRule(Rule):
    """Each token's error is taken after the writes of the tokens before it, in the last layer of the memory.

    With all gradients at the chunk's start (Eq. 16), tokens of a chunk with similar keys overshoot together, and the
    step must be small. Here a token corrects what the ones before it have left: steps up to 1/2 are stable, and a
    linear memory is that of chunks of one token, whatever the chunk size. Hidden layers stay at the chunk's start.
    """

    def gradient_point(self, boundary, present):
        return (*boundary[:-1], present[-1])

    def factors(self, weights, momentum, start, chunk, gates, k, v):
        if type(self).error is not Rule.error:
            raise ValueError(
                f"the closed form of `DeltaRule` is for the squared loss: give {type(self).__name__} its own"
            )
        return delta_factors(self, weights, momentum, start, chunk, gates, k, v)


RULES = {"chunk": Rule, "delta": DeltaRule}


def rule_of(config) -> Rule:
    """The rule of a `TitansConfig`."""
    return RULES[config.memory_write](
        config.memory_max_surprise, config.memory_step == "normalised", config.memory_hidden_step
    )


def answers(weights: tuple[Tensor, ...], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """`M(x)` for [B, H, n, D]: every layer's input and its output before the activation; the last output is `M(x)`."""
    inputs, outputs = [], []
    for W in weights:
        x = F.silu(outputs[-1]) if outputs else x
        inputs.append(x)
        outputs.append(x @ W)
    return inputs, outputs


def surprise(rule: Rule, weights: tuple[Tensor, ...], k: Tensor, v: Tensor):
    """The gradient `u` of the memory's loss by its weights (Eq. 12), by autograd; capped as the rule says.

    Args:
        weights: where the gradient is taken.
        k, v: key and value of one token, [B, H, D].

    Returns:
        Per layer `u` [B, H, in, out], and its factors `u = a^T g`: `a` [B, H, 1, in] and `g` [B, H, 1, out].
    """
    outer_grad = torch.is_grad_enabled()
    with torch.enable_grad():
        # New tensors, so that only the loss's own use of the weights counts: in MAC the keys depend on them as well.
        weights = tuple(W.clone() if outer_grad and W.requires_grad else W.detach().requires_grad_() for W in weights)
        inputs, outputs = answers(weights, k[..., None, :])
        loss = rule.loss(outputs[-1], v[..., None, :]).sum()
        found = torch.autograd.grad(loss, [*weights, *outputs], create_graph=outer_grad)
    u, errors = found[: len(weights)], found[len(weights) :]
    sizes = [[x.square().sum((-2, -1), keepdim=True) for x in xs] for xs in (inputs, errors)]
    scales = [rule.scale(layer, len(u), *pair) for layer, pair in enumerate(zip(*sizes, strict=True))]
    u, errors = ([g * scale for g, scale in zip(xs, scales, strict=True)] for xs in (u, errors))
    return u, [a if outer_grad else a.detach() for a in inputs], errors


def write(M, S, u, theta: Tensor, eta: Tensor, alpha: Tensor, start=None):
    """Write one token into the memory: `M` and `S` after it. Gates are [B, H]; the others per layer [B, H, in, out].

    Forgetting leads to `start`: alpha = 1 leaves nothing but it and the token. None is zero, as printed.
    """
    theta, eta, alpha = (gate[..., None, None] for gate in (theta, eta, alpha))
    S = tuple(eta * S_l - theta * u_l for S_l, u_l in zip(S, u, strict=True))  # Eq. 14
    M = tuple((1 - alpha) * M_l + S_l for M_l, S_l in zip(M, S, strict=True))  # Eq. 13
    if start is not None:
        M = tuple(M_l + alpha * own for M_l, own in zip(M, start, strict=True))
    return M, S


def token_loop(rule: Rule, q, k, v, theta, eta, alpha, state: MemoryState, mask: Tensor | None, chunk_size: int):
    """Read tokens one by one: write (Eqs. 12-14), then read after the token's own write (Eq. 15).

    Args:
        q, k, v: [B, T, H, D]; theta, eta, alpha: [B, T, H]; mask: [B, T] bool, True at real tokens, or None.
        state: where to go on from, at any token.

    Returns:
        The outputs [B, T, H, D], zero at padding, and the state after the last token.
    """
    state = state.opened(chunk_size)
    M, S = state.current()
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(state.length, dtype=torch.bool) if mask is None else mask[:, t]
        gates = [gate[:, t] for gate in (theta, eta, alpha)]
        u, inputs, errors = surprise(rule, rule.gradient_point(state.weights, M), k[:, t], v[:, t])
        M_new, S_new = write(M, S, u, *gates, state.start)
        y = answers(M_new, q[:, t, :, None])[1][-1].squeeze(-2)  # Eq. 15
        outputs.append(where_rows(real, y, torch.zeros_like(y)))

        M, S = where_all(real, M_new, M), where_all(real, S_new, S)
        state = state.with_tokens(inputs, errors, [gate[..., None] for gate in gates], 1).select(real, state)
        state = state.close(M, S)
    places = on_host(state.length)
    if places is not None and not any(places):
        state = state.at_boundary()
    return torch.stack(outputs, dim=1), state
