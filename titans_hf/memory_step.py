"""One token into an open chunk, without gradients: the step of decoding in torch.

`memory_ops.extend_chunk` defines what is computed. Here the same is done in few operations, which is what a single
token's time consists of: the state lies in few buffers, whose slots are filled in place, and what the present memory
is made of is carried from token to token, by the recurrence itself.

Axis letters: B batch, H heads, G = B H, C tokens of a chunk, D head width.
"""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory_chunks import Write, negligible


class Pen:
    """The buffers of an open chunk, where its next token is written, and what the memory after the last is made of.

    A line of states, each one token longer than the one before, shares buffers and pen; only the last of them can be
    written on. The others do not look beyond their own length. A state that was made in another way, also from one of
    these, is not served: it gets a pen, and buffers, of its own.

    Args:
        weights, momentum, inputs, errors, gates: as in `memory_ops.MemoryState`; they are copied.
        of_M, of_S: [G, 2 + C], the shares of `M_0`, `S_0` and the chunk's gradients (negative) in `M_t` and `S_t`.

    Attributes:
        layers: per layer [G, 2 in + C, out], weights, momentum and errors.
        slots: [G, C, all inputs + 3], the inputs of all layers and the gates.
    """

    def __init__(self, weights, momentum, inputs, errors, gates, of_M: Tensor, of_S: Tensor, filled: int):
        self.batch, self.widths = weights[0].shape[:2], [W.shape[2] for W in weights]
        self.layers = [torch.cat(parts, dim=2).flatten(0, 1) for parts in zip(weights, momentum, errors, strict=True)]
        self.slots = torch.cat((*inputs, *(gate[..., None] for gate in gates)), dim=-1).flatten(0, 1)
        self.of_M, self.of_S, self.filled = of_M, of_S, filled
        self.weights = [layer[:, :width] for layer, width in zip(self.layers, self.widths, strict=True)]
        self.inputs = self.slots.split([*self.widths, 3], dim=-1)[:-1]
        self._last: weakref.ref | None = None

    def moved_to(self, state):
        """The state, which from now on is the one that can be written on."""
        self._last = weakref.ref(state)
        return state

    def retire(self) -> None:
        """Serve no state any more."""
        self._last = None

    def serves(self, state) -> bool:
        """Whether the state can be written on here and now; tensors of inference mode cannot outside of it."""
        own = self._last is not None and self._last() is state
        return own and (torch.is_inference_mode_enabled() or not self.slots.is_inference())

    def fields(self) -> dict[str, tuple[Tensor, ...]]:
        """The buffers as fields of a `MemoryState`."""
        size, parts = self.slots.shape[1], zip(self.layers, self.widths, strict=True)
        split = [layer.unflatten(0, self.batch).split((width, width, size), dim=2) for layer, width in parts]
        weights, momentum, errors = map(tuple, zip(*split, strict=True))
        *inputs, gates = self.slots.unflatten(0, self.batch).split([*self.widths, 3], dim=-1)
        inputs, gates = tuple(inputs), gates.unbind(-1)
        return dict(weights=weights, momentum=momentum, inputs=inputs, errors=errors, gates=gates)

    def write(self, k: Tensor, v: Tensor, gates: list[Tensor], max_surprise: float | None) -> None:
        """A key and value [G, 1, D] with gates [G, 1]."""
        factors = Write(self.weights, k, v, max_surprise)
        self.slots[:, self.filled] = torch.cat((*(x[:, 0] for x in factors.X), *gates), dim=-1)
        for layer, width, d in zip(self.layers, self.widths, factors.capped_errors(), strict=True):
            layer[:, 2 * width + self.filled] = d[:, 0]
        theta, eta, alpha = gates
        of_S = self.of_S * eta  # Eq. 14, and below Eq. 13, for the shares
        of_S[:, 2 + self.filled] = -theta[:, 0]
        dust = negligible(of_S.dtype)
        self.of_M = F.hardshrink(torch.addcmul(of_S, self.of_M, 1 - alpha), dust)
        self.of_S = F.hardshrink(of_S, dust)
        self.filled += 1

    def read(self, q: Tensor) -> Tensor:
        """The query [G, 1, D] through the present memory (Eq. 15)."""
        of_W, of_S, of_u = self._shares(self.of_M[:, None])
        for i, (layer, width, inputs) in enumerate(zip(self.layers, self.widths, self.inputs, strict=True)):
            q = F.silu(q) if i else q
            overlap = torch.bmm(q, inputs[:, : self.filled].mT)
            shares = torch.cat((of_W.expand(-1, -1, width), of_S.expand(-1, -1, width), of_u), dim=-1)
            q = torch.bmm(torch.cat((q, q, overlap), dim=-1).mul_(shares), layer[:, : 2 * width + self.filled])
        return q

    def _shares(self, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return of[..., :1], of[..., 1:2], of[..., 2 : 2 + self.filled]

    def state(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The present weights and momentum, [B, H, in, out] each (Eqs. 13 and 14)."""
        return tuple(tuple(self._made_of(of, i) for i in range(len(self.layers))) for of in (self.of_M, self.of_S))

    def _made_of(self, of: Tensor, i: int) -> Tensor:
        of_W, of_S, of_u = self._shares(of[:, None])
        width, layer, a = self.widths[i], self.layers[i], self.inputs[i][:, : self.filled]
        W, S, g = layer[:, : 2 * width + self.filled].split((width, width, self.filled), dim=1)
        return (W * of_W).addcmul_(S, of_S).baddbmm_((a * of_u.mT).mT, g).unflatten(0, self.batch)
