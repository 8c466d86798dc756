"""Titans for time series (Table 3): the memory takes the place of the sequence layer in a forecaster of patches.

Every series is normalised by what was observed of its look-back, cut into patches, read by a Titans model, and forecast
by one linear layer from the last patches' outputs.

Axis letters: B batch, L time steps read, C channels, N patches of a look-back, P patch length, F forecast steps.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .cache_titans import TitansCache
from .configuration_series import TitansTimeSeriesConfig
from .modeling_titans import TitansModel, TitansPreTrainedModel

SMALLEST_VARIANCE = 1e-5  # of a series: one that does not move is not blown up


@dataclass
class SeriesCache:
    """What a forecast goes on from when more is observed: of constant size, whatever was read.

    Attributes:
        memory: what the layers carry, for B * C rows.
        loc, scale: mean and deviation [B, 1, C] of the look-back that was read first.
        values, observed: the last time steps [B, P - stride, C], normalised, which the next patch begins with.
        outputs: what the model made of the last patches, [B, C, up to N, hidden].
    """

    memory: TitansCache
    loc: Tensor
    scale: Tensor
    values: Tensor
    observed: Tensor
    outputs: Tensor

    def clone(self) -> "SeriesCache":
        """An independent copy, to go on from the same place twice."""
        return replace(self, memory=self.memory.clone())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        own = (self.loc, self.scale, self.values, self.observed, self.outputs)
        return self.memory.nbytes + sum(x.numel() * x.element_size() for x in own)


@dataclass
class TitansTimeSeriesOutput(ModelOutput):
    """What a forecaster returns.

    Args:
        loss: mean squared error over the observed targets, if `future_values` were given.
        prediction_outputs: the forecast [B, F, C], in the units of `past_values`.
        loc, scale: mean and deviation [B, 1, C] that the series were normalised by.
        past_key_values: a `SeriesCache` to go on from, with `use_cache=True`.
        hidden_states, attentions: of the layers, for B * C rows of patches (B rows of series with variate tokens).
    """

    loss: Tensor | None = None
    prediction_outputs: Tensor | None = None
    loc: Tensor | None = None
    scale: Tensor | None = None
    past_key_values: SeriesCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SeriesEmbedding(nn.Module):
    """Tokens from values and from which of them were observed: a missing value is not a zero."""

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__()
        width = config.context_length if config.series_tokens == "variate" else config.patch_length
        self.proj = nn.Linear(2 * width, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, values: Tensor, observed: Tensor) -> Tensor:
        """[..., width] each to [..., hidden], in the model's precision whatever that of the values."""
        told = torch.cat((values, observed.to(values.dtype)), dim=-1)
        return self.dropout(self.proj(told.to(self.proj.weight.dtype)))


class SeriesHead(nn.Module):
    """One linear layer from the outputs of all patches of a look-back to all steps of the forecast."""

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__()
        tokens = 1 if config.series_tokens == "variate" else config.num_patches
        self.dropout = nn.Dropout(config.head_dropout)
        self.proj = nn.Linear(tokens * config.hidden_size, config.prediction_length)

    def forward(self, outputs: Tensor) -> Tensor:
        """[B, C, N, hidden] to [B, F, C]."""
        return self.proj(self.dropout(outputs.flatten(2))).transpose(1, 2)


