"""Base: what every wing stands on: errors, ranks, text, GPUs, versions, and a stdout that never fails. Most of it
imports no torch, and none of it knows a wing."""

from harness.base.console import leave, never_fail, record_error, send, tell_json
from harness.base.devices import CLOCK_STOPPED, GIB, give_back_freed_memory, memory_figures, wait_for_device
from harness.base.errors import NoSplitError, UserError
from harness.base.gpus import CONTEXT_GIB, NCCL_GIB, Gpu, choose_kind, find_gpu, unlisted
from harness.base.hub import answer_from_cache_without_network
from harness.base.labels import IGNORE_INDEX
from harness.base.ranks import from_main_process, of_all_ranks, on_main_rank, with_all_ranks
from harness.base.saved import (
    FORMAT,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    named_checkpoints,
    newest_checkpoint,
    read_config,
    read_json,
    read_manifest,
    seal,
    step_in_name,
    sync_to_disk,
    unfinished_checkpoints,
)
from harness.base.text import counted, first_line, is_url, one_line, one_or_more, read_template, shortened
from harness.base.versions import (
    OLDEST_TORCHAO,
    ROOT,
    ShowVersion,
    commit,
    installed,
    package_versions,
    refuse_missing_packages,
    refuse_old_python,
    version_parts,
)

__all__ = [
    "CLOCK_STOPPED",
    "CONTEXT_GIB",
    "FORMAT",
    "GIB",
    "IGNORE_INDEX",
    "MANIFEST",
    "NCCL_GIB",
    "OLDEST_TORCHAO",
    "ROOT",
    "Gpu",
    "NoSplitError",
    "ShowVersion",
    "UserError",
    "answer_from_cache_without_network",
    "checkpoint_name",
    "choose_kind",
    "commit",
    "complete_checkpoints",
    "counted",
    "find_gpu",
    "first_line",
    "from_main_process",
    "give_back_freed_memory",
    "installed",
    "is_url",
    "leave",
    "memory_figures",
    "named_checkpoints",
    "never_fail",
    "newest_checkpoint",
    "of_all_ranks",
    "on_main_rank",
    "one_line",
    "one_or_more",
    "package_versions",
    "read_config",
    "read_json",
    "read_manifest",
    "read_template",
    "record_error",
    "refuse_missing_packages",
    "refuse_old_python",
    "seal",
    "send",
    "shortened",
    "step_in_name",
    "sync_to_disk",
    "tell_json",
    "unfinished_checkpoints",
    "unlisted",
    "version_parts",
    "wait_for_device",
    "with_all_ranks",
]
