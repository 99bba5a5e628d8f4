"""Plan text: what --plan prints, in 80 columns but for commands, tables and paths: the answer, the table, and with
--plan-details what they are made of. Called by `planning`. Computes no figure that the JSON object does not have."""

from collections.abc import Callable

from harness import base, flags, job
from harness.plan.predict import FRAGMENTATION, PUBLISHED_MEMORY_RUNS, PUBLISHED_MEMORY_SHARE, TIGHT
from harness.plan.rates import Rates
from harness.plan.search import MIN_GAIN

# Tokens/s of published runs as shares of their plans by assumed rates, the least, the median and the most:
# `published_share` of benchmarks/results/plan_published.json. The run that is left out contradicts itself. They say
# something of plans of their kinds, and nothing of others.
PUBLISHED_KINDS, PUBLISHED_GPUS = "dense models on A100, H100 and H200", ("A100", "H100", "H200")
PUBLISHED_RUNS, PUBLISHED_SHARE = "30 of 31 published runs", (0.83, 1.05, 1.22)
SHORT = {"fits": "yes", "tight": "tight", "does not fit": "NO"}  # verdicts in a table
ROWS = 8  # of the table, of the number of GPUs that was asked for


def describe_plan(settings: flags.Settings, result: dict) -> str:
    """The answer and the table; with --plan-details all of it."""
    answer = {"verdict": describe_verdict(result)} | describe_speed(result) | describe_advice(result)
    lines = [job.columns({name: text}) if name == "command" else fill(name, text) for name, text in answer.items()]
    if len(result["configurations"]) > 1:
        lines += ["", *describe_configurations(result)]
    if settings.plan_details:
        lines += describe_details(settings, result)
    else:
        lines += ["", "--plan-details: memory, time and traffic of a step, and what is assumed"]
    return "\n".join(line.rstrip() for line in lines)


# ---- The answer ------------------------------------------------------------------------------------------------------


def describe_verdict(result: dict) -> str:
    """Whether it fits, and the memory that it takes."""
    used = share_of(result["memory_gib"]["reserved"], result["capacity_gib"])
    line = f"{result['verdict']}: {used} on each of {result['gpus']:,} x {result['gpu']}"
    if not result["fits"]:
        return line
    line += f"; {PUBLISHED_MEMORY_RUNS} took {percents(PUBLISHED_MEMORY_SHARE)} of their plans, so "
    if result["verdict"] == "tight":
        return line + f"above {100 * TIGHT:.0f} % it may run out of memory"
    return line + f"up to {100 * TIGHT:.0f} % fits"


def describe_speed(result: dict) -> dict[str, str]:
    """What to expect of the configuration as it is, with the range of published runs where it is of their kind."""
    share, lines = result["published_share"], {}
    if result["fits"]:
        lines["expect"] = figures(result, share)
        if share:
            lines["expect"] += f"; rates are assumed, {PUBLISHED_RUNS} ({PUBLISHED_KINDS}) reached {percents(share)}"
        elif "assumed" in {rate["source"] for rate in result["rates"].values()}:
            lines["expect"] += f"; some rates are assumed, and the published runs compared are of {PUBLISHED_KINDS}"
    if "run" in result:
        run = result["run"]
        time = ranged(run["hours"], share, duration, inverse=True)
        if "cost" in run:
            time += f", {ranged(run['cost'], share, dollars, inverse=True)}"
        length = f"{base.counted(run['steps'], 'step')}, {run['tokens']:,} tokens"
        lines["this run"] = f"{time}: {length}, without evaluation and checkpoints"
    return lines


def describe_advice(result: dict) -> dict[str, str]:
    """The configuration to take."""
    best, rows, search = result["fastest"], result["configurations"], result["search"]
    planned = f"{base.counted(search['planned'], 'configuration')} planned in {search['seconds']:.0f} s"
    if not search["complete"]:
        planned += f"; --plan-seconds {search['plan_seconds']:g} left no time for more"
    if not best:
        advice = "nothing that was planned fits: more GPUs, a shorter --sequence-length or a smaller --model"
        return {"fastest": advice, "search": planned}
    if best["asked"]:
        lines = {"fastest": "as it is" if len(rows) == 1 else "as it is; nothing else planned is more than 1 % faster"}
    else:
        change = ""
        if result["fits"]:
            change = f"{100 * (best['tokens_per_sec'] / result['tokens_per_sec'] - 1):+.1f} %, "
        elif best["gpus"] != result["gpus"]:
            change = f"{best['gpus']:,} GPUs, "
        used = share_of(best["reserved_gib"], result["capacity_gib"])
        host = f" and {best['host_gib']:,.0f} GiB of the host for each" if best["host_gib"] else ""
        share = None if result["fits"] else result["published_share"]
        lines = {name_of_best(result): f"{best['flags']}: {change}{figures(best, share)}, {used}{host}"}
    if best["verdict"] == "tight":
        lines["but"] = "it is tight; nothing with more room was found"
    lines["command"] = best["command"]
    asked = next(row for row in rows if row["asked"])
    if best["tokens_per_step"] == asked["tokens_per_step"]:
        lines["tokens"] = f"{best['tokens_per_step']:,} a step, as asked"
    else:
        lines["tokens"] = f"{best['tokens_per_step']:,} a step instead of {asked['tokens_per_step']:,}: another run"
    return lines | {"search": planned}


