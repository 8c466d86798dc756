"""Equal-effort comparison on text: `titans_hf.studies.learning`."""

from titans_hf.studies.learning import main

if __name__ == "__main__":
    main()