class TitansForTimeSeriesPrediction(TitansPreTrainedModel):
    """Titans as a forecaster. With patches every series is read by itself, and they share all weights."""

    config: TitansTimeSeriesConfig
    config_class = TitansTimeSeriesConfig
    main_input_name = "past_values"
    _code = __file__

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.model.embed_tokens = None  # no token ids are read
        self.embedding = SeriesEmbedding(config)
        self.head = SeriesHead(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """What makes tokens of the input."""
        return self.embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As everywhere; the first forecasts are near the look-back's mean."""
        super()._init_weights(module)
        if isinstance(module, SeriesHead):
            init.normal_(module.proj.weight, std=0.1 * module.proj.in_features**-0.5)

    @can_return_tuple
    def forward(
        self,
        past_values: Tensor,
        past_observed_mask: Tensor | None = None,
        future_values: Tensor | None = None,
        future_observed_mask: Tensor | None = None,
        past_key_values: SeriesCache | None = None,
        use_cache: bool | None = None,
        memory_read_only: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> TitansTimeSeriesOutput:
        """Forecast the next `prediction_length` time steps.

        Args:
            past_values: [B, L, C]. A look-back shorter than `context_length` is filled up in front with missing values.
                A longer one has whole strides more, and all of it is read: its first `context_length` steps give the
                mean and the deviation, its last ones the patches to forecast from.
            past_observed_mask: [B, L, C], 0 where a value is missing, whatever stands there. NaN is missing anyway.
            future_values: [B, prediction_length, C], the targets. NaN is missing.
            future_observed_mask: [B, prediction_length, C], 0 where a target is missing.
            past_key_values: a `SeriesCache` to go on from; it is updated. `past_values` are then what was observed
                since, whole strides of it. The forecast equals that of reading all at once, if the first read was at
                least `context_length` long: mean and deviation stay those of the first read.
            use_cache: whether to return a cache. By default `config.use_cache`; always when going on from one; never
                with variate tokens.
            memory_read_only: forecast without writing into the memory.
        """
        past, observed = _observed(past_values, past_observed_mask, "past_values", "past_observed_mask")
        self._check_past(past, observed, past_key_values)
        self._check_future(past, future_values, future_observed_mask)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        use_cache = (use_cache or past_key_values is not None) and self.config.series_tokens == "patch"
        options = dict(
            memory_read_only=memory_read_only,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        read = self._read_variates if self.config.series_tokens == "variate" else self._read_patches
        forecast, cache, outputs = read(past, observed, past_key_values, use_cache, options)
        forecast = forecast * cache.scale + cache.loc
        loss = None
        if future_values is not None:
            future, wanted = _observed(future_values, future_observed_mask, "future_values", "future_observed_mask")
            loss = ((forecast - future) * wanted).square().sum() / wanted.sum().clamp(min=1)
        return TitansTimeSeriesOutput(
            loss=loss,
            prediction_outputs=forecast,
            loc=cache.loc,
            scale=cache.scale,
            past_key_values=cache if use_cache else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _read_patches(self, past: Tensor, observed: Tensor, cache: SeriesCache | None, use_cache: bool, options):
        """The normalised forecast [B, F, C], the cache after it, and the model's outputs."""
        B, _, C = past.shape
        if cache is None:
            past, observed = self._filled(past, observed)
            cache = self._begin(past, observed, use_cache)
        values = torch.cat((cache.values, (past - cache.loc) / cache.scale * observed), dim=1)
        observed = torch.cat((cache.observed, observed), dim=1)
        patches = [
            x.transpose(1, 2).unfold(-1, self.config.patch_length, self.config.patch_stride) for x in (values, observed)
        ]  # [B, C, new patches, P]
        embeds = self.embedding(*patches)
        outputs = self.model(
            inputs_embeds=embeds.flatten(0, 1), past_key_values=cache.memory, use_cache=use_cache, **options
        )
        made = embeds + outputs.last_hidden_state.unflatten(0, (B, C))
        read = torch.cat((cache.outputs, made), dim=2)
        read = read[:, :, -self.config.num_patches :]
        cache.values, cache.observed = self._overlap(values), self._overlap(observed)
        cache.outputs = read
        return self.head(read), cache, outputs

    def _read_variates(self, past: Tensor, observed: Tensor, cache: None, use_cache: bool, options):
        """As `_read_patches`. What comes first sees nothing of what follows, hence the second reading."""
        past, observed = self._filled(past, observed)
        cache = self._begin(past, observed, False)
        values = (past - cache.loc) / cache.scale * observed
        embeds = self.embedding(values.transpose(1, 2), observed.transpose(1, 2))  # [B, C, hidden]
        outputs = self.model(inputs_embeds=torch.cat((embeds, embeds), dim=1), use_cache=False, **options)
        made = embeds + outputs.last_hidden_state[:, past.shape[2] :]
        return self.head(made[:, :, None]), cache, outputs

    def _begin(self, past: Tensor, observed: Tensor, use_cache: bool) -> SeriesCache:
        """The cache before the first patch: mean and deviation of the look-back, and nothing read."""
        B, _, C = past.shape
        first = self.config.context_length + self._lead
        loc, scale = _mean_and_deviation(past[:, :first], observed[:, :first])
        if not self.config.scaling:
            loc, scale = torch.zeros_like(loc), torch.ones_like(scale)
        memory = TitansCache(self.config, rewind=False) if use_cache else None
        outputs = self.head.proj.weight.new_zeros(B, C, 0, self.config.hidden_size)
        return SeriesCache(memory, loc, scale, past[:, :0], observed[:, :0], outputs)

    @property
    def _lead(self) -> int:
        """Missing time steps before the look-back, so that the last patch ends where it ends."""
        if self.config.series_tokens == "variate":
            return 0
        config = self.config
        return config.patch_length + (config.num_patches - 1) * config.patch_stride - config.context_length

    def _filled(self, past: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """With missing values in front, up to whole patches."""
        missing = self._lead + max(0, self.config.context_length - past.shape[1])
        if not missing:
            return past, observed
        front = past.new_zeros(past.shape[0], missing, past.shape[2])
        return torch.cat((front, past), dim=1), torch.cat((front.bool(), observed), dim=1)

    def _overlap(self, x: Tensor) -> Tensor:
        """The time steps that the next patch begins with."""
        return x[:, x.shape[1] - (self.config.patch_length - self.config.patch_stride) :]

    def _check_past(self, past: Tensor, observed: Tensor, cache: SeriesCache | None) -> None:
        config, (B, L, C) = self.config, past.shape
        if config.num_input_channels != C:
            raise ValueError(f"`past_values` has {C} channels, and `num_input_channels` is {config.num_input_channels}")
        if config.series_tokens == "variate" and (cache is not None or config.context_length < L):
            raise ValueError(
                "a token is a whole series with `series_tokens='variate'`: pass the last `context_length` time steps "
                "and no `past_key_values`, or train a model with `series_tokens='patch'`"
            )
        more = L - config.context_length if cache is None else L
        if more > 0 and more % config.patch_stride:
            raise ValueError(
                f"`past_values` has {more} time steps {'more than the look-back' if cache is None else 'to go on by'}, "
                f"not a multiple of `patch_stride` ({config.patch_stride}): leave out the first ones, or wait for more"
            )
        if cache is not None and cache.loc.shape != (B, 1, C):
            raise ValueError(f"`past_key_values` was made for a batch of {cache.loc.shape[0]}, got one of {B}")
        if torch.compiler.is_compiling():
            return
        if not past.isfinite().all():
            raise ValueError("`past_values` has infinite values: mark them in `past_observed_mask`, or make them NaN")
        seen = observed[:, : config.context_length].any(dim=1)
        if cache is None and not seen.all():
            row, channel = (~seen).nonzero()[0].tolist()
            raise ValueError(
                f"`past_values` has nothing observed in the look-back of row {row}, channel {channel}: leave the "
                "series out, or pass an earlier look-back"
            )

    def _check_future(self, past: Tensor, future: Tensor | None, mask: Tensor | None) -> None:
        shape = (past.shape[0], self.config.prediction_length, past.shape[2])
        for name, given in (("future_values", future), ("future_observed_mask", mask)):
            if given is not None and given.shape != shape:
                raise ValueError(f"`{name}` must be {list(shape)} (batch, time, channels), got {list(given.shape)}")


def _observed(values: Tensor, mask: Tensor | None, name: str, mask_name: str) -> tuple[Tensor, Tensor]:
    """The values with zeros where they are missing, and a bool tensor of where they are not."""
    if values.dim() != 3 or 0 in values.shape or not values.is_floating_point():
        raise ValueError(f"`{name}` must be floats [batch, time, channels], got {values.dtype} {list(values.shape)}")
    observed = ~values.isnan()
    if mask is not None:
        if mask.shape != values.shape:
            raise ValueError(f"`{mask_name}` must have the shape of `{name}`, {list(values.shape)}: {list(mask.shape)}")
        observed = observed & mask.bool()
    return values.masked_fill(~observed, 0.0), observed


def _mean_and_deviation(values: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Over the observed time steps, [B, 1, C] each."""
    count = observed.sum(dim=1, keepdim=True).clamp(min=1)
    loc = values.sum(dim=1, keepdim=True) / count
    variance = ((values - loc) * observed).square().sum(dim=1, keepdim=True) / count
    return loc, (variance + SMALLEST_VARIANCE).sqrt()


MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES["titans_time_series"] = "TitansForTimeSeriesPrediction"

__all__ = ["SeriesCache", "TitansForTimeSeriesPrediction", "TitansTimeSeriesOutput"]
