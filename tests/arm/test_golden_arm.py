"""Golden values of ARM, worked out by hand or in double precision."""

import pytest
import torch
from arm_models import gap, tiny_arm, tokens
from transformers import LlamaConfig

from hf_models.arm import ArmMemory, cache_bytes
from hf_models.arm.cache_arm import ArmCacheLayer
from hf_models.arm.configuration_arm import ArmLlamaConfig
from hf_models.arm.convert_arm import arm_config
from hf_models.arm.ops_arm import (
    Writes,
    balance_loss,
    count_events,
    greedy_leaf,
    interpolate_reads,
    proceed_at,
    read_cost,
    read_width,
    rotate,
    threshold_gate,
    tree_log_probs,
    write_pointers,
)
from hf_models.arm.reference_arm import arm_reference
from hf_models.arm.scan_arm import arm_scan, arm_step, empty_state

ROWS = [[1, 0], [0, 1], [0.5, 0.5], [-0.5, 0.5], [1, 1], [1, -1]]
TIED = [[1, 0], [0, 1], [2, 0], [-2, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("rows", "x", "log_p", "leaf"),
    [
        (ROWS, [3, 4], [-1.2008414, -2.0493695, -0.6606913, -2.9234330], 2),
        (ROWS, [1, -2], [-0.5658374, -1.1982930, -4.6435769, -2.1137548], 0),
        (TIED, [3, 3.3], [-0.763854, -4.569066, -1.339860, -1.339860], 2),
    ],
)
def test_router_gives_leaf_probabilities_and_greedy_leaf_when_a_tree_is_given(rows, x, log_p, leaf):
    router, x = torch.tensor(rows, dtype=torch.float)[None], torch.tensor(x, dtype=torch.float).view(1, 1, 1, 2)
    got = tree_log_probs(x, router, 2, 2)
    assert gap(got.flatten(), torch.tensor(log_p)) < 1e-5
    assert greedy_leaf(x, router, 2, 2).item() == leaf
    assert rows is ROWS or got.argmax().item() == 0  # the greedy leaf need not be the best one


def run(way: str, q: torch.Tensor, writes: Writes, slots: int, window: int, scaling: float, mask: torch.Tensor):
    """Output (T, d) and N, U, c of one head, computed in one of three ways; `mask` (T, M) of slots read."""
    length, d = q.shape
    q, mask = q.view(1, 1, 1, length, d), mask[None, None]
    if way == "reference":
        out, _, N, U, c = arm_reference(q, q, writes, slots, window, 0, scaling, mask)
        return out[0, 0, 0], N[0, 0], U[0, 0], c[0, 0]
    state = empty_state(1, 1, d, d, slots, 1, window, 0, torch.float32, "cpu")
    if way.startswith("scan"):
        (out,), state = arm_scan(state, q, q, writes, scaling, (mask,), chunk=int(way[4:]))
    else:
        pieces = []
        for t in range(length):
            one = Writes(*(x[:, :, t : t + 1] for x in writes[:-1]), writes.valid[:, t : t + 1])
            at = q[..., t : t + 1, :]
            pieces.append(arm_step(state, at, at, one, scaling, mask[:, :, t : t + 1])[0])
        out = torch.cat(pieces, 3)
    return out[0, 0, 0], state.N[0, 0], state.U[0, 0], state.c[0, 0]


def writes_of(k, v, gate, slot) -> Writes:
    k, v, gate, slot = (torch.as_tensor(x)[None, None] for x in (k, v, gate, slot))
    return Writes(k.float(), v.float(), k.float(), gate, slot, slot, torch.ones(1, k.shape[2], dtype=torch.bool))


WAYS = ["scan1", "scan3", "scan16", "step", "reference"]


@pytest.mark.parametrize("way", WAYS)
def test_write_and_read_give_the_known_values_when_only_slots_are_read(way):
    # The window always shows a token to itself. A key far off in a third dimension takes its weight to zero.
    k = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [2, 0, 0]]).float()
    v = torch.tensor([[1, 2, 0], [3, 4, 0], [5, 6, 0], [7, 8, 0]]).float()
    writes = writes_of(k, v, [0.5, 1, 0.25, 0], [0, 1, 0, 1])
    writes = writes._replace(k_rot=torch.tensor([0, 0, -1e4]).expand(1, 1, 4, 3))
    q = torch.tensor([[1.0, 1, 1]]).expand(4, 3)
    out, N, U, c = run(way, q, writes, 2, 1, 2**-0.5, torch.ones(4, 2, dtype=torch.bool))
    known = [[1, 2], [2, 3], [2.7719028, 3.7719028], [2.7719028, 3.7719028]]
    assert gap(out[:, :2], torch.tensor(known)) < 1e-5
    assert gap(N[:, :2], torch.tensor([[0.625, 0.25], [0, 1]])) < 1e-6
    assert gap(U[:, :2], torch.tensor([[1.625, 2.25], [3, 4]])) < 1e-6
    assert gap(c, torch.tensor([0.625, 1])) < 1e-6


