"""The Space of MPC-Flow: its functions, what it says to bad input, and the page itself in Chromium."""

import importlib.util
import inspect
import io
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

pytest.importorskip("gradio")

import gradio as gr
import torch
from browser import SOURCE_ROOT, open_space

APP = SOURCE_ROOT / "spaces" / "mpc_flow" / "app.py"
METHODS = ("k1", "k1_churn", "k3", "dt", "pnp_flow", "flowgrad")
PROBLEMS = ("denoise", "box", "random", "freeform", "blur", "motion", "super_resolution", "hdr", "tanh_blur", "phase")
METHOD_LABELS = (
    "MPC, K = 1: no backpropagation",
    "MPC, K = 1 + churn: no backpropagation",
    "MPC, K = 3",
    "MPC, Δt horizon: best, slower",
    "Baseline: PnP-Flow",
    "Baseline: FlowGrad, global control",
)
PROBLEM_LABELS = (
    "Noise only",
    "Box of 6×6 pixels missing",
    "70 % of the pixels missing",
    "Stripes missing",
    "Gaussian blur",
    "Motion blur",
    "Low resolution, 8×8",
    "Overexposure (HDR), nonlinear",
    "tanh of a blur, nonlinear",
    "Fourier magnitudes only (phase retrieval)",
)
API_NAMES = {"restore", "degrade", "show_endpoint", "problem_defaults", "method_defaults", "plan_paths"}
CLICK_SECONDS = 6  # three on an idle machine


@pytest.fixture(scope="module")
def app():
    """`app.py`, loaded by its path as `closedloop space` does it."""
    spec = importlib.util.spec_from_file_location("space_mpc_flow_app", APP)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def tab(app):
    """The module with the functions of the first tab."""
    return app.tab_restore


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory) -> dict[str, str]:
    """Files that are no acceptable picture, each with what is wrong with it as its name."""
    folder = tmp_path_factory.mktemp("bad")

    def save(name: str, picture: PIL.Image.Image) -> None:
        picture.save(folder / name)

    save("one_pixel.png", PIL.Image.new("L", (1, 1)))
    save("huge.png", PIL.Image.new("L", (5000, 4000), 128))  # 20 megapixels in some 20 kB
    (folder / "text.png").write_text("this is not a picture\n" * 20)
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(buffer, "PNG")
    (folder / "cut_off.png").write_bytes(buffer.getvalue()[:2000])
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> str:
    """A picture of a user: coloured, not square, with transparency."""
    path = tmp_path_factory.mktemp("good") / "photo.png"
    ramp = np.linspace(0, 255, 90 * 120).reshape(90, 120)
    PIL.Image.fromarray(np.stack([ramp, ramp[::-1], ramp, 255 - ramp / 2], -1).astype(np.uint8)).save(path)
    return str(path)


def restore(tab, **changes) -> dict:
    """Call `restore` as the page does at its start, with changes; returns its outputs by name."""
    arguments = {
        "source": "digit",
        "digit": 8,
        "file": None,
        "drawing": None,
        "problem": "random",
        "noise_std": 0.01,
        "method": "k1_churn",
        "log10_lam": 2.0,
        "auto_lam": True,
        "steps": 20,
        "seed": 0,
        "progress": lambda *args, **kwargs: None,
    }
    names = (
        *("truth", "degraded", "restored", "compare", "endpoint", "step", "residual", "error", "nearest", "table"),
        *("note", "endpoints"),
    )
    return dict(zip(names, tab.restore(**arguments | changes), strict=True))


def decibels(output: dict) -> tuple[float, float]:
    """PSNR of the degraded and of the restored image, from the table."""
    (_, _, degraded, restored) = output["table"][0]
    return float(degraded), float(restored)


# ------------------------------------------------------------------------------------------------------- functions


@pytest.mark.parametrize("method", METHODS)
def test_every_method_restores_a_digit_better_than_it_was(tab, method):
    output = restore(tab, method=method, auto_lam=method.startswith("k1"), steps=15)

    degraded, restored = decibels(output)
    assert restored > degraded + 3
    assert len(output["endpoints"]) == 15
    assert output["restored"].size == output["endpoint"].size == (384, 384)
    assert "15 network calls" in output["note"] or not method.startswith("k1")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_degradation_is_undone_in_part(tab, problem):
    noise_std, log10_lam = tab.problem_defaults(problem)

    output = restore(tab, problem=problem, noise_std=noise_std, log10_lam=log10_lam, steps=25)

    degraded, restored = decibels(output)
    assert restored > degraded + (0.5 if problem == "phase" else 2)  # Fourier magnitudes allow the image upside down
    assert ("180°" in output["note"]) == (problem == "phase")


