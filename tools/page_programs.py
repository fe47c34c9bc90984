"""Write the Python programs of pages into a folder, one file for each block, so that type checkers can read them.

python tools/page_programs.py FOLDER PAGE... writes the block that begins in line 21 of README.md to README_21.py.
Empty lines precede the program, so that its lines have the numbers that they have in the page.
"""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python(?: \{\w+\})?\n(?P<code>.*?)^```$", re.M | re.S)


def main(folder: str, *pages: str) -> None:
    """Write the programs; fail if a page has none."""
    for page in map(Path, pages):
        text = page.read_text()
        programs = list(BLOCK.finditer(text))
        if not programs:
            sys.exit(f"{page} has no Python program")
        for program in programs:
            before = text.count("\n", 0, program.start("code"))
            name = f"{page.stem.replace('-', '_')}_{before}.py"
            Path(folder, name).write_text("\n" * before + program["code"])


if __name__ == "__main__":
    main(*sys.argv[1:])
