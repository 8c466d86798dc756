"""The model card of a forecaster, from its folder: what it is, how to use it, and the errors that were measured.

Records of `titans eval-series --out` in the folder give the results.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .loading import load_config

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

BODY = """---
{data}
---

# {name}

Titans ("Learning to Memorize at Test Time", [arXiv 2501.00663](https://arxiv.org/abs/2501.00663)) as a forecaster: the
neural memory reads {what}, normalised by their own look-back, and a linear layer forecasts.
No official code or weights exist; this is titans-hf's own implementation.

## Model

| | |
|---|---|
{rows}

## Use

The repository carries its own code. Where titans-hf is installed, `import titans_hf` stands for `trust_remote_code`.

```python
import torch
from transformers import AutoModelForTimeSeriesPrediction

model = AutoModelForTimeSeriesPrediction.from_pretrained("{repo}", trust_remote_code=True).eval()
past = torch.randn(1, {context}, {channels})  # batch, time, channels; NaN where a value is missing
with torch.no_grad():
    forecast = model(past_values=past).prediction_outputs  # [1, {horizon}, {channels}]
```

## Results

{results}

## Limits

- It forecasts {horizon} time steps at once, from {context}, and knows neither dates nor holidays.
- Errors are of values scaled by the training rows, over all channels, and every window of the split counts.
"""


def is_forecaster(folder: Path) -> bool:
    """Whether the folder's configuration is that of a Titans model of time series."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("model_type") == "titans_time_series"


def forecaster_card(folder: Path, name: str, repo_id: str | None = None) -> "ModelCard":
    """The card of a forecaster's folder."""
    from huggingface_hub import ModelCard, ModelCardData

    from ..configuration_series import TitansTimeSeriesConfig
    from .cards import LIBRARY, LICENSE, TAGS

    config = load_config(str(folder), TitansTimeSeriesConfig)
    data = ModelCardData(
        library_name=LIBRARY,
        license=LICENSE,
        pipeline_tag="time-series-forecasting",
        tags=[*TAGS, "time-series"],
    )
    patches = config.series_tokens == "patch"
    rows = {
        "variant": config.variant,
        "layers, width": f"{config.num_hidden_layers}, {config.hidden_size}",
        "memory": f"depth {config.memory_depth}, {config.memory_num_heads} heads",
        "look-back, horizon": f"{config.context_length}, {config.prediction_length} time steps",
        "channels": config.num_input_channels,
        "tokens": f"patches of {config.patch_length}, every {config.patch_stride}" if patches else "whole series",
    }
    text = BODY.format(
        data=data.to_yaml(),
        name=name,
        what="patches of each series" if patches else "all series as tokens",
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        repo=repo_id or name,
        context=config.context_length,
        horizon=config.prediction_length,
        channels=config.num_input_channels,
        results=results(folder),
    )
    return ModelCard(text)


def results(folder: Path) -> str:
    """The records in a folder as a table."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("suite") == "series" and found["memory"] == "on":
            what = f"{found['data']}, {found['split']}, {found['windows']:,} windows"
            lines.append(f"| {what} | {found['mse']:.4f} | {found['mae']:.4f} | `{found['command']}` |")
    if not lines:
        return "No evaluation was given when this card was made."
    return "\n".join(["| data | MSE | MAE | command |", "|---|---:|---:|---|", *lines])
