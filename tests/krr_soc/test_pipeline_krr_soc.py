"""`pipeline("optimal-stopping")`."""

import pytest
import torch
from transformers import pipeline

from hf_models import KrrSocConfig, KrrSocModel
from hf_pipelines import OptimalStoppingPipeline, hub
from hf_pipelines.krr_soc import BermudanLattice

SIZES = {"n_lower": 2000, "n_upper": 100, "n_upper_inner": 32}


@pytest.fixture(scope="module")
def pipe() -> OptimalStoppingPipeline:
    """The shipped one-year put."""
    return pipeline("optimal-stopping", model=f"{hub.repo('krr-maxcall-5d')}/put-1d")


def test_task_loads_the_shipped_model_when_named(pipe):
    assert type(pipe) is OptimalStoppingPipeline and pipe.model.centers.dtype == torch.float64


def test_price_comes_with_bounds_when_asked(pipe):
    out = pipe({"spot": [100.0]}, bounds=True, **SIZES)
    assert out["price"] == pipe.model.price().price
    assert out["interval"][0] <= 6.0275786 <= out["interval"][1] and out["consistent"]
    assert out["action"] == "hold" and out["payoff"] == 0.0 and out["seconds"] > 0
    bound = pipe.model.lower_bound(2000)
    assert out["lower"]["value"] == bound.value and out["lower"]["standard_error"] == bound.standard_error


def test_decision_needs_no_bounds_when_a_date_is_given(pipe):
    outs = pipe([{"spot": [75.0], "t": 4}, {"spot": [99.0], "t": 4}])
    assert [out["action"] for out in outs] == ["exercise", "hold"]
    assert outs[0]["payoff"] == 25.0 and outs[0]["price"] == 25.0 and outs[0]["interval"] is None
    assert outs[1]["continuation"] > outs[1]["payoff"] == 1.0


def test_maturity_pays_when_the_last_date_is_given(pipe):
    assert pipe({"spot": [90.0], "t": 9})["price"] == 10.0


def test_strike_is_priced_by_scaling_when_it_differs(pipe):
    out = pipe({"spot": [110.0], "strike": 110.0}, bounds=True, **SIZES)
    base = pipe({"spot": [100.0]}, bounds=True, **SIZES)
    assert out["price"] == pytest.approx(1.1 * base["price"], rel=1e-6)
    assert out["upper"]["value"] == pytest.approx(1.1 * base["upper"]["value"], rel=1e-6)
    lattice = BermudanLattice(spot=100.0, strike=105.0)
    value = float(lattice(0, torch.full((1, 1), 100.0, dtype=torch.float64)))
    assert abs(pipe({"spot": [100.0], "strike": 105.0})["price"] / value - 1) < 0.01


def test_results_do_not_depend_on_the_batch_size(pipe):
    inputs = [{"spot": [s], "t": 3} for s in (80.0, 95.0, 110.0)]
    strip = lambda outs: [{k: v for k, v in out.items() if k != "seconds"} for out in outs]  # noqa: E731
    assert strip(pipe(inputs)) == strip(pipe(inputs, batch_size=3)) == strip([pipe(i) for i in inputs])


def test_seed_decides_the_paths_when_given(pipe):
    first, again, other = (pipe({"spot": [100.0]}, bounds=True, seed=s, **SIZES)["lower"] for s in (5, 5, 6))
    assert first == again != other


def test_alpha_widens_the_interval_when_smaller(pipe):
    wide, narrow = (pipe({"spot": [100.0]}, bounds=True, alpha=a, **SIZES)["interval"] for a in (0.01, 0.2))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_state_is_flagged_when_it_lies_beyond_the_training_states(pipe):
    assert pipe({"spot": [40.0], "t": 1})["extrapolates"] and not pipe({"spot": [95.0], "t": 1})["extrapolates"]


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        ({"spot": [100.0, 90.0]}, {}, "spot has 2 values, but the model has 1 assets"),
        ({"spot": [-1.0]}, {}, "states must hold positive prices"),
        ({"spot": [float("nan")]}, {}, "states must be finite"),
        ({"spot": [100.0], "t": 11}, {}, "t=11 must be a date"),
        ({"spot": [100.0], "strike": -5.0}, {}, "strike=-5.0 must be positive"),
        ({"spot": [100.0], "strike": "high"}, {}, "strike='high' must be positive"),
        ({"spot": [100.0], "rate": 0.1}, {}, "rate=0.1 is unknown; an input takes spot"),
        ({"spot": [100.0], "variance": 0.1}, {}, "this model has no variance"),
        ({"t": 1}, {}, "must be a dict such as"),
        ({"spot": [100.0]}, {"alpha": 2.0}, "alpha=2.0 must be between 0 and 1"),
        ({"spot": [100.0]}, {"paths": 10}, "paths=10 is unknown; there is bounds"),
        ({"spot": [100.0]}, {"bounds": True, "n_lower": 1}, "n_lower=1 must be at least 2"),
    ],
)
def test_argument_is_named_when_it_is_wrong(pipe, inputs, settings, message):
    with pytest.raises(ValueError, match=message):
        pipe(inputs, **settings)


def test_variance_is_taken_when_the_model_is_hestons():
    config = KrrSocConfig(process="heston", n_states=150, n_centers=50, n_inner=16, n_steps=3, n_initial=512)
    pipe = OptimalStoppingPipeline(KrrSocModel(config).fit())
    calm, wild = (pipe({"spot": [100.0], "variance": v, "t": 1})["price"] for v in (0.01, 0.09))
    assert wild > calm + 1


def test_specs_example_runs_as_printed(tmp_path):
    config = KrrSocConfig(
        process="black_scholes", payoff="max_call", dim=5, spot=100.0, strike=100.0, rate=0.05, dividend=0.10,
        volatility=0.2, correlation=0.0, maturity=3.0, n_steps=9, seed=0,
    )  # fmt: skip
    model = KrrSocModel(config).fit()
    assert abs(model.price().price - 26.159) < 0.15
    model.save_pretrained(tmp_path / "krr-maxcall-5d")
    pipe = pipeline("optimal-stopping", model=str(tmp_path / "krr-maxcall-5d"))
    assert pipe({"spot": [100.0] * 5}, bounds=True, **SIZES)["price"] == model.price().price
    assert pipe([{"spot": [130.0, 90.0, 90.0, 90.0, 90.0], "t": 4}])[0]["payoff"] == 30.0
