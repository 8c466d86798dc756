"""A prefill of a fixed length can be exported; what an exported model could not compute, it refuses."""

import pytest
import torch
from support import assert_close, random_ids, slow_but, tiny_model


@slow_but("mac")
def test_an_exported_prefill_equals_eager(variant, tmp_path):
    """With any padding, and after a round trip through a file."""
    model = tiny_model(variant, torch.float32, num_hidden_layers=1, memory_chunk_size=6)
    ids = random_ids(2, 13)
    program = torch.export.export(model, (), dict(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False))
    torch.export.save(program, tmp_path / "titans.pt2")
    exported = torch.export.load(tmp_path / "titans.pt2").module()
    for masked in (0, 4):
        for new_ids in (ids, random_ids(2, 13, seed=1)):
            mask = torch.ones_like(ids)
            mask[0, :masked], mask[1, 13 - masked :] = 0, 0
            inputs = dict(input_ids=new_ids, attention_mask=mask, use_cache=False)
            with torch.no_grad():
                assert_close(exported(**inputs).logits, model(**inputs).logits, 1e-5)


def test_an_exported_model_refuses_packed_documents():
    model, ids = tiny_model("lmm", torch.float32, num_hidden_layers=1, memory_chunk_size=6), random_ids(1, 6)
    inputs = dict(input_ids=ids, position_ids=torch.arange(6)[None], use_cache=False)
    exported = torch.export.export(model, (), inputs).module()
    with torch.no_grad():
        assert_close(exported(**inputs).logits, model(**inputs).logits, 1e-5)
        with pytest.raises(RuntimeError, match="packed documents"):
            exported(**{**inputs, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])})
    with pytest.raises(ValueError, match="packed documents"):
        torch.export.export(model, (), dict(input_ids=ids, seq_idx=torch.zeros(1, 6), use_cache=False))
