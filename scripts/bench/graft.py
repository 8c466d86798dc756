"""Time a graft's decoding and weigh its cache beside its source: `titans_hf.bench.graft`."""

from titans_hf.bench.graft import main

if __name__ == "__main__":
    main()
