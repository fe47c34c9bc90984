"""Run every Python example of the README and of docs/ on the host engine, each in a separate process.

Most run in a fork of a process that has imported numpy and ncclpy, as a new process takes longer for the imports.

A block that begins with ```` ```python {torch} ```` or ```` ```python {jax} ```` needs that package, one with
```` ```python {gpu} ```` needs GPUs and its imports. If these are missing, the block is compiled and not run.
```` ```python {test} ```` is a file of pytest tests, which must pass, and ```` ```python {ranks} ```` a program for
two ranks of `ncclpy run`.
"""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT, TESTS
from warm_ranks import run_program

import ncclpy
import ncclpy.interop.torch
from ncclpy.interop import cupy_nccl, jax, nccl4py, pynccl, pynccl_wrapper

DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))  # signatures and docstrings, no programs
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*DOCS.rglob("*.md")} - {*REFERENCE})]
BLOCK = re.compile(r"^```python(?: \{(?P<needs>\w+)\})?\n(?P<code>.*?)^```$", re.M | re.S)


def examples():
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            if match["needs"] == "test":
                continue  # these run together
            marks = {None: (), "ranks": (), "torch": (), "jax": (), "gpu": (pytest.mark.gpu,)}[match["needs"]]
            yield pytest.param(match["code"], match["needs"], id=f"{page.name}-{number}", marks=marks)


def run(code, needs, tmp_path):
    """Run an example; return its exit code and output."""
    script = tmp_path / "test_example.py"
    script.write_text(code.replace("timeout=2.0", "timeout=0.7"))  # shortens deadlines that examples let pass
    if (
        needs is None
        and ncclpy.library().engine == "host"
        and not re.search("multiprocessing|__main__|__file__", code)
    ):
        return run_program(script, {"NCCLPY_LIBRARY": "host"})
    how = ["-m", "ncclpy", "run", "-n", "2", str(script)] if needs == "ranks" else ["-W", "error", str(script)]
    # On the host engine JAX's arrays have to be in CPU memory.
    done = python(tmp_path, how, {} if needs == "gpu" else {"NCCLPY_LIBRARY": "host", "JAX_PLATFORMS": "cpu"})
    return done.returncode, done.stdout + done.stderr


def python(folder, how, variables):
    return subprocess.run(
        [sys.executable, *how],
        cwd=folder,  # not the root, where Python would import the sources as the package
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_examples_of_tests_pass(tmp_path):
    """Run all in one process, as its start takes longer than the tests."""
    tests = 0
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            if match["needs"] == "test":
                tests += len(re.findall("^def test_", match["code"], re.M))
                (tmp_path / f"test_{page.stem.replace('-', '_')}_{number}.py").write_text(match["code"])
    files = sorted(map(str, tmp_path.glob("test_*.py")))
    # Rewriting assertions, those of plugins too, would take most of the time.
    plain = ["--assert=plain", "-p", "no:hypothesispytest", "-p", "no:benchmark"]  # benchmark's warns of xdist
    how = ["-m", "pytest", "-q", "-n", "0", *plain, "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", *files]
    paths = [str(TESTS), str(SUPPORT), os.environ.get("PYTHONPATH")]
    done = python(tmp_path, how, {"NCCLPY_LIBRARY": "host", "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    assert done.returncode == 0, done.stdout + done.stderr
    assert tests >= len(files) > 3 and int(re.search(r"(\d+) passed", done.stdout)[1]) >= tests, done.stdout


@pytest.mark.parametrize(("code", "needs"), list(examples()))
def test_example_prints_its_stated_output(code, needs, tmp_path):
    if needs in ("torch", "jax") and importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    exit_code, said = run(code, needs, tmp_path)
    if ncclpy.library().engine == "cuda" and "NcclUnsupported" in said and "or newer" in said:
        pytest.skip(said.splitlines()[-1])
    assert exit_code == 0, said
    # A comment behind a print() states its output.
    promised = re.findall(r"^\s*print\(.*\)\s+# (.+)$", code, re.M)
    assert [line for line in promised if line not in said] == [], said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_seen_and_compiles(page):
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"^\s*```\{?py", text, re.M)), "a block is marked in a way that is not known"
    for block in blocks:
        compile(block["code"], page.name, "exec")


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=lambda page: page.name)
def test_programs_are_seen_whole_on_the_site(page):
    code = [block["code"] for block in BLOCK.finditer(page.read_text())]
    assert [line for text in code for line in text.splitlines() if len(line) > 98] == []


