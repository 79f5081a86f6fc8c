"""Training of the embedded flow: resume, processes, checkpoints, arguments (flow_control_core §5)."""

import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from datasets_scripts import load_digit_tensors
from hf_models import SmallFlowModel
from hf_pipelines import SmallFlowPipeline
from hf_pipelines.flow_control.train_small_flow import (
    draw_batch,
    evaluate,
    flow_matching_loss,
    latest_checkpoint,
    main,
    parse_args,
    sample_sigma,
)

MODULE = "hf_pipelines.flow_control.train_small_flow"
ROOT = Path(__file__).parents[2]
STEPS = 60
SHORT = (
    *("--size", "8", "--max_train_steps", str(STEPS), "--train_batch_size", "32"),
    *("--checkpointing_steps", "10", "--logging_steps", "20", "--save_dtype", "float32"),
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT = 240  # seconds; a run takes about 10 on an idle core


def start(out: Path, *arguments: str) -> subprocess.Popen:
    """Train in a process of its own."""
    command = [sys.executable, "-m", MODULE, "--output_dir", str(out), *SHORT, *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Train in two processes that talk over gloo."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port()), "-m", MODULE, "--output_dir", str(out), *SHORT, *arguments),
    ]
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "pipeline/model/diffusion_pytorch_model.safetensors")


def losses(out: Path) -> dict[str, float]:
    return json.loads((out / "pipeline/training_metrics.json").read_text())


def bit_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """An uninterrupted run beside one that is killed after its first checkpoint."""
    root = tmp_path_factory.mktemp("runs")
    killed, whole = start(root / "killed"), start(root / "whole")
    deadline = time.monotonic() + TIMEOUT
    while latest_checkpoint(root / "killed") is None and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT)
    log = whole.communicate(timeout=TIMEOUT)[0]
    assert whole.returncode == 0, log
    return {"root": root, "killed": root / "killed", "whole": root / "whole", "rc": killed.returncode, "log": log}


# ------------------------------------------------------------------------------------------------------------ resume


def test_weights_are_bit_equal_when_a_killed_run_is_resumed(runs, caplog):
    assert runs["rc"] == -signal.SIGKILL
    assert not (runs["killed"] / "pipeline").exists()  # it was in the middle
    step = int(latest_checkpoint(runs["killed"]).name.rsplit("_", 1)[1])
    assert 10 <= step < STEPS
    # a later checkpoint that was cut short must be passed over
    torn = runs["killed"] / f"checkpoints/checkpoint_{STEPS - 1}"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.INFO):
        main(["--output_dir", str(runs["killed"]), *SHORT, "--resume_from_checkpoint", "latest"])
    assert re.search(rf"resumed .*checkpoint_{step} at step {step}\n", caplog.text)
    assert bit_equal(weights(runs["killed"]), weights(runs["whole"]))
    assert losses(runs["killed"]) == losses(runs["whole"])
    assert latest_checkpoint(runs["killed"]).name == f"checkpoint_{STEPS}"


