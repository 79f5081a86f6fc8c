"""Known pitfalls of other implementations, each as required behaviour."""

import math

import numpy as np
import pytest
import torch

from hf_models import KrrSocConfig, KrrSocModel
from hf_models.krr_soc import stopping_problem
from hf_models.krr_soc.dynamic_programming_krr_soc import generator_of, sample_blocks
from hf_models.krr_soc.kernels_krr_soc import kernel_matrix
from hf_models.krr_soc.regression_krr_soc import cholesky_with_jitter, solve_dense, whitened_system
from hf_pipelines.krr_soc import european_price

SMALL = {"n_states": 300, "n_centers": 80, "n_inner": 32, "n_initial": 4096}
FIXED = SMALL | {"lengthscale": 1.0, "shrink": 1.0}


@pytest.mark.parametrize("rate", [-0.03, 0.0, 0.05])
@pytest.mark.parametrize("payoff", ["put", "call"])
def test_price_is_not_below_the_european_one_whatever_the_rate(payoff, rate):
    model = KrrSocModel(KrrSocConfig(payoff=payoff, rate=rate, **SMALL)).fit()
    european = european_price(model.problem, 50_000)
    assert model.price().price >= european.value - 3 * european.standard_error


@pytest.mark.parametrize("scale", [0.01, 1000.0])
@pytest.mark.parametrize(
    "fields",
    [{}, {"payoff": "call", "dividend": 0.05}, {"payoff": "max_call", "dim": 2, "dividend": 0.1, "maturity": 3.0}],
)
def test_price_is_homogeneous_when_spot_and_strike_scale(fields, scale):
    one = KrrSocModel(KrrSocConfig(spot=90.0, **fields, **SMALL)).fit().price().price
    other = KrrSocModel(KrrSocConfig(spot=90 * scale, strike=100 * scale, **fields, **SMALL)).fit().price().price
    assert abs(other / scale - one) < 1e-10 * one


def test_far_out_of_the_money_option_is_priced_when_the_spot_is_small():
    model = KrrSocModel(KrrSocConfig(spot=1.0, strike=0.7, n_initial=2**16)).fit()
    assert abs(model.price().price - 0.0012927) < 1.3e-4  # `BermudanLattice`, see below


def test_far_out_of_the_money_reference_comes_from_the_lattice():
    from hf_pipelines.krr_soc import BermudanLattice

    value = BermudanLattice(spot=1.0, strike=0.7)(0, torch.ones(1, 1, dtype=torch.float64))
    assert abs(float(value) - 0.0012927) < 1e-6


@pytest.mark.parametrize(
    ("dates", "expected"),
    [([7, 8, 9], 5.80859), (None, 6.0275786), ([9], 5.57330)],
)
def test_exercise_dates_are_honoured_when_only_some_are_allowed(dates, expected):
    model = KrrSocModel(KrrSocConfig(exercise_dates=dates, n_initial=2**16)).fit()
    assert abs(model.price().price / expected - 1) < 0.01
    x = torch.tensor([[60.0]])
    assert (int(model(x, t=3).action) == 0) == (dates is None)  # deep in the money, but not at a forbidden date


def test_policy_never_stops_when_the_date_is_not_allowed():
    model = KrrSocModel(KrrSocConfig(exercise_dates=[9], **FIXED)).fit()
    lower = model.lower_bound(20_000)
    assert abs(lower.value - 5.57330) < 4 * lower.standard_error


def test_duplicated_states_are_solved_when_lambda_is_positive():
    x = torch.zeros(50, 1, dtype=torch.float64)
    y = torch.arange(50, dtype=torch.float64)[:, None]
    gram = kernel_matrix("rbf", x, x, 1.0)
    dense = gram @ solve_dense(gram, y, 1e-6)
    nystroem = gram @ whitened_system(lambda: iter([gram]), gram, y).solve(1e-6)
    assert torch.allclose(
        dense, torch.full_like(y, 24.5), atol=1e-3
    )  # the mean, which is all that one point can learn
    assert torch.allclose(nystroem, torch.full_like(y, 24.5), atol=1e-3)


def test_nearly_singular_kernel_is_solved_with_jitter_when_points_are_close():
    x = torch.linspace(0, 1e-3, 200, dtype=torch.float64)[:, None]
    gram = kernel_matrix("rbf", x, x, 1.0)
    factor = cholesky_with_jitter(gram)
    assert torch.allclose(factor @ factor.T, gram, atol=1e-4)


