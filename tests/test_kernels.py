"""The kernels compute what the torch form computes: outputs, states and every gradient, in Triton's interpreter.

Uninitialised memory is NaN in all of these tests.
"""

import inspect
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from support import assert_close, memory_inputs, random_ids, slow_but, tiny_model
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from titans_hf import MemoryState, memory_ops, neural_memory
from titans_hf.memory_rule import DeltaRule, Rule

kernels = pytest.importorskip("titans_kernels", reason="triton is not installed (pip install titans-hf[kernels])")
from titans_kernels import served  # noqa: E402

slow = pytest.mark.slow  # the interpreter takes seconds: of most cross products one part is ordinary

# depth, head width, expansion, chunk, whole chunks, cap; rows of different lengths; forgetting towards a start
SHAPES = [
    (1, 16, 1, 16, 3, None, False, True),
    (1, 32, 1, 32, 2, 0.7, True, True),
    (2, 16, 1, 16, 3, 10.0, True, True),
    (2, 16, 2, 32, 2, None, True, False),
    (2, 64, 1, 32, 1, 0.7, True, True),
]
MORE_SHAPES = [
    *((*shape, not ragged, not to_start) for *shape, ragged, to_start in SHAPES),
    *((1, 64, 1, 16, 2, 5.0, ragged, ragged) for ragged in (False, True)),
    *((2, 32, 2, 16, 2, 0.7, ragged, ragged) for ragged in (False, True)),
    *((2, 64, 2, 64, 1, None, ragged, not ragged) for ragged in (False, True)),
]
RULES = {  # what a rule's fields do to the gradients of two layers: before the cap, and where it acts
    "normalised": dict(max_surprise=None, normalised=True),
    "a share for the hidden layer": dict(max_surprise=3.0, hidden_step=0.3),
    "both": dict(max_surprise=1.5, normalised=True, hidden_step=0.3),
}
GATES = {"no momentum": {"eta": 0.0}, "no forgetting": {"alpha": 0.0}}


@pytest.fixture(autouse=True)
def memory_that_was_never_written_is_nan():
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def chunked_inputs(depth, D, expansion, C, N, B=2, H=3, seed=0, eta=None, alpha=None):
    """Weights, momentum and tokens [B, H, N, C, ...]; some gates are exactly 0 or 1, or all of one kind as given."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    uniform = lambda: torch.rand(B, H, N, C, generator=g)  # noqa: E731
    q, k, v = normal(B, H, N, C, D), normalize(normal(B, H, N, C, D), dim=-1), normal(B, H, N, C, D)
    gates = theta, etas, alphas = 0.1 * uniform(), uniform(), 0.3 * uniform()
    etas[..., 3], etas[..., 4], alphas[..., 5], alphas[..., 7] = 0.0, 1.0, 1.0, 0.0
    for gate, value in ((etas, eta), (alphas, alpha)):
        if value is not None:
            gate.fill_(value)
    widths = [D, *[expansion * D] * (depth - 1), D]
    weights = [normal(B, H, i, o) / i**0.5 for i, o in zip(widths, widths[1:], strict=False)]
    momentum = [0.1 * normal(*W.shape) for W in weights]
    return weights, momentum, [q, k, v, *gates]


def away_from(weights) -> tuple[torch.Tensor, ...]:
    """A start that the weights have left."""
    g = torch.Generator().manual_seed(3)
    return tuple(W + 0.3 * W.std() * torch.randn(W.shape, generator=g) for W in weights)


def outputs_and_gradients(run, weights, momentum, tokens, chunks, cap, to_start=False):
    """Outputs (zeros behind a row's last chunk), end states, and the gradients of states, tokens, gates and start."""
    start = away_from(weights) if to_start else ()
    inputs = [x.detach().requires_grad_() for x in (*weights, *momentum, *tokens, *start)]
    depth, N = len(weights), tokens[0].shape[2]
    weights, momentum, tokens = inputs[:depth], inputs[depth : 2 * depth], inputs[2 * depth : 2 * depth + 6]
    start = tuple(inputs[2 * depth + 6 :]) or None
    y, W, S = run(tuple(weights), tuple(momentum), *tokens, chunks, cap, start=start)
    real = torch.arange(N) < (torch.full((2,), N) if chunks is None else chunks)[:, None]
    outputs = [torch.where(real[:, None, :, None, None], y, 0.0), *W, *S]
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=g).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]


