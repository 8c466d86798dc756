"""What a training run takes: steps, FLOPs, memory and days, from arithmetic alone. Nothing is allocated or loaded.

FLOPs are those of the matrix products that the code here computes, forward and backward, a multiply-add being two.
Gradient checkpointing would compute the forward once more; that is not counted, as is usual where a utilisation is
assumed. Tests compare the count with torch's own counter.

Letters: N weights, D head width, C tokens of a chunk, H heads, P persistent tokens, T tokens of a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .. import TitansConfig
from ..records.sizes import Sizes, count_parameters, empty_model
from .gpus import GPUS
from .recipe import Recipe

# Bytes that a layer keeps for its backward, per token and unit of width, without chunk starts and feed-forward:
# measured on the 170m presets, and a Llama of that width, under bfloat16 autocast.
KEPT_BY_MIXER = {"mac": 145, "mag": 182, "mal": 166, "lmm": 56, "llama": 34}
BYTES_PER_LOGIT = 12  # in bfloat16 and float32, their log-softmax and its gradient


@dataclass
class Flops:
    """Training FLOPs per token."""

    products: int
    memory: int
    attention: int

    @property
    def total(self) -> int:
        return self.products + self.memory + self.attention


@dataclass
class Batch:
    """The global batch: rows of a device x accumulation x processes x length."""

    rows: int
    accumulation: int
    processes: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.accumulation * self.processes * self.length


def product_flops(model: PreTrainedModel) -> int:
    """`6 N` per token: 2 N forward and 4 N backward for the N weights of linear layers, the head's included.

    MAC uses some of its weights twice: retrieval has queries and an output of its own, and attention also takes keys
    and values of what was retrieved.
    """
    twice = ("memory.q_proj", "memory.out_proj", "attention.k_proj", "attention.v_proj")
    weights = 0
    for name, count in linear_weights(model):
        again = mixer_of(model.config) == "mac" and name.endswith(twice)
        weights += count * (2 if again else 1)
    return 6 * weights


def linear_weights(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """The name of every linear layer, and how many weights it has."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module.weight.numel()


def mixer_of(config: PreTrainedConfig) -> str:
    """A Titans variant, or the family of a baseline."""
    return getattr(config, "variant", config.model_type)


def memory_flops(config: PreTrainedConfig) -> int:
    """The inner loop, per token of all layers. With |M| the weights of a head's memory and |M'| those after its first
    layer, multiply-adds per token and head are

        write     |M| + |M'|             keys forward, errors back: the inner gradient (Eq. 12)
        update    2 |M|                  into weights and momentum (Eqs. 13 and 14)
        read      2 |M| + C w            through both, and through the chunk's own gradients (Eq. 15)
        gates     C (C + 2)              the weight of each gradient for each later token

    where `w` sums the widths at both ends of every layer; `written_by_delta` adds what `memory_write="delta"` takes.
    The backward computes write, read and gates again, and then takes `8 |M| + 2 C w` for read and update, `2 |M| + 2
    |M'|` for the write, a gradient through a gradient, and twice the gates. Where forgetting leads to the start, each
    read takes `|M|` more, and its backward `2 |M|`. MAC reads the memory once more for every token, `|M|` forward and
    `2 |M|` backward.
    """
    if mixer_of(config) == "llama":
        return 0
    C, layers = config.memory_chunk_size, memory_layers(config)
    M = sum(i * o for i, o in layers)
    deep = M - math.prod(layers[0])
    chunk = C * sum(i + o for i, o in layers)
    write, update, read, gates = M + deep, 2 * M, 2 * M + chunk, C * (C + 2)
    forward = write + update + read + gates
    backward = write + read + gates + 8 * M + 2 * chunk + 2 * M + 2 * deep + 2 * gates
    retrieval = 3 * M if config.variant == "mac" else 0
    to_start = config.memory_forget_to == "start"
    delta = written_by_delta(C, layers, to_start) if config.memory_write == "delta" else 0
    if to_start:
        forward, backward = forward + M, backward + 3 * M
    count = sum(map(config.has_memory, range(config.num_hidden_layers)))
    return 2 * count * config.memory_num_heads * (forward + backward + retrieval + delta)


def written_by_delta(C: int, layers: list[tuple[int, int]], to_start: bool) -> int:
    """What the errors that follow one another in the last layer add, per token and head, without the triangular solve.

    The write takes the keys and errors through the momentum too, and `to_start` through the start, and compares each
    token's with those before it; the backward computes that again, and its derivative.
    """
    (i, o), deep = layers[-1], len(layers) > 1
    state = (1 + to_start) * i * o
    write = state + C * i + deep * (state + C * (i + o))
    derivative = 2 * state + C * (i + 3 * o) + deep * 2 * (state + C * (i + o))
    return 2 * write + derivative


