"""Views of a `SurpriseTrace`: in the terminal (rich), as HTML, and as a plot (matplotlib).

All three show relative surprise, `|M(k) - v|^2 / |v|^2`: 0 where the memory predicted the token, 1 where it knew
nothing, more where it was wrong. The colours range from the 2nd to the 98th percentile of the text, and to at most 2,
so that one diverged head does not hide the others. The legend gives the range.
"""

import html
from collections.abc import Iterator

import torch
from torch import Tensor

PALETTE = ((255, 255, 229), (254, 217, 118), (253, 141, 60), (227, 26, 28), (128, 0, 38))  # little to much surprise
LEGEND = "little surprise {low:.2f} {bar} {high:.2f} much   |M(k) - v|\N{SUPERSCRIPT TWO} / |v|\N{SUPERSCRIPT TWO}"
MAX_COLOURED = 2.0  # relative surprise beyond which the colour stays the same
NOTEBOOK_TOKENS, PAGE_TOKENS, TERMINAL_TOKENS = 2_000, 20_000, 1_500
COLUMNS = 1_200  # points along a plot; longer texts are averaged in bins
LABELLED = 120  # longest text whose tokens label the axis of a plot


def needed(package: str, error: ImportError) -> ImportError:
    return ImportError(f'this view needs {package}: pip install "titans-hf[viz]"', name=error.name)


def span(values: Tensor) -> tuple[float, float]:
    """The values at which the colours begin and end."""
    low, high = torch.quantile(values[:100_000].double(), torch.tensor([0.02, 0.98], dtype=torch.float64)).tolist()
    return low, max(min(high, MAX_COLOURED), low + 1e-6)


