"""What a training run is said to take is what torch counts, and every recipe of the paper has a plan."""

from pathlib import Path

import pytest
import torch
from support import VARIANTS, every_variant
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from titans_hf import TitansConfig, TitansForCausalLM

pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")

ROOT = Path(__file__).parent.parent

from titans_hf.hub.graft import graft_config, graft_model  # noqa: E402
from titans_hf.train import distil, plan  # noqa: E402
from titans_hf.train import pretrain as train  # noqa: E402

IN_PLACE = {torch.ops.aten.baddbmm_: lambda x, a, b, **kwargs: 2 * a[0] * a[1] * a[2] * b[2]}
LENGTH = 96
STACK = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
SIZES = {"170m": "15b", "340m": "15b", "400m": "15b", "760m": "30b"}


def small_config(variant: str, **overrides) -> TitansConfig:
    sizes = {
        **STACK,
        "memory_num_heads": 2,
        "memory_chunk_size": 8,
        "segment_size": 16,
        "sliding_window": 24,
        "num_persistent_tokens": 0,
    }
    return TitansConfig(variant=variant, attn_implementation="eager", **{**sizes, **overrides})


def counted(config: PreTrainedConfig, dtype: torch.dtype, rows: int = 2, length: int = LENGTH) -> float:
    """FLOPs per token of a forward and a backward, by torch's counter, which does not know `baddbmm_` by itself."""
    model, ids = AutoModelForCausalLM.from_config(config).to(dtype).train(), torch.randint(97, (rows, length))
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops() / ids.numel()


@every_variant
@pytest.mark.parametrize("depth, expansion, write", [(1, 1, "delta"), (3, 2, "delta"), (2, 2, "chunk")])
def test_the_flops_are_those_that_torch_counts(variant, depth, expansion, write):
    """To the last one, but for the triangular solve: products, memory and attention, forward and backward."""
    config = small_config(variant, memory_depth=depth, memory_expansion=expansion, memory_write=write)
    assert plan.training_flops(plan.empty_model(config), LENGTH).total == counted(config, torch.bfloat16)


def test_the_flops_of_a_baseline_are_those_that_torch_counts():
    config = LlamaConfig(attn_implementation="eager", tie_word_embeddings=True, **STACK)
    assert plan.training_flops(plan.empty_model(config), LENGTH).total == counted(config, torch.float32)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_flops_of_a_lesson_are_those_that_torch_counts(rank):
    """The teacher's forward, the student's, and a backward that stops below the lowest memory, to whole layers."""
    sizes = {**STACK, "num_hidden_layers": 9, "intermediate_size": 160}
    source = LlamaConfig(attn_implementation="eager", tie_word_embeddings=True, **sizes)
    teacher = AutoModelForCausalLM.from_config(source)
    fields = {"window": LENGTH, "sinks": 0, "memory_layers": [4, 8], "memory_chunk_size": 8}
    student = graft_model(teacher, graft_config(source, **fields, attn_implementation="eager")).train()
    expected = plan.taught_flops(student, LENGTH, False, rank).total
    student.requires_grad_(False)
    if rank:
        distil.add_lora(student, rank)
    for name, parameter in student.named_parameters():
        if ".memory." in name:
            parameter.requires_grad_(True)
    ids = torch.randint(97, (2, LENGTH))
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        with torch.no_grad():
            wanted = teacher(ids).logits
        distil.divergence(student(ids, use_cache=False).logits, wanted).backward()
    assert expected == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.03)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_persistent_tokens_are_counted_to_half_a_percent(variant, dtype):
    """What they take of attention is counted; their own way through the layers, once per batch, is not."""
    config = small_config(variant, num_persistent_tokens=1)
    found = plan.training_flops(plan.empty_model(config), LENGTH, half=dtype == torch.bfloat16).total
    assert found == pytest.approx(counted(config, dtype), rel=5e-3)


