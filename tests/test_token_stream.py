"""The training data's stream: every token in order, no padding, and from any row on as if it had never been left."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from support import assert_close, every_variant, tiny_model

datasets = pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")

from datasets.distributed import split_dataset_by_node  # noqa: E402

from titans_hf.train import token_stream  # noqa: E402
from titans_hf.train.corpus import read_documents, train_tokenizer  # noqa: E402
from titans_hf.train.recipe import DataSection  # noqa: E402


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """datasets would count every `load_dataset` on the Hub, and wait for it where there is none."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Documents as jsonl, as text files and, in a folder laid out like a dataset on the Hub, as parquet."""
    folder, documents = tmp_path_factory.mktemp("documents"), iter(read_documents())
    for number in range(4):
        part = [f"{number}.{i} {text[:150]}" for i, text in enumerate(islice(documents, 5 + number))]
        rows = datasets.Dataset.from_dict({"text": part, "source": ["here"] * len(part)})
        rows.to_parquet(folder / f"hub/{number}.parquet", batch_size=3)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(lines)
        (folder / f"{number}.txt").write_text("\n\n".join(part))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(read_documents()[:10], 300)


SOURCES = {"python": None, "jsonl": "*.jsonl", "text": "*.txt", "hub": "hub"}


def section(files: Path, source: str, **fields) -> DataSection:
    path = None if source == "python" else str(files / SOURCES[source])
    return DataSection(**{"source": source, "path": path, "sequence_length": 53, **fields})


def stream(data, tokenizer, place=token_stream.START, rank=0, processes=1) -> token_stream.TokenStream:
    documents = split_dataset_by_node(token_stream.open_documents(data), rank, processes)
    return token_stream.TokenStream(documents, tokenizer, data, 7, place)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_goes_on_where_it_was_left(source, processes, files, tokenizer):
    """From row to row, into the second pass, for files dealt out whole (2 processes) and for every third document."""
    data = section(files, source, shuffle_seed=3, documents="paragraph")
    rows = list(islice(stream(data, tokenizer, rank=processes - 1, processes=processes), 120 // processes))
    if source != "python":
        assert rows[-1]["place"]["epoch"] > 0
    place, again = token_stream.START, []
    for count in (1, 1, 2, 5, 11, len(rows) - 20):  # left behind each of these, and taken up in a new stream
        again += islice(stream(data, tokenizer, place, processes - 1, processes), count)
        place = json.loads(json.dumps(again[-1]["place"]))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(rows, again, strict=True))


def test_a_worker_reads_the_same_stream(files, tokenizer):
    data = section(files, "jsonl", shuffle_seed=3)
    rows = stream(data, tokenizer)
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=1)
    for one, other in zip(islice(rows, 30), islice(loader, 30), strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert one["place"] == other["place"]


def texts_of(rows: list[dict], tokenizer) -> list[str]:
    """The documents of rows that follow each other; the first and the last may be cut."""
    return tokenizer.decode(torch.cat([row["input_ids"] for row in rows])).split(tokenizer.eos_token)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_read_different_documents_and_together_all(processes, files, tokenizer):
    data = section(files, "jsonl")
    wanted = list(token_stream.texts(token_stream.open_documents(data), "text"))
    found = []
    for rank in range(processes):
        rows = []
        for row in stream(data, tokenizer, rank=rank, processes=processes):
            rows.append(row)
            if row["place"]["epoch"]:
                break
        found.append({text for text in texts_of(rows, tokenizer) if text in wanted})
    assert sum(map(len, found)) == len(set().union(*found))
    assert set().union(*found) == {text for text in wanted if not token_stream.is_held_out(text, 7)}


def test_rows_hold_every_token_in_order_and_no_padding(files, tokenizer):
    data = section(files, "jsonl")
    texts = list(token_stream.texts(token_stream.open_documents(data), "text"))
    kept = [text for text in texts if not token_stream.is_held_out(text, 7)]
    tokens = [token for text in kept for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = list(islice(stream(data, tokenizer), len(tokens) // 53))
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == tokens[: len(rows) * 53]
    assert all(torch.equal(row["input_ids"], row["labels"]) for row in rows)


def test_held_out_documents_are_evaluated_and_never_trained_on(files, tokenizer):
    data = section(files, "python", sequence_length=16)
    rows = token_stream.held_out_rows(token_stream.open_documents(data), tokenizer, data, 7, 10**6)
    held_out = {text for text in read_documents() if token_stream.is_held_out(text, 7)}
    assert 3 < len(held_out) < len(read_documents()) / 3
    assert set(texts_of(rows, tokenizer)[:-1]) == held_out - {texts_of(rows, tokenizer)[-1]}


def test_a_tokenizer_with_a_start_token_keeps_it():
    from tokenizers import processors

    tokenizer = train_tokenizer(read_documents()[:3], 300)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    assert token_stream.encode_document(tokenizer, "a")[0] == 1
    assert token_stream.encode_document(tokenizer, "a")[-1] == end[1]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
    assert token_stream.encode_document(tokenizer, "a").count(end[1]) == 1


@every_variant
def test_documents_that_are_kept_apart_are_read_as_if_alone(variant):
    lengths, model = (9, 1, 14, 5), tiny_model(variant)
    ids = torch.randint(1, 29, (sum(lengths),)).split(lengths)
    data = DataSection(sequence_length=sum(lengths), reset_at_documents=True)
    (row,) = token_stream.cut_rows((({}, document.tolist()) for document in ids), data)
    batch = token_stream.stack_rows([row])
    assert (batch["labels"] == -100).nonzero()[:, 1].tolist() == [0, 9, 10, 24]
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        alone = torch.cat([model(document[None]).logits for document in ids], dim=1)
    assert_close(found, alone, 1e-9)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="set model.config.vocab_size=300"):
        token_stream.load_tokenizer(tmp_path, 200)
