"""The rules of the code's structure: layers by parsing the imports, safety rules by the source."""

import ast
import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llama
from llama import api
from llama.engine.request import SequenceSpec
from llama.engine.sequence import SequenceState

REPO = Path(__file__).resolve().parent.parent
FILES = sorted((REPO / "llama").rglob("*.py"))
NAMES = [str(path.relative_to(REPO)) for path in FILES]

# The floors of the house, from the ground up. A file may import what stands on a lower floor, and
# other files of its own. A file of its own name stands before the folder that it is in.
FLOORS = [
    "llama/common",
    "llama/build_args.py",
    "llama/storage",
    "llama/tokenizer.py",
    "llama/reference",
    "llama/sampling_params.py",
    "llama/prompts",
    "llama/ops",
    "llama/kernels",
    "llama/weights",
    "llama/ranks",
    "llama/model",
    "llama/vision",
    "llama/engine",
    "llama/checkpoint",
    "llama/options",
    "llama/gpu",
    "llama/loading",
    "llama/assembly.py",
    "llama/requests",
    "llama/generation.py",
    "llama/__init__.py",
    "llama/api.py",
    "llama/server",
    "llama/compat",
    "llama/cli",
    "llama/__main__.py",
]


def floor_of(name: str) -> int:
    fitting = [i for i, place in enumerate(FLOORS) if name == place or name.startswith(place + "/")]
    return min(fitting, key=lambda i: -len(FLOORS[i]))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the syntax nodes of the file, parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the full dotted names of everything that a file imports, at any depth."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Return the files of the package that a file imports, including those for types alone."""
    found = set()
    for dotted in imports(REPO / name):
        for module in (dotted, dotted.rpartition(".")[0]):
            path = module.replace(".", "/")
            found |= {p for p in (f"{path}.py", f"{path}/__init__.py") if p in NAMES}
            if found & {f"{path}.py", f"{path}/__init__.py"}:
                break
    return found - {name}


def test_notes_are_in_the_documentation():
    """The only page at the top level is the README; all others are in docs/."""
    assert [path.name for path in REPO.glob("*.md")] == ["README.md"]


def test_imports_point_down():
    above = {
        name: {other for other in own_imports(name) if floor_of(other) > floor_of(name)}
        for name in NAMES
    }
    assert not {name: others for name, others in above.items() if others}, "they stand below these"


def test_no_import_is_for_types_alone():
    """No import is for types alone, since one that does not run would hide a cycle."""
    for name in NAMES:
        for node in nodes(REPO / name):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                assert "llama" not in ast.unparse(node), name


def test_the_reference_stands_alone():
    """The reference imports the tokenizer alone, and `llama verify` alone imports it.

    It has at most 500 lines, none of its files more than 300.
    """
    own = {name for name in NAMES if name.startswith("llama/reference/")}
    assert set().union(*map(own_imports, own)) - own == {"llama/tokenizer.py"}
    users = {name for name in NAMES if own_imports(name) & own} - own
    assert users == {"llama/cli/verify_answers.py"}
    num_lines = [len((REPO / name).read_text().splitlines()) for name in own]
    assert sum(num_lines) <= 500 and max(num_lines) <= 300


def test_imports_have_no_circle():
    """Imports have no cycle.

    Files are removed once all that they import is removed; those of a cycle stay.
    """
    left = {name: own_imports(name) for name in NAMES}
    while ends := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in ends:
            del left[name]
    assert not left


def test_the_core_knows_other_ranks_by_their_interface():
    """Model and engine import an interface of the ranks, and nothing that implements it.

    Whoever leads other ranks also defers their signals, which needs `signals`.
    """
    allowed = {"llama/ranks/parallel.py", "llama/ranks/placement.py"}
    ranks = [name for name in NAMES if name.startswith("llama/ranks/")]
    for name in NAMES:
        if name.startswith(("llama/model/", "llama/engine/", "llama/options/", "llama/requests/")):
            more = {"llama/ranks/signals.py"} if name == "llama/requests/interrupts.py" else set()
            assert own_imports(name) & {*ranks} <= allowed | more, name
    for name in allowed:
        assert not own_imports(name) & ({*ranks} - allowed), name
        assert not {i for i in imports(REPO / name) if i.startswith("torch.distributed")}, name


def test_a_format_of_weights_is_a_file():
    """A format of weights is a file.

    It has its kernels and its name, on the command line and in a docstring: no other file names
    int8, but as an instruction set of CPUs.
    """
    naming = [path.name for path in FILES if re.search(r"(?<!u)(?<!amx.)int8", path.read_text())]
    assert "bytes.py" in naming and len(naming) <= 6, naming


