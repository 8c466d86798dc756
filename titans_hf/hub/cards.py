"""Model cards from what is known: of a preset, its configuration; of a trained model, its folder and its records.

A trained model's card is made from
    config.json     the model's
    training.json   of scripts/train/pretrain.py: how it was trained
    about.json      what no record contains, all of it optional: "data" (a text on the training data), "language",
                    "datasets" and "base_model" (ids on the Hub)
and from evaluation records, any JSON files of `titans eval`. The weights need not be there.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..evals.paper_tables import Row, paper_table
from ..evals.records import FORMAT, read_record
from ..evals.tables import count, figure, heading
from ..records.schema import Schema, validate
from .card_results import HUB_ID, eval_results, result_tables
from .describe import describe, find_dtype
from .loading import CommandError, Dtype, folder_name, size
from .series_card import forecaster_card, is_forecaster

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

    from ..configuration_titans import TitansConfig

TEMPLATE = Path(__file__).parent / "card_template.md"
LICENSE, LIBRARY = "apache-2.0", "transformers"
FORM_SAYS = "This model card has been automatically generated."  # in the template that transformers writes
VARIANTS = {
    "mac": "MAC, memory as context (Section 4.1)",
    "mag": "MAG, memory as gate (Section 4.2)",
    "mal": "MAL, memory as layer (Section 4.3)",
    "lmm": "LMM, the memory alone (Section 4.3)",
}
PIPELINES = {"TitansForSequenceClassification": "text-classification", "TitansModel": "feature-extraction"}
AUTO_CLASSES = {"TitansForSequenceClassification": "AutoModelForSequenceClassification", "TitansModel": "AutoModel"}
TAGS = ["titans", "neural-memory", "test-time-training"]
# As in scripts/recipes/, which are not installed with the package; a test compares them.
PAPER_RECIPE = {
    "dataset": "HuggingFaceFW/fineweb-edu",
    "config": "sample-100BT",
    "tokenizer": "TinyLlama/TinyLlama_v1.1",
    "length": 4096,
    "batch": 524_288,
    "learning_rate": 4e-4,
    "weight_decay": 0.1,
}
PAPER_TOKENS = {"paper-15b.yaml": 15_000_000_000, "paper-30b.yaml": 30_000_000_000}
ENGLISH = ("HuggingFaceFW/fineweb-edu",)
ABSOLUTE = re.compile(r"(?:(?<=[\s='\"`(])|^)/(?:[^\s/'\"`]+/)+", re.MULTILINE)


class Training(Schema):
    """What a card says about the training, from `training.json`."""

    command: str
    commit: str | None
    date: str
    torch: str
    transformers: str
    machine: str
    recipe: dict
    parameters: int
    tokens: int
    steps: int
    seconds: float
    held_out_perplexity: float


class About(Schema):
    """What no record contains, from `about.json`."""

    data: str | None = None
    language: str | None = None
    datasets: list[str] | None = None
    base_model: str | None = None


@dataclass
class Model:
    """What a card is made from."""

    name: str
    config: dict
    training: dict | None = None
    about: dict = field(default_factory=dict)
    records: list[dict] = field(default_factory=list)

    @property
    def is_titans(self) -> bool:
        return self.config.get("model_type") == "titans"

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or [""])[0]

    @property
    def recipe(self) -> dict:
        return self.training["recipe"] if self.training else {}

    @property
    def teacher(self) -> str | None:
        """The model that this one was grafted from and taught by."""
        return (self.recipe.get("distil") or {}).get("teacher")


def read_model(folder: Path, records: list[Path] = (), training: Path | None = None, name: str | None = None) -> Model:
    """A model's folder, with the records in it and the given ones."""
    config = read_json(folder / "config.json", "the model's configuration")
    training = training or find_training(folder)
    found = read_json(training, "the training record") if training else None
    about = read_json(folder / "about.json", "what is said about the model") if (folder / "about.json").exists() else {}
    if found is not None:
        validate(Training, found, f"{training}, of scripts/train/pretrain.py")
    validate(About, about, str(folder / "about.json"))
    own = [path for path in sorted(folder.glob("*.json")) if is_record(path)]
    paths = list(dict.fromkeys(path.resolve() for path in [*own, *records]))
    return Model(name or folder_name(folder), config, found, about, [read_record(path) for path in paths])


def find_training(folder: Path) -> Path | None:
    """`training.json` in the folder, or beside it where it is the `model` of a run of scripts/train/pretrain.py."""
    homes = [folder, *([folder.resolve().parent] if folder.resolve().name == "model" else [])]
    return next((home / "training.json" for home in homes if (home / "training.json").is_file()), None)


