"""Golden values of the MPC-Flow spec, in float64."""

import pytest
import torch

from hf_models import GaussianMixtureFlowModel
from hf_pipelines import MPCFlowController, operators
from hf_pipelines.flow_control import FlowState, run_controller
from hf_pipelines.flow_control.controller_flow import identity_decode
from hf_pipelines.mpc_flow import MeasurementObjective
from hf_pipelines.mpc_flow.baselines_mpc_flow import FlowGrad
from hf_pipelines.mpc_flow.controller_mpc_flow import delta_t_cost, endpoint_cost, receding_horizon_cost

F64 = torch.float64


def scalar_state():
    """x = .2, b = 1, t = .5, next t = .6."""
    x = torch.full((1, 1, 1, 1), 0.2, dtype=F64)
    return FlowState(-torch.ones_like(x), x, 0.5, 0.4, 5, 10, decode=identity_decode)


def controlled(state, **settings):
    y = torch.ones(1, 1, 1, 1, dtype=F64)
    controller = MPCFlowController(lam=10.0, **settings)
    controller.with_objective(MeasurementObjective(operators.Denoise(), y)).reset(10, 1, y.device)
    return controller.control(state)


def test_golden_1_scalar_prox():
    state = scalar_state()
    answer = controlled(state, solver="prox")
    u = float(state.v - answer.velocity)
    assert u == pytest.approx(0.4285714285714286, abs=1e-12)
    assert float(state.x - state.sigma * answer.velocity) == pytest.approx(0.9142857142857144, abs=1e-12)
    assert float(state.x - 0.1 * answer.velocity) == pytest.approx(0.34285714285714286, abs=1e-12)
    assert float(answer.velocity) == pytest.approx(-1.4285714285714286, abs=1e-12)


def test_golden_1_scalar_cost():
    phi = MeasurementObjective(operators.Denoise(), torch.ones(1, 1, 1, 1, dtype=F64))
    endpoint = torch.full((1, 1, 1, 1), 0.7, dtype=F64)
    for u, expected in ((0.0, 0.45), (0.4285714285714286, 0.1285714285714286)):
        d = torch.full_like(endpoint, 0.5 * u)
        assert float(endpoint_cost(d, endpoint, phi, w=2.0, lam=10.0)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n_ctrl", "expected"), [(20, 0.33633375374834784), (100, 0.4268430690478733)])
def test_golden_1_scalar_adam(n_ctrl, expected):
    state = scalar_state()
    answer = controlled(state, solver="adam", n_ctrl=n_ctrl, lr=0.1)
    assert float(state.v - answer.velocity) == pytest.approx(expected, abs=1e-9)


def test_golden_2_masked_prox():
    mask = operators.FreeformInpaint([[1, 0, 1, 0]])
    endpoint = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=F64).view(1, 1, 1, 4)
    y = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=F64).view(1, 1, 1, 4)
    expected = torch.tensor([0.875, 0.5, -0.875, -0.5], dtype=F64).view(1, 1, 1, 4)
    assert torch.allclose(mask.prox(endpoint, y, 3.0), expected, atol=1e-14)


def test_golden_2_blur_prox_solves_the_normal_equations():
    blur = operators.GaussianBlur(9, 1.0)
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(2, 1, 1, 16, 16, generator=generator, dtype=F64)
    x = blur.prox(z, y, 7.0)
    residual = x + 7.0 * blur.At(blur.A(x)) - z - 7.0 * blur.At(y)
    assert float(residual.abs().max()) < 1e-12


@pytest.fixture(scope="module")
def two_modes():
    model = GaussianMixtureFlowModel(2, [[2.0, 2.0], [-2.0, -2.0]], [0.5, 0.5], sample_shape=(1, 1, 2))
    mask = operators.FreeformInpaint([[1, 0]])
    return lambda x, sigma: model(x, sigma).sample, mask


