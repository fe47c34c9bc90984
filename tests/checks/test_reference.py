"""tools/reference.py makes Markdown from small sources, and finds each page of docs/reference that is out of date."""

from __future__ import annotations

import importlib

import pytest
from paths import ROOT

#: A package with a Cython module and its stub, and a page of docs/api.
TREE = {
    "ncclpy/__init__.py": "from ncclpy.core import Comm as Communicator\nfrom ncclpy.errors import NcclError, Lost\n",
    "ncclpy/errors.py": '''
class NcclError(RuntimeError):
    """Report a failure.

    Parameters
    ----------
    message
        What went wrong.
    """

    def __init__(self, message: str = '', *, result: "int | None" = None) -> None: ...

class Lost(NcclError):
    """Report a lost rank."""
''',
    "ncclpy/core.pyx": '''"""A module."""

cdef object _SUM = ReduceOp.SUM
cdef str text = "def no_function():"

cdef class Base:
    """Hold a handle."""

    cpdef int close(self, bint now=False) except -1:
        """Close it."""

cdef class Comm(Base):
    """Comm(*args)
--

Take part in *args* as one rank, with a `Window` and ``a_b``.

    - First point,
      on two lines.
    - Second point.

    >>> comm = Comm(3)
    ...

    Attributes
    ----------
    rank, size : int
        Which of how many.
    """

    def __cinit__(
        self, int rank,  # from 0, not (1
        str name=None,
    ):
        def inner(x):
            """Not public."""
        self.rank = rank

    @property
    def closed(self):
        """Return whether it is closed."""

    @staticmethod
    async def reduce(
        const void[:] send, object recv not None=None, op=_SUM, *, root=0, **options,
    ):
        """Reduce over all ranks (`ncclReduce`); see :meth:`Comm.close`.

        Parameters
        ----------
        send, recv : buffer
            The buffers, 2**3 < 9.

            A second paragraph.
        op
            The operator.

        Returns
        -------
        Work
            Its result.

        Raises
        ------
        TypeError, ValueError
            If ``send`` is wrong.
        """
        return 1
''',
    "ncclpy/core.pyi": '''
class Base:
    def close(self, now: bool = ...) -> None: ...

class Comm(Base):
    def __new__(cls, rank: int, name: str | None = ...) -> Comm: ...
    @property
    def closed(self) -> bool: ...
    @staticmethod
    async def reduce(
        send: BufferLike, recv: BufferLike | None = ..., op: OpLike = ..., *, root: int = ..., **options: object
    ) -> Work: ...
''',
    "docs/api/page.md": """# A page

Prose with a [link](../guide.md).

```{eval-rst}
.. currentmodule:: ncclpy

.. autoclass:: Communicator
   :members:
   :inherited-members:
.. autoexception:: Lost
```

```{toctree}
other
```

## Again

```{eval-rst}
.. currentmodule:: ncclpy

.. autofunction:: ncclpy.Communicator.reduce
```
""",
}  # fmt: skip

CLASS = """<!-- `python -m tools.reference` makes this page from docs/api/page.md and the docstrings. Change those. -->

# A page

Prose with a [link](../guide.md).

Module: `ncclpy`

### `Communicator`

```python
class Communicator(rank: int, name: str | None = None)
```

Take part in \\*args\\* as one rank, with a `Window` and `a_b`.

- First point, on two lines.
- Second point.

```pycon
>>> comm = Comm(3)
...
```

**Attributes**

- `rank`, `size` (int): Which of how many.
- `closed` (`bool`): Return whether it is closed.

#### `Communicator.reduce`
"""

METHOD = """
```python
@staticmethod
async def reduce(
    send: BufferLike,
    recv: BufferLike | None = None,
    op: OpLike = ReduceOp.SUM,
    *,
    root: int = 0,
    **options: object,
) -> Work
```

Reduce over all ranks ([`ncclReduce`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html#c.ncclReduce)); see `Comm.close`.

**Parameters**

- `send`, `recv` (buffer): The buffers, 2\\*\\*3 \\< 9.

  A second paragraph.
- `op` (`OpLike`): The operator.

**Returns**

- Work: Its result.

**Raises**

- `TypeError`, `ValueError`: If `send` is wrong.
"""  # noqa: E501