def test_indefinite_matrix_is_refused_with_lambda_jitter_and_duplicates_named():
    bad = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"even with jitter 1e-06·m and lambda 0.1 \(0 of its rows are repeated\)"):
        cholesky_with_jitter(bad, 0.1)


def test_training_states_are_correlated_when_the_assets_are():
    config = KrrSocConfig(payoff="max_call", dim=2, correlation=0.8, n_states=4000)
    x = sample_blocks(stopping_problem(config), config, 5, "cpu").log()
    assert abs(float(torch.corrcoef(x.T)[0, 1]) - 0.8) < 0.03  # 0.8 ± 3·(1 − 0.64)/√4000


def test_initial_state_is_not_jittered_when_sampled():
    problem = stopping_problem(KrrSocConfig())
    x = problem.sample_states(0, 5, torch.Generator().manual_seed(0))
    assert torch.equal(x, torch.full((5, 1), 100.0, dtype=torch.float64))


def test_all_states_are_used_when_the_lengthscale_was_chosen_by_hold_out():
    config = KrrSocConfig(preset="paper", n_states=100, n_inner=8, n_centers=100, n_steps=2, solver="dense")
    model = KrrSocModel(config).fit()
    assert model.centers.shape[1] == 100  # of 70 that the hold-out fit had
    assert (model.alpha[1] != 0).all() and float(model.lengthscale[1]) in (40.0, 80.0)


def test_price_is_identical_and_global_generators_are_untouched_when_seeds_agree():
    torch.manual_seed(7)
    np.random.seed(7)
    state, other = torch.get_rng_state(), np.random.get_state()[1].copy()
    prices = [KrrSocModel(KrrSocConfig(seed=3, **SMALL)).fit().price(True, n_lower=500, n_upper=50) for _ in range(2)]
    assert prices[0].price == prices[1].price
    assert prices[0].lower == prices[1].lower and prices[0].upper == prices[1].upper
    assert torch.equal(torch.get_rng_state(), state) and (np.random.get_state()[1] == other).all()
    assert KrrSocModel(KrrSocConfig(seed=4, **SMALL)).fit().price().price != prices[0].price


def test_streams_differ_when_their_purpose_or_date_does():
    draws = {
        float(torch.rand(1, generator=generator_of(0, name, t)))
        for name in ("states", "inner", "lower")
        for t in (1, 2)
    }
    assert len(draws) == 6


def test_value_target_is_biased_upward_when_samples_are_few():
    prices = {}
    for target in ("value", "continuation"):
        runs = [
            KrrSocModel(
                KrrSocConfig(
                    target=target, n_states=200, n_inner=16, n_centers=200, lam=1e-6, sampler="mc", seed=seed,
                    lengthscale=1.0, shrink=1.0, n_initial=2**16,
                )
            ).fit().price().price
            for seed in range(8)
        ]  # fmt: skip
        prices[target] = sum(runs) / 8 - 6.0275786
    assert prices["value"] > 0.15 > 0.06 > abs(prices["continuation"])  # the spec measured +0.282 and +0.011


def test_small_runs_explode_only_when_nothing_is_clipped():
    errors = {}
    for clip in ("auto", "none"):
        fields = {"n_states": 50, "n_inner": 8, "n_centers": 50, "lam": 1e-9, "sampler": "mc", "target": "value"}
        runs = [
            KrrSocModel(KrrSocConfig(clip=clip, lengthscale=1.0, features="log", seed=s, **fields)).fit().price().price
            for s in range(8)
        ]
        errors[clip] = sum(abs(p - 6.0275786) for p in runs) / 8
    assert errors["none"] > 1.5 * errors["auto"]


def test_two_bounds_replace_the_spread_of_prices_as_interval():
    model = KrrSocModel(KrrSocConfig()).fit()
    out = model.price(bounds=True, n_lower=20_000, n_upper=300, n_upper_inner=64)
    assert out.interval[0] <= 6.0275786 <= out.interval[1]
    z = 1.959963985
    assert math.isclose(out.interval[0], out.lower.value - z * out.lower.standard_error, rel_tol=1e-9)
    assert math.isclose(out.interval[1], out.upper.value + z * out.upper.standard_error, rel_tol=1e-9)
