"""Push a model's folder to the Hub: what is uploaded, the checks before, one commit, and plain errors.

Only known files are uploaded. The code among them is this package's own, byte for byte, and runs once before the
push, in a process that has neither titans_hf nor a token. Everything is uploaded in one commit: a push that fails
leaves the repository unchanged.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .loading import CommandError, load, load_config, say, size

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from torch import Tensor

WEIGHTS, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
LARGEST = 50 * 10**9  # bytes of a file: the Hub's limit
LARGEST_IN_GIT = 10 * 2**20  # beyond it, or by these endings, the Hub keeps a file in LFS
IN_LFS = (".safetensors", ".model")
SHARD = r"model-\d+-of-\d+\.safetensors"
OLD_WEIGHTS = re.compile(rf"{SHARD}|{re.escape(WEIGHTS)}|{re.escape(INDEX)}")
SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
REQUIRED = ("library_name", "license", "pipeline_tag", "tags")  # of a card
INCIDENTAL = ("transformers_version", "dtype", "torch_dtype", "use_cache", "memory_implementation", "auto_map")
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
PROBE = "The memory of 1 model."
LOAD_ALONE = """
import json, sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "titans_hf":
            raise ImportError("titans_hf is not there, on purpose")

sys.meta_path.insert(0, NotInstalled())
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out, text, ids = sys.argv[1:]
words = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(text).input_ids
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(torch.tensor([json.loads(ids)])).logits
save_file({"logits": logits.float().contiguous(), "words": torch.tensor(words)}, out)
"""


@dataclass
class Upload:
    """The files to upload, collected in a folder; what is left out; and the checks that passed."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)  # sizes
    left_out: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    def add(self, name: str, source: Path | str) -> None:
        """A file, or its text."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, str):
            target.write_text(source, encoding="utf-8")
        else:
            link(source.resolve(), target)
        self.files[name] = target.stat().st_size


def link(source: Path, target: Path) -> None:
    """Link or copy a file: weights are large."""
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copy(source, target)


def way(name: str, count: int) -> str:
    """How the Hub stores a file by its default rules; the Hub decides."""
    return "LFS" if name.endswith(IN_LFS) or count > LARGEST_IN_GIT else "regular"


def prepare(folder: Path, staging: Path, refresh_code: bool = False) -> Upload:
    """Collect the model's files, if its folder requires no code but ours."""
    check_config(folder)
    upload = Upload(staging)
    upload.checks.append("configuration: a Titans model whose auto_map points to its own code")
    code = own_code()
    for file in code:
        check_code(folder / file.name, file, refresh_code)
        upload.add(file.name, file)
    upload.checks.append(f"code: {len(code)} files, this titans-hf's own")
    known = [name for name in (*CONFIGURATION, *TOKENIZER) if (folder / name).is_file()]
    for name in [*known, *weight_files(folder)]:
        upload.add(name, folder / name)
    return upload


def add_card(upload: Upload, folder: Path, card: str, extra: dict[str, str] | None = None) -> None:
    """The card and what goes with it, by name; then all files are there to be looked at."""
    check_card(card)
    upload.checks.append("card: parses, with " + ", ".join(REQUIRED))
    for name, text in {CARD: card, **(extra or {})}.items():
        upload.add(name, text)
    check_files(upload)
    upload.checks.append(f"files: none above {LARGEST // 10**9} GB, none with a token in it")
    upload.left_out = left_out(folder, upload)


def check_config(folder: Path) -> None:
    """Only a Titans configuration, which names no code but our own, here or on the Hub."""
    from ..configuration_titans import AUTO_MAP

    path = folder / "config.json"
    found = read_mapping(path) if path.is_file() else {}
    for name in ("attn_implementation", "_attn_implementation"):
        if found.get(name):
            raise CommandError(f"`{name}` in {path} chooses code for others: remove it")
    load_config(str(folder))
    if found.get("auto_map") != AUTO_MAP:
        raise CommandError(
            f"`auto_map` in {path} does not point to titans-hf's code: save the model again with `save_pretrained`"
        )
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file() and "auto_map" in read_mapping(tokenizer):
        raise CommandError(f"`auto_map` in {tokenizer} asks for code of the tokenizer's own, which does not go up")


