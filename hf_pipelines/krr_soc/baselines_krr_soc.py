"""Least-squares methods for optimal stopping: Longstaff–Schwartz, Tsitsiklis–Van Roy, randomized least squares."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from hf_models.krr_soc import Bound, OptimalStopping
from hf_models.krr_soc.bounds_krr_soc import mean_of_paths
from hf_models.krr_soc.dynamic_programming_krr_soc import ValueFunction, generator_of
from hf_models.krr_soc.samplers_krr_soc import normal

Basis = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # states (n, d) and payoff (n,) → columns (n, p)
HIDDEN = 50  # random features of RLSM
LEAK = 0.01


class RegressionPolicy(ValueFunction):
    """Continuation values that are linear in a basis; bounds take it as they take our own value function.

    Args:
        problem (`OptimalStopping`): The problem.
        basis (`Callable`): Its columns.
        coefficients (`dict[int, torch.Tensor]`): (p,) of each date; a date without any is never exercised.
        price (`float`): In-sample estimate of the price.
        held (`float`): In-sample value of holding at date 0.
    """

    def __init__(
        self,
        problem: OptimalStopping,
        basis: Basis,
        coefficients: dict[int, torch.Tensor],
        price: float,
        held: float,
    ):
        self.problem, self.basis, self.coefficients, self.price, self.held = problem, basis, coefficients, price, held
        self.is_stopping, self.settings = True, SimpleNamespace(target="continuation")

    def fitted(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """q̂_t, (n, 1)."""
        if t not in self.coefficients:
            return x.new_full((len(x), 1), torch.inf)
        return (self.basis(x, self.problem.exercise(t, x)) @ self.coefficients[t])[:, None]


def simulate(problem: OptimalStopping, count: int, seed: int) -> list[torch.Tensor]:
    """Paths as states (count, state_dim) of the dates 0 … N."""
    x0 = problem.process.initial()
    generator = generator_of(seed, "states", 0, 1_000_000, device=x0.device)
    states = [x0.expand(count, -1)]
    for t in range(problem.n_steps):
        z = normal((count, problem.noise_dim), generator, x0)
        states.append(problem.step(t, states[-1], None, z))
    return states


def polynomial_basis(problem: OptimalStopping) -> Basis:
    """Monomials up to degree two of the three highest prices (and of what else a state holds), and the payoff."""
    process, strike = problem.process, problem.strike

    def columns(x: torch.Tensor, payoff: torch.Tensor) -> torch.Tensor:
        prices = process.prices(x)
        top = prices.sort(dim=-1, descending=True).values[:, :3] / strike
        z = torch.cat([top, x[:, prices.shape[1] :]], 1)
        rows, cols = torch.triu_indices(z.shape[1], z.shape[1])
        one = torch.ones_like(payoff)[:, None]
        return torch.cat([one, z, z[:, rows] * z[:, cols], payoff.clamp(min=0)[:, None] / strike], 1)

    return columns


def random_basis(problem: OptimalStopping, seed: int, hidden: int = HIDDEN) -> Basis:
    """A constant and `hidden` leaky-ReLU features with random weights of prices and payoff (Herrera et al.)."""
    x0 = problem.process.initial()
    generator = generator_of(seed, "centers", 1_000_000)
    scale = torch.cat([x0, x0.new_tensor([problem.strike])])
    weight = normal((len(scale), hidden), generator, x0)
    bias = normal((hidden,), generator, x0)

    def columns(x: torch.Tensor, payoff: torch.Tensor) -> torch.Tensor:
        z = torch.cat([x, payoff.clamp(min=0)[:, None]], 1) / scale
        features = torch.nn.functional.leaky_relu(z @ weight + bias, LEAK)
        return torch.cat([torch.ones_like(payoff)[:, None], features], 1)

    return columns


def _least_squares(columns: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(columns, y[:, None], driver="gelsd" if columns.device.type == "cpu" else None).solution[
        :, 0
    ]


def stop_by_regression(problem: OptimalStopping, basis: Basis, n_paths: int, seed: int) -> RegressionPolicy:
    """Longstaff–Schwartz backward induction: regress what the policy earns on paths that are in the money.

    Args:
        problem (`OptimalStopping`): The problem.
        basis (`Callable`): Of the regressions.
        n_paths (`int`): Training paths.
        seed (`int`): Of the paths.
    """
    states, n = simulate(problem, n_paths, seed), problem.n_steps
    cash, coefficients = problem.terminal(states[n]), {}
    for t in range(n - 1, 0, -1):
        cash = problem.discount(t) * cash
        payoff = problem.exercise(t, states[t])
        rows = (payoff > 0).nonzero()[:, 0]
        columns = basis(states[t][rows], payoff[rows])
        if len(rows) <= columns.shape[1]:
            continue
        coefficients[t] = _least_squares(columns, cash[rows])
        stop = rows[payoff[rows] >= columns @ coefficients[t]]
        cash[stop] = payoff[stop]
    return _policy(problem, basis, coefficients, problem.discount(0) * float(cash.mean()))


def longstaff_schwartz(problem: OptimalStopping, n_paths: int = 20_000, seed: int = 0) -> RegressionPolicy:
    """LSM (Longstaff and Schwartz 2001) with [`polynomial_basis`]; see [`stop_by_regression`]."""
    return stop_by_regression(problem, polynomial_basis(problem), n_paths, seed)


def randomized_least_squares(problem: OptimalStopping, n_paths: int = 20_000, seed: int = 0) -> RegressionPolicy:
    """RLSM (Herrera, Krach, Ruyssen and Teichmann) with [`random_basis`]; see [`stop_by_regression`]."""
    return stop_by_regression(problem, random_basis(problem, seed), n_paths, seed)


def tsitsiklis_van_roy(problem: OptimalStopping, n_paths: int = 20_000, seed: int = 0) -> RegressionPolicy:
    """TvR (2001): regress the discounted value of the next date on all paths, with [`polynomial_basis`].

    Args:
        problem (`OptimalStopping`): The problem.
        n_paths (`int`, defaults to 20,000): Training paths.
        seed (`int`, defaults to 0): Of the paths.
    """
    basis, states, n = polynomial_basis(problem), simulate(problem, n_paths, seed), problem.n_steps
    value, coefficients = problem.terminal(states[n]), {}
    for t in range(n - 1, 0, -1):
        payoff = problem.exercise(t, states[t])
        columns = basis(states[t], payoff)
        coefficients[t] = _least_squares(columns, problem.discount(t) * value)
        value = torch.maximum(payoff, columns @ coefficients[t])
    return _policy(problem, basis, coefficients, problem.discount(0) * float(value.mean()))


def _policy(
    problem: OptimalStopping, basis: Basis, coefficients: dict[int, torch.Tensor], held: float
) -> RegressionPolicy:
    now = float(problem.exercise(0, problem.process.initial()[None])[0])
    return RegressionPolicy(problem, basis, coefficients, max(now, held), held)


def european_price(problem: OptimalStopping, n_paths: int = 100_000, seed: int = 0) -> Bound:
    """The price without early exercise, by plain averaging over paths.

    Args:
        problem (`OptimalStopping`): The problem; only its payoff at maturity counts.
        n_paths (`int`, defaults to 100,000): Paths.
        seed (`int`, defaults to 0): Of the paths.
    """
    discount = 1.0
    for t in range(problem.n_steps):
        discount *= problem.discount(t)
    return mean_of_paths(discount * problem.terminal(simulate(problem, n_paths, seed)[-1]))


class KernelRidgePolicy(RegressionPolicy):
    """Continuation values of scikit-learn's `KernelRidge`, a model a date."""

    def fitted(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """q̂_t, (n, 1)."""
        if t not in self.coefficients:
            return x.new_full((len(x), 1), torch.inf)
        columns = self.basis(x, self.problem.exercise(t, x)).cpu().numpy()
        return torch.as_tensor(self.coefficients[t].predict(columns), device=x.device).reshape(-1, 1)


def kernel_ridge_stopping(
    problem: OptimalStopping, n_paths: int = 2000, seed: int = 0, penalty: float = 1e-3
) -> KernelRidgePolicy:
    """Longstaff–Schwartz induction with scikit-learn's kernel ridge regression in the money, one path a state.

    Args:
        problem (`OptimalStopping`): The problem.
        n_paths (`int`, defaults to 2,000): Training paths.
        seed (`int`, defaults to 0): Of the paths.
        penalty (`float`, defaults to 1e-3): λ; scikit-learn's `alpha` is λ times the number of paths.
    """
    from sklearn.kernel_ridge import KernelRidge

    spread = problem.process.dt**0.5 * problem.n_steps**0.5 * 0.2

    def columns(x: torch.Tensor, payoff: torch.Tensor) -> torch.Tensor:
        prices = (problem.process.prices(x) / problem.strike).log().sort(dim=-1, descending=True).values
        return prices / spread

    states, n = simulate(problem, n_paths, seed), problem.n_steps
    cash, models = problem.terminal(states[n]), {}
    for t in range(n - 1, 0, -1):
        cash = problem.discount(t) * cash
        payoff = problem.exercise(t, states[t])
        rows = (payoff > 0).nonzero()[:, 0]
        if len(rows) < 2:
            continue
        x = columns(states[t][rows], payoff[rows]).cpu().numpy()
        models[t] = KernelRidge(alpha=penalty * len(rows), kernel="rbf", gamma=0.5).fit(x, cash[rows].cpu().numpy())
        held = torch.as_tensor(models[t].predict(x), device=cash.device)
        stop = rows[payoff[rows] >= held]
        cash[stop] = payoff[stop]
    held = problem.discount(0) * float(cash.mean())
    now = float(problem.exercise(0, problem.process.initial()[None])[0])
    return KernelRidgePolicy(problem, columns, models, max(now, held), held)


BASELINES: dict[str, Callable[..., RegressionPolicy]] = {
    "LSM": longstaff_schwartz,
    "TvR": tsitsiklis_van_roy,
    "RLSM": randomized_least_squares,
}
