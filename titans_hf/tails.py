"""The last tokens of every row, or the first, carried from call to call, and how such buffers grow in place.

Axis letters: B batch, T new tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .fast_paths import takes
from .rows import compact, on_host, take, where_rows

ROOM = 16  # tokens that can be appended before a tail has to move


class Cursor:
    """Where a shared buffer ends, and so which value may append to it: the one that ends there too.

    Values that are carried from call to call (`Tail`, `memory_step.ChunkWriter`) are never changed. A value that is one
    token longer may still share its buffer with the one before, because neither looks beyond its own end. Only the
    longest may append in place; any other value, and any value of autograd or of inference mode outside of it, copies
    the buffer first. Copies and pickles have none until they move.
    """

    def __init__(self, end: int):
        self.end = end

    def allows(self, end: int, buffer: Tensor) -> bool:
        """Whether a value with that end may append to the buffer."""
        return self.end == end and (torch.is_inference_mode_enabled() or not buffer.is_inference())

    def retire(self) -> None:
        """Allow no value to append any more."""
        self.end = -1


class Tail:
    """The last `size` tokens of every row, [B, size, ...], right-aligned: the newest is last.

    The buffer has room after them, so that a decoding step writes its own token and copies nothing. Under autograd, in
    `torch.compile`, and where rows have different numbers of new tokens, everything is copied.

    Attributes:
        buffer: what is kept in memory for it.
    """

    def __init__(self, values: Tensor):
        self.size = values.shape[1]
        self.buffer, self._end, self._cursor = values, self.size, None

    @classmethod
    def _in(cls, buffer: Tensor, end: int, size: int, cursor: Cursor | None) -> "Tail":
        tail = cls.__new__(cls)
        tail.buffer, tail._end, tail.size, tail._cursor = buffer, end, size, cursor
        return tail

    def __reduce__(self):
        """Copies and pickles do not append where this tail does."""
        return type(self)._in, (self.buffer, self._end, self.size, None)

    @property
    def values(self) -> Tensor:
        return self.last(self.size)

    def last(self, count: int) -> Tensor:
        return self.buffer[:, self._end - count : self._end]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tail":
        """Apply a batch operation."""
        return self._in(fn(self.buffer), self._end, self.size, None)

    def select(self, rows: Tensor, other: "Tail") -> "Tail":
        """Rows of this tail where `rows` [B] is True, rows of `other` elsewhere."""
        return Tail(where_rows(rows, self.values, other.values))

    def without_last(self, removed: Tensor) -> "Tail":
        """Without each row's last `removed` [B] tokens; the oldest slots become unused."""
        slot = torch.arange(self.size, device=removed.device) - removed[:, None]
        return Tail(take(self.values, slot.clamp(min=0)))

    def compact(self) -> "Tail":
        """The same tail in a buffer that holds nothing else: a view would keep a whole prefill alive."""
        if torch.compiler.is_compiling():
            return type(self)(compact(self.values))
        return self if self._cursor is not None else self._moved()

    def _moved(self) -> "Tail":
        values = self.values
        room = values.new_zeros(values.shape[0], self._room(), *values.shape[2:])
        cursor = Cursor(self.size) if takes("append") else None
        return self._in(torch.cat((values, room), dim=1), self.size, self.size, cursor)

    def _room(self) -> int:
        """Tokens that can be appended to a buffer that moves now."""
        return ROOM

    def _size_after(self, new_tokens: int) -> int:
        return self.size

    def append(self, new: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, "Tail"]:
        """Append tokens: returns [the tail | the new tokens], [B, size + T, ...], and the tail after each row's last.

        Args:
            new: [B, T, ...].
            lengths: [B] how many of the new tokens each row has; None means all.
        """
        T, new = new.shape[1], new.to(self.buffer.dtype)  # under autocast they may differ
        if lengths is not None or T > ROOM or not takes("append"):
            self._retire()
            extended = torch.cat((self.values, new), dim=1)
            ends = None if lengths is None else self.size + lengths
            return extended, type(self)(_last(extended, ends, self._size_after(T)))
        home, end = self, self._end + T
        if self._cursor is None or end > self.buffer.shape[1] or not self._cursor.allows(self._end, self.buffer):
            home = self._moved()
            end = home._end + T
        home.buffer[:, home._end : end] = new
        home._cursor.end = end
        tail = self._in(home.buffer, end, self._size_after(T), home._cursor)
        return home.buffer[:, end - T - self.size : end], tail

    def _retire(self) -> None:
        """Autograd may keep the buffer: do not write to it later."""
        if self._cursor is not None and torch.is_grad_enabled():
            self._cursor.retire()

    def after(self, new: Sequence[Tensor], lengths: Tensor | None = None) -> "Tail":
        """The tail after new tokens whose last axis comes in parts; joins no more of them than the tail keeps."""
        T = new[0].shape[1]
        if lengths is None and self.size <= T:
            self._retire()
            return Tail(torch.cat([x[:, T - self.size :] for x in new], dim=-1).to(self.buffer.dtype))
        return self.append(torch.cat(list(new), dim=-1), lengths)[1]