def memory_layers(config: TitansConfig) -> list[tuple[int, int]]:
    """The widths at both ends of every layer of a head's memory."""
    D = config.head_dim
    return list(pairwise([D, *[config.memory_expansion * D] * (config.memory_depth - 1), D]))


def attention_flops(config: PreTrainedConfig, length: int, half: bool) -> int:
    """Scores and weighted values, per token of all layers, three times for forward and backward.

    A MAC token attends to P + 2 segments of keys. A MAG or MAL token of a row longer than its window attends to P keys
    and three blocks of half a window, or in a layer with full attention to P keys and all of its row; the prefix's
    scores take further channels (`SlidingAttention._lay_out`). A Llama token attends to all keys of its row.
    """
    if mixer_of(config) == "lmm":
        return 0
    if mixer_of(config) == "llama":
        return 2 * 3 * config.num_hidden_layers * config.num_attention_heads * length * 2 * config.head_dim
    D, P = config.head_dim, config.num_persistent_tokens
    if config.variant == "mac":
        work = (P + 2 * min(config.segment_size, length)) * 2 * D
    else:
        W, full = config.sliding_window, len(config.full_attention_layers or ()) / config.num_hidden_layers
        P += config.attention_sinks
        inside = length if length <= W else 3 * ((W + 1) // 2)
        keys = P + full * length + (1 - full) * inside
        if P == 0:
            work = keys * 2 * D
        elif half:
            work = keys * 3 * D
        else:
            work = keys * 2 * (D + P) + P * D
    return round(2 * 3 * config.num_hidden_layers * config.num_attention_heads * work)


def training_flops(model: PreTrainedModel, length: int, half: bool = True) -> Flops:
    config = model.config
    return Flops(product_flops(model), memory_flops(config), attention_flops(config, length, half))


def taught_flops(model: PreTrainedModel, length: int, half: bool, lora_rank: int) -> Flops:
    """The same where a graft learns from its source (`distil`), whose forward pass is counted, too.

    The base takes no gradients of weights, and below the lowest memory none at all; with LoRA they reach all layers.
    """
    config, linear = model.config, dict(linear_weights(model))
    head = 6 * linear.pop("lm_head")
    memories = 6 * sum(count for name, count in linear.items() if ".memory." in name)
    layers = product_flops(model) - head - memories
    adapters = sum(
        6 * lora_rank * sum(model.get_submodule(name).weight.shape) for name in linear if ".attention." in name
    )
    reached = 1 - lowest_learning_layer(config, lora_rank) / config.num_hidden_layers
    seen_by_teacher = 4 * config.num_hidden_layers * config.num_attention_heads * length * config.head_dim
    return Flops(
        round(layers * (2 + reached) / 3) + head + memories + adapters,
        memory_flops(config),
        round(attention_flops(config, length, half) * (1 + 2 * reached) / 3) + seen_by_teacher,
    )


def lowest_learning_layer(config: PreTrainedConfig, lora_rank: int) -> int:
    """The first layer of a graft that learns."""
    return 0 if lora_rank else min(filter(config.has_memory, range(config.num_hidden_layers)))


def split_batch(batch_tokens: int, rows: int, processes: int, length: int) -> Batch:
    """The accumulation that makes up the global batch, or a `ValueError` if none does."""
    once = rows * processes * length
    if batch_tokens % once:
        near = {max(1, batch_tokens // once) * once, (batch_tokens // once + 1) * once}
        raise ValueError(
            f"`training.batch_tokens` ({batch_tokens:,}) is not a multiple of rows_per_device x processes x "
            f"sequence_length = {rows} x {processes} x {length:,} = {once:,}; "
            f"near it: {' and '.join(f'{tokens:,}' for tokens in sorted(near))}"
        )
    return Batch(rows, batch_tokens // once, processes, length)


def state_bytes(sizes: Sizes, gpus: int) -> int:
    """Weights, gradients and AdamW's two moments in float32, which FSDP2 shards over all GPUs."""
    return 16 * sizes.parameters // gpus


def taught_state_bytes(model: PreTrainedModel, half: bool, lora_rank: int) -> int:
    """What learns as above, the frozen base in float32, and the teacher."""
    learns = sum(parameter.numel() for name, parameter in model.named_parameters() if ".memory." in name)
    base = model.num_parameters() - learns
    for name, _ in linear_weights(model):
        if lora_rank and ".attention." in name:
            learns += lora_rank * sum(model.get_submodule(name).weight.shape)
    return 16 * learns + 4 * base + (2 if half else 4) * base


def gathered_bytes(sizes: Sizes, gpus: int) -> int:
    """Under FSDP2, what is unsharded at a time, in bfloat16: the embeddings, two layers and a layer's gradient."""
    return 0 if gpus == 1 else 2 * (sizes.parameters - sizes.without_embeddings + 3 * sizes.per_layer)


def activation_bytes(config: PreTrainedConfig, tokens: int, checkpointing: bool, frozen: int = 0) -> int:
    """An estimate: what the layers keep of `tokens` tokens, then the larger of one more layer's inside and the logits.

    With checkpointing a layer keeps its input, and its inside when it is computed again. The first `frozen` keep none.
    """
    chunk_starts = 0
    if mixer_of(config) != "llama":
        M = sum(i * o for i, o in memory_layers(config))
        chunk_starts = 8 * M * config.memory_num_heads // config.memory_chunk_size  # weights and momentum, float32
    inside = KEPT_BY_MIXER[mixer_of(config)] * config.hidden_size + 8 * config.intermediate_size + chunk_starts
    logits = BYTES_PER_LOGIT * config.vocab_size
    layers = config.num_hidden_layers - frozen
    if checkpointing:
        return tokens * (2 * config.hidden_size * layers + max(inside, logits))
    return tokens * (inside * layers + logits)


@dataclass
class Plan:
    """A run in numbers; printed as a table."""

    model: str
    sizes: Sizes
    tokens: int
    steps: int
    batch: Batch
    flops: Flops
    state: int
    gathered: int
    activations: int
    gpu: str | None
    utilisation: float

    @property
    def training_flops(self) -> int:
        return self.flops.total * self.steps * self.batch.tokens

    @property
    def days(self) -> float | None:
        if self.gpu is None:
            return None
        speed = GPUS[self.gpu].bf16 * self.utilisation * self.batch.processes
        return self.training_flops / speed / 86_400

    def rows(self) -> dict[str, str]:
        b, f, total = self.batch, self.flops, self.state + self.gathered + self.activations
        rows = {
            "model": self.model,
            "parameters": f"{self.sizes.parameters:,} ({self.sizes.without_embeddings:,} without embeddings)",
            "tokens": f"{self.tokens:,}",
            "steps": f"{self.steps:,}",
            "global batch": f"{b.rows} rows x {b.accumulation} accumulated x {b.processes} processes x {b.length:,} "
            f"tokens = {b.tokens:,}",
            "FLOPs per token": f"{f.total / 1e6:,.1f} M: {_share(f.products, f)} matrix products (6 N), "
            f"{_share(f.memory, f)} memory, {_share(f.attention, f)} attention",
            "FLOPs of the run": f"{self.training_flops:.2e}",
            "memory per device": f"{_gb(total)} GB: {_gb(self.state)} weights, gradients and AdamW"
            + (f" (FSDP2, sharded), {_gb(self.gathered)} gathered" if b.processes > 1 else "")
            + f", about {_gb(self.activations)} activations (estimate)",
        }
        if self.gpu is not None:
            gpu = GPUS[self.gpu]
            if total > gpu.room * 1e9:
                rows["memory per device"] += f"; more than the {gpu.room} GB of a {self.gpu}: lower rows_per_device"
            rows["time"] = (
                f"{self.days:.2f} days ({24 * self.days:.1f} hours) on {b.processes} x {self.gpu} of "
                f"{gpu.bf16 / 1e12:.0f} TFLOP/s at an assumed utilisation of {self.utilisation:.0%}, "
                "which nobody has measured"
            )
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(map(len, rows)) + 2
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g}"


def _share(part: int, flops: Flops) -> str:
    return f"{part / flops.total:.0%}"


def make_plan(recipe: Recipe, processes: int) -> Plan:
    """The plan of a recipe on a number of processes."""
    training, data, hardware = recipe.training, recipe.data, recipe.hardware
    if hardware.gpu is not None and hardware.gpu not in GPUS:
        raise ValueError(f"`hardware.gpu` must be one of {', '.join(GPUS)}, or null; got {hardware.gpu!r}")
    batch = split_batch(training.batch_tokens, training.rows_per_device, processes, data.sequence_length)
    model = empty_model(recipe.configuration())
    sizes, half = count_parameters(model), training.precision == "bf16"
    flops, state = training_flops(model, data.sequence_length, half), state_bytes(sizes, processes)
    frozen = 0
    if recipe.distil is not None:
        rank = recipe.distil.lora_rank
        flops, state = taught_flops(model, data.sequence_length, half, rank), taught_state_bytes(model, half, rank)
        frozen = lowest_learning_layer(model.config, rank)
    return Plan(
        model=recipe.model.preset
        or f"{recipe.model.family.capitalize()} {getattr(model.config, 'variant', '')}".strip(),
        sizes=sizes,
        tokens=training.tokens,
        steps=math.ceil(training.tokens / batch.tokens),
        batch=batch,
        flops=flops,
        state=state,
        gathered=gathered_bytes(sizes, processes),
        activations=activation_bytes(model.config, batch.rows * batch.length, training.gradient_checkpointing, frozen),
        gpu=hardware.gpu,
        utilisation=hardware.utilisation,
    )
