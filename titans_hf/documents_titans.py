"""Packed batches: rows that hold several documents, each of which is read as if it were alone.

A packed batch (`DataCollatorWithFlattening`, TRL's padding-free training) marks the start of a document by
`position_ids` that restart, by `seq_idx` or by `cu_seq_lens_q`. Norms and feed-forward layers process the packed
tokens. For the mixer every document becomes a row, with its own memory, chunk grid and attention window.

Axis letters: B batch, T tokens, N real tokens of the whole batch, K documents of a group, L tokens of the longest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_titans import Rows


@dataclass
class DocumentGroup:
    """Documents of similar length as rows, padded to the longest.

    Attributes:
        tokens: [K, L] the index among the packed tokens, [0, N); padding repeats the document's last token.
        real: the flat indices into [K, L] that are not padding.
        rows: the description of these rows that the mixers take.
    """

    tokens: Tensor
    real: Tensor
    rows: Rows

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> "DocumentGroup":
        place = torch.arange(int(lengths.max()), device=starts.device)
        tokens = starts[:, None] + torch.minimum(place, lengths[:, None] - 1)
        real = (place < lengths[:, None]).flatten().nonzero()[:, 0]
        return cls(tokens, real, Rows(torch.zeros_like(lengths), None, place.shape[0]))

    def on(self, device: torch.device) -> "DocumentGroup":
        return DocumentGroup(self.tokens.to(device), self.real.to(device), self.rows.on(device))


class Documents:
    """The documents of a packed batch.

    They are grouped by length, so that padding at most doubles the length of a document.

    Args:
        shape: (B, T) of the batch.
        real: [N] flat indices of the real tokens in [B, T].
        starts: [N] bool, True at the first token of each document.
    """

    def __init__(self, shape: tuple[int, int], real: Tensor, starts: Tensor):
        self.shape, self.real = shape, real
        first = starts.nonzero()[:, 0]
        lengths = torch.diff(first, append=first.new_tensor([len(real)]))
        scale = torch.frexp(lengths.double())[1]  # 2^(scale - 1) <= length < 2^scale
        self.groups = [
            DocumentGroup.of(first[scale == size], lengths[scale == size]) for size in scale.unique().tolist()
        ]
        order = torch.cat([group.tokens.flatten()[group.real] for group in self.groups])
        self.place = order.argsort()  # [N] the index of each token in the concatenated groups

    def on(self, device: torch.device) -> "Documents":
        """The same documents on another device, for the layers that a device map places there."""
        if device == self.place.device:
            return self
        moved = Documents.__new__(Documents)
        moved.__dict__.update(self.__dict__)
        moved.groups, moved.place = [group.on(device) for group in self.groups], self.place.to(device)
        return moved

    def pack(self, x: Tensor) -> Tensor:
        """The real tokens of [B, T, ...] as one row, [1, N, ...]."""
        return x.flatten(0, 1)[self.real][None]

    def spread(self, x: Tensor, before: None = None) -> Tensor:
        """The inverse of `pack`: [1, N, ...] to [B, T, ...], with zeros at padding."""
        B, T = self.shape
        empty = x.new_zeros(B * T, *x.shape[2:])
        return empty.index_copy(0, self.real.to(x.device), x[0]).unflatten(0, (B, T))

    def apart(self, x: Tensor, mix: Callable[[Tensor, Rows], Tensor]) -> Tensor:
        """`mix`, applied to [1, N, hidden] with every document as a row of its own."""
        mixed = [mix(x[0, group.tokens], group.rows).flatten(0, 1)[group.real] for group in self.groups]
        return torch.cat(mixed)[self.place][None]


@torch.compiler.disable
def find_documents(
    shape: tuple[int, int],
    mask: Tensor | None,
    device: torch.device,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
) -> Documents | None:
    """The documents of a batch [B, T], or None if every row is one document.

    The number of documents depends on the data, so under `torch.compile` this runs outside of the graph.

    Args:
        mask: [B, T] bool, True at real tokens; None means all.
        position_ids: [B or 1, T]; a document starts where they do not increase from one real token to the next. With a
            mask they must also restart at 0: the positions that `generate` gives to tokens after a right-padded prompt
            do not mark a document.
        seq_idx: [B or 1, T] the document that each token belongs to.
        cu_seq_lens: the flat index in [B, T] at which each document starts, and at the end `B * T`.
    """
    B, T = shape
    real = torch.arange(B * T, device=device) if mask is None else mask.flatten().nonzero()[:, 0]
    row_starts = real.new_ones(len(real), dtype=torch.bool)
    row_starts[1:] = (real[1:] // T) != (real[:-1] // T)
    starts = row_starts.clone()
    if position_ids is not None:
        positions = _per_token("position_ids", position_ids, shape)[real]
        back = positions[1:] <= positions[:-1]
        starts[1:] |= back if mask is None else back & (positions[1:] == 0)
    if seq_idx is not None:
        document = _per_token("seq_idx", seq_idx, shape)[real]
        starts[1:] |= document[1:] != document[:-1]
    if cu_seq_lens is not None:
        ends = cu_seq_lens.to(device)
        if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0 or int(ends[-1]) != B * T:
            raise ValueError(f"`cu_seq_lens_q` must go from 0 to {B * T}, the tokens of the batch; got {ends.tolist()}")
        document = torch.bucketize(real, ends, right=True)
        starts[1:] |= document[1:] != document[:-1]
    return Documents(shape, real, starts) if bool((starts != row_starts).any()) else None


def _per_token(name: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
    B, T = shape
    if x.dim() != 2 or x.shape[0] not in (1, B) or x.shape[1] != T:
        raise ValueError(f"`{name}` must be [{B}, {T}] (batch, tokens), got {tuple(x.shape)}")
    return x.expand(B, T).flatten()
