"""The configuration of a Titans forecaster: that of a Titans model, and what its series look like."""

from huggingface_hub.dataclasses import strict

from .configuration_titans import TitansConfig

SERIES_TOKENS = ("patch", "variate")

# Saved with every forecaster, beside the code itself.
SERIES_AUTO_MAP = {
    "AutoConfig": "configuration_series.TitansTimeSeriesConfig",
    "AutoModel": "modeling_series.TitansForTimeSeriesPrediction",
    "AutoModelForTimeSeriesPrediction": "modeling_series.TitansForTimeSeriesPrediction",
}

POSITIVE_SERIES_FIELDS = ("context_length", "prediction_length", "num_input_channels", "patch_length", "patch_stride")


@strict
class TitansTimeSeriesConfig(TitansConfig):
    """What a forecaster computes. Every field of `TitansConfig` has its meaning there, with defaults of its own here.

    Args:
        context_length: time steps of the look-back. Its mean and deviation normalise all that is read.
        prediction_length: time steps of a forecast.
        num_input_channels: series that are read side by side.
        series_tokens: what a token is. "patch" cuts every series into patches, and each series is read by itself.
            "variate" takes a whole series as one token, and reads the series twice, so that each knows of all others.
        patch_length, patch_stride: time steps of a patch, and from one patch to the next; patches may overlap.
        scaling: whether every series is normalised by its own look-back (and the forecast scaled back).
        embedding_dropout, head_dropout: dropout on the tokens, and before the linear head.
        initializer_range: by default `1 / sqrt(hidden_size)`: widths are small here.
        use_cache: whether to return, by default, what a forecast goes on from when more is observed.
    """

    model_type = "titans_time_series"
    base_model_fsdp_plan = {"layers.*": "free_full_weight", "norm": "keep_full_weight"}

    vocab_size: int = 1  # no token ids are read
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    initializer_range: float | None = None
    use_cache: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    variant: str = "lmm"
    segment_size: int = 16
    sliding_window: int = 16
    num_persistent_tokens: int = 4
    memory_chunk_size: int = 16

    context_length: int = 96
    prediction_length: int = 96
    num_input_channels: int = 1
    series_tokens: str = "patch"
    patch_length: int = 16
    patch_stride: int = 8
    scaling: bool = True
    embedding_dropout: float | int = 0.0
    head_dropout: float | int = 0.0

    def __post_init__(self, **kwargs):
        if self.initializer_range is None and self.hidden_size > 0:
            self.initializer_range = self.hidden_size**-0.5
        super().__post_init__(**{"auto_map": dict(SERIES_AUTO_MAP), **kwargs})

    @property
    def num_patches(self) -> int:
        """Patches of the look-back. Where they do not fit, the first one begins before it, with missing values."""
        return 1 + -(-max(0, self.context_length - self.patch_length) // self.patch_stride)

    def check(self) -> None:
        """Raise a `ValueError` that names the first field that cannot work, and the fix."""
        super().check()
        for field in POSITIVE_SERIES_FIELDS:
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1, got {getattr(self, field)}")
        if self.series_tokens not in SERIES_TOKENS:
            raise ValueError(f"`series_tokens` must be one of {SERIES_TOKENS}, got {self.series_tokens!r}")
        if self.patch_length > self.context_length:
            raise ValueError(
                f"`patch_length` ({self.patch_length}) is longer than `context_length` ({self.context_length}): choose "
                "a shorter patch"
            )
        if self.patch_stride > self.patch_length:
            raise ValueError(
                f"`patch_stride` ({self.patch_stride}) is longer than `patch_length` ({self.patch_length}), and time "
                "steps between two patches would not be read: choose a shorter stride"
            )
        for field in ("embedding_dropout", "head_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 0 and below 1, got {getattr(self, field)}")
