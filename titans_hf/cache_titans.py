"""The cache of a Titans model: the memory, and the short tails that attention and convolution look back on.

A layer's cache has a constant size, except for the keys and values of a layer with full attention. A forward pass
returns a new `LayerCarry` and never changes an earlier one, so that autograd can go through a carried cache.

Axis letters: B batch.
"""

import os
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .carry_titans import LOG_COLUMNS, REWIND, LayerCarry, log_of_first_version
from .configuration_titans import READING, SHAPE
from .snapshots import difference, fingerprint, read_snapshot, write_snapshot

REFUSED = (*SHAPE, *READING)  # a cache filled under one value of these fields cannot be read under another

# The name under which transformers finds the cache layers of a configuration. Every copy of this code needs its own: a
# process can hold several, one for each checkpoint that was loaded with `trust_remote_code=True`.
PACKAGE = __name__.rpartition(".")[0]
LAYER_TYPE = "titans" if PACKAGE == "titans_hf" else f"titans@{PACKAGE}"


def identity(config: PreTrainedConfig) -> dict:
    """The fields that a cache depends on, with their values."""
    scaled = () if config.rope_parameters["rope_type"] == "default" else ("max_position_embeddings",)
    own = vars(config)  # quicker than `getattr`, which a configuration of transformers looks up twice
    return {name: own[name] if name in own else getattr(config, name) for name in (*REFUSED, *scaled)}


