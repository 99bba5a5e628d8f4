"""Tokenized corpora that other tools wrote: the same losses from all of them, what opening ten billion tokens takes,
and how fast windows are read beside numpy's own memmap.

    python -m venv /tmp/tools
    echo $PWD/.venv/lib/python3.11/site-packages > /tmp/tools/lib/python3.11/site-packages/project.pth
    /tmp/tools/bin/pip install --no-deps megatron-core==0.16.1 datatrove==0.10.1 loguru humanize
    /tmp/tools/bin/python benchmarks/formats.py

The stories of the demo are tokenized and written by megatron-core's IndexedDatasetBuilder, datatrove's
DocumentTokenizer and MegatronDocumentTokenizer, datasets' save_to_disk and to_parquet, and NumPy. nanoGPT and llm.c
have scripts and no package: their files are written here by the published layouts. Writes
benchmarks/results/formats.json.
"""

import argparse
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pathlib
import struct
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import numpy as np
import psutil

import train_fsdp
import utils
from harness.data.sample_order import GlobalOrderSampler

DEMO = ROOT / "assets" / "demo"
END = "<|endoftext|>"
VOCABULARY = 50_304  # of the corpora that are only opened and read
COLD_WINDOWS = 200  # that are read of a file that is not in memory
TEN_BILLION, DOCUMENTS = 10**10, 20_000_000
PACKAGES = ("torch", "numpy", "pyarrow", "datasets", "megatron-core", "datatrove")


# ----------------------------------------------------------------------------------------------------------------------
# The same documents, by the tools themselves


def write_megatron(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "stories_text_document.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(folder / "stories_text_document.idx"))


def write_datatrove(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str], shuffle: bool = False) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(
        str(folder), str(DEMO / "tokenizer.json"), eos_token=END, shuffle_documents=shuffle, seed=1
    )
    step.run((Document(text=text, id=str(number)) for number, text in enumerate(texts)), 0, 1)