@pytest.mark.parametrize("size", SIZES)
@every_variant
def test_every_paper_recipe_has_a_plan(variant, size, capsys):
    recipe, preset = ROOT / f"scripts/recipes/paper-{SIZES[size]}.yaml", f"titans-{variant}-{size}"
    train.main([str(recipe), "--preset", preset, "--dry-run"])
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["model"] == preset
    assert int(rows["tokens"].replace(",", "")) == int(SIZES[size].removesuffix("b")) * 10**9
    assert rows["steps"] == {"15b": "28,611", "30b": "57,221"}[SIZES[size]]
    assert rows["global batch"] == "4 rows x 4 accumulated x 8 processes x 4,096 tokens = 524,288"
    parameters = int(rows["parameters"].split()[0].replace(",", ""))
    assert parameters == pytest.approx(int(size.removesuffix("m")) * 10**6, rel=0.02)
    assert "assumed utilisation of 35%" in rows["time"]
    assert "(estimate)" in rows["memory per device"]


def test_the_recipes_carry_the_papers_numbers():
    recipe = train.load_recipe(ROOT / "scripts/recipes/paper-15b.yaml")
    t, data = recipe.training, recipe.data
    assert (t.learning_rate, t.weight_decay, t.batch_tokens, data.sequence_length) == (4e-4, 0.1, 2**19, 4096)
    assert data.path == "HuggingFaceFW/fineweb-edu"
    assert recipe.configuration().vocab_size == 32_000


def test_accumulation_makes_up_the_global_batch():
    batch = plan.split_batch(524_288, rows=4, processes=8, length=4096)
    assert (batch.accumulation, batch.tokens) == (4, 524_288)
    assert plan.split_batch(524_288, rows=2, processes=64, length=4096).accumulation == 1
    with pytest.raises(ValueError, match="4 x 7 x 4,096 = 114,688; near it: 458,752 and 573,440"):
        plan.split_batch(524_288, rows=4, processes=7, length=4096)
    with pytest.raises(ValueError, match="near it: 1,048,576"):
        plan.split_batch(524_288, rows=32, processes=8, length=4096)


def test_days_follow_from_flops_peak_and_utilisation():
    recipe = train.load_recipe(ROOT / "scripts/recipes/paper-15b.yaml")
    one, two = (plan.make_plan(recipe, processes) for processes in (8, 16))
    assert one.days == pytest.approx(one.training_flops / (8 * 989e12 * 0.35) / 86_400)
    assert two.days == pytest.approx(one.days / 2)


@every_variant
def test_the_state_of_one_process_is_what_adamw_holds(variant):
    model = TitansForCausalLM(small_config(variant))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    sizes = plan.count_parameters(model)
    assert plan.state_bytes(sizes, gpus=1) == sum(x.nbytes for x in held)
    assert plan.state_bytes(sizes, gpus=8) == plan.state_bytes(sizes, gpus=1) // 8


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, "llama"])
def test_the_activations_are_estimated_to_a_third(variant):
    """What one layer of the paper's width more keeps for the backward of 256 tokens more."""

    def config(layers: int) -> PreTrainedConfig:
        if variant == "llama":
            wide = {"hidden_size": 768, "intermediate_size": 2816, "num_attention_heads": 12}
            return LlamaConfig(vocab_size=97, num_hidden_layers=layers, **wide)
        return TitansConfig.preset(f"titans-{variant}-170m", num_hidden_layers=layers, vocab_size=97)

    def kept(layers: int, tokens: int) -> int:
        model, ids = AutoModelForCausalLM.from_config(config(layers)).train(), torch.randint(97, (1, tokens))
        own, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def note(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage
            return x

        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=ids, labels=ids)
        return sum(storage.nbytes() for storage in found.values())

    measured = (kept(2, 1024) - kept(1, 1024)) - (kept(2, 768) - kept(1, 768))
    estimated = plan.activation_bytes(config(2), 256, False) - plan.activation_bytes(config(1), 256, False)
    assert estimated == pytest.approx(measured, rel=0.33)


def test_a_plan_allocates_nothing():
    model = plan.empty_model(TitansConfig.preset("titans-mal-760m"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    sizes = plan.count_parameters(model)
    assert sizes.parameters - sizes.without_embeddings == 32_000 * 1536
    untied = plan.count_parameters(plan.empty_model(TitansConfig.preset("titans-mal-760m", tie_word_embeddings=False)))
    assert untied.without_embeddings == sizes.without_embeddings
