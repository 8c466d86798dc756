"""`backend="auto"` compares the kernels with torch at their first use, and falls back to torch if they fail.

GPU tensors are simulated by CPU tensors with `is_cuda`. The kernels run once in Triton's interpreter; after that the
tests replay what they returned, or spoil it.
"""

import subprocess
import warnings
from contextlib import nullcontext

import pytest
import torch
from support import memory_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from titans_hf import MemoryState, memory_ops, neural_memory
from titans_hf.memory_delta import Before, DeltaWrite
from titans_hf.memory_parts import Coefficients, Write
from titans_hf.memory_rule import DeltaRule, Rule

kernels = pytest.importorskip("titans_kernels", reason="triton is not installed (pip install titans-hf[kernels])")
import triton  # noqa: E402

from titans_kernels import launch, self_check, served  # noqa: E402

LAUNCHES = ("forward", "backward", "token")
CHUNK = WIDTH = 16


def small_inputs(T: int = 32, D: int = WIDTH, dtype: torch.dtype = torch.float32):
    return memory_inputs(B=2, T=T, H=3, D=D, depth=1, dtype=dtype)


def read(T: int = 32, backend: str = "auto"):
    tokens, state = small_inputs(T)
    return neural_memory(*tokens, state, chunk_size=CHUNK, backend=backend)


def check(q=None, D: int = WIDTH, chunk: int = CHUNK, delta: bool = False, to_start: bool = False) -> bool:
    tokens, state = small_inputs(D=D)
    q = tokens[0] if q is None else q
    definition = memory_ops.scan_chunks, memory_ops.extend_chunk, MemoryState
    return kernels.passes(state.weights, q, chunk, *definition, delta, to_start)


class Replayed:
    """In place of a launch: what it returned in the check, changed by `spoil`; later calls launch."""

    def __init__(self, real, results: list):
        self.real, self.results, self.calls = real, results, 0
        self.spoil = lambda found: found

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls > len(self.results):
            return self.spoil(self.real(*arguments))
        return self.spoil([x.clone() for x in self.results[self.calls - 1]])