class GrowingTail(Tail):
    """All tokens of every row, for attention without a window: it grows by every token.

    Rows are right-aligned, too. A row with fewer tokens than the longest has unused slots before them.
    """

    def _room(self) -> int:
        return max(ROOM, self.size // 8)

    def _size_after(self, new_tokens: int) -> int:
        return self.size + new_tokens

    def select(self, rows: Tensor, other: Tail) -> Tail:
        size = max(self.size, other.size)
        return GrowingTail(where_rows(rows, *(_widened(tail.values, size) for tail in (self, other))))

    def without_last(self, removed: Tensor) -> Tail:
        """Without each row's last `removed` [B] tokens; slots that no row needs any more are given back."""
        least = int(removed.min())
        slot = torch.arange(self.size - least, device=removed.device) - (removed - least)[:, None]
        return GrowingTail(take(self.values, slot.clamp(min=0)))


class Head(Tail):
    """The first `size` tokens of every row, left-aligned: what comes later moves nothing.

    A row that has read fewer has unused slots after them; cropping leaves slots that are filled again.
    """

    def select(self, rows: Tensor, other: Tail) -> Tail:
        return Head(where_rows(rows, self.values, other.values))

    def without_last(self, removed: Tensor) -> Tail:
        return self

    def compact(self) -> Tail:
        return Head(compact(self.values))

    def filled(self, new: Tensor, seen: Tensor, lengths: Tensor | None) -> "Head":
        """The head after new tokens [B, T, ...] of rows that have read `seen` [B]; `lengths` as for `Tail.append`."""
        read = on_host(seen)
        if read is not None and min(read) >= self.size:
            return self
        slot = torch.arange(self.size, device=seen.device) - seen[:, None]  # [B, size], its place among the new tokens
        is_new = (slot >= 0) & (slot < (new.shape[1] if lengths is None else lengths[:, None]))
        found = take(new, slot.clamp(0, new.shape[1] - 1)).to(self.buffer.dtype)
        return Head(torch.where(is_new.view(*is_new.shape, *[1] * (new.dim() - 2)), found, self.values))


def _widened(values: Tensor, size: int) -> Tensor:
    """Tokens [B, N, ...] with unused slots before them, [B, size, ...]."""
    unused = values.new_zeros(values.shape[0], size - values.shape[1], *values.shape[2:])
    return torch.cat((unused, values), dim=1)


def _last(extended: Tensor, ends: Tensor | None, count: int) -> Tensor:
    """The `count` tokens before `ends` [B] in every row; None is the rows' end."""
    if ends is None:
        return extended[:, extended.shape[1] - count :]
    slot = (ends - count)[:, None] + torch.arange(count, device=extended.device)
    return take(extended, slot.clamp(min=0))
