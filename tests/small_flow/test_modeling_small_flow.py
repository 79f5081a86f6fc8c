"""The embedded flow models: parameter counts, exact velocities and error messages of flow_control_core §5."""

import pytest
import torch

from hf_models import GaussianMixtureFlowModel, SmallFlowModel


@pytest.mark.parametrize(("side", "hidden", "count"), [(8, 256, 909_888), (16, 384, 2_151_424)])
def test_small_flow_model_has_the_parameter_count_of_the_spec(side, hidden, count):
    assert SmallFlowModel((1, side, side), hidden).num_parameters() == count


def test_small_flow_model_starts_at_zero_velocity():
    velocity = SmallFlowModel()(torch.randn(2, 1, 16, 16), timestep=0.5).sample
    assert torch.equal(velocity, torch.zeros_like(velocity))


def test_small_flow_model_treats_no_label_and_the_null_label_alike(digits_pipe):
    x = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    null = torch.full((2,), 10)
    assert torch.equal(digits_pipe.model(x, 0.3).sample, digits_pipe.model(x, 0.3, null).sample)


def test_small_flow_model_takes_one_sigma_per_image(digits_pipe):
    x = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    both = digits_pipe.model(x, torch.tensor([0.2, 0.9])).sample
    assert torch.allclose(both[1:], digits_pipe.model(x[1:], 0.9).sample, atol=1e-6)


@pytest.mark.parametrize(
    ("sample", "timestep", "labels", "match"),
    [
        (torch.zeros(2, 1, 8, 8), 0.5, None, "sample"),
        (torch.zeros(2, 1, 16, 16), torch.zeros(3), None, "timestep"),
        (torch.zeros(2, 1, 16, 16), 0.5, torch.zeros(3, dtype=torch.long), "class_labels"),
    ],
)
def test_small_flow_model_names_the_argument_when_a_shape_is_wrong(sample, timestep, labels, match):
    with pytest.raises(ValueError, match=match):
        SmallFlowModel()(sample, timestep, labels)


def test_small_flow_model_saves_and_loads_bit_equal(tmp_path, digits_pipe):
    digits_pipe.model.save_pretrained(tmp_path)
    again = SmallFlowModel.from_pretrained(tmp_path)
    x = torch.randn(3, 1, 16, 16)
    assert torch.equal(again(x, 0.4).sample, digits_pipe.model(x, 0.4).sample)


def two_modes(**kwargs) -> GaussianMixtureFlowModel:
    return GaussianMixtureFlowModel(2, [[2.0, 0.0], [-2.0, 0.0]], [0.5, 0.5], **kwargs)


def test_mixture_velocity_equals_the_golden_values():
    x = torch.tensor([[0.3, 0.1], [0.2, -0.4], [0.1, 0.6]], dtype=torch.float64)
    expected = torch.tensor(
        [[-2.0216859756, 0.12], [-1.5676785691, -0.48], [-0.8704221479, 0.72]], dtype=torch.float64
    )
    assert torch.allclose(two_modes()(x, 0.5).sample, expected, atol=1e-9)  # flow_diversity, golden 6
    assert torch.allclose(two_modes()(x, 1.0).sample, x, atol=1e-12)


def test_mixture_velocity_is_minus_x_at_the_data_end():
    x = torch.tensor([[1.0, -3.0]], dtype=torch.float64)  # E[ε − x₀ | x₀ = x] = −x
    assert torch.allclose(two_modes()(x, 0.0).sample, -x, atol=1e-12)


def test_mixture_flow_reproduces_mean_and_spread_of_the_data():
    from hf_pipelines.flow_control import run_controller

    model = GaussianMixtureFlowModel(2, [[1.5, -1.0]], [0.6])
    noise = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = run_controller(lambda x, s: model(x, s).sample, None, noise, torch.linspace(1, 0, 201).tolist())
    assert torch.allclose(samples.mean(0), torch.tensor([1.5, -1.0], dtype=torch.float64), atol=0.03)
    assert torch.allclose(samples.std(0), torch.full((2,), 0.6, dtype=torch.float64), atol=0.02)


def test_mixture_saves_and_loads_bit_equal(tmp_path):
    model = GaussianMixtureFlowModel(2, [[0.1, 0.2], [-0.3, 0.7]], [0.3, 0.9], [0.25, 0.75], sample_shape=(1, 1, 2))
    model.save_pretrained(tmp_path)
    x = torch.randn(5, 1, 1, 2, dtype=torch.float64)
    assert torch.equal(GaussianMixtureFlowModel.from_pretrained(tmp_path)(x, 0.37).sample, model(x, 0.37).sample)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dim": 3, "means": [[0.0, 1.0]], "stds": [1.0]}, "means"),
        ({"dim": 1, "means": [[0.0]], "stds": [0.0]}, "stds"),
        ({"dim": 1, "means": [[0.0]], "stds": [1.0], "weights": [1.0, 2.0]}, "weights"),
        ({"dim": 2, "means": [[0.0, 1.0]], "stds": [1.0], "sample_shape": (3,)}, "sample_shape"),
    ],
)
def test_mixture_names_the_argument_when_the_config_is_wrong(arguments, match):
    with pytest.raises(ValueError, match=match):
        GaussianMixtureFlowModel(**arguments)
