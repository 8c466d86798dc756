"""Table 1 through lm-eval: its own requests, from files; nothing cut, memory bounded, for any batch size."""

import json
from pathlib import Path

import datasets
import pytest
import torch
from support import VARIANTS, chat_tokenizer, save_chat_model, tiny_model
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install titans-hf[eval])")

import lm_eval
from lm_eval.models.huggingface import HFLM

from titans_hf.cli.app import app
from titans_hf.evals.chance import CHANCE, level
from titans_hf.evals.evaluation import TASK_FOLDER, evaluate, load_tasks, task_manager
from titans_hf.evals.files import COUNTS, READERS, VARIABLE, data_folder, documents
from titans_hf.evals.model import TitansLM
from titans_hf.evals.paper_tables import paper_table
from titans_hf.evals.records import read_record

pytestmark = pytest.mark.usefixtures("libraries_as_before")
REAL = Path(__file__).parent.parent.parent / "shared" / "data" / "lm_eval"
with_real_files = pytest.mark.skipif(
    not REAL.is_dir(), reason="the benchmarks' own files are not in ../shared/data/lm_eval"
)
TASKS = paper_table(1).tasks


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def question(name: str, stem: str, key: str, **choices: str) -> dict:
    """A row of ARC as its authors publish it."""
    listed = [{"text": text, "label": label} for label, text in choices.items()]
    return {"id": name, "question": {"stem": stem, "choices": listed}, "answerKey": key}


PIQA = {"goal": "To open a jar,", "sol1": "turn the lid.", "sol2": "turn the  table."}
SIQA = {"context": "Al fed Bo.", "question": "Why?", "answerA": "hunger", "answerB": "rain", "answerC": "caf\u00e9"}
HELLASWAG = {
    "ind": 4,
    "activity_label": "Cooking",
    "ctx_a": "A pan [title] heats.",
    "ctx_b": "the cook",
    "ctx": "A pan [title] heats. the cook",
    "split": "val",
    "split_type": "indomain",
    "endings": ["[step] stirs.", "sleeps.", "sings  twice.", "leaves."],
    "source_id": "x~1",
}
WINOGRANDE = {"sentence": "Ann met Eve as _ was late.", "option1": "Ann", "option2": "Eve", "answer": "2"}
BOOLQ = {"question": "is tea a drink", "passage": "Tea -- Tea is a drink.", "idx": 0}
CHOICES = {"text": ["rock", "tree", "dog"], "label": ["1", "2", "3"]}
ARTICLES = (" = One = \n \n Words @-@ and , more . \n = = Part = = \n Text \n", " = Two = \n \n The \u2013 end . \n")

# by task: the files as their authors publish them, and the rows that the Hub gives
PUBLISHED: dict[str, tuple[tuple[str, ...], list[dict]]] = {
    "wikitext": ((" \n" + "".join(ARTICLES),), [{"page": ARTICLES[0][:-1]}, {"page": ARTICLES[1]}]),
    "lambada_openai": (
        (lines({"text": "He said no,\nnever again"}, {"text": "A cup of tea"}),),
        [{"text": "He said no,\nnever again"}, {"text": "A cup of tea"}],
    ),
    "piqa": ((lines(PIQA, PIQA), "1\n0\n"), [{**PIQA, "label": 1}, {**PIQA, "label": 0}]),
    "hellaswag": (
        (lines({**HELLASWAG, "label": 3}, {**HELLASWAG, "label": 0}),),
        [{**HELLASWAG, "label": "3"}, {**HELLASWAG, "label": "0"}],
    ),
    "winogrande": ((lines(WINOGRANDE, {**WINOGRANDE, "answer": "1"}),), [WINOGRANDE, {**WINOGRANDE, "answer": "1"}]),
    "arc_easy": (
        (lines(question("q1", "What barks?", "3", **{"1": "rock", "2": "tree", "3": "dog"})),),
        [{"id": "q1", "question": "What barks?", "choices": CHOICES, "answerKey": "3"}],
    ),
    "arc_challenge": (
        (lines(question("q2", "What is hot?", "B", A="ice", B="fire")),),
        [
            {
                "id": "q2",
                "question": "What is hot?",
                "choices": {"text": ["ice", "fire"], "label": ["A", "B"]},
                "answerKey": "B",
            }
        ],
    ),
    "social_iqa": ((lines(SIQA, SIQA), "1\n3\n"), [{**SIQA, "label": "1"}, {**SIQA, "label": "3"}]),
    "boolq": (
        (lines({**BOOLQ, "label": True}, {**BOOLQ, "idx": 1, "label": False}),),
        [{**BOOLQ, "label": 1}, {**BOOLQ, "idx": 1, "label": 0}],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of all nine benchmarks, a row or two each."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for task, (texts, _) in PUBLISHED.items():
        for name, text in zip(READERS[task][0], texts, strict=True):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory):
    """The first rows of the real files."""
    folder = tmp_path_factory.mktemp("real")
    for task, (names, _) in READERS.items():
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            text = (REAL / name).read_text(encoding="utf-8").split("\n")[: 300 if task == "wikitext" else 11]
            (folder / name).write_text("\n".join(text), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model("mac", vocab_size=len(chat_tokenizer()))


@pytest.fixture(scope="module")
def record(folder, model):
    return evaluate(model, chat_tokenizer(), data_dir=folder, batch_size=3, name="runs/tiny")


def requests(task) -> list[tuple]:
    """All that a task asks of a model, and what it counts as right."""
    task.set_config("num_fewshot", 0)
    task.build_all_requests(rank=0, world_size=1)
    return [(x.request_type, x.arguments, x.idx, x.doc, task.doc_to_target(x.doc)) for x in task.instances]


def lm_evals_own(name: str, rows: list[dict], monkeypatch):
    """lm-eval's own task, none of our code in it, which finds these rows on the Hub."""
    asked = []

    def load_dataset(path, name=None, **kwargs):
        asked.append(path)
        rows_of = datasets.Dataset.from_list(rows)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows_of))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = task_manager().load([name])["tasks"][name]
    assert len(asked) == 1
    assert type(task).__module__.startswith("lm_eval")
    return task


