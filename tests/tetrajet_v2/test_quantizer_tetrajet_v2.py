"""Config, `from_pretrained`, `prepare_model`, saving in both modes, other model families, adapters."""

import copy
import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import hf_models.tetrajet_v2 as tj
from hf_models.tetrajet_v2.quantizer_tetrajet_v2 import pack_model

IDS = torch.arange(24).view(2, 12) * 7 % 250


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tj.olmo2_config("tiny")).eval()


@pytest.fixture
def full(plain):
    """Converted, outlier channels selected."""
    model = tj.prepare_model(plain, "tetrajet_v2")
    for _, layer in tj.iter_layers(model):
        layer.select(torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(layer.layer_id)))
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


# -------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize("recipe", sorted(tj.RECIPES))
def test_config_is_equal_when_built_from_its_own_dict(recipe):
    config = tj.TetraJetConfig(recipe, osci_reset={"period": 300}, modules_to_not_convert=["layers.3"])
    values = config.to_dict()
    assert values["quant_method"] == "tetrajet_v2" and json.loads(json.dumps(values)) == values
    assert tj.TetraJetConfig(**values) == config == tj.TetraJetConfig.from_dict(values)
    assert isinstance(config.osci_reset, tj.OsciResetConfig) and isinstance(values["osci_reset"], dict)


def test_defaults_are_those_of_the_paper_when_nothing_is_given():
    config = tj.TetraJetConfig()
    assert config.to_dict() == {
        "quant_method": "tetrajet_v2",
        "recipe": "tetrajet_v2",
        "outer_block_size": 128,
        "weight_block_2d": False,
        "align_backward": True,
        "stochastic_grad": True,
        "stochastic_weight": True,
        "stochastic_act": True,
        "rht_dx": True,
        "rht_dw": True,
        "disabled_quantizers": [],
        "hadamard_size": 16,
        "scale_rounding": "nearest",
        "strict_unbiased": False,
        "modules_to_not_convert": None,
        "weights": "master",
        "save_packed_activations": False,
        "gemm": "fp32",
        "seed": 0,
        "out_control": {
            "enabled": True, "ratio": 0.1, "record_start": 501, "record_steps": 50, "align": 16, "selected": False,
        },
        "osci_reset": {
            "enabled": True, "detect": "distance_ratio", "start": 0.64, "period": 200, "window": 50, "threshold": 8.0,
            "sample_percent": 10, "edge_threshold": 0.495,
        },
    }  # fmt: skip


def test_presets_have_the_switches_of_their_table_when_built():
    table = {  # outer, 2-D weights, aligned, SR of dY, W, X, RHT in dX, dW
        "nvfp4_rtn": (-1, False, False, False, False, False, False, False),
        "nvidia_nvfp4": (-1, True, False, True, False, False, False, True),
        "fp4_all_the_way": (-1, False, False, True, False, True, False, False),
        "tetrajet_v2_base": (128, False, True, True, True, True, True, True),
        "tetrajet_v2": (128, False, True, True, True, True, True, True),
    }
    names = ["outer_block_size", "weight_block_2d", "align_backward"]
    names += ["stochastic_grad", "stochastic_weight", "stochastic_act", "rht_dx", "rht_dw"]
    for recipe, expected in table.items():
        config = tj.TetraJetConfig(recipe)
        assert tuple(getattr(config, n) for n in names) == expected
        assert config.osci_reset.enabled == config.out_control.enabled == (recipe == "tetrajet_v2")
    assert not tj.TetraJetConfig("bf16").enabled


def test_user_value_wins_when_the_preset_says_otherwise():
    config = tj.TetraJetConfig("nvfp4_rtn", outer_block_size=128, stochastic_grad=True, osci_reset={"enabled": True})
    assert config.outer_block_size == 128 and config.stochastic_grad and config.osci_reset.enabled
    assert tj.TetraJetConfig(rht_dx=False).rht_dx is False


