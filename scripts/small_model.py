"""The small model of the tour, and how it is trained in two minutes on a CPU.

Training mixes two kinds of rows: text, and facts to be remembered (see facts.py). The first fifth of the time is facts
alone: recall is learned in seconds when nothing else asks for attention, and hardly at all once the text does.

Axis letters: B rows of a batch, N tokens of a text or row.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from facts import Facts, stretches
from records import plots
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from titans_hf import TitansConfig, TitansForCausalLM

WINDOW = 32
ROW_LENGTH = 128
TEXT_ROWS, FACT_ROWS = 5, 3  # of a batch
FACTS = 8
FIRST_FACTS, FIRST_ROWS, FIRST_LENGTH = 6, 32, 66  # of a batch while facts are all there is
FACTS_ALONE = 0.2  # of the training
PEAK_LR = 6e-3


@dataclass
class Budget:
    """How much training there is: `steps` if given, else `seconds` on the clock from now."""

    seconds: float
    steps: int | None = None
    taken: int = 0
    start: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def spent(self) -> float:
        """The fraction used up, from 0 to 1."""
        return min(1.0, self.taken / self.steps if self.steps else self.elapsed / self.seconds)


def build_model(variant: str, tokenizer: PreTrainedTokenizerBase) -> TitansForCausalLM:
    config = TitansConfig(
        variant=variant,
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        segment_size=WINDOW,
        sliding_window=WINDOW,
        num_persistent_tokens=4,
        memory_chunk_size=16,
        memory_depth=2,
        memory_expansion=1,
        initializer_range=128**-0.5,  # transformers' 0.02 suits widths in the thousands
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return TitansForCausalLM(config)


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


def learning_rate(spent: float, warmup: float = 0.05) -> float:
    """A short linear warm-up, then half a cosine down to a tenth of the peak."""
    if spent < warmup:
        return PEAK_LR * (0.1 + 0.9 * spent / warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * (spent - warmup) / (1 - warmup)))
    return PEAK_LR * (0.1 + 0.9 * cosine)


def train_model(model: TitansForCausalLM, tokens: torch.Tensor, facts: Facts, budget: Budget) -> list[dict]:
    """Train until the budget is spent. Returns a point of the loss curve for every step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    curve = []
    with tqdm(total=1.0, desc="training", bar_format="{l_bar}{bar}| {elapsed}{postfix}") as bar:
        while (spent := budget.spent) < 1:
            alone = spent < FACTS_ALONE
            ids, weight = training_batch(tokens, facts, alone)
            logits = model(ids).logits[:, :-1]
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            losses, weight = losses.view(len(ids), -1), weight[:, 1:]
            loss = (losses * weight).sum() / weight.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(spent)
            optimizer.step()
            optimizer.zero_grad()
            budget.taken += 1
            point = {"tokens": ids.numel(), "facts": losses[weight > 0.9 if alone else weight > 1].mean().item()}
            curve.append(point if alone else {**point, "text": losses[:TEXT_ROWS].mean().item()})
            shown = ", ".join(f"{name} {point:.2f}" for name, point in curve[-1].items() if name != "tokens")
            bar.set_postfix_str(f"step {budget.taken}, loss: {shown}", refresh=False)
            bar.update(budget.spent - bar.n)
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
