"""Run Cython for one folder's modules in one process: cythonize.py ROOT DEPFILE MODULE.pyx… OUTPUT.c|.cpp…

cythonize.py --shared OUTPUT.c writes the module with the functions that Cython would otherwise put into each module.
With --lines before all other arguments, the C names the line of the .pyx for each line, so that gcov counts these.

Cython needs 0.7 s before it reads its first line, as long as most modules take: one process for each module, as in
meson's own support for Cython, doubles the time. Modules with an output that is newer than all its inputs are left
alone, so that ninja, which checks the outputs again, compiles only what has changed.

A third of the remaining time is for the .pxd files, which Cython reads again for each module: here the process reads
them once, and forks for each module, since Cython changes what it has read. This uses functions that Cython does not
document. If it fails, in a newer Cython or because the module has an error, Cython's own way is tried next, and
reports the error.
"""

import contextlib
import gc
import io
import os
import re
import sys
import traceback
from pathlib import Path

import Cython
from Cython.Build.Dependencies import create_dependency_tree
from Cython.Compiler import Errors, Main, Options

#: Older releases release an attribute's old value before the attribute has its new one. Freeing a tensor releases the
#: GIL: another thread then found the dying object in the attribute, took a reference to it and freed it twice.
OLDEST = (3, 3, 1)
#: The module with Cython's own functions: compiling them once takes gcc a fifth less time than in each module.
SHARED = "ncclpy._cython_shared"
#: Modules on the path of every call, which have the functions themselves: gcc inlines these, 2% of a call's
#: instructions.
UNSHARED = tuple(
    f"ncclpy/core/{name}.pyx"
    for name in (
        "arguments/buffers",
        "arguments/validation",
        "calls/group",
        "calls/batch",
        "calls/submit",
        "communicator",
        "runtime/stream",
        "start",
    )
)
#: No methods for pickle: the classes hold pointers and locks, so Python itself refuses to pickle them; classes that
#: can be pickled have a __reduce__ of their own. Cython's two methods for each class are a tenth of the C.
DIRECTIVES = {"auto_pickle": False}


def read_dependencies(output):
    """Return an output's inputs, as Cython noted them beside the output; none if it was never made."""
    try:
        text = Path(f"{output}.dep").read_text()
    except FileNotFoundError:
        return []
    names = re.split(r"(?<!\\)\s+", text.partition(": \\\n")[2].replace("\\\n", " ").strip())
    return [name.replace("\\ ", " ") for name in names]


def is_current(output):
    """Return whether an output is newer than all its inputs, Cython and this file included."""
    made_from = read_dependencies(output)
    try:
        made = output.stat().st_mtime_ns
        return bool(made_from) and all(
            Path(name).stat().st_mtime_ns < made for name in [*made_from, __file__, Cython.__file__]
        )
    except FileNotFoundError:
        return False


def options_of(root, source, output, lines):
    """Return Cython's options for a module."""
    return Options.CompilationOptions(
        Options.default_options,
        language_level=3,
        include_path=[root],
        output_file=str(output),
        cplus=output.suffix == ".cpp",
        compiler_directives=dict(DIRECTIVES),
        shared_utility_qualified_name=None if str(source).endswith(UNSHARED) else SHARED,
        depfile=True,
        emit_linenums=lines,
    )


def declarations(tree, file, found):
    """Add each .pxd that a file needs, and its module's name, to `found`, in the order in which Cython ends them."""
    own = [tree.fully_qualified_name(file)] if file.endswith(".pyx") else []
    for name in own + [name.split()[0] for name in tree.parse_dependencies(file)[0]]:
        pxd = None if name.partition(".")[0] == "cython" else tree.find_pxd(name, file)
        if pxd and pxd not in found:
            found[pxd] = None
            declarations(tree, pxd, found)
            del found[pxd]
            found[pxd] = tree.fully_qualified_name(pxd) if name.startswith(".") else name
    return found


def read_declarations(root, modules, lines):
    """Return a Cython context that has read each .pxd that the modules need; all modules are C, or all C++."""
    context = Main.Context.from_options(options_of(root, *modules[0], lines))
    tree = create_dependency_tree(context)
    with Errors.local_errors(ignore=True) as errors:
        for source, _ in modules:
            tree.all_dependencies(source)  # for the .dep; it caches what it has seen
            for name in declarations(tree, source, {}).values():
                context.find_module(name)
    return None if errors else context


