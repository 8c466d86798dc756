"""The memory is learned and used: recall beyond the window, against the same model that never writes."""

import pytest
import torch

from titans_hf.studies import recall
from titans_hf.train.small_model import PEAK_LR, make_schedule


def test_a_small_mag_recalls_what_its_window_cannot_see():
    """Two layers with a window of 4 reach 6 tokens back; the pairs stood 14 and more tokens back. Chance: 1 in 8."""
    task = ["--variant", "mag", "--symbols", "8", "--pairs", "2", "--gap", "14"]
    size = ["--window", "4", "--chunk", "8", "--hidden-size", "32", "--steps", "150", "--lr", "1e-2", "--quiet"]
    with_memory, without = recall.main([*task, *size])["runs"]
    assert with_memory["accuracy_by_gap"]["14"] > 0.95
    assert without["accuracy_by_gap"]["14"] < 0.3
    assert with_memory["accuracy_by_gap"]["56"] > 0.9, "what was learned at one distance holds at four times it"


def test_the_learning_rate_rises_from_a_tenth_to_its_peak_and_falls_back():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK_LR)
    schedule, rates = make_schedule(optimizer, steps=200), []
    for _ in range(201):
        rates.append(optimizer.param_groups[0]["lr"] / PEAK_LR)
        optimizer.step()
        schedule.step()
    assert rates.index(max(rates)) == 10
    expected = {0: 0.1, 5: 0.55, 10: 1.0, 105: 0.55, 200: 0.1}
    assert {step: rates[step] for step in expected} == pytest.approx(expected)
