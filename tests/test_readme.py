"""The README's examples run as they stand, on the model that `make demo` leaves behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("datasets", "peft", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install titans-hf[train])")

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "README.md").read_text().split("## Five lines each")[1].split("\n## ")[0]
EXAMPLES = re.findall(r"```(python|bash)\n(.*?)```", SECTION, re.DOTALL)

# the examples share the demo's folder, and one is the file that the next launches
pytestmark = pytest.mark.xdist_group("readme")


def run(folder: Path, *command: str) -> str:
    """Run in `folder`, with the programs of this Python's environment first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    demo = str(ROOT / "scripts" / "demo.py")
    run(folder, sys.executable, demo, "--variant", "mac", "--steps", "3", "--only", "train")
    return folder


def test_there_is_an_example_for_everything_promised():
    assert [language for language, _ in EXAMPLES] == ["python", "python", "python", "python", "bash", "python"]
    for word in (".generate(", "pipeline(", "LoraConfig", "Trainer(model", "accelerate launch", "TitansCache"):
        assert any(word in code for _, code in EXAMPLES), word


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_example_runs(number, folder):
    language, code = EXAMPLES[number]
    if language == "bash":
        _, script = EXAMPLES[number - 1]
        (folder / "train.py").write_text(script)
        assert "train_loss" in run(folder, "bash", "-c", code)
    else:
        (folder / f"example{number}.py").write_text(code)
        run(folder, sys.executable, f"example{number}.py")
