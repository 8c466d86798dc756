"""Launches the kernels: shapes, buffers and grids. Imported only where Triton runs."""

import torch
from torch import Tensor

from .kernels import (
    coefficients_kernel,
    linear_outputs_kernel,
    linear_states_kernel,
    mlp_outputs_kernel,
    mlp_states_kernel,
)
from .scan import BLOCK, NUM_WARPS, PRECISION, QUERIES


def _with_room(start: Tensor, chunks: int) -> Tensor:
    """States [B, H, N + 1, in, out] whose first slot holds the start."""
    B, H = start.shape[:2]
    states = start.new_empty(B, H, chunks + 1, *start.shape[2:], dtype=torch.float32)
    states[:, :, 0] = start
    return states


def forward(weights, momentum, q, k, v, theta, eta, alpha, chunks, max_surprise) -> list[Tensor]:
    B, H, N, C, D = q.shape
    q, k, v, theta, eta, alpha = (x.contiguous() for x in (q, k, v, theta, eta, alpha))
    new = lambda *shape: q.new_empty(B, H, N, *shape, dtype=torch.float32)  # noqa: E731
    step, write_S, decay, drift, kept = new(C, C), new(C), new(C), new(C), new(C)
    coefficients_kernel[(B * H * N,)](theta, eta, alpha, step, write_S, decay, drift, kept, C=C, num_warps=1)

    states = [_with_room(x, N) for x in (*weights, *momentum)]
    depth, hidden = len(weights), weights[0].shape[-1]
    shape = dict(H=H, N=N, PRECISION=PRECISION, C=C, D=D, BF=BLOCK)
    cap = dict(max_surprise=max_surprise or 0.0, CAPPED=max_surprise is not None)
    y, BQ = new(C, D), min(QUERIES, C)
    if depth == 1:
        (W, S), error = states, new(C, D)
        linear_states_kernel[(B * H,)](
            k, v, step, write_S, decay, drift, kept, W, S, error, chunks, **cap, **shape, num_warps=NUM_WARPS
        )
        linear_outputs_kernel[(N * C // BQ, B * H)](
            q, k, step, decay, drift, W, S, error, y, chunks, **shape, BQ=BQ, num_warps=NUM_WARPS
        )
    else:
        W1, W2, S1, S2 = states
        factors, shape["F"] = (new(C, hidden), new(C, hidden), new(C, D)), hidden
        mlp_states_kernel[(B * H,)](
            k, v, step, write_S, decay, drift, kept, W1, S1, W2, S2, *factors, chunks, **cap, **shape,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        mlp_outputs_kernel[(N * C // BQ, B * H)](
            q, k, step, decay, drift, W1, S1, W2, S2, *factors, y, chunks, **shape, BQ=BQ, num_warps=NUM_WARPS
        )
    return [y, *states]
