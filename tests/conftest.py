"""One thread per process: the tensors are tiny, and the suite runs in parallel. Kernels run in Triton's interpreter."""

import logging
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which transformers does

torch.set_num_threads(1)

# `make test-slow` draws more examples: --hypothesis-profile=thorough
CHECKS_TOO_STRICT_HERE = [HealthCheck.too_slow, HealthCheck.data_too_large]
for name, examples in (("ordinary", 50), ("thorough", 500)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, derandomize=True, suppress_health_check=CHECKS_TOO_STRICT_HERE
    )
settings.load_profile("ordinary")


@pytest.fixture
def libraries_as_before(monkeypatch):
    """Commands quieten libraries, and evaluating sets a variable; other tests want neither."""
    from transformers.utils import logging as of_transformers

    monkeypatch.delenv("TITANS_EVAL_DATA", raising=False)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    level = of_transformers.get_verbosity()
    yield
    of_transformers.set_verbosity(level)
    of_transformers.enable_progress_bar()
    logging.getLogger("lm_eval").setLevel(logging.NOTSET)
