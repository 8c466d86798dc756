"""Rows of a batch with different numbers of real tokens, at different places of the chunk or segment grid.

Axis letters: B batch, T tokens, Q tokens that are picked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .fast_paths import inside_functorch, without_values


def take(x: Tensor, index: Tensor) -> Tensor:
    """Pick tokens `index` [B, Q] of every row of `x` [B, T, ...]."""
    index = index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


def where_rows(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Rows of `x` where `rows` [B] is True, rows of `y` elsewhere."""
    return torch.where(rows.view(-1, *[1] * (x.dim() - 1)), x, y)


def fill_slots(buffer: Tensor, new: Tensor, length: Tensor) -> Tensor:
    """Put `new` [B, H, n, ...] after the first `length` [B] slots of `buffer` [B, H, C, ...]."""
    slot = torch.arange(buffer.shape[2], device=buffer.device) - length[:, None]  # [B, C]
    shape = (slot.shape[0], 1, slot.shape[1], *[1] * (buffer.dim() - 3))
    index = slot.clamp(0, new.shape[2] - 1).view(shape)
    filled = new.gather(2, index.expand(*buffer.shape))
    return torch.where((slot < 0).view(shape), buffer, filled)


def on_host(counts: Tensor | None) -> list[int] | None:
    """Row counts as Python numbers, or None where they have no values: then callers use bounds instead."""
    return None if counts is None or without_values(counts) else counts.tolist()


def compact(x: Tensor) -> Tensor:
    """A tensor that holds just its own bytes: a view would keep a whole prefill alive."""
    if torch.compiler.is_compiling() or inside_functorch():  # sizes may be symbols, and tensors without storage
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
        """[B, T, ...] to [B, width, ...]; zeros after each row's last real token, whatever the padding held."""
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
class Part:
    """Some of the tokens of every row.

    Attributes:
        start: where they start: one place for all rows, or [B].
        width: token columns, as many as the longest row needs.
        counts: [B] tokens that each row has; None means all of `width`.
    """

    start: int | Tensor = 0
    width: int = 0
    counts: Tensor | None = None

    def of(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The part of each of several [B, T, ...]; columns after a row's last token repeat some other token."""
        if isinstance(self.start, int):
            return [x[:, self.start : self.start + self.width] for x in xs]
        index = self.start[:, None] + torch.arange(self.width, device=self.start.device)
        return [take(x, index.clamp(max=x.shape[1] - 1)) for x in xs]

    def cell(self, n: int, period: int) -> "Part":
        """The n-th cell of a part that consists of whole cells."""
        counts = None if self.counts is None else (self.counts - n * period).clamp(0, period)
        return Part(self.start + n * period, period, counts)


@dataclass
class GridCut:
    """The tokens of every row, cut at the boundaries of a grid of cells (chunks or segments).

    Attributes:
        head: closes the cell that is open.
        cells: whole cells, from boundary to boundary.
        rest: opens the next cell.
        width: token columns before the cut.
    """

    head: Part
    cells: Part
    rest: Part
    width: int

    @classmethod
    def of(cls, offset: Tensor | None, lengths: Tensor | None, width: int, period: int) -> "GridCut":
        """Cut `width` token columns.

        Args:
            offset: [B] tokens already in each row's open cell; None when every row is at a boundary.
            lengths: [B] new tokens of each row (at the front); None when every row has `width`.
            period: tokens of a cell.
        """
        if offset is not None and width == 1:  # a decoding step: into the open cell, wherever the row is
            return cls(Part(0, 1, lengths), Part(), Part(), width)
        if any(x is not None and without_values(x) for x in (offset, lengths)):
            return cls._by_bounds(offset, lengths, width, period)
        places = set(on_host(offset) or [0])
        if lengths is None and len(places) == 1:
            head = min(width, -places.pop() % period)
            whole = (width - head) // period * period
            return cls(Part(0, head), Part(head, whole), Part(head + whole, width - head - whole), width)
        return cls._by_row(offset, lengths, width, period)

    @classmethod
    def _by_row(cls, offset: Tensor | None, lengths: Tensor | None, width: int, period: int) -> "GridCut":
        """Every row has boundaries of its own."""
        lengths = torch.full_like(offset, width) if lengths is None else lengths
        head = torch.zeros_like(lengths) if offset is None else torch.minimum(lengths, -offset % period)
        whole = (lengths - head) // period * period
        rest = lengths - head - whole
        widths = [max(on_host(counts)) for counts in (head, whole, rest)]
        if not any(widths):
            widths[-1] = 1  # no row has a token: one column, whose output is unspecified
        starts = (0, head if widths[0] else 0, head + whole if widths[0] or widths[1] else 0)
        return cls(*map(Part, starts, widths, (head, whole, rest)), width)

    @classmethod
    def _by_bounds(cls, offset: Tensor | None, lengths: Tensor | None, width: int, period: int) -> "GridCut":
        """Only shapes are known: every part is as wide as it could be."""
        if offset is None:
            whole = lengths // period * period
            cells = Part(0, width // period * period, whole)
            return cls(Part(), cells, Part(whole, min(width, period), lengths - whole), width)
        lengths = torch.full_like(offset, width) if lengths is None else lengths
        head = torch.minimum(lengths, period - offset)
        whole = (lengths - head) // period * period
        widths = (min(width, period), (width - 1) // period * period, min(width - 1, period))
        starts, counts = (0, head, head + whole), (head, whole, lengths - head - whole)
        return cls(*map(Part, starts, widths, counts), width)

    def join(self, *outputs: Tensor | None) -> Tensor:
        """Outputs of head, cells and rest, None for empty parts, in the order of the tokens they were cut from."""
        parts = [(part, y) for part, y in zip((self.head, self.cells, self.rest), outputs, strict=True) if part.width]
        joined = parts[0][1] if len(parts) == 1 else torch.cat([y for _, y in parts], dim=1)
        if joined.shape[1] == self.width and all(isinstance(part.start, int) for part, _ in parts):
            return joined
        token, index, column = torch.arange(self.width, device=joined.device), 0, 0
        for part, _ in parts:
            start = part.start if isinstance(part.start, int) else part.start[:, None]
            index = torch.where(token >= start, column + token - start, index)
            column += part.width
        return take(joined, index.clamp(max=joined.shape[1] - 1))
