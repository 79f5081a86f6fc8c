"""Bad input and edge cases: each is refused by name, or has the one right answer."""

import math

import pytest
import torch

from hf_models import KrrSocConfig, KrrSocModel
from hf_models.krr_soc import OptimalStopping, PathStates, register_payoff
from hf_models.krr_soc.processes_krr_soc import correlation_factor
from hf_models.krr_soc.samplers_krr_soc import InnerSampler

SMALL = {"n_states": 200, "n_centers": 60, "n_inner": 16, "n_initial": 1024}
FIXED = SMALL | {"lengthscale": 1.0, "shrink": 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 2, "spot": [100.0]}, "spot has 1 values"),
        ({"dim": 2, "volatility": [0.2] * 3}, "volatility has 3 values"),
        ({"dim": 2, "dividend": [0.1] * 3}, "dividend has 3 values"),
        ({"spot": 0.0}, "spot=0.0 must be positive"),
        ({"spot": -1.0}, "spot=-1.0 must be positive"),
        ({"spot": math.nan}, "spot=nan must be positive"),
        ({"volatility": 0.0}, "volatility=0.0 must be positive"),
        ({"maturity": -1.0}, "maturity=-1.0 must be positive"),
        ({"maturity": math.inf}, "maturity=inf must be positive"),
        ({"strike": 0.0}, "strike=0.0 must be positive"),
        ({"rate": math.nan}, "rate=nan must be finite"),
        ({"n_steps": 0}, "n_steps=0 must be an integer of at least 1"),
        ({"dim": 2, "correlation": 1.5}, "correlation=1.5 must be in"),
        ({"dim": 3, "correlation": -0.9}, "correlation=-0.9 must be in"),
        ({"dim": 2, "correlation": [[1.0, 0.5], [0.4, 1.0]]}, "correlation must be finite and symmetric"),
        ({"dim": 2, "correlation": [[1.0]]}, "correlation must be 2×2"),
        (
            {"dim": 3, "correlation": [[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]]},
            "correlation is not positive semidefinite",
        ),
        ({"sampler": "antithetic", "n_inner": 15}, "n_inner=15 must be even"),
        ({"sampler": "sobol"}, "sampler='sobol' must be one of"),
        ({"target": "reward"}, "target='reward' must be one of"),
        ({"features": "sorted"}, "features='sorted' must be one of"),
        ({"process": "sabr"}, "process='sabr' must be one of"),
        ({"kernel": "cosine"}, "kernel='cosine' must be one of"),
        ({"preset": "fast"}, "preset='fast' must be one of paper"),
        ({"lam": 0.0}, "lam=0.0 must be positive"),
        ({"lengthscale": "auto"}, "lengthscale='auto' must be positive or one of"),
        ({"lengthscale": "holdout"}, "needs lengthscale_grid"),
        ({"shrink": 0.5}, "shrink=0.5 must be at least 1"),
        ({"exercise_dates": [10]}, r"exercise_dates=\[10\] must be some of the dates 0 … 9"),
        ({"exercise_dates": []}, r"exercise_dates=\[\] must be some"),
        ({"sampler": "exact"}, "sampler='exact' is a closed form that needs"),
    ],
)
def test_configuration_names_the_field_when_a_value_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        KrrSocConfig(**fields)


def test_negative_rate_is_priced_when_given():
    config = KrrSocConfig(rate=-0.02, **FIXED)
    d1 = (-0.02 + 0.02) / 0.2  # Black–Scholes; a put is never exercised early at negative rates
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    european = float(100 * math.exp(0.02) * phi(torch.tensor(-(d1 - 0.2))) - 100 * phi(torch.tensor(-d1)))
    assert abs(KrrSocModel(config).fit().price().price / european - 1) < 0.02


@pytest.fixture(scope="module")
def model() -> KrrSocModel:
    """A small fitted 2-D max-call."""
    return KrrSocModel(KrrSocConfig(payoff="max_call", dim=2, dividend=0.1, maturity=3.0, **FIXED)).fit()


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (torch.ones(3, 1), r"states must be \(B, 2\), got \(3, 1\)"),
        (torch.ones(2), r"states must be \(B, 2\), got \(2,\)"),
        (torch.tensor([[100.0, math.nan]]), "states must be finite"),
        (torch.tensor([[100.0, math.inf]]), "states must be finite"),
        (torch.tensor([[100.0, 0.0]]), "states must hold positive prices"),
    ],
)
def test_states_are_refused_when_their_width_or_values_are_wrong(model, states, message):
    with pytest.raises(ValueError, match=message):
        model(states, t=3)


