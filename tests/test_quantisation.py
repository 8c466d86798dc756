"""Quantised weights: torchao's int8 loads and generates; the memory itself stays in float32."""

import pytest
import torch
from support import assert_close, every_variant, random_ids, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

pytest.importorskip("torchao", reason="torchao is not installed")


def load_int8(folder, dtype: torch.dtype):
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def int8_layers(model) -> dict[str, nn.Linear]:
    named = model.named_modules()
    return {name: layer for name, layer in named if isinstance(layer, nn.Linear) and name != "lm_head"}


@every_variant
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_int8_weights_are_all_that_is_quantised(variant, dtype, tolerance, tmp_path):
    """The same model computes the same with the weights that the int8 stand for; the memory is in float32 in both."""
    model, ids = tiny_model(variant, torch.float32, hidden_size=32, head_dim=8), random_ids(2, 17)
    model.save_pretrained(tmp_path)
    quantized, plain = load_int8(tmp_path, dtype), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    layers = int8_layers(quantized)
    assert {type(layer.weight.data).__name__ for layer in layers.values()} == {"Int8Tensor"}
    starts = [p for name, p in quantized.named_parameters() if ".memory.start." in name]
    assert len(starts) == 4
    assert {p.dtype for p in starts} == {torch.float32}
    with torch.no_grad():
        for name, layer in layers.items():
            plain.get_submodule(name).weight.copy_(layer.weight.dequantize())
        outputs = quantized(ids)
        assert_close(outputs.logits, plain(ids).logits, tolerance)
    states = [layer.carry.memory for layer in outputs.past_key_values.layers]
    assert {x.dtype for state in states for x in state.tensors() if x.is_floating_point()} == {torch.float32}


@every_variant
def test_int8_weights_generate_with_a_cache_as_without(variant, tmp_path):
    model, ids = tiny_model(variant, torch.float32, hidden_size=32, head_dim=8), random_ids(2, 17)
    model.save_pretrained(tmp_path)
    quantized = load_int8(tmp_path, torch.float32)  # in bfloat16 the two ways round differently
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(quantized.generate(ids, **options), quantized.generate(ids, use_cache=False, **options))
