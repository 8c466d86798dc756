"""Copy a pretrained transformer into a Titans model that starts as the same function.

Every weight of the source keeps its place. Some layers get a memory beside (mag) or before (mal) their attention; its
keys and values start as attention's own. Its branch ends in a projection that starts at zero and is added, so that at
first it changes nothing. The projection's own gradient does not vanish, and once it has moved, those of all that is
before it do not either.

Attention reads a sliding window: up to its length the logits are the source's. Beyond it a row's first tokens stay
visible, since attention that was trained without a window leans on them; without these sinks the logits are those of
the source under a sliding-window mask.
"""

import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..attention_titans import TitansAttention
from ..configuration_titans import TitansConfig
from ..memory_layer import NeuralMemory
from ..modeling_titans import TitansForCausalLM
from ..records.sizes import empty_model

FAMILIES = {
    "llama": "Llama (SmolLM2 too)",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # the same frequencies at any length of the text
DEFAULT_WINDOW, DEFAULT_SINKS = 512, 4
EVERY = 4  # by default, one layer in so many gets a memory
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
LARGEST_DIFFERENCE = 1e-4  # of logits in float32 and float64, relative to the largest


@dataclass
class Source:
    """A pretrained model, ready to be copied.

    Attributes:
        tokenizer: None where the source has none.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def default_memory_layers(layers: int) -> list[int]:
    """Every fourth layer, and the last."""
    return sorted({*range(EVERY - 1, layers, EVERY), layers - 1})


def graft_config(
    source: PreTrainedConfig,
    variant: str = "mag",
    window: int | None = None,
    memory_layers: Sequence[int] | str | None = None,
    full_attention_layers: Sequence[int] = (),
    sinks: int | None = None,
    **memory_fields,
) -> TitansConfig:
    """The configuration of the Titans model into which a model of the given configuration is copied.

    Args:
        variant: "mag" or "mal".
        window: tokens a token attends to; by default the source's own sliding window, or 512 where it has none.
        memory_layers: numbers, from 0, of the layers that get a memory, or "all"; by default every fourth and the last.
        full_attention_layers: numbers of the layers that keep full attention.
        sinks: first tokens that stay visible beyond the window; by default 4, or as many as the window has if that is
            fewer, and none where the source has windows of its own.
        memory_fields: fields of `TitansConfig` that give the memory its size and rule.
    """
    check_source(source)
    if variant not in ("mag", "mal"):
        raise ValueError(
            f"`variant` must be 'mag' or 'mal', got {variant!r}: mac's retrieved tokens take a share of attention even "
            "when they say nothing, and lmm has no attention to copy into"
        )
    layers = source.num_hidden_layers
    if memory_layers is None:
        memory_layers = default_memory_layers(layers)
    return TitansConfig(
        **{name: getattr(source, name) for name in COPIED},
        **source_parts(source),
        variant=variant,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        rope_parameters=copy.deepcopy(dict(source.rope_parameters)),
        rotary_layers=source_rotary_layers(source),
        sliding_window=fitting_window(source, window),
        attention_sinks=fitting_sinks(source, window) if sinks is None else sinks,
        full_attention_layers=fitting_full_layers(source, full_attention_layers),
        memory_layers=None if memory_layers == "all" else as_layers("memory_layers", memory_layers),
        num_persistent_tokens=0,
        memory_combine="add",
        memory_layer_norm=False,
        **({"max_position_embeddings": source.max_position_embeddings} if full_attention_layers else {}),
        **memory_fields,
    )


def as_layers(name: str, layers: Sequence[int] | str) -> list[int]:
    """Layer numbers in rising order."""
    if isinstance(layers, str):
        raise ValueError(f"`{name}` must be layer numbers, got {layers!r}")
    return sorted(set(layers))


def check_source(source: PreTrainedConfig) -> None:
    """Refuse a configuration whose function a Titans model cannot have."""
    if source.model_type not in FAMILIES:
        raise ValueError(
            f"cannot graft a model of type {source.model_type!r}; the families are {', '.join(FAMILIES.values())}"
        )
    rotation = source.rope_parameters.get("rope_type", "default")
    if rotation not in FIXED_ROTATIONS:
        raise ValueError(
            f"cannot graft rotary positions of type {rotation!r}, whose frequencies change with the length of the "
            f"text; types that can be are {', '.join(FIXED_ROTATIONS)}"
        )
    unknown = set(getattr(source, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"cannot graft layers of type {min(unknown)!r}, only full and sliding attention")


def source_windows(source: PreTrainedConfig) -> list[int | None]:
    """The sliding window of every layer of the source; None is full attention."""
    layers, window = source.num_hidden_layers, getattr(source, "sliding_window", None)
    if source.model_type == "llama" or not getattr(source, "use_sliding_window", True):
        window = None
    types = getattr(source, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types[:layers]]


def source_rotary_layers(source: PreTrainedConfig) -> list[int] | None:
    """The layers with rotary positions; None is all."""
    rotates = getattr(source, "no_rope_layers", None)  # 1 where a layer has them, despite its name
    layers = range(source.num_hidden_layers)
    if rotates is None or all(rotates[layer] for layer in layers):
        return None
    return [layer for layer in layers if rotates[layer]]


def fitting_window(source: PreTrainedConfig, window: int | None) -> int:
    """The student's window: no longer than the source's own, which it could not follow beyond it."""
    own = min((size for size in source_windows(source) if size is not None), default=None)
    if window is None:
        return own or DEFAULT_WINDOW
    if own is not None and window > own:
        raise ValueError(f"`window` is {window}, but the source attends to {own} tokens: take {own} or fewer")
    return window


def fitting_sinks(source: PreTrainedConfig, window: int | None) -> int:
    """First tokens to keep visible: none where the source has learned to do without."""
    if any(size is not None for size in source_windows(source)):
        return 0
    return min(DEFAULT_SINKS, fitting_window(source, window))


def fitting_full_layers(source: PreTrainedConfig, layers: Sequence[int]) -> list[int] | None:
    """The layers that keep full attention, each of which must have it."""
    layers, windows = as_layers("full_attention_layers", layers), source_windows(source)
    for layer in layers:
        if 0 <= layer < len(windows) and windows[layer] is not None:
            raise ValueError(
                f"`full_attention_layers` names layer {layer}, whose attention in the source has a window of "
                f"{windows[layer]} tokens: leave it out"
            )
    return layers or None


def source_parts(source: PreTrainedConfig) -> dict[str, bool]:
    """Which biases and norms the source has, by the fields of `TitansConfig`."""
    names = {name for name, _ in empty_model(source).base_model.layers[0].named_parameters()}
    return {
        "attention_bias": "self_attn.q_proj.bias" in names,
        "attention_out_bias": "self_attn.o_proj.bias" in names,
        "mlp_bias": "mlp.down_proj.bias" in names,
        "attention_qk_norm": "self_attn.q_norm.weight" in names,
    }


def graft_model(source: PreTrainedModel, config: TitansConfig) -> TitansForCausalLM:
    """The source's weights in a Titans model of that configuration, with silent memories, in the source's dtype."""
    student = TitansForCausalLM(config)
    for name, parameter in student.named_parameters():  # not the buffers: rotary frequencies stay precise
        precise = torch.promote_types(source.dtype, torch.float32)
        parameter.data = parameter.data.to(precise if ".memory.start." in name else source.dtype)
    copy_weights(source, student)
    for layer in student.model.layers:
        if layer.memory is not None:
            start_memory(layer.memory, layer.mixer.attention)
    student.generation_config = copy.deepcopy(source.generation_config)
    if student.generation_config.cache_implementation not in (None, "dynamic", "static"):
        student.generation_config.cache_implementation = None
    return student.eval()


@torch.no_grad()
def start_memory(memory: NeuralMemory, attention: TitansAttention) -> None:
    """A silent memory that writes what attention beside it would: its keys and values, where the heads are as many."""
    nn.init.zeros_(memory.out_proj.weight)
    if memory.num_heads != attention.config.num_attention_heads:
        return
    memory.v_proj.weight.copy_(_for_every_head(attention.v_proj.weight, attention))
    for proj in (memory.q_proj, memory.k_proj):
        if proj is not None:
            proj.weight.copy_(_for_every_head(attention.k_proj.weight, attention))


def _for_every_head(weight: Tensor, attention: TitansAttention) -> Tensor:
    """The weight of a projection to key-value heads, each repeated for its group of heads."""
    heads = weight.unflatten(0, (-1, attention.head_dim))
    return heads.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)


@torch.no_grad()
def copy_weights(source: PreTrainedModel, student: TitansForCausalLM) -> None:
    """Copy every weight of the source; all that is new in the student belongs to a memory."""
    weights = {name.replace(".self_attn.", ".mixer.attention."): x for name, x in source.state_dict().items()}
    missing, unknown = student.load_state_dict(weights, strict=False)
    odd = [*unknown, *(name for name in missing if ".mixer.memory." not in name)]
    if odd:
        raise ValueError(f"the source's weights are not those of its configuration, see {odd[0]!r}")


@torch.no_grad()
def largest_difference(source: PreTrainedModel, student: TitansForCausalLM, tokens: int = 64, seed: int = 0) -> float:
    """The largest difference of their logits on random tokens within the window, relative to the largest logit."""
    generator = torch.Generator().manual_seed(seed)
    count = min(tokens, student.config.sliding_window)
    ids = torch.randint(0, student.config.vocab_size, (1, count), generator=generator).to(source.device)
    expected = source.eval()(ids, use_cache=False).logits.float()
    found = student(ids, use_cache=False).logits.float()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def check_equal(source: PreTrainedModel, student: TitansForCausalLM) -> float:
    """`largest_difference`; in float32 or better, a `RuntimeError` if the two are not the same function."""
    found = largest_difference(source, student)
    if source.dtype in (torch.float32, torch.float64) and not found <= LARGEST_DIFFERENCE:
        raise RuntimeError(
            f"the copy's logits differ from the source's by {found:.1e} of the largest: nothing was written"
        )
    return found


def load_source_config(name: str, gguf_file: str | None = None) -> PreTrainedConfig:
    """The configuration of a folder or of a model on the Hub; one that cannot be grafted is refused."""
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file: pass its folder, and --gguf-file {os.path.basename(name)} for a GGUF file")
    if os.path.isabs(name) and not os.path.isdir(name):
        raise ValueError(f"there is no folder {name}")
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **_gguf(gguf_file))
    check_source(config)
    if gguf_file is None and getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantised: graft the model it was made from")
    return config


def load_source(name: str, gguf_file: str | None = None, dtype: str = "auto") -> Source:
    """The model and its tokenizer."""
    options = {"trust_remote_code": False, **_gguf(gguf_file)}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return Source(model.eval(), load_tokenizer(name, options))


def load_tokenizer(name: str, options: dict) -> PreTrainedTokenizerBase | None:
    """The source's tokenizer; None without one, and for the empty one that transformers may make up then."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError):
        return None
    return tokenizer if len(tokenizer) > len(tokenizer.get_added_vocab()) else None


def _gguf(file: str | None) -> dict[str, str]:
    return {} if file is None else {"gguf_file": file}


def check_out(out: Path) -> None:
    """Refuse a folder that cannot be written, or holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out} cannot be written: there is no folder {out.absolute().parent}")


def save(student: TitansForCausalLM, tokenizer: PreTrainedTokenizerBase | None, out: Path) -> None:
    """Write the model, its code and its tokenizer; the folder appears when all of it is there."""
    check_out(out)
    with _whole_folder(out) as folder:
        student.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it at the end."""
    out = out.absolute()
    folder = out.with_name(f"{out.name}.{os.getpid()}.part")
    folder.mkdir()
    try:
        yield folder
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
