"""Trains every pair of techniques for two steps on CPU: a combination is trained or refused by name, never broken.

    python benchmarks/covering.py --ranks 2 --out covering.json

Runs are chosen so that any two values of two flags stand together in one of them that the command line accepts; where
no accepted combination has both, one refused run shows why. A run is trained if it ends with 0 and its losses are
those of the other runs on the same tokens to within 3 %, refused if it ends with 2 and one line. Exits with 1 if any is
neither.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import socket
import statistics
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.flags import OPTIMIZERS, Settings, contradiction, parse_args

FACTORS = {
    "precision": ("fp32", "bf16", "bf16-pure", "fp8 tensorwise", "fp8 rowwise", "fp8 rowwise_with_gw_hp"),
    "optimizer": tuple(OPTIMIZERS),
    "cpu_offload": (False, True),
    "activation_checkpointing": ("none", "selective", "full"),
    "compile": (False, True),
    "zero_stage": (3, 2, 1, 0),
    "sequence_length": (32, 20),  # with two sequences 20 is no multiple of 16 tokens
    "gradient_accumulation_steps": (1, 2),
}
NEAR = 0.03  # of float8 and bf16 to fp32 in two steps, as in tests/pair/test_parallel.py
MODEL = {
    "model_type": "llama",
    "vocab_size": 1536,  # the demo tokenizer's
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def pairs(combination: dict) -> set[tuple]:
    """Each two values of it, with their names."""
    return set(itertools.combinations(combination.items(), 2))


def covering(factors: dict, accepted) -> list[dict]:
    """Combinations such that each pair of values that an accepted one can have is in an accepted one, and each other
    pair in one. The next is always that with most pairs that are new, the first of them."""
    product = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    good, bad = [], []
    for combination in product:
        (good if accepted(combination) else bad).append((combination, pairs(combination)))
    chosen = []
    covered: set[tuple] = set()
    for candidates in (good, bad):
        while True:
            combination, new = max(candidates, key=lambda one: len(one[1] - covered), default=(None, set()))
            if not new - covered:
                break
            covered |= new
            chosen.append(combination)
    return chosen


def flags_of(combination: dict) -> list[str]:
    """The combination as it stands on a command line."""
    words = []
    for name, value in combination.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "precision":
            precision, _, recipe = value.partition(" ")
            words += [flag, precision] + (["--fp8-emulate", "--fp8-recipe", recipe] if recipe else [])
        elif name == "compile":
            words.append("--compile" if value else "--no-compile")
        elif value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return words


def is_accepted(base: Settings, combination: dict) -> bool:
    """Whether the command line takes it; `base` has all other flags."""
    precision, _, recipe = combination["precision"].partition(" ")
    changes = combination | {"precision": precision, "fp8_recipe": recipe or None, "fp8_emulate": bool(recipe)}
    return not contradiction(dataclasses.replace(base, **changes))


def start_rank(rank: int, ranks: int, port: int, argv: list[str], output: pathlib.Path) -> int:
    """The pid of a process that is one rank of a run; what it prints goes into a file."""
    import train_fsdp

    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in names.items()}
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        train_fsdp.main(parse_args(argv))
        exit_code = 0
    except SystemExit as left:
        exit_code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


def run(folder: pathlib.Path, number: int, combination: dict, ranks: int) -> dict:
    """What became of one combination, from another process for each rank, as a crash would end this one."""
    name, output = f"run-{number}", folder / f"run-{number}.txt"
    argv = [*common_flags(folder), "--run-name", name, *flags_of(combination)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    pids = [start_rank(rank, ranks, port, argv, output) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    result = {"flags": " ".join(flags_of(combination)), "exit_codes": codes}
    result["seconds"] = round(time.monotonic() - began, 1)
    said = [line for line in output.read_text(errors="replace").splitlines() if line]
    metrics = folder / "out" / name / "metrics.jsonl"
    if codes == [0] * ranks:
        logged = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = [line["loss"] for line in logged if not line.get("final")]
        return result | {"outcome": "trained", "losses": losses}
    errors = [line for line in said if line.startswith("train_fsdp.py: error: ")]
    if set(codes) == {2} and len(errors) == 1 and not any("Traceback" in line for line in said):
        return result | {"outcome": "refused", "says": errors[0].removeprefix("train_fsdp.py: error: ")}
    return result | {"outcome": "broken", "says": said[-30:]}


def common_flags(folder: pathlib.Path) -> list[str]:
    tokenizer = ROOT / "assets" / "demo"
    flags = "--dataset demo --num-steps 2 --batch-size 2 --num-workers 0 --log-interval 1 --lr 1e-3 --timeout-minutes 5"
    folders = ["--output-dir", folder / "out", "--cache-dir", folder / "cache"]
    return [*flags.split(), *map(str, ["--model", folder / "model", "--tokenizer", tokenizer, *folders])]


def prepare(folder: pathlib.Path) -> Settings:
    """Writes the model's config; the flags that all combinations share."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    return parse_args(common_flags(folder))


def mark_strays(results: list[dict]) -> None:
    """Calls a run broken whose losses are not finite, or far from the median of the runs on the same tokens."""
    tokens: dict[tuple, list[dict]] = {}
    for result in results:
        if result["outcome"] == "trained":
            sizes = (result["combination"]["sequence_length"], result["combination"]["gradient_accumulation_steps"])
            tokens.setdefault(sizes, []).append(result)
    for same in tokens.values():
        for step in range(2):
            middle = statistics.median(result["losses"][step] for result in same)
            for result in same:
                loss = result["losses"][step]
                if not math.isfinite(loss) or abs(loss / middle - 1) > NEAR:
                    result |= {"outcome": "broken", "says": [f"step {step + 1}: loss {loss}, of all {middle}"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of what became of each combination")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; aot_eager generates no code and is quick"
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the combinations to run, from 0 [all]")
    args = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        base, results = prepare(folder), []
        torch.compile = functools.partial(torch.compile, backend=args.backend)
        for number, combination in enumerate(covering(FACTORS, lambda one: is_accepted(base, one))):
            if args.only is not None and number not in args.only:
                continue
            result = run(folder, number, combination, args.ranks)
            print(number, result["outcome"], result["seconds"], result["flags"], result.get("says", ""), flush=True)
            results.append(result | {"combination": combination})
    mark_strays(results)
    outcomes = [result["outcome"] for result in results]
    counts = {outcome: outcomes.count(outcome) for outcome in ("trained", "refused", "broken")}
    print(counts)
    if args.out:
        of_all = {"ranks": args.ranks, "torch": torch.__version__, "backend": args.backend, "counts": counts}
        of_all |= {"date": time.strftime("%Y-%m-%d"), "runs": results}
        args.out.write_text(json.dumps(of_all, indent=2) + "\n")
    return 1 if counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
