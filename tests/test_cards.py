"""A model card says what the records say, no more, and the committed ones are what the generator makes now."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData, parse_eval_result_entries
from support import tiny_config
from transformers import LlamaConfig
from typer.testing import CliRunner

import titans_hf
from titans_hf.cli.app import app
from titans_hf.configuration_titans import PRESETS
from titans_hf.evals.chance import CHANCE, level
from titans_hf.evals.records import write_record
from titans_hf.hub import cards
from titans_hf.hub.card_results import by_suite, chance_note, eval_files, eval_results
from titans_hf.hub.cards import fill_card, is_hub_id, preset_card, public, read_model, trained_card
from titans_hf.hub.loading import CommandError
from titans_hf.hub.make_cards import main as make_cards
from titans_hf.records.provenance import provenance
from titans_hf.train.recipe import load_recipe

ROOT = Path(__file__).parent.parent

HOME = ROOT / "model_cards"
COMMITTED = sorted(path for path in HOME.glob("*.md") if path.name not in ("README.md", "RESULTS.md"))
DATASETS = {"wikitext": "EleutherAI/wikitext_document_level, wikitext-2-raw-v1", "piqa": "baber/piqa"}
DATASETS |= {"arc_easy": "allenai/ai2_arc, ARC-Easy", "arc_challenge": "allenai/ai2_arc, ARC-Challenge"}
DATASETS |= {"boolq": "aps/super_glue, boolq", "niah_single_1": "RULER, books"}
TASKS = {"wikitext_ppl": ("wikitext", "word_perplexity", "ppl"), "piqa_acc": ("piqa", "acc", "%")}
TASKS |= {"arc_easy_acc": ("arc_easy", "acc", "%"), "arc_challenge_acc_norm": ("arc_challenge", "acc_norm", "%")}
TASKS |= {"boolq_acc": ("boolq", "acc", "%"), "average": (None, None, "%")}
TASKS |= {"niah_pk_2k": ("niah_single_1", "2048", "%")}
RECIPE = {
    "out": "runs/small/mag",
    "model": {"preset": None, "config": {"variant": "mag"}},
    "tokenizer": {"name": "/home/somebody/tokenizer", "train": None},
    "data": {"source": "jsonl", "path": "runs/small/text.jsonl", "sequence_length": 512},
    "training": {"learning_rate": 0.003, "precision": "fp32"},
}
TRAINING = {
    "command": "python scripts/train/pretrain.py /home/somebody/small.yaml out=runs/x",
    "commit": "abc1234",
    "date": "2026-01-02",
    "torch": "2.13.0",
    "transformers": "5.22.2",
    "machine": "x86_64, 1 threads",
    "recipe": RECIPE,
    "parameters": 2_500_000,
    "tokens": 2_000_896,
    "steps": 977,
    "seconds": 1234.5,
    "held_out_perplexity": 98.76,
}


def make_record(suite: str = "table1", memory: str = "on", limit: int | None = None, **figures) -> dict:
    """A record as `titans eval` writes it; figures are value and standard error by column."""
    metrics, data = {}, {}
    for key, (value, stderr) in figures.items():
        task, metric, unit = TASKS[key]
        metrics[key] = {"value": value, "stderr": stderr, "unit": unit, "task": task, "metric": metric}
        if task:
            held = {"source": "files", "dataset": DATASETS[task], "task_version": 1.0, "files": {}}
            data[task] = {**held, "documents": limit or 100, "total": 100}
    return {
        "format": "titans evaluation",
        "version": 1,
        "suite": suite,
        **provenance(command="titans eval runs/small/mag/model --data-dir /home/somebody/data"),
        "commit": "abc1234",
        "date": "2026-01-03",
        "seeds": {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234},
        "seconds": 3.5,
        "model": {"name": "small", "variant": "mag", "parameters": 2_500_000, "dtype": "float32", "memory": memory},
        "settings": {"limit": limit, "batch_size": 8, "max_length": 99, "num_fewshot": 0, "bootstrap_iters": 1000},
        "data": data,
        "metrics": metrics,
    }


FIGURES = {
    "wikitext_ppl": (345.678, None),
    "piqa_acc": (55.5, 1.15),
    "arc_easy_acc": (26.0, 0.9),
    "arc_challenge_acc_norm": (21.0, 1.2),
    "boolq_acc": (60.0, 0.85),
    "average": (40.0, 0.5),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """What `model_cards/records/<name>/` holds for a trained model; there are no weights."""
    folder = tmp_path / "titans-mag-small"
    folder.mkdir()
    tiny_config("mag", architectures=["TitansForCausalLM"]).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(TRAINING))
    write_record(folder / "table1.json", make_record(**FIGURES))
    write_record(folder / "table1-off.json", make_record(memory="off", **{**FIGURES, "piqa_acc": (51.0, 1.17)}))
    write_record(folder / "table2.json", make_record("table2", niah_pk_2k=(3.5, 1.0)))
    return folder


def test_the_committed_cards_are_what_the_generator_makes(tmp_path):
    make_cards(["--out", str(tmp_path)])
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}
    committed = {path.name: path.read_text(encoding="utf-8") for path in COMMITTED}
    stale = sorted(name for name in {*made, *committed} if made.get(name) != committed.get(name))
    assert not stale, f"run `python scripts/make_cards.py`: {stale}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_card_is_one_the_hub_can_read(path):
    """What the Hub's own validation looks at: names that it knows, and lists where it wants lists."""
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "text-generation"
    assert all(isinstance(tag, str) for tag in data["tags"])
    assert re.fullmatch(r"[a-z]{2,3}", data.get("language", "en"))
    assert all(is_hub_id(name) for name in data.get("datasets", []))
    assert str(ModelCard(card.content)) == card.content
    assert "/work" not in card.content
    assert "/home" not in card.content
    if path.stem in PRESETS:
        assert "untrained" in data["tags"]
        assert "model-index" not in data
        title, first = [line for line in card.text.splitlines() if line][:2]
        assert title == f"# {path.stem} (untrained: no weights exist)"
        assert first.startswith("**Untrained: no weights exist.**")
    else:
        assert (HOME / "records" / path.stem / "config.json").is_file()


