"""What one sequence does to the memory: what stands behind the second tab. No gradio in here."""

from dataclasses import dataclass
from html import escape

import lab_arm as lab
import torch
from matplotlib.figure import Figure

from datasets_scripts.recall_tasks import (
    FILLER_OFFSET,
    GET_OFFSET,
    IGNORE_INDEX,
    NUM_VALUES,
    VALUE_OFFSET,
    associative_recall,
)

HEAD_COLOURS = ((99, 102, 241), (245, 158, 11))  # of the two kv heads
SHOWN_MASS = 0.02  # of a token in a slot


@dataclass
class Look:
    """One sequence and what the one layer of a model did with it. K kv heads, T tokens.

    Args:
        ids (`list[int]`): The tokens.
        context (`int`): Tokens before the first question.
        buckets (`int`): G.
        slots (`int`): M.
        gate (`torch.Tensor`): γ after the threshold, (K, T).
        slot (`torch.Tensor`): Slot chosen, (K, T).
        reads (`torch.Tensor`): Buckets read, (K, T).
        mass (`torch.Tensor`): Mass of each token in its slot at the first question, (K, context).
        answers (`dict[int, int]`): Value that the model gives, by the column of the question.
    """

    ids: list[int]
    context: int
    buckets: int
    slots: int
    gate: torch.Tensor
    slot: torch.Tensor
    reads: torch.Tensor
    mass: torch.Tensor
    answers: dict[int, int]

    @property
    def right(self) -> int:
        """Number of right answers."""
        return sum(self.ids[column + 1] == answer for column, answer in self.answers.items())


@torch.no_grad()
def look(slots: int, context: int, facts: int, policy: str, read_buckets: int, seed: int) -> Look:
    """Draw a sequence, run the model, note what it did.

    Args:
        slots (`int`): Slots of the shipped model.
        context (`int`): Tokens before the questions.
        facts (`int`): Facts among them.
        policy (`str`): Read policy.
        read_buckets (`int`): Buckets of the fixed policy.
        seed (`int`): Seed of the sequence.

    Returns:
        [`Look`].
    """
    model = lab.arm_model(slots, policy=policy, read_buckets=read_buckets)
    ids, labels = associative_recall(1, context, facts, generator=torch.Generator().manual_seed(seed))
    answers = model(ids, use_cache=False).logits[0].argmax(-1)
    (stats,) = model.arm_stats()
    gate, slot = stats.gate[0], stats.slot[0]
    asked = (labels[0] != IGNORE_INDEX).nonzero().flatten().tolist()
    return Look(
        ids=ids[0].tolist(),
        context=context,
        buckets=model.config.arm_buckets,
        slots=slots,
        gate=gate,
        slot=slot,
        reads=stats.read_buckets[0],
        mass=masses(gate[:, :context], slot[:, :context], slots),
        answers={column: int(answers[column]) for column in asked},
    )


def masses(gate: torch.Tensor, slot: torch.Tensor, slots: int) -> torch.Tensor:
    """What is left of each token s in its slot at the end, (K, T): γ_s Π (1 − γ_u) over later u of the same slot."""
    mass = torch.zeros_like(gate)
    left = gate.new_ones(gate.shape[0], slots)
    for t in range(gate.shape[1] - 1, -1, -1):
        column = slot[:, t : t + 1]
        kept = left.gather(1, column)
        mass[:, t : t + 1] = gate[:, t : t + 1] * kept
        left.scatter_(1, column, kept * (1 - gate[:, t : t + 1]))
    return mass


def name(token: int) -> str:
    """A token in words: SET 3=5, GET 3, VAL 5, or a letter for a filler."""
    if token < GET_OFFSET:
        return f"SET {token // NUM_VALUES}={token % NUM_VALUES}"
    if token < VALUE_OFFSET:
        return f"GET {token - GET_OFFSET}"
    if token < FILLER_OFFSET:
        return f"VAL {token - VALUE_OFFSET}"
    return "abcdefgh"[token - FILLER_OFFSET]


def strip(seen: Look) -> str:
    """The tokens as HTML, coloured by the gates: the upper half by head 1, the lower by head 2."""
    spans = []
    for t, token in enumerate(seen.ids):
        kind, text = "", name(token)
        if token >= FILLER_OFFSET:
            kind = "filler"
        elif token >= VALUE_OFFSET:
            kind = "right" if seen.answers[t - 1] == token else "wrong"
            text += " ✓" if kind == "right" else f" ✗ said {said(seen.answers[t - 1])}"
        elif token >= GET_OFFSET:
            kind = "question"
        upper, lower = (
            f"rgba({', '.join(map(str, colour))}, {0.85 * float(gate):.2f})"
            for colour, gate in zip(HEAD_COLOURS, seen.gate[:, t], strict=True)
        )
        gates = " / ".join(f"{float(gate):.2f}" for gate in seen.gate[:, t])
        reads = " / ".join(str(int(width)) for width in seen.reads[:, t])
        style = f"background-image: linear-gradient({upper} 50%, {lower} 50%)"
        tip = f"token {t}: gate {gates}, buckets read {reads}"
        spans.append(f'<span class="token {kind}" style="{style}" title="{tip}">{escape(text)}</span>')
    return f'<div class="strip">{"".join(spans)}</div>'


