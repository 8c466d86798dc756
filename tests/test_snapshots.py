"""A cache can be saved to a file and continued in another process; any other or damaged file is refused."""

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VARIANTS, assert_close, every_variant, random_ids, tiny_model

from titans_hf import TitansCache
from titans_hf.snapshots import content_digest, read_note


def read(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options).logits


@pytest.fixture
def saved(tmp_path):
    """A model, its cache and the file of it."""
    model, path = tiny_model("mag"), tmp_path / "book.safetensors"
    cache = TitansCache(model.config)
    read(model, random_ids(1, 50), cache)
    cache.save(path)
    return model, cache, path


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens, forget_to", [(1, "zero"), (9, "zero"), (200, "zero"), (200, "start")])
def test_a_loaded_cache_goes_on_as_the_saved_one(variant, tokens, forget_to, tmp_path):
    model, same = (tiny_model(variant, memory_forget_to=forget_to) for _ in range(2))
    ids, more = random_ids(2, tokens), random_ids(2, 30, seed=1)
    cache = TitansCache(model.config)
    read(model, ids, cache)
    cache.save(tmp_path / "book.safetensors")
    loaded = TitansCache.load(tmp_path / "book.safetensors", same)
    assert loaded.nbytes == cache.nbytes
    assert loaded.get_seq_length() == tokens
    for part in more.split([1, 1, 28], dim=1):
        assert torch.equal(read(model, part, cache), read(model, part, loaded))
    for each in (cache, loaded):
        each.crop(-20)
    assert torch.equal(read(model, more[:, 10:], cache), read(model, more[:, 10:], loaded))


def test_another_process_answers_as_this_one(saved, tmp_path):
    model, cache, path = saved
    model.save_pretrained(tmp_path / "model")
    code = """
import sys, torch
from titans_hf import TitansCache, TitansForCausalLM
model = TitansForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64).eval()
cache = TitansCache.load(sys.argv[2], model)
with torch.no_grad():
    torch.save(model(torch.tensor([[3, 5, 7]]), past_key_values=cache).logits, sys.argv[3])
"""
    command = [sys.executable, "-c", code, tmp_path / "model", path, tmp_path / "logits.pt"]
    subprocess.run(command, check=True, capture_output=True)
    assert_close(torch.load(tmp_path / "logits.pt"), read(model, torch.tensor([[3, 5, 7]]), cache), 1e-12)


def test_padded_rows_and_a_pickled_cache(tmp_path):
    model, ids = tiny_model("mac"), random_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "book.safetensors")
    loaded = TitansCache.load(tmp_path / "book.safetensors", model)
    again = pickle.loads(pickle.dumps(cache))
    expected = read(model, random_ids(2, 5, seed=2), cache)
    assert torch.equal(read(model, random_ids(2, 5, seed=2), loaded), expected)
    assert torch.equal(read(model, random_ids(2, 5, seed=2), again), expected)


def test_other_weights_another_architecture_and_another_dtype_are_refused(saved):
    model, _, path = saved
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-9
    with pytest.raises(ValueError, match=r"weights differ in `layers.1.mlp.up_proj.weight`$"):
        TitansCache.load(path, model)
    for name, value in (("memory_theta_max", 0.05), ("memory_gates", "chunk"), ("rms_norm_eps", 1e-5)):
        with pytest.raises(ValueError, match=f"it had `{name}=.*, this one has {value!r}"):
            TitansCache.load(path, tiny_model("mag", **{name: value}))
    with pytest.raises(ValueError, match=r"it had `sliding_window=.*, this one has 9"):
        TitansCache.load(path, tiny_model("mag", sliding_window=9))
    with pytest.raises(ValueError, match="it had `variant='mag'`, this one has 'lmm'"):
        TitansCache.load(path, tiny_model("lmm"))
    with pytest.raises(ValueError, match="weights differ in .* others"):
        TitansCache.load(path, tiny_model("mag", dtype=torch.float32))


def test_a_cut_a_foreign_and_a_missing_file_are_errors_that_say_so(saved, tmp_path):
    model, _, path = saved
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged, or not a snapshot"):
            TitansCache.load(path, model)
    path.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    with pytest.raises(ValueError, match="damaged, or not a snapshot"):
        TitansCache.load(path, model)
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ValueError, match="damaged, or not a snapshot"):
        TitansCache.load(path, model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="not a snapshot of a Titans memory"):
        TitansCache.load(tmp_path / "model" / "model.safetensors", model)
    with pytest.raises(FileNotFoundError, match="no snapshot at"):
        TitansCache.load(tmp_path / "nothing.safetensors", model)


