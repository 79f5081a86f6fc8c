"""FlowDiversityController and its baselines: signs, groups, chunks, noise, bad input, pitfalls of the spec."""

import pytest
import torch

from hf_models import GaussianMixtureFlowModel
from hf_pipelines.flow_control import FlowState, run_controller
from hf_pipelines.flow_control.controller_flow import identity_decode
from hf_pipelines.flow_diversity import FlowDiversityController
from hf_pipelines.flow_diversity.baselines_flow_diversity import (
    CADS,
    DPPGuidance,
    ParticleGuidance,
    PlainODE,
    SDENoise,
)
from hf_pipelines.flow_diversity.controller_flow_diversity import log_volume, prepare_features, schedule

F64 = torch.float64
LATENT = {"feature_space": "latent", "chunk": 1000}


@pytest.fixture(scope="module")
def velocity():
    model = GaussianMixtureFlowModel(2, [[2.0, 0.0], [-2.0, 0.0]], [0.5, 0.5])
    return lambda x, sigma: model(x, sigma).sample


def starts(count=8, seed=0):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sample(velocity, controller, x=None, steps=10, seed=1):
    sigmas = [1 - k / steps for k in range(steps + 1)]
    x = starts() if x is None else x
    return run_controller(velocity, controller, x, sigmas, generator=torch.Generator().manual_seed(seed))


def step(controller, x, v, sigma=0.8, sigma_next=0.7, index=3):
    controller.reset(10, len(x), x.device)
    controller.generator = torch.Generator().manual_seed(0)
    return controller.control(FlowState(v, x, sigma, sigma_next, index, 10, decode=identity_decode))


def spread(x, v, controller, sigma=0.8):
    z = prepare_features((x - sigma * v).flatten(1), controller.config.feature_norm, controller.config.center)
    return float(log_volume(z, controller.config.tau))


@pytest.mark.parametrize("settings", [{}, {"ortho": 0.0}, {"feature_norm": "none"}, {"center": False, "tau": 1.0}])
def test_one_small_controlled_step_raises_the_volume_and_the_wrong_sign_lowers_it(settings):
    generator = torch.Generator().manual_seed(3)
    x, v = torch.randn(2, 5, 6, generator=generator, dtype=F64)
    settings = {"beta0": 0.0, "gate": (0.0, 1.0), "max_ratio": 1e-3, **LATENT, **settings}
    for gamma0, sign in ((1.0, 1), (-1.0, -1)):
        controller = FlowDiversityController(gamma0=gamma0, **settings)
        u = v - step(controller, x, v).velocity
        moved = spread(x + u, v, controller)  # the endpoint's Jacobian is taken as the identity
        assert sign * (moved - spread(x, v, controller)) > 0


def test_control_is_orthogonal_to_the_flow():
    generator = torch.Generator().manual_seed(3)
    x, v = torch.randn(2, 5, 6, generator=generator, dtype=F64)
    controller = FlowDiversityController(beta0=0.0, gate=(0.0, 1.0), **LATENT)
    u = v - step(controller, x, v).velocity
    assert float((u * v).sum(1).abs().max()) < 1e-12
    assert controller.log[0]["orthogonality"] < 1e-12
    assert torch.allclose(u.norm(dim=1), 4 * schedule(0.8, "sin2", (0, 1)) * 0.3 * v.norm(dim=1))


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_result_does_not_depend_on_the_chunk_size(velocity, chunk):
    results = [
        sample(velocity, FlowDiversityController(feature_space="latent", chunk=size, beta0=0.0)) for size in (chunk, 8)
    ]
    assert torch.allclose(*results, atol=1e-10)


def test_groups_never_repel_each_other(velocity):
    x = starts(8)
    together = sample(velocity, FlowDiversityController(group_size=4, beta0=0.0, **LATENT), x)
    alone = sample(velocity, FlowDiversityController(beta0=0.0, **LATENT), x[:4])
    assert torch.allclose(together[:4], alone, atol=1e-12)


def test_strength_zero_is_plain_sampling_bit_for_bit(velocity):
    plain = sample(velocity, None)
    assert torch.equal(sample(velocity, FlowDiversityController(gamma0=0.0, beta0=0.0, **LATENT)), plain)
    assert torch.equal(sample(velocity, PlainODE(**LATENT)), plain)


def test_noise_is_not_zero_for_a_flow_whose_sigma_falls(velocity):
    # a scale from σ'² − σ² would be negative; ours is √(2βΔ)
    x, v = starts(), torch.zeros(8, 2, dtype=F64)
    controller = SDENoise(0.5, score_correction=False, noise_gate=(0.0, 1.0), **LATENT)
    noise = step(controller, x.repeat(500, 1), v.repeat(500, 1)).noise
    # with v = 0 the limit ρ_n‖b‖Δ is 0, so that a flow at rest is left at rest
    assert float(noise.abs().max()) == 0
    noise = step(controller, x.repeat(500, 1), v.repeat(500, 1) + 1).noise
    assert float(noise.std()) == pytest.approx((2 * 0.5 * 0.1) ** 0.5, rel=0.05)