def assert_all_close(mine, theirs, tolerance: float) -> None:
    for x, y in zip(mine, theirs, strict=True):
        assert_close(x, y, tolerance)


# Whole chunks


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=slow) for shape in MORE_SHAPES)], ids=str)
def test_whole_chunks_equal_the_torch_form(shape):
    *sizes, N, cap, ragged, to_start = shape
    inputs = (*chunked_inputs(*sizes, N), torch.tensor([N, N - 1]) if ragged else None, cap, to_start)
    mine, theirs = (outputs_and_gradients(form.scan_chunks, *inputs) for form in (kernels, memory_ops))
    assert_all_close(mine, theirs, 2e-6)


def inputs_of_either_norm(*sizes, **gates):
    """`chunked_inputs` whose hidden layer has norms below and above 1, which `normalised` tells apart."""
    weights, momentum, (q, k, *rest) = chunked_inputs(*sizes, **gates)
    norms = torch.linspace(0.2, 3, k[..., 0].numel()).view(k.shape[:-1])
    return weights, momentum, [q, k * norms[..., None], *rest]


@pytest.mark.parametrize("fields", [*(pytest.param(x, marks=slow) for x in [*RULES.values()][:-1]), RULES["both"]])
def test_a_rule_s_fields_change_the_gradients_as_in_the_torch_form(fields):
    cap, fields = fields["max_surprise"], {name: x for name, x in fields.items() if name != "max_surprise"}
    inputs = (*inputs_of_either_norm(2, 16, 1, 16, 2), None, cap)
    mine, theirs = (
        outputs_and_gradients(partial(form.scan_chunks, **fields), *inputs) for form in (kernels, memory_ops)
    )
    assert_all_close(mine, theirs, 2e-6)


# depth, head width, expansion, chunk, whole chunks, cap, rows of different lengths, start; other fields of the rule
NORMALISED = dict(normalised=True, hidden_step=0.3)
DELTA = [
    (1, 16, 1, 16, 2, 1.5, True, True, {}),
    (2, 16, 2, 16, 2, 1.5, False, True, NORMALISED),
    (2, 16, 1, 32, 1, None, False, False, NORMALISED),
]
MORE_DELTA = [
    (1, 16, 1, 16, 2, 1.5, True, False, {}),
    (1, 32, 1, 32, 2, None, False, True, {}),
    (2, 16, 1, 16, 2, 20.0, True, False, {}),
    (2, 16, 2, 16, 3, None, True, True, NORMALISED),
    (2, 64, 2, 32, 1, 3.0, True, False, NORMALISED),
    (2, 32, 4, 64, 1, None, False, True, NORMALISED),
]


@pytest.mark.parametrize("shape", [*DELTA, *(pytest.param(shape, marks=slow) for shape in MORE_DELTA)], ids=str)
def test_chunks_written_by_delta_equal_the_torch_form(shape):
    """With the cap, which acts on some tokens, and without."""
    *sizes, N, cap, ragged, to_start, fields = shape
    inputs = (*inputs_of_either_norm(*sizes, N), torch.tensor([N, N - 1]) if ragged else None, cap, to_start)
    mine, theirs = (
        outputs_and_gradients(partial(form.scan_chunks, delta=True, **fields), *inputs)
        for form in (kernels, memory_ops)
    )
    assert_all_close(mine, theirs, 5e-6)


