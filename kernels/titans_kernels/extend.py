"""`extend_chunk` in Triton for one token, the decoding step, as a torch operator without a backward."""

from dataclasses import replace

import torch
from torch import Tensor

from .served import Rule, refuse


def extend_chunk(
    state,
    q,
    k,
    v,
    theta,
    eta,
    alpha,
    counts: Tensor | None,
    max_surprise: float | None,
    normalised: bool = False,
    hidden_step: float = 1.0,
    delta: bool = False,
):
    """The output and the next state, as `titans_hf.memory_ops.extend_chunk` defines them; one token, no gradient."""
    refuse(state.weights, q, state.gates[0].shape[-1])
    if q.shape[2] != 1:
        raise ValueError(f"the decode kernel reads one token, `q` has {q.shape[2]}: use the torch form")
    counts = torch.ones_like(state.length) if counts is None else counts
    parts = (state.weights, state.momentum, state.inputs, state.errors)
    y, length, *found = torch.ops.titans.extend_chunk(
        *map(list, parts),
        list(state.start or ()),
        *state.gates,
        state.length,
        *(q, k, v, theta, eta, alpha, counts),
        max_surprise,
        normalised,
        hidden_step,
        delta,
    )
    gates, found = tuple(found[:3]), iter(found[3:])
    weights, momentum, inputs, errors = (tuple(next(found) for _ in part) for part in parts)
    state = replace(state, weights=weights, momentum=momentum, inputs=inputs, errors=errors, gates=gates, length=length)
    return y, state


@torch.library.custom_op("titans::extend_chunk", mutates_args=())
def _extend(
    weights: list[Tensor],
    momentum: list[Tensor],
    inputs: list[Tensor],
    errors: list[Tensor],
    start: list[Tensor],
    slot_theta: Tensor,
    slot_eta: Tensor,
    slot_alpha: Tensor,
    length: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    counts: Tensor,
    max_surprise: float | None,
    normalised: bool,
    hidden_step: float,
    delta: bool,
) -> list[Tensor]:
    """The output [B, H, 1, D], the next length, the slots of the gates, and the next state in argument order."""
    from . import launch

    state = (*weights, *momentum, *inputs, *errors)
    gates = (slot_theta, slot_eta, slot_alpha)
    rule = Rule(max_surprise, normalised, hidden_step, delta)
    return launch.token(state, start, gates, length, (q, k, v, theta, eta, alpha), counts, rule)


@_extend.register_fake
def _(weights, momentum, inputs, errors, start, slot_theta, slot_eta, slot_alpha, length, q, k, v, theta, eta, alpha,
      counts, max_surprise, normalised, hidden_step, delta):  # fmt: skip
    new = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)  # noqa: E731
    return list(map(new, (q, length, slot_theta, slot_eta, slot_alpha, *weights, *momentum, *inputs, *errors)))
