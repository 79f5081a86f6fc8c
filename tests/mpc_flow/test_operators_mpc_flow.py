"""Measurement operators: adjoints, proximal maps, masks, saving, noise, preprocessing."""

import numpy as np
import pytest
import torch
from PIL import Image

from hf_pipelines import operators as ops
from hf_pipelines.mpc_flow.operator_base import LinearOperator, conjugate_gradient

F64 = torch.float64
LINEAR = {
    "denoise": (ops.Denoise(), 1),
    "box": (ops.BoxInpaint(6), 1),
    "box off centre": (ops.BoxInpaint(5, (2, 13)), 3),
    "random": (ops.RandomInpaint(0.7, seed=3), 3),
    "freeform": (ops.FreeformInpaint((torch.arange(256).view(16, 16) % 3 > 0).float()), 1),
    "gaussian blur": (ops.GaussianBlur(9, 1.0), 1),
    "gaussian blur wider than the image": (ops.GaussianBlur(61, 3.0), 1),
    "motion blur": (ops.MotionBlur(9, 0.7, seed=1), 3),
    "subsample": (ops.SuperResolution(2, "subsample"), 1),
    "average": (ops.SuperResolution(4, "average"), 1),
    "bicubic": (ops.SuperResolution(2, "bicubic"), 1),
    "colorize": (ops.Colorize(), 3),
    "compose": (ops.Compose([ops.GaussianBlur(5, 1.0), ops.SuperResolution(2)]), 1),
}
NONLINEAR = {
    "hdr": (ops.HDR(), 1),
    "nonlinear blur": (ops.NonlinearBlur(9, 1.0), 1),
    "phase retrieval": (ops.PhaseRetrieval(2.0), 1),
    "compose": (ops.Compose([ops.HDR(), ops.SuperResolution(2)]), 1),
}
ALL = {**LINEAR, **{f"nonlinear {name}": value for name, value in NONLINEAR.items()}}


def images(channels, batch=2, dtype=F64, seed=0):
    return torch.randn(batch, channels, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("name", LINEAR)
def test_adjoint_satisfies_the_inner_product_identity(name):
    operator, channels = LINEAR[name]
    x = images(channels)
    y = operator.A(x)
    q = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert operator.linear
    assert float((y * q).sum()) == pytest.approx(float((x * operator.At(q)).sum()), rel=1e-10)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("c", [0.0, 0.3, 40.0])
def test_prox_solves_the_normal_equations(name, c):
    operator, channels = LINEAR[name]
    z = images(channels)
    y = operator.A(images(channels, seed=2))
    x = operator.prox(z, y, c)
    residual = x + c * operator.At(operator.A(x)) - z - c * operator.At(y)
    assert float(residual.norm() / z.norm()) < 1e-6


@pytest.mark.parametrize("name", LINEAR)
def test_image_shape_and_back_projection_have_the_shape_of_the_image(name):
    operator, channels = LINEAR[name]
    x = images(channels)
    y = operator.A(x)
    assert operator.image_shape(tuple(y.shape)) == tuple(x.shape)
    assert operator.pinv(y).shape == x.shape


@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear_operators_are_differentiable_and_have_a_picture(name):
    operator, channels = NONLINEAR[name]
    x = (0.3 * images(channels)).clamp(-1, 1).requires_grad_(True)
    y = operator.A(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), [x])
    assert not operator.linear
    assert bool(torch.isfinite(gradient).all()) and float(gradient.abs().max()) > 0
    assert operator.pinv(y.detach()).shape == x.shape


@pytest.mark.parametrize("name", ALL)
def test_operator_saves_and_loads_with_every_setting(name, tmp_path):
    operator, channels = ALL[name]
    operator.save_pretrained(tmp_path)
    assert (tmp_path / "operator_config.json").is_file()
    loaded = ops.Operator.from_pretrained(tmp_path)
    assert type(loaded) is type(operator)
    assert torch.equal(loaded.A(images(channels)), operator.A(images(channels)))


@pytest.mark.parametrize("name", ALL)
def test_operator_prints_its_full_config(name):
    operator, _ = ALL[name]
    text = repr(operator)
    assert text.startswith(type(operator).__name__)
    assert all(f"{key}=" in text for key in operator.config if not key.startswith("_"))


@pytest.mark.parametrize("name", ALL)
def test_each_image_is_measured_alike_in_any_batch(name):
    operator, channels = ALL[name]
    x = images(channels, batch=4)
    assert torch.allclose(operator.A(x)[:1], operator.A(x[:1]), atol=1e-12)


def test_random_masks_stay_the_same_between_calls_and_whatever_global_seeds_do():
    operator = ops.RandomInpaint(0.5, seed=7)
    x = torch.ones(3, 2, 8, 8)
    first = operator.A(x)
    torch.manual_seed(123)
    np.random.seed(5)
    assert torch.equal(operator.A(x), first)
    assert torch.equal(operator.At(x), first)
    assert torch.equal(ops.RandomInpaint(0.5, seed=7).A(x), first)


def test_random_masks_differ_between_images_and_are_shared_by_channels():
    masked = ops.RandomInpaint(0.5).A(torch.ones(2, 3, 16, 16))
    assert not torch.equal(masked[0], masked[1])
    assert torch.equal(masked[:, 0], masked[:, 1]) and torch.equal(masked[:, 0], masked[:, 2])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_masks_of_all_ones_and_all_zeros_work(p):
    operator = ops.RandomInpaint(p)
    z = images(1)
    x = operator.prox(z, operator.A(images(1, seed=1)), 1e6)
    assert bool(torch.isfinite(x).all())
    assert torch.equal(x, z) == (p == 1.0)


