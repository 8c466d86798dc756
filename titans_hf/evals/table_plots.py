"""A table of the paper as a picture: one panel per column, the paper's rows as dots by model size, ours as stars."""

from pathlib import Path

from ..records.files import plots
from ..snapshots import whole_file
from .paper_tables import Column, Row, Table
from .tables import OURS, OurRow, chance_levels, groups_with, heading

COLOURS = {
    "LMM": "#009e73",
    "MAC": "#d55e00",
    "MAG": "#0072b2",
    "MAL": "#cc79a7",
}  # a palette for all kinds of colour vision
OTHERS = "#b5b5b5"
CHANCE_LINE = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
ACROSS = 4  # panels


def variant(row: Row) -> str | None:
    """Which of the four variants a row is; the name of our row may contain any word."""
    said = row.variant if isinstance(row, OurRow) else row.model
    return next((name for name in COLOURS if name in said), None)


def save_png(path: Path, table: Table, records: list[dict]) -> None:
    """Draw the table with the rows of our records."""
    plt = plots()
    groups, levels = groups_with(table, records), chance_levels(table)
    across = min(ACROSS, len(table.columns))
    down = -(-len(table.columns) // across)
    sheet, panels = plt.subplots(down, across, figsize=(3.4 * across, 2.7 * down + 0.6), squeeze=False)
    for panel, column in zip(panels.flat, table.columns):
        draw_panel(panel, column, groups)
        if column.key in levels:
            panel.axhline(levels[column.key], **CHANCE_LINE, zorder=0)
    for panel in list(panels.flat)[len(table.columns) :]:
        panel.axis("off")
    sheet.suptitle(f"Table {table.number}: {table.title}")
    sheet.legend(handles=legend(OURS in groups, bool(levels)), loc="lower center", ncols=7, frameon=False)
    sheet.tight_layout(rect=(0, 0.35 / sheet.get_figheight(), 1, 1))
    with whole_file(path) as temporary:
        sheet.savefig(temporary, format="png", dpi=130)
    plt.close(sheet)


def draw_panel(panel, column: Column, groups: dict[str, list[Row]]) -> None:
    for place, rows in enumerate(groups.values()):
        for row in rows:
            if column.key in row.values:
                draw_row(panel, place, row, column.key)
    panel.set_title(heading(column), fontsize=9)
    panel.set_xticks(range(len(groups)), [name.split(" ")[0] or "paper" for name in groups], fontsize=8)
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.tick_params(axis="y", labelsize=8)
    panel.margins(y=0.1)
    if column.unit == "ppl":
        panel.set_yscale("log")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def draw_row(panel, place: int, row: Row, key: str) -> None:
    """A dot in its variant's own lane, so that equal figures stay apart; the paper's other models behind them."""
    name, lanes = variant(row), [None, *COLOURS]
    beside = name is not None or isinstance(row, OurRow)
    lane = place + (0.12 * (lanes.index(name) - 2.5) if beside else 0.0)
    colour = OTHERS if name is None else COLOURS[name]
    if isinstance(row, OurRow):
        panel.errorbar(lane, row.values[key], row.errors.get(key), fmt="*", markersize=11, color=colour, capsize=2)
    else:
        panel.plot(lane, row.values[key], "o", markersize=3 if name is None else 5, color=colour, zorder=1 + bool(name))


def legend(with_ours: bool, with_chance: bool) -> list:
    from matplotlib.lines import Line2D

    def sign(mark: str, colour: str, label: str) -> Line2D:
        return Line2D([], [], marker=mark, linestyle="", color=colour, label=label)

    titans = [sign("o", colour, f"Titans ({name})") for name, colour in COLOURS.items()]
    ours = [sign("*", "black", "titans-hf, one standard error")] if with_ours else []
    chance = [Line2D([], [], **CHANCE_LINE, label="chance")] if with_chance else []
    return [*titans, sign("o", OTHERS, "other models"), *ours, *chance]
