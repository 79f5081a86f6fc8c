"""From atoms to tasks: choose, sort, give personas, write the JSON, sample."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hf_pipelines.tau2_bench.domains.telecom_tasks import texts
from hf_pipelines.tau2_bench.domains.telecom_tasks.atoms import ATOMS, Atom, init_step
from hf_pipelines.tau2_bench.domains.telecom_tasks.categories import Category
from hf_pipelines.tau2_bench.domains.telecom_tasks.subject import Subject
from hf_pipelines.tau2_bench.task import Task

PERSONA_ORDER = ("None", "Easy", "Hard")
SAMPLE_SEED, SAMPLES_PER_BIN, MIN_ATOMS = 42, 3, 2


@dataclass(frozen=True)
class Composite:
    """Faults that happen together, and the persona they happen to.

    Args:
        category (`Category`): Kind of trouble.
        atoms (`tuple[Atom, ...]`): Faults, sorted by name.
        persona (`str`): Name in `PERSONAS`.
    """

    category: Category
    atoms: tuple[Atom, ...]
    persona: str = "None"

    @property
    def fixable(self) -> bool:
        """Whether the policy has a way to mend every fault."""
        return all(atom.fix is not None for atom in self.atoms)

    def has(self, atom_name: str) -> bool:
        """Whether a fault is among them."""
        return any(atom.name == atom_name for atom in self.atoms)

    def task_id(self, subject: Subject) -> str:
        """`[category]atom1|atom2|…[PERSONA:p]`, with `@customer/line` for any but the usual customer."""
        names = "|".join(atom.name for atom in self.atoms)
        suffix = "" if subject.is_default else f"@{subject.customer_id}/{subject.line_id}"
        return f"[{self.category.name}]{names}[PERSONA:{self.persona}]{suffix}"


def compose(category: Category, extra_atoms: Sequence[Atom] = ()) -> list[Composite]:
    """Every choice of at most one atom from each selection set, with at least one from the category's own sets.

    The order is that of the Cartesian product with "none" last in each set, then by number of atoms (stable).

    Args:
        category (`Category`): Kind of trouble.
        extra_atoms (`Sequence[Atom]`): New faults with this category among their `intents`. One whose `category_set`
            is that of known atoms joins their set; any other makes a set of its own at the end.

    Raises:
        ValueError: If an extra atom has the name of a known one.
    """
    known = dict(ATOMS)
    shared, own = [list(names) for names in category.shared_sets], [list(names) for names in category.own_sets]
    places = {known[names[0]].category_set: names for names in shared + own}
    for atom in extra_atoms:
        if atom.name in known:
            raise ValueError(f"extra_atoms: there is already an atom {atom.name!r}; give the new one another name")
        known[atom.name] = atom
        if category.name not in atom.intents:
            continue
        if atom.category_set not in places:
            own.append([])
            places[atom.category_set] = own[-1]
        places[atom.category_set].append(atom.name)
    chosen = []
    for choice in product(*([*names, None] for names in shared + own)):
        if any(choice[len(shared) :]):
            chosen.append(tuple(known[name] for name in sorted(filter(None, choice))))
    return [Composite(category, atoms) for atoms in sorted(chosen, key=len)]


def assign_personas(composites: Sequence[Composite], personas: Sequence[str] = PERSONA_ORDER) -> list[Composite]:
    """Give the i-th composite the persona i mod n.

    Raises:
        ValueError: If a persona is unknown or none is given.
    """
    unknown = [name for name in personas if name not in texts.PERSONAS]
    if unknown or not personas:
        raise ValueError(f"personas={list(personas)} must be some of {', '.join(texts.PERSONAS)}")
    return [Composite(c.category, c.atoms, personas[i % len(personas)]) for i, c in enumerate(composites)]


def sample_bins(
    composites: Iterable[Composite],
    per_bin: int = SAMPLES_PER_BIN,
    seed: int = SAMPLE_SEED,
    min_atoms: int = MIN_ATOMS,
    max_atoms: int | None = None,
    categories: Sequence[str] | None = None,
    personas: Sequence[str] | None = None,
) -> list[Composite]:
    """Draw up to `per_bin` composites of every (category, number of atoms, persona), bins in first-seen order.

    Args:
        composites (`Iterable[Composite]`): What to draw from.
        per_bin (`int`, defaults to 3): Draws per bin.
        seed (`int`, defaults to 42): Seed.
        min_atoms (`int`, defaults to 2): Smallest number of atoms.
        max_atoms (`int`, *optional*): Largest number of atoms.
        categories (`Sequence[str]`, *optional*): Only these.
        personas (`Sequence[str]`, *optional*): Only these.

    Raises:
        ValueError: If `per_bin` is less than 1 or the limits exclude each other.
    """
    if per_bin < 1 or min_atoms < 1 or (max_atoms is not None and max_atoms < min_atoms):
        raise ValueError(
            f"per_bin={per_bin}, min_atoms={min_atoms}, max_atoms={max_atoms}: need 1 ≤ min ≤ max, per_bin ≥ 1"
        )
    bins: dict[tuple[str, int, str], list[Composite]] = {}
    for composite in composites:
        size = len(composite.atoms)
        if size < min_atoms or (max_atoms is not None and size > max_atoms):
            continue
        if categories is not None and composite.category.name not in categories:
            continue
        if personas is not None and composite.persona not in personas:
            continue
        bins.setdefault((composite.category.name, size, composite.persona), []).append(composite)
    rng = random.Random(seed)
    return [composite for members in bins.values() for composite in rng.sample(members, min(per_bin, len(members)))]


def build_task(composite: Composite, subject: Subject) -> Task:
    """Write a composite as a task of the public format.

    Raises:
        ValueError: If the customer's start state does not allow an atom.
    """
    blocked = [atom.name for atom in composite.atoms if not atom.possible(subject)]
    if blocked:
        raise ValueError(f"{blocked[0]!r} cannot be set up for {subject.customer_id}/{subject.line_id}")
    category, name = composite.category, composite.category.name
    init = [init_step("user", "set_user_info", name=subject.full_name, phone_number=subject.phone_number)]
    for atom in composite.atoms:
        init += atom.init(subject)
    abroad = any(item["func_name"] == "set_user_location" and item["arguments"]["abroad"] for item in init)
    place = f"currently {texts.ABROAD if abroad else texts.AT_HOME}"
    known = f"You are {subject.full_name}; your phone number is {subject.phone_number}."
    data = {
        "id": composite.task_id(subject),
        "description": {"purpose": texts.PURPOSES[name], "relevant_policies": None, "notes": None},
        "user_scenario": {
            "persona": texts.PERSONAS[composite.persona],
            "instructions": {
                "domain": "telecom",
                "reason_for_call": texts.REASONS[name],
                "known_info": f"{known} You are {place}." if category.asks_location else known,
                "unknown_info": None,
                "task_instructions": texts.INSTRUCTIONS[name],
            },
        },
        "ticket": texts.TICKETS[name].format(name=subject.full_name, number=subject.phone_number, place=place),
        "initial_state": {"initialization_data": None, "initialization_actions": init, "message_history": None},
        "evaluation_criteria": _criteria(composite, subject),
    }
    return Task(data, "telecom")


def _criteria(composite: Composite, subject: Subject) -> dict[str, Any]:
    goal = composite.category.goal(composite.fixable, subject)
    if composite.fixable:
        steps = [item for atom in composite.atoms for item in atom.fix(subject)]
        actions = [_action(item, f"{item['name']}_{index}") for index, item in enumerate(steps)]
        checks = [item for atom in composite.atoms if atom.checks for item in atom.checks(subject)]
        basis = ["ENV_ASSERTION"]
    else:
        transfer = {
            "requestor": "assistant",
            "name": "transfer_to_human_agents",
            "arguments": {"summary": texts.HANDOVER_SUMMARY},
        }
        actions, checks, basis = [_action(transfer, transfer["name"], [])], [], ["ENV_ASSERTION", "ACTION"]
    return {
        "actions": actions,
        "env_assertions": goal + checks,
        "communicate_info": None,
        "nl_assertions": None,
        "reward_basis": basis,
    }


def _action(item: dict[str, Any], action_id: str, compare_args: list[str] | None = None) -> dict[str, Any]:
    return {"action_id": action_id, **item, "info": None, "compare_args": compare_args}
