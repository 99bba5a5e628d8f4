"""The loss: a cross entropy that never holds the logits of all tokens, and the changes by which a transformers model
uses it. FSDP gathers the head around it."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from harness import base, flags
from harness.base import IGNORE_INDEX
from harness.model.context import share_sequences
from harness.model.flops import eager_on_meta, running_on_meta
from harness.model.masks import prepare_masks
from harness.model.routing import watch_routers
from harness.model.weights import on_meta

# Bytes of the logits of one chunk. Their gradient takes as much again, and without compilation so do two fp32 copies.
LOGITS_BYTES = 2**30


def tokens_at_once(weight: torch.Tensor) -> int:
    """Tokens per chunk for a head of shape (vocab, dim): 4,096, or fewer if a large vocabulary or fp32 would make the
    logits larger than LOGITS_BYTES. Each chunk reads and writes the weight's gradient in fp32, 8 bytes per element, so
    a few large chunks are faster than many small ones."""
    return 1024 * min(max(LOGITS_BYTES // (len(weight) * weight.element_size()) // 1024, 1), 4)


def chunk_starts(tokens: int, size: int) -> Iterable[int]:
    """The first token of each chunk. A plan replaces this by three chunks, as all but the last are alike."""
    return range(0, tokens, size)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to `total`, which is fp32; on CUDA in one kernel."""
    if total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


Term = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Terms that are trained in addition to the cross entropy, such as a z-loss, by the names of their metrics;
# harness/register.py adds those of --import. A term is a function of logits, fp32 (tokens, vocab), and targets,
# (tokens, 1), that returns each token's value, fp32 (tokens,). Its mean over the labels that count is differentiated
# with the loss and logged under its name; `loss` and `eval_loss` stay the cross entropy. Compiled, a z-loss is in the
# kernel of the loss.
TERMS: dict[str, Term] = {}