def test_one_step_control_makes_no_backward_call_and_delta_t_does(tab):
    rows = {row[0]: row for row in restore(tab, method="k1")["table"]}
    assert rows["Network calls, backward"][3] == "0"
    rows = {row[0]: row for row in restore(tab, method="dt", auto_lam=False, steps=3)["table"]}
    assert rows["Network calls, backward"][3] == "40"  # 20 iterations in all steps but the last


def test_the_same_seed_gives_the_same_pictures_and_another_one_does_not(tab):
    first, second, other = (np.asarray(restore(tab, seed=seed)["restored"]) for seed in (3, 3, 4))
    assert (first == second).all()
    assert (first != other).any()


def test_the_measurement_shown_by_degrade_is_the_one_restored(tab):
    _, degraded, note = tab.degrade("digit", 8, None, None, "random", 0.01, 5)
    assert (np.asarray(degraded) == np.asarray(restore(tab, seed=5)["degraded"])).all()
    assert note == ""


def test_the_noise_of_the_measurement_is_not_the_starting_noise(tab):
    """The data error of the truth is the noise; if the sampler started from the same numbers, K = 1 would keep it."""
    rows = {row[0].split(" (")[0]: row for row in restore(tab, problem="denoise", noise_std=0.2)["table"]}
    assert float(rows["Data RMSE"][1]) == pytest.approx(0.2, abs=0.03)
    assert float(rows["Data RMSE"][3]) == pytest.approx(0.2, abs=0.04)  # near the noise: it was not fitted


def test_an_uploaded_picture_is_shrunk_and_said_to_be_foreign(tab, photo):
    output = restore(tab, source="upload", file=photo)
    assert "handwritten digits" in output["note"]
    assert np.unique(np.asarray(output["truth"]).reshape(16, 24, 16, 24).std((1, 3))).tolist() == [0]


def test_dark_ink_on_a_light_canvas_becomes_a_light_digit(tab):
    canvas = np.full((320, 320), 255, dtype=np.uint8)
    canvas[40:280, 140:180] = 0
    truth = np.asarray(restore(tab, source="draw", drawing={"composite": canvas})["truth"])
    assert truth[192, 192] > 200  # averaged over its border
    assert truth[192, 20] == 0


def test_a_16_bit_picture_is_scaled_not_clipped(app, tmp_path):
    path = tmp_path / "deep.png"
    PIL.Image.fromarray(np.full((20, 20), 32768, dtype=np.uint16)).save(path)
    picture = sys.modules["pictures_mpc_flow"].open_picture(str(path))
    assert np.asarray(picture).max() == 127


def test_show_endpoint_gives_the_estimate_of_that_step(tab):
    output = restore(tab, steps=5)
    last, first = (np.asarray(tab.show_endpoint(step, output["endpoints"])) for step in (5, 1))
    assert (last == np.asarray(output["endpoint"])).all()
    assert (first != last).any()


def test_plan_paths_agrees_with_the_golden_end_points(app):
    """`mpc_flow.md`, golden 3: means ±(2, 2), x(0) = (−.3, −.2), N = 10, λ = 10."""
    planners = ["none", "k1", "k3", "dt"]
    figure, rows = app.tab_paths.plan_paths("two_modes", -0.3, -0.2, 2, 1, 10, planners, gr.Progress())
    ends = {row[0]: row[1] for row in rows}
    assert ends == {
        "No control": "(-1.71, -1.67)",
        "MPC, K = 1": "(1.92, 1.27)",
        "MPC, K = 3": "(1.85, 1.39)",
        "MPC, Δt horizon": "(1.95, 1.83)",
    }
    assert len(figure.axes) == 1


@pytest.mark.parametrize("density", ["two_modes", "hexagon"])
def test_global_control_costs_least_in_two_dimensions(app, density):
    _, rows = app.tab_paths.plan_paths(density, -0.3, -0.2, 2, 1, 10, ["none", "global", "k1", "k2"], gr.Progress())
    costs = {row[0]: float(row[4]) for row in rows}
    assert min(costs, key=costs.get) == "Global control (FlowGrad)"


