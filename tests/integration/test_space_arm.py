"""The Space of ARM: its functions, what it says to bad input, and the page itself in Chromium."""

import importlib.util
import inspect
import shutil
import sys

import pytest

pytest.importorskip("gradio")

import gradio as gr
import torch
from browser import SOURCE_ROOT, open_space

from hf_pipelines import hub

APP = SOURCE_ROOT / "spaces" / "arm" / "app.py"
API_NAMES = {"recall", "look_inside", "cost", "stream", "reset_stream"}
WAIT = 60  # seconds for a click on a crowded machine


@pytest.fixture(scope="module")
def app():
    """`app.py`, loaded by its path as `closedloop space` does it."""
    spec = importlib.util.spec_from_file_location("space_arm_app", APP)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def streams(app):
    """The module behind the fourth tab."""
    return app.tab_stream.streams


def recall(app, **changes) -> dict:
    """Call `recall` with changes; returns accuracies by method at the longest context, and the note."""
    _, rows, note = app.tab_recall.recall(**{"sequences": 16, "context_length": 96} | changes)
    return dict(zip(app.tab_recall.HEADERS, map(float, rows[-1]), strict=True)) | {"note": note, "rows": rows}


# ------------------------------------------------------------------------------------------------------- functions


def test_arm_recalls_more_than_every_other_bounded_cache_when_the_context_is_long(app):
    result = recall(app, context_length=512)
    assert result["ARM"] >= 0.7
    assert max(result["H2O"], result["StreamingLLM"], result["sliding window"]) < result["ARM"] - 0.4
    assert result["full attention"] < result["ARM"]
    assert "24 entries per head (16 slots + window 8)" in result["note"]


def test_all_bounded_methods_keep_the_entries_that_the_note_names_when_slots_and_window_change(app):
    lab = app.tab_recall.lab
    ids = torch.randint(152, 160, (1, 80), generator=torch.Generator().manual_seed(0))
    for slots, window in ((4, 1), (8, 16), (32, 64)):
        entries = slots + window
        config = lab.arm_model(slots, window).config
        assert (config.arm_slots, config.arm_window, config.arm_sinks) == (slots, window, 0)
        for policy in ("h2o", "streaming_llm", "swa"):
            logits = lab.budget_logits(policy, entries)(ids)
            assert logits.shape == (1, 80, 160)
        note = recall(app, slots=str(slots), window=window)["note"]
        assert f"{entries} entries per head ({slots} slots + window {window})" in note


def test_a_window_as_long_as_the_text_makes_every_budgeted_cache_full_attention(app):
    result = recall(app, slots="16", window=64, context_length=48)  # 80 entries, 64 tokens
    assert result["H2O"] == result["StreamingLLM"] == result["sliding window"] == result["full attention"]


def test_the_policy_reads_less_than_everything_and_the_fixed_one_as_told(app):
    inside = app.tab_inside.inside
    adaptive, fixed, everything = (inside.look(16, 48, 8, policy, 3, 0) for policy in ("adaptive", "fixed", "all"))
    assert (fixed.reads == 3).all() and (everything.reads == 4).all()
    fillers = [token >= inside.FILLER_OFFSET for token in adaptive.ids]
    assert adaptive.reads[:, fillers].float().mean() < 0.5
    assert adaptive.reads[:, list(adaptive.answers)].float().mean() > 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_masses_of_the_tokens_in_a_slot_are_those_of_the_cache(app, seed):
    inside = app.tab_inside.inside
    seen = inside.look(16, 120, 12, "adaptive", 4, seed)
    model = app.tab_recall.lab.arm_model(16)
    cache = inside_cache(model, seen.ids[: seen.context])
    mass = torch.zeros(2, 16).scatter_add_(1, seen.slot[:, : seen.context], seen.mass)
    torch.testing.assert_close(mass, cache.layers[0].state.c[0], atol=1e-5, rtol=0)


