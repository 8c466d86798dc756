"""Classifiers of equal size for DNA: Titans, a Transformer with full attention, and a convolutional network.

All have the width, depth and heads of `SIZES`; the feed-forward width, for the CNN its number of filters, makes up for
what a mixer holds. All take token ids and a mask, and return the logits of transformers' classifiers.

Axes: B rows, T letters, W width, F filters.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from .. import TitansForSequenceClassification
from ..configuration_titans import VARIANTS, TitansConfig
from ..dna import dna_tokenizer
from .families import fitted_width, language_model, titans_config

MODELS = (*VARIANTS, "llama", "cnn")
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "window": 64}
PARAMETERS = 440_000
KERNEL = 11  # letters that a filter of the CNN sees


class MeanPooled(nn.Module):
    """A linear classifier on the mean of a model's hidden states over the real tokens of a row."""

    def __init__(self, encoder: PreTrainedModel, classes: int):
        super().__init__()
        self.encoder = encoder
        self.score = nn.Linear(encoder.config.hidden_size, classes, bias=False)
        nn.init.normal_(self.score.weight, std=encoder.config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SequenceClassifierOutput:
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        real = _real(input_ids, attention_mask)
        return SequenceClassifierOutput(logits=self.score((states * real).sum(1) / real.sum(1)))


class ConvolutionalBlock(nn.Module):
    """LayerNorm, filters over `KERNEL` letters, GELU, back to the width, residual."""

    def __init__(self, width: int, filters: int, dilation: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.filters = nn.Conv1d(width, filters, KERNEL, padding="same", dilation=dilation)
        self.out = nn.Linear(filters, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        found = self.filters((self.norm(x) * real).transpose(1, 2)).transpose(1, 2)  # [B, T, F]
        return (x + self.out(nn.functional.gelu(found))) * real


class DnaCnn(nn.Module):
    """A convolutional network: what the filters find best and on average anywhere in the row classifies it.

    Each block's filters are spread four times as far as those of the one before. Padding is zero behind every layer, as
    beyond the ends of a row: it changes nothing.
    """

    def __init__(self, width: int, filters: int, layers: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(len(dna_tokenizer()), width)
        self.blocks = nn.ModuleList(ConvolutionalBlock(width, filters, 4**layer) for layer in range(layers))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(2 * width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SequenceClassifierOutput:
        real = _real(input_ids, attention_mask)
        x = self.embedding(input_ids) * real
        for block in self.blocks:
            x = block(x, real)
        x = self.norm(x)
        most = x.masked_fill(real == 0, float("-inf")).amax(1)
        mean = (x * real).sum(1) / real.sum(1)
        return SequenceClassifierOutput(logits=self.score(torch.cat((most, mean), dim=1)))


def build(model: str, classes: int, seed: int) -> nn.Module:
    """The model of that name with `PARAMETERS` parameters, within the step of its feed-forward width."""
    width = fitted_width(lambda width: _count(model, classes, width), PARAMETERS)
    torch.manual_seed(seed)
    return _model(model, classes, width)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _count(model: str, classes: int, width: int) -> int:
    with torch.device("meta"):
        return parameters(_model(model, classes, width))


def _model(model: str, classes: int, width: int) -> nn.Module:
    tokenizer, hidden = dna_tokenizer(), SIZES["hidden_size"]
    if model == "cnn":
        return DnaCnn(hidden, width, SIZES["num_hidden_layers"], classes)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "intermediate_size": width}
    if model in VARIANTS:
        tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
        head = {"num_labels": classes, "classifier_pooling": "mean", "eos_token_id": tokenizer.eos_token_id}
        return TitansForSequenceClassification(titans_config(model, sizes, {**tokens, **head}))
    quiet = {"embedding_range": hidden**-0.5, "mixer_scale": TitansConfig.mixer_initializer_scale}
    return MeanPooled(language_model(model, sizes, quiet).base_model, classes)


def _real(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[B, T, 1]: 1.0 at letters, 0.0 at padding."""
    kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return kept[..., None].float()