def known_names(tree):
    """Yield every dotted ``ncclpy.x.y`` of a program."""
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == "ncclpy":
            yield parts[::-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_examples_exist(page):
    programs = [ast.parse(block["code"]) for block in BLOCK.finditer(page.read_text())]
    for parts in (parts for program in programs for parts in known_names(program)):
        value = ncclpy
        for part in parts[:2]:
            assert hasattr(value, part), f"ncclpy.{'.'.join(parts)} does not exist"
            value = getattr(value, part)
            if not (inspect.ismodule(value) or inspect.isclass(value)):
                break


def anchors(page):
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{path} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{path} has no heading for #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_are_named_exist(page):
    """Also in commands, and in decisions."""
    named = r"\b(?:tests|ncclpy|benchmarks|tools|docs|examples)/[\w./-]+\.(?:py|pyx|pxd|cpp|hpp|md|toml)\b"
    for path in re.findall(named, page.read_text()):
        assert (ROOT / path).exists() or (page.parent / path).exists(), f"{path} does not exist"


def test_reference_has_every_public_name():
    """The pages of the reference list exactly the public names."""
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    modules = re.findall(r"^\.\. currentmodule:: (\S+)\n(.*?)^```$", text, re.M | re.S)
    listed = set()
    for module, block in modules:
        for name in re.findall(r"^\.\. auto(?:class|function|method|property|exception):: (\S+)", block, re.M):
            listed.add(name if name.startswith("ncclpy.") else f"{module}.{name}")
    modules = {"bindings", "bootstrap", "memory", "recorder"}
    operators = {"SUM", "PROD", "MAX", "MIN", "AVG"}  # shown as the members of ReduceOp
    public = {f"ncclpy.{name}" for name in set(ncclpy.__all__) - modules - operators}
    public |= {f"ncclpy.bindings.{name}" for name in ncclpy.bindings.__all__}
    public |= {f"ncclpy.bootstrap.{name}" for name in ncclpy.bootstrap.__all__}
    public |= {f"ncclpy.memory.{name}" for name in ncclpy.memory.__all__}
    public |= {f"ncclpy.interop.torch.{name}" for name in ncclpy.interop.torch.__all__}
    public |= {f"ncclpy.testing.{name}" for name in ncclpy.testing.__all__}
    for module in cupy_nccl, jax, nccl4py, pynccl, pynccl_wrapper:
        own = [each for name in module.__all__ if callable(each := getattr(module, name))]
        public |= {f"{module.__name__}.{each.__name__}" for each in own if each.__module__ == module.__name__}
    in_class_docstring = {"rank", "size", "nranks", "device"}
    methods = {name for name in dir(ncclpy.Communicator) if not name.startswith("_")} - in_class_docstring
    public |= {f"ncclpy.Communicator.{name}" for name in methods}
    assert public - listed == set(), "missing in docs/api"
    returned = {
        "ncclpy.core.runtime.library.Library",
        "ncclpy.process_group.OperationInfo",
        "ncclpy.interop.torch.hooks.TorchHooks",
    }
    assert listed - public == returned, "what others return"


def test_environment_variables_are_on_their_page():
    """Every variable of ncclpy that is read anywhere has a line on the page."""
    package = ROOT / "ncclpy"
    sources = [path for ending in ("py", "pyx", "cpp", "hpp", "h") for path in package.rglob(f"*.{ending}")]
    reading = re.compile(r"(?:getenv\(|environ(?:\.get)?[(\[]|environment\(|is_on\()\s*\"(NCCLPY_\w+)\"")
    read = {name for path in sources for name in reading.findall(path.read_text())}
    assert {"NCCLPY_LIBRARY", "NCCLPY_FAULTS", "NCCLPY_HOST_DEVICES"} <= read
    table = (DOCS / "environment.md").read_text().partition("## NCCL's")[0]
    assert {name for cell, _ in rows(table) for name in dotted(cell)} == read


COMING_FROM = DOCS / "guides" / "coming-from.md"


def rows(text):
    """Yield the first two columns of each row of a page's tables, without the headings."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| `") and len(cells) >= 2:
            yield cells[0].removeprefix("| "), cells[1]


def dotted(cell):
    """Return the names in a cell, without the parentheses behind them."""
    return [re.match(r"[\w.]+", name)[0] for name in re.findall(r"`([^`]+)`", cell)]


def resolves(root, name):
    for part in name.split("."):
        if not hasattr(root, part):
            return False
        root = getattr(root, part)
    return True


def test_migration_target_names_exist():
    python = {"bytes", "ValueError", "TypeError", "ncclpy"}  # `ncclpy info` is a command
    names = [name for _, cell in rows(COMING_FROM.read_text()) for name in dotted(cell)]
    assert len(names) > 90
    assert [name for name in names if name not in python and not resolves(ncclpy, name)] == []


@pytest.mark.parametrize("module", ["nccl.core", "cupy.cuda.nccl"])
def test_migration_source_names_exist(module):
    other = pytest.importorskip(module)
    table = COMING_FROM.read_text().partition(f"<!-- other: {module} -->")[2].partition("\n\n")[0]
    names = [name for cell, _ in rows(table) for name in dotted(cell)]
    assert len(names) > 20
    assert [name for name in names if not resolves(other, name)] == []
