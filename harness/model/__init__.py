"""The model wing: configs, tokenizer and weights; attention, loss and precision; what training does to weights. It runs
on any number of ranks, and nothing in it knows of runs, checkpoints' files or reports.

Elsewhere: `from harness import model as models`, as a model is called `model` there.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "configs": "choose_sequence_length find_source load_config read_generation_config",
        "tokenizer": "load_files",
        "weights": "as_in_checkpoint decoder_layers layer_period materialize on_meta",
        "pretrained": "PretrainedWeights",
        "attention": "any_attention_kernel choose_attention describe_attention",
        "loss": "IGNORE_INDEX adapt_forward choose_loss full_loss",
        "precision": "choose_precision",
        "float8": "check_float8 compute_float8_scales describe_float8 fp8_converter",
        "routing": "describe_routing",
        "flops": "MENDED computes_every_score count_flops eager_on_meta known_flops",
        "collectives": "finish_sharding fsdp_group sharded_modules",
        "verify": "verify_sharding",
        "optimization": "build_optimizer clip_grad_norm find_optimizer local memory_saving_optimizers",
        "skipping": "decide_skip skips_on_device step_or_skip",
        "sampling": "evaluating reshard sample",
        "finite": "loss_and_norm loss_without_data",
        "stand_ins": "without_data",
    },
)