def term_values(terms: dict[str, Term], logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each term's values, fp32 (tokens,)."""
    values = {}
    for name, term in terms.items():
        value = term(logits, target)
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != target.shape[:1]:
            found = f"shape {tuple(value.shape)}" if is_tensor else repr(value)
            raise base.UserError(f"loss term {name}: it gave {found} instead of a value for each token")
        values[name] = value.float()
    return values


def loss_and_gradient(
    logits: torch.Tensor, target: torch.Tensor, terms: dict[str, Term], trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """(log-probability of each token's target, fp32 (tokens, 1); if it `trains`, the gradient of its negative plus all
    terms, shaped like the logits, and each term's values, fp32 (tokens,)).

    Compiled, it only reads the logits and writes the gradient; eager code makes an fp32 copy in between.
    """
    log_probs = logits.log_softmax(1, dtype=torch.float32)
    picked = log_probs.gather(1, target)
    if not trains:
        return picked, None, {}
    # softmax minus one-hot
    if torch.compiler.is_compiling():  # a comparison is fused, a scatter is not
        gradient = log_probs.exp() - (torch.arange(logits.shape[1], device=logits.device) == target).float()
    else:
        gradient = log_probs.exp_().scatter_add_(1, target, -torch.ones_like(picked))
    values: dict[str, torch.Tensor] = {}
    if terms:

        def summed(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            values = term_values(terms, logits, target)
            return torch.stack([value.sum() for value in values.values()]).sum(), values

        term_gradient, values = torch.func.grad(summed, has_aux=True)(logits.float())
        gradient = gradient + term_gradient
    return picked, gradient.to(logits.dtype), values


class LinearCrossEntropy(torch.autograd.Function):
    """(mean cross entropy of `hidden @ weight.T + bias`, a chunk of tokens at a time; the means of the terms). The
    caller says if it `trains`: inside an autograd.Function gradients always seem disabled.

    The gradients are computed in forward, while a chunk's logits exist: nothing is computed twice, and neither logits
    nor their gradients ever exist for all tokens. A frozen head gets none. Shapes: hidden (tokens, dim), weight
    (vocab, dim), bias (vocab,) or None, labels (tokens,); `loss_and_gradient` has its terms and may be compiled.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss_and_gradient: Callable,
        trains: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        counted = labels != IGNORE_INDEX
        count = counted.sum().clamp(min=1)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = tokens_at_once(weight)
        hidden_needs_grad, weight_needs_grad, bias_needs_grad = (
            trains and needed for needed in ctx.needs_input_grad[:3]
        )
        grad_hidden = torch.empty_like(hidden) if hidden_needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight_needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias_needs_grad else None
        terms: dict[str, torch.Tensor] = {}
        for start in chunk_starts(len(hidden), size):
            chunk = slice(start, start + size)
            inputs, target = hidden[chunk], labels[chunk].clamp(min=0).unsqueeze(1)
            share = counted[chunk].unsqueeze(1) / count  # weight of each token in the mean
            logits = F.linear(inputs, weight, bias)
            picked, gradient, values = loss_and_gradient(logits, target, trains=trains)
            loss -= (picked * share).sum()
            for name, value in values.items():
                terms[name] = terms.get(name, 0.0) + value.dot(share.squeeze(1))
            # d loss / d logits = gradient * share; the share is applied where it is cheap
            if hidden_needs_grad:
                torch.mul(gradient @ weight, share, out=grad_hidden[chunk])
            if weight_needs_grad:
                add_product(grad_weight, gradient.t(), (inputs * share).to(weight.dtype))
            if bias_needs_grad:
                grad_bias += gradient.t().float() @ share.squeeze(1)
        grad_weight = grad_weight.to(weight.dtype) if weight_needs_grad else None
        grad_bias = grad_bias.to(bias.dtype) if bias_needs_grad else None
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss, terms

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        factor = grad_loss.view(1)  # fp32; a scalar tensor would be rounded to a bf16 gradient's dtype first on CUDA
        grads = [None if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors]
        return *grads, None, None, None


def full_loss(logits: torch.Tensor, labels: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Mean cross entropy of logits (batch, seq, vocab) and labels (batch, seq), which are shifted already."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


def term_means(terms: dict[str, Term], logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The means of the terms over the labels that count, for logits (batch, seq, vocab) and labels (batch, seq)."""
    counted = (labels != IGNORE_INDEX).flatten()
    share = counted / counted.sum().clamp(min=1)
    values = term_values(terms, logits.flatten(0, 1).float(), labels.flatten().clamp(min=0).unsqueeze(1))
    return {name: value.dot(share) for name, value in values.items()}


def adapt_forward(model: Any, settings: flags.Settings) -> None:
    """Make transformers' forward train as this program does: with its loss, of labels that are shifted already and
    checked; with document masks if they are on; with this rank's part of a shared sequence; with the router loss
    outside the loss. After a forward pass with gradients `model.loss_terms` has the means of `TERMS`. Comes before the
    layers are wrapped or compiled."""
    terms = dict(TERMS)
    if settings.fused_loss:
        fuse_loss(model, terms, settings.compile)
    else:
        keep_logits(model, terms)
    group = share_sequences(model, settings)
    check_labels(model)
    watch_routers(model, settings.init, group)
    prepare_masks(model, settings.model, settings.document_mask, group)  # last: the others see a part


class StepLoss:
    """This rank's sums over the microbatches of an optimizer step, on the device: `loss`, `terms` by name,
    `router_loss`, and `expert_load`, the number of tokens for each expert, fp32 (layers, experts). The last two are
    None without a router loss."""

    def __init__(self, model: Any, microbatches: int):
        """`model` was adapted by `adapt_forward`."""
        self.model, self.microbatches = model, microbatches
        self.loss: torch.Tensor | None = None
        self.terms: dict[str, torch.Tensor] = {}
        self.router_loss: torch.Tensor | None = None
        self.expert_load: torch.Tensor | None = None

    def totals(self) -> dict[str, Any]:
        """The sums so far, by name."""
        names = ("loss", "terms", "router_loss", "expert_load")
        return {name: getattr(self, name) for name in names}

    def add_microbatch(self, loss: torch.Tensor, divisor: float) -> torch.Tensor:
        """Add the `loss` of the last forward pass, and its terms, divided by `divisor`; return the scalar to
        differentiate. The router losses of all microbatches have equal weight, however many tokens they train on."""
        loss = loss / divisor
        self.loss = added(self.loss, loss.detach())
        for name, term in self.model.loss_terms.items():
            self.terms[name] = added(self.terms.get(name), term / divisor)
        routing = self.model.routing
        if not routing:
            return loss
        router_loss, assignments = routing.read()
        router_loss = router_loss / self.microbatches
        self.router_loss = added(self.router_loss, router_loss.detach())
        self.expert_load = added(self.expert_load, assignments)
        return loss + routing.coefficient * router_loss


def added(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if total is None else total + value


def choose_loss(fused: bool | None, config: PretrainedConfig) -> bool:
    """Resolve `--fused-loss`: True if the head is fused into the loss.

    Raises:
        UserError: it is requested, and the logits are more than a linear of the hidden states.
    """
    if fused is False:
        return False
    linear = has_linear_logits(config)
    if fused and not linear:
        raise base.UserError("--fused-loss: this model's logits are more than a linear of its hidden states")
    return linear


def has_linear_logits(config: PretrainedConfig) -> bool:
    """True if logits are what the head returns, times a constant, by a forward on the meta device. Of a model that does
    not run there, as it reads data, only transformers' own are taken for linear, and `fuse_loss` checks them."""
    model: Any = on_meta(config)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    heads: list[tuple] = []  # the shape and the node in autograd's graph of what the head returns
    try:
        runnable: Any = eager_on_meta(config)
        runnable.get_output_embeddings().register_forward_hook(
            lambda head, inputs, result: heads.append((result.shape, result.grad_fn))
        )
        with running_on_meta():
            logits = runnable(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except ValueError:
        return type(model).__module__.startswith("transformers.")
    shape, node = heads[-1]
    return logits.shape == shape and is_multiple(logits, node)


def check_labels(model: Any) -> None:
    """Make a forward raise a UserError if the family passes changed labels, or none, to the loss."""
    received: dict[str, torch.Tensor | None] = {}
    forward, loss = model.forward, model.loss_function

    def checked(logits: torch.Tensor, labels: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
        if labels is None or labels.shape != received["labels"].shape:
            raise base.UserError(
                f"--model: {type(model).__name__} shifts labels, which are shifted already, or cuts them"
            )
        return loss(logits, labels)

    @functools.wraps(forward)
    def checked_forward(*args: Any, **options: Any) -> Any:
        received.update(labels=options.get("labels"))
        return forward(*args, **options)

    model.forward, model.loss_function = checked_forward, checked


def is_multiple(result: torch.Tensor, source: Any) -> bool:
    """True if `result` came from the tensor of the node `source`, in autograd's graph, by views, casts and constant
    factors alone."""
    node = result.grad_fn
    while node is not source:
        if not re.match("Mul|Div|ToCopy|View|UnsafeView|Alias|Clone", node.name()):
            return False
        node, *others = (source for source, _ in node.next_functions)
        if node is None or any(others):
            return False
    return True


def keep_logits(model: Any, terms: dict[str, Term]) -> None:
    """Give a model the loss of its full logits."""
    model.loss_terms = {}

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean = full_loss(logits, labels)
        means = term_means(terms, logits, labels) if terms and logits.requires_grad else {}
        model.loss_terms = {name: term.detach() for name, term in means.items()}
        for term in means.values():
            mean = mean + (term - term.detach())  # adds its gradient, not its value
        return mean

    model.loss_function = loss


def fuse_loss(model: Any, terms: dict[str, Term], compiled: bool) -> None:
    """Make the head pass its input through if there are labels, and the loss multiply by the head in chunks.

    transformers' forward stays in charge, and what it does between head and loss (scaling, a router loss) still
    happens; it has to be linear in the logits.
    """
    head = model.get_output_embeddings()
    project = head.forward
    model.loss_terms = {}

    # no partial: dynamo counts the compilations of all partials as those of one function
    def chunk_loss(
        logits: torch.Tensor, target: torch.Tensor, trains: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        return loss_and_gradient(logits, target, terms, trains)

    if compiled:
        chunk_loss = torch.compile(chunk_loss)

    sources: list[Any] = []  # one, of a forward's hidden states in autograd's graph; taken out, as it holds the graph

    def pass_through(hidden: torch.Tensor) -> torch.Tensor:
        sources[:] = [hidden.grad_fn]
        return hidden

    def choose_head(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        head.forward = pass_through if kwargs.get("labels") is not None else project

    # what transformers calls logits here are the hidden states
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source = sources.pop()
        if logits.requires_grad and not is_multiple(logits, source):
            raise base.UserError("--model: its logits are more than a linear of its hidden states; use --no-fused-loss")
        hidden = logits.flatten(0, 1).to(head.weight.dtype)
        inputs = hidden, head.weight, head.bias, labels.flatten()
        mean, model.loss_terms = LinearCrossEntropy.apply(*inputs, chunk_loss, torch.is_grad_enabled())
        return mean

    model.register_forward_pre_hook(choose_head, with_kwargs=True)
    model.loss_function = loss
