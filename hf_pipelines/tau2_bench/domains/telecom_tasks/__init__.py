"""The generator of telecom tasks: faults (atoms) composed per category, with personas, samples and validation."""

from hf_pipelines.tau2_bench.domains.telecom_tasks.atoms import ATOMS, Atom, check_step, init_step, step
from hf_pipelines.tau2_bench.domains.telecom_tasks.categories import CATEGORIES, Category
from hf_pipelines.tau2_bench.domains.telecom_tasks.compose import (
    Composite,
    assign_personas,
    build_task,
    compose,
    sample_bins,
)
from hf_pipelines.tau2_bench.domains.telecom_tasks.generate import SPLITS, generate_tasks, validate
from hf_pipelines.tau2_bench.domains.telecom_tasks.subject import Subject
from hf_pipelines.tau2_bench.domains.telecom_tasks.texts import PERSONAS

__all__ = [
    "ATOMS",
    "CATEGORIES",
    "PERSONAS",
    "SPLITS",
    "Atom",
    "Category",
    "Composite",
    "Subject",
    "assign_personas",
    "build_task",
    "check_step",
    "compose",
    "generate_tasks",
    "init_step",
    "sample_bins",
    "step",
    "validate",
]
