"""What must hold for every variant, depth and chunk size: causal, split anywhere, padding, batch, crop."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TOLERANCE, VARIANTS, VOCAB, assert_close, random_ids, tiny_model

from titans_hf import TitansCache

DEPTHS, CHUNKS, DTYPES = (1, 2, 3), (1, 3, 16), (torch.float64, torch.float32)


def is_representative(variant: int, depth: int, chunk: int, dtype: int) -> bool:
    """A Latin square over the places in the tuples above: any two of the four values meet in one of twelve models."""
    return chunk == (variant + depth) % 3 and dtype == (depth == variant % 3)


EVERY_MODEL = [
    pytest.param(
        variant,
        DEPTHS[depth],
        CHUNKS[chunk],
        DTYPES[dtype],
        id=f"{variant}-depth{DEPTHS[depth]}-chunk{CHUNKS[chunk]}-{str(DTYPES[dtype])[6:]}",
        marks=() if is_representative(v, depth, chunk, dtype) else pytest.mark.slow,
    )
    for v, variant in enumerate(VARIANTS)
    for depth, chunk, dtype in product(range(3), range(3), range(2))
]
every_model = pytest.mark.parametrize("variant, depth, chunk, dtype", EVERY_MODEL)
seeds = st.integers(0, 9999)


def build(variant, depth, chunk, dtype, seed):
    """Sizes change with the seed: window, segment, persistent tokens, gates and where forgetting leads."""
    return tiny_model(
        variant,
        dtype,
        seed,
        memory_depth=depth,
        memory_chunk_size=chunk,
        segment_size=chunk * (1 + seed % 3),
        sliding_window=(5, 1, 9)[seed % 3],
        num_persistent_tokens=(2, 0, 5)[seed // 3 % 3],
        memory_gates=("token", "chunk")[seed // 9 % 2],
        memory_conv=seed % 5 != 0,
        memory_forget_to=("zero", "start")[seed // 18 % 2],
    )


def total_length(chunk: int) -> int:
    return 17 if chunk == 1 else 41


@st.composite
def splits(draw, length: int) -> list[int]:
    """Sizes of consecutive pieces that add up to `length`."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]


@st.composite
def padding_masks(draw, rows: int, length: int) -> torch.Tensor:
    """Left and right padding of every row, with holes in some; every row keeps a token."""
    mask = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        first = draw(st.integers(0, length - 1))
        last = draw(st.integers(first, length - 1))
        mask[row, first : last + 1] = 1
        if last > first and draw(st.booleans()):
            mask[row, draw(st.integers(first, last - 1))] = 0
    return mask


def alone(model, ids, mask):
    """Each row by itself, without padding and without a cache."""
    return [model(row[real.bool()][None], use_cache=False).logits[0] for row, real in zip(ids, mask, strict=True)]


def assert_rows(logits, mask, expected, tolerance):
    for row, real, wanted in zip(logits, mask, expected, strict=True):
        assert_close(row[real.bool()], wanted, tolerance)


