"""`scan_chunks` in Triton: whole chunks from a chunk boundary, as a torch operator with a backward.

The forward saves the state at the start of every `GROUP`-th chunk. The backward recomputes the others, all groups of a
piece in parallel: between the passes a layer keeps `1 / GROUP` of its chunk states.
"""

import torch
from torch import Tensor

from . import served
from .served import Rule, refuse


def scan_chunks(
    weights,
    momentum,
    q,
    k,
    v,
    theta,
    eta,
    alpha,
    chunks: Tensor | None,
    max_surprise: float | None,
    normalised: bool = False,
    hidden_step: float = 1.0,
    delta: bool = False,
    start=None,
):
    """Outputs, weights and momentum, as `titans_hf.memory_ops.scan_chunks` defines them."""
    refuse(weights, q, q.shape[-2])
    if chunks is None:
        chunks = torch.full(q.shape[:1], q.shape[2], device=q.device)  # [B]
    start = start or ()
    inputs = (*weights, *momentum, *start, q, k, v, theta, eta, alpha)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    y, *states = torch.ops.titans.scan_chunks(
        list(weights),
        list(momentum),
        list(start),
        *(q, k, v, theta, eta, alpha),
        chunks.to(torch.int32),
        max_surprise,
        normalised,
        hidden_step,
        delta,
        keep,
    )
    depth = len(weights)
    return y, tuple(states[:depth]), tuple(states[depth : 2 * depth])


@torch.library.custom_op("titans::scan_chunks", mutates_args=())
def _scan(
    weights: list[Tensor],
    momentum: list[Tensor],
    start: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    chunks: Tensor,
    max_surprise: float | None,
    normalised: bool,
    hidden_step: float,
    delta: bool,
    keep: bool,
) -> list[Tensor]:
    """Outputs [B, H, N, C, D]; weights, then momentum of each layer after each row's last chunk; and, if `keep`, both
    at the start of every `GROUP`-th chunk, [B, H, ceil(N / GROUP), in, out]."""
    from . import launch

    rule = Rule(max_surprise, normalised, hidden_step, delta)
    return launch.forward([*weights, *momentum], start, (q, k, v, theta, eta, alpha), chunks, rule, keep)


@_scan.register_fake
def _(weights, momentum, start, q, k, v, theta, eta, alpha, chunks, max_surprise, normalised, hidden_step, delta, keep):
    states, groups = (*weights, *momentum), -(-q.shape[2] // served.GROUP)
    kept = [W.new_empty(*W.shape[:2], groups, *W.shape[2:]) if keep else W.new_empty(0) for W in states]
    return [torch.empty_like(q, memory_format=torch.contiguous_format), *(W.new_empty(W.shape) for W in states), *kept]


def _save(ctx, inputs, output) -> None:
    weights, _, start, *inputs, _ = inputs
    ctx.depth, ctx.rule = len(weights), inputs[7:]
    ctx.set_materialize_grads(False)  # checkpoints have no gradient: do not allocate zeros for them
    ctx.save_for_backward(*inputs[:7], *start, *output[1 + 2 * ctx.depth :])


def _backward(ctx, gradients):
    q, k, v, theta, eta, alpha, chunks, *states = ctx.saved_tensors
    start, checkpoints = states[: -2 * ctx.depth], states[-2 * ctx.depth :]
    ends = [(*q.shape[:2], *x.shape[3:]) for x in checkpoints]
    shapes = zip(gradients, (q.shape, *ends), strict=False)
    dy, *d_ends = (checkpoints[0].new_zeros(shape) if g is None else g for g, shape in shapes)
    found = torch.ops.titans.scan_chunks_backward(
        dy, d_ends, checkpoints, start, q, k, v, theta, eta, alpha, chunks, *ctx.rule
    )
    states, tokens = found[:-6], found[-6:]
    weights, momentum, start = (states[i * ctx.depth : (i + 1) * ctx.depth] for i in range(3))
    return weights, momentum, start, *tokens, None, *(None for _ in ctx.rule), None


_scan.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("titans::scan_chunks_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    d_ends: list[Tensor],
    checkpoints: list[Tensor],
    start: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    chunks: Tensor,
    max_surprise: float | None,
    normalised: bool,
    hidden_step: float,
    delta: bool,
) -> list[Tensor]:
    """Gradients of weights, momentum and start, and of q, k, v, theta, eta, alpha."""
    from . import launch

    rule = Rule(max_surprise, normalised, hidden_step, delta)
    return launch.backward(dy, d_ends, checkpoints, start, (q, k, v, theta, eta, alpha), chunks, rule)


@_scan_backward.register_fake
def _(dy, d_ends, checkpoints, start, q, k, v, theta, eta, alpha, chunks, max_surprise, normalised, hidden_step, delta):
    tokens = (q, k, v, theta, eta, alpha)
    contiguous = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
    return [*(x.new_empty(x.shape) for x in (*d_ends, *start)), *contiguous]
