"""A model goes to the Hub whole, alone and checked, and comes back as it was. The Hub is a stand-in on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_stand_in import OTHER, READER, WRITER, Blob, HubStandIn
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from support import chat_tokenizer, save_chat_model, tiny_model
from test_loading import WITHOUT_TITANS_HF
from typer.testing import CliRunner

from titans_hf.cli import push as cli_push
from titans_hf.cli.app import app
from titans_hf.hub import push as hub_push
from titans_hf.hub.loading import CommandError, size
from titans_hf.hub.push import own_code

ROOT = Path(__file__).parent.parent

# a file directly in titans_hf/ travels with a checkpoint; what lies in a subfolder does not
STAY = {
    "__init__.py",
    "__main__.py",
    "configuration_series.py",
    "modeling_series.py",
}  # the last two: forecasters alone
CODE = {path.name for path in (ROOT / "titans_hf").glob("*.py")} - STAY
MODEL = {"config.json", "generation_config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
UPLOADED = {*CODE, *MODEL, *TOKENIZER, "README.md"}
CARD = "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [titans]\n---\n# Mine\n"
STRANGE = {"training_args.bin": b"x", "optimizer.pt": b"x", ".env": b"SECRET=1", "notes.txt": b"x", "evil.py": b"x"}


@pytest.fixture
def hub():
    with HubStandIn() as hub:
        yield hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_chat_model(folder, "mag")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A model's folder as training leaves it, with files that must not be uploaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, content in STRANGE.items():
        (folder / name).write_bytes(content)
    (folder / "checkpoint-1").mkdir()
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def push(hub, folder, monkeypatch):
    """`titans push` of that folder to the stand-in; the loading, which takes seconds, is tested by itself."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_push, "check_loading", lambda folder, upload: upload.checks.append("loading: stub"))

    def run(*arguments, code: int = 0, token: str | None = WRITER, url: str | None = None, repo: str = "ada/tiny"):
        monkeypatch.setattr(cli_push, "open_hub", lambda: HfApi(endpoint=url or hub.url, token=token))
        done = CliRunner().invoke(app, ["push", str(folder), "--repo-id", repo, *map(str, arguments)])
        assert done.exit_code == code, (done.output, done.exception)
        if code:
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done

    return run


def run_in_process(code: str, hub: HubStandIn, home: Path, *arguments) -> str:
    """Another process, which has its own place for what it downloads and no other Hub than the stand-in."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    settings = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, env={**os.environ, **own}, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_goes_up_and_comes_back_as_it_was(hub, folder, tmp_path):
    """By `titans push` and by `push_to_hub`; then, without titans_hf, by name and `trust_remote_code`."""
    send = """
import sys
from titans_hf import TitansForCausalLM
from titans_hf.cli.app import app
from transformers import AutoTokenizer
try:
    app(["push", sys.argv[1], "--repo-id", "ada/by-command"], prog_name="titans")
except SystemExit as end:
    assert not end.code, end.code
TitansForCausalLM.from_pretrained(sys.argv[1]).push_to_hub("ada/by-method", tags=["tagged"])
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("ada/by-method")
"""
    (folder / "README.md").unlink()
    printed = run_in_process(send, hub, tmp_path / "sender", folder)
    assert "checked: loading: without titans_hf" in printed
    for name in ("by-command", "by-method"):
        found = hub.repos[f"ada/{name}"].files()
        assert found.keys() == {*UPLOADED, ".gitattributes"}
        for path in UPLOADED - {"README.md"}:
            assert name == "by-method" or found[path] == (folder / path).read_bytes(), path
        card = ModelCard(found["README.md"].decode())
        assert card.data.pipeline_tag == "text-generation"
        assert f'name = "ada/{name}"' in card.text
        assert ("tagged" in card.data.tags) == (name == "by-method")
    weights = [load_file(file) for file in _written(hub, tmp_path)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(hub.repos["ada/by-command"].messages) == 2  # the first is the Hub's own

    ids = torch.arange(1, 14)[None]
    with torch.no_grad():
        torch.save((ids, _load(folder)(ids).logits), tmp_path / "expected.pt")
    receive = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids, expected = torch.load(folder)
for name in ("ada/by-command", "ada/by-method"):
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)
    print(AutoTokenizer.from_pretrained(name, trust_remote_code=True)("two words").input_ids)
"""
    printed = run_in_process(WITHOUT_TITANS_HF + receive, hub, tmp_path / "receiver", tmp_path / "expected.pt")
    assert printed.splitlines() == 2 * [str(chat_tokenizer()("two words").input_ids)]


def _load(folder: Path):
    from titans_hf import TitansForCausalLM

    return TitansForCausalLM.from_pretrained(folder).eval()


