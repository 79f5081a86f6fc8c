"""The Space of flow diversity: its functions, what it says to bad input, and the page itself in Chromium."""

import importlib.util
import inspect
import sys

import numpy as np
import PIL.Image
import pytest

pytest.importorskip("gradio")

import gradio as gr
import torch
from browser import SOURCE_ROOT, open_space

APP = SOURCE_ROOT / "spaces" / "flow_diversity" / "app.py"
API_NAMES = {"spread", "sweep", "spread_mixture"}
CLICK_SECONDS = 6  # three on an idle machine
SWEEP_SECONDS = 40  # twenty on an idle machine
DEFAULTS = {"gamma0": 4.0, "gate": (0.6, 1.0), "tau": 10.0, "beta0": 0.1, "ortho": 1.0}


@pytest.fixture(scope="module")
def app():
    """`app.py`, loaded by its path as `closedloop space` does it."""
    spec = importlib.util.spec_from_file_location("space_flow_diversity_app", APP)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def sets(app):
    """The module behind the first tab."""
    return app.tab_digits.sets


def spread(app, **changes) -> dict:
    """Call `spread` as the page does at its start, with changes; returns its outputs by name."""
    names = ("plain", "controlled", "plain_caption", "controlled_caption", "table", "figure", "note")
    return dict(zip(names, app.tab_digits.spread(**changes), strict=True))


def points(app, **changes) -> dict:
    """Call `spread_mixture` as the page does at its start, with changes; returns its outputs by name."""
    return dict(zip(("figure", "table", "note"), app.tab_mixture.spread_mixture(**changes), strict=True))


def value(rows: list[list[str]], name: str) -> tuple[float, float]:
    """Numbers of the row that begins with `name`, plain and controlled."""
    (row,) = [cells for title, *cells in rows if title.startswith(name)]
    return tuple(float(cell.rstrip(" %")) for cell in row)


# ------------------------------------------------------------------------------------------------------- functions


@pytest.mark.parametrize("kind", ["independent classifier", "pixels", "the encoder that guides"])
def test_the_controlled_set_has_the_higher_vendi_score_at_the_settings_the_page_starts_with(app, kind):
    plain, controlled = value(spread(app)["table"], f"Vendi, {kind}")
    assert controlled > plain + 0.2


@pytest.mark.parametrize("label", ["0", "4", "7", "any"])
def test_other_prompts_gain_too_and_keep_their_precision(app, label):
    table = spread(app, label=label)["table"]
    plain, controlled = value(table, "Vendi, independent")
    assert controlled > plain
    before, after = value(table, "Precision")
    assert after >= before - 0.25  # two of eight images


def test_the_same_seed_gives_the_same_pictures_and_another_one_does_not(app):
    first, second, other = (spread(app, seed=seed) for seed in (3, 3, 4))
    for name in ("plain", "controlled"):
        assert (np.asarray(first[name]) == np.asarray(second[name])).all()
        assert (np.asarray(first[name]) != np.asarray(other[name])).any()
    assert first["table"][:-1] == second["table"][:-1]  # the last row holds the seconds
    assert first["note"] == second["note"]


def test_without_strength_and_noise_both_sets_are_the_plain_one(app):
    output = spread(app, gamma0=0, beta0=0)
    assert (np.asarray(output["plain"]) == np.asarray(output["controlled"])).all()
    assert output["plain_caption"] == output["controlled_caption"]
    assert "nothing is controlled" in output["note"]


@pytest.mark.parametrize("label", ["3", "any"])
def test_the_sets_are_bit_for_bit_those_of_the_pipeline(sets, label):
    pipe = sets.pipeline()
    arguments = {"num_images": 8, "num_inference_steps": 12, "output_type": "latent"}
    if label != "any":
        arguments |= {"class_labels": [3] * 8, "guidance_scale": 3.0}

    def generator():
        return torch.Generator().manual_seed(5)

    plain = sets.sample(None, label, 8, 12, 3.0, 5)
    idle = sets.sample(sets.FlowDiversityController(gamma0=0.0, beta0=0.0), label, 8, 12, 3.0, 5)
    controlled = sets.sample(sets.spread_controller(8, **DEFAULTS), label, 8, 12, 3.0, 5)

    expected = pipe.base(**arguments, generator=generator()).images
    assert torch.equal(plain.images, expected) and torch.equal(idle.images, expected)
    assert torch.equal(controlled.images, pipe(**arguments, generator=generator()).images)
    assert not torch.equal(controlled.images, expected)
    assert controlled.acted and not plain.acted and not idle.acted