def name_of_best(result: dict) -> str:
    """What the configuration to take is called: "safer" where the asked one is as fast, but has less room."""
    if not result["fits"]:
        return "fits with"
    is_faster = result["fastest"]["tokens_per_sec"] > (1 + MIN_GAIN) * result["tokens_per_sec"]
    return "fastest" if is_faster else "safer"


# ---- The table -------------------------------------------------------------------------------------------------------


def describe_configurations(result: dict) -> list[str]:
    """Side by side: the configuration as it is, the one to take, the fastest of the rest, and other numbers of GPUs."""
    rows = result["configurations"]
    first = [row for row in rows if row["asked"] or row["fastest"]]
    rest = [row for row in rows if row not in first and row["gpus"] == result["gpus"]]
    rest.sort(key=lambda row: (not row["fits"], -row["tokens_per_sec"]))
    scaling = [row for row in result.get("scaling", []) if row["gpus"] != result["gpus"]]
    is_priced = "cost_per_billion_tokens" in rows[0]
    price = f"{'$ a billion':>13}" if is_priced else ""
    lines = [f"{'':10}  GPUs  sharding      checkpoints    batch  GiB a GPU  fits   tokens/s  MFU{price}"]
    for row in (first + rest)[:ROWS] + scaling:
        name = "as is" if row["asked"] else name_of_best(result) if row["fastest"] else ""
        replicas = f" x{row['dp_replicate_size']}" if row["dp_replicate_size"] > 1 else ""
        batch = f"{row['batch_size']:,} x {row['gradient_accumulation_steps']:,}"
        line = (
            f"{name:10}{row['gpus']:6,}  {'ZeRO-' + str(row['zero_stage']) + replicas:14}"
            f"{row['activation_checkpointing']:11}{batch:>9}{row['reserved_gib']:11,.1f}{SHORT[row['verdict']]:>6}"
            f"{row['tokens_per_sec']:11,.0f}{mfu(row):>5}"
        )
        lines.append(line + (f"{row['cost_per_billion_tokens']:13,.2f}" if is_priced else ""))
        others = flags.as_flags({name: value for name, value in row["changes"].items() if name not in row})
        if others:
            lines.append(f"{'':18}with {others}")
    return [*lines, f"{'':10}(batch: sequences at once x microbatches; x2: two replicas of the sharded model)"]


# ---- What they are made of -------------------------------------------------------------------------------------------


def describe_details(settings: flags.Settings, result: dict) -> list[str]:
    """The run, its memory, traffic and time, and what is assumed."""
    world, memory = result["gpus"], result["memory_gib"]
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    techniques = [
        settings.precision,
        "compiled" if settings.compile else "eager",
        f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing",
        "fused loss" if settings.fused_loss else "loss from full logits",
        f"{settings.optimizer}, offloaded to the host" if settings.cpu_offload else settings.optimizer,
    ]
    if settings.ema:
        techniques.append(f"ema {settings.ema:g}")
    setup = {
        "plan": f"{settings.model} on {world:,} x {result['gpu']}, ZeRO-{settings.zero_stage}, "
        f"replicas x shards {replicas:,} x {world // replicas:,}",
        "model": f"{result['parameters']:,} parameters, {result['flops']}",
        "technique": ", ".join(techniques),
        "batch": settings.describe_batch(world),
    }
    lines = ["", *(fill(name, text) for name, text in setup.items())]

    lines.append(f"\nmemory of the fullest GPU in GiB, at its peak, {result['peak_at']}")
    lines.append(f"  {'':15}{'then':>9}{'at most':>9}")
    for kind, gib in result["at_peak_gib"].items():
        lines.append(f"  {kind:15}{gib:9,.2f}{memory[kind]:9,.2f}")
    for kind, gib in result["beside_tensors_gib"].items():
        lines.append(f"  {kind:15}{gib:9,.2f}")
    lines.append(f"  {'in all':15}{memory['reserved']:9,.2f} of {result['capacity_gib']:,.2f}")
    if settings.cpu_offload:
        lines.append(f"  on the host, for each GPU: {memory['host']:,.2f}")

    lines.append("\nsent by each GPU in a step, GiB")
    for entry in result["collectives"]:
        kind, times = entry["collective"].replace("_", "-"), f"x {entry['calls']:,}"
        between = f", {entry['gib_between_nodes']:,.2f} of it between nodes" if entry["gib_between_nodes"] > 0 else ""
        lines.append(f"  {kind:15}{times:9}{entry['gib']:9,.2f}   {entry['ranks']:,} ranks{between}")

    time_ms = result["time_ms"]
    notes = {
        "memory": "what memory bounds: norms, activations, copies",
        "exposed": f"communication that computation does not hide, of {time_ms['communication']:,.1f}",
        "contention": "computation slowed by communication beside it",
        "launches": "waiting for the host",
    }
    lines.append("\ntime of a step, ms")
    for name, value in (time_ms | {"step": result["step_time_ms"]}).items():
        if name != "communication":
            lines.append(f"  {name:15}{value:9,.1f}   {notes.get(name, '')}")
    lines.append(f"  {'':15}{result['tokens_per_sec_per_gpu']:9,.0f}   tokens/s a GPU, MFU {mfu(result)}")
    lines += ["\nassumptions", *(fill(f"  {name}", text) for name, text in result["assumptions"].items())]
    return lines


