"""Needles and BABILong through lm-eval: samples that fit, from files or the Hub; nothing cut, for any batch size."""

import random
from pathlib import Path

import datasets
import pytest
import torch
from support import VARIANTS, chat_tokenizer, every_variant, hang_on_memory, save_chat_model, tiny_model
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install titans-hf[eval])")
pytest.importorskip("wonderwords", reason="RULER's words are not installed (pip install titans-hf[eval])")

import lm_eval
from lm_eval import tasks as of_lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml

from titans_hf.cli.app import app
from titans_hf.evals import evaluation
from titans_hf.evals import model as eval_model
from titans_hf.evals import needles as eval_needles
from titans_hf.evals.babilong import scatter
from titans_hf.evals.evaluation import TASK_FOLDER, evaluate, load_tasks, task_manager
from titans_hf.evals.files import VARIABLE
from titans_hf.evals.model import CheckedLM, TitansLM
from titans_hf.evals.needles import prepare_niah
from titans_hf.evals.paper_tables import paper_table
from titans_hf.evals.records import check_record, read_record
from titans_hf.evals.suites import TASKS, columns, length_name, read_lengths
from titans_hf.evals.tables import markdown, our_rows
from titans_hf.evals.texts import books, prose, questions, sentences, story_file, words

pytestmark = pytest.mark.usefixtures("libraries_as_before")
REAL = Path(__file__).parent.parent.parent / "shared" / "data"
with_real_files = pytest.mark.skipif(
    not (REAL / "babi").is_dir(), reason="bAbI and the books are not in ../shared/data"
)
NEEDLES, BABILONG = tuple(TASKS["table2"]), tuple(TASKS["babilong"])
SHORT, LONG = 700, 1100  # tokens, which are bytes here
QUICK = {"memory_chunk_size": 29, "segment_size": 58, "sliding_window": 31}
BABI = {
    "qa1_single-supporting-fact": (
        "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
        "4 Mary went to the garden.\n5 Where is Mary? \tgarden\t4\n"
        "1 Ann went to the office.\n2 Where is Ann? \toffice\t1\n"
    ),
    "qa2_two-supporting-facts": "1 Al got the milk.\n2 Al moved to the hall.\n3 Where is the milk? \thall\t1 2\n",
    "qa3_three-supporting-facts": "".join(f"{i} Al went to room {i}.\n" for i in range(1, 40))
    + "40 Where was Al before the room 39? \troom 38\t38 39\n",
    "qa4_two-arg-relations": "1 The hall is north of the bath.\n2 What is north of the bath?\thall\t1\n",
    "qa5_three-arg-relations": "1 Fred gave the milk to Jeff.\n2 Who gave the milk? \tFred\t1\n",
}


def a_book(seed: int, count: int) -> str:
    """Sentences of made-up words, all different."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abdefgiklmnoprstuv", k=rng.randint(2, 9))) for _ in range(300)]
    lines = [" ".join(rng.choices(vocabulary, k=rng.randint(2, 12))).capitalize() + "." for _ in range(count)]
    return "# Title\n\n## CHAPTER I\n\n" + "\n\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two books and five files of stories, in the layout that the documentation gives."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text" / "books").mkdir(parents=True)
    (folder / "babi" / "en-10k").mkdir(parents=True)
    (folder / "README.md").write_text("No book.")
    (folder / "text" / "books" / "a.md").write_text(a_book(1, 500), encoding="utf-8")
    (folder / "text" / "books" / "b.txt").write_text(a_book(2, 60), encoding="utf-8")
    for name, text in BABI.items():
        (folder / "babi" / "en-10k" / f"{name}_test.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def speaking_model(variant: str, tokenizer):
    """A tiny model that writes in letters and reads a thousand tokens in a moment."""
    model = tiny_model(variant, vocab_size=len(tokenizer), **QUICK)
    printable = torch.tensor(
        [len(token) == 1 and token.isascii() for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    )
    with torch.no_grad():
        model.lm_head.weight[~printable] = 0.0
    return hang_on_memory(model)


@pytest.fixture(scope="module")
def model(tokenizer):
    return speaking_model("mac", tokenizer)


def task_of(name: str, folder, tokenizer, lengths=(SHORT, LONG)):
    suite = "table2" if name in NEEDLES else "babilong"
    return load_tasks([name], folder, suite, tokenizer=tokenizer, max_seq_lengths=list(lengths))["tasks"][name]


def first(task, count: int) -> list[dict]:
    return [task.eval_docs[i] for i in range(count)]


def requests(task, **how) -> list[tuple]:
    """All that a task asks of a model, and what it counts as right."""
    task.build_all_requests(rank=0, world_size=1, **how)
    return [(x.request_type, x.arguments, x.idx, x.doc, task.doc_to_target(x.doc)) for x in task.instances]


def lm_evals_own(name: str, rows: list[dict]) -> ConfigurableTask:
    """lm-eval's own task, none of our code in it, over these rows."""
    home = Path(of_lm_eval.__file__).parent / ("ruler" if name in NEEDLES else "babilong")
    config = load_yaml(home / f"{name}.yaml", resolve_func=True)
    held = {config["test_split"]: datasets.Dataset.from_list(rows)}
    unused = {key: value for key, value in config.items() if key != "tag"}
    return ConfigurableTask(config={**unused, "custom_dataset": lambda **kwargs: held})