def shade(value: float, low: float, high: float) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The background colour of a value, and black or white for the text on it."""
    place = min(max((value - low) / (high - low), 0.0), 1.0) * (len(PALETTE) - 1)
    index = min(int(place), len(PALETTE) - 2)
    pair = zip(PALETTE[index], PALETTE[index + 1], strict=True)
    colour = tuple(round(a + (place - index) * (b - a)) for a, b in pair)
    brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return colour, (0, 0, 0) if brightness > 140 else (255, 255, 255)


def css(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def shown_tokens(trace, limit: int) -> Iterator[tuple[str, float]]:
    """The first `limit` tokens of a trace as (text, relative surprise)."""
    surprise = trace.per_token()[:limit].tolist()
    texts = (trace.tokens or ["\N{BLACK SQUARE}"] * len(trace))[:limit]
    return zip(texts, surprise, strict=True)


def layer_rows(trace) -> list[tuple[str, ...]]:
    """One row per layer: mean surprise in the first and last tenth of the text, mean gates, first and last norm."""
    tenth = max(1, len(trace) // 10)
    rows = []
    for layer in range(trace.surprise.shape[0]):
        surprise, norm = trace.per_token(layer), trace.norm[layer].mean(0)
        gates = (getattr(trace, name)[layer].mean().item() for name in ("theta", "eta", "alpha"))
        ends = (surprise[:tenth].mean().item(), surprise[-tenth:].mean().item())
        sizes = (norm[0].item(), norm[-1].item())
        rows.append((str(layer), *map("{:.3f}".format, (*ends, *gates)), *map("{:.2f}".format, sizes)))
    return rows


HEADINGS = ("layer", "surprise, first tenth", "last tenth", "theta", "eta", "alpha", "|M|, first", "last")


def left_out(trace, limit: int) -> str:
    return f"The first {limit:,} of {len(trace):,} tokens." if len(trace) > limit else ""


# Terminal


def terminal():
    try:
        from rich.console import Console
    except ImportError as error:
        raise needed("rich", error) from error
    return Console()


def terminal_view(trace, limit: int = TERMINAL_TOKENS):
    """The text on a coloured background, with a legend and a table by layer."""
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise needed("rich", error) from error

    def painted(text: str, value: float) -> tuple[str, str]:
        colour, ink = shade(value, low, high)
        return text, f"{css(ink)} on {css(colour)}"

    low, high = span(trace.per_token())
    before, after = LEGEND.format(low=low, high=high, bar="{bar}").split("{bar}")
    steps = [painted("  ", low + (high - low) * i / 11) for i in range(12)]
    text = Text.assemble(*(painted(text, value) for text, value in shown_tokens(trace, limit)))
    table = Table(*HEADINGS, title="by layer (means over heads)", title_justify="left")
    for row in layer_rows(trace):
        table.add_row(*row)
    return Group(Text.assemble(before, *steps, after), Text(), text, Text(left_out(trace, limit)), table)


# HTML


def html_view(trace, limit: int = NOTEBOOK_TOKENS) -> str:
    """The text on a coloured background, each token with its numbers in a tooltip."""
    low, high = span(trace.per_token())
    gradient = ", ".join(map(css, PALETTE))
    bar = (
        f'<span style="display:inline-block;width:12em;height:1em;background:linear-gradient(90deg,{gradient})"></span>'
    )
    legend = html.escape(LEGEND).format(low=low, high=high, bar=bar)
    notes = tooltips(trace[:limit])
    spans = []
    for (text, value), note in zip(shown_tokens(trace, limit), notes, strict=True):
        ground, ink = map(css, shade(value, low, high))
        style = f"background:{ground};color:{ink}"
        spans.append(f'<span style="{style}" title="{html.escape(note)}">{html.escape(text)}</span>')
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in layer_rows(trace))
    return (
        f'<div class="titans-surprise" style="font-family:sans-serif"><p>{legend}</p>'
        f'<p style="white-space:pre-wrap;line-height:1.7;font-family:monospace">{"".join(spans)}</p>'
        f"<p>{left_out(trace, limit)}</p>"
        f'<table style="text-align:right;border-spacing:1em 0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def tooltips(trace) -> list[str]:
    """The tooltip of each token: surprise, by layer too, gates and norm."""
    total = trace.per_token().tolist()
    layers = torch.stack([trace.per_token(layer) for layer in range(trace.surprise.shape[0])], dim=1).tolist()
    means = zip(*(getattr(trace, name).mean((0, 1)).tolist() for name in ("theta", "eta", "alpha", "norm")))
    return [
        f"token {i}: surprise {total[i]:.3f} (by layer: {' '.join(f'{x:.2f}' for x in layers[i])})\n"
        f"theta {theta:.3g}, eta {eta:.3g}, alpha {alpha:.3g}, |M| {norm:.3g}"
        for i, (theta, eta, alpha, norm) in enumerate(means)
    ]


def html_page(trace, title: str) -> str:
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
        f'<body style="max-width:60em;margin:2em auto"><h1 style="font-family:sans-serif">{html.escape(title)}</h1>'
        f"{html_view(trace, PAGE_TOKENS)}</body></html>\n"
    )


# Plot


def figure(trace, title: str):
    """A plot over the tokens: surprise, surprise by layer and head, gates, memory norm."""
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needed("matplotlib", error) from error
    heads = trace.relative().flatten(0, 1)  # [L H, T]
    drawing = Figure(figsize=(12, 8 + min(6.0, 0.12 * len(heads))), dpi=110, layout="constrained")
    top, heat, gates, size = drawing.subplots(4, 1, sharex=True, height_ratios=(2, 3 + 0.1 * len(heads), 1.5, 1.5))
    drawing.suptitle(title)
    bins = max(1, -(-len(trace) // COLUMNS))
    across = (torch.arange(0, len(trace), bins) + (bins - 1) / 2).numpy()

    draw_surprise(top, across, binned(trace.per_token(), bins))
    palette = LinearSegmentedColormap.from_list("surprise", [css(colour) for colour in PALETTE])
    low, high = span(heads.flatten())
    image = heat.imshow(
        binned(heads, bins).numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=palette,
        vmin=low,
        vmax=high,
        extent=(-0.5, len(trace) - 0.5, len(heads) - 0.5, -0.5),
    )
    drawing.colorbar(image, ax=heat, label="relative surprise", extend="both", pad=0.01)
    label_heads(heat, *trace.surprise.shape[:2])
    for name, colour in (("theta", "tab:blue"), ("eta", "tab:green"), ("alpha", "tab:red")):
        meaning = {"theta": "theta, step size", "eta": "eta, momentum decay", "alpha": "alpha, forget gate"}[name]
        gates.plot(across, binned(getattr(trace, name).mean((0, 1)), bins).numpy(), color=colour, lw=1, label=meaning)
    gates.set_yscale("log")
    gates.set_ylabel("gates\n(mean)")
    for layer, norm in enumerate(trace.norm.mean(1)):
        size.plot(across, binned(norm, bins).numpy(), lw=1.2, label=f"layer {layer}")
    size.set_ylabel("|M|\n(mean of heads)")
    for axes in (top, gates, size):
        axes.margins(y=0.3)
        axes.legend(loc="lower right" if axes is top else "upper right", ncols=8, fontsize=8, framealpha=0.8)
        axes.grid(alpha=0.3, axis="y")
    top.set_ylim(0, max(1.2, min(top.get_ylim()[1], 1.5 * MAX_COLOURED)))
    size.set_ylim(bottom=0)
    label_tokens(size, trace)
    return drawing


def binned(x: Tensor, width: int) -> Tensor:
    """Means over bins of `width` along the last axis; the last bin may be shorter."""
    return torch.stack([part.mean(-1) for part in x.split(width, dim=-1)], dim=-1)


def draw_surprise(axes, across, surprise: Tensor) -> None:
    axes.plot(across, surprise.numpy(), color="tab:orange", lw=0.7, alpha=0.7, label="surprise")
    window = max(1, len(surprise) // 40)
    if window > 2:
        smooth = surprise.unfold(0, window, 1).mean(-1).numpy()
        axes.plot(across[window - 1 :], smooth, color="darkred", lw=1.6, label=f"mean of last {window} points")
    axes.axhline(1.0, color="grey", lw=0.8, ls="--", label="nothing known")
    axes.set_ylabel("relative surprise\n$|M(k) - v|^2 / |v|^2$")


def label_heads(axes, layers: int, heads: int) -> None:
    axes.set_yticks([layer * heads + (heads - 1) / 2 for layer in range(layers)], [f"layer {i}" for i in range(layers)])
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="black", lw=0.6)
    axes.set_ylabel(f"{heads} heads each")


def label_tokens(axes, trace) -> None:
    axes.set_xlim(-0.5, len(trace) - 0.5)
    if trace.tokens is None or len(trace) > LABELLED:
        axes.set_xlabel("token")
        return
    plain = [text.replace("\n", "\N{RETURN SYMBOL}").replace("$", r"\$") for text in trace.tokens]
    axes.set_xticks(range(len(trace)), plain, rotation=90, family="monospace", fontsize=min(8, 700 / len(trace)))