def test_all_presets_have_a_card():
    assert len(PRESETS) == 16
    assert {path.stem for path in HOME.glob("*.md")} >= set(PRESETS)


def test_a_preset_s_card_names_its_own_recipe_and_the_paper_s_figures():
    for name, recipe, tokens, perplexity in (
        ("titans-mac-340m", "paper-15b.yaml", "15,000,000,000", "25.43"),
        ("titans-lmm-760m", "paper-30b.yaml", "30,000,000,000", "20.04"),
        ("titans-mag-170m", "paper-15b.yaml", "15,000,000,000", None),
    ):
        text = str(preset_card(name))
        assert f"python scripts/train/pretrain.py scripts/recipes/{recipe} --preset {name}\n" in text
        assert f"| tokens | {tokens}, " in text
        assert (f"| Wiki. ppl ↓ | {perplexity} |" in text) == (perplexity is not None)
        assert ("**the paper's, not ours**" in text) == (perplexity is not None)
        assert "it never grows" in text
        for context in ("4K", "128K", "2M"):
            assert f"| at {context} tokens | " in text


@pytest.mark.parametrize("file", cards.PAPER_TOKENS)
def test_what_the_cards_say_of_the_recipes_is_in_the_recipes(file):
    recipe = load_recipe(ROOT / "scripts" / "recipes" / file)
    assert recipe.training.tokens == cards.PAPER_TOKENS[file]
    assert {
        "dataset": recipe.data.path,
        "config": recipe.data.config,
        "tokenizer": recipe.tokenizer.name,
        "length": recipe.data.sequence_length,
        "batch": recipe.training.batch_tokens,
        "learning_rate": recipe.training.learning_rate,
        "weight_decay": recipe.training.weight_decay,
    } == cards.PAPER_RECIPE