def _written(hub: HubStandIn, tmp_path: Path) -> list[Path]:
    paths = []
    for name in ("by-command", "by-method"):
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(hub.repos[f"ada/{name}"].files()["model.safetensors"])
    return paths


def test_the_code_that_travels_is_the_model_s_alone():
    assert {file.name for file in own_code()} == CODE


def test_a_dry_run_lists_everything_and_sends_nothing(push, hub, folder):
    printed = push("--dry-run").stdout
    lines = {line.split()[0]: line for line in printed.splitlines()}
    for name in UPLOADED:
        assert lines[name].endswith("LFS" if name.endswith(".safetensors") else "regular")
        assert size((folder / name).stat().st_size) in lines[name]
    assert lines["total"].endswith(f"{len(UPLOADED)} files")
    left = next(line for line in printed.splitlines() if line.startswith("left out: "))
    assert left == "left out: " + ", ".join(sorted([*STRANGE, "checkpoint-1/"]))
    assert "checked: loading: stub" in printed
    assert hub.calls == []
    assert hub.repos == {}


def test_only_known_files_go_up(push, hub):
    push()
    assert hub.repos["ada/tiny"].files().keys() == {*UPLOADED, ".gitattributes"}


def test_shards_go_up_and_old_ones_go(push, hub, folder):
    """A push renews the same model in one commit, which leaves no weights of before."""
    push()
    (folder / "model.safetensors").unlink()
    tiny_model("mag", torch.float32, vocab_size=len(chat_tokenizer())).save_pretrained(folder, max_shard_size="20KB")
    shards = {path.name for path in folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    push()
    found = {name for name in hub.repos["ada/tiny"].files() if "safetensors" in name}
    assert found == {*shards, "model.safetensors.index.json"}
    next(folder.glob("model-*.safetensors")).unlink()
    assert "which model.safetensors.index.json names" in push(code=1).stderr


def test_a_private_repository_and_a_branch(push, hub):
    push("--private", "--branch", "next", "--message", "try")
    repo = hub.repos["ada/tiny"]
    assert repo.private
    assert repo.messages[-1] == "try"
    assert set(repo.files()) == {".gitattributes"}
    assert set(repo.files("next")) == {*UPLOADED, ".gitattributes"}
    push("--branch", "next")


@pytest.mark.parametrize(
    "token, repo, expected",
    [
        (None, "ada/tiny", "there is no token of the Hub here: log in with `hf auth login`"),
        ("hf_wrong", "ada/tiny", "the Hub does not accept the token: log in with `hf auth login`"),
        (READER, "ada/tiny", "the token of ada can read and not write"),
        (OTHER, "ada/tiny", "the token may not write to ada/tiny"),
    ],
)
def test_a_token_that_does_not_do_is_named(push, hub, token, repo, expected):
    assert expected in push(code=1, token=token, repo=repo).stderr
    assert hub.repos == {}


def test_without_a_token_nothing_is_even_loaded(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    done = CliRunner().invoke(app, ["push", str(folder), "--repo-id", "ada/tiny"])
    assert done.exit_code == 1
    assert "hf auth login" in done.stderr


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "ada/..", "ada/has space", "ada/" + 100 * "x"])
def test_a_name_that_cannot_be_is_refused(push, hub, name):
    assert "--repo-id" in push(code=1, repo=name).stderr
    assert hub.calls == []


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"config.json": b'{"model_type": "llama"}'}, "a model of type 'llama'"),
        ({"thesis.pdf": b"x"}, "files that are not a Titans model"),
        ({"config.json": b'{"model_type": "titans", "hidden_size": 99}'}, "another Titans model, with `"),
    ],
)
def test_what_somebody_else_put_there_stays(push, hub, files, expected):
    repo = hub.make("ada/tiny", **files)
    before = repo.files()
    assert expected in push(code=1).stderr
    assert repo.files() == before
    push("--overwrite")
    assert repo.files().keys() == {*UPLOADED, ".gitattributes"}