@pytest.mark.parametrize("task", ["style", "luminance", "super_resolution"])
def test_a_text_to_image_pipeline_is_guided_by_a_reference(app, task):
    """The third tab without a GPU: a tiny random SD3 and a tiny random CLIP, on the code that a GPU would run."""
    import text_to_image_mpc_flow as text_to_image
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from hf_pipelines import MPCFlowPipeline

    sys.path.insert(0, str(SOURCE_ROOT / "tests"))
    try:
        from tiny_pipelines import tiny_sd3
    finally:
        sys.path.remove(str(SOURCE_ROOT / "tests"))
    base, arguments = tiny_sd3()
    arguments = {  # the embeddings of one prompt; `guide` knows the size
        name: value[:1] if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in ("height", "width")
    }
    torch.manual_seed(0)
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    clip = CLIPVisionModel(CLIPVisionConfig(**config, image_size=16, patch_size=4)).eval().requires_grad_(False)
    pipe = MPCFlowPipeline(base)
    pipe.set_progress_bar_config(disable=True)
    reference = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))

    seen, image, rows = text_to_image.guide(pipe, task, reference, 3, 0, lambda: clip, side=16, **arguments)

    assert seen.size == image.size == (16, 16)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1][3]) > 0  # there is a control


def test_the_third_tab_is_built_where_there_is_a_gpu_only(app, monkeypatch):
    def tabs(blocks):
        return [block.label for block in blocks.blocks.values() if isinstance(block, gr.Tab)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tabs(app.build()) == ["Restore an image", "Paths in two dimensions"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    page = app.build()
    assert tabs(page)[2:] == ["Guide a text-to-image model"]
    assert "/generate" in page.get_api_info()["named_endpoints"]


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_pixel", "too small: each side must have at least 8 pixels, got 1×1"),
        ("huge", "too large: at most 16 megapixels are accepted, this one has 20.0"),
        ("text", "not a picture of a known kind"),
        ("cut_off", "damaged"),
    ],
)
def test_a_bad_file_gets_a_readable_message(tab, bad_files, name, message):
    with pytest.raises(gr.Error, match=message) as raised:
        tab.degrade("upload", 0, bad_files[name], None, "denoise", 0.1, 0)
    assert not raised.value.print_exception


def test_a_huge_picture_is_refused_before_it_is_decoded(tab, bad_files, monkeypatch):
    monkeypatch.setattr(PIL.Image.Image, "load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(gr.Error, match="too large"):
        tab.degrade("upload", 0, bad_files["huge"], None, "denoise", 0.1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "upload"}, "no picture yet"),
        ({"source": "upload", "file": "/nowhere/x.png"}, "missing: upload it again"),
        ({"source": "draw"}, "canvas is empty"),
        ({"source": "draw", "drawing": {"composite": np.full((9, 9), 255, np.uint8)}}, "canvas is empty"),
        ({"source": "camera"}, "source must be one of digit, upload, draw; got 'camera'"),
        ({"digit": 200}, "test digit must be a whole number from 0 to 199, got 200"),
        ({"digit": 1.5}, "whole number"),
        ({"problem": "rain"}, "degradation must be one of denoise, box.*got 'rain'"),
        ({"method": "magic"}, "method must be one of k1, .*got 'magic'"),
        ({"noise_std": -0.1}, "noise level must be a number from 0 to 0.5, got -0.1"),
        ({"noise_std": float("nan")}, "noise level must be a number from 0 to 0.5, got nan"),
        ({"noise_std": None}, "got None"),
        ({"log10_lam": float("inf"), "auto_lam": False}, "λ must be a number from -1 to 3, got inf"),
        ({"log10_lam": -5, "auto_lam": False}, "λ must be a number from -1 to 3, got -5"),
        ({"steps": 0}, "steps of k1_churn must be a whole number from 1 to 100, got 0"),
        ({"steps": 31, "method": "dt", "auto_lam": False}, "steps of dt must be a whole number from 1 to 30, got 31"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2147483647, got -1"),
        ({"auto_lam": True, "noise_std": 0}, "need a positive noise_std"),
        ({"auto_lam": True, "method": "dt"}, "horizon_steps=1 only"),
    ],
)
def test_a_bad_argument_gets_a_readable_message(tab, changes, message):
    with pytest.raises(gr.Error, match=message):
        restore(tab, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"density": "ring"}, "density must be one of two_modes, hexagon"),
        ({"start_1": float("nan")}, "start must be a number from -3 to 3, got nan"),
        ({"steps": 100}, "steps must be a whole number from 2 to 12, got 100"),
        ({"planners": []}, "choose at least one planner"),
        ({"planners": ["k9"]}, "planner must be one of none, global.*got 'k9'"),
    ],
)
def test_a_bad_argument_of_the_paths_gets_a_readable_message(app, changes, message):
    arguments = {
        "density": "two_modes",
        "start_1": 0,
        "start_2": 0,
        "observed": 2,
        "log10_lam": 1,
        "steps": 5,
        "planners": ["none"],
    }
    with pytest.raises(gr.Error, match=message):
        app.tab_paths.plan_paths(**arguments | changes)