def test_unknown_keys_are_named_in_one_warning_when_a_newer_config_is_read():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = tj.TetraJetConfig(**{**tj.TetraJetConfig().to_dict(), "new_a": 1, "new_b": 2})
    assert len(caught) == 1 and "['new_a', 'new_b']" in str(caught[0].message)
    assert config == tj.TetraJetConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "fp3"}, "recipe must be one of"),
        ({"outer_block_size": 24}, "outer_block_size must be -1 or a positive multiple of 16, got 24"),
        ({"outer_block_size": 0}, "outer_block_size must be"),
        ({"hadamard_size": 12}, "hadamard_size must be a power of two"),
        ({"scale_rounding": "down"}, "scale_rounding must be 'nearest' or 'up', got 'down'"),
        ({"weights": "fp4"}, "weights must be 'master' or 'packed'"),
        ({"gemm": "fp16"}, "gemm must be 'fp32', 'bf16' or 'native'"),
        ({"gemm": "native"}, "outer_block_size must be -1 with gemm='native'"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"disabled_quantizers": ["Q7"]}, "disabled_quantizers must be a list of"),
        ({"osci_reset": {"window": 199}}, r"osci_reset.window must be less than period − 1 = 199"),
        ({"osci_reset": {"threshold": 0}}, "osci_reset.threshold must be positive"),
        ({"osci_reset": {"detect": "magic"}}, "osci_reset.detect must be one of"),
        ({"osci_reset": {"start": 1.5}}, "osci_reset.start must be a step"),
        ({"osci_reset": {"sample_percent": 0}}, "osci_reset.sample_percent must be in"),
        ({"osci_reset": {"edge_threshold": 0.6}}, "osci_reset.edge_threshold must be in"),
        ({"out_control": {"ratio": 1.0}}, r"out_control.ratio must be in \[0, 1\), got 1.0"),
        ({"out_control": {"record_steps": 0}}, "out_control.record_steps must be an integer ≥ 1"),
        ({"out_control": 3}, "out_control must be a dict or OutControlConfig"),
    ],
)  # fmt: skip
def test_field_is_named_with_allowed_values_when_refused(values, message):
    with pytest.raises(ValueError, match=message):
        tj.TetraJetConfig(**values)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0), reason="has FP4 cores"
)
def test_native_back_end_is_refused_before_any_step_when_there_are_no_fp4_cores():
    with pytest.raises(ValueError, match=r"'native' needs FP4 tensor cores \(CUDA capability ≥ \(10, 0\)\)"):
        tj.TetraJetConfig("nvfp4_rtn", gemm="native")


@pytest.mark.parametrize(("size", "align", "expected"), [(16, 16, 0), (31, 16, 0), (32, 16, 16), (512, 16, 64)])
def test_number_of_outliers_is_aligned_when_the_layer_is_wide_enough(size, align, expected):
    assert tj.OutControlConfig(align=align).num_outliers(size) == expected


