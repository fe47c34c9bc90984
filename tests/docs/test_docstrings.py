"""Every public name explains itself: an imperative sentence first, then its parameters."""

from __future__ import annotations

import enum
import inspect
import re

import pytest

import ncclpy

# Third person, gerund or noun instead of an imperative.
NOT_IMPERATIVE = re.compile(r"^(A|An|The|This|Returns|[A-Z][a-z]+ing)$|^(?!Pass|Process|Address|Express)[A-Z][a-z]+s$")


def public():
    """Yield ``(dotted name, object)`` for every public name."""
    for name in [*ncclpy.__all__, "testing"]:
        value = getattr(ncclpy, name)
        if inspect.ismodule(value):
            yield f"ncclpy.{name}", value
            for inner in getattr(value, "__all__", [each for each in vars(value) if not each.startswith("_")]):
                attribute = getattr(value, inner)
                if callable(attribute) and not isinstance(attribute, enum.EnumMeta):
                    yield from described(f"ncclpy.{name}.{inner}", attribute)
        elif callable(value):
            yield from described(f"ncclpy.{name}", value)


def described(name, value):
    yield name, value
    if inspect.isclass(value) and not issubclass(value, enum.Enum):
        for inner, attribute in vars(value).items():
            if not inner.startswith("_") and (
                callable(attribute) or isinstance(attribute, (property, classmethod, staticmethod))
            ):
                yield f"{name}.{inner}", getattr(attribute, "__func__", attribute)
            elif not inner.startswith("_") and inspect.isgetsetdescriptor(attribute):
                yield f"{name}.{inner}", attribute


SIGNATURE = re.compile(r"^[\w.]+\((.*)\)(?: -> .*)?$")


def parts(value) -> tuple[str, list[str]]:
    """Return the docstring without the signature that Cython writes before it, and the names of the parameters."""
    text = inspect.cleandoc(value.__doc__ or "")
    first, _, rest = text.partition("\n")
    written = SIGNATURE.match(first)
    if written:
        text = rest.strip()
    if isinstance(value, property) or inspect.isgetsetdescriptor(value):
        return text, []
    try:
        names = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        arguments = re.sub(r"\[[^]]*\]", "", written[1]) if written else ""
        names = [re.split(r"[:=]", each)[0].split()[-1] for each in arguments.split(",") if each.strip(" */")]
    return text, [name.lstrip("*") for name in names if name.strip("*/") not in ("", "self", "cls", "type")]


# Users do not call these constructors: documented methods make the objects.
MADE_BY_METHODS = (
    ncclpy.Communicator,
    ncclpy.CustomOp,
    ncclpy.Registration,
    ncclpy.Window,
    ncclpy.bindings.CommProperties,
    ncclpy.bindings.PendingHandle,
    ncclpy.bindings.Team,
    ncclpy.memory.Allocation,
    ncclpy.memory.Attachment,
    ncclpy.memory.Pool,
)


def made_elsewhere(value):
    """Return whether users never call the constructor, or it is inherited (enums, errors)."""
    return inspect.isclass(value) and (
        value in MADE_BY_METHODS
        or issubclass(value, enum.Enum)
        or (issubclass(value, ncclpy.NcclError) and value is not ncclpy.NcclError)
    )


PUBLIC: dict = {}
for name, value in public():
    PUBLIC.setdefault(".".join(name.split(".")[:2]), []).append((name, value))


@pytest.mark.parametrize("owner", PUBLIC)
def test_docstrings(owner):
    """Check a class with its methods, or a module with its functions."""
    for each in PUBLIC[owner]:
        check_docstring(*each)


def check_docstring(name, value):
    text, parameters = parts(value)
    if not text and inspect.isgetsetdescriptor(value):
        # A plain attribute of a Cython class cannot have a docstring: the class names it.
        owner = value.__objclass__.__doc__ or ""
        assert re.search(rf"\b{value.__name__}\b", owner), f"{name} is not explained by its class"
        return
    assert text, f"{name} has no docstring"
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]
    assert sentence.endswith("."), f"{name}: the first sentence ends with a period: {sentence!r}"
    attribute = isinstance(value, property) or inspect.isgetsetdescriptor(value) or inspect.ismodule(value)
    if not attribute:
        word = sentence.split()[0]
        assert not NOT_IMPERATIVE.match(word), f"{name}: starts with {word!r}, not with an imperative"
    if len(parameters) > 1 and not made_elsewhere(value):
        body = text.partition("\n")[2] + sentence
        if name.startswith("ncclpy.bindings."):
            body += ncclpy.bindings.__doc__  # the common arguments of C functions are explained once
        missing = [each for each in parameters if not re.search(rf"(?<!\w){re.escape(each)}(?!\w)", body)]
        assert not missing, f"{name} does not explain {', '.join(missing)}"


def test_checker_finds_faults():
    def bad(a, b):
        """Returns nothing."""

    def silent():
        pass

    def partly(a, b):
        """Take `a`."""

    for faulty, words in (
        (bad, "starts with 'Returns', not with an imperative"),
        (silent, "has no docstring"),
        (partly, "does not explain b"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_docstring(faulty.__name__, faulty)
