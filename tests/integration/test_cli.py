"""The `closedloop` command: help, exit statuses, JSON, readable failures, discovery of new methods."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from hf_pipelines import hub
from hf_pipelines.cli import app

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
COMMANDS = (
    *(["demo"], ["bench"], ["space"], ["data", "list"], ["data", "build"]),
    *(["hub", "list"], ["hub", "export"], ["hub", "check"], ["hub", "push"]),
)

# Methods as a developer would add them: nothing but a room with a benchmark.
TOY = """
from hf_pipelines.benchmark import Bar, BenchmarkResult, Comparison, Row, measured

def run(quick, seed, device):
    with measured(BenchmarkResult({slug!r}, seed, quick)) as result:
        result.rows = [
            Row("ours", {{"error": 1.5, "psnr": float("inf"), "setting": "λ=1"}}, ours=True),
            Row("theirs", {{"error": 2.0}}),
        ]
        result.comparisons = [Comparison("theirs", "error", 1.5, 2.0, higher_is_better=False)]
        result.bars = [Bar("the error is small", 1.5, {limit}, at_least=False)]
    return result
"""
BROKEN = """
def run(quick, seed, device):
    raise RuntimeError("the [/red] matrix is singular\\nand more")
"""
ROOMS = {
    "toy_method": TOY.format(slug="toy_method", limit=2.0),
    "toy_missed": TOY.format(slug="toy_missed", limit=1.0),
    "toy_broken": BROKEN,
}
WITH_ROOMS = """
import sys
sys.argv[0] = "closedloop"
import hf_pipelines
hf_pipelines.__path__.append(sys.argv.pop(1))
from hf_pipelines.cli import main
main()
"""


def start(*arguments: str, cwd: Path | None = None, rooms: Path | None = None) -> subprocess.Popen:
    head = ["-c", WITH_ROOMS, str(rooms)] if rooms else ["-m", "hf_pipelines.cli"]
    return subprocess.Popen(
        [sys.executable, *head, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()  # where it did not end in time
    assert "Traceback" not in out + err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def closedloop(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    """Run the command in a process of its own; it never shows a traceback."""
    return finish(start(*arguments, **kwargs))


def strict_json(text: str):
    """Parse JSON as any program would: no NaN, no Infinity, nothing around it."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def one_line(text: str) -> str:
    (line,) = text.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def rooms(tmp_path_factory) -> Path:
    """Folder of the toy methods."""
    root = tmp_path_factory.mktemp("rooms")
    for slug, source in ROOMS.items():
        (root / slug).mkdir()
        (root / slug / "__init__.py").write_text("")
        (root / slug / f"benchmark_{slug}.py").write_text(textwrap.dedent(source))
    (root / "toy_method/benchmark_other.py").write_text("")  # no method's benchmark
    return root


# -------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_an_example_when_asked(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: closedloop {' '.join(command)}" in " ".join(result.output.split())


def test_every_command_is_covered_when_listed():
    names = {(command.name or command.callback.__name__,) for command in app.registered_commands}
    for group in app.registered_groups:
        names |= {(group.name, command.name) for command in group.typer_instance.registered_commands}
    assert names == {tuple(command) for command in COMMANDS}


@pytest.mark.parametrize("command", [["demo"], ["bench"]])
def test_seed_device_and_json_are_offered_when_a_command_computes(command):
    output = CliRunner().invoke(app, [*command, "--help"]).output
    assert all(option in output for option in ("--seed", "--device", "--json"))


