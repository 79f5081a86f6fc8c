"""MPCFlowPipeline on the embedded flow: usage, seeds, batches, counts, errors and pitfalls of the spec."""

import pytest
import torch

from hf_pipelines import MPCFlowController, MPCFlowPipeline, SmallFlowPipeline, attach_controller, hub, operators
from hf_pipelines.flow_control.metrics import psnr
from hf_pipelines.mpc_flow import InverseProblem, MeasurementObjective, tune_lambda

REGIMES = {
    "K=1": {"mode": "rhc", "horizon_steps": 1},
    "K=1 adam": {"mode": "rhc", "solver": "adam"},
    "K=1 churn": {"mode": "rhc", "churn": 1.0},
    "K=1 release": {"control_weight": "release", "control_param": "d", "solver": "adam", "rho": 0.05},
    "K=1 bayes": {"lam": "auto", "noise_std": 0.05},
    "K=3": {"mode": "rhc", "horizon_steps": 3, "lr": 0.05},
    "full": {"mode": "rhc", "horizon_steps": "full", "lr": 0.05},
    "dt": {"mode": "dt"},
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipe(digits_pipe):
    return MPCFlowPipeline(digits_pipe)


@pytest.fixture(scope="module")
def blurred(digits):
    operator = operators.GaussianBlur(9, 1.0)
    return operator, operator.measure(digits[:4], noise_std=0.05, generator=seeded(1))


def restore(pipe, blurred, **settings):
    operator, y = blurred
    arguments = {"num_inference_steps": 8, "generator": seeded(), "output_type": "pt", **settings}
    return pipe(y, operator, **arguments)


def test_usage_example_of_the_spec_runs_as_printed(digits):
    from hf_pipelines.flow_control import MPCFlowPipeline
    from hf_pipelines.flow_control import operators as ops

    x_true, g = digits[:2], seeded()
    pipe = MPCFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
    pipe.set_progress_bar_config(disable=True)
    A = ops.BoxInpaint(size=6)
    y = A.measure(x_true, noise_std=0.05, generator=g)
    best = pipe(y, A, mode="dt", num_inference_steps=25, lam=100.0, generator=g)
    cheap = pipe(y, A, mode="rhc", horizon_steps=1, lam="auto", noise_std=0.05, churn=1.0)
    assert [image.size for image in best.images + cheap.images] == [(16, 16)] * 4


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_restores_better_than_the_plain_flow_and_the_measurement(pipe, blurred, digits, regime):
    out = restore(pipe, blurred, num_inference_steps=20, reference=digits[:4], **REGIMES[regime])
    plain = restore(pipe, blurred, num_inference_steps=20, lam=0.0).images * 2 - 1
    assert out.log[-1]["psnr"] > float(psnr(plain, digits[:4]).mean()) + 5
    assert out.log[-1]["psnr"] > out.log[-1]["degraded_psnr"]
    assert len(out.log) == 20 and out.data_rmse.shape == (4,)


@pytest.mark.parametrize("regime", REGIMES)
def test_same_seed_gives_the_same_images(pipe, blurred, regime):
    first, second = (restore(pipe, blurred, **REGIMES[regime]).images for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("regime", [name for name in REGIMES if name != "K=1 churn"])
def test_an_image_does_not_depend_on_its_batch(blurred, regime):
    # in float64: matrix products of another batch size round differently, and Adam magnifies it
    pipe = MPCFlowPipeline.from_pretrained(hub.repo("digits-16x16"), torch_dtype=torch.float64)
    pipe.set_progress_bar_config(disable=True)
    operator, y = blurred
    latents = torch.randn(4, 1, 16, 16, generator=seeded(), dtype=torch.float64)
    settings = {"num_inference_steps": 8, "output_type": "pt", **REGIMES[regime]}
    together = pipe(y, operator, latents=latents, **settings).images
    alone = pipe(y[2:3], operator, latents=latents[2:3], **settings).images
    assert torch.allclose(together[2:3], alone, atol=1e-4)


def test_an_image_does_not_depend_on_its_batch_with_churn_and_one_generator_each(pipe, blurred):
    operator, y = blurred
    settings = {"num_inference_steps": 8, "output_type": "pt", "churn": 1.0}
    together = pipe(y, operator, generator=[seeded(i) for i in range(4)], **settings).images
    alone = pipe(y[2:3], operator, generator=[seeded(2)], **settings).images
    assert torch.allclose(together[2:3], alone, atol=1e-5)


def test_lambda_zero_is_plain_sampling_bit_for_bit(pipe, blurred):
    plain = pipe.base(num_images=4, num_inference_steps=8, generator=seeded(), output_type="pt").images
    for regime in ("K=1", "K=3", "dt"):
        assert torch.equal(restore(pipe, blurred, **{**REGIMES[regime], "lam": 0.0}).images, plain)


def test_one_step_sampling_returns_the_proximal_point_of_the_endpoint(pipe, blurred):
    # a control computed in `callback_on_step_end` would come one step late
    operator, y = blurred
    x = torch.randn(4, 1, 16, 16, generator=seeded())
    with torch.no_grad():
        endpoint = x - pipe.base.model(x, 1.0).sample
    out = pipe(y, operator, lam=30.0, num_inference_steps=1, latents=x, output_type="latent").images
    assert torch.allclose(out, operator.prox(endpoint, y, 15.0), atol=1e-5)  # c = λh/2 with h = 1


def test_prox_and_adam_agree_when_adam_runs_long_enough(pipe, blurred):
    operator, y = blurred
    x = torch.randn(4, 1, 16, 16, generator=seeded())
    common = {"lam": 10.0, "num_inference_steps": 1, "latents": x, "output_type": "latent"}
    exact = pipe(y, operator, solver="prox", **common).images
    for param in ("u", "d"):
        adam = pipe(y, operator, solver="adam", n_ctrl=600, lr=0.05, control_param=param, **common).images
        assert torch.allclose(adam, exact, atol=1e-3)


def test_scale_of_phi_multiplies_lambda(pipe, blurred):
    n = blurred[1][0].numel()
    base = restore(pipe, blurred, lam=100.0).images
    assert torch.allclose(restore(pipe, blurred, lam=100.0 * n / 2, phi_scale="mean").images, base, atol=1e-5)
    noise = restore(pipe, blurred, lam=100.0 * 0.05**2, phi_scale="noise", noise_std=0.05).images
    assert torch.allclose(noise, base, atol=1e-5)


def test_churn_zero_is_exactly_the_method_of_the_paper(pipe, blurred):
    assert torch.equal(restore(pipe, blurred, churn=0.0).images, restore(pipe, blurred).images)
    nearly = restore(pipe, blurred, churn=1e-9).images
    assert torch.allclose(nearly, restore(pipe, blurred).images, atol=1e-5)


@pytest.mark.parametrize(
    ("regime", "nfe", "nbp"),
    [
        ("K=1", 8, 0),
        ("K=1 adam", 8, 0),
        ("K=1 churn", 8, 0),
        ("K=3", 8 + 8 * 20 * 2, 8 * 20 * 2),
        ("dt", 8 + 7 * 20, 7 * 20),
    ],
)
def test_network_calls_are_those_of_the_spec(pipe, blurred, regime, nfe, nbp):
    # Δt makes no call at the last step, where the value is Φ itself
    out = restore(pipe, blurred, **REGIMES[regime])
    assert (out.nfe, out.nbp) == (nfe, nbp)


def test_one_step_horizon_never_differentiates_the_network(pipe, blurred, monkeypatch):
    model = pipe.base.model
    forward = type(model).forward

    def watched(self, sample, *args, **kwargs):
        assert not torch.is_grad_enabled() or not sample.requires_grad
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    restore(pipe, blurred, solver="adam")


@pytest.mark.parametrize("regime", REGIMES)
def test_no_parameter_gathers_a_gradient(pipe, blurred, regime):
    restore(pipe, blurred, **REGIMES[regime])
    assert all(parameter.grad is None for parameter in pipe.base.model.parameters())


def test_data_error_approaches_the_noise_level(pipe, digits):
    y = operators.Denoise().measure(digits[:8], noise_std=0.2, generator=seeded(1))
    out = pipe(y, operators.Denoise(), lam="auto", noise_std=0.2, num_inference_steps=50, generator=seeded())
    assert float(out.data_rmse.mean()) == pytest.approx(0.2, rel=0.35)


def test_endpoints_are_recorded_on_request(pipe, blurred):
    out = restore(pipe, blurred, record_endpoints=True)
    assert len(out.endpoints) == 8 and out.endpoints[0].shape == (4, 1, 16, 16)
    assert torch.allclose(out.endpoints[-1], out.images * 2 - 1, atol=1.0)
    assert restore(pipe, blurred).endpoints == []


def test_class_conditional_guidance_reaches_the_base(pipe, blurred):
    unconditional = restore(pipe, blurred, mode="dt").images
    guided = restore(pipe, blurred, mode="dt", class_labels=[3] * 4, guidance_scale=2.0).images
    assert not torch.allclose(unconditional, guided, atol=1e-3)


def test_per_image_masks_restore_each_image_with_its_own_mask(pipe, digits):
    mask = torch.ones(2, 1, 16, 16)
    mask[0, :, :8], mask[1, :, 8:] = 0, 0
    operator = operators.FreeformInpaint(mask)
    y = operator.measure(digits[:2])
    images = pipe(y, operator, lam=1e4, num_inference_steps=8, generator=seeded(), output_type="pt").images * 2 - 1
    assert torch.allclose(mask * images, y, atol=1e-2)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_mask_of_all_ones_or_zeros_works(pipe, digits, p):
    operator = operators.RandomInpaint(p)
    y = operator.measure(digits[:2])
    images = pipe(y, operator, num_inference_steps=4, generator=seeded(), output_type="pt").images
    assert bool(torch.isfinite(images).all())


def test_objective_may_be_any_differentiable_function(pipe):
    def bright(images):
        return -images.sum((1, 2, 3))

    arguments = {"num_images": 2, "num_inference_steps": 8, "output_type": "pt"}
    plain = pipe.base(generator=seeded(), **arguments).images
    for settings in ({}, {"mode": "dt"}):
        out = pipe(objective=bright, lam=0.5, generator=seeded(), **arguments, **settings)
        assert float(out.images.mean()) > float(plain.mean()) + 0.02
        assert out.data_rmse is None


def test_nan_in_an_objective_keeps_the_last_finite_control_of_that_image(pipe):
    def broken_for_the_second(images):
        return -images.sum((1, 2, 3)) * torch.tensor([1.0, float("nan")])

    arguments = {"num_images": 2, "num_inference_steps": 4, "output_type": "latent"}
    out = pipe(objective=broken_for_the_second, lam=0.5, generator=seeded(), **arguments)
    plain = pipe.base(generator=seeded(), **arguments).images
    assert torch.allclose(out.images[1], plain[1], atol=1e-6)
    assert not torch.allclose(out.images[0], plain[0], atol=1e-3)
    assert [entry["nonfinite_images"] for entry in out.log] == [1] * 4


def test_operator_of_the_pipeline_is_the_default_and_is_saved(tmp_path, digits_pipe, digits):
    pipe = MPCFlowPipeline(digits_pipe, operators.SuperResolution(2, "average"))
    y = pipe.operator.measure(digits[:2])
    expected = pipe(y, num_inference_steps=4, generator=seeded(), output_type="pt").images
    pipe.save_pretrained(tmp_path)
    assert (tmp_path / "operator" / "operator_config.json").is_file()
    loaded = MPCFlowPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded(y, num_inference_steps=4, generator=seeded(), output_type="pt").images, expected)


def test_shipped_repo_restores_without_further_arguments(digits):
    pipe = MPCFlowPipeline.from_pretrained(hub.repo("mpc-flow-digits-16x16"))
    pipe.set_progress_bar_config(disable=True)
    y = pipe.operator.measure(digits[:2], noise_std=0.05, generator=seeded())
    out = pipe(y, mode="dt", num_inference_steps=12, generator=seeded(), reference=digits[:2])
    assert out.log[-1]["psnr"] > out.log[-1]["degraded_psnr"] + 3


def test_wrapping_shares_components_and_casts_none(digits_pipe):
    half = SmallFlowPipeline.from_pretrained(hub.repo("digits-16x16"), torch_dtype=torch.bfloat16)
    for wrap in (MPCFlowPipeline, MPCFlowPipeline.from_pipe):
        pipe = wrap(half)
        assert pipe.base.model is half.model and pipe.dtype == torch.bfloat16
    assert MPCFlowPipeline.from_pipe(pipe).base is half
    loaded = MPCFlowPipeline.from_pretrained(hub.repo("mpc-flow-digits-16x16"), torch_dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.device.type == "cpu"
    assert loaded.to(torch.float32).base.model.dtype == torch.float32


def test_tune_lambda_finds_the_best_of_the_grid(pipe, digits):
    problem = InverseProblem(pipe, operators.Denoise(), 0.2, {"mode": "dt", "num_inference_steps": 8})
    tuning = tune_lambda(problem, digits[24:30], [0.1, 10.0, 1000.0])
    assert tuning.best == 10.0 == max(tuning.psnr, key=tuning.psnr.get)
    with pytest.raises(ValueError, match="grid"):
        tune_lambda(problem, digits[24:30], [])


def test_psnr_does_not_depend_on_the_batch_size(digits):
    noisy = digits[:4] + 0.3 * torch.rand(4, 1, 1, 1, generator=seeded())
    together = psnr(noisy, digits[:4])
    alone = torch.cat([psnr(noisy[i : i + 1], digits[i : i + 1]) for i in range(4)])
    assert torch.allclose(together, alone)
    whole = 10 * torch.log10(4 / (noisy - digits[:4]).square().mean())
    assert abs(float(together.mean() - whole)) > 0.1  # so that the test can tell


def Y(*shape):
    return torch.zeros(*shape)


BAD_INPUT = [
    ({"y": Y(2, 1, 8, 8), "operator": operators.Denoise()}, r"\(2, 1, 8, 8\).*\(2, 1, 16, 16\)"),
    ({"y": Y(1, 1, 16, 16), "operator": operators.SuperResolution(2), "num_images": 1}, r"\(1, 1, 16, 16\).*8, 8"),
    ({"y": Y(1, 1, 16, 16) + 200, "operator": operators.Denoise()}, "preprocess"),
    ({"y": Y(1, 1, 16, 16).to(torch.uint8), "operator": operators.Denoise()}, "preprocess"),
    ({"y": Y(1, 1, 16, 16) * float("nan"), "operator": operators.Denoise()}, "NaN"),
    ({"y": Y(1, 1, 16, 16)}, "`operator` is missing"),
    ({"operator": operators.Denoise()}, "`y` is missing"),
    ({"y": Y(1, 1, 16, 16), "objective": lambda x: x}, "not both"),
    ({"lam": -1.0}, "`lam`"),
    ({"lam": float("nan")}, "`lam`"),
    ({"lam": "auto"}, "`noise_std`"),
    ({"lam": "auto", "noise_std": 0.1, "horizon_steps": 3}, "horizon_steps=1"),
    ({"n_ctrl": 0}, "`n_ctrl`"),
    ({"lr": 0.0}, "`lr`"),
    ({"horizon_steps": 0}, "`horizon_steps`"),
    ({"horizon_steps": 2, "mode": "dt"}, "no meaning with mode='dt'"),
    ({"churn": 1.5}, "`churn`"),
    ({"churn": 0.5, "mode": "dt"}, "`churn`"),
    ({"noise_std": -0.1}, "`noise_std`"),
    ({"mode": "mpc"}, "`mode`"),
    ({"solver": "newton"}, "`solver`"),
    ({"control_weight": "heavy"}, "`control_weight`"),
    ({"phi_scale": "max"}, "`phi_scale`"),
    ({"phi_scale": "noise"}, "`noise_std`"),
    ({"steps": 3}, "'steps'"),
    ({"num_inference_steps": 0}, "`num_inference_steps`"),
    ({"output_type": "latent", "reference": Y(1, 1, 16, 16)}, "`reference`"),
]


@pytest.mark.parametrize(("arguments", "match"), BAD_INPUT)
def test_bad_input_is_named(pipe, arguments, match):
    if not {"y", "operator", "objective"} & set(arguments):
        arguments = {"y": Y(1, 1, 16, 16), "operator": operators.Denoise(), **arguments}
    original = pipe.base.scheduler
    with pytest.raises(ValueError, match=match):
        pipe(**{"num_inference_steps": 2, **arguments})
    assert pipe.base.scheduler is original


@pytest.mark.parametrize(
    ("objective", "match"),
    [
        (lambda images: images.sum(), "one value per image"),
        (lambda images: 1.0, "one value per image"),
        (lambda images: images.detach().sum((1, 2, 3)), "not differentiable"),
    ],
)
def test_objective_that_cannot_be_used_is_named(pipe, objective, match):
    objective.__name__ = "my_objective"
    with pytest.raises(ValueError, match=f"my_objective.*{match}"):
        pipe(objective=objective, num_images=2, num_inference_steps=2)


def test_wrong_types_are_named(digits_pipe, pipe):
    with pytest.raises(TypeError, match="base"):
        MPCFlowPipeline(object())
    with pytest.raises(TypeError, match="operator"):
        pipe(Y(1, 1, 16, 16), lambda x: x)
    with pytest.raises(TypeError, match="objective"):
        pipe(objective=3)


def test_controller_without_an_objective_says_so(digits_pipe):
    with (
        pytest.raises(ValueError, match="with_objective"),
        attach_controller(digits_pipe, MPCFlowController()) as pipe,
    ):
        pipe(num_images=1, num_inference_steps=1)


def test_forced_prox_warns_and_uses_adam_when_there_is_no_closed_form(pipe, digits):
    y = operators.HDR().measure(digits[:1])
    with pytest.warns(UserWarning, match="nonlinear objective"):
        out = pipe(y, operators.HDR(), solver="prox", num_inference_steps=2, generator=seeded())
    assert len(out.images) == 1


def test_laplace_noise_uses_its_own_data_term_and_adam(pipe, digits):
    noise = operators.LaplaceNoise(0.1)
    y = operators.Denoise().measure(digits[:2], noise=noise, generator=seeded())
    objective = MeasurementObjective(operators.Denoise(), y, noise=noise)
    assert not objective.quadratic
    out = pipe(y, operators.Denoise(), noise=noise, lam=1.0, num_inference_steps=10, generator=seeded())
    assert float(out.data_rmse.mean()) < 0.4


def test_seeded_controller_repeats_its_churn_noise(digits_pipe, digits):
    y = operators.Denoise().measure(digits[:2])
    controller = MPCFlowController(churn=1.0, seed=5)
    controller.with_objective(MeasurementObjective(operators.Denoise(), y))
    latents = torch.randn(2, 1, 16, 16, generator=seeded())
    runs = []
    for _ in range(2):
        with attach_controller(digits_pipe, controller) as pipe:
            runs.append(pipe(latents=latents, num_inference_steps=4, output_type="latent").images)
    assert torch.equal(*runs)
