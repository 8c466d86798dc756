"""MAC as the paper prints it shows later tokens to earlier ones; ours does not."""

import pytest
import torch
from support import VOCAB, random_ids, tiny_model

from titans_hf.attention_titans import rotate
from titans_hf.mixers_titans import MemoryAsContext


class PrintedMemoryAsContext(MemoryAsContext):
    """Eqs. 21-25 as printed: all retrieved tokens stand before the segment, and the read comes after it."""

    def forward(self, x, persistent, rows, past, rotary, read_only=False, output_attentions=False):
        C, outputs = self.config.segment_size, []
        carry = self.memory.begin(x.shape[0])
        tail = carry.tail.map(lambda x: x[..., : x.shape[-1] // 3])
        read_tail = tail
        for segment in x.split(C, dim=1):
            q, tail = self.memory.queries(segment, tail)
            retrieved = self.memory.retrieve(carry.state.current()[0], q)  # Eq. 21
            context = torch.cat((persistent().expand(x.shape[0], -1, -1), retrieved, segment), dim=1)  # Eq. 22
            y = self._causal_attention(context, rotary)[:, -segment.shape[1] :]  # Eq. 23
            written = self.write_norm(y)
            _, carry, _ = self.memory(written, carry)  # Eq. 24
            q, read_tail = self.memory.queries(written, read_tail)
            outputs.append(self.combine(y, self.memory.retrieve(carry.state.current()[0], q)))
        return torch.cat(outputs, dim=1), None, None  # Eq. 25

    def _causal_attention(self, context, rotary):
        positions = torch.arange(context.shape[1])
        turn = rotary(context, positions)
        k, v = self.attention.keys_values(context)
        mask = (positions <= positions[:, None])[None, None]
        out, _ = self.attention.attend(rotate(self.attention.queries(context), turn), rotate(k, turn), v, mask)
        return self.attention.o_proj(out)


def leak(model, ids, place):
    """The largest change that another token at `place` makes to the logits before it."""
    changed = ids.clone()
    changed[:, place] = 1 + changed[:, place] % (VOCAB - 1)
    with torch.no_grad():
        before, after = (model(x, use_cache=False).logits[:, :place] for x in (ids, changed))
    return (after - before).abs().max().item()


@pytest.mark.parametrize("place", [3, 5, 10])
def test_the_printed_form_leaks_and_ours_does_not(place):
    ids = random_ids(2, 12)
    ours, printed = tiny_model("mac"), tiny_model("mac")
    for layer in printed.model.layers:
        layer.mixer.__class__ = PrintedMemoryAsContext
    assert leak(ours, ids, place) == 0.0
    assert leak(printed, ids, place) > 1e-3
