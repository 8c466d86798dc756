"""Count what the kernels compute and move: `titans_hf.bench.kernel_roofline`."""

from titans_hf.bench.kernel_roofline import main

if __name__ == "__main__":
    main()