def said(token: int) -> str:
    """An answer of the model, which may be no value at all."""
    return str(token - VALUE_OFFSET) if VALUE_OFFSET <= token < FILLER_OFFSET else f"“{name(token)}”"


def slot_map(seen: Look) -> str:
    """Which token sits in which slot at the first question, as HTML; a token is as opaque as its mass."""
    parts = []
    per_bucket = seen.slots // seen.buckets
    for head, colour in enumerate(HEAD_COLOURS):
        parts.append(f"<b>Head {head + 1}</b><div class='buckets'>")
        for bucket in range(seen.buckets):
            parts.append(f"<div class='bucket'><b>bucket {bucket + 1}</b>")
            for slot in range(bucket * per_bucket, (bucket + 1) * per_bucket):
                parts.append(f"<div class='slot'><i>{slot}</i>{_tokens(seen, head, slot, colour)}</div>")
            parts.append("</div>")
        parts.append("</div>")
    return "".join(parts)


def _tokens(seen: Look, head: int, slot: int, colour: tuple[int, int, int]) -> str:
    held = seen.mass[head] >= SHOWN_MASS
    mine = ((seen.slot[head, : seen.context] == slot) & held).nonzero().flatten().tolist()
    mine.sort(key=lambda t: -float(seen.mass[head, t]))
    return "".join(
        f'<span class="token" title="token {t}" style="background-image: linear-gradient({_fill(colour, mass)})">'
        f"{escape(name(seen.ids[t]))} {100 * mass:.0f} %</span>"
        for t, mass in ((t, float(seen.mass[head, t])) for t in mine)
    )


def _fill(colour: tuple[int, int, int], alpha: float) -> str:
    return f"rgba({', '.join(map(str, colour))}, {alpha:.2f}) 0 100%"


def draw(seen: Look) -> Figure:
    """Writes into slots, and buckets read, over the tokens."""
    figure = Figure(figsize=(10.5, 5.6), dpi=110, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    times = torch.arange(len(seen.ids)).numpy()
    for head, colour in enumerate(HEAD_COLOURS):
        rgb = tuple(value / 255 for value in colour)
        gate, slot = seen.gate[head].numpy(), seen.slot[head].numpy()
        written = gate > 0
        shift = 0.18 * (2 * head - 1)
        colours = [(*rgb, max(0.12, float(value))) for value in gate[written]]
        label = f"head {head + 1}"
        top.scatter(times[written], slot[written] + shift, c=colours, marker="s", s=34)
        top.scatter([], [], color=rgb, marker="s", s=34, label=label)
        bottom.bar(times + shift, seen.reads[head].numpy(), width=0.36, color=rgb, label=label)
    for axes in (top, bottom):
        axes.axvline(seen.context - 0.5, color="black", linestyle=":", linewidth=1)
        axes.grid(alpha=0.2)
    for boundary in range(1, seen.buckets):
        top.axhline(boundary * seen.slots / seen.buckets - 0.5, color="#a1a1aa", linewidth=0.8)
    top.set(ylim=(seen.slots - 0.5, -0.5), ylabel="slot")
    top.set_title(
        "Writes: as opaque as the gate; lines between buckets; the questions begin at the dotted line", fontsize=10
    )
    top.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
    bottom.set(ylim=(0, seen.buckets + 0.2), xlim=(-1, len(seen.ids)), xlabel="token", ylabel="buckets read")
    return figure


def rows(seen: Look) -> list[list[str]]:
    """Per question: what was asked, the right value, the model's, and where the fact sits in each head."""
    table = []
    for column, answer in seen.answers.items():
        key, value = seen.ids[column] - GET_OFFSET, seen.ids[column + 1] - VALUE_OFFSET
        fact = seen.ids.index(NUM_VALUES * key + value)
        places = [
            f"slot {int(seen.slot[head, fact])}, {100 * float(seen.mass[head, fact]):.0f} %"
            if seen.mass[head, fact] >= SHOWN_MASS
            else "–"
            for head in range(len(HEAD_COLOURS))
        ]
        verdict = "✓" if answer == seen.ids[column + 1] else "✗"
        table.append([f"GET {key}", str(value), f"{said(answer)} {verdict}", *places])
    return table
