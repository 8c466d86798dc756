"""One thread per process: the tensors are tiny, and the suite runs in parallel. Kernels run in Triton's interpreter."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which transformers does

torch.set_num_threads(1)

settings.register_profile(
    "titans", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("titans")
