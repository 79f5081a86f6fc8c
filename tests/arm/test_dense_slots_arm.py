"""Densely written slots: the dense oracle against the scan and the definition, and ABC and GSA inside ARM's reader."""

import math
import time

import pytest
import torch

from hf_models.arm.cache_arm import ArmCache
from hf_models.arm.ops_arm import Writes
from hf_models.arm.reference_arm import arm_reference
from hf_models.arm.scan_arm import arm_scan, arm_step, empty_state
from hf_models.arm.train_recall_arm import RECALL_MEMORY, recall_loss, recall_model
from hf_pipelines.arm import DenseSlotMemory, dense_scan, dense_slot_model
from hf_pipelines.arm.dense_oracle_arm import scan_dense_writes

# ---- the dense oracle ----


def random_case(length: int, seed: int = 0, batch: int = 2, window: int = 5, sinks: int = 2):
    g = torch.Generator().manual_seed(seed)
    heads, group, d, buckets, per_bucket = 2, 2, 6, 3, 2
    q_mem, q_rot = (torch.randn(batch, heads, group, length, d, generator=g) for _ in range(2))
    k, v, k_rot = (torch.randn(batch, heads, length, d, generator=g) for _ in range(3))
    slot = torch.randint(0, buckets * per_bucket, (batch, heads, length), generator=g)
    valid = torch.arange(length) < torch.tensor([[length], [max(length - 3, 0)]])[:batch]
    gate = torch.rand(batch, heads, length, generator=g) * (torch.rand(batch, heads, length, generator=g) > 0.3)
    gate = torch.where(valid[:, None], gate, 0.0)
    state = empty_state(batch, heads, d, d, buckets, per_bucket, window, sinks, torch.float32, "cpu")
    return state, q_mem, q_rot, Writes(k, v, k_rot, gate, slot, slot // per_bucket, valid), d**-0.5


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (23, 4), (70, 16), (70, 100)])
@pytest.mark.parametrize("debias", [True, False])
def test_dense_scan_equals_the_index_form_when_continued_with_masks(length, chunk, debias):
    state, *first, scaling = random_case(9, seed=1)
    state = arm_scan(state, *first, scaling)[1]  # a memory that holds something
    _, *case, _ = random_case(length)
    mask = torch.rand(2, 2, length, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    expected, moved = arm_scan(state, *case, scaling, (None, mask), chunk, debias)
    outputs, dense = dense_scan(state, *case, scaling, (None, mask), chunk, debias)
    for got, wanted in zip((*outputs, *dense), (*expected, *moved), strict=True):
        assert wanted is None or (got.double() - wanted.double()).abs().max() < 1e-5


def test_dense_scan_equals_the_definition_when_nothing_was_seen():
    state, q_mem, q_rot, writes, scaling = random_case(23)
    (out,), moved = dense_scan(state, q_mem, q_rot, writes, scaling, chunk=8)
    reference, _, *accumulators = arm_reference(q_mem, q_rot, writes, 6, 5, 2, scaling)
    assert (out - reference).abs().max() < 1e-5
    for got, wanted in zip(moved[:3], accumulators, strict=True):
        assert (got - wanted).abs().max() < 1e-6


def test_dense_scan_has_the_gradients_of_the_index_form_when_differentiated():
    gradients = []
    for scan in (arm_scan, dense_scan):
        state, q_mem, q_rot, writes, scaling = random_case(23)
        leaves = [x.clone().requires_grad_(True) for x in (writes.k, writes.v, writes.gate, q_mem)]
        writes = writes._replace(k=leaves[0], v=leaves[1], gate=leaves[2])
        (out,), moved = scan(state, leaves[3], q_rot, writes, scaling, chunk=8)
        gradients.append(torch.autograd.grad(out.square().sum() + moved.N.sum(), leaves))
    for got, wanted in zip(*gradients, strict=True):
        assert wanted.abs().max() > 0.1
        assert (got - wanted).abs().max() < 1e-4


def test_dense_scan_equals_steps_when_fed_one_by_one():
    state, q_mem, q_rot, writes, scaling = random_case(20, batch=1)
    (expected,), moved = dense_scan(state, q_mem, q_rot, writes, scaling)
    for t in range(20):
        part = Writes(*(x[:, :, t : t + 1] for x in writes[:-1]), writes.valid[:, t : t + 1])
        out, _ = arm_step(state, q_mem[..., t : t + 1, :], q_rot[..., t : t + 1, :], part, scaling)
        assert (out - expected[..., t : t + 1, :]).abs().max() < 1e-5
    assert (state.N - moved.N).abs().max() < 1e-6


@pytest.mark.slow
def test_index_form_is_faster_when_slots_are_many():
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, 4, 2048, 32, generator=g) for _ in range(3))
    slot = torch.randint(0, 256, (1, 4, 2048), generator=g)
    gate, valid = torch.rand(1, 4, 2048, generator=g), torch.ones(1, 2048, dtype=torch.bool)
    writes = Writes(k, v, k, gate, slot, slot // 4, valid)
    state = empty_state(1, 4, 32, 32, 64, 4, 64, 4, torch.float32, "cpu")
    seconds = {arm_scan: math.inf, dense_scan: math.inf}
    with torch.no_grad():
        for _ in range(4):
            for scan in seconds:
                start = time.process_time()
                scan(state, q[:, :, None], q[:, :, None], writes, 32**-0.5, chunk=32)
                seconds[scan] = min(seconds[scan], time.process_time() - start)
    assert seconds[dense_scan] >= 5 * seconds[arm_scan]


# ---- ABC and GSA ----


@pytest.mark.parametrize("kind", ["abc", "gsa"])
def test_dense_writes_equal_the_recurrence_when_computed_in_chunks(kind):
    state, q_mem, q_rot, writes, scaling = random_case(23)
    g = torch.Generator().manual_seed(5)
    real = writes.valid[:, None, :, None]
    control = torch.randn(2, 2, 23, 6, generator=g)
    decay = torch.ones_like(control) if kind == "abc" else torch.where(real, control.sigmoid(), 1.0)
    weight = torch.where(real, control.softmax(-1), 0.0) if kind == "abc" else 1 - decay
    (out,), moved = scan_dense_writes(state, q_mem, q_rot, writes, decay, weight, scaling, chunk=8)
    N, U, c = state.N.clone(), state.U.clone(), state.c.clone()
    for t in range(20):  # the second row has 20 real tokens
        delta, w = decay[:, :, t], weight[:, :, t]
        N = delta[..., None] * N + w[..., None] * writes.k[:, :, t, None]
        U = delta[..., None] * U + w[..., None] * writes.v[:, :, t, None]
        c = delta * c + w
        near = [i for i in range(t + 1) if t - i < 5 or i < 2]
        far = q_mem[..., t, :] @ (N / c[..., None]).transpose(-1, -2)
        local = q_rot[..., t, :] @ writes.k_rot[:, :, near].transpose(-1, -2)
        p = (torch.cat((far, local), -1) * scaling).softmax(-1)
        expected = p @ torch.cat((U / c[..., None], writes.v[:, :, near]), 2)
        assert (out[..., t, :] - expected).abs().max() < 1e-5
    for got, wanted in zip(moved[:3], (N, U, c), strict=True):
        assert (got[1] - wanted[1]).abs().max() < 1e-5  # padding changed nothing


def make_memory(kind: str, damping: float = 1.0) -> tuple[DenseSlotMemory, torch.Tensor, torch.Tensor]:
    memory = dense_slot_model(recall_model(0, RECALL_MEMORY), kind, damping).model.layers[0].self_attn.arm
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    return memory, hidden, torch.arange(7) < torch.tensor([[7], [5]])


def test_abc_spreads_mass_one_per_token_when_it_writes():
    memory, hidden, valid = make_memory("abc")
    decay, weight = memory.write_weights(hidden, valid)
    assert decay.shape == weight.shape == (2, 2, 7, 16)
    assert (decay == 1).all()
    assert (weight.sum(-1) - valid[:, None].float()).abs().max() < 1e-6
    assert (weight[0] > 0).all()  # every slot


def test_gsa_mass_is_what_was_not_forgotten_when_it_writes():
    memory, hidden, valid = make_memory("gsa")
    decay, weight = memory.write_weights(hidden, valid)
    assert decay.shape == (2, 2, 7, 16)
    assert (decay + weight - 1).abs().max() < 1e-6
    assert (decay[1, :, 5:] == 1).all()
    logit = torch.nn.functional.linear(hidden, memory.control.weight, memory.control.bias)
    expected = logit[0].view(7, 2, 16).transpose(0, 1).sigmoid()
    assert (decay[0] - expected).abs().max() < 1e-6
    damped = make_memory("gsa", damping=8)[0].write_weights(hidden, valid)[0]
    assert (damped[0] - expected ** (1 / 8)).abs().max() < 1e-6
    c = torch.zeros(2, 2, 16)
    for t in range(7):
        c = decay[:, :, t] * c + weight[:, :, t]
    assert (c - (1 - decay.prod(2))).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["abc", "gsa"])
