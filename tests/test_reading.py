"""A text of any length is read in parts, and its tokens are those of the whole."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from titans_hf.cli.reading import Token, _meeting, characters, opening_tokens, tokens

PARAGRAPH = (
    "Call me Ishmael.  Some years ago -- never mind how long precisely -- I thought I would sail.\n\n\n"
    "def whale(n):\n    return n + 1234567   # caf\u00e9, na\u00efve, \u9be8\u9be8, \U0001f40b\n\n"
    "\tIt is a way I have of driving off the spleen ...\n \nWhenever it is a damp, drizzly November:  \n"
)
TEXT = "".join(f"{PARAGRAPH}Chapter {n}. {'sea ' * (n % 7)}\n" for n in range(40))


def train_tokenizer(model, trainer, *, before, after=None, normalizer=None) -> PreTrainedTokenizerFast:
    """A tokenizer of the text above which puts <s> before every text."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer, tokenizer.decoder = before, normalizer, after
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": SPECIAL, "show_progress": False}
NEWER_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # joins ends of lines
)


def bytes_by_words() -> PreTrainedTokenizerFast:
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=360, **BYTES)
    return train_tokenizer(models.BPE(), trainer, before=before, after=decoders.ByteLevel())


def bytes_by_newer_words() -> PreTrainedTokenizerFast:
    words = pre_tokenizers.Split(Regex(NEWER_WORDS), "isolated")
    before = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return train_tokenizer(models.BPE(), trainers.BpeTrainer(vocab_size=400, **BYTES), before=before)


def whole_sentences() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return train_tokenizer(models.Unigram(), trainer, before=pre_tokenizers.Metaspace(prepend_scheme="first"))


def lower_case_words() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    return train_tokenizer(
        models.WordPiece(unk_token="<unk>"),
        trainer,
        before=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
    )


@pytest.mark.parametrize("make", [bytes_by_words, bytes_by_newer_words, whole_sentences, lower_case_words])
def test_a_streamed_text_has_the_tokens_of_the_whole(make):
    tokenizer = make()
    whole = tokenizer(TEXT, add_special_tokens=False).input_ids
    for window, part in ((301, 97), (302, 7), (4000, 1000)):
        parts = [TEXT[i : i + part] for i in range(0, len(TEXT), part)]
        streamed = list(tokens(parts, tokenizer, window, overlap=211))
        assert len(streamed) > len(TEXT) // (window + 211)
        assert [token for some in streamed for token in some] == whole
    cut_by_window = [tokenizer(TEXT[i : i + 301], add_special_tokens=False).input_ids for i in range(0, len(TEXT), 301)]
    assert [token for some in cut_by_window for token in some] != whole  # or the above would show nothing


def test_a_cut_is_made_only_where_many_tokens_agree():
    old = [Token(n, n, n + 1) for n in range(40)]
    new = [token if 12 <= n < 28 else Token(99, *token[1:]) for n, token in enumerate(old)]
    assert _meeting(old, new[3:], 19) == (20, 17)
    new[27] = Token(99, 27, 28)
    assert _meeting(old, new[3:], 19) is None


def test_a_text_without_a_place_to_cut_is_still_read_whole():
    tokenizer = bytes_by_words()
    blob = "".join(chr(97 + (n * n + n // 7) % 26) for n in range(3000)) + "=" * 2000
    streamed = [token for some in tokens([blob], tokenizer, 200, overlap=50) for token in some]
    assert tokenizer.decode(streamed) == blob


def test_bytes_become_characters_as_python_reads_them(tmp_path):
    text = "\ufeffone\r\ntwo\rthree \U0001f40b\n" * 9000
    path = tmp_path / "book.txt"
    path.write_bytes(text.encode())
    heard = []
    with path.open("rb") as file:
        found = "".join(characters(file, "book", heard.append))
    assert found == path.read_text(encoding="utf-8-sig")
    assert sum(heard) == path.stat().st_size
    path.write_bytes(b"x" * 70_000 + "\u9be8".encode()[:2] + b"y")
    with path.open("rb") as file, pytest.raises(ValueError, match="book is not UTF-8 text: see byte 70,000"):
        list(characters(file, "book"))


def test_only_what_the_tokenizer_puts_in_front_opens_a_text():
    tokenizer = bytes_by_words()
    assert opening_tokens(tokenizer) == [tokenizer.bos_token_id]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    assert opening_tokens(tokenizer) == []