def test_a_cap_that_acts_on_every_error_in_turn_has_the_gradient_of_the_token_loop():
    """Against autograd through the definition, in float64."""
    weights, momentum, tokens = chunked_inputs(2, 16, 1, 16, 1, B=1, H=1)
    found = []
    for backend in ("triton", "recurrent"):
        exact = backend == "recurrent"
        inputs = [x.double() if exact else x for x in (*tokens, *weights, *momentum, *away_from(weights))]
        inputs = [x.detach().requires_grad_() for x in inputs]
        state = MemoryState(tuple(inputs[6:8]), tuple(inputs[8:10]), start=tuple(inputs[10:]))
        of_tokens = [x[:, :, 0].transpose(1, 2) for x in inputs[:6]]
        rule = DeltaRule(0.5, **NORMALISED)
        y, after = neural_memory(*of_tokens, state, chunk_size=16, rule=rule, backend=backend)
        outputs = [y, *sum(after.current(), ())]
        gradients = torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs)
        found.append([x.float() for x in (*outputs, *gradients)])
    assert_all_close(*found, 5e-6)


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=slow)])
def test_without_momentum_or_forgetting(depth, gates):
    inputs = (*chunked_inputs(depth, 16, 1, 16, 2, **gates), None, 1.0)
    mine, theirs = (outputs_and_gradients(form.scan_chunks, *inputs) for form in (kernels, memory_ops))
    assert_all_close(mine, theirs, 2e-6)


