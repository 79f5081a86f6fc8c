"""Velocity adapters (flow_control_core §4): the network again, under the same prompt, guidance and sign rules."""

import pytest
import torch
from tiny_pipelines import TINY_PIPELINES, tiny_flux, tiny_sd3, tiny_zimage

from hf_pipelines.flow_control import attach_controller, get_velocity_adapter
from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController


class Reevaluate(FlowController):
    """Asks the adapter for the velocity at the state the scheduler already knows, and at the one before."""

    requires_velocity = True

    def reset(self, num_steps, batch, device):
        super().reset(num_steps, batch, device)
        self.errors, self.cross_errors, self.previous = [], [], None

    def control(self, state):
        with torch.no_grad():
            again = state.velocity(state.x, state.sigma)
            self.errors.append(float((again - state.v).abs().max()))
            if self.previous is not None:  # replaying an earlier point from a later step's call
                earlier = state.velocity(self.previous.x, self.previous.sigma)
                self.cross_errors.append(float((earlier - self.previous.v).abs().max()))
        self.previous = state
        return FlowControl(state.v, state.x)


def check(pipe, arguments, tolerance=2e-5):
    pipe.set_progress_bar_config(disable=True)
    controller = Reevaluate()
    with attach_controller(pipe, controller):
        pipe(**arguments, num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="latent")
    assert len(controller.errors) == 3
    assert max(controller.errors + controller.cross_errors) < tolerance


@pytest.mark.parametrize("family", sorted(TINY_PIPELINES))
def test_adapter_reproduces_the_velocity_of_the_pipeline(family):
    check(*TINY_PIPELINES[family]())


@pytest.mark.parametrize("family", ["sd3", "zimage"])
def test_adapter_reproduces_the_velocity_when_guidance_is_off(family):
    pipe, arguments = TINY_PIPELINES[family]()
    check(pipe, {**arguments, "guidance_scale": 0.0})


def test_adapter_measures_the_true_guidance_scale_of_flux():
    pipe, arguments = tiny_flux()
    generator = torch.Generator().manual_seed(5)
    negative = {
        "negative_prompt_embeds": torch.randn(2, 7, 32, generator=generator),
        "negative_pooled_prompt_embeds": torch.randn(2, 32, generator=generator),
        "true_cfg_scale": 4.0,
    }
    check(pipe, {**arguments, **negative}, tolerance=1e-4)


def test_adapter_renormalises_as_z_image_does():
    pipe, arguments = tiny_zimage()
    check(pipe, {**arguments, "cfg_normalization": 1.0})


def test_adapter_drops_reference_tokens_of_flux2():
    from PIL import Image
    from tiny_pipelines import tiny_flux2

    pipe, arguments = tiny_flux2()
    check(pipe, {**arguments, "image": Image.new("RGB", (64, 64), "red")})


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_adapter_of_the_embedded_flow_follows_labels_and_guidance(digits_pipe, scale):
    check(digits_pipe, {"class_labels": [1, 7], "guidance_scale": scale})


def test_adapter_refuses_when_the_pipeline_mixes_in_another_call():
    pipe, arguments = tiny_sd3()
    pipe.set_progress_bar_config(disable=True)
    options = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    with (
        pytest.raises(NotImplementedError, match="skip-layer guidance"),
        attach_controller(pipe, Reevaluate()),
    ):
        pipe(**arguments, **options, num_inference_steps=3, output_type="latent")


def test_unknown_pipeline_says_what_works_without_an_adapter():
    class FancyPipeline:
        pass

    with pytest.raises(NotImplementedError, match="horizon_steps=1"):
        get_velocity_adapter(FancyPipeline())


def test_adapter_works_inside_a_step_only(digits_pipe):
    with pytest.raises(RuntimeError, match="inside a sampling step"):
        get_velocity_adapter(digits_pipe)(torch.zeros(1, 1, 16, 16), 0.5)


def test_adapter_counts_forward_and_backward_calls(digits_pipe):
    class Count(FlowController):
        requires_velocity = True

        def control(self, state):
            x = state.x.requires_grad_(True)
            state.velocity(x, state.sigma)
            with torch.no_grad():
                state.velocity(x, state.sigma)
            return FlowControl(state.v, state.x.detach())

    with attach_controller(digits_pipe, Count()) as pipe:
        pipe(num_images=1, num_inference_steps=4)
        adapter = pipe.scheduler.velocity_adapter
    assert (adapter.nfe, adapter.nbp) == (8, 4)


def test_adapter_differentiates_under_inference_mode():
    pipe, arguments = tiny_flux()
    pipe.set_progress_bar_config(disable=True)

    class Gradient(FlowController):
        requires_velocity = True

        def control(self, state):
            x = state.x.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(state.velocity(x, state.sigma).square().sum(), [x])
            self.norm = float(gradient.norm())
            return FlowControl(state.v, state.x)

    controller = Gradient()
    with torch.inference_mode(), attach_controller(pipe, controller):
        pipe(**arguments, num_inference_steps=2, output_type="latent")
    assert controller.norm > 0
