"""The Space of TetraJet-v2: its functions, what it says to bad input, and the page itself in Chromium."""

import importlib.util
import inspect
import json
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("gradio")

import gradio as gr
import torch
from browser import SOURCE_ROOT, open_space

APP = SOURCE_ROOT / "spaces" / "tetrajet_v2" / "app.py"
API_NAMES = {"inspect_format", "measure_bias", "oscillate", "train", "export"}
WAIT = 60  # seconds for a click on a crowded machine


@pytest.fixture(scope="module")
def app():
    """`app.py`, loaded by its path as `closedloop space` does it."""
    spec = importlib.util.spec_from_file_location("space_tetrajet_v2_app", APP)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def lm(app):
    """The module behind the fourth tab."""
    return app.tab_train.lm


@pytest.fixture(scope="module")
def trained(app):
    """Last answer of a training of two recipes, 10 steps: note, figure, rows, state."""
    return list(app.tab_train.train(["nvfp4_rtn", "bf16"], steps=10))[-1]


def last(generator):
    """What a function that renews its answer says at the end."""
    return list(generator)[-1]


# -------------------------------------------------------------------------------------------------------- microscope


def test_codes_and_scales_are_the_golden_ones_when_the_numbers_are_typed(app):
    t = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, None, -0.25, -0.75, -5, -2.5, 0, 0.2499, -6]
    numbers = [2240.0003 if value is None else 448 * value for value in t]  # None: just above 5
    own = ", ".join(map(str, numbers))
    note, _, scales, codes, _ = app.tab_microscope.inspect_format("own", own=own)
    assert [int(row[3], 2) for row in codes] == [7, 0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14, 12, 0, 0, 15]
    assert scales == [["0–15", "1", "448", "0x7e", "448", "6.000", scales[0][-1]]]
    assert "6.50 bits per number" in note and "clipped" not in note


def test_the_mean_of_stochastic_draws_goes_to_the_numbers_unless_they_are_clipped(app):
    microscope = app.tab_microscope.microscope
    x = microscope.sample("normal", 256, 0, 0)

    def error(draws: int, scale_rounding: str) -> float:
        seen = microscope.view(x, 128, "stochastic", scale_rounding, draws, 0)
        return microscope.relative_error(x, seen.mean)

    assert error(1000, "up") < 2 * error(1, "up") / 1000
    assert error(1000, "nearest") > 4 * error(1, "nearest") / 1000  # the floor of clipping
    assert error(1, "up") > 2 * microscope.relative_error(x, microscope.view(x, 128, "nearest", "up", 1, 0).mean)


def test_an_outlier_costs_its_own_outer_block_and_the_row_only_when_that_has_one_scale(app):
    for outer, lost in (("128", range(8)), ("-1", range(16))):
        _, _, scales, _, _ = app.tab_microscope.inspect_format(outlier=1e8, outer_block=outer)
        errors = [float(row[-1]) for row in scales]
        assert [block for block, error in enumerate(errors) if error == 1] == [block for block in lost if block != 5]
        assert errors[5] < 1e-10  # the outlier itself
        assert all(0.003 < error < 0.03 for block, error in enumerate(errors) if block not in lost)


@pytest.mark.parametrize("word", ["nan", "inf", "-Infinity"])
def test_a_broken_number_makes_its_outer_block_nan_and_no_other(app, word):
    numbers = ["1.5"] * 256
    numbers[3] = word
    note, _, _, codes, _ = app.tab_microscope.inspect_format("own", own=" ".join(numbers))
    assert note.startswith("**1 of 256 numbers is NaN or infinite: 128 become NaN**")
    assert [row[5] for row in codes] == ["nan"] * 128 + ["1.5"] * 128


@pytest.mark.parametrize("own", ["0 0 0", "5", "3.4e38 -3.4e38", "1e-45 0"])
def test_numbers_at_the_ends_of_fp32_stay_finite(app, own):
    note, _, _, codes, _ = app.tab_microscope.inspect_format("own", own=own, rounding="stochastic", draws=3)
    assert note.startswith("**Relative squared error") and "nan" not in note
    assert all(torch.tensor(float(row[5])).isfinite() for row in codes)


