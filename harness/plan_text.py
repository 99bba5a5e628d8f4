"""Plan text: what --plan prints of a plan. Called by `planning`. It computes no figure that the JSON object does not
have."""

import textwrap

from harness.advice import as_flags
from harness.gpus import CONTEXT_GIB, FRAGMENTATION, NCCL_GIB
from harness.processes import columns
from harness.rates import Rates
from harness.settings import Settings
from utils import find_gpu


def assumptions(settings: Settings, config, rates: Rates, sources: dict[str, float]) -> dict[str, str]:
    """What the plan takes for granted, in words."""
    layers, attention = "operator by operator", "the scores' matrix in memory"
    if settings.compile:
        layers = "partitioned as inductor does, held is what its kernels have to write"
    if settings.attention != "eager":
        attention = "saves a row's logsumexp, accumulates the query gradient in fp32"
    said = [", ".join(f"{name} {value:,.4g}" for name, value in rates.assumed.items())] if rates.assumed else []
    said += ["shares of datasheets (docs/PLAN.md)"] if said and find_gpu(rates.device) else []
    if rates.sections:
        parts = ", ".join(f"{sources.get(name, 0):.0%} {name}" for name in ("measured", "scaled", "assumed"))
        said.insert(0, f"of the step's time {parts}; measured {rates.source}, scaled from other sizes measured there")
    elif rates.source:
        said.append(rates.source)
    beside = "collectives beside their pass, but for the first gathers and the last reductions"
    return {
        "rates": "; ".join(said),
        "memory": f"rank 0, the fullest; assumed {FRAGMENTATION:.0%} fragmentation, {CONTEXT_GIB} GiB for CUDA, "
        f"{NCCL_GIB} GiB a communicator",
        "attention": attention,
        "layers": f"{layers}; shallow models, extrapolated to {config.get_text_config().num_hidden_layers} layers",
        "time": f"one operator after the other; {beside if rates.overlaps else 'nothing beside anything'}; "
        f"{'launches ahead of the GPU' if rates.overlaps else 'then what the host does'}; data always there",
    }


def fill(text: str, indent: int) -> str:
    """Wrapped, with no number on another line than its %."""
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(text, 110, subsequent_indent=" " * indent).replace("\N{NO-BREAK SPACE}", " ")


def layout(row: dict) -> str:
    replicas = f", {row['dp_replicate_size']} replicas" * (row["dp_replicate_size"] > 1)
    return f"ZeRO-{row['zero_stage']}{replicas}"


def mfu(row: dict) -> str:
    return f"{row['mfu_percent']:.1f}" if row["mfu_percent"] else "-"


def dollars(price: float) -> str:
    return f"${price:,.0f}" if price >= 10 else f"${price:,.2f}"


def figures(row: dict) -> str:
    """Speed, MFU and price of a configuration."""
    said = [f"{row['tokens_per_sec']:,.0f} tokens/s"]
    said += [f"MFU {row['mfu_percent']:.1f} %"] if row["mfu_percent"] else []
    said += [f"{dollars(row['cost_per_billion_tokens'])} a billion tokens"] if "cost_per_billion_tokens" in row else []
    return ", ".join(said)


def verdict(result: dict) -> str:
    """Whether it fits, in one line."""
    used = f"{result['memory_gib']['reserved']:.1f} of {result['capacity_gib']:.1f} GiB reserved on each"
    fits = "fits" if result["fits"] else "DOES NOT FIT"
    speed = f": {figures(result)}" * result["fits"]
    return f"{fits}, {used} of {result['gpus']:,} x {result['gpu']}{speed}"


def describe_fastest(result: dict) -> dict[str, str]:
    """The configuration to take, as lines of the answer."""
    best, found = result["fastest"], result["search"]
    how = f"{found['planned']} configurations planned in {found['seconds']:.0f} s"
    if not found["complete"]:
        how += "; the next would not have been ready in time: there may be faster ones (--plan-seconds)"
    if not best:
        none = "no flags make it fit: more GPUs, a shorter --sequence-length or a smaller --model"
        return {"fastest": none if found["complete"] else "none that fits was found", "search": how}
    if best["asked"]:
        said = "as asked; nothing else that fits is more than 1 % faster"
        return {"fastest": said, "command": best["command"], "search": how}
    faster = f"{best['tokens_per_sec'] / result['tokens_per_sec'] - 1:+.0%}, ".replace("%", " %") * result["fits"]
    fitting = (result.get("fits_with") or {}).get("flags")
    lines = {} if result["fits"] or fitting == best["flags"] else {"fits with": fitting}
    host = f" and {best['host_gib']:,.0f} GiB of the host's memory for each" if best["host_gib"] else ""
    lines["fastest"] = f"{best['flags']}: {faster}{figures(best)}, {best['reserved_gib']:.1f} GiB a GPU{host}"
    others = [row for row in result["configurations"] if row["fits"] and "optimizer" in row["changes"]]
    other = max(others, key=lambda row: row["tokens_per_sec"], default=best)
    if other["tokens_per_sec"] > best["tokens_per_sec"]:
        lines["besides"] = f"{other['flags']}: {figures(other)}, but another optimizer, which trains otherwise"
    lines["command"] = best["command"]
    asked = result["configurations"][0]["tokens_per_step"]
    if best["tokens_per_step"] != asked:
        keep = f"with --batch-size {result['configurations'][0]['batch_size']} they stay"
        lines["changes"] = (
            f"{best['tokens_per_step']:,} tokens a step instead of {asked:,}, which is another run; {keep}"
        )
    return lines | {"search": how}


