"""Why lm-eval's perplexity of an export is not that of the run's held-out loss: both computed from the export, token by
token, and what lies between them added up, in nats.

    python benchmarks/lm_eval_proof.py outputs/story story --lm-eval results.json --out benchmarks/results/lm_eval.json
"""

import argparse
import json
import math
import pathlib
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STORIES = pathlib.Path(__file__).resolve().parent.parent / "assets" / "demo" / "stories" / "validation.jsonl"


@torch.no_grad()
def nats(model, tokens: list[int]) -> torch.Tensor:
    """What each token but the first costs, given those before it: shape (len(tokens) - 1,)."""
    ids = torch.tensor(tokens)
    logits = model(ids[None, :-1], use_cache=False).logits[0].double()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def compare(model, tokenizer, texts: list[str], length: int) -> dict:
    """Sums in nats and how many tokens they are over, from the run's held-out loss down to lm-eval's sum."""
    end = tokenizer.eos_token_id
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    stream = [token for document in documents for token in (*document, end)]
    place = [number for document in documents for number in range(len(document) + 1)]  # in its document
    packed = torch.full((len(stream),), math.nan, dtype=torch.float64)
    cut = torch.zeros(len(stream), dtype=torch.bool)  # whether its document began before its window
    for first in range(0, (len(stream) - 1) // length * length, length):
        packed[first + 1 : first + length + 1] = nats(model, stream[first : first + length + 1])
        cut[first + 1 : first + length + 1] = torch.tensor(
            [place[p] > p - first for p in range(first + 1, first + length + 1)]
        )
    alone = torch.cat([torch.cat([nats(model, [end, *d]), torch.tensor([math.nan])]) for d in documents])
    place = torch.tensor(place)
    ends, seen, first = alone.isnan(), ~packed.isnan(), place == 0
    change = alone - packed
    terms = {
        "held-out windows": (packed, seen),
        "end-of-text labels, which lm-eval has not": (-packed, seen & ends),
        "tokens in no window: the first, and the last partial one": (alone, ~seen & ~ends),
        "first tokens of stories, after end-of-text alone": (change, seen & ~ends & first),
        "tokens of stories that a window had cut": (change, seen & ~ends & ~first & cut),
        "other tokens, which saw stories before their own": (change, seen & ~ends & ~first & ~cut),
    }
    rows = {name: [values[chosen].sum().item(), int(chosen.sum())] for name, (values, chosen) in terms.items()}
    total, tokens = sum(value for value, _ in rows.values()), int((~ends).sum())
    assert math.isclose(total, alone[~ends].sum().item())
    return {"terms": rows, "lm_eval": [total, tokens], "loss": rows["held-out windows"][0] / int(seen.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("export", help="its export")
    parser.add_argument("--lm-eval", help="the results that lm_eval wrote, to compare with")
    parser.add_argument("--out", help="where the figures go, as JSON")
    args = parser.parse_args()
    run = pathlib.Path(args.run)
    flags = json.loads((run / "config.json").read_text())["flags"]
    said = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in STORIES.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(args.export, dtype=torch.float32).eval()
    found = compare(model, AutoTokenizer.from_pretrained(args.export), texts, flags["sequence_length"])
    total, words = found["lm_eval"][0], sum(len(text.split()) for text in texts)
    found["run"] = {"eval_loss": next(line["eval_loss"] for line in reversed(said) if "eval_loss" in line)}
    found["date"] = time.strftime("%Y-%m-%d")
    found["by_hand"] = {
        "word_perplexity": math.exp(total / words),
        "byte_perplexity": math.exp(total / sum(len(text.encode()) for text in texts)),
        "token_perplexity": math.exp(total / found["lm_eval"][1]),
    }
    if args.lm_eval:
        results = json.loads(pathlib.Path(args.lm_eval).read_text())
        found["by_lm_eval"] = {key: value for key, value in results["results"]["stories"].items() if "_per" in key}
    print(f"{'':58}{'nats':>12}{'tokens':>9}")
    for name, (value, tokens) in (found["terms"] | {"lm-eval's sum": found["lm_eval"]}).items():
        print(f"{name:58}{value:12,.2f}{tokens:9,}")
    print(json.dumps({key: found[key] for key in found if key not in ("terms", "lm_eval")}, indent=2))
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
