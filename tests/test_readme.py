"""What the READMEs say is true: their Python runs; their commands, links, paths and names exist; page one is short."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from titans_hf import TitansConfig
from titans_hf.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "titans_hf/README.md",
        "scripts/README.md",
        "model_cards/README.md",
        "model_cards/RESULTS.md",
        "kernels/README.md",
    )
}
BLOCKS = [
    pytest.param(language, code, id=f"{page}:{text[: text.index(code)].count(chr(10))}")
    for page, text in PAGES.items()
    for language, code in re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL)
]
CODE = [block.values[1] for block in BLOCKS]
LAUNCHED = next(code for code in CODE if "Trainer(model" in code)  # the page says that it is saved as train.py
every_page = pytest.mark.parametrize("page", PAGES)

# the examples share the demo's folder
pytestmark = pytest.mark.xdist_group("readme")


# What is on the pages


def spans(page: str) -> list[str]:
    """What stands in backticks, outside of code blocks and of lists that programs have written."""
    text = re.sub(r"```.*?```|^    .*?$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(page: str, mentioned: bool = True) -> list[list[str]]:
    """The words of every command, from code blocks and, where those mentioned in a sentence count, from backticks."""
    blocks = re.findall(r"^    (?:\$ )?((?:.*\\\n)*.*)$", PAGES[page], re.MULTILINE)
    blocks += [code for language, code in re.findall(r"```(bash)\n(.*?)```", PAGES[page], re.DOTALL)]
    programs = ("python ", "titans ", "accelerate ", "lm_eval ")
    lines = [*blocks, *(spans(page) if mentioned else ())]
    lines = [line.replace("\\\n", " ") for line in lines if line.startswith(programs)]
    return [shlex.split(line, comments=True) for line in lines]


def script_source(script: Path) -> str:
    """The source of a script and of the module whose `main` it calls."""
    text = script.read_text()
    called = re.search(r"^from (titans_hf[\w.]*) import main", text, re.MULTILINE)
    return text + (Path(importlib.import_module(called[1]).__file__).read_text() if called else "")


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


# The pages themselves


def test_the_front_page_is_read_in_five_minutes():
    assert len(PAGES["README.md"].splitlines()) <= 220


def test_the_front_page_names_the_two_commands_that_make_serves():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"\n    make {target} " in PAGES["README.md"]
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@every_page
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[page])
    for link in links:
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        target = ROOT / page if not path else (ROOT / page).parent / path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), link


HOUSE = ("titans_hf", "scripts", "kernels", "model_cards", "tests", ".ci")
ENDINGS = (".py", ".md", ".json", ".csv", ".png", ".yaml", ".toml", ".txt", ".cff")
OTHERS = ("runs/", "text/", "babi/", "train.py", "table1.json")  # what a reader makes or brings along
FILES = {path.name for folder in (*HOUSE, ".") for path in (ROOT / folder).glob("**/*" if folder != "." else "*")}


@every_page
def test_every_path_in_backticks_exists(page):
    for span in spans(page):
        is_path = re.fullmatch(r"[\w.{},*/-]+", span) and (span.endswith((*ENDINGS, "/")) or span.startswith(HOUSE))
        if not is_path or span in ENDINGS or span.startswith(OTHERS) or re.fullmatch(r"titans_hf(\.\w+)*", span):
            continue
        pattern = re.sub(r"{[^}]*}", "*", span).rstrip("/")
        found = [path for home in ((ROOT / page).parent, ROOT) for path in home.glob(pattern)]
        assert found or span in FILES, span


@every_page
def test_every_script_and_its_options_exist(page):
    for words in commands(page):
        for place, word in enumerate(words):
            if re.fullmatch(r"scripts/\S+\.py", word):
                source = script_source(ROOT / word)
                for option in options(words[place:]):
                    assert f'"{option}"' in source, (word, option)


@every_page
def test_every_subcommand_of_titans_and_its_options_exist(page):
    known = typer.main.get_command(app).commands
    for words in commands(page):
        if words[0] == "titans" and len(words) > 1:
            taken = [name for param in known[words[1]].params for name in param.opts]
            assert set(options(words)) <= {*taken, "--help"}, words


@every_page
def test_a_subcommand_in_a_code_block_has_all_that_it_requires(page):
    known = typer.main.get_command(app).commands
    for words in commands(page, mentioned=False):
        if words[0] == "titans" and len(words) > 1 and "--help" not in words:
            needed = [param for param in known[words[1]].params if param.required and param.param_type_name == "option"]
            for param in needed:
                assert set(param.opts) & set(words), (param.name, words)


@every_page
def test_every_file_that_a_command_reads_exists(page):
    for words in commands(page):
        for before, word in zip(words, words[1:]):
            if word.startswith(tuple(f"{home}/" for home in HOUSE)) and before not in ("--record", "--out"):
                assert list(ROOT.glob(word)), words


def test_names_of_paper_to_code_are_in_the_files_beside_them():
    section = PAGES["README.md"].split("## Paper to code")[1].split("\n## ")[0]
    rows = [row.split("|")[2:4] for row in section.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 12
    for names, files in rows:
        sources = [*re.findall(r"`([^`]+)`", files), "titans_hf/configuration_titans.py"]
        text = "\n".join((ROOT / file).read_text() for file in sources)
        for name in re.findall(r"`([^`]+)`", names):
            word = name if name.startswith("#") else re.findall(r"\w+", name)[-1]
            assert re.search(rf"(?<!\w){re.escape(word)}\b", text), name


def test_the_front_page_names_every_switch_of_the_memory():
    section = PAGES["README.md"].split("## Readings of the paper")[1].split("\n## ")[0]
    fields = {field for field in TitansConfig.__annotations__ if field.startswith("memory_")}
    named = set(re.findall(r"\bmemory_\w+", section)) - {"memory_layer"}
    assert named == fields


# What the pages show


def shown(page: str, command: str) -> list[str]:
    """The lines below a command in a code block."""
    text = PAGES[page].split(f"    $ {command}\n")[1]
    return [line.removeprefix("    ") for line in re.split(r"\n\n|\n    \$ ", text)[0].splitlines()]


def test_titans_info_prints_what_the_page_shows():
    printed = CliRunner().invoke(app, ["info", "titans-mac-340m"]).output.splitlines()
    expected = shown("titans_hf/README.md", "titans info titans-mac-340m")
    own_machine = "kernels"
    assert [x for x in printed if x[:7] != own_machine] == [x for x in expected if x[:7] != own_machine]


def test_a_dry_run_prints_what_the_page_shows(capsys, monkeypatch):
    from titans_hf.train.pretrain import main

    words = "scripts/recipes/paper-15b.yaml --preset titans-mac-340m --dry-run"
    monkeypatch.chdir(ROOT)
    main(words.split())
    assert capsys.readouterr().out.splitlines() == shown(
        "scripts/README.md", f"python scripts/train/pretrain.py {words}"
    )


# The examples


def run(folder: Path, *command: str) -> str:
    """Run in `folder`, with the programs of this Python's environment first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `make demo` has left a model, of three steps."""
    folder = tmp_path_factory.mktemp("readme")
    demo = str(ROOT / "scripts" / "demo.py")
    run(folder, sys.executable, demo, "--variant", "mac", "--steps", "3", "--only", "train")
    return folder


def test_there_is_an_example_for_everything_promised():
    promised = (".generate(", "pipeline(", "LoraConfig", "Trainer(model", "accelerate launch", "TitansCache.load(")
    for word in (*promised, "memory_read_only=True", "trace_surprise", "= neural_memory(", "simple_evaluate"):
        assert any(word in code for code in CODE), word


@pytest.mark.parametrize("language, code", BLOCKS)
def test_the_example_runs(language, code, folder, monkeypatch):
    """In this process, but for what is launched; that is why each must import titans_hf by itself."""
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install titans-hf[dev])")
    if language == "bash":
        (folder / "train.py").write_text(LAUNCHED)
        assert "train_loss" in run(folder, "bash", "-c", code)
        return
    assert re.search(r"^(import|from) titans_hf\b", code, re.MULTILINE)
    if "lm_eval" in code:
        without_documents(monkeypatch)
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def without_documents(monkeypatch) -> None:
    """lm-eval's documents come from the Hub: see test_eval_tasks for these lines with documents from files."""
    import lm_eval

    def evaluate(model, model_args, tasks, task_manager, device, limit):
        assert all(task in task_manager.task_index for task in tasks)

    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    monkeypatch.setattr(lm_eval.utils, "make_table", str)
