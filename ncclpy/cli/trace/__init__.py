"""``ncclpy trace``: what is stuck and which rank it waits for, from the recorder's dumps of one or more processes.

`reading` finds the files, `dump` reads one into a `table`, `stuck`, `divergence` and `crossing` judge, `report` puts
it into words, `timeline` makes spans for a trace viewer and for `picture`; `command` has the arguments and calls the
others. Nothing here loads NCCL, so dumps can be read on any machine.
"""
