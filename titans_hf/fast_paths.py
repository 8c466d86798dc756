"""The one place that says when a fast path may be taken, and in which precision the memory computes.

Every fast path computes what a plain path computes too, and works in eager mode only: while `torch.compile` traces or
`torch.func` transforms, the plain path is taken, because neither can look into a hand-written backward or a buffer that
is filled in place.
`forced` pins any choice, so that a test can run both paths on the same input; a path for one token stays one.

| path | what is fast | taken when |
|---|---|---|
| `chunks` | whole chunks with a hand-written backward (`memory_chunks`) | eager mode |
| `step` | one token into the open chunk, in place (`memory_step`) | eager mode, one token, no gradients |
| `tokens` | fused convolution and gated norm (`memory_tokens`) | eager mode, more than `FEW` tokens |
| `query` | sliding-window attention of a single query | eager mode, one token, no gradients |
| `append` | a carried buffer grows in place (`tails`) | eager mode, no gradients |
| `operators` | what lies between two linear layers, in C++ (`titans_cpu`) | as `step`, in float32 on a CPU |
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

PATHS = ("chunks", "step", "tokens", "query", "append", "operators")
WITHOUT_GRADIENTS = ("step", "query", "append", "operators")
ONE_TOKEN = ("step", "query", "operators")
FEW = 8  # tokens: with no more of them, torch's own operations are faster than the fused passes

_forced: dict[str, bool] = {}


def takes(path: str, tokens: int = 1) -> bool:
    """Whether to take a fast path for a call with that many tokens."""
    if path in _forced:
        return _forced[path] and (tokens == 1 or path not in ONE_TOKEN)
    if torch.is_grad_enabled() and path in WITHOUT_GRADIENTS:
        return False
    if (tokens != 1 and path in ONE_TOKEN) or (tokens <= FEW and path == "tokens"):
        return False
    return not torch.compiler.is_compiling() and not inside_functorch()


def operators(x: Tensor, tokens: int = 1) -> Any:
    """The C++ operators for a decoding step, if they can compute with a tensor like x; else None.

    They are `torch.ops.titans_cpu`. Where that package, a compiler or Linux is missing, torch computes the same.
    """
    if tokens != 1 or not takes("operators") or x.dtype is not torch.float32 or type(x) is not Tensor or not x.is_cpu:
        return None
    return _operators()


def plain(*layers: nn.Module) -> bool:
    """Whether an operator may read the layers' weights: linear ones, not adapted, quantised, hooked or offloaded."""
    for layer in layers:
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
            return False
        weight = layer._parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.dtype is not torch.float32 or "forward" in layer.__dict__:
            return False
    return True


def weights_of(*layers: nn.Linear) -> list[Tensor | None]:
    """Weight and bias of each."""
    return [layer._parameters[name] for layer in layers for name in ("weight", "bias")]


@cache
def _operators() -> Any:
    package = operators_package()
    return package.operators() if package else None


def operators_package() -> Any:
    """The package of C++ operators, if it is installed."""
    try:
        import titans_cpu
    except ImportError:
        return None
    return titans_cpu


@contextmanager
def forced(**choices: bool) -> Iterator[None]:
    """Take (True) or avoid (False) the named paths: `with forced(chunks=False, step=False): ...`."""
    unknown = choices.keys() - set(PATHS)
    if unknown:
        raise ValueError(f"`forced` knows the paths {PATHS}, got {sorted(unknown)}")
    before = dict(_forced)
    _forced.update(choices)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def inside_functorch() -> bool:
    """Whether a transform of `torch.func` is active; such a transform only knows torch's own operations."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_values(x: Tensor) -> bool:
    """Whether only shapes are computed: `torch.compile` traces, or the tensor is on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of memory state and gate products: float32 under half precision, never less than the model's."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(x: Tensor):
    """A context in which matrix products keep the state's precision, whatever autocast would choose."""
    device = x.device.type
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()
