"""The loss without logits is the loss of the logits, and so are its gradients."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from conftest import slow_case
from tiny import MODELS
from transformers import LlamaConfig, LlamaForCausalLM

from harness.base import IGNORE_INDEX, UserError
from harness.model import loss
from harness.model.loss import LinearCrossEntropy, loss_and_gradient, tokens_at_once

compiled = functools.partial(torch.compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Small chunks: a few thousand tokens are several."""
    monkeypatch.setattr(loss, "tokens_at_once", lambda weight: 1024)


# Each gives (the loss, the means of the terms) of hidden states, a head's weight and bias, labels and terms.


def fused(hidden, weight, bias, labels, terms, compiled=lambda function: function):
    chunk = compiled(functools.partial(loss_and_gradient, terms=terms))
    return LinearCrossEntropy.apply(hidden, weight, bias, labels, chunk, torch.is_grad_enabled())


def full(hidden, weight, bias, labels, terms):
    model = SimpleNamespace()
    loss.keep_logits(model, terms)
    mean = model.loss_function(F.linear(hidden, weight, bias)[None], labels[None])
    return mean, model.loss_terms


PATHS = {
    "fused": fused,
    "fused compiled": functools.partial(fused, compiled=compiled),
    "full": full,
    "full compiled": compiled(full),
}
TERMS = {
    "z_loss": lambda logits, target: 0.1 * logits.logsumexp(1) ** 2,
    "target_cosine": lambda logits, target: logits.gather(1, target).squeeze(1).cos(),
}
by_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def inputs_of(tokens: int, vocab: int = 50, bias: bool = True, dtype: torch.dtype = torch.float32):
    """(hidden states, weight, bias or None, labels of which a third do not count)."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (tokens, 24), (vocab, 24), (vocab,)
    hidden, weight, offset = (torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::3] = IGNORE_INDEX
    return hidden, weight, offset if bias else None, labels


@by_path
@pytest.mark.parametrize("terms", [{}, TERMS], ids=["the loss alone", "with terms"])
@pytest.mark.parametrize("tokens, bias", [(1, False), slow_case(1024, True), slow_case(2500, False), (2500, True)])
def test_every_path_has_the_loss_the_terms_and_the_gradients_that_autograd_has(path, terms, tokens, bias):
    hidden, weight, offset, labels = inputs_of(tokens, bias=bias)
    wanted = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    value, means = path(hidden, weight, offset, labels, terms)
    gradients = torch.autograd.grad(3 * value, wanted)

    counted = labels != IGNORE_INDEX
    logits, targets = F.linear(hidden, weight, offset)[counted], labels[counted]
    expected = {name: term(logits, targets[:, None]).mean() for name, term in terms.items()}
    plain = F.cross_entropy(logits, targets)
    torch.testing.assert_close((value, means), (plain, expected))  # the terms are not in the loss, but in its gradient
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * sum(expected.values(), plain), wanted))


@by_path
def test_without_a_gradient_every_path_has_the_loss_and_no_term(path, monkeypatch):
    monkeypatch.setattr(loss, "add_product", None)  # nor the product of one
    hidden, weight, offset, labels = inputs_of(2500)
    with torch.no_grad():
        value, means = path(hidden, weight, offset, labels, TERMS)
    plain = F.cross_entropy(F.linear(hidden, weight, offset), labels)
    torch.testing.assert_close((value, means), (plain, {}))


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["the loss alone", "with terms"])
def test_in_bf16_the_compiled_loss_is_the_eager_one(terms):
    hidden, weight, _, labels = inputs_of(1500, bias=False, dtype=torch.bfloat16)
    results = []
    for path in (PATHS["fused"], PATHS["fused compiled"]):
        value, means = path(hidden, weight, None, labels, terms)
        results.append((value, means, *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(results[0], results[1])


@by_path
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias"), ("hidden",)], ids=" and ".join)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(path, frozen, monkeypatch):
    products = []
    add_product = loss.add_product
    monkeypatch.setattr(loss, "add_product", lambda *args: products.append(args) or add_product(*args))
    hidden, weight, offset, labels = inputs_of(2500)
    tensors = {"hidden": hidden, "weight": weight, "bias": offset}
    path(*tensors.values(), labels, TERMS)[0].backward()
    all_gradients = {name: tensor.grad for name, tensor in tensors.items()}
    products.clear()
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in frozen).grad = None
    value, means = path(*tensors.values(), labels, TERMS)
    value.backward()
    assert means.keys() == TERMS.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, None if name in frozen else all_gradients[name], rtol=0, atol=0)
    assert not (products and "weight" in frozen)  # nor is one computed


@pytest.mark.parametrize("shape", ["mean", "column"])
@by_path
def test_a_term_that_does_not_give_a_value_for_each_token_is_refused(path, shape):
    values = {"mean": lambda logits, target: logits.mean(), "column": lambda logits, target: logits[:, :1]}
    with pytest.raises(UserError, match=r"^loss term wrong: it gave shape .* instead of a value for each token"):
        path(*inputs_of(30), {"wrong": values[shape]})


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "full"])
def test_a_term_that_is_chosen_trains_the_model_and_is_not_evaluated(is_fused, compile, monkeypatch):
    """`TERMS` is the one place to add a term."""
    monkeypatch.setattr(torch, "compile", compiled)
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    names = {"model": "", "init": "random", "document_mask": False, "context_parallel": 1}
    settings = SimpleNamespace(**names, fused_loss=is_fused, compile=compile)

    def passes() -> tuple:
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**MODELS["llama"]))
        loss.adapt_forward(model, settings)
        with torch.no_grad():
            evaluated = model(**batch).loss
        assert model.loss_terms == {}  # nor a gradient
        trained = model(**batch).loss
        trained.backward()
        return evaluated, trained.detach(), model.loss_terms, model.lm_head.weight.grad, model

    evaluated, trained, means, gradient, model = passes()
    torch.testing.assert_close(evaluated, trained)
    assert means == {}
    monkeypatch.setitem(loss.TERMS, "z_loss", lambda logits, target: 0.1 * logits.logsumexp(1) ** 2)
    same_evaluated, same_trained, means, other, _ = passes()
    torch.testing.assert_close((same_evaluated, same_trained), (evaluated, trained), rtol=0, atol=0)
    logits = model(tokens[:, :-1]).logits
    expected = 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(means, {"z_loss": expected.detach()})
    (term_gradient,) = torch.autograd.grad(expected, model.lm_head.weight)
    torch.testing.assert_close(other, gradient + term_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_of_a_microbatch_are_not_biased_by_its_share_of_the_step(microbatches):
    """One microbatch of several gives its share of the gradient of full logits in fp32, rounded to bf16."""
    generator, sizes = torch.Generator().manual_seed(1), ((1500, 64), (300, 64), (300,))
    hidden, weight, offset = (torch.randn(*size, generator=generator).mul(0.3).bfloat16() for size in sizes)
    for tensor in (hidden, weight, offset):
        tensor.requires_grad_()
    labels = torch.randint(0, 300, (1500,), generator=generator)
    mean = fused(hidden, weight, offset, labels, {})[0] / microbatches
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight, offset)]
    full_mean = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), labels) / microbatches
    gradients, expected = torch.autograd.grad(mean, (hidden, weight, offset)), torch.autograd.grad(full_mean, exact)
    for gradient, other in zip(gradients, expected, strict=True):
        size = (gradient.float() * other).sum() / (other * other).sum()  # 1 where no element is off by the same share
        assert size.item() == pytest.approx(1, abs=5e-4)
        torch.testing.assert_close(gradient.float(), other, rtol=0, atol=0.01 * other.abs().max().item())


@pytest.mark.parametrize("vocab, tokens", [(1536, 4096), (128256, 2048), (10**7, 1024)])
def test_logits_of_a_chunk_take_a_gibibyte_at_most_or_are_of_the_least_tokens(vocab, tokens):
    assert tokens_at_once(torch.empty(vocab, 8, device="meta")) == tokens
    assert tokens * vocab * 4 <= loss.LOGITS_BYTES or tokens == 1024


@by_path
@pytest.mark.parametrize("terms", [{}, TERMS], ids=["the loss alone", "with terms"])
def test_the_loss_of_no_label_at_all_is_zero_also_over_an_infinite_divisor(path, terms):
    hidden, weight, offset, labels = inputs_of(5)
    value = path(hidden, weight, offset, torch.full_like(labels, IGNORE_INDEX), terms)[0] / float("inf")
    value.backward()
    assert value.item() == 0
    assert all((tensor.grad == 0).all() for tensor in (hidden, weight, offset))  # and none is NaN
