"""Flags of other trainers and their equivalents, for errors and for the tables of docs/MIGRATION.md, which `python -m
tools.migration_table docs/MIGRATION.md` writes."""

from typing import NamedTuple


class Row(NamedTuple):
    """Names with one equivalent."""

    theirs: str  # separated by blanks; if one is a flag of this program too, the note has the difference
    here: str  # a flag, or a sentence, in Markdown
    note: str = ""  # other defaults, and differences


# Equivalents of several names
SIZES = "`--model FOLDER` with a config.json, which has the sizes"
QUANTIZED = "no quantized base (QLoRA) is trained here, TRL and axolotl do that; `--lora-rank R` has its base in bf16"
ON_ASSISTANT = "the loss is on the assistant's turns and on completions; `--chat-loss all` takes every token"
LAYOUTS = "the layout of records is found by their fields, see [Conversations](DATA.md#conversations)"
EVAL_FILE = "`--eval-split FILE`"
NO_EARLY_STOP = "no run ends before its steps; `--keep-best` keeps the checkpoint with the lowest eval loss"
HUB = "`--export DIR`, then `hf upload REPO DIR`"
ADAPTERS = "`--lora-rank R`"
MERGED = "`--export DIR --export-weights merged`"
EVAL_STEPS = "`--eval-interval`, a number of steps, or epoch"
ANOTHER_TOOL = "[When another tool is better](PLAN.md#when-another-tool-is-better)"
NO_PARALLELISM = f"no tensor, pipeline, context or expert parallelism here, see {ANOTHER_TOOL}"
LAUNCHER = "the launcher sets the number of ranks, before the script: `torchrun --nproc_per_node=N train_fsdp.py`"
DEVICE = "a GPU is used if there is one; `CUDA_VISIBLE_DEVICES` in the environment chooses, empty for the CPU"
WARMUP = "`--warmup-steps`, a number of steps"
GLOBAL_BATCH = "`--gradient-accumulation-steps`: the global batch over ranks and `--batch-size`"
PACKED = (
    "`--packing`",
    "on by default: texts end to end, conversations whole; none pads each to a sequence of its own",
)

