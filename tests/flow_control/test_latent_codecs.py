"""Latents → images (flow_control_core §3): the same picture as the pipeline's own decoding, and its gradient."""

import pytest
import torch
from tiny_pipelines import TINY_PIPELINES, tiny_flux, tiny_qwen, tiny_sd3

from hf_pipelines.flow_control import attach_controller, get_latent_codec, register_latent_codec
from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController
from hf_pipelines.flow_control.latent_codecs import LatentCodec

ALL_PIPELINES = {**TINY_PIPELINES, "qwen": tiny_qwen}


class LastEndpoint(FlowController):
    """Decodes the endpoint of the last step, which is the pipeline's result."""

    requires_decode = True

    def control(self, state):
        if state.step == state.num_steps - 1:
            with torch.no_grad():
                self.images = state.decode(state.endpoint)
        return FlowControl(state.v, state.x)


@pytest.mark.parametrize("family", sorted(ALL_PIPELINES))
def test_codec_equals_the_decoding_of_the_pipeline(family):
    pipe, arguments = ALL_PIPELINES[family]()
    pipe.set_progress_bar_config(disable=True)
    controller = LastEndpoint()
    with attach_controller(pipe, controller):
        images = pipe(**arguments, num_inference_steps=2, output_type="pt").images
    assert torch.allclose((controller.images / 2 + 0.5).clamp(0, 1), images, atol=2e-5)


@pytest.mark.parametrize("family", sorted(ALL_PIPELINES))
def test_codec_places_tokens_right_when_the_picture_is_not_square(family):
    pipe, arguments = ALL_PIPELINES[family]()
    pipe.set_progress_bar_config(disable=True)
    controller = LastEndpoint()
    with attach_controller(pipe, controller):
        images = pipe(**{**arguments, "height": 16, "width": 32}, num_inference_steps=1, output_type="pt").images
    assert images.shape[-2:] == (16, 32)
    assert torch.allclose((controller.images / 2 + 0.5).clamp(0, 1), images, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_decoding_and_its_gradient_do_not_depend_on_the_chunk_size(chunk):
    pipe, _ = tiny_sd3()
    z = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    results = []
    for size in (chunk, 3):
        codec = get_latent_codec(pipe, decode_chunk=size)
        leaf = z.clone().requires_grad_(True)
        images = codec(leaf)
        results.append((images.detach(), torch.autograd.grad(images.square().sum(), [leaf])[0]))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


def test_shift_factor_is_not_dropped():
    pipe, _ = tiny_sd3()
    z = torch.zeros(1, 4, 8, 8)
    with torch.no_grad():
        expected = pipe.vae.decode(z + 0.0609).sample
        assert torch.allclose(get_latent_codec(pipe)(z), expected, atol=1e-6)
        pipe.vae.register_to_config(shift_factor=None)
        assert torch.allclose(get_latent_codec(pipe)(z), pipe.vae.decode(z).sample, atol=1e-6)


def test_images_are_not_clamped():
    pipe, _ = tiny_sd3()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias.fill_(5.0)
        assert float(get_latent_codec(pipe)(torch.zeros(1, 4, 8, 8)).min()) > 1


def test_bf16_vae_decodes_in_float32_through_one_cached_copy():
    pipe, _ = tiny_sd3()
    reference = get_latent_codec(pipe)(torch.ones(1, 4, 8, 8)).detach()
    pipe.vae.to(torch.bfloat16)
    codec = get_latent_codec(pipe)
    images = codec(torch.ones(1, 4, 8, 8)).detach()
    assert images.dtype == torch.float32
    assert torch.allclose(images, reference, atol=0.05)  # weights were rounded to bf16 once
    assert codec._vae() is codec._vae() and pipe.vae.dtype == torch.bfloat16 and pipe.vae.encoder is not None


def test_packed_latents_name_both_sizes_when_the_grid_disagrees():
    pipe, _ = tiny_flux()
    codec = get_latent_codec(pipe)
    with pytest.raises(ValueError, match="grid of the packed latents is unknown"):
        codec(torch.zeros(1, 64, 16))
    codec.grid = (4, 4)
    with pytest.raises(ValueError, match="64 tokens, the grid is 4×4"):
        codec(torch.zeros(1, 64, 16))


def test_pixel_space_pipeline_has_the_identity(digits_pipe):
    codec = get_latent_codec(digits_pipe)
    z = torch.randn(2, 1, 16, 16)
    assert codec.is_identity and codec(z) is z


def test_unknown_pipeline_with_a_vae_asks_to_register_a_codec():
    class FancyPipeline:
        vae = object()

    with pytest.raises(NotImplementedError, match="register_latent_codec"):
        get_latent_codec(FancyPipeline())

    @register_latent_codec("FancyPipeline")
    class FancyCodec(LatentCodec):
        pass

    assert isinstance(get_latent_codec(FancyPipeline()), FancyCodec)


def test_decode_chunk_must_be_positive(digits_pipe):
    with pytest.raises(ValueError, match="decode_chunk"):
        get_latent_codec(digits_pipe, decode_chunk=0)