@pytest.mark.parametrize(
    "depth, chunks",
    [
        (1, [2, 5]),
        (2, [0, 3]),
        pytest.param(1, [6, 5], marks=slow),
        pytest.param(1, [0, 3], marks=slow),
        pytest.param(2, [6, 5], marks=slow),
        pytest.param(2, [2, 5], marks=slow),
    ],
    ids=str,
)
def test_sequences_of_several_pieces_and_checkpoints(depth, chunks, monkeypatch):
    """Rows that end in any piece; states recomputed from checkpoints; one layer in registers and in global memory."""
    monkeypatch.setattr(served, "PIECE", 4)
    monkeypatch.setattr(served, "GROUP", 2)
    monkeypatch.setattr(served, "ON_CHIP_WIDTH", {"ieee": 0 if chunks[0] == 2 else 16})
    inputs = (*chunked_inputs(depth, 16, 1, 16, 6, H=2), torch.tensor(chunks), 1.0, depth == 2)
    mine, theirs = (outputs_and_gradients(form.scan_chunks, *inputs) for form in (kernels, memory_ops))
    assert_all_close(mine, theirs, 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_half_precision_tokens_keep_a_float32_state(dtype):
    weights, momentum, tokens = chunked_inputs(2, 16, 1, 16, 2)
    tokens = [*(x.to(dtype) for x in tokens[:3]), *tokens[3:]]
    mine, theirs = (
        outputs_and_gradients(form.scan_chunks, weights, momentum, tokens, None, 1.0) for form in (kernels, memory_ops)
    )
    assert [x.dtype for x in mine[1:5]] == [torch.float32] * 4  # weights and momentum of two layers
    assert [x.dtype for x in mine[9:12]] == [dtype] * 3  # gradients of q, k, v
    assert_all_close(mine[1:5], theirs[1:5], 2e-6)
    assert_all_close([x.float() for x in mine], [x.float() for x in theirs], 2 * torch.finfo(dtype).eps)


# Any length, from any state


def assert_same_state(mine: MemoryState, theirs: MemoryState) -> None:
    assert_all_close(sum(mine.current(), ()), sum(theirs.current(), ()), 2e-6)
    if theirs.length is not None:
        assert torch.equal(mine.length, theirs.length)


@pytest.mark.parametrize(
    "rule, to_start",
    [
        (Rule(1.0), True),
        (DeltaRule(1.0, **NORMALISED), True),
        *(pytest.param(rule, False, marks=slow) for rule in (Rule(1.0), DeltaRule(1.0, **NORMALISED))),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_read_before", [5, *(pytest.param(tokens, marks=slow) for tokens in (0, 16))])
def test_any_length_from_any_state_equals_the_torch_backend(tokens_read_before, rule, to_start):
    """Odd lengths, from the middle of a chunk, with padding anywhere."""
    tokens, state = memory_inputs(B=2, T=60, H=2, D=16, dtype=torch.float32)
    state = replace(state, start=away_from(state.weights) if to_start else None)
    options = dict(chunk_size=16, rule=rule)
    if tokens_read_before:
        _, state = neural_memory(*(x[:, :tokens_read_before] for x in tokens), state, **options)
    tokens = [x[:, tokens_read_before : tokens_read_before + 43] for x in tokens]
    mask = torch.rand(2, 43, generator=torch.Generator().manual_seed(2)) < 0.9
    for padding in (None, mask):
        (y, after), (expected, expected_after) = (
            neural_memory(*tokens, state, mask=padding, backend=backend, **options) for backend in ("triton", "torch")
        )
        assert_close(y, expected, 2e-6)
        assert_same_state(after, expected_after)


@pytest.mark.parametrize(
    "depth, rule, to_start",
    [
        (1, Rule(), False),
        (2, Rule(0.8, normalised=True, hidden_step=0.3), True),
        (2, DeltaRule(1.5, normalised=True, hidden_step=0.3), True),
        *(pytest.param(1, rule, True, marks=slow) for rule in (Rule(0.8), DeltaRule(), DeltaRule(0.8))),
        *(pytest.param(2, rule, False, marks=slow) for rule in (Rule(), DeltaRule())),
    ],
    ids=str,
)
def test_decoding_token_by_token_equals_the_torch_backend(depth, rule, to_start):
    """Across a chunk boundary, which the rows reach at different steps: one row skips some."""
    tokens, first = memory_inputs(B=2, T=23, H=2, D=16, depth=depth, dtype=torch.float32)
    outputs, states = [], []
    for backend in ("triton", "torch"):
        state = replace(first, start=away_from(first.weights) if to_start else None)
        for t in range(23):
            lengths = torch.tensor([1, int(t % 7 != 3)])
            y, state = neural_memory(
                *(x[:, t : t + 1] for x in tokens),
                state,
                chunk_size=16,
                rule=rule,
                backend=backend,
                lengths=lengths,
            )
            outputs.append(torch.where(lengths.bool()[:, None, None, None], y, 0.0))
        states.append(state)
    assert_close(torch.cat(outputs[:23], 1), torch.cat(outputs[23:], 1), 2e-6)
    assert_same_state(*states)


def test_decoding_changes_nothing_in_place():
    tokens, state = memory_inputs(B=1, T=1, D=16, dtype=torch.float32)
    state = state.opened(16)
    before = [x.clone() for x in state.tensors()]
    neural_memory(*tokens, state, chunk_size=16, backend="triton")
    assert all(map(torch.equal, state.tensors(), before))


# In a model


def small_model(variant: str, implementation: str, **fields):
    sizes = dict(hidden_size=32, head_dim=16, memory_chunk_size=16, segment_size=32, sliding_window=16)
    return tiny_model(
        variant, torch.float32, num_hidden_layers=1, memory_implementation=implementation, **sizes, **fields
    )


PLAIN = dict(memory_write="chunk", memory_step="plain", memory_hidden_step=1.0, memory_forget_to="zero")


@pytest.mark.parametrize(
    "variant, fields",
    [("mac", {}), *(pytest.param(variant, PLAIN, marks=slow) for variant in ("mac", "mag", "mal", "lmm"))],
)
def test_a_model_computes_and_trains_the_same_with_kernels(variant, fields):
    ids, found = random_ids(2, 39), []
    for implementation in ("triton", "torch"):
        model = small_model(variant, implementation, **fields)
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        found.append([outputs.logits, *(p.grad for p in model.parameters())])
    assert_all_close(*found, 2e-5)


@slow_but("mag")
def test_a_model_generates_the_same_with_kernels(variant):
    """From the middle of a chunk into the next one."""
    ids, found = random_ids(2, 29), []
    for implementation in ("triton", "torch"):
        model = small_model(variant, implementation)
        found.append(
            model.generate(
                ids,
                max_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                eos_token_id=None,
            )
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert_all_close(found[0].logits, found[1].logits, 2e-5)


# Wired into torch


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=slow)])
def test_the_operators_pass_torch_s_own_checks(depth):
    """Schema, fake tensors, autograd registration, ahead-of-time dispatch: what torch.compile relies on."""
    weights, momentum, tokens = chunked_inputs(depth, 16, 1, 16, 1, H=2)
    chunks = torch.tensor([1, 0], dtype=torch.int32)
    start = list(away_from(weights)) if depth == 1 else []
    for x in (*weights, *momentum, *start, *tokens):
        x.requires_grad_()
    rule = (10.0, True, 0.5, depth == 2)
    arguments = (weights, momentum, start, *tokens, chunks, *rule, True)
    torch.library.opcheck(torch.ops.titans.scan_chunks.default, arguments)
    with torch.no_grad():
        y, *states = torch.ops.titans.scan_chunks(*arguments)
        ends, checkpoints = states[: 2 * depth], states[2 * depth :]
        gradients = (torch.ones_like(y), [torch.ones_like(x) for x in ends], checkpoints)
        start = [x.detach() for x in start]
        arguments = (*gradients, start, *(x.detach() for x in tokens), chunks, *rule)
    torch.library.opcheck(torch.ops.titans.scan_chunks_backward.default, arguments)
    _, state = memory_inputs(B=1, H=2, D=16, depth=depth, dtype=torch.float32)
    state = state.opened(16)
    q, gate = torch.randn(1, 2, 1, 16), torch.rand(1, 2, 1)
    parts = map(list, (state.weights, state.momentum, state.inputs, state.errors))
    arguments = (
        *parts,
        list(state.start or ()),
        *state.gates,
        state.length,
        q,
        q,
        q,
        gate,
        gate,
        gate,
        torch.ones(1, dtype=torch.long),
        *rule,
    )
    torch.library.opcheck(torch.ops.titans.extend_chunk.default, arguments)


def test_meta_tensors_have_the_shapes_of_real_ones():
    tokens, state = memory_inputs(B=2, T=37, H=3, D=16, dtype=torch.float32)
    y, after = neural_memory(*tokens, state, chunk_size=16, backend="triton")
    tokens, state = [x.to("meta") for x in tokens], state.map(lambda x: x.to("meta"))
    y_meta, after_meta = neural_memory(*tokens, state, chunk_size=16, backend="triton")
    assert (y_meta.shape, y_meta.dtype) == (y.shape, y.dtype)
    assert [x.shape for x in after_meta.tensors()] == [x.shape for x in after.tensors()]


def test_torch_compile_takes_the_kernels_as_they_are():
    """One graph, with the same outputs and gradients."""
    tokens, state = memory_inputs(B=2, T=16, H=3, D=16, dtype=torch.float32)
    k = tokens[1].requires_grad_()

    def read(*tokens):
        y, after = neural_memory(*tokens, state, chunk_size=16, max_surprise=1.0, backend="triton")
        return y, after.weights[0]

    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")
    found = []
    for fn in (compiled, read):
        outputs = fn(*tokens)
        found.append([*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], k)])
    assert_all_close(*found, 1e-6)


