"""FlowDiversityPipeline: usage, seeds, saving, any text-to-image base, encoders, bad input."""

import pytest
import torch
from tiny_pipelines import TINY_PIPELINES

from hf_models import ImageFeatureEncoder
from hf_pipelines import FlowDiversityPipeline, hub
from hf_pipelines.flow_control.metrics import vendi_score

REPO = "flow-diversity-digits-8x8"
DIGITS = {"class_labels": [3] * 8, "guidance_scale": 3.0, "output_type": "pt"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipe():
    pipe = FlowDiversityPipeline.from_pretrained(hub.repo(REPO))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_set_is_more_diverse_than_the_plain_one(pipe):
    scores = []
    for diversity in (False, None):
        images = torch.cat([pipe(**DIGITS, generator=seeded(s), diversity=diversity).images for s in range(4)])
        scores.append(sum(vendi_score(rows) for rows in (images - images.mean(0)).flatten(1).split(8)))
    assert scores[1] > 1.02 * scores[0]


def test_diversity_false_and_strength_zero_are_the_base_bit_for_bit(pipe):
    plain = pipe.base(**DIGITS, generator=seeded()).images
    assert torch.equal(pipe(**DIGITS, generator=seeded(), diversity=False).images, plain)
    assert torch.equal(pipe(**DIGITS, generator=seeded(), diversity={"gamma0": 0.0, "beta0": 0.0}).images, plain)


def test_generator_is_not_consumed_by_the_controller(pipe):
    one, other = seeded(), seeded()
    pipe(**DIGITS, generator=one)
    pipe.base(**DIGITS, generator=other)
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))


