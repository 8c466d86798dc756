"""The plots of `speed`: the memory layer, models reading, models decoding."""

from pathlib import Path

from ..records.files import plots

COLOURS = {
    "titans-hf mac": "tab:blue",
    "titans-hf mag": "tab:cyan",
    "titans-hf mal": "tab:purple",
    "titans-hf lmm": "tab:pink",
    "titans-pytorch mac": "tab:orange",
    "Mamba2": "tab:green",
    "Qwen3-Next": "tab:olive",
    "Llama": "tab:gray",
}


def draw(rows: list[dict], record: Path) -> None:
    """One plot for each kind of rows: `<record>.png`, `<record>-models.png`, `<record>-decode.png`."""
    by_section = {section: [row for row in rows if row["section"] == section] for section in ("layer", "decode")}
    reading = [row for row in rows if row["section"] in ("training", "prefill")]
    if by_section["layer"]:
        draw_layer(by_section["layer"], record.with_suffix(".png"))
    if reading:
        draw_reading(reading, record.with_name(f"{record.stem}-models.png"))
    if by_section["decode"]:
        draw_decode(by_section["decode"], record.with_name(f"{record.stem}-decode.png"))


def draw_layer(rows: list[dict], path: Path) -> None:
    plt = plots()
    names = ("titans-pytorch", "large products")
    groups = list(dict.fromkeys((row["measured"], row["tokens"], row["expansion"]) for row in rows))
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(groups) + 1.5), layout="constrained")
    for offset, name in zip((-0.2, 0.2), names, strict=True):
        for place, group in enumerate(groups):
            mine = [r for r in rows if (r["measured"], r["tokens"], r["expansion"]) == group]
            for row in (r for r in mine if r["implementation"] == name):
                colour = "tab:orange" if name == "titans-pytorch" else "tab:gray"
                axis.barh(place + offset, row["times_ours"], 0.36, color=colour, label=None if place else name)
                axis.text(row["times_ours"], place + offset, f" {row['times_ours']:.2f}", va="center", fontsize=8)
    axis.axvline(1, color="tab:blue", label="titans-hf = 1")
    labels = [f"{measured}, {tokens:,} tokens, expansion {expansion}" for measured, tokens, expansion in groups]
    axis.set_yticks(range(len(groups)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set(
        xlabel="time (or memory) as a multiple of titans-hf's", title="The memory layer, heads of 64, chunks of 64"
    )
    axis.margins(x=0.08)
    axis.legend()
    figure.savefig(path, dpi=120)


def draw_reading(rows: list[dict], path: Path) -> None:
    """Tokens per second as bars, a panel for training and one for prefill."""
    plt = plots()
    sections = list(dict.fromkeys(row["section"] for row in rows))
    figure, axes = plt.subplots(1, len(sections), figsize=(5 * len(sections), 3.6), layout="constrained", squeeze=False)
    for axis, section in zip(axes[0], sections, strict=True):
        mine = [row for row in rows if row["section"] == section]
        rates = [row["tokens_per_second"] for row in mine]
        names = [row["implementation"] for row in mine]
        bars = axis.barh(names, rates, color=[COLOURS[name] for name in names])
        axis.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3, fontsize=8)
        axis.margins(x=0.18)
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.invert_yaxis()
        axis.set(xlabel="tokens per second", title=f"{section}, 1 x {mine[0]['tokens']:,} tokens")
    figure.suptitle(f"Models of {rows[0]['parameters'] / 1e6:.1f} million parameters, within 5 %", fontsize=11)
    figure.savefig(path, dpi=120)


def short(tokens: int) -> str:
    """1024 as 1K, 2**20 as 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def draw_decode(rows: list[dict], path: Path) -> None:
    """Tokens per second against the context, a panel for each batch size."""
    plt = plots()
    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(5 * len(batches) + 2, 4), layout="constrained", squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        for name, colour in COLOURS.items():
            mine = [row for row in rows if (row["implementation"], row["batch"]) == (name, batch)]
            contexts, rates = [row["context"] for row in mine], [row["tokens_per_second"] for row in mine]
            if mine:
                style = "o-" if name.startswith("titans-hf") else "s--"
                axis.plot(contexts, rates, style, color=colour, label=name, markersize=4)
        axis.set(xlabel="tokens read before", ylabel="tokens per second", title=f"decode, batch of {batch}")
        marks = sorted({row["context"] for row in rows})
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(marks, [short(mark) for mark in marks], minor=False)
        axis.set_xticks([], minor=True)
        for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            formatter("{x:,.0f}")
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
