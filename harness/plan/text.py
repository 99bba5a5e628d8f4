"""Plan text: what --plan prints of a plan, in at most 80 columns but for commands and paths. Called by `planning`.
Computes no figure that the JSON object does not have."""

import textwrap

from harness import job
from harness.base.gpu_table import CONTEXT_GIB, NCCL_GIB, find_gpu
from harness.base.text import counted
from harness.flags.commands import as_flags
from harness.flags.settings import Settings
from harness.job import columns
from harness.plan.gpus import FRAGMENTATION, PUBLISHED_KINDS, PUBLISHED_MEMORY_RUNS, TIGHT
from harness.plan.rates import Rates
from harness.plan.search import MIN_GAIN

SHORT = {"fits": "yes", "tight": "tight", "does not fit": "NO"}  # verdicts in a table


def assumptions(settings: Settings, config, rates: Rates, sources: dict[str, float]) -> dict[str, str]:
    """What the plan takes for granted, in words."""
    layers, attention = "operator by operator", "the scores' matrix in memory"
    if settings.compile:
        layers = "partitioned as inductor does, held is what its kernels have to write"
    if settings.attention != "eager":
        attention = "saves a row's logsumexp, accumulates the query gradient in fp32"
    if rates.on_gpu:
        order = "collectives beside their pass, but for the first gathers and the last reductions"
        order += "; launches ahead of the GPU"
    else:
        order = "nothing beside anything; then what the host does"
    lines = {}
    if rates.taken:
        lines["gpu"] = rates.taken
    return lines | {
        "rates": describe_rates(rates, sources),
        "memory": f"rank 0, the fullest; {100 * FRAGMENTATION:.0f} % fragmentation, {CONTEXT_GIB} GiB for CUDA and "
        f"{NCCL_GIB} GiB a communicator are assumed",
        "attention": attention,
        "layers": f"{layers}; shallow models, extrapolated to {config.get_text_config().num_hidden_layers} layers",
        "time": f"one operator after the other; {order}; data always there",
    }


def describe_rates(rates: Rates, sources: dict[str, float]) -> str:
    """Where the rates are from: measured, the assumed ones, the file that was given."""
    parts = []
    if rates.sections:
        shares = ", ".join(f"{sources.get(name, 0):.0%} {name}" for name in ("measured", "scaled", "assumed"))
        parts.append(f"of the step's time {shares}; measured {rates.source}, scaled from other sizes measured there")
    if rates.assumed:
        parts.append(", ".join(f"{name} {value:,.4g}" for name, value in rates.assumed.items()))
        if find_gpu(rates.device):
            parts.append("shares of datasheets (docs/PLAN.md)")
    if rates.source and not rates.sections:
        parts.append(rates.source)
    return "; ".join(parts)


def fill(text: str, indent: int, first: int = 0) -> str:
    """Wrapped to the terminal, to 80 columns where there is none, with no number on another line than its %."""
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    columns = min(job.width() or 80, 120)
    options = {"initial_indent": " " * first, "subsequent_indent": " " * indent, "break_on_hyphens": False}
    filled = textwrap.fill(text, columns, break_long_words=False, **options)
    return filled.replace("\N{NO-BREAK SPACE}", " ")


def layout(row: dict) -> str:
    replicas = f" x{row['dp_replicate_size']}" if row["dp_replicate_size"] > 1 else ""
    return f"ZeRO-{row['zero_stage']}{replicas}"


def mfu(row: dict) -> str:
    return f"{row['mfu_percent']:.1f}" if row["mfu_percent"] else "-"


def dollars(price: float) -> str:
    if price < 0.1:
        return f"${price:.2g}"
    return f"${price:,.0f}" if price >= 10 else f"${price:,.2f}"


def duration(hours: float) -> str:
    minutes = round(60 * hours)
    if minutes < 2:
        return f"{3600 * hours:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 100 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{round(hours) // 24:,} d {round(hours) % 24} h"


def rounded(number: float) -> float:
    """To three digits."""
    return float(f"{number:.3g}")


def percents(share: tuple) -> str:
    return f"{100 * share[0]:.0f} to {100 * share[-1]:.0f} %"