def metadata_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))["__metadata__"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors, facts: tensors.pop("layers.0.seen"), "not a cache's, see 'layers.0.seen'"),
        (lambda tensors, facts: tensors.update(extra=torch.zeros(1)), "not a cache's, see 'extra'"),
        (lambda tensors, facts: tensors["layers.1.memory.weights.0"].fill_(torch.nan), "not finite"),
        (lambda tensors, facts: tensors["layers.0.memory.length"].fill_(99), "length' is out of range"),
        (lambda tensors, facts: tensors["layers.0.log.count"].fill_(-1), "count' is out of range"),
        (lambda tensors, facts: tensors.update({"layers.0.seen": torch.zeros(3, dtype=torch.long)}), "damaged: "),
        (
            lambda tensors, facts: facts.update(state='{"columns": -4, "rewindable": 0, "log_columns": 0}'),
            "`columns` is -4",
        ),
        (lambda tensors, facts: facts.update(state="[]"), "metadata are not a snapshot's"),
        (lambda tensors, facts: facts.update(state='{"columns": 4}'), "counters are not a cache's"),
        (lambda tensors, facts: facts.update(weights="[1]"), "metadata are not a snapshot's"),
        (lambda tensors, facts: tensors["layers.1.seen"].fill_(-1), "seen' is out of range"),
        (lambda tensors, facts: facts.update(state="{"), "damaged, or not a snapshot"),
        (lambda tensors, facts: facts.update(config='{"variant": null}'), "it had `variant=None`"),
        (
            lambda tensors, facts: facts.update(state='{"columns": 3, "rewindable": 9, "log_columns": 9}'),
            "go back to before its first token",
        ),
        (lambda tensors, facts: facts.update(version="3"), r"is of version 3; this titans-hf reads versions \(1, 2\)"),
        (lambda tensors, facts: facts.pop("weights"), "damaged, or not a snapshot"),
    ],
)
def test_a_file_that_no_cache_wrote_is_refused(saved, change, message):
    model, _, path = saved
    tensors, facts = load_file(path), metadata_of(path)
    change(tensors, facts)
    save_file(tensors, path, facts)
    with pytest.raises(ValueError, match="is damaged: its content does not match its sha256 digest|is of version 3"):
        TitansCache.load(path, model)
    save_file(tensors, path, {**facts, "digest": content_digest(tensors, facts)})
    with pytest.raises(ValueError, match=message):
        TitansCache.load(path, model)


def test_a_file_without_a_digest_loads_with_a_warning(saved):
    """Older versions wrote none."""
    model, cache, path = saved
    tensors, facts = load_file(path), metadata_of(path)
    assert facts.pop("digest").startswith("sha256:")
    save_file(tensors, path, facts)
    with pytest.warns(UserWarning, match="has no digest, .* damage to its numbers cannot be detected") as caught:
        assert_same_cache(TitansCache.load(path, model), cache)
    assert caught[0].filename == __file__
    save_file(tensors, path, {**facts, "dihest": "sha256:0"})
    with pytest.raises(ValueError, match="is damaged: its metadata has an unknown entry 'dihest'"):
        TitansCache.load(path, model)


def test_a_snapshot_that_was_just_written_loads_without_a_warning(saved):
    model, cache, path = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_cache(TitansCache.load(path, model), cache)


def assert_same_cache(loaded: TitansCache, cache: TitansCache) -> None:
    """All tensors are equal, bit for bit, and all counters."""
    for mine, other in zip(loaded.layers, cache.layers, strict=True):
        assert (mine.columns, mine.rewindable) == (other.columns, other.rewindable)
        assert mine.carry.log.columns == other.carry.log.columns
        found, expected = mine.named(), other.named()
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name], x), name


def test_flipped_and_zeroed_payload_bytes_are_refused(saved):
    model, _, path = saved
    whole = path.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in (start, (start + len(whole)) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="is damaged: its content does not match its sha256 digest"):
            TitansCache.load(path, model)
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    with pytest.raises(ValueError, match="is damaged: its content does not match its sha256 digest"):
        TitansCache.load(path, model)


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """The file with one random change, in the header as often as in the payload."""
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    data, kind = bytearray(whole), draw.choice(("flip", "zero", "random", "swap", "truncate", "extend"))
    low, high = draw.choice(((0, header), (header, len(data))))
    place, length = draw.randrange(low, high), draw.choice((1, 2, 8, 40, 500))
    if kind == "flip":
        data[place] ^= draw.choice((*(1 << bit for bit in range(8)), draw.randrange(1, 256)))
    elif kind == "zero":
        data[place : place + length] = bytes(len(data[place : place + length]))
    elif kind == "random":
        data[place : place + length] = draw.randbytes(len(data[place : place + length]))
    elif kind == "swap":
        other = draw.randrange(len(data))
        first, second = sorted((place, other))
        length = min(length, second - first, len(data) - second)
        data[first : first + length], data[second : second + length] = (
            data[second : second + length],
            data[first : first + length],
        )
    elif kind == "truncate":
        del data[draw.choice((place, len(data) - length)) :]
    else:
        place = draw.choice((place, len(data)))
        data[place:place] = draw.choice((bytes(length), draw.randbytes(length)))
    return bytes(data)