def read_mapping(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def weight_files(folder: Path) -> list[str]:
    """The safetensors file, or the index and every shard that it names."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        raise CommandError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    shards = sorted(set(map(str, (read_mapping(folder / INDEX).get("weight_map") or {}).values())))
    for name in shards:
        if not re.fullmatch(SHARD, name):
            raise CommandError(f"{folder / INDEX} names {name!r}, which is not the name of a shard")
        if not (folder / name).is_file():
            raise CommandError(f"{folder} lacks {name}, which {INDEX} names")
    return [INDEX, *shards]


def own_code() -> list[Path]:
    """The files that `save_pretrained` puts beside a checkpoint."""
    from transformers.dynamic_module_utils import get_relative_import_files

    home = str(Path(__file__).parents[1] / "modeling_titans.py")
    return sorted({Path(file) for file in (home, *get_relative_import_files(home))})


def check_code(found: Path, own: Path, refresh: bool) -> None:
    if not refresh and found.is_file() and found.read_bytes() != own.read_bytes():
        raise CommandError(
            f"{found} is not the file of this titans-hf, and is not run: another version saved it, or somebody changed "
            "it. --refresh-code puts this titans-hf's code in its place"
        )


def left_out(folder: Path, upload: Upload) -> list[str]:
    """The files that are not uploaded, with a card that is replaced."""
    own, card = set(upload.files), folder / CARD
    if card.is_file() and card.read_bytes() != (upload.folder / CARD).read_bytes():
        own.remove(CARD)
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir() if path.name not in own)


def check_card(text: str) -> None:
    import yaml
    from huggingface_hub import ModelCard

    try:
        found = ModelCard(text).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise CommandError(f"the card has metadata that cannot be read: {error}") from error
    missing = [name for name in REQUIRED if not found.get(name)]
    if missing:
        raise CommandError(f"the card's metadata lack {', '.join(missing)}: `titans card DIR` makes one that has them")


def check_files(upload: Upload) -> None:
    for name, count in upload.files.items():
        if count > LARGEST:
            raise CommandError(
                f"{name} has {size(count)}, more than the Hub's {LARGEST // 10**9} GB: save the model again with "
                '`save_pretrained(..., max_shard_size="5GB")`'
            )
        if not name.endswith(".safetensors") and SECRET.search((upload.folder / name).read_bytes()):
            raise CommandError(f"{name} holds what looks like a token of the Hub: remove it")


def check_loading(folder: Path, upload: Upload) -> None:
    """Load the upload as a user without titans_hf would, and compare it with the folder loaded here."""
    import torch

    loaded = load(str(folder), None, device="cpu")
    ids = [(7 * i + 1) % loaded.model.config.vocab_size for i in range(24)]
    with torch.no_grad():
        expected = loaded.model(torch.tensor([ids])).logits.float()
    words = loaded.tokenizer(PROBE).input_ids
    del loaded
    say("loading it once more, without titans_hf")
    found = load_alone(upload.folder, ids)
    if not found["logits"].isfinite().all():
        raise CommandError(f"{folder} gives logits that are not finite")
    error = (found["logits"] - expected).abs().max().item()
    if error > 1e-4 * max(1.0, expected.abs().max().item()):
        raise CommandError(f"{folder}: its own code gives other logits than the package, off by {error:.1e}")
    if found["words"].tolist() != words:
        raise CommandError(f"{folder}: its tokenizer reads a text differently where titans_hf is not installed")
    upload.checks.append(
        "loading: without titans_hf and offline, by trust_remote_code; finite logits, as the package's"
    )
    upload.checks.append("tokenizer: loads, and reads as it does here")


def load_alone(folder: Path, ids: list[int]) -> "dict[str, Tensor]":
    """Logits of `ids` and tokens of a text, from a process without titans_hf, network or token."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if name not in TOKENS}
        environment |= {"HF_HOME": home, "HF_MODULES_CACHE": f"{home}/modules", "HF_HUB_OFFLINE": "1"}
        out = Path(home) / "found.safetensors"
        command = [sys.executable, "-I", "-c", LOAD_ALONE, str(folder), str(out), PROBE, json.dumps(ids)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CommandError(f"the model does not load by trust_remote_code without titans_hf: {last}")
        return load_file(out)


@dataclass
class Repository:
    """The repository on the Hub: its last commit, its files, and its model's configuration if there is one."""

    sha: str
    files: list[str]
    config: dict


@contextmanager
def plain_errors(repo_id: str, ending: str = "") -> Iterator[None]:
    """The Hub's errors as one line each; `ending` says what state they leave."""
    from huggingface_hub.errors import HfHubHTTPError

    of_httpx = HfHubHTTPError.__bases__[0]  # the Hub's client has changed its httpx
    try:
        yield
    except CommandError:
        raise
    except (of_httpx, OSError, RuntimeError, ValueError) as error:
        raise CommandError(explain(error, repo_id) + ending) from error


def explain(error: BaseException, repo_id: str) -> str:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if cause is not error:
        return f"the upload broke off: {error} ({status or type(cause).__name__})"
    if status == 401:
        return f"the Hub does not accept the token: {LOG_IN}"
    if status == 403:
        return (
            f"the token may not write to {repo_id}: it needs write access, and the user a right to "
            f"{repo_id.split('/')[0]}; {LOG_IN}"
        )
    if status is not None:
        first = (getattr(error, "server_message", None) or str(error)).strip().splitlines()[0]
        return f"the Hub refused, with {status}: {first}"
    if isinstance(error, ValueError):
        return f"the Hub's client refused: {error}"
    return f"cannot reach the Hub: {error or type(error).__name__}"


def check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise CommandError(f"--repo-id {repo_id!r} is not a name on the Hub: {error}") from error
    if repo_id.count("/") != 1:
        raise CommandError(f"--repo-id {repo_id!r} must name the owner as well: user/{repo_id}")


def check_token(api: "HfApi", repo_id: str) -> None:
    """Ask the Hub whose token this is, and refuse one that can only read."""
    if not api.token:
        raise CommandError(f"there is no token of the Hub here: {LOG_IN}")
    with plain_errors(repo_id):
        found = api.whoami()
    if (found.get("auth") or {}).get("accessToken", {}).get("role") == "read":
        raise CommandError(f"the token of {found.get('name')} can read and not write: {LOG_IN}")


def look(api: "HfApi", repo_id: str, branch: str | None = None) -> Repository | None:
    """The repository as it is; None where there is none. A branch that is not there yet begins as the main one."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with plain_errors(repo_id):
        try:
            info = api.model_info(repo_id, revision=branch)
        except RevisionNotFoundError:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return None
        files = [each.rfilename for each in info.siblings or []]
        with tempfile.TemporaryDirectory() as home:
            if "config.json" not in files:
                return Repository(info.sha, files, {})
            path = api.hf_hub_download(repo_id, "config.json", revision=info.sha, local_dir=home)
            return Repository(info.sha, files, read_mapping(Path(path)))


def check_clash(found: Repository | None, upload: Upload, repo_id: str) -> None:
    """Refuse a push unless the repository is new, empty, or holds the same model.

    A card alone counts as empty. The same model has the same configuration, whatever its weights.
    """
    if found is None or not set(found.files) - {".gitattributes", CARD}:
        return
    own = read_mapping(upload.folder / "config.json")
    if found.config.get("model_type") != "titans":
        kind = found.config.get("model_type")
        what = f"a model of type {kind!r}" if kind else f"files that are not a Titans model ({found.files[0]} ...)"
    else:
        names = [name for name in sorted({*own, *found.config}) if own.get(name) != found.config.get(name)]
        other = [name for name in names if name not in INCIDENTAL]
        if not other:
            return
        what = f"another Titans model, with `{other[0]}` {found.config.get(other[0])!r} and not {own.get(other[0])!r}"
    raise CommandError(f"{repo_id} holds {what}: choose another name, or replace its files with --overwrite")


def stale(found: Repository | None, upload: Upload, overwrite: bool) -> list[str]:
    """Files to delete in the same commit: weights and tokenizer of before; with `overwrite`, all but ours."""
    kept = {*upload.files, ".gitattributes"}
    files = [name for name in (found.files if found else []) if name not in kept]
    return [name for name in files if overwrite or name in TOKENIZER or OLD_WEIGHTS.fullmatch(name)]


def push(
    api: "HfApi",
    upload: Upload,
    repo_id: str,
    *,
    found: Repository | None,
    private: bool = False,
    branch: str | None = None,
    overwrite: bool = False,
    message: str | None = None,
) -> str:
    """Create the repository if there is none, and upload everything in one commit. Returns the commit's address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if found is None:
        create(api, repo_id, private)
    state = f"; nothing was committed, and {repo_id} is " + ("there and empty" if found is None else "as it was")
    with plain_errors(repo_id, f"{state}: push again"):
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        operations = [CommitOperationAdd(name, str((upload.folder / name).resolve())) for name in upload.files]
        operations += [CommitOperationDelete(name) for name in stale(found, upload, overwrite)]
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message or "Upload Titans model",
            revision=branch,
            parent_commit=found.sha if found else None,
        )
    return done.commit_url


def create(api: "HfApi", repo_id: str, private: bool) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    with plain_errors(repo_id, f"; {repo_id} was not made"):
        try:
            api.create_repo(repo_id, private=private or None)
        except HfHubHTTPError as error:
            if error.response.status_code == 409:
                raise CommandError(f"the name {repo_id} is taken, and this token cannot see by what") from error
            raise