@torch.no_grad()
def inside_cache(model, ids):
    from hf_models import ArmCache

    cache = ArmCache(model.config)
    model(torch.tensor([ids]), cache=cache)
    return cache


def test_masses_when_two_tokens_share_a_slot(app):
    gate = torch.tensor([[0.5, 1.0, 0.25, 0.0]])
    slot = torch.tensor([[0, 1, 0, 1]])
    mass = app.tab_inside.inside.masses(gate, slot, 2)
    torch.testing.assert_close(mass, torch.tensor([[0.375, 1.0, 0.25, 0.0]]))


def test_the_strip_marks_right_and_wrong_answers_as_the_note_counts_them(app):
    note, strip, slot_map, _, table = app.tab_inside.look_inside(context_length=96, facts=12, seed=4)
    right = int(note.removeprefix("**").split(" of ")[0])
    assert strip.count('class="token right"') == right == sum("✓" in row[2] for row in table)
    assert strip.count('class="token wrong"') == 12 - right
    assert strip.count("SET ") == strip.count("GET ") == 12
    assert slot_map.count("class='slot'") == 2 * 16


def test_the_bytes_of_arm_do_not_change_and_those_of_full_attention_double(app):
    tab = app.tab_cost
    points = list(tab.measure(2048))
    assert [point[0] for point in points] == [512, 1024, 2048]
    assert len({point[2] for point in points}) == 1
    assert points[1][1] == 2 * points[0][1] == points[2][1] / 2 == 1024 * 2 * 2 * 128 * 4
    assert all(seconds > 0 for point in points for seconds in point[3:])


def test_facts_stay_under_fillers_and_the_bytes_are_constant(streams):
    stream = streams.begin("", "once", "")
    for _ in range(12):
        stream.step()
    tokens, sizes, right = zip(*stream.points, strict=True)
    assert tokens == tuple(48 + 256 * i for i in range(12))
    assert set(sizes) == {6352}
    assert right[0] >= 0.7 and right[-1] >= right[0] - 0.13


def test_facts_that_change_are_answered_above_chance(streams):
    stream = streams.begin("", "change", "")
    for _ in range(40):
        stream.step()
    assert stream.tokens == 40 * 256
    right, asked = map(sum, zip(*stream.answered, strict=True))
    assert asked == 320 and 0.3 < right / asked < 0.7


def test_a_stream_goes_on_where_it_ended_and_another_feed_begins_anew(app):
    stream = app.tab_stream.stream
    first = list(stream("", "change", seconds=1))[-1]
    seen = first[-1].tokens
    second = list(stream("", "change", seconds=1, state=first[-1]))[-1]
    assert second[-1] is first[-1] and second[-1].tokens > seen
    other = list(stream("", "once", seconds=1, state=first[-1]))[-1]
    assert other[-1] is not first[-1]
    assert app.tab_stream.reset_stream()[-1] is None


def test_a_folder_with_a_tokenizer_reads_its_text(app, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from hf_models import convert_to_arm

    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "a": 1, "house": 2, "by": 3, "the": 4, "sea": 5}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = convert_to_arm(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).eval(), levels=1, window=8)
    model.save_pretrained(tmp_path)
    note, _, slots, state = list(app.tab_stream.stream(str(tmp_path), text="a house by the sea", seconds=1))[-1]
    assert state.ids.tolist() == [[1, 2, 3, 4, 5]]
    assert f"**{state.tokens:,} tokens seen, {state.cache.nbytes():,} bytes at any length.**" in note
    assert slots.count("<rect") == 2 * 2 * 16


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": "5"}, "number of slots must be one of 4, 8, 16, 32; got '5'"),
        ({"slots": 16}, "number of slots must be one of .*; got 16"),
        ({"window": 0}, "window must be a whole number from 1 to 64, got 0"),
        ({"window": 2.5}, "window must be a whole number from 1 to 64, got 2.5"),
        ({"context_length": 4096}, "context length must be a whole number from 48 to 2048, got 4096"),
        ({"facts": 17}, "number of facts must be a whole number from 1 to 16, got 17"),
        ({"policy": "some"}, "read policy must be one of all, fixed, adaptive; got 'some'"),
        ({"buckets": 5}, "number of buckets must be a whole number from 1 to 4, got 5"),
        ({"sequences": None}, "number of sequences must be a whole number from 8 to 64, got None"),
        ({"seed": float("nan")}, "seed must be a whole number from 0 to 2147483647, got nan"),
    ],
)
def test_a_bad_argument_gets_a_readable_message(app, changes, message):
    with pytest.raises(gr.Error, match=message) as caught:
        recall(app, **changes)
    assert not caught.value.print_exception
    if set(changes) <= {"slots", "facts", "policy", "buckets", "seed"}:
        with pytest.raises(gr.Error, match=message):
            app.tab_inside.look_inside(**changes)


