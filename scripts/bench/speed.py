"""Time the memory layer and whole models beside their peers: `titans_hf.bench.speed`."""

from titans_hf.bench.speed import main

if __name__ == "__main__":
    main()