def test_the_log_has_the_volume_of_every_step_and_the_control_ends_higher(sets):
    plain = sets.sample(None, "3", 8, 20, 3.0, 0)
    controlled = sets.sample(sets.spread_controller(8, **DEFAULTS), "3", 8, 20, 3.0, 0)
    assert len(plain.volumes) == len(controlled.volumes) == len(plain.sigmas) == 20
    assert plain.volumes[0] == controlled.volumes[0]  # the same starting noise
    assert controlled.volumes[-1] > plain.volumes[-1] + 0.5


def test_digits_are_enlarged_sharply_in_the_frames_of_their_groups(app, sets):
    figures = app.tab_digits.figures
    images = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)
    picture = np.asarray(figures.grid(images, [0, 1, 0]))
    cell = figures.DIGIT + 2 * figures.FRAME
    assert figures.DIGIT >= 64
    assert tuple(picture[0, 0, :3]) == figures.COLOURS[0]
    assert tuple(picture[0, cell + figures.GAP, :3]) == figures.COLOURS[1]
    inner = picture[figures.FRAME : figures.FRAME + figures.DIGIT, figures.FRAME : figures.FRAME + figures.DIGIT, 0]
    blocks = inner.reshape(8, figures.DIGIT // 8, 8, figures.DIGIT // 8)
    assert blocks.std((1, 3)).max() == 0


def test_the_judge_is_not_the_guide_and_knows_its_digits(sets):
    images, labels = sets.load_digit_tensors(8, "test")
    guide = sets.pipeline().feature_encoder
    assert sets.judge().config.tower_config != guide.config.tower_config
    assert (sets.judge().vision_tower(images)[1].argmax(1) == labels).float().mean() > 0.96


def test_real_images_are_precise_and_noise_is_not(sets):
    images, labels = sets.load_digit_tensors(8, "test")
    threes = sets.judge()(images[labels == 3][:4])
    assert sets.precision(threes, "3") >= 0.75
    noise = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2
    assert sets.precision(sets.judge()(noise), "3") == 0


def test_one_image_gets_a_note(app):
    output = spread(app, num_images=1)
    assert "One image: there is nothing to spread." in output["note"]
    assert (np.asarray(output["plain"]) == np.asarray(output["controlled"])).all()


@pytest.mark.filterwarnings("ignore:.*cover none of the:UserWarning")
def test_a_gate_between_the_steps_gets_a_note(app):
    output = spread(app, gate_low=0.95, gate_high=0.99, beta0=0, steps=5)
    assert "cover none of the steps" in output["note"]
    output = points(app, gate_low=0.95, gate_high=0.99, steps=5)
    assert "cover none of the steps" in output["note"]


@pytest.mark.parametrize("num_images", [2, 16])
def test_the_smallest_and_the_largest_set_work(app, num_images):
    output = spread(app, num_images=num_images, steps=10)
    assert output["note"].startswith("**Vendi score")
    assert output["figure"].axes[0].lines[1].get_ydata().shape == (10,)


def test_a_sweep_has_every_method_at_every_strength(app, sets, monkeypatch):
    monkeypatch.setattr(sets, "SWEEP_SETS", 4)
    figure, rows = app.tab_digits.sweep("7", num_images=4, steps=10, progress=gr.Progress())
    assert len(rows) == sum(len(method.strengths) for method in sets.METHODS.values())
    assert {row[0] for row in rows} == {method.label for method in sets.METHODS.values()}
    ours = [float(row[2]) for row in rows if row[0] == "This method"]
    assert ours[-1] > ours[0] > 1
    assert all(0 <= float(row[4]) <= 1 for row in rows)
    assert len(figure.axes) == 1


def test_a_sweep_of_one_image_is_refused(app):
    with pytest.raises(gr.Error, match="take 2 images or more"):
        app.tab_digits.sweep(num_images=1)


def test_the_mixture_agrees_with_the_golden_end_points(app, monkeypatch):
    """`flow_diversity.md`, golden 6: one mode becomes two. σ = 1, .9, …, 0 from a given start."""
    mixture = app.tab_mixture.mixture
    start = torch.tensor([[0.3, 0.1], [0.2, -0.4], [0.1, 0.6]], dtype=torch.float64)
    monkeypatch.setattr(mixture, "starts", lambda count, seed: start)
    settings = {"gamma0": 8.0, "gate": (0.5, 1.0), "tau": 1.0, "beta0": 0.0, "ortho": 1.0}
    plain, _ = mixture.run("two_modes", None, 3, 10, 0)
    controlled, acted = mixture.run("two_modes", settings, 3, 10, 0)
    expected = [[1.5266755903, 0.0430782605], [1.3736241229, -0.1723130420], [1.1376268762, 0.2584695629]]
    assert plain.ends == pytest.approx(np.array(expected), abs=1e-7)
    expected = [[1.6063315719, 0.2221623673], [-0.6068157087, -0.1525547781], [-1.4280548693, 0.3448795646]]
    assert controlled.ends == pytest.approx(np.array(expected), abs=1e-7)
    assert acted


@pytest.mark.parametrize(("density", "num_samples"), [("ring", 6), ("two_modes", 4)])
def test_the_control_reaches_more_modes_on_average(app, density, num_samples):
    table = points(app, density=density, num_samples=num_samples)["table"]
    plain, controlled = value(table, "Modes reached, mean")
    assert controlled > plain
    assert min(value(table, "Points in a mode, 40")) > 95


def test_four_points_in_one_mode_become_points_in_both(app):
    output = points(app, density="two_modes", num_samples=4, seed=3)
    assert output["note"].startswith("**1 → 2 of 2 modes**")
    plain, controlled = output["figure"].axes
    assert (plain.get_title(), controlled.get_title()) == ("Plain: 1 of 2 modes", "Controlled: 2 of 2 modes")
    assert plain.get_aspect() == controlled.get_aspect() == 1


def test_the_mixture_is_deterministic_and_plain_without_strength(app):
    first, second = points(app, beta0=0.5, seed=9), points(app, beta0=0.5, seed=9)
    assert first["table"] == second["table"]
    for one, two in zip(first["figure"].axes[1].lines, second["figure"].axes[1].lines, strict=True):
        assert (one.get_xydata() == two.get_xydata()).all()
    plain, controlled = points(app, gamma0=0)["figure"].axes
    for one, two in zip(plain.lines, controlled.lines, strict=True):
        assert (one.get_xydata() == two.get_xydata()).all()


def test_one_point_gets_a_note(app):
    assert "One point: there is nothing to spread." in points(app, num_samples=1)["note"]


# ---------------------------------------------------------------------------------------------------- text to image


@pytest.fixture(scope="module")
def text_to_image(app, tmp_path_factory):
    """The third tab's module with a tiny random FLUX and a tiny random CLIP on disk, on the code a GPU would run."""
    import text_to_image_flow_diversity as module
    from tiny_pipelines import tiny_flux_with_text
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    folder = tmp_path_factory.mktemp("models")
    tiny_flux_with_text().save_pretrained(folder / "base")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**small, projection_dim=8, image_size=16, patch_size=4)
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "encoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SIDE", 16)
        patch.setitem(module.BASES, module.OWN, module.Model("Tiny FLUX", str(folder / "base")))
        patch.setitem(module.ENCODERS, module.OWN, module.Model("Tiny CLIP", str(folder / "encoder")))
        patch.setattr(module.FlowDiversityPipeline, "enable_model_cpu_offload", lambda self: None)
        yield module
        module.load_base.cache_clear()
        module.load_encoder.cache_clear()


