"""Imports point one way, device code keeps to its folder, and importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anabranch
from anabranch.keys import KINDS

PACKAGE = Path(anabranch.__file__).parent
# From low to high; a module imports only from its own layer and the layers below it.
LAYERS = [
    {"state", "shapes", "requirements"},
    {"launches"},
    {"keys", "device", "check_states"},
    {"rules", "call"},
    {"kernels"},
    {
        "implementations",
        "merge",
        "producers",
        "plan",
        "prior",
        "traced_call",
        "attend",
        "append",
    },
    {"compositions"},
    {""},  # the package itself, `from anabranch import merge`
    {"distributed"},
    {"integrations"},
    # The second floor
    {"llm"},
    {"llm.parallel"},
    {"llm.models"},
    {"llm.grammar"},
    {"llm.sampling"},
    {"llm.sequences"},
    {"llm.runner"},
    {"llm.speculative"},
    {"llm.engine"},
    {"llm.server"},
    {"llm.cli"},
    {"llm.bench"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
RANK["reference"] = RANK["kernels"]  # the oracle reads key sources, but is no part of the library
READS_REFERENCE = {"reference"}
KERNELS_READ = {
    "state",
    "shapes",
    "keys",
    "keys.formats",
    "rules",
    "call",
    "device",
    "kernels.config",
    "kernels.constants",
    "kernels.hopper_config",
    "kernels.list_config",
    "kernels.programs",
    "kernels.versions",
    "launches",
    "launches.build_cache",
    "launches.driver",
    "launches.extension",
    "launches.hopper_ptx",
    "launches.prepare",
    "launches.recorder",
    "launches.triton_version",
}
# What each folder of kernels reads beside itself. Producers do not read each other.
PARTS_OF_KERNELS = {"kernels.softmax", "kernels.load", "kernels.schedule", "kernels.parts"}
SHARED = {
    "kernels.softmax": set[str](),
    "kernels.load": set[str](),
    "kernels.schedule": {"kernels.softmax"},
    "kernels.parts": {"kernels.softmax", "kernels.load", "kernels.schedule"},
    "kernels.triton": PARTS_OF_KERNELS,
    "kernels.gluon": PARTS_OF_KERNELS,
    "kernels.cpu": set[str](),
    "kernels.cuda": set[str](),
    "kernels.layers": {"kernels.gluon", "kernels.softmax", "kernels.load"},
}
NO_NAMES = {"utils", "common", "helpers", "misc"}


def module_of(path: Path) -> str:
    """The dotted name below the package: "" for itself, "kernels.triton.merge"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> Iterator[str]:
    """The modules of the package that a module imports anywhere, named as in SOURCES."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relative to itself"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root, _, below = name.partition(".")
            if root == "anabranch":
                yield below if below in SOURCES else below.rpartition(".")[0]


IMPORTS = [(module, other) for module in SOURCES for other in imports_of(module)]


def top(module: str) -> str:
    """The layer of a module: its first name, on the second floor the first two."""
    names = module.split(".")
    return ".".join(names[: 2 if names[0] == "llm" else 1])


def test_every_module_has_a_layer() -> None:
    assert {top(module) for module in SOURCES} <= RANK.keys()


def test_imports_point_down() -> None:
    up = [(a, b) for a, b in IMPORTS if a and RANK[top(b)] > RANK[top(a)]]
    assert not up


def test_no_two_folders_import_each_other() -> None:
    """Files of one layer have a direction among themselves, too."""
    edges = {(top(a), top(b)) for a, b in IMPORTS if a and top(a) != top(b)}
    assert not {pair for pair in edges if pair[::-1] in edges}
    names = {name for name in RANK if name and (PACKAGE / name.replace(".", "/")).is_dir()}
    assert not [row for row in LAYERS if len(row & names) > 1], "folders in one layer"


def test_only_tests_and_benchmarks_read_the_reference() -> None:
    assert not [a for a, b in IMPORTS if b == "reference" and top(a) not in READS_REFERENCE]


def folder(module: str) -> str:
    return ".".join(SOURCES[module].relative_to(PACKAGE).parts[:-1])


def test_kernels_keep_to_their_folder() -> None:
    astray = [
        (module, other)
        for module, other in IMPORTS
        if top(module) == "kernels"
        and other not in KERNELS_READ
        and folder(module) != folder(other)
        and (folder(module) == "kernels" or folder(other) not in SHARED[folder(module)])
    ]
    assert not astray


def test_kernels_are_launched_in_one_way() -> None:
    """Through `launch`, which says how they are compiled and records them."""

    def starts(module: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(SOURCES[module].read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                yield ast.unparse(node.func.value)

    assert [*starts("launches.recorder")] == ["kernel"]  # the rule sees what is started
    assert not {m for m in SOURCES if any(name.endswith("_kernel") for name in starts(m))}


def asked_types(module: str) -> Iterator[str]:
    """Names that stand as the type in a call of isinstance or issubclass."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield from (x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name))


def test_only_their_room_asks_for_the_kind_of_keys() -> None:
    sources = {source.__name__ for source in KINDS.values()}
    asked = {module for module in SOURCES if sources & {*asked_types(module)}}
    assert {top(module) for module in asked} <= {"keys"}
    assert "AttentionState" in asked_types("merge")  # the rule sees what is asked


def test_files_are_short() -> None:
    long = {
        module: count
        for module, path in SOURCES.items()
        if (count := len(path.read_text().splitlines())) > 300
    }
    assert not long


def device_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for module, path in SOURCES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(decorator).startswith(("triton.jit", "gluon.jit"))
                for decorator in node.decorator_list
            ):
                yield f"{module}.{node.name}", node


def test_device_functions_are_short() -> None:
    """A signature that is too long wants a name for values that travel together."""
    found = dict(device_functions())
    assert "kernels.triton.tile_loop.attend_tiles" in found
    assert not {
        name
        for name, node in found.items()
        if (node.end_lineno or 0) - node.lineno >= 100 or len(node.args.args) > 16
    }
    skipped = sum(path.read_text().count("# fmt: skip") for path in SOURCES.values())
    assert skipped <= 20


def test_the_rules_see_the_imports() -> None:
    """The rules above would hold of an empty list, too."""
    assert ("merge", "state") in IMPORTS
    assert ("kernels.triton.merge", "kernels.config") in IMPORTS
    assert ("", "merge") in IMPORTS


def test_a_file_is_named_for_what_it_holds() -> None:
    assert not {module for module in SOURCES if module.rpartition(".")[2] in NO_NAMES}


def repeated(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Where a name occurs that occurs more than once, of pairs of a name and a place."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_module_name_is_one_thing() -> None:
    """Kernels are named for what they implement, the same for every kind of device."""
    modules = [module for module in SOURCES if top(module) != "kernels" and module]
    stems = [(module.rpartition(".")[2], module) for module in modules]
    named = [pair for pair in stems if "__" not in pair[0] and not is_folder(pair[1])]
    assert not repeated(named)
    assert ("sampler", "llm.sampling.sampler") in named


def is_folder(module: str) -> bool:
    return SOURCES[module].name == "__init__.py"


def test_a_class_name_is_one_thing() -> None:
    classes = [
        (node.name, module)
        for module, path in SOURCES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not repeated(classes)
    assert ("Sampler", "llm.sampling.sampler") in classes


def test_import_touches_no_gpu_and_no_extra() -> None:
    extras = ("transformers", "typer", "rich", "matplotlib", "pytest")
    script = (
        "import sys, torch, anabranch, anabranch.integrations\n"
        "assert not torch.cuda.is_initialized()\n"
        f"assert not [name for name in {extras} if name in sys.modules]"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