@pytest.mark.parametrize("task", TASKS)
def test_files_become_the_rows_of_the_hub(task, folder):
    assert documents(task, folder) == PUBLISHED[task][1]


@pytest.mark.parametrize("task", TASKS)
def test_requests_from_files_are_those_of_lm_evals_own_task(task, folder, monkeypatch):
    """Contexts, continuations, targets and documents, one by one."""
    own = requests(lm_evals_own(task, PUBLISHED[task][1], monkeypatch))
    assert own
    assert requests(load_tasks([task], folder)["tasks"][task]) == own


@with_real_files
@pytest.mark.parametrize("task", TASKS)
def test_requests_from_the_real_files_are_those_of_lm_evals_own_task(task, beginnings, monkeypatch):
    own = requests(lm_evals_own(task, documents(task, beginnings), monkeypatch))
    assert len(own) > 1
    assert requests(load_tasks([task], beginnings)["tasks"][task]) == own


@with_real_files
@pytest.mark.parametrize("task", TASKS)
def test_the_real_files_are_complete(task):
    assert len(documents(task, REAL)) == COUNTS[task]
    assert data_folder(REAL.parent) == REAL  # the folder above does as well


@with_real_files
def test_chance_is_what_the_real_files_make_of_a_guess():
    for task in set(CHANCE) - {"hellaswag", "winogrande"}:  # which have four and two answers throughout
        own = load_tasks([task], REAL)["tasks"][task]
        asked = list(own.test_docs() if own.has_test_docs() else own.validation_docs())
        guess = sum(100 / len(own.doc_to_choice(doc)) for doc in asked) / len(asked)
        assert guess == pytest.approx(CHANCE[task], abs=0.05)
    answers = [row["label"] for row in documents("boolq", REAL)]
    assert 100 * sum(answers) / len(answers) == pytest.approx(level("boolq"), abs=0.05)


def test_the_group_travels_with_the_package_and_names_the_papers_tasks():
    assert (TASK_FOLDER / "titans_table1.yaml").is_file()
    held = task_manager().task_index["titans_table1"].cfg["task"]
    assert [item["task"] for item in held] == list(TASKS)


def test_four_lines_of_python_evaluate_with_lm_eval_alone(folder, record, tmp_path, monkeypatch):
    """The README's lines. The variable says where the files are; the group's figure is the paper's Avg."""
    save_chat_model(tmp_path / "tiny", dtype=torch.float64)
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(
        "lm_eval.evaluator.add_env_info", lambda results: None
    )  # which looks at the machine for seconds
    from titans_hf.evals.evaluation import task_manager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'tiny'}",
        device="cpu",
        tasks=["titans_table1"],
        task_manager=task_manager(),
        limit=4,
        bootstrap_iters=1000,
    )
    found = results["results"]
    assert set(found) == {*TASKS, "titans_table1"}
    assert "titans_table1" in lm_eval.utils.make_table(results)
    for column in paper_table(1).columns:
        value = found[column.task or "titans_table1"][f"{column.metric or 'table1_acc'},none"]
        assert record["metrics"][column.key]["value"] == pytest.approx(column.scale * value, rel=1e-9)
    errors = [record["metrics"][key]["stderr"] for key in ("average", "piqa_acc", "lambada_ppl")]
    assert errors[1] == pytest.approx(100 * found["piqa"]["acc_stderr,none"])
    assert errors[2] == pytest.approx(found["lambada_openai"]["perplexity_stderr,none"])
    assert errors[0] is None  # ARC has one document here, and one has no standard error


