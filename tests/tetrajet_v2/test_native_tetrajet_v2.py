"""The native back end: what is handed to `scaled_mm`, decoded here by the hardware's layout. The call itself needs
Blackwell."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_models.tetrajet_v2 as tj
from hf_models.tetrajet_v2.native import native_available, native_matmul, swizzle_scales


def unswizzle(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scale of (row, block) by the documented offset inside tiles of 128 × 4."""
    tiles_across = -(-blocks // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = (r // 128) * tiles_across + c // 4
    return flat.to(torch.float32)[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]


def decode(codes: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    values = tj.decode_e2m1(tj.unpack_e2m1(codes.view(torch.uint8)))
    rows, columns = values.shape
    inner = unswizzle(scales[0], rows, columns // 16)
    return values * (inner * scales[1]).repeat_interleave(16, 1)


@pytest.fixture
def blackwell(monkeypatch):
    """`scaled_mm` by its definition, and a device that reports capability (10, 0)."""

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
        assert recipe_a == recipe_b == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        assert swizzle_a == swizzle_b == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and a.shape[1] % 16 == 0 and a.is_contiguous()
        return decode(a, scale_a) @ decode(b.t(), scale_b).t()  # FP32, so that the operands can be compared

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (10, 0))


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (130, 9), (300, 16)])
def test_scales_come_back_when_swizzled(rows, blocks, generator):
    scales = torch.rand(rows, blocks, generator=generator).to(torch.float8_e4m3fn)
    flat = swizzle_scales(scales)
    assert flat.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    assert torch.equal(unswizzle(flat, rows, blocks), scales.to(torch.float32))


@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 64), (5, 7, 48), (130, 33, 80)])
def test_product_is_that_of_the_dequantized_operands_when_native(m, n, k, blackwell, generator):
    a = tj.nvfp4_quantize(torch.randn(m, k, generator=generator), -1)
    b = tj.nvfp4_quantize(torch.randn(n, k, generator=generator), -1)
    assert torch.allclose(native_matmul(a, b), a.dequantize() @ b.dequantize().t(), atol=1e-4)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", "tetrajet_v2_base"])
def test_layer_is_the_emulated_one_when_the_back_end_is_native(recipe, outliers, blackwell, generator):
    x, w = torch.randn(40, 96, generator=generator), nn.Parameter(torch.randn(48, 96, generator=generator))
    dy = torch.randn(40, 48, generator=generator)
    order = torch.randperm(96, generator=generator).int()
    split = tj.Outliers(order[:16], order[16:]) if outliers else None
    # nearest rounding: stochastic noise is laid out differently for transposed operands
    off = dict(stochastic_grad=False, stochastic_weight=False, stochastic_act=False, outer_block_size=-1)
    results = []
    for gemm in ("native", "fp32"):
        leaf = x.clone().requires_grad_()
        y = tj.fqt_linear(leaf, w, None, tj.TetraJetConfig(recipe, gemm=gemm, **off), outliers=split)
        results.append((y, *torch.autograd.grad(y, (leaf, w), dy)))
    for native, emulated in zip(*results, strict=True):
        tolerance = 1e-2 if outliers else 1e-5  # the MXFP8 part runs on BF16
        assert float((native - emulated).detach().norm() / emulated.detach().norm()) < tolerance


@pytest.mark.skipif(native_available(), reason="has FP4 cores")
def test_checkpoint_is_emulated_with_a_warning_when_there_are_no_fp4_cores(blackwell, monkeypatch):
    saved = tj.TetraJetConfig("nvfp4_rtn", gemm="native")
    layer = tj.TetraJetLinear(32, 16, recipe=saved)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="emulated here"):
        assert tj.TetraJetConfig.from_dict(saved.to_dict()).gemm == "fp32"
    with pytest.raises(RuntimeError, match="needs FP4 tensor cores"):  # before any step, never zeros
        layer(torch.ones(2, 32))


@pytest.mark.gpu
def test_native_product_is_the_emulated_one_when_the_gpu_is_blackwell(generator):
    if not native_available():
        pytest.skip("no FP4 tensor cores")
    a = tj.nvfp4_quantize(torch.randn(256, 512, generator=generator).cuda(), -1)
    b = tj.nvfp4_quantize(torch.randn(128, 512, generator=generator).cuda(), -1)
    expected = a.dequantize() @ b.dequantize().t()
    assert float((native_matmul(a, b) - expected).norm() / expected.norm()) < 2**-7
