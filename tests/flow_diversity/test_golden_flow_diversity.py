"""Golden values of the flow-diversity spec, in float64."""

import pytest
import torch

from hf_models import GaussianMixtureFlowModel
from hf_pipelines.flow_control import FlowState, run_controller
from hf_pipelines.flow_control.controller_flow import identity_decode
from hf_pipelines.flow_diversity import FlowDiversityController
from hf_pipelines.flow_diversity.controller_flow_diversity import (
    limit_ratio,
    log_volume,
    prepare_features,
    project_orthogonal,
    schedule,
)

F64 = torch.float64


def tensor(values):
    return torch.tensor(values, dtype=F64)


def volume_and_gradient(features, tau, norm, center):
    leaf = tensor(features).requires_grad_(True)
    volume = log_volume(prepare_features(leaf, norm, center), tau)
    return float(volume.detach()), torch.autograd.grad(volume, [leaf])[0]


def test_golden_1_log_volume_of_raw_features():
    volume, gradient = volume_and_gradient([[1, 0], [0, 1], [1, 1]], 1.0, "none", False)
    assert volume == pytest.approx(1.0397207708399179, abs=1e-12)  # ½ ln 8
    assert torch.allclose(gradient, tensor([[0.375, -0.125], [-0.125, 0.375], [0.25, 0.25]]), atol=1e-12)


def test_golden_1_gradient_is_the_closed_form():
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    leaf = z.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(log_volume(leaf, 2.5), [leaf])
    closed = 2.5 * torch.linalg.solve(torch.eye(5, dtype=F64) + 2.5 * z @ z.T, z)  # τ (I + τ Z Zᵀ)⁻¹ Z
    assert torch.allclose(gradient, closed, atol=1e-12)


def test_golden_2_normalised_and_centred():
    features = [[1, 0], [0.8, 0.6], [0, 1]]
    volume, gradient = volume_and_gradient(features, 1.0, "l2", True)
    assert volume == pytest.approx(0.3757080443419606, abs=1e-12)
    expected = [[0, -0.3018867924528], [0.0113207547170, -0.0150943396226], [-0.3207547169811, 0]]
    assert torch.allclose(gradient, tensor(expected), atol=1e-9)
    assert volume_and_gradient(features, 10.0, "l2", True)[0] == pytest.approx(1.416606672028108, abs=1e-12)
    assert volume_and_gradient(features, 1.0, "l2", False)[0] == pytest.approx(0.8958797346140275, abs=1e-12)


@pytest.mark.parametrize(("ortho", "expected"), [(1.0, [-1, 2, 1]), (0.5, [0, 2, 2])])
def test_golden_3_projection(ortho, expected):
    projected = project_orthogonal(tensor([[1, 2, 3]]), tensor([[1, 0, 1]]), ortho)
    assert torch.allclose(projected, tensor([expected]), atol=1e-9)


@pytest.mark.parametrize(("sigma", "expected"), [(0.84, 0), (0.875, 0.5), (0.9, 1), (0.95, 0)])
def test_golden_4_gate(sigma, expected):
    assert schedule(sigma, "sin2", (0.85, 0.95)) == pytest.approx(expected, abs=1e-12)


X5, V5 = [[1, 0], [0, 1]], [[0.5, -0.5], [0.25, 1]]


def one_step(**settings):
    settings = {
        "feature_space": "latent",
        "feature_norm": "none",
        "center": False,
        "tau": 1.0,
        "beta0": 0.0,
        **settings,
    }
    controller = FlowDiversityController(gamma_schedule="const", **settings)
    controller.reset(10, 2, torch.device("cpu"))
    state = FlowState(tensor(V5), tensor(X5), 0.9, 0.8, 1, 10, decode=identity_decode)
    answer = controller.control(state)
    return controller, state, answer


def test_golden_5_one_step():
    controller, state, _ = one_step(gamma0=2.0)
    assert torch.allclose(state.endpoint, tensor([[0.55, 0.45], [-0.225, 0.1]]), atol=1e-12)
    assert controller.log[0]["log_volume"] == pytest.approx(0.2318792917702122, abs=1e-9)
    g = controller._feature_gradient(state.endpoint)[0]
    assert torch.allclose(g, tensor([[0.3557302543, 0.3051222209], [-0.1857265692, 0.1169389510]]), atol=1e-9)
    b = -state.v
    projected = project_orthogonal(g, b)
    expected = [[0.3304262376, 0.3304262376], [-0.2023165242, 0.0505791311]]
    assert torch.allclose(projected, tensor(expected), atol=1e-9)
    cap, unit = (limit_ratio(projected, b, 0.3, mode) for mode in ("cap", "unit"))
    assert torch.allclose(cap, tensor([[0.15, 0.15], [-0.2023165242, 0.0505791311]]), atol=1e-9)
    assert torch.allclose(unit, tensor([[0.15, 0.15], [-0.3, 0.075]]), atol=1e-9)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("cap", [[0.98, 0.08], [-0.0654633048, 0.9101158262]]), ("unit", [[0.98, 0.08], [-0.085, 0.915]])],
)
def test_golden_5_new_state(mode, expected):
    _, state, answer = one_step(gamma0=2.0, cap_mode=mode)
    assert torch.allclose(state.x - 0.1 * answer.velocity, tensor(expected), atol=1e-8)


def test_golden_6_one_mode_becomes_two():
    model = GaussianMixtureFlowModel(2, [[2.0, 0.0], [-2.0, 0.0]], [0.5, 0.5])
    x = tensor([[0.3, 0.1], [0.2, -0.4], [0.1, 0.6]])
    sigmas = [1 - k / 10 for k in range(10)] + [0.0]

    def sample(controller):
        return run_controller(lambda x, s: model(x, s).sample, controller, x, sigmas)

    plain = [[1.5266755903, 0.0430782605], [1.3736241229, -0.1723130420], [1.1376268762, 0.2584695629]]
    assert torch.allclose(sample(None), tensor(plain), atol=1e-7)
    controller = FlowDiversityController(
        gamma0=8.0, gate=(0.5, 1.0), tau=1.0, feature_norm="none", feature_space="latent", beta0=0.0
    )
    spread = [[1.6063315719, 0.2221623673], [-0.6068157087, -0.1525547781], [-1.4280548693, 0.3448795646]]
    assert torch.allclose(sample(controller), tensor(spread), atol=1e-7)
