"""Every fast path gives the numbers of the plain path it replaces, and one module chooses between them."""

import pytest
import torch
from support import assert_close, every_variant, random_ids, tiny_model

from titans_hf import TitansCache, fast_paths
from titans_hf.fast_paths import PATHS, forced, takes


@torch.no_grad()
def decode(model, ids):
    """Logits of a prompt of 14 tokens, then token by token over chunk and segment ends."""
    cache = TitansCache(model.config)
    pieces = ids.split([14, *[1] * (ids.shape[1] - 14)], dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def train(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@every_variant
@pytest.mark.parametrize("path", PATHS)
def test_the_plain_path_gives_the_same_logits_and_gradients(variant, path):
    model, ids = tiny_model(variant), random_ids(2, 27)
    expected, gradients = decode(model, ids), train(model, ids)
    with forced(**{path: False}):
        assert_close(decode(model, ids), expected, 1e-9)
        for mine, theirs in zip(train(model, ids), gradients, strict=True):
            assert_close(mine, theirs, 1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_is_asked_for_in_a_forward_pass_or_a_decoding_step(path, monkeypatch):
    """A path that nothing asks for would make the test above pass without it."""
    asked = set()
    monkeypatch.setattr(fast_paths, "_forced", Noting(asked))
    model, ids = tiny_model("mag"), random_ids(2, 27)
    decode(model, ids)
    train(model, ids)
    assert path in asked


class Noting(dict):
    """An empty dict that notes what it is asked for."""

    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def __contains__(self, path):
        self.asked.add(path)
        return False


def test_fast_paths_are_for_eager_mode():
    with torch.no_grad():
        assert all(takes(path, tokens=1) for path in ("step", "query", "append", "chunks"))
        assert takes("tokens", tokens=100)
        assert not takes("tokens", tokens=3)
        assert not takes("step", tokens=2)
    with torch.enable_grad():
        assert not any(takes(path) for path in ("step", "query", "append"))
    seen = []
    torch.func.vmap(lambda x: seen.append(takes("chunks")) or x)(torch.zeros(2))
    assert seen == [False]


def test_forcing_ends_with_its_context_and_knows_its_paths():
    with forced(chunks=False):
        with forced(chunks=True, step=True):
            assert takes("chunks")
        assert not takes("chunks")
    assert takes("chunks")
    with pytest.raises(ValueError, match="knows the paths"), forced(chunk=False):
        pass
