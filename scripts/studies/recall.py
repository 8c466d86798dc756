"""Recall of key-value pairs beyond the attention window: `titans_hf.studies.recall`."""

from titans_hf.studies.recall import main

if __name__ == "__main__":
    main()
