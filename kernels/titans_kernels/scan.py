"""`scan_chunks` by Triton: whole chunks from a chunk boundary, as a torch operator with a backward.

The forward launches the kernels of `kernels.py`. It keeps every chunk's start state, `2 |M|` numbers per chunk and
head, as the torch form does; the backward goes through the chunks from the last to the first with `formulae.Chunk`.
"""

import os

import torch
from torch import Tensor

from .formulae import Chunk

CHUNKS, WIDTHS, MAX_DEPTH = (16, 32, 64), (16, 32, 64, 128), 2
MAX_HIDDEN = 512
BLOCK = 16  # hidden columns that are in registers at a time
QUERIES = 16  # tokens of a chunk that one program of the outputs kernel reads
NUM_WARPS = 8
PRECISION = "ieee"  # of the products: tokens come in float32


def check(weights, chunk_size: int) -> None:
    """Refuse a memory that the kernels do not serve, naming what they do."""
    first = weights[0]
    width, hidden = first.shape[-2:]
    for refused, what in (
        (first.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", "CPU tensors, only those of GPUs"),
        (first.dtype != torch.float32, f"a state in {first.dtype}, only in float32"),
        (len(weights) > MAX_DEPTH, f"a memory of {len(weights)} layers, only of 1 or {MAX_DEPTH}"),
        (chunk_size not in CHUNKS, f"a chunk of {chunk_size} tokens, only of {CHUNKS}"),
        (width not in WIDTHS, f"a head width of {width}, only of {WIDTHS}"),
        (
            hidden % BLOCK or hidden > MAX_HIDDEN,
            f"a hidden width of {hidden}, only multiples of {BLOCK} to {MAX_HIDDEN}",
        ),
    ):
        if refused:
            raise ValueError(f"`backend='triton'` does not serve {what}. Use 'torch'")


def scan_chunks(weights, momentum, q, k, v, theta, eta, alpha, chunks: Tensor | None, max_surprise: float | None):
    """As `titans_hf.memory_ops.scan_chunks`, which is its definition."""
    check(weights, q.shape[-2])
    if chunks is None:
        chunks = torch.full(q.shape[:1], q.shape[2], device=q.device)  # [B]
    y, *states = torch.ops.titans.scan_chunks(
        list(weights), list(momentum), q, k, v, theta, eta, alpha, chunks.to(torch.int32), max_surprise
    )
    depth = len(weights)
    row = torch.arange(q.shape[0], device=q.device)
    ends = [state[row, :, chunks] for state in states]  # [B, H, in, out] after each row's last chunk
    return y, tuple(ends[:depth]), tuple(ends[depth:])


@torch.library.custom_op("titans::scan_chunks", mutates_args=())
def _scan(
    weights: list[Tensor],
    momentum: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    chunks: Tensor,
    max_surprise: float | None,
) -> list[Tensor]:
    """Outputs [B, H, N, C, D]; then weights, then momentum of each layer at every boundary, [B, H, N + 1, in, out]."""
    from . import launch

    return launch.forward(weights, momentum, q, k, v, theta, eta, alpha, chunks, max_surprise)


@_scan.register_fake
def _(weights, momentum, q, k, v, theta, eta, alpha, chunks, max_surprise):
    B, H, N = q.shape[:3]
    states = [W.new_empty(B, H, N + 1, *W.shape[2:]) for W in (*weights, *momentum)]
    return [q.new_empty(q.shape, dtype=torch.float32), *states]


def _save(ctx, inputs, output) -> None:
    weights, _, *tokens, chunks, max_surprise = inputs
    ctx.depth, ctx.max_surprise = len(weights), max_surprise
    ctx.save_for_backward(*tokens, chunks, *output[1:])


def _backward(ctx, grads):
    q, k, v, theta, eta, alpha, chunks, *states = ctx.saved_tensors
    dy, *d_states = grads
    found = torch.ops.titans.scan_chunks_backward(
        dy, d_states, states, q, k, v, theta, eta, alpha, chunks, ctx.max_surprise
    )
    depth = ctx.depth
    starts, tokens = found[: 2 * depth], found[2 * depth :]
    return starts[:depth], starts[depth:], *tokens, None, None


_scan.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("titans::scan_chunks_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    d_states: list[Tensor],
    states: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    chunks: Tensor,
    max_surprise: float | None,
) -> list[Tensor]:
    """Gradients of the start state (weights, then momentum) and of q, k, v, theta, eta, alpha."""
    depth, N = len(states) // 2, q.shape[2]
    tokens = (q, k, v, theta, eta, alpha)
    d_tokens = [torch.zeros_like(x) for x in tokens]
    d_state = [x[:, :, N].clone() for x in d_states]
    for n in reversed(range(N)):
        start = [x[:, :, n] for x in states]
        chunk = Chunk(start[:depth], start[depth:], *(x[:, :, n].to(start[0].dtype) for x in tokens), max_surprise)
        dW, dS, *now = chunk.backward(dy[:, :, n].to(start[0].dtype), d_state[:depth], d_state[depth:])
        more = (n < chunks).view(-1, *[1] * 3)
        d_state = [torch.where(more, new, old) for new, old in zip((*dW, *dS), d_state, strict=True)]
        d_state = [d + own[:, :, n] for d, own in zip(d_state, d_states, strict=True)]
        for d_token, new in zip(d_tokens, now, strict=True):
            d_token[:, :, n] = torch.where(more if new.dim() == 4 else more[..., 0], new, 0.0).to(d_token.dtype)
    return [*d_state, *d_tokens]


@_scan_backward.register_fake
def _(dy, d_states, states, q, k, v, theta, eta, alpha, chunks, max_surprise):
    return [
        *(x.new_empty(*x.shape[:2], *x.shape[3:]) for x in states),
        *map(torch.empty_like, (q, k, v, theta, eta, alpha)),
    ]