def speed_in_range(speed: float, share: tuple | None) -> str:
    """Tokens/s, with the range where published runs reached this share of such plans: the least, the median, the
    most."""
    if not share:
        return f"{speed:,.0f} tokens/s"
    return f"{speed:,.0f} tokens/s ({rounded(share[0] * speed):,.0f} to {rounded(share[-1] * speed):,.0f})"


def price_in_range(price: float, share: tuple | None) -> str:
    """Dollars, with the range that follows from that of the speed."""
    if not share:
        return dollars(price)
    return f"{dollars(price)} ({dollars(price / share[-1])} to {dollars(price / share[0])})"


def duration_in_range(hours: float, share: tuple | None) -> str:
    if not share:
        return duration(hours)
    return f"{duration(hours)} ({duration(hours / share[-1])} to {duration(hours / share[0])})"


def figures(row: dict, share: tuple | None = None) -> str:
    """Speed, MFU and price of a configuration, with ranges as in `speed_in_range`."""
    parts = [speed_in_range(row["tokens_per_sec"], share)]
    if row.get("mfu_percent"):
        parts.append(f"MFU {row['mfu_percent']:.1f} %")
    price = row.get("cost_per_billion_tokens")
    if price:
        range_of_price = price_in_range(price, share).removeprefix(dollars(price))
        parts.append(f"{dollars(price)} a billion tokens{range_of_price}")
    return ", ".join(parts)


def share_of(gib: float, capacity: float) -> str:
    return f"{gib:,.1f} of {capacity:,.1f} GiB ({100 * gib / capacity:,.0f} %)"


def describe_verdict(settings: Settings, result: dict) -> str:
    """Whether it fits, and the memory that it takes, in one line."""
    used = share_of(result["memory_gib"]["reserved"], result["capacity_gib"])
    microbatch = f"{counted(settings.batch_size, 'sequence')} of {settings.sequence_length:,} tokens"
    line = f"{result['verdict']}: {used} on each of {result['gpus']:,} x {result['gpu']}, {microbatch} at once"
    if result["verdict"] == "tight":
        line += f"; above {100 * TIGHT:.0f} % an evaluation or fragmentation may run it out of memory"
    share = result["published_memory_share"]
    if share:
        line += f"; {PUBLISHED_MEMORY_RUNS} (dense models) took {percents(share)} of such plans"
    return line


def describe_speed(settings: Settings, result: dict) -> dict[str, str]:
    """What to expect of the configuration as it is, which fits, with the range where rates are assumed."""
    share = result["published_share"]
    expected = figures(result, share)
    if share:
        expected += f"; rates are assumed, {result['published_runs']} reached {percents(share)} of such plans"
    elif result["rates_assumed"]:
        expected += f"; rates are assumed, and no published run shows how near: those compared are {PUBLISHED_KINDS}"
    lines = {"expect": expected}
    run = result.get("run")
    if run:
        time_and_cost = duration_in_range(run["hours"], share)
        gpus = counted(result["gpus"], "GPU")
        if run.get("cost"):
            time_and_cost += f", {price_in_range(run['cost'], share)}"
            gpus += f" at ${run['gpu_hour_usd']:,g}"
        steps = f"{counted(run['steps'], 'step')} of {settings.tokens_per_step(result['gpus']):,} tokens"
        lines["this run"] = f"{time_and_cost} ({gpus}); {steps}, without start, evaluation and checkpoints"
    return lines


def describe_search(search: dict) -> str:
    line = f"{counted(search['planned'], 'configuration')} planned, {search['seconds']:.0f} s"
    if search["seconds"] > 1.2 * search["seconds_allowed"] > 0:
        line += f"; --plan-seconds {search['plan_seconds']:g} was too short"
    elif not search["complete"]:
        line += f"; --plan-seconds {search['plan_seconds']:g} left no time for the next"
    if not search["complete"]:
        line += ": there may be faster ones"
    return line


def describe_fastest(result: dict) -> dict[str, str]:
    """The configuration to take, as lines of the answer."""
    best, search = result["fastest"], result["search"]
    lines = {}
    if not best:
        lines["fastest"] = "none that fits was found"
        if search["complete"]:
            lines["fastest"] = "no flags make it fit: more GPUs, a shorter --sequence-length or a smaller --model"
    elif best["asked"]:
        lines["fastest"] = describe_asked(best, search)
        lines["command"] = best["command"]
    else:
        lines = describe_other(result)
    lines["search"] = describe_search(search)
    return lines


