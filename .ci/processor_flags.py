"""Refuse a build that is for one kind of processor: python .ci/processor_flags.py compile_commands.json

Only the reductions are compiled for more than what every processor of a family has, each copy in a file of its own
that is chosen at run time.
"""

import json
import shlex
import sys
from pathlib import Path

CHOSEN_AT_RUN_TIME = "reduce_kernels.cpp"
#: Of the flags that begin with -m these say nothing about the processor.
HARMLESS = {"-m64", "-mabi=lp64"}


def main():
    """Look at each command."""
    commands = json.loads(Path(sys.argv[1]).read_text())
    bound = 0
    for command in commands:
        flags = [word for word in shlex.split(command["command"]) if word.startswith("-m") and word not in HARMLESS]
        if flags and Path(command["file"]).name != CHOSEN_AT_RUN_TIME:
            print(f"{command['file']} is compiled with {' '.join(flags)}: it may not run elsewhere")
            bound += 1
    print(f"{len(commands)} commands, {bound} of them for one kind of processor")
    return 1 if bound or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
