"""`import titans_hf` needs little, and the Auto classes know Titans whichever was imported first."""

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

SMALL = "hidden_size=32, num_hidden_layers=1, num_attention_heads=1"


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_torch_and_transformers_are_all_it_needs():
    """Beyond what transformers' own model classes import, `import titans_hf` loads itself and no other package."""
    code = """
import sys
from transformers import AutoModelForCausalLM, PreTrainedModel
before = set(sys.modules)
import titans_hf
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names - {"tokenizers", "transformers"}))
print(*sorted(name for name in sys.modules if name.startswith("titans_hf.") and name.count(".") > 1))
"""
    assert run(code) == ["titans_hf"]


ORDERS = [
    "import titans_hf; from transformers import AutoConfig, AutoModelForCausalLM",
    "from transformers import AutoConfig; import titans_hf; from transformers import AutoModelForCausalLM",
]
MORE_ORDERS = [  # each costs a process
    "from transformers import AutoConfig, AutoModelForCausalLM; import titans_hf",
    "from titans_hf import TitansForCausalLM; from transformers import AutoConfig, AutoModelForCausalLM",
    "import titans_hf.configuration_titans; from transformers import AutoConfig, AutoModelForCausalLM",
    "import titans_hf, transformers; AutoConfig = transformers.AutoConfig; "
    "AutoModelForCausalLM = transformers.AutoModelForCausalLM",
]


@pytest.mark.parametrize("imports", [*ORDERS, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_ORDERS)])
def test_the_auto_classes_know_titans_in_any_order(imports):
    code = f"""
{imports}
import transformers
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("titans", {SMALL}))
print(type(model).__name__, transformers.TitansForCausalLM is type(model))
"""
    assert run(code) == ["TitansForCausalLM", "True"]


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
    """`titans_hf.neural_memory` is the function, whatever was imported; there is no module of its name."""
    import titans_hf
    import titans_hf.modeling_titans
    from titans_hf import memory_ops

    assert titans_hf.neural_memory is memory_ops.neural_memory
    assert isinstance(memory_ops, ModuleType)
    exec("from titans_hf import *", names := {})
    assert names["neural_memory"] is memory_ops.neural_memory
    assert names["TitansCache"] is titans_hf.TitansCache
    with pytest.raises(ModuleNotFoundError):
        import_module("titans_hf.neural_memory")


def test_what_is_public_is_listed_and_what_is_not_there_is_an_attribute_error():
    import titans_hf

    assert set(titans_hf.__all__) <= set(dir(titans_hf))
    assert all(getattr(titans_hf, name) is not None for name in titans_hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Titan'"):
        titans_hf.Titan  # noqa: B018