def describe_asked(best: dict, search: dict) -> str:
    """Where the configuration as it is is the one to take."""
    if best["verdict"] == "tight":
        return "as it is; tight, but nothing else fits"
    if search["planned"] == 1:
        return "as it is; nothing else was planned"
    if not search["complete"]:
        return "as it is; nothing else that was planned is more than 1 % faster"
    return "as it is; nothing else that fits is more than 1 % faster"


def describe_other(result: dict) -> dict[str, str]:
    """Where another configuration than the asked one is to be taken."""
    best, share, lines = result["fastest"], result["published_share"], {}
    is_tight = best["verdict"] == "tight"
    note = "; tight, but nothing else fits" if is_tight else ""
    change = ""
    if result["fits"]:
        share = None  # the range stands at the configuration as it is
        percent = 100 * (best["tokens_per_sec"] / result["tokens_per_sec"] - 1)
        change = f"{percent:+.0f} %, " if abs(percent) >= 0.95 else f"{percent:+.1f} %, "
        if result["verdict"] == "tight" and not is_tight:
            note = "; not tight"
    elif result["fits_with"]["flags"] != best["flags"]:
        lines["fits with"] = f"{result['fits_with']['flags']}: {figures(result['fits_with'], share)}"
    host = f" and {best['host_gib']:,.0f} GiB of the host's memory for each" if best["host_gib"] else ""
    used = share_of(best["reserved_gib"], result["capacity_gib"])
    lines[name_of_best(result)] = f"{best['flags']}: {change}{figures(best, share)}, {used}{host}{note}"
    rows = result["configurations"]
    others = [row for row in rows if row["verdict"] == "fits" and "optimizer" in row["changes"]]
    other = max(others, key=lambda row: row["tokens_per_sec"], default=best)
    if other["tokens_per_sec"] > best["tokens_per_sec"]:
        lines["besides"] = f"{other['flags']}: {figures(other)}, but another optimizer, which trains otherwise"
    lines["command"] = best["command"]
    asked = rows[0]
    if best["tokens_per_step"] != asked["tokens_per_step"]:
        tokens = f"{best['tokens_per_step']:,} tokens a step instead of {asked['tokens_per_step']:,}"
        keep = f"with --batch-size {asked['batch_size']} they stay"
        lines["changes"] = f"{tokens}, which is another run; {keep}"
    return lines


def describe_memory(result: dict, width: int = 40) -> list[str]:
    """Where the memory of a GPU goes at the peak, one kind below the other, up to its capacity, and what each kind
    takes at most."""
    capacity, memory = result["capacity_gib"], result["memory_gib"]
    reserved = memory["reserved"]
    parts = result["at_peak_gib"] | result["beside_tensors_gib"]
    parts["free" if reserved <= capacity else "LACKING"] = capacity - reserved
    scale = width / max(capacity, reserved)  # characters a GiB
    edge = round(capacity * scale)
    lines = [f"  {'':15}{'then':>9}{'at most':>9}"]
    filled = 0.0
    for kind, gib in parts.items():
        start, end = sorted((round(filled * scale), round((filled + gib) * scale)))
        shade = "░" if kind == "free" else "█"
        filled_cells = shade * (end - start)
        bar = (" " * start + filled_cells).ljust(width)
        most = f"{memory[kind]:9,.2f}" if kind in result["at_peak_gib"] else " " * 9
        lines.append(f"  {kind:15}{gib:9,.2f}{most}  {bar[:edge]}│{bar[edge:]}".rstrip())
        filled += gib
    notes = [
        f"at most: what a kind takes at its own worst moment; only the first column adds up, to {memory['total']:,.2f} "
        f"of tensors and {reserved:,.2f} in all",
        "communication: parameters that are gathered, gradients on their way to other ranks",
        "other streams: what was freed for a CUDA stream of communication, which no other stream gets; fragmentation: "
        "gaps between tensors; CUDA and NCCL: the context, libraries and buffers",
    ]
    return lines + [fill(note, 4, 2) for note in notes]