def test_same_seed_gives_the_same_samples_and_another_seed_others(velocity):
    controller = FlowDiversityController(beta0=0.5, noise_ratio=10.0, **LATENT)
    first, again, other = (sample(velocity, controller, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_score_correction_keeps_the_spread_that_plain_noise_inflates(velocity):
    x = starts(2000)
    settings = {"noise_gate": (0.0, 1.0), "gamma_schedule": "const", "noise_ratio": 1e9}

    def width(controller):
        final = sample(velocity, controller, x, steps=40)
        return float((final.abs() - torch.tensor([2.0, 0.0], dtype=F64))[:, 0].std())

    plain = width(None)
    assert width(SDENoise(0.3, False, **settings, **LATENT)) > 1.1 * plain
    assert width(SDENoise(0.3, True, **settings, **LATENT)) == pytest.approx(plain, rel=0.08)


def test_identical_starts_warn_and_end_apart_when_there_is_noise(velocity):
    x = starts(1).repeat(4, 1)
    with pytest.warns(UserWarning, match="same seed"):
        final = sample(velocity, FlowDiversityController(beta0=0.5, noise_ratio=10.0, **LATENT), x)
    assert len({tuple(row) for row in final.tolist()}) == 4


def test_identical_features_give_no_control_and_no_division(velocity):
    x = starts(1).repeat(3, 1)
    with pytest.warns(UserWarning, match="same seed"):
        assert torch.equal(
            sample(velocity, FlowDiversityController(beta0=0.0, **LATENT), x), sample(velocity, None, x)
        )


def test_single_sample_warns_and_is_sampled_plainly(velocity):
    x = starts(1)
    with pytest.warns(UserWarning, match="at least two samples"):
        assert torch.equal(sample(velocity, FlowDiversityController(**LATENT), x), sample(velocity, None, x))


def test_memory_keeps_a_single_sample_away_from_earlier_images(velocity):
    x = torch.tensor([[0.4, 0.1]], dtype=F64)
    plain = sample(velocity, None, x)
    controller = FlowDiversityController(
        gamma0=8.0, gate=(0.2, 1.0), beta0=0.0, feature_norm="none", center=False, tau=1.0, **LATENT
    )
    controller.memory = plain.repeat(4, 1)
    assert float((sample(velocity, controller, x) - plain).norm()) > 0.5


def test_nan_gradient_leaves_that_sample_alone_and_says_so():
    # √ of a negative number is NaN
    x = torch.tensor([[1.0, 0.5], [0.5, 1.0], [-1.0, 0.2]], dtype=F64)
    v = torch.tensor([[0.1, 0.0]] * 3, dtype=F64)
    controller = FlowDiversityController(lambda z: z.sqrt(), gate=(0.0, 1.0), beta0=0.0, chunk=3)
    with pytest.warns(UserWarning, match="not finite"):
        answer = step(controller, x, v)
    assert bool(torch.isfinite(answer.velocity).all())
    assert controller.log[0]["skipped"] == 1
    assert torch.equal(answer.velocity[2], v[2]) and not torch.equal(answer.velocity[:2], v[:2])


def test_gate_that_covers_no_step_warns(velocity):
    controller = FlowDiversityController(gate=(0.51, 0.52), beta0=0.0, **LATENT)
    with pytest.warns(UserWarning, match="nothing was controlled"):
        sample(velocity, controller, steps=4)


def test_heun_endpoint_makes_one_more_call_a_controlled_step(velocity):
    calls = []

    def counted(x, sigma):
        calls.append(sigma)
        return velocity(x, sigma)

    controller = FlowDiversityController(endpoint="heun", beta0=0.0, gate=(0.55, 1.0), **LATENT)
    sample(counted, controller)
    controlled = [entry for entry in controller.log if entry["gamma"] > 0]
    assert len(calls) == 10 + len(controlled) and calls.count(pytest.approx(0.1)) == 1 + len(controlled)
    assert controller.requires_velocity


def test_control_is_reused_between_updates(velocity):
    controller = FlowDiversityController(update_every=2, beta0=0.0, gate=(0.0, 1.0), **LATENT)
    sample(velocity, controller)
    volumes = [entry for entry in controller.log[:-1] if "control_ratio" in entry]
    assert len(volumes) < 9


@pytest.mark.parametrize(("chunk", "expected"), [(8, 2 * 1 + 1), (4, 2 * 2 * 2 + 2)])
def test_features_are_computed_only_in_gated_steps(velocity, chunk, expected):
    # σ = .9 and .8 are gated: one pass where the batch is one chunk, else one for features and one for the pull-back;
    # then the final features
    count = []

    def encoder(images):
        count.append(len(images))
        return images

    sample(velocity, FlowDiversityController(encoder, gate=(0.75, 1.0), beta0=0.1, chunk=chunk))
    assert len(count) == expected


@pytest.mark.parametrize("method", [ParticleGuidance, DPPGuidance])
def test_force_baselines_push_two_close_samples_apart(method):
    x = torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 3.0]], dtype=F64)
    v = torch.tensor([[0.0, 1e-3]] * 3, dtype=F64)
    controller = method(gamma=1.0, **LATENT)
    u = v - step(controller, x, v).velocity
    assert float(u[0, 0]) > 0 > float(u[1, 0])


