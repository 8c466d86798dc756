"""Documents from files, from the Hub or from Python itself, as an endless stream of rows without padding.

Documents are read one by one. Each is tokenised and ends with the end token; their concatenation is cut into rows.
After the last document the first follows again. Every row carries the position in the stream after it, so that a run
can resume there without reading what came before.
"""

import glob
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import datasets
import torch
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .corpus import read_documents, train_tokenizer
from .recipe import DataSection, TokenizerSection

START = {"epoch": 0, "documents": None, "skip": 0}  # the position before the first token
SAMPLE_BY = {"file": "document", "paragraph": "paragraph", "line": "line"}  # as datasets calls them
TOKENIZER_DOCUMENTS = 20_000  # what a tokenizer is trained on, at most


def open_documents(data: DataSection) -> datasets.IterableDataset:
    """The documents as a streamed dataset; the text is in `data.column`."""
    if data.source == "python":
        documents = datasets.Dataset.from_dict({data.column: read_documents()}).to_iterable_dataset(num_shards=4)
    else:
        try:
            documents = _load(data)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"`data.path`: cannot open {data.path!r}: {reason}") from error
    if data.shuffle_seed is None:
        return documents
    # Files alone are shuffled: a buffer of shuffled documents would be lost when a run is resumed.
    return documents.shuffle(seed=data.shuffle_seed, buffer_size=1, max_buffer_input_shards=1)


def _load(data: DataSection) -> datasets.IterableDataset:
    if data.source == "hub":
        return datasets.load_dataset(data.path, data.config, split=data.split, streaming=True)
    files = sorted(glob.glob(data.path, recursive=True))
    if not files:
        raise ValueError("no file matches")
    if data.source == "jsonl":
        return datasets.IterableDataset.from_json(files)
    return datasets.IterableDataset.from_text(files, sample_by=SAMPLE_BY[data.documents])


def texts(documents: datasets.IterableDataset, column: str) -> Iterator[str]:
    for row in _read(documents):
        if not isinstance(row.get(column), str):
            others = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "no text at all"
            raise ValueError(f"`data.column`: a document has no text in {column!r}; it has {others}")
        yield row[column]


def _read(documents: datasets.IterableDataset) -> Iterator[dict]:
    try:
        yield from documents
    except ValueError as error:  # a line that is not JSON, bytes that are not UTF-8
        raise ValueError(f"`data.path`: a file cannot be read: {str(error).splitlines()[0]}") from error


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a document is held out. Its text decides, so equal documents are always treated alike."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % one_in == 0


def open_tokenizer(
    section: TokenizerSection, data: DataSection, one_in: int, vocab_size: int
) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe; a new one learns from training documents only."""
    if section.train is not None:
        found = (text for text in texts(open_documents(data), data.column) if not is_held_out(text, one_in))
        return train_tokenizer(islice(found, TOKENIZER_DOCUMENTS), section.train.vocab_size)
    return load_tokenizer(section.name, vocab_size)


def load_tokenizer(name: str | Path, vocab_size: int) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"`tokenizer.name`: cannot load {str(name)!r}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"`tokenizer.name`: {name} has no end token (eos_token), which closes every document")
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"`tokenizer.name`: {name} has {len(tokenizer):,} tokens, the model's `vocab_size` is {vocab_size:,}; "
            f"set model.config.vocab_size={len(tokenizer)}"
        )
    return tokenizer


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, with the tokenizer's start token if it has one, and the end token."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def cut_rows(documents: Iterable[tuple[dict, list[int]]], data: DataSection, skip: int = 0) -> Iterator[dict]:
    """Documents concatenated and cut into rows: the model's inputs, and the `place` after each row.

    Args:
        documents: each with the position before it.
        skip: tokens of the first document that earlier rows contain.
    """
    ids, starts = [], []  # the open row, and where documents begin in it
    for before, document in documents:
        done, skip = skip, 0
        while done < len(document):
            piece = document[done : done + data.sequence_length - len(ids)]
            starts.append(len(ids))
            ids += piece
            done += len(piece)
            if len(ids) == data.sequence_length:
                yield {**_inputs(ids, starts, data.reset_at_documents), "place": {**before, "skip": done}}
                ids, starts = [], []


def _inputs(ids: list[int], starts: list[int], reset: bool) -> dict[str, torch.Tensor]:
    """With `reset`, positions restart at each document, whose first token is not predicted from the one before."""
    row = torch.tensor(ids)
    inputs = {"input_ids": row, "labels": row.clone()}
    if reset:
        first = torch.zeros_like(row)
        first[starts] = torch.tensor(starts)
        inputs["position_ids"] = torch.arange(len(row)) - first.cummax(0).values
        inputs["labels"][starts] = -100
    return inputs


class TokenStream(IterableDataset):
    """An endless stream of rows of the training documents, from a position on.

    Args:
        documents: those of this process (`split_dataset_by_node`).
        one_in: which documents are left out; see `is_held_out`.
        place: the `place` of an earlier row.
    """

    def __init__(self, documents, tokenizer, data: DataSection, one_in: int, place: dict = START):
        self.documents, self.tokenizer, self.data, self.one_in = documents, tokenizer, data, one_in
        self.place = place

    def __iter__(self) -> Iterator[dict]:
        return cut_rows(self._encoded(), self.data, self.place["skip"])

    def _encoded(self) -> Iterator[tuple[dict, list[int]]]:
        epoch, state = self.place["epoch"], self.place["documents"]
        while True:
            found, before = state is not None, state
            self.documents.set_epoch(epoch)
            self.documents.load_state_dict(state)
            for text in texts(self.documents, self.data.column):
                if not is_held_out(text, self.one_in):
                    yield {"epoch": epoch, "documents": before}, encode_document(self.tokenizer, text)
                    found = True
                before = self.documents.state_dict()
            if not found:
                raise ValueError("`data.path`: there is no document to train on")
            epoch, state = epoch + 1, None


def held_out_rows(documents, tokenizer, data: DataSection, one_in: int, rows: int) -> list[dict]:
    """Rows of held-out documents: `rows` of them, or as many as one pass over the documents fills."""
    kept = (text for text in texts(documents, data.column) if is_held_out(text, one_in))
    cut = cut_rows((({}, encode_document(tokenizer, text)) for text in kept), data)
    found = [{name: x for name, x in row.items() if name != "place"} for row in islice(cut, rows)]
    if not found:
        raise ValueError(
            f"`held_out.one_in`: one document in {one_in} does not fill a single row of {data.sequence_length} tokens; "
            "choose a smaller number, or give more data"
        )
    return found


def stack_rows(rows: list[dict]) -> dict:
    """A batch of rows, with the position after the last one."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "place"}
    if "place" in rows[0]:
        batch["place"] = rows[-1]["place"]
    return batch
