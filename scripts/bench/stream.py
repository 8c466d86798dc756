"""Read two million tokens at constant memory and speed: `titans_hf.bench.stream`."""

from titans_hf.bench.stream import main

if __name__ == "__main__":
    main()