def translate(root, source, output, lines, context):
    """Write a module's C or C++, with the .pxd files that a context has read; return whether that succeeded."""
    options, said = options_of(root, source, output, lines), io.StringIO()
    with contextlib.suppress(Exception), contextlib.redirect_stderr(said):
        context.options = options
        names = declarations(create_dependency_tree(), source, {}).values()
        context.pxds = {name: context.pxds[name] for name in names}  # Cython puts each into the C
        if Main.compile_single(source, options, None, context=context).num_errors == 0:
            print(said.getvalue(), end="", file=sys.__stderr__)
            return True
    if Main.compile_single(source, options, None).num_errors == 0:
        return True
    output.unlink(missing_ok=True)
    return False


def translate_all(root, modules, lines):
    """Write the C or C++ of each module, as many at once as there are processors; return whether all succeeded."""
    contexts, well, most = {}, True, len(os.sched_getaffinity(0))
    for suffix in {output.suffix for _, output in modules}:
        with contextlib.suppress(Exception):
            contexts[suffix] = read_declarations(root, [each for each in modules if each[1].suffix == suffix], lines)
    for number, (source, output) in enumerate(modules):
        if number >= most:
            well = os.wait()[1] == 0 and well
        if not os.fork():
            status = 1
            try:
                status = not translate(root, source, output, lines, contexts.get(output.suffix))
                if lines and not status:
                    mark_lines(root, output)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
    for _ in modules[-most:]:
        well = os.wait()[1] == 0 and well
    return well


def mark_lines(root, output):
    """Have every line of the C name its line of a .pyx, by a path relative to the root.

    Cython names only the first of several lines, and gcc counts up from there: a docstring, or the statement six lines
    below a `def`, would count as code that runs with each call. And gcov resolves a relative path from the folder of
    the C.
    """
    marked, mark = [], None
    for line in output.read_text().split("\n"):
        if found := re.fullmatch(r'#line (\d+) "(.*)"', line):
            mark = f'#line {found[1]} "{Path(root, found[2])}"' if found[2].endswith((".pyx", ".pxd")) else None
            marked.append(mark or line)
            continue
        if mark and marked[-1] != mark and not marked[-1].endswith("\\"):
            marked.append(mark)
        marked.append(line)
    output.write_text("\n".join(marked))


def write_shared(output):
    """Write the C of the module with the shared functions."""
    from Cython.Build.SharedModule import generate_shared_module  # older releases, which are refused, do not have it

    options = Options.CompilationOptions(
        Options.default_options, language_level=3, shared_c_file_path=output, module_name=SHARED
    )
    failure, _ = generate_shared_module(options)
    return failure is None


def main():
    """Translate modules that are not current, and write the one depfile that ninja reads."""
    lines = sys.argv[1] == "--lines"
    root, depfile, *names = sys.argv[2 if lines else 1 :]
    if tuple(map(int, re.findall(r"\d+", Cython.__version__)[:3])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        print(
            f"ncclpy is built by Cython {wanted} or newer, and this is {Cython.__version__}: with older ones objects "
            "are freed that another thread still finds. pip install --upgrade Cython, or build in pip's isolation",
            file=sys.stderr,
        )
        return 1
    if root == "--shared":
        return 0 if write_shared(depfile) else 1
    sources, outputs = names[: len(names) // 2], [Path(name) for name in names[len(names) // 2 :]]
    Options.fast_fail = True
    gc.disable()  # garbage collection is a quarter of Cython's time, and would free 250 MB
    pairs = zip(sources, outputs, strict=True)
    modules = [(os.path.abspath(source), output) for source, output in pairs if not is_current(output)]
    if not translate_all(root, modules, lines):
        return 1
    made_from = sorted({name for output in outputs for name in read_dependencies(output)})
    escaped = " ".join(name.replace(" ", "\\ ") for name in made_from)
    Path(depfile).write_text(f"{' '.join(map(str, outputs))}: {escaped}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
