"""One definition, many ways to compute it: the ways of feeding an ARM model give the same logits."""

import inspect

import pytest
import torch
from arm_models import BACKBONES, decode, feed, gap, tiny_arm, tiny_backbone, tokens

from hf_models.arm import ArmCache, ArmMemory, convert_to_arm, full_attention
from hf_models.arm.ops_arm import Writes
from hf_models.arm.reference_arm import arm_reference
from hf_models.arm.scan_arm import arm_scan, empty_state

LENGTH = 41
LAYOUTS = {
    "paper_literal": {"window": 1, "sinks": 0},
    "branching_1": {"branching": 1, "levels": 3},
    "levels_1": {"levels": 1},
    "four_levels_one_slot": {"levels": 4, "slots_per_bucket": 1},
    "one_slot": {"branching": 1, "levels": 1, "slots_per_bucket": 1},
    "more_sinks_than_window": {"window": 2, "sinks": 5},
    "window_longer_than_segment": {"window": 30, "segment": 8},
    "read_all": {"read_policy": "all"},
    "read_two": {"read_policy": "fixed", "read_buckets": 2},
    "read_at_least_one": {"min_read": 1},
    "ungated": {"gate": False},
    "biased": {"debias": False},
    "no_threshold": {"write_threshold": 0.0},
    "high_threshold": {"write_threshold": 0.5},
    "no_prior": {"slot_prior": 0.0},
    "other_distance": {"memory_distance": 40},
    "double_state": {"state_dtype": "float64"},
    "some_layers": {"layers": [1]},
}


@pytest.fixture(scope="module")
def model():
    """A Llama with memory."""
    return tiny_arm()


@pytest.fixture(scope="module")
def whole(model):
    """Its logits for five rows in one call."""
    with torch.no_grad():
        return model(tokens(5, LENGTH)).logits


# ---- the definition itself ----


