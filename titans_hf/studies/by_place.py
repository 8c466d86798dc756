"""How well a model reads, by place in the text, with its memory on, reset at each segment, and never written.

    python scripts/studies/by_place.py runs/small/mag/model --data DATA --tokens 12288

DATA holds `wikitext2/wiki.test.raw`, by itself or under `lm_eval/`. Prints the mean loss of a token, in nats, over the
articles of WikiText-2 that are long enough; they are cut at `--tokens`.

Axes: N articles, T tokens, P tokens of a piece, V vocabulary.
"""

import argparse
from pathlib import Path

import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..evals.files import data_folder, documents
from ..evals.model import MEMORY, TitansLM
from ..records.files import write_record
from .places import places


def read_texts(folder: Path, tokenizer, tokens: int) -> Tensor:
    """The first `tokens` tokens of the articles that are long enough, after the start token: [N, 1 + T]."""
    texts = map(wikitext_detokenizer, documents("wikitext", data_folder(folder)))
    found = [tokenizer(text, verbose=False).input_ids[:tokens] for text in texts]
    kept = [[tokenizer.bos_token_id, *ids] for ids in found if len(ids) == tokens]
    if not kept:
        raise ValueError(f"no article has {tokens:,} tokens: lower --tokens")
    return torch.tensor(kept)


@torch.no_grad()
def losses(lm: TitansLM, ids: Tensor) -> Tensor:
    """The mean loss of every place, [T]."""
    parts = []
    for start, logits in lm._pieces(ids[:, :-1], needed=0):  # [N, P, V]
        target = ids[:, start + 1 : start + 1 + logits.shape[1]]
        parts.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none"))
    return torch.cat(parts, dim=1).mean(0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a Titans model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmarks' files")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--forget-to", choices=("zero", "start"), help="in place of the model's own memory_forget_to")
    parser.add_argument("--record", type=Path, help="write <record>.json")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    own = {} if args.forget_to is None else {"memory_forget_to": args.forget_to}
    model = AutoModelForCausalLM.from_pretrained(args.model, **own).eval()
    ids = read_texts(args.data, tokenizer, args.tokens)
    stretches = places(args.tokens)
    print(f"{len(ids)} articles")
    print(f"{'tokens':<8}" + "".join(f"{f'{start}-{end}':>12}" for start, end in stretches))
    means = {}
    for memory in tqdm(MEMORY, desc="memory", leave=False):
        lm = TitansLM(pretrained=model, tokenizer=tokenizer, batch_size=len(ids), memory=memory)
        found = losses(lm, ids.to(model.device))
        means[memory] = [round(found[start:end].mean().item(), 4) for start, end in stretches]
        tqdm.write(f"{memory:<8}" + "".join(f"{mean:>12.3f}" for mean in means[memory]))
    if args.record:
        write_record(
            args.record, model=args.model.as_posix(), articles=len(ids), places=stretches, nats_per_token=means
        )
