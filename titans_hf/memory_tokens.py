"""Convolution, normalisation and gating of many tokens, each fused into one pass with a hand-written backward.

A pass works, on a CPU, in blocks that stay in its cache, and keeps nothing but its inputs for the backward. The same
composed of torch's own functions would write, and keep, every intermediate tensor.

Axis letters: B batch, T tokens, H heads, D head width.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 2**18  # numbers of a block
SMALLEST = 1e-6  # a norm below this counts as this: a zero vector stays zero
LONGEST = 1.0  # a norm below this counts as this: a vector becomes no longer, and a shorter one stays as it is


def _blocks(x: Tensor) -> Iterator[slice]:
    """Blocks of the tokens of [B, T, channels]; on other devices than a CPU, one block."""
    size = max(16, BLOCK // (x.shape[0] * x.shape[2])) if x.device.type == "cpu" else x.shape[1]
    for start in range(0, x.shape[1], size):
        yield slice(start, min(start + size, x.shape[1]))


def _with_reach(x: Tensor, before: Tensor, block: slice) -> Tensor:
    """A block of tokens and those before it that the convolution reaches."""
    reach = before.shape[1]
    if block.start >= reach:
        return x[:, block.start - reach : block.stop]
    return torch.cat((before[:, block.start :], x[:, : block.stop]), dim=1)


def convolved(extended: Tensor, taps: Tensor, out: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution of [B, reach + T, channels] by [reach + 1, channels] to [B, T, channels]."""
    T = extended.shape[1] + 1 - len(taps)
    if T == 1 and out is None:
        return (extended * taps).sum(1, keepdim=True)
    mixed = torch.mul(extended[:, :T], taps[0], out=out)  # F.conv1d has no fast depthwise form on a CPU
    for tap in range(1, len(taps)):
        mixed = mixed.addcmul_(extended[:, tap : tap + T], taps[tap])
    return mixed


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, before, taps, heads, least):
        ctx.save_for_backward(x, before, taps)
        ctx.heads, ctx.least = heads, least
        return _conv_silu(x, before, taps, heads, least)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, before, taps = ctx.saved_tensors
        dy, d_taps = dy.flatten(2), torch.zeros_like(taps)
        reach = len(taps) - 1
        d_extended = dy.new_empty(x.shape[0], reach + x.shape[1], x.shape[2])
        d_extended[:, :reach] = 0
        for block in _blocks(x):
            extended = _with_reach(x, before, block)
            z = convolved(extended, taps)
            dz = torch.ops.aten.silu_backward(_unit_backward(dy[:, block], z, ctx), z)
            T = dz.shape[1]
            torch.mul(dz, taps[-1], out=d_extended[:, reach + block.start : reach + block.stop])
            for tap in range(reach):
                d_extended[:, block.start + tap : block.stop + tap].addcmul_(dz, taps[tap])
            for tap in range(reach + 1):
                d_taps[tap] += torch.mul(dz, extended[:, tap : tap + T]).sum((0, 1))
        return d_extended[:, reach:].to(x.dtype), d_extended[:, :reach].to(before.dtype), d_taps, None, None


def _unit_backward(dy: Tensor, z: Tensor, ctx) -> Tensor:
    """From the gradient of the outputs to that of SiLU's, [B, T, channels]."""
    if ctx.least is None:
        return dy
    y, dy = (x.unflatten(-1, (ctx.heads, -1)) for x in (F.silu(z), dy))
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    share = (y * dy).sum(-1, keepdim=True).div_(norm.square()).masked_fill_(norm < ctx.least, 0.0)
    return torch.addcmul(dy, y, share, value=-1).div_(norm.clamp_(min=ctx.least)).flatten(2)


def _conv_silu(x: Tensor, before: Tensor, taps: Tensor, heads: int, least: float | None) -> Tensor:
    y = torch.empty(x.shape, dtype=taps.dtype, device=x.device)
    for block in _blocks(x):
        z = F.silu(convolved(_with_reach(x, before, block), taps, out=y[:, block]), inplace=True)
        if least is not None:
            z = z.unflatten(-1, (heads, -1))
            z.div_(torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_(min=least))
    return y.unflatten(-1, (heads, -1))


def conv_silu(x: Tensor, before: Tensor, taps: Tensor, heads: int, least: float | None) -> Tensor:
    """SiLU of a causal depthwise convolution, in heads, divided by their norms.

    Args:
        x: [B, T, channels].
        before: [B, reach, channels], the tokens before.
        taps: [reach + 1, channels], in the dtype to compute in.
        least: norms below this count as this (`SMALLEST`, `LONGEST`); None leaves the heads as they are.

    Returns:
        [B, T, heads, D] in the dtype of the taps.
    """
    if torch.is_grad_enabled() and (x.requires_grad or before.requires_grad or taps.requires_grad):
        return _ConvSilu.apply(x, before, taps, heads, least)
    return _conv_silu(x, before, taps, heads, least)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gate, weight, eps):
        ctx.save_for_backward(y, gate, weight)
        ctx.eps = eps
        return _gated_norm(y, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        y, gate, weight = ctx.saved_tensors
        dy, d_gate, d_weight = torch.empty_like(y), torch.empty_like(gate), torch.zeros_like(weight)
        for block in _blocks(gate):
            x, g, dx = y[:, block], gate[:, block].to(y.dtype), d_out[:, block].to(y.dtype)
            rms = inverse_rms(x, ctx.eps)
            normed, open_gate = x * rms, F.silu(g).view_as(x)
            scaled = normed * weight
            d_gate[:, block] = torch.ops.aten.silu_backward(dx * scaled.flatten(2), g)
            dx = dx.view_as(x) * open_gate
            d_weight += (dx * normed).sum((0, 1, 2))
            dx.mul_(weight)
            share = (dx * normed).mean(-1, keepdim=True)
            torch.mul(dx.addcmul_(normed, share, value=-1), rms, out=dy[:, block])
        return dy, d_gate, d_weight, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(gate)
    for block in _blocks(gate):
        x, g = y[:, block], gate[:, block].to(y.dtype)
        out[:, block] = (x * inverse_rms(x, eps)).mul_(weight).flatten(2).mul_(F.silu(g))
    return out


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(y) * weight`, heads side by side, times SiLU of the gate.

    Args:
        y: [B, T, H, D], in the dtype to compute in, as `weight` [D].
        gate: [B, T, H D].

    Returns:
        [B, T, H D], in the dtype of the gate.
    """
    if torch.is_grad_enabled() and (y.requires_grad or gate.requires_grad or weight.requires_grad):
        return _GatedNorm.apply(y, gate, weight, eps)
    return _gated_norm(y, gate, weight, eps)