def test_round_robin_pointers_follow_events_when_small_gates_write_nothing():
    gate = threshold_gate(torch.tensor([0.9, 0.01, 0.5, 0.06, 0.9, 0.7, 0.9, 0.9]), 0.05)[None, None]
    bucket = torch.tensor([0, 0, 0, 1, 0, 1, 0, 0])[None, None]
    zero = torch.zeros(1, 1, 2, dtype=torch.long)
    assert write_pointers(bucket, gate > 0, zero, 3).flatten().tolist() == [0, 1, 1, 0, 2, 1, 0, 1]
    assert count_events(bucket, gate > 0, zero).flatten().tolist() == [5, 2]
    counters, pointers = zero, []
    for t in range(8):  # the same, one by one
        at = slice(t, t + 1)
        pointers.append(write_pointers(bucket[..., at], gate[..., at] > 0, counters, 3).item())
        counters = count_events(bucket[..., at], gate[..., at] > 0, counters)
    assert pointers == [0, 1, 1, 0, 2, 1, 0, 1]


@pytest.mark.parametrize(
    ("proceed", "width", "at_width", "cost"),
    [
        ([0.9, 0.8, 0.3, 0.7], 2, 0.3, 2.3),
        ([0.4, 0.9, 0.9, 0.9], 0, 0.4, 0.4),
        ([0.5, 0.5, 0.5, 0.5], 4, 0.0, 4.0),
        ([0.9, 0.49999, 0.9, 0.9], 1, 0.49999, 1.49999),
    ],
)
def test_read_policy_stops_at_the_first_refusal_when_probabilities_are_given(proceed, width, at_width, cost):
    proceed = torch.tensor(proceed)
    M = read_width(proceed)
    assert M.item() == width
    assert proceed_at(proceed, M).item() == pytest.approx(at_width, abs=1e-6)
    assert read_cost(M, proceed_at(proceed, M)).item() == pytest.approx(cost, abs=1e-5)


def test_reads_are_interpolated_when_the_policy_hesitates():
    got = interpolate_reads(torch.tensor([1.0, 0]), torch.tensor([0, 2.0]), torch.tensor(0.3))
    assert gap(got, torch.tensor([0.7, 0.6])) < 1e-6


def test_balance_loss_is_1_4_when_half_the_writes_share_a_bucket():
    probs = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.25] * 4])[None, None]
    bucket, gate = torch.tensor([[[0, 0, 1, 3]]]), torch.tensor([[[1, 1, 0.5, 0.5]]])
    assert balance_loss(bucket, probs, gate).item() == pytest.approx(1.4, abs=1e-5)
    even = torch.full((1, 1, 4, 4), 0.25)
    assert balance_loss(torch.tensor([[[0, 1, 2, 3]]]), even, torch.ones(1, 1, 4)).item() == pytest.approx(1)


@pytest.mark.parametrize("way", WAYS)
def test_whole_layer_gives_the_known_values_when_slots_and_window_are_read_together(way):
    x = torch.sin(0.7 * torch.arange(24)).view(6, 4)
    writes = writes_of(0.8 * x.flip(0), 1.3 * x.roll(1, 1), [0.5, 1, 0.25, 0, 0.75, 0.5], [0, 2, 0, 1, 2, 0])
    out, N, U, c = run(way, x, writes, 4, 2, 0.5, torch.ones(6, 4, dtype=torch.bool))
    known = [
        [1.122172, 0, 0.837483, 1.281085],
        [0.146489, 0.177087, 0.311490, 0.299394],
        [-0.634918, 0.183304, -0.264581, -0.588029],
        [0.715975, -0.296422, 0.195937, 0.596144],
        [-0.095665, -0.006576, -0.078903, -0.114120],
        [0.178491, 0.101461, 0.249039, 0.279489],
    ]
    assert gap(out, torch.tensor(known)) < 1e-5
    assert gap(c, torch.tensor([0.8125, 0, 1, 0])) < 1e-6
    assert gap(N[0], torch.tensor([0.234051, 0.416459, 0.403000, 0.200003])) < 1e-5
    assert gap(U[2], torch.tensor([0.333533, -0.845827, -0.716688, -0.250480])) < 1e-5


