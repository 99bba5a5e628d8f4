"""Base: errors, ranks, text, GPUs, versions, checkpoint folders, and a stdout that never fails, for all packages. It
imports none of them, and most of it no torch."""

from harness.base.console import exit_with_error, ignore_closed_pipes, print_json, record_error, send
from harness.base.devices import CLOCK_STOPPED, GIB, gpu_name, memory_metrics, trim_host_memory, wait_for_device
from harness.base.errors import UserError
from harness.base.gpus import CONTEXT_GIB, NCCL_GIB, Gpu, choose_kind, find_gpu, unlisted
from harness.base.hub import set_hub_offline_without_network
from harness.base.labels import IGNORE_INDEX
from harness.base.ranks import (
    WORK,
    all_gather_objects,
    all_to_all_lists,
    broadcast_from_node_main,
    broadcast_from_rank_0,
    call_on_all_ranks,
    count_compiling_as_work,
    working,
)
from harness.base.saved import (
    ADAPTER_CONFIG,
    DAMAGED,
    FORMAT,
    MANIFEST,
    OtherFormatError,
    checkpoint_name,
    complete_checkpoints,
    dump_with_checksum,
    is_run,
    named_checkpoints,
    newest_checkpoint,
    read_config,
    read_json,
    read_manifest,
    step_in_name,
    sync_to_disk,
    unfinished_checkpoints,
)
from harness.base.text import (
    chat_templates,
    counted,
    first_line,
    is_url,
    one_line,
    one_or_more,
    read_template,
    shortened,
)
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