def test_number_of_outliers_follows_the_paper_when_alignment_is_1_or_128():
    assert tj.OutControlConfig(align=1).num_outliers(512) == 51  # round(51.2)
    assert tj.OutControlConfig(align=128).num_outliers(512) == 128
    for k in range(32, 8192, 16):  # ceil16(K/10), whatever the rounding of 0.1·K
        assert tj.OutControlConfig().num_outliers(k) == min(-(-k // 160) * 16, k - 16)
    assert tj.OutControlConfig(align=128).num_outliers(100) == 84  # at most K − 16


# -------------------------------------------------------------------------------------------------- loading and saving


def test_method_is_registered_when_the_package_is_imported_and_registered_again():
    code = (
        "import hf_models\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as a, AUTO_QUANTIZATION_CONFIG_MAPPING as b\n"
        "import importlib, sys, hf_models.tetrajet_v2 as tj\n"
        "print(a['tetrajet_v2'].__name__, b['tetrajet_v2'] is tj.TetraJetConfig)\n"
        "heavy = ['peft', 'gradio', 'transformers.trainer', 'hf_models.tetrajet_v2.trainer_tetrajet_v2']\n"
        "heavy += ['hf_models.tetrajet_v2.triton_quantize']\n"
        "print([m for m in heavy if m in sys.modules])\n"
        "tj.register()\n"
        "module = importlib.reload(sys.modules['hf_models.tetrajet_v2.configuration_tetrajet_v2']); tj.register()\n"
        "print(b['tetrajet_v2'] is module.TetraJetConfig)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[:3] == ["TetraJetHfQuantizer True", "[]", "True"], done.stderr[-2000:]


def test_linears_of_the_blocks_are_converted_when_loaded_with_a_config(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=tj.TetraJetConfig(), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    names = [name for name, _ in tj.iter_layers(model)]
    assert len(names) == 14 and type(model.lm_head) is nn.Linear and "lm_head" not in names
    assert [layer.layer_id for _, layer in tj.iter_layers(model)] == list(range(14))
    assert len({id(layer.state) for _, layer in tj.iter_layers(model)}) == 1
    assert not any(bool(layer.selected) for _, layer in tj.iter_layers(model))
    expected = logits(tj.prepare_model(plain, tj.TetraJetConfig()))
    assert torch.equal(logits(model), expected)
    assert (
        model.hf_quantizer.is_qat_trainable
        and model.hf_quantizer.is_trainable
        and model.hf_quantizer.is_serializable()
    )
    assert model.hf_quantizer.requires_calibration is False


def test_listed_modules_stay_plain_when_not_to_be_converted(plain):
    model = tj.prepare_model(plain, tj.TetraJetConfig(modules_to_not_convert=["model.layers.1", "down_proj"]))
    names = [name for name, _ in tj.iter_layers(model)]
    assert len(names) == 6 and all(n.startswith("model.layers.0.") and "down" not in n for n in names)


def test_master_checkpoint_gives_equal_logits_when_saved_and_loaded(full, tmp_path):
    expected = logits(full)
    full.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "tetrajet_v2" and saved["osci_reset"]["period"] == 200
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(model), expected)
    layer = model.model.layers[1].mlp.down_proj
    assert torch.equal(layer.hi_idx, full.model.layers[1].mlp.down_proj.hi_idx) and bool(layer.selected)


def test_master_checkpoint_loads_as_a_plain_model_when_the_package_is_absent(full, tmp_path):
    full.save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['hf_models'] = None\n"
        "import torch\nfrom transformers import AutoModelForCausalLM as A\n"
        f"m, i = A.from_pretrained({str(tmp_path)!r}, output_loading_info=True)\n"
        "print(type(m.model.layers[0].mlp.up_proj).__name__, len(i['missing_keys']),"
        " {k.split('.')[-1] for k in i['unexpected_keys']} <= {'hi_idx', 'lo_idx', 'selected'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["Linear", "0", "True"], done.stderr[-2000:]
    assert "Unknown quantization type" in done.stderr


def test_packed_checkpoint_gives_equal_logits_when_saved_and_loaded(full, tmp_path):
    expected = logits(full)
    pack_model(full, full.config.quantization_config)
    assert torch.equal(logits(full), expected)
    full.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(model), expected)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.mode == "packed" and not list(layer.parameters())
    assert not model.hf_quantizer.is_qat_trainable and model.hf_quantizer.is_trainable


def test_packed_checkpoint_takes_0_594_bytes_per_weight_when_there_are_no_outliers(plain, tmp_path):
    model = tj.prepare_model(plain, tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))
    layer = model.model.layers[0].mlp.down_proj  # (64, 128)
    stored = sum(b.nbytes for b in layer.buffers())
    assert stored / (64 * 128) == 0.5 + 1 / 16 + 4 / 128


def test_packed_dtypes_survive_when_loaded_or_cast_to_half_precision(full, tmp_path):
    config = full.config.quantization_config
    pack_model(full, config)
    full.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    other = copy.deepcopy(full).to(torch.float16)
    for a in (model, other):
        layer = a.model.layers[0].mlp.up_proj
        dtypes = {name: b.dtype for name, b in layer.named_buffers()}
        assert dtypes == {
            "weight_packed": torch.uint8,
            "weight_scale": torch.float8_e4m3fn,
            "weight_outer_scale": torch.float32,
            "weight_hi": torch.float8_e4m3fn,
            "weight_hi_scale": torch.uint8,
            "hi_idx": torch.int32,
            "lo_idx": torch.int32,
            "selected": torch.bool,
        }
        assert torch.equal(layer.dequantized_matrix(), full.model.layers[0].mlp.up_proj.dequantized_matrix())


def test_plain_checkpoint_is_packed_at_once_when_loaded_with_packed_weights(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    config = tj.TetraJetConfig("nvfp4_rtn", weights="packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    assert all(layer.mode == "packed" for _, layer in tj.iter_layers(model))
    assert torch.equal(logits(model), logits(tj.prepare_model(plain, "nvfp4_rtn")))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied_and_plain_when_converted(tied, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = tj.prepare_model(AutoModelForCausalLM.from_config(config).eval(), tj.TetraJetConfig("tetrajet_v2_base"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied and type(model.lm_head) is nn.Linear
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    pack_model(model, model.config.quantization_config)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), expected)


def test_callers_config_is_untouched_when_the_model_is_packed(plain):
    config = tj.TetraJetConfig("tetrajet_v2_base")
    model = tj.prepare_model(plain, config)
    pack_model(model, model.config.quantization_config)
    assert config.weights == "master" and model.config.quantization_config.weights == "packed"


def test_plain_dict_is_enough_when_given_as_quantization_config(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    values = {"quant_method": "tetrajet_v2", "recipe": "nvfp4_rtn", "seed": 5}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=values)
    assert model.config.quantization_config == tj.TetraJetConfig("nvfp4_rtn", seed=5)
    assert model.tetrajet_state.seed == 5 and len(list(tj.iter_layers(model))) == 14


def test_checkpoints_config_wins_when_other_options_are_given(full, tmp_path):
    full.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=tj.TetraJetConfig("nvfp4_rtn"))
    assert model.config.quantization_config.recipe == "tetrajet_v2"
    config = tj.set_recipe(model, recipe="nvfp4_rtn", seed=3)
    assert config.outer_block_size == -1 and model.tetrajet_state.seed == 3
    assert all(layer.recipe is config for _, layer in tj.iter_layers(model))
    assert model.hf_quantizer.quantization_config is config is model.config.quantization_config


def test_conversion_is_idempotent_when_repeated(plain):
    model = tj.prepare_model(plain, tj.TetraJetConfig("tetrajet_v2_base"))
    layers = [id(layer) for _, layer in tj.iter_layers(model)]
    assert tj.prepare_model(model, "tetrajet_v2_base") is model
    assert [id(layer) for _, layer in tj.iter_layers(model)] == layers
    with pytest.raises(ValueError, match="set_recipe"):
        tj.prepare_model(model, "nvfp4_rtn")
    assert model.is_quantized and model.quantization_method == "tetrajet_v2" and model.hf_quantizer is not None


def test_change_is_refused_when_a_field_is_unknown_or_fixed(plain):
    with pytest.raises(ValueError, match="not converted"):
        tj.set_recipe(plain, seed=1)
    model = tj.prepare_model(plain, "tetrajet_v2_base")
    with pytest.raises(ValueError, match=r"\['colour'\] must be fields"):
        tj.set_recipe(model, colour=1)
    with pytest.raises(ValueError, match="weights is fixed"):
        tj.set_recipe(model, weights="packed")
    with pytest.raises(ValueError, match="outer_block_size must be"):
        tj.set_recipe(model, outer_block_size=5)


def test_packed_layers_keep_their_format_when_a_recipe_is_set(plain):
    model = tj.prepare_model(plain, tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))
    tj.set_recipe(model, strict_unbiased=True)
    with pytest.raises(ValueError, match="packed layer keeps its weight format"):
        tj.set_recipe(model, recipe="nvfp4_rtn")


def test_outputs_equal_f_linear_when_the_recipe_is_bf16(plain):
    expected = logits(plain)
    assert torch.equal(logits(tj.prepare_model(plain, "bf16")), expected)


def test_model_is_plain_with_the_forward_weights_when_dequantized(full):
    matrices = {name: layer.dequantized_matrix() for name, layer in tj.iter_layers(full)}
    model = full.dequantize(torch.float32)
    assert not list(tj.iter_layers(model)) and not hasattr(model.config, "quantization_config")
    for name, matrix in matrices.items():
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and torch.equal(layer.weight, matrix)
    assert logits(model).isfinite().all()


def test_one_warning_recommends_fp32_when_master_weights_are_half_precision(plain, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_models.tetrajet_v2.quantizer_tetrajet_v2._warned", set())
    plain.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_models"):
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(
                tmp_path, dtype=torch.bfloat16, quantization_config=tj.TetraJetConfig()
            )
    messages = [r.getMessage() for r in caplog.records if "Master weights" in r.getMessage()]
    assert len(messages) == 1 and "dtype=torch.float32" in messages[0]


# -------------------------------------------------------------------------------------------------------- bad packings


def test_tensor_is_named_when_a_packed_checkpoint_is_damaged(plain, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tj.prepare_model(plain, tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    key = "model.layers.0.mlp.up_proj.weight_scale"
    bad = dict(good)
    bad[key] = good[key].clone()
    bad[key].view(torch.uint8)[3, 1] = 0x7F
    save_file(bad, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight_scale holds a NaN byte"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    bad[key] = good[key][:, :2].contiguous()
    save_file(bad, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"up_proj\.weight_scale: shape \(128, 4\) is expected, the file has \(128, 2\)"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_layer_is_named_when_its_channels_are_odd_or_its_weight_is_not_finite():
    model = nn.Sequential(nn.Linear(33, 16))
    with pytest.raises(ValueError, match=r"0\.weight_packed: an even number of channels is needed, got 33"):
        tj.prepare_model(model, tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))
    model = nn.Sequential(nn.Linear(32, 16))
    model[0].weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"0\.weight holds 1 non-finite"):
        tj.prepare_model(model, tj.TetraJetConfig("tetrajet_v2_base", weights="packed"))


def test_indices_are_refused_when_they_are_no_permutation(full, tmp_path):
    state = full.state_dict()
    state["model.layers.0.mlp.up_proj.hi_idx"] = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"up_proj\.hi_idx .* not a permutation"):
        full.load_state_dict(state)


# -------------------------------------------------------------------------------------------------------- other models


def test_conv1d_is_quantized_as_its_transpose_when_the_model_is_gpt2(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=256, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    )
    before = copy.deepcopy(model.transformer.h[0].mlp.c_fc)
    model = tj.prepare_model(model.eval(), "tetrajet_v2_base")
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(5, 64)
    assert len(list(tj.iter_layers(model))) == 4
    expected = tj.fqt_linear(x, before.weight.t(), before.bias, "tetrajet_v2_base")
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (64, 256)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    pack_model(model, model.config.quantization_config)
    assert torch.equal(logits(model), expected)
    assert type(model.dequantize(torch.float32).transformer.h[0].mlp.c_fc) is transformers.pytorch_utils.Conv1D


def test_fused_experts_are_listed_with_their_share_when_left_in_high_precision(caplog):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING, logger="hf_models"):
        tj.prepare_model(model, "tetrajet_v2_base")
    report = tj.quantization_report(model)
    assert set(report.experts) == {
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj",
    }  # fmt: skip
    share = 100 * sum(report.experts.values()) / sum(p.numel() for p in model.parameters())
    message = next(r.getMessage() for r in caplog.records if "expert" in r.getMessage())
    assert f"({share:.1f} %" in message and "gate_up_proj" in message
    assert "gate_up_proj" in str(report)


def test_shared_layer_stays_shared_when_converted():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(32, 32))})
    tj.prepare_model(model, "tetrajet_v2_base")
    assert model["a"] is model["b"][0] and isinstance(model["a"], tj.TetraJetLinear)
    assert model["a"].weight is shared.weight