def test_folder_without_complete_json_is_passed_over_when_resuming(tmp_path):
    for step in (500, 1000, 1500):
        (tmp_path / f"checkpoints/checkpoint_{step}").mkdir(parents=True)
    assert latest_checkpoint(tmp_path) is None
    for step in (500, 1000):
        (tmp_path / f"checkpoints/checkpoint_{step}/complete.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints/checkpoint_1000"


def test_run_starts_afresh_when_latest_is_asked_and_there_is_none(runs, tmp_path):
    main(["--output_dir", str(tmp_path), *SHORT, "--resume_from_checkpoint", "latest"])
    assert bit_equal(weights(tmp_path), weights(runs["whole"]))


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_argument_is_named_when_the_checkpoint_is_none(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    arguments = ["--output_dir", str(tmp_path), *SHORT, "--resume_from_checkpoint", str(tmp_path / folder)]
    with pytest.raises(ValueError, match=rf"--resume_from_checkpoint: '.*{folder}' is not the folder of a complete"):
        main(arguments)


def test_weights_of_a_checkpoint_are_safetensors_when_saved(runs):
    folder = runs["whole"] / "checkpoints/checkpoint_10"
    assert {path.name for path in folder.iterdir()} == {
        *("model.safetensors", "ema.safetensors", "complete.json"),
        *("optimizer.bin", "scheduler.bin", "random_states_0.pkl"),  # numbers, read with weights_only
    }
    assert json.loads((folder / "complete.json").read_text()) == {"step": 10}
    model, averaged = (load_file(folder / f"{name}.safetensors") for name in ("model", "ema"))
    assert sum(w.numel() for w in model.values()) == sum(w.numel() for w in averaged.values()) == 909_888


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_no_code_of_a_checkpoint_runs_when_resuming(runs, tmp_path, name):
    folder = tmp_path / "checkpoint_10"
    shutil.copytree(runs["whole"] / "checkpoints/checkpoint_10", folder)
    torch.save({"step": Bomb(tmp_path / "marker")}, folder / name)
    arguments = ["--output_dir", str(tmp_path), *SHORT, "--max_train_steps", "11"]
    arguments += ["--resume_from_checkpoint", str(folder)]
    if name == "random_states_0.pkl":  # accelerate passes over it; every draw here comes from the seed and the step
        main(arguments)
    else:
        refused = "Weights only load failed|does not match the number of registered objects"
        with pytest.raises((pickle.UnpicklingError, RuntimeError), match=refused):
            main(arguments)
    assert not (tmp_path / "marker").exists()


def test_old_mark_of_completeness_goes_first_when_a_checkpoint_is_written_again(tmp_path, monkeypatch):
    from accelerate import Accelerator

    folder = tmp_path / "checkpoints/checkpoint_10"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text('{"step": 10}')

    def full_disk(self, *args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full_disk)  # the one way to stop in the middle of it
    with pytest.raises(OSError, match="No space"):
        main(["--output_dir", str(tmp_path), *SHORT])
    assert latest_checkpoint(tmp_path) is None


# --------------------------------------------------------------------------------------------------------- processes


def test_weights_are_those_of_one_process_when_two_train(runs):
    done = launch(runs["root"] / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = weights(runs["whole"]), weights(runs["root"] / "two")
    assert one.keys() == two.keys()
    # both average the same 32 gradients, summed in another order: float32 rounding over 60 AdamW steps of up to 2e-3
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    assert losses(runs["root"] / "two") == pytest.approx(losses(runs["whole"]), abs=1e-4)
    states = {path.name for path in (runs["root"] / "two/checkpoints/checkpoint_10").glob("random_states_*")}
    assert states == {"random_states_0.pkl", "random_states_1.pkl"}  # there really were two


def train_forked(rank: int, port: int, out: Path, answers) -> None:
    """One of two processes that share the imports of this one."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    try:
        main(["--output_dir", str(out), *SHORT, "--train_batch_size", "33"])
    except ValueError as error:
        answers.put(str(error))


def test_batch_size_is_named_when_it_does_not_divide_among_the_processes(tmp_path):
    fork = multiprocessing.get_context("fork")
    answers, port = fork.Queue(), free_port()
    processes = [fork.Process(target=train_forked, args=(rank, port, tmp_path, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    message = "--train_batch_size 33 is not a multiple of the 2 processes."
    assert [answers.get(timeout=TIMEOUT) for _ in processes] == [message] * 2
    for process in processes:
        process.join(timeout=TIMEOUT)


# ---------------------------------------------------------------------------------------------------------- training


def test_loss_falls_when_training_runs(runs):
    metrics = losses(runs["whole"])
    kinds = ("conditional", "unconditional")
    assert set(metrics) == {f"{split}_{kind}" for split in ("train", "test") for kind in kinds}
    before = evaluate(SmallFlowModel((1, 8, 8), 256), *load_digit_tensors(8, "test"))  # the zero velocity
    assert metrics["test_conditional"] < 0.8 * before["conditional"]


def test_log_shows_step_loss_and_learning_rate_when_training_runs(runs):
    lines = re.findall(r"step (\d+) loss (\d\.\d+) lr (\S+)", runs["log"])
    assert [int(step) for step, _, _ in lines] == [20, 40, 60]
    assert float(lines[0][1]) > float(lines[-1][1])
    assert float(lines[0][2]) > float(lines[-1][2])  # the one-cycle schedule comes down
    assert "60/60" in runs["log"]  # the progress bar


def test_saved_pipeline_loads_and_has_the_reported_loss_when_training_ends(runs):
    pipe = SmallFlowPipeline.from_pretrained(runs["whole"] / "pipeline")
    assert pipe.scheduler.config.shift == 1.0
    again = evaluate(pipe.model.eval(), *load_digit_tensors(8, "test"))
    assert again["conditional"] == pytest.approx(losses(runs["whole"])["test_conditional"], abs=1e-6)


@pytest.mark.parametrize("steps", [1, 10])
def test_run_ends_when_it_is_shorter_than_its_warm_up(tmp_path, steps):
    metrics = main(["--output_dir", str(tmp_path), "--size", "8", "--max_train_steps", str(steps)])
    assert all(value == value for value in metrics.values())
    assert weights(tmp_path)["proj_in.weight"].dtype == torch.float16  # the default of --save_dtype


def test_argument_is_named_when_a_batch_is_larger_than_the_data(tmp_path):
    with pytest.raises(ValueError, match="--train_batch_size 1600 exceeds the 1597 training images"):
        main(["--output_dir", str(tmp_path), "--size", "8", "--train_batch_size", "1600"])


def test_batch_is_a_function_of_seed_and_step_when_drawn(tmp_path):
    args = parse_args(["--output_dir", str(tmp_path), "--size", "8"])
    images, labels = load_digit_tensors(8, "train")
    first, again = (draw_batch(7, images, labels, args) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = draw_batch(8, images, labels, args)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    args.seed = 1
    assert not torch.equal(draw_batch(7, images, labels, args)["noise"], first["noise"])


def test_each_image_comes_at_most_once_when_an_epoch_passes(tmp_path):
    args = parse_args(["--output_dir", str(tmp_path)])
    images, labels = torch.arange(1597.0).view(-1, 1, 1, 1), torch.zeros(1597, dtype=torch.long)
    batches = [draw_batch(step, images, labels, args) for step in range(12)]  # 1597 // 128
    drawn = torch.cat([batch["clean"].flatten() for batch in batches])
    assert len(drawn) == len(drawn.unique()) == 12 * 128
    assert not torch.equal(draw_batch(12, images, labels, args)["clean"], batches[0]["clean"])  # shuffled anew
    dropped = torch.cat([batch["labels"] for batch in batches]) == 10
    assert dropped.double().mean().item() == pytest.approx(0.2, abs=0.04)  # 4 standard deviations of 1536 coins


def test_noise_levels_are_half_uniform_and_half_logit_normal_when_drawn():
    sigma = sample_sigma(20_001, torch.Generator().manual_seed(0))
    uniform, logit = sigma[:10_001], sigma[10_001:]
    assert len(logit) == 10_000
    # 4 standard errors: 0.2887/100 and 1/100
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.012)
    assert uniform.std().item() == pytest.approx(12**-0.5, abs=0.012)
    assert torch.logit(logit).mean().item() == pytest.approx(0, abs=0.04)
    assert torch.logit(logit).std().item() == pytest.approx(1, abs=0.04)


def test_loss_is_that_of_the_zero_velocity_when_the_model_is_new():
    clean, noise = torch.full((2, 1, 8, 8), 0.25), torch.full((2, 1, 8, 8), 1.0)
    loss = flow_matching_loss(
        SmallFlowModel((1, 8, 8), 16), clean, noise, torch.tensor([0.1, 0.9]), torch.tensor([3, 10])
    )
    assert loss.item() == pytest.approx(0.75**2, abs=1e-7)  # the target is ε − x₀ at every σ


def test_model_sees_the_noisy_image_when_the_loss_is_computed():
    class Record(torch.nn.Module):
        def forward(self, sample, timestep, class_labels):
            self.seen = (sample, timestep, class_labels)
            return type("Output", (), {"sample": sample})

    model, sigma, labels = Record(), torch.tensor([0.25, 1.0]), torch.tensor([3, 10])
    flow_matching_loss(model, torch.ones(2, 1, 1, 1), torch.full((2, 1, 1, 1), 3.0), sigma, labels)
    assert model.seen[0].flatten().tolist() == [1.5, 3.0]  # (1 − σ) x₀ + σ ε
    assert model.seen[1] is sigma and model.seen[2] is labels


# --------------------------------------------------------------------------------------------------------- arguments


def test_help_documents_every_argument_when_asked(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "accelerate launch -m hf_pipelines.flow_control.train_small_flow" in text
    fields = vars(parse_args(["--output_dir", "x"]))
    assert len(fields) == 13
    for name in fields:
        # the option, its value, then words about it
        assert re.search(rf"\n  --{name} \S+\s+[a-zA-Z0-9]+ ?\w+", text), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --output_dir"),
        (["--size", "9"], "--size: invalid choice: 9"),
        (["--max_train_steps", "0"], "--max_train_steps must be at least 1, got 0"),
        (["--train_batch_size", "-1"], "--train_batch_size must be at least 1, got -1"),
        (["--checkpointing_steps", "0"], "--checkpointing_steps must be at least 1"),
        (["--logging_steps", "0"], "--logging_steps must be at least 1"),
        (["--learning_rate", "0"], "--learning_rate must be positive, got 0.0"),
        (["--learning_rate", "nan"], "--learning_rate must be positive, got nan"),
        (["--weight_decay", "-1"], "--weight_decay must not be negative"),
        (["--label_dropout", "1.5"], r"--label_dropout must lie in [0, 1], got 1.5"),
        (["--ema_decay", "-0.1"], r"--ema_decay must lie in [0, 1], got -0.1"),
        (["--save_dtype", "int8"], "--save_dtype: invalid choice: 'int8'"),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
    ],
)
def test_exit_status_is_two_when_an_argument_is_wrong(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main([*(["--output_dir", "x"] if arguments else []), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
