"""Quantised weights: torchao's int8 loads and generates; the memory itself stays in float32."""

import pytest
import torch
from support import assert_close, every_variant, random_ids, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

pytest.importorskip("torchao", reason="torchao is not installed")


@every_variant
def test_int8_weights_load_and_generate(variant, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    model, ids = tiny_model(variant, torch.float32, seed=1, hidden_size=32, head_dim=8), random_ids(2, 17)
    model.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), dtype=torch.bfloat16
    )
    kinds = {
        name: type(module.weight.data).__name__
        for name, module in quantized.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    assert set(kinds.values()) == {"Int8Tensor"}
    starts = [p for name, p in quantized.named_parameters() if ".memory.start." in name]
    assert len(starts) == 4
    assert {p.dtype for p in starts} == {torch.float32}
    with torch.no_grad():
        outputs = quantized(ids)
        assert_close(outputs.logits.float(), model(ids).logits, 0.2)
    states = [layer.carry.memory for layer in outputs.past_key_values.layers]
    assert {x.dtype for state in states for x in state.tensors() if x.is_floating_point()} == {torch.float32}
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(quantized.generate(ids, **options), quantized.generate(ids, use_cache=False, **options))
