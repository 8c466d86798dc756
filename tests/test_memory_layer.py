"""`NeuralMemory` as a layer of its own: carried state, gates by chunk, the prologue."""

import torch
from support import assert_close, tiny_config

from titans_hf import NeuralMemory, neural_memory


def build(**overrides) -> NeuralMemory:
    torch.manual_seed(0)
    memory = NeuralMemory(tiny_config("lmm", **overrides)).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_(std=0.4)
    return memory


def tokens(count: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, count, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def test_it_can_be_used_alone_and_carried():
    memory, x = build(), tokens(17)
    whole, *_ = memory(x, memory.begin(batch_size=2))
    carry, parts = memory.begin(batch_size=2), []
    for piece in x.split([5, 1, 11], dim=1):
        y, carry, _ = memory(piece, carry)
        parts.append(y)
    assert whole.shape == (2, 17, 14)
    assert_close(torch.cat(parts, dim=1), whole, 1e-9)


@torch.no_grad()
def test_gates_by_chunk_are_those_of_the_token_that_opens_the_chunk():
    memory, x = build(memory_gates="chunk", memory_chunk_size=4), tokens(11)
    by_token = memory.write_gates(x)
    _, carry, written = memory(x, memory.begin(2))
    assert_close(written.gates, by_token[:, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8]], 0.0)
    _, _, written = memory(x[:, :3], carry)  # token 8 opened the chunk that these go on with
    assert_close(
        written.gates, torch.stack((by_token[:, 8], by_token[:, 0], by_token[:, 0])[:1] + (by_token[:, 1],) * 2, 1), 0.0
    )


@torch.no_grad()
def test_the_prologue_is_one_chunk_at_the_learned_start():
    """However long it is, its gradients are taken at `M_0`, and it ends on a chunk boundary."""
    memory, persistent = build(memory_chunk_size=3), tokens(5, rows=1)[0]
    outputs, carry = memory.prologue(persistent, batch_size=2)
    assert carry.state.length is None
    y, alone, written = memory(persistent[None], memory.begin(1), chunk_size=5)
    assert_close(outputs, y.expand(2, -1, -1), 0.0)
    _, expected = neural_memory(
        written.k,
        written.k,
        written.v,
        *written.gates.unbind(2),
        memory.start(),
        chunk_size=5,
        rule=memory.rule,
        backend="recurrent",
    )
    for W, V in zip(carry.state.weights, expected.weights, strict=True):
        assert_close(W, V.expand_as(W), 1e-9)


@torch.no_grad()
def test_surprise_beyond_the_cap_is_scaled_and_below_it_untouched():
    x = tokens(9)
    free = build(memory_max_surprise=None)
    y, *_ = free(x, free.begin(2))
    for cap, same in ((1e6, True), (1e-3, False)):
        capped = build(memory_max_surprise=cap)
        z, *_ = capped(x, capped.begin(2))
        assert torch.allclose(y, z, atol=1e-12) == same