def test_freeform_mask_takes_one_mask_per_image():
    mask = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    masked = ops.FreeformInpaint(mask).A(torch.ones(2, 3, 4, 4))
    assert float(masked[0].sum()) == 0 and float(masked[1].sum()) == 48


def test_subsampling_is_that_of_pnp_flow():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert ops.SuperResolution(2).A(x).flatten().tolist() == [0.0, 2.0, 8.0, 10.0]


@pytest.mark.parametrize("kernel", [ops.GaussianBlur(61, 3.0), ops.MotionBlur(31, 0.5), ops.MotionBlur(3, 1.0)])
def test_kernels_are_non_negative_and_sum_to_one(kernel):
    weights = kernel.kernel()
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12) and float(weights.min()) >= 0


def test_motion_blur_depends_on_its_seed_alone():
    assert torch.equal(ops.MotionBlur(15, 0.5, 1).kernel(), ops.MotionBlur(15, 0.5, 1).kernel())
    assert not torch.equal(ops.MotionBlur(15, 0.5, 1).kernel(), ops.MotionBlur(15, 0.5, 2).kernel())


def test_conjugate_gradient_keeps_images_apart():
    class Scale(LinearOperator):
        def A(self, x):
            return x * torch.linspace(0.1, 3, 256, dtype=x.dtype).view(1, 1, 16, 16)

    operator, right = Scale(), images(1, batch=3)

    def apply(x):
        return x + 5 * operator.At(operator.A(x))

    together = conjugate_gradient(apply, right, torch.zeros_like(right))
    alone = conjugate_gradient(apply, right[1:2], torch.zeros_like(right[1:2]))
    assert torch.allclose(together[1:2], alone, atol=1e-10)


NOISES = [ops.GaussianNoise(0.1), ops.LaplaceNoise(0.1), ops.PoissonNoise(500.0), ops.Quantization(32)]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: type(noise).__name__)
def test_noise_is_reproducible_small_and_unbiased(noise):
    y = torch.linspace(-1, 1, 40_000).view(1, 1, 200, 200)
    noisy = noise(y, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noisy, noise(y, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(noisy, y)
    assert abs(float((noisy - y).mean())) < 5e-3 and float((noisy - y).std()) < 0.2


def test_laplace_noise_has_the_scale_and_the_data_term_of_its_density():
    noisy = ops.LaplaceNoise(0.2)(torch.zeros(1, 1, 300, 300), generator=torch.Generator().manual_seed(0))
    assert float(noisy.abs().mean()) == pytest.approx(0.2, rel=0.02)  # E|n| = b
    residual = torch.tensor([[1.0, -2.0]])
    assert float(ops.LaplaceNoise(0.2).data_term(residual)) == pytest.approx(15.0)
    assert float(ops.GaussianNoise().data_term(residual)) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ops.BoxInpaint(-1), "size"),
        (lambda: ops.RandomInpaint(1.5), "`p`"),
        (lambda: ops.FreeformInpaint([[0.5, 1.0]]), "mask"),
        (lambda: ops.FreeformInpaint(torch.ones(4, 4)).A(torch.ones(1, 1, 8, 8)), r"\(1, 1, 4, 4\).*\(1, 1, 8, 8\)"),
        (lambda: ops.GaussianBlur(4, 1.0), "kernel_size"),
        (lambda: ops.GaussianBlur(5, 0.0), "sigma"),
        (lambda: ops.MotionBlur(5, 2.0), "intensity"),
        (lambda: ops.SuperResolution(0), "factor"),
        (lambda: ops.SuperResolution(2, "nearest"), "kind"),
        (lambda: ops.SuperResolution(3).A(torch.zeros(1, 1, 16, 16)), "factor"),
        (lambda: ops.Colorize().A(torch.zeros(1, 1, 4, 4)), "3 channels"),
        (lambda: ops.PhaseRetrieval(0.5), "oversample"),
        (lambda: ops.Compose([]), "operators"),
        (lambda: ops.operator_from_config({"_class_name": "Nope"}), "Nope"),
        (lambda: ops.GaussianNoise(-0.1), "noise_std"),
        (lambda: ops.LaplaceNoise(0.0), "scale"),
        (lambda: ops.PoissonNoise(-1.0), "scale"),
        (lambda: ops.Quantization(1), "levels"),
        (lambda: ops.Denoise().measure(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)), "preprocess"),
        (lambda: ops.Denoise().measure(torch.full((1, 1, 2, 2), 200.0)), "preprocess"),
        (lambda: ops.Denoise().measure(torch.zeros(1, 1, 2, 2), 0.1, ops.PoissonNoise()), "not both"),
        (lambda: ops.preprocess(torch.full((1, 3, 4, 4), 2.0)), r"\[0, 1\]"),
        (lambda: ops.preprocess([torch.zeros(1, 4, 4), torch.zeros(1, 5, 5)]), "share a shape"),
        (lambda: ops.preprocess(torch.zeros(4)), "pictures"),
    ],
)
def test_wrong_argument_is_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_preprocess_accepts_what_people_have():
    picture = Image.new("RGB", (40, 30), (255, 0, 127))
    array = np.array(picture)
    expected = torch.tensor([1.0, -1.0, 127 / 255 * 2 - 1]).view(1, 3, 1, 1)
    for given in (picture, array, torch.from_numpy(array).permute(2, 0, 1)):
        assert torch.allclose(ops.preprocess(given), expected.expand(1, 3, 30, 40), atol=1e-6)
    assert torch.allclose(ops.preprocess(array.astype("float32") / 255), expected.expand(1, 3, 30, 40), atol=1e-6)
    assert ops.preprocess([picture, picture], size=16).shape == (2, 3, 16, 16)
    assert ops.preprocess(Image.new("L", (1, 1), 255), size=16).shape == (1, 1, 16, 16)
