"""A cache as a file: read a book once, ask later, in another process.

A snapshot is a safetensors file: the tensors of the cache, and as metadata a fingerprint of the model that filled it.
It is loaded only into a model with the same fingerprint, if every tensor is what this model's cache would hold.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FORMAT, VERSION = "titans memory", 1
PARTS = ("state", "config", "weights")  # of the metadata, each a mapping


def fingerprint(model: nn.Module, fields: tuple[str, ...]) -> tuple[dict, dict[str, str]]:
    """All that a cache depends on: the given fields of the configuration, and a digest of every weight, by name.

    The weights are those of the stack of blocks, whatever head or wrapper the model has; adapters are among them, and
    whether they are in use.
    """
    stack = next((x for x in model.modules() if getattr(x, "base_model", None) is x), None)
    if stack is None:
        raise ValueError(f"a {type(model).__name__} has no Titans model in it")
    config = {name: getattr(stack.config, name) for name in fields}
    weights = {name: _digest(name, x) for name, x in stack.state_dict().items()}
    for name, module in stack.named_modules():
        if hasattr(module, "merged_adapters"):  # a layer of PEFT's
            weights[f"{name}, adapters in use"] = str((module.active_adapters, module.disable_adapters, module.merged))
    return json.loads(json.dumps(config)), weights


def _digest(name: str, x: Tensor) -> str:
    try:
        data = x.detach().cpu().contiguous().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(f"cannot fingerprint `{name}` ({type(x).__name__}): snapshots need plain weights") from error
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    digest.update(data)
    return digest.hexdigest()[:16]


def difference(what: str, theirs: dict, ours: dict) -> str:
    """Where two such descriptions differ, in words."""
    names = [name for name in {**ours, **theirs} if theirs.get(name, ...) != ours.get(name, ...)]
    more = f" and {len(names) - 1} others" if len(names) > 1 else ""
    if what == "weights":
        return f"its weights differ in `{names[0]}`{more}"
    return f"it had `{names[0]}={theirs.get(names[0])!r}`, this one has {ours.get(names[0])!r}{more and ';' + more}"


def write_snapshot(
    path: str | os.PathLike,
    tensors: dict[str, Tensor],
    state: dict,
    config: dict,
    weights: dict,
    note: dict[str, str] | None = None,
) -> None:
    """Write a snapshot: the tensors, and the facts that `read_snapshot` finds."""
    facts = {"version": VERSION, **dict(zip(PARTS, (state, config, weights), strict=True)), "note": note or {}}
    metadata = {"format": FORMAT, **{name: json.dumps(fact) for name, fact in facts.items()}}
    own = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    with whole_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(own, temporary, metadata)  # which refuses tensors that share memory, and hides the file from others
        temporary.chmod(mode)


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A name to write a file under; it gets its own when it is complete. There is never half of one."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_note(path: str | os.PathLike) -> dict[str, str]:
    """What its writer noted on a snapshot. Nobody vouches for it, and loading a snapshot does not look at it."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no snapshot at {os.fspath(path)!r}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        note = json.loads(metadata.get("note", "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged, or not a snapshot: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} is not a snapshot of a Titans memory")
    return {name: x for name, x in note.items() if isinstance(x, str)} if isinstance(note, dict) else {}


def read_snapshot(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of a snapshot, of this version and whole."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no snapshot at {os.fspath(path)!r}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") == FORMAT:
            facts = {name: json.loads(metadata[name]) for name in ("version", *PARTS)}
            if not all(isinstance(facts[name], dict) for name in PARTS):
                raise ValueError("its metadata are not a snapshot's")
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged, or not a snapshot: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} is not a snapshot of a Titans memory")
    if facts["version"] != VERSION:
        raise ValueError(
            f"{os.fspath(path)!r} is of version {facts['version']!r}; this titans-hf reads version {VERSION}: "
            "read the text again"
        )
    return tensors, facts
