"""Tiny models and tensors with pairwise different sizes, and the one way in which tests compare numbers."""

import json
import signal
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from titans_hf import MemoryState, TitansConfig, TitansForCausalLM
from titans_hf.train.corpus import train_tokenizer

VARIANTS = ("mac", "mag", "mal", "lmm")
VOCAB = 29
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def slow_but(*ordinary: str) -> pytest.MarkDecorator:
    """Parametrizes over every variant; all but the ordinary ones are left to `make test-slow`."""
    rest = [pytest.param(variant, marks=pytest.mark.slow) for variant in VARIANTS if variant not in ordinary]
    return pytest.mark.parametrize("variant", [*ordinary, *rest])


def tiny_config(variant: str, **overrides) -> TitansConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 14,
        "intermediate_size": 22,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "memory_num_heads": 3,
        "memory_chunk_size": 3,
        "segment_size": 6,
        "sliding_window": 5,
        "num_persistent_tokens": 2,
        "pad_token_id": 0,
    }
    return TitansConfig(variant=variant, **{**sizes, **overrides})


def tiny_model(variant: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> TitansForCausalLM:
    """A model in which every parameter matters: all of them are moved away from their start."""
    torch.manual_seed(seed)
    model = TitansForCausalLM(tiny_config(variant, **overrides)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def hang_on_memory(model: TitansForCausalLM) -> TitansForCausalLM:
    """The model with louder memories, so that what it says hangs on what it remembers."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.memory.out_proj.weight.mul_(4)
    return model


def take_flash_attention(model: TitansForCausalLM, monkeypatch) -> None:
    """Give `model` flash attention's contract in plain torch: bottom-right aligned window, 2D mask over keys."""

    def flash_like(module, query, key, value, attention_mask, scaling, sliding_window, dropout=0.0, **kwargs):
        T, K = query.shape[2], key.shape[2]
        distance = torch.arange(K - T, K)[:, None] - torch.arange(K)
        mask = ((distance >= 0) & (distance < (sliding_window or K)))[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool()
        groups = query.shape[1] // key.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), mask, scale=scaling
        )
        return out.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash_like)
    model.config._attn_implementation_internal = "flash_attention_2"


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, two roles and a chat template: what a chat model's folder holds, without a download."""
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        extra_special_tokens=special[3:],
        padding_side="left",
        chat_template=(
            "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
            "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )


def save_chat_model(folder, variant: str = "mac", dtype: torch.dtype = torch.float32, **overrides) -> None:
    """A tiny model and its tokenizer in one folder."""
    tokenizer = chat_tokenizer()
    tiny_model(variant, dtype, vocab_size=len(tokenizer), **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance`, relative to max(1, max |expected|)."""
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = (actual - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= tolerance, f"off by {error:.2e}, allowed {tolerance:.0e}"


def memory_inputs(B=2, T=19, H=3, D=5, depth=2, expansion=2, dtype=torch.float64, seed=0, closed_gates=False):
    """Random tokens `(q, k, v, theta, eta, alpha)` and a state whose momentum is not zero.

    With `closed_gates`, some forget and momentum gates are exactly 0 and some exactly 1.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    q, k, v = normal(B, T, H, D), torch.nn.functional.normalize(normal(B, T, H, D), dim=-1), normal(B, T, H, D)
    theta, eta, alpha = 0.2 * uniform(B, T, H), uniform(B, T, H), 0.4 * uniform(B, T, H)
    if closed_gates:
        for gate in (eta, alpha):
            draw = uniform(B, T, H)
            gate[draw < 0.25], gate[draw > 0.75] = 0.0, 1.0
    widths = [D, *[expansion * D] * (depth - 1), D]
    weights = tuple(normal(B, H, i, o) / i**0.5 for i, o in zip(widths, widths[1:], strict=False))
    momentum = tuple(0.1 * normal(*W.shape) for W in weights)
    tokens = [x.to(dtype) for x in (q, k, v, theta, eta, alpha)]
    return tokens, MemoryState(tuple(W.to(dtype) for W in weights), tuple(S.to(dtype) for S in momentum))


def hears_ctrl_c() -> None:
    """For `preexec_fn`: what was started in the background of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def small_text(folder: Path) -> Path:
    """What scripts/train/small_text.py makes, of a few hundred sentences; each document and novel has its own words."""
    folder.mkdir(parents=True)
    texts = [f"It was night {i}, and the rain fell on the town of {chr(65 + i % 26)}. " * 30 for i in range(60)]
    novels = [("choose", "Snow lay on the hill of x{}. "), ("report", "A bird sang of y{} by the sea. ")]
    train_tokenizer([*texts, *(text for _, text in novels)], 300).save_pretrained(folder / "tokenizer")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = [
        {"title": part, "part": part, "text": "".join(text.format(i) for i in range(1500))} for part, text in novels
    ]
    (folder / "novels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
