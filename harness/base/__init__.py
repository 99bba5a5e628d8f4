"""Base: what every wing stands on: errors, ranks, text, GPUs, versions, and a stdout that never fails. Most of it
imports no torch, and none of it knows a wing."""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "errors": "UserError NoSplitError",
        "ranks": "on_main_rank from_main_process of_all_ranks with_all_ranks",
        "text": "counted first_line is_url one_line one_or_more read_template shortened",
        "devices": "CLOCK_STOPPED GIB give_back_freed_memory memory_figures wait_for_device",
        "gpus": "Gpu RATES CONTEXT_GIB NCCL_GIB find_gpu choose_kind unlisted read_rates",
        "versions": "ROOT OLDEST_TORCHAO ShowVersion commit installed package_versions version_parts "
        "refuse_old_python refuse_missing_packages",
        "console": "leave never_fail send record_error tell_json",
        "hub": "answer_from_cache_without_network",
        "saved": "FORMAT MANIFEST checkpoint_name complete_checkpoints named_checkpoints newest_checkpoint read_config "
        "read_json read_manifest seal step_in_name sync_to_disk unfinished_checkpoints",
    },
)
