"""torchtitan's trainer on a Llama of the preset's sizes: fp32 weights, bf16 compute, compiled layers, chunked loss.

What differs: every layer has rotary embeddings, q, k and v are one matmul, attention is FlexAttention; all of it is
torchtitan's own choice. Written for torchtitan 0.3, whose trainer needs a GPU.
"""

import dataclasses
import tempfile

from common import ROOT, Clock, RandomTokens, build_model, device, leave, parse_args, world_of_one

args = parse_args(__doc__)
world_of_one()
if device().type == "cpu":
    raise RuntimeError("torchtitan's trainer needs a GPU")

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.trainer import Trainer

model = build_model(args, torch.device("meta"))
clock, sizes = Clock(args, model), model.config


class RandomBatches(BaseDataLoader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **_):
        pass

    def __iter__(self):
        data = RandomTokens(args, sizes.vocab_size)
        positions = torch.arange(args.sequence_length).repeat(args.batch_size, 1)
        for batch in torch.utils.data.DataLoader(data, args.batch_size, num_workers=1, pin_memory=True):
            yield {"input": batch["input_ids"], "positions": positions}, batch["labels"].roll(-1, 1)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class TimedTrainer(Trainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def forward_backward_step(self, **batch) -> torch.Tensor:
        loss = super().forward_backward_step(**batch)
        self.newest_loss = loss.detach() * clock.world  # it was a sum over this rank, divided by the tokens of all
        return loss

    def train_step(self, batches) -> None:
        super().train_step(batches)
        clock.step(self.newest_loss, precision="fp32 weights, bf16 compute")


spec = llama3.model_registry("3B")  # tied embeddings, as SmolLM3; its sizes are replaced
head_dim = sizes.hidden_size // sizes.num_attention_heads
dim = sizes.hidden_size
spec.model = dataclasses.replace(
    spec.model,
    dim=dim,
    vocab_size=sizes.vocab_size,
    tok_embeddings=dataclasses.replace(spec.model.tok_embeddings, num_embeddings=sizes.vocab_size, embedding_dim=dim),
    norm=dataclasses.replace(spec.model.norm, normalized_shape=dim),
    lm_head=dataclasses.replace(spec.model.lm_head, in_features=dim, out_features=sizes.vocab_size),
    layers=llama3._build_llama3_layers(
        n_layers=sizes.num_hidden_layers,
        dim=dim,
        n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_key_value_heads,
        hidden_dim=sizes.intermediate_size,
        rope=llama3.ComplexRoPE.Config(dim=head_dim, max_seq_len=sizes.max_position_embeddings, theta=500000),
        attn_backend="flex",
    ),
)
with tempfile.TemporaryDirectory() as folder:
    config = TimedTrainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=sizes.vocab_size)),
        hf_assets_path=str(ROOT / "assets" / "demo"),  # a tokenizer, which is not used
        dump_folder=folder,
        dataloader=RandomBatches.Config(),
        optimizer=default_adamw(lr=3e-4),
        metrics=MetricsProcessor.Config(log_freq=10**6),
        training=TrainingConfig(local_batch_size=args.batch_size, seq_len=args.sequence_length, steps=args.num_steps),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward="never"),
        activation_checkpoint=None,
        compile=CompileConfig(enable=args.compile),
    )
    config.build().train()
leave()