def spread_texts(module, **changes) -> dict:
    """Call `spread_text_to_image` with the tiny models, with changes; returns its outputs by name."""
    arguments = {"base": "own", "encoder": "own", "prompt": "a red house", "num_images": 3, "steps": 6}
    outputs = module.spread_text_to_image(**arguments | {"progress": gr.Progress()} | changes)
    return dict(zip(("plain", "controlled", "table", "note"), outputs, strict=True))


def stacked(images) -> np.ndarray:
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize("num_images", [2, 8])
def test_images_of_a_text_are_kept_apart(text_to_image, num_images):
    output = spread_texts(text_to_image, num_images=num_images)
    plain, controlled = stacked(output["plain"]), stacked(output["controlled"])
    assert plain.shape == controlled.shape == (num_images, 16, 16, 3)
    assert (plain != controlled).any()
    before, after = value(output["table"], "Log-volume")
    assert after > before
    assert 1 <= min(value(output["table"], "Vendi score")) <= num_images
    assert output["note"].startswith("**Vendi score") and "Tiny CLIP" in output["note"]


def test_images_of_a_text_are_those_of_the_pipeline(text_to_image):
    pipe = text_to_image.load(text_to_image.BASES["own"], text_to_image.ENCODERS["own"])
    settings = {"prompt": "a red house", "num_images_per_prompt": 3, "num_inference_steps": 6}
    settings |= {"guidance_scale": 4.0, "height": 16, "width": 16}
    output = spread_texts(text_to_image, guidance=4.0, seed=5)
    plain = pipe.base(**settings, generator=torch.Generator().manual_seed(5)).images
    controlled = pipe(**settings, generator=torch.Generator().manual_seed(5))
    assert (stacked(output["plain"]) == stacked(plain)).all()
    assert (stacked(output["controlled"]) == stacked(controlled.images)).all()
    volume = value(output["table"], "Log-volume")[1]
    assert volume == pytest.approx(controlled.log[-1]["log_volume"], rel=0.05)  # images in 16 bits, clamped


