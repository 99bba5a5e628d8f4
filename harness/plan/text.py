"""Plan text: format the JSON object of a plan: the answer, the table, and with --plan-details the rest."""

import math
from collections.abc import Callable

from transformers import PretrainedConfig

from harness import base, flags, job
from harness.plan.predict import FRAGMENTATION, RESERVED_SHARE
from harness.plan.rates import Rates

# Measured over planned tokens/s: minimum, median if there are many runs, maximum. This program's runs are in
# benchmarks/results/plan_measured.json, published ones in plan_published.json; one of these contradicts itself.
OWN_RUNS, OWN_GPUS, OWN_SHARE = "13 measured runs on one GPU", ("H100 SXM", "H200"), (0.959, 1.117)
PUBLISHED_RUNS, PUBLISHED_GPUS = "30 of 31 published runs", ("A100", "H100", "H200")
PUBLISHED_SHARE = (0.861, 1.025, 1.29)
SHORT = {"fits": "yes", "tight": "tight", "does not fit": "NO"}  # verdicts in a table


def describe_plan(settings: flags.Settings, result: dict) -> str:
    """Format the answer and the table; with --plan-details everything."""
    answer = {"verdict": describe_verdict(settings, result)} | describe_speed(result)
    answer |= describe_longest(result) | describe_advice(result)
    answer |= {name: result[name] for name in ("warning", "imports") if result[name]}
    lines = [job.columns(answer)]
    if len(result["configurations"]) > 1:
        lines += describe_configurations(result)
    if settings.plan_details:
        lines += describe_details(settings, result)
    else:
        lines += ["", "--plan-details: memory, time and traffic of a step, and assumptions"]
    return "\n".join(line.rstrip() for line in lines)


# ---- The answer ------------------------------------------------------------------------------------------------------


def describe_verdict(settings: flags.Settings, result: dict) -> str:
    """Return the verdict with the reserved memory."""
    used = describe_share(result["memory_gib"]["reserved"], result["capacity_gib"])
    line = f"{result['verdict']}: {used} on each of {result['gpus']:,} x {result['gpu']}"
    if host := result["memory_gib"]["host"]:
        ranks = min(result["gpus"], settings.gpus_per_node)
        line += f"; {host * ranks:,.0f} GiB of host memory on a node of {base.counted(ranks, 'GPU')}"
    if result["verdict"] != "tight":
        return line
    within = math.ceil(100 * max(abs(share - 1) for share in RESERVED_SHARE))
    return f"{line}; measured runs on one GPU were within {within} % of their plans"


def describe_speed(result: dict) -> dict[str, str]:
    """Return the lines about the given configuration: speed, with the range of measured runs if they are comparable,
    advice if the host bounds a step, and the full run."""
    share, lines = result["measured_share"] or result["published_share"], {}  # this program's runs first
    if result["fits"]:
        lines["expect"] = describe_metrics(result, share)
        if share:
            runs = OWN_RUNS if result["measured_share"] else PUBLISHED_RUNS
            lines["expect"] += f"; {runs} reached {percents(share)} of their plans"
    if result["bound_by"] == "host":
        lines["host"] = describe_host(result)
    if "run" in result:
        run = result["run"]
        time = ranged(run["hours"], share, duration, inverse=True)
        if "cost" in run:
            time += f", {ranged(run['cost'], share, dollars, inverse=True)}"
        length = f"{base.counted(run['steps'], 'step')}, {run['tokens']:,} tokens"
        lines["this run"] = f"{time}: {length}, without evaluation and checkpoints"
    elif "num_epochs" in result:
        problem = f"--num-epochs {result['num_epochs']:g}: the number of steps depends on the data"
        lines["this run"] = f"no hours: {problem}; the header of a run has it, --num-steps N plans it"
    return lines


