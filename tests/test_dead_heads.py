"""A deep memory that forgets faster than it writes collapses to exact zeros, and nothing revives it.

Near zero a memory of depth 2 is `M(k) = W2 W1 k / 2`, and the gradient of each layer is proportional to the other
layer. Writing makes both layers grow at a rate of at most `theta sigma / (1 - eta)` per token, where `sigma` is the top
singular value of `E[v k^T]`; forgetting makes them shrink at the rate `alpha`. If the ratio of the two,
`theta sigma / ((1 - eta) alpha)`, is below 1, they shrink exponentially until they underflow. Once both layers are
zero, all gradients vanish, those of the memory's own loss and those of training. The tests show the collapse, what does
not revive the head, and that `memory_forget_to="start"` avoids it.

Forgetting alone reaches an exact zero only if a chunk forgets more than half, `(1 - alpha)^chunk < 1/2`. Otherwise the
smallest subnormal number rounds to itself. The outputs are products of the layers and exactly zero all the same.
"""

import pytest
import torch
from support import memory_inputs, random_ids, tiny_model
from torch import Tensor
from torch.nn.functional import normalize

from titans_hf import MemoryState, neural_memory

CHUNK = 16
THETA, ETA = 0.05, 0.5
ALPHA = torch.tensor([0.1, 0.07, 0.01])  # by head: two forget faster than they write
DEAD = torch.tensor([True, True, False])


def random_tokens(T: int, H: int = 3, D: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, T, H, D]: the values are the keys plus noise."""
    g = torch.Generator().manual_seed(seed)
    q, k, noise = (torch.randn(1, T, H, D, generator=g) for _ in range(3))
    k = normalize(k, dim=-1)
    return q, k, k + noise


def gates(T: int, theta: float = THETA, alpha: Tensor = ALPHA) -> list[Tensor]:
    return [torch.full((1, T, 3), theta), torch.full((1, T, 3), ETA), alpha.expand(1, T, 3)]


def start_state(forget_to: str) -> MemoryState:
    weights = memory_inputs(B=1, T=1, H=3, D=5, depth=2, dtype=torch.float32)[1].weights
    momentum = tuple(torch.zeros_like(W) for W in weights)
    return MemoryState(weights, momentum, start=weights if forget_to == "start" else None)


def write(tokens, written_with: list[Tensor], state: MemoryState) -> tuple[Tensor, MemoryState]:
    return neural_memory(*tokens, *written_with, state, chunk_size=CHUNK, max_surprise=10.0)


def largest(tensors: tuple[Tensor, ...]) -> Tensor:
    """[layers, H] the largest absolute weight of each memory layer, by head."""
    return torch.stack([x.abs().amax((0, 2, 3)) for x in tensors])


@pytest.fixture(scope="module")
def collapsed() -> tuple[Tensor, MemoryState]:
    """The outputs and the state after a stream in which two of the three heads die."""
    tokens = random_tokens(8000)
    with torch.no_grad():
        y, state = write(tokens, gates(8000), start_state("zero"))
    sigma = torch.linalg.svdvals(torch.einsum("bthi,bthj->hij", tokens[2], tokens[1]) / 8000)[:, 0]
    assert torch.equal(THETA * sigma / ((1 - ETA) * ALPHA) < 1, DEAD), "the criterion names the heads that die"
    return y, state


def test_a_head_that_forgets_faster_than_it_writes_becomes_exactly_zero(collapsed):
    """All weights and the momentum, in both layers, and all outputs. The head that writes faster stays alive."""
    y, state = collapsed
    for part in state.current():
        assert torch.equal(largest(part) == 0, DEAD.expand(2, 3))
    assert (y[:, -500:].abs().amax((0, 1, 3)) == 0).equal(DEAD)


@torch.no_grad()
def test_large_writes_do_not_revive_it(collapsed):
    """Neither steps ten times as large nor an end to forgetting: the gradient of each layer is zero with the other."""
    y, state = write(random_tokens(500, seed=1), gates(500, 10 * THETA, torch.zeros(3)), collapsed[1])
    assert torch.equal(largest(state.current()[0]) == 0, DEAD.expand(2, 3))
    assert (y.abs().amax((0, 1, 3)) == 0).equal(DEAD)


def test_no_gradient_of_training_reaches_it(collapsed):
    """A loss on the outputs has no gradient towards the head's weights, momentum, keys, values or gates."""
    _, state = collapsed
    weights, momentum = (tuple(x.clone().requires_grad_() for x in part) for part in state.current())
    tokens = [x.requires_grad_() for x in (*random_tokens(40, seed=2), *(x.clone() for x in gates(40)))]
    y, _ = write(tokens[:3], tokens[3:], MemoryState(weights, momentum))
    (y - 1).square().sum().backward()
    for x in (*weights, *momentum):
        assert torch.equal(x.grad.abs().amax((0, 2, 3)) == 0, DEAD)
    for x in tokens:
        assert torch.equal(x.grad[0].abs().sum(0).reshape(3, -1).sum(1) == 0, DEAD)


@torch.no_grad()
def test_forgetting_towards_the_start_keeps_every_head_alive():
    """The same stream and gates: what is forgotten of the start comes back with every token."""
    start = start_state("start")
    y, state = write(random_tokens(8000), gates(8000), start)
    assert (largest(state.current()[0]) > 0.3 * largest(start.weights)).all()
    assert (y[:, -500:].abs().amax((0, 1, 3)) > 0.1).all()


def model_with_a_forgetful_head(forget_to: str):
    """One layer of LMM whose head 0 forgets 30 % per token; its other gates stay as they are."""
    model = tiny_model("lmm", torch.float32, num_hidden_layers=1, memory_chunk_size=CHUNK, memory_forget_to=forget_to)
    proj = model.model.layers[0].mixer.memory.write_gates.proj
    with torch.no_grad():
        proj.weight[2 * model.config.memory_num_heads] = 0
        proj.bias[2 * model.config.memory_num_heads] = torch.tensor(0.3).logit()
    return model


@pytest.mark.parametrize("forget_to, dies", [("zero", True), ("start", False)])
def test_a_model_whose_head_has_died(forget_to, dies):
    """Its norm is exactly 0 at the end of the text, and a loss on later tokens has no gradient for that head."""
    model, ids = model_with_a_forgetful_head(forget_to), random_ids(1, 640)[0]
    norm = model.trace_surprise(ids).norm[0, :, -1]  # [H]
    assert (norm == 0).tolist() == [dies, False, False]
    labels = ids.clone()
    labels[:600] = -100
    model.train()(ids[None], labels=labels[None]).loss.backward()
    memory = model.model.layers[0].mixer.memory
    for W in memory.start.weights:
        assert (W.grad.abs().amax((1, 2)) == 0)[0] == dies
    by_head = memory.write_gates.proj.weight.grad.unflatten(0, (3, 3)).abs().amax((0, 2))
    assert (by_head == 0).tolist() == [dies, False, False]
