"""The loss without logits is the loss of the logits, and so are its gradients."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

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


def inputs_of(tokens: int, bias: bool = True):
    """(hidden states, weight, bias or None, labels of which a third do not count)."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight, offset = (
        torch.randn(size, generator=generator).requires_grad_() for size in ((tokens, 24), (50, 24), (50,))
    )
    labels = torch.randint(0, 50, (tokens,), generator=generator)
    labels[1::3] = IGNORE_INDEX
    return hidden, weight, offset if bias else None, labels


@by_path
@pytest.mark.parametrize(
    "tokens, bias, terms", [(1, False, TERMS), (1024, True, {}), (2500, False, {}), (2500, True, TERMS)]
)
def test_every_path_has_the_loss_the_terms_and_the_gradients_that_autograd_has(path, tokens, bias, terms):
    hidden, weight, offset, labels = inputs_of(tokens, bias)
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
def test_without_a_gradient_every_path_has_the_loss_and_no_term(path):
    hidden, weight, offset, labels = inputs_of(2500)
    with torch.no_grad():
        value, means = path(hidden, weight, offset, labels, TERMS)
    plain = F.cross_entropy(F.linear(hidden, weight, offset), labels)
    torch.testing.assert_close((value, means), (plain, {}))


@by_path
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias"), ("hidden",)], ids=" and ".join)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(path, frozen):
    hidden, weight, offset, labels = inputs_of(2500)
    tensors = {"hidden": hidden, "weight": weight, "bias": offset}
    path(*tensors.values(), labels, TERMS)[0].backward()
    all_gradients = {name: tensor.grad for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in frozen).grad = None
    value, means = path(*tensors.values(), labels, TERMS)
    value.backward()
    assert means.keys() == TERMS.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, None if name in frozen else all_gradients[name], rtol=0, atol=0)


@by_path
def test_the_loss_of_no_label_at_all_is_zero_also_over_an_infinite_divisor(path):
    hidden, weight, offset, labels = inputs_of(5)
    value = path(hidden, weight, offset, torch.full_like(labels, IGNORE_INDEX), TERMS)[0] / float("inf")
    value.backward()
    assert value.item() == 0
    assert all((tensor.grad == 0).all() for tensor in (hidden, weight, offset))  # and none is NaN


@pytest.mark.parametrize("path", [fused, full])
@pytest.mark.parametrize("term", [lambda logits, _: logits.mean(), lambda logits, _: logits[:, :1], lambda *_: None])
def test_a_term_that_does_not_give_a_value_for_each_token_is_refused(path, term):
    with pytest.raises(UserError, match=r"^loss term wrong: it gave (shape .*|None) instead of a value for each token"):
        path(*inputs_of(30), {"wrong": term})


@pytest.mark.parametrize("path", [fused, full])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_the_values_of_a_term_may_have_another_dtype(path, dtype):
    terms = {
        name: lambda logits, _, dtype=dtype: logits.logsumexp(1).to(dtype)
        for name, dtype in {"same": torch.float32, "other": dtype}.items()
    }
    means = path(*inputs_of(30), terms)[1]
    assert means["other"].dtype == torch.float32 and torch.allclose(means["other"], means["same"], atol=1)


@pytest.mark.parametrize("path", ["fused", "fused compiled"])
def test_gradients_of_a_microbatch_are_not_biased_by_its_share_of_the_step(path):
    """One microbatch of three gives its share of the gradient of full logits in fp32, rounded to bf16."""
    generator, sizes = torch.Generator().manual_seed(1), ((1500, 64), (300, 64), (300,))
    exact = [torch.randn(size, generator=generator).mul(0.3).bfloat16().float().requires_grad_() for size in sizes]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    labels = torch.randint(0, 300, (1500,), generator=generator)
    gradients = torch.autograd.grad(PATHS[path](*rounded, labels, {})[0] / 3, rounded)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels) / 3, exact)
    for gradient, other in zip(gradients, expected, strict=True):
        size = (gradient.float() * other).sum() / (other * other).sum()  # 1 where no element is off by the same share
        assert size.item() == pytest.approx(1, abs=5e-4)
        torch.testing.assert_close(gradient.float(), other, rtol=0, atol=0.01 * other.abs().max().item())


@pytest.mark.parametrize("vocab, tokens", [(1536, 4096), (128256, 2048), (10**7, 1024)])
def test_logits_of_a_chunk_take_a_gibibyte_at_most_or_are_of_the_least_tokens(vocab, tokens):
    assert tokens_at_once(torch.empty(vocab, 8, device="meta")) == tokens
