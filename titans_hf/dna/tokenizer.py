"""A tokenizer for DNA: every letter is a token."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "ACGTN"
SPECIAL = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")  # in HyenaDNA's order, so ids agree


def dna_tokenizer(max_length: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter, A C G T N, and HyenaDNA's numbers: [CLS] is 0, A is 7, N is 11.

    Small letters (soft-masked repeats) are read as capitals, and what is no letter of these is [UNK]. Rows are padded
    on the left. No special tokens are added. It is an ordinary fast tokenizer: `save_pretrained`, and
    `AutoTokenizer.from_pretrained` without this package.

    Args:
        max_length: tokens of the longest text, `model_max_length`; by default there is no limit.
    """
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(x.lower(), x) for x in LETTERS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(cls_token="[CLS]", sep_token="[SEP]", eos_token="[SEP]", bos_token="[BOS]"),
        **dict(mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **limit,
    )
