"""Rows of a batch with different numbers of real tokens, standing at different places of the chunk grid.

Axis letters: B batch, T tokens, Q tokens that are picked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """Pick tokens `index` [B, Q] of every row of `x` [B, T, ...]."""
    index = index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


def where_rows(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Rows of `x` where `rows` [B] is True, rows of `y` elsewhere."""
    return torch.where(rows.view(-1, *[1] * (x.dim() - 1)), x, y)


def on_host(counts: Tensor | None) -> list[int] | None:
    """Row counts as Python numbers, or None where they have no values: then callers use bounds instead."""
    return None if counts is None or without_values(counts) else counts.tolist()


def without_values(x: Tensor) -> bool:
    """Whether only shapes are computed: `torch.compile` traces, or the tensor is on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta


def compact(x: Tensor) -> Tensor:
    """A tensor that owns just its own bytes: a view would keep a whole prefill alive."""
    if torch.compiler.is_compiling():  # sizes may be symbols
        return x.clone()
    return x if x.untyped_storage().nbytes() == x.nbytes and x.is_contiguous() else x.clone()


class PackedRows:
    """The real tokens of each row, gathered to the front in their order.

    Args:
        mask: [B, T] bool, True at real tokens, in any pattern.
    """

    def __init__(self, mask: Tensor):
        self.mask = mask
        self.lengths = mask.sum(1)  # [B]
        longest = on_host(self.lengths.max()[None])
        self.width = mask.shape[1] if longest is None else max(1, longest[0])
        self.order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.width]
        read = mask.cumsum(1)  # [B, T] real tokens up to each column
        self.started = read > 0
        self.rank = (read - 1).clamp(min=0, max=self.width - 1)
        self.valid = torch.arange(self.width, device=mask.device) < self.lengths[:, None]  # [B, width]

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [B, width, ...]; zeros behind each row's last real token, whatever the padding held."""
        return torch.where(self._like(self.valid, x), self._take(x, self.order), x.new_zeros(()))

    def unpack(self, x: Tensor) -> Tensor:
        """[B, width, ...] back to [B, T, ...]; zeros at padding."""
        return torch.where(self._like(self.mask, x), self._take(x, self.rank), x.new_zeros(()))

    def spread(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """[B, width, ...] back to [B, T, ...]; padding repeats the token before it, the first `before` [B, ...]."""
        before = x.new_zeros(()) if before is None else before[:, None]
        return torch.where(self._like(self.started, x), self._take(x, self.rank), before)

    @staticmethod
    def _take(x: Tensor, index: Tensor) -> Tensor:
        return take(x, index.to(x.device))

    @staticmethod
    def _like(flags: Tensor, x: Tensor) -> Tensor:
        return flags.view(*flags.shape, *[1] * (x.dim() - 2)).to(x.device)


@dataclass
class RowCut:
    """Cuts the tokens of every row in two: a head, and the body behind it.

    Attributes:
        width: token columns before the cut.
        head_width, body_width: columns of the two parts, as wide as their longest row; never both 0.
        head_counts, body_counts: [B] tokens of each row; None where every row fills the part. With head counts of None
            both parts are plain slices.
    """

    width: int
    head_width: int
    body_width: int
    head_counts: Tensor | None = None
    body_counts: Tensor | None = None

    @classmethod
    def at_next_line(cls, offset: Tensor | None, lengths: Tensor | None, width: int, period: int) -> "RowCut":
        """Cut at each row's next grid line: the head closes the cell that is open, the body starts on a line.

        Args:
            offset: [B] tokens already in each row's open cell, None when every row stands on a line.
            lengths: [B] new real tokens of each row (at the front), None when every row has `width`.
            width: number of token columns.
            period: grid spacing.
        """
        if offset is not None and width == 1:  # a decoding step: into the open cell, wherever the row stands
            return cls(width, 1, 0, lengths)
        places = on_host(offset)
        if offset is None or (places is not None and not any(places)):
            return cls(width, 0, width, None, lengths)
        if lengths is None and places is not None and len(set(places)) == 1:
            head = min(width, period - places[0])
            return cls(width, head, width - head)
        lengths = torch.full_like(offset, width) if lengths is None else lengths
        counts = torch.minimum(lengths, period - offset)
        if places is None:
            return cls(width, min(width, period), width - 1, counts, lengths - counts)
        counts = counts.where(offset > 0, 0)
        head = max(on_host(counts))
        return cls(width, head, max(*on_host(lengths - counts), 0 if head else 1), counts, lengths - counts)

    @classmethod
    def at_last_line(cls, lengths: Tensor | None, width: int, period: int) -> "RowCut":
        """Cut rows that start on a line at the last line they reach: whole cells in the head, the rest in the body."""
        if lengths is None:
            return cls(width, width // period * period, width % period)
        counts = lengths // period * period
        rest = lengths - counts
        if on_host(lengths) is None:
            return cls(width, width // period * period, min(width, period), counts, rest)
        head = max(on_host(counts))
        return cls(width, head, max(*on_host(rest), 0 if head else 1), counts, rest)

    def head(self, x: Tensor) -> Tensor:
        return x[:, : self.head_width]

    def body(self, x: Tensor) -> Tensor:
        if self.head_counts is None:
            return x[:, self.head_width :]
        index = self.head_counts[:, None] + torch.arange(self.body_width, device=x.device)
        return take(x, index.clamp(max=self.width - 1))

    def join(self, head: Tensor | None, body: Tensor | None) -> Tensor:
        """Outputs of head and body, back in the order of the tokens they were cut from."""
        parts = [part for part in (head, body) if part is not None]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.head_counts is None:
            return joined
        token = torch.arange(self.width, device=joined.device)
        index = torch.where(
            token < self.head_counts[:, None], token, self.head_width + token - self.head_counts[:, None]
        )
        return take(joined, index.clamp(max=joined.shape[1] - 1))
