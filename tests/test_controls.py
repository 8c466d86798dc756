"""Controls for evaluation: a memory that is never written, one that is reset at each segment, and a baseline."""

import copy
import json

import pytest
import torch
from support import VARIANTS, chat_tokenizer, save_chat_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install titans-hf[eval])")

from lm_eval.models.huggingface import HFLM

from titans_hf.cli.app import app
from titans_hf.evals import evaluation
from titans_hf.evals.evaluation import evaluate
from titans_hf.evals.model import TitansLM
from titans_hf.evals.records import read_record
from titans_hf.evals.tables import measured
from titans_hf.studies import by_place

pytestmark = pytest.mark.usefixtures("libraries_as_before")
SEGMENT = 8
LENGTHS = (29, 8, 17, 3)


def open_lm(model, memory: str, batch_size: int = 3) -> TitansLM:
    return TitansLM(pretrained=model, tokenizer=chat_tokenizer(), batch_size=batch_size, memory=memory)


def small_model(variant: str, **config):
    return tiny_model(variant, vocab_size=len(chat_tokenizer()), segment_size=SEGMENT, memory_chunk_size=4, **config)


def draw(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 250, (length,), generator=generator).tolist() for length in lengths]


def likelihoods(lm: HFLM, rows: list[list[int]]) -> list[float]:
    """Of each row's tokens behind its first."""
    return [found[0] for found in lm._loglikelihood_tokens([(None, ids[:1], ids[1:]) for ids in rows], True)]


@torch.no_grad()
def likelihood(model, ids: list[int], **kwargs) -> float:
    x = torch.tensor([ids])
    logits = model(x, use_cache=False, **kwargs).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, x[0, 1:, None]).sum().item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_off_never_writes(variant):
    model, rows = small_model(variant), draw(*LENGTHS)
    expected = [likelihood(model, ids, memory_read_only=True) for ids in rows]
    assert likelihoods(open_lm(model, "off"), rows) == pytest.approx(expected, rel=1e-9)
    assert likelihoods(open_lm(model, "on"), rows) != pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("variant", ["lmm", "mac"])
@pytest.mark.parametrize("persistent", [0, 3])
def test_with_resets_a_segment_knows_nothing_of_those_before(variant, persistent):
    """Without a convolution nothing but the memory joins the segments of LMM and MAC: each is read as if alone."""
    model = small_model(variant, memory_conv=False, num_persistent_tokens=persistent)
    (ids,) = draw(29)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids[i : i + SEGMENT]])).logits[0] for i in range(0, 28, SEGMENT)])
    expected = alone[:28].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).sum().item()
    assert likelihoods(open_lm(model, "reset"), [ids]) == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resets_leave_attention_and_the_first_segment_alone(variant):
    """What a window reaches is still seen over the border of a segment; what only the memory held is gone."""
    model = small_model(variant, num_hidden_layers=1, sliding_window=6, memory_conv=False)
    (ids,) = draw(16)
    rows = [ids, [ids[0] + 1, *ids[1:]], [*ids[:7], ids[7] + 1, *ids[8:]]]

    def logits(memory: str) -> torch.Tensor:
        lm, x = open_lm(model, memory), torch.tensor(rows)
        with torch.no_grad():
            return torch.cat([found for _, found in lm._pieces(x, 0)], dim=1)  # [rows, T, V]

    on, reset = logits("on"), logits("reset")
    clear = SEGMENT + 5  # whose window begins with the segment
    assert not torch.allclose(on[0, clear], on[1, clear])
    assert torch.equal(reset[0, clear], reset[1, clear])
    assert torch.equal(reset[0, SEGMENT], reset[2, SEGMENT]) == (variant in ("lmm", "mac"))
    short = draw(SEGMENT, 5)
    assert likelihoods(open_lm(model, "reset"), short) == pytest.approx(likelihoods(open_lm(model, "on"), short))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("memory", ["off", "reset"])
def test_controls_do_not_depend_on_the_batch(variant, memory):
    model, rows = small_model(variant), draw(*LENGTHS)
    expected = likelihoods(open_lm(model, memory, batch_size=1), rows)
    assert likelihoods(open_lm(model, memory, batch_size=4), rows) == pytest.approx(expected, rel=1e-9)