def test_the_average_is_the_mean_of_the_eight_accuracies(record):
    values = {key: found["value"] for key, found in record["metrics"].items()}
    accuracies = [value for key, value in values.items() if key not in ("wikitext_ppl", "lambada_ppl", "average")]
    assert len(accuracies) == 8
    assert values["average"] == pytest.approx(sum(accuracies) / 8)


def test_a_record_says_what_was_read(record, folder):
    assert record["settings"]["max_length"] == 2**21
    assert record["model"] == {
        "name": "runs/tiny",
        "variant": "mac",
        "parameters": record["model"]["parameters"],
        "dtype": "float64",
        "memory": "on",
    }
    for task in TASKS:
        data = record["data"][task]
        assert data["source"] == "files"
        assert (data["documents"], data["total"]) == (len(PUBLISHED[task][1]), COUNTS[task])
        assert set(data["files"]) == set(READERS[task][0])


def likelihoods(lm, folder, *tasks: str) -> list:
    """What a model answers to all the requests of some tasks."""
    loaded = load_tasks(tasks, folder)["tasks"]
    asked: dict[str, list] = {}
    for task in loaded.values():
        requests(task)
        for instance in task.instances:
            asked.setdefault(instance.request_type, []).append(instance)
    return [answer for kind, some in sorted(asked.items()) for answer in getattr(lm, kind)(some, disable_tqdm=True)]


def assert_same_answers(answers: list, expected: list) -> None:
    assert len(answers) == len(expected)
    for answer, other in zip(answers, expected):
        likelihood, greedy = answer if isinstance(answer, tuple) else (answer, None)
        wanted, as_greedy = other if isinstance(other, tuple) else (other, None)
        assert likelihood == pytest.approx(wanted, rel=1e-9)
        assert greedy == as_greedy


SOME = ("wikitext", "lambada_openai", "hellaswag", "winogrande", "boolq")


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_size_and_pieces_change_nothing(variant, folder, monkeypatch):
    """lm-eval fills rows up on the right and passes no mask: a causal model does not notice."""
    held = {"pretrained": tiny_model(variant, vocab_size=len(chat_tokenizer())), "tokenizer": chat_tokenizer()}
    expected = likelihoods(HFLM(**held, batch_size=1), folder, *SOME)
    assert_same_answers(likelihoods(HFLM(**held, batch_size=8), folder, *SOME), expected)
    monkeypatch.setattr("titans_hf.evals.model.SHORTEST", 7)
    for batch, logits in ((1, 2**25), (8, 2**25), (5, 1)):  # the last in pieces of 7 tokens
        assert_same_answers(likelihoods(TitansLM(**held, batch_size=batch, logits=logits), folder, *SOME), expected)


