"""The small model of the tour, and how it is trained in two minutes on a CPU.

Training mixes two kinds of rows: text, and facts to be remembered (see facts.py). The first fifth of the steps is facts
alone: recall is learned in seconds from facts alone, and hardly at all once text is mixed in.

Axis letters: B rows of a batch, N tokens of a text or row.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LRScheduler
from tqdm import trange
from transformers import PreTrainedTokenizerBase, get_wsd_schedule

from .. import TitansForCausalLM
from ..records.files import plots
from .facts import Facts, stretches
from .small_titans import small_titans

WINDOW = 32
ROW_LENGTH = 128
TEXT_ROWS, FACT_ROWS = 5, 3  # of a batch
FACTS = 8
FIRST_FACTS, FIRST_ROWS, FIRST_LENGTH = 6, 32, 66  # of a batch with facts alone
FACTS_ALONE = 0.2  # of the training
PEAK_LR = 6e-3


def build_model(variant: str, tokenizer: PreTrainedTokenizerBase) -> TitansForCausalLM:
    return small_titans(
        variant,
        len(tokenizer),
        hidden_size=128,
        seed=None,
        intermediate_size=320,
        num_attention_heads=4,
        segment_size=WINDOW,
        sliding_window=WINDOW,
        memory_chunk_size=16,
        memory_expansion=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def training_batch(tokens: torch.Tensor, facts: Facts, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, N] and the weight of every token's loss: facts alone at first, then text and facts."""
    if alone:
        filler = stretches(tokens, FIRST_ROWS, FIRST_LENGTH - 2 * facts.width(FIRST_FACTS))
        ids, asked = facts.rows(filler, FIRST_FACTS)
        return ids, asked.float()
    text = stretches(tokens, TEXT_ROWS, ROW_LENGTH)
    filler = stretches(tokens, FACT_ROWS, ROW_LENGTH - 2 * facts.width(FACTS))
    ids, asked = facts.rows(filler, FACTS)
    return torch.cat((text, ids)), torch.cat((torch.ones_like(text), torch.where(asked, 5.0, 0.2)))


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """A linear warm-up over a twentieth of the steps, then half a cosine; both ends are a tenth of the peak."""
    warmup = 0.05 * steps
    return get_wsd_schedule(optimizer, warmup, steps - warmup, num_stable_steps=0, min_lr_ratio=0.1)


def train_model(model: TitansForCausalLM, tokens: torch.Tensor, facts: Facts, steps: int) -> list[dict]:
    """Train, and return a point of the loss curve for every step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule, curve = make_schedule(optimizer, steps), []
    for step in (bar := trange(steps, desc="training")):
        alone = step < FACTS_ALONE * steps
        ids, weight = training_batch(tokens, facts, alone)
        logits = model(ids).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses, weight = losses.view(len(ids), -1), weight[:, 1:]
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        point = {"facts": losses[weight == weight.max()].mean().item()}
        if not alone:
            point["text"] = losses[:TEXT_ROWS].mean().item()
        bar.set_postfix(point, refresh=False)
        curve.append({"tokens": ids.numel(), **point})
    return curve


def draw_losses(curve: list[dict], path: Path) -> None:
    plt = plots()
    figure, axes = plt.subplots(figsize=(7, 3.6))
    tokens = torch.tensor([point["tokens"] for point in curve]).cumsum(0)
    for name, label, colour in (("text", "text", "tab:blue"), ("facts", "asked facts", "tab:orange")):
        at = [i for i, point in enumerate(curve) if name in point]
        values = torch.tensor([curve[i][name] for i in at])
        window = max(1, len(values) // 50)
        axes.plot(tokens[at], values, color=colour, alpha=0.25, lw=0.8)
        if len(values) >= window:
            axes.plot(tokens[at][window - 1 :], values.unfold(0, window, 1).mean(1), color=colour, label=label)
    axes.set(xlabel="tokens read", ylabel="loss (nats per token)", title="Training", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@torch.no_grad()
def perplexity(model: TitansForCausalLM, tokens: torch.Tensor) -> float:
    """Per-token perplexity over `tokens` cut into rows of `ROW_LENGTH`; a last, shorter row is left out."""
    model.eval()
    rows = tokens[: len(tokens) // ROW_LENGTH * ROW_LENGTH].view(-1, ROW_LENGTH)  # [B, N]
    losses = [model(input_ids=batch, labels=batch).loss * len(batch) for batch in rows.split(8)]
    return math.exp(torch.stack(losses).sum().item() / len(rows))