def test_random_rows_have_unit_variance_and_ties_lie_between_two_codes(app):
    microscope = app.tab_microscope.microscope
    for name in ("normal", "laplace", "uniform"):
        assert abs(float(microscope.sample(name, 100_000, 0, 1).var()) - 1) < 0.03
    seen = microscope.view(microscope.sample("ties", 128, 0, 0), 128, "nearest", "nearest", 1, 0)
    assert torch.equal(seen.tensor.inner.float(), torch.full((1, 8), 448.0))
    even = seen.tensor.codes[0][seen.x.abs() < 6] % 2
    assert not even.any()  # a tie goes to the even code


def test_the_bits_of_a_number_count_both_scales(app):
    bits = app.tab_microscope.microscope.bits
    assert bits(256, 128) == 4.75 and bits(128, -1) == 4.75 and bits(16, 128) == 6.5 and bits(1, 128) == 44


# ---------------------------------------------------------------------------------------------------------- gradient


def test_the_mean_gradient_of_the_base_recipe_keeps_improving_and_that_of_the_rivals_stops(app):
    tab = app.tab_gradient
    names = ["nvfp4_rtn", "fp4_all_the_way", "tetrajet_v2_base", "own"]
    answers = list(tab.measure_bias(names, "16"))
    note, _, rows = answers[-1]
    assert [len(answer[2]) for answer in answers] == [1, 2, 3, 4]  # a curve at a time
    assert "fall like 1/n after 16 draws: tetrajet_v2_base, own.**" in note
    assert note.endswith("At least one turns flat: nvfp4_rtn, fp4_all_the_way.")
    assert rows[0][1:] == ["2.6e-02", "2.6e-02", "16.0", "2.4e-02", "2.4e-02", "16.0"]  # no noise at all
    assert rows[3][1:] == rows[2][1:]  # the switches as they stand are the base recipe


def test_the_gradient_turns_flat_when_the_own_recipe_does_not_align(app):
    tab = app.tab_gradient
    _, _, rows = last(tab.measure_bias(["own"], "16", [name for name in tab.BASE if name != "align_backward"]))
    assert min(float(rows[0][3]), float(rows[0][6])) > 3


def test_growth_is_one_without_a_bias_and_n_where_averaging_does_not_help(app):
    growth = app.tab_gradient.growth
    assert growth({1: 0.5, 4: 0.125}) == 1 and growth({1: 0.5, 4: 0.5}) == 4


# ------------------------------------------------------------------------------------------------------- oscillation


def test_flips_of_the_toy_are_the_golden_ones_without_and_with_reset(app):
    note, _, rows = app.tab_oscillation.oscillate()
    assert [int(row[2]) for row in rows] == [399, 399, 399, 399, 1, 1, 400, 399]
    for row, expected in zip(rows, [199, 199, 199, 199, 1, 1, 200, 199], strict=True):
        assert abs(int(row[3]) - expected) <= 2
    assert [row[4] for row in rows] == ["100.0"] * 4 + ["0.0"] * 2 + ["100.0"] * 2
    assert [int(row[5]) for row in rows] == [4, 4, 4, 4, 0, 0, 4, 4]
    assert "24 times a weight was put on its centre" in note


def test_a_slow_way_back_leaves_fewer_flips_and_a_high_threshold_resets_nothing(app):
    def flips(**changes) -> tuple[int, int]:
        _, _, rows = app.tab_oscillation.oscillate(**{"steps": 60, "shown": 60} | changes)
        return sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)

    before, after = flips(learning_rate=0.005)
    assert after < 0.3 * before
    before, after = flips(threshold=101)  # ρ = 2/0.02
    assert before == after
    for detect in ("distance_ratio_mem_eff", "bin_edge"):
        before, after = flips(detect=detect, weight="7")
        assert after < before


# ---------------------------------------------------------------------------------------------------------- training


def test_recipes_share_weights_and_batches_and_learn(app, lm, trained):
    note, figure, rows, state = trained
    assert [row[0] for row in rows] == ["bf16", "nvfp4_rtn"]  # in the order of the page
    losses = {name: run.losses for name, run in state.runs.items()}
    assert abs(losses["bf16"][0] - losses["nvfp4_rtn"][0]) < 0.02  # ln 128 = 4.85, but for the rounding
    assert losses["bf16"] != losses["nvfp4_rtn"]
    assert all(run[-1] < run[0] - 0.5 for run in losses.values())
    assert "10 steps done. Held-out nats per character: bf16 " in note
    gap = state.runs["nvfp4_rtn"].held_out - state.runs["bf16"].held_out
    assert rows[1][3] == f"{gap:+.3f}" and rows[0][3] == "–"
    assert len(figure.axes) == 2
    assert all(run.optimizer is None and not run.model.training for run in state.runs.values())


