"""A small corpus and a tokenizer for it, with nothing to download.

The text is Python's own language reference (`pydoc_data.topics`): real English. Its last tenth is held out.

Axes: N tokens of a text.
"""

from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def read_documents() -> list[str]:
    """The topics as documents. A paragraph that occurs in several is kept in the first alone."""
    seen, documents = set(), []
    for topic in topics.values():
        new = [p for p in dict.fromkeys(topic.strip().split("\n\n")) if p not in seen]
        seen.update(new)
        documents.append("\n\n".join(new))
    return [document for document in documents if document]


def read_corpus() -> tuple[str, str]:
    """The text for training, and the held-out last tenth. No paragraph is in both."""
    text = "\n\n".join(read_documents())
    cut = text.rindex("\n\n", 0, len(text) * 9 // 10)
    return text[:cut], text[cut:]


def train_tokenizer(text: str | Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, learned from one text or from many."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [text] if isinstance(text, str) else text
    bpe.train_from_iterator(
        (line for one in texts for line in one.splitlines(keepends=True)),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
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