# ------------------------------------------------------------------------------------------------------------- API


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
        assert "Args:" in text and "Returns:" in text
        for name in inspect.signature(fn.fn).parameters:
            assert f"    {name}: " in text, f"{fn.api_name} does not document {name}"


def test_a_client_restores_degrades_and_walks_through_the_estimates(client, photo):
    from gradio_client import handle_file

    outputs = client.predict(problem="blur", noise_std=0.05, steps=10, api_name="/restore")
    assert PIL.Image.open(outputs[2]).size == (384, 384)
    assert outputs[9]["headers"][3] == "Restored"
    assert PIL.Image.open(client.predict(step=3, api_name="/show_endpoint")).size == (384, 384)
    _, degraded, note = client.predict(source="upload", file=handle_file(photo), api_name="/degrade")
    assert PIL.Image.open(degraded).size == (384, 384)
    assert "handwritten digits" in note
    assert client.predict(problem="denoise", api_name="/problem_defaults") == (0.2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1000}, "100"),
        ({"log10_lam": -9}, "-1"),
        ({"method": "magic"}, "not in the list of choices"),
        ({"seed": -3}, "0"),
    ],
)
def test_a_client_that_leaves_the_bounds_is_told_so(client, arguments, message):
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match=message):
        client.predict(**arguments, api_name="/restore")


@pytest.mark.parametrize(("name", "message"), [("huge", "too large"), ("text", "not a picture")])
def test_a_client_cannot_draw_what_it_may_not_upload(client, bad_files, name, message):
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    file = handle_file(bad_files[name])
    drawing = {"background": file, "layers": [], "composite": file, "id": None}
    with pytest.raises(AppError, match=message):
        client.predict(source="draw", drawing=drawing, api_name="/degrade")