def steer(two_modes, x0, num_steps, generator=None, **settings):
    velocity, mask = two_modes
    y = torch.tensor([2.0, 0.0], dtype=F64).view(1, 1, 1, 2).expand(len(x0), -1, -1, -1)
    controller = MPCFlowController(**settings).with_objective(MeasurementObjective(mask, y))
    sigmas = torch.linspace(1, 0, num_steps + 1, dtype=F64)
    return run_controller(velocity, controller, x0, sigmas, generator=generator)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lam": 0.0}, (-1.71332711, -1.67024885)),
        ({"lam": 1.0}, (-0.58399648, -1.50809983)),
        ({"lam": 10.0}, (1.91515827, 1.27009814)),
        ({"lam": 10.0, "solver": "adam"}, (1.8897322, 1.22637584)),
        ({"lam": 10.0, "horizon_steps": 3, "lr": 0.05}, (1.85375082, 1.38709501)),
        ({"lam": 10.0, "horizon_steps": 3, "lr": 0.05, "warm_start": False}, (1.7024459, 1.26715088)),
        ({"lam": 10.0, "mode": "dt"}, (1.95470973, 1.82686943)),
        ({"lam": 1.0, "mode": "dt", "lambda_scaling": "inverse_dt"}, (1.95470973, 1.82686943)),
    ],
)
def test_golden_3_two_mode_mixture(two_modes, settings, expected):
    x0 = torch.tensor([-0.3, -0.2], dtype=F64).view(1, 1, 1, 2)
    final = steer(two_modes, x0, 10, **settings)
    assert torch.allclose(final.flatten(), torch.tensor(expected, dtype=F64), atol=1e-6)


def test_golden_3_global_control(two_modes):
    velocity, mask = two_modes
    x0 = torch.tensor([-0.3, -0.2], dtype=F64).view(1, 1, 1, 2)
    y = torch.tensor([2.0, 0.0], dtype=F64).view(1, 1, 1, 2)
    final = FlowGrad(num_steps=10, iterations=200, lam=10.0, lr=0.05).solve(velocity, mask, y, x0)
    assert torch.allclose(final.flatten(), torch.tensor([1.85356537, 1.49216672], dtype=F64), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lam": 0.0}, 0.445),
        ({"lam": 100.0}, 0.75),
        ({"lam": 100.0, "churn": 1.0}, 1.00),
        ({"lam": 10.0, "horizon_steps": 3, "lr": 0.05}, 0.76),
        ({"lam": 100.0, "mode": "dt"}, 0.83),
    ],
)
def test_golden_4_share_of_starts_that_reach_the_measured_mode(two_modes, settings, expected):
    x0 = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=F64).view(200, 1, 1, 2)
    final = steer(two_modes, x0, 20, generator=torch.Generator().manual_seed(1), **settings).view(200, 2)
    reached = ((final - 2.0).norm(dim=1) < 1.2).double().mean()
    assert float(reached) == pytest.approx(expected, abs=0.03)


