"""Pre-train a model by a recipe: `titans_hf.train.pretrain`."""

from titans_hf.train.pretrain import main

if __name__ == "__main__":
    main()
