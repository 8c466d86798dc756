"""Write the model cards: of every preset, and of every trained model with a folder of records.

    python scripts/make_cards.py

A folder `model_cards/records/<name>/` with `config.json`, and if there are any with `training.json`, `about.json` and
records of `titans eval` (`table1.json`, `table1-off.json`, ...), becomes `model_cards/<name>.md`. No weights are
needed.
"""

import argparse
from pathlib import Path

from ..configuration_titans import PRESETS
from ..records.files import write_text
from .cards import preset_card, read_model, trained_card

HOME = Path(__file__).parents[2] / "model_cards"


def make_cards(records: Path) -> dict[str, str]:
    """All cards, by name."""
    folders = sorted(path.parent for path in records.glob("*/config.json"))
    cards = {name: preset_card(name) for name in PRESETS}
    cards |= {folder.name: trained_card(read_model(folder)) for folder in folders}
    return {name: str(card) for name, card in cards.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HOME / "records", help="folders of trained models")
    parser.add_argument("--out", type=Path, default=HOME, help="where the cards go")
    args = parser.parse_args(argv)
    cards = make_cards(args.records)
    for name, text in cards.items():
        write_text(args.out / f"{name}.md", text)
    print(f"{len(cards)} cards in {args.out}")
