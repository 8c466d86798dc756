"""A checkpoint loads wherever transformers loads checkpoints, and computes what it computed when it was saved."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from support import (
    VOCAB,
    assert_close,
    chat_tokenizer,
    every_variant,
    random_ids,
    save_chat_model,
    slow_but,
    tiny_model,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from titans_hf import (
    TitansConfig,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansModel,
    TitansPreTrainedModel,
)

WITHOUT_TITANS_HF = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "titans_hf":
            raise ImportError("titans_hf is not installed here")
sys.meta_path.insert(0, NotInstalled())
folder = sys.argv[1]
"""


def run_without_titans_hf(code: str, *arguments, **environment) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TITANS_HF + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@every_variant
def test_the_auto_classes_know_titans(variant, tmp_path):
    tiny_model(variant, torch.float32).save_pretrained(tmp_path)
    for auto, expected in (
        (AutoConfig, TitansConfig),
        (AutoModel, TitansModel),
        (AutoModelForCausalLM, TitansForCausalLM),
        (AutoModelForSequenceClassification, TitansForSequenceClassification),
    ):
        assert type(auto.from_pretrained(tmp_path)) is expected
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_config(config)) is TitansForCausalLM


@every_variant
def test_a_pipeline_writes_what_generate_writes(variant, tmp_path):
    save_chat_model(tmp_path, variant)
    tokenizer, model = (auto.from_pretrained(tmp_path) for auto in (AutoTokenizer, AutoModelForCausalLM))
    write = pipeline("text-generation", model=str(tmp_path))
    settings = {"max_new_tokens": 6, "do_sample": False}
    texts = ["one two", "three"]
    found = [answer[0]["generated_text"] for answer in write(texts, batch_size=2, return_full_text=False, **settings)]
    for text, written in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        expected = model.generate(**inputs, **settings)[0, inputs.input_ids.shape[1] :]
        assert written == tokenizer.decode(expected, skip_special_tokens=True)


@slow_but("mac")
def test_a_checkpoint_brings_its_own_code(variant, tmp_path):
    """Where titans_hf cannot be imported, `trust_remote_code=True` gives the same logits and the same text."""
    model, ids = tiny_model(variant, torch.float32), random_ids(2, 13)
    model.save_pretrained(tmp_path / "saved")
    chat_tokenizer().save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = {"logits": model(ids).logits, "text": model.generate(ids, max_new_tokens=5, do_sample=False)}
    torch.save((ids, expected), tmp_path / "expected.pt")
    code = """
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
ids, expected = torch.load(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, expected["logits"], rtol=0, atol=1e-6)
for cache in (None, "static"):
    text = model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation=cache)
    assert torch.equal(text, expected["text"])
assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "TitansModel"
model.save_pretrained(sys.argv[3])  # and it passes its code on
print("loaded", AutoTokenizer.from_pretrained(folder)("a").input_ids)
"""
    arguments = (tmp_path / "saved", tmp_path / "expected.pt", tmp_path / "again")
    printed = run_without_titans_hf(code, *arguments, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert printed.strip().endswith("loaded " + str(chat_tokenizer()("a").input_ids))
    for folder in ("saved", "again"):
        code_files = {file.name for file in (tmp_path / folder).glob("*.py")}
        assert {"modeling_titans.py", "configuration_titans.py", "memory_ops.py", "cache_titans.py"} <= code_files
    auto_map = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "modeling_titans.TitansForCausalLM"


def test_two_checkpoints_with_code_of_their_own_share_a_process(tmp_path):
    """Each model writes what it writes alone, with every kind of cache, in any order; each cache is of its own code."""
    ids, expected = random_ids(2, 13), []
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, variant, layers in zip(folders, ("mag", "lmm"), (2, 3), strict=True):
        model = tiny_model(variant, torch.float32, num_hidden_layers=layers)
        model.save_pretrained(folder)
        expected.append(model.generate(ids, max_new_tokens=5, do_sample=False))
    with open(folders[1] / "cache_titans.py", "a") as file:
        file.write("# another version\n")
    torch.save((ids, expected), tmp_path / "expected.pt")
    code = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
ids, expected = torch.load(sys.argv[3])
settings = {"max_new_tokens": 5, "do_sample": False}
models = [AutoModelForCausalLM.from_pretrained(x, trust_remote_code=True) for x in sys.argv[1:3]]
packages = [type(model).__module__.rpartition(".")[0] for model in models]
assert packages[0] != packages[1], packages
caches = (
    lambda config: {},
    lambda config: {"past_key_values": DynamicCache(config=config)},
    lambda config: {"past_key_values": StaticCache(config=config, max_cache_len=40)},
    lambda config: {"cache_implementation": "static"},
)
for make in (*caches, *caches):
    for model, package, text in zip(models, packages, expected):
        written = model.generate(ids, **settings, **make(model.config), return_dict_in_generate=True)
        assert torch.equal(written.sequences, text)
        assert {type(layer).__module__ for layer in written.past_key_values.layers} == {package + ".cache_titans"}
fresh = AutoConfig.from_pretrained(folder, trust_remote_code=True)  # of no model: the code that was loaded first
assert torch.equal(models[0].generate(ids, past_key_values=DynamicCache(config=fresh), **settings), expected[0])
for number, model in enumerate(models):
    model.save_pretrained(sys.argv[4] + str(number))
"""
    arguments = (*folders, tmp_path / "expected.pt", tmp_path / "again")
    run_without_titans_hf(code, *arguments, HF_MODULES_CACHE=str(tmp_path / "modules"))
    for number, folder in enumerate(folders):
        saved, again = (json.loads((x / "config.json").read_text()) for x in (folder, tmp_path / f"again{number}"))
        assert again == saved, "what a model calls its cache layers is not saved"


@every_variant
@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_checkpoint_loads_back_to_the_same_logits(variant, tied, tmp_path):
    model, ids = tiny_model(variant, torch.float32, tie_word_embeddings=tied), random_ids(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    names = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names |= set(file.keys())
    assert ("lm_head.weight" in names) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_loads_in_the_dtype_asked_for(variant, dtype, tmp_path):
    """Half precision leaves the memory's start, and its state, in float32."""
    model, ids = tiny_model(variant, torch.float32), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    with torch.no_grad():
        outputs = loaded(ids)
    assert outputs.logits.dtype == dtype
    assert_close(outputs.logits.float(), model(ids).logits, 1e-4 if dtype == torch.float64 else 0.1)
    memory = outputs.past_key_values.layers[0].carry.memory
    kept = {*(W.dtype for W in memory.weights), *(W.dtype for W in loaded.model.layers[0].mixer.memory.start.weights)}
    assert kept == {torch.promote_types(dtype, torch.float32)}


def test_a_weight_file_s_variant_is_not_the_model_s(tmp_path):
    """`variant="fp16"` chooses a file, here as for every model; the configuration keeps its own `variant`."""
    model, ids = tiny_model("mal", torch.float32), random_ids(1, 5)
    model.save_pretrained(tmp_path, variant="fp16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16")
    assert loaded.config.variant == "mal"
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path, variant="lmm").variant == "lmm"