def test_sentences_end_at_full_stops_but_not_at_titles():
    text = 'He met Mr. Bell. "Who?" asked St. John! (Yes.) It cost 3.50 pounds'
    assert sentences(text) == ["He met Mr. Bell.", '"Who?" asked St. John!', "(Yes.)", "It cost 3.50 pounds"]
    assert sentences("") == []


def test_books_are_prose_without_markdown(folder):
    assert prose("# Title\n\n-------\n\nOne _big_\nline.\n\n* * *\n\nNext.") == "One big line. Next."
    assert [book.path.name for book in books(folder)] == ["a.md", "b.txt"]
    assert books(folder / "text" / "books") == books(folder)  # the folder of the books does as well
    some, used = words(books(folder), 10)
    assert len(some) == 10
    assert [book.path.name for book in used] == ["a.md"]
    assert not any("#" in word for word in some)


def test_stories_become_questions_with_all_facts_told_so_far(folder):
    found = questions(story_file("qa1", folder))
    assert [(each.question, each.answer) for each in found] == [
        ("Where is Mary?", "bathroom"),
        ("Where is Mary?", "garden"),
        ("Where is Ann?", "office"),
    ]
    moved = ("Mary moved to the bathroom.", "John went to the hallway.")
    assert [each.facts for each in found] == [
        moved,
        (*moved, "Mary went to the garden."),
        ("Ann went to the office.",),
    ]
    assert story_file("qa1", folder / "babi") == story_file("qa1", folder)


def test_lengths_are_read_in_thousands_or_tokens():
    assert read_lengths("table2") == [2048, 4096, 8192, 16384]
    assert read_lengths("babilong", "0k, 128K") == [0, 131072]
    assert read_lengths("table2", [300, "1k", 300]) == [300, 1024]
    assert read_lengths("table1") == []
    assert [length_name(length) for length in (0, 300, 2048)] == ["0k", "300", "2k"]
    assert [column.key for column in columns("table2", NEEDLES, read_lengths("table2"))] == [
        column.key for column in paper_table(2).columns
    ]
    for suite, given, message in (
        ("table2", "2k,long", "'long' is not one"),
        ("table2", "0k", "no room for a needle"),
        ("table2", " , ", "holds none; write them as 2k,4k,8k,16k"),
        ("table1", "2k", "table1 has none"),
    ):
        with pytest.raises(ValueError, match=f"lengths: .*{message}"):
            read_lengths(suite, given)


@pytest.mark.parametrize("name", NEEDLES)
def test_a_needle_is_in_its_sample_once_and_the_sample_fills_its_length(name, folder, tokenizer):
    task = task_of(name, folder, tokenizer)
    asked = requests(task, limit=16)
    assert [doc["max_length"] for *_, doc, _ in asked] == [SHORT, LONG] * 8  # they take turns
    for _, (prompt, options), _, doc, target in asked:
        (answer,) = target
        needle = f"is: {answer}."
        assert prompt.count(answer) == prompt.count(needle) == 1
        tokens = len(tokenizer(prompt).input_ids) + options["max_gen_toks"]
        assert tokens == doc["length"] <= doc["max_length"] < tokens + 140  # a sentence of noise is 90 bytes
        assert prompt.endswith(doc["gen_prefix"])
        assert options["max_gen_toks"] == 128
    assert len({target[0] for *_, target in asked}) == 16