@pytest.mark.parametrize("t", [-1, 10, 1.5])
def test_date_is_refused_when_outside_of_the_horizon(model, t):
    with pytest.raises(ValueError, match=f"t={t} must be a date 0 … 9"):
        model(torch.full((1, 2), 100.0), t=t)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.price(alpha=1.0), "alpha=1.0 must be between 0 and 1"),
        (lambda m: m.lower_bound(1), "n_lower=1 must be at least 2"),
        (lambda m: m.upper_bound(1), "n_upper=1 must be at least 2"),
        (lambda m: m.exercise_boundary(0), "t=0 must be a date 1 … 8"),
        (lambda m: m.exercise_boundary(1, axis=2), "axis=2 must be an asset 0 … 1"),
    ],
)
def test_method_names_the_argument_when_it_is_out_of_range(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_use_is_refused_when_the_model_is_not_fitted():
    with pytest.raises(ValueError, match="not fitted: call fit"):
        KrrSocModel(KrrSocConfig()).price()


def test_float32_states_are_promoted_when_given(model):
    x = torch.tensor([[110.0, 95.0]])
    out = model(x, t=4)
    assert out.value.dtype == torch.float64
    assert torch.equal(out.value, model(x.double(), t=4).value)


def test_price_and_bounds_are_zero_when_no_state_is_in_the_money():
    config = KrrSocConfig(strike=30.0, volatility=0.1, **FIXED)
    out = KrrSocModel(config).fit().price(bounds=True, n_lower=500, n_upper=100, n_upper_inner=16)
    assert (out.price, out.lower.value, out.upper.value) == (0.0, 0.0, 0.0)


def test_deep_put_is_exercised_at_once_when_date_zero_is_allowed():
    model = KrrSocModel(KrrSocConfig(spot=50.0, **FIXED)).fit()
    assert model.price().price == 50.0
    assert int(model(torch.tensor([[50.0]]), t=0).action) == 0  # exercise
    assert model.lower_bound(100).value == 50.0


def test_deep_put_is_held_when_date_zero_is_not_allowed():
    model = KrrSocModel(KrrSocConfig(spot=50.0, exercise_dates=list(range(1, 10)), **FIXED)).fit()
    first = 100 * math.exp(-0.05 / 9) - 50  # exercised for sure at the first date
    assert abs(model.price().price / first - 1) < 1e-3
    assert int(model(torch.tensor([[50.0]]), t=0).action) == 1  # hold


def test_one_step_is_a_plain_european_average_when_date_zero_is_out_of_the_money():
    model = KrrSocModel(KrrSocConfig(n_steps=1, n_initial=2**16)).fit()
    assert abs(model.price().price - 5.5735260) < 1e-3  # Black–Scholes


def test_centres_are_cut_with_a_warning_when_they_outnumber_the_states():
    with pytest.warns(UserWarning, match="n_centers=300 is more than n_states=100"):
        model = KrrSocModel(KrrSocConfig(n_states=100, n_centers=300, n_inner=8, n_steps=2)).fit()
    assert model.centers.shape[1] == 100


def test_sampler_refuses_an_odd_count_when_antithetic():
    with pytest.raises(ValueError, match="n_inner=5 must be even"):
        InnerSampler("antithetic", 5, 1, 0, torch.zeros((), dtype=torch.float64))


def test_gauss_hermite_is_refused_when_the_noise_has_four_dimensions():
    with pytest.raises(ValueError, match="at most 3 noise dimensions, here 4"):
        KrrSocModel(KrrSocConfig(payoff="max_call", dim=4, sampler="gauss_hermite")).fit()


def test_zero_rate_and_dividend_call_equals_its_european_price():
    model = KrrSocModel(KrrSocConfig(payoff="call", rate=0.0)).fit()
    out = model.price(bounds=True, n_lower=20_000, n_upper=300, n_upper_inner=64)
    assert abs(out.price / 7.9655675 - 1) < 0.01  # Black–Scholes, r = δ = 0
    assert out.upper.value + 3 * out.upper.standard_error >= 7.9655675


def test_kernel_may_be_evaluated_in_single_precision_when_asked():
    double, single = (
        KrrSocModel(KrrSocConfig(kernel_dtype=name, lam=1e-6, **FIXED)).fit() for name in ("float64", "float32")
    )
    assert single.alpha.dtype == torch.float64
    assert 0 < abs(single.price().price - double.price().price) < 0.05


def test_loading_lists_the_payoffs_when_the_saved_one_is_not_registered(tmp_path):
    from hf_models.krr_soc.payoffs_krr_soc import PAYOFFS

    register_payoff("digital_for_this_test", lambda x, strike: (x.mean(-1) > strike).to(x.dtype))
    try:
        KrrSocModel(KrrSocConfig(payoff="digital_for_this_test", **FIXED)).fit().save_pretrained(tmp_path)
        assert KrrSocModel.from_pretrained(tmp_path).price().price > 0
    finally:
        del PAYOFFS["digital_for_this_test"]
    model = KrrSocModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'digital_for_this_test' is not registered; there is basket_call"):
        model.price()


def test_payoff_name_is_refused_when_taken():
    with pytest.raises(ValueError, match="'put' is already registered"):
        register_payoff("put", lambda x, strike: x.mean(-1))


def test_last_date_gives_the_payoff_when_asked(model):
    out = model(torch.tensor([[110.0, 90.0], [90.0, 80.0]]), t=9)
    assert out.value.tolist() == [10.0, 0.0] and out.action.tolist() == [0, 1]


def test_date_zero_gives_the_stored_price_only_for_the_stored_spot(model):
    out = model(torch.tensor([[100.0, 100.0], [120.0, 100.0]], dtype=torch.float64), t=0)
    near = model(torch.tensor([[100.0, 100.0]], dtype=torch.float64), t=0)
    assert float(near.value) == model.price().price
    assert float(out.value[1]) > float(out.value[0]) + 5
    assert abs(float(out.value[0]) - model.price().price) < 1e-9


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"kappa": -1.0}, r"process_params\['kappa'\]=-1.0 must be positive"), ({"speed": 1.0}, "do not fit 'heston'")],
)
def test_heston_names_the_parameter_when_it_is_wrong(parameters, message):
    with pytest.raises(ValueError, match=message):
        _ = KrrSocModel(KrrSocConfig(process="heston", process_params=parameters)).problem


