"""The model as a transformers model: fits, files, decisions, sensitivities, control problems, other processes."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModel

from datasets_scripts.sim_paths import SimPathsBuilder
from hf_models import KrrSocConfig, KrrSocModel
from hf_models.krr_soc import LinearQuadratic, OptimalStopping, PathStates, stopping_problem
from hf_models.krr_soc.dynamic_programming_krr_soc import ValueFunction, fit_value_function
from hf_models.krr_soc.samplers_krr_soc import InnerSampler
from hf_pipelines import hub
from hf_pipelines.krr_soc import CASES, BermudanLattice

SMALL = {"n_states": 300, "n_centers": 80, "n_inner": 32, "n_initial": 4096}
FIXED = SMALL | {"lengthscale": 1.0, "shrink": 1.0}
REPO = "krr-maxcall-5d"


@pytest.fixture(scope="module")
def put() -> KrrSocModel:
    """The one-year put with default settings."""
    return KrrSocModel(KrrSocConfig()).fit()


@pytest.fixture(scope="module")
def shipped() -> KrrSocModel:
    """The shipped five-asset model."""
    return KrrSocModel.from_pretrained(hub.repo(REPO))


@pytest.mark.parametrize("name", ["put S90", "put S100", "put S110", "dividend max-call d2 S100", "geometric put d5"])
def test_price_is_within_one_percent_of_the_reference(name):
    price = KrrSocModel(KrrSocConfig(**CASES[name].fields)).fit().price().price
    assert abs(price / CASES[name].value - 1) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geometric put d20", "max-call d10", "dividend max-call d5 S100"])
@pytest.mark.parametrize("seed", range(5))
def test_price_is_within_one_percent_of_the_reference_when_dimensions_are_many(name, seed):
    price = KrrSocModel(KrrSocConfig(**CASES[name].fields, seed=seed)).fit().price().price
    assert abs(price / CASES[name].value - 1) < 0.01


def test_heston_put_is_within_one_and_a_half_percent_when_eight_steps_are_taken():
    fields = CASES["Heston put"].fields | {"n_states": 600, "n_inner": 100, "n_centers": 150}
    assert abs(KrrSocModel(KrrSocConfig(**fields)).fit().price().price / 5.96463 - 1) < 0.015


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_loaded_model_is_bit_identical_in_float64_whatever_dtype_is_asked(put, tmp_path, dtype):
    put.price(bounds=True, n_lower=100, n_upper=20, n_upper_inner=8)
    put.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    assert type(loaded) is KrrSocModel
    for name, tensor in put.state_dict().items():
        other = loaded.state_dict()[name]
        assert other.dtype == torch.float64 and torch.equal(tensor, other)
    x = torch.tensor([[80.0], [100.0], [120.0]])
    for t in (0, 3, 9):
        assert torch.equal(put(x, t).value, loaded(x, t).value)
    assert loaded.price().price == put.price().price


def test_certificate_travels_with_the_model_when_bounds_were_computed(put, tmp_path):
    out = put.price(bounds=True, n_lower=100, n_upper=20, n_upper_inner=8, alpha=0.1)
    put.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written == KrrSocModel.from_pretrained(tmp_path).certificate
    assert written["price"] == out.price and written["lower"]["count"] == 100 and written["alpha"] == 0.1
    assert written["interval"] == list(out.interval) and written["versions"]["torch"] == torch.__version__


def test_configuration_survives_a_round_trip_when_a_preset_was_changed(tmp_path):
    config = KrrSocConfig(preset="paper", target="continuation", sampler="qmc", payoff="geo_put", dim=2)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.target, loaded.sampler, loaded.features, loaded.lam) == ("continuation", "qmc", "raw", 1e-6)
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


def test_lambda_is_an_accepted_name_for_the_penalty():
    assert KrrSocConfig(**{"lambda": 1e-4}).lam == 1e-4


def test_shipped_model_has_its_certified_price_when_loaded(shipped):
    certificate = shipped.certificate
    assert certificate["price"] == pytest.approx(shipped.price().price, abs=1e-12)
    assert certificate["interval"][0] <= 26.159 <= certificate["interval"][1]


def test_shipped_subfolder_has_its_own_certificate():
    model = AutoModel.from_pretrained(hub.repo(REPO), subfolder="put-1d")
    assert abs(model.certificate["price"] / 6.0275786 - 1) < 0.01


def test_decision_is_to_exercise_when_one_asset_is_far_ahead(shipped):
    x = torch.tensor([[170.0, 90.0, 90.0, 90.0, 90.0], [100.0] * 5])
    out = shipped(x, t=4)
    assert out.action.tolist() == [0, 1]
    assert float(out.value[0]) == 70.0


def test_value_does_not_see_the_order_of_exchangeable_assets(shipped):
    x = torch.tensor([[120.0, 80.0, 95.0, 100.0, 105.0]])
    assert torch.equal(shipped(x, 3).value, shipped(x.flip(1), 3).value)


def test_assets_are_not_sorted_when_they_differ():
    config = KrrSocConfig(payoff="max_call", dim=2, volatility=[0.1, 0.4], **FIXED)
    model = KrrSocModel(config).fit()
    x = torch.tensor([[120.0, 80.0], [80.0, 120.0]])
    values = model(x, 3).value
    assert abs(float(values[0] - values[1])) > 1


def test_tuple_is_returned_when_asked(put):
    value, continuation, action = put(torch.tensor([[90.0]]), 3, return_dict=False)
    assert value.shape == continuation.shape == action.shape == (1,)


def test_exercise_boundary_is_near_the_lattice_when_the_option_is_a_put(put):
    lattice = BermudanLattice()
    prices = torch.linspace(70, 99, 2901, dtype=torch.float64)[:, None]
    stops = lattice(5, prices) <= (100 - prices[:, 0]) + 1e-12
    boundary = put.exercise_boundary(5)
    assert len(boundary) == 1
    assert abs(float(boundary[0]) - float(prices[stops].max())) < 1.5
    below, above = put(boundary[:, None] - 0.01, 5).action, put(boundary[:, None] + 0.01, 5).action
    assert int(below) == 0 and int(above) == 1


def test_delta_is_near_the_lattice_when_differentiated(put):
    greeks = put.greeks()
    lattice, h = BermudanLattice(), 0.01
    x = torch.tensor([[100.0 - h], [100.0 + h]], dtype=torch.float64)
    low, high = lattice(0, x)
    assert abs(float(greeks["delta"]) - float(high - low) / (2 * h)) < 0.03
    assert float(greeks["value"]) == pytest.approx(put.price().price, rel=1e-6)


def test_delta_of_an_exercised_put_is_minus_one(put):
    greeks = put.greeks(torch.tensor([[50.0], [100.0]]))
    assert float(greeks["delta"][0]) == -1.0 and float(greeks["value"][0]) == 50.0


def test_bounds_start_anywhere_when_a_state_is_given(put):
    x, t = torch.tensor([95.0]), 4
    value = float(BermudanLattice()(t, x.double()[None]))
    lower, upper = put.lower_bound(20_000, state=x, t=t), put.upper_bound(200, 64, state=x, t=t)
    assert lower.value - 3.5 * lower.standard_error <= value <= upper.value + 3.5 * upper.standard_error
    assert abs(upper.value / value - 1) < 0.02


def test_upper_bound_is_tight_where_perfect_foresight_is_not():
    model = KrrSocModel(KrrSocConfig(**CASES["max-call d2"].fields)).fit()
    upper = model.upper_bound(400, 64)
    assert 16.85 - 4 * upper.standard_error < upper.value < 17.2  # perfect foresight gives 22.5


@pytest.mark.parametrize("target", ["value", "continuation"])
def test_lower_bound_does_not_compare_the_payoff_with_its_own_maximum(target):
    model = KrrSocModel(KrrSocConfig(target=target, **FIXED)).fit()
    lower = model.lower_bound(10_000)
    assert lower.value > 5.70 and lower.value - 3 * lower.standard_error < 6.0276  # European price: 5.5735


def test_refit_forgets_the_old_price_when_the_configuration_changed():
    model = KrrSocModel(KrrSocConfig(**FIXED)).fit()
    model.config.strike = 110.0
    assert model.fit().price().price == KrrSocModel(KrrSocConfig(strike=110.0, **FIXED)).fit().price().price > 10


@pytest.mark.parametrize("solver", ["eig", "cg", "dense"])
def test_solvers_agree_when_all_states_are_centres(solver):
    fields = {"n_states": 200, "n_centers": 200, "lam": 1e-5, "n_inner": 32, "lengthscale": 1.0, "shrink": 1.0}
    price = KrrSocModel(KrrSocConfig(solver=solver, **fields)).fit().price().price
    assert abs(price - KrrSocModel(KrrSocConfig(solver="eig", **fields)).fit().price().price) < 1e-5


@pytest.mark.parametrize("kernel", ["matern32", "matern52", "laplacian"])
def test_other_kernels_price_the_put_when_chosen(kernel):
    price = KrrSocModel(KrrSocConfig(kernel=kernel, **SMALL)).fit().price().price
    assert abs(price / 6.0275786 - 1) < 0.02


@pytest.mark.parametrize("sampler", ["mc", "antithetic", "gauss_hermite", "monomial3", "exact"])
def test_other_samplers_price_the_put_when_chosen(sampler):
    fields = {"features": "log", "target": "value", "clip": "none", "lam": 1e-7} if sampler == "exact" else {}
    price = KrrSocModel(KrrSocConfig(sampler=sampler, **FIXED | fields)).fit().price().price
    assert abs(price / 6.0275786 - 1) < (0.1 if sampler == "monomial3" else 0.03)  # two points miss the kink


@pytest.mark.parametrize("name", ["qmc", "mc", "antithetic", "gauss_hermite", "monomial3"])
def test_sampler_is_standard_normal_in_its_first_two_moments(name):
    like = torch.zeros((), dtype=torch.float64)
    sampler = InnerSampler(name, 64, 2, 0, like)
    z = sampler.draw(500, torch.Generator().manual_seed(0))
    assert z.shape == (500, sampler.count, 2)
    assert abs(float(sampler.average(z).mean())) < 0.02
    assert abs(float(sampler.average(z.square()).mean()) - 1) < 0.02


def test_noise_is_fresh_for_every_state_unless_shared():
    like = torch.zeros((), dtype=torch.float64)
    fresh, shared = (
        InnerSampler("qmc", 8, 1, 0, like, shared=s).draw(2, torch.Generator().manual_seed(0)) for s in (False, True)
    )
    assert not torch.equal(fresh[0], fresh[1]) and torch.equal(shared[0], shared[1])


def test_ranks_share_the_blocks_without_changing_a_bit():
    config = KrrSocConfig(n_states=700, n_centers=80, n_inner=16, n_steps=4, n_initial=1024)
    problem, like = stopping_problem(config), torch.zeros((), dtype=torch.float64)
    alone = fit_value_function(problem, config, like)
    barrier, parts = threading.Barrier(2), {}

    def fit_as(rank: int) -> ValueFunction:
        def gather(y: torch.Tensor) -> torch.Tensor:
            parts[rank] = y
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        return fit_value_function(problem, config, like, gather, rank, 2)

    with ThreadPoolExecutor(2) as pool:  # each thread is a rank
        both = list(pool.map(fit_as, (0, 1)))
    assert (parts[0] == 0).any() and (parts[1] == 0).any()  # each did its own blocks only
    for t, stage in alone.stages.items():
        for function in both:
            assert torch.equal(stage.alpha, function.stages[t].alpha)


def test_paths_of_a_data_set_train_the_model_when_a_simulator_is_given(tmp_path):
    builder = SimPathsBuilder(config_name="put", n_paths=400, cache_dir=str(tmp_path))
    builder.download_and_prepare()
    rows = builder.as_dataset(split="train").with_format("torch", dtype=torch.float64)
    paths = rows["path"][:]
    market = stopping_problem(KrrSocConfig()).process
    problem = OptimalStopping(PathStates(paths, step=market.step), "put", 100.0, 9, 1.0, 0.05)
    config = KrrSocConfig(process="custom", **SMALL)
    assert abs(KrrSocModel(config).fit(problem).price().price / 6.0275786 - 1) < 0.03


def test_fitted_values_stay_within_their_bounds_when_clipped(put):
    function = put.value_function()
    x = torch.tensor([[1.0], [50.0], [500.0]], dtype=torch.float64)
    stage = function.stages[4]
    values = function.fitted(4, put.scale(x))
    assert isinstance(function, ValueFunction)
    assert (values >= stage.low).all() and (values <= stage.high).all() and float(stage.low) == 0.0


def test_control_problem_refuses_option_features_when_fitted():
    with pytest.raises(ValueError, match="features='indexed' needs an option"):
        KrrSocModel(KrrSocConfig(process="custom", n_steps=5)).fit(LinearQuadratic())


def test_control_problem_has_no_price_but_values(tmp_path):
    config = KrrSocConfig(process="custom", n_steps=2, features="raw", n_states=50, n_centers=20, lengthscale=2.0)
    problem = LinearQuadratic(torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None], n_steps=2)
    model = KrrSocModel(config).fit(problem)
    with pytest.raises(ValueError, match="price\\(\\) is for options"):
        model.price()
    model.save_pretrained(tmp_path)
    loaded = KrrSocModel.from_pretrained(tmp_path)
    loaded.problem = problem
    x = torch.tensor([[0.5]])
    assert torch.equal(loaded(x, 0).value, model(x, 0).value) and not math.isnan(float(loaded(x, 1).value))
