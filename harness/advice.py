"""Advice: the flags that would fit, or be faster, found by planning them. Called by `planning`, and by the script for
the flags that save memory. It does not know how a plan is made."""

import math
from importlib.util import find_spec

from harness.loss import choose_loss
from harness.rates import Rates
from harness.settings import Settings


def largest_batch(planned, rates: Rates) -> int:
    """The largest --batch-size that fits (of more than 16, one within a sixteenth of it); 0 if none does.

    Memory grows evenly with it where activations are the peak, so two plans tell about where it lies, and the next
    ones make sure.
    """

    def left(size: int) -> float:
        return rates.memory_gib - planned(batch_size=size)["memory_gib"]["reserved"]

    fits, fails, probe = 0, math.inf, 1
    while fails - fits > 1 + fits // 16:
        if left(probe) >= 0:
            fits = probe
        else:
            fails = probe
        if fails < math.inf:
            probe = (fits + fails) // 2
        else:
            other = fits if fits > 1 else 2
            growth = max((left(1) - left(other)) / (other - 1), 1e-9)
            probe = min(max(fits + int(left(fits) / growth), fits + 1 + fits // 16), 64 * fits)
    return fits


def memory_savers(settings: Settings) -> list[dict]:
    """Changes that lower memory, the cheapest in speed first, less what is so already."""
    batch, checkpointing = settings.batch_size, settings.activation_checkpointing
    steps = settings.gradient_accumulation_steps * (1 if batch == "auto" else batch)
    ways = [
        ({"fused_loss": True}, settings.fused_loss is False),
        ({"zero_stage": 3}, settings.zero_stage < 3),
        ({"activation_checkpointing": "selective"}, checkpointing == "none"),
        ({"batch_size": 1, "gradient_accumulation_steps": steps}, batch != 1),
        ({"activation_checkpointing": "full"}, checkpointing != "full"),
        ({"optimizer": "adamw8bit"}, settings.optimizer != "adamw8bit" and find_spec("torchao")),
        ({"cpu_offload": True}, not settings.cpu_offload),
    ]
    return [changes for changes, possible in ways if possible]


def as_flags(changes: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')}" + f" {v}" * (v is not True) for name, v in changes.items())


def what_fits(settings: Settings, config, planned) -> dict | None:
    """The flags that make it fit at the least cost in speed, by planning them; None where nothing does.

    They are tried one on top of the other, the cheapest in speed first, until it fits; then what is not needed is
    taken out again.
    """

    def with_all(chosen: list[dict]) -> dict:
        return planned(**{name: value for changes in chosen for name, value in changes.items()})

    chosen: list[dict] = []
    for changes in memory_savers(settings):
        if "fused_loss" in changes and not choose_loss(None, config):
            continue
        chosen = [one for one in chosen if one.keys() != changes.keys()] + [changes]  # full in place of selective
        if with_all(chosen)["fits"]:
            break
    else:
        return None
    for changes in chosen[:-1]:
        fewer = [one for one in chosen if one is not changes]
        if with_all(fewer)["fits"]:
            chosen = fewer
    result = with_all(chosen)
    flags, reserved = " ".join(map(as_flags, chosen)), result["memory_gib"]["reserved"]
    return {"flags": flags, "reserved_gib": reserved, "tokens_per_sec": result["tokens_per_sec"]}


def scaling(settings: Settings, planned, worlds: tuple[int, ...]) -> list[dict]:
    """Plans at each world size; where it spans nodes also with one shard group a node, if that was not decided."""
    speed = ("step_time_ms", "tokens_per_sec", "mfu_percent", "exposed_communication_percent")
    rows, told = [], ("fits", "communication_gib_per_step", *speed)
    for world in worlds:
        nodes = world // settings.gpus_per_node
        hybrid = [nodes] if nodes > 1 and not world % settings.gpus_per_node and settings.zero_stage else []
        for replicas in [settings.dp_replicate_size, *(hybrid if settings.dp_replicate_size == 1 else [])]:
            row = planned(world, dp_replicate_size=replicas)
            rows.append({"gpus": world, "dp_replicate_size": replicas} | {name: row[name] for name in told})
    return rows
