"""Saves a cache to a file: read a book once, ask about it later in another process.

A snapshot is a safetensors file. It holds the tensors of the cache and, as metadata, a fingerprint of the model that
filled it and a digest of the whole content. A snapshot loads only if the digest is right, the model has the same
fingerprint, and every tensor has the shape and dtype that the model's cache needs.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FORMAT, VERSION = "titans memory", 2
READABLE = (1, 2)  # version 1 had another log for rewinding, see `carry_titans.log_of_first_version`
PARTS = ("state", "config", "weights")  # metadata entries that hold a JSON object
CHECKED = ("format", "version", *PARTS)  # metadata entries that the digest covers
DIGEST = "sha256"


def fingerprint(model: nn.Module, fields: tuple[str, ...]) -> tuple[dict, dict[str, str]]:
    """The given configuration fields, and a digest of every weight by name: all that a cache depends on.

    The weights are those of the stack of blocks, without the model's head or wrapper. Adapters count as weights, and so
    does whether they are active.
    """
    stack = next((x for x in model.modules() if getattr(x, "base_model", None) is x), None)
    if stack is None:
        raise ValueError(f"a {type(model).__name__} contains no Titans model")
    config = {name: getattr(stack.config, name) for name in fields}
    weights = {name: _weight_digest(name, x) for name, x in stack.state_dict().items()}
    for name, module in stack.named_modules():
        if hasattr(module, "merged_adapters"):  # a PEFT layer
            weights[f"{name}, adapters in use"] = str((module.active_adapters, module.disable_adapters, module.merged))
    return json.loads(json.dumps(config)), weights


def _weight_digest(name: str, x: Tensor) -> str:
    try:
        data = _bytes_of(x)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(f"cannot fingerprint `{name}` ({type(x).__name__}): snapshots need plain weights") from error
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    digest.update(data)
    return digest.hexdigest()[:16]


def _bytes_of(x: Tensor):
    """The bytes of a tensor as an array, without a copy if it is contiguous and on the CPU."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def content_digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """The digest of a snapshot: all tensors with their names, dtypes and shapes, and the `CHECKED` metadata."""
    digest = hashlib.new(DIGEST)
    digest.update(json.dumps([metadata.get(name) for name in CHECKED]).encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(json.dumps([name, str(x.dtype), x.shape]).encode())
        digest.update(_bytes_of(x))
    return f"{DIGEST}:{digest.hexdigest()}"


def difference(what: str, theirs: dict, ours: dict) -> str:
    """A sentence on where two fingerprints differ; `what` is "config" or "weights"."""
    names = [name for name in {**ours, **theirs} if theirs.get(name, ...) != ours.get(name, ...)]
    others = len(names) - 1
    more = f" and {others} other{'s' * (others > 1)}" if others else ""
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
    """Write the tensors and the facts that `read_snapshot` returns, with a digest of both.

    The digest does not cover the note.
    """
    facts = {"version": VERSION, **dict(zip(PARTS, (state, config, weights), strict=True)), "note": note or {}}
    metadata = {"format": FORMAT, **{name: json.dumps(fact) for name, fact in facts.items()}}
    # Copies, because `save_file` refuses tensors that share memory.
    own = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    metadata["digest"] = content_digest(own, metadata)
    with whole_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(own, temporary, metadata)  # this makes the file readable by its owner only
        temporary.chmod(mode)


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end: `path` never holds an incomplete file."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_note(path: str | os.PathLike) -> dict[str, str]:
    """The note that was saved with a snapshot. It is not verified, and loading ignores it."""
    _, metadata = _open(path, with_tensors=False)
    note = _parsed(path, metadata, "note") if "note" in metadata else {}
    return {name: x for name, x in note.items() if isinstance(x, str)} if isinstance(note, dict) else {}


def read_snapshot(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of a snapshot, once its version and its digest have been checked."""
    tensors, metadata = _open(path)
    version = _parsed(path, metadata, "version")
    if version not in READABLE:
        raise ValueError(
            f"{os.fspath(path)!r} is of version {version!r}; this titans-hf reads versions {READABLE}: "
            "read the text again"
        )
    _check_digest(path, tensors, metadata)
    facts = {name: _parsed(path, metadata, name) for name in PARTS}
    if not all(isinstance(fact, dict) for fact in facts.values()):
        raise _damaged(path, "its metadata are not a snapshot's")
    return tensors, facts


def _open(path: str | os.PathLike, with_tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file that says it is a snapshot."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no snapshot at {os.fspath(path)!r}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys()) if with_tensors and metadata.get("format") == FORMAT else []
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, error) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} is not a snapshot of a Titans memory")
    return tensors, metadata


def _parsed(path: str | os.PathLike, metadata: dict[str, str], name: str):
    try:
        return json.loads(metadata[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _check_digest(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Refuse a file whose content does not match its digest; warn if it has none, as in older files."""
    if "digest" in metadata:
        if content_digest(tensors, metadata) != metadata["digest"]:
            raise ValueError(f"{os.fspath(path)!r} is damaged: its content does not match its {DIGEST} digest")
        return
    unknown = metadata.keys() - {*CHECKED, "note"}
    if unknown:  # such as "digest" with a flipped bit
        raise ValueError(f"{os.fspath(path)!r} is damaged: its metadata has an unknown entry {min(unknown)!r}")
    warnings.warn(
        f"{os.fspath(path)!r} has no digest, as an older titans-hf wrote it: damage to its numbers cannot be detected. "
        "Save the cache again to add one.",
        stacklevel=4,  # the caller of `TitansCache.load`
    )


def _damaged(path: str | os.PathLike, reason: Exception | str) -> ValueError:
    return ValueError(f"{os.fspath(path)!r} is damaged, or not a snapshot: {reason}")
