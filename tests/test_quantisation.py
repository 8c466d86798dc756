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
def test_int8_weights_are_all_that_is_quantised(variant, tmp_path):
    """The same model computes the same with the weights that the int8 stand for."""
    model, ids = tiny_model(variant, torch.float32, hidden_size=32, head_dim=8), random_ids(2, 17)
    model.save_pretrained(tmp_path)
    quantized = load_int8(tmp_path, torch.float32)
    with torch.no_grad():
        for name, layer in int8_layers(quantized).items():
            model.get_submodule(name).weight.copy_(layer.weight.dequantize())
        assert_close(quantized(ids).logits, model(ids).logits, 1e-4)


@every_variant
def test_int8_weights_load_and_generate(variant, tmp_path):
    model, ids = tiny_model(variant, torch.float32, seed=1, hidden_size=32, head_dim=8), random_ids(2, 17)
    model.save_pretrained(tmp_path)
    quantized = load_int8(tmp_path, torch.bfloat16)
    assert {type(layer.weight.data).__name__ for layer in int8_layers(quantized).values()} == {"Int8Tensor"}
    starts = [p for name, p in quantized.named_parameters() if ".memory.start." in name]
    assert len(starts) == 4
    assert {p.dtype for p in starts} == {torch.float32}
    with torch.no_grad():
        outputs = quantized(ids)
        assert_close(outputs.logits.float(), model(ids).logits, 0.2)  # both roundings, of this draw
    states = [layer.carry.memory for layer in outputs.past_key_values.layers]
    assert {x.dtype for state in states for x in state.tensors() if x.is_floating_point()} == {torch.float32}
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(quantized.generate(ids, **options), quantized.generate(ids, use_cache=False, **options))
