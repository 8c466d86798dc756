"""Write the model cards: of every preset, and of every trained model with a folder of records.

    python scripts/make_cards.py

A folder `model_cards/records/<name>/` with `config.json`, and if there are any with `training.json`, `about.json` and
records of `titans eval` (`table1.json`, `table1-off.json`, ...), becomes `model_cards/<name>.md`. No weights are
needed.
"""

import argparse
from pathlib import Path

from titans_hf.evals.tables import write_text
from titans_hf.hub.cards import preset_card, preset_names, read_model, trained_card

HOME = Path(__file__).parent.parent / "model_cards"


def make_cards(records: Path) -> dict[str, str]:
    """All cards, by name."""
    folders = sorted(path.parent for path in records.glob("*/config.json"))
    cards = {name: preset_card(name) for name in preset_names()}
    cards |= {folder.name: trained_card(read_model(folder)) for folder in folders}
    return {name: str(card) for name, card in cards.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HOME / "records", help="folders of trained models")
    parser.add_argument("--out", type=Path, default=HOME, help="where the cards go")
    args = parser.parse_args(argv)
    cards = make_cards(args.records)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in cards.items():
        write_text(args.out / f"{name}.md", text)
    print(f"{len(cards)} cards in {args.out}")


if __name__ == "__main__":
    main()
