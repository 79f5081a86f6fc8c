"""`TetraJetTrainer`: schedules, exact resuming, checkpointing, accumulation, two processes."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_models.tetrajet_v2 as tj

ROOT = Path(__file__).parents[2]
STEPS = 16


def dataset(n=64, seed=0):
    ids = torch.randint(0, 250, (n, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def config(**changes):
    values = {
        "recipe": "tetrajet_v2",
        "out_control": {"record_start": 2, "record_steps": 3},
        "osci_reset": {"start": 6, "period": 6, "window": 3, "threshold": 2.0},
        **changes,
    }
    return tj.TetraJetConfig(**values)


def model_of(recipe=None):
    torch.manual_seed(0)
    return tj.prepare_model(AutoModelForCausalLM.from_config(tj.olmo2_config("tiny")), recipe or config())


def arguments(folder, **changes):
    values = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 0,
        **changes,
    }
    return TrainingArguments(str(folder), **values)


def train(folder, model=None, resume=None, callbacks=None, **changes):
    trainer = tj.TetraJetTrainer(
        model=model or model_of(), args=arguments(folder, **changes), train_dataset=dataset(), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def states_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return train(tmp_path_factory.mktemp("whole"))


def test_outliers_are_selected_and_weights_reset_when_the_full_recipe_trains(whole):
    trainer = whole
    engines = {type(c).__name__: c.engine for c in trainer.callback_handler.callbacks if hasattr(c, "engine")}
    assert engines["OutControlCallback"].is_done and engines["OutControlCallback"].first_step == 2
    assert engines["OsciResetCallback"].num_resets > 0 and engines["OsciResetCallback"].start == 6
    assert all(bool(layer.selected) for _, layer in tj.iter_layers(trainer.model))
    assert trainer.model.tetrajet_state.step == STEPS - 1


@pytest.mark.parametrize(
    ("stop", "where"), [(4, "inside the recording"), (8, "inside a window"), (11, "between windows")]
)
def test_run_equals_an_uninterrupted_one_when_resumed(stop, where, whole, tmp_path):
    train(tmp_path / "b", max_steps=STEPS, save_strategy="steps", save_steps=stop, callbacks=[StopAt(stop)])
    checkpoint = tmp_path / "b" / f"checkpoint-{stop}"
    saved = load_file(checkpoint / "tetrajet_state.safetensors")
    assert any(k.endswith("/norms") for k in saved) == (where == "inside the recording")
    assert any(k.endswith("/d_q") for k in saved) == (where == "inside a window")
    resumed = train(tmp_path / "b", resume=str(checkpoint))
    assert states_equal(whole.model, resumed.model)


def test_last_checkpoint_is_continued_when_resume_is_true(whole, tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=3, callbacks=[StopAt(9)])
    assert states_equal(whole.model, train(tmp_path, resume=True).model)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 9])
def test_run_equals_an_uninterrupted_one_when_killed_and_resumed(step, whole, tmp_path):
    code = (
        f"import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_trainer_tetrajet_v2 as t, torch; torch.set_num_threads(1)\n"
        "class Kill(t.TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        f"        if state.global_step == {step}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"t.train({str(tmp_path)!r}, save_strategy='steps', save_steps=1, callbacks=[Kill()])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=600)
    assert killed.returncode == -9, killed.stderr[-3000:]
    assert states_equal(whole.model, train(tmp_path, resume=True).model)


def test_training_goes_on_with_a_message_when_the_state_file_is_missing(tmp_path, caplog):
    train(tmp_path, save_strategy="steps", save_steps=8, callbacks=[StopAt(8)])
    (tmp_path / "checkpoint-8" / "tetrajet_state.safetensors").unlink()
    with caplog.at_level(logging.WARNING, logger="hf_models"):
        trainer = train(tmp_path, resume=str(tmp_path / "checkpoint-8"))
    assert "has no tetrajet_state.safetensors" in caplog.text
    engine = next(c.engine for c in trainer.callback_handler.callbacks if isinstance(c, tj.OsciResetCallback))
    # the window open at step 8 (indices 6 … 10) is lost; the next, at 12, ends at index 16, after the last step
    assert engine.num_resets == 0 and engine.is_tracking


def test_recording_restarts_at_once_when_its_state_is_missing(tmp_path, caplog):
    train(tmp_path, save_strategy="steps", save_steps=4, callbacks=[StopAt(4)])
    (tmp_path / "checkpoint-4" / "tetrajet_state.safetensors").unlink()
    with caplog.at_level(logging.WARNING, logger="hf_models"):
        trainer = train(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    engine = next(c.engine for c in trainer.callback_handler.callbacks if isinstance(c, tj.OutControlCallback))
    assert engine.first_step == 4 and engine.is_done and "step 4 is past record_start=2" in caplog.text


def test_weights_are_the_same_when_activations_are_checkpointed(tmp_path):
    plain = train(tmp_path / "a", max_steps=9)
    for reentrant in (True, False):
        checkpointed = train(
            tmp_path / "b", max_steps=9, activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        assert states_equal(plain.model, checkpointed.model)


def test_micro_steps_draw_different_noise_and_resets_count_optimizer_steps_when_accumulating(tmp_path):
    keys = []

    class Spy(StopAt):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            keys.append((model.tetrajet_state.step, model.tetrajet_state.micro_step))

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            keys.append((model.tetrajet_state.step, model.tetrajet_state.micro_step))

    trainer = train(tmp_path, callbacks=[Spy(99)], gradient_accumulation_steps=2, per_device_train_batch_size=2)
    assert keys[1::2] == [(i, 1) for i in range(STEPS)]
    engine = next(c.engine for c in trainer.callback_handler.callbacks if isinstance(c, tj.OsciResetCallback))
    assert engine.num_resets > 0 and engine.start == 6


def test_accumulated_gradient_is_the_sum_of_the_micro_steps_when_keys_are_set_by_hand():
    layer = tj.TetraJetLinear(32, 16, recipe="tetrajet_v2_base")
    x = torch.randn(2, 8, 32)
    total = 0
    for micro in range(2):
        layer.state.set_step(5, micro)
        total = total + torch.autograd.grad(layer(x[micro]).square().sum(), layer.weight)[0]
    for micro in range(2):
        layer.state.set_step(5, micro)
        layer(x[micro]).square().sum().backward()
    assert torch.equal(layer.weight.grad, total)


def test_callbacks_work_when_given_to_the_plain_trainer(whole, tmp_path):
    trainer = Trainer(
        model=model_of(),
        args=arguments(tmp_path / "b"),
        train_dataset=dataset(),
        callbacks=[tj.OutControlCallback(), tj.OsciResetCallback(), tj.TetraJetStateCallback()],
    )
    trainer.train()
    assert states_equal(whole.model, trainer.model)


def test_callbacks_are_not_doubled_when_the_user_brings_one(tmp_path):
    mine = tj.OsciResetCallback(tj.OsciResetConfig(start=2, period=5, window=2))
    trainer = train(tmp_path, callbacks=[mine], max_steps=3)
    kinds = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    assert kinds.count("OsciResetCallback") == 1 and kinds[-1] == "TetraJetStateCallback"
    assert mine.engine.start == 2


def test_no_step_is_counted_when_the_optimizer_skipped_it():
    class Skipped:
        step_was_skipped = True

    callback = tj.OsciResetCallback()
    callback.engine = tj.OsciReset(model_of(), tj.OsciResetConfig(start=0, period=6, window=3))
    state = type("S", (), {"global_step": 1})()
    callback.on_step_end(None, state, None, optimizer=Skipped())
    assert not callback.engine.is_tracking
    callback.on_step_end(None, state, None, optimizer=object())
    assert callback.engine.is_tracking


def test_tensors_are_named_when_training_starts_from_non_finite_weights(tmp_path):
    model = model_of()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"not finite.*model\.layers\.1\.mlp\.up_proj\.weight"):
        train(tmp_path, model=model)


def test_trainer_is_refused_when_the_model_is_plain_or_packed(tmp_path):
    plain = AutoModelForCausalLM.from_config(tj.olmo2_config("tiny"))
    with pytest.raises(ValueError, match="call prepare_model"):
        tj.TetraJetTrainer(model=plain, args=arguments(tmp_path), train_dataset=dataset())
    packed = model_of(tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))
    with pytest.raises(ValueError, match="load the master checkpoint, or attach adapters"):
        tj.TetraJetTrainer(model=packed, args=arguments(tmp_path), train_dataset=dataset())


def test_saved_model_loads_equal_when_training_is_done(whole, tmp_path):
    trainer = whole
    trainer.save_model(str(tmp_path / "master"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "master")
    ids = torch.stack([row["input_ids"] for row in dataset(4)])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.eval()(ids).logits)


def test_bf16_autocast_trains_when_asked(tmp_path):
    trainer = train(tmp_path, bf16=True, max_steps=8)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("recipe", ["nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", "tetrajet_v2_base", "tetrajet_v2"])
def test_loss_falls_when_a_recipe_trains(recipe, tmp_path):
    data = dataset(8)
    model = model_of(tj.TetraJetConfig(recipe, out_control={"record_start": 2, "record_steps": 2}))
    batch = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        before = float(model(batch, labels=batch).loss)
    args = arguments(tmp_path, max_steps=30, per_device_train_batch_size=8)
    tj.TetraJetTrainer(model=model, args=args, train_dataset=data).train()
    with torch.no_grad():
        assert float(model.eval()(batch, labels=batch).loss) < before - 0.5


def test_plain_loop_trains_when_the_engines_are_stepped_by_hand():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = tj.prepare_model(model, config(osci_reset={"start": 4, "period": 4, "window": 2, "threshold": 1.0}))
    reset, control = tj.OsciReset(model), tj.OutControl(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(32, 64), torch.randn(32, 8)
    for i in range(12):
        control.begin(i)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        control.step(i)
        reset.step(i)
    assert control.is_done and model.tetrajet_state.step == 12


# ------------------------------------------------------------------------------------------------------- two processes


TWO_PROCESSES = """
import sys, torch
import torch.distributed as dist
sys.path.insert(0, {tests!r})
import test_trainer_tetrajet_v2 as t
import hf_models.tetrajet_v2 as tj
torch.set_num_threads(1)
trainer = t.train({folder!r}, per_device_train_batch_size=2, ddp_backend="gloo")
assert dist.get_world_size() == 2
engine = next(c.engine for c in trainer.callback_handler.callbacks if isinstance(c, tj.OsciResetCallback))
assert engine.num_resets > 0
for tensor in trainer.model.state_dict().values():
    other = tensor.detach().clone()
    dist.broadcast(other, 0)
    assert torch.equal(other, tensor.detach())
