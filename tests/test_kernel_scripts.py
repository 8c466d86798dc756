"""The kernels compile for GPUs that need not be present, and what the scripts recorded is up to date."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install titans-hf[kernels])")

from titans_hf.bench import kernel_resources, kernel_roofline, kernel_speed  # noqa: E402

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels of this process are compiled"
)


def compiled(*command: str) -> None:
    """Runs Python in a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


# one target and one precision, of the first shape
SOME_KERNELS = """
import sys
from titans_hf.bench import kernel_resources as r
some = [v for v in r.variants(r.default_shapes()[:1], ["sm_90"]) if ("PRECISION", "ieee") not in v.constants]
rows = [r.row_of(variant, r.compile_one(variant), r.digests()[variant.kernel]) for variant in some]
assert len({row["kernel"] for row in rows}) > 5
sys.exit("\\n".join(r.problems(rows) + r.differences(rows)) or None)
"""


def test_kernels_compile_without_spills_as_the_list_says():
    """The list has every kernel for every target, and none of them spills."""
    compiled("-c", SOME_KERNELS)


@pytest.mark.slow
def test_the_presets_kernels_compile_for_every_target():
    compiled(str(ROOT / "scripts/bench/kernel_resources.py"), "--defaults", "--check")


def test_the_list_is_checked_against_the_sources(monkeypatch):
    """With another digest of one kernel the check fails."""
    _, rows = kernel_resources.read_list()
    known = dict.fromkeys(map(kernel_resources.key_of, rows))
    monkeypatch.setattr(kernel_resources, "wanted", lambda: known)  # kernels for the interpreter have no parameters
    monkeypatch.setattr(kernel_resources, "variants", lambda *_: [])
    monkeypatch.setattr(kernel_resources, "table", lambda *_: "")
    assert "was made from other sources" not in "".join(kernel_resources.differences([]))
    digests = kernel_resources.digests()
    monkeypatch.setattr(kernel_resources, "digests", lambda: {**digests, "token_kernel": "other"})
    assert "was made from other sources" in "".join(kernel_resources.differences([]))


def test_a_kernel_s_digest_depends_on_what_it_calls(monkeypatch):
    before, functions = kernel_resources.digests(), kernel_resources.functions()
    monkeypatch.setattr(kernel_resources, "functions", lambda: {**functions, "silu_curve": "def silu_curve(z): ..."})
    after = kernel_resources.digests()
    assert {name for name in before if before[name] != after[name]} == {
        "write_backward_kernel",
        "delta_write_backward_kernel",
    }


def test_words_do_not_count_as_sources_and_code_does():
    """So that a docstring can be improved without compiling everything again."""
    source = "'First.'\nx = 1  # why\n\ndef f():\n    'F.'\n    return '# not a comment'\n"
    assert kernel_resources.code_of(source) == "x = 1\ndef f():\n    return '# not a comment'"


def test_the_roofline_in_the_readme_is_the_scripts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel_roofline.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        kernel_roofline.main()
    assert not ended.value.code


@interpreted
def test_the_kernel_benchmark_times_nothing_that_is_not_equal(monkeypatch):
    """A NaN in one gradient is enough."""
    x, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert not kernel_speed.distance([x, x], [x, nan]) <= 1e9
    monkeypatch.setattr(kernel_speed, "ragged_disagreement", lambda *_: float("nan"))
    with pytest.raises(SystemExit, match="nothing is timed"):
        kernel_speed.verify(kernel_speed.Sizes(1, 1, 16, 1, 1, 16), "cpu", 1.0)


@interpreted
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_kernel_benchmark_compares_before_it_times(depth, tmp_path, monkeypatch):
    precision, verify, verified = torch.get_float32_matmul_precision(), kernel_speed.verify, []

    def noting(*arguments):
        verified.append(arguments)
        if depth == 2:  # takes long in the interpreter
            verify(*arguments)

    def timed(*arguments):
        assert verified
        return time(*arguments)

    time = kernel_speed.timed
    monkeypatch.setattr(kernel_speed, "verify", noting)
    monkeypatch.setattr(kernel_speed, "timed", timed)
    options = ["--device", "cpu", "--depth", str(depth), "--record", str(tmp_path / "kernels")]
    monkeypatch.setattr(sys, "argv", ["kernel_speed.py", *options])
    kernel_speed.main()
    torch.set_float32_matmul_precision(precision)
    with (tmp_path / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} >= {"torch", "triton"}
    assert all(float(row["disagreement"]) < 1e-4 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert json.loads((tmp_path / "kernels.json").read_text())["runs"]
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