def test_the_cards_have_the_package_s_license():
    found = re.search(r'^license = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found.group(1).lower() == cards.LICENSE


def test_a_trained_card_quotes_its_records(folder):
    card = trained_card(read_model(folder))
    text = card.text
    assert "# titans-mag-small\n" in text
    assert "untrained" not in str(card)
    assert "| piqa, acc ↑ | 55.50 ± 1.15 | 51.00 ± 1.17 | 50.0 |" in text
    assert "| boolq, acc ↑ | 60.00 ± 0.85 | 60.00 ± 0.85 | 50.0 (one answer to all: 62.2) |" in text
    assert "| wikitext, word_perplexity ↓ | 345.68 | 345.68 | – |" in text
    assert "| Avg. | 40.00 ± 0.50 | 40.00 ± 0.50 | – |" in text
    assert "| niah_single_1, acc at 2048 tokens ↑ | 3.50 ± 1.00 | – |" in text
    below = "within two standard errors of chance, or below it: arc_easy, arc_challenge, boolq; above chance by more"
    assert f"- Memory on: {below} than that: piqa.\n" in text
    assert "- Memory off: a control that never writes into the memory.\n" in text
    assert "- Memory off: table1: all documents, from files; " in text
    assert "- Memory off: within two standard errors of chance, or below it: piqa, arc_easy" in text
    assert "| held-out perplexity | 98.76 |" in text
    assert "| tokens | 2,000,896 in 977 steps |" in text
    assert "| data | local files, `runs/small/text.jsonl` (jsonl) |" in text
    assert "per sequence, memory included; it never grows" in text
    assert "trust_remote_code=True" in text


def test_a_card_tells_nothing_of_the_machine_s_folders(folder):
    text = str(trained_card(read_model(folder)))
    assert "somebody" not in text
    assert "python scripts/train/pretrain.py …/small.yaml out=runs/x" in text
    assert "titans eval runs/small/mag/model --data-dir …/data" in text
    assert "name: …/tokenizer" in text
    assert public("see https://a.b/c/d and a/b/c") == "see https://a.b/c/d and a/b/c"


def test_the_metadata_hold_whole_results_on_the_hub_s_datasets_alone(folder):
    """Not the controls, not parts of a task, not tasks of no dataset; ARC's two parts are kept apart."""
    data = ModelCard(str(trained_card(read_model(folder)))).data
    found = {
        (each.dataset_type, each.dataset_config, each.metric_type): each.metric_value for each in data.eval_results
    }
    assert found == {
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "perplexity"): 345.68,
        ("baber/piqa", None, "accuracy"): 55.5,
        ("allenai/ai2_arc", "ARC-Easy", "accuracy"): 26.0,
        ("allenai/ai2_arc", "ARC-Challenge", "accuracy"): 21.0,
        ("aps/super_glue", "boolq", "accuracy"): 60.0,
    }
    assert data.model_name == "titans-mag-small"
    assert data.datasets is None  # local files have no name on the Hub
    assert data.language is None
    assert eval_results([make_record(limit=7, **FIGURES)]) == []


def test_results_in_the_hub_s_newer_form_read_back(folder):
    files = eval_files(read_model(folder).records)
    assert list(files) == [".eval_results/titans-table1.yaml"]
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/titans-table1.yaml"]))
    assert ("baber/piqa", "piqa", 55.5, "2026-01-03") in [(x.dataset_id, x.task_id, x.value, x.date) for x in entries]


def test_what_nobody_recorded_can_be_said_in_a_file(folder):
    about = {"data": "Novels and articles.", "language": "en", "datasets": ["a/b"], "base_model": "c/d"}
    (folder / "about.json").write_text(json.dumps(about))
    card = trained_card(read_model(folder))
    assert (card.data.language, card.data.datasets, card.data.base_model) == ("en", ["a/b"], "c/d")
    assert "\nNovels and articles.\n" in card.text
    (folder / "about.json").write_text(json.dumps({"language": 3}))
    with pytest.raises(ValueError, match="`language` must be a valid string; got 3"):
        read_model(folder)


def test_a_model_that_an_installed_wheel_trained_has_a_card(folder):
    """Its training record has no commit, since there is no repository."""
    (folder / "training.json").write_text(json.dumps({**TRAINING, "commit": None}))
    assert "| commit, date | unknown, 2026-01-02 |" in trained_card(read_model(folder)).text


