"""Kernel ridge regression: min over f of (1/n) Σ (y_i − f(x_i))² + λ‖f‖², dense, with Nyström centres, or iteratively.

λ multiplies n, as FALKON's `penalty`; scikit-learn's `alpha` is n·λ. Everything is solved in double precision.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

JITTERS = tuple(10.0**power for power in range(-13, -5))  # 1e-13 … 1e-6
MAX_DENSE, MAX_EIG = 2000, 2000
PATIENCE = 20  # steps without progress after which conjugate gradients stop: rounding is reached


@dataclass
class WhitenedSystem:
    """Normal equations in coordinates where the penalty is the identity; one eigendecomposition serves every λ.

    With K_mm = LLᵀ and A = L⁻¹K_mn: AAᵀ = V diag(s) Vᵀ, p = VᵀAy, α = L⁻ᵀ V p/(s + nλ).

    Args:
        factor (`torch.Tensor`): L, (m, m).
        eigenvectors (`torch.Tensor`): V, (m, m).
        eigenvalues (`torch.Tensor`): s, (m,).
        projection (`torch.Tensor`): p, (m, k).
        squares (`torch.Tensor`): ‖y‖² of each right-hand side, (k,).
        count (`int`): n.
    """

    factor: torch.Tensor
    eigenvectors: torch.Tensor
    eigenvalues: torch.Tensor
    projection: torch.Tensor
    squares: torch.Tensor
    count: int

    def solve(self, lam: float) -> torch.Tensor:
        """α, (m, k)."""
        b = self.projection / (self.eigenvalues + self.count * lam)[:, None]
        return torch.linalg.solve_triangular(self.factor.T, self.eigenvectors @ b, upper=True)

    def degrees_of_freedom(self, lam: float) -> float:
        """df(λ) = Σ s/(s + nλ)."""
        return float((self.eigenvalues / (self.eigenvalues + self.count * lam)).sum())

    def gcv(self, lam: float) -> float:
        """Generalised cross-validation (RSS/n)/(1 − df/n)², summed over right-hand sides."""
        s, n = self.eigenvalues[:, None], self.count
        shrunk = s + n * lam
        square = self.projection.square()
        rss = self.squares.sum() - (2 * square / shrunk - s * square / shrunk**2).sum()
        return float(rss.clamp(min=0) / n) / (1 - self.degrees_of_freedom(lam) / n) ** 2


def cholesky_with_jitter(matrix: torch.Tensor, lam: float | None = None) -> torch.Tensor:
    """Lower factor of K + jitter·m·I with the smallest jitter of the ladder that works.

    Args:
        matrix (`torch.Tensor`): K, (m, m).
        lam (`float`, *optional*): λ that K contains already, for the message.

    Raises:
        ValueError: None does.
    """
    m = len(matrix)
    for jitter in JITTERS:
        shifted = matrix.clone()
        shifted.diagonal().add_(jitter * m)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not info:
            return factor
    duplicates = m - len(matrix.unique(dim=0))
    raise ValueError(
        f"the {m}×{m} kernel matrix is not positive definite even with jitter {JITTERS[-1]:g}·m and lambda "
        f"{0.0 if lam is None else lam:g} ({duplicates} of its rows are repeated): use a larger lambda, a shorter "
        "lengthscale or fewer centres."
    )


Blocks = Callable[[], Iterator[torch.Tensor]]  # rows of k(x_i, c_j), a few thousand at a time, (rows, m)


def whitened_system(blocks: Blocks, kernel_mm: torch.Tensor, y: torch.Tensor) -> WhitenedSystem:
    """The system of n points and m centres, accumulated over blocks of rows.

    Args:
        blocks (`Callable`): Gives K_nm in blocks of rows.
        kernel_mm (`torch.Tensor`): k(c_i, c_j), (m, m).
        y (`torch.Tensor`): (n, k).
    """
    factor = cholesky_with_jitter(kernel_mm)
    gram, product, start = torch.zeros_like(kernel_mm), kernel_mm.new_zeros(len(kernel_mm), y.shape[1]), 0
    for rows in blocks():
        a = torch.linalg.solve_triangular(factor, rows.T, upper=False)  # (m, rows)
        gram += a @ a.T
        product += a @ y[start : start + len(rows)]
        start += len(rows)
    s, v = torch.linalg.eigh(gram)
    return WhitenedSystem(factor, v, s.clamp(min=0), v.T @ product, y.square().sum(0), len(y))


def solve_dense(kernel_nn: torch.Tensor, y: torch.Tensor, lam: float) -> torch.Tensor:
    """α = (K + nλI)⁻¹y with every point a centre.

    Args:
        kernel_nn (`torch.Tensor`): (n, n).
        y (`torch.Tensor`): (n, k).
        lam (`float`): λ.

    Returns:
        `torch.Tensor`: (n, k).

    Raises:
        ValueError: The matrix is singular: λ is too small for repeated points.
    """
    shifted = kernel_nn.clone()
    shifted.diagonal().add_(len(y) * lam)
    factor, info = torch.linalg.cholesky_ex(shifted)
    if info:
        factor = cholesky_with_jitter(shifted, lam)
    return torch.cholesky_solve(y, factor)


def solve_cg(
    blocks: Blocks,
    kernel_mm: torch.Tensor,
    y: torch.Tensor,
    lam: float,
    tolerance: float = 1e-12,
    max_iterations: int = 500,
) -> torch.Tensor:
    """α with Nyström centres by preconditioned conjugate gradients, as FALKON does for many centres.

    In the coordinates β = Bᵀα with BBᵀ ≈ (n/m)K_mm² + nλK_mm the normal equations are close to the identity, and each
    step costs two products with K_nm.

    Args:
        blocks (`Callable`): Gives K_nm in blocks of rows.
        kernel_mm (`torch.Tensor`): (m, m).
        y (`torch.Tensor`): (n, k).
        lam (`float`): λ.
        tolerance (`float`, defaults to 1e-12): Residual relative to the right-hand side at which to stop.
        max_iterations (`int`, defaults to 500): Most steps.

    Returns:
        `torch.Tensor`: (m, k).
    """
    n, m = len(y), len(kernel_mm)
    outer = cholesky_with_jitter(kernel_mm)  # K_mm = TᵀT with T = outerᵀ
    inner = outer.T @ outer * (n / m)  # T Tᵀ n/m
    inner.diagonal().add_(n * lam)
    inner = torch.linalg.cholesky(inner)

    def precondition(x: torch.Tensor) -> torch.Tensor:  # T⁻¹ A⁻¹
        x = torch.linalg.solve_triangular(inner.T, x, upper=True)
        return torch.linalg.solve_triangular(outer.T, x, upper=True)

    def precondition_transposed(x: torch.Tensor) -> torch.Tensor:
        x = torch.linalg.solve_triangular(outer, x, upper=False)
        return torch.linalg.solve_triangular(inner, x, upper=False)

    def apply(b: torch.Tensor) -> torch.Tensor:
        alpha = precondition(b)
        total = n * lam * (kernel_mm @ alpha)
        for rows in blocks():
            total += rows.T @ (rows @ alpha)
        return precondition_transposed(total)

    right, start = torch.zeros_like(kernel_mm[:, : y.shape[1]]), 0
    for rows in blocks():
        right += rows.T @ y[start : start + len(rows)]
        start += len(rows)
    right = precondition_transposed(right)
    b = torch.zeros_like(right)
    r, d = right.clone(), right.clone()
    rho = r.square().sum(0)
    stop, best, best_rho, stalled = tolerance**2 * rho, b, rho.clone(), 0
    for _ in range(max_iterations):
        step = apply(d)
        curvature = (d * step).sum(0)
        active = (rho > stop) & (curvature > 0)  # a right-hand side that is solved, or lost to rounding, rests
        if not active.any() or stalled >= PATIENCE:
            break
        length = torch.where(active, rho / torch.where(active, curvature, 1.0), 0.0)
        b = b + length * d
        r = r - length * step
        new = r.square().sum(0)
        improved = new < best_rho
        best, best_rho = torch.where(improved, b, best), torch.minimum(new, best_rho)
        stalled = 0 if improved.any() else stalled + 1
        d = r + torch.where(active, new / torch.where(active, rho, 1.0), 0.0) * d
        rho = new
    b = best
    return precondition(b)


def choose_solver(solver: str, n: int, m: int) -> str:
    """`"auto"` → dense up to 2,000 points without Nyström, eig up to 2,000 centres, else cg."""
    if solver != "auto":
        return solver
    if m >= n and n <= MAX_DENSE:
        return "dense"
    return "eig" if m <= MAX_EIG else "cg"
