"""Losses by place in the text, in stretches that double: 0 to 128, 128 to 256, 256 to 512 tokens and so on."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

FIRST = 128


def places(tokens: int) -> list[tuple[int, int]]:
    """The stretches [start, end) of a text of that many tokens."""
    borders, border = [0], FIRST
    while border < tokens:
        borders, border = [*borders, border], 2 * border
    return list(pairwise([*borders, tokens]))


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, piece: int = 4096, **options) -> Tensor:
    """Nats of every token of one text [T] but the first, [T - 1]; the logits are made piece by piece."""
    hidden = model.base_model(ids[None], **{"use_cache": False, **options}).last_hidden_state[0, :-1]
    logits = (model.lm_head(part).float() for part in hidden.split(piece))
    return torch.cat([F.cross_entropy(x, y, reduction="none") for x, y in zip(logits, ids[1:].split(piece))])