def test_a_bad_longest_context_gets_a_readable_message(app):
    with pytest.raises(gr.Error, match="longest context must be one of 2048, 4096, 8192, 16384; got '100'"):
        next(app.tab_cost.cost("100"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/no/such/folder"}, "'/no/such/folder' is not a local folder with an ARM model"),
        ({"path": "closedloop/arm-recall"}, "is not a local folder .* Nothing is downloaded"),
        ({"path": "a\0b"}, "is not a local folder"),
        ({"path": "x" * 5000}, "is not a local folder"),
        ({"path": 3}, "folder must be a path, got 3"),
        ({"feed": "facts"}, "feed must be one of change, once, text; got 'facts'"),
        ({"feed": "text"}, "recall model knows 160 tokens and no text"),
        ({"text": " "}, "text must have 1 to 20000 characters"),
        ({"seconds": 60}, "time must be a number from 1 to 20, got 60"),
    ],
)
def test_a_bad_argument_of_the_stream_gets_a_readable_message(app, changes, message):
    with pytest.raises(gr.Error, match=message) as caught:
        list(app.tab_stream.stream(**{"seconds": 1} | changes))
    assert not caught.value.print_exception


def test_a_folder_without_memory_or_with_damaged_weights_is_refused(app, tmp_path):
    full = hub.repo("arm-recall") + "/full-attention"
    with pytest.raises(gr.Error, match="is not a local folder with an ARM model"):
        list(app.tab_stream.stream(full, seconds=1))
    shutil.copy(hub.repo("arm-recall") + "/config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(gr.Error, match="The ARM model of this folder cannot be loaded: "):
        list(app.tab_stream.stream(str(tmp_path), seconds=1))


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
        assert "Returns:" in text
        for name in inspect.signature(fn.fn).parameters:
            assert f"    {name}: " in text, f"{fn.api_name} does not document {name}"


def test_a_client_compares_looks_and_streams(client):
    _, table, note = client.predict(context_length=96, sequences=8, api_name="/recall")
    assert table["headers"][:2] == ["Context", "ARM"] and len(table["data"]) == 2
    assert note.startswith("**At 96 tokens and 24 entries")
    note, strip, *_ = client.predict(facts=3, api_name="/look_inside")
    assert "of 3 answers are right" in note and strip.count("SET ") == 3
    counts = []
    for _ in range(2):
        note, *_ = client.predict(seconds=1, api_name="/stream")
        counts.append(int(note.removeprefix("**").split(" tokens")[0].replace(",", "")))
    assert counts[1] > counts[0]  # the session goes on
    note, *_ = client.predict(api_name="/reset_stream")
    assert note == "Nothing was fed yet."


@pytest.mark.parametrize(
    ("api_name", "arguments", "message"),
    [
        ("/recall", {"context_length": 10**6}, "2048"),
        ("/look_inside", {"slots": "64"}, "not in the list of choices"),
        ("/stream", {"path": "/etc"}, "not a local folder with an ARM model"),
    ],
)
def test_a_client_that_leaves_the_bounds_is_told_so(client, api_name, arguments, message):
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match=message):
        client.predict(**arguments, api_name=api_name)