def test_a_hub_dataset_of_the_recipe_is_named(folder):
    data = {"source": "hub", "path": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT", "split": "train"}
    (folder / "training.json").write_text(json.dumps({**TRAINING, "recipe": {**RECIPE, "data": data}}))
    card = trained_card(read_model(folder))
    assert (card.data.datasets, card.data.language) == (["HuggingFaceFW/fineweb-edu"], "en")
    assert "| data | `HuggingFaceFW/fineweb-edu`, `sample-10BT`, split `train` |" in card.text


@pytest.mark.parametrize("rank, learned", [(0, "the memories alone"), (16, "attention by LoRA of rank 16, merged")])
def test_a_taught_graft_names_its_source_and_claims_no_licence(folder, rank, learned):
    for teacher, base in (("ada/llama-135m", "ada/llama-135m"), ("/home/ada/llama", None)):
        recipe = {**RECIPE, "distil": {"teacher": teacher, "lora_rank": rank}}
        (folder / "training.json").write_text(json.dumps({**TRAINING, "recipe": recipe}))
        card = trained_card(read_model(folder))
        assert (card.data.base_model, card.data.license) == (base, None)
        name = teacher.replace("/home/ada/", "…/")
        assert f"grafted from {name} and taught by it" in card.text
        assert f"those of {name}, whose licence and limits hold" in card.text
        assert learned in card.text
        assert "/home/ada" not in str(card)


def test_a_baseline_has_a_card_without_a_memory(tmp_path):
    LlamaConfig(hidden_size=192, num_hidden_layers=4, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    record = make_record(memory="none", **FIGURES)
    write_record(tmp_path / "table1.json", {**record, "model": {**record["model"], "variant": "llama"}})
    card = trained_card(read_model(tmp_path, name="small-llama"))
    assert card.data.tags == ["llama"]
    assert len(card.data.eval_results) == 5
    assert "A llama (baseline) language model of 2.5M parameters" in card.text
    assert "| layers | 4 |" in card.text
    for word in ("Memory state", "trust_remote_code", "lossy", "Citation"):
        assert word not in card.text


def test_a_folder_with_a_configuration_alone_has_a_card(tmp_path):
    tiny_config("lmm").save_pretrained(tmp_path / "run" / "model")
    card = trained_card(read_model(tmp_path / "run" / "model"))
    assert "# run\n" in card.text
    assert "No record of the training" in card.text
    assert "No evaluation was given" in card.text
    (tmp_path / "run" / "training.json").write_text(json.dumps(TRAINING))  # where scripts/train/pretrain.py puts it
    assert "trained on 2M tokens" in trained_card(read_model(tmp_path / "run" / "model")).text


def test_chance_is_that_of_the_answers_and_of_the_commonest_one():
    assert level("boolq") == 62.2
    assert level("social_iqa") == CHANCE["social_iqa"] == 100 / 3
    assert chance_note(make_record(piqa_acc=(52.2, 1.15))).startswith("within two standard errors of chance")
    assert chance_note(make_record(piqa_acc=(52.4, 1.15))) == "above chance by more than that: piqa."
    assert chance_note(make_record(wikitext_ppl=(30.0, None))) == ""
    assert chance_note(make_record(piqa_acc=(52.4, None))) == ""


def test_the_same_evaluation_twice_is_refused():
    with pytest.raises(ValueError, match="two records are of table1 with the memory on"):
        by_suite([make_record(**FIGURES), make_record(**FIGURES)])


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("training.json", json.dumps({**TRAINING, "tokens": "many"}), "`tokens` must be a valid integer; got 'many'"),
        ("training.json", json.dumps({"command": "x"}), "`commit` is missing"),
        ("training.json", "{", "is not JSON"),
        ("config.json", "[]", "must hold a mapping"),
        ("config.json", '{"model_type": "titans", "variant": "mad"}', "configuration that cannot be read"),
    ],
)
def test_bad_input_is_named(folder, name, text, expected):
    (folder / name).write_text(text)
    with pytest.raises((CommandError, ValueError), match=expected):
        trained_card(read_model(folder))