@every_variant
def test_a_device_map_and_disk_offload_change_no_token(variant, tmp_path):
    model, ids = tiny_model(variant, torch.float32, num_hidden_layers=3), random_ids(2, 9)
    model.save_pretrained(tmp_path / "saved")
    expected = model.generate(ids, max_new_tokens=7, do_sample=False)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map="auto")
    assert torch.equal(whole.generate(ids, max_new_tokens=7, do_sample=False), expected)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert split.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(split.generate(ids, max_new_tokens=7, do_sample=False), expected)


@every_variant
def test_a_model_can_be_made_on_meta_and_given_its_weights_later(variant):
    model, ids = tiny_model(variant, torch.float32), random_ids(2, 9)
    with torch.device("meta"):
        empty = TitansForCausalLM(model.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    # as from_pretrained does for buffers that are not saved
    empty.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


@every_variant
@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_can_grow(variant, tied, tmp_path):
    """Old tokens keep their logits, new ones get some, and the larger model saves and loads."""
    model, ids = tiny_model(variant, torch.float32, tie_word_embeddings=tied), random_ids(2, 9)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(VOCAB + 4)
        after = model(ids).logits
    assert model.config.vocab_size == VOCAB + 4
    assert after.shape[-1] == VOCAB + 4
    assert_close(after[..., :VOCAB], before, 1e-6)
    assert model(ids, labels=ids).loss.isfinite()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, after)


def test_an_fsdp_wrapper_does_not_pass_for_our_code():
    """FSDP2 subclasses the model in a module of torch's; that module must not be saved as the model's code."""

    class Loaded(TitansForCausalLM):  # as transformers leaves a class that it loaded as remote code
        _auto_class = "AutoModelForCausalLM"

    wrapped = type("FSDPLoaded", (Loaded,), {"__module__": "torch.distributed.fsdp._fully_shard"})
    assert Loaded.is_remote_code()
    assert not wrapped.is_remote_code()
    assert issubclass(wrapped, TitansPreTrainedModel)
