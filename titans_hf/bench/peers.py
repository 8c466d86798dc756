"""What `speed` times: the memory layer and the language models, ours and their peers, behind one interface.

Layers: ours, titans-pytorch's with `batch_size == chunk_size`, which updates at each chunk as here, and large matrix
products with as many FLOPs. Models, all in float32, of equal width and depth and with heads of 64: our four variants,
titans-pytorch's MAC, and transformers' Mamba2, Qwen3-Next (dense) and Llama on their torch paths.
"""

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from .. import NeuralMemory, TitansCache, TitansConfig, TitansForCausalLM
from ..configuration_titans import VARIANTS

CHUNK, HEAD = 64, 64
PIECE = 8192  # tokens per forward when a long context is read

HAS_TITANS_PYTORCH = importlib.util.find_spec("titans_pytorch") is not None
if not HAS_TITANS_PYTORCH:
    print("without titans-pytorch: it is not installed", file=sys.stderr)


# The memory layer


@dataclass(frozen=True)
class Case:
    tokens: int
    expansion: int
    heads: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, expansion {self.expansion}"


def our_layer(case: Case) -> Callable:
    config = TitansConfig(
        hidden_size=case.heads * HEAD,
        num_attention_heads=case.heads,
        memory_expansion=case.expansion,
        memory_chunk_size=CHUNK,
    )
    memory = NeuralMemory(config)
    for name, parameter in memory.named_parameters():  # the model's initialiser does this
        if name.startswith("conv") or "start" in name:
            torch.nn.init.normal_(parameter, std=0.3 if name.startswith("conv") else HEAD**-0.5)
    return lambda x: memory(x, memory.begin(x.shape[0]))[0]


def their_layer(case: Case) -> Callable:
    from titans_pytorch import MemoryMLP
    from titans_pytorch import NeuralMemory as Theirs

    model = MemoryMLP(HEAD, depth=2, expansion_factor=case.expansion)
    sizes = dict(chunk_size=CHUNK, batch_size=CHUNK, heads=case.heads, dim_head=HEAD)
    memory = Theirs(case.heads * HEAD, **sizes, model=model)
    return lambda x: memory(x)[0]


LAYERS = {"titans-hf": our_layer}
if HAS_TITANS_PYTORCH:
    LAYERS["titans-pytorch"] = their_layer


def large_products(case: Case, backward: bool) -> Callable:
    """Products of 1,024 x 1,024 matrices with the FLOPs of our layer; a backward has twice those of the forward."""
    hidden, size = case.expansion * HEAD, 1024
    memory = 11 * CHUNK * HEAD * hidden + 2 * CHUNK**2 * (HEAD + hidden)
    macs = case.tokens * (case.heads * memory / CHUNK + 5 * (case.heads * HEAD) ** 2)
    count = max(1, round(macs * (3 if backward else 1) / size**3))
    a, b = torch.randn(size, size), torch.randn(size, size)

    def multiply(x):
        for _ in range(count):
            a @ b

    return multiply


# Language models


@dataclass(frozen=True)
class Shape:
    """What all models have in common."""

    width: int = 256
    layers: int = 4
    vocabulary: int = 1024

    @property
    def heads(self) -> int:
        return self.width // HEAD

    @property
    def feed_forward(self) -> int:
        """2.75 widths, the ratio of Qwen3-Next; Llama's and titans-pytorch's defaults are 2.69 and 2.67."""
        return self.width * 11 // 4

    def draw(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (batch, tokens))

    def kv_bytes(self, tokens: int) -> int:
        """Bytes that full attention keeps for `tokens` tokens: Llama's keys and values."""
        return 2 * 4 * self.layers * self.heads * HEAD * tokens


