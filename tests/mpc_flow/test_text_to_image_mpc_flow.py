"""MPC-Flow on tiny FLUX, FLUX.2, SD3 and Z-Image pipelines: every regime, saving, memory saving, bf16."""

import pytest
import torch
from diffusers import FluxTransformer2DModel, TorchAoConfig
from tiny_pipelines import TINY_PIPELINES, tiny_flux, tiny_flux_with_text, tiny_sd3

from hf_pipelines import MPCFlowPipeline, operators
from hf_pipelines.flow_control import encode_then_free
from hf_pipelines.mpc_flow import RELEASE_SETTINGS, GramStyle, LuminanceTarget

FAMILIES = sorted(TINY_PIPELINES)
REGIMES = {
    "K=1": {},
    "K=1 churn": {"churn": 0.5},
    "K=1 release": {"control_weight": "release", "control_param": "d", "rho": 1e-3, "phi_scale": "mean"},
    "K=2": {"horizon_steps": 2},
    "dt": {"mode": "dt"},
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make(family, dtype=None):
    base, arguments = TINY_PIPELINES[family]()
    base.set_progress_bar_config(disable=True)
    if dtype is not None:
        base.to(dtype)
        arguments = {k: _cast(v, dtype) for k, v in arguments.items()}
    size = (arguments.pop("height"), arguments.pop("width"))
    return MPCFlowPipeline(base), arguments, size


def _cast(value, dtype):
    if isinstance(value, list):
        return [item.to(dtype) for item in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def measured(operator, size):
    truth = torch.linspace(-0.8, 0.8, size[1]).expand(2, 3, *size).contiguous()
    return operator.measure(truth, noise_std=0.01, generator=seeded(1))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_control_brings_the_image_closer_to_the_measurement(family, regime):
    pipe, arguments, size = make(family)
    operator = operators.SuperResolution(2, "average")
    y = measured(operator, size)
    settings = {"num_inference_steps": 3, "generator": seeded(), "output_type": "pt", "lr": 0.3, **arguments}
    out = pipe(y, operator, **{"lam": 50.0, **settings, **REGIMES[regime]})
    plain = pipe(y, operator, lam=0.0, **{**settings, "generator": seeded()})
    assert out.images.shape == (2, 3, *size)  # the size came from the measurement

    def rmse(images):
        return float((operator.A(images * 2 - 1) - y).square().mean().sqrt())

    assert rmse(out.images) < 0.97 * rmse(plain.images)
    # the pipeline reports the error of the unclamped decoding, which the clamped picture can only come near to
    assert float(out.data_rmse.square().mean().sqrt()) == pytest.approx(rmse(out.images), rel=0.15)
    assert (out.nbp > 0) == (regime in ("K=2", "dt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_lambda_zero_is_bit_equal_to_the_plain_pipeline(family):
    pipe, arguments, size = make(family)
    settings = {"num_inference_steps": 2, "output_type": "pt", **arguments}
    y = measured(operators.Denoise(), size)
    controlled = pipe(y, operators.Denoise(), lam=0.0, generator=seeded(), **settings).images
    plain = pipe.base(generator=seeded(), height=size[0], width=size[1], **settings).images
    assert torch.equal(controlled, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_are_guided_in_float32(family):
    pipe, arguments, size = make(family, torch.bfloat16)
    operator = operators.SuperResolution(2, "average")
    y = measured(operator, size)
    out = pipe(y, operator, num_inference_steps=2, generator=seeded(), output_type="pt", lr=0.3, **arguments)
    assert bool(torch.isfinite(out.images).all())
    assert pipe.base.vae.dtype == pipe.base.transformer.dtype == torch.bfloat16
    modules = (pipe.base.vae, pipe.base.transformer)
    assert all(parameter.grad is None for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("chunk", [1, 2])
def test_result_does_not_depend_on_the_decode_chunk(chunk):
    pipe, arguments, size = make("sd3")
    y = measured(operators.Denoise(), size)
    settings = {"num_inference_steps": 2, "output_type": "pt", "n_ctrl": 3, **arguments}
    images = [pipe(y, operators.Denoise(), generator=seeded(), decode_chunk=n, **settings).images for n in (chunk, 2)]
    assert torch.allclose(*images, atol=1e-5)


def test_memory_of_the_inner_loop_is_one_decoder_graph_whatever_the_batch(monkeypatch):
    pipe, arguments, size = make("sd3")
    graphs = []
    decode = pipe.base.vae.decode

    def watched(z, **kwargs):
        graphs.append(z.shape[0])
        return decode(z, **kwargs)

    monkeypatch.setattr(pipe.base.vae, "decode", watched)
    y = measured(operators.Denoise(), size)
    pipe(y, operators.Denoise(), num_inference_steps=1, n_ctrl=2, output_type="latent", **arguments)
    assert set(graphs) == {1}


def test_forced_prox_warns_on_a_latent_model():
    pipe, arguments, size = make("sd3")
    y = measured(operators.Denoise(), size)
    with pytest.warns(UserWarning, match="latent-space model"):
        pipe(y, operators.Denoise(), solver="prox", num_inference_steps=1, n_ctrl=1, **arguments)


@pytest.mark.parametrize("call", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offload_keeps_the_vae_on_the_device_and_reaches_the_base(call, monkeypatch):
    pipe, _, _ = make("flux")
    seen = {}

    def record(*args, **kwargs):
        seen.update(args=args, kwargs=kwargs, excluded=list(pipe.base._exclude_from_cpu_offload))

    monkeypatch.setattr(pipe.base, call, record)
    getattr(pipe, call)(device="cuda")
    assert seen == {"args": (), "kwargs": {"device": "cuda"}, "excluded": ["vae"]}
    assert "vae" not in type(pipe.base)._exclude_from_cpu_offload  # the class itself is untouched


def test_offload_on_a_machine_without_accelerator_is_the_librarys_error():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    pipe, _, _ = make("flux")
    with pytest.raises(RuntimeError, match="requires accelerator"):
        pipe.enable_model_cpu_offload()


def test_group_offload_runs_and_gives_the_same_images():
    images = []
    for offload in (False, True):
        pipe, arguments, size = make("flux")
        if offload:
            pipe.enable_group_offload(
                onload_device=torch.device("cpu"), offload_type="leaf_level", exclude_modules=["vae"]
            )
        y = measured(operators.Denoise(), size)
        out = pipe(y, operators.Denoise(), num_inference_steps=2, generator=seeded(), output_type="pt", **arguments)
        images.append(out.images)
    assert torch.allclose(*images, atol=1e-5)


def test_offloaded_models_under_real_hooks_give_the_same_images():
    from accelerate import cpu_offload_with_hook

    images = []
    for offload in (False, True):
        pipe, arguments, size = make("sd3")
        if offload:
            cpu_offload_with_hook(pipe.base.transformer, execution_device="cpu")
        y = measured(operators.Denoise(), size)
        out = pipe(
            y, operators.Denoise(), mode="dt", num_inference_steps=2, generator=seeded(), output_type="pt", **arguments
        )
        images.append(out.images)
    assert torch.allclose(*images, atol=1e-5)


@pytest.fixture
def quantized(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    base, arguments = tiny_flux()
    base.set_progress_bar_config(disable=True)
    base.transformer.save_pretrained(tmp_path)
    base.transformer = FluxTransformer2DModel.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), torch_dtype=torch.bfloat16
    )
    base.vae.to(torch.bfloat16)
    arguments = {k: _cast(v, torch.bfloat16) for k, v in arguments.items() if k not in ("height", "width")}
    return MPCFlowPipeline(base), arguments


def test_quantized_transformer_is_guided_without_a_warning_when_no_gradient_needs_it(quantized, recwarn):
    pipe, arguments = quantized
    operator = operators.SuperResolution(2)
    out = pipe(measured(operator, (16, 16)), operator, num_inference_steps=2, output_type="pt", **arguments)
    assert bool(torch.isfinite(out.images).all()) and out.nbp == 0
    assert not [w for w in recwarn if "quantized" in str(w.message)]


def test_quantized_transformer_warns_when_a_mode_differentiates_it(quantized):
    pipe, arguments = quantized
    operator = operators.SuperResolution(2)
    with pytest.warns(UserWarning, match="quantized denoiser"):
        pipe(measured(operator, (16, 16)), operator, mode="dt", n_ctrl=1, num_inference_steps=2, **arguments)


def test_gradient_checkpointing_of_the_transformer_changes_nothing():
    images = []
    for checkpointing in (False, True):
        pipe, arguments, size = make("flux")
        if checkpointing:
            pipe.base.transformer.enable_gradient_checkpointing()
        settings = {"mode": "dt", "n_ctrl": 2, "num_inference_steps": 2, "output_type": "pt", **arguments}
        y = measured(operators.Denoise(), size)
        images.append(pipe(y, operators.Denoise(), generator=seeded(), **settings).images)
    assert torch.allclose(*images, atol=1e-5)


@pytest.fixture(scope="module")
def vision_model():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=16, patch_size=4
    )
    return CLIPVisionModel(config)


def test_style_objective_lowers_the_gram_distance(vision_model):
    pipe, arguments, size = make("sd3")
    style = GramStyle(vision_model, torch.rand(1, 3, 16, 16, generator=seeded()))
    settings = {**RELEASE_SETTINGS["style"], **arguments, "num_inference_steps": 4, "output_type": "pt", "rho": 1e-3}
    sized = {"height": size[0], "width": size[1]}
    styled = pipe(objective=style, generator=seeded(), **settings, **sized)
    plain = pipe.base(
        generator=seeded(), num_inference_steps=4, output_type="pt", **{**arguments, **sized, "guidance_scale": 4.0}
    )
    assert float(style(styled.images).mean()) < float(style(plain.images).mean())
    assert styled.nbp == 0


def test_luminance_objective_pulls_towards_the_map():
    pipe, arguments, size = make("sd3")
    target = LuminanceTarget(torch.linspace(0, 1, 16).expand(1, 1, 16, 16))
    settings = {**RELEASE_SETTINGS["luminance"], **arguments, "num_inference_steps": 4, "output_type": "pt"}
    sized = {"height": size[0], "width": size[1]}
    lit = pipe(objective=target, generator=seeded(), **settings, **sized).images
    plain = pipe.base(
        generator=seeded(), num_inference_steps=4, output_type="pt", **{**arguments, **sized, "guidance_scale": 4.0}
    )
    assert float(target(lit).mean()) < 0.8 * float(target(plain.images).mean())


def test_text_to_image_objectives_name_wrong_shapes(vision_model):
    with pytest.raises(ValueError, match=r"\(1, 3, H, W\)"):
        GramStyle(vision_model, torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match="block"):
        GramStyle(vision_model, torch.zeros(1, 3, 8, 8), block=9)
    with pytest.raises(ValueError, match=r"\(B, 1, H, W\)"):
        LuminanceTarget(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="target is"):
        LuminanceTarget(torch.zeros(1, 1, 8, 8))(torch.zeros(1, 3, 16, 16))


def test_batch_size_follows_the_measurement_when_a_prompt_is_text():
    base, _ = tiny_sd3()
    pipe = MPCFlowPipeline(base)
    y = torch.zeros(3, 3, 8, 8)
    arguments = pipe._base_arguments({"prompt": "a house"}, y, operators.SuperResolution(2))
    assert arguments == {"prompt": "a house", "height": 16, "width": 16, "num_images_per_prompt": 3}


@pytest.fixture
def flux_with_text():
    return tiny_flux_with_text()


def test_encode_then_free_gives_the_same_images_without_the_encoders(flux_with_text):
    operator = operators.SuperResolution(2)
    y = measured(operator, (16, 16))
    pipe = MPCFlowPipeline(flux_with_text)
    settings = {"num_inference_steps": 2, "output_type": "pt", "n_ctrl": 2, "true_cfg_scale": 2.0}
    texts = {"prompt": "a red house", "negative_prompt": "blurry", "max_sequence_length": 8}
    expected = pipe(y, operator, generator=seeded(), **texts, **settings).images
    prompt = encode_then_free(flux_with_text, "a red house", "blurry", num_images_per_prompt=2, max_sequence_length=8)
    assert flux_with_text.text_encoder is None and flux_with_text.text_encoder_2 is None
    assert torch.allclose(pipe(y, operator, generator=seeded(), **prompt, **settings).images, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="no text encoder"):
        encode_then_free(flux_with_text, "a red house")


def test_encode_then_free_refuses_unknown_pipelines_and_offloaded_ones(flux_with_text, digits_pipe):
    with pytest.raises(NotImplementedError, match="SmallFlowPipeline"):
        encode_then_free(digits_pipe, "a house")
    flux_with_text._all_hooks = [object()]
    with pytest.raises(RuntimeError, match="before"):
        encode_then_free(flux_with_text, "a house")


def test_whole_text_to_image_pipeline_round_trips_inside_the_wrapper(flux_with_text, tmp_path):
    operator = operators.SuperResolution(2)
    pipe = MPCFlowPipeline(flux_with_text, operator)
    y = measured(operator, (16, 16))
    settings = {"num_inference_steps": 2, "output_type": "pt", "n_ctrl": 2, "prompt": "a house"}
    expected = pipe(y, generator=seeded(), max_sequence_length=8, **settings).images
    pipe.save_pretrained(tmp_path)
    loaded = MPCFlowPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    loaded.base.tokenizer_max_length = 8
    assert torch.equal(loaded(y, generator=seeded(), max_sequence_length=8, **settings).images, expected)
    wrapped = MPCFlowPipeline.from_pretrained(tmp_path / "base", operator=operator)
    assert type(wrapped.base).__name__ == "FluxPipeline" and wrapped.operator is operator