def write_datatrove_megatron(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    tokenizer = str(DEMO / "tokenizer.json")
    step = MegatronDocumentTokenizer(output_folder=str(folder), tokenizer_name_or_path=tokenizer, eos_token=END)
    step.run((Document(text=text, id=str(number)) for number, text in enumerate(texts)), 0, 1)


def write_disk(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": documents}).save_to_disk(folder / "disk", num_shards=3)


def write_parquet(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": documents}).to_parquet(folder / "a.parquet")


def write_nanogpt(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    np.concatenate(documents).astype("<u2").tofile(folder / "train.bin")


def write_llmc(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    tokens, header = np.concatenate(documents).astype("<u4"), np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(tokens)
    (folder / "stories_train.bin").write_bytes(header.tobytes() + tokens.tobytes())


def write_npy(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    np.save(folder / "a.npy", np.concatenate(documents))


def write_npz(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    np.savez_compressed(folder / "a.npz", tokens=np.concatenate(documents))


def write_jsonl(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    lines = (json.dumps({"input_ids": document.tolist()}) + "\n" for document in documents)
    (folder / "a.jsonl").write_text("".join(lines))


def write_text(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


WRITERS = {
    "text, tokenized by the program": write_text,
    "Megatron: IndexedDatasetBuilder": write_megatron,
    "Megatron: datatrove's MegatronDocumentTokenizer": write_datatrove_megatron,
    "datatrove: DocumentTokenizer": write_datatrove,
    "datasets: save_to_disk": write_disk,
    "datasets: to_parquet": write_parquet,
    "nanoGPT": write_nanogpt,
    "llm.c, uint32": write_llmc,
    "NumPy: .npy": write_npy,
    "NumPy: .npz": write_npz,
    "JSON lines of ids": write_jsonl,
}


def read_stories(count: int) -> tuple[list[np.ndarray], list[str]]:
    """(the tokens of each story with an end-of-text token, its text)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    with (DEMO / "stories" / "train.jsonl").open() as lines:
        texts = [json.loads(line)["text"].strip("\n") for line in itertools.islice(lines, count)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [np.array([*ids, tokenizer.eos_token_id], np.uint16) for ids in encoded], texts


def in_new_process(function, *arguments):
    """What `function(send, ...)` sends from a process that is forked from this one, which has all imports."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=function, args=(sender.send, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        sys.exit(f"{function.__name__}{arguments} failed")
    finally:
        process.join()


def as_program(send, argv: list[str], output: str) -> None:
    """The program, with what it prints in a file."""
    from harness.flags import parse_args

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    send(output)
    train_fsdp.main(parse_args(argv))


def train(folder: pathlib.Path, source: pathlib.Path, name: str, steps: int) -> tuple[list[float], str]:
    """(the losses of a run and of its evaluation, the program's line about the data)."""
    flags = f"--demo --sequence-length 128 --batch-size 4 --num-steps {steps} --log-interval 1 --precision fp32"
    flags += f" --eval-interval {steps} --sample-tokens 2 --no-final-checkpoint --perf-warmup-steps 1 --no-compile"
    where = ["--output-dir", str(folder), "--run-name", name, "--cache-dir", str(folder / "cache")]
    output = in_new_process(as_program, [*flags.split(), "--dataset", str(source), *where], str(folder / "said"))
    said = pathlib.Path(output).read_text()
    metrics = folder / name / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [line[key] for line in lines if not line.get("final") for key in ("loss", "eval_loss") if key in line]
    if len(losses) != steps + 1:
        sys.exit(f"{source}: {said[-2000:]}")
    about = [line for line in said.splitlines() if line.startswith("data ")]
    return losses, about[0].removeprefix("data").strip().replace(str(folder), "...").replace(f"{ROOT}/", "")


def compare_losses(folder: pathlib.Path, count: int, steps: int) -> dict:
    """The losses of a run on each format, which have to be the same floats; shuffled files of datatrove have the same
    documents in another order."""
    documents, texts = read_stories(count)
    table: dict = {"documents": count, "steps": steps, "formats": {}}
    expected = None
    for number, (name, write) in enumerate(WRITERS.items()):
        source = folder / f"corpus-{number}"
        source.mkdir()
        write(source, documents, texts)
        losses, line = train(folder, source, f"run-{number}", steps)
        expected = expected or losses
        table["formats"][name] = {"same": losses == expected, "last_loss": losses[-2], "line": line}
        print(f"{name:48} {'the same' if losses == expected else 'DIFFERS'}  {losses[-2]!r}  {line}", flush=True)
    table["losses"] = expected
    table["shuffled"] = compare_shuffled(folder / "shuffled", documents, texts)
    return table


def compare_shuffled(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> dict:
    """Whether datatrove's shuffled files have all documents once, cut where the index says."""
    write_datatrove(folder, documents, texts, shuffle=True)
    packed = utils.get_dataset(None, 256, dataset=str(folder), vocab_size=VOCABULARY)
    found = np.split(packed.tokens[0 : len(packed.tokens)], packed.mapped.document_ends[:-1])
    same = sorted(part.tobytes() for part in found) == sorted(document.tobytes() for document in documents)
    in_order = all(map(np.array_equal, found, documents))
    print(f"{'datatrove: shuffled':48} {'the same' if same else 'OTHER'} documents, in order: {in_order}", flush=True)
    return {"same_documents": same, "in_order": in_order}


# ----------------------------------------------------------------------------------------------------------------------
# Ten billion tokens


def make_large(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Sparse files of ten billion tokens, by format; the indexes have 20 million documents of 500 tokens."""
    files = {
        name: folder / file for name, file in (("nanoGPT", "flat.bin"), ("Megatron", "m.bin"), ("datatrove", "a.ds"))
    }
    for file in files.values():
        with file.open("wb") as raw:
            raw.truncate(2 * TEN_BILLION)
    length = TEN_BILLION // DOCUMENTS
    with (folder / "m.idx").open("wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        np.full(DOCUMENTS, length, "<i4").tofile(index)
        (np.arange(DOCUMENTS, dtype="<i8") * 2 * length).tofile(index)
        np.arange(DOCUMENTS + 1, dtype="<i8").tofile(index)
    (np.arange(1, DOCUMENTS + 1, dtype="<u8") * length).tofile(folder / "a.ds.index")
    return files


def drop_from_memory(file: pathlib.Path) -> None:
    """Lets the kernel forget what it keeps of a file."""
    with file.open("rb") as raw:
        os.fsync(raw.fileno())
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Used:
    """Wall and CPU seconds and resident memory that calls took."""

    def __init__(self):
        self.process, self.figures = psutil.Process(), dict.fromkeys(("seconds", "cpu_seconds", "mebibytes"), 0.0)

    def by(self, function, *args, **options):
        """What the function returns."""
        before, start, cpu = self.process.memory_info().rss, time.perf_counter(), time.process_time()
        answer = function(*args, **options)
        self.figures["seconds"] += time.perf_counter() - start
        self.figures["cpu_seconds"] += time.process_time() - cpu
        self.figures["mebibytes"] += (self.process.memory_info().rss - before) / 2**20
        return answer


def measure_large(folder: pathlib.Path) -> dict:
    """What each format's file of ten billion tokens takes."""
    table: dict = {"tokens": TEN_BILLION, "documents": DOCUMENTS}
    for name, file in make_large(folder).items():
        table[name] = {"library": in_new_process(open_large, str(file))}
        table[name]["program"] = in_new_process(run_large, str(file), str(folder))
        print(f"ten billion tokens, {name}: {table[name]}", flush=True)
        file.unlink()
    return table


def open_large(send, file: str) -> None:
    """Sends what opening a corpus takes, and what all up to its first batch takes, as a library."""
    used = Used()
    packed = used.by(utils.get_dataset, None, 8192, dataset=file, vocab_size=VOCABULARY)
    opened = dict(used.figures)
    used.by(packed.fingerprint)
    (index,) = used.by(next, iter(GlobalOrderSampler(len(packed), 1)))
    used.by(utils.create_collate_fn(), [used.by(packed.__getitem__, index)])
    send({"opened": opened, "first_batch": used.figures})


def run_large(send, file: str, folder: str) -> None:
    """Starts the program on a corpus and ends it at its first batch; sends what all about the data takes until then."""
    from harness.flags import parse_args

    used = Used()
    for name in ("load_model_files", "load_data", "first_words", "describe_identity"):
        setattr(train_fsdp, name, functools.partial(used.by, getattr(train_fsdp, name)))

    def take_first_batch(job, *_) -> None:
        batches = train_fsdp.training_batches(job.settings, job.data, job.state, job.device)
        assert used.by(next, batches)["input_ids"].shape == (1, 8192)
        send(used.figures)
        os._exit(0)

    train_fsdp.train = take_first_batch
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "bos_token_id": None}
    config |= {"max_position_embeddings": 8192, "eos_token_id": None, "architectures": ["LlamaForCausalLM"]}
    model = pathlib.Path(folder, "model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    flags = "--sequence-length 8192 --num-steps 1 --num-workers 0 --no-final-checkpoint --no-compile"
    where = ["--dataset", file, "--model", str(model), "--output-dir", folder]
    train_fsdp.main(parse_args([*flags.split(), *where, "--run-name", f"run-of-{pathlib.Path(file).stem}"]))


# ----------------------------------------------------------------------------------------------------------------------
# Rates


def make_random(folder: pathlib.Path, tokens: int) -> dict[str, pathlib.Path]:
    """The same random tokens in each mapped format, documents of 500 tokens."""
    import datasets
    import pyarrow

    ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens, dtype=np.uint16)
    rows = ids.reshape(-1, 500)
    names = {"nanoGPT": "flat", "llm.c": "llmc", "Megatron": "megatron", "datatrove": "datatrove", ".npy": "npy"}
    folders = {name: folder / "rates" / directory for name, directory in names.items()}
    for path in folders.values():
        path.mkdir(parents=True)
    write_nanogpt(folders["nanoGPT"], [ids], [])
    write_llmc(folders["llm.c"], [ids], [])
    write_npy(folders[".npy"], [ids], [])
    write_megatron(folders["Megatron"], list(rows), [])
    ids.tofile(folders["datatrove"] / "a.ds")
    (np.arange(1, len(rows) + 1, dtype="<u8") * 500).tofile(folders["datatrove"] / "a.ds.index")
    folders["Arrow"] = folder / "rates" / "arrow"
    offsets = np.arange(0, len(ids) + 1, 500, dtype=np.int32)
    column = pyarrow.ListArray.from_arrays(offsets, ids)
    datasets.Dataset(pyarrow.table({"input_ids": column})).save_to_disk(folders["Arrow"], num_shards=1)
    return folders


def read_windows(send, source: pathlib.Path, way: str, cold: bool) -> None:
    """Sends how many tokens a second are read in shuffled windows of 8,192: ours, or copies of numpy's memmap."""
    files = [path for path in source.iterdir() if path.suffix in (".bin", ".ds", ".npy", ".arrow")]
    packed = utils.get_dataset(None, 8192, dataset=str(source), vocab_size=VOCABULARY)
    if way == "numpy":
        packed = utils.PackedDataset(np.memmap(files[0], np.uint16, "r"), 8192)
    order = np.random.default_rng(1).permutation(len(packed))
    if cold:
        order = order[:COLD_WINDOWS]
        for file in files:
            drop_from_memory(file)
    start, cpu = time.perf_counter(), time.process_time()
    for index in order:
        np.array(packed[index])
    tokens = len(order) * 8192
    send({"wall": tokens / (time.perf_counter() - start), "cpu": tokens / (time.process_time() - cpu)})


def make_cold(folder: pathlib.Path) -> pathlib.Path:
    """A folder with a flat file of 2 GiB, much more than is read of it."""
    cold = folder / "cold"
    cold.mkdir()
    block = np.random.default_rng(0).integers(0, VOCABULARY, 2**24, dtype=np.uint16)
    with (cold / "train.bin").open("wb") as file:
        for _ in range(64):
            block.tofile(file)
    return cold


def measure_rates(folder: pathlib.Path, tokens: int, repeats: int) -> dict:
    sources = make_random(folder, tokens)
    ways = [("numpy's memmap", sources["nanoGPT"], "numpy"), *((name, path, "ours") for name, path in sources.items())]
    cold = make_cold(folder)
    tables = {"warm": ways, "cold": [("numpy's memmap", cold, "numpy"), ("nanoGPT", cold, "ours")]}
    rates: dict = {"tokens": tokens, "window": 8192, "cold_windows": COLD_WINDOWS, "cold_tokens": 2**30}
    for state, of_state in tables.items():
        found: dict[str, list[dict]] = {name: [] for name, _, _ in of_state}
        for _ in range(repeats):  # in turn, so that other work on the machine meets them all
            for name, source, way in of_state:
                found[name].append(in_new_process(read_windows, source, way, state == "cold"))
        rates[state] = {}
        for name, runs in found.items():
            best = {clock: round(max(run[clock] for run in runs)) for clock in ("wall", "cpu")}
            rates[state][name] = best
            print(f"{state}: {name:16} {best['wall']:15,} tokens/s, {best['cpu']:15,} a CPU second", flush=True)
    return rates


def main() -> None:
    import datasets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000, help="stories of the compared corpora")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the corpora whose reading is timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "formats.json")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    result: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for name, measure in (
            ("losses", lambda: compare_losses(folder, args.documents, args.num_steps)),
            ("ten_billion", lambda: measure_large(folder)),
            ("rates", lambda: measure_rates(folder, args.tokens, args.repeats)),
        ):
            result[name] = measure()
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    formats = result["losses"]["formats"].values()
    sys.exit(0 if all(one["same"] for one in formats) and result["losses"]["shuffled"]["same_documents"] else 1)


if __name__ == "__main__":
    main()