def expectation(result: dict) -> str:
    """What published runs reached of such plans, for the configuration to take."""
    least, _, most = result["published_share"]
    best = result.get("fastest") or result
    said = f"{least * best['tokens_per_sec']:,.0f} to {most * best['tokens_per_sec']:,.0f} tokens/s"
    if "cost_per_billion_tokens" in best:
        cost = best["cost_per_billion_tokens"]
        said += f", {dollars(cost / most)} to {dollars(cost / least)} a billion tokens"
    why = "the rates are assumed, so speeds are bounds: published runs reached"
    return f"{said}; {why} {100 * least:.0f} to {100 * most:.0f} % of such plans"


def memory_bar(result: dict, width: int = 40) -> list[str]:
    """Where the memory of a GPU goes at the peak, one kind below the other, up to its capacity."""
    capacity, reserved = result["capacity_gib"], result["memory_gib"]["reserved"]
    parts = result["at_peak_gib"] | {"allocator, CUDA": reserved - result["memory_gib"]["total"]}
    parts |= {"free": capacity - reserved} if reserved <= capacity else {"LACKING": capacity - reserved}
    scale, filled, lines = width / max(capacity, reserved), 0.0, []
    for kind, gib in parts.items():
        start, end = sorted((round(filled * scale), round((filled + gib) * scale)))
        row = " " * start + ("░" if kind == "free" else "█") * (end - start)
        edge = round(capacity * scale)
        row = f"{row:{width}}"[:edge] + "│" + f"{row:{width}}"[edge:]
        lines.append(f"  {kind:16}{gib:9,.2f}  {row}".rstrip())
        filled += gib
    return lines


def describe_configurations(result: dict) -> list[str]:
    """Side by side: what was asked, the fastest, what one flag changes, and the fastest of the rest."""
    rows = result["configurations"]
    first = [row for row in rows if row["asked"] or row["fastest"]]
    near = [row for row in rows if len(row["changes"]) == 1 and row not in first]
    rest = sorted((row for row in rows if row not in first + near), key=lambda row: -row["tokens_per_sec"])
    near += [row for row in rest if row["fits"]][: max(8 - len(first + near), 0)]
    shown = first + sorted(near, key=lambda row: (not row["fits"], -row["tokens_per_sec"]))
    priced = "cost_per_billion_tokens" in rows[0]
    lines = [
        f"\n{'':52}batch x    GiB a{'':36}" + "  $ a billion" * priced,
        f"{'':9}{'sharding':21}{'checkpointing':15}microbatches      GPU  fits  ms a step     tokens/s  MFU %"
        + "       tokens" * priced,
    ]
    for row in shown:
        name = "asked" if row["asked"] else "fastest" if row["fastest"] else ""
        batch = f"{row['batch_size']:,} x {row['gradient_accumulation_steps']:,}"
        lines.append(
            f"{name:9}{layout(row):21}{row['activation_checkpointing']:15}{batch:>12}{row['reserved_gib']:9,.1f}"
            f"{'yes' if row['fits'] else 'NO':>6}{row['step_time_ms']:11,.1f}{row['tokens_per_sec']:13,.0f}"
            f"{mfu(row):>7}"
            + (f"{row['cost_per_billion_tokens']:13,.2f}" if priced else "")
            + f"  {as_flags({name: value for name, value in row['changes'].items() if name not in row})}"
        )
    return lines


def describe_worlds(rows: list[dict]) -> list[str]:
    """World sizes side by side, and below them what to do at each."""
    lines = [
        f"\n{'':30}GiB sent{'':38}not hidden",
        "    GPUs  replicas  fits        in a step   ms a step      tokens/s  MFU %   traffic %",
    ]
    lines += [
        f"{row['gpus']:8,}{row['dp_replicate_size']:10,}{'yes' if row['fits'] else 'NO':>6}"
        f"{row['communication_gib_per_step']:17,.2f}{row['step_time_ms']:12,.1f}{row['tokens_per_sec']:14,.0f}"
        f"{mfu(row):>7}{row['exposed_communication_percent']:12.1f}"
        for row in rows
    ]
    for row in rows:
        if "search" not in row:
            continue
        best, late = row["fastest"], "" if row["search"]["complete"] else " (out of time: there may be faster ones)"
        if not best:
            said = f"nothing that fits was found{late}"
        elif best["asked"]:
            said = f"as asked; nothing found is more than 1 % faster{late}"
        else:
            fitting = (row.get("fits_with") or {}).get("flags", best["flags"])
            why = "fastest: " if row["fits"] else "it fits with "
            if fitting != best["flags"]:
                why = f"it fits with {fitting}; fastest: "
            said = f"{why}{best['flags']}: {figures(best)}, {best['reserved_gib']:.1f} GiB{late}"
        lines.append("\n" * (row is rows[0]) + fill(f"{row['gpus']:8,}  {said}", 10))
        lines += [f"{'':10}{best['command']}"] if best and not best["asked"] else []
    return lines