def describe_advice(result: dict) -> dict[str, str]:
    """Return the lines about the recommended configuration and its alternatives."""
    best, search, safer = result["fastest"], result["search"], result["safer"]
    planned = f"{base.counted(search['planned'], 'configuration')} planned in {search['seconds']:.0f} s"
    if not search["complete"]:
        planned += f"; --plan-seconds {search['plan_seconds']:g} ended the search"
    if not best:
        problem, advice = "nothing planned fits", "more GPUs, a shorter --sequence-length or a smaller --model"
        if not search["complete"]:
            problem = f"nothing planned within --plan-seconds {search['plan_seconds']:g} fits"
            advice = f"more --plan-seconds, {advice}"
        return {"fastest": f"{problem}: {advice}", **describe_adapters(result), "search": planned}
    title = "fastest"
    if best["given"]:
        advice = "as it is"
        if search["planned"] > 1:
            advice += "; nothing else planned is more than 1 % faster"
    else:
        title = title_best(result)
        advice = f"{best['flags']}: "
        if result["fits"]:
            advice += f"{100 * (best['tokens_per_sec'] / result['tokens_per_sec'] - 1):+.1f} %, "
        elif best["gpus"] != result["gpus"]:
            advice += f"{best['gpus']:,} GPUs, "
        advice += f"{describe_metrics(best, None)}, {describe_share(best['reserved_gib'], best['capacity_gib'])}"
        if best["host_gib"]:
            advice += f" and {best['host_gib']:,.0f} GiB of host memory per GPU"
    lines = {title: advice}
    if safer:
        change = 100 * (safer["tokens_per_sec"] / best["tokens_per_sec"] - 1)
        room = describe_share(safer["reserved_gib"], safer["capacity_gib"])
        lines["safer"] = f"{safer['flags']}: {change:+.1f} %, {describe_metrics(safer, None)}, {room}"
    elif best["verdict"] == "tight":
        lines["but"] = "it is tight; no configuration with less memory was found"
        if not search["complete"]:
            lines["but"] += f" within --plan-seconds {search['plan_seconds']:g}"
    if in_float8 := result["in_float8"]:
        change = 100 * (in_float8["tokens_per_sec"] / best["tokens_per_sec"] - 1)
        lines["float8"] = f"with --precision fp8: {change:+.0f} %, lower precision"
    lines |= describe_adapters(result)
    lines["command"] = best["command"]
    given = next(row for row in result["configurations"] if row["given"])
    lines["tokens"] = f"{best['tokens_per_step']:,} per step, unchanged"
    if best["tokens_per_step"] != given["tokens_per_step"]:
        lines["tokens"] = f"{best['tokens_per_step']:,} per step instead of {given['tokens_per_step']:,}: another run"
    return lines | {"search": planned}


def describe_longest(result: dict) -> dict[str, str]:
    """Return the line about the longest sequences that fit, {} if none was planned."""
    texts: list[str] = []
    for row in result["longest"]:
        changes = {name: value for name, value in row["changes"].items() if name != "sequence_length"}
        text = f"{row['sequence_length']:,} tokens a sequence" if not texts else f"{row['sequence_length']:,}"
        text += f" with {flags.as_flags(changes)}" if changes else " as it is"
        if row["host_gib"]:
            text += f" and {row['host_gib']:,.0f} GiB of host memory per GPU"
        texts.append(text)
    positions = result["positions"]
    if positions and any(row["sequence_length"] > positions for row in result["longest"]):
        texts.append(f"the model has {positions:,} positions")
    return {"longest": "; ".join(texts)} if texts else {}


def describe_adapters(result: dict) -> dict[str, str]:
    """Return the line about adapters that fit, {} if none was planned."""
    row = result["with_adapters"]
    if not row:
        return {}
    room = describe_share(row["reserved_gib"], row["capacity_gib"])
    return {"adapters": f"{row['flags']}: {describe_metrics(row, None)}, {room}; other training, only of adapters"}