class Bellman:
    """Golden 5: one-dimensional Gaussian data, for which every problem is linear-quadratic."""

    N, LAM, X0, Y = 8, 4.0, 0.3, -0.5
    U = (-0.936139, -1.081643, -1.259227, -1.462194, -1.657153, -1.775521, -1.758928, -1.62631)

    def __init__(self):
        model = GaussianMixtureFlowModel(1, [[1.5]], [0.6], sample_shape=(1, 1, 1))
        self.velocity = lambda x, sigma: model(x, sigma).sample
        self.phi = MeasurementObjective(operators.Denoise(), torch.full((1, 1, 1, 1), self.Y, dtype=F64))
        self.start = torch.full((1, 1, 1, 1), self.X0, dtype=F64)

    def solve_exactly(self, cost, shape):
        """The minimiser of a quadratic cost: one Newton step from 0."""
        zero = torch.zeros(shape, dtype=F64)
        gradient = torch.autograd.functional.jacobian(lambda u: cost(u).sum(), zero).flatten()
        hessian = torch.autograd.functional.hessian(lambda u: cost(u).sum(), zero).view(zero.numel(), -1)
        return -torch.linalg.solve(hessian, gradient).view(shape)

    def plan(self, x, k):
        """Exact plan over the whole remaining grid."""
        t = k / self.N

        def cost(u):
            return receding_horizon_cost(u, x, -self.velocity(x, 1 - t), t, self.velocity, self.phi, self.LAM)

        return self.solve_exactly(cost, (1, self.N - k, 1, 1, 1)), cost

    def value_functions(self):
        """Riccati recursion: cost-to-go p x² + q x + r at each grid point, λΦ at the end."""
        p, q, r = self.LAM / 2, -self.LAM * self.Y, self.LAM * self.Y**2 / 2
        values = [(p, q, r)]
        delta = 1 / self.N
        for k in reversed(range(self.N)):
            points = torch.tensor([0.0, 1.0], dtype=F64).view(2, 1, 1, 1)
            intercept, one = (-self.velocity(points, 1 - k / self.N)).flatten().tolist()
            a, c = 1 + delta * (one - intercept), delta * intercept  # x' = a x + c + Δ u
            # min over u of Δu² + p(m + Δu)² + q(m + Δu) + r with m = a x + c
            scale = 1 / (1 + delta * p)
            p2, q2, r2 = p * scale, q * scale, r - delta * q**2 / 4 * scale  # as a quadratic in m
            p, q, r = p2 * a**2, 2 * p2 * a * c + q2 * a, p2 * c**2 + q2 * c + r2
            values.insert(0, (p, q, r))
        return values


def test_golden_5_optimal_control_and_cost():
    problem = Bellman()
    u, cost = problem.plan(problem.start, 0)
    assert torch.allclose(u.flatten(), torch.tensor(problem.U, dtype=F64), atol=1e-6)
    assert float(cost(u)) == pytest.approx(3.4983565815, abs=1e-9)


def test_theorem_1_receding_horizon_with_exact_solves_is_globally_optimal():
    problem = Bellman()
    x, applied = problem.start, []
    for k in range(problem.N):
        u = problem.plan(x, k)[0][:, 0]
        applied.append(float(u))
        x = x + (u - problem.velocity(x, 1 - k / problem.N)) / problem.N
    optimal = problem.plan(problem.start, 0)[0].flatten()
    assert torch.allclose(torch.tensor(applied, dtype=F64), optimal, atol=1e-12)
    assert float(x) == pytest.approx(0.3131550466, abs=1e-9)


def test_theorem_2_one_step_horizon_with_the_exact_value_is_globally_optimal():
    problem = Bellman()
    values = problem.value_functions()
    x, applied = problem.start, []
    for k in range(problem.N):
        p, q, r = values[k + 1]

        def value(z, t, p=p, q=q, r=r):
            return ((p * z**2 + q * z + r) / problem.LAM).flatten(1).sum(1)

        b = -problem.velocity(x, 1 - k / problem.N)

        def cost(u, x=x, b=b, k=k, value=value):
            return delta_t_cost(u, x, b, k / problem.N, (k + 1) / problem.N, problem.LAM, value)

        u = problem.solve_exactly(cost, (1, 1, 1, 1))
        applied.append(float(u))
        x = x + (b + u) / problem.N
    optimal = problem.plan(problem.start, 0)[0].flatten()
    assert torch.allclose(torch.tensor(applied, dtype=F64), optimal, atol=1e-12)


@pytest.mark.parametrize(("settings", "expected"), [({"lam": 0.0}, 1.6511005779), ({"lam": 4.0}, 0.2333281425)])
def test_golden_5_no_control_and_one_step_plan(settings, expected):
    problem = Bellman()
    controller = MPCFlowController(**settings).with_objective(problem.phi)
    sigmas = torch.linspace(1, 0, problem.N + 1, dtype=F64)
    final = run_controller(problem.velocity, controller, problem.start, sigmas)
    assert float(final) == pytest.approx(expected, abs=1e-9)