TRAINERS = {
    "Trainer and TRL": [
        Row(
            "model_name_or_path pretrained_model_name_or_path model_name",
            "`--model`",
            "random weights without `--init pretrained`",
        ),
        Row("tokenizer_name tokenizer_name_or_path", "`--tokenizer`"),
        Row("config_name config_overrides", SIZES),
        Row("trust_remote_code", "no code of a model's folder is run; families of transformers are trained"),
        Row("dataset_name train_file", "`--dataset`"),
        Row("dataset_config_name", "`--dataset-config`"),
        Row("validation_file eval_dataset eval_file", EVAL_FILE),
        Row(
            "validation_split_percentage test_size",
            EVAL_FILE,
            "without it the split validation, or one of 20 documents",
        ),
        Row("max_train_samples max_samples", "`--dataset-split 'train[:1000]'`"),
        Row("dataset_text_field text_column text_column_name", "`--text-field`"),
        Row(
            "per_device_train_batch_size per_device_batch_size train_batch_size",
            "`--batch-size`",
            "8 in Trainer, 1 here",
        ),
        Row("per_device_eval_batch_size eval_batch_size", "evaluations have the `--batch-size` of the training"),
        Row("auto_find_batch_size", "`--batch-size auto`"),
        Row(
            "max_length max_seq_length max_seq_len",
            "`--sequence-length`",
            "what is longer is trained on in further pieces here, where SFTTrainer drops the rest",
        ),
        Row("max_steps", "`--num-steps`"),
        Row("num_train_epochs epochs", "`--num-epochs`", "3 epochs in Trainer, 1,000 steps here"),
        Row("learning_rate", "`--lr`", "5e-5 in Trainer, 2e-5 in SFTTrainer; 3e-4 here, with `--init pretrained` 2e-5"),
        Row("lr_scheduler_type", "`--lr-scheduler`", "linear in Trainer, cosine here"),
        Row("warmup_ratio warmup_steps", WARMUP, "none in Trainer, 5 % of the run here"),
        Row("weight_decay", "`--weight-decay`", "0 in Trainer, 0.1 here"),
        Row("adam_beta1 adam_beta2", "`--betas B1 B2`", "0.9 and 0.999 in Trainer, 0.9 and 0.95 here"),
        Row("optim", "`--optimizer`", "adamw_torch_fused is adamw, adamw_torch_8bit is adamw8bit"),
        Row("bf16 dtype torch_dtype", "`--precision bf16`", "bf16-pure for a model loaded in bf16"),
        Row("fp16 fp16_full_eval", "no fp16 here; `--precision bf16` needs no loss scale"),
        Row("fp8", "`--precision fp8`"),
        Row("gradient_checkpointing", "`--activation-checkpointing full`", "or selective"),
        Row("torch_compile", "`--compile`", "on with CUDA here"),
        Row("use_liger_kernel use_liger", "`--fused-loss`", "on here"),
        Row("attn_implementation", "`--attention`"),
        Row("dataloader_num_workers", "`--num-workers`"),
        Row("eval_strategy evaluation_strategy", EVAL_STEPS),
        Row("eval_steps", "`--eval-interval`", "`--eval-steps` here is the number of batches"),
        Row("logging_steps", "`--log-interval`", "500 in Trainer, 10 here"),
        Row("logging_dir", "`--output-dir`", "each run has a folder in it"),
        Row(
            "save_steps save_strategy",
            "`--checkpoint-interval`, a number of steps",
            "500 in Trainer, only the last state here",
        ),
        Row("save_total_limit", "`--keep-checkpoints`", "all in Trainer, 2 here"),
        Row(
            "load_best_model_at_end metric_for_best_model",
            "`--keep-best`",
            "it keeps the checkpoint with the lowest eval loss",
        ),
        Row("early_stopping early_stopping_patience early_stopping_threshold", NO_EARLY_STOP),
        Row("resume_from_checkpoint", "`--resume auto`, with a fixed `--run-name`"),
        Row(
            "overwrite_output_dir",
            "no run is overwritten: another `--run-name` starts a new one, `--resume auto` continues one",
        ),
        Row("do_train do_eval", "a run trains, and evaluates with `--eval-interval`; `--num-steps 0` only evaluates"),
        Row("save_model save_safetensors", "`--export DIR`"),
        Row("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo", HUB),
        Row("report_to use_wandb wandb tensorboard", "`--log-with`"),
        Row("ddp_timeout", "`--timeout-minutes`", "30 minutes in Trainer, 10 here"),
        Row("fsdp fsdp_config sharding_strategy", "`--zero-stage`", "see [From accelerate](#from-accelerate)"),
        Row("deepspeed", "`--zero-stage`", "no DeepSpeed configuration is read, see [From DeepSpeed](#from-deepspeed)"),
        Row("local_rank num_processes nproc_per_node num_gpus gpus devices world_size", LAUNCHER),
        Row("device device_type gpu gpu_id no_cuda use_cpu", DEVICE),
        Row("prompt prompts", "`--sample-prompt TEXT`"),
        Row("max_new_tokens", "`--sample-tokens`"),
        Row("packing padding_free group_by_length", *PACKED),
        Row("assistant_only_loss completion_only_loss", ON_ASSISTANT),
        Row("chat_template_path conversation_template", "`--chat-template FILE`", "without it the tokenizer's"),
        Row("dataset_format", LAYOUTS),
        Row("eos_token", "texts end with the tokenizer's eos_token, or what the chat template puts after an answer"),
        Row("use_peft peft lora_r", ADAPTERS),
        Row("lora_target_modules target_modules", "`--lora-targets`", "all linears of decoder layers here"),
        Row("lora_dropout", "adapters have no dropout here; leave it out"),
        Row("use_dora", "adapters are plain LoRA here; peft and TRL train others"),
        Row("use_rslora", "`--lora-alpha`, alpha / rank is the scale", "sqrt(rank) x alpha gives rsLoRA's"),
        Row(
            "modules_to_save lora_modules_to_save",
            "only adapters are trained with `--lora-rank`; without it all weights",
        ),
        Row("load_in_4bit load_in_8bit qlora", QUANTIZED),
        Row("dpo grpo reward_model_path", "no preference losses here; TRL has them"),
        Row("neftune_noise_alpha label_smoothing_factor", "not here; Trainer has it"),
    ],
    "axolotl, LLaMA-Factory and Unsloth": [
        Row("base_model", "`--model`", "random weights without `--init pretrained`"),
        Row("micro_batch_size", "`--batch-size`"),
        Row("sequence_len cutoff_len model_max_length max_sequence_length", "`--sequence-length`"),
        Row("sample_packing eval_sample_packing neat_packing", *PACKED),
        Row("val_set_size", EVAL_FILE, "without it the split validation, or one of 20 documents"),
        Row("evals_per_epoch saves_per_epoch", "`--eval-interval`, `--checkpoint-interval`", "numbers of steps"),
        Row("train_on_inputs train_on_prompt train_on_responses_only mask_prompt roles_to_train", ON_ASSISTANT),
        Row("train_on_eos", "the token that ends an assistant's turn is in the loss"),
        Row(
            "conversation_column messages_field field_messages",
            "`--text-field`, a column of messages",
            "messages and conversations are found",
        ),
        Row("dataset_type", LAYOUTS),
        Row("adapter lora lora_dim finetuning_type", ADAPTERS),
        Row("lora_target lora_target_linear", "`--lora-targets`", "all linears of decoder layers here"),
        Row("merge merge_lora merge_and_unload", MERGED),
        Row("flash_attention flash_attn use_flash_attention_2", "`--attention`"),
        Row("wandb_project", "`--project-name`"),
        Row("wandb_run_name wandb_name wandb_run_id", "`--run-name`"),
    ],
    "torchtune": [
        Row("max_steps_per_epoch", "`--num-steps`"),
        Row("dataset.packed packed", *PACKED),
        Row("fsdp_cpu_offload", "`--cpu-offload`"),
        Row("data_parallel_replicate_dim", "`--dp-replicate-size`"),
        Row("enable_activation_checkpointing", "`--activation-checkpointing full`"),
        Row("optimizer_in_bwd enable_activation_offloading", "not here; torchtune has it"),
    ],
    "accelerate": [
        Row("fsdp_reshard_after_forward", "`--zero-stage`", "3 is true, 2 is false"),
        Row(
            "fsdp_sharding_strategy",
            "`--zero-stage`",
            "see [FSDP1 and FSDP2 side by side](#fsdp1-and-fsdp2-side-by-side)",
        ),
        Row(
            "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
            "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states",
            "automatic here; leave it out",
        ),
        Row("fsdp_offload_params", "`--cpu-offload`"),
        Row("fsdp_activation_checkpointing", "`--activation-checkpointing full`"),
        Row("fsdp_state_dict_type", "sharded checkpoints always; `--export` writes whole weights"),
        Row("mixed_precision", "`--precision`"),
        Row("dynamo_backend", "`--compile`"),
    ],
    "DeepSpeed": [
        Row("deepspeed_config", "`--zero-stage`", "no DeepSpeed configuration is read"),
        Row("train_micro_batch_size_per_gpu", "`--batch-size`"),
        Row("zero_optimization.stage zero_optimization", "`--zero-stage`", "stages 1 and 2 shard master weights too"),
        Row("offload_optimizer offload_param", "`--cpu-offload`", "both together; no nvme"),
        Row("mics_shard_size", "`--dp-replicate-size`", "ranks over that size"),
        Row("zero_quantized_weights", "`--precision fp8`", "the nearest"),
        Row(
            "overlap_comm reduce_bucket_size allgather_bucket_size stage3_param_persistence_threshold",
            "not needed here; leave it out",
        ),
        Row("gradient_clipping", "`--max-grad-norm`", "none in DeepSpeed, 1.0 here"),
        Row(
            "scheduler",
            "`--lr-scheduler`",
            "WarmupLR is constant_with_warmup, WarmupDecayLR linear, WarmupCosineLR cosine",
        ),
        Row("zero_to_fp32", "`--export DIR`"),
        Row("loss_scale zero_quantized_gradients", "not here; bf16 needs no loss scale"),
    ],
    "torchtitan": [
        Row("local_batch_size", "`--batch-size`"),
        Row("global_batch_size", GLOBAL_BATCH),
        Row("seq_len", "`--sequence-length`"),
        Row("steps", "`--num-steps`"),
        Row("max_norm", "`--max-grad-norm`"),
        Row("mixed_precision_param", "`--precision`"),
        Row("data_parallel_replicate_degree dp_replicate", "`--dp-replicate-size`", "the other ranks shard"),
        Row("data_parallel_shard_degree dp_shard", "`--dp-replicate-size`; the other ranks shard"),
        Row("fsdp_reshard_after_forward", "`--zero-stage`", "3 is always, 2 is never"),
        Row(
            "activation_checkpoint.mode",
            "`--activation-checkpointing`",
            "selective recomputes every second matmul there, none here",
        ),
        Row("compile.enable", "`--compile`"),
        Row("enable_fsdp_float8_all_gather", "`--precision fp8`"),
        Row("checkpoint.interval", "`--checkpoint-interval`"),
        Row("async_mode", "`--async-checkpoint`"),
        Row("keep_latest_k", "`--keep-checkpoints`"),
        Row("log_freq", "`--log-interval`"),
        Row("enable_wandb enable_tensorboard", "`--log-with`"),
        Row("validation.freq", "`--eval-interval`"),
        Row("validation.steps", "`--eval-steps`"),
        Row("enable_profiling", "`--profile`"),
    ],
    "Megatron, and models over several GPUs": [
        Row(
            "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tensor_parallel_dim tp tp_size",
            NO_PARALLELISM,
        ),
        Row("pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp pp_size", NO_PARALLELISM),
        Row(
            "context_parallel_size context_parallel_degree sequence_parallel sequence_parallel_size cp cp_size",
            NO_PARALLELISM,
        ),
        Row("expert_model_parallel_size expert_parallel_size expert_parallel_degree ep ep_size", NO_PARALLELISM),
        Row("num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups num_experts", SIZES),
        Row("num_hidden_layers intermediate_size num_key_value_heads vocab_size max_position_embeddings", SIZES),
        Row("seq_length", "`--sequence-length`"),
        Row("train_iters", "`--num-steps`"),
        Row("lr_decay_style", "`--lr-scheduler`"),
        Row("lr_warmup_iters lr_warmup_steps lr_warmup_fraction", WARMUP),
        Row("clip_grad", "`--max-grad-norm`"),
        Row("data_path", "`--dataset`"),
        Row("tokenizer_type tokenizer_model", "`--tokenizer`"),
        Row("mock_data", "`--dataset synthetic`"),
        Row("save", "`--output-dir`"),
        Row("load", "`--resume PATH`"),
        Row("save_interval", "`--checkpoint-interval`"),
        Row("recompute_activations recompute_granularity", "`--activation-checkpointing`"),
        Row("use_distributed_optimizer", "`--zero-stage 1`"),
    ],
    "nanoGPT and nanochat": [
        Row("n_layer n_head n_embd depth", SIZES),
        Row("init_from", "`--init random`, `--resume auto`, or `--model gpt2 --init pretrained`"),
        Row("device_batch_size", "`--batch-size`"),
        Row("total_batch_size", GLOBAL_BATCH),
        Row(
            "gradient_accumulation_steps",
            "`--gradient-accumulation-steps`",
            "summed over ranks in nanoGPT, for each rank here",
        ),
        Row("block_size context_length", "`--sequence-length`"),
        Row("max_iters num_iterations", "`--num-steps`"),
        Row("warmup_iters", "`--warmup-steps`"),
        Row("max_lr", "`--lr`"),
        Row("min_lr", "`--lr-scheduler cosine_with_min_lr`", "a tenth of the peak"),
        Row("matrix_lr", "`--lr`, of `--optimizer muon`"),
        Row("embedding_lr unembedding_lr", "`--adamw-lr`, of `--optimizer muon`"),
        Row("beta1 beta2", "`--betas B1 B2`"),
        Row("grad_clip", "`--max-grad-norm`"),
        Row("eval_every", "`--eval-interval`"),
        Row("eval_iters", "`--eval-steps`"),
        Row("log_every", "`--log-interval`"),
        Row("save_every", "`--checkpoint-interval`"),
        Row("out_dir output", "`--output-dir`"),
        Row(
            "data",
            "`--dataset`, a folder such as data/NAME",
            "train.bin is trained on as it is, val.bin is for evaluation",
        ),
        Row("wandb_log", "`--log-with wandb`"),
    ],
}
