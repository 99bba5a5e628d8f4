"""Removed flags: what earlier versions had, with what to do instead. The config.json of an old run still names them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RemovedFlag:
    old_default: object  # a file that gives this value asks for nothing
    instead: str  # why it went and what does its work, as the end of an error


REMOVED_FLAGS = {
    "--liger": RemovedFlag(
        False, "its kernels were never measured here; --compile fuses norms, SwiGLU and rotary positions by itself"
    )
}


def asks_for_nothing(flag: str, value: object) -> bool:
    """Whether a key of a file is a removed flag at the default that it had."""
    return flag in REMOVED_FLAGS and value == REMOVED_FLAGS[flag].old_default


def describe_removal(flag: str) -> str:
    """What to do without a removed flag; empty for any other."""
    if flag not in REMOVED_FLAGS:
        return ""
    return f"this flag was removed: {REMOVED_FLAGS[flag].instead}"
