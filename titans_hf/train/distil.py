"""A graft learns from the model that it was grafted from: what the window no longer shows, its memory must supply.

The teacher reads a row with full attention, the student with its window and its memory. The loss is the divergence of
their predictions at the places where the window has overflowed; before them both see the same. What the source does not
have is trained (memories, and what joins them with attention); with a rank, LoRA on attention's projections too, which
is merged into the weights in the end. Everything else is frozen, and no gradient reaches below the lowest memory.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .recipe import DistilSection, Recipe
from .stream_trainer import StreamTrainer

PIECE = 256  # places whose divergence is computed at a time
OF_THE_GRAFT = (".mixer.memory.", ".mixer.combine.", ".persistent")  # in names of parameters that no source has
ATTENTION = r".*\.attention\.[qkvo]_proj"


def load_student(recipe: Recipe, checkpoint: Path | None = None) -> PreTrainedModel:
    """The graft, ready to learn; with the weights of a checkpoint of this run if there is one."""
    model = AutoModelForCausalLM.from_pretrained(recipe.model.checkpoint, dtype=torch.float32)
    model.requires_grad_(False)
    if recipe.distil.lora_rank:
        add_lora(model, recipe.distil.lora_rank)
    trained = [p for name, p in model.named_parameters() if any(part in name for part in OF_THE_GRAFT)]
    if not trained:
        raise ValueError(f"`model.checkpoint`: no layer of {recipe.model.checkpoint} has a memory: nothing would learn")
    for parameter in trained:
        parameter.requires_grad_(True)
    if checkpoint is not None:
        model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)  # tied weights are left out
        model.tie_weights()
    return model


def load_teacher(recipe: Recipe) -> PreTrainedModel:
    """The teacher, frozen. A `ValueError` if it is not a model over the same tokens."""
    name, file = recipe.distil.teacher, recipe.distil.gguf_file
    gguf = {} if file is None else {"gguf_file": file}
    try:
        config = AutoConfig.from_pretrained(name, **gguf)
    except (OSError, ValueError) as error:
        raise ValueError(f"`distil.teacher`: cannot load {name!r}: {str(error).splitlines()[0]}") from error
    vocab_size = recipe.configuration().vocab_size
    if config.vocab_size != vocab_size:
        raise ValueError(f"`distil.teacher`: {name} has {config.vocab_size:,} tokens, the student {vocab_size:,}")
    longest, length = config.max_position_embeddings, recipe.data.sequence_length
    if length > longest:
        raise ValueError(f"`data.sequence_length` ({length:,}) is more than the {longest:,} positions of {name}")
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **gguf).eval().requires_grad_(False)


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Put LoRA into attention's projections, in place; the model keeps its class and its checkpoints' form."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION), model)


def merge_lora(model: PreTrainedModel) -> None:
    """Merge LoRA into the weights, in place: an ordinary Titans model again."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, module.get_base_layer())


def first_place(section: DistilSection, config) -> int:
    """The first place whose prediction counts: by default the first one whose window has overflowed."""
    return config.sliding_window if section.start is None else section.start


def chosen_places(ids: Tensor, start: int, count: int | None) -> Tensor:
    """Places of rows [B, T] whose predictions count: all from `start` on, or as many drawn from them.

    The draw follows from the rows, so that a run that goes on from a checkpoint draws the same.
    """
    places = torch.arange(start, ids.shape[1])
    if count is not None and count < len(places):
        generator = torch.Generator().manual_seed(int(ids.sum()))
        places = places[torch.randperm(len(places), generator=generator)[:count].sort().values]
    return places.to(ids.device)


def overflowed(rows: list[dict], start: int) -> list[dict]:
    """Rows to evaluate, labelled from there on."""
    place = torch.arange(len(rows[0]["labels"]))
    return [{**row, "labels": row["labels"].where(place > start, -100)} for row in rows]


class DistilTrainer(StreamTrainer):
    """A StreamTrainer whose loss is what the student's predictions lack of the teacher's."""

    def __init__(self, *args, teacher: PreTrainedModel, section: DistilSection, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean: accumulated ones are averaged
        self.teacher, self.section = teacher.to(self.args.device), section
        self.start = first_place(section, self.model.config)

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, **kwargs):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        ids, hidden = inputs["input_ids"], self.section.hidden > 0
        places = chosen_places(ids, self.start, self.section.places)
        asked = {"use_cache": False, "logits_to_keep": places, "output_hidden_states": hidden}
        with torch.no_grad():
            wanted = self.teacher(ids, **asked)
        found = model(ids, **asked)
        loss = divergence(found.logits, wanted.logits)
        if hidden:
            loss = loss + self.section.hidden * distance(found.hidden_states[-1], wanted.hidden_states[-1], self.start)
        return (loss, found) if return_outputs else loss


def divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean nats by which predictions [B, T, vocabulary] differ from those wanted (Kullback-Leibler)."""
    pieces = zip(found.split(PIECE, dim=1), wanted.split(PIECE, dim=1), strict=True)
    total = sum(
        F.kl_div(x.float().log_softmax(-1), y.float().log_softmax(-1), reduction="sum", log_target=True)
        for x, y in pieces
    )
    return total / found.shape[:2].numel()


def distance(found: Tensor, wanted: Tensor, start: int) -> Tensor:
    """Mean squared distance of hidden states from a place on, in units of the wanted ones' mean square."""
    found, wanted = found[:, start:].float(), wanted[:, start:].float()
    return (found - wanted).square().mean() / wanted.square().mean()
