"""Adapters and fine-tuning: PEFT reaches every linear layer, TRL trains a chat model from an object or a folder."""

import pytest
import torch
from support import assert_close, chat_tokenizer, every_variant, random_ids, save_chat_model, slow_but, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")


def adapted(variant: str, **options):
    settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=3, **options)
    return peft.get_peft_model(tiny_model(variant), settings)


@every_variant
def test_every_linear_layer_is_adapted_and_used(variant):
    """Each adapter on its own changes the logits: no forward goes past the layer by reading its weight."""
    model, ids = adapted(variant, init_lora_weights=False).eval(), random_ids(2, 17)
    linear = {name for name, module in tiny_model(variant).named_modules() if isinstance(module, nn.Linear)}
    adapters = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert set(adapters) == linear - {"lm_head"}
    with torch.no_grad(), model.disable_adapter():
        plain = model(ids).logits
    for module in adapters.values():
        nn.init.zeros_(module.lora_B["default"].weight)
    for name, module in adapters.items():
        nn.init.constant_(module.lora_B["default"].weight, 0.5)
        with torch.no_grad():
            assert (model(ids).logits - plain).abs().max() > 1e-6, f"{name} is adapted but not used"
        nn.init.zeros_(module.lora_B["default"].weight)


@every_variant
def test_an_adapter_trains_saves_loads_and_merges(variant, tmp_path):
    model, ids = adapted(variant).train(), random_ids(4, 17)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    model.eval().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(variant), tmp_path).eval()
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        expected = model(ids).logits
        assert_close(loaded(ids).logits, expected, 1e-6)  # adapters are saved in float32
        text = model.generate(input_ids=ids, **options)
        merged = loaded.merge_and_unload()
        assert_close(merged(ids).logits, expected, 1e-6)
        assert torch.equal(merged.generate(input_ids=ids, **options), text)


@every_variant
def test_prompt_tuning_works_and_prefix_tuning_is_refused(variant):
    """A prefix of keys and values has no place in a Titans cache."""
    ids = random_ids(2, 9)
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(variant), prompts)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert model.prompt_encoder["default"].embedding.weight.grad.abs().sum() > 0
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="cannot hold a Titans memory"):
        peft.get_peft_model(tiny_model(variant, torch.float32), prefix)(input_ids=ids)


def fine_tune(model, folder, **options) -> list[float]:
    """A few steps of supervised fine-tuning on a chat made up here: a number, and the next one."""
    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(12)
    ]
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    run = trl.SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(chats), processing_class=chat_tokenizer()
    )
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@slow_but("mac", "lmm")
def test_sft_trains_an_object_and_a_folder_alike(variant, tmp_path):
    save_chat_model(tmp_path / "model", variant)
    from_object = fine_tune(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "a")
    from_folder = fine_tune(str(tmp_path / "model"), tmp_path / "b", model_init_kwargs={"dtype": "float32"})
    assert from_object == from_folder
    assert from_object[-1] < from_object[0]


@slow_but("mag")
def test_sft_packs_chats_without_padding(variant, tmp_path):
    """TRL hands over position_ids, seq_idx and cu_seq_lens of chats that stand side by side."""
    save_chat_model(tmp_path / "model", variant)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    losses = fine_tune(model, tmp_path / "run", packing=True, max_length=32)
    assert losses[-1] < losses[0]
