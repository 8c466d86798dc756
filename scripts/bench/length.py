"""Time decoding and weigh the cache after growing lengths: `titans_hf.bench.length`."""

from titans_hf.bench.length import main

if __name__ == "__main__":
    main()
