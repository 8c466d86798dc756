"""The small Table 1: its text, its recipes of equal size, and its baseline, which trains as the others do."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

pytest.importorskip("datasets", reason="datasets is not installed (pip install titans-hf[train])")
pytest.importorskip("yaml", reason="pyyaml is not installed (pip install titans-hf[train])")
pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install titans-hf[eval])")

ROOT = Path(__file__).parent.parent
from titans_hf.records.sizes import count_parameters, empty_model  # noqa: E402
from titans_hf.train import pretrain as train  # noqa: E402
from titans_hf.train import recipe as recipes  # noqa: E402
from titans_hf.train import small_table, small_text  # noqa: E402

ARTICLES = (
    " \n = One {0} = \n \n Words @-@ and , more . \n = = Part = = \n Text <unk> \n"
    " = Two {0} = \n \n The \u2013 end . \n"
)


def write_data(folder: Path) -> Path:
    books = folder / "text/books"
    books.mkdir(parents=True)
    (folder / "text/wikitext2.train.tokens").write_text(
        "".join(ARTICLES.format(i) for i in range(300)), encoding="utf-8"
    )
    chapters = [f"## CHAPTER {i}\n\n" + f"It was night {i}. " * 200 for i in range(9)]
    (books / "A.md").write_text("# Title: A\n\n## Year: 1880\n\n" + "\n\n".join(chapters), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    small_text.main(["--data", str(write_data(folder / "data")), "--out", str(folder / "runs")])
    return folder / "runs"


def documents(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]


def test_the_text_is_articles_and_chapters_in_equal_parts(text):
    found = documents(text)
    articles = [document for document in found if document.startswith("= ")]
    chapters = [document for document in found if document.startswith("It was night")]
    assert len(articles) == 600
    assert "= One 7 =\n\nWords-and, more.\n== Part ==\nText <unk>" in articles
    assert "= Two 7 =\n\nThe \u2013 end." in articles
    assert len(articles) + len(chapters) == len(found)
    longest = max(map(len, chapters))
    assert sum(map(len, articles)) - longest < sum(map(len, chapters)) <= sum(map(len, articles))
    assert found[:600] != articles  # shuffled


def test_what_cards_say_of_the_text_is_counted(text):
    said = json.loads((text / "about.json").read_text())["data"]
    chapters = len(documents(text)) - 600
    assert "All 600 articles of WikiText-2's training set, " in said
    assert f" and {chapters} chapters, drawn at random, of 1 public-domain novels" in said


def test_a_model_that_was_trained_anew_is_measured_anew(tmp_path, monkeypatch):
    """Records of the weights before must not stand beside the new training."""
    monkeypatch.setattr(small_table, "RUNS", tmp_path / "runs")
    run, records = tmp_path / "runs" / "mag", tmp_path / "records"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (tmp_path / "runs" / "about.json").write_text("{}")
    measured = []

    def measure(*command: object) -> None:
        measured.append(command[command.index("--out") + 1].name)
        command[command.index("--out") + 1].write_text("{}")

    monkeypatch.setattr(small_table, "run", measure)
    for training, expected in (("1", 3), ("1", 0), ("2", 3)):
        (run / "training.json").write_text(training)
        small_table.measure("mag", tmp_path, records)
        assert len(measured) == expected
        measured.clear()
    small_table.measure("mag", tmp_path, records)
    assert (records / "titans-mag-3m" / "training.json").read_text() == "2"


def test_the_text_is_the_same_each_time(text, tmp_path):
    small_text.main(["--data", str(write_data(tmp_path / "data")), "--out", str(tmp_path / "runs")])
    assert documents(tmp_path / "runs") == documents(text)
    one, two = (AutoTokenizer.from_pretrained(folder / "tokenizer") for folder in (text, tmp_path / "runs"))
    assert one.get_vocab() == two.get_vocab()


def test_the_five_models_have_equal_parameters():
    sizes = []
    for model in small_table.MODELS.values():
        recipe = recipes.load_recipe(ROOT / f"scripts/recipes/{model.recipe}.yaml", list(model.settings))
        sizes.append(count_parameters(empty_model(recipe.configuration())).parameters)
        assert recipe.data.sequence_length <= getattr(recipe.configuration(), "max_position_embeddings", 10**9)
    assert len(sizes) == 5
    assert max(sizes) < 1.005 * min(sizes)


def test_a_baseline_trains_by_the_same_script(text, tmp_path):
    settings = [
        f"tokenizer.name={text / 'tokenizer'}",
        f"data.path={text / 'text.jsonl'}",
        "model.config.hidden_size=16",
        "model.config.intermediate_size=24",
        "model.config.num_hidden_layers=1",
        "model.config.num_attention_heads=2",
        "data.sequence_length=64",
        "held_out.one_in=5",
        "held_out.rows=2",
        "training.batch_tokens=256",
        "training.tokens=1024",
    ]
    train.main([str(ROOT / "scripts/recipes/small-llama.yaml"), *settings, f"out={tmp_path / 'run'}"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    record = json.loads((tmp_path / "run/training.json").read_text())
    assert record["recipe"]["model"]["family"] == "llama"


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.family=mamba", "`model.family` must be 'titans' or 'llama'; got 'mamba'"),
        ("model.preset=titans-mac-170m", "`model.preset` must be left out: the family 'llama' has no presets"),
        ("model.config.variant=mac", "there is no field `model.config.variant`"),
    ],
)
def test_a_wrong_family_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        recipes.load_recipe(ROOT / "scripts/recipes/small-llama.yaml", [setting])


def test_small_table_names_what_is_missing(tmp_path, capsys):
    for arguments, message in (
        (["--data", str(tmp_path)], "lm_eval is not there"),
        (["--data", str(tmp_path), "--only", "mac,gpt"], "there is no model 'gpt'; choose from mac"),
    ):
        with pytest.raises(SystemExit):
            small_table.main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        small_text.main(["--data", str(tmp_path)])
    assert "wikitext2.train.tokens" in capsys.readouterr().err
