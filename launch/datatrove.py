"""Tokenize a folder of text too large for one machine, with datatrove's readers, tokenizer step and executors:

    pip install datatrove==0.10.1 orjson
    python launch/datatrove.py --dataset corpus/ --output corpus-tokens --tokenizer HuggingFaceTB/SmolLM3-3B
    python train_fsdp.py --dataset corpus-tokens --tokenizer HuggingFaceTB/SmolLM3-3B

Reads .jsonl, also compressed, and .parquet from a folder or a bucket; one task reads a file. OUTPUT appears when all
tasks are done. Until then OUTPUT.work has the tokens and, in `logs`, datatrove's logs; lines that it cannot read are
logged there and left out. The same command again continues with the tasks that are not done.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import sys


def publish(_, task: int, tasks: int, tokens: str, output: str) -> None:
    """Rename the tokens of all tasks to `output`, without files that have no document. The last job."""
    import os  # here, as Slurm's and Ray's jobs get this function without its module
    import pathlib

    for file in pathlib.Path(tokens).glob("*.ds"):
        if not file.stat().st_size:
            for part in pathlib.Path(tokens).glob(f"{file.name}*"):
                part.unlink()
    os.rename(tokens, output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dataset", required=True, help="folder or URL with .jsonl or .parquet files")
    add("--output", required=True, help="the folder of .ds files to make")
    add("--tokenizer", required=True, help="hub id, or folder with a tokenizer.json")
    add("--text-field", default="text", help="column of the text [text]")
    add("--workers", type=int, default=os.cpu_count(), help="tasks at a time, each on one core [the cores here]")
    add("--executor", choices=("local", "slurm", "ray"), default="local", help="where tasks run [local]")
    add("--executor-options", type=json.loads, default={}, help="its keywords, as JSON: for slurm partition, time, ...")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    from datatrove.io import get_datafolder
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    dataset = args.dataset if "://" in args.dataset else os.path.abspath(args.dataset)
    output = pathlib.Path(args.output).absolute()
    if output.exists():
        sys.exit(f"launch/datatrove.py: error: --output {output}: already exists; give another")
    readers = {"**/*.jsonl*": JsonlReader, "**/*.parquet": ParquetReader}
    files = {pattern: get_datafolder(dataset).list_files(glob_pattern=pattern) for pattern in readers}
    tasks = max(map(len, files.values()))  # each reader divides its files among them
    if not tasks:
        sys.exit(
            f"launch/datatrove.py: error: --dataset {args.dataset}: a folder with .jsonl or .parquet files is needed"
        )
    identity = [dataset, files, args.text_field, args.tokenizer]  # another identity is other work
    work = output.with_name(f"{output.name}.work") / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    tokens = str(work / "tokens")

    steps = [
        readers[pattern](dataset, glob_pattern=pattern, text_key=args.text_field) for pattern in files if files[pattern]
    ]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    lacks = "end-of-text token (eos_token)" if tokenizer.is_fast else "tokenizer.json"
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        sys.exit(f"launch/datatrove.py: error: --tokenizer {args.tokenizer}: it has no {lacks}; give one that has it")
    if tokenizer.split_special_tokens:
        problem = "it treats special tokens as text, which datatrove's workers do not"
        sys.exit(f"launch/datatrove.py: error: --tokenizer {args.tokenizer}: {problem}; let the run tokenize")
    vocabulary = os.path.join(os.path.abspath(args.tokenizer), "tokenizer.json")
    name = vocabulary if os.path.isfile(vocabulary) else args.tokenizer
    writer = DocumentTokenizer(tokens, name, shuffle_documents=False)
    writer.tokenizer = tokenizer.backend_tokenizer  # with transformers' settings, for the same tokens as in a run
    writer.tokenizer.no_truncation()  # settings in tokenizer.json are ignored
    writer.tokenizer.no_padding()
    end_of_text = ("<end>", tokenizer.eos_token_id)
    writer.tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[end_of_text])

    executors = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}
    executor = functools.partial(executors[args.executor], **args.executor_options)
    tokenize = executor([*steps, writer], tasks=tasks, workers=args.workers, logging_dir=str(work / "logs"))
    last = functools.partial(publish, tokens=tokens, output=str(output))
    executor([last], tasks=1, workers=1, depends=tokenize, logging_dir=str(work / "logs-of-publish")).run()


if __name__ == "__main__":
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file's name would hide the package
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    main()
