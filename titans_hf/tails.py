"""The last tokens of every row, carried from call to call.

Axis letters: B batch, T new tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .rows import take, where_rows

ROOM = 64  # tokens that can be appended before the tail has to move


class _Cursor:
    """How far a buffer is filled. All tails in the buffer share it: the one that ends here may append."""

    def __init__(self, end: int):
        self.end = end


class Tail:
    """The last `size` tokens of every row, [B, size, ...], right-aligned: the newest is last.

    They lie in a buffer with room behind them. Going on writes there, where no older tail looks: a decoding step copies
    no more than its token. What goes on from the same tail a second time, or from one that is shared, moves to a buffer
    of its own. Under autograd, while compiling, and where rows have different numbers of tokens, everything is copied.

    Attributes:
        buffer: what is kept in memory for it.
    """

    def __init__(self, values: Tensor):
        self.size = values.shape[1]
        self.buffer, self._end, self._cursor = values, self.size, None

    @classmethod
    def _in(cls, buffer: Tensor, end: int, size: int, cursor: _Cursor | None) -> "Tail":
        tail = cls.__new__(cls)
        tail.buffer, tail._end, tail.size, tail._cursor = buffer, end, size, cursor
        return tail

    def __reduce__(self):
        """Copies and pickles do not append where this tail does."""
        return Tail._in, (self.buffer, self._end, self.size, None)

    @property
    def values(self) -> Tensor:
        return self.last(self.size)

    def last(self, count: int) -> Tensor:
        return self.buffer[:, self._end - count : self._end]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tail":
        """Apply a batch operation."""
        return Tail._in(fn(self.buffer), self._end, self.size, None)

    def select(self, rows: Tensor, other: "Tail") -> "Tail":
        """Rows of this tail where `rows` [B] is True, rows of `other` elsewhere."""
        return Tail(where_rows(rows, self.values, other.values))

    def without_last(self, removed: Tensor) -> "Tail":
        """Without each row's last `removed` [B] tokens; the oldest slots become unused."""
        slot = torch.arange(self.size, device=removed.device) - removed[:, None]
        return Tail(take(self.values, slot.clamp(min=0)))

    def settled(self) -> "Tail":
        """The same tail in a buffer that holds nothing else: a view would keep a whole prefill alive."""
        if torch.compiler.is_compiling():  # sizes may be symbols
            return Tail(self.values.clone())
        return self if self._cursor is not None else self._moved()

    def _moved(self) -> "Tail":
        values = self.values
        room = values.new_zeros(values.shape[0], ROOM, *values.shape[2:])
        cursor = None if torch.is_grad_enabled() else _Cursor(self.size)
        return Tail._in(torch.cat((values, room), dim=1), self.size, self.size, cursor)

    def go_on(self, new: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, "Tail"]:
        """Read on: [the tail | the new tokens], [B, size + T, ...], and the tail after each row's last new token.

        Args:
            new: [B, T, ...].
            lengths: [B] how many of the new tokens each row has; None means all.
        """
        T, new = new.shape[1], new.to(self.buffer.dtype)  # under autocast they may differ
        self._retire()
        if lengths is not None or T > ROOM or torch.is_grad_enabled() or torch.compiler.is_compiling():
            extended = torch.cat((self.values, new), dim=1)
            return extended, Tail(_last(extended, lengths, self.size))
        home = self if self._may_append(T) else self._moved()
        end = home._end + T
        home.buffer[:, home._end : end] = new
        home._cursor.end = end
        return home.buffer[:, end - T - self.size : end], Tail._in(home.buffer, end, self.size, home._cursor)

    def _retire(self) -> None:
        """What autograd may keep of the buffer is not written on later."""
        if torch.is_grad_enabled() and self._cursor is not None:
            self._cursor.end = -1

    def _may_append(self, T: int) -> bool:
        return (
            self._cursor is not None
            and self._cursor.end == self._end
            and self._end + T <= self.buffer.shape[1]
            and (torch.is_inference_mode_enabled() or not self.buffer.is_inference())
        )

    def after(self, new: Sequence[Tensor], lengths: Tensor | None = None) -> "Tail":
        """`go_on` for new tokens whose last axis comes in parts, without joining more of them than the tail keeps."""
        T = new[0].shape[1]
        if lengths is None and self.size <= T:
            self._retire()
            return Tail(torch.cat([x[:, T - self.size :] for x in new], dim=-1).to(self.buffer.dtype))
        return self.go_on(torch.cat(list(new), dim=-1), lengths)[1]


def _last(extended: Tensor, lengths: Tensor | None, count: int) -> Tensor:
    """The last `count` real tokens of rows that stand as [old tail of `count` | new tokens]."""
    if lengths is None:
        return extended[:, extended.shape[1] - count :]
    return take(extended, lengths[:, None] + torch.arange(count, device=extended.device))
