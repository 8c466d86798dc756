"""Make the text and the tokenizer of the small models: `titans_hf.train.small_text`."""

from titans_hf.train.small_text import main

if __name__ == "__main__":
    main()