def test_whole_layer_puts_the_known_mass_on_the_memory_when_read_step_by_step():
    x = torch.sin(0.7 * torch.arange(24)).view(6, 4)
    writes = writes_of(0.8 * x.flip(0), 1.3 * x.roll(1, 1), [0.5, 1, 0.25, 0, 0.75, 0.5], [0, 2, 0, 1, 2, 0])
    known = torch.tensor([0.5, 0.5, 0.513086, 0.481374, 0.376096, 0.506803])
    q = x.view(1, 1, 1, 6, 4)
    assert gap(arm_reference(q, q, writes, 4, 2, 0, 0.5)[1].flatten(), known) < 1e-5
    state = empty_state(1, 1, 4, 4, 4, 1, 2, 0, torch.float32, "cpu")
    for t in range(6):
        one = Writes(*(w[:, :, t : t + 1] for w in writes[:-1]), writes.valid[:, t : t + 1])
        p = arm_step(state, q[..., t : t + 1, :], q[..., t : t + 1, :], one, 0.5)[1]
        assert p[..., :4].sum().item() == pytest.approx(known[t].item(), abs=1e-5)


def test_rotation_turns_half_pairs_when_the_distance_is_eight():
    angle = (8 * 10000.0 ** -(torch.arange(0, 4, 2) / 4)).repeat(2)
    got = rotate(torch.tensor([1.0, 0, 0, 1]), angle.cos(), angle.sin())
    assert gap(got, torch.tensor([-0.14550003, -0.07991469, 0.98935825, 0.99680171])) < 1e-6


def test_cache_takes_the_known_bytes_when_shaped_as_llama_3_1_8b():
    config = ArmLlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    layer = ArmCacheLayer(config)
    keys = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    layer.lazy_initialization(keys, keys)
    size = {name: x.numel() * x.element_size() for name, x in layer.state._asdict().items() if x is not None}
    assert size["N"] + size["U"] == 2_097_152
    assert (size["c"], size["ev"], size["wvalid"], size["sn"]) == (8_192, 4_096, 64, 8)
    assert sum(size[name] for name in ("wk", "wv", "sk", "sv")) == 278_528
    assert layer.nbytes() == 2_388_040
    assert cache_bytes(config) == 32 * 2_388_040


def test_adapter_has_the_known_parameters_when_shaped_as_llama_3_1_8b():
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1)
    with torch.device("meta"):
        memory = ArmMemory(arm_config(config))
    assert 32 * sum(p.numel() for p in memory.parameters()) == pytest.approx(13.3e6, rel=0.01)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1], [500]])
def test_slot_keeps_every_bit_when_ten_thousand_small_gates_are_routed_to_it(sizes):
    model = tiny_arm(branching=1, levels=1, slots_per_bucket=1, segment=500)
    memories = [m for m in model.modules() if isinstance(m, ArmMemory)]
    ids, bias = tokens(1, 10_001), torch.logit(torch.tensor(0.049))
    for memory in memories:
        memory.gate.weight.zero_()
        memory.gate.bias.fill_(3.0)
    out = model(ids[:, :1])
    cache = out.cache
    before = [[x.clone() for x in (*layer.state[:3], layer.state.ev)] for layer in cache.layers]
    assert all(layer.state.ev.max() == 1 for layer in cache.layers)
    for memory in memories:
        memory.gate.bias.copy_(bias.expand(2))
    count = 10_000 if sizes == [500] else 300  # every step of the slow way is the same
    for piece in ids[:, 1 : count + 1].split(sizes[0], 1):
        model(piece, cache=cache, logits_to_keep=1)
    assert int(cache.get_seq_length()) == count + 1
    for layer, kept in zip(cache.layers, before, strict=True):
        for now, then in zip((*layer.state[:3], layer.state.ev), kept, strict=True):
            assert torch.equal(now, then)


def test_gate_of_the_best_merge_is_three_quarters_when_the_new_value_is_asked_three_times_as_often():
    # argmin of Σ p (x − m)² over x = 0, 4 and p = 1/4, 3/4 is m = 3, which γ = p_new/(p_old + p_new) writes
    writes = writes_of([[0.0], [4.0]], [[0.0], [4.0]], [1.0, 0.75], [0, 0])
    state = empty_state(1, 1, 1, 1, 1, 1, 1, 0, torch.float32, "cpu")
    q = torch.zeros(1, 1, 1, 2, 1)
    _, state = arm_scan(state, q, q, writes, 1.0)
    assert state.U.item() == 3.0
    assert state.c.item() == 1.0
