"""Packed batches: each document gets a fresh memory, and no token sees another document."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import VARIANTS, assert_close, every_variant, random_ids, slow_but, tiny_model
from transformers import DataCollatorWithFlattening

MARKS = {
    "position_ids": ("position_ids",),
    "seq_idx": ("seq_idx",),
    "cu_seq_lens": ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


def documents(lengths) -> list[torch.Tensor]:
    return [random_ids(1, length, seed=i)[0] for i, length in enumerate(lengths)]


def flattened(rows: list[torch.Tensor], *marks: str) -> dict:
    """What transformers' collator makes of the documents, with the given marks of where they start."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    return {name: batch[name] for name in ("input_ids", "labels", *marks)}


@every_variant
@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_packed_documents_equal_the_documents_one_by_one(variant, marks):
    """Logits, loss and every gradient; lengths below, at and above chunk, segment and window."""
    rows = documents((7, 1, 2, 19, 33, 6, 1))
    model = tiny_model(variant).train()
    packed = model(**flattened(rows, *marks))
    packed.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = [model(row[None]).logits for row in rows]
    assert_close(packed.logits, torch.cat(alone, dim=1), 1e-9)
    assert packed.past_key_values is None
    predictions = torch.cat([logits[0, :-1] for logits in alone])
    loss = torch.nn.functional.cross_entropy(predictions, torch.cat([row[1:] for row in rows]))
    assert_close(packed.loss.double(), loss, 1e-6)
    loss.backward()
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        assert_close(found, parameter.grad, 1e-5)  # transformers computes the loss in float32


@given(
    variant=st.sampled_from(VARIANTS),
    lengths=st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=5), min_size=1, max_size=3),
    data=st.data(),
)
def test_rows_of_documents_and_padding_equal_the_documents_one_by_one(variant, lengths, data):
    """Several rows, each with its own documents, padding anywhere between the tokens."""
    forget_to = data.draw(st.sampled_from(["zero", "start"]))
    model, width = tiny_model(variant, memory_forget_to=forget_to), max(map(sum, lengths)) + 3
    ids, mask = random_ids(len(lengths), width), torch.zeros(len(lengths), width, dtype=torch.long)
    positions, expected = torch.zeros_like(ids), torch.zeros(len(lengths), width, 29, dtype=torch.float64)
    with torch.no_grad():
        for row, row_lengths in enumerate(lengths):
            chosen = data.draw(st.permutations(range(width)))[: sum(row_lengths)]
            real = torch.tensor(sorted(chosen))
            mask[row, real] = 1
            for places in real.split(row_lengths):
                positions[row, places] = torch.arange(len(places))
                expected[row, places] = model(ids[row, places][None]).logits[0]
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(logits[mask.bool()], expected[mask.bool()], 1e-9)


@every_variant
def test_another_document_changes_nothing(variant):
    model, rows = tiny_model(variant), documents((9, 8, 7))
    with torch.no_grad():
        before = model(**flattened(rows, "position_ids")).logits
        after = model(**flattened([rows[0], random_ids(1, 8, seed=9)[0], rows[2]], "position_ids")).logits
    assert torch.equal(before[:, :9], after[:, :9])
    assert torch.equal(before[:, 17:], after[:, 17:])
    assert not torch.allclose(before[:, 9:17], after[:, 9:17])


def gradients(run, model, batch) -> list[torch.Tensor]:
    model.zero_grad()
    run(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@every_variant
def test_packed_documents_under_checkpointing(variant):
    batch, model = flattened(documents((7, 2, 5)), "position_ids"), tiny_model(variant, num_hidden_layers=1).train()
    expected = gradients(model, model, batch)
    model.gradient_checkpointing_enable()
    for found, wanted in zip(gradients(model, model, batch), expected, strict=True):
        assert_close(found, wanted, 1e-9)


@slow_but("mag")
def test_packed_documents_under_compilation(variant):
    """The number of documents is data: it is found outside of the compiled graphs, which go on around it."""
    batch, model = flattened(documents((7, 2, 5)), "position_ids"), tiny_model(variant, num_hidden_layers=1).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for found, wanted in zip(gradients(compiled, model, batch), gradients(model, model, batch), strict=True):
        assert_close(found, wanted, 1e-9)
    torch._dynamo.reset()


def test_position_ids_that_go_on_are_one_document():
    """As generate makes them, from a mask, with padding on the left; or from zero, from anywhere, with gaps."""
    model, ids = tiny_model("mag"), random_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        outputs = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        assert torch.equal(outputs.logits, expected)
        assert outputs.past_key_values.get_seq_length() == 8
        plain = model(ids).logits
        for start, step in ((0, 1), (5, 1), (0, 3)):
            assert torch.equal(model(ids, position_ids=start + step * torch.arange(8)[None]).logits, plain)


def test_what_packed_documents_cannot_do_is_refused():
    model = tiny_model("mac", attn_implementation="eager")
    batch = flattened(documents((4, 5)), "position_ids")
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**batch, use_cache=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 4, 8]))