@pytest.mark.parametrize("name", NEEDLES[1:])
def test_needles_lie_between_sentences_at_rulers_depths(name, folder, tokenizer):
    found = set()
    for doc in first(task_of(name, folder, tokenizer, [LONG]), 12):
        told = sentences(doc["input"].split("\n")[1])
        (place,) = (i for i, sentence in enumerate(told) if doc["outputs"][0] in sentence)
        rest = len(told) - 1
        assert place in {int(rest * depth / 100) for depth in prepare_niah.DEPTHS}
        found.add(place)
    assert len(found) > 4


def test_samples_are_those_that_lm_eval_writes(folder, tokenizer, monkeypatch):
    """With one seed for both, and as many units as lm-eval finds room for."""
    units, write = [], prepare_niah.generate_input_output

    def writes(count, *args, **kwargs):
        units.append(count)
        random.seed(5)
        return write(count, *args, **kwargs)

    monkeypatch.setattr(prepare_niah, "generate_input_output", writes)
    monkeypatch.setattr(prepare_niah, "cached_sent_tokenize", sentences)
    for name in NEEDLES:
        task = task_of(name, folder, tokenizer, [4096])
        kind, value = eval_needles.HAYSTACKS[name], eval_needles.VALUES[name]
        (own,) = prepare_niah.generate_samples(
            task.haystack,
            tokenizer,
            max_seq_length=4096,
            type_haystack=kind,
            type_needle_k="words",
            type_needle_v=value,
            template=eval_needles.TEMPLATE,
            num_samples=1,
        )
        ours = task.draw(4096, 0, units[-1])
        assert own.pop("length") < ours.pop("length")  # which counts the answer's first words
        assert ours == own


@pytest.mark.parametrize("name", [*NEEDLES, *BABILONG])
def test_requests_and_scores_are_those_of_lm_evals_own_task(name, folder, tokenizer):
    task = task_of(name, folder, tokenizer)
    asked = requests(task, limit=2)
    own = lm_evals_own(name, [doc for *_, doc, _ in asked])
    assert requests(own) == asked
    for _, _, _, doc, target in asked:
        answer = target[0] if name in NEEDLES else target
        for said in (f" It is {answer.upper()}\n", "no"):
            (score,) = (value for value in own.process_results(doc, [said]).values() if value != -1)
            length = doc["max_length"]
            metric = str(length) if name in NEEDLES else length_name(length)
            assert task.process_results(doc, [said]) == {metric: score}
            assert score == (said != "no")


def test_samples_do_not_depend_on_the_run(folder, tokenizer):
    """Nor on which other tasks and lengths are in it; and nobody else's random numbers are touched."""
    for name in ("niah_single_3", "babilong_qa1"):
        task = task_of(name, folder, tokenizer)
        before = random.getstate()
        docs = first(task, 4)
        assert random.getstate() == before
        assert docs == first(task_of(name, folder, tokenizer), 4)
        assert docs[1::2] == first(task_of(name, folder, tokenizer, [LONG]), 2)
        assert docs[0]["input"] != docs[2]["input"]


def test_a_limit_is_all_that_is_made(folder, tokenizer):
    task = task_of("niah_single_2", folder, tokenizer)
    assert len(task.eval_docs) == 2 * 500
    requests(task, limit=3)
    assert set(task.eval_docs.made) == {0, 1, 2}


def in_order(facts, text: str) -> bool:
    places = [text.index(fact) for fact in facts]
    return places == sorted(places)


