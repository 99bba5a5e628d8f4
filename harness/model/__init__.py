"""The model package: configs, tokenizer and weights; attention, loss and precision; optimizers and adapters. It runs on
any number of ranks and knows nothing of runs, checkpoint files or reports.

Import it as `from harness import model as models`, as a model is called `model` elsewhere.
"""

from harness.model.activations import LayerInputOffload, checkpoint_activations, pinned_bytes
from harness.model.attention import choose_attention, describe_attention
from harness.model.collectives import (
    avoid_copies_on_one_rank,
    discard_unreduced_gradients,
    gather_frozen_in_own_dtype,
    make_replicas_equal,
)
from harness.model.configs import find_source, load_config, read_generation_config, scale_rope
from harness.model.context import check_context_parallel, most_ranks_per_sequence
from harness.model.finite import loss_and_norm, loss_without_data
from harness.model.float8 import check_float8, compute_float8_scales, describe_float8, fp8_converter
from harness.model.flops import (
    CORRECTED_FORMULAS,
    attention_flops_per_key,
    computes_every_score,
    count_flops,
    eager_on_meta,
    flops_or_zeros,
)
from harness.model.lora import (
    Adapters,
    base_weights_dtype,
    describe_adapters,
    freeze_as_in,
    has_frozen,
    merged,
    to_peft_names,
    trained_on_meta,
    write_adapter_config,
)
from harness.model.loss import TERMS, StepLoss, adapt_forward, choose_loss, full_loss
from harness.model.masks import choose_sequence_length, max_positions
from harness.model.optimization import (
    OptimizerKind,
    build_optimizer,
    build_scheduler,
    clip_grad_norm,
    find_optimizer,
    local,
    memory_saving_optimizers,
)
from harness.model.patches import has_aligned_rows
from harness.model.precision import choose_precision
from harness.model.pretrained import describe_ignored_weights, open_weights, weights_digest
from harness.model.routing import describe_routing
from harness.model.sampling import check_generates, evaluating, reshard, sample
from harness.model.skipping import is_non_finite, skips_on_device, step_or_skip
from harness.model.stand_ins import without_data
from harness.model.tokenizer import load_files
from harness.model.verify import verify_sharding
from harness.model.weights import (
    as_in_checkpoint,
    check_gpu_memory,
    check_uniform_dtype,
    decoder_layers,
    layer_period,
    materialize,
    on_meta,
)