def test_images_of_a_text_without_strength_are_the_plain_ones(text_to_image):
    output = spread_texts(text_to_image, gamma0=0)
    assert (stacked(output["plain"]) == stacked(output["controlled"])).all()
    assert "nothing is controlled" in output["note"]
    other = spread_texts(text_to_image, gamma0=0, seed=1)
    assert (stacked(output["plain"]) != stacked(other["plain"])).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "/etc"}, "model must be one of .*own; got '/etc'"),
        ({"base": "someone/some-model"}, "model must be one of .*got 'someone/some-model'"),
        ({"encoder": "../clip"}, "encoder must be one of .*got '../clip'"),
        ({"encoder": None}, "encoder must be one of .*got None"),
        ({"prompt": " "}, "prompt must be a text of 1 to 1000 characters"),
        ({"prompt": "a" * 1001}, "prompt must be a text of 1 to 1000 characters"),
        ({"prompt": None}, "prompt must be a text of 1 to 1000 characters"),
        ({"num_images": 1}, "number of images must be a whole number from 2 to 8, got 1"),
        ({"num_images": 9}, "number of images must be a whole number from 2 to 8, got 9"),
        ({"steps": 51}, "number of steps must be a whole number from 2 to 50, got 51"),
        ({"guidance": -1}, "guidance must be a number from 0 to 20, got -1"),
        ({"gamma0": float("nan")}, "strength γ₀ must be a number from 0 to 12, got nan"),
        ({"seed": 2**31}, "seed must be a whole number from 0 to 2147483647, got 2147483648"),
    ],
)
def test_a_bad_argument_of_a_text_gets_a_readable_message(text_to_image, monkeypatch, changes, message):
    monkeypatch.setattr(text_to_image, "load", lambda *models: pytest.fail("loaded"))
    with pytest.raises(gr.Error, match=message) as caught:
        spread_texts(text_to_image, **changes)
    assert not caught.value.print_exception


@pytest.mark.parametrize(("kind", "offer"), [("base", "BASES"), ("encoder", "ENCODERS")])
def test_a_model_that_is_not_there_is_named_but_not_its_folder(text_to_image, monkeypatch, tmp_path, kind, offer):
    missing = text_to_image.Model("Missing one", str(tmp_path / "secret"))
    monkeypatch.setitem(getattr(text_to_image, offer), "own", missing)
    with pytest.raises(gr.Error, match="Missing one could not be loaded: ") as caught:
        spread_texts(text_to_image)
    assert str(tmp_path) not in str(caught.value)


