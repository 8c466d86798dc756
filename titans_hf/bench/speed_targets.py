"""The targets of `speed`: one line each, with the worst case that was measured."""

from collections import defaultdict


def targets(rows: list[dict]) -> list[dict]:
    """The targets that the rows have figures for. Rates and times are ratios of the same run."""
    decode = [row for row in rows if row["section"] == "decode" and row["batch"] == 1]
    training = [row for row in rows if row["section"] == "training"]
    forward, both = "forward", "forward and backward"
    theirs, products = "titans-pytorch", "large products"
    found = [
        at_least(5, "layer, forward: times as fast as titans-pytorch's", over_ours(rows, forward, theirs)),
        at_least(4, "layer, forward and backward: times as fast", over_ours(rows, both, theirs)),
        at_most(2.5, "layer, forward: times as long as large products", ours_over(rows, forward, products)),
        at_most(2.5, "layer, forward and backward: times as long", ours_over(rows, both, products)),
        at_most(1 / 4, "layer, peak memory: part of titans-pytorch's", ours_over(rows, "peak memory", theirs)),
        at_least(5, "training: times titans-pytorch's rate", ratios(training, "times_titans_pytorch")),
        at_least(1, "training: times Mamba2's rate", ratios(training, "times_mamba2")),
        at_least(8, "decode: times titans-pytorch's rate", ratios(decode, "times_titans_pytorch")),
        at_least(1, "decode: times Mamba2's rate", ratios(decode, "times_mamba2")),
        at_least(0.95, "decode: rate after the longest context over 4K's", late_over_early(decode)),
        at_most(1, "decode: largest cache over the smallest", spread_of_bytes(decode)),
    ]
    return [line for line in found if line]


def at_least(bound: float, target: str, found: dict[str, float]) -> dict:
    return verdict(target, f"at least {bound:g}", min, found, lambda worst: worst >= bound)


def at_most(bound: float, target: str, found: dict[str, float]) -> dict:
    return verdict(target, f"at most {bound:g}", max, found, lambda worst: worst <= bound)


def verdict(target: str, wanted: str, worst_of, found: dict[str, float], holds) -> dict:
    """The target's line, empty where nothing was measured."""
    if not found:
        return {}
    where = worst_of(found, key=found.get)
    worst = found[where]
    return dict(target=target, wanted=wanted, worst=round(worst, 3), where=where, reached=bool(holds(worst)))


def ours_over(rows: list[dict], measured: str, peer: str) -> dict[str, float]:
    """Our layer's time or memory over a peer's, by case."""
    cases = defaultdict(dict)
    for row in rows:
        if row["section"] == "layer" and row["measured"] == measured:
            name = f"{row['tokens']:,} tokens, expansion {row['expansion']}"
            cases[name][row["implementation"]] = row.get("milliseconds", row.get("mebibytes"))
    return {name: case["titans-hf"] / case[peer] for name, case in cases.items() if peer in case}


def over_ours(rows: list[dict], measured: str, peer: str) -> dict[str, float]:
    return {name: 1 / ratio for name, ratio in ours_over(rows, measured, peer).items()}


def ratios(rows: list[dict], column: str) -> dict[str, float]:
    """A column of our models' rows, by variant and context."""
    return {
        row["implementation"] + (f" after {row['context']:,}" if "context" in row else ""): row[column]
        for row in rows
        if row["implementation"].startswith("titans-hf") and column in row
    }


def ours_by_variant(rows: list[dict], column: str) -> dict[str, dict[int, float]]:
    """A column of our models' rows as {variant: {context: value}}."""
    found = defaultdict(dict)
    for row in rows:
        if row["implementation"].startswith("titans-hf"):
            found[row["implementation"]][row["context"]] = row[column]
    return found


def late_over_early(rows: list[dict]) -> dict[str, float]:
    """The rate after the longest context over that after 4,096 tokens, where both were measured."""
    found = ours_by_variant(rows, "tokens_per_second")
    found = {name: rates for name, rates in found.items() if 4096 in rates and max(rates) > 4096}
    return {name: rates[max(rates)] / rates[4096] for name, rates in found.items()}


def spread_of_bytes(rows: list[dict]) -> dict[str, float]:
    found = ours_by_variant(rows, "cache_bytes")
    return {name: max(sizes.values()) / min(sizes.values()) for name, sizes in found.items()}


def print_targets(lines: list[dict]) -> None:
    for line in lines:
        said = "reached" if line["reached"] else "missed"
        print(f"{line['target']:50}{line['wanted']:15}{line['worst']:>9.3f}  {said:9}{line['where']}")
