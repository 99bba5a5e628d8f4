"""The planned tables of docs/MEMORY.md and docs/PLAN.md, in Markdown; about ten minutes on one core.

python benchmarks/plan_tables.py
"""

import json
import pathlib
import sys
import tempfile
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import train_fsdp
from harness.flags.parser import parse_args
from harness.model.configs import load_config
from harness.model.flops import known_flops
from harness.model.weights import on_meta
from harness.plan import gpus
from harness.plan.predict import predict


def mpt(width: int, layers: int, heads: int, positions: int) -> dict:
    """A GPT-NeoX of the sizes of llm-foundry's MPT, whose own attention with ALiBi has no kernel here."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": 50432, "max_position_embeddings": positions}
    return {"model_type": "gpt_neox", "tie_word_embeddings": True} | sizes


LLAMA2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
KEMPNER = "--model llama3.1-8b --precision bf16-pure --activation-checkpointing full --sequence-length 4096 \
    --batch-size 4 --gradient-accumulation-steps 2 --plan-gpu H200"
TITAN = "--model llama3.1-8b --attention flash --batch-size 2 --activation-checkpointing selective --no-fused-loss \
    --plan-gpus 8"
# Its H100 have 96 GB of HBM2e at 2.4 TB/s, run at 500 W, and peak between SXM and NVL, as it says: here as NVL.
TITANS_H100 = {"memory_gib": 93.1, "memory_gb_per_s": gpus.MEMORY_SHARE * 2400}
for unit in ("matmul_tflops", "fp8_tflops", "attention_tflops"):
    TITANS_H100[unit] = gpus.find_rates("H100 SXM", {}).assumed[unit] * 835 / 989
FULL = "--precision bf16-pure --activation-checkpointing full"
PLAIN = "--attention flash --no-compile --no-fused-loss --plan-gpus 4"


def planned(flags: str, given: dict | None = None) -> dict:
    settings = parse_args(["--plan", *flags.split()])
    config = load_config(settings.model)
    settings = train_fsdp.resolve(settings, config)
    rates = gpus.find_rates(settings.plan_gpu or "H100 SXM", given or {}, settings.attention == "flash")
    model = on_meta(config, settings.attention)
    flops, _ = known_flops(model, settings.sequence_length, train_fsdp.RECIPE.flops_per_token)
    return predict(settings, train_fsdp.RECIPE, config, settings.plan_gpus[0], rates, flops).to_json()


def row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    print("MEMORY.md: checkpointing, loss, batch, ZeRO-0 to 3, of it activations, ms a step\n")
    for checkpointing in ("none", "selective", "full"):
        for loss, flag in (("fused", ""), ("full logits", "--no-fused-loss")):
            for batch in (1, 2, 4):
                flags = f"--plan-gpus 4 --activation-checkpointing {checkpointing} --batch-size {batch} {flag}"
                plans = [planned(f"{flags} --zero-stage {stage}") for stage in range(4)]
                totals = [f"{plan['memory_gib']['total']:.1f}" + " *" * (not plan["fits"]) for plan in plans]
                times = f"{plans[2]['step_time_ms']:.0f} / {plans[3]['step_time_ms']:.0f}"
                row(checkpointing, loss, batch, *totals, f"{plans[3]['at_peak_gib']['activations']:.1f}", times)
    print("\nMEMORY.md: by kind, at the peak\n")
    stages = ("--zero-stage 0", "--zero-stage 2", "--zero-stage 3", "--zero-stage 3 --activation-checkpointing full")
    plans = [planned(f"--plan-gpus 4 {stage}") for stage in stages]
    for kind in plans[0]["at_peak_gib"]:
        row(kind, *(f"{plan['at_peak_gib'][kind]:.2f}" for plan in plans))
    row("total", *(f"{plan['memory_gib']['total']:.1f}" for plan in plans))
    row("when", *(plan["peak_at"] for plan in plans))
    print("\nMEMORY.md: the published run, ZeRO-2, ZeRO-3\n")
    for flags in ("bf16-pure", "bf16-pure --activation-checkpointing full", "bf16 --activation-checkpointing full"):
        sizes = [planned(f"{PLAIN} --precision {flags} --zero-stage {z}")["memory_gib"]["total"] for z in (2, 3)]
        row(f"`--precision {flags}`", *(f"{size:.1f} GiB ({size * 2**30 / 1e9:.1f} GB)" for size in sizes))
    print("\nPLAN.md: published, planned tokens/s per GPU, error\n")
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama2": LLAMA2_7B, "3b": mpt(2560, 32, 20, 8192), "1b": mpt(2048, 24, 16, 8192)}
        for name, sizes in (models | {"7b": mpt(4096, 32, 32, 2048)}).items():
            pathlib.Path(folder, name).mkdir()
            pathlib.Path(folder, name, "config.json").write_text(json.dumps(sizes))
        llama2 = f"--model {folder}/llama2 --attention flash --sequence-length 4096 --batch-size 2 --plan-gpus 96"
        llama2 += " --dp-replicate-size 12 --precision bf16-pure"
        foundry = f"--attention flash --no-compile --no-fused-loss --plan-gpus 8 --model {folder}"
        h200 = TITAN.replace("--plan-gpus 8", "--plan-gpus 32 --plan-gpu H200")
        for name, published, flags, given in (
            ("KempnerForge 1x H200", 10471, f"{KEMPNER} --plan-gpus 1", {}),
            ("KempnerForge 4x H200", 9746, f"{KEMPNER} --plan-gpus 4", {}),
            ("fms-fsdp", 9600, llama2, {}),
            ("llm-foundry 7B at 2048", 10643, f"{foundry}/7b --sequence-length 2048 --batch-size 6", {}),
            ("llm-foundry 3B at 8192", 16578, f"{foundry}/3b --sequence-length 8192 --batch-size 2", {}),
            ("llm-foundry 1B at 8192", 29157, f"{foundry}/1b --sequence-length 8192 --batch-size 3", {}),
            ("torchtitan eager", 5762, f"{TITAN} --no-compile", TITANS_H100),
            ("torchtitan compiled", 6667, TITAN, TITANS_H100),
            ("torchtitan float8", 8532, f"{TITAN} --precision fp8", TITANS_H100),
            ("torchtitan float8 32x H200", 10938, f"{h200} --precision fp8", {}),
            ("SmolLM3-3B 4x H100", 8415, f"{PLAIN} --zero-stage 2 {FULL}", {}),
        ):
            speed = planned(flags, given)["tokens_per_sec_per_gpu"]
            row(name, f"{published:,}", f"{speed:,.0f}", f"{100 * (speed / published - 1):+.0f} %")


if __name__ == "__main__":
    main()