def test_only_an_empty_form_is_filled(tmp_path):
    """`push_to_hub` finds the repository's card, which stays, or leaves a form, which does not."""
    tiny_config("mac").save_pretrained(tmp_path)
    says = "This is the model card of a model. This model card has been automatically generated."
    form = ModelCard.from_template(ModelCardData(tags=["mine"]), model_description=says)
    half_filled = str(form).replace("[More Information Needed]", "Ada", 1)
    path = tmp_path / "README.md"
    for own in ("---\nlicense: mit\n---\n# Mine\n", half_filled, f"{form}\nAnd this.\n"):
        path.write_text(own, encoding="utf-8")
        fill_card(tmp_path, "ada/tiny")
        assert path.read_text(encoding="utf-8") == own
    form.save(path)
    fill_card(tmp_path, "ada/tiny")
    found = ModelCard.load(path)
    assert {"mine", "titans-mac"} <= set(found.data.tags)
    assert "# tiny\n" in found.text


@pytest.mark.parametrize(
    ("architecture", "loads", "uses", "is_a"),
    [
        ("TitansForCausalLM", "AutoModelForCausalLM", "model.generate(", "language model"),
        ("TitansForSequenceClassification", "AutoModelForSequenceClassification", ".logits", "model for text class"),
        ("TitansModel", "AutoModel", ".last_hidden_state", "model for feature extraction"),
    ],
)
def test_a_card_shows_how_its_own_kind_of_model_is_used(tmp_path, architecture, loads, uses, is_a):
    config = tiny_config("mag", num_labels=3)
    model = getattr(titans_hf, architecture)(config)
    model.save_pretrained(tmp_path)
    text = trained_card(read_model(tmp_path)).text
    assert f"model = {loads}.from_pretrained(" in text
    assert uses in text
    assert f"A Titans (MAG) {is_a}" in text
    assert f"| parameters | {model.num_parameters():,} " in text


def test_babilong_has_a_result_for_each_task_and_length():
    """The Hub tells figures of one dataset apart by its configuration and split."""
    record = make_record(suite="babilong", limit=None)
    hub = {
        "source": "hub",
        "dataset": "RMT-team/babilong",
        "task_version": 1.0,
        "documents": 2,
        "total": 2,
        "files": {},
    }
    figures = [(task, length) for task in ("qa1", "qa2") for length in ("0k", "4k")]
    record["data"] = {f"babilong_{task}": hub for task, _ in figures}
    record["metrics"] = {
        f"{task}_{length}": dict(value=10.0 + i, stderr=1.0, unit="%", task=f"babilong_{task}", metric=length)
        for i, (task, length) in enumerate(figures)
    }
    found = eval_results([record])
    assert [(x.dataset_split, x.dataset_config) for x in found] == figures
    read = ModelCardData(model_name="x", eval_results=found).to_dict()["model-index"][0]["results"]
    assert [len(result["metrics"]) for result in read] == [1, 1, 1, 1]
    assert eval_files([record]) == {}


def run(*arguments, code: int = 0):
    done = CliRunner().invoke(app, ["card", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_the_command_writes_and_prints_cards(folder, tmp_path):
    out = tmp_path / "card.md"
    run(folder, "--out", out)
    assert out.read_text(encoding="utf-8") == str(trained_card(read_model(folder)))
    printed = run("titans-mag-170m").stdout
    assert printed == (HOME / "titans-mag-170m.md").read_text(encoding="utf-8")
    (folder / "table1-off.json").rename(tmp_path / "off.json")
    assert "memory off" in run(folder, "--records", tmp_path / "off.json", "--name", "other").stdout


def test_the_command_says_what_is_wrong(folder, tmp_path):
    for arguments, expected in (
        (["titans-mag-171m"], "no folder titans-mag-171m; the preset nearest to it is titans-mag-170m"),
        (["titans-mag-170m", "--records", folder / "table1.json"], "which nobody trained"),
        ([folder / "config.json"], "is a file"),
        ([tmp_path], "there is no"),
        ([folder, "--training", tmp_path / "none.json"], "a card needs the training record"),
        ([folder, "--records", folder / "training.json"], "is not the record of a `titans eval`"),
        ([folder, "--out", tmp_path / "nowhere" / "card.md"], "there is no folder"),
    ):
        assert expected in run(*arguments, code=1).stderr