def test_a_lack_of_memory_gets_a_readable_message(text_to_image, monkeypatch):
    def exhaust(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(text_to_image, "sample", exhaust)
    with pytest.raises(gr.Error, match="take fewer images"):
        spread_texts(text_to_image)


def test_the_environment_adds_a_model_in_front(text_to_image, monkeypatch):
    fixed = text_to_image.Model("Fixed", "some/model")
    assert list(text_to_image._offer("FLOW_DIVERSITY_BASE_OF_A_TEST", "Own", fixed)) == ["some/model"]
    monkeypatch.setenv("FLOW_DIVERSITY_BASE_OF_A_TEST", "/models/mine")
    offer = text_to_image._offer("FLOW_DIVERSITY_BASE_OF_A_TEST", "Own", fixed)
    assert list(offer) == ["own", "some/model"] and offer["own"].path == "/models/mine"


def test_the_third_tab_is_built_where_there_is_a_gpu_only(app, monkeypatch):
    def tabs(blocks):
        return [block.label for block in blocks.blocks.values() if isinstance(block, gr.Tab)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tabs(app.build()) == ["Digits", "2-D mixture"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    page = app.build()
    assert tabs(page)[2:] == ["Text to image"]
    public = {fn.api_name: fn.fn for fn in page.fns.values() if fn.api_visibility == "public"}
    assert set(public) == API_NAMES | {"spread_text_to_image"}
    text = inspect.getdoc(public["spread_text_to_image"])
    for name in inspect.signature(public["spread_text_to_image"]).parameters:
        assert f"    {name}: " in text


# -------------------------------------------------------------------------------------------------------- bad input


SHARED_MESSAGES = [
    ({"steps": 1}, "number of steps must be a whole number from 2 to 60, got 1"),
    ({"steps": 7.5}, "number of steps must be a whole number from 2 to 60, got 7.5"),
    ({"gamma0": float("nan")}, "strength γ₀ must be a number from 0 to 12, got nan"),
    ({"gamma0": True}, "strength γ₀ must be a number from 0 to 12, got True"),
    ({"gate_low": 0.8, "gate_high": 0.6}, "lower end must be below its upper end, got 0.8 and 0.6"),
    ({"gate_low": -0.1}, "end of the gate must be a number from 0 to 1, got -0.1"),
    ({"log10_tau": float("inf")}, "τ must be a number from -1 to 3, got inf"),
    ({"beta0": 2}, "noise β₀ must be a number from 0 to 1, got 2"),
    ({"project": "yes"}, "projection must be on .* got 'yes'"),
    ({"seed": -1}, "seed must be a whole number from 0 to 2147483647, got -1"),
    ({"seed": None}, "seed must be a whole number from 0 to 2147483647, got None"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *SHARED_MESSAGES,
        ({"label": "11"}, "digit must be one of 0, 1, .*any; got '11'"),
        ({"label": None}, "digit must be one of .*; got None"),
        ({"num_images": 17}, "number of images must be a whole number from 1 to 16, got 17"),
        ({"num_images": "many"}, "got 'many'"),
        ({"guidance": 0}, "guidance must be a number from 1 to 8, got 0"),
    ],
)
def test_a_bad_argument_gets_a_readable_message(app, changes, message):
    with pytest.raises(gr.Error, match=message) as caught:
        spread(app, **changes)
    assert str(caught.value).strip("'\"").count(". ") == 0  # one sentence
    if not {"gamma0"} & set(changes):
        with pytest.raises(gr.Error, match=message):
            app.tab_digits.sweep(**changes)


@pytest.mark.parametrize(
    ("changes", "message"), [*SHARED_MESSAGES, ({"density": "square"}, "mixture must be one of two_modes, ring; got")]
)
def test_a_bad_argument_of_the_mixture_gets_a_readable_message(app, changes, message):
    with pytest.raises(gr.Error, match=message):
        points(app, **changes)


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


def test_a_client_samples_sets_and_points(client):
    plain, controlled, caption, _, table, _, note = client.predict(
        label="8", num_images=4, steps=8, api_name="/spread"
    )
    assert PIL.Image.open(plain).size == PIL.Image.open(controlled).size
    assert "clusters" in caption
    assert table["headers"] == ["", "Plain", "Controlled"]
    assert note.startswith("**Vendi score")
    _, table, note = client.predict(density="two_modes", steps=8, api_name="/spread_mixture")
    assert len(table["data"]) == 4
    assert "of 2 modes" in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1000}, "60"),
        ({"gamma0": -9}, "0"),
        ({"label": "eleven"}, "not in the list of choices"),
        ({"seed": -3}, "0"),
        ({"gate_low": 0.9, "gate_high": 0.2}, "lower end must be below its upper end"),
    ],
)
def test_a_client_that_leaves_the_bounds_is_told_so(client, arguments, message):
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match=message):
        client.predict(**arguments, api_name="/spread")


# --------------------------------------------------------------------------------------------------------- browser


def clicked(space, name: str, limit: float = CLICK_SECONDS) -> None:
    seconds = space.click(name, timeout=limit + 20)
    assert seconds < limit, f"{name} took {seconds:.1f} s"
    print(f"{name}: {seconds:.2f} s")


def shown_gain(space) -> tuple[float, float]:
    """Vendi scores, plain and controlled, from the note."""
    note = space.page.get_by_text("from the same starting noise:").first.inner_text()
    before, after = note.removeprefix("Vendi score ").split(" (")[0].split(" → ")
    return float(before), float(after)