def describe_host(result: dict) -> str:
    """Return the line about a step that the host bounds, with flags that give the GPU more work per kernel."""
    time, row = result["time_ms"], result["configurations"][0]
    on_gpu = result["step_time_ms"] - time["launches"]
    line = f"bounds a step: {time['host']:,.1f} ms for launches, {on_gpu:,.1f} ms on the GPU; "
    advice = ["a larger --batch-size"]
    if row["gradient_accumulation_steps"] > 1:
        advice.append("fewer and larger microbatches (--gradient-accumulation-steps)")
    if result["precision"] == "fp8":
        advice.append("no --precision fp8")
    return f"{line}{' or '.join(advice)} helps"


def title_best(result: dict) -> str:
    """Return the title of the recommended configuration."""
    if not result["fits"]:
        return "fits with"
    return "safer" if result["verdict"] == "tight" else "fastest"


# ---- The table -------------------------------------------------------------------------------------------------------


def describe_configurations(result: dict) -> list[str]:
    """Return the table's lines: the given configuration, the recommended one, the others by speed, other numbers of
    GPUs."""

    def order(row: dict) -> tuple:
        title = 0 if row["given"] else 1 if row["fastest"] else 2
        return title, row["gpus"] != result["gpus"], row["gpus"], not row["fits"], -row["tokens_per_sec"]

    price = "cost_per_billion_tokens"
    header = "  GPUs  sharding      checkpoints    batch  GiB a GPU  fits   tokens/s  MFU"
    lines = ["", f"{'':10}{header}{'$ a billion' if price in result else '':>13}"]
    for row in sorted(result["configurations"], key=order):
        name = "as is" if row["given"] else title_best(result) if row["fastest"] else "safer" if row["safer"] else ""
        replicas = f" x{row['dp_replicate_size']}" if row["dp_replicate_size"] > 1 else ""
        batch = f"{row['batch_size']:,} x {row['gradient_accumulation_steps']:,}"
        lines.append(
            f"{name:10}{row['gpus']:6,}  {'ZeRO-' + str(row['zero_stage']) + replicas:14}"
            f"{row['activation_checkpointing']:11}{batch:>9}{row['reserved_gib']:11,.1f}{SHORT[row['verdict']]:>6}"
            f"{row['tokens_per_sec']:11,.0f}{mfu(row):>5}{f'{row[price]:,.2f}' if price in row else '':>13}"
        )
        others = flags.as_flags({name: value for name, value in row["changes"].items() if name not in row})
        if others:
            lines.append(f"{'':18}with {others}")
    return [*lines, f"{'':10}(batch: sequences at once x microbatches; x2: two replicas of the sharded model)"]


# ---- Details ---------------------------------------------------------------------------------------------------------

DESCRIBED = (
    *("zero_stage", "dp_replicate_size", "context_parallel", "precision", "attention", "compile"),
    *("activation_checkpointing", "fused_loss", "optimizer", "cpu_offload"),
)
ASSUMED = {
    "memory": f"rank 0, the fullest; {100 * FRAGMENTATION:.0f} % fragmentation, {base.CONTEXT_GIB} GiB for CUDA and "
    f"{base.NCCL_GIB} GiB per communicator",
    "attention": "saves the logsumexp, accumulates the query gradient in fp32; eager attention stores all scores",
    "documents": "each sequence is one document without padding; its tokens attend to all its keys in FLOPs and MFU",
    "layers": "compiled layers are partitioned like inductor's; each tensor that their kernels write is written and "
    "read once; eager layers run operator by operator; shallow models are extrapolated to the full depth",
    "time": "operators run one after the other, with a gap between kernels; collectives overlap their pass, except for "
    "the first gathers and the last reductions; the host launches ahead; data never wait",
}


