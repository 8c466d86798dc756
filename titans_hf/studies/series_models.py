"""The forecasters that are compared: Titans, DLinear (ours), and transformers' PatchTST.

All of them take scaled values [B, L, C] and return a forecast [B, F, C]. NaN marks what is missing.
"""

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

from .. import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

MODELS = ("titans", "dlinear", "patchtst")
TREND = 25  # time steps of DLinear's moving average
DEFAULTS = {
    "titans": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_persistent_tokens": 0,
        "memory_chunk_size": 6,
        "patch_length": 16,
        "patch_stride": 16,
        "embedding_dropout": 0.1,
        "head_dropout": 0.3,
    },
    "patchtst": {  # the sizes that its authors took for ETTh
        "patch_length": 16,
        "patch_stride": 8,
        "d_model": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "ffn_dim": 128,
        "ff_dropout": 0.3,
        "path_dropout": 0.3,
        "head_dropout": 0.0,
        "pooling_type": None,
    },
    "dlinear": {},
}


class DLinear(nn.Module):
    """Two linear layers over time, for a moving average and for the rest (arXiv 2205.13504). Channels share them."""

    def __init__(self, look_back: int, horizon: int):
        super().__init__()
        self.trend = nn.Linear(look_back, horizon)
        self.rest = nn.Linear(look_back, horizon)

    def forward(self, values: Tensor) -> Tensor:
        x = values.nan_to_num(0.0).transpose(1, 2)
        trend = F.avg_pool1d(F.pad(x, (TREND // 2, TREND // 2), mode="replicate"), TREND, stride=1)
        return (self.trend(trend) + self.rest(x - trend)).transpose(1, 2)


class Forecaster(nn.Module):
    """A model of transformers as a function from values to a forecast."""

    def __init__(self, model: nn.Module, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, values: Tensor) -> Tensor:
        missing = values.isnan()
        found = self.model(past_values=values.masked_fill(missing, 0.0), past_observed_mask=~missing, **self.options)
        return found.prediction_outputs


def build(model: str, fields: str, look_back: int, horizon: int, channels: int, seed: int) -> nn.Module:
    """The model with random weights; `fields`, as JSON, are those of its configuration."""
    torch.manual_seed(seed)
    sizes = {"context_length": look_back, "prediction_length": horizon, "num_input_channels": channels}
    own = json.loads(fields)
    if model == "titans":
        return Forecaster(TitansForTimeSeriesPrediction(TitansTimeSeriesConfig(**sizes, **own)))
    if model == "patchtst":
        return Forecaster(PatchTSTForPrediction(PatchTSTConfig(**sizes, **own)))
    if own:
        raise ValueError(f"`dlinear` has no field {next(iter(own))!r}: leave it out")
    return DLinear(look_back, horizon)
