"""The loss without logits is the loss of the logits, and so are its gradients."""

import pytest
import torch
import torch._dynamo

from harness.base import IGNORE_INDEX
from harness.model import loss
from harness.model.loss import LinearCrossEntropy, loss_and_gradient, tokens_at_once


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a few thousand tokens are several."""
    monkeypatch.setattr(loss, "tokens_at_once", lambda weight: 1024)


def test_the_compiled_loss_is_the_eager_one():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1500, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (1500,), generator=generator)
    labels[::7] = IGNORE_INDEX
    compiled = torch.compile(loss_and_gradient, backend="aot_eager")
    results = []
    for function in (loss_and_gradient, compiled):
        loss = LinearCrossEntropy.apply(hidden, weight, None, labels, function)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("tokens", [1, 1024, 2500])
@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_loss_is_cross_entropy_of_the_logits(tokens, bias):
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(size, 24, generator=generator, requires_grad=True) for size in (tokens, 50))
    offset = torch.randn(50, generator=generator, requires_grad=True) if bias else None
    labels = torch.randint(0, 50, (tokens,), generator=generator)
    labels[1::3] = IGNORE_INDEX
    inputs = [hidden, weight, *([offset] if bias else [])]
    fused = LinearCrossEntropy.apply(hidden, weight, offset, labels)
    gradients = torch.autograd.grad(3 * fused, inputs)
    plain = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, offset), labels)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * plain, inputs))
    with torch.no_grad():
        torch.testing.assert_close(LinearCrossEntropy.apply(hidden, weight, offset, labels), plain)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_of_a_microbatch_are_not_biased_by_its_share_of_the_step(microbatches):
    """One microbatch of several gives a share of the gradient, to what bf16 rounds it to: against full logits in
    fp32."""
    generator, sizes = torch.Generator().manual_seed(1), ((1500, 64), (300, 64), (300,))
    hidden, weight, offset = (torch.randn(*size, generator=generator).mul(0.3).bfloat16() for size in sizes)
    for tensor in (hidden, weight, offset):
        tensor.requires_grad_()
    labels = torch.randint(0, 300, (1500,), generator=generator)
    fused = LinearCrossEntropy.apply(hidden, weight, offset, labels) / microbatches
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight, offset)]
    full = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), labels) / microbatches
    gradients, expected = torch.autograd.grad(fused, (hidden, weight, offset)), torch.autograd.grad(full, exact)
    for gradient, other in zip(gradients, expected, strict=True):
        size = (gradient.float() * other).sum() / (other * other).sum()  # 1 where no element is off by the same share
        assert size.item() == pytest.approx(1, abs=5e-4)
        torch.testing.assert_close(gradient.float(), other, rtol=0, atol=0.01 * other.abs().max().item())


@pytest.mark.parametrize("vocab, tokens", [(1536, 4096), (128256, 2048), (10**7, 1024)])
def test_logits_of_a_chunk_take_a_gibibyte_at_most_or_are_of_the_least_tokens(vocab, tokens):
    assert tokens_at_once(torch.empty(vocab, 8, device="meta")) == tokens
    assert tokens * vocab * 4 <= loss.LOGITS_BYTES or tokens == 1024


def compiled_fused(hidden, weight, labels):
    return LinearCrossEntropy.apply(hidden, weight, None, labels, torch.compile(loss_and_gradient, backend="aot_eager"))


def fused(hidden, weight, labels):
    return LinearCrossEntropy.apply(hidden, weight, None, labels)


def full(hidden, weight, labels):
    return loss.full_loss((hidden @ weight.T)[None], labels[None])


@pytest.mark.parametrize("function", [fused, compiled_fused, full, torch.compile(full, backend="aot_eager")])
def test_the_loss_of_no_label_at_all_is_zero_also_over_an_infinite_divisor(function):
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    value = function(hidden, weight, torch.full((5,), IGNORE_INDEX)) / float("inf")
    value.backward()
    assert value.item() == 0
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()  # and none is NaN


@pytest.mark.parametrize("function", [fused, compiled_fused, full])
def test_the_loss_is_the_mean_over_the_labels_that_count(function):
    hidden, weight = torch.randn(6, 8), torch.randn(10, 8)
    labels = torch.tensor([IGNORE_INDEX, 3, IGNORE_INDEX, 9, IGNORE_INDEX, IGNORE_INDEX])
    counted = labels != IGNORE_INDEX
    expected = torch.nn.functional.cross_entropy(hidden[counted] @ weight.T, labels[counted])
    torch.testing.assert_close(function(hidden.requires_grad_(), weight, labels), expected)
