"""Multi-query associative recall: `titans_hf.studies.mqar`."""

from titans_hf.studies.mqar import main

if __name__ == "__main__":
    main()