def test_babilong_scatters_facts_in_order_over_a_book(folder, tokenizer):
    told = {sentence for book in books(folder) for sentence in book.sentences}
    task = task_of("babilong_qa1", folder, tokenizer, [0, SHORT, LONG])
    known = questions(story_file("qa1", folder))
    assert len(task.eval_docs) == 3 * len(known)
    between = 0
    for i, doc in enumerate(first(task, len(task.eval_docs))):
        asked = known[i // 3]
        assert (doc["question"], doc["target"]) == (asked.question, asked.answer)
        assert in_order(asked.facts, doc["input"])
        rest = [sentence for sentence in sentences(doc["input"]) if sentence not in asked.facts]
        assert set(rest) <= told
        assert all(len(sentence) >= 9 for sentence in rest)  # and a space before it: 10 tokens
        if doc["max_length"] == 0:
            assert doc["input"] == " ".join(asked.facts)
        else:
            assert doc["max_length"] - 100 < len(tokenizer(doc["input"]).input_ids) <= doc["max_length"]
            between += not doc["input"].startswith(asked.facts[0])
    assert between > 0


def test_facts_lie_anywhere_between_sentences():
    facts, background = ["F1.", "F2."], ["A.", "B."]
    found = {scatter(facts, background, str(seed)) for seed in range(60)}
    assert found == {
        "F1. F2. A. B.",
        "F1. A. F2. B.",
        "F1. A. B. F2.",
        "A. F1. F2. B.",
        "A. F1. B. F2.",
        "A. B. F1. F2.",
    }
    assert scatter(facts, [], "") == "F1. F2."


def test_a_story_that_fills_its_length_stands_alone(folder, tokenizer):
    doc = task_of("babilong_qa3", folder, tokenizer).eval_docs[0]
    assert doc["max_length"] == SHORT < len(doc["input"])
    assert doc["input"] == " ".join(questions(story_file("qa3", folder))[0].facts)


def test_babilong_shows_lm_evals_examples_before_the_question(folder, tokenizer):
    prompt = requests(task_of("babilong_qa1", folder, tokenizer, [0]), limit=1)[0][1][0]
    assert prompt.startswith("I will give you context with the facts about positions")
    assert prompt.count("The most recent location of") == 1 + 2
    assert prompt.endswith("John went to the hallway.\nWhere is Mary?")


def test_without_a_folder_the_hub_is_asked(tokenizer, monkeypatch):
    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        rows = {"input": f"Facts of {name}.", "question": "Who?", "target": "Al"} if name else {"text": a_book(3, 900)}
        return datasets.Dataset.from_list([rows] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare_niah.get_haystack.cache_clear()
    task = task_of("babilong_qa2", None, tokenizer, [0, 4096])
    assert asked == [("RMT-team/babilong-1k-samples", name, "qa2") for name in ("0k", "4k")]
    assert [doc["input"] for doc in first(task, 3)] == ["Facts of 0k.", "Facts of 4k.", "Facts of 0k."]
    assert task.describe_source() == {"source": "hub", "dataset": "RMT-team/babilong-1k-samples", "files": {}}
    with pytest.raises(ValueError, match="lengths: the Hub has no BABILong of 3k: it has 0k"):
        task_of("babilong_qa2", None, tokenizer, [3 * 1024])
    task = task_of("niah_single_2", None, tokenizer)
    assert asked[-1][0] == "baber/paul_graham_essays"
    assert task.eval_docs[1]["length"] > LONG - 20
    assert task.describe_source()["source"] == "hub"
    prepare_niah.get_haystack.cache_clear()


def test_too_little_text_or_room_is_refused(folder, tokenizer, tmp_path):
    for lengths, message in (([400], "400 tokens leave no room"), ([2**15], "too few for 32k: add books")):
        with pytest.raises(ValueError, match=message):
            task_of("niah_single_2", folder, tokenizer, lengths)
    for name in ("text/books", "babi/en-10k"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "text/books/a.txt").write_text("Too. Short. All.")
    (tmp_path / "babi/en-10k/qa1_x_test.txt").write_text(BABI["qa1_single-supporting-fact"])
    with pytest.raises(ValueError, match="no sentence of 10 tokens: add books"):
        task_of("babilong_qa1", tmp_path, tokenizer)
    (tmp_path / "babi/en-10k/qa1_x_test.txt").write_text("Mary moved.\n")
    with pytest.raises(ValueError, match="line 1 is not bAbI's"):
        task_of("babilong_qa1", tmp_path, tokenizer)
    (tmp_path / "babi/en-10k/qa1_x_test.txt").write_text("1 Mary moved.\n")
    with pytest.raises(ValueError, match="holds no questions"):
        task_of("babilong_qa1", tmp_path, tokenizer)
    with pytest.raises(ValueError, match="measures its samples in the model's tokens: name the tokenizer"):
        load_tasks(["babilong_qa2"], folder, "babilong")


# --- answers


def prompts(folder, tokenizer, count: int = 5) -> list[str]:
    """Of different lengths, the longest in the middle."""
    tasks = [task_of(name, folder, tokenizer, [SHORT]) for name in ("niah_single_1", "niah_single_3", "babilong_qa1")]
    texts = [request[1][0] for task in tasks for request in requests(task, limit=2)]
    return [text[-(131 * (1 + i % 4)) :] for i, text in enumerate(texts)][:count]


def answers(lm, texts: list[str], tokens: int = 9) -> list[str]:
    options = {"do_sample": False, "temperature": 0.0, "max_gen_toks": tokens, "until": []}
    asked = [Instance("generate_until", {}, (text, {**options}), i) for i, text in enumerate(texts)]
    return lm.generate_until(asked, disable_tqdm=True)


@every_variant
def test_batch_size_and_pieces_change_no_answer(variant, folder, tokenizer, monkeypatch):
    """Plain HFLM in batches of 1 and 8, ours likewise, and in pieces of 7 tokens: the same strings."""
    held = {"pretrained": speaking_model(variant, tokenizer), "tokenizer": tokenizer}
    texts = prompts(folder, tokenizer)
    expected = answers(HFLM(**held, batch_size=1), texts)
    assert len(set(expected)) > 1
    assert answers(HFLM(**held, batch_size=8), texts) == expected
    assert answers(TitansLM(**held, batch_size=1), texts) == expected
    monkeypatch.setattr(eval_model, "SHORTEST", 7)
    monkeypatch.setattr(eval_model, "PROMPT", 1)
    assert answers(TitansLM(**held, batch_size=8), texts) == expected


def test_prompts_are_read_in_bounded_pieces(model, folder, tokenizer, monkeypatch):
    sizes = []
    seen = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    monkeypatch.setattr(eval_model, "PROMPT", 200)
    texts = prompts(folder, tokenizer)
    answers(TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=2), texts, tokens=1)
    seen.remove()
    assert max(sizes) <= 200
    assert sum(sizes) >= sum(map(len, texts))


def test_a_row_is_done_at_its_end_of_text(folder, model):
    """Whatever its neighbours still write, and though the model's configuration knows of no end."""
    texts, tokenizer = prompts(folder, chat_tokenizer()), chat_tokenizer()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    ids = tokenizer(texts[1], return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, -1].item()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(written)
    lm = TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    expected = answers(lm, texts)
    assert len({len(text) for text in expected}) > 1
    assert answers(TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=8), texts) == expected


