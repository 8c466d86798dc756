"""Train a small Titans on a CPU in about a minute, save it, load it back and let it write.

The text is the language reference that every Python carries (`pydoc_data.topics`): real English, nothing to download.
The last tenth is held out. The seed fixes the weights, the batches and the sample; with a time budget, the number of
steps still depends on the machine, and `--steps` fixes that too.

    python scripts/demo.py --variant mag --seconds 120

Axes: B rows of a batch, T tokens of a row, N tokens of a text.
"""

import argparse
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed
from transformers.utils.logging import disable_progress_bar

from titans_hf import TitansConfig, TitansForCausalLM

END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCAB_SIZE = 1024
BATCH_SIZE = 8
ROW_LENGTH = 128
PEAK_LR = 4e-3


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


@dataclass
class Summary:
    """What the demo found out."""

    variant: str
    parameters: int
    steps: int
    tokens_per_second: float
    perplexity_before: float
    perplexity_after: float
    reload_difference: float
    out: Path
    sample: str

    def __str__(self) -> str:
        rows = {
            "model": f"Titans {self.variant}, {self.parameters:,} parameters",
            "training": f"{self.steps} steps, {self.tokens_per_second:,.0f} tokens/s",
            "held-out perplexity": f"{self.perplexity_before:,.1f} before, {self.perplexity_after:,.1f} after",
            "saved to": f"{self.out} (reloaded; logits differ by {self.reload_difference:.0e} at most)",
        }
        width = max(map(len, rows)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in rows.items()]
        return "\n".join(["", *lines, "", "It writes:", "", self.sample])


def read_corpus() -> tuple[str, str]:
    """The text for training and the held-out last tenth, each paragraph kept once so that none stands in both."""
    paragraphs = dict.fromkeys(p for topic in topics.values() for p in topic.strip().split("\n\n"))
    text = "\n\n".join(paragraphs)
    cut = text.rindex("\n\n", 0, len(text) * 9 // 10)
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB_SIZE` tokens, learned from `text`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])  # [N]


def build_model(variant: str, tokenizer: PreTrainedTokenizerFast) -> TitansForCausalLM:
    config = TitansConfig(
        variant=variant,
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        segment_size=64,
        sliding_window=64,
        num_persistent_tokens=4,
        memory_chunk_size=32,
        memory_depth=2,
        memory_expansion=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return TitansForCausalLM(config)


def random_rows(tokens: torch.Tensor) -> torch.Tensor:
    """`BATCH_SIZE` stretches of `tokens`, each from a random place."""
    starts = torch.randint(len(tokens) - ROW_LENGTH + 1, (BATCH_SIZE, 1))
    return tokens[starts + torch.arange(ROW_LENGTH)]  # [B, T]


def learning_rate(spent: float, warmup: float = 0.05) -> float:
    """A short linear warm-up, then half a cosine down to a tenth of the peak."""
    if spent < warmup:
        return PEAK_LR * (0.1 + 0.9 * spent / warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * (spent - warmup) / (1 - warmup)))
    return PEAK_LR * (0.1 + 0.9 * cosine)


def train(model: TitansForCausalLM, tokens: torch.Tensor, budget: Budget) -> float:
    """Train until the budget is spent, and return the tokens read per second."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    bar = tqdm(total=1.0, desc="training", bar_format="{l_bar}{bar}| {elapsed}{postfix}")
    with bar:
        while (spent := budget.spent) < 1:
            rows = random_rows(tokens)
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(spent)
            optimizer.step()
            optimizer.zero_grad()
            budget.taken += 1
            bar.set_postfix_str(f"step {budget.taken}, loss {loss.item():.3f}", refresh=False)
            bar.update(budget.spent - bar.n)
    return budget.taken * BATCH_SIZE * ROW_LENGTH / budget.elapsed


@torch.no_grad()
def perplexity(model: TitansForCausalLM, tokens: torch.Tensor) -> float:
    """Per-token perplexity over `tokens` cut into rows of `ROW_LENGTH`; a last, shorter row is left out."""
    model.eval()
    rows = tokens[: len(tokens) // ROW_LENGTH * ROW_LENGTH].view(-1, ROW_LENGTH)  # [B, T]
    losses = [model(input_ids=batch, labels=batch).loss * len(batch) for batch in rows.split(BATCH_SIZE)]
    return math.exp(torch.stack(losses).sum().item() / len(rows))


@torch.no_grad()
def reload_and_compare(model: TitansForCausalLM, tokens: torch.Tensor, out: Path) -> tuple[TitansForCausalLM, float]:
    """Load the saved model as a stranger would, and refuse it if its logits are not the trained model's."""
    reloaded = AutoModelForCausalLM.from_pretrained(out)
    row = tokens[None, :ROW_LENGTH]  # [1, T]
    expected, actual = model.eval()(input_ids=row).logits, reloaded.eval()(input_ids=row).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    return reloaded, (actual - expected).abs().max().item()


def write(model: TitansForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=40)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def run(args: argparse.Namespace) -> Summary:
    disable_progress_bar()  # saving and loading take no time here; the bar to watch is the training's
    set_seed(args.seed)
    train_text, held_out_text = read_corpus()
    tokenizer = train_tokenizer(train_text)
    tokens, held_out = encode(tokenizer, train_text), encode(tokenizer, held_out_text)
    model = build_model(args.variant, tokenizer)
    print(f"Titans {args.variant}: {len(tokens):,} tokens to train on, {len(held_out):,} held out")

    before = perplexity(model, held_out)
    budget = Budget(args.seconds, args.steps)
    tokens_per_second = train(model, tokens, budget)
    after = perplexity(model, held_out)

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    reloaded, difference = reload_and_compare(model, held_out, args.out)
    set_seed(args.seed)
    sample = write(reloaded, AutoTokenizer.from_pretrained(args.out), args.prompt)
    return Summary(
        variant=args.variant,
        parameters=model.num_parameters(),
        steps=budget.taken,
        tokens_per_second=tokens_per_second,
        perplexity_before=before,
        perplexity_after=after,
        reload_difference=difference,
        out=args.out,
        sample=sample,
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=["mac", "mag", "mal", "lmm"], default="mac")
    parser.add_argument("--seconds", type=float, default=60, help="time to train for (default: 60)")
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where to save (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="A function definition")
    args = parser.parse_args(argv)
    if args.seconds <= 0 or (args.steps is not None and args.steps < 1):
        parser.error("--seconds and --steps must be positive")
    return args


def main(argv: list[str] | None = None) -> None:
    print(run(parse_args(argv)))


if __name__ == "__main__":
    main()