def test_long_inputs_are_neither_cut_nor_held_at_once(model, monkeypatch):
    """2**21 tokens is what lm-eval is told; the logits of a piece are all that there ever is."""
    sizes = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
    lm = TitansLM(pretrained=model, tokenizer=chat_tokenizer(), batch_size=2, logits=2 * 70 * model.config.vocab_size)
    plain = HFLM(pretrained=model, tokenizer=chat_tokenizer(), batch_size=2)
    assert lm.max_length == plain.max_length == 2**21
    ids = torch.randint(5, 250, (501,), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [(("", "a"), ids[:400], ids[400:]), (("", "b"), [1], ids[:301]), (("", "c"), ids[:400], ids[400:-1] + [7])]
    found = lm._loglikelihood_tokens(asked, disable_tqdm=True)
    assert max(sizes) <= lm.logits
    assert_same_answers(found, plain._loglikelihood_tokens(asked, disable_tqdm=True))
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    whole = logits[399:500].log_softmax(-1).gather(-1, torch.tensor(ids[400:])[:, None]).sum().item()
    assert found[0][0] == pytest.approx(whole, rel=1e-9)


def test_a_greedy_continuation_is_found_across_pieces(model):
    lm = TitansLM(pretrained=model, tokenizer=chat_tokenizer(), batch_size=1, logits=1)
    ids = model.generate(torch.tensor([[1, 20, 30]]), max_new_tokens=80, do_sample=False, eos_token_id=None)[0].tolist()
    assert lm._loglikelihood_tokens([(None, ids[:3], ids[3:])], disable_tqdm=True)[0][1]
    wrong = [*ids[3:-1], (ids[-1] + 1) % model.config.vocab_size]
    assert not lm._loglikelihood_tokens([(None, ids[:3], wrong)], disable_tqdm=True)[0][1]


def run(*arguments, code: int = 0):
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_the_command_prints_the_figures_and_writes_the_record(folder, tmp_path, monkeypatch):
    save_chat_model(tmp_path / "tiny", "mag")
    monkeypatch.chdir(tmp_path)
    done = run("tiny", "--data-dir", folder, "--limit", 1, "--tasks", "boolq,wikitext")
    record = read_record(tmp_path / "tiny-table1.json")
    assert list(record["metrics"]) == ["wikitext_ppl", "boolq_acc"]  # no average of a part
    assert record["settings"]["limit"] == 1
    assert "1 of 3,270" in done.stdout
    assert "wikitext" in done.stdout
    assert "piqa" not in done.stdout
    assert not list(tmp_path.glob("*.part"))


def test_a_record_is_replaced_unasked_only_by_the_same_measurement(folder, tmp_path, monkeypatch):
    save_chat_model(tmp_path / "mag" / "model", "mag")  # as scripts/train/pretrain.py leaves it
    monkeypatch.chdir(tmp_path)
    arguments = ["mag/model", "--data-dir", folder, "--tasks", "boolq"]
    run(*arguments)
    run(*arguments)
    before = (tmp_path / "mag-table1.json").read_bytes()
    for other, what in ((["--limit", 1], "limit"), (["--tasks", "piqa"], "tasks"), (["--name", "x"], "name")):
        done = run(*arguments, *other, code=1)
        assert f"mag-table1.json is the record of another {what}: name this one with --out" in done.stderr
    run(*arguments, "--memory", "off")
    assert read_record(tmp_path / "mag-table1-off.json")["model"]["memory"] == "off"
    assert (tmp_path / "mag-table1.json").read_bytes() == before
    run(*arguments, "--limit", 1, "--out", "mag-table1.json")
    assert read_record(tmp_path / "mag-table1.json")["settings"]["limit"] == 1


def test_errors_are_one_line_that_names_the_fix(folder, tmp_path, monkeypatch):
    save_chat_model(tmp_path / "tiny")
    cases = (
        (["--tasks", "mmlu"], "choose from wikitext"),
        (["--data-dir", tmp_path / "none"], "is not a folder"),
        (["--data-dir", tmp_path], "wiki.test.raw is not there: --data-dir"),
        (["--data-dir", folder, "--out", tmp_path / "tiny" / "config.json"], "is not a record: choose another name"),
        (["--data-dir", folder, "--out", tmp_path / "no" / "x.json"], "there is no folder"),
    )
    for arguments, message in cases:
        done = run(tmp_path / "tiny", *arguments, code=1)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    done = run(tmp_path / "tiny", "--tasks", "piqa", "--out", tmp_path / "x.json", code=1)
    assert "--data-dir reads the documents from files" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_damaged_files_are_named(tmp_path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    write("piqa/valid.jsonl", lines(PIQA, PIQA))
    write("piqa/valid-labels.lst", "1\n")
    with pytest.raises(ValueError, match="1 labels for the 2 rows of valid.jsonl"):
        documents("piqa", tmp_path)
    write("boolq/val.jsonl", lines({**BOOLQ, "label": True}) + "{\n")
    with pytest.raises(ValueError, match="val.jsonl, line 2 is not JSON"):
        documents("boolq", tmp_path)
    write("boolq/val.jsonl", lines(BOOLQ))
    with pytest.raises(ValueError, match="line 1 lacks 'label'"):
        documents("boolq", tmp_path)
    write("lambada/lambada_test.jsonl", "")
    with pytest.raises(ValueError, match="is empty"):
        documents("lambada_openai", tmp_path)


def test_files_hold_no_examples_to_show(folder):
    task = load_tasks(["piqa"], folder)["tasks"]["piqa"]
    task.set_config("num_fewshot", 2)
    with pytest.raises(ValueError, match="num_fewshot=2: Table 1 is zero-shot"):
        task.build_all_requests(rank=0, world_size=1)