def test_a_prompt_is_refused_rather_than_cut(model, tokenizer):
    text = "a" * 60
    assert TitansLM(pretrained=model, tokenizer=tokenizer).max_length == 2**21
    for kind in (TitansLM, CheckedLM):
        lm = kind(pretrained=model, tokenizer=tokenizer, max_length=64)
        answers(lm, [text], tokens=4)
        with pytest.raises(ValueError, match="a prompt of 60 tokens .* max_length=64: ask for shorter ones"):
            answers(lm, [text], tokens=5)


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[-1]])
def test_controls_hold_for_answers(variant, folder, tokenizer):
    """Off is a memory that is only read; reset is the model itself within its first segment, and its own beyond."""
    model = speaking_model(variant, tokenizer)
    held, texts = {"pretrained": model, "tokenizer": tokenizer}, prompts(folder, tokenizer)
    ids = tokenizer(texts[0], return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=9, do_sample=False, memory_read_only=True, eos_token_id=None)
    off = answers(TitansLM(**held, memory="off", batch_size=8), texts)
    assert off[0] == tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    reset = answers(TitansLM(**held, memory="reset", batch_size=8), texts)
    assert reset == answers(TitansLM(**held, memory="reset", batch_size=1), texts)
    on = answers(TitansLM(**held, batch_size=8), texts)
    assert on != off
    assert on != reset
    begun = [text[: model.config.segment_size - 1] for text in texts]
    assert answers(TitansLM(**held, memory="reset", batch_size=8), begun) == answers(TitansLM(**held), begun)