REST = """
#### `Communicator.close`

```python
def close(now: bool = False) -> None
```

Close it.

### `Lost`

```python
class Lost(NcclError)
```

Report a lost rank.

## Again

### `ncclpy.Communicator.reduce`
"""


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("tools.reference")


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_page_has_signatures_and_docstrings_as_markdown(reference, tree):
    made = reference.Pages(tree).page("page.md")
    assert made[: len(CLASS)] == CLASS
    made = made[len(CLASS) :]
    assert made[: len(METHOD)] == METHOD
    assert made[len(METHOD) :] == REST + METHOD


def test_skeleton_of_cython_is_python_without_code(reference):
    sources = importlib.import_module("tools.api_sources")
    text = sources.skeleton(TREE["ncclpy/core.pyx"])
    compile(text, "core.py", "exec")
    lines = [line.strip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith(("def ", "async def "))] == [
        "def close(self, now=False):",
        "def __cinit__(self, rank, name=None):",
        "def closed(self):",
        "async def reduce(send, recv=None, op=_SUM, *, root=0, **options):",
    ]
    assert "inner" not in text and "_SUM = ReduceOp.SUM" in lines


def test_fields_of_records_are_parameters(reference, tree):
    (tree / "ncclpy/records.py").write_text('''
class Place(NamedTuple):
    """Tell a place."""
    rank: int
    host: str = ""

@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold options."""
    stack: tuple[int, ...] = field(default=(), compare=False)
    """Not shown."""

class Kind(enum.IntEnum):
    """Name kinds."""
    ONE = 1
''')
    pages = reference.Pages(tree)
    made = [pages.entry(f"ncclpy.records.{name}", name, []) for name in ("Place", "Options", "Kind")]
    assert 'class Place(rank: int, host: str = "")' in made[0] and "Attributes" not in made[0]
    assert "class Options(*, stack: tuple[int, ...] = ())" in made[1]
    assert "class Kind(IntEnum)" in made[2] and made[2].endswith("**Attributes**\n\n- `ONE = 1`\n")


OVERLOADS = """class Store:
    @overload
    def get(self, key: str, size: int = ...) -> bytes: ...
    @overload
    def get(self, key: bytes, size: int = ...) -> str: ...
"""
GET = '''    def get(self, key, size=4):
        """Return a value.

        Parameters
        ----------
        key
            The name.
        size
            The length.
        """
'''


@pytest.mark.parametrize("files", [{"py": OVERLOADS + GET}, {"pyx": f"cdef class Store:\n{GET}", "pyi": OVERLOADS}])
def test_overloads_have_a_signature_each(reference, tree, files):
    for ending, text in files.items():
        (tree / f"ncclpy/stores.{ending}").write_text(text)
    made = reference.Pages(tree).entry("ncclpy.stores.Store.get", "Store.get")
    first, second = "def get(key: str, size: int = 4) -> bytes", "def get(key: bytes, size: int = 4) -> str"
    assert f"```python\n@overload\n{first}\n\n@overload\n{second}\n```\n\nReturn a value.\n" in made
    assert made.endswith("- `key`: The name.\n- `size` (`int`): The length.\n")


def test_check_names_pages_that_differ(reference, tree, capsys):
    folder = tree / "docs/reference"
    assert reference.main(["--check"], tree) == 1 and not folder.exists()
    assert reference.main([], tree) == 0
    assert reference.main(["--check"], tree) == 0
    capsys.readouterr()
    stub = tree / "ncclpy/core.pyi"
    stub.write_text(stub.read_text().replace("root: int", "root: str"))
    (folder / "old.md").write_text("# No page of docs/api\n")
    assert reference.main(["--check"], tree) == 1
    out = capsys.readouterr().out
    assert "docs/reference/page.md: is not" in out and "docs/reference/old.md: is not" in out
    assert "2 differ" in out
    assert reference.main([], tree) == 0 and "root: str" in (folder / "page.md").read_text()
    assert [path.name for path in folder.iterdir()] == ["page.md"]


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"ncclpy/__init__.py": ""}, "ncclpy.Communicator is in docs/api, but not in the sources"),
        ({"ncclpy/errors.py": "class NcclError: pass\nclass Lost(NcclError): pass\n"}, "Lost .* has no docstring"),
    ],
)
def test_name_without_source_or_docstring_raises(reference, tree, different, words):
    for name, text in different.items():
        (tree / name).write_text(text)
    with pytest.raises(LookupError, match=words):
        reference.main([], tree)


def test_tree_without_pages_raises(reference, tmp_path):
    with pytest.raises(FileNotFoundError):
        reference.main(["--check"], tmp_path)


def test_reference_of_repository_is_up_to_date(reference, capsys):
    """If this fails: python -m tools.reference."""
    assert reference.main(["--check"]) == 0, capsys.readouterr().out
