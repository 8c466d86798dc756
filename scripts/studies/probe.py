"""What a trained memory does with a text: `titans_hf.studies.probe`."""

from titans_hf.studies.probe import main

if __name__ == "__main__":
    main()