@pytest.mark.parametrize(
    ("library", "where"),
    [
        (
            "torch.distributed",
            r"llama/(ranks/(collectives|groups|meeting|one_shot|stage_link|torch_private)\.py|"
            r"reference/generation\.py)",
        ),
        ("fairscale", r"llama/(ranks/groups\.py|reference/)"),
        ("triton", r"llama/(kernels/cuda|gpu)/"),
        ("fastapi", r"llama/(server/|compat/fastchat\.py)"),
        ("uvicorn", r"llama/server/(process|api_process|connections)\.py"),
        ("openai", r"nowhere"),
        ("httpx2", r"llama/cli/client\.py"),
        ("huggingface_hub", r"llama/cli/download\.py"),
        ("prometheus_client", r"llama/server/(engine_|summed_)?metrics\.py"),
        ("fastchat", r"nowhere"),
        ("fire", r"nowhere"),
        ("tiktoken", r"llama/tokenizer\.py"),
        (
            "regex",
            r"llama/(prompts/(scanner|parser|call_format_parser)|checkpoint/lora/config)\.py",
        ),
        ("jinja2", r"llama/prompts/jinja/(sandbox|filters)\.py"),
        ("llguidance", r"llama/requests/grammar\.py"),
        ("PIL", r"llama/prompts/pictures\.py"),
        ("transformers", r"nowhere"),
        ("llama_models", r"nowhere"),
        ("pickle", r"nowhere"),
    ],
)
def test_each_library_has_one_place(library, where):
    users = [n for n, p in zip(NAMES, FILES, strict=True)
             if any(i == library or i.startswith(library + ".") for i in imports(p))]  # fmt: skip
    assert all(re.match(where, name) for name in users), users
    assert users or where == "nowhere"


@pytest.mark.parametrize(
    "name", ["request", "sequence", "pages", "waiting", "scheduler", "rows", "step"]
)
def test_the_books_of_the_engine_need_no_torch(name):
    path = REPO / "llama" / "engine" / f"{name}.py"
    assert not {i for i in imports(path) if i.split(".")[0] == "torch"}


BELOW_TEXT = [
    path
    for folder in ("engine", "model", "options")
    for path in (REPO / "llama" / folder).rglob("*.py")
]


def test_text_stays_out_of_the_engine():
    """Text stays out of the engine.

    It has no tokenizer and no string of a user, neither in a sequence nor in what is read from it.
    """
    text = {"stop", "bad_words_text", "prompt", "text", "detokenizer", "tokenizer"}
    for path in BELOW_TEXT:
        assert not {i for i in imports(path) if "tokenizer" in i}
        read = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        assert not read & text, path
    fields = dataclasses.fields(SequenceSpec) + dataclasses.fields(SequenceState)
    holds_text = {field.name for field in fields if re.search(r"\bstr\b", str(field.type))}
    assert not holds_text, "a finish_reason is one of a fixed set"


def test_an_assert_changes_nothing():
    """An assert changes nothing.

    `python -O` leaves it out, so the functions that it calls must only read. Methods with _ are
    exempt.
    """
    pattern = re.compile(r"assert (not )?self\._\w+\(")
    assert not [path for path in FILES if pattern.search(path.read_text())]


def test_no_dangerous_calls():
    """No dangerous calls are used.

    No code is made from data: eval, exec, shell strings, object collectives, unsafe loads.
    """
    calls = ((name, x) for name in NAMES for x in nodes(REPO / name) if isinstance(x, ast.Call))
    for name, node in calls:
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "os.system", "compile"), name
        assert "_object" not in called and "set_default_" not in called, name
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert keywords.get("shell") is None, name
        if called == "torch.load":
            assert keywords.get("weights_only") == "True", name


@pytest.mark.parametrize(("module", "stub"), [(llama, "__init__.pyi"), (api, "api.pyi")])
def test_type_checkers_see_the_names_that_are_there(module, stub):
    tree = ast.parse((REPO / "llama" / stub).read_text())
    imported = {
        x.name for node in tree.body if isinstance(node, ast.ImportFrom) for x in node.names
    }
    assert imported == set(module.__all__)
    assert all(getattr(module, name) is not None for name in imported)


# What the server, compat and the commands may import besides `llama.api`, and the files that look
# inside on purpose.
VOCABULARIES = (
    "common",
    "prompts",
    "storage",
    "sampling_params.py",
    "tokenizer.py",
    "build_args.py",
)
LOOKING_INSIDE = ("llama/cli/doctor.py", "llama/cli/plan/", "llama/cli/verify_answers.py")


def test_the_core_has_one_face():
    """Server, compat and commands import the core through `llama.api`, which has about 40 names."""
    users = ("llama/server/", "llama/compat/", "llama/cli/")
    own = (*users, "llama/api.py", "llama/__init__.py", *(f"llama/{name}" for name in VOCABULARIES))
    for name in NAMES:
        if name.startswith(users) and not name.startswith(LOOKING_INSIDE):
            assert not {other for other in own_imports(name) if not other.startswith(own)}, name
    assert len(api.__all__) <= 43


@pytest.mark.process
def test_importing_is_quiet_and_light():
    """Importing is quiet and light.

    `import llama` prints nothing, loads no heavy library and changes no global of torch.
    """
    code = """
import json, sys, torch
before = (str(torch.get_default_dtype()), torch.get_num_threads(), torch.initial_seed())
import llama
llama.Llama
after = (str(torch.get_default_dtype()), torch.get_num_threads(), torch.initial_seed())
heavy = [m for m in ("transformers", "fire", "triton", "tokenizers", "jinja2") if m in sys.modules]
print(json.dumps([before == after, heavy]))
"""
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True,
        cwd=REPO,
    )  # fmt: skip
    assert json.loads(out.stdout) == [True, []]
    assert out.stderr == ""


def test_every_file_opens_with_its_charter():
    paths = [*FILES, *(REPO / "scripts").rglob("*.py"), *(REPO / "tests").glob("*.py")]
    for path in paths:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path