def read_json(path: Path, what: str) -> dict:
    if not path.is_file():
        raise CommandError(f"there is no {path}: a card needs {what}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CommandError(f"{path} must hold a mapping: it should be {what}")
    return found


def is_record(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def preset_card(name: str) -> "ModelCard":
    """A recipe card: what a preset is and how to train it. It has no weights, and the card says so first."""
    from ..configuration_titans import TitansConfig

    config = TitansConfig.preset(name)
    facts, recipe = describe(config, find_dtype(config, Dtype.auto)), paper_recipe(name)
    return render(
        card_data(
            pipeline_tag="text-generation",
            tags=[*TAGS, f"titans-{config.variant}", "untrained"],
            language="en",
            datasets=[recipe["dataset"]],
        ),
        name=name,
        trained=False,
        titans=True,
        summary=f"A recipe card: what the preset `{name}` of titans-hf is, what it takes, and how to train it.",
        model_rows=titans_rows(config, facts),
        memory_rows=memory_rows(facts),
        recipe={key: f"{value:,}" if isinstance(value, int) else value for key, value in recipe.items()},
        paper=paper_figures(name),
        limits=[
            "There are no weights: what `TitansConfig.preset` makes is random and writes noise.",
            "Depth and feed-forward width were chosen to meet the number of parameters in its name. Whether it reaches "
            "the paper's figures is not known.",
            "The recipe has not been run, on a GPU or with the Hub.",
        ],
    )


def trained_card(model: Model, repo_id: str | None = None) -> "ModelCard":
    """The card of a model that was trained, Titans or a baseline of transformers'."""
    config = titans_config(model)
    facts = describe(config, find_dtype(config, Dtype.auto)) if config else None
    results = eval_results(model.records)
    return render(
        card_data(
            pipeline_tag=PIPELINES.get(model.architecture, "text-generation"),
            tags=[*TAGS, f"titans-{config.variant}"] if config else [model.config.get("model_type", "baseline")],
            language=language(model),
            datasets=datasets(model),
            **({"license": None} if model.teacher else {}),
            base_model=model.about.get("base_model") or (model.teacher if is_hub_id(model.teacher) else None),
            **({"model_name": model.name, "eval_results": results} if results else {}),
        ),
        name=model.name,
        trained=True,
        titans=config is not None,
        repo_id=repo_id or model.name,
        auto_class=AUTO_CLASSES.get(model.architecture, "AutoModelForCausalLM"),
        summary=summary(model, facts),
        model_rows=titans_rows(config, facts) if config else baseline_rows(model),
        memory_rows=memory_rows(facts) if facts else [],
        about_data=model.about.get("data"),
        training_rows=training_rows(model) if model.training else [],
        recipe_yaml=public(recipe_yaml(model.recipe)),
        results=[{**table, "how": [public(how) for how in table["how"]]} for table in result_tables(model.records)],
        limits=trained_limits(model),
    )


def render(data: "ModelCardData", **context) -> "ModelCard":
    from huggingface_hub import ModelCard

    template = re.sub(r"^(\{%.*%\})\n", r"\1", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    try:
        card = ModelCard.from_template(data, template_str=template, **context)
    except ImportError as error:
        raise CommandError("a model card needs jinja2: pip install jinja2") from error
    return ModelCard(re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n")


def card_data(**fields) -> "ModelCardData":
    from huggingface_hub import ModelCardData

    return ModelCardData(**{"library_name": LIBRARY, "license": LICENSE, **fields})


def titans_config(model: Model) -> "TitansConfig | None":
    from huggingface_hub.errors import StrictDataclassError

    from ..configuration_titans import TitansConfig

    if not model.is_titans:
        return None
    try:
        return TitansConfig.from_dict(model.config)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise CommandError(f"{model.name} has a configuration that cannot be read: {error}") from error


def titans_rows(config: "TitansConfig", facts: dict) -> list[tuple[str, str]]:
    first = f" and the first {config.attention_sinks} of a text" if config.attention_sinks else ""
    attention = {
        "mac": f"segments of {config.segment_size} tokens, {config.num_attention_heads} heads",
        "lmm": "none",
    }.get(config.variant, f"a window of {config.sliding_window} tokens{first}, {config.num_attention_heads} heads")
    rows = {
        "variant": VARIANTS[config.variant],
        "parameters": f"{facts['parameters']['all']:,} ({facts['parameters']['without_embeddings']:,} without "
        "embeddings)",
        "layers": str(config.num_hidden_layers),
        "width": f"{config.hidden_size}, feed-forward {config.intermediate_size}",
        "attention": attention,
        "persistent tokens": str(config.num_persistent_tokens),
        "memory": f"{config.memory_num_heads} heads of width {config.head_dim}, MLPs of {config.memory_depth} layers, "
        f"expansion {config.memory_expansion}, chunks of {config.memory_chunk_size} tokens",
        **layer_rows(config),
        "vocabulary": f"{config.vocab_size:,}",
        "precision": facts["dtype"],
    }
    return list(rows.items())


def layer_rows(config: "TitansConfig") -> dict[str, str]:
    """Which layers have a memory and which full attention, where not all are alike."""
    lists = {"layers with a memory": config.memory_layers, "layers with full attention": config.full_attention_layers}
    return {name: ", ".join(map(str, layers)) or "none" for name, layers in lists.items() if layers is not None}


def baseline_rows(model: Model) -> list[tuple[str, str]]:
    """What the configuration of another family says."""
    names = {
        "model_type": "family",
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "intermediate_size": "feed-forward",
        "num_attention_heads": "heads",
        "max_position_embeddings": "positions",
        "vocab_size": "vocabulary",
        "dtype": "precision",
    }
    rows = [("parameters", f"{parameters(model):,}")] if parameters(model) else []
    known = ((label, model.config.get(name)) for name, label in names.items())
    return rows + [(label, f"{x:,}" if isinstance(x, int) else str(x)) for label, x in known if x is not None]


def parameters(model: Model, facts: dict | None = None) -> int | None:
    if facts:
        return facts["parameters"]["all"]
    if model.training:
        return model.training["parameters"]
    return model.records[0]["model"]["parameters"] if model.records else None


def memory_rows(facts: dict) -> list[tuple[str, str]]:
    """What `titans info` tells of the memory and the cache."""
    memory = facts["memory_state_bytes"]
    rows = [
        ("memory", f"{size(memory['all'])} per sequence, weights and momentum; {size(memory['per_layer'])} per layer"),
        ("cache", f"{size(facts['cache_bytes'])} per sequence, memory included; {growth_of(facts)}"),
    ]
    for name, full in facts["full_attention_cache_bytes"].items():
        ratio = f"{size(full['bytes'])} in full attention of the same layers and heads: {full['ratio']:,.2f} times it"
        rows.append((f"at {name} tokens", ratio))
    return rows


def growth_of(facts: dict) -> str:
    grown = facts["cache_bytes_per_token"]
    return f"full attention adds {size(grown)} for every token" if grown else "it never grows"


def paper_recipe(name: str) -> dict:
    file = "paper-30b.yaml" if name.endswith("760m") else "paper-15b.yaml"
    command = f"python scripts/train/pretrain.py scripts/recipes/{file} --preset {name}"
    return {"file": file, "command": command, "tokens": PAPER_TOKENS[file], **PAPER_RECIPE}


def paper_figures(name: str) -> dict | None:
    """The row of the paper's Table 1 for that variant and size, as a table of two columns; None where it has none."""
    _, variant, width = name.split("-")
    table, model = paper_table(1), f"Titans ({variant.upper()})"
    row: Row | None = next(
        (
            row
            for group, rows in table.groups.items()
            for row in rows
            if group.startswith(width.upper()) and row.model == model
        ),
        None,
    )
    if row is None:
        return None
    lines = ["| the paper's Table 1 | " + f"{row.model}, {width.upper()} |", "|---|---:|"]
    lines += [f"| {heading(column)} | {figure(row.values[column.key], table.decimals)} |" for column in table.columns]
    start = f"{width.upper()}, {model}"
    notes = [note for note in table.source["does_not_add_up"] + table.source["notes"] if note.startswith(start)]
    notes = [note.removeprefix(start).lstrip(":, ").rstrip(".") for note in notes]
    return {"source": table.source["paper"], "table": "\n".join(lines), "notes": notes}


def summary(model: Model, facts: dict | None) -> str:
    kind = (
        f"Titans ({facts['variant'].upper()})" if facts else f"{model.config.get('model_type', 'baseline')} (baseline)"
    )
    number = parameters(model, facts)
    of = f" of {count(number)} parameters" if number else ""
    trained = f", trained on {count(model.training['tokens'])} tokens" if model.training else ""
    task = PIPELINES.get(model.architecture)
    noun = f"model for {task.replace('-', ' ')}" if task else "language model"
    if model.teacher:
        trained = f", grafted from {public(model.teacher)} and taught by it on {count(model.training['tokens'])} tokens"
    return f"A {kind} {noun}{of}{trained} with titans-hf."


def training_rows(model: Model) -> list[tuple[str, str]]:
    training, recipe = model.training, model.recipe
    data, tokenizer, settings = (recipe.get(name) or {} for name in ("data", "tokenizer", "training"))
    new = (tokenizer.get("train") or {}).get("vocab_size")
    rows = {
        **({"teacher": model.teacher, "what learned": what_learned(recipe["distil"])} if model.teacher else {}),
        "data": data_source(data),
        "tokenizer": f"a byte-level BPE of {new:,} tokens, learned from the data" if new else tokenizer.get("name"),
        "tokens": f"{training['tokens']:,} in {training['steps']:,} steps",
        "rows": f"{data['sequence_length']:,} tokens" if data.get("sequence_length") else None,
        "learning rate": f"{settings['learning_rate']:g}, cosine" if settings.get("learning_rate") else None,
        "precision": settings.get("precision"),
        "held-out perplexity": f"{training['held_out_perplexity']:.2f}",
        "time": f"{training['seconds'] / 60:,.1f} minutes ({training['machine']})",
        "versions": f"torch {training['torch']}, transformers {training['transformers']}",
        "commit, date": f"{training['commit'] or 'unknown'}, {training['date']}",
        "command": f"`{training['command']}`",
    }
    return [(key, public(str(value)).replace("|", r"\|")) for key, value in rows.items() if value]


def what_learned(distil: dict) -> str:
    rank = distil.get("lora_rank")
    return f"the memories, and attention by LoRA of rank {rank}, merged" if rank else "the memories alone"


def data_source(data: dict) -> str | None:
    source, path = data.get("source"), data.get("path")
    if source == "hub":
        config = f", `{data['config']}`" if data.get("config") else ""
        return f"`{path}`{config}, split `{data.get('split', 'train')}`"
    if source == "python":
        return "the language reference that Python itself carries"
    return f"local files, `{path}` ({source})" if path else None


def is_hub_id(name: object) -> bool:
    """Whether a name could be an id on the Hub and is not a local path."""
    return isinstance(name, str) and HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def datasets(model: Model) -> list[str] | None:
    """Ids on the Hub, as the recipe has them or `about.json`; local files have none."""
    data = model.recipe.get("data") or {}
    if "datasets" in model.about:
        return model.about["datasets"] or None
    return [data["path"]] if data.get("source") == "hub" and is_hub_id(data.get("path")) else None


def language(model: Model) -> str | None:
    data = model.recipe.get("data") or {}
    known = data.get("source") == "python" or data.get("path") in ENGLISH
    return model.about.get("language") or ("en" if known else None)


def recipe_yaml(recipe: dict) -> str:
    import yaml

    return yaml.safe_dump(recipe, sort_keys=False).strip()


def public(text: str) -> str:
    """Without the folders of absolute paths, which are private."""
    return ABSOLUTE.sub("…/", text)


def trained_limits(model: Model) -> list[str]:
    number = parameters(model)
    limits = []
    if model.teacher:
        limits.append(
            f"Its memories learned from {model.training['tokens']:,} tokens. Its other weights are those of "
            f"{public(model.teacher)}, whose licence and limits hold for it."
        )
    elif model.training:
        limits.append(
            f"Trained on {model.training['tokens']:,} tokens: far fewer than models that are of use. It shows how such "
            "a model trains, and is not one to rely on."
            if model.training["tokens"] < 1e9
            else f"Trained on {model.training['tokens']:,} tokens; nobody has looked at what it says."
        )
    limits.append("Not tuned to follow instructions, nor for safety: it may write what is false or offensive.")
    if model.is_titans:
        limits.append(
            "`memory_chunk_size` and the other fields of the configuration are part of what was trained: do not change "
            'them, but for `memory_implementation`, and `memory_forget_to="start"` to read far beyond the rows that it '
            "was trained on."
        )
        limits.append("What it keeps of a long text is lossy: the state is of constant size.")
    if not model.records and number:
        limits.append("It has not been evaluated.")
    return limits


def is_empty_form(card: "ModelCard") -> bool:
    """Whether the card is huggingface_hub's template, unedited."""
    from huggingface_hub import ModelCard

    said = next((line for line in card.text.splitlines() if FORM_SAYS in line), None)
    if said is None:
        return False
    form = ModelCard.from_template(card.data, model_description=said)
    return form.text.split() == card.text.split()


def fill_card(folder: str | Path, repo_id: str) -> None:
    """Replace the empty template that transformers writes for a new repository by a card of the model."""
    from huggingface_hub import ModelCard

    path = Path(folder) / "README.md"
    if not path.is_file() or not is_empty_form(ModelCard.load(path)):
        return
    if is_forecaster(Path(folder)):
        card = forecaster_card(Path(folder), repo_id.split("/")[-1], repo_id)
    else:
        card = trained_card(read_model(Path(folder), name=repo_id.split("/")[-1]), repo_id)
    extra = ModelCard.load(path).data.tags or []
    card.data.tags = list(dict.fromkeys([*card.data.tags, *extra]))
    card.save(path)
