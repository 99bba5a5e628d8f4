"""Names: what a mistyped flag, or a mistyped name of anything else, may have meant."""

import difflib
from collections.abc import Iterable

from harness.flags.settings import FLAGS, as_flag

# Flags that are no more, and what takes their place.
INSTEAD = {
    "--ema": "--average-checkpoints K, with --num-steps 0 --resume RUN, averages the weights of saved checkpoints",
    "--skip-spikes": "steps that are not finite are skipped by themselves; a lower --max-grad-norm tames spikes",
    "--muon-iteration": "muon has one iteration, Newton-Schulz; leave it out",
    "--muon-scale": "muon scales as match_rms_adamw; leave it out",
    "--momentum-dtype": "muon's momentum is in fp32; leave it out",
    "--measure": "plans go by assumed rates; docs/PLAN.md has them beside runs on GPUs",
    "--plan-rates": "plans go by assumed rates; --plan-gpu names a GPU of the table",
    "--activation-memory-budget": "--activation-checkpointing selective or full keeps fewer activations",
}


def no_such_flag(name: str, known: Iterable[str]) -> str:
    """What is wrong with a flag that is none, and what takes its place or may have been meant."""
    if name in INSTEAD:
        return f"no such flag any more; {INSTEAD[name]}"
    return f"no such flag{suggest(name, known)}"


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty where no name in `known` is near."""
    name, known = name.lower().replace("_", "-"), sorted(known)
    meanings = {own: own for own in known}
    for field, about in FLAGS.items():
        if as_flag(field) in known:
            meanings |= {f"--{other}": as_flag(field) for other in about.metadata["also"].split()}
    near = [meanings[name]] if name in meanings and name not in known else []
    if not near and len(name) > 4:
        near = [own for own in known if own.startswith(name)]
    if not near:
        near = [meanings[other] for other in difflib.get_close_matches(name, meanings, 1, 0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
