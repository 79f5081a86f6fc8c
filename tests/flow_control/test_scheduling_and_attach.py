"""The scheduler hook and `attach_controller` (flow_control_core §2)."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from tiny_pipelines import TINY_PIPELINES, tiny_flux, tiny_sd3

from hf_pipelines import ControlledFlowMatchEulerScheduler, attach_controller
from hf_pipelines.flow_control import FlowControl, FlowController, run_controller


class Push(FlowController):
    """Adds a constant control and remembers what it saw."""

    def __init__(self, control=0.0, noise=None):
        super().__init__()
        self.constant, self.noise, self.states = control, noise, []

    def reset(self, num_steps, batch, device):
        super().reset(num_steps, batch, device)
        self.states = []

    def control(self, state):
        self.states.append(state)
        noise = None if self.noise is None else torch.full_like(state.x, self.noise)
        return FlowControl(state.v - self.constant, state.x, noise)


def prepared(scheduler_class, steps=4, **config):
    scheduler = scheduler_class(**config)
    scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)])
    return scheduler


@pytest.mark.parametrize("config", [{}, {"shift": 3.0}, {"stochastic_sampling": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_is_bit_identical_to_the_parent_when_there_is_no_controller(config, dtype):
    outputs = []
    for scheduler_class in (FlowMatchEulerDiscreteScheduler, ControlledFlowMatchEulerScheduler):
        scheduler = prepared(scheduler_class, **config)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, 4, 4, generator=generator).to(dtype)
        for t in scheduler.timesteps:
            v = torch.randn(2, 3, 4, 4, generator=generator).to(dtype)
            x = scheduler.step(v, t, x, generator=generator, return_dict=False)[0]
        outputs.append(x)
    assert torch.equal(*outputs)


def test_step_applies_control_and_noise_at_the_same_sigma():
    scheduler = prepared(ControlledFlowMatchEulerScheduler)
    scheduler.controller = Push(control=2.0, noise=0.5)
    x = torch.ones(1, 1, 2, 2)
    new = scheduler.step(torch.full_like(x, 3.0), scheduler.timesteps[0], x).prev_sample
    assert torch.allclose(new, torch.full_like(x, 1 - 0.25 * (3 - 2) + 0.5))  # x + (σ' − σ)(v − u) + n
    state = scheduler.controller.states[0]
    assert (state.sigma, state.sigma_next, state.step, state.num_steps) == (1.0, 0.75, 0, 4)
    assert torch.equal(state.endpoint, x - 3.0)


def test_step_returns_the_dtype_of_the_model_when_latents_are_bf16():
    scheduler = prepared(ControlledFlowMatchEulerScheduler)
    scheduler.controller = Push(control=1.0)
    x = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    assert scheduler.step(x, scheduler.timesteps[0], x, return_dict=False)[0].dtype == torch.bfloat16
    assert scheduler.controller.states[0].x.dtype == torch.float32


def test_step_names_the_option_when_it_cannot_be_combined():
    scheduler = prepared(ControlledFlowMatchEulerScheduler)
    scheduler.controller = Push()
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="per_token_timesteps"):
        scheduler.step(x, scheduler.timesteps[0], x, per_token_timesteps=torch.ones(1, 4))
    inverted = prepared(ControlledFlowMatchEulerScheduler, invert_sigmas=True)
    inverted.controller = Push()
    with pytest.raises(NotImplementedError, match="invert_sigmas"):
        inverted.step(x, inverted.timesteps[0], x)


def test_config_keeps_every_field_and_never_the_controller(tmp_path):
    scheduler = ControlledFlowMatchEulerScheduler.from_scheduler(FlowMatchEulerDiscreteScheduler(shift=3.0))
    scheduler.controller = Push()
    scheduler.save_pretrained(tmp_path)
    loaded = ControlledFlowMatchEulerScheduler.from_pretrained(tmp_path)
    assert loaded.controller is None
    plain = FlowMatchEulerDiscreteScheduler(shift=3.0).config
    assert {k: v for k, v in loaded.config.items() if not k.startswith("_")} == {
        k: v for k, v in plain.items() if not k.startswith("_")
    }


def test_from_scheduler_names_the_supported_class_when_given_a_multistep_scheduler():
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler can be controlled"):
        ControlledFlowMatchEulerScheduler.from_scheduler(FlowMatchHeunDiscreteScheduler())


def test_attach_restores_the_scheduler_when_the_pipeline_raises(digits_pipe):
    original = digits_pipe.scheduler
    with pytest.raises(ValueError, match="num_images"), attach_controller(digits_pipe, Push()) as pipe:
        assert isinstance(pipe.scheduler, ControlledFlowMatchEulerScheduler)
        pipe(num_images=0)
    assert digits_pipe.scheduler is original
    assert "prepare_latents" not in vars(digits_pipe)


def test_attach_refuses_what_is_no_controller(digits_pipe):
    with pytest.raises(TypeError, match="FlowController"), attach_controller(digits_pipe, object()):
        pass


def test_attach_resets_the_controller_at_each_run(digits_pipe):
    controller = Push()
    with attach_controller(digits_pipe, controller) as pipe:
        pipe(num_images=1, num_inference_steps=3)
        pipe(num_images=2, num_inference_steps=5)
    assert [len(state.x) for state in controller.states] == [2] * 5


def test_run_controller_equals_the_pipeline(digits_pipe):
    latents = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with attach_controller(digits_pipe, Push(control=0.3)) as pipe:
        expected = pipe(num_images=2, latents=latents, num_inference_steps=6, output_type="latent").images
    sigmas = [1 - k / 6 for k in range(7)]
    got = run_controller(lambda x, s: digits_pipe.model(x, s).sample, Push(control=0.3), latents, sigmas)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("family", sorted(TINY_PIPELINES))
def test_attached_pipeline_is_bit_equal_to_the_plain_one_when_the_control_changes_nothing(family):
    pipe, arguments = TINY_PIPELINES[family]()
    pipe.set_progress_bar_config(disable=True)

    def sample():
        generator = torch.Generator().manual_seed(0)
        return pipe(**arguments, num_inference_steps=3, generator=generator, output_type="latent").images

    class Nothing(FlowController):
        def control(self, state):
            return FlowControl(state.v, state.x)

    plain = sample()
    with attach_controller(pipe, Nothing()):
        assert torch.equal(sample(), plain)


@pytest.mark.parametrize("family", sorted(TINY_PIPELINES))
def test_hook_sees_the_velocity_after_guidance_and_sign(family):
    # the Euler step of the pipeline itself must be x + (σ' − σ) v with the v that the controller saw
    pipe, arguments = TINY_PIPELINES[family]()
    pipe.set_progress_bar_config(disable=True)
    controller = Push()
    with attach_controller(pipe, controller):
        final = pipe(
            **arguments, num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="latent"
        ).images
    last = controller.states[-1]
    assert last.sigma_next == 0
    assert torch.allclose(final, last.endpoint, atol=1e-5)


def test_attach_works_under_inference_mode_and_in_bf16():
    pipe, arguments = tiny_sd3()
    pipe.to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    arguments = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}

    class Descend(FlowController):
        requires_decode = True

        def control(self, state):
            z = state.endpoint.requires_grad_(True)
            (gradient,) = torch.autograd.grad(state.decode(z).square().sum(), [z])
            return FlowControl(state.v + 0.1 * gradient, state.x)

    with torch.inference_mode(), attach_controller(pipe, Descend()):
        images = pipe(**arguments, num_inference_steps=2, output_type="pt").images
    assert bool(torch.isfinite(images).all())
    assert all(p.grad is None for module in (pipe.vae, pipe.transformer) for p in module.parameters())
    assert pipe.vae.dtype == torch.bfloat16  # the user's VAE was not cast
    assert all(p.requires_grad for p in pipe.vae.parameters())  # nor left frozen


def test_attach_warns_when_the_vae_is_under_cpu_offload():
    from accelerate import cpu_offload_with_hook

    pipe, _ = tiny_flux()
    cpu_offload_with_hook(pipe.vae, execution_device="cpu")
    controller = Push()
    type(controller).requires_decode = True
    try:
        with pytest.warns(UserWarning, match="_exclude_from_cpu_offload"), attach_controller(pipe, controller):
            pass
    finally:
        del type(controller).requires_decode


def test_attach_works_on_a_modular_pipeline_and_gives_its_scheduler_back():
    from diffusers.modular_pipelines import FluxAutoBlocks

    base, arguments = tiny_flux()
    blocks = FluxAutoBlocks()
    blocks.sub_blocks.pop("text_encoder")
    pipe = blocks.init_pipeline()
    pipe.update_components(transformer=base.transformer, vae=base.vae, scheduler=base.scheduler)
    pipe.set_progress_bar_config(disable=True)
    arguments = {**arguments, "num_images_per_prompt": 1, "num_inference_steps": 3, "output": "images"}

    def sample():
        return pipe(**arguments, generator=torch.Generator().manual_seed(0), output_type="pt")

    plain, original = sample(), pipe.scheduler
    controller = Push(control=0.5)
    with attach_controller(pipe, controller):
        controlled = sample()
    assert len(controller.states) == 3
    assert not torch.allclose(controlled, plain, atol=1e-2)
    assert pipe.scheduler is original and torch.equal(sample(), plain)


def test_controller_settings_save_and_load(tmp_path):
    from hf_pipelines import MPCFlowController

    MPCFlowController(mode="dt", lam=7.0, lr=0.2).save_pretrained(tmp_path)
    assert (tmp_path / "flow_controller_config.json").is_file()
    loaded = MPCFlowController.from_pretrained(tmp_path, lr=0.4)
    assert (loaded.config.mode, loaded.config.lam, loaded.config.lr) == ("dt", 7.0, 0.4)
