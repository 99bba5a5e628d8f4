"""Newton-Schulz: orthogonalizes a stack of matrices by a few matrix products."""

import torch

from harness.model.precision import cpu_multiplies_bf16

DTYPE = torch.bfloat16  # dtype of the iteration and of the tensors that ranks exchange for it; tests use fp32
EPS = 1e-7  # torch.optim.Muon's
# a, b, c of a step's polynomial a x + b x^3 + c x^5 of the singular values. Keller Jordan's, as in torch.optim.Muon:
# https://kellerjordan.github.io/posts/muon/
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Iterations of each part of `iterate_gram`. In one part of five the rounding of the Gram matrix would make some of its
# eigenvalues negative, and the iterations let these grow without bound: for a 128 x 640 matrix with one large singular
# value the largest one of the result was 2.8 in fp16 and 31,000 in bf16, instead of 0.7. With parts of 2 and 3 in bf16
# it was 1.4 instead of 1.2, for a condition number of 100 (torch 2.13.0, a CPU).
GRAM_PARTS = (3, 2)
GRAM_RATIO = 2  # columns over rows from which on `iterate_gram` takes fewer FLOPs, 8 m m n + 28 m^3, for 20 and 10


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (count, rows, columns) with their singular values moved to about 1, in DTYPE; the singular vectors stay.

    With more rows than columns it works on the transposed matrices, which makes its products smaller.
    """
    _, rows, columns = matrices.shape
    x = matrices.to(DTYPE)
    if rows > columns:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    x = iterate_gram(x) if gains_by_gram(x) else iterate(x)
    return x.mT if rows > columns else x


def gram_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float16 if x.dtype == torch.bfloat16 else x.dtype


def gains_by_gram(x: torch.Tensor) -> bool:
    """True if `iterate_gram` takes fewer FLOPs, and no slower ones: a CPU that multiplies bf16 has none for fp16."""
    fewer = x.shape[-1] >= GRAM_RATIO * x.shape[-2]
    return fewer and product_dtype(x.new_empty(0, dtype=gram_dtype(x))).itemsize <= product_dtype(x).itemsize


def iterate(x: torch.Tensor) -> torch.Tensor:
    """The iterations as torch.optim.Muon has them, each with two products of the size of `x`."""
    exact = product_dtype(x)
    a, b, c = POLYNOMIAL
    for _ in range(ITERATIONS):
        wide = x.to(exact)
        gram = (wide @ wide.mT).to(DTYPE).to(exact)
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(DTYPE).to(exact)
        x = torch.baddbmm(wide, odd, wide, beta=a).to(DTYPE)
    return x


def iterate_gram(x: torch.Tensor) -> torch.Tensor:
    """The same iterations on the Gram matrix A = X X^T of wide matrices. One multiplies X by P = a + b A + c A^2, so A
    becomes P A P; the product of a part's P is applied to X once.

    In place of bf16 it rounds to fp16, whose three more bits the Gram matrix needs: its eigenvalues are the squares of
    the singular values. No number exceeds fp16's range, as the first singular values are at most 1.
    """
    half = gram_dtype(x)
    x = x.to(half)
    exact = product_dtype(x)
    a, b, c = POLYNOMIAL

    def rounded(result: torch.Tensor) -> torch.Tensor:
        return result.to(half).to(exact)

    for iterations in GRAM_PARTS:
        wide = x.to(exact)
        gram, product = rounded(wide @ wide.mT), None
        for remaining in reversed(range(iterations)):
            step = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
            step.diagonal(dim1=-2, dim2=-1).add_(a)
            step = rounded(step)
            product = step if product is None else rounded(step @ product)
            if remaining:
                gram = rounded(rounded(step @ gram) @ step)
        x = (product @ wide).to(half)
    return x.to(DTYPE)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of `x`, but fp32 on a CPU without instructions for it, on which it may take fifty times as long. A GPU
    sums such products in fp32 too, so results rounded to that dtype differ by the order of the sums only. The plan of a
    GPU replaces this function, as its tensors are on the CPU."""
    if x.device.type == "cpu" and not (x.dtype == torch.bfloat16 and cpu_multiplies_bf16()):
        return torch.float32
    return x.dtype