# --------------------------------------------------------------------------------------------------------- browser


def visible(page, name: str):
    """The visible radio button called `name`."""
    return page.get_by_role("radio", name=name, exact=True).and_(page.locator(":visible"))


@pytest.mark.browser
def test_every_control_of_every_tab(tmp_path):
    with open_space(APP) as space:
        page = space.page
        page.get_by_text("At 512 tokens and 24 entries per head").wait_for(timeout=WAIT * 1000)  # by itself
        page.screenshot(path=tmp_path / "recall.png", full_page=True)
        space.fill_number("number input for Longest context", 96)
        space.fill_number("number input for Test sequences per length", 8)
        assert not page.get_by_label("number input for Buckets read, of 4").and_(page.locator(":visible")).is_enabled()
        visible(page, "the n best buckets").click()
        space.settle()
        space.fill_number("number input for Buckets read, of 4", 1)
        visible(page, "8").click()
        space.fill_number("number input for Exact window", 4)
        space.fill_number("number input for Facts", 4)
        space.fill_number("Seed", 3)
        space.click("Compare", WAIT)
        page.get_by_text("At 96 tokens and 12 entries per head (8 slots + window 4)").wait_for()
        space.fill_number("Seed", -5)
        space.click("Compare", WAIT)
        assert "0" in space.take_message()

        space.open_tab("Look inside")
        page.get_by_text("of 8 answers are right").wait_for(timeout=WAIT * 1000)
        assert page.locator(".strip .token").count() == 64
        page.screenshot(path=tmp_path / "inside.png", full_page=True)
        visible(page, "8").click()
        space.fill_number("number input for Context length", 96)
        space.fill_number("number input for Facts", 5)
        visible(page, "the n best buckets").click()
        space.settle()
        space.fill_number("number input for Buckets read, of 4", 2)
        space.fill_number("Seed", 3)
        space.click("Look", WAIT)
        page.get_by_text("of 5 answers are right").wait_for()
        assert page.locator(".strip .token").count() == 106
        assert page.locator(".slot").count() == 16
        space.fill_number("number input for Context length", 16)
        space.fill_number("number input for Facts", 16)
        space.click("Look", WAIT)
        page.get_by_text("of 16 answers are right").wait_for()

        space.open_tab("Flat cost")
        visible(page, "2048").click()
        space.click("Measure", WAIT)
        page.get_by_text("At 2,048 tokens: 4.19 MB against 0.68 MB").wait_for()
        page.wait_for_timeout(300)
        page.screenshot(path=tmp_path / "cost.png", full_page=True)

        space.open_tab("Stream")
        page.get_by_text("Nothing was fed yet.").wait_for()
        space.fill_number("number input for Seconds per click", 2)
        space.click("Start", WAIT)
        page.get_by_text("6,352 bytes at any length").wait_for()
        page.locator("svg[aria-label='Slot occupancy'] rect").nth(31).wait_for()
        page.wait_for_timeout(300)
        page.screenshot(path=tmp_path / "stream.png", full_page=True)
        visible(page, "8 facts at the start, then fillers only").click()
        space.fill_number("number input for Seconds per click", 20)
        page.get_by_role("button", name="Start").click()
        page.get_by_text("Last answers:").wait_for()
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for(timeout=8000)  # long before the 20 seconds are over
        page.wait_for_timeout(1500)
        assert page.get_by_text("Stopped.").is_visible()
        space.settle(WAIT)
        space.click("Reset", WAIT)
        page.get_by_text("Nothing was fed yet.").wait_for()
        page.get_by_label("Text", exact=True).fill("one two three")
        page.get_by_label("ARM folder on this machine").fill("/no/such/folder")
        space.click("Start", WAIT)
        assert "not a local folder with an ARM model" in space.take_message()
        assert "Traceback" not in page.content()
        assert space.problems == []