resets = torch.tensor(engine.num_resets)
dist.broadcast(resets, 0)
assert int(resets) == engine.num_resets
seeds = [None, None]
dist.all_gather_object(seeds, next(l for _, l in tj.iter_layers(trainer.model)).state.key(0))
assert seeds[0][:4] == seeds[1][:4] and seeds[0][4] != seeds[1][4], seeds
if dist.get_rank() == 0:
    print("RESETS", engine.num_resets)
"""


@pytest.mark.slow
def test_ranks_reset_and_select_identically_when_two_processes_train(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "out")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29731",
        script,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RESETS" in done.stdout


FSDP2 = """
import torch, copy
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
import hf_models.tetrajet_v2 as tj
dist.init_process_group("gloo")
torch.manual_seed(0)
model = tj.prepare_model(nn.Sequential(nn.Linear(256, 32, bias=False)), "tetrajet_v2_base")
whole = copy.deepcopy(model)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
settings = tj.OsciResetConfig(start=0, period=8, window=4, threshold=2.0)
engines = [tj.OsciReset(model, settings), tj.OsciReset(whole, settings)]
rank = dist.get_rank()
for i in range(6):
    noise = 0.02 * torch.randn(32, 256, generator=torch.Generator().manual_seed(i))
    whole[0].weight.data.add_(noise)
    model[0].weight.to_local().data.add_(noise[16 * rank : 16 * rank + 16])
    for engine in engines:
        engine.step(i)
assert engines[1].num_resets > 0
assert torch.equal(model[0].weight.to_local(), whole[0].weight.data[16 * rank : 16 * rank + 16])
tj.set_recipe(model, outer_block_size=-1)
try:
    tj.OsciReset(model, settings).step(0)
except RuntimeError as error:
    assert "whole rows" in str(error)
    print("REFUSED")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_row_shards_reset_as_the_whole_weight_when_fsdp2_shards_it(tmp_path):
    script = tmp_path / "fsdp2.py"
    script.write_text(FSDP2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29732",
        script,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("REFUSED") == 2