def test_an_empty_repository_is_filled_and_the_same_model_renewed(push, hub, folder):
    repo = hub.make("ada/tiny")
    push()
    for name in ("figure.png", "demo.py", "tokenizer.model"):
        repo.commits[repo.branches["main"]][name] = Blob(b"x")
    weights = load_file(folder / "model.safetensors")
    save_file({name: x + 1 for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    push()
    assert repo.files()["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert {"figure.png", "demo.py"} <= repo.files().keys()  # which are not ours to delete
    assert "tokenizer.model" not in repo.files()  # which would speak for another tokenizer
    assert "POST /api/repos/create" not in hub.calls


def test_a_name_that_is_taken_unseen_is_refused(push, hub):
    """The Hub hides what a token may not see; the name is taken all the same."""
    hub.make("ada/tiny")
    hub.broken = {"GET /api/models/ada/tiny": 404}
    assert "the name ada/tiny is taken" in push(code=1).stderr


@pytest.mark.parametrize(
    "broken, status, expected",
    [
        ("POST /api/models/ada/tiny/commit", 500, "the Hub refused, with 500"),
        ("PUT /storage", 403, "the upload broke off"),
        ("POST /api/validate-yaml", 400, "nothing was committed"),
        ("POST /api/models/ada/tiny/preupload", 403, "the token may not write to ada/tiny"),
    ],
)
def test_a_push_that_breaks_off_leaves_a_repository_as_it_was(push, hub, broken, status, expected):
    hub.broken = {broken: status}
    for state in ("there and empty", "as it was"):
        message = push(code=1).stderr
        assert expected in message
        assert f"nothing was committed, and ada/tiny is {state}" in message
        assert hub.repos["ada/tiny"].files().keys() == {".gitattributes"}
    hub.broken = {}
    push()
    assert hub.repos["ada/tiny"].files().keys() == {*UPLOADED, ".gitattributes"}


def test_a_hub_that_cannot_be_reached_is_said_so(push, hub):
    assert "cannot reach the Hub" in push(code=1, url="http://127.0.0.1:9").stderr
    assert hub.calls == []


def test_a_stranger_s_code_is_neither_run_nor_sent(push, hub, folder):
    (folder / "memory_ops.py").write_text("raise SystemExit('run')")
    assert "memory_ops.py is not the file of this titans-hf" in push(code=1).stderr
    assert hub.calls == []
    push("--refresh-code")
    own = next(file for file in own_code() if file.name == "memory_ops.py")
    assert hub.repos["ada/tiny"].files()["memory_ops.py"] == own.read_bytes()


@pytest.mark.parametrize(
    "file, change, expected",
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "eve/evil--x.Y"}}, "`auto_map` in"),
        ("config.json", {"auto_map": None}, "save the model again"),
        ("config.json", {"attn_implementation": "eve/kernel"}, "chooses code for others"),
        ("config.json", {"model_type": "llama"}, "not a Titans model"),
        ("config.json", {"pad_note": "hf_" + 34 * "a"}, "what looks like a token"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "code of the tokenizer's own"),
    ],
)
def test_a_configuration_that_names_other_code_is_refused(push, hub, folder, file, change, expected):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert expected in push(code=1).stderr
    assert hub.calls == []


def test_a_file_above_the_hub_s_limit_is_refused(push, hub, monkeypatch):
    monkeypatch.setattr(hub_push, "LARGEST", 20_000)
    assert "max_shard_size" in push(code=1).stderr
    assert hub.calls == []


def test_weights_must_be_there(push, folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in push(code=1).stderr
    assert "no folder" in CliRunner().invoke(app, ["push", "nowhere", "--repo-id", "a/b", "--dry-run"]).stderr


def test_a_given_card_goes_up_and_a_bad_one_does_not(push, hub, folder, tmp_path):
    card = tmp_path / "card.md"
    card.write_text("# No metadata\n")
    assert "the card's metadata lack library_name" in push("--card", card, code=1).stderr
    card.write_text("---\nlicense: [\n---\n# Broken\n")
    assert "metadata that cannot be read" in push("--card", card, code=1).stderr
    push()
    assert hub.repos["ada/tiny"].files()["README.md"].decode() == CARD
    card.write_text(CARD.replace("Mine", "Given"))
    assert "left out: .env, README.md" in push("--card", card).stdout
    assert hub.repos["ada/tiny"].files()["README.md"] == card.read_bytes()


def test_loading_is_compared_with_the_package(saved, tmp_path, monkeypatch):
    """What a stranger's process finds must be finite and the same; a model that does not load is not pushed."""
    upload = hub_push.prepare(saved, tmp_path)
    ids = [(7 * i + 1) % len(chat_tokenizer()) for i in range(24)]
    with torch.no_grad():
        logits = _load(saved)(torch.tensor([ids])).logits
    words = torch.tensor(chat_tokenizer()(hub_push.PROBE).input_ids)
    for found, expected in (
        ({"logits": logits, "words": words}, None),
        ({"logits": logits * float("nan"), "words": words}, "not finite"),
        ({"logits": logits + 1, "words": words}, "other logits"),
        ({"logits": logits, "words": words[1:]}, "tokenizer reads a text differently"),
    ):
        monkeypatch.setattr(hub_push, "load_alone", lambda folder, ids, found=found: found)
        if expected is None:
            hub_push.check_loading(saved, upload)
        else:
            with pytest.raises(CommandError, match=expected):
                hub_push.check_loading(saved, upload)