@pytest.fixture(scope="module")
def baseline() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chat_tokenizer()),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def write_boolq(folder):
    (folder / "boolq").mkdir()
    row = '{"question": "is tea a drink", "passage": "Tea -- Tea is a drink.", "idx": 0, "label": true}\n'
    (folder / "boolq" / "val.jsonl").write_text(row)
    return folder


def test_a_baseline_is_measured_by_the_same_command(baseline, tmp_path):
    baseline.save_pretrained(tmp_path / "llama")
    chat_tokenizer().save_pretrained(tmp_path / "llama")
    arguments = ["eval", tmp_path / "llama", "--data-dir", write_boolq(tmp_path), "--tasks", "boolq"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 0, done.output
    record = read_record(tmp_path / "x.json")
    assert (record["model"]["variant"], record["model"]["memory"]) == ("llama", "none")
    assert record["settings"]["max_length"] == 32
    assert record["settings"]["inputs_cut"] == 2  # yes and no, behind a passage of more than 32 bytes
    assert "did not fit, 2 inputs cut to 32 tokens" in done.stderr
    assert ", from files, 2 inputs cut to 32 tokens; " in measured(record)


@torch.no_grad()
def test_a_baseline_in_bfloat16_is_scored_in_float32(baseline):
    """As a Titans model is: rounded to bfloat16, sums of logarithms would keep two or three digits."""
    half, rows = copy.deepcopy(baseline).bfloat16(), draw(*LENGTHS)
    found = likelihoods(evaluation.open_lm(half, chat_tokenizer(), batch_size=1), rows)
    expected = []
    for ids in map(torch.tensor, rows):
        logits = half(ids[None, :-1]).logits[0].float()
        expected.append(logits.log_softmax(-1).gather(-1, ids[1:, None]).sum().item())
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_has_no_memory_cannot_have_it_switched_off(baseline, tmp_path):
    with pytest.raises(ValueError, match="`memory` must be left out: 'llama' is a baseline"):
        evaluate(baseline, chat_tokenizer(), tasks=["boolq"], data_dir=write_boolq(tmp_path), memory="off")
    with pytest.raises(ValueError, match="`memory` must be one of on, off, reset; got 'of'"):
        evaluate(tiny_model("lmm"), chat_tokenizer(), tasks=["boolq"], data_dir=tmp_path, memory="of")


def test_losses_by_place_are_the_models_own(tmp_path, capsys):
    save_chat_model(tmp_path / "tiny", "lmm", memory_chunk_size=4, num_persistent_tokens=0)
    (tmp_path / "wikitext2").mkdir()
    articles = " = One = \n \n " + "Some words , and more . " * 30 + "\n = Two = \n \n Short . \n"
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(articles)
    by_place.main([str(tmp_path / "tiny"), "--data", str(tmp_path), "--tokens", "300"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 articles"
    assert printed[1].split() == ["tokens", "0-128", "128-256", "256-300"]
    assert [line.split()[0] for line in printed[2:]] == ["on", "off", "reset"]
    model, tokenizer = (auto.from_pretrained(tmp_path / "tiny") for auto in (AutoModelForCausalLM, AutoTokenizer))
    ids = by_place.read_texts(tmp_path, tokenizer, 300)
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1], memory_read_only=True).logits[0]
    whole = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert printed[3].split()[1:] == [f"{whole[a:b].mean():.3f}" for a, b in ((0, 128), (128, 256), (256, 300))]
    record = ["--forget-to", "zero", "--record", str(tmp_path / "places")]
    by_place.main([str(tmp_path / "tiny"), "--data", str(tmp_path), "--tokens", "300", *record])
    found = json.loads((tmp_path / "places.json").read_text())
    assert found["places"] == [[0, 128], [128, 256], [256, 300]]
    towards_zero = capsys.readouterr().out.splitlines()
    assert (
        [f"{mean:.3f}" for mean in found["nats_per_token"]["on"]]
        == towards_zero[2].split()[1:]
        != printed[2].split()[1:]
    )
    assert towards_zero[3] == printed[3]  # a memory that is never written forgets nothing
    with pytest.raises(ValueError, match="no article has 9,000 tokens: lower --tokens"):
        by_place.read_texts(tmp_path, tokenizer, 9000)