def by_definition(memory: ArmMemory, call: dict) -> torch.Tensor:
    """What a memory must answer: bucket, slot, gate and width in plain loops, then the sequential oracle."""
    config, hidden, keys, queries = memory.config, call["hidden"], call["keys"], call["queries"]
    b, L, S, d = config.arm_branching, config.arm_levels, config.arm_slots_per_bucket, keys.shape[-1]
    B, K, T, _ = keys.shape
    G = b**L
    queries = queries.unflatten(1, (K, -1))
    gates = torch.sigmoid(hidden @ memory.gate.weight.T + memory.gate.bias)
    asks = hidden @ memory.policy.weight.T + memory.policy.bias
    slot, gate = torch.zeros(B, K, T, dtype=torch.long), torch.zeros(B, K, T)
    mask = torch.zeros(B, K, T, G * S, dtype=torch.bool)

    def children(x: torch.Tensor, h: int, level: int, node: int) -> torch.Tensor:
        first = sum(b**i for i in range(1, level + 1)) + node * b
        return memory.router[h, first : first + b] @ (d**0.5 * x / x.norm())

    for row in range(B):
        for h in range(K):
            events = [0] * G
            for t in range(T):
                if not call["valid"][row, t]:
                    continue
                leaf = 0
                for level in range(L):
                    leaf = leaf * b + int(children(keys[row, h, t], h, level, leaf).argmax())
                zeta = memory.slot_keys[h, leaf] @ (d**0.5 * keys[row, h, t] / keys[row, h, t].norm())
                zeta[events[leaf] % S] += config.arm_slot_prior
                slot[row, h, t] = leaf * S + int(zeta.argmax())
                if gates[row, t, h] >= config.arm_write_threshold:
                    gate[row, h, t] = gates[row, t, h]
                    events[leaf] += 1
                scores = torch.zeros(G)
                for query in queries[row, h, :, t]:
                    for g in range(G):
                        path = [g // b ** (L - level) for level in range(L + 1)]
                        for level in range(L):
                            z = children(query, h, level, path[level]).log_softmax(-1)
                            scores[g] += z[path[level + 1] % b] / queries.shape[2]
                order = scores.argsort(descending=True)
                for rank, g in enumerate(order.tolist()):
                    evidence = memory.policy_scale[h] * (scores[g] + torch.tensor(float(G)).log())
                    if torch.sigmoid(asks[row, t, h] + evidence + memory.policy_bias[h, rank]) < 0.5:
                        break
                    mask[row, h, t, g * S : (g + 1) * S] = True
    cos, sin = call["rotation"]
    first, second = queries.chunk(2, -1)
    q_mem = queries * cos + torch.cat((-second, first), -1) * sin
    writes = Writes(keys, call["values"], call["keys_rotated"], gate, slot, slot // S, call["valid"])
    q_rot = call["queries_rotated"].unflatten(1, (K, -1))
    sizes = (G * S, config.arm_window, config.arm_sinks)
    out = arm_reference(q_mem, q_rot, writes, *sizes, call["scaling"], mask)[0]
    return out.flatten(1, 2).transpose(1, 2)


@torch.no_grad()
def test_every_layer_equals_the_definition_when_written_out_in_loops():
    model, calls = tiny_arm(segment=64), []  # one segment, so that a layer is called once
    names = list(inspect.signature(ArmMemory.forward).parameters)[1:]

    def keep(module, args, kwargs, output):
        calls.append((module, dict(zip(names, args, strict=False)) | kwargs, output[0]))

    hooks = [m.register_forward_hook(keep, with_kwargs=True) for m in model.modules() if isinstance(m, ArmMemory)]
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, 28:] = 0
    model(tokens(2, 33), attention_mask=mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2
    for memory, call, output in calls:
        call["valid"] = mask.bool()
        expected = by_definition(memory, call)
        assert gap(output[mask.bool()], expected[mask.bool()]) < 1e-5


# ---- any way of feeding ----


@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_equals_one_call_when_batches_differ(model, whole, batch):
    assert gap(decode(model, tokens(5, LENGTH)[:batch]), whole[:batch]) < 1e-5


@pytest.mark.parametrize("sizes", [[7, 1, 20, 2, 11], [40, 1], [1, 40], [16, 16, 9], [3] * 13 + [2]])
def test_any_split_equals_one_call_when_the_cache_goes_on(model, whole, sizes):
    assert gap(feed(model, tokens(5, LENGTH), sizes), whole) < 1e-5


@pytest.mark.parametrize(
    ("chunk", "segment"), [(1, 16), (3, 7), (16, 512), (100, 5), (64, 41), (5, 1), (4, 40), (8, 20)]
)
@pytest.mark.parametrize("grad", [True, False])
def test_chunk_and_segment_change_nothing_when_set_to_any_size(whole, chunk, segment, grad):
    other = tiny_arm(chunk=chunk, segment=segment)
    with torch.set_grad_enabled(grad):
        assert gap(other(tokens(5, LENGTH), use_cache=False).logits, whole) < 1e-5


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 8, 9, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("use_cache", [True, False])
def test_prompt_equals_decoding_when_window_sinks_or_segment_just_fill(model, whole, length, use_cache):
    with torch.no_grad():
        logits = model(tokens(5, LENGTH)[:, :length], use_cache=use_cache).logits
    assert gap(logits, whole[:, :length]) < 1e-5


def padded(ids: torch.Tensor, where: str, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row b loses its last 3·b tokens, and gets padding at a place instead; ids and mask."""
    x, mask = torch.zeros(len(ids), columns, dtype=torch.long), torch.zeros(len(ids), columns, dtype=torch.long)
    g = torch.Generator().manual_seed(3)
    for row, real in enumerate(ids):
        n = ids.shape[1] - 3 * row
        start = {"left": columns - n, "right": 0}.get(where, 0)
        at = torch.randperm(columns, generator=g)[:n].sort().values if where == "middle" else torch.arange(n) + start
        x[row, at], mask[row, at] = real[:n], 1
    return x, mask


@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("way", ["one call", "split", "token by token"])
@torch.no_grad()
def test_padding_changes_nothing_when_it_stands_anywhere(model, whole, where, batch, way):
    x, mask = padded(tokens(5, LENGTH)[:batch], where, 50)
    sizes = {"one call": [50], "split": [11, 1, 30, 8], "token by token": [1] * 50}[way]
    cache, outputs, seen = ArmCache(model.config), [], 0
    for size in sizes:
        seen += size
        outputs.append(model(x[:, seen - size : seen], attention_mask=mask[:, :seen], cache=cache).logits)
    logits = torch.cat(outputs, 1)
    assert logits.isfinite().all()
    for row in range(batch):
        n = LENGTH - 3 * row
        assert gap(logits[row][mask[row].bool()], whole[row, :n]) < 1e-5
    assert cache.layers[0].state.sn.tolist() == [LENGTH - 3 * row for row in range(batch)]


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_decoding_split_and_padding_equal_one_call_when_the_layout_varies(layout):
    model, ids = tiny_arm(**LAYOUTS[layout]), tokens(2, 37)
    expected = model(ids).logits
    assert gap(decode(model, ids), expected) < 1e-5
    assert gap(feed(model, ids, [2, 1, 19, 15]), expected) < 1e-5
    x, mask = padded(ids, "middle", 45)
    logits = model(x, attention_mask=mask).logits
    assert gap(logits[0][mask[0].bool()], expected[0]) < 1e-5
    assert gap(logits[1][mask[1].bool()], expected[1, :34]) < 1e-5


@pytest.mark.parametrize("family", BACKBONES)
@torch.no_grad()
def test_decoding_split_and_padding_equal_one_call_when_the_backbone_varies(family):
    model, ids = tiny_arm(family), tokens(2, 37)
    expected = model(ids).logits
    assert type(model).__name__.lower() == f"arm{family}forcausallm"
    assert gap(decode(model, ids), expected) < 1e-5
    assert gap(feed(model, ids, [2, 1, 19, 15]), expected) < 1e-5
    x, mask = padded(ids, "left", 45)
    assert gap(model(x, attention_mask=mask).logits[1][mask[1].bool()], expected[1, :34]) < 1e-5


# ---- against the backbone ----


@pytest.mark.parametrize("family", BACKBONES)
@torch.no_grad()
def test_closed_gate_equals_the_backbone_when_the_window_covers_the_text(family):
    base, ids = tiny_backbone(family), tokens(2, 30)
    model = convert_to_arm(base, gate_bias=-20, window=30, sinks=3, segment=16)
    expected = base(ids).logits
    assert gap(model(ids).logits, expected) < 1e-5
    assert gap(decode(model, ids), expected) < 1e-5
    assert all(layer.state.ev.sum() == 0 for layer in model(ids).cache.layers)


@pytest.mark.parametrize("family", BACKBONES)
@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (5, 3), (1, 4), (1, 0)])
@torch.no_grad()
def test_closed_gate_equals_the_backbone_with_a_4d_mask_when_the_text_is_longer(family, window, sinks):
    base, ids = tiny_backbone(family), tokens(2, 30)
    model = convert_to_arm(base, gate_bias=-20, window=window, sinks=sinks, segment=16)
    t = torch.arange(30)
    age = t[:, None] - t
    allowed = (age >= 0) & ((age < window) | (t < sinks))
    base.set_attn_implementation("sdpa")
    expected = base(ids, attention_mask=allowed[None, None].expand(2, 1, -1, -1)).logits
    assert gap(model(ids).logits, expected) < 1e-5
    assert gap(decode(model, ids), expected) < 1e-5


@pytest.mark.parametrize("family", BACKBONES)
@torch.no_grad()
def test_full_attention_equals_the_backbone_when_inside_and_is_gone_after(family):
    base, ids = tiny_backbone(family), tokens(2, 30)
    model = tiny_arm(family, base)
    before = model(ids).logits
    with full_attention(model) as teacher:
        assert teacher is model
        assert gap(model(ids).logits, base(ids).logits) < 1e-5
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(RuntimeError, match="boom"), full_attention(model):
        raise RuntimeError("boom")
    assert model.config._attn_implementation == "arm"
    assert torch.equal(model(ids).logits, before)
    assert gap(before, base(ids).logits) > 1e-3


@torch.no_grad()
def test_full_attention_keeps_padding_when_given_a_mask():
    base = tiny_backbone()
    model, (x, mask) = tiny_arm(base=base), padded(tokens(2, 20), "left", 26)
    with full_attention(model):
        logits = model(x, attention_mask=mask).logits
    assert gap(logits[mask.bool()], base(x, attention_mask=mask).logits[mask.bool()]) < 1e-5


@torch.no_grad()
def test_policy_that_reads_nothing_equals_a_closed_gate_when_slots_are_full():
    base, ids = tiny_backbone(), tokens(2, 30)
    silent, closed = tiny_arm(base=base), tiny_arm(base=base, gate_bias=-20)
    for memory in (m for m in silent.modules() if isinstance(m, ArmMemory)):
        memory.policy_bias.fill_(-50)
    for memory in (m for m in closed.modules() if isinstance(m, ArmMemory)):
        memory.gate.weight.zero_()
        memory.gate.bias.fill_(-20)
    out = silent(ids)
    assert out.read_buckets.max() == 0
    assert out.cache.layers[0].state.ev.sum() > 0
    assert gap(out.logits, closed(ids).logits) < 1e-5


# ---- gradients ----


def scan_case(length: int = 7, seed: int = 0) -> tuple:
    g = torch.Generator().manual_seed(seed)
    B, K, r, d, M = 2, 1, 2, 3, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.double)

    q_mem, q_rot = draw(B, K, r, length, d), draw(B, K, r, length, d)
    k, v, k_rot = draw(B, K, length, d), draw(B, K, length, d), draw(B, K, length, d)
    gate = torch.rand(B, K, length, generator=g, dtype=torch.double)
    slot = torch.randint(0, M, (B, K, length), generator=g)
    return q_mem, q_rot, k, v, k_rot, gate, slot, torch.ones(B, length, dtype=torch.bool)


def run_scan(q_mem, q_rot, k, v, k_rot, gate, slot, valid, chunk: int = 3) -> torch.Tensor:
    state = empty_state(2, 1, 3, 3, 2, 2, 2, 1, torch.double, "cpu", torch.double)
    writes = Writes(k, v, k_rot, gate, slot, slot // 2, valid)
    return arm_scan(state, q_mem, q_rot, writes, 0.7, chunk=chunk)[0][0]


def test_scan_gradient_equals_finite_differences_when_in_double_precision():
    *floats, slot, valid = scan_case()
    leaves = [x.requires_grad_(True) for x in floats]
    assert torch.autograd.gradcheck(lambda *x: run_scan(*x, slot, valid), leaves, atol=1e-6)


def test_scan_gradient_equals_that_of_the_reference_when_chunked():
    def gradients(function) -> list[torch.Tensor]:
        *floats, slot, valid = scan_case(17, seed=4)
        leaves = [x.requires_grad_(True) for x in floats]
        out = function(*leaves, slot, valid)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.double).view(out.shape)
        return torch.autograd.grad((out * weights).sum(), leaves)

    def sequential(q_mem, q_rot, k, v, k_rot, gate, slot, valid) -> torch.Tensor:
        """The recurrence with lists instead of in-place writes, so that autograd can follow it."""
        rows = []
        for b in range(2):
            slots = [(torch.zeros(3), torch.zeros(3), torch.tensor(0.0)) for _ in range(4)]
            outs = []
            for t in range(17):
                m, a = int(slot[b, 0, t]), gate[b, 0, t]
                new = (k[b, 0, t], v[b, 0, t], 1.0)
                slots[m] = tuple((1 - a) * old + a * x for old, x in zip(slots[m], new, strict=True))
                held = [s for s in slots if s[2].item() > 1e-6]
                near = [i for i in range(t + 1) if t - i < 2 or i < 1]
                keys = torch.stack([n / c for n, _, c in held])
                values = torch.cat((torch.stack([u / c for _, u, c in held]), v[b, 0, near]))
                logits = torch.cat((q_mem[b, 0, :, t] @ keys.T, q_rot[b, 0, :, t] @ k_rot[b, 0, near].T), -1)
                outs.append((0.7 * logits).softmax(-1) @ values)
            rows.append(torch.stack(outs, 1)[None])
        return torch.stack(rows)

    for got, expected in zip(gradients(run_scan), gradients(sequential), strict=True):
        assert gap(got, expected) < 1e-9


def test_scan_is_exact_with_finite_gradients_when_gates_are_saturated():
    *floats, slot, valid = scan_case(24, seed=2)
    floats = [x.float() for x in floats]
    floats[5] = torch.tensor([1.0, 1 - 1e-7, 1e-7, 0.0, 1.0, 0.5]).repeat(4).expand(2, 1, 24).clone()
    q_mem, q_rot, k, v, k_rot, gate = (x.requires_grad_(True) for x in floats)
    state = empty_state(2, 1, 3, 3, 2, 2, 2, 1, torch.float32, "cpu")
    writes = Writes(k, v, k_rot, gate, slot, slot // 2, valid)
    out, moved = arm_scan(state, q_mem, q_rot, writes, 0.7, chunk=16)
    with torch.no_grad():
        expected, _, *accumulators = arm_reference(q_mem, q_rot, writes, 4, 2, 1, 0.7)
    assert gap(out[0], expected) < 1e-6
    assert all(gap(a, b) < 2e-7 for a, b in zip(moved[:3], accumulators, strict=True))
    out[0].square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q_mem, q_rot, k, v, k_rot, gate))