def name_of_best(result: dict) -> str:
    """What the configuration to take is called: "safer" where the asked one is as fast, but has less room."""
    best = result["fastest"]
    if result["fits"] and best["tokens_per_sec"] <= (1 + MIN_GAIN) * result["tokens_per_sec"]:
        return "safer"
    return "fastest"


def describe_configurations(result: dict) -> list[str]:
    """Side by side: the configuration as it is, the fastest, what one flag changes, and the fastest of the rest."""
    rows = result["configurations"]
    shown = choose_shown(rows)
    is_priced = "cost_per_billion_tokens" in rows[0]
    wide = max(8, *(len(layout(row)) for row in shown)) + 2
    upper = f"\n{'':8}{'':{wide}}activation  batch x   GiB a"
    lower = f"{'':8}{'sharding':{wide}}checkpoints microb.     GPU  fits   tokens/s  MFU %"
    if is_priced:
        upper += f"{'':24}{'$ a':>9}"
        lower += "  billion"
    lines = [upper, lower]
    for row in shown:
        name = ""
        if row["asked"]:
            name = "as is"
        elif row["fastest"]:
            name = name_of_best(result)
        batch = f"{row['batch_size']:,} x {row['gradient_accumulation_steps']:,}"
        line = (
            f"{name:8}{layout(row):{wide}}{row['activation_checkpointing']:10}{batch:>9}{row['reserved_gib']:8,.1f}"
            f"{SHORT[row['verdict']]:>6}{row['tokens_per_sec']:11,.0f}{mfu(row):>7}"
        )
        if is_priced:
            line += f"{row['cost_per_billion_tokens']:9,.2f}"
        lines.append(line)
        others = as_flags({name: value for name, value in row["changes"].items() if name not in row})
        if others:
            lines.append(f"{'':8}with {others}")
    if any(row["dp_replicate_size"] > 1 for row in shown):
        lines.append(f"{'':8}x2: two replicas of the sharded model")
    return lines


def choose_shown(rows: list[dict]) -> list[dict]:
    """The rows of the table: as asked and the fastest, then what differs by one flag and the fastest of the rest that
    fit, eight in all where there are as many."""
    main = [row for row in rows if row["asked"] or row["fastest"]]
    near = [row for row in rows if len(row["changes"]) == 1 and row not in main]
    rest = [row for row in rows if row not in main + near and row["fits"]]
    rest.sort(key=lambda row: -row["tokens_per_sec"])
    near += rest[: max(8 - len(main + near), 0)]
    return main + sorted(near, key=lambda row: (not row["fits"], -row["tokens_per_sec"]))


def describe_worlds(rows: list[dict]) -> list[str]:
    """World sizes side by side, and below them what to do at each."""
    is_priced = "cost_per_billion_tokens" in rows[0]
    upper = f"\n{'':17}  GiB a           GiB sent{'':17} exposed"
    lower = "    GPUs replicas    GPU  fits in a step     tokens/s MFU %  comm. %"
    if is_priced:
        upper += f"{'$ a billion':>12}"
        lower += f"{'tokens':>12}"
    lines = [upper, lower]
    for row in rows:
        line = (
            f"{row['gpus']:8,}{row['dp_replicate_size']:9,}{row['reserved_gib']:7,.1f}{SHORT[row['verdict']]:>6}"
            f"{row['communication_gib_per_step']:10,.2f}{row['tokens_per_sec']:13,.0f}"
            f"{mfu(row):>6}{row['exposed_communication_percent']:9.1f}"
        )
        if is_priced:
            line += f"{row['cost_per_billion_tokens']:12,.2f}"
        lines.append(line)
    for row in rows:
        if "search" not in row:
            continue
        if row is rows[0]:
            lines.append("")
        lines.append(fill(f"{row['gpus']:8,}  {describe_world(row)}", 10))
        best = row["fastest"]
        if best and not best["asked"]:
            lines.append(f"{'':10}{best['command']}")
    return lines


