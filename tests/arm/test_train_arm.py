"""Training a memory: resume, two processes, distillation, arguments, logs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_models.arm import ArmTrainer, ArmTrainingArguments, convert_to_arm, full_attention
from hf_models.arm.train_arm import main
from hf_models.arm.train_recall_arm import (
    RECALL_MEMORY,
    learning_rate_share,
    recall_accuracy,
    recall_model,
    train_recall,
    window_mask,
)
from hf_models.arm.trainer_arm import distillation_loss, prepare_for_training, read_cost_share, slot_use, slot_writes

ROOT = Path(__file__).parents[2]
MODULE = "hf_models.arm.train_arm"
SHORT = (
    *("--max_steps", "40", "--learning_rate", "1e-2", "--per_device_train_batch_size", "16", "--warmup_steps", "5"),
    *("--logging_steps", "10", "--save_steps", "10", "--use_cpu", "true", "--seed", "1", "--disable_tqdm", "true"),
    *("--read_policy", "adaptive"),
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT = 240


def start(out: Path, *arguments: str) -> subprocess.Popen:
    """Train in a process of its own."""
    command = [sys.executable, "-m", MODULE, "--output_dir", str(out), *SHORT, *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def largest_difference(first: Path, second: Path) -> float:
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """A run of 40 steps without interruption, and what it printed."""
    out = tmp_path_factory.mktemp("whole")
    process = start(out)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output[-3000:]
    return out, output


# ------------------------------------------------------------------------------------------------ the command line


def test_weights_are_bit_equal_when_a_killed_run_is_resumed(whole, tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "checkpoint-20" / "trainer_state.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model.safetensors").exists()
    process = start(tmp_path, "--resume_from_checkpoint", "true")
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output[-3000:]
    assert largest_difference(whole[0], tmp_path) == 0.0


def test_logs_tell_what_the_memory_does_when_training(whole):
    history = json.loads((whole[0] / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
    names = {"loss", "gate_mean", "read_fraction", "balance_loss", "slot_entropy", "dead_slots"}
    assert len(history) == 4 and all(names <= set(entry) for entry in history)
    assert all(0 <= entry["slot_entropy"] <= 1 and 0 <= entry["dead_slots"] <= 1 for entry in history)
    assert "slot_entropy" in whole[1]  # printed, not only stored


def test_folder_loads_through_the_auto_class_when_trained(whole):
    model = AutoModelForCausalLM.from_pretrained(whole[0])
    assert type(model).__name__ == "ArmLlamaForCausalLM" and model.config.arm_read_policy == "adaptive"


@pytest.mark.slow
def test_two_processes_give_what_one_gives_when_no_noise_is_drawn(tmp_path):
    # one slot per bucket and no policy: the Gumbel noise decides nothing; the balance loss is no mean over rows
    quiet = ("--read_policy", "all", "--branching", "16", "--slots_per_bucket", "1", "--balance_coef", "0")
    process = start(tmp_path / "one", *quiet)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output[-3000:]
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port()), "-m", MODULE, "--output_dir", str(tmp_path / "two"), *SHORT),
        *("--per_device_train_batch_size", "8", *quiet),
    ]
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-3


def test_every_argument_is_documented_when_help_is_asked(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in ("--model", "--data", "--block_size", "--train_mode", "--read_coef", "--distill_coef", "--lora_rank"):
        assert name in text
    assert "memory+lora" in text and "Rank of the LoRA adapters" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train_mode", "half"), "train_mode='half' must be one of memory, memory\\+lora, full"),
        (("--data", "packaged"), "--data packaged is text, but --model recall reads recall tasks"),
        (("--read_cost_start", "1"), "read_cost_start=1.0 must be in"),
        (("--window", "0"), "arm_window=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named_when_training_starts(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(["--output_dir", str(tmp_path), "--use_cpu", "true", *arguments])


# ------------------------------------------------------------------------------------------------ text, LoRA, teacher


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny Llama with a byte-like tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("base")
    letters = ["<s>", "</s>", *(chr(code) for code in range(97, 123)), " ", "."]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(letters))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"text": f"abc def {'xyz ' * n}."}) + "\n" for n in range(40))
    )
    return folder


@pytest.mark.parametrize("mode", ["memory", "memory+lora", "full"])
def test_only_what_the_mode_names_changes_when_training_on_text(mode, base, texts, tmp_path):
    arguments = ("--model", str(base), "--data", str(texts), "--block_size", "32", "--max_steps", "3", "--window", "4")
    small = (
        "--branching",
        "2",
        "--levels",
        "1",
        "--use_cpu",
        "true",
        "--save_strategy",
        "no",
        "--disable_tqdm",
        "true",
    )
    distilled = ("--learning_rate", "1e-2", "--distill_coef", "0.5", "--train_mode", mode)
    main([*arguments, *small, *distilled, "--output_dir", str(tmp_path)])
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert set(before) <= set(after) and any(".arm.router" in name for name in after)
    if mode == "memory":
        assert changed == set()
    elif mode == "memory+lora":
        assert changed and all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in changed)
    else:
        assert any("mlp" in name for name in changed)


def test_distillation_is_zero_when_the_student_is_the_teacher():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20)).eval()
    inputs = {"input_ids": torch.randint(0, 20, (2, 12))}
    inputs["labels"] = inputs["input_ids"].clone()
    closed = convert_to_arm(base, window=16, gate_bias=-20)
    assert abs(float(distillation_loss(closed, inputs, closed(**inputs).logits).detach())) < 1e-6
    open_ = convert_to_arm(base, window=2, sinks=0)
    student = open_(**inputs).logits
    with full_attention(open_), torch.no_grad():
        teacher = open_(**inputs).logits
    p, q = teacher.softmax(-1)[:, :-1], student.softmax(-1)[:, :-1]
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    assert float(distillation_loss(open_, inputs, student).detach()) == pytest.approx(float(expected), abs=1e-6)


def test_coefficients_of_the_arguments_win_over_the_configuration_when_given(tmp_path):
    args = ArmTrainingArguments(output_dir=str(tmp_path), read_coef=0.3, distill_coef=0.1, use_cpu=True)
    trainer = ArmTrainer(model=recall_model(0, RECALL_MEMORY), args=args)
    config = trainer.model.config
    assert (config.arm_read_coef, config.arm_distill_coef, config.arm_balance_coef) == (0.3, 0.1, 0.01)


def test_model_without_memory_is_refused_when_a_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no ARM model"):
        ArmTrainer(model=recall_model(0), args=ArmTrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_memory_alone_is_trainable_when_the_mode_says_so(tmp_path):
    args = ArmTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    model = prepare_for_training(recall_model(0, RECALL_MEMORY), args)
    assert {name.split(".arm.")[-1] for name, p in model.named_parameters() if p.requires_grad} == {
        *("router", "slot_keys", "gate.weight", "gate.bias"),
        *("policy.weight", "policy.bias", "policy_scale", "policy_bias"),
    }


# ------------------------------------------------------------------------------------------------ schedules, recall


def test_read_cost_ramps_when_its_start_is_reached():
    assert [read_cost_share(step, 100, 0.4) for step in (0, 40, 70, 100)] == [0.0, 0.0, 0.5, 1.0]


def test_learning_rate_warms_up_and_falls_to_a_twentieth_when_scheduled():
    assert learning_rate_share(0, 800) == pytest.approx(1 / 30)
    assert learning_rate_share(30, 800) == pytest.approx(1.0)
    assert learning_rate_share(800, 800) == pytest.approx(0.05)


def test_slot_use_is_known_when_writes_are_counted():
    model = recall_model(0, RECALL_MEMORY).train()
    model(torch.randint(0, 160, (3, 20)), use_cache=False)
    writes = slot_writes(model.arm_stats(), 16)
    assert writes.shape == (1, 2, 16)
    assert float(writes.sum()) == float((model.arm_stats()[0].gate > 0).sum())
    assert slot_use(torch.ones(1, 1, 16)) == (pytest.approx(1.0), 0.0)
    one = torch.zeros(1, 1, 16)
    one[..., 3] = 7
    assert slot_use(one) == (pytest.approx(0.0, abs=1e-9), 15 / 16)


def test_window_mask_shows_window_and_sinks_when_made():
    mask = window_mask(5, 2, 1)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]


@pytest.mark.slow
def test_memory_recalls_more_than_a_window_of_equal_size_when_trained():
    arm = train_recall(recall_model(0, RECALL_MEMORY), 400, 0, progress=False)
    window = train_recall(recall_model(0), 400, 0, mask=window_mask(64, 24), progress=False)
    masked = lambda ids: window(ids, attention_mask=window_mask(ids.shape[1], 24)).logits  # noqa: E731
    assert recall_accuracy(arm, 48) >= 0.55
    assert recall_accuracy(arm, 240) >= recall_accuracy(window, 240, logits=masked) + 0.3