@every_model
def test_a_token_changes_no_logit_before_it(variant, depth, chunk, dtype):
    model, T = build(variant, depth, chunk, dtype, seed=depth + 4 * chunk), total_length(chunk)
    ids = random_ids(2, T)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        for place in (0, T // 2, T - 1):
            changed = ids.clone()
            changed[:, place] = 1 + changed[:, place] % (VOCAB - 1)
            after = model(changed, use_cache=False).logits
            assert_close(after[:, :place], before[:, :place], 0.0)
            assert ((after - before)[:, place:].abs().amax(-1) > 0).all(), "a token must reach itself and what follows"


@every_model
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
@torch.no_grad()
def test_forward_in_pieces_equals_one_forward(variant, depth, chunk, dtype, data, seed):
    model, T = build(variant, depth, chunk, dtype, seed), total_length(chunk)
    ids = random_ids(2, T, seed)
    whole = model(ids, use_cache=False).logits
    for sizes in (data.draw(splits(T)), [1] * T):
        cache, parts = TitansCache(model.config), []
        for piece in ids.split(sizes, dim=1):
            parts.append(model(piece, past_key_values=cache).logits)
        assert_close(torch.cat(parts, dim=1), whole, TOLERANCE[dtype])


@every_model
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
@torch.no_grad()
def test_a_padded_row_among_others_equals_the_row_alone(variant, depth, chunk, dtype, data, seed):
    """In one forward, and continued in pieces, where rows come to stand at different places of their chunks."""
    model, T = build(variant, depth, chunk, dtype, seed), total_length(chunk)
    mask, ids = data.draw(padding_masks(3, T)), random_ids(3, T, seed)
    expected = alone(model, ids, mask)
    assert_rows(model(ids, attention_mask=mask, use_cache=False).logits, mask, expected, TOLERANCE[dtype])

    cache, parts, start = TitansCache(model.config), [], 0
    for size in data.draw(splits(T)):
        stop = start + size
        parts.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        start = stop
    assert_rows(torch.cat(parts, dim=1), mask, expected, TOLERANCE[dtype])


@every_model
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
@torch.no_grad()
def test_crop_then_continue_equals_never_having_gone_on(variant, depth, chunk, dtype, data, seed):
    """Read a detour of up to 64 columns with padding of its own, crop it in one or two steps, and go on."""
    model, T = build(variant, depth, chunk, dtype, seed), total_length(chunk)
    mask, ids = data.draw(padding_masks(2, T)), random_ids(2, T, seed)
    expected = alone(model, ids, mask)
    cache, parts, start = TitansCache(model.config), [], 0
    for size in data.draw(splits(T)):
        stop = start + size
        parts.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        start = stop
        detour = data.draw(st.sampled_from([0, 1, 7, 33] if chunk == 1 else [0, 1, 20, 64]))
        if detour:
            extra = torch.ones(2, detour, dtype=torch.long)
            extra[0, : data.draw(st.integers(0, detour))] = 0
            seen = torch.cat((mask[:, :stop], extra), dim=1)
            model(random_ids(2, detour, seed + 1), attention_mask=seen, past_key_values=cache)
            first = data.draw(st.integers(0, detour))
            cache.crop(-first)
            cache.crop(first - detour)
            assert cache.get_seq_length() == stop
    assert_rows(torch.cat(parts, dim=1), mask, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_long_prompt_can_be_cropped_by_64_tokens(variant):
    """A prompt of several hundred tokens is read in two passes; the result and the crop are exact all the same."""
    model = tiny_model(variant, memory_chunk_size=16, segment_size=48)
    ids = random_ids(2, 301)
    whole = model(ids, use_cache=False).logits
    output = model(ids, use_cache=True)
    assert_close(output.logits, whole, 1e-9)
    cache = output.past_key_values
    cache.crop(-64)
    assert_close(model(ids[:, 237:], past_key_values=cache).logits, whole[:, 237:], 1e-9)
    mask = torch.ones_like(ids)
    mask[0, :100], mask[1, 250:] = 0, 0
    expected = alone(model, ids, mask)
    output = model(ids, attention_mask=mask, use_cache=True)
    assert_rows(output.logits, mask, expected, 1e-9)
    output.past_key_values.crop(-64)
    again = model(ids[:, 237:], attention_mask=mask, past_key_values=output.past_key_values).logits
    assert_rows(torch.cat((output.logits[:, :237], again), dim=1), mask, expected, 1e-9)


def read_and_crop(model, ids, mask, plan):
    """Follow a plan of (columns to read, of these to crop), with junk for what is cropped; returns the logits kept."""
    cache, kept, place = TitansCache(model.config), [], 0
    for size, cropped in plan:
        real = torch.cat((mask[:, : place + size - cropped], torch.ones(len(ids), cropped, dtype=torch.long)), dim=1)
        piece = torch.cat((ids[:, place : place + size - cropped], random_ids(len(ids), cropped, place)), dim=1)
        logits = model(piece, attention_mask=real, past_key_values=cache).logits
        cache.crop(-cropped)
        kept.append(logits[:, : size - cropped])
        place += size - cropped
    return torch.cat(kept, dim=1)


LONG_PLANS = {
    "a log that was used, then a long pass": [(100, 0), (300, 10), (20, 0)],
    "more tokens than the log holds, piece by piece": [(5, 0)] * 50 + [(41, 31), (9, 0)],
    "speculation": [(8, 5)] * 60,
    "long speculation": [(70, 64)] * 8 + [(1, 0)] * 30,
    "rows of different length fill the log": [(20, 0), (128, 0), (60, 40), (64, 64), (30, 0)],
}


@pytest.mark.parametrize("plan", LONG_PLANS.values(), ids=LONG_PLANS)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_crop_is_exact_however_long_the_cache_was_used(variant, plan, padded):
    model = tiny_model(variant, memory_chunk_size=16, segment_size=48)
    length = sum(size - cropped for size, cropped in plan)
    ids, mask = random_ids(2, length), torch.ones(2, length, dtype=torch.long)
    if padded:
        mask[0, 20:108], mask[1, -7:] = 0, 0
        mask[0, length // 2], mask[1, 3] = 0, 0
    assert_rows(read_and_crop(model, ids, mask, plan), mask, alone(model, ids, mask), 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["recurrent", "torch"])
@pytest.mark.parametrize("forget_to", ["zero", "start"])
@torch.no_grad()
def test_the_model_computes_the_same_with_the_token_loop(variant, implementation, forget_to):
    model = tiny_model(variant, memory_implementation=implementation, memory_forget_to=forget_to)
    reference = tiny_model(variant, memory_forget_to=forget_to)
    ids = random_ids(2, 23)
    assert_close(model(ids).logits, reference(ids).logits, 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_gradients_equal_those_of_the_token_loop(variant, forget_to):
    """Also of the learned start and of the persistent tokens."""
    ids, found = random_ids(2, 23), {}
    for implementation in ("recurrent", "torch"):
        model = tiny_model(variant, memory_implementation=implementation, memory_forget_to=forget_to).train()
        model(ids, labels=ids).loss.backward()
        found[implementation] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in found["recurrent"].items():
        assert expected.abs().max() > 0, f"{name} gets no gradient"
        assert_close(found["torch"][name], expected, 1e-9)