def test_a_seed_gives_the_same_losses_again_whichever_recipes_run_beside(app, lm, trained):
    again = lm.begin(["nvfp4_rtn"], "scratch", 10, 3e-3, 0)
    for _ in range(3):
        lm.step(again, again.runs["nvfp4_rtn"])
        again.done += 1
    assert again.runs["nvfp4_rtn"].losses == trained[3].runs["nvfp4_rtn"].losses[:3]


def test_the_shipped_model_is_where_a_training_starts_and_it_is_not_changed(lm):
    before = {name: value.clone() for name, value in lm.shipped_model().state_dict().items()}
    training = lm.begin(["bf16", "tetrajet_v2"], "shipped", 10, 1e-3, 0)
    for run in training.runs.values():
        lm.step(training, run)
        assert run.losses[0] < 2.5
    assert all(torch.equal(value, before[name]) for name, value in lm.shipped_model().state_dict().items())


def test_a_stopped_training_keeps_its_models_and_says_where_it_stands(app, lm):
    running = app.tab_train.train(["nvfp4_rtn"], steps=200)
    note, *_, state = next(running)
    assert note == "**Step 0 of 200.**" and lm.models(state) == {}  # at once
    next(running)
    running.close()  # what the stop button does
    assert state.done == 1 and state.runs["nvfp4_rtn"].optimizer is None
    assert app.tab_train.stop_training(state).startswith(f"**Stopped after step {state.done} of 200.**")
    assert list(lm.models(state)) == ["nvfp4_rtn"]
    assert app.tab_train.stop_training(None) == app.tab_train.NOTHING


def test_a_training_ends_in_time_and_is_evaluated(app, lm, monkeypatch):
    monkeypatch.setattr(lm, "LONGEST", 0.0)
    note, _, rows, state = last(app.tab_train.train(["bf16"], steps=200))
    assert state.done == 1 and "The time of 0 seconds is over" in note
    assert float(rows[0][2]) > 3


def test_a_loss_that_is_not_finite_ends_the_training_with_a_readable_message(app, lm, monkeypatch):
    original = lm.plain_model

    def broken(start: str, seed: int):
        model = original(start, seed)
        model.lm_head.weight.data[0, 0] = float("nan")
        return model

    monkeypatch.setattr(lm, "plain_model", broken)
    with pytest.raises(gr.Error, match="loss became nan at step 1: take a smaller learning rate"):
        list(app.tab_train.train(["bf16"], steps=10))


def test_the_smoothed_curve_begins_at_the_first_value_and_keeps_a_constant(lm):
    assert lm.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert lm.smooth([]) == []


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth(lm):
    training = lm.Training({}, 100, 1e-3, 0, "scratch")
    rates = []
    for training.done in range(100):
        rates.append(lm.rate(training))
    assert rates[0] == pytest.approx(1e-3 / 20) and max(rates) == rates[19] == rates[20] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(5e-5, rel=0.02)


@pytest.mark.slow
def test_osci_reset_cuts_the_share_of_oscillating_weights_at_the_defaults_of_the_page(app):
    _, _, rows, state = last(app.tab_train.train(["tetrajet_v2_base", "base + OsciReset", "tetrajet_v2"]))
    base, osci, full = (state.runs[row[0]].shares[-1] for row in rows)
    assert base[0] == osci[0] == full[0] == 60
    assert max(osci[1], full[1]) < base[1] / 2.5  # seen: 4.8, 1.3 and 1.2 %; seed 1: 3.8, 1.0 and 1.0 %


# ------------------------------------------------------------------------------------------------------------ export


def test_the_exact_layout_computes_what_training_computed(app):
    note, checks, _, layers, written, config, _ = last(app.tab_export.export(layout="tetrajet"))
    assert checks[0] == ["logits, model against folder", "largest difference 0", "✓"]
    assert "0.0 % of the codes changed" in note and "Every check holds." in note
    assert "425,984 weights in 288,526 bytes: 5.42 bits each" in note
    model, folder = (line.partition(": ")[2].strip() for line in written.splitlines())
    assert model == folder and "The import statement" in model
    assert json.loads(config)["weights"] == "packed" and len(layers) == 14


