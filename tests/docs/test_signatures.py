"""Public names in a shell: dir() lists all of them, and each function and class has its signature."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ncclpy

MODULES = ("bindings", "bootstrap", "coordinator", "memory", "process_group", "recorder", "testing")


def public():
    """Yield the dotted name and the object of every public class, function and method."""
    for module in (ncclpy, *(importlib.import_module(f"ncclpy.{name}") for name in MODULES)):
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or (inspect.isclass(value) and issubclass(value, (enum.Enum, BaseException))):
                continue
            yield f"{module.__name__}.{name}", value
            for inner in dir(value) if inspect.isclass(value) else ():
                if not inner.startswith("_") and callable(getattr(value, inner)):
                    yield f"{module.__name__}.{name}.{inner}", getattr(value, inner)


PUBLIC = dict(public())
OWNERS = {}
for each in PUBLIC:
    OWNERS.setdefault(each if inspect.isclass(PUBLIC[each]) else each.rpartition(".")[0], []).append(each)


def stubs():
    """Return the syntax trees of the stubs' classes and functions by module and name."""
    found = {}
    root = Path(ncclpy.__file__).parent
    for path in root.rglob("*.pyi"):
        module = ".".join(("ncclpy", *path.relative_to(root).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.setdefault((module, node.name), []).append(node)
    return found


STUBS = stubs()


def methods_of(module, name):
    """Return the methods in the stub of a class, with those of its bases in the same package."""
    found = {}
    for node in STUBS.get((module, name), ()):
        for base in map(ast.unparse, node.bases):
            for other in {
                other for other, named in STUBS if named == base and package_of(other) == package_of(module)
            }:
                found |= methods_of(other, base)
        # Of overloads the first counts: it has all the defaults.
        found |= {each.name: each for each in reversed(node.body) if isinstance(each, ast.FunctionDef)}
    return found


def package_of(module):
    return module.rpartition(".")[0]


def shape(parameters):
    """Return the name, the kind and the presence of a default of each parameter, without `self`."""
    return [each for each in parameters if each[0] not in ("self", "cls")]


def shape_of(value):
    parameters = inspect.signature(value).parameters.values()
    return shape((each.name, each.kind.name, each.default is not inspect.Parameter.empty) for each in parameters)


def shape_of_stub(node):
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    without = len(plain) - len(args.defaults)
    found = [
        (each.arg, "POSITIONAL_ONLY" if each in args.posonlyargs else "POSITIONAL_OR_KEYWORD", number >= without)
        for number, each in enumerate(plain)
    ]
    if args.vararg:
        found.append((args.vararg.arg, "VAR_POSITIONAL", False))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((each.arg, "KEYWORD_ONLY", default is not None))
    if args.kwarg:
        found.append((args.kwarg.arg, "VAR_KEYWORD", False))
    return shape(found)


def shape_of_class(module, name):
    """Return the parameters of the constructor in the stub of a class."""
    [node] = STUBS[module, name]
    if any(ast.unparse(each).startswith("dataclass(") for each in node.decorator_list):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return [(each.target.id, "KEYWORD_ONLY", each.value is not None) for each in fields]
    if "NamedTuple" in map(ast.unparse, node.bases):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return [(each.target.id, "POSITIONAL_OR_KEYWORD", each.value is not None) for each in fields]
    functions = methods_of(module, name)
    made = functions.get("__init__", functions.get("__new__"))
    return [] if made is None else shape_of_stub(made)


@pytest.mark.parametrize("owner", OWNERS)
def test_public_names_have_their_signatures_and_those_of_their_stubs(owner):
    """Check a class with its methods, or the functions of a module."""
    for name in OWNERS[owner]:
        check_signature(name, PUBLIC[name])


def check_signature(name, value):
    told = shape_of(value)
    assert ("options", "VAR_KEYWORD", False) not in told, f"{name}: options are spelled out"
    if inspect.isclass(value):
        if (value.__module__, value.__name__) in STUBS:
            assert told == shape_of_class(value.__module__, value.__name__), name
    else:
        owner, _, method = name.rpartition(".")
        if owner in PUBLIC:
            stub = methods_of(PUBLIC[owner].__module__, PUBLIC[owner].__name__).get(method)
        else:
            stub = next(iter(STUBS.get((value.__module__, value.__name__), ())), None)
        if stub is not None:
            assert told == shape_of_stub(stub), name


def test_stubs_are_found_for_the_comparison():
    """The stubs have the methods of a class, also of its bases, and the functions."""
    assert shape_of_stub(methods_of("ncclpy.core.communicator", "Communicator")["all_reduce"])[0][0] == "send"
    assert shape_of_stub(methods_of("ncclpy.process_group.group", "ProcessGroup")["__init__"])[:1] == [
        ("store", "POSITIONAL_OR_KEYWORD", False)
    ]
    assert ("ncclpy.core.bindings.collectives", "all_reduce") in STUBS


def test_dir_lists_every_public_name():
    assert set(ncclpy.__all__) | {"testing", "__version__"} <= set(dir(ncclpy))
    assert all(hasattr(ncclpy, name) for name in dir(ncclpy))


def test_modules_of_the_reference_are_imported_by_their_names():
    pages = {"bindings", "bootstrap", "memory", "recorder", "testing"}
    assert pages <= {each.name for each in pkgutil.iter_modules(ncclpy.__path__)}
    code = "import ncclpy.recorder, ncclpy; assert ncclpy.recorder.dump()"
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True, timeout=60)
