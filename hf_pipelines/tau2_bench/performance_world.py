"""What the world costs: seconds for gold replays, calls, the generator, and the set-up of an episode.

python -m hf_pipelines.tau2_bench.performance_world --data-dir DIR
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.domains.telecom_tasks import generate_tasks
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.scoring import gold_replay
from hf_pipelines.tau2_bench.store import json_copy
from hf_pipelines.tau2_bench.tasks import load_tasks
from hf_pipelines.tau2_bench.types import ToolCall

TARGETS = {
    "generator, 3,405 tasks (s)": 1.0,
    "gold replay, 2,285 tasks (s)": 6.0,
    "telecom call (µs)": 15.0,
    "airline episode set-up (ms)": 20.0,
    "airline set-up over a deep copy": 0.1,
}
MIXED_CALLS = (
    ("assistant", "get_customer_by_phone", {"phone_number": "555-123-2002"}),
    ("assistant", "get_details_by_id", {"id": "L1002"}),
    ("assistant", "enable_roaming", {"customer_id": "C1001", "line_id": "L1002"}),
    ("assistant", "no_such_tool", {}),
    ("user", "check_status_bar", {}),
    ("user", "toggle_data", {}),
    ("user", "run_speed_test", {}),
    ("user", "toggle_airplane_mode", {}),
)


def best_cpu_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of an action, the best of some repeats."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        action()
        best = min(best, time.process_time() - start)
    return best


def measure_telecom(replays: int | None = None) -> dict[str, float]:
    """Costs of the generator, the gold replays and a call.

    Args:
        replays (`int`, *optional*): How many tasks to replay; the figure is scaled to all 2,285.
    """
    tasks, domain = generate_tasks("full"), get_domain("telecom")
    some = tasks if replays is None else tasks[:: max(1, len(tasks) // replays)]
    replay = best_cpu_seconds(lambda: [gold_replay(task, domain) for task in some])
    calls = [ToolCall("call", name, arguments, side) for side, name, arguments in MIXED_CALLS]
    env = Environment.for_task(domain, tasks[0])
    rounds = 200
    per_call = best_cpu_seconds(lambda: [env.respond(call) for _ in range(rounds) for call in calls])
    return {
        "generator, 3,405 tasks (s)": best_cpu_seconds(lambda: generate_tasks("all")),
        "gold replay, 2,285 tasks (s)": replay * len(tasks) / len(some),
        "telecom call (µs)": per_call / (rounds * len(calls)) * 1e6,
    }


def measure_airline(data_dir: str | Path) -> dict[str, float]:
    """Cost of a new airline episode with one booking changed and both states hashed, and of a deep copy instead."""
    domain = get_domain("airline", data_dir)
    task = next(task for task in load_tasks("airline", data_dir=data_dir) if task.actions)
    domain.agent_state.texts, domain.agent_state.table_texts  # noqa: B018  (made once per process)
    set_up = best_cpu_seconds(lambda: Environment.for_task(domain, task), 5)
    copy = best_cpu_seconds(lambda: json_copy(domain.agent_state.tables))
    env, _ = gold_replay(task, domain)
    return {
        "airline episode set-up (ms)": set_up * 1e3,
        "airline state hash (ms)": best_cpu_seconds(env.hash) * 1e3,
        "airline set-up over a deep copy": set_up / copy,
    }


def main() -> None:
    """Print the figures beside their targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder of the public data, for the airline figures")
    arguments = parser.parse_args()
    figures = measure_telecom()
    if arguments.data_dir:
        figures |= measure_airline(arguments.data_dir)
    for name, value in figures.items():
        limit = f"  (target ≤ {TARGETS[name]:g})" if name in TARGETS else ""
        print(f"{name:36} {value:10.4g}{limit}")


if __name__ == "__main__":
    main()