@pytest.fixture(scope="module")
def recorded():
    """What the kernels return in the check, which they pass."""
    results = {name: [] for name in LAUNCHES}

    def recording(name: str, real):
        return lambda *arguments: results[name].append(real(*arguments)) or results[name][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_results", {})
        for name in LAUNCHES:
            patch.setattr(launch, name, recording(name, getattr(launch, name)))
        assert check()
    assert [len(results[name]) for name in LAUNCHES] == [1, 1, 2]
    return results


@pytest.fixture
def launched(recorded, monkeypatch):
    """The launches by name, in a process that has checked nothing yet; tensors say that they are on a GPU."""
    monkeypatch.setattr(self_check, "_results", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    replayed = {name: Replayed(getattr(launch, name), recorded[name]) for name in LAUNCHES}
    for name, stand_in in replayed.items():
        monkeypatch.setattr(launch, name, stand_in)
    return replayed


def calls(launched) -> list[int]:
    return [launched[name].calls for name in LAUNCHES]


def off_by_a_tenth(place: int):
    def spoil(found):
        found[place] = 1.1 * found[place]
        return found

    return spoil


def one_nan(found):
    found[-1].view(-1)[-1] = float("nan")
    return found


# Which launch is wrong, how, and what the warning names.
WRONG = {
    "outputs": ("forward", off_by_a_tenth(0), "outputs"),
    "end state": ("forward", off_by_a_tenth(2), "momentum 1"),
    "gradient of the start": ("backward", off_by_a_tenth(0), "gradient of weights 1"),
    "gradient of theta": ("backward", off_by_a_tenth(5), "gradient of theta"),
    "one NaN": ("backward", one_nan, "gradient of alpha"),
    "decoding": ("token", off_by_a_tenth(0), "decoded output"),
    "state after decoding": ("token", off_by_a_tenth(-1), "decoded errors 1"),
}


def assert_falls_back(launched, *words: str) -> None:
    """One warning with these words, the numbers of the torch form, and no further launch."""
    with pytest.warns(RuntimeWarning, match="torch form is used") as caught:
        y, state = read()
    message = str(caught[0].message)
    assert len(caught) == 1
    assert all(word in message for word in (*words, "width=16", "backend='triton'", "TITANS_KERNEL_CHECK=0"))
    expected, expected_state = read(backend="torch")
    assert torch.equal(y, expected)
    assert all(map(torch.equal, state.tensors(), expected_state.tensors()))
    before = calls(launched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read()
    assert calls(launched) == before


@pytest.mark.parametrize(("launch_name", "spoil", "named"), WRONG.values(), ids=WRONG)
def test_wrong_numbers_fall_back_to_torch_with_one_warning(launched, launch_name, spoil, named):
    launched[launch_name].spoil = spoil
    assert_falls_back(launched, named)


@pytest.mark.parametrize(
    "error",
    [
        triton.CompilationError("def kernel(): ...", None, "no such operation"),
        triton.runtime.OutOfResources(300_000, 232_448, "shared memory"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        subprocess.CalledProcessError(1, ["gcc"]),
        KeyError("Keyword argument maxnreg was specified but unrecognised"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("launch_name", LAUNCHES)
def test_kernels_that_do_not_compile_or_launch_fall_back_to_torch(launched, launch_name, error):
    def fail(found):
        raise error

    launched[launch_name].spoil = fail
    assert_falls_back(launched, type(error).__name__)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), TypeError("a mistake of ours")], ids=repr)
def test_other_errors_are_raised(launched, error):
    def fail(found):
        raise error

    launched["backward"].spoil = fail  # which only the check runs
    with pytest.raises(type(error)):
        read()


def test_kernels_that_agree_are_used_and_checked_once(launched):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            read(T=1)
            assert calls(launched) == [1, 1, 3 + step]  # two tokens of the check, then one each time


@pytest.mark.parametrize("how", ["variable", "backend"])
def test_kernels_that_failed_still_run_where_they_are_forced(launched, monkeypatch, how):
    launched["token"].spoil = off_by_a_tenth(0)
    with pytest.warns(RuntimeWarning, match="torch form is used"):
        read(T=1)
    if how == "variable":
        monkeypatch.setenv("TITANS_KERNEL_CHECK", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(T=1, backend="triton" if how == "backend" else "auto")
    assert calls(launched) == [1, 1, 3]  # the check, then the token


@pytest.mark.parametrize("how", ["variable", "backend"])
def test_forced_kernels_are_not_checked(launched, monkeypatch, how):
    checked = []
    monkeypatch.setattr(self_check, "_check", lambda case, definition: checked.append(case) or True)
    with monkeypatch.context() as patch:
        if how == "variable":
            patch.setenv("TITANS_KERNEL_CHECK", "0")
        read(T=1, backend="triton" if how == "backend" else "auto")
    assert calls(launched) == [0, 0, 1]
    assert not checked
    read(T=1)
    assert len(checked) == 1


def test_each_shape_dtype_and_precision_is_checked_by_itself(monkeypatch):
    checked = []
    monkeypatch.setattr(self_check, "_results", {})
    monkeypatch.setattr(self_check, "_check", lambda case, definition: checked.append(case) or True)
    q = torch.empty(1)
    for _ in range(2):
        check(), check(D=32), check(chunk=32), check(q.bfloat16()), check(delta=True), check(to_start=True)
        with monkeypatch.context() as patch:
            patch.setattr(self_check, "precision_of", lambda tokens: "tf32")
            check()
    assert len(set(checked)) == len(checked) == 7


@pytest.mark.parametrize(
    "delta, to_start",
    [(True, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, True), (True, False)))],
)
def test_two_layers_and_half_precision_pass_within_their_tolerance(delta, to_start):
    shape = served.Shape(depth=2, chunk=16, width=16, hidden=32)
    case = self_check.Case(torch.device("cpu"), torch.bfloat16, "ieee", shape, delta, to_start)
    form = self_check.Form(memory_ops.scan_chunks, memory_ops.extend_chunk, MemoryState)
    assert self_check._problem(case, form) is None


# Where the first use may be


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
    "nothing": nullcontext,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_the_check_runs_in_eager_mode_whatever_surrounds_it(launched, surrounding):
    tokens, state = small_inputs()
    definition = memory_ops.scan_chunks, memory_ops.extend_chunk, MemoryState
    with surrounding():
        assert kernels.passes(state.weights, tokens[0], CHUNK, *definition)
    assert calls(launched) == [1, 1, 2]


def test_a_first_use_under_activation_checkpointing(launched):
    """The recomputed forward saves the tensors of the first one: the check adds none."""
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda x: x.sin() * float(check()), x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("agree", [True, False])
def test_torch_compile_checks_while_it_traces(launched, agree, dynamic):
    """One graph without the check in it: only the choice."""
    if not agree:
        launched["forward"].spoil = off_by_a_tenth(0)
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    tokens, state = small_inputs()
    definition = memory_ops.scan_chunks, memory_ops.extend_chunk, MemoryState

    @torch.compile(fullgraph=True, backend=keep, dynamic=dynamic)
    def choose(q, *weights):
        return q.sin() if kernels.passes(weights, q, CHUNK, *definition) else q.cos()

    with nullcontext() if agree else pytest.warns(RuntimeWarning, match="torch form"):
        y = choose(tokens[0], *state.weights)
    torch.testing.assert_close(y, tokens[0].sin() if agree else tokens[0].cos())
    assert graphs == [["sin" if agree else "cos"]]


def test_without_a_device_to_run_on_the_torch_form_is_used(monkeypatch):
    monkeypatch.setattr(self_check, "_results", {})
    assert not check(torch.empty(1, device="meta"))
    with FakeTensorMode():
        absent = torch.empty(1, device="cuda")
    assert torch.cuda.is_available() or not check(absent)


@pytest.mark.parametrize("to_start", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in served.every_shape() if shape.width == 16], ids=str)
def test_no_token_of_the_case_is_near_the_cap(shape, delta, to_start):
    """The gradient jumps there: rounding could make right kernels fail."""
    case = self_check.Case(torch.device("cpu"), torch.float32, "ieee", shape, delta, to_start)
    data = self_check.Data(case, exact=True)
    weights, momentum, tokens = data.matrices(1.0), data.matrices(0.1), data.tokens(self_check.N, shape.chunk)
    start = data.start()
    fields = dict(**self_check.FIELDS, delta=delta, start=start)
    rule, ratios = (DeltaRule if delta else Rule)(**self_check.FIELDS), []
    for n in range(self_check.N):
        _, k, v, *gates = (x[:, :, n].flatten(0, 1) for x in tokens)
        here = [x.flatten(0, 1) for x in weights]
        if delta:
            before = Before.of(Coefficients(*gates).gates)
            own = start and start[-1].flatten(0, 1)
            last = here[-1] if own is None else here[-1] - own
            write = DeltaWrite(rule, [*here[:-1], last], momentum[-1].flatten(0, 1), own, k, v, before)
        else:
            write = Write(rule, here, k, v)
        ratios += [a * g * step / self_check.CAP for (a, g), step in zip(write.norms, write.step_scale, strict=True)]
        chunk = [x[:, :, n : n + 1] for x in tokens]
        _, weights, momentum = memory_ops.scan_chunks(weights, momentum, *chunk, None, **fields)
    ratios = torch.stack(ratios)
    assert ratios.log().abs().min() > 0.015
    assert 0.2 < (ratios > 1).double().mean() < 0.8
