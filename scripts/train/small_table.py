"""Train and measure the small models of Table 1: `titans_hf.train.small_table`."""

from titans_hf.train.small_table import main

if __name__ == "__main__":
    main()
