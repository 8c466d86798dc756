"""What the tasks of long context share: lengths, a tokenizer to measure them, and samples made when they are needed.

Prompts and metrics are lm-eval's. A task holds every length, and reports a figure for each.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import ClassVar

from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.ruler.common_utils import get_tokenizer, resolve_tokenizer_name

from .files import given_folder
from .suites import read_lengths


class Samples(Sequence):
    """Documents made on access: with a limit, only those are made.

    The lengths alternate, so that the first documents cover every length.
    """

    def __init__(self, lengths: Sequence[int], count: int, make: Callable[[int, int], dict]):
        self.lengths, self.count, self.make = lengths, count, make
        self.made: dict[int, dict] = {}

    def __len__(self) -> int:
        return self.count * len(self.lengths)

    def __getitem__(self, place: int) -> dict:
        if not 0 <= place < len(self):
            raise IndexError(place)
        if place not in self.made:
            number, turn = divmod(place, len(self.lengths))
            self.made[place] = self.make(self.lengths[turn], number)
        return self.made[place]

    @property
    def features(self) -> dict[str, None]:
        """The names of the fields, for which lm-eval asks."""
        return dict.fromkeys(self[0])


class LongTask(ConfigurableTask):
    """A task of lm-eval whose documents are of several lengths.

    lm-eval's `--metadata` may name them (`max_seq_lengths`), the folder of the texts (`data_dir`) and the `tokenizer`
    that measures; left out, they are the suite's, TITANS_EVAL_DATA's or the Hub's, and the model's.
    """

    SUITE: ClassVar[str]

    def __init__(self, config: dict):
        config = {name: value for name, value in config.items() if name != "class"}
        metadata = dict(config.get("metadata") or {})
        tokenizer = metadata.get("tokenizer")
        if tokenizer is not None and not isinstance(tokenizer, str):
            self.tokenizer = metadata.pop("tokenizer")  # not a config field: lm-eval would log it
        self.folder = given_folder(metadata.get("data_dir"))
        self.lengths = read_lengths(self.SUITE, metadata.get("max_seq_lengths"))
        names = [self.metric_name(length) for length in self.lengths]
        figures = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
        super().__init__(config={**config, "metadata": metadata, "metric_list": figures})

    @cached_property
    def tokenizer(self):
        name = resolve_tokenizer_name(self.config.metadata)
        if name is None:
            raise ValueError(
                f"{self.config.task} measures its samples in the model's tokens: name the tokenizer, by --model_args "
                'pretrained=DIR or --metadata \'{"tokenizer": "DIR"}\''
            )
        return get_tokenizer(name)

    def count(self, text: str) -> int:
        """Tokens of a text, with what the tokenizer puts around it."""
        return len(self.tokenizer(text).input_ids)

    def download(self, dataset_kwargs: dict | None = None, **kwargs) -> None:
        self.dataset = {self.config.test_split: self.samples()}

    def samples(self) -> Sequence[dict]:
        raise NotImplementedError

    def process_results(self, doc: dict, results: list[str]) -> dict[str, float]:
        (score,) = (value for name, value in super().process_results(doc, results).items() if value != -1.0)
        return {self.metric_name(doc["max_length"]): score}

    @staticmethod
    def metric_name(length: int) -> str:
        raise NotImplementedError

    def describe_source(self) -> dict:
        """Where the texts are from: the fields source, dataset and files of a record."""
        raise NotImplementedError


def joined(texts: Iterable[str]) -> str:
    return " ".join(text for text in texts if text)
