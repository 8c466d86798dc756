"""Training with transformers' own tools gives the gradients and the weights it should."""

import pytest
import torch
from support import VARIANTS, assert_close, every_variant, random_ids, tiny_model
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from titans_hf import TitansCache


def examples(count: int) -> list[dict]:
    """Token lists of 7 to 11 tokens; a few labels are left out."""
    rows = [random_ids(1, 7 + 2 * (i % 3), seed=i)[0].tolist() for i in range(count)]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def pad_right(rows: list[dict]) -> dict:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(values, filler):
        return torch.tensor([[*row, *[filler] * (width - len(row))] for row in values])

    return {
        "input_ids": padded([row["input_ids"] for row in rows], 0),
        "labels": padded([row["labels"] for row in rows], -100),
        "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
    }


def trainer(model, folder, batch=2, steps=6, collator=pad_right, **options) -> Trainer:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=examples(24), eval_dataset=examples(5), data_collator=collator)


def trained(model, folder, resume=None, **options) -> list[torch.Tensor]:
    run = trainer(model, folder, **options)
    run.train(resume_from_checkpoint=resume)
    return [p.detach() for p in run.model.parameters()]


@every_variant
def test_training_resumes_to_identical_weights(variant, tmp_path):
    straight = trained(tiny_model(variant, torch.float32), tmp_path)
    resumed = trained(tiny_model(variant, torch.float32, seed=1), tmp_path, resume=tmp_path / "checkpoint-3")
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


@every_variant
def test_evaluate_and_predict_equal_a_plain_forward(variant, tmp_path):
    """The cache that evaluation makes stays out of the predictions."""
    model = tiny_model(variant, torch.float32)
    run = trainer(model, tmp_path, per_device_eval_batch_size=5)
    batch = pad_right(examples(5))
    with torch.no_grad():
        expected = model(**batch)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    predictions = torch.tensor(run.predict(examples(5)).predictions)
    assert predictions.shape == expected.logits.shape
    assert_close(predictions[batch["attention_mask"] == 1], expected.logits[batch["attention_mask"] == 1], 1e-5)


@every_variant
def test_accumulation_checkpointing_and_whole_batches_train_alike(variant, tmp_path):
    """Rows have different numbers of labels: the loss is scaled by the tokens of the whole batch, not of its parts.

    In float64: Adam divides a gradient by its size, and so makes a step of what is no more than rounding.
    """
    whole = trained(tiny_model(variant, torch.float64), tmp_path / "whole", batch=4, steps=4)
    for name, options in {
        "accumulated": dict(batch=1, gradient_accumulation_steps=4),
        "checkpointed": dict(batch=4, gradient_checkpointing=True),
    }.items():
        other = trained(tiny_model(variant, torch.float64), tmp_path / name, steps=4, **options)
        for one, two in zip(whole, other, strict=True):
            assert_close(two, one, 1e-9)


@every_variant
@pytest.mark.parametrize("load_in_half", [False, True])
def test_training_in_bfloat16_lowers_the_loss(variant, load_in_half, tmp_path):
    model = tiny_model(variant, torch.bfloat16 if load_in_half else torch.float32)
    run = trainer(model, tmp_path, batch=8, steps=12, bf16=not load_in_half)
    run.train_dataset = [examples(1)[0]] * 96
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0] - 0.3
    assert all(p.isfinite().all() for p in run.model.parameters())


@every_variant
def test_a_flattening_collator_trains_and_evaluates(variant, tmp_path):
    model = tiny_model(variant, torch.float32)
    run = trainer(model, tmp_path, collator=DataCollatorWithFlattening(), steps=2, per_device_eval_batch_size=5)
    rows = [row["input_ids"] for row in examples(5)]
    with torch.no_grad():
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in rows]
    run.eval_dataset = [{"input_ids": row} for row in rows]
    expected = sum(losses) / sum(len(row) - 1 for row in rows)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    run.train()


# AOT autograd traces forward and backward together, which takes long; where attention is the point, dynamo alone does.
COMPILED = [("lmm", True, "start", "aot_eager"), ("mac", False, "zero", "eager")]
MORE_COMPILED = [(variant, True, "zero", "aot_eager") for variant in VARIANTS]
MORE_COMPILED += [("lmm", False, "zero", "aot_eager"), ("mag", True, "start", "aot_eager")]


@pytest.mark.parametrize(
    "variant, padded, forget_to, backend",
    [*COMPILED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_COMPILED)],
)
def test_a_compiled_training_step_equals_eager(variant, padded, forget_to, backend):
    sizes = dict(num_hidden_layers=1, memory_chunk_size=6)
    model = tiny_model(variant, torch.float32, memory_forget_to=forget_to, **sizes).train()
    batch = pad_right(examples(3))
    if not padded:
        batch = {"input_ids": random_ids(2, 8), "labels": random_ids(2, 8)}
    expected = model(**batch)
    expected.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    outputs = torch.compile(model, backend=backend, fullgraph=True)(**batch)
    outputs.loss.backward()
    real = batch["labels"] != -100
    assert_close(outputs.logits[real], expected.logits[real], 1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient, 1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
@every_variant
def test_a_training_step_compiled_with_inductor_equals_eager(variant):
    model, ids = tiny_model(variant, torch.float32, num_hidden_layers=1).train(), random_ids(2, 8)
    expected = model(ids, labels=ids)
    torch._dynamo.reset()
    outputs = torch.compile(model)(ids, labels=ids)
    outputs.loss.backward()
    assert_close(outputs.logits, expected.logits, 1e-4)
    assert_close(outputs.loss, expected.loss, 1e-5)
    torch._dynamo.reset()


def test_label_smoothing_smooths_the_next_token(tmp_path):
    model, batch = tiny_model("mag", torch.float32), pad_right(examples(3))
    run = trainer(model, tmp_path, label_smoothing_factor=0.2)
    found = run.compute_loss(model, dict(batch))
    logits, labels = model(**batch).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    assert_close(found, expected, 1e-5)


def test_a_replica_of_data_parallel_makes_no_cache_unless_told():
    """`nn.DataParallel`, which Trainer uses on several GPUs of one process, cannot gather caches."""
    model, ids = tiny_model("lmm"), random_ids(1, 5)
    assert model(ids).past_key_values is not None
    model.model._is_replica = True  # as torch.nn.parallel.replicate marks its copies
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None


def test_functional_gradients_equal_those_of_backward():
    """torch.func has no saved-tensor hooks, on which checkpoints rest."""
    model, ids = tiny_model("lmm"), random_ids(2, 9)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,), dict(use_cache=False)).logits.square().mean()

    found = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, 1e-9)


@every_variant
def test_truncated_back_propagation_goes_through_a_carried_cache(variant):
    """Two forwards and one backward give the gradients of one forward; a detached cache cuts them off."""
    model, ids = tiny_model(variant).train(), random_ids(2, 17)
    model(ids).logits[:, 9:].square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    found = []
    for detach in (False, True):
        model.zero_grad(set_to_none=False)
        cache = TitansCache(model.config)
        model(ids[:, :9], past_key_values=cache)
        if detach:
            for layer in cache.layers:
                layer.map(torch.Tensor.detach)
        model(ids[:, 9:], past_key_values=cache).logits.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for whole, carried in zip(expected, found[0], strict=True):
        assert_close(carried, whole, 1e-9)
    assert any(not torch.allclose(whole, cut, rtol=1e-3) for whole, cut in zip(expected, found[1], strict=True))