class Peer:
    """A language model behind the benchmark's interface.

    Attributes:
        network: the model.
        longest: the longest context that decoding is timed after.
        filled: how a context gets into the cache: "read", or "drawn" where reading would take hours.
        period: decoding steps that are timed together, so that they include all occasional work.
    """

    longest, filled, period = 16_384, "drawn", CHUNK // 2

    def __init__(self, network: nn.Module, shape: Shape):
        self.network, self.shape = network, shape

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def contexts(self, asked: list[int]) -> list[int]:
        """Those of the contexts that decoding is timed after."""
        return [context for context in asked if context <= self.longest]

    def loss(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def prefill(self, ids: Tensor) -> None:
        """Read a prompt, with a cache, for its last token's logits."""
        raise NotImplementedError

    def begin(self, context: int, batch: int) -> Any:
        """The state after `context` tokens, from which `decode` continues."""
        raise NotImplementedError

    def fork(self, state: Any) -> Any:
        """A state that `decode` may change."""
        return copy.deepcopy(state)

    def decode(self, state: Any, ids: Tensor) -> None:
        """Read `ids` [B, T] token by token, and change the state."""
        raise NotImplementedError


class HubModel(Peer):
    """A model of transformers. Its context is drawn: keys and values at random, then one chunk of text is read."""

    cache_name = "past_key_values"

    def loss(self, ids: Tensor) -> Tensor:
        return self.network.train()(input_ids=ids, labels=ids, use_cache=False).loss

    @torch.no_grad()
    def prefill(self, ids: Tensor, cache: DynamicCache | None = None) -> None:
        self.network.eval()(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})

    def begin(self, context: int, batch: int) -> DynamicCache:
        config = self.network.config
        cache = DynamicCache(config=config)
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer):  # one with attention
                shape = (batch, config.num_key_value_heads, context - CHUNK, config.head_dim)
                layer.update(torch.randn(shape), torch.randn(shape))
        self.prefill(self.shape.draw(batch, CHUNK), cache)
        return cache

    @torch.no_grad()
    def decode(self, state: DynamicCache, ids: Tensor) -> None:
        network = self.network.eval()
        for token in ids.split(1, dim=1):
            network(input_ids=token, use_cache=True, **{self.cache_name: state})


class Mamba2(HubModel):
    """Its state has a constant size: one chunk read stands for every context, timed at the two ends."""

    filled = "constant"
    cache_name = "cache_params"  # it accepts `past_key_values` and ignores it

    def contexts(self, asked: list[int]) -> list[int]:
        return sorted({min(asked), max(asked)})


class Titans(HubModel):
    """Ours: every token of the context is read, once, and rows of a batch are copies.

    In 256 steps MAC begins one segment, every variant ends four chunks, and its cache twice moves the state that it can
    be rewound to.
    """

    longest, filled, period = sys.maxsize, "read", 256

    def __init__(self, network: TitansForCausalLM, shape: Shape):
        super().__init__(network, shape)
        self.kept = {0: TitansCache(network.config, rewind=False)}

    def begin(self, context: int, batch: int) -> TitansCache:
        if context not in self.kept:
            place = max(read for read in self.kept if read < context)
            self.kept[context] = self._read(self.kept[place].clone(), context - place)
        cache = self.kept[context].clone()
        cache.batch_repeat_interleave(batch)
        return cache

    def _read(self, cache: TitansCache, tokens: int) -> TitansCache:
        """Read on in pieces, but the last chunk token by token: decoding is timed from the middle of decoding."""
        label = f"{self.network.config.variant}: reading on to {cache.get_seq_length() + tokens:,}"
        with tqdm(total=tokens, desc=label, unit=" tokens", unit_scale=True) as bar:
            for start in range(0, tokens - CHUNK, PIECE):
                size = min(PIECE, tokens - CHUNK - start)
                self.prefill(self.shape.draw(1, size), cache)
                bar.update(size)
            self.decode(cache, self.shape.draw(1, min(CHUNK, tokens)))
            bar.update(min(CHUNK, tokens))
        return cache

    def fork(self, state: TitansCache) -> TitansCache:
        return state.clone()


class TitansPytorch(Peer):
    """titans-pytorch's MAC. It computes every token's logits, and decodes as its `sample` does, without sampling."""

    longest, filled, period = 4_096, "read", CHUNK

    def loss(self, ids: Tensor) -> Tensor:
        return self.network.train()(F.pad(ids, (0, 1)), return_loss=True)  # it reads all but the last

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> tuple:
        return self.network.eval()(ids, return_cache=True)[1]

    def begin(self, context: int, batch: int) -> tuple:
        ids = self.shape.draw(batch, context)
        return ids, self.prefill(ids)

    def fork(self, state: tuple) -> tuple:
        return state  # which it does not change

    @torch.no_grad()
    def decode(self, state: tuple, ids: Tensor) -> None:
        seen, cache = state
        positions = self.network.axial_pos_emb
        grid = positions.maybe_derive_outer_dim(seen.shape[1] + ids.shape[1], (CHUNK,))
        factors = positions(grid, return_factorized=True)
        for token in ids.split(1, dim=1):
            seen = torch.cat((seen, token), dim=1)
            _, cache = self.network(seen, cache=cache, return_cache=True, factorized_pos_emb=factors)


