"""Export layouts, read by decoders written here from the layouts' definitions alone."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_models.tetrajet_v2 as tj

ROOT = Path(__file__).parents[2]
IDS = torch.arange(24).view(2, 12) * 7 % 250
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def model_of(recipe="tetrajet_v2_base", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tj.olmo2_config("tiny")).eval()
    return tj.prepare_model(model, tj.TetraJetConfig(recipe, **changes))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def decode(codes: torch.Tensor, scale: torch.Tensor, multiplier: float) -> np.ndarray:
    """Independent decoder, one block at a time in plain Python numbers (FP32 products)."""
    bytes_, scales = codes.numpy(), scale.to(torch.float32).numpy()
    out = np.zeros((bytes_.shape[0], bytes_.shape[1] * 2), dtype=np.float32)
    for half in (0, 1):
        nibble = (bytes_ >> (4 * half)) & 0xF
        out[:, half::2] = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=np.float32)[nibble]
    product = scales * np.float32(multiplier)
    return out * np.repeat(product, 16, axis=1)[:, : out.shape[1]]


def tensors_of(folder):
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


# --------------------------------------------------------------------------------------------------------- the layouts


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_decoded_weights_are_the_quantized_masters_when_an_interop_layout_is_written(layout, fuse, tmp_path):
    model = model_of()
    report = tj.export_packed(model, tmp_path, layout=layout, fuse=fuse)
    tensors, _ = tensors_of(tmp_path)
    for name, layer in tj.iter_layers(model):
        w = layer.weight.detach()
        group = [name]
        if fuse:
            for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
                if name.split(".")[-1] in names:
                    group = [name.rpartition(".")[0] + "." + leaf for leaf in names]
        amax = max(float(model.get_submodule(n).weight.detach().abs().max()) for n in group)
        codes = tensors[f"{name}.{'weight' if layout == 'modelopt' else 'weight_packed'}"]
        scale = tensors[f"{name}.weight_scale"]
        assert codes.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn
        assert codes.shape == (w.shape[0], w.shape[1] // 2) and scale.shape == (w.shape[0], w.shape[1] // 16)
        if layout == "modelopt":
            outer = tensors[f"{name}.weight_scale_2"]
            assert outer.shape == () and float(outer) == pytest.approx(amax / 2688, rel=1e-6)
            decoded = decode(codes, scale, float(outer))
        else:
            outer = tensors[f"{name}.weight_global_scale"]
            assert outer.shape == (1,) and float(outer) == pytest.approx(2688 / amax, rel=1e-6)
            decoded = decode(codes, scale, 1 / float(outer))
        expected = tj.nvfp4_quantize(w, -1, tensor_amax=amax).dequantize().numpy()
        assert np.allclose(decoded, expected, rtol=1e-6)
        assert np.abs(decoded - w.numpy()).max() <= amax / 6 + 1e-6
    assert f"{name}.weight_scale" in tensors and not any(k.endswith(("hi_idx", "lo_idx", "selected")) for k in tensors)
    assert 0 < report["mean_relative_change"] <= report["max_relative_change"] < 0.2
    assert json.loads((tmp_path / "export_report.json").read_text())["layout"] == layout


def test_fused_layers_share_their_outer_scale_when_exported(tmp_path):
    tj.export_packed(model_of(), tmp_path)
    tensors, _ = tensors_of(tmp_path)
    scale = {k.split("layers.0.")[1]: float(v) for k, v in tensors.items() if "layers.0" in k and "global" in k}
    attention = [scale[f"self_attn.{n}_proj.weight_global_scale"] for n in "qkv"]
    assert (
        len(set(attention)) == 1
        and scale["mlp.gate_proj.weight_global_scale"] == scale["mlp.up_proj.weight_global_scale"]
    )
    assert scale["self_attn.o_proj.weight_global_scale"] != attention[0]


def test_export_is_exact_when_training_used_one_outer_scale(tmp_path):
    report = tj.export_packed(model_of("nvfp4_rtn"), tmp_path, fuse=False)
    assert report["codes_changed_percent"] == 0.0 and report["max_relative_change"] == 0.0
    other = tj.export_packed(model_of("tetrajet_v2_base"), tmp_path / "b", fuse=False)
    assert 0 < other["codes_changed_percent"] < 50 and other["max_relative_change"] > 0
    assert set(other["layers"]) == {name for name, _ in tj.iter_layers(model_of())}


def test_config_names_scheme_and_skipped_modules_when_exported(tmp_path):
    tj.export_packed(model_of(), tmp_path / "a")
    quantization = tensors_of(tmp_path / "a")[1]["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    assert quantization["quant_method"] == "compressed-tensors" and quantization["format"] == "nvfp4-pack-quantized"
    assert (
        group["input_activations"] is None
        and group["weights"]["group_size"] == 16
        and quantization["ignore"] == ["lm_head"]
    )
    tj.export_packed(model_of(), tmp_path / "b", layout="modelopt")
    content = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
    assert content["quantization"]["group_size"] == 16 and content["quantization"]["exclude_modules"] == ["lm_head"]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_every_layer_has_an_input_scale_when_inputs_are_quantized_too(layout, tmp_path):
    model = model_of()
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda m, a, n=name: seen.__setitem__(n, float(a[0].abs().max())))
        for name, layer in tj.iter_layers(model)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    tj.export_packed(model, tmp_path, layout=layout, scheme="NVFP4", calibration_batches=[{"input_ids": IDS}])
    tensors, config = tensors_of(tmp_path)
    for name, _ in tj.iter_layers(model):
        if layout == "modelopt":
            assert float(tensors[f"{name}.input_scale"]) == pytest.approx(seen[name] / 2688, rel=1e-6)
        else:
            assert float(tensors[f"{name}.input_global_scale"]) == pytest.approx(2688 / seen[name], rel=1e-6)
    if layout == "compressed-tensors":
        assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


def test_scale_bytes_are_never_nan_when_a_weight_has_zero_blocks_and_zero_rows(tmp_path):
    model = model_of()
    layers = dict(tj.iter_layers(model))
    weights = [layer.weight.data for layer in layers.values()]
    weights[0][:, 16:32], weights[1][3] = 0, 0
    weights[4].zero_()
    first, _, _, _, zero = list(layers)[:5]
    for layout in ("compressed-tensors", "modelopt", "tetrajet"):
        tj.export_packed(model, tmp_path / layout, layout=layout)
        for key, value in load_file(tmp_path / layout / "model.safetensors").items():
            if key.endswith("weight_scale"):
                assert not bool((value.view(torch.uint8) & 0x7F == 0x7F).any())
            elif value.is_floating_point() and value.dtype != torch.float8_e4m3fn:
                assert value.isfinite().all(), key
        state = tj.import_packed(tmp_path / layout).state_dict()
        assert not state[f"{zero}.weight"].any() and not state[f"{first}.weight"][:, 16:32].any()


# ---------------------------------------------------------------------------------------------------------- own layout


@pytest.mark.parametrize("recipe", ["tetrajet_v2_base", "tetrajet_v2", "nvidia_nvfp4"])
def test_logits_are_equal_to_the_last_bit_when_the_own_layout_is_loaded(recipe, tmp_path):
    model = model_of(recipe)
    if recipe == "tetrajet_v2":
        for _, layer in tj.iter_layers(model):
            layer.select(torch.randperm(layer.in_features))
    expected = logits(model)
    report = tj.export_packed(model, tmp_path, layout="tetrajet")
    assert report["max_relative_change"] == 0.0 and "import hf_models" in (tmp_path / "README.md").read_text()
    assert all(layer.mode == "master" for _, layer in tj.iter_layers(model))
    assert model.config.quantization_config.weights == "master"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "tetrajet"])
def test_weights_come_back_when_any_layout_is_imported(layout, tmp_path):
    model = model_of("tetrajet_v2")
    for _, layer in tj.iter_layers(model):
        layer.select(torch.randperm(layer.in_features))
    tj.export_packed(model, tmp_path, layout=layout, fuse=False)
    plain = tj.import_packed(tmp_path)
    assert not list(tj.iter_layers(plain))
    for name, layer in tj.iter_layers(model):
        expected = layer.dequantized_matrix() if layout == "tetrajet" else tj.nvfp4_fake_quant(layer.weight, -1)
        assert torch.allclose(plain.get_submodule(name).weight, expected, rtol=1e-6, atol=0)
    head = model.lm_head.weight if layout == "tetrajet" else model.lm_head.weight.bfloat16().float()
    assert torch.equal(plain.lm_head.weight, head)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_written_once_when_exported(tied, tmp_path):
    config = tj.olmo2_config("tiny")
    config.tie_word_embeddings = tied
    model = tj.prepare_model(AutoModelForCausalLM.from_config(config).eval(), "nvfp4_rtn")
    tj.export_packed(model, tmp_path, layout="tetrajet")
    assert ("lm_head.weight" in tensors_of(tmp_path)[0]) != tied
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert tj.import_packed(tmp_path) is not None


# ----------------------------------------------------------------------------------------------------------- bad input


def test_nothing_is_written_when_weights_are_not_finite(tmp_path):
    model = model_of()
    model.model.layers[0].mlp.up_proj.weight.data[1, :2] = torch.inf
    for layout in ("compressed-tensors", "modelopt", "tetrajet"):
        with pytest.raises(ValueError, match=r"1 layers hold non-finite.*nothing was written.*up_proj \(2\)"):
            tj.export_packed(model, tmp_path / layout, layout=layout)
        assert not (tmp_path / layout).exists()


def test_argument_is_refused_when_it_is_not_allowed(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="layout must be one of"):
        tj.export_packed(model, tmp_path, layout="gguf")
    with pytest.raises(ValueError, match="scheme must be one of"):
        tj.export_packed(model, tmp_path, scheme="W8A8")
    with pytest.raises(ValueError, match="calibration_batches must be given"):
        tj.export_packed(model, tmp_path, scheme="NVFP4")
    with pytest.raises(ValueError, match="no quantized layers"):
        tj.export_packed(AutoModelForCausalLM.from_config(tj.olmo2_config("tiny")), tmp_path)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "tetrajet"])
def test_tensor_is_named_when_an_exported_folder_is_damaged(layout, tmp_path):
    tj.export_packed(model_of(), tmp_path, layout=layout)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.mlp.down_proj"
    codes_key = f"{name}.{'weight' if layout == 'modelopt' else 'weight_packed'}"

    def damaged(**changes):
        save_file({**good, **{f"{name}.{k}": v.contiguous() for k, v in changes.items()}}, file)
        return tj.import_packed(tmp_path)

    scale = good[f"{name}.weight_scale"]
    with_nan = scale.clone()
    with_nan.view(torch.uint8)[0, 0] = 0xFF
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale holds a NaN byte"):
        damaged(weight_scale=with_nan)
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale: shape \(64, 8\) is expected, got \(64, 7\)"):
        damaged(weight_scale=scale[:, :7])
    with pytest.raises(ValueError, match=r"down_proj\.weight.*is expected"):
        codes = good[codes_key]
        damaged(**{codes_key.removeprefix(f"{name}."): codes[:, :48], "weight_scale": scale[:, :6]})
    with pytest.raises(ValueError, match="must be a uint8 matrix"):
        damaged(**{codes_key.removeprefix(f"{name}."): good[codes_key].float()})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="quant_method must be one of"):
        tj.import_packed(tmp_path)


# -------------------------------------------------------------------------------------------------- third-party loader


def test_folder_loads_through_transformers_own_loader_when_compressed_tensors_is_installed(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = model_of("nvfp4_rtn")
    tj.export_packed(model, tmp_path)
    reference = tj.import_packed(tmp_path).to(torch.bfloat16)
    code = (
        "import sys, torch; sys.modules['hf_models'] = None\n"
        "from transformers import AutoModelForCausalLM as A\n"
        f"m, info = A.from_pretrained({str(tmp_path)!r}, output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "print(type(m.hf_quantizer).__name__)\n"
        f"torch.save(m(torch.arange(24).view(2, 12) * 7 % 250).logits.detach(), {str(tmp_path / 'logits.pt')!r})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CompressedTensorsHfQuantizer" in done.stdout
    theirs = torch.load(tmp_path / "logits.pt").float()
    expected = logits(reference).float()
    assert float((theirs - expected).norm() / expected.norm()) < 2e-2  # BF16 on both sides


@pytest.mark.parametrize("layer", ["mlp.down_proj", "self_attn.o_proj"])
def test_bytes_are_theirs_when_compressed_tensors_quantizes_the_same_weight(layer, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    model = model_of("nvfp4_rtn")
    w = model.get_submodule(f"model.layers.0.{layer}").weight.detach()
    tj.export_packed(model, tmp_path)
    ours, _ = tensors_of(tmp_path)
    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    global_scale = generate_gparam(w.min(), w.max())
    blocks = w.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    theirs = NVFP4PackedCompressor.compress(
        {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}, scheme
    )
    for key in ("weight_packed", "weight_scale"):
        mine, other = ours[f"model.layers.0.{layer}.{key}"], theirs[key]
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(ours[f"model.layers.0.{layer}.weight_global_scale"], global_scale)


def test_model_is_unchanged_when_exported(tmp_path):
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    expected = logits(model)
    for layout in ("compressed-tensors", "tetrajet"):
        tj.export_packed(model, tmp_path / layout, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(logits(model), expected)
