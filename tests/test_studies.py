"""What studies measure with: models of equal size, losses by place, and the probe of a memory."""

import pytest
import torch
from support import random_ids, tiny_model

pytest.importorskip("tqdm", reason="tqdm is not installed (pip install titans-hf[dev])")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install titans-hf[viz])")

from titans_hf.studies import probe  # noqa: E402
from titans_hf.studies.families import FAMILIES, build  # noqa: E402
from titans_hf.studies.places import places, token_losses  # noqa: E402

SIZES = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "window": 16}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mamba2"])
def test_models_of_all_families_have_the_asked_size_and_learn(family):
    model = build(family, SIZES, parameters=150_000, seed=0)
    assert abs(model.num_parameters() / 150_000 - 1) < 0.03
    ids = random_ids(2, 23) % 61
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    again = build(family, SIZES, parameters=150_000, seed=0)
    assert all(map(torch.equal, model.parameters(), again.parameters())), "the seed decides the start"


def test_places_double_and_cover_the_text():
    assert places(1000) == [(0, 128), (128, 256), (256, 512), (512, 1000)]
    assert places(100) == [(0, 100)]


def test_token_losses_are_the_model_s_own():
    model, ids = tiny_model("mag", torch.float32), random_ids(1, 41)
    with torch.no_grad():
        expected = model(ids, labels=ids).loss
    found = token_losses(model, ids[0], piece=7)
    assert found.shape == (40,)
    assert found.mean().item() == pytest.approx(expected.item(), abs=1e-5)


def test_alike_keys_and_common_answers_are_seen():
    same = torch.nn.functional.normalize(torch.ones(2, 9, 5), dim=-1)
    different = torch.eye(5).expand(2, 5, 5)
    assert probe.key_likeness(same) == pytest.approx((1.0, 1.0))
    assert probe.key_likeness(different) == pytest.approx((0.0, 0.2))
    assert probe.common_share(same) == pytest.approx(1.0)
    assert probe.common_share(different) == pytest.approx(0.2)
    answers = torch.ones(3, 4, 5)
    answers[1] *= 1e-7
    assert probe.dead_heads(answers, torch.ones(3, 4, 5)) == 1


def test_a_memory_that_writes_whole_values_is_not_surprised_the_second_time(tmp_path):
    """A linear memory by delta that forgets nothing, wide enough for the text, against one that hardly writes."""
    found = {}
    for share in (1 - 1e-6, 1e-6):
        linear = {"memory_depth": 1, "memory_momentum": False, "memory_forget": False, "memory_conv": False}
        model = tiny_model("lmm", num_hidden_layers=1, head_dim=24, num_persistent_tokens=0, **linear)
        gates = model.model.layers[0].mixer.memory.write_gates
        with torch.no_grad():
            gates.proj.weight.zero_()
            gates.proj.bias.fill_(torch.tensor(share, dtype=torch.float64).logit())
        found[share] = probe.probe(model, torch.arange(1, 20))
    kept, lost = found.values()
    assert kept.second_over_first < 0.5
    assert lost.second_over_first > 0.9
    assert kept.layers[0].dead_heads == 0
    assert len(kept.surprise) == 2 * 19
    assert "second pass" in probe.in_words(kept)
    probe.draw(kept, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_a_text_that_is_too_short_to_probe_is_refused():
    with pytest.raises(ValueError, match="probe with 16 or more"):
        probe.probe(tiny_model("lmm"), torch.arange(9))
