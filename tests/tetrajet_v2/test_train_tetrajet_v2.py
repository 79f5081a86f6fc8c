"""The command line of the trainer: resume after a kill, two processes, recipes, stages, arguments."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_models.tetrajet_v2 as tj
from hf_models.tetrajet_v2.train_tetrajet_v2 import (
    PretrainingTrainer,
    TetraJetArguments,
    TetraJetTrainingArguments,
    main,
    tiny_llama_config,
)

ROOT = Path(__file__).parents[2]
MODULE = "hf_models.tetrajet_v2.train_tetrajet_v2"
SHORT = (
    *("--max_steps", "24", "--per_device_train_batch_size", "4", "--train_file", "markov", "--warmup_steps", "2"),
    *("--logging_steps", "6", "--save_steps", "6", "--use_cpu", "true", "--seed", "1", "--disable_tqdm", "true"),
    *("--eval_blocks", "32", "--record_start", "2", "--record_steps", "3", "--block_size", "32"),
    *("--osci_start", "10", "--osci_period", "6", "--osci_window", "3", "--osci_threshold", "2"),
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT = 240


def start(out: Path, *arguments: str) -> subprocess.Popen:
    """Train in a process of its own."""
    command = [sys.executable, "-m", MODULE, "--output_dir", str(out), *SHORT, *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output[-3000:]
    return output


def largest_difference(first: Path, second: Path) -> float:
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """A run of 24 steps without interruption, and what it printed."""
    out = tmp_path_factory.mktemp("whole")
    return out, finish(start(out))


def test_weights_are_bit_equal_when_a_killed_run_is_resumed(whole, tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "checkpoint-12" / "trainer_state.json").exists():  # step 12 opens a window
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model.safetensors").exists()
    finish(start(tmp_path, "--resume_from_checkpoint", "true"))
    assert largest_difference(whole[0], tmp_path) == 0.0


def test_folder_loads_with_its_recipe_when_trained(whole):
    model = AutoModelForCausalLM.from_pretrained(whole[0])
    layers = [layer for _, layer in tj.iter_layers(model)]
    assert len(layers) == 14 and all(bool(layer.selected) for layer in layers)
    recipe = model.config.quantization_config
    assert (recipe.recipe, recipe.seed, recipe.osci_reset.start) == ("tetrajet_v2", 1, 10)
    text = "aba bab.\n"
    tokenizer = AutoTokenizer.from_pretrained(whole[0])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_perplexity_is_that_of_the_quantized_forward_when_measured(whole):
    from datasets_scripts.tetrajet_corpora import load_corpus

    metrics = json.loads((whole[0] / "training_metrics.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(whole[0]).eval()
    rows = load_corpus("markov", AutoTokenizer.from_pretrained(whole[0]), 32, "test")["input_ids"][:32]
    with torch.no_grad():
        loss = float(model(rows, labels=rows).loss)
    assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
    assert "perplexity" in whole[1] and "'loss'" in whole[1]


def test_second_stage_changes_the_recipe_when_it_goes_on_from_a_checkpoint(tmp_path):
    short = (*SHORT, "--max_steps", "2", "--save_strategy", "no")
    main([*short, "--recipe", "bf16", "--output_dir", str(tmp_path / "one")])
    second = ("--model_name_or_path", str(tmp_path / "one"), "--recipe", "nvfp4_rtn", "--rht_dw", "true")
    main([*short, *second, "--output_dir", str(tmp_path / "two")])
    recipes = [AutoModelForCausalLM.from_pretrained(tmp_path / n).config.quantization_config for n in ("one", "two")]
    assert [recipe.recipe for recipe in recipes] == ["bf16", "nvfp4_rtn"]
    assert recipes[1].rht_dw and not recipes[1].rht_dx and recipes[1].enabled and not recipes[0].enabled
    assert largest_difference(tmp_path / "one", tmp_path / "two") > 0


def test_olmo2_trains_on_memory_mapped_tokens_when_given(tmp_path):
    np.random.default_rng(0).integers(0, 250, 4000).astype("<u4").tofile(tmp_path / "part-0.npy")
    arguments = ("--model_config", "olmo2-tiny", "--train_file", str(tmp_path), "--z_loss", "1e-4")
    main([*SHORT, *arguments, "--max_steps", "2", "--save_strategy", "no", "--output_dir", str(tmp_path / "out")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "olmo2"


def test_recipe_arguments_reach_the_config_when_given():
    options = TetraJetArguments(recipe="tetrajet_v2_base", osci_reset=True, osci_start=0.5, outer_block_size=-1)
    config = tj.TetraJetConfig(**options.recipe_fields(7))
    assert (config.osci_reset.enabled, config.osci_reset.start, config.out_control.enabled) == (True, 0.5, False)
    assert (config.outer_block_size, config.seed, config.osci_reset.period) == (-1, 7, 200)
    assert TetraJetArguments(osci_start=8000.0).recipe_fields(0)["osci_reset"]["start"] == 8000


def test_embeddings_are_not_decayed_and_z_loss_is_added_when_training(tmp_path):
    torch.manual_seed(0)
    model = tj.prepare_model(AutoModelForCausalLM.from_config(tiny_llama_config()), "tetrajet_v2_base")
    args = TetraJetTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    trainer = PretrainingTrainer(model=model, args=args, z_loss=0.5)
    names = trainer.get_decay_parameter_names(model)
    assert "lm_head.weight" in names and "model.embed_tokens.weight" not in names
    assert not any("norm" in name for name in names)
    trainer.decay_embeddings = True
    assert "model.embed_tokens.weight" in trainer.get_decay_parameter_names(model)
    ids = torch.randint(0, 128, (3, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    model.train()
    with torch.no_grad():
        outputs = model(**inputs)
        expected = outputs.loss + 0.5 * outputs.logits[:, :-1].logsumexp(-1).square().mean()
        assert float(trainer.compute_loss(model, inputs)) == pytest.approx(float(expected), rel=1e-6)
        assert float(trainer.compute_loss(model, inputs, num_items_in_batch=42)) == pytest.approx(
            float(expected) / 2, rel=1e-6
        )
        assert float(trainer.compute_loss(model.eval(), inputs)) == pytest.approx(float(outputs.loss), rel=1e-6)


def test_every_argument_is_documented_when_help_is_asked(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in TetraJetArguments.__dataclass_fields__:
        assert f"--{name}" in text
    assert "Steps of a window." in text and "tetrajet_v2_base" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "fp2"), "recipe must be one of"),
        (("--model_config", "gpt"), "model_config='gpt' must be one of tiny-llama, olmo2-tiny"),
        (("--block_size", "1"), "block_size=1 must be at least 2"),
        (("--eval_blocks", "-1"), "eval_blocks=-1 must be at least 0"),
        (("--z_loss", "-1"), "z_loss=-1.0 must be at least 0"),
        (("--osci_start", "1.5"), "osci_start=1.5 must be a share"),
        (("--osci_window", "5"), "osci_reset.window must be less than"),
        (("--outlier_ratio", "1"), r"out_control.ratio must be in \[0, 1\)"),
        (("--gemm", "fp8"), "gemm must be"),
        (("--train_file", "nowhere.txt"), "is no file or folder here"),
    ],
)
def test_wrong_arguments_are_named_when_training_starts(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([*SHORT, "--output_dir", str(tmp_path), *arguments])


def test_tokenizer_is_asked_for_when_a_large_model_reads_text(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    arguments = ("--model_config", "olmo2-70M", "--train_file", str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="--tokenizer is needed for --model_config olmo2-70M"):
        main([*SHORT, *arguments, "--output_dir", str(tmp_path / "out")])


@pytest.mark.slow
def test_two_processes_give_what_one_gives_when_nothing_is_quantized(tmp_path):
    # a quantized weight gradient depends on how tokens fall into blocks, so only the plain recipe can be equal
    finish(start(tmp_path / "one", "--recipe", "bf16"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(port), "-m", MODULE, "--output_dir", str(tmp_path / "two"), *SHORT),
        *("--per_device_train_batch_size", "2", "--recipe", "bf16"),
    ]
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-3
