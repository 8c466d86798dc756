"""Time the memory's implementations side by side: `titans_hf.bench.kernel_speed`."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which transformers does

from titans_hf.bench.kernel_speed import main  # noqa: E402

if __name__ == "__main__":
    main()