def describe_plan(settings: Settings, result: dict) -> str:
    """The answer, then what it is made of, then what was assumed."""
    world, memory, time_ms = result["gpus"], result["memory_gib"], result["time_ms"]
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    techniques = [
        settings.precision,
        "compiled" if settings.compile else "eager",
        f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing",
        "fused loss" if settings.fused_loss else "loss from full logits",
        settings.optimizer + ", offloaded to the host" * settings.cpu_offload,
    ]
    answer = {"verdict": result["verdict"]} | (describe_fastest(result) if "search" in result else {})
    answer |= {"expect": expectation(result)} if result["published_share"] else {}
    setup = {
        "plan": f"{settings.model} on {world} x {result['gpu']}, ZeRO-{settings.zero_stage}, "
        f"replicas x shards {replicas} x {world // replicas}",
        "model": f"{result['parameters']:,} parameters, {result['flops']}",
        "technique": ", ".join(techniques),
        "batch": settings.describe_batch(world),
    }
    places = {"build": "while the model is built", "head": "in head and loss", "optimizer": "in the optimizer's step"}
    place = places.get(result["peak_at"], f"in {result['peak_at']}")
    place += f"; {memory['host']:,.1f} GiB a GPU on the host" * settings.cpu_offload
    largest = result.get("largest_batch_size", 0)
    kinds = {"matmul": "matmul", "attention": "attention", "memory": "memory-bound", "optimizer": "optimizer"}
    lines = [
        *(
            columns({name: text}) if name == "command" else fill(columns({name: text}), 11)
            for name, text in answer.items()
        ),
        *(describe_configurations(result) if "search" in result else []),
        *(describe_worlds(result["scaling"]) if "scaling" in result else []),
        f"\nmemory of the fullest GPU in GiB, as asked: {memory['reserved']:,.2f} reserved of "
        f"{result['capacity_gib']:.1f}" + f", largest --batch-size {largest:,}" * (largest > 0),
        *memory_bar(result),
        "\n" + columns(setup),
        f"\nmemory of the fullest GPU, GiB{'at most':>9}  {place}",
        *(f"  {kind:24}{memory[kind]:13,.2f}{gib:13,.2f}" for kind, gib in result["at_peak_gib"].items()),
        f"  {'total':24}{'':13}{memory['total']:13,.2f}",
        f"  {'reserved':24}{'':13}{memory['reserved']:13,.2f}",
        "\nsent by each GPU in a step, GiB",
        *(
            f"  {entry['collective'].replace('_', '-'):15}{'x ' + str(entry['calls']):9}{entry['gib']:9,.2f}   "
            + f"{entry['ranks']} ranks"
            + f", {entry['gib_between_nodes']:,.2f} of it between nodes" * (entry["gib_between_nodes"] > 0)
            for entry in result["collectives"]
        ),
        "\ntime of a step, ms",
        *(f"  {name:24}{time_ms[kind]:9,.1f}" for kind, name in kinds.items()),
        f"  {'exposed communication':24}{time_ms['exposed']:9,.1f}   of {time_ms['communication']:,.1f}",
        *[f"  {'contention':24}{time_ms['contention']:9,.1f}"] * (time_ms["contention"] >= 0.1),
        *[f"  {'waiting for the host':24}{time_ms['launches']:9,.1f}"] * (time_ms["launches"] >= 0.1),
        f"  {'step':24}{result['step_time_ms']:9,.1f}   {result['tokens_per_sec']:,.0f} tok/s, "
        f"{result['tokens_per_sec_per_gpu']:,.0f} a GPU, "
        + (f"MFU {result['mfu_percent']:.1f} %" if result["mfu_percent"] else "no MFU"),
        f"  {'a billion tokens':24}{result['hours_per_billion_tokens']:9,.2f} h"
        + (f", {dollars(result.get('cost_per_billion_tokens', 0))}" if settings.gpu_hour_usd else ""),
    ]
    wrap = textwrap.TextWrapper(110, initial_indent="  ", subsequent_indent="    ")
    assumed = [wrap.fill(f"{name}: {text}") for name, text in result["assumptions"].items()]
    return "\n".join(line.rstrip() for line in [*lines, "\nassumptions", *assumed])