# --- records


class Oracle(LM):
    """Knows the answers to what is short, and what it was asked."""

    max_length = 2**21

    def __init__(self, knows: int):
        super().__init__()
        self.knows, self.asked = knows, []

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        self.asked += requests
        return [self.answer(request.doc) for request in requests]

    def answer(self, doc: dict) -> str:
        known = doc["target"] if "target" in doc else doc["outputs"][0]
        return f"it is {known}" if doc["max_length"] <= self.knows else "who knows"

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate_oracle(monkeypatch, model, tokenizer, oracle, **how) -> dict:
    monkeypatch.setattr(evaluation, "open_lm", lambda *args: oracle)
    return evaluate(model, tokenizer, name="runs/tiny", **how)


def test_table2_has_the_papers_columns(model, folder, tokenizer, monkeypatch, tmp_path):
    oracle = Oracle(knows=4096)
    record = evaluate_oracle(
        monkeypatch, model, tokenizer, oracle, suite="table2", data_dir=folder, limit=3, batch_size=2
    )
    check_record(record)
    assert list(record["metrics"]) == [column.key for column in paper_table(2).columns]
    for key, found in record["metrics"].items():
        assert (found["value"], found["stderr"]) == (100.0 if key.endswith(("_2k", "_4k")) else 0.0, 0.0)
    assert len(oracle.asked) == 3 * 4 * 3
    assert record["settings"]["lengths"] == ["2k", "4k", "8k", "16k"]
    assert record["settings"]["max_length"] == 2**21
    sources = {task: (held["source"], list(held["files"])) for task, held in record["data"].items()}
    book = ["text/books/a.md", "text/books/b.txt"]
    assert sources == dict(zip(NEEDLES, (("noise", []), ("files", book), ("files", book))))
    assert all((held["documents"], held["total"]) == (12, 2000) for held in record["data"].values())
    text = markdown(paper_table(2), [record])
    assert r"| runs/tiny (MAC, 11.3K)\* | 100.0 ± 0.0 | 100.0 ± 0.0 | 0.0 ± 0.0 |" in text
    assert "the first 3 documents of each task and length, from files and noise" in text


def test_babilong_has_a_figure_and_an_error_for_each_length(model, folder, tokenizer, monkeypatch):
    how = dict(suite="babilong", data_dir=folder, tasks=["babilong_qa1", "babilong_qa4"])
    record = evaluate_oracle(monkeypatch, model, tokenizer, Oracle(knows=SHORT), lengths=f"0k,{SHORT},1k", **how)
    check_record(record)
    known = {f"babilong_qa{i}_{name}": value for i in (1, 4) for name, value in (("0k", 100), (SHORT, 100), ("1k", 0))}
    assert {key: found["value"] for key, found in record["metrics"].items()} == known
    assert record["metrics"]["babilong_qa1_0k"]["stderr"] == 0
    assert record["metrics"]["babilong_qa4_0k"]["stderr"] is None  # of one document
    assert record["settings"]["num_fewshot"] == 2
    assert record["data"]["babilong_qa1"]["documents"] == 9
    assert "babi/en-10k/qa1_single-supporting-fact_test.txt" in record["data"]["babilong_qa1"]["files"]
    assert our_rows([record], paper_table(2)) == []


def test_lm_eval_alone_gives_the_same_figures(folder, tokenizer, tmp_path, monkeypatch):
    """The group of the package, plain `--model hf`, the variable for the files: what a record has."""
    model = speaking_model("lmm", tokenizer)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # looks at the machine for seconds
    asked = {"tokenizer": str(tmp_path / "tiny"), "max_seq_lengths": f"0k,{SHORT}"}
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'tiny'}",
        device="cpu",
        batch_size=3,
        tasks=["titans_babilong"],
        task_manager=task_manager(**asked),
        limit=2,
    )
    assert set(results["results"]) == {*BABILONG, "titans_babilong"}
    plain = {task: [sample["resps"] for sample in found] for task, found in results["samples"].items()}
    kept = []
    monkeypatch.setattr(evaluation, "load_tasks", lambda *args, **how: kept.append(load_tasks(*args, **how)) or kept[0])
    record = evaluate(model, tokenizer, suite="babilong", lengths=f"0k,{SHORT}", limit=1, batch_size=1)
    ours = {name: [[each.resps] for each in task.instances] for name, task in kept[0]["tasks"].items()}
    assert ours == plain
    for name in BABILONG:
        for length in ("0k", str(SHORT)):
            value = results["results"][name][f"{length},none"]
            assert record["metrics"][f"{name}_{length}"]["value"] == 100 * value


