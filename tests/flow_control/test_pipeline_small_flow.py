"""Sampling with `SmallFlowPipeline` (flow_control_core §5)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from datasets_scripts import load_digit_tensors
from hf_models import GaussianMixtureFlowModel
from hf_pipelines import SmallFlowPipeline, hub
from hf_pipelines.flow_control import load_flow_pipeline
from hf_pipelines.flow_control.train_small_flow import evaluate

STEPS = 4
SHAPE = (1, 8, 8)
# one network call on a batch and on its parts differ by the order of float32 sums, values are of the order of 1
BATCH_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pipe():
    """The shipped 8×8 flow, quiet."""
    pipe = SmallFlowPipeline.from_pretrained(hub.repo("digits-8x8"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def mixture():
    """An exact mixture of two images of constant grey, ±0.5, in the pipeline."""
    model = GaussianMixtureFlowModel(4, [[0.5] * 4, [-0.5] * 4], [0.1, 0.1], sample_shape=(1, 2, 2))
    pipe = SmallFlowPipeline(model, FlowMatchEulerDiscreteScheduler(shift=1.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    """The 8×8 repo with its code, as on the Hub."""
    return hub.export("digits-8x8", tmp_path_factory.mktemp("export") / "digits-8x8")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=seeded(seed))


def sample(pipe, *args, **kwargs) -> torch.Tensor:
    return pipe(*args, **{"num_inference_steps": STEPS, "output_type": "latent", **kwargs}).images


def euler(velocity, x: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """The sampler by hand on σ = 1, 1 − 1/N, …, 1/N, 0."""
    for step in range(steps):
        x = x - velocity(x, 1 - step / steps) / steps
    return x


# ---------------------------------------------------------------------------------------------------------- seeds


def test_images_are_bit_equal_when_the_seed_is_the_same(pipe):
    first = sample(pipe, [3, 8], generator=seeded(5))
    assert torch.equal(first, sample(pipe, [3, 8], generator=seeded(5)))
    assert not torch.equal(first, sample(pipe, [3, 8], generator=seeded(6)))


def test_each_image_is_independent_of_the_batch_when_generators_are_a_list(pipe):
    together = sample(pipe, [3, 8, 1], generator=[seeded(10), seeded(11), seeded(12)])
    for index, label in enumerate([3, 8, 1]):
        alone = sample(pipe, label, generator=[seeded(10 + index)])
        assert torch.allclose(together[index : index + 1], alone, atol=BATCH_TOLERANCE)


def test_starting_noise_is_the_given_one_when_latents_are_given(pipe):
    given = noise(3)
    expected = euler(lambda x, s: pipe.model(x, s).sample, given)
    assert torch.allclose(sample(pipe, latents=given), expected, atol=1e-6)
    assert torch.equal(given, noise(3))  # the caller's tensor is not written to


def test_given_latents_equal_the_drawn_ones_when_the_generator_draws_the_same(pipe):
    assert torch.equal(
        sample(pipe, num_images=2, latents=noise(2, 4)), sample(pipe, num_images=2, generator=seeded(4))
    )


# ---------------------------------------------------------------------------------------------------------- outputs


def test_pil_images_are_grey_when_nothing_is_asked(pipe):
    images = pipe(num_images=2, num_inference_steps=STEPS).images
    assert [(image.size, image.mode) for image in images] == [((8, 8), "L")] * 2


def test_arrays_lie_in_the_unit_range_when_output_type_is_np_or_pt(pipe):
    latents = sample(pipe, num_images=3, generator=seeded())
    arrays = sample(pipe, num_images=3, generator=seeded(), output_type="np")
    tensors = sample(pipe, num_images=3, generator=seeded(), output_type="pt")
    assert arrays.shape == (3, 8, 8, 1) and isinstance(arrays, np.ndarray)
    assert tensors.shape == (3, 1, 8, 8) and isinstance(tensors, torch.Tensor)
    expected = (latents / 2 + 0.5).clamp(0, 1)  # [−1, 1] → [0, 1]
    assert torch.equal(tensors, expected)
    assert np.array_equal(arrays, expected.permute(0, 2, 3, 1).numpy())
    assert tensors.min() == 0 and tensors.max() <= 1


def test_latents_are_not_clamped_when_output_type_is_latent(pipe):
    latents = sample(pipe, num_images=8, generator=seeded(), num_inference_steps=10)
    assert latents.shape == (8, *SHAPE)
    assert latents.abs().max() > 1


def test_pil_image_is_the_rounded_array_when_the_seed_is_the_same(pipe):
    image = pipe(num_images=1, num_inference_steps=STEPS, generator=seeded()).images[0]
    array = sample(pipe, num_images=1, generator=seeded(), output_type="np")[0, :, :, 0]
    assert np.array_equal(np.asarray(image), (array * 255).round().astype("uint8"))


def test_result_is_a_tuple_when_return_dict_is_false(pipe):
    result = pipe(num_images=2, num_inference_steps=STEPS, generator=seeded(), output_type="latent", return_dict=False)
    assert isinstance(result, tuple) and len(result) == 1
    assert torch.equal(result[0], sample(pipe, num_images=2, generator=seeded()))


# ---------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("labels", [7, [7], (7,), torch.tensor([7]), torch.tensor(7), np.int64(7), np.array([7])])
def test_one_label_serves_all_images_when_given_as_any_kind(pipe, labels):
    expected = sample(pipe, [7, 7, 7], latents=noise(3))
    assert torch.equal(sample(pipe, labels, num_images=3, latents=noise(3)), expected)


def test_each_image_follows_its_label_when_labels_are_a_list(pipe):
    mixed = sample(pipe, [2, 9], latents=noise(2))
    for index, label in enumerate([2, 9]):
        alone = sample(pipe, label, latents=noise(2)[index : index + 1])
        assert torch.allclose(mixed[index : index + 1], alone, atol=BATCH_TOLERANCE)
    assert (mixed - sample(pipe, latents=noise(2))).abs().max() > 0.1


def test_null_label_equals_no_label_when_given(pipe):
    assert torch.equal(sample(pipe, 10, latents=noise(2)), sample(pipe, latents=noise(2)))


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 8),
        ({"class_labels": 3}, 1),
        ({"class_labels": [3]}, 1),
        ({"class_labels": [3, 4, 5]}, 3),
        ({"latents": noise(2)}, 2),
        ({"latents": noise(2), "class_labels": 3}, 2),
        ({"class_labels": 3, "num_images": 5}, 5),
    ],
)
def test_number_of_images_follows_labels_and_latents_when_not_given(pipe, arguments, count):
    assert len(sample(pipe, **arguments)) == count


# ---------------------------------------------------------------------------------------------------------- guidance


def test_only_the_condition_counts_when_guidance_scale_is_one(pipe):
    labels = torch.tensor([1, 6])
    expected = euler(lambda x, s: pipe.model(x, s, labels).sample, noise(2))
    assert torch.allclose(sample(pipe, labels, latents=noise(2)), expected, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 4])
def test_guidance_equals_the_two_call_formula_when_scale_is_not_one(pipe, scale):
    labels = torch.tensor([1, 6])

    def velocity(x, sigma):
        unconditional, conditional = pipe.model(x, sigma).sample, pipe.model(x, sigma, labels).sample
        return unconditional + scale * (conditional - unconditional)

    guided = sample(pipe, labels, latents=noise(2), guidance_scale=scale)
    assert torch.allclose(guided, euler(velocity, noise(2)), atol=5e-5)
    assert pipe.guidance_scale == scale


# ---------------------------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("steps", [1, 4, 30])
def test_sigmas_run_in_equal_steps_to_zero_when_sampling(pipe, steps):
    seen = []
    hook = pipe.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(float(kwargs["timestep"])), with_kwargs=True
    )
    try:
        sample(pipe, num_images=1, num_inference_steps=steps)
    finally:
        hook.remove()
    assert seen == pytest.approx([1 - k / steps for k in range(steps)], abs=1e-6)
    assert pipe.scheduler.sigmas.tolist() == pytest.approx([1 - k / steps for k in range(steps + 1)], abs=1e-6)
    default = FlowMatchEulerDiscreteScheduler(shift=1.0)
    default.set_timesteps(steps)
    if steps > 1:  # its own grid ends at 0.001 and then jumps to 0
        assert default.sigmas[-2] == pytest.approx(0.001)


def test_callback_comes_once_per_step_when_given(pipe):
    seen = []

    def callback(pipeline, step, timestep, tensors):
        seen.append((pipeline, step, float(timestep), tensors["latents"].clone()))
        return tensors

    final = sample(pipe, num_images=2, generator=seeded(), callback_on_step_end=callback)
    assert [step for _, step, _, _ in seen] == [0, 1, 2, 3]
    assert [timestep for _, _, timestep, _ in seen] == pytest.approx([1000, 750, 500, 250])
    assert all(pipeline is pipe for pipeline, _, _, _ in seen)
    assert torch.equal(seen[-1][3], final)
    assert torch.equal(final, sample(pipe, num_images=2, generator=seeded()))


def test_latents_are_replaced_when_the_callback_returns_others(pipe):
    def callback(pipeline, step, timestep, tensors):
        return {"latents": torch.full_like(tensors["latents"], 0.25) if step == STEPS - 1 else tensors["latents"]}

    final = sample(pipe, num_images=2, callback_on_step_end=callback)
    assert torch.equal(final, torch.full((2, *SHAPE), 0.25))


def test_callback_gets_nothing_when_it_asks_for_nothing(pipe):
    seen = []

    def callback(pipeline, step, timestep, tensors):
        seen.append(dict(tensors))
        return tensors

    plain = sample(pipe, num_images=1, latents=noise(1))
    quiet = sample(
        pipe,
        num_images=1,
        latents=noise(1),
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=[],
    )
    assert seen == [{}] * STEPS
    assert torch.equal(plain, quiet)


def test_progress_bar_is_shown_when_not_disabled(capsys):
    pipe = SmallFlowPipeline.from_pretrained(hub.repo("digits-8x8"))
    capsys.readouterr()
    pipe(num_images=1, num_inference_steps=3)
    assert "3/3" in capsys.readouterr().err
    pipe.set_progress_bar_config(disable=True)
    pipe(num_images=1, num_inference_steps=3)
    assert capsys.readouterr().err == ""


def test_images_are_those_of_the_mixture_when_the_model_is_exact(mixture):
    images = sample(mixture, num_images=64, generator=seeded(), num_inference_steps=50)
    signs = images.mean((1, 2, 3)).sign()
    distance = (images - 0.5 * signs.view(-1, 1, 1, 1)).flatten(1).square().mean(1).sqrt()
    # a pixel of N(±0.5, 0.1²) lies 0.1 from its mean in root mean square; 0.03 covers 64 samples and 50 Euler steps
    assert distance.mean() == pytest.approx(0.1, abs=0.03)
    assert 20 <= int((signs > 0).sum()) <= 44  # 64 coins: 32 ± 3 standard deviations
    assert mixture(num_images=1, num_inference_steps=2).images[0].size == (2, 2)


def test_result_is_near_float32_when_the_pipeline_is_bf16(pipe):
    half = SmallFlowPipeline.from_pretrained(hub.repo("digits-8x8"), dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    assert half.model.dtype == torch.bfloat16
    images = sample(half, 3, latents=noise(2))
    assert images.dtype == torch.bfloat16
    # bf16 has 8 bits: 2⁻⁸ = 0.004 per operation; four steps of a three-block network stay below 20 of them
    assert (images.float() - sample(pipe, 3, latents=noise(2))).abs().max() < 20 * 2**-8
    assert half(num_images=1, num_inference_steps=2, output_type="np").images.dtype == np.float32


# ---------------------------------------------------------------------------------------------------------- loading


def test_images_are_bit_equal_when_saved_and_loaded(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    again = SmallFlowPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    arguments = {"latents": noise(2), "guidance_scale": 2.0}
    assert torch.equal(sample(again, [4, 5], **arguments), sample(pipe, [4, 5], **arguments))
    assert [path.suffix for path in (tmp_path / "model").iterdir() if path.name != "config.json"] == [".safetensors"]


def test_mixture_is_bit_equal_when_saved_and_loaded(mixture, tmp_path):
    mixture.save_pretrained(tmp_path)
    again = SmallFlowPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(
        sample(again, num_images=3, generator=seeded()), sample(mixture, num_images=3, generator=seeded())
    )


@pytest.mark.parametrize("load", [SmallFlowPipeline.from_pretrained, load_flow_pipeline])
def test_export_loads_with_our_classes_when_its_code_is_not_trusted(pipe, export, load):
    assert isinstance(json.loads((export / "model_index.json").read_text())["_class_name"], list)
    loaded = load(str(export))
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is SmallFlowPipeline
    assert type(loaded.model).__module__ == "hf_models.small_flow.modeling_small_flow"  # not the repo's copy
    assert torch.equal(sample(loaded, 3, latents=noise(2)), sample(pipe, 3, latents=noise(2)))


def test_dtype_is_kept_when_an_export_is_loaded(export):
    assert SmallFlowPipeline.from_pretrained(export, dtype=torch.float16).model.dtype == torch.float16


def test_components_are_the_given_ones_when_an_export_is_loaded(export, pipe):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    loaded = SmallFlowPipeline.from_pretrained(export, model=pipe.model, scheduler=scheduler)
    assert loaded.model is pipe.model and loaded.scheduler is scheduler


def test_model_is_named_when_an_export_holds_an_unknown_one(export, tmp_path):
    shutil.copytree(export, tmp_path / "repo")
    index = tmp_path / "repo/model_index.json"
    index.write_text(index.read_text().replace("SmallFlowModel", "OtherModel"))
    with pytest.raises(ValueError, match=r"`model` of .*repo is a OtherModel; known: SmallFlowModel, Gaussian"):
        SmallFlowPipeline.from_pretrained(tmp_path / "repo")


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_images": 0}, "`num_images` must be a positive integer, got 0"),
        ({"num_images": -2}, "`num_images`.*-2"),
        ({"num_images": 1.5}, "`num_images`.*1.5"),
        ({"num_inference_steps": 0}, "`num_inference_steps` must be a positive integer, got 0"),
        ({"num_inference_steps": 2.0}, "`num_inference_steps`.*2.0"),
        ({"latents": torch.zeros(2, 1, 16, 16)}, r"`latents` must have shape \(2, 1, 8, 8\), got \(2, 1, 16, 16\)"),
        ({"latents": torch.zeros(2, *SHAPE), "num_images": 3}, r"`latents` must have shape \(3, 1, 8, 8\)"),
        ({"latents": np.zeros((2, *SHAPE))}, "`latents`.*ndarray"),
        ({"class_labels": [3, 11]}, r"`class_labels` must lie in 0\.\.10 .*got \[11\]"),
        ({"class_labels": -1}, r"`class_labels`.*got \[-1\]"),
        ({"class_labels": [1, 2], "num_images": 3}, "`class_labels` holds 2 labels for 3 images"),
        ({"class_labels": [1, 2], "latents": torch.zeros(3, *SHAPE)}, "`latents` must have shape"),
        ({"class_labels": []}, "`class_labels` holds 0 labels"),
        ({"class_labels": [1.5]}, "`class_labels` must be integers"),
        ({"class_labels": "3"}, "`class_labels` must be integers, got '3'"),
        ({"class_labels": torch.zeros(2, 2, dtype=torch.long)}, "`class_labels` must be integers of shape"),
        ({"guidance_scale": 2.0}, "`guidance_scale` = 2.0 needs `class_labels`"),
        ({"guidance_scale": float("nan"), "class_labels": 1}, "`guidance_scale` must be a finite number"),
        ({"guidance_scale": "2", "class_labels": 1}, "`guidance_scale` must be a finite number"),
        ({"output_type": "jpg"}, "`output_type` must be one of .*got 'jpg'"),
        ({"generator": [seeded(), seeded()], "num_images": 3}, r"`generator` must hold .* \(3\), got 2"),
        ({"generator": [seeded(), seeded()], "num_images": 1}, r"`generator` must hold .* \(1\), got 2"),
        (
            {"callback_on_step_end": print, "callback_on_step_end_tensor_inputs": ["latents", "velocity"]},
            r"`callback_on_step_end_tensor_inputs`.*\['velocity'\]",
        ),
    ],
)
def test_argument_is_named_when_it_is_wrong(pipe, arguments, match):
    with pytest.raises(ValueError, match=match):
        pipe(**arguments)


def test_argument_is_named_when_the_model_has_no_classes(mixture):
    with pytest.raises(ValueError, match="`class_labels` need a class-conditional model, not GaussianMixture"):
        mixture(3)
    with pytest.raises(ValueError, match="`guidance_scale` = 2 needs"):
        mixture(guidance_scale=2)


@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_argument_is_named_when_samples_are_no_images(output_type):
    pipe = SmallFlowPipeline(GaussianMixtureFlowModel(), FlowMatchEulerDiscreteScheduler(shift=1.0))
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(ValueError, match=r"`output_type` must be 'pt' or 'latent' for samples of shape \(2,\)"):
        pipe(output_type=output_type)
    assert sample(pipe, num_images=3).shape == (3, 2)


# ---------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("size", "bar", "ratio"), [(16, 0.24, 1.15), (8, 0.42, 1.2)])
def test_shipped_weights_meet_the_acceptance_bars_when_evaluated(size, bar, ratio):
    # flow_control_core §5: loss on the 200 held-out images, and its ratio to the training loss (no memorisation)
    model = SmallFlowPipeline.from_pretrained(hub.repo(f"digits-{size}x{size}")).model
    test, train = (evaluate(model, *load_digit_tensors(size, split)) for split in ("test", "train"))
    assert test["conditional"] <= bar
    assert test["conditional"] / train["conditional"] <= ratio
    assert test["conditional"] < test["unconditional"]  # the labels are used