def operators_of(backend: str, D: int = 16, T: int = 32, chunk: int = 16) -> set[str]:
    """The kernels' operators that a call runs."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.add(str(operator))
            return operator(*args, **(kwargs or {}))

    seen = set()
    tokens, state = memory_inputs(B=2, T=T, H=2, D=D, dtype=torch.float32)
    with Watch():
        neural_memory(*tokens, state, chunk_size=chunk, backend=backend)
    return {name.split(".")[1] for name in seen if name.startswith("titans.")}


def test_auto_takes_the_kernels_for_gpu_tensors_that_they_serve(monkeypatch):
    monkeypatch.setenv("TITANS_KERNEL_CHECK", "0")
    assert operators_of("auto") == set()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # True for CUDA and HIP devices
    assert operators_of("auto") == {"scan_chunks"}
    assert operators_of("auto", T=1) == {"extend_chunk"}
    assert operators_of("auto", D=24) == set()
    assert operators_of("auto", chunk=12) == set()
    assert operators_of("torch") == set()


def test_names_and_signatures_are_those_of_the_definition():
    for name in ("scan_chunks", "extend_chunk"):
        mine, definition = (inspect.signature(getattr(module, name)) for module in (kernels, memory_ops))
        assert list(mine.parameters.values()) == list(definition.parameters.values())


def test_what_the_kernels_do_not_serve_is_refused_by_name(monkeypatch):
    def read(chunk=16, depth=2, D=16, expansion=2, dtype=torch.float32):
        tokens, state = memory_inputs(T=1, D=D, depth=depth, expansion=expansion, dtype=dtype)
        neural_memory(*tokens, state, chunk_size=chunk, backend="triton")

    for sizes, message in (
        (dict(chunk=12), "a chunk of 12 tokens"),
        (dict(D=24), "a head width of 24"),
        (dict(depth=3), "a memory of 3 layers"),
        (dict(expansion=3), "a hidden width of 48"),
        (dict(dtype=torch.float64), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**sizes)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="CPU tensors"):
        read()


def test_pieces_hold_whole_groups_and_stay_within_their_buffers():
    for shape in served.every_shape():
        for rows in (1, 16, 128, 768, 65_535):
            chunks = served.piece_of(rows, shape)
            assert chunks % served.GROUP == 0
            assert served.GROUP <= chunks <= served.PIECE
            state = 2 * shape.depth * shape.width * shape.hidden * 4
            assert chunks == served.GROUP or chunks * rows * state <= served.BUFFERS


class OnGPU(NamedTuple):
    """The attributes of a tensor that decide the precision."""

    dtype: torch.dtype
    device: torch.device = torch.device("cuda:0")


def test_tf32_is_used_where_tokens_or_torch_s_switches_allow_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        assert served.precision_of(OnGPU(torch.float32)) == "ieee"
        assert served.precision_of(OnGPU(torch.bfloat16)) == "tf32"
        matmul.fp32_precision = "tf32"
        assert served.precision_of(OnGPU(torch.float32)) == "tf32"
    finally:
        matmul.fp32_precision = before


def test_every_served_shape_is_let_through():
    q = torch.empty(1, 1, 1, 1)
    for shape in served.every_shape():
        layers = [(shape.width, shape.hidden), (shape.hidden, shape.width)][: shape.depth]
        weights = [torch.empty(1, 1, *layer) for layer in layers]
        assert kernels.refusal(weights, q, shape.chunk) is None
        assert served.shape_of(weights, shape.chunk) == shape


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now fails
import torch
from titans_hf import TitansConfig, TitansForCausalLM
from titans_hf.memory_ops import MemoryState, neural_memory
sizes = dict(hidden_size=32, head_dim=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
TitansForCausalLM(TitansConfig(**sizes))(torch.tensor([[1, 2, 3]]))
W, x, gate = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1)
try:
    neural_memory(x, x, x, gate, gate, gate, MemoryState((W,), (W,)), chunk_size=16, backend="triton")
except ValueError as error:
    print(error)
"""


def test_without_triton_the_model_runs_and_asking_for_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'titans-hf[kernels]'" in done.stdout


def test_a_backward_keeps_a_fraction_of_the_states():
    """The forward saves one state in GROUP for the backward, not one per chunk."""
    N = 2 * served.GROUP
    weights, momentum, tokens = chunked_inputs(1, 16, 1, 16, N, B=1, H=1)
    weights = [W.requires_grad_() for W in weights]
    y, *_ = kernels.scan_chunks(tuple(weights), tuple(momentum), *tokens, None, None)
    kept = [x for x in y.grad_fn.saved_tensors if x.shape[-2:] == weights[0].shape[-2:] and x.dim() == 5]
    assert [x.shape[2] for x in kept if x.shape[2] != N] == [2, 2]
