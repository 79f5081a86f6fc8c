"""The public task sets, generated, and task sets that nobody has seen."""

from collections.abc import Sequence

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.domains.telecom_tasks.atoms import Atom
from hf_pipelines.tau2_bench.domains.telecom_tasks.categories import CATEGORIES
from hf_pipelines.tau2_bench.domains.telecom_tasks.compose import (
    Composite,
    assign_personas,
    build_task,
    compose,
    sample_bins,
)
from hf_pipelines.tau2_bench.domains.telecom_tasks.subject import Subject
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.task import Task

SPLITS = ("base", "train", "test", "small", "full", "all")
NO_REFUEL = "data_usage_exceeded_no_refuel"
# Places in the generated base set of the 40 tasks that the public benchmark keeps for tests; the other 74 train.
# fmt: off
TEST_PLACES = frozenset((
    5, 9, 12, 17, 18, 26, 27, 32, 33, 36, 38, 39, 40, 42, 45, 49, 51, 53, 55, 56, 60, 61, 62, 64, 65, 68, 70, 71, 74,
    77, 79, 86, 90, 94, 97, 100, 101, 102, 108, 111,
))
# fmt: on


def generate_tasks(
    split: str = "base",
    for_customer: tuple[str, str] | None = None,
    extra_atoms: Sequence[Atom] = (),
    domain: Domain | None = None,
) -> list[Task]:
    """Generate a split of the telecom tasks.

    Args:
        split (`str`, defaults to `"base"`): `"all"` (3,405 tasks), `"full"` (the 2,285 of them whose data can be
            refueled), `"small"` (20 with one fault), `"base"` (114), or its parts `"train"` (74) and `"test"` (40).
        for_customer (`tuple[str, str]`, *optional*): Customer and line id, such as `("C1002", "L1004")`; composites
            that this customer's start state does not allow are left out.
        extra_atoms (`Sequence[Atom]`): New faults. They change what `"base"` draws; `"train"` and `"test"` are
            fixed lists and refuse them.
        domain (`Domain`, *optional*): Telecom over other tables.

    Raises:
        ValueError: If the split is unknown, or fixed while other atoms or customers are asked for.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
    subject = Subject.of(domain or get_domain("telecom"), *(for_customer or ()))
    if split in ("train", "test") and (extra_atoms or not subject.is_default):
        raise ValueError(
            f"split={split!r} is a fixed list for C1001/L1002 without extra atoms; use 'base', 'full' or 'all'"
        )
    everything: list[Composite] = []
    for category in CATEGORIES.values():
        composites = [c for c in compose(category, extra_atoms) if all(atom.possible(subject) for atom in c.atoms)]
        everything += assign_personas(composites)
    refuelable = [composite for composite in everything if not composite.has(NO_REFUEL)]
    base = [composite for composite in sample_bins(everything) if not composite.has(NO_REFUEL)]
    members = {
        "base": base,
        "train": [composite for place, composite in enumerate(base) if place not in TEST_PLACES],
        "test": [composite for place, composite in enumerate(base) if place in TEST_PLACES],
        "small": [composite for composite in refuelable if len(composite.atoms) == 1],
        "full": refuelable,
        "all": everything,
    }
    if extra_atoms or not subject.is_default:
        del members["train"], members["test"]
    places = {name: set(map(id, composites)) for name, composites in members.items()}
    tasks = []
    for composite in members[split]:
        task = build_task(composite, subject)
        task.splits = tuple(name for name, found in places.items() if id(composite) in found)
        tasks.append(task)
    return tasks


def validate(task: Task, domain: Domain | None = None) -> list[str]:
    """What is wrong with a generated task; an empty list means it is sound.

    The goal must be unmet after the set-up and before every gold action, met after the last one (or still unmet where
    the gold hands over), and all assertions must hold after the gold.
    """
    env = Environment.for_task(domain or get_domain("telecom"), task)
    extra = {"assert_data_refueling_amount"}
    solvable = not task.must_transfer
    goal = [item for item in task.env_assertions if item.func_name not in extra]
    problems = []

    def met() -> bool:
        """Whether the customer's problem is gone."""
        holds = all(env.check(item) for item in goal)
        return holds if solvable else not holds

    for place, action in enumerate(task.actions):
        if met():
            problems.append(f"the goal is met before gold action {place} ({action.name})")
        try:
            env.call(action.name, action.arguments, action.requestor)
        except ValueError as error:
            problems.append(f"gold action {place} ({action.name}) fails: {error}")
    if solvable and not met():
        problems.append("the goal is not met after the gold actions")
    problems += [
        f"{a.func_name} does not hold after the gold actions" for a in task.env_assertions if not env.check(a)
    ]
    return problems
