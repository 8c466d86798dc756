"""Stream hard input through every variant: `titans_hf.studies.stability`."""

from titans_hf.studies.stability import main

if __name__ == "__main__":
    main()