def test_an_engine_layout_reports_what_it_changed_and_its_file_is_there_to_load(app, trained, tmp_path):
    running = app.tab_export.export("nvfp4_rtn", state=trained[3])
    note, checks, files, layers, _, config, archive = next(running)
    sizes = {name: int(size.replace(",", "")) for name, size in files}
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    assert next(running, None) is None and not Path(archive).exists()  # nothing is left behind
    for path in tmp_path.iterdir():
        assert path.stat().st_size == sizes[path.name]
    assert sizes["all files"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert all(row[2] == "✓" for row in checks) and len(layers) == 14
    assert json.loads(config)["format"] == "nvfp4-pack-quantized"
    report = json.loads((tmp_path / "export_report.json").read_text())
    assert 0.5 < report["codes_changed_percent"] < 10  # q, k, v and gate, up share a scale only here
    assert f"{report['codes_changed_percent']:.1f} % of the codes changed" in note
    assert "425,984 weights in 239,672 bytes: 4.50 bits each" in note  # 9/16 of a byte, and 4 bytes a layer


def test_a_model_trained_with_one_scale_per_matrix_exports_without_any_change(app, trained):
    answer = last(app.tab_export.export("nvfp4_rtn", "modelopt", "NVFP4", False, trained[3]))
    assert "0.0 % of the codes changed. Weights changed by 0.00 %" in answer[0]
    assert json.loads(answer[5])["quant_algo"] == "NVFP4"
    assert app.tab_export.refresh_sources(trained[3]).choices[-1] == ("trained here: nvfp4_rtn", "nvfp4_rtn")


def test_a_model_trained_in_high_precision_is_rounded_by_an_engine_layout_and_refused_by_the_exact_one(app, trained):
    note, _, _, layers, *_ = last(app.tab_export.export("bf16", state=trained[3]))
    assert "codes changed" not in note and {row[2] for row in layers} == {"–"}
    assert all(7 < float(row[1].removesuffix(" %")) < 13 for row in layers)
    with pytest.raises(gr.Error, match="layout tetrajet needs a model trained with 4-bit weights, not bf16"):
        list(app.tab_export.export("bf16", "tetrajet", state=trained[3]))


# --------------------------------------------------------------------------------------------------------- bad input

NAN = float("nan")
FIVE = ["bf16", "nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", "tetrajet_v2"]
BAD = [
    ("inspect_format", {"distribution": "cauchy"}, "distribution must be one of normal, .*; got 'cauchy'"),
    ("inspect_format", {"size": 4}, "number of values must be a whole number from 8 to 512, got 4"),
    ("inspect_format", {"size": 10**9}, "whole number from 8 to 512, got 1000000000"),
    ("inspect_format", {"size": 16.5}, "whole number from 8 to 512, got 16.5"),
    ("inspect_format", {"outlier": -1}, "outlier must be a number from 0 to 1000000000, got -1"),
    ("inspect_format", {"outlier": NAN}, "outlier must be a number .*, got nan"),
    ("inspect_format", {"outer_block": 128}, "outer block must be one of 128, 64, 32, -1; got 128"),
    ("inspect_format", {"rounding": None}, "rounding must be one of nearest, stochastic; got None"),
    ("inspect_format", {"scale_rounding": "down"}, "rounding of the scales must be one of nearest, up; got 'down'"),
    ("inspect_format", {"draws": 1001}, "number of draws must be a whole number from 1 to 1000, got 1001"),
    ("inspect_format", {"seed": -1}, "seed must be a whole number from 0 to 2147483647, got -1"),
    ("inspect_format", {"distribution": "own", "own": " "}, "own numbers are empty"),
    ("inspect_format", {"distribution": "own", "own": None}, "own numbers are empty"),
    ("inspect_format", {"distribution": "own", "own": "1 2 x"}, "Number 3 of your own, 'x', is not a number"),
    ("inspect_format", {"distribution": "own", "own": "1e39"}, "Number 1 of your own, '1e39', is beyond FP32"),
    ("inspect_format", {"distribution": "own", "own": "-1e999"}, "Number 1 of your own, '-1e999', is beyond FP32"),
    ("inspect_format", {"distribution": "own", "own": "1 " * 513}, "may be 512 at most, got 513"),
    ("inspect_format", {"distribution": "own", "own": "1" * 30000}, "may have 20480 characters at most, got 30000"),
    ("measure_bias", {"recipes": []}, "recipes must be at least 1, got 0"),
    ("measure_bias", {"recipes": None}, "recipes must be a list of .*; got None"),
    ("measure_bias", {"recipes": ["bf16"]}, "Each of the recipes must be one of .*; got 'bf16'"),
    ("measure_bias", {"switches": ["all"]}, "Each of the switches must be one of .*; got 'all'"),
    ("measure_bias", {"draws": "4096"}, "number of draws must be one of 16, 64, 256, 1024; got '4096'"),
    ("measure_bias", {"seed": "0"}, "seed must be a whole number .*, got '0'"),
    ("oscillate", {"period": 2}, "period P must be a whole number from 3 to 200, got 2"),
    ("oscillate", {"window": 49}, "window W must be less than P − 1 = 49, got 49"),
    ("oscillate", {"window": 0}, "window W must be a whole number from 1 to 198, got 0"),
    ("oscillate", {"threshold": 0}, "threshold τ must be a number from 0.5 to 200, got 0"),
    ("oscillate", {"learning_rate": float("inf")}, "learning rate must be a number from 0.001 to 0.2, got inf"),
    ("oscillate", {"steps": 10**7}, "number of steps must be a whole number from 10 to 800, got 10000000"),
    ("oscillate", {"shown": True}, "number of steps shown must be .*, got True"),
    ("oscillate", {"detect": "luck"}, "detection must be one of .*; got 'luck'"),
    ("oscillate", {"weight": "8"}, "weight must be one of 0, 1, .*; got '8'"),
    ("train", {"recipes": []}, "recipes must be at least 1, got 0"),
    ("train", {"recipes": FIVE}, "recipes must be at most 4 at a time, got 5"),
    ("train", {"recipes": "bf16"}, "recipes must be a list of .*; got 'bf16'"),
    ("train", {"start": "gpt"}, "start must be one of scratch, shipped; got 'gpt'"),
    ("train", {"steps": 201}, "number of steps must be a whole number from 10 to 200, got 201"),
    ("train", {"learning_rate": NAN}, "learning rate must be a number from 0.0001 to 0.01, got nan"),
    ("train", {"seed": 2**31}, "seed must be a whole number .*, got 2147483648"),
    ("export", {"source": "tetrajet_v2"}, "model must be one of 'shipped'; got 'tetrajet_v2'. Train another recipe"),
    ("export", {"source": ["x" * 500]}, "got .'x{50,60}…"),
    ("export", {"layout": "gguf"}, "layout must be one of compressed-tensors, modelopt, tetrajet; got 'gguf'"),
    ("export", {"scheme": "W8"}, "scheme must be one of NVFP4A16, NVFP4; got 'W8'"),
    ("export", {"fuse": "no"}, "switch for fused layers must be true or false, got 'no'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_a_bad_argument_gets_a_readable_message(app, name, changes, message):
    (function,) = {fn.fn for fn in app.demo.fns.values() if fn.api_name == name}
    with pytest.raises(gr.Error, match=message) as caught:
        answer = function(**changes)
        next(answer)
    assert not caught.value.print_exception


# --------------------------------------------------------------------------------------------------------------- API


@pytest.fixture(scope="module")
def client(app):
    """A `gradio_client` on the running app."""
    from gradio_client import Client

    _, url, _ = app.demo.launch(
        **app.LAUNCH_KWARGS, prevent_thread_lock=True, quiet=True, server_name="127.0.0.1", ssr_mode=False
    )
    yield Client(url, verbose=False)
    app.demo.close()


def test_every_public_function_has_a_name_and_a_documented_signature(app):
    public = [fn for fn in app.demo.fns.values() if fn.api_visibility == "public"]
    assert {fn.api_name for fn in public} == API_NAMES
    for fn in public:
        text = inspect.getdoc(fn.fn)
        assert "Returns:" in text
        for name in inspect.signature(fn.fn).parameters:
            assert f"    {name}: " in text, f"{fn.api_name} does not document {name}"


def test_a_client_inspects_measures_and_oscillates(client):
    note, _, scales, codes, _ = client.predict(size=40, api_name="/inspect_format")
    assert len(scales["data"]) == 3 and len(codes["data"]) == 40 and "bits per number" in note
    note, *_ = client.predict(steps=50, api_name="/oscillate")
    assert "in 50 steps" in note
    _, _, table = client.predict(recipes=["tetrajet_v2_base"], draws="16", api_name="/measure_bias")
    assert [row[0] for row in table["data"]] == ["tetrajet_v2_base"]


@pytest.mark.slow
def test_a_client_exports_what_its_session_trained(client):
    note, _, table = client.predict(recipes=["bf16"], steps=10, api_name="/train")
    assert note.startswith("**10 steps done.") and len(table["data"]) == 1
    note, *_, archive = client.predict(source="bf16", layout="modelopt", api_name="/export")
    assert note.endswith("Every check holds.")
    with zipfile.ZipFile(archive) as packed:
        assert "model.safetensors" in packed.namelist()


@pytest.mark.parametrize(
    ("api_name", "arguments", "message"),
    [
        ("/inspect_format", {"size": 10**6}, "512"),
        ("/oscillate", {"period": 20, "window": 19}, "window W must be less than P − 1 = 19, got 19"),
        ("/train", {"steps": 10**6}, "200"),
        ("/export", {"source": "../../etc"}, "model must be one of 'shipped'"),
    ],
)
def test_a_client_that_leaves_the_bounds_is_told_so(app, client, api_name, arguments, message):
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match=message):  # a session of its own: nothing was trained in it
        Client(client.src, verbose=False).predict(**arguments, api_name=api_name)


# ----------------------------------------------------------------------------------------------------------- browser


def pick(page, role: str, name: str):
    """The visible radio button or checkbox called `name`."""
    return page.get_by_role(role, name=name, exact=True).and_(page.locator(":visible"))


@pytest.fixture(scope="module")
def space():
    """The open page; both tests share it, for starting takes longest."""
    with open_space(APP) as opened:
        yield opened


@pytest.mark.browser
def test_every_control_of_every_tab(space, tmp_path):
    page = space.page

    def picture(name: str) -> None:
        page.wait_for_timeout(300)
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)

    page.get_by_text("Relative squared error 8.97e-03 (20.5 dB)").wait_for(timeout=WAIT * 1000)  # by itself
    picture("microscope")
    space.fill_number("number input for How many", 64)
    space.fill_number("Outlier", 1e6)
    pick(page, "radio", "the whole row (NVIDIA)").click()
    pick(page, "radio", "stochastic (backward)").click()
    pick(page, "radio", "up (nothing is clipped)").click()
    space.settle()
    space.fill_number("number input for Draws to average", 50)
    space.fill_number("Seed", 3)
    space.click("Quantize", WAIT)
    page.get_by_text("of the mean of 50 draws").wait_for()
    page.get_by_text("at 5.00 bits per number").wait_for()
    picture("microscope_outlier")
    space.choose("Numbers", "the numbers below")
    page.get_by_label("Numbers of your own").fill("1 2 nan 3")
    space.click("Quantize", WAIT)
    page.get_by_text("1 of 4 numbers is NaN or infinite: 4 become NaN").wait_for()
    page.get_by_label("Numbers of your own").fill("1 2 many")
    space.click("Quantize", WAIT)
    assert "Number 3 of your own, 'many', is not a number" in space.take_message()

    space.open_tab("Is my gradient unbiased?")
    for name in ("nvidia_nvfp4", "fp4_all_the_way", "base + strict_unbiased: backward scales rounded up"):
        pick(page, "checkbox", name).click()
    pick(page, "checkbox", "your own recipe, by the switches below").click()
    space.settle()
    pick(page, "checkbox", "re-quantize Q(W), Q(X)").click()
    pick(page, "radio", "16").click()
    space.fill_number("Seed", 1)
    space.click("Measure", WAIT)
    page.get_by_text("fall like 1/n after 16 draws: tetrajet_v2_base.").wait_for()
    page.get_by_text("At least one turns flat: nvfp4_rtn, own.").wait_for()
    picture("gradient")
    for name in ("nvfp4_rtn: everything to nearest", "tetrajet_v2_base"):
        pick(page, "checkbox", name).click()
    pick(page, "checkbox", "your own recipe, by the switches below").click()
    space.click("Measure", WAIT)
    assert "recipes must be at least 1, got 0" in space.take_message()

    space.open_tab("Oscillation")
    page.get_by_text("24 times a weight was put on its centre").wait_for(timeout=WAIT * 1000)
    for label, value in (("Period P", 40), ("Window W", 8), ("Threshold τ", 20), ("Steps", 200)):
        space.fill_number(f"number input for {label}", value)
    space.fill_number("number input for Learning rate", 0.01)
    space.fill_number("number input for Steps shown", 90)
    pick(page, "radio", "the same, 10 % nearest an edge only").click()
    space.choose("Weight of the curves", "2.49 → 2.5")
    space.click("Run", WAIT)
    page.get_by_text("flips of the eight weights in 200 steps without OsciReset").wait_for()
    picture("oscillation")
    space.fill_number("number input for Window W", 39)
    space.click("Run", WAIT)
    assert "window W must be less than P − 1 = 39, got 39" in space.take_message()

    space.open_tab("Train a tiny LM")
    page.get_by_text("Nothing was trained yet.").wait_for()
    pick(page, "checkbox", "tetrajet_v2").click()
    space.fill_number("number input for Steps", 200)
    page.get_by_role("button", name="Train", exact=True).click()
    page.get_by_text("Step 1 of 200.").or_(page.get_by_text("of 200.")).first.wait_for(timeout=WAIT * 1000)
    page.wait_for_timeout(2500)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped after step").wait_for(timeout=8000)  # long before 200 steps are over
    page.wait_for_timeout(1500)
    assert page.get_by_text("Stopped after step").is_visible()
    space.settle(WAIT)
    pick(page, "checkbox", "bf16").click()
    pick(page, "radio", "the shipped model").click()
    space.fill_number("number input for Steps", 20)
    space.fill_number("number input for Learning rate", 0.0015)
    space.fill_number("Seed", 5)
    space.click("Train", WAIT)
    page.get_by_text("20 steps done. Held-out nats per character: nvfp4_rtn").wait_for()
    picture("training")

    space.open_tab("Export")
    page.get_by_label("Model", exact=True).and_(page.locator(":visible")).wait_for()
    assert page.get_by_label("Model", exact=True).first.input_value() == "trained here: nvfp4_rtn"
    pick(page, "radio", "modelopt (TensorRT-LLM, SGLang)").click()
    pick(page, "radio", "weights and inputs").click()
    page.get_by_label("q, k, v and gate, up share their outer scale").click()
    space.click("Write checkpoint", WAIT)
    page.get_by_text("0.0 % of the codes changed.").wait_for()
    page.get_by_text("tetrajet-v2-modelopt").wait_for()  # the zip file
    page.get_by_role("button", name="quantization_config of config.json").click()
    picture("export")
    space.choose("Model", "the shipped model (tetrajet_v2)")
    pick(page, "radio", "tetrajet (this package; exact)").click()
    space.click("Write checkpoint", WAIT)
    page.get_by_text("largest difference 0").last.wait_for()
    page.get_by_text("5.42 bits each.").wait_for()
    assert "Traceback" not in page.content()
    assert space.problems == []


@pytest.mark.browser
def test_nothing_is_cut_off_on_a_telephone_or_lost_in_the_dark(space, tmp_path):
    page = space.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{space.url}/?__theme=dark", wait_until="load")
    page.get_by_text("Relative squared error 8.97e-03").wait_for(timeout=WAIT * 1000)
    space.settle(WAIT)
    page.screenshot(path=tmp_path / "telephone_dark.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    picture = page.locator(".figure img").first
    frame = page.locator(".figure .matplotlib").first.bounding_box()
    assert picture.bounding_box()["x"] >= frame["x"] and picture.bounding_box()["width"] > frame["width"]
    assert "invert" in picture.evaluate("image => getComputedStyle(image).filter")
    results, guide = (page.locator(f".{name}:visible").first.bounding_box() for name in ("results", "guide"))
    assert guide["y"] >= results["y"] + results["height"]  # the answer comes before the explanation
    assert space.problems == []