class TitansCacheLayer(CacheLayerMixin):
    """One block's cache. `DynamicCache(config=...)`, `generate` and `TitansCache` build it by its layer type.

    Args:
        rewind: whether `crop` can remove the last tokens. It costs a second memory and a log of the last tokens.
    """

    _layer_type = LAYER_TYPE
    is_sliding = False
    is_croppable = True
    can_grow = True
    supports_early_init = False

    def __init__(self, rewind: bool = True, **kwargs):
        super().__init__()
        self.is_croppable = type(self).is_croppable and rewind
        self.spare = REWIND if self.is_croppable else 0  # tokens that tails keep beyond what is needed
        self.config: PreTrainedConfig | None = None
        self.bound: dict | None = None
        self._empty()

    def _empty(self) -> None:
        self.carry: LayerCarry | None = None
        self.seen: Tensor | None = None  # [B] real tokens read
        self.columns = 0  # token columns read, padding included
        self.recent: Tensor | None = None  # [B, REWIND] bool: which of the last columns were real
        self.rewindable = 0

    # What the model calls

    def bind(self, config: PreTrainedConfig, fields: dict) -> None:
        """Remember, or check, the configuration this cache belongs to: `fields` are its `identity`."""
        if self.bound is None:
            self.config, self.bound = config, fields
        if self.bound == fields:
            return
        name = next(name for name in fields if self.bound[name] != fields[name])
        raise ValueError(
            f"`past_key_values` was made for a model with `{name}={self.bound[name]!r}`, this model has "
            f"{fields[name]!r}: start with a fresh TitansCache(model.config)"
        )

    def store(self, carry: LayerCarry, seen: Tensor) -> None:
        """Take over the state after one pass, and how many tokens [B] each row has read by then."""
        self.carry, self.seen = carry.compact(), seen

    def advance(self, mask: Tensor | None, width: int, rewinds: bool) -> None:
        """Count the token columns of one forward; `mask` [B, width] says which were real, None means all.

        Args:
            rewinds: whether every layer has a state to go back to.
        """
        self.columns += width
        if not self.spare:
            return
        B, device = self.seen.shape[0], self.seen.device
        if mask is None:
            mask = torch.ones(B, min(width, REWIND), dtype=torch.bool)
        if self.recent is None:
            self.recent = torch.zeros(B, REWIND, dtype=torch.bool, device=device)
        self.recent = torch.cat((self.recent, mask.to(device)), dim=1)[:, -REWIND:].clone()
        self.rewindable = min(REWIND, self.rewindable + width) if rewinds else 0

    def take_memory_of(self, other: "TitansCacheLayer") -> None:
        """Take over the memory of another layer and keep all else. What was read before cannot be cropped any more."""
        if self.carry.own is not None:
            own = replace(self.carry.own, state=other.carry.memory.map(torch.clone))
            self.carry = replace(self.carry, own=own, segment_weights=other.carry.segment_weights)
            if self.spare:
                self.carry = self.carry.restarting(self.seen)
        self.rewindable = 0

    # What transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first forward brings the whole state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise ValueError(
            "a Titans cache layer holds a memory, not keys and values alone; only a Titans model can fill it"
        )

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        if self.carry is None:
            raise AttributeError("the cache is empty")
        return self.seen.shape[0]

    def tensors(self) -> list[Tensor]:
        """Every tensor the layer keeps."""
        if self.carry is None:
            return []
        counters = [x for x in (self.seen, self.recent) if x is not None]
        return [*self.carry.tensors(), *counters]

    def named(self) -> dict[str, Tensor]:
        """Every tensor of the layer by its name in a snapshot."""
        recent = {} if self.recent is None else {"recent": self.recent}
        return {"seen": self.seen, **recent, **self.carry.named()}

    def fill(self, named: dict[str, Tensor], columns: int, rewindable: int, log_columns: int) -> None:
        """Take over what another layer of the same form held."""
        self.seen, self.recent, self.columns, self.rewindable = named["seen"], named.get("recent"), columns, rewindable
        self.carry = self.carry.filled(named, log_columns)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every tensor of the layer."""
        if self.carry is None:
            return
        self.carry = self.carry.map(fn)
        self.seen = fn(self.seen)
        if self.recent is not None:
            self.recent = fn(self.recent)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Back to before the first token: the next forward starts from the learned memory, prologue included."""
        self._empty()

    def offload(self) -> None:
        raise ValueError("offloading is not supported: a Titans cache is small and is read whole at every token")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` token columns, as if they had never been read."""
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes the negative number of tokens to remove, got {tokens_to_remove}")
        removed_columns = -tokens_to_remove
        if removed_columns == 0 or self.carry is None:
            return
        self.check_crop(removed_columns)
        if removed_columns == self.columns:
            self.reset()
            return
        self._take_back(self.recent[:, -removed_columns:].sum(1))
        self.recent = torch.cat((torch.zeros_like(self.recent), self.recent), dim=1)[:, -removed_columns - REWIND :]
        self.recent = self.recent[:, :REWIND].clone()
        self.columns -= removed_columns
        self.rewindable -= removed_columns

    def hide(self, hidden: Tensor) -> None:
        """Take back the tokens of the columns that `hidden` [B, REWIND] names: the last real ones of their rows."""
        hidden = hidden.to(self.recent.device)
        self._take_back(hidden.sum(1))
        self.recent = self.recent & ~hidden

    def _take_back(self, removed: Tensor) -> None:
        """Forget each row's last `removed` [B] real tokens."""
        self.carry = self.carry.without_last(removed, self.seen, self.config)
        self.seen = self.seen - removed

    def check_crop(self, removed_columns: int) -> None:
        if not self.spare:
            raise ValueError("this cache was made with `rewind=False` and cannot be cropped; use TitansCache(config)")
        if removed_columns > self.rewindable:
            raise ValueError(
                f"cannot crop {removed_columns} tokens: this cache can go back {self.rewindable} of its {self.columns} "
                f"tokens (at most {REWIND}). Keep a `clone()` to go back further."
            )


class TitansStaticCacheLayer(TitansCacheLayer):
    """The same state at fixed addresses, for `torch.compile`: written in place, and not croppable."""

    _layer_type = None
    is_croppable = False
    can_grow = False
    is_compileable = True

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len

    def _empty(self) -> None:
        super()._empty()
        self.columns = torch.zeros((), dtype=torch.long)

    def store(self, carry: LayerCarry, seen: Tensor) -> None:
        carry = carry.without_room()
        if self.carry is None:
            self.carry, self.seen = carry.map(Tensor.clone), seen
            self.columns = self.columns.to(seen.device)
            for x in (*self.tensors(), self.columns):
                torch._dynamo.mark_static_address(x)
            return
        for old, new in zip(self.carry.tensors(), carry.tensors(), strict=True):
            old.copy_(new)
        self.seen.copy_(seen)

    def advance(self, mask, width, rewinds) -> None:
        self.columns.add_(width)

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a static Titans cache cannot be cropped; use the default cache")


cache_utils.STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = TitansStaticCacheLayer
# A configuration that belongs to no model yet gets the layers of the first copy of this code.
cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.setdefault("titans", TitansCacheLayer)
cache_utils.STATIC_LAYER_TYPE_MAPPING.setdefault("titans", TitansStaticCacheLayer)


class TitansCache(DynamicCache):
    """The memory of a Titans model, to carry from call to call.

    >>> cache = TitansCache(model.config)
    >>> model(book, past_key_values=cache)                     # any length, in any pieces
    >>> mask = torch.ones(1, cache.get_seq_length() + question.shape[1])
    >>> model.generate(question, attention_mask=mask, past_key_values=cache)

    The mask tells `generate` that the cache holds tokens which are not in `question`; without it, it expects the ids of
    the whole conversation.

    Args:
        rewind: whether `crop` can remove the last tokens, up to 64. Without it a cache is about half as large.
    """

    def __init__(self, config: PreTrainedConfig, rewind: bool = True):
        if not hasattr(config, "cache_layer_type"):  # the class may be another copy's
            raise ValueError(f"`config` must be a TitansConfig, got {type(config).__name__}")
        Cache.__init__(self, layers=[TitansCacheLayer(rewind) for _ in range(config.num_hidden_layers)])
        for layer in self.layers:
            layer.bind(config, identity(config))
        self.reader: weakref.ref | None = None  # the model that filled it

    def __getstate__(self) -> dict:
        return {**self.__dict__, "reader": None}

    def save(self, path: str | os.PathLike, model: nn.Module | None = None, note: dict[str, str] | None = None) -> None:
        """Write the cache as a safetensors file, which `TitansCache.load` reads in another process.

        The file holds a fingerprint of the model that filled the cache: the one that last read, or the one given. A
        note, say where that model is, goes into the file's metadata: `snapshots.read_note` finds it, `load` ignores it.
        """
        model = model or (self.reader and self.reader())
        if self.layers[0].carry is None:
            raise ValueError("the cache is empty: read something first")
        if model is None:
            raise ValueError("the model that filled this cache is gone: pass it, `cache.save(path, model)`")
        first = self.layers[0]
        log_columns = max((layer.carry.log.columns for layer in self.layers if layer.carry.log is not None), default=0)
        state = {"columns": first.columns, "rewindable": first.rewindable, "log_columns": log_columns}
        write_snapshot(path, self._named(), state, *fingerprint(model, REFUSED), note=note)

    @classmethod
    def load(cls, path: str | os.PathLike, model: nn.Module) -> "TitansCache":
        """The cache that `save` wrote, for the same model, as if this process had read the text itself.

        A file of another model, of another version, or damaged, is refused with a `ValueError` that says why.
        """
        tensors, facts = read_snapshot(path)
        defaults = {name: getattr(type(model.config), name, None) for name in REFUSED}
        facts["config"] = {**defaults, **facts["config"]}  # a file from before a field has its default
        for what, ours in zip(("config", "weights"), fingerprint(model, REFUSED), strict=True):
            if facts[what] != ours:
                raise ValueError(
                    f"{os.fspath(path)!r} was made by another model: {difference(what, facts[what], ours)}"
                )
        cache = cls._like(model, rewind=any(".log." in name or name.endswith(".recent") for name in tensors))
        tensors, state = _upgraded(path, tensors, facts["state"], model.config.num_hidden_layers)
        _check_snapshot(path, tensors, cache._named(), state, cache._growing())
        for index, layer in enumerate(cache.layers):
            device = layer.seen.device
            layer.fill({name: x.to(device) for name, x in _of_layer(tensors, index).items()}, **state)
        return cache

    @classmethod
    @torch.no_grad()
    def _like(cls, model: nn.Module, rewind: bool) -> "TitansCache":
        """A cache of this model's that has read one token: its tensors say what a snapshot must hold."""
        cache, modes = cls(model.config, rewind), {module: module.training for module in model.modules()}
        try:
            model.eval()
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
        finally:
            for module, training in modes.items():
                module.training = training
        return cache

    def _named(self) -> dict[str, Tensor]:
        return {f"layers.{i}.{name}": x for i, layer in enumerate(self.layers) for name, x in layer.named().items()}

    def _growing(self) -> set[str]:
        """The names in a snapshot of what grows with every token."""
        return {f"layers.{i}.{name}" for i, layer in enumerate(self.layers) for name in layer.carry.growing}

    def clone(self) -> "TitansCache":
        """An independent copy: go on from here more than once."""
        twin = TitansCache.__new__(TitansCache)
        twin.__dict__.update(self.__dict__)
        twin.layers = [_copy_layer(layer) for layer in self.layers]
        return twin

    def to(self, *args, **kwargs) -> "TitansCache":
        """Move to a device, in place. The dtypes of a cache are part of what it computes and stay."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        for layer in self.layers if device is not None else ():
            layer.map(lambda x: x.to(device))
        return self

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly; at most 64. Checked before any layer changes."""
        for layer in self.layers:
            if tokens_to_remove < 0 and layer.carry is not None:
                layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor kept. Constant, unless layers have full attention: theirs grow with what was read."""
        return sum(x.nbytes for layer in self.layers for x in layer.tensors())


def _of_layer(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one layer of a snapshot, by their names in the layer."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _upgraded(path, tensors: dict[str, Tensor], state: dict, layers: int) -> tuple[dict[str, Tensor], dict]:
    """Tensors and counters of a snapshot under today's names; those of the first version had another log."""
    if "cursor" not in state:
        return tensors, state
    try:
        found = [log_of_first_version(_of_layer(tensors, index)) for index in range(layers)]
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged: its log cannot be read ({error})") from error
    tensors = {f"layers.{index}.{name}": x for index, named in enumerate(found) for name, x in named.items()}
    counters = {name: x for name, x in state.items() if name != "cursor"}
    return tensors, {**counters, "log_columns": int(tensors["layers.0.log.count"].max())}


def _check_snapshot(
    path, tensors: dict[str, Tensor], expected: dict[str, Tensor], state: dict, growing: set[str]
) -> None:
    """Refuse a file whose tensors or numbers no cache of the model could hold; `growing` ones hold any tokens."""

    def refuse(what: str):
        raise ValueError(f"{os.fspath(path)!r} is damaged: {what}")

    if tensors.keys() != expected.keys():
        refuse(f"its tensors are not a cache's, see {sorted(tensors.keys() ^ expected.keys())[0]!r}")
    batch = tensors["layers.0.seen"].shape[:1]
    for name, x in tensors.items():
        want, tokens = expected[name], tensors[f"{name.rpartition('.tails.')[0]}.seen"] if name in growing else None
        if tokens is not None and x.dim() == want.dim() and x.shape[1] >= int(tokens.max()):
            want = want[:, :1].expand(-1, x.shape[1], *want.shape[2:])
        if x.dtype != want.dtype or x.shape[:1] != batch or x.shape[1:] != want.shape[1:]:
            refuse(f"{name!r} is {x.dtype} {tuple(x.shape)}, not {want.dtype} {(*batch, *want.shape[1:])}")
        if x.is_floating_point() and not x.isfinite().all():
            refuse(f"{name!r} holds numbers that are not finite")
    for name, x in tensors.items():
        slots = torch.inf
        if name.endswith(".log.count"):
            slots = LOG_COLUMNS + 1
        elif name.endswith(".length"):
            slots = tensors[name.replace(".length", ".gates.0")].shape[-1]
        if not x.is_floating_point() and not bool(((x >= 0) & (x < slots)).all()):
            refuse(f"{name!r} is out of range")
    limits = {"columns": 2**62, "rewindable": REWIND, "log_columns": LOG_COLUMNS}
    if state.keys() != limits.keys():
        refuse("its counters are not a cache's")
    for name, limit in limits.items():
        if type(state[name]) is not int or not 0 <= state[name] <= limit:
            refuse(f"its counter `{name}` is {state[name]!r}")
    if state["rewindable"] > state["columns"]:
        refuse("it could go back to before its first token")


def _copy_layer(layer: TitansCacheLayer) -> TitansCacheLayer:
    twin = layer.__class__.__new__(layer.__class__)
    twin.__dict__.update(layer.__dict__)
    if isinstance(layer.columns, Tensor):
        twin.columns = layer.columns.clone()
    twin.map(Tensor.clone)
    return twin


def hide_past(cache: Cache, visible: Tensor) -> None:
    """Take back tokens that a later mask of the past, [B, columns] bool, or [B, 0] for none, shows as padding.

    `generate` pads rows that have ended while others go on, and reads that padding: masked in the next call, it must
    not stay in the memory. Only a row's last tokens can be taken back; padding that becomes visible was never read.
    """
    layer = cache.layers[0]
    if layer.carry is None or visible.shape[1] == 0:
        return
    missing = layer.seen - visible.sum(1)  # [B] tokens read that the mask does not show, if positive
    hidden = torch.zeros_like(visible)
    if layer.recent is not None:
        width = min(REWIND, visible.shape[1])
        hidden = torch.zeros_like(layer.recent)
        hidden[:, REWIND - width :] = layer.recent[:, REWIND - width :] & ~visible[:, -width:]
    if not bool((missing > 0).any()) and not bool(hidden.any()):
        return
    reach = torch.arange(hidden.shape[1], device=hidden.device) >= hidden.shape[1] - layer.rewindable
    behind = hidden.cumsum(1) > 0
    exposed = layer.recent is None or bool((layer.recent & ~hidden & behind).any())
    if exposed or bool((missing > hidden.sum(1)).any()) or bool((hidden & ~reach).any()):
        raise ValueError(
            "`attention_mask` hides tokens that `past_key_values` has read and cannot take back: it can for the last "
            f"tokens of a row, up to {REWIND} columns back. Start with a fresh cache, or keep a `clone()`."
        )
    for layer in cache.layers:
        layer.hide(hidden)


def advance_all(cache: Cache, mask: Tensor | None, width: int) -> None:
    """Count the token columns of one forward in every layer, see `TitansCacheLayer.advance`.

    An empty log: all was read in one long pass, and there is no state to go back to.
    """
    logs = [layer.carry.log for layer in cache.layers if layer.carry.log is not None]
    rewinds = all(log.columns for log in logs)
    for layer in cache.layers:
        layer.advance(mask, width, rewinds)


def check_cache(cache: Cache, config: PreTrainedConfig, batch_size: int, dtype: torch.dtype) -> None:
    """Refuse a cache that cannot hold this model's memory for this batch, before anything is written."""
    if len(cache.layers) != config.num_hidden_layers or not all(
        isinstance(layer, TitansCacheLayer) for layer in cache.layers
    ):
        raise ValueError(
            "`past_key_values` cannot hold a Titans memory: pass a TitansCache(model.config), or "
            "DynamicCache(config=model.config) / StaticCache(config=model.config, ...)"
        )
    if config.full_attention_layers and not all(layer.can_grow for layer in cache.layers):
        raise ValueError(
            "a static cache cannot grow, and the cache of `full_attention_layers` grows with every token: use a "
            "TitansCache(model.config)"
        )
    fields = identity(config)
    for layer in cache.layers:
        layer.bind(config, fields)
        if layer.carry is not None and layer.batch_size != batch_size:
            raise ValueError(
                f"`past_key_values` holds {layer.batch_size} rows, but the input has {batch_size}: use a cache per "
                "batch, or `batch_select_indices` / `batch_repeat_interleave` it to fit"
            )
        if layer.carry is not None and layer.carry.dtype != dtype:
            raise ValueError(
                f"`past_key_values` holds {layer.carry.dtype}, but the model computes in {dtype}: "
                "start with a fresh TitansCache(model.config)"
            )
