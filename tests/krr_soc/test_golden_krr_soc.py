"""Golden values of the spec: kernel ridge regression, cross-validation, payoffs, closed forms, deterministic DP."""

import math

import pytest
import torch

from hf_models import KrrSocConfig, KrrSocModel
from hf_models.krr_soc import LinearQuadratic, OptimalStopping, stopping_problem
from hf_models.krr_soc.kernels_krr_soc import gaussian_kernel_mean, kernel_matrix, kernel_product
from hf_models.krr_soc.payoffs_krr_soc import get_payoff
from hf_models.krr_soc.regression_krr_soc import solve_cg, solve_dense, whitened_system

X = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
Y = torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64)
QUERY = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
CENTERS = X[[0, 2]]


def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernel_matrix("rbf", a, b, 1.0)


def close(value, expected, tolerance: float) -> bool:
    return torch.allclose(value, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def test_dense_regression_has_golden_coefficients_when_lambda_is_a_tenth():
    alpha = solve_dense(kernel(X, X), Y, 0.1)
    assert close(alpha[:, 0], [-0.0688982192, 2.0033498603, -0.9275144249], 1e-9)
    assert close(kernel_product("rbf", QUERY, X, alpha, 1.0)[:, 0], [1.4060277349, -0.2922074054], 1e-9)


@pytest.mark.parametrize("solver", ["eig", "cg"])
def test_nystroem_has_golden_coefficients_when_two_points_are_centres(solver):
    def blocks():
        return iter([kernel(X[:2], CENTERS), kernel(X[2:], CENTERS)])

    if solver == "eig":
        alpha = whitened_system(blocks, kernel(CENTERS, CENTERS), Y).solve(0.1)
    else:
        alpha = solve_cg(blocks, kernel(CENTERS, CENTERS), Y, 0.1)
    assert close(alpha[:, 0], [1.1821490012, 0.3235327955], 1e-8)
    assert close(kernel_product("rbf", QUERY, CENTERS, alpha, 1.0)[:, 0], [1.1482785523, 0.2093650490], 1e-8)


@pytest.mark.parametrize(
    ("lam", "gcv", "freedom"),
    [
        (1e-3, 1.7235796359, 2.9807194),
        (1e-2, 1.6618727077, 2.8246920),
        (0.1, 1.3612853199, 2.0163337),
        (1.0, 1.3718149040, 0.6795977),
    ],
)
def test_cross_validation_is_golden_for_each_lambda_when_all_points_are_centres(lam, gcv, freedom):
    system = whitened_system(lambda: iter([kernel(X, X)]), kernel(X, X), Y)
    assert math.isclose(system.gcv(lam), gcv, abs_tol=1e-7)
    assert math.isclose(system.degrees_of_freedom(lam), freedom, abs_tol=1e-7)


def test_payoffs_are_golden_when_the_strike_is_100():
    x = torch.tensor([[90.0, 110.0, 105.0], [80.0, 95.0, 99.0]], dtype=torch.float64)
    assert close(get_payoff("max_call").value(x, 100.0), [10.0, 0.0], 0)
    assert close(get_payoff("geo_put").value(x, 100.0), [0.0, 9.0471604507], 1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("put", [10.0, 0.0]),
        ("call", [0.0, 20.0]),
        ("basket_put", [10.0, 0.0]),
        ("basket_call", [0.0, 20.0]),
        ("min_put", [20.0, 0.0]),
        ("straddle", [10.0, 20.0]),
        ("butterfly", [0.0, 0.0]),
    ],
)
def test_payoff_is_its_formula_when_two_assets_are_given(name, expected):
    x = torch.tensor([[80.0, 100.0], [110.0, 130.0]], dtype=torch.float64)
    assert close(get_payoff(name).value(x, 100.0), expected, 1e-12)


def test_butterfly_pays_its_width_less_the_distance_when_near_the_strike():
    x = torch.tensor([[97.0]], dtype=torch.float64)
    assert close(get_payoff("butterfly").value(x, 100.0, width=5.0), [2.0], 1e-12)


def test_gaussian_kernel_mean_is_golden_when_one_dimensional():
    one = torch.ones(1, 1, dtype=torch.float64)
    mean = gaussian_kernel_mean(0.5 * one, 0 * one, 0.25 * one, 1.0)
    assert math.isclose(float(mean), 0.8093111901, abs_tol=1e-10)


@pytest.mark.parametrize(("name", "expected"), [("matern32", 0.4833577245), ("matern52", 0.5239941088)])
def test_matern_kernels_have_their_formula_when_the_distance_is_one_lengthscale(name, expected):
    one = torch.ones(1, 1, dtype=torch.float64)
    assert math.isclose(float(kernel_matrix(name, one, 0 * one, 1.0)), expected, abs_tol=1e-9)


def test_laplacian_kernel_is_the_exponential_of_the_distance():
    one = torch.ones(1, 1, dtype=torch.float64)
    assert math.isclose(float(kernel_matrix("laplacian", 3 * one, one, 2.0)), math.exp(-1), abs_tol=1e-12)


class QuantileStates(OptimalStopping):
    """A 1-D option whose training states are exact quantiles."""

    def sample_states(self, t, count, generator):
        process = self.process
        middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return process._move(process.spot, torch.special.ndtri(middle)[:, None], t * process.dt)


@pytest.mark.parametrize(
    ("target", "n", "expected"),
    [
        ("continuation", 32, 6.048297490),
        ("continuation", 64, 6.028897854),
        ("continuation", 128, 6.028891812),
        ("value", 64, 6.027433823),
    ],
)
def test_deterministic_induction_is_golden_when_states_are_quantiles(target, n, expected):
    config = KrrSocConfig(
        n_states=n, n_centers=n, n_inner=32, sampler="gauss_hermite", features="log", lengthscale=1.0, lam=1e-8,
        solver="dense", clip="nonnegative", target=target,
    )  # fmt: skip
    plain = stopping_problem(config)
    problem = QuantileStates(plain.process, "put", 100.0, 9, 1.0, 0.05)
    assert math.isclose(KrrSocModel(config).fit(problem).price().price, expected, abs_tol=1e-6)


def test_linear_quadratic_value_has_golden_coefficients():
    value = LinearQuadratic().exact_value(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert close(-value, [0.8188660007, 0.8188660007 + 1.7579335630], 1e-9)


@pytest.mark.parametrize("target", ["value", pytest.param("continuation", marks=pytest.mark.slow)])
def test_linear_quadratic_control_is_solved_within_five_thousandths_when_controls_are_a_grid(target):
    config = KrrSocConfig(
        process="custom", n_steps=5, n_states=300, n_centers=100, n_inner=16, sampler="gauss_hermite",
        features="raw", lengthscale=2.0, target=target,
    )  # fmt: skip
    problem = LinearQuadratic()
    x = torch.tensor([[-1.5], [0.0], [1.0]], dtype=torch.float64)
    out = KrrSocModel(config).fit(problem)(x)
    assert close(out.value, [-4.77422, -0.81887, -2.57680], 0.005)
    p = -float(problem.exact_value(x, t=1)[2] - problem.exact_value(x, t=1)[1])  # P_1 of V_1 = −(P_1 x² + c_1)
    gain = p * 0.9 * 0.5 / (0.5 + p * 0.5**2)  # the best control is −gain · x
    assert close(problem.controls[out.action, 0], [1.5 * gain, 0.0, -gain], 0.05)  # the grid's spacing