def test_the_folder_of_spaces_does_not_stand_in_for_the_package_of_that_name():
    code = (
        "import gradio as gr\n"
        "with gr.Blocks() as demo:\n"
        "    text = gr.Textbox()\n"
        "    gr.Button().click(lambda x: x, text, text)\n"
        "try:\n"
        "    import spaces\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "closedloop space" in done.stdout


# --------------------------------------------------------------------------------------------------------- browser


def clicked(space, name: str) -> None:
    seconds = space.click(name)
    assert seconds < CLICK_SECONDS, f"{name} took {seconds:.1f} s"
    print(f"{name}: {seconds:.2f} s")


def restored_decibels(space) -> float:
    note = space.page.get_by_text("network calls,").first.inner_text()
    return float(note.split("→")[1].split("dB")[0])


@pytest.mark.browser
def test_every_control_of_the_first_tab(tmp_path):
    from playwright.sync_api import expect

    with open_space(APP) as space:
        page = space.page
        space.settle()
        assert restored_decibels(space) > 20  # the page restores its first digit by itself
        clicked(space, "Restore")

        page.locator(".thumbnails button.thumbnail-item").nth(3).click()
        space.settle()
        assert page.get_by_label("number input for Test digit").input_value() == "3"
        space.fill_number("number input for Test digit", 42)

        for label in PROBLEM_LABELS:
            space.choose("Degradation A", label)
            clicked(space, "Degrade")
        assert page.get_by_label("number input for Noise level").input_value() == "0.05"
        space.choose("Degradation A", "Noise only")
        assert page.get_by_label("number input for Noise level").input_value() == "0.2"

        for label in METHOD_LABELS:
            space.choose("Method", label)
            clicked(space, "Restore")
            assert restored_decibels(space) > 10
        assert not page.get_by_label("λ from the noise level").is_enabled()
        space.choose("Method", METHOD_LABELS[0])
        page.get_by_label("λ from the noise level").uncheck()
        space.settle()
        space.fill_number("number input for Weight of the data: log₁₀ λ", 1.5)
        space.fill_number("number input for Noise level σ", 0.1)
        space.fill_number("number input for Steps N", 30)
        space.fill_number("Seed", 7)
        clicked(space, "Restore")
        assert "λ = 31.6" in page.get_by_text("network calls,").first.inner_text()
        assert "30 network calls" in page.get_by_text("network calls,").first.inner_text()

        picture = page.locator(".block").filter(has_text="Endpoint estimate").locator("img").last
        before = picture.get_attribute("src")
        space.fill_number("number input for Step", 1)
        expect(picture).not_to_have_attribute("src", before)
        page.screenshot(path=tmp_path / "restore.png", full_page=True)
        assert space.problems == []


@pytest.mark.browser
def test_upload_degrade_restore_compare_and_draw(tmp_path, photo):
    with open_space(APP) as space:
        page = space.page
        page.get_by_role("radio", name="Upload").click()
        space.settle()
        page.locator("input[type=file]").first.set_input_files(photo)
        page.get_by_text("Your own picture").wait_for()
        clicked(space, "Degrade")
        clicked(space, "Restore")
        handle = page.locator("[data-testid=slider]")
        before = handle.bounding_box()
        page.mouse.move(before["x"] + before["width"] / 2, before["y"] + before["height"] / 2)
        page.mouse.down()
        page.mouse.move(before["x"] + before["width"] / 2 + 80, before["y"] + before["height"] / 2, steps=8)
        page.mouse.up()
        assert handle.bounding_box()["x"] == pytest.approx(before["x"] + 80, abs=4)
        page.screenshot(path=tmp_path / "upload.png", full_page=True)

        page.get_by_role("radio", name="Draw").click()
        space.settle()
        canvas = page.locator("canvas:visible").first
        canvas.wait_for()
        page.wait_for_timeout(1000)  # it sets itself up
        box = canvas.bounding_box()
        middle = box["x"] + box["width"] / 2
        page.mouse.move(middle, box["y"] + box["height"] * 0.2)
        page.mouse.down()
        page.mouse.move(middle, box["y"] + box["height"] * 0.8, steps=15)
        page.mouse.up()
        page.wait_for_timeout(500)
        note = page.get_by_text("network calls,").first.inner_text()
        clicked(space, "Restore")
        assert page.locator("[data-testid='toast-body']").count() == 0
        assert page.get_by_text("network calls,").first.inner_text() != note  # the drawing, not the upload
        assert restored_decibels(space) > 10
        page.screenshot(path=tmp_path / "draw.png", full_page=True)
        assert space.problems == []


@pytest.mark.browser
def test_bad_files_are_explained_in_the_page(tmp_path, bad_files):
    with open_space(APP) as space:
        page = space.page
        page.get_by_role("radio", name="Upload").click()
        space.settle()
        space.click("Restore")
        assert "no picture yet" in space.take_message()
        for name, message in (("one_pixel", "too small"), ("huge", "too large"), ("text", "not a picture")):
            page.locator("input[type=file]").first.set_input_files(bad_files[name])
            assert message in space.take_message()
            space.click("Restore")
            assert message in space.take_message()
            page.screenshot(path=tmp_path / f"{name}.png")
            page.get_by_label("Remove this file").or_(page.get_by_label("Clear")).first.click()
            space.settle()
        assert "Traceback" not in page.content()
        assert space.problems == []


@pytest.mark.browser
def test_every_control_of_the_second_tab(tmp_path):
    with open_space(APP) as space:
        page = space.page
        space.open_tab("Paths in two dimensions")
        space.click("Plan")  # warms up
        clicked(space, "Plan")
        assert page.locator("td").filter(has_text="Global control (FlowGrad)").count() == 1
        page.get_by_role("radio", name="Hexagon of six modes").click()
        for label, value in (
            ("Start x₁", 1),
            ("Start x₂", -1.5),
            ("Measured x₁", 0),
            ("Weight of the data: log₁₀ λ", 2),
        ):
            space.fill_number(f"number input for {label}", value)
        space.fill_number("number input for Steps N", 8)
        for label in ("MPC, K = 4", "MPC, K = 5"):
            page.get_by_role("checkbox", name=label).uncheck()
        clicked(space, "Plan")
        assert page.locator("td").filter(has_text="MPC, K = 4").count() == 0
        page.screenshot(path=tmp_path / "paths.png", full_page=True)
        for label in page.get_by_role("checkbox").all():
            if label.is_visible() and label.is_checked():
                label.uncheck()
        space.click("Plan")
        assert "choose at least one planner" in space.take_message()
        assert space.problems == []