def test_same_seed_gives_the_same_set(pipe):
    first, second = (pipe(**DIGITS, generator=seeded()) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert first.features.shape == (8, 32) and first.nfe == 30
    assert first.log[-1]["log_volume"] > first.log[1]["log_volume"]


def test_settings_are_saved_with_the_pipeline(pipe, tmp_path):
    stronger = FlowDiversityPipeline(pipe.base, pipe.feature_encoder, gamma0=6.0, gate=(0.5, 0.9))
    expected = stronger(**DIGITS, generator=seeded()).images
    stronger.save_pretrained(tmp_path)
    loaded = FlowDiversityPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert (loaded.config.gamma0, tuple(loaded.config.gate)) == (6.0, (0.5, 0.9))
    assert torch.equal(loaded(**DIGITS, generator=seeded()).images, expected)


def test_classes_in_one_batch_are_groups_of_their_own(pipe):
    latents = torch.randn(8, 1, 8, 8, generator=seeded())
    settings = {"guidance_scale": 3.0, "output_type": "pt", "diversity": {"beta0": 0.0}}
    both = pipe(class_labels=[1] * 4 + [7] * 4, latents=latents, **settings).images
    alone = pipe(class_labels=[1] * 4, latents=latents[:4], **settings).images
    assert torch.allclose(both[:4], alone, atol=1e-4)


@pytest.mark.parametrize("labels", [[1, 7, 1, 7], [1, 1, 1, 7]])
def test_mixed_classes_ask_for_a_group_size(pipe, labels):
    with pytest.raises(ValueError, match="group_size"):
        pipe(class_labels=labels)


@pytest.mark.parametrize("value", [True, 3, "strong"])
def test_diversity_of_a_wrong_type_is_named(pipe, value):
    with pytest.raises(TypeError, match="`diversity`"):
        pipe(**DIGITS, diversity=value)


def test_setting_out_of_range_is_an_error_when_the_pipeline_is_built(pipe):
    with pytest.raises(ValueError, match="`gate`"):
        FlowDiversityPipeline(pipe.base, pipe.feature_encoder, gate=(0.9, 0.1))


def test_pipeline_without_an_encoder_spreads_latents_and_says_so(pipe):
    bare = FlowDiversityPipeline(pipe.base)
    with pytest.warns(UserWarning, match="texture, not semantics"):
        images = bare(**DIGITS, generator=seeded()).images
    assert not torch.equal(images, pipe.base(**DIGITS, generator=seeded()).images)


def test_single_image_warns_and_is_plain(pipe):
    arguments = {"class_labels": 3, "num_images": 1, "output_type": "pt"}
    with pytest.warns(UserWarning, match="at least two samples"):
        image = pipe(**arguments, generator=seeded()).images
    assert torch.equal(image, pipe.base(**arguments, generator=seeded()).images)


@pytest.fixture(scope="module")
def towers():
    from transformers import (
        CLIPVisionConfig,
        CLIPVisionModelWithProjection,
        Dinov2Config,
        Dinov2Model,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    return {
        "clip": CLIPVisionModelWithProjection(CLIPVisionConfig(intermediate_size=32, projection_dim=8, **small)),
        "siglip": SiglipVisionModel(SiglipVisionConfig(intermediate_size=32, **small)),
        "dinov2": Dinov2Model(Dinov2Config(**small)),
    }


@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2"])
def test_encoder_wraps_a_vision_tower_and_saves(towers, name, tmp_path):
    encoder = ImageFeatureEncoder.from_transformers(towers[name])
    images = torch.rand(2, 3, 32, 32, generator=seeded()) * 2 - 1
    features = encoder(images)
    assert features.shape == (2, 8 if name == "clip" else 16)
    encoder.save_pretrained(tmp_path)
    assert torch.equal(ImageFeatureEncoder.from_pretrained(tmp_path).eval()(images), features)
    assert torch.allclose(encoder(images[:, :1]), encoder(images[:, :1].expand(-1, 3, -1, -1)))
    leaf = images.requires_grad_(True)
    assert float(torch.autograd.grad(encoder(leaf).sum(), [leaf])[0].abs().sum()) > 0


def test_encoder_loads_a_tower_from_a_folder(towers, tmp_path):
    towers["clip"].save_pretrained(tmp_path)
    encoder = ImageFeatureEncoder.from_transformers(str(tmp_path))
    assert type(encoder.vision_tower).__name__ == "CLIPVisionModelWithProjection"


def test_encoder_names_what_it_cannot_use():
    with pytest.raises(ValueError, match="`tower`"):
        ImageFeatureEncoder("ResNet")
    with pytest.raises(ValueError, match="channels"):
        ImageFeatureEncoder()(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="type None"):
        ImageFeatureEncoder.from_transformers(torch.nn.Module.__new__(_NoConfig))


class _NoConfig(torch.nn.Module):
    config = None


@pytest.mark.parametrize("family", sorted(TINY_PIPELINES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_text_to_image_pipeline_is_controlled(towers, family, dtype):
    base, arguments = TINY_PIPELINES[family]()
    base.set_progress_bar_config(disable=True)
    base.to(dtype)

    def cast(value):
        if isinstance(value, list):
            return [cast(item) for item in value]
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    arguments = {name: cast(value) for name, value in arguments.items()}
    pipe = FlowDiversityPipeline(base, ImageFeatureEncoder.from_transformers(towers["clip"]))
    settings = {**arguments, "num_inference_steps": 4, "output_type": "pt"}
    plain = base(**settings, generator=seeded()).images
    assert torch.equal(pipe(**settings, generator=seeded(), diversity=False).images, plain)
    first, second = (pipe(**settings, generator=seeded()).images for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(first, plain)
    assert bool(torch.isfinite(first).all())
    assert all(p.grad is None for module in (base.vae, pipe.feature_encoder) for p in module.parameters())


@pytest.mark.parametrize("offload", ["group", "hooks"])
def test_offloaded_pipeline_gives_the_same_images(towers, offload):
    from accelerate import cpu_offload_with_hook

    images = []
    for offloaded in (False, True):
        base, arguments = TINY_PIPELINES["flux"]()
        pipe = FlowDiversityPipeline(base, ImageFeatureEncoder.from_transformers(towers["clip"]))
        pipe.set_progress_bar_config(disable=True)
        if offloaded and offload == "group":
            device = torch.device("cpu")
            pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", exclude_modules=["vae"])
        elif offloaded:
            cpu_offload_with_hook(base.transformer, execution_device="cpu")
        images.append(pipe(**arguments, num_inference_steps=3, generator=seeded(), output_type="pt").images)
    assert torch.allclose(*images, atol=1e-5)


def test_several_prompts_are_groups_of_their_images():
    base, _ = TINY_PIPELINES["sd3"]()
    pipe = FlowDiversityPipeline(base)
    assert pipe._group_size({"prompt": ["a", "b"], "num_images_per_prompt": 4}) == 4
    assert pipe._group_size({"prompt": "a", "num_images_per_prompt": 4}) is None