@pytest.mark.parametrize("mutations", [120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_refused_or_gives_the_same_cache(mutations, tmp_path):
    """Whatever was changed in the file: a `ValueError`, or a cache with the same tensors and counters."""
    model, path, draw = tiny_model("mac", num_hidden_layers=1), tmp_path / "book.safetensors", random.Random(mutations)
    cache = TitansCache(model.config)
    read(model, random_ids(1, 50), cache)
    cache.save(path, note={"model": "somewhere"})
    whole, refused = path.read_bytes(), 0
    for _ in range(mutations):
        path.write_bytes(mutated(whole, draw))
        try:
            loaded = TitansCache.load(path, model)
        except ValueError:
            refused += 1
        else:
            assert_same_cache(loaded, cache)
        try:
            assert isinstance(read_note(path), dict)
        except ValueError:
            continue
    assert 0.9 * mutations < refused < mutations


def test_a_snapshot_can_be_read_by_whom_other_files_can(saved, tmp_path):
    (tmp_path / "other").touch()
    assert saved[2].stat().st_mode == (tmp_path / "other").stat().st_mode


def test_saving_leaves_no_half_file_and_says_what_is_missing(saved, tmp_path, monkeypatch):
    model, cache, path = saved
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("titans_hf.snapshots.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["book.safetensors"]
    with pytest.raises(ValueError, match="the cache is empty"):
        TitansCache(model.config).save(path)
    del model
    alone = pickle.loads(pickle.dumps(cache))
    with pytest.raises(ValueError, match="pass it, `cache.save"):
        alone.save(path)


def test_loading_leaves_the_model_as_it_was(saved):
    model, _, path = saved
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    TitansCache.load(path, model)
    assert [module.training for module in model.modules()] == modes


def test_heads_and_adapters(saved, tmp_path):
    """Only what the memory depends on counts: not the head, but an adapter, and whether it is in use."""
    peft = pytest.importorskip("peft")
    model, _, path = saved
    assert TitansCache.load(path, model.model).get_seq_length() == 50
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match="weights differ"):
        TitansCache.load(path, adapted)
    cache = TitansCache(model.config)
    read(adapted, random_ids(1, 9), cache)
    cache.save(path)
    assert TitansCache.load(path, adapted).get_seq_length() == 9
    with adapted.disable_adapter(), pytest.raises(ValueError, match="adapters in use"):
        TitansCache.load(path, adapted)


@every_variant
def test_a_file_of_version_1_goes_on_and_is_cropped_as_it_would_have_been(variant, tmp_path):
    """Its log had columns with padding between the tokens, and a table that said what each column held."""
    model, ids, path = tiny_model(variant), random_ids(2, 90), tmp_path / "old.safetensors"
    cache = TitansCache(model.config)
    for piece in ids[:, :80].split([70, 3, 1, 1, 5], dim=1):
        read(model, piece, cache)
    read(model, random_ids(2, 3, seed=5), cache, memory_read_only=True)
    cache.save(path)
    tensors, facts = load_file(path), metadata_of(path)
    config = {name: x for name, x in json.loads(facts["config"]).items() if name != "memory_write"}  # a later field
    state = as_version_1(tensors, json.loads(facts["state"]))
    facts = {**facts, "version": "1", "state": state, "config": json.dumps(config)}
    facts.pop("digest")
    save_file(tensors, path, facts)
    with pytest.warns(UserWarning, match="digest"):
        old = TitansCache.load(path, model)
    for held in (cache, old):
        held.crop(-9)
    assert_close(read(model, ids[:, 74:], old), read(model, ids[:, 74:], cache), 1e-12)


def as_version_1(tensors: dict, state: dict) -> str:
    """Rewrite the logs in place; the two rows' tokens stand at different columns, with padding before and behind."""
    for prefix in [name.removesuffix("tokens") for name in tensors if name.endswith("log.tokens")]:
        count, tokens = tensors.pop(prefix + "count"), tensors[prefix + "tokens"]
        kind = torch.zeros(tokens.shape[:2], dtype=torch.int8)
        spread = torch.zeros_like(tokens[..., :-1])
        for row, own in enumerate(count.tolist()):
            newest = tokens[row, tokens.shape[1] - own :]
            columns = torch.arange(own) + 4 * row + 2
            spread[row, columns] = newest[..., :-1]
            kind[row, columns] = 1 + newest[:, 0, -1].to(torch.int8)
        tensors[prefix + "tokens"], tensors[prefix + "kind"] = spread, kind
    return json.dumps({"columns": state["columns"], "rewindable": state["rewindable"], "cursor": 192})