def titans(shape: Shape, feed_forward: int, variant: str) -> Titans:
    config = TitansConfig(
        variant=variant,
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        memory_chunk_size=CHUNK,
    )
    return Titans(TitansForCausalLM(config), shape)


def titans_pytorch(shape: Shape, feed_forward: int) -> TitansPytorch:
    from titans_pytorch import MemoryAsContextTransformer, MemoryMLP

    network = MemoryAsContextTransformer(
        num_tokens=shape.vocabulary,
        dim=shape.width,
        depth=shape.layers,
        heads=shape.heads,
        dim_head=HEAD,
        ff_mult=1.5 * (feed_forward + 0.5) / shape.width,  # its layer is `int(2 / 3 * mult * dim)` wide
        segment_len=CHUNK,
        num_persist_mem_tokens=TitansConfig.num_persistent_tokens,
        neural_memory_segment_len=CHUNK,
        neural_memory_batch_size=CHUNK,
        neural_memory_model=MemoryMLP(HEAD, depth=2, expansion_factor=TitansConfig.memory_expansion),
        neural_memory_kwargs=dict(dim_head=HEAD, heads=shape.heads),
    )
    return TitansPytorch(network, shape)


def common(shape: Shape) -> dict:
    """Fields that transformers' configurations share."""
    return dict(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        head_dim=HEAD,
        tie_word_embeddings=True,
    )


def mamba2(shape: Shape, expand: int) -> Mamba2:
    sizes = dict(expand=expand, num_heads=expand * shape.heads, state_size=128, n_groups=1, chunk_size=CHUNK)
    return Mamba2(Mamba2ForCausalLM(Mamba2Config(**common(shape), **sizes)), shape)


def qwen3_next(shape: Shape, feed_forward: int) -> HubModel:
    """Three layers of the gated delta rule to one of attention; its head counts are in the ratios of its defaults."""
    config = Qwen3NextConfig(
        **common(shape),
        intermediate_size=feed_forward,
        num_experts=0,
        num_attention_heads=2 * shape.heads,
        num_key_value_heads=max(1, shape.heads // 4),
        linear_num_key_heads=shape.heads,
        linear_num_value_heads=2 * shape.heads,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
    )
    return HubModel(Qwen3NextForCausalLM(config), shape)


def llama(shape: Shape, feed_forward: int) -> HubModel:
    sizes = dict(intermediate_size=feed_forward, num_attention_heads=shape.heads)
    return HubModel(LlamaForCausalLM(LlamaConfig(**common(shape), **sizes)), shape)


WITH_FEED_FORWARD = {f"titans-hf {variant}": partial(titans, variant=variant) for variant in VARIANTS}
if HAS_TITANS_PYTORCH:
    WITH_FEED_FORWARD["titans-pytorch mac"] = titans_pytorch
WITH_FEED_FORWARD |= {"Qwen3-Next": qwen3_next, "Llama": llama}


def of_equal_width(shape: Shape) -> dict[str, Peer]:
    """Models of equal width and depth, in the proportions of their libraries."""
    models = {name: make(shape, shape.feed_forward) for name, make in WITH_FEED_FORWARD.items()}
    return {**models, "Mamba2": mamba2(shape, expand=2)}


def of_equal_parameters(shape: Shape) -> dict[str, Peer]:
    """Models of equal width, depth and, within 5 %, parameters.

    Mamba2 has no feed-forward layer and grows by whole expansions: it is fitted to our MAC, and all others to it.
    """
    wanted = titans(shape, shape.feed_forward, "mac").parameters
    fitted = {"Mamba2": fit(partial(mamba2, shape), wanted, step=1)}
    wanted = fitted["Mamba2"].parameters
    models = {name: fit(partial(make, shape), wanted, step=16) for name, make in WITH_FEED_FORWARD.items()} | fitted
    for name, model in models.items():
        if abs(model.parameters / wanted - 1) > 0.05:
            raise ValueError(f"{name} has {model.parameters:,} parameters, not about {wanted:,}: choose another width")
    return models


def fit(make: Callable[[int], Peer], parameters: int, step: int) -> Peer:
    """The model nearest to `parameters`, which are linear in the size that `make` takes, a multiple of `step`."""
    first, second = make(step).parameters, make(2 * step).parameters
    return make(step * max(1, 1 + round((parameters - first) / (second - first))))