def test_dense_slot_model_trains_when_its_loss_is_differentiated(kind):
    model = dense_slot_model(recall_model(0, RECALL_MEMORY), kind).train()
    ids = torch.randint(0, 160, (2, 64), generator=torch.Generator().manual_seed(0))
    loss = recall_loss(model, ids, ids)
    loss.backward()
    control = model.model.layers[0].self_attn.arm.control
    assert all(p.grad is not None for p in model.parameters())
    assert control.weight.grad.abs().max() > 1e-6
    assert math.isfinite(loss.item())
    assert [name for name, _ in model.named_parameters() if ".arm." in name] == [
        "model.layers.0.self_attn.arm.control.weight",
        "model.layers.0.self_attn.arm.control.bias",
    ]


@pytest.mark.parametrize("kind", ["abc", "gsa"])
def test_dense_slot_model_ignores_padding_and_later_tokens_when_it_reads(kind):
    model = dense_slot_model(recall_model(0, RECALL_MEMORY), kind).eval()
    ids = torch.randint(0, 160, (1, 600), generator=torch.Generator().manual_seed(0))  # two segments
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits
    padded = torch.cat((torch.zeros(1, 9, dtype=torch.long), ids[:, :60]), 1)
    mask = torch.cat((torch.zeros(1, 9), torch.ones(1, 60)), 1).long()
    with torch.no_grad():
        short = model(padded, attention_mask=mask, use_cache=False).logits[:, 9:]
    assert logits.shape == (1, 600, 160)
    assert (short - logits[:, :60]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["abc", "gsa"])
def test_dense_slot_model_gives_the_same_logits_when_its_cache_goes_on(kind):
    model = dense_slot_model(recall_model(0, RECALL_MEMORY), kind).eval()
    ids = torch.randint(0, 160, (2, 600), generator=torch.Generator().manual_seed(0))
    whole = model(ids, use_cache=False).logits.detach()
    cache = ArmCache(model.config)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([20, 1, 1, 578], 1)]
        assert (model(ids, use_cache=False).logits - whole).abs().max() < 1e-5
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5
    assert cache.get_seq_length() == 600


def test_value_error_when_a_dense_slot_model_cannot_be_made_or_rolled_back():
    with pytest.raises(ValueError, match="kind is 'fifo'"):
        dense_slot_model(recall_model(0, RECALL_MEMORY), "fifo")
    with pytest.raises(ValueError, match="damping is 0"):
        dense_slot_model(recall_model(0, RECALL_MEMORY), "gsa", damping=0)
    with pytest.raises(ValueError, match="no memory to replace"):
        dense_slot_model(recall_model(0), "abc")
    model = dense_slot_model(recall_model(0, RECALL_MEMORY), "abc").eval()
    cache = ArmCache(model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="cannot take tokens back"), torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), cache=cache)
