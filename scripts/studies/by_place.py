"""Losses by place in the text: `titans_hf.studies.by_place`."""

from titans_hf.studies.by_place import main

if __name__ == "__main__":
    main()
