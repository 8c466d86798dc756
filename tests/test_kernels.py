"""The kernels compute what the chunk form computes: outputs, states and every gradient, in Triton's interpreter."""

import inspect

import pytest
import torch
from support import assert_close, every_variant, memory_inputs, random_ids, tiny_model
from torch.nn.functional import normalize

from titans_hf import memory_ops, neural_memory
from titans_kernels.formulae import Chunk

pytest.importorskip("triton", reason="triton is not installed (pip install titans-hf[kernels])")
scan = pytest.importorskip("titans_kernels.scan")

# depth, head width, expansion, chunk, whole chunks, cap
SHAPES = [
    (1, 16, 1, 16, 3, None),
    (1, 32, 1, 32, 2, 0.7),
    (2, 16, 1, 16, 3, 10.0),
    (2, 32, 2, 16, 2, 0.7),
    (2, 64, 2, 64, 1, None),
]


@pytest.fixture(autouse=True)
def memory_that_was_never_written_is_nan(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def filled(self, *args, **kwargs):
        x = new_empty(self, *args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def chunked_inputs(depth, D, expansion, C, N, B=2, H=3, seed=0):
    """Weights, momentum and tokens [B, H, N, C, ...]; some gates are exactly 0 or 1."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    uniform = lambda: torch.rand(B, H, N, C, generator=g)  # noqa: E731
    q, k, v = normal(B, H, N, C, D), normalize(normal(B, H, N, C, D), dim=-1), normal(B, H, N, C, D)
    theta, eta, alpha = 0.1 * uniform(), uniform(), 0.3 * uniform()
    eta[..., 3], eta[..., 4], alpha[..., 5], alpha[..., 7] = 0.0, 1.0, 1.0, 0.0
    widths = [D, *[expansion * D] * (depth - 1), D]
    weights = [normal(B, H, i, o) / i**0.5 for i, o in zip(widths, widths[1:], strict=False)]
    momentum = [0.1 * normal(*W.shape) for W in weights]
    return weights, momentum, [q, k, v, theta, eta, alpha]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_chunks_equal_the_torch_form(shape, ragged):
    """Outputs, final weights and momentum, and the gradients of tokens, gates and start; rows of different lengths."""
    *sizes, N, cap = shape
    weights, momentum, tokens = chunked_inputs(*sizes, N)
    inputs = [x.requires_grad_() for x in (*weights, *momentum, *tokens)]
    chunks = torch.tensor([N, N - 1]) if ragged else None
    real = torch.arange(N) < (torch.tensor([N, N]) if chunks is None else chunks)[:, None]
    found = []
    for run in (scan.scan_chunks, memory_ops.scan_chunks):
        y, W, S = run(tuple(weights), tuple(momentum), *tokens, chunks, cap)
        outputs = [torch.where(real[:, None, :, None, None], y, 0.0), *W, *S]
        g = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, generator=g) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, inputs, upstream)])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, 2e-6)


@pytest.mark.parametrize("closed_gates", [False, True])
@pytest.mark.parametrize("cap", [None, 0.7, 10.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_written_out_backward_equals_autograd(depth, cap, closed_gates):
    """In float64, with gates of exactly 0 and 1, with and without tokens that meet the cap."""
    tokens, state = memory_inputs(T=7, depth=depth, closed_gates=closed_gates)
    tokens = [x.transpose(1, 2).contiguous().requires_grad_() for x in tokens]
    starts = [x.requires_grad_() for x in (*state.weights, *state.momentum)]
    y, W, S = memory_ops._chunk(tuple(starts[:depth]), tuple(starts[depth:]), *tokens, cap)
    upstream = [torch.randn_like(x) for x in (y, *W, *S)]
    expected = torch.autograd.grad((y, *W, *S), (*starts, *tokens), upstream)
    with torch.no_grad():
        chunk = Chunk(starts[:depth], starts[depth:], *tokens, cap)
        after_W, after_S = chunk.after()
        dW, dS, *d_tokens = chunk.backward(upstream[0], upstream[1 : 1 + depth], upstream[1 + depth :])
    for mine, theirs in zip((chunk.y, *after_W, *after_S, *dW, *dS, *d_tokens), (y, *W, *S, *expected), strict=True):
        assert_close(mine, theirs, 1e-12)


@pytest.mark.parametrize("tokens_read_before", [0, 5, 16])
def test_any_length_from_any_state_equals_the_torch_backend(tokens_read_before):
    """Odd lengths, from the middle of a chunk, with padding anywhere."""
    tokens, state = memory_inputs(B=2, T=60, H=2, D=16, dtype=torch.float32)
    options = dict(chunk_size=16, max_surprise=1.0)
    if tokens_read_before:
        _, state = neural_memory(*(x[:, :tokens_read_before] for x in tokens), state, **options)
    tokens = [x[:, tokens_read_before : tokens_read_before + 43] for x in tokens]
    mask = torch.rand(2, 43, generator=torch.Generator().manual_seed(2)) < 0.9
    for padding in (None, mask):
        (y, after), (expected, expected_after) = (
            neural_memory(*tokens, state, mask=padding, backend=backend, **options) for backend in ("triton", "torch")
        )
        assert_close(y, expected, 2e-6)
        for mine, theirs in zip(
            (*after.current()[0], *after.current()[1]), sum(expected_after.current(), ()), strict=True
        ):
            assert_close(mine, theirs, 2e-6)


@every_variant
def test_a_model_computes_and_trains_the_same_with_kernels(variant):
    sizes = dict(hidden_size=32, head_dim=16, memory_chunk_size=16, segment_size=32, sliding_window=16)
    ids, found = random_ids(2, 39), []
    for implementation in ("triton", "torch"):
        model = tiny_model(variant, torch.float32, num_hidden_layers=1, memory_implementation=implementation, **sizes)
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        found.append([outputs.logits, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, 2e-5)


def test_the_operators_pass_torch_s_own_checks():
    """Schema, fake tensors, autograd registration, ahead-of-time dispatch: what torch.compile relies on."""
    weights, momentum, tokens = chunked_inputs(2, 16, 1, 16, 2, B=1, H=1)
    inputs = [x.requires_grad_() for x in (*weights, *momentum, *tokens)]
    chunks = torch.tensor([2], dtype=torch.int32)
    arguments = (inputs[:2], inputs[2:4], *inputs[4:], chunks, 10.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.titans.scan_chunks.default, arguments, test_utils=checks)
    y, *states = torch.ops.titans.scan_chunks(*arguments)
    gradients = (torch.ones_like(y), [torch.ones_like(x) for x in states], [x.detach() for x in states])
    arguments = (*gradients, *(x.detach() for x in tokens), chunks, 10.0)
    torch.library.opcheck(torch.ops.titans.scan_chunks_backward.default, arguments, test_utils=checks)


def test_names_and_signatures_are_those_of_the_definition():
    mine, definition = (inspect.signature(module.scan_chunks) for module in (scan, memory_ops))
    assert list(mine.parameters.values()) == list(definition.parameters.values())


def test_what_the_kernels_do_not_serve_is_refused_by_name(monkeypatch):
    def read(chunk=16, depth=2, D=16, dtype=torch.float32):
        tokens, state = memory_inputs(T=1, D=D, depth=depth, dtype=dtype)  # refused before any kernel would run
        neural_memory(*tokens, state, chunk_size=chunk, backend="triton")

    for sizes, message in (
        (dict(chunk=12), "a chunk of 12 tokens"),
        (dict(D=24), "a head width of 24"),
        (dict(depth=3), "a memory of 3 layers"),
        (dict(dtype=torch.float64), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**sizes)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="CPU tensors"):
        read()