def describe_world(row: dict) -> str:
    """What to do at a world size."""
    best = row["fastest"]
    late = "" if row["search"]["complete"] else " (out of time: there may be faster ones)"
    if not best:
        return f"nothing that fits was found{late}"
    is_tight = best["verdict"] == "tight"
    if best["asked"] and is_tight:
        return f"as it is; tight, but nothing else that fits was found{late}"
    if best["asked"]:
        return f"as it is; nothing found is more than 1 % faster{late}"
    fitting = (row.get("fits_with") or {}).get("flags", best["flags"])
    why = "fastest: " if row["fits"] else "it fits with "
    if fitting != best["flags"]:
        why = f"it fits with {fitting}; fastest: "
    if row["verdict"] == "tight" and best["verdict"] == "fits":
        why = "fastest with room: "
    note = "; tight, but nothing else fits" if is_tight else ""
    return f"{why}{best['flags']}: {figures(best)}, {best['reserved_gib']:.1f} GiB{note}{late}"


def describe_plan(settings: Settings, result: dict) -> str:
    """The answer, then what it is made of, then what was assumed."""
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
    answer = {"verdict": result["verdict_text"]}
    if result["fits"]:
        answer |= describe_speed(settings, result)
    if "search" in result:
        answer |= describe_fastest(result)
    setup = {
        "plan": f"{settings.model} on {world:,} x {result['gpu']}, ZeRO-{settings.zero_stage}, "
        f"replicas x shards {replicas:,} x {world // replicas:,}",
        "model": f"{result['parameters']:,} parameters, {result['flops']}",
        "technique": ", ".join(techniques),
        "batch": settings.describe_batch(world),
    }
    places = {"build": "while the model is built", "head": "in head and loss", "optimizer": "in the optimizer's step"}
    place = places.get(result["peak_at"], f"in {result['peak_at']}")
    lines = []
    for name, text in answer.items():
        line = columns({name: text})
        lines.append(line if name == "command" else fill(line, 11))
    if "search" in result:
        lines += describe_configurations(result)
    if "scaling" in result:
        lines += describe_worlds(result["scaling"])
    lines += [f"\nmemory of the fullest GPU in GiB, as it is, at its peak {place}", *describe_memory(result)]
    if settings.cpu_offload:
        lines.append(f"  on the host, for each GPU: {memory['host']:,.2f}")
    if result.get("largest_batch_size"):
        lines.append(f"  largest --batch-size that is not tight: {result['largest_batch_size']:,}")
    lines += ["", *(fill(columns({name: text}), 11) for name, text in setup.items())]
    lines.append("\nsent by each GPU in a step, GiB")
    for entry in result["collectives"]:
        kind, times = entry["collective"].replace("_", "-"), f"x {entry['calls']:,}"
        between = f", {entry['gib_between_nodes']:,.2f} of it between nodes" if entry["gib_between_nodes"] > 0 else ""
        lines.append(f"  {kind:15}{times:9}{entry['gib']:9,.2f}   {entry['ranks']:,} ranks{between}")
    lines += ["\ntime of a step, ms", *describe_time(result)]
    lines += ["\nassumptions", *(fill(f"{name}: {text}", 4, 2) for name, text in result["assumptions"].items())]
    return "\n".join(line.rstrip() for line in lines)


def describe_time(result: dict) -> list[str]:
    """Where the time of a step goes."""
    time_ms = result["time_ms"]
    rows = [
        ("matmul", time_ms["matmul"], ""),
        ("attention", time_ms["attention"], ""),
        ("memory-bound", time_ms["memory"], "norms, activations, copies"),
        ("optimizer", time_ms["optimizer"], ""),
        (
            "exposed communication",
            time_ms["exposed"],
            f"of {time_ms['communication']:,.1f}, the rest beside computation",
        ),
        ("contention", time_ms["contention"], "computation slowed by what is beside it"),
        ("waiting for the host", time_ms["launches"], "launches take longer than what they start"),
    ]
    speed = f"{result['tokens_per_sec_per_gpu']:,.0f} tokens/s a GPU"
    if not result["mfu_percent"]:
        speed += ", no MFU"
    elif not result["fits"]:  # else it stands at the top
        speed += f", MFU {result['mfu_percent']:.1f} %"
    rows = [row for row in rows if row[1] >= 0.05 or row[0] not in ("contention", "waiting for the host")]
    rows.append(("step", result["step_time_ms"], speed))
    lines = [f"  {name:22}{value:10,.1f}   {note}" for name, value, note in rows]
    return [*lines, f"  {'a billion tokens':22}{result['hours_per_billion_tokens']:10,.2f} h"]
