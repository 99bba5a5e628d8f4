"""Test every causal-LM family of the installed transformers, built small: its FLOPs, and training on one and two ranks.

    python benchmarks/families.py

FLOPs: `utils.get_model_flops_per_token`, from PaLM's formula or the counter, against torch's counter on real tensors.
Training: the script's functions, fp32, a few steps; the losses of one and two ranks must be equal, and the cross
entropy of causal logits. Writes benchmarks/results/families.json and the tables in docs/MODELS.md.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import utils
from harness import model as models
from harness.base import first_line

SEQUENCE, STEPS, BATCH, TOLERANCE = 64, 4, 4, 1e-5
RESULTS, TABLE = ROOT / "benchmarks" / "results" / "families.json", ROOT / "docs" / "MODELS.md"
MARKS = ("<!-- made by benchmarks/families.py -->", "<!-- end -->")

# Small values for fields of default configs: the first pattern that matches the full name.
SMALL = {
    r"vocab_size.*|n_vocab": 512,
    r"(num|n|decoder|encoder)_.*layers?|n_layer|num_layers": 4,
    r"hidden_size|d_model|n_embd|dim|embedding_size|lru_width|word_embed_proj_dim|decoder_hidden_size": 64,
    r"num_attention_heads|.*attention_heads|n_heads?|num_heads|num_attn_heads": 4,
    r".*key_value_heads|num_kv_heads|n_head_kv": 2,
    r"qk_head_dim": 32,
    r".*head_dim|dim_head|attention_head_size|kv_channels|d_kv|mamba_d_head|mamba_headdim": 16,
    r".*intermediate_size|n_inner|.*ffn_dim|dim_ff|ffn_hidden_size|dff|d_inner|intermediate_dim": 96,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|ffn_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|top_k_experts|moe_k|moe_top_?k": 2,
    r"(moe_)?n_group|(moe_)?topk_group": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len|context_length|.*_positions": 256,
    r".*lora_rank|.*_rank|rotary_dim": 8,
    r".*sliding_window|attention_chunk_size|window_size|attention_window_size": 16,
    r"chunk_size|.*_chunk_size": 16,
    r".*drop.*|.*jitter.*": 0,
}
# Further fields of single families.
WANTED = {
    "bailing_hybrid": {"qk_rope_head_dim": 8, "head_dim": 16},
    "bamba": {"mamba_n_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
}


def families() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_sizes(config) -> dict:
    """Return small values for the sizes in a default config and its sub-configs."""
    sizes, heads = {}, getattr(config, "num_attention_heads", None)
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            sizes[name] = small_sizes(value)
        elif name.endswith("_token_id") and value is not None:
            sizes[name] = 0
        elif name == "head_dim" and value is None:
            sizes[name] = 16
        elif isinstance(value, int | float) and not isinstance(value, bool):
            small = next((to for pattern, to in SMALL.items() if re.fullmatch(pattern, name)), None)
            if name.endswith("key_value_heads") and value == heads:
                small = 4
            if small is not None:
                sizes[name] = type(value)(min(value, small))
    return sizes


def small_config(family: str):
    kind = type(AutoConfig.for_model(family))
    sizes = small_sizes(kind()) | WANTED.get(family, {})
    config = kind(**sizes)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # an encoder otherwise
    config.use_cache = False
    return config


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def flops_on_real_tensors(config) -> float:
    """Return FLOPs per token from torch's counter, for an eager step of a model with weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter does not count grouped matmuls
    tokens = torch.randint(1, 500, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    with (
        FlopCounterMode(display=False, custom_mapping=models.CORRECTED_FORMULAS) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return counter.get_total_flops() / SEQUENCE


def check_flops(config) -> dict:
    """Return FLOPs per token, their source (formula, counter or none, with the reason) and the counter's value."""
    config._attn_implementation = "eager"
    try:
        flops = utils.get_model_flops_per_token(config, SEQUENCE)
    except ValueError as error:
        return {"flops": "none", "flops_why": str(error), "flops_on_real_tensors": flops_on_real_tensors(config)}
    result = {"flops_per_token": flops, "flops_on_real_tensors": flops_on_real_tensors(config), "flops": "counter"}
    with contextlib.suppress(ValueError):  # only the formula has a causal variant
        utils.get_model_flops_per_token(config, SEQUENCE, causal=True)
        result["flops"] = "formula"
    return result


# ---- Training --------------------------------------------------------------------------------------------------------


def batches(rank: int, world: int):
    tokens = torch.randint(1, 500, (STEPS, BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    for step in tokens:
        mine = step[rank * BATCH // world : (rank + 1) * BATCH // world]
        yield {"input_ids": mine[:, :-1], "labels": mine[:, 1:]}


def train(folder: pathlib.Path, device) -> dict:
    """Return the losses of a few steps, and problems: a loss other than the cross entropy, logits that are not
    causal."""
    import torch.distributed as dist

    import train_fsdp
    from harness import model as models
    from harness import resolving
    from harness.flags import parse_args

    rank, world = dist.get_rank(), dist.get_world_size()
    flags = f"--dataset synthetic --precision fp32 --no-compile --sequence-length {SEQUENCE} --num-steps {STEPS}"
    flags += f" --batch-size {BATCH // world} --lr 1e-4 --lr-scheduler constant"
    settings = parse_args(["--model", str(folder), *flags.split()])
    config = models.load_config(settings.model)
    # The router loss is a product of means over a microbatch, so it depends on the number of ranks.
    config.get_text_config().router_aux_loss_coef = 0.0
    settings = resolving.resolve_steps(resolving.resolve(settings, config))
    mesh = train_fsdp.build_mesh(settings, device)
    model = train_fsdp.build_model(settings, config, mesh, device)
    optimizer = models.build_optimizer(settings, model)
    models.verify_sharding(settings, model, optimizer, mesh)
    batch, problems = next(batches(0, 1)), []
    with models.evaluating(model):
        loss = model(**batch, use_cache=False).loss
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        changed = torch.cat([batch["input_ids"][:, :40], batch["input_ids"][:, 40:].flip(1)], 1)
        later = model(input_ids=changed, use_cache=False).logits
    if not torch.allclose(loss, expected, rtol=TOLERANCE, atol=TOLERANCE):
        problems.append(f"the loss is {loss.item():.5f}, the cross entropy of the logits {expected.item():.5f}")
    if not torch.allclose(logits[:, :40], later[:, :40], rtol=1e-3, atol=1e-4):
        problems.append("logits depend on later tokens")
    seen = set()
    for seed in (0, 1):  # with dropout and jitter at 0
        torch.manual_seed(seed)
        with torch.no_grad():
            seen.add(model(**batch, use_cache=False).loss.item())
    losses, rank_batches = [], batches(rank, world)
    for _ in range(STEPS):
        mean = train_fsdp.train_step(settings, model, optimizer, rank_batches).loss.clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return {"losses": losses, "problems": problems, "random": len(seen) > 1}


def walk(names: list[str], out: pathlib.Path) -> None:
    """Test the families on this rank; rank 0 adds a line to `out` for each."""
    import torch.distributed as dist

    from harness.job import start_processes, stop_processes

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device = start_processes()
    for name in names:
        found: dict = {"family": name}
        if dist.get_rank() == 0:
            with out.open("a") as file:
                print(json.dumps(found | {"began": True}), file=file)
        try:
            config = small_config(name)
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                check_size(config)
                if dist.get_world_size() == 1:
                    found |= check_flops(small_config(name))
                found["built"] = True
                found |= train(pathlib.Path(folder), device)
        except Exception as error:  # any error is a result
            found["error"] = f"{type(error).__name__}: {first_line(error)}"[:200]
            found["error"] = re.sub(r"/tmp/\S+?: ", "", found["error"])
        if dist.get_rank() == 0:
            with out.open("a") as file:
                print(json.dumps(found), file=file)
        dist.barrier()
    stop_processes()


def check_size(config) -> None:
    """Build the model on the meta device. Raises ValueError if it is too large to test."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3e7:
        raise ValueError(f"{size:,} parameters with the smallest config")


def collect(ranks: int, names: list[str], folder: pathlib.Path) -> dict[str, dict]:
    """Return the results of `walk` on `ranks` ranks. After a family that kills or stalls the ranks, the next walk
    starts with the family after it."""
    out, found, left = folder / f"{ranks}.jsonl", {}, list(names)
    while left:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, "--walk", str(out), *left]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        seen = -1
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            size = out.stat().st_size if out.exists() else 0
            if process.poll() is None and size == seen:
                os.killpg(process.pid, signal.SIGKILL)
            seen = size
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        for line in lines:
            found[line["family"]] = line
        for line in found.values():
            if line.pop("began", None):
                line["error"] = "the ranks ended or waited for each other"
        left = [name for name in names if name not in found]
    return found


# ---- Result ----------------------------------------------------------------------------------------------------------


def compare_ranks(one: dict, two: dict) -> dict:
    """Return a family's verdict from its results on one and two ranks."""
    verdict = {
        key: one[key] for key in ("flops", "flops_per_token", "flops_on_real_tensors", "flops_why") if key in one
    }
    if not one.get("built"):
        return verdict | {"verdict": "not built", "why": one.get("error", "")}
    if errors := [run["error"] for run in (one, two) if "error" in run]:
        refused = errors[0].startswith("UserError: ")
        return verdict | {"verdict": "refused" if refused else "fails", "why": errors[0].removeprefix("UserError: ")}
    difference = max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True))
    tolerance = 1e-2 if one["random"] else TOLERANCE
    problems = one["problems"] + ([f"losses {difference:.1e} apart"] if not difference <= tolerance else [])
    verdict |= {"losses": one["losses"], "apart": difference, "verdict": "wrong" if problems else "trains"}
    if one["random"] and not problems:
        problems = [f"it draws random numbers, so losses are only close, {difference:.1e} apart"]
    return verdict | ({"why": "; ".join(problems)} if problems else {})


def list_families(names: list[str]) -> str:
    return ", ".join(sorted(names))


def table(result: dict) -> str:
    """Format as Markdown: families that train by source of their FLOPs, refused ones by reason, the others."""
    trained: dict[str, list[str]] = collections.defaultdict(list)
    refused: dict[str, list[str]] = collections.defaultdict(list)
    not_built = [name for name, family in result["families"].items() if family["verdict"] == "not built"]
    for name, family in result["families"].items():
        if family["verdict"] == "trains":
            trained[family["flops"]].append(name)
        elif family["verdict"] == "refused":
            why = family.get("why", "").replace("|", "/")
            why = re.sub(rf"(--model:?) {re.escape(name)} ", r"\1 … ", why)
            why = re.sub(r"\w+ForCausalLM|\w+LMHeadModel", "…", why)
            refused[why].append(name)

    rows = ["| FLOPs | families that train |", "|---|---|"]
    for kind, names in sorted(trained.items(), key=lambda item: -len(item[1])):
        rows.append(f"| {kind}: {len(names)} | {list_families(names)} |")
    rows += ["", "| refused | why |", "|---|---|"]
    for why, names in sorted(refused.items(), key=lambda item: (-len(item[1]), item[1])):
        rows.append(f"| {list_families(names)} | {why} |")
    return "\n".join([*rows, "", f"Not built: {list_families(not_built)}."])


def write_table(result: dict) -> None:
    text = TABLE.read_text()
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    counts = collections.Counter(family["verdict"] for family in result["families"].values())
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    versions = f"transformers {result['transformers']}, torch {result['torch']}"
    summary = f"{len(result['families'])} families, {versions}: {verdicts}."
    TABLE.write_text(f"{before}{MARKS[0]}\n{summary}\n\n{table(result)}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families [all]")
    parser.add_argument("--walk", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="result file [%(default)s]")
    args = parser.parse_args()
    if args.walk:
        return walk(args.names, args.walk)
    names = args.names or families()
    with tempfile.TemporaryDirectory() as folder:
        one, two = (collect(ranks, names, pathlib.Path(folder)) for ranks in (1, 2))
    result = {"torch": torch.__version__, "transformers": transformers.__version__, "families": {}}
    result["date"] = time.strftime("%Y-%m-%d")
    result["families"] = {name: compare_ranks(one[name], two[name]) for name in names}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.out == RESULTS:
        write_table(result)
    for name, found in result["families"].items():
        print(f"{name:24} {found.get('flops', '-'):8} {found['verdict']:10} {found.get('why', '')}")


if __name__ == "__main__":
    main()
