"""The `closedloop` command."""

import importlib.util
import json
import logging
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_models._rooms import register_all
from hf_pipelines import hub

app = typer.Typer(
    name="closedloop",
    help="Control methods of ICML 2026 as Hugging Face components.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="List and build the data sets.", no_args_is_help=True)
hub_app = typer.Typer(help="List, export, check and push repos of the Hub.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(hub_app, name="hub")

# where the output is no terminal there is no width to respect, and a wide table must stay readable
out_console = Console(width=None if sys.stdout.isatty() else 140)
err_console = Console(stderr=True)

Seed = Annotated[int, typer.Option(help="Seed of every random draw.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]


class UsageError(ValueError):
    """A wrong argument on the command line."""


def resolve_device(device: str) -> str:
    """Turn `auto` into what the machine has, and check any other name.

    Raises:
        UsageError: There is no such device here.
    """
    import torch

    if device == "auto":
        return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()  # fails too on a device that computes nothing, such as meta
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {device}: {reason}") from error
    return device


def print_json(value: Any) -> None:
    """Write one JSON document to standard output."""
    print(json.dumps(value, indent=2))


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows_table(title: str, rows: list[Any]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row.metrics))
    table = Table("", *columns, title=title)
    for row in rows:
        table.add_row(row.name, *(_format(row.metrics.get(name, "")) for name in columns))
    return table


@app.command(epilog="Example: closedloop demo mpc_flow --seed 1")
def demo(
    slugs: Annotated[list[str] | None, typer.Argument(help="Methods; all when none is named.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("closedloop-demo"),
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run every method on its embedded defaults, print one table and draw pictures."""
    from hf_pipelines import benchmark

    device = resolve_device(device)
    modules = [benchmark.load_benchmark(slug) for slug in slugs or benchmark.find_benchmarks()]
    table = Table("method", "baseline", "metric", "method's value", "baseline's value", "seconds")
    results, failed, pictures = [], [], []
    for module in modules:
        slug = module.__name__.split(".")[-2]
        start = time.perf_counter()
        try:
            with err_console.status(f"{slug} …"):
                result = module.run(quick=True, seed=seed, device=device)
                pictures += result.save_figures(out)
        except Exception as error:  # one broken method must not take the others' results with it
            failed.append(slug)
            reason = escape(f"{type(error).__name__}: {_one_line(error)}")
            table.add_row(slug, "", f"[red]{reason}[/red]", "", "", "")
            if as_json:
                err_console.print(f"{slug}: {reason}", highlight=False, soft_wrap=True)
            continue
        results.append(result.to_dict())
        seconds = f"{time.perf_counter() - start:.1f}"
        for line in result.comparisons:
            value = f"[bold]{line.value:.4g}[/bold]" if line.wins else f"{line.value:.4g}"
            table.add_row(slug, line.baseline, line.metric, value, f"{line.baseline_value:.4g}", seconds)
    if as_json:
        print_json({"results": results, "failed": failed, "pictures": [str(path) for path in pictures]})
    else:
        out_console.print(table)
        for path in pictures:
            out_console.print(f"picture: {path}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


@app.command(epilog="Example: closedloop bench mpc_flow --json > mpc_flow.json")
def bench(
    slug: Annotated[str, typer.Argument(help="The method.")],
    quick: Annotated[bool, typer.Option(help="The short run of `closedloop demo`.")] = False,
    performance: Annotated[bool, typer.Option(help="Measure the ratios of time and memory instead.")] = False,
    ablations: Annotated[bool, typer.Option(help="Vary one choice of the method at a time instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also draw the pictures into this folder.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run a method's benchmark against its baselines; exit 1 if a claim of its card fails.

    The full run with seed 0 also writes results, tables and pictures into the method's model card, where that is
    checked out; other seeds leave it alone.
    """
    from hf_pipelines import benchmark

    device = resolve_device(device)
    module = benchmark.load_benchmark(slug)
    if quick + performance + ablations > 1:
        raise UsageError("choose one of --quick, --performance and --ablations.")
    kind = "performance" if performance else "ablations" if ablations else ""
    if kind:
        runner = getattr(module, f"run_{kind}", None)
        if runner is None:
            raise UsageError(f"{slug} has no --{kind}.")
        result = runner(seed=seed, device=device)
    else:
        result = module.run(quick=quick, seed=seed, device=device)
    if out is not None:
        result.save_figures(out)
    folder = benchmark.card_folder(result)
    if folder is not None and not quick and seed == 0:
        name = f"{slug}_{kind}" if kind else slug
        path = result.save_eval_results(folder, name)
        err_console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
        result.save_figures(folder)
        for readme in (folder / "README.md", folder.parents[1] / "README.md"):
            result.update_card(readme)
    if as_json:
        print_json(result.to_dict())
    else:
        out_console.print(_rows_table(f"{slug}, seed {seed}, {result.seconds:.0f} s", result.rows))
        for bar in result.bars:
            mark = "[green]holds[/green]" if bar.passed else "[red]FAILS[/red]"
            relation = "≥" if bar.at_least else "≤"
            out_console.print(f"{mark}  {bar.claim}: {bar.value:.4g} (bar {relation} {bar.limit:g})", highlight=False)
    raise typer.Exit(0 if all(bar.passed for bar in result.bars) else 1)


def load_space(slug: str) -> ModuleType:
    """Import `app.py` of a Space.

    Raises:
        UsageError: There is no such Space, or gradio is not installed.
    """
    spaces = {record.name: Path(record.path) for record in hub.list_repos() if record.kind == "space"}
    if slug not in spaces:
        raise UsageError(f"no Space {slug!r}; there is {', '.join(sorted(spaces))}.")
    if importlib.util.find_spec("gradio") is None:
        raise UsageError('Spaces need gradio: pip install "closedloop[spaces]"')
    sys.path.insert(0, str(spaces[slug]))  # as on the Hub, where the app's folder is the working directory
    spec = importlib.util.spec_from_file_location("app", spaces[slug] / "app.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["app"] = module
    spec.loader.exec_module(module)
    return module


@app.command(epilog="Example: closedloop space mpc_flow --port 7861")
def space(
    slug: Annotated[str, typer.Argument(help="The method's Space.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = False,
) -> None:
    """Start a method's Gradio Space on this machine."""
    register_all()
    module = load_space(slug)
    settings = getattr(module, "LAUNCH_KWARGS", {})
    module.demo.launch(**settings, server_name=host, server_port=port, inbrowser=browser)


@data_app.command("list", epilog="Example: closedloop data list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets that can be built."""
    from datasets_scripts import list_builders

    records = [{"name": name, "about": about} for name, about in list_builders().items()]
    if as_json:
        print_json(records)
        return
    table = Table("name", "about")
    for record in records:
        table.add_row(record["name"], record["about"])
    out_console.print(table)


@data_app.command("build", epilog="Example: closedloop data build digits --out digits")
def data_build(
    name: Annotated[str, typer.Argument(help="The data set.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    data_dir: Annotated[Path | None, typer.Option(help="Your download, for data that may not ship.")] = None,
    seed: Seed = 0,
) -> None:
    """Write a data set as a folder that `load_dataset` opens."""
    from datasets_scripts import build

    out_console.print(
        f"wrote {build(name, out, seed=seed, data_dir=data_dir)}", markup=False, highlight=False, soft_wrap=True
    )


@hub_app.command("list", epilog="Example: closedloop hub list --json")
def hub_list(as_json: AsJson = False) -> None:
    """List models, data sets and Spaces."""
    records = hub.list_repos()
    if as_json:
        print_json(
            [{"name": r.name, "kind": r.kind, "path": r.path and str(r.path), "bytes": r.size} for r in records]
        )
        return
    table = Table("name", "kind", "MB", "path")
    for record in records:
        table.add_row(record.name, record.kind, f"{record.size / 1e6:.2f}", str(record.path or "built on export"))
    out_console.print(table)


@hub_app.command("export", epilog="Example: closedloop hub export mpc-flow-digits-16x16 --out exported")
def hub_export(
    name: Annotated[str, typer.Argument(help="A repo of `closedloop hub list`, or a folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new, empty, or an earlier export.")],
) -> None:
    """Write a Hub-ready folder that loads without this package."""
    out_console.print(f"wrote {hub.export(name, out)}", markup=False, highlight=False, soft_wrap=True)


@hub_app.command("check", epilog="Example: closedloop hub check")
def hub_check(
    names: Annotated[list[str] | None, typer.Argument(help="Repos or folders; all when none is named.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check cards, sizes and formats, and load each repo in a clean process; exit 1 if something is wrong."""
    problems = []
    repos = [(name, None) for name in names] if names else [(r.name, r.kind) for r in hub.list_repos()]
    for name, kind in repos:
        with err_console.status(f"checking {name} …"):
            problems += hub.check(name, kind)
    if as_json:
        print_json([{"repo": p.repo, "rule": p.rule, "message": p.message} for p in problems])
    else:
        for problem in problems:
            line = f"{problem.repo}: {problem.rule}: {problem.message}"
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
        out_console.print(f"checked {len(repos)} repos, {len(problems)} problems", highlight=False)
    raise typer.Exit(1 if problems else 0)


@hub_app.command("push", epilog="Example: closedloop hub push mpc-flow-digits-16x16 --dry-run")
def hub_push(
    name: Annotated[str, typer.Argument(help="A repo of `closedloop hub list`, or a folder.")],
    repo_id: Annotated[str | None, typer.Option(help="Where to; closedloop/<name> when not given.")] = None,
    dry_run: Annotated[bool, typer.Option(help="List what would go, contact nothing.")] = False,
    private: Annotated[bool, typer.Option(help="Make a new repo private.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export, check and upload a repo. The token is that of `hf auth login` or HF_TOKEN."""
    files = hub.push(name, repo_id, dry_run=dry_run, private=private)
    if as_json:
        print_json([{"path": str(path), "bytes": size} for path, size in files])
        return
    for path, size in files:
        out_console.print(f"{size:>10,}  {path}", markup=False, highlight=False, soft_wrap=True)
    verb = "would go" if dry_run else "went"
    out_console.print(f"{len(files)} files, {sum(size for _, size in files):,} bytes {verb}", highlight=False)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main() -> None:
    """Run the command; what a user can cause is one line on standard error, exit 2 for wrong usage and 1 otherwise."""
    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # transformers imports torchao where it is, whose warnings concern nobody
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app()
    except KeyboardInterrupt:
        err_console.print("interrupted")
        sys.exit(130)
    except (ValueError, TypeError, NotImplementedError) as error:
        err_console.print(f"[red]error:[/red] {escape(_one_line(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except (OSError, ImportError) as error:
        err_console.print(f"[red]error:[/red] {escape(_one_line(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
