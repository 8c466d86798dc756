"""A tour of titans-hf in about four minutes: `titans_hf.studies.tour`."""

from titans_hf.studies.tour import main

if __name__ == "__main__":
    main()