def test_olmo2_sizes_have_the_papers_shapes_when_built():
    config = tj.olmo2_config("150M")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert (config.intermediate_size, config.vocab_size) == (1536, 100278)
    assert config.rope_parameters["rope_theta"] == 5e5 and not config.tie_word_embeddings
    sizes = {"70M": (512, 8, 8, 1024), "370M": (1024, 16, 16, 4096)}
    for size, expected in sizes.items():
        c = tj.olmo2_config(size)
        assert (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.intermediate_size) == expected
    with pytest.raises(ValueError, match="size must be one of"):
        tj.olmo2_config("7B")


def test_pipeline_generates_when_the_master_checkpoint_is_given(full, tmp_path):
    full.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    out = model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 8)


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("mode", ["master", "packed"])
def test_adapters_train_on_a_frozen_base_when_attached(mode, plain):
    peft = pytest.importorskip("peft")
    model = tj.prepare_model(plain, tj.TetraJetConfig("tetrajet_v2_base", weights=mode))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    before = logits(adapted)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = adapted(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    trainable = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in n for n in trainable)
    assert torch.isfinite(logits(adapted)).all() and not torch.equal(logits(adapted), before)


@pytest.mark.parametrize("safe", [False, True])
def test_merge_is_refused_when_the_base_is_packed_and_works_when_it_is_master(safe, plain):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    packed = tj.prepare_model(copy.deepcopy(plain), tj.TetraJetConfig("nvfp4_rtn", weights="packed"))
    with pytest.raises(ValueError, match="load the master checkpoint to merge"):
        peft.get_peft_model(packed, settings).merge_and_unload(safe_merge=safe)
    master = tj.prepare_model(plain, "nvfp4_rtn")
    before = master.model.layers[0].self_attn.q_proj.weight.detach().clone()
    merged = peft.get_peft_model(master, settings).merge_and_unload(safe_merge=safe)
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, before)


def test_input_gradient_is_the_masters_when_the_layer_is_packed(generator):
    layer = tj.TetraJetLinear(96, 48, recipe="tetrajet_v2")
    layer.select(torch.randperm(96, generator=generator))
    packed = copy.deepcopy(layer)
    packed.pack_()
    x, dy = torch.randn(32, 96, generator=generator), torch.randn(32, 48, generator=generator)
    grads = []
    for a in (layer, packed):
        leaf = x.clone().requires_grad_()
        a(leaf).backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(layer(x), packed(x)) and torch.equal(*grads)
