"""Compile the kernels for GPUs that are not here: `titans_hf.bench.kernel_resources`."""

from titans_hf.bench.kernel_resources import main

if __name__ == "__main__":
    main()
