"""`import titans_hf` is light, and the Auto classes know Titans whoever was imported first."""

import subprocess
import sys

import pytest

SMALL = "hidden_size=32, num_hidden_layers=1, num_attention_heads=1"


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_loaded_before_it_is_used():
    """torch and the models of transformers take seconds to import; `titans_hf` asks for them when it needs them."""
    code = """
import sys, transformers
before = set(sys.modules)
import titans_hf
new = set(sys.modules) - before
print(len([name for name in new if name.split(".")[0] in ("torch", "transformers")]), "torch" in sys.modules)
print(titans_hf.TitansConfig.model_type, "torch" in sys.modules)
"""
    assert run(code) == ["0", "False", "titans", "True"]


@pytest.mark.parametrize(
    "imports",
    [
        "import titans_hf; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM; import titans_hf",
        "from transformers import AutoConfig; import titans_hf; from transformers import AutoModelForCausalLM",
        "from titans_hf import TitansForCausalLM; from transformers import AutoConfig, AutoModelForCausalLM",
        "import titans_hf; titans_hf.TitansConfig(); from transformers import AutoConfig, AutoModelForCausalLM",
        "import titans_hf, transformers; AutoConfig = transformers.AutoConfig; "
        "AutoModelForCausalLM = transformers.AutoModelForCausalLM",
    ],
)
def test_the_auto_classes_know_titans_in_any_order(imports):
    code = f"""
{imports}
import transformers
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("titans", {SMALL}))
print(type(model).__name__, transformers.TitansForCausalLM is type(model))
"""
    assert run(code) == ["TitansForCausalLM", "True"]


def test_looking_for_a_module_does_not_count_as_importing_it():
    code = f"""
import titans_hf
from importlib.util import find_spec
for name in ("titans_hf.modeling_titans", "titans_hf.configuration_titans", "transformers.models.auto.modeling_auto"):
    find_spec(name)
from transformers import AutoConfig, AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_config(AutoConfig.for_model("titans", {SMALL}))).__name__)
"""
    assert run(code) == ["TitansForCausalLM"]


def test_another_thread_may_be_importing_the_auto_classes():
    code = f"""
import sys, threading, time
import transformers
thread = threading.Thread(target=lambda: transformers.AutoModelForCausalLM)
thread.start()
while "transformers.models.auto.modeling_auto" not in sys.modules:
    time.sleep(0.001)
import titans_hf
thread.join()
from transformers import AutoConfig, AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_config(AutoConfig.for_model("titans", {SMALL}))).__name__)
"""
    assert run(code) == ["TitansForCausalLM"]


def test_no_module_shadows_the_function():
    """`import titans_hf.neural_memory as m` fails: no module has the name of the function."""
    code = """
import titans_hf, titans_hf.modeling_titans
from importlib.util import find_spec
print(callable(titans_hf.neural_memory), find_spec("titans_hf.neural_memory"))
from titans_hf import *
print(callable(neural_memory), TitansCache.__name__)
"""
    assert run(code) == ["True", "None", "True", "TitansCache"]


def test_what_is_public_is_listed_and_what_is_not_there_is_an_attribute_error():
    import titans_hf

    assert set(titans_hf.__all__) <= set(dir(titans_hf))
    assert all(getattr(titans_hf, name) is not None for name in titans_hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Titan'"):
        titans_hf.Titan  # noqa: B018
