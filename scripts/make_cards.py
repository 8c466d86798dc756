"""Write the model cards: `titans_hf.hub.make_cards`."""

from titans_hf.hub.make_cards import main

if __name__ == "__main__":
    main()