def test_the_groups_travel_with_the_package():
    manager = task_manager()
    for group, tasks in (("titans_table2", NEEDLES), ("titans_babilong", BABILONG)):
        assert (TASK_FOLDER / f"{group}.yaml").is_file()
        assert [item["task"] for item in manager.task_index[group].cfg["task"]] == list(tasks)


def run(*arguments, code: int = 0):
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_the_command_prints_a_grid_and_writes_the_record(folder, tmp_path, monkeypatch):
    save_chat_model(tmp_path / "tiny", "lmm", **QUICK)
    monkeypatch.chdir(tmp_path)
    done = run("tiny", "--suite", "table2", "--data-dir", folder, "--limit", 1, "--lengths", SHORT, "--batch-size", 3)
    record = read_record(tmp_path / "tiny-table2.json")
    assert list(record["metrics"]) == [f"niah_{name}_{SHORT}" for name in ("pk", "n", "w")]
    header, *lines = done.stdout.rstrip().split("\n")
    assert header.split() == ["accuracy,", "%", str(SHORT), "documents"]
    assert [line.split()[0] for line in lines] == list(NEEDLES)
    assert "1 of 500, noise" in lines[0]


def test_errors_are_one_line_that_names_the_fix(folder, tmp_path, monkeypatch):
    save_chat_model(tmp_path / "tiny")
    cases = (
        (["--suite", "table2", "--tasks", "piqa"], "choose from niah_single_1"),
        (["--suite", "table2", "--lengths", "2x"], "write them as 2k,4k"),
        (["--suite", "table1", "--lengths", "2k"], "table1 has none"),
        (["--suite", "babilong", "--data-dir", tmp_path / "none"], "is not a folder"),
        (["--suite", "table2", "--data-dir", tmp_path], "holds no books: --data-dir"),
        (["--suite", "babilong", "--data-dir", folder / "text"], "holds no qa1_*_test.txt of bAbI: --data-dir"),
        (["--suite", "table2", "--data-dir", folder, "--lengths", "32k"], "too few for 32k: add books"),
    )
    (tmp_path / "README.md").write_text("No book.")
    for arguments, message in cases:
        done = run(tmp_path / "tiny", "--out", tmp_path / "x.json", *arguments, code=1)
        assert message in done.stderr
        assert done.stderr.rstrip().count("\n") <= 1  # the model's name may come before
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("no")))
    done = run(tmp_path / "tiny", "--suite", "babilong", "--out", tmp_path / "x.json", code=1)
    assert "--data-dir reads the documents from files" in done.stderr
    assert not (tmp_path / "x.json").exists()


# --- the real files


@with_real_files
@pytest.mark.parametrize("name", BABILONG)
def test_the_real_stories_are_complete_and_hidden_whole(name, tokenizer):
    known = questions(story_file(name.removeprefix("babilong_"), REAL))
    assert len(known) == 1000
    task = task_of(name, REAL, tokenizer, [0, 4096])
    for doc, asked in zip(first(task, 6)[1::2], known):
        assert (doc["question"], doc["target"]) == (asked.question, asked.answer)
        assert in_order(sorted(set(asked.facts), key=asked.facts.index), doc["input"])
        if len(" ".join(asked.facts)) < 4096:
            assert 3500 < len(tokenizer(doc["input"]).input_ids) <= 4096


@with_real_files
def test_needles_in_the_real_books_fill_their_lengths(tokenizer):
    for name in NEEDLES[1:]:
        for doc in first(task_of(name, REAL, tokenizer, read_lengths("table2")), 4):
            assert doc["max_length"] - 20 < doc["length"] <= doc["max_length"]
