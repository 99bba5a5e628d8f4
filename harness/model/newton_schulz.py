"""Newton-Schulz: a stack of matrices made orthogonal by a few matrix products. Called by the optimizers' files.
Independent of where the matrices are from."""

import torch

from harness.model.precision import cpu_multiplies_bf16

DTYPE = torch.bfloat16  # of the iteration, and of what ranks send each other for it; tests compute in fp32
EPS = 1e-7  # torch.optim.Muon's
# Of each step a polynomial a x + b x^3 + c x^5 of the singular values. Keller Jordan's, which torch.optim.Muon has too:
# https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5
SAFETY = 1.01  # by which "The Polar Express" narrows its polynomials
# The first five of its algorithm 1 (arXiv 2505.16932), before that.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]


def orthogonalize(matrices: torch.Tensor, iteration: str = "newton-schulz") -> torch.Tensor:
    """Matrices (count, rows, columns) with their singular values moved to about 1, in DTYPE; the singular vectors stay.

    `iteration` is a value of --muon-iteration. Where the rows are more, it works on the transposed matrices: its
    products are then as small as they can be.
    """
    _, rows, columns = matrices.shape
    x = matrices.to(DTYPE)
    if rows > columns:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    polynomials = NEWTON_SCHULZ
    if iteration == "newton-schulz":
        x = x / norm.clamp(min=EPS)
    else:
        x = x / (norm * SAFETY + EPS)
        polynomials = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS]
    exact = dtype_of_products(x)
    for a, b, c in polynomials:
        wide = x.to(exact)
        gram = (wide @ wide.mT).to(DTYPE).to(exact)
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(DTYPE).to(exact)
        x = torch.baddbmm(wide, odd, wide, beta=a).to(DTYPE)
    return x.mT if rows > columns else x


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """That of `x`, but fp32 on a CPU without instructions for bf16, where bf16 may take fifty times as long: a GPU sums
    up products of bf16 in fp32 too, so the results, rounded to bf16, are the same but for the order of the sums. The
    plan of a GPU replaces this, as its tensors are on the CPU."""
    return torch.float32 if x.device.type == "cpu" and not cpu_multiplies_bf16() else x.dtype