def assumptions(settings: flags.Settings, config, rates: Rates) -> dict[str, str]:
    """What the plan takes for granted, in words."""
    layers = "operator by operator"
    if settings.compile:
        layers = "partitioned as inductor does; each tensor that its kernels have to write is written and read once"
    attention = "saves a row's logsumexp, accumulates the query gradient in fp32"
    if settings.attention == "eager":
        attention = "the scores' matrix in memory"
    order = "nothing beside anything, then what the host does"
    if rates.on_gpu:
        order = "collectives beside their pass, but for the first gathers and the last reductions; launches ahead"
    lines = {"gpu": rates.taken} if rates.taken else {}
    for source in ("measured", "given", "assumed"):
        of_source = [f"{name} {value:,.4g}" for name, value in rates.values.items() if rates.sources[name] == source]
        if of_source:
            where = f", in {rates.file}" if source != "assumed" else ": shares of datasheets, docs/PLAN.md"
            lines[source] = f"{', '.join(of_source)}{where}"
    return lines | {
        "memory": f"rank 0, the fullest; {100 * FRAGMENTATION:.0f} % fragmentation, {base.CONTEXT_GIB} GiB for CUDA "
        f"and {base.NCCL_GIB} GiB a communicator",
        "attention": attention,
        "layers": f"{layers}; shallow models, extrapolated to {config.get_text_config().num_hidden_layers} layers",
        "time": f"one operator after the other; {order}; data always there",
    }


def published_share(rates: Rates, config) -> tuple[float, float, float] | None:
    """What published runs reached of such plans; None where no such run was compared."""
    text = config.get_text_config()
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    kind = base.find_gpu(rates.device)
    is_of_their_kind = kind is not None and kind.plan_name.startswith(PUBLISHED_GPUS) and not any(experts)
    return PUBLISHED_SHARE if is_of_their_kind and "measured" not in rates.sources.values() else None


# ---- Figures ---------------------------------------------------------------------------------------------------------


def fill(title: str, text: str) -> str:
    """A title and its text, wrapped to the terminal, to 80 columns where there is none."""
    return job.wrap_lines(job.columns({title: text}), 11, min(job.width() or 80, 120))


def figures(row: dict, share: tuple | None = None) -> str:
    """Speed, MFU and price of a configuration, with the range where published runs reached this share of plans."""
    parts = [f"{ranged(row['tokens_per_sec'], share, '{:,.0f}'.format)} tokens/s"]
    if row["mfu_percent"]:
        parts.append(f"MFU {row['mfu_percent']:.1f} %")
    if "cost_per_billion_tokens" in row:
        price = ranged(row["cost_per_billion_tokens"], share, dollars, inverse=True)
        parts.append(f"{price} a billion tokens")
    return ", ".join(parts)


def ranged(value: float, share: tuple | None, write: Callable[[float], str], inverse: bool = False) -> str:
    """A figure, with the least and the most that follow from the share; `inverse` of what falls when speed grows."""
    if not share:
        return write(value)
    ends = (value / share[-1], value / share[0]) if inverse else (value * share[0], value * share[-1])
    least, most = (write(float(f"{end:.3g}")) for end in ends)
    return f"{write(value)} ({least} to {most})"


def mfu(row: dict) -> str:
    return f"{row['mfu_percent']:.1f}" if row["mfu_percent"] else "-"


def dollars(price: float) -> str:
    if price < 0.1:
        return f"${price:.2g}"
    return f"${price:,.0f}" if price >= 10 else f"${price:,.2f}"


def duration(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.3g} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def percents(share: tuple) -> str:
    return f"{100 * share[0]:.0f} to {100 * share[-1]:.0f} %"


def share_of(gib: float, capacity: float) -> str:
    return f"{gib:,.1f} of {capacity:,.1f} GiB ({100 * gib / capacity:,.0f} %)"