# -------------------------------------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "nosuch"], "no method 'nosuch'; there is .*mpc_flow"),
        (["bench", "nosuch"], "no method 'nosuch'; there is .*mpc_flow"),
        (["bench", "mpc_flow", "--device", "nosuch"], "--device nosuch: Expected one of cpu"),
        (["demo", "mpc_flow", "--device", "meta"], "--device meta: "),
        (["space", "nosuch"], "no Space 'nosuch'; there is .*mpc_flow"),
        (["data", "build", "nosuch", "--out", "out"], "no data set 'nosuch'; there is .*digits"),
        (["hub", "export", "nosuch", "--out", "out"], "one of .*digits-16x16.*got 'nosuch'"),
        (["hub", "check", "nosuch"], "one of .*digits-16x16.*got 'nosuch'"),
        (["hub", "push", "nosuch", "--dry-run"], "one of .*digits-16x16.*got 'nosuch'"),
        (["hub", "push", "digits-8x8", "--dry-run", "--repo-id", "a/b/c"], "`repo_id` must be 'namespace/name'"),
        (["hub", "export", "[/red]", "--out", "out"], r"got '\[/red\]'"),
    ],
    ids=lambda value: " ".join(value).replace("/", "-") if isinstance(value, list) else "",
)
def test_status_is_two_and_one_line_says_why_when_usage_is_wrong(arguments, message, tmp_path):
    done = closedloop(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    line = one_line(done.stderr)
    assert line.startswith("error: ")
    assert re.search(message, line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "mpc_flow", "--seed", "x"], "Invalid value for '--seed'"),
        (["bench"], "Missing argument"),
        (["data", "build", "digits"], "Missing option '--out'"),
        (["space", "mpc_flow", "--port", "99999"], "Invalid value for '--port'"),
        (["nosuch"], "No such command 'nosuch'"),
    ],
    ids=" ".join,
)
def test_status_is_two_when_the_command_line_does_not_parse(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [["data", "build", "digits"], ["hub", "export", "digits-8x8"]], ids=" ".join)
def test_status_is_two_when_out_holds_files(command, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = closedloop(*command, "--out", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in one_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ------------------------------------------------------------------------------------------------------- benchmarks


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> dict:
    """The real method's demo and short benchmark, side by side."""
    out = tmp_path_factory.mktemp("demo") / "pictures"
    processes = {
        "demo": start("demo", "mpc_flow", "--out", str(out), "--json", "--seed", "3"),
        "bench": start("bench", "mpc_flow", "--quick", "--json", "--seed", "3"),
    }
    return {"out": out, **{name: finish(process) for name, process in processes.items()}}


def check_result(result: dict, slug: str, seed: int) -> None:
    """The keys of done.md, item 6."""
    assert {"slug", "seed", "quick", "rows", "seconds", "peak_memory_bytes", "versions"} <= set(result)
    assert (result["slug"], result["seed"], result["quick"]) == (slug, seed, True)
    assert len(result["rows"]) >= 2
    assert all(set(row) == {"name", "metrics"} and row["metrics"] for row in result["rows"])
    assert result["seconds"] > 0 or slug.startswith("toy")
    assert 1e7 < result["peak_memory_bytes"] < 1e11
    assert {"torch", "diffusers", "transformers", "numpy"} <= set(result["versions"])


def test_demo_prints_json_alone_when_asked(computed):
    assert computed["demo"].returncode == 0, computed["demo"].stderr[-2000:]
    answer = strict_json(computed["demo"].stdout)
    assert set(answer) == {"results", "failed", "pictures"} and answer["failed"] == []
    (result,) = answer["results"]
    check_result(result, "mpc_flow", seed=3)


def test_demo_draws_pictures_when_it_ends(computed):
    pictures = strict_json(computed["demo"].stdout)["pictures"]
    assert sorted(pictures) == sorted(str(path) for path in computed["out"].glob("mpc_flow_*.png"))
    assert pictures
    for picture in pictures:
        with Image.open(picture) as image:
            assert min(image.size) > 100
            assert len(set(image.convert("L").tobytes())) > 10  # not blank


def test_bench_prints_json_alone_when_asked(computed):
    assert computed["bench"].returncode == 0, computed["bench"].stderr[-2000:]
    check_result(strict_json(computed["bench"].stdout), "mpc_flow", seed=3)


def test_numbers_are_the_same_when_demo_and_bench_have_the_same_seed(computed):
    (demo,), bench = strict_json(computed["demo"].stdout)["results"], strict_json(computed["bench"].stdout)

    def quality(result):  # without what depends on the load of the machine
        timed = ("seconds", "memory")
        return [
            {name: value for name, value in row["metrics"].items() if not any(word in name for word in timed)}
            for row in result["rows"]
        ]

    assert quality(demo) == quality(bench)


def test_progress_is_shown_apart_from_the_result_when_running(computed):
    assert "100%" in computed["bench"].stderr


def test_status_is_130_without_a_traceback_when_interrupted(tmp_path):
    process = start("bench", "mpc_flow", "--json", cwd=tmp_path)  # the full run: minutes
    seen = ""
    while "mpc_flow:" not in seen:  # its progress bar
        character = process.stderr.read(1)
        assert character, seen
        seen += character
    for _ in range(5):  # as a user would: a library may swallow the first while it is being imported
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=20)
            break
        except subprocess.TimeoutExpired:
            pass
    done = finish(process)
    assert done.returncode == 130
    assert done.stdout == ""


# -------------------------------------------------------------------------------------------------------- discovery


def test_new_room_is_found_when_nothing_else_is_edited(rooms, tmp_path):
    done = closedloop("demo", "toy_method", "--json", "--out", str(tmp_path / "out"), rooms=rooms)
    assert done.returncode == 0, done.stderr
    (result,) = strict_json(done.stdout)["results"]
    check_result(result, "toy_method", seed=0)
    assert result["rows"][0]["metrics"] == {"error": 1.5, "psnr": None, "setting": "λ=1"}  # infinity is no JSON


def test_table_shows_both_values_when_no_json_is_asked(rooms, tmp_path):
    done = closedloop("demo", "toy_method", "--out", str(tmp_path / "out"), rooms=rooms)
    (row,) = [line for line in done.stdout.splitlines() if "toy_method" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")][:5] == ["toy_method", "theirs", "error", "1.5", "2"]


def test_other_methods_still_run_when_one_breaks(rooms, tmp_path):
    arguments = ("demo", "toy_broken", "toy_method", "--out", str(tmp_path / "out"))
    done = closedloop(*arguments, "--json", rooms=rooms)
    answer = strict_json(done.stdout)
    assert done.returncode == 1
    assert [result["slug"] for result in answer["results"]] == ["toy_method"] and answer["failed"] == ["toy_broken"]
    assert one_line(done.stderr) == "toy_broken: RuntimeError: the [/red] matrix is singular"
    table = closedloop(*arguments, rooms=rooms)
    assert table.returncode == 1
    assert "RuntimeError: the [/red] matrix is singular" in table.stdout and "1.5" in table.stdout


@pytest.mark.parametrize(("slug", "status", "mark"), [("toy_method", 0, "holds"), ("toy_missed", 1, "FAILS")])
def test_status_of_bench_says_whether_claims_hold_when_it_ends(rooms, slug, status, mark):
    done = closedloop("bench", slug, rooms=rooms)
    assert done.returncode == status
    assert f"{mark}  the error is small: 1.5" in done.stdout
    as_json = closedloop("bench", slug, "--json", rooms=rooms)
    assert as_json.returncode == status
    assert [bar["passed"] for bar in strict_json(as_json.stdout)["bars"]] == [status == 0]


def test_nan_never_passes_when_a_claim_is_checked():
    from hf_pipelines.benchmark import Bar

    assert not Bar("a claim", math.nan, 1.0).passed
    assert not Bar("a claim", math.nan, 1.0, at_least=False).passed


# ------------------------------------------------------------------------------------------------- data sets and Hub


def test_data_sets_are_listed_when_asked():
    result = CliRunner().invoke(app, ["data", "list", "--json"])
    assert {"digits", "sample_photos"} <= {record["name"] for record in strict_json(result.output)}
    assert "sample_photos" in CliRunner().invoke(app, ["data", "list"]).output


def test_folder_opens_when_data_is_built(tmp_path):
    from datasets import load_dataset

    done = closedloop("data", "build", "sample_photos", "--out", "photos [/b]", cwd=tmp_path)
    assert (done.returncode, one_line(done.stdout)) == (0, "wrote photos [/b]")
    (tmp_path / "photos [/b]").rename(tmp_path / "photos")
    assert load_dataset(str(tmp_path / "photos"), split="test", cache_dir=str(tmp_path / "cache")).num_rows == 2


def test_repos_are_listed_when_asked():
    records = strict_json(CliRunner().invoke(app, ["hub", "list", "--json"]).output)
    found = {(record["name"], record["kind"]): record for record in records}
    assert {("digits-16x16", "model"), ("digits", "dataset"), ("mpc_flow", "space")} <= set(found)
    assert found["digits-16x16", "model"]["bytes"] > 4_000_000
    assert "digits-16x16" in CliRunner().invoke(app, ["hub", "list"]).output


def test_export_is_written_when_the_name_is_known(tmp_path):
    done = closedloop("hub", "export", "digits-8x8", "--out", "exported", cwd=tmp_path)
    assert (done.returncode, one_line(done.stdout)) == (0, "wrote exported")
    assert (tmp_path / "exported/model/modeling_small_flow.py").is_file()


def test_dry_run_lists_files_and_sizes_when_pushing(tmp_path):
    done = closedloop("hub", "push", "digits-8x8", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    sizes = {record["path"]: record["bytes"] for record in strict_json(done.stdout)}
    weights = "model/diffusion_pytorch_model.safetensors"
    assert sizes[weights] == (Path(hub.repo("digits-8x8")) / weights).stat().st_size
    assert {"README.md", "model_index.json", "pipeline_small_flow.py"} <= set(sizes)


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "overwritten": lambda content: b"\xff" * len(content),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_one_line_names_the_file_when_weights_are_damaged(how, tmp_path):
    from hf_pipelines import SmallFlowPipeline

    repo = tmp_path / "digits-8x8"
    shutil.copytree(hub.repo("digits-8x8"), repo)
    weights = repo / "model/diffusion_pytorch_model.safetensors"
    weights.write_bytes(DAMAGE[how](weights.read_bytes()))
    done = closedloop("hub", "check", str(repo))
    assert done.returncode == 1
    problem, summary = done.stdout.strip().splitlines()
    assert problem.startswith("digits-8x8: weights: model/diffusion_pytorch_model.safetensors cannot be read: ")
    assert summary == "checked 1 repos, 1 problems"
    with pytest.raises(OSError, match=r"diffusion_pytorch_model\.safetensors"):
        SmallFlowPipeline.from_pretrained(repo)
