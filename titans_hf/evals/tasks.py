"""Table 1 as tasks of lm-eval: its own, from the Hub or from files, and the accuracy that the paper prints.

`lm_eval_tasks/titans_table1.yaml` names this class for each task. Prompts, splits and metrics stay lm-eval's.
"""

from functools import cached_property

from datasets import Dataset, DatasetDict
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from .files import data_folder, documents
from .paper_tables import paper_table

PRINTED = "table1_acc"


class Table1Task(ConfigurableTask):
    """A task of lm-eval whose documents may come from files.

    Besides lm-eval's metrics it reports `table1_acc`: the accuracy of Table 1, which is acc for some tasks and acc_norm
    for others. The group's mean of it is the paper's Avg. column.
    """

    def __init__(self, config: dict):
        config = {name: value for name, value in config.items() if name != "class"}
        self.folder = data_folder((config.get("metadata") or {}).get("data_dir"))
        columns = [column for column in paper_table(1).columns if column.task == config["task"] and column.unit == "%"]
        self.printed = columns[0].metric if columns else None
        super().__init__(config=config)
        if self.printed:
            self._aggregation_list[PRINTED], self._higher_is_better[PRINTED] = mean, True

    def download(self, dataset_kwargs: dict | None = None, **kwargs) -> None:
        if self.folder is None:
            super().download(dataset_kwargs, **kwargs)
        else:
            split = self.config.test_split or self.config.validation_split
            self.dataset = DatasetDict({split: Dataset.from_list(documents(self.config.task, self.folder))})

    @cached_property
    def eval_docs(self) -> Dataset:
        """Cached: lm-eval asks for them repeatedly and would process them each time."""
        return super().eval_docs

    def fewshot_docs(self):
        """Few-shot examples are refused: the files hold the scored split alone."""
        return super().fewshot_docs() if self.folder is None else None

    def fewshot_context(self, doc, num_fewshot, *args, **kwargs):
        if num_fewshot and self.folder is not None:
            raise ValueError(f"num_fewshot={num_fewshot}: Table 1 is zero-shot, and its files hold no examples; use 0")
        return super().fewshot_context(doc, num_fewshot, *args, **kwargs)

    def process_results(self, doc, results):
        found = super().process_results(doc, results)
        return {**found, PRINTED: found[self.printed]} if self.printed else found