@pytest.mark.browser
def test_every_control_of_the_first_tab(tmp_path):
    from playwright.sync_api import expect

    with open_space(APP) as space:
        page = space.page
        before, after = shown_gain(space)  # the page samples its first set by itself
        assert after > before
        pictures = page.locator(".pixels img")
        expect(pictures).to_have_count(2)
        assert all(picture.bounding_box()["width"] >= 4 * 64 for picture in pictures.all())
        page.screenshot(path=tmp_path / "digits.png", full_page=True)
        clicked(space, "Sample")

        for label, number in (
            ("Images m", 12),
            ("Strength γ₀", 6),
            ("Gate: from σ", 0.5),
            ("Gate: to σ", 0.95),
            ("Scale of the volume: log₁₀ τ", 2),
            ("Noise β₀", 0.2),
            ("Guidance scale", 2),
            ("Steps N", 40),
        ):
            source = pictures.last.get_attribute("src")
            space.fill_number(f"number input for {label}", number)
            clicked(space, "Sample")
            expect(pictures.last).not_to_have_attribute("src", source)
        source = pictures.last.get_attribute("src")
        page.get_by_label("Keep at right angles to the flow").and_(page.locator(":visible")).uncheck()
        clicked(space, "Sample")
        expect(pictures.last).not_to_have_attribute("src", source)
        source = pictures.first.get_attribute("src")
        space.fill_number("Seed", 7)
        clicked(space, "Sample")
        expect(pictures.first).not_to_have_attribute("src", source)

        space.choose("Prompt", "Any digit (unconditional)")
        assert not page.get_by_label("number input for Guidance scale").is_enabled()
        clicked(space, "Sample")
        assert "of 10 classes" in page.get_by_text("from the same starting noise:").first.inner_text()
        page.screenshot(path=tmp_path / "any.png", full_page=True)
        space.choose("Prompt", "Digit 7")
        assert page.get_by_label("number input for Guidance scale").is_enabled()

        space.fill_number("number input for Images m", 1)
        clicked(space, "Sample")
        page.get_by_text("One image: there is nothing to spread.").wait_for()
        space.click("Sweep strength")
        assert "take 2 images or more" in space.take_message()
        space.fill_number("number input for Gate: from σ", 0.95)
        space.click("Sample")
        assert "lower end must be below its upper end" in space.take_message()
        assert "Traceback" not in page.content()
        assert space.problems == []


@pytest.mark.browser
def test_the_sweep_draws_a_curve(tmp_path):
    with open_space(APP) as space:
        page = space.page
        cells = page.locator("[role=gridcell]:visible").filter(has_text="Particle Guidance")
        assert cells.count() == 0
        clicked(space, "Sweep strength", SWEEP_SECONDS)
        cells.first.wait_for()
        assert cells.count() == 3
        page.wait_for_timeout(500)
        page.screenshot(path=tmp_path / "sweep.png", full_page=True)
        assert space.problems == []


@pytest.mark.browser
def test_every_control_of_the_second_tab(tmp_path):
    with open_space(APP) as space:
        page = space.page
        space.open_tab("2-D mixture")
        page.get_by_text("of 6 modes from the same 6 starts").wait_for()  # sampled by itself
        clicked(space, "Sample points")
        page.screenshot(path=tmp_path / "ring.png", full_page=True)
        page.get_by_role("radio", name="Two modes").click()
        space.fill_number("number input for Points m", 4)
        space.fill_number("Seed", 3)
        clicked(space, "Sample points")
        page.get_by_text("1 → 2 of 2 modes").wait_for()
        page.wait_for_timeout(500)
        page.screenshot(path=tmp_path / "two_modes.png", full_page=True)
        for label, number in (
            ("Strength γ₀", 3),
            ("Gate: from σ", 0.3),
            ("Gate: to σ", 0.9),
            ("Scale of the volume: log₁₀ τ", 1),
            ("Noise β₀", 0.2),
            ("Steps N", 20),
        ):
            space.fill_number(f"number input for {label}", number)
            clicked(space, "Sample points")
        page.get_by_label("Keep at right angles to the flow").and_(page.locator(":visible")).uncheck()
        clicked(space, "Sample points")
        space.fill_number("number input for Points m", 1)
        clicked(space, "Sample points")
        page.get_by_text("One point: there is nothing to spread.").wait_for()
        assert space.problems == []
