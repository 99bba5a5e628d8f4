"""What the installed transformers reads of exports: `python reader.py OUT EXPORT...` writes each one's logits into
OUT/NAME.pt, and what its tokenizer and its samples are into OUT/NAME.json."""

import json
import pathlib
import sys

import torch
import transformers

TEXTS = [
    "Once upon a time, there was a 3.5% fox.\n\n  It ran!",
    "<|im_start|>The fox<|im_end|> sleeps",
    "été 東京 🙂 x",
]
MESSAGES = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once upon a time. "}]
INPUTS = torch.arange(1, 1500, 11)[None]


def read(export: pathlib.Path) -> tuple[torch.Tensor, dict]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(export, output_loading_info=True, attn_implementation="eager")  # sdpa caps no scores (gemma2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    with torch.no_grad():
        logits = model.eval()(input_ids=INPUTS, use_cache=False).logits
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    found = {
        "unread": sorted(key for key, names in report.items() if names),
        "ids": ids,
        "texts": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids],
        "special": sorted(tokenizer.all_special_ids),
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "inputs": sorted(tokenizer(TEXTS[0])),
        "length": tokenizer.model_max_length,
        "image": getattr(tokenizer, "image_token", None),
        "chat": tokenizer.apply_chat_template(MESSAGES, tokenize=False) if tokenizer.chat_template else None,
        "sample": model.generate(INPUTS[:, :9], max_new_tokens=5, do_sample=False)[0].tolist(),
    }
    return logits, found


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    for export in map(pathlib.Path, sys.argv[2:]):
        logits, found = read(export)
        torch.save(logits, out / f"{export.name}.pt")
        (out / f"{export.name}.json").write_text(json.dumps(found))
    print(transformers.__version__)