def test_heston_is_refused_when_it_has_two_assets():
    with pytest.raises(ValueError, match="dim=2 must be 1"):
        _ = KrrSocModel(KrrSocConfig(process="heston", dim=2)).problem


def test_paths_ask_for_a_simulator_when_they_have_none():
    paths = torch.rand(50, 3, 1, generator=torch.Generator().manual_seed(0)).double() + 99.5
    problem = OptimalStopping(PathStates(paths), "put", 100.0, 2, 1.0, 0.0)
    config = KrrSocConfig(process="custom", n_steps=2, **FIXED)
    with pytest.raises(NotImplementedError, match="give a one-step simulator"):
        KrrSocModel(config).fit(problem)


def test_paths_are_refused_when_not_finite():
    with pytest.raises(ValueError, match="paths must be finite"):
        PathStates(torch.full((2, 3, 1), math.nan))


def test_custom_process_is_refused_when_no_problem_is_given():
    with pytest.raises(ValueError, match="process='custom': give the problem"):
        KrrSocModel(KrrSocConfig(process="custom")).fit()


def test_problem_is_refused_when_it_does_not_follow_the_protocol():
    with pytest.raises(TypeError, match="must follow ControlProblem, got str"):
        KrrSocModel(KrrSocConfig(process="custom")).fit("put")


def test_singular_correlation_has_a_factor_when_semidefinite():
    ones = torch.ones(3, 3, dtype=torch.float64)
    factor = correlation_factor(ones)
    assert torch.allclose(factor @ factor.T, ones, atol=1e-12)