def test_cads_gate_has_the_right_denominator():
    cads = CADS(tau1=0.6, tau2=0.9)
    assert [cads.gamma(t) for t in (0.5, 0.6, 0.75, 0.9, 1.0)] == pytest.approx([1, 1, 0.5, 0, 0])
    with pytest.raises(ValueError, match="tau1"):
        CADS(tau1=0.9, tau2=0.6)


def test_cads_keeps_mean_and_deviation_and_never_makes_nan():
    embedding = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)) * 3 + 1
    cads = CADS(scale=0.5, generator=torch.Generator().manual_seed(1))
    for level in (0.95, 0.8, 0.7):
        annealed = cads.anneal(embedding, level)
        assert not torch.equal(annealed, embedding)
        assert float(annealed.mean()) == pytest.approx(float(embedding.mean()), abs=1e-4)
        assert float(annealed.std()) == pytest.approx(float(embedding.std()), abs=1e-4)
    assert torch.equal(cads.anneal(embedding, 0.5), embedding)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gate": (0.9, 0.5)}, "`gate`"),
        ({"gate": (-0.1, 0.5)}, "`gate`"),
        ({"noise_gate": (0.5, 1.5)}, "`noise_gate`"),
        ({"tau": 0.0}, "`tau`"),
        ({"max_ratio": -1.0}, "`max_ratio`"),
        ({"beta0": -0.1}, "`beta0`"),
        ({"gamma0": float("nan")}, "`gamma0`"),
        ({"ortho": 1.5}, "`ortho`"),
        ({"init_ortho": 1.0}, "`init_ortho`"),
        ({"decode_size": 0.0}, "`decode_size`"),
        ({"feature_norm": "l1"}, "`feature_norm`"),
        ({"cap_mode": "clip"}, "`cap_mode`"),
        ({"endpoint": "rk4"}, "`endpoint`"),
        ({"feature_space": "words"}, "`feature_space`"),
        ({"gamma_schedule": "cosine"}, "`gamma_schedule`"),
        ({"update_every": 0}, "`update_every`"),
        ({"chunk": 0}, "`chunk`"),
        ({"group_size": 0}, "`group_size`"),
    ],
)
def test_bad_setting_is_named(settings, match):
    with pytest.raises(ValueError, match=match):
        FlowDiversityController(**settings)


def test_starting_latents_turn_apart_and_keep_their_norm():
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=F64).repeat(4, 1, 1, 1)
    controller = FlowDiversityController(init_ortho=0.6, beta0=0.0, gate=(0.0, 0.5), **LATENT)
    with pytest.warns(UserWarning, match="same seed"):
        answer = step(controller, x, torch.ones_like(x), sigma=1.0, sigma_next=0.9, index=0)
    rows = answer.sample.flatten(1)
    assert torch.allclose(rows.norm(dim=1), x.flatten(1).norm(dim=1))
    cosine = torch.nn.functional.cosine_similarity(rows[:1], rows[1:])
    assert float(cosine.max()) < 0.95 and float(cosine.min()) > 0.2


def test_smaller_decoding_for_features_needs_spatial_latents():
    sizes = []

    def encoder(images):
        sizes.append(images.shape[-1])
        return images.flatten(1)

    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    controller = FlowDiversityController(encoder, decode_size=0.5, beta0=0.0, gate=(0.0, 1.0), chunk=3)
    step(controller, x, torch.ones_like(x))
    assert set(sizes) == {4}
    with pytest.raises(ValueError, match="`decode_size`"):
        step(controller, x.view(3, 8, 8), torch.ones(3, 8, 8, dtype=F64))


def test_group_size_must_divide_the_batch(velocity):
    with pytest.raises(ValueError, match="`group_size` 3 does not divide the batch of 8"):
        sample(velocity, FlowDiversityController(group_size=3, **LATENT))


def test_missing_encoder_is_named(velocity):
    with pytest.raises(ValueError, match="needs an `encoder`"):
        sample(velocity, FlowDiversityController())


def test_settings_save_and_load(tmp_path):
    FlowDiversityController(gamma0=7.0, gate=(0.5, 0.9)).save_pretrained(tmp_path)
    loaded = FlowDiversityController.from_pretrained(tmp_path)
    assert loaded.config.gamma0 == 7.0 and tuple(loaded.config.gate) == (0.5, 0.9)