def describe_details(settings: flags.Settings, result: dict) -> list[str]:
    """Return the lines of --plan-details: the run, memory, traffic, time and assumptions."""
    trained = f", {result['trained_parameters']:,} of them trained"
    setup = {
        "plan": f"{settings.model} on {result['gpus']:,} x {result['gpu']}",
        "model": f"{result['parameters']:,} parameters{trained}, {result['flops']}",
        "flags": flags.as_flags({name: getattr(settings, name) for name in DESCRIBED}),
        "batch": settings.describe_batch(result["gpus"]),
    }
    sent = {
        f"{entry['collective'].replace('_', '-')} x {entry['calls']:,} by {entry['ranks']:,} ranks": entry["gib"]
        for entry in result["collectives"]
    }
    return [
        *("", job.columns(setup)),
        *table(f"memory of the fullest GPU at its peak, {result['peak_at']}, GiB", result["at_peak_gib"]),
        *table("besides tensors, GiB", result["beside_tensors_gib"]),
        *table(f"peak of each kind, of {result['capacity_gib']:,.2f} GiB", result["memory_gib"]),
        *table("sent by each GPU in a step, GiB", sent),
        *table(
            "time of a step, ms; of communication only the exposed part counts, of the host the launches",
            result["time_ms"] | {"step": result["step_time_ms"]},
        ),
        *("", "assumptions", job.columns({f"  {name}": text for name, text in result["assumptions"].items()})),
    ]


def table(title: str, values: dict[str, float]) -> list[str]:
    return ["", title, *(f"  {name:36}{value:12,.2f}" for name, value in values.items())]


def assumptions(rates: Rates) -> dict[str, str]:
    """Return the assumptions by subject."""
    lines = {"gpu": rates.resolved_from} if rates.resolved_from else {}
    values = ", ".join(f"{name} {value:,.4g}" for name, value in rates.values.items())
    return lines | {"assumed": f"{values}: shares of datasheets, docs/PLAN.md"} | ASSUMED


def measured_shares(
    settings: flags.Settings, config: PretrainedConfig, result: dict
) -> tuple[tuple[float, float] | None, tuple[float, float, float] | None]:
    """Return (OWN_SHARE, PUBLISHED_SHARE), each None for a plan that is not comparable: all these runs train every
    parameter of a dense model in bf16 or fp8, and the GPU bounds their steps."""
    text = config.get_text_config()
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    gpu = base.find_gpu(result["gpu"])
    is_other_kind = any(experts) or settings.cpu_offload or settings.lora_rank or settings.precision == "fp32"
    if is_other_kind or result["bound_by"] == "host" or gpu is None:
        return None, None
    own = OWN_SHARE if result["gpus"] == 1 and gpu.plan_name in OWN_GPUS else None
    return own, PUBLISHED_SHARE if gpu.plan_name.startswith(PUBLISHED_GPUS) else None


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def describe_metrics(row: dict, share: tuple | None) -> str:
    """Format speed, MFU and price of a configuration, with the range that follows from `share`."""
    parts = [f"{ranged(row['tokens_per_sec'], share, '{:,.0f}'.format)} tokens/s"]
    if row["mfu_percent"]:
        parts.append(f"MFU {mfu(row)} %")
    if "cost_per_billion_tokens" in row:
        price = ranged(row["cost_per_billion_tokens"], share, dollars, inverse=True)
        parts.append(f"{price} a billion tokens")
    return ", ".join(parts)


def ranged(value: float, share: tuple | None, write: Callable[[float], str], inverse: bool = False) -> str:
    """Format a value with the minimum and maximum from `share`; `inverse` for a value that falls with speed."""
    if not share:
        return write(value)
    ends = (value / share[-1], value / share[0]) if inverse else (value * share[0], value * share[-1])
    least, most = (write(float(f"{end:.3g}")) for end in ends)
    return f"{write(value)} ({least} to {most})"


def mfu(row: dict) -> str:
    return f"{row['mfu_percent']:.1f}" if row["mfu_percent"] else "-"


def dollars(price: float) -> str:
    return f"${price:,.0f}" if price >= 10 else f"${price:.3g}"


def duration(hours: float) -> str:
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:,.1f} days"


def percents(share: tuple) -> str:
    return f"{100 * share[0]:.0f} to {100 * share[-1]:.0f} %"


def describe_share(gib: float, capacity: float) -> str:
    return f"{gib:,.1f} of {capacity:,.1f} GiB ({100 * gib / capacity:,.0f} %)"
