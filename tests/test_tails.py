"""A tail is the last tokens read, whatever else goes on from the same buffer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titans_hf.tails import ROOM, Tail


def tokens(start, count, batch=2):
    """[batch, count, 1]: numbers that say which token stands where."""
    return (torch.arange(start, start + count) + 1000 * torch.arange(batch)[:, None]).float()[..., None]


@given(size=st.integers(0, 7), pieces=st.lists(st.integers(1, 2 * ROOM), max_size=8), settle=st.booleans())
@torch.no_grad()
def test_pieces_of_any_length(size, pieces, settle):
    tail, read = Tail(tokens(-size, size)), 0
    for count in pieces:
        tail = tail.compact() if settle else tail
        extended, tail = tail.append(tokens(read, count))
        assert torch.equal(extended, tokens(read - size, size + count))
        read += count
        assert torch.equal(tail.values, tokens(read - size, size))


@torch.no_grad()
def test_two_ways_on_from_one_tail_do_not_meet():
    """The first goes on in place; the second, and those that were before, see nothing of it."""
    trunk = Tail(tokens(0, 5)).compact()
    first = second = trunk
    for step in range(3 * ROOM):
        _, first = first.append(tokens(100 + step, 1))
        _, second = second.append(tokens(500 + step, 1))
        assert first.values[0, -1] == 100 + step
        assert second.values[0, -1] == 500 + step
    assert torch.equal(trunk.values, tokens(0, 5))
    assert torch.equal(first.values, tokens(100 + 3 * ROOM - 5, 5))
    assert torch.equal(second.values, tokens(500 + 3 * ROOM - 5, 5))


@torch.no_grad()
def test_a_step_copies_only_now_and_then():
    tail = Tail(tokens(0, 5)).compact()
    buffers = set()
    for step in range(4 * ROOM):
        _, tail = tail.append(tokens(step, 1))
        buffers.add(tail.buffer.data_ptr())
    assert len(buffers) <= 5


@torch.no_grad()
def test_the_parts_of_a_long_piece_make_the_tail_of_the_whole():
    parts = [tokens(0, 9), tokens(50, 9)]
    for tail in (Tail(torch.zeros(2, 4, 2)), Tail(torch.zeros(2, 12, 2))):
        whole = tail.append(torch.cat(parts, dim=-1))[1]
        assert torch.equal(tail.after(parts).values, whole.values)


def test_rows_of_different_lengths():
    _, tail = Tail(tokens(-3, 3)).append(tokens(0, 4), lengths=torch.tensor([4, 1]))
    assert tail.values[..., 0].tolist() == [[1, 2, 3], [998, 999, 1000]]


def test_gradients_pass_and_what_they_need_is_not_overwritten():
    x = torch.ones(1, 2, 1, requires_grad=True)
    _, tail = Tail(torch.zeros(1, 3, 1)).append(x)
    loss = tail.compact().values.square().sum()
    with torch.no_grad():
        for _ in range(3):
            _, tail = tail.append(torch.full((1, 1, 1), 7.0))
    loss.backward()
    assert x.grad.flatten().tolist() == [2, 2]


def test_a_tail_of_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        tail = Tail(tokens(0, 3)).compact()
    with torch.no_grad():
        _, tail = tail.append(tokens(3, 1))
    assert torch.equal(tail.values, tokens(1, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_without_the_last_tokens(mode):
    with mode():
        tail = Tail(tokens(0, 6)).compact().without_last(torch.tensor([0, 2]))
        assert tail.values[0, -1, 0] == 5
        assert tail.values[1, -1, 0] == 1003
