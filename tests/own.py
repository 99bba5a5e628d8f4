"""All that --import can add, in one file: a model, a data set, a schedule, an optimizer, a metric, a loss term."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from harness import register
from harness.model import OptimizerKind


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads, self.norm, self.mlp_norm = heads, nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class PlainConfig(PreTrainedConfig):
    model_type = "plain"

    def __init__(self, vocab_size=1536, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**others)


class Plain(PreTrainedModel, GenerationMixin):
    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        size, heads = config.hidden_size, config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(Block(size, heads) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None, attention_mask=None, **_):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):  # no cache: each token computes the whole text
        return {"input_ids": input_ids}


AutoConfig.register("plain", PlainConfig)
AutoModelForCausalLM.register(PlainConfig, Plain)


register.dataset("squares", lambda: [f"The square of {number} is {number**2}." for number in range(2000)])
register.schedule("triangle", lambda step, steps, warmup: 1 - abs(2 * step / steps - 1))


def build_sgd(groups, settings):
    optimizer = torch.optim.SGD(groups, settings.lr, momentum=settings.betas[0])
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


register.optimizer("sgd", OptimizerKind(build_sgd))


def weight_norm(model, result):
    return torch.stack([parameter.norm() for parameter in model.parameters()]).norm()


register.metric("weight_norm", weight_norm, on_console=True)
register.loss_term("z_loss", lambda logits, target: 0.1 * logits.logsumexp(1) ** 2)
